from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from adaptdl_elastic.autoscaler.providers.base import (
    InstanceState,
    Pool,
    ProviderError,
    UnknownInstanceError,
    UnknownPoolError,
)
from adaptdl_elastic.autoscaler.providers.local import LocalProvider

pytestmark = pytest.mark.processes

POOL = Pool("local", desired=0, maximum=3, hourly_price=0.5, instance_type="laptop", preemptible=True)

POLITE = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("up", flush=True)
signal.pause()
"""
DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
signal.pause()
"""
PARENT = """
import signal, subprocess
print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
signal.pause()
"""


def wait(condition: Callable[[], bool], seconds: float = 100.0) -> None:
    """Until a change made by another process can be seen; there is nothing to be told by."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < end
        pause.wait(0.01)


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., LocalProvider]]:
    made: list[LocalProvider] = []
    before = psutil.Process().children()  # servers that other tests of this process share

    def build(script: str = POLITE, **more: object) -> LocalProvider:
        made.append(LocalProvider([sys.executable, "-c", script], [POOL], tmp_path, **more))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for provider in made:
        provider.grace = 0.2
        provider.hand_back()
    assert set(psutil.Process().children()) <= set(before)


def up(tmp_path: Path, instance: str) -> bool:
    log = tmp_path / f"{instance}.log"
    return log.exists() and "up" in log.read_text()


def test_starts_as_many_as_are_wanted(make: Callable[..., LocalProvider], tmp_path: Path) -> None:
    local = make("import json, os, signal; print(json.dumps(dict(os.environ)), flush=True); signal.pause()")
    assert local.capacity().instances == ()
    local.request("local", 2)
    now = local.capacity()
    assert [(i.state, i.hourly_price, i.preemptible) for i in now.instances] == [
        (InstanceState.RUNNING, 0.5, True)
    ] * 2
    name = now.instances[0].id
    wait(lambda: (tmp_path / f"{name}.log").read_text().endswith("\n"))
    environ = json.loads((tmp_path / f"{name}.log").read_text())
    assert environ["ADAPTDL_INSTANCE_ID"] == name
    assert (environ["ADAPTDL_INSTANCE_TYPE"], environ["ADAPTDL_PREEMPTIBLE"]) == ("laptop", "1")


def test_a_released_agent_leaves_and_stays_away(make: Callable[..., LocalProvider], tmp_path: Path) -> None:
    local = make()
    local.request("local", 2)
    chosen = local.capacity().instances[0].id
    wait(lambda: up(tmp_path, chosen))
    local.release(chosen)
    local.release(chosen)
    wait(lambda: local.capacity().instance(chosen) is None)
    assert len(local.capacity().instances) == 1
    assert local.capacity().pool("local").desired == 1


def test_a_deaf_agent_is_killed_after_its_grace(make: Callable[..., LocalProvider], tmp_path: Path) -> None:
    local = make(DEAF, grace_seconds=0.2)
    local.request("local", 1)
    chosen = local.capacity().instances[0].id
    wait(lambda: up(tmp_path, chosen))
    local.release(chosen)
    leaving = local.capacity().instance(chosen)
    assert leaving is None or leaving.state is InstanceState.LEAVING
    wait(lambda: local.capacity().instance(chosen) is None)


def test_one_that_dies_is_replaced(make: Callable[..., LocalProvider]) -> None:
    local = make()
    local.request("local", 1)
    (first,) = local.capacity().instances
    local.terminate(first.id)
    (second,) = local.capacity().instances
    assert second.id != first.id


@pytest.mark.parametrize("code", [0, 1, 143])
def test_one_that_ends_by_itself_is_not(make: Callable[..., LocalProvider], code: int) -> None:
    local = make(f"import sys; sys.exit({code})")
    local.request("local", 2)
    before = local.capacity().instances
    assert len(before) == 2, "shown once, however soon they end: what dies early is counted"
    wait(lambda: not local.capacity().instances)
    assert local.capacity().pool("local").desired == 0


def test_what_an_agent_leaves_behind_goes_with_it(make: Callable[..., LocalProvider], tmp_path: Path) -> None:
    local = make(PARENT)
    local.request("local", 1)
    (first,) = local.capacity().instances
    log = tmp_path / f"{first.id}.log"
    wait(lambda: log.read_text().endswith("\n"))
    child = psutil.Process(int(log.read_text()))
    local.terminate(first.id)
    wait(lambda: gone(child))


def test_agents_do_not_outlive_a_killed_owner(tmp_path: Path) -> None:
    owner = f"""
import sys
from pathlib import Path
from adaptdl_elastic.autoscaler.providers.base import Pool
from adaptdl_elastic.autoscaler.providers.local import LocalProvider
pool = Pool("local", desired=1, maximum=1)
local = LocalProvider([sys.executable, "-c", {POLITE!r}], [pool], Path({str(tmp_path)!r}))
local.capacity()
print(local._agents["local-1"].process.pid, flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", owner], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    agent = psutil.Process(int(process.stdout.readline()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    wait(lambda: gone(agent))


def test_bad_requests(make: Callable[..., LocalProvider], tmp_path: Path) -> None:
    local = make()
    with pytest.raises(ProviderError, match=r"outside \[0, 3\]"):
        local.request("local", 4)
    with pytest.raises(UnknownPoolError, match="there are: local"):
        local.request("other", 1)
    with pytest.raises(UnknownInstanceError):
        local.release("i-0123")
    absent = LocalProvider(["/nowhere/adaptdl-run"], [POOL], tmp_path)
    with pytest.raises(ProviderError, match="/nowhere/adaptdl-run"):
        absent.request("local", 1)
