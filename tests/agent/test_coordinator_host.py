"""Which agents keep a coordinator: two of them, on different nodes, and none where a service leads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from adaptdl_elastic.agent.cluster import coordinator_host
from adaptdl_elastic.agent.cluster.coordinator_host import (
    CLAIM_AGAIN_AFTER,
    REST,
    SERIES,
    CoordinatorChild,
    CoordinatorCommand,
    CoordinatorHost,
    Holder,
)
from adaptdl_elastic.rendezvous.schema.keys import Keys

KEYS = Keys()
FIRST, SECOND = KEYS.coordinator_host, KEYS.coordinator_second
ME, NEIGHBOUR, FAR = Holder("here", "me"), Holder("here", "other"), Holder("there", "far")
SETTLED = 100.0


class Child:
    """A coordinator that is none."""

    def __init__(self) -> None:
        self.closed = self.failed = False

    def close(self) -> None:
        self.closed = True


@dataclass
class World:
    """One agent, a clock, and what it does."""

    now: float = 0.0
    of_service: bool = False
    claims: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host = CoordinatorHost(
            ME,
            KEYS,
            self._child,  # type: ignore[arg-type]
            self._claim,
            self.released.append,
            SETTLED,
            lambda: self.now,
            self.of_service,
        )

    def _child(self) -> Child:
        self.children.append(Child())
        return self.children[-1]

    def _claim(self, key: str, other: str) -> None:
        assert {key, other} == {FIRST, SECOND}
        self.claims.append(key)

    def update(self, first: Holder | None, second: Holder | None, leads: bool) -> list[str]:
        """What is claimed now."""
        self.claims.clear()
        self.host.update(first and str(first), second and str(second), "somebody" if leads else None)
        return list(self.claims)


@pytest.fixture
def world() -> World:
    """An agent that is there for long enough to stand by."""
    return World(now=SETTLED)


def test_an_agent_claims_the_coordinator_at_once_if_no_agent_keeps_one() -> None:
    world = World()
    assert world.update(None, None, leads=False) == [FIRST]
    assert world.update(None, None, leads=False) == []
    assert world.host.due == CLAIM_AGAIN_AFTER
    world.now = CLAIM_AGAIN_AFTER
    assert world.update(None, None, leads=False) == [FIRST]
    assert world.update(ME, None, leads=False) == []
    assert len(world.children) == 1
    assert world.update(ME, FAR, leads=True) == []
    assert len(world.children) == 1
    assert world.host.due is None


def test_an_agent_of_a_service_leaves_a_key_that_is_free_for_a_moment_to_services() -> None:
    world = World(of_service=True)
    for world.now, first, claimed in (
        (0.0, None, []),
        (50.0, FAR, []),
        (60.0, None, []),
        (120.0, None, [FIRST]),
    ):
        assert world.update(first, first and NEIGHBOUR, leads=False) == claimed


def test_no_agent_claims_the_coordinator_where_a_service_leads(world: World) -> None:
    assert world.update(None, None, leads=True) == []
    assert world.host.due is None


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        (FAR, None, [SECOND]),
        (None, FAR, [FIRST]),
        (NEIGHBOUR, None, []),  # they would be lost together
        (None, NEIGHBOUR, []),
        (FAR, NEIGHBOUR, []),
        (ME, None, []),
        (None, ME, []),
    ],
)
def test_one_of_another_node_stands_by(
    first: Holder | None, second: Holder | None, wanted: list[str], world: World
) -> None:
    assert world.update(first, second, leads=True) == wanted


def test_one_stands_by_only_when_the_start_is_over() -> None:
    world = World()
    assert world.update(FAR, None, leads=True) == []
    assert world.host.due == SETTLED
    world.now = SETTLED
    assert world.update(FAR, None, leads=True) == [SECOND]


def test_an_agent_claims_a_lost_place_again_while_its_coordinator_goes_on(world: World) -> None:
    """The store was away for longer than our lease; the coordinator has its own."""
    world.update(ME, None, leads=True)
    assert world.update(None, None, leads=True) == [FIRST]
    world.now += CLAIM_AGAIN_AFTER
    assert world.update(FAR, None, leads=True) == [SECOND]
    (child,) = world.children
    assert not child.closed


@pytest.mark.parametrize("first", [NEIGHBOUR, ME])
def test_of_two_places_on_one_node_the_second_is_given_up(first: Holder, world: World) -> None:
    """Two agents of a node claimed at the same moment, or one whose claim was under way."""
    world.update(first if first == ME else FAR, ME, leads=True)
    (child,) = world.children
    world.released.clear()
    for _ in range(2):  # the store has not taken it yet
        assert world.update(first, ME, leads=True) == []
        assert (set(world.released), len(world.children)) == ({SECOND}, 1)
    assert (world.host._child is child) == (first == ME)
    assert world.update(first, None, leads=True) == []
    assert world.update(first, FAR, leads=True) == []
    assert len(world.children) == 1


def test_the_holder_of_the_first_place_keeps_it_beside_any_second(world: World) -> None:
    world.update(ME, NEIGHBOUR, leads=True)
    assert (world.released, len(world.children)) == ([], 1)


def test_a_third_coordinator_is_ended(world: World) -> None:
    world.update(ME, None, leads=True)
    ended = world.children[0]
    world.update(FAR, Holder("elsewhere", "third"), leads=True)
    assert world.host._child is None
    world.update(FAR, ME, leads=True)
    assert len(world.children) == 2
    world.host.close()
    assert world.children[1].closed
    assert ended is not world.children[1]


@pytest.mark.parametrize(("first", "second", "mine"), [(ME, FAR, FIRST), (FAR, ME, SECOND)])
def test_an_agent_whose_coordinator_fails_leaves_it_to_others_for_a_while(
    first: Holder, second: Holder, mine: str, world: World
) -> None:
    world.update(first, second, leads=True)
    world.children[0].failed = True
    assert world.update(first, second, leads=False) == []
    assert world.released == [mine]
    world.update(first, second, leads=False)  # the store has not taken it yet
    assert world.update(None, None, leads=False) == []
    assert (world.released, len(world.children), world.host.due) == ([mine], 1, SETTLED + REST)
    world.now += REST
    assert world.update(None, None, leads=False) == [FIRST]


class Process:
    """A coordinator that runs until it is told that its agent has gone."""

    pid = 7

    def __init__(self, ends: threading.Event, log: Any) -> None:
        self.ends, self.log = ends, log.name

    def wait(self, timeout: float | None = None) -> int:
        assert self.ends.wait(200)
        return 0


class Starter:
    """Stands in for `subprocess.Popen`: raises what it is given, in turn, then starts one."""

    def __init__(self, *errors: Exception, always: bool = False) -> None:
        self.errors, self.always = list(errors), always
        self.started, self.ends = threading.Event(), threading.Event()
        self.process: Process | None = None
        self.tried = 0

    def __call__(self, command: list[str], **how: Any) -> Process:
        self.tried += 1
        assert os.fstat(how["pass_fds"][0])
        assert how["env"] == {"ADAPTDL_ETCD_USER": "u"}
        if self.errors:
            raise self.errors[0] if self.always else self.errors.pop(0)
        self.process = Process(self.ends, how["stdout"])
        self.started.set()
        return self.process


def open_files() -> set[str]:
    """Return this process's descriptors with what each stands for; other tests' may be closed at any time."""
    found = set[str]()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(f"{path.name} {path.readlink()}")
    return found


@contextmanager
def kept(monkeypatch: pytest.MonkeyPatch, starter: Starter, log: Path) -> Iterator[list[str]]:
    """What is said while a child is kept by that starter; no descriptor is left open."""
    monkeypatch.setattr(coordinator_host, "FIRST_DELAY", 0.0)
    monkeypatch.setattr("subprocess.Popen", starter)
    before, said = open_files(), list[str]()
    child = CoordinatorChild(
        CoordinatorCommand(("--etcd", "e:1"), {"ADAPTDL_ETCD_USER": "u"}), log, said.append
    )
    try:
        yield said
    finally:
        child.closing.set()  # before it ends: or it would be started again, and end, in a series
        starter.ends.set()
        child.close()
    assert open_files() <= before
    assert child.failed == starter.always


def test_a_coordinator_that_can_not_be_started_is_tried_again_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starter = Starter(*(OSError(24, "Too many open files") for _ in range(3)))
    with kept(monkeypatch, starter, tmp_path / "log") as said:
        assert starter.started.wait(200)
        assert said == [
            "no coordinator can be started here: [Errno 24] Too many open files; starting it again"
        ]
    assert starter.tried == 4


def test_a_coordinator_that_never_starts_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starter = Starter(OSError(12, "Cannot allocate memory"), always=True)
    with kept(monkeypatch, starter, tmp_path / "log") as said:
        for thread in threading.enumerate():
            if thread.name == "coordinator":
                thread.join(200)
    assert starter.tried == SERIES
    assert len(said) == 2
    assert f"leaves it to others for {REST:g} s" in said[1]


LOST_STORE = "adaptdl: etcd at e:1 does not answer"


@pytest.mark.parametrize(
    ("ends", "broken"),
    [
        ([(1, "ImportError: a")] * 4, [False, False, True, True]),
        ([(-11, "")] * 3, [False, False, True]),
        ([(1, "ImportError: a"), (1, "ImportError: b")] * 2, [False] * 4),
        ([(2, "a"), (2, "a"), (-9, "a"), (2, "a")], [False] * 4),
        ([(1, LOST_STORE)] * 4, [False] * 4),
        ([(0, "")] * 3, [False] * 3),
    ],
)
def test_a_coordinator_that_ends_three_times_in_the_same_way_by_itself_is_broken(
    ends: list[tuple[int, str]], broken: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log, found, known, enough = tmp_path / "log", list[bool](), threading.Event(), threading.Event()
    left = iter(ends)
    child: CoordinatorChild

    def died(line: str) -> None:
        assert known.wait(200)
        found.append(child.broken is not None)
        if len(found) == len(ends):
            child.closing.set()
            enough.set()

    class Ended:
        def __init__(self, command: list[str], **how: Any) -> None:
            self.code, line = next(left)
            how["stdout"].write(f"{line}\n".encode())

        def wait(self, timeout: float | None = None) -> int:
            return self.code

    monkeypatch.setattr(coordinator_host, "FIRST_DELAY", 0.0)
    monkeypatch.setattr("subprocess.Popen", Ended)
    child = CoordinatorChild(CoordinatorCommand((), {}), log, died)
    known.set()
    assert enough.wait(200)
    child.close()
    assert found == broken


def test_a_log_that_can_not_be_written_keeps_no_coordinator_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starter = Starter()
    with kept(monkeypatch, starter, tmp_path / "removed" / "log") as said:
        assert starter.started.wait(200)
        assert len(said) == 1
        assert "the coordinator's log is lost" in said[0]
        assert starter.process is not None
        assert starter.process.log == os.devnull


def test_an_unreadable_holder_still_holds_the_key() -> None:
    assert Holder.parse("garbage") == Holder("", "garbage")
    assert Holder.parse(None) is None
    assert Holder.parse(str(FAR)) == FAR
