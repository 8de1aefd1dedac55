"""A stranger beside replicas that change in place: no code of it runs, and nobody believes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fake_agent
import loop_script_path
import psutil
import pytest
from attacker import Attacker
from fake_agent import FakeAgent

pytestmark = pytest.mark.processes

SIZE, BATCH = 403, 8


start = fake_agent.starts("step", size=SIZE, batch=BATCH, pace=0.5)


@pytest.fixture
def attack(tmp_path: Path) -> Iterator[Callable[[FakeAgent], Attacker]]:
    made: list[Attacker] = []

    def begin(job: FakeAgent) -> Attacker:
        made.append(
            Attacker(
                tmp_path,
                lambda: [store.port for store in job.stores],
                lambda: [psutil.Process(one.process.pid) for one in job.all if one.process.is_alive()],
            )
        )
        return made[-1]

    yield begin
    for each in made:
        each.close()


def forged(job: FakeAgent, attacker: Attacker) -> bool:
    """Wait until a replica has refused a forged value, or has run code of the attacker's."""
    while not attacker.owned.exists():
        _, message, _ = job.messages.get(timeout=fake_agent.PATIENCE)
        if "was not written by one of them" in message.get("reason", ""):
            return True
    return False


def lead_a_survivor_to(attacker: Attacker, job: FakeAgent) -> None:
    """Kill rank 2 of three, and let rank 1 find the attacker's address where it looks for rank 0's."""
    attacker.do(attacker.send_replicas_here, attacker.impersonate)
    job.kill(2)
    # rank 1 looks before rank 0 writes
    forgery = "adaptdl/1/go/1"
    job.plan_recovery(told=[1], before=lambda: job.stores[-1].wait([forgery], timedelta(seconds=60)))


def test_survivors_are_not_led_to_a_stranger(start: Any, attack: Any) -> None:
    """They believed an address and a key of the stranger's, and unpickled its reply."""
    job = start(3)
    attacker = attack(job)
    lead_a_survivor_to(attacker, job)
    refused = forged(job, attacker)
    assert not attacker.owned.exists()
    assert refused
    attacker.close()
    job.plan_recovery()  # as the agents do: training goes on
    job.wait_for("switched", 2)
    job.finish()


@pytest.mark.parametrize("broken", [True, False])
def test_the_attacker_wins_where_the_guard_is_broken_and_only_there(
    broken: bool, tmp_path: Path, attack: Any
) -> None:
    given = {"size": SIZE, "batch": BATCH, "pace": 0.5, "broken": broken}
    with fake_agent.starter(tmp_path, "step", loop_script_path.UNGUARDED, **given) as start:
        job = start(3)
        attacker = attack(job)
        lead_a_survivor_to(attacker, job)
        while not attacker.owned.exists():
            _, message, _ = job.messages.get(timeout=fake_agent.PATIENCE)
            if "an object where only plain data may come" in message.get("reason", ""):
                break
        assert attacker.owned.exists() == broken


def test_an_attacker_that_only_reads_and_talks_changes_nothing(start: Any, attack: Any) -> None:
    job = start(2)
    attacker = attack(job)
    attacker.do(attacker.read_all, attacker.impersonate)
    job.rescale(3)
    job.recover(1)
    job.rescale(1)
    job.finish()
    assert not attacker.owned.exists()
    assert any("go/" in key for key in attacker.read)
    for key, value in attacker.read.items():
        assert b"secret" not in value, key


def test_a_newcomer_refuses_a_forged_preview_and_training_goes_on(start: Any, attack: Any) -> None:
    job = start(1)
    attacker = attack(job)
    attacker.do(attacker.forge_previews)
    job.plan(2)
    (newcomer,) = job.pending
    assert newcomer.join() == 1
    assert not attacker.owned.exists()
    assert "was not written by one of them: a stranger reaches its port" in newcomer.text()
    attacker.close()
    job.withdraw()
    job.finish()
