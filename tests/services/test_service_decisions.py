"""Which submitted jobs begin, why others wait, and which agents a node starts and stops."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from submitted_jobs import submission_by

from adaptdl_elastic.agent.service.decisions import (
    LONGEST_PAUSE_SECONDS,
    MOST_FAILURES,
    STEADY_SECONDS,
    STOP_SECONDS,
    AgentState,
    Step,
    decide,
    hopeless,
)
from adaptdl_elastic.rendezvous.schema.records import DrainRequest
from adaptdl_elastic.rendezvous.schema.records import JobState as State
from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord
from adaptdl_elastic.rendezvous.services.admission import OVERTAKING_SECONDS, JobState, Request, admit
from adaptdl_elastic.rendezvous.services.submitted import Submitted, state_of
from adaptdl_elastic.rendezvous.text import clock

IDLE, BUSY = JobState(), JobState(agents=2, state=State.RUNNING)


def request(
    job: str, least: int = 1, *, run: JobState = IDLE, cancelled: str | None = None, **options: object
) -> Request:
    made = submission_by("alice", job, min_replicas=least, max_replicas=max(8, least))
    return Request(replace(made, **options), cancelled, run)  # type: ignore[arg-type]


def reasons(*requests: Request, slots: int) -> dict[str, str]:
    return {job: verdict.reason for job, verdict in admit(requests, slots).items()}


def test_jobs_begin_in_the_order_of_their_submission_while_there_is_room() -> None:
    first, second, third = (request(name, 2, created=n) for n, name in enumerate(("c", "b", "a")))
    assert reasons(third, first, second, slots=4) == {
        "c": "",
        "b": "",
        "a": "needs 2 slots, jobs before it need 4 of 4",
    }


def test_a_replica_with_several_gpus_takes_as_many_slots() -> None:
    first, second = (request(name, 2, created=n, gpus_per_replica=3) for n, name in enumerate("ab"))
    assert reasons(first, second, slots=8) == {"a": "", "b": "needs 6 slots, jobs before it need 6 of 8"}
    assert reasons(first, second, slots=12) == {"a": "", "b": ""}


def test_a_priority_counts_up_to_what_its_owner_may_give() -> None:
    fair, greedy = request("fair", 3, created=1), request("greedy", 3, created=2, priority=900)
    assert reasons(fair, greedy, slots=4)["greedy"] == ""
    greedy = replace(greedy, most_priority=0)
    assert reasons(fair, greedy, slots=4) == {
        "fair": "",
        "greedy": "needs 3 slots, jobs before it need 3 of 4; "
        "its priority counts as 0, the most that alice may give",
    }


def test_a_job_that_says_that_it_is_old_does_not_come_first() -> None:
    """A submission's time is its owner's word; the store's revision is not."""
    first = replace(request("first", 3, created=100), revision=5)
    forged = replace(request("forged", 3, created=1), revision=6)
    assert reasons(forged, first, slots=4)["first"] == ""


@pytest.mark.parametrize("said", [0.0, 100.0, 2 * OVERTAKING_SECONDS])
def test_a_job_that_says_that_it_is_old_does_not_overtake_for_ever(said: float) -> None:
    running = replace(request("running", 2, run=BUSY), revision=1)
    large = replace(request("large", 3, created=100), revision=2)
    witness = replace(request("witness", 3, created=101 + OVERTAKING_SECONDS), revision=3)
    small = replace(request("small", 1, created=said), revision=4)
    kept = "needs 1 slot, jobs before it need 5 of 3"
    assert reasons(running, large, witness, small, slots=3)["small"] == kept
    early = replace(small, revision=2)
    assert (
        reasons(
            running,
            large,
            replace(early, submission=replace(early.submission, created=101.0)),
            witness,
            slots=3,
        )["small"]
        == ""
    )


def test_a_small_job_begins_beside_a_large_one_that_waits() -> None:
    running, large, small = (
        request("running", 2, run=BUSY),
        request("large", 3, created=1),
        request("small", 1, created=2),
    )
    assert reasons(running, large, small, slots=3) == {
        "running": "",
        "large": "needs 3 slots, jobs before it need 2 of 3",
        "small": "",
    }


def test_a_job_that_waits_for_slots_is_not_overtaken_without_end() -> None:
    running, large = request("running", 2, run=BUSY), request("large", 3, created=1)
    soon = request("soon", 1, created=1 + OVERTAKING_SECONDS)
    late = request("late", 1, created=2 + OVERTAKING_SECONDS)
    larger_than_all = request("larger", 4, created=0)
    assert reasons(running, large, late, slots=3)["late"] == "needs 1 slot, jobs before it need 5 of 3"
    assert reasons(running, large, soon, slots=3)["soon"] == ""
    assert reasons(running, larger_than_all, late, slots=3)["late"] == ""
    urgent = request("urgent", 1, created=2 + OVERTAKING_SECONDS, priority=1)
    assert reasons(running, large, urgent, slots=3)["urgent"] == ""


def test_a_large_job_begins_although_small_ones_are_submitted_all_the_time() -> None:
    minute, lasts, ends = 60.0, 7, dict[str, int]()
    waiting = [request("large", 8, created=1)]
    for now in range(120):
        waiting.append(request(f"small-{now}", created=now * minute))
        waiting = [one for one in waiting if ends.get(one.submission.job, now + 1) > now]
        verdicts = admit(waiting, 8)
        for number, one in enumerate(waiting):
            job = one.submission.job
            if verdicts[job].admitted and job not in ends:
                waiting[number], ends[job] = replace(one, run=BUSY), now + lasts
        if "large" in ends:
            break
    assert ends.get("large") is not None


def test_a_higher_priority_goes_first_and_displaces_nothing_that_runs() -> None:
    running = request("running", 2, run=BUSY, priority=-5)
    plain, urgent = request("plain", 1, created=1), request("urgent", 1, created=2, priority=5)
    verdicts = admit([running, plain, urgent], 3)
    assert {job: verdict.admitted for job, verdict in verdicts.items()} == {
        "running": True,
        "urgent": True,
        "plain": False,
    }


@pytest.mark.parametrize(
    ("run", "cancelled", "reason"),
    [
        (JobState(state=State.DONE), None, ""),
        (BUSY, None, "waits for first"),
        (JobState(state=State.FAILED), None, "waits for first, which is failed; adaptdl cancel then ends it"),
        (IDLE, "bob", "waits for first, which is cancelled; adaptdl cancel then ends it"),
    ],
)
def test_a_job_waits_for_its_predecessor(run: JobState, cancelled: str | None, reason: str) -> None:
    first = request("first", run=run, cancelled=cancelled)
    assert reasons(first, request("then", after=("first",), created=1), slots=8)["then"] == reason


def test_the_reasons_of_a_cluster_that_is_too_small() -> None:
    assert reasons(request("job", 3), slots=2) == {"job": "needs 3 slots, the cluster has 2"}
    assert reasons(request("job"), slots=0) == {
        "job": "no node service is registered; see adaptdl cluster status"
    }


def service(node: str, slots: int, version: str = "2.0") -> ServiceRecord:
    return ServiceRecord(node, "127.0.0.1", 1, slots, version=version)


def test_slots_of_drained_nodes_are_not_counted_and_the_reason_says_so() -> None:
    drain = DrainRequest("n1", "new disk", created=time.time(), person="bob")
    nodes = {"n1": service("n1", 4), "n2": service("n2", 1)}
    found = Submitted(nodes, (request("job", 2),), {}, {"n1": drain})
    left_out = f"n1 (drained by bob since {clock(drain.created)} (new disk); adaptdl drain n1 --cancel)"
    why = f"needs 2 slots, the cluster has 1; not counted: {left_out}"
    assert state_of(found.requests[0], found) == ("queued", why)
    every = replace(found, services={"n1": nodes["n1"]})
    assert "the cluster has 0; not counted: n1" in state_of(found.requests[0], every)[1]


def test_jobs_begin_on_nodes_of_one_version_only() -> None:
    # `cluster up` did not reach n1, whose agent all others would refuse
    nodes = {"n1": service("n1", 1, "1.0"), "n2": service("n2", 1), "n3": service("n3", 1)}
    large, small = request("large", 3), request("small", 2, created=1)
    found = Submitted(nodes, (large, small), {})
    assert found.unused == {"n1": "has adaptdl-elastic 1.0, most slots 2.0: adaptdl cluster up"}
    verdicts = found.verdicts()
    assert verdicts["large"].reason == (
        f"needs 3 slots, the cluster has 2; not counted: n1 ({found.unused['n1']})"
    )
    assert verdicts["small"].admitted, "a job that cannot be placed holds no slots"


def test_jobs_that_are_over_are_neither_admitted_nor_counted() -> None:
    over = [request("done", 4, run=JobState(state=State.DONE)), request("away", 4, cancelled="alice")]
    assert reasons(*over, request("job", 4), slots=4) == {"job": ""}


WANTED, RUNNING = request("job"), AgentState().started(0.0)


def test_an_agent_is_started_once_and_stopped_when_its_job_is_cancelled() -> None:
    assert decide([WANTED], 1, {}, 0.0) == {"job": Step.START}
    assert decide([WANTED], 1, {"job": RUNNING}, 1.0) == {}
    cancelled = request("job", cancelled="alice", run=BUSY)
    assert decide([cancelled], 1, {"job": RUNNING}, 1.0) == {"job": Step.TERMINATE}
    told = replace(RUNNING, terminated=1.0)
    assert decide([cancelled], 1, {"job": told}, 1.0 + STOP_SECONDS) == {}
    assert decide([cancelled], 1, {"job": told}, 1.1 + STOP_SECONDS) == {"job": Step.KILL}
    assert decide([], 1, {"job": RUNNING}, 1.0) == {"job": Step.TERMINATE}
    assert decide([], 1, {"job": RUNNING}, 1.0, {"job"}) == {}


def test_an_agent_of_a_job_that_ends_is_left_to_end_by_itself_and_a_registration_is_not() -> None:
    ended = request("job", run=JobState(agents=1, state=State.DONE))
    assert decide([ended], 1, {"job": RUNNING}, 1.0) == {}
    assert decide([ended], 1, {"job": replace(RUNNING, standing=True)}, 1.0) == {"job": Step.TERMINATE}


def test_a_node_that_is_drained_is_registered_for_no_job() -> None:
    assert decide([WANTED], 1, {}, 0.0, unused=True) == {}
    assert decide([WANTED], 1, {"job": RUNNING}, 0.0, unused=True) == {}  # an agent leaves by itself
    standing = replace(RUNNING, standing=True)
    assert decide([WANTED], 1, {"job": standing}, 0.0, unused=True) == {"job": Step.TERMINATE}


def test_an_agent_that_fails_at_once_is_tried_again_later_and_later_and_then_no_more() -> None:
    state, now, pauses = AgentState(), 0.0, []
    while decide([WANTED], 1, {"job": state}, now):
        state = state.started(now).ended(now + 1.0, 1)
        pauses.append(state.not_before - now - 1.0)
        assert decide([WANTED], 1, {"job": state}, now + 1.0) == {}
        now = state.not_before
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert len(pauses) == MOST_FAILURES


@pytest.mark.parametrize(("lived", "code"), [(STEADY_SECONDS + 1.0, 1), (1.0, 0)])
def test_an_agent_that_ran_long_or_was_drained_is_tried_without_end(lived: float, code: int) -> None:
    state = AgentState(failures=MOST_FAILURES - 1).started(0.0).ended(lived, code)
    assert state.failures == 0
    assert 0 < state.not_before - lived <= LONGEST_PAUSE_SECONDS


def test_a_job_that_no_node_can_start_is_hopeless() -> None:
    def service(node: str, *given_up: str) -> ServiceRecord:
        return ServiceRecord(node, "h", 1, 2, problems=dict.fromkeys("abc", "disk full"), given_up=given_up)

    requests = [request("a"), request("b", run=BUSY), request("c", cancelled="eve"), request("d")]
    services = {"n1": service("n1", *"abc"), "n2": service("n2", *"abc")}
    assert hopeless(requests, services, ()) == {"a": "n1: disk full; n2: disk full"}
    services["n3"] = service("n3")
    assert hopeless(requests, services, ()) == {}, "it is still tried there"
    assert set(hopeless(requests, services, {"n3"})) == {"a"}
    assert hopeless(requests, {}, ()) == {}
    requests = [request("a", run=JobState(ran_on=("n2", "n3")))]
    assert hopeless(requests, services, {"n3"}) == {}, "it may go on where it has run"
    services["n3"] = service("n3", "a")
    assert set(hopeless(requests, services, ())) == {"a"}
    del services["n2"]
    assert hopeless(requests, services, ()) == {}
