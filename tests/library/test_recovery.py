"""Deaths in the middle of training, survived in the same processes."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fake_agent
import generations
import loop_script_path
import pytest
import torch
from fake_agent import FakeAgent
from recovered import BATCH, SIZE, applied, as_undisturbed, same, train

from adaptdl_elastic.protocol.messages import SaveCheckpoint, Stop

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]


start = fake_agent.starts("resilient", size=SIZE, batch=BATCH, pace=0.01, late=0.5)


def evaluated(folder: Path, epochs: int, size: int) -> None:
    """Each epoch's evaluation saw every sample, whatever it had seen in vain before."""
    seen = Counter(
        (line["epoch"], sample)
        for line in generations.records(folder)
        if line["loop"] == "evaluate"
        for sample in line["samples"]
    )
    assert set(seen) == {(epoch, sample) for epoch in range(epochs) for sample in range(size)}


@pytest.mark.parametrize("die", [(0, 1), (1, 3)], ids=str)
def test_half_of_the_replicas_at_once(start: Any, tmp_path: Path, die: tuple[int, ...]) -> None:
    job = start(4)
    job.recover(*die)
    job.finish()
    applied(tmp_path, 2)


def test_when_torch_never_agrees_on_the_order_of_buckets(start: Any, tmp_path: Path) -> None:
    """gloo may forget a message if a replica dies in the second step of a generation."""
    job = start(2, forgets=1)
    job.plan(3)
    job.wait_for("forgotten", 3)
    job.generation, job.running = 1, job.staying + job.pending
    job.recover(2)
    job.finish()
    applied(tmp_path, 2)


Act = Callable[[FakeAgent], Any]


def waits(kind: str) -> Act:
    return lambda job: job.wait_for(kind)


def die(*ranks: int) -> list[Act]:
    """One after the other, with a step in between."""
    acts = [[waits("step"), lambda job, rank=rank: job.recover(rank)] for rank in ranks]  # type: ignore[misc]
    return list(itertools.chain(*acts))[1:]


def changes(*sizes: int) -> list[Act]:
    return [lambda job, size=size: job.rescale(size) for size in sizes]  # type: ignore[misc]


def kills_itself(rank: int) -> list[Act]:
    return [lambda job: job.bury(rank), lambda job: job.survive()]


SHORT = {"size": 84, "epochs": 12, "evaluate": 1, "pace": 0.02, "late": 1.0}
LATE = [*changes(3), *die(1), waits("step"), *changes(2, 1, 2), waits("resilient")]
SUMS = ["adaptdl-accumulator-epoch0-0", 1]
OUTSIDE: dict[str, Any] = {"size": 84, "epochs": 3, "outside": "both", "torn": SUMS}
SCHEDULES: dict[str, tuple[int, dict[str, Any], list[Act]]] = {
    "one after the other": (4, {}, die(0, 1, 0)),
    "in the middle of an accumulation": (3, {"accumulate": 3}, die(1, 0)),
    "a stream": (3, {"stream": True}, die(1)),
    "in evaluation loops and short epochs": (3, SHORT, die(2, 0)),
    "one that came in an evaluation loop counts the same steps": (
        2, {**SHORT, "epochs": 24, "pace": 0.05}, [*LATE, *LATE]
    ),
    "in the first window of the second loader that is made in every epoch": (
        3, {"size": 84, "epochs": 3, "fresh": True, "die": [2, "train", 1, 1]}, kills_itself(2)
    ),
    # The dead replica's last word was an accumulator's sums, and one survivor stands at the next one's.
    "sums from outside of loops came to one of two": (3, OUTSIDE, kills_itself(0)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_deaths_leave_no_trace(start: Any, tmp_path: Path, name: str) -> None:
    replicas, given, acts = SCHEDULES[name]
    job = start(replicas, **given)
    for act in acts:
        act(job)
    job.finish()
    epochs, size = given.get("epochs", 1), given.get("size", SIZE)
    applied(tmp_path, len(job.running), epochs, size)
    if given.get("evaluate"):
        evaluated(tmp_path, epochs, size)


def test_a_death_before_the_plan_for_another_is_there(start: Any, tmp_path: Path) -> None:
    job = start(4)
    job.kill(1)
    job.wait_for("peer_lost", 3)
    job.recover(2)
    job.finish()
    applied(tmp_path, 2)


def test_a_death_during_the_recovery(start: Any, tmp_path: Path) -> None:
    """The plan counts on one who is dead already: the others give it up for the next one."""
    job = start(4)
    job.kill(3)
    job.wait_for("peer_lost", 3)
    whole = job.running
    job.kill(0)
    left, job.running = job.running, whole
    job.plan_recovery()
    job.running = left
    job.survive()
    job.finish()
    applied(tmp_path, 2)


@pytest.mark.essential
def test_changes_of_size_and_deaths_mixed(start: Any, tmp_path: Path) -> None:
    job = start(2, epochs=2)
    job.recover(0)
    job.rescale(3)
    job.wait_for("resilient")
    job.recover(0)
    job.rescale(1)
    job.rescale(2)
    job.finish()
    applied(tmp_path, 2, epochs=2)


def test_a_death_while_newcomers_warm_up(start: Any, tmp_path: Path) -> None:
    job = start(2)
    job.plan(3)
    job.wait_for("hello")
    survivors, newcomer = job.kill(1), job.pending[0]
    job.withdraw()
    newcomer.process.kill()
    assert job.running == survivors
    job.survive()
    job.rescale(2)
    job.finish()
    applied(tmp_path, 2)


@pytest.mark.parametrize("where", ["form", "take", "finish"])
def test_a_newcomer_that_dies_while_the_others_switch(start: Any, tmp_path: Path, where: str) -> None:
    """In the middle of a training loop: those who were there go on from where they are."""
    job = start(2)
    for _ in range(5):
        job.wait_for("step")
    job.plan(3, TROUBLE=where)
    assert job.pending[0].join() == -9
    if where == "form":  # nobody misses it before it has connected
        job.withdraw()
        job.generation -= 1
    job.wait_for("peer_lost", 2)
    job.generation += 1
    job.survive()
    job.finish()
    applied(tmp_path, 2)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.essential
def test_with_worker_processes(start: Any, tmp_path: Path, persistent: bool) -> None:
    job = start(2, workers=1, persistent=persistent)
    job.recover(0)
    job.finish()
    applied(tmp_path, 1)


def test_a_checkpoint_that_was_asked_of_the_dead_is_still_saved(start: Any, tmp_path: Path) -> None:
    """Rank 0 has our request for a checkpoint, and dies."""
    job = start(3)
    job.running[2].channel.send(SaveCheckpoint(7))
    if not job.recover(0)["saved"]:
        job.wait_for("saved")
    job.running[1].channel.send(Stop("test"))
    assert [each.join() for each in job.running] == [143, 143]


@pytest.mark.parametrize(
    ("tag", "count"),
    [
        *itertools.product(["seed", "adaptdl-accumulator", "end of data loop", "agreement"], [1, 2]),
        # the batch size is settled once a generation
        *[("batch size", 1), ("end of epoch", 1)],
    ],
)
def test_the_last_word_of_the_dead_reaches_one_of_two(
    start: Any, tmp_path: Path, tag: str, count: int
) -> None:
    """One survivor has the result of a collective, the other one has not."""
    autoscale = 3 * BATCH if tag in ("batch size", "end of epoch") else 0
    job = start(3, size=84, epochs=3, evaluate=1, torn=[tag, count], autoscale=autoscale)
    if tag == "agreement":
        job.running[2].channel.send(SaveCheckpoint(7))
        if count == 2:
            job.wait_for("saved")
            job.running[2].channel.send(SaveCheckpoint(8))
    job.bury(0)
    job.survive()
    job.finish()
    if autoscale:
        weights = [torch.load(tmp_path / f"weights-{rank}") for rank in range(2)]
        assert torch.equal(*weights)
    else:
        applied(tmp_path, 2, epochs=3, size=84)
    evaluated(tmp_path, 3, 84)


@pytest.mark.parametrize("tag", ["agreement", "end of data loop"])
def test_a_silent_replica_is_not_waited_for_in_a_collective_of_the_library(
    start: Any, tmp_path: Path, tag: str
) -> None:
    """Rank 0 is stopped: its connections stay open, and only the agents find out."""
    job = start(3, size=84, epochs=3, evaluate=1, torn=[tag, 1, "SIGSTOP"])
    if tag == "agreement":
        job.running[2].channel.send(SaveCheckpoint(7))
    job.forsake(0)
    job.survive()
    job.finish()
    applied(tmp_path, 2, epochs=3, size=84)
    evaluated(tmp_path, 3, 84)


def test_sums_that_are_passed_on_by_one_that_got_them_passed_on(start: Any, tmp_path: Path) -> None:
    """The first of four dies when one has its sums, and that one when it has passed them on to one of two."""
    job = start(4, **OUTSIDE, **{"torn then": ["sums", 1]})
    job.bury(0)
    job.plan_recovery()
    job.bury(0)
    job.survive()
    job.finish()
    applied(tmp_path, 2, epochs=3, size=84)
    shown = [line["sum"] for line in generations.records(tmp_path) if line["loop"] == "outside"]
    assert Counter(shown) == {4: 3, 2: 4}  # one that told it before it died, and the two who live


def test_sums_from_outside_of_loops_that_die_with_a_replica(start: Any, tmp_path: Path) -> None:
    """In an evaluation loop, which can be begun anew, but what was added before it cannot be."""
    job = start(3, size=84, epochs=3, evaluate=1, outside=True, die=[2, "evaluate", 1, 2])
    job.bury(2)
    job.plan_recovery()
    assert [each.join() for each in job.running] == [1, 1]
    for each in job.running:
        assert "outside of data loops is gone" in each.text()


@pytest.mark.parametrize("tag", ["formed", "standing", "statistics", "index", "recovered", "switched"])
def test_rank_0_dies_in_a_recovery_and_reaches_one_of_two(start: Any, tmp_path: Path, tag: str) -> None:
    job = start(4, torn=[tag, 1])
    job.wait_for("step")  # before the first one nobody has an index to agree on
    job.kill(3)
    job.plan_recovery()
    job.bury(0)
    job.survive()
    job.finish()
    applied(tmp_path, 2)


@pytest.mark.parametrize(("tag", "count"), [("switch", 1), ("switch", 2), ("formed", 1), ("switched", 1)])
@pytest.mark.parametrize("replicas", [2, 4])
def test_rank_0_dies_in_a_change_and_reaches_one(
    start: Any, tmp_path: Path, tag: str, count: int, replicas: int
) -> None:
    """Of three replicas becoming two or four."""
    job = start(3, torn=[tag, count])
    job.plan(replicas)
    job.bury(0)
    job.generation += 1  # the plan's
    for each in job.pending:  # newcomers have nothing that others need
        each.process.kill()
    if replicas == 2 and tag != "switch":  # all know that the last one leaves
        assert job.running.pop().join() == 0
    job.plan_recovery()
    job.finish()
    applied(tmp_path, len(job.running))


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return what a run of these settings in which no replica dies ends with; each is run once."""
    found: dict[str, Any] = {}

    def run(**given: Any) -> Any:
        key = repr(sorted(given.items()))
        if key not in found:
            (found[key],) = train(tmp_path_factory.mktemp("undisturbed") / "run", 1, **given)
        return found[key]

    return run


recovery_script = partial(fake_agent.running, loop_script_path.RECOVERY)
REST = {"size": 243, "drop_last": True}  # three samples too many for 20 batches
FAULTS: dict[str, dict[str, Any]] = {
    "rank 0 dies": {"faults": [[0, 10, 0, "die"]]},
    "rank 1 dies in a late bucket": {"faults": [[1, 10, 1, "die"]]},
    "the first step": {"faults": [[1, 0, 0, "die"]]},
    "the second step, after the buckets were made anew": {"faults": [[1, 1, 0, "die"]]},
    "the last step of an epoch": {"faults": [[2, 19, 1, "die"]]},
    # One does not get the last bucket of a step, and the others do.
    "one is a step behind": {"faults": [[1, 10, 1, "miss"]], "late": [2]},
    "rank 0 is a step behind": {"faults": [[0, 10, 1, "miss"]], "late": [2]},
    "a step behind at the end of an epoch": {"faults": [[1, 19, 1, "miss"]], "late": [0]},
    "two are a step behind": {"faults": [[1, 10, 1, "miss"], [2, 10, 1, "miss"]], "late": [0]},
    "one of four is a step behind": {"faults": [[1, 10, 1, "miss"]], "late": [2], "replicas": 4},
    "the last step before a rest to leave out": {"faults": [[2, 19, 1, "die"]], **REST},
    "a step behind before a rest to leave out": {"faults": [[1, 19, 1, "miss"]], "late": [0], **REST},
    # many loops have no scheduler, nanoGPT's for one: a death made such a job restart
    "no scheduler": {"faults": [[1, 10, 1, "die"]], "kind": "rate by hand"},
    "an average is changed before the step": {"faults": [[1, 10, 1, "miss"]], "late": [2], "large": "before"},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_at_any_bucket_leaves_no_trace(tmp_path: Path, undisturbed_run: Any, name: str) -> None:
    """Parameters, averages, optimizer, scheduler and loss scale end as in a run in which no replica dies."""
    given = {"replicas": 3, **FAULTS[name]}
    undisturbed = undisturbed_run(**{key: given[key] for key in given.keys() & {*REST, "kind", "large"}})
    results = train(tmp_path / "disturbed", **given)
    assert len(results) == given["replicas"] - 1
    for result in results:
        as_undisturbed(result, undisturbed)
        assert result["draws"] == draws_of(result["seed"], 40)
        assert str(result["average"]) == str(results[0]["average"])
    same(results)


def draws_of(seed: int, count: int) -> list[tuple[float, float]]:
    torch.manual_seed(seed)
    random.seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return [(torch.rand(1).item(), random.random()) for _ in range(count)]
    finally:
        torch.set_default_dtype(default)


def test_one_behind_goes_on_from_its_own_step_when_the_only_donor_dies(
    tmp_path: Path, undisturbed_run: Any
) -> None:
    undisturbed = undisturbed_run()
    with recovery_script(tmp_path, 3, faults=[[1, 10, 1, "miss"]], dies_giving=0) as job:
        job.wait_for("peer_lost", 3)
        job.kill(2)
        job.plan_recovery()
        donor, behind = job.running
        assert donor.join() == -9
        job.running = [behind]
        job.plan_recovery()
        job.finish()
        assert "step 11 arrived elsewhere" in behind.text()
    as_undisturbed(torch.load(tmp_path / "result-0"), undisturbed)


@pytest.mark.parametrize("name", ["rank 0 dies", "one is a step behind"])
def test_buffers_and_sums_are_put_back(tmp_path: Path, name: str) -> None:
    results = train(tmp_path / "run", 3, **FAULTS[name], norm=True, optimizer="adam")
    for result in results:
        *_, batches = result["buffers"]
        assert int(batches) == result["steps"] == 40
    same(results)
    # What the dead one had seen is gone with it: its third of the windows until then.
    died = 11 if "late" in FAULTS[name] else 10
    assert [result["seen"] for result in results] == [240 * 2 - died * 4] * 2


@pytest.mark.parametrize(("leave", "leavers"), [(10, [0, 1, 2]), (20, [0]), (20, [1, 2])])
def test_buffers_are_rank_0s_after_a_loop_however_it_was_left(
    tmp_path: Path, leave: int, leavers: list[int]
) -> None:
    results = train(tmp_path / "run", 3, norm=True, leave=leave, leavers=leavers, evaluate=True)
    for result in results[1:]:
        assert str(result["buffers"]) == str(results[0]["buffers"])


@pytest.mark.parametrize("busy", [0, 1])
def test_a_survivor_that_is_busy_outside_of_all_loops_is_waited_for(tmp_path: Path, busy: int) -> None:
    """It evaluates, draws or saves when another one dies: nothing tells how long that takes."""
    with recovery_script(tmp_path, 3, busy=busy) as job:
        job.wait_for_file("busy")
        job.kill(2)
        job.plan_recovery()
        job.wait_for_file(f"patient-{job.running[1 - busy].process.pid}")
        (tmp_path / "free").touch()
        job.finish()
        assert "did not come about" not in job.outputs()
        results = [torch.load(tmp_path / f"result-{rank}") for rank in range(2)]
        assert [result["samples"] for result in results] == [[240, 240]] * 2
        same(results)


BEFORE = "'before once', which cannot be put back because the step that failed has changed it before"
COPIED = "'copied', which cannot be put back because its `state_dict` does not return the tensors themselves"


@pytest.mark.parametrize(
    ("written", "bucket", "why"),
    [
        ({"kind": "unknown scheduler"}, 0, "given no lr_scheduler"),
        ({"kind": "unknown scaler"}, 0, "not given the GradScaler"),
        ({"kind": "two models"}, 2, "several models"),  # the second one's first: the first one has stepped
        ({"kind": "parts"}, 0, "'counter', which cannot be put back because it has a `sync` of its own"),
        ({"kind": "lbfgs"}, 0, ""),
        ({"large": "before once"}, 0, BEFORE),
        ({"large": "copied"}, 0, COPIED),
    ],
)
@pytest.mark.essential
def test_a_change_that_cannot_be_put_back_says_why_and_ends_the_job(
    tmp_path: Path, written: dict[str, Any], bucket: int, why: str
) -> None:
    with recovery_script(tmp_path, 2, **written, faults=[[1, 10, bucket, "die"]]) as job:
        assert job.running[1].join() == -9
        assert job.running[0].join() == 1
        text = job.running[0].text()
        assert why in text
        assert (why == "") != ("restarts from the last checkpoint, because" in text), text
