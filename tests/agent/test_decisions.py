"""What an agent does about what it is told: no processes, no store, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from decided import HELLO, ME, Agent, kinds, master, plan, said
from hypothesis import given
from hypothesis import strategies as st

from adaptdl_elastic.agent.core import states as d
from adaptdl_elastic.agent.core.decisions import KILL_AGAIN_AFTER, OWN_STOP_AFTER, PATIENCE, deadline, decide
from adaptdl_elastic.protocol.messages import Finished, Ready, StepFinished, Stopping, Switched
from adaptdl_elastic.rendezvous.schema.records import (
    EndedRecord,
    Failure,
    JobState,
    JobStatus,
    Leaving,
    Outcome,
    Plan,
    Transition,
)


def test_rank_0_opens_the_master_and_then_starts() -> None:
    agent = Agent()
    first = plan(0, ("here", 2), ("there", 1))
    assert agent(d.PlanSeen(first)) == [d.OpenMaster(0)]
    assert agent(d.Tick()) == []
    found = master(0)
    assert agent(found) == [d.StartReplicas(first, found.master, (0, 1)), d.WriteRunning(0)]


def test_others_wait_for_the_master() -> None:
    agent = Agent()
    assert agent(d.PlanSeen(plan(0, ("there", 1), ("here", 1)))) == []
    assert kinds(agent(master(0))) == ["StartReplicas", "WriteRunning"]


def test_a_master_of_another_generation_is_none() -> None:
    agent = Agent()
    agent(master(0))
    assert agent(d.PlanSeen(plan(1, ("there", 1), ("here", 1)))) == []


def test_a_generation_waits_for_those_who_leave_the_one_before() -> None:
    agent = Agent()
    leaving = [Leaving("there", 1, "agent-there", 0)]
    assert agent(d.PlanSeen(plan(1, ("here", 1), leaving=leaving))) == []
    assert agent(d.EndedSeen(0, "there", Outcome.STOPPED)) == [d.OpenMaster(1)]


def test_a_node_that_has_vanished_is_not_waited_for() -> None:
    agent = Agent()
    agent(d.PlanSeen(plan(1, ("here", 1), leaving=[Leaving("there", 1, "agent-there", 0)])))
    assert agent(d.NodesSeen({"here": "agent-1", "there": "another agent"})) == [d.OpenMaster(1)]


def test_nobody_has_vanished_before_the_registrations_were_read() -> None:
    state = d.State(me=ME)
    there = Leaving("there", 1, "agent-there", 0)
    state, actions = decide(state, d.PlanSeen(plan(1, ("here", 1), leaving=[there])), 0.0)
    assert actions == []
    state, actions = decide(state, d.NodesSeen({"here": "agent-1", "there": "agent-there"}), 0.0)
    assert actions == []


def test_a_planned_change_saves_ends_and_starts_again() -> None:
    agent = Agent().running()
    leaving = [Leaving("here", 2, "agent-1", 0)]
    assert agent(d.PlanSeen(plan(1, ("here", 1), leaving=leaving))) == [d.AskToStop((0, 1), (), "why")]
    assert agent.later(1) == []
    assert agent.exits(143, 143) == [
        d.WriteEnded(EndedRecord("here", 0, Outcome.STOPPED, 143)),
        d.OpenMaster(1),
    ]


@pytest.mark.parametrize(
    ("between", "starts"), [(Outcome.STOPPED, False), (Outcome.FAILED, True), (Outcome.ABORTED, True)]
)
def test_a_script_that_ended_before_a_plan_that_was_replaced_is_not_started_again(
    between: Outcome, starts: bool
) -> None:
    agent = Agent()
    agent(d.EndedSeen(0, "there", Outcome.DONE))
    agent(d.EndedSeen(1, "third", between))
    leaving = [Leaving("there", 1, "agent-there", 0), Leaving("third", 1, "agent-third", 1)]
    actions = agent(d.PlanSeen(plan(2, ("here", 1), leaving=leaving)))
    assert kinds(actions) == (["OpenMaster"] if starts else ["WriteEnded"])


def test_a_script_without_the_library_is_stopped_by_signal_and_may_answer_as_it_likes() -> None:
    agent = Agent().running(library=False)
    assert agent(d.PlanSeen(plan(1, ("here", 1)))) == [d.AskToStop((), (0, 1), "why")]
    ended = agent.exits(-15, 1)[0]
    assert ended == d.WriteEnded(EndedRecord("here", 0, Outcome.STOPPED, 143))


@pytest.mark.parametrize("codes", [(0, 0), (0, 143), (0, 1), (130, 0), (-15, 0)])
def test_a_script_that_exits_0_after_our_signal_is_stopped_and_not_done(codes: tuple[int, int]) -> None:
    agent = Agent().running(library=False)
    agent(d.PlanSeen(plan(1, ("here", 1), leaving=[Leaving("here", 2, "agent-1", 0)])))
    stopped = EndedRecord("here", 0, Outcome.STOPPED, 143)
    assert agent.exits(*codes) == [d.WriteEnded(stopped), d.OpenMaster(1)]


def test_a_script_that_ends_before_our_signal_arrives_is_done() -> None:
    agent = Agent().running(count=1, library=False)
    agent(d.PlanSeen(plan(1, ("here", 1), leaving=[Leaving("here", 1, "agent-1", 0)])))
    ended = agent(d.ReplicaExited(0, 0, 0, 5.0, signal_arrived=False))
    assert ended[0] == d.WriteEnded(EndedRecord("here", 0, Outcome.DONE))


def test_a_script_that_fails_before_our_signal_arrives_has_failed() -> None:
    agent = Agent().running(count=1, library=False)
    agent(d.PlanSeen(plan(1, ("here", 1), leaving=[Leaving("here", 1, "agent-1", 0)])))
    ended = agent(d.ReplicaExited(0, 0, 3, 5.0, "why", signal_arrived=False))
    failure = Failure(0, 3, "why", 5.0)
    assert ended[0] == d.WriteEnded(EndedRecord("here", 0, Outcome.FAILED, 3, failure))


@pytest.mark.parametrize("others", [0, 143])
def test_a_replica_that_was_at_its_end_when_the_signal_came_has_ended_by_itself(others: int) -> None:
    agent = Agent().running(library=False)
    agent(said(0, Finished()))
    agent(d.PlanSeen(plan(1, ("here", 1), leaving=[Leaving("here", 2, "agent-1", 0)])))
    agent(d.ReplicaExited(0, 0, 0, 5.0))
    if others == 0:
        agent(said(1, Finished()))
    outcome = Outcome.DONE if others == 0 else Outcome.STOPPED
    assert agent(d.ReplicaExited(0, 1, others, 5.0))[0] == d.WriteEnded(
        EndedRecord("here", 0, outcome, others)
    )


@pytest.mark.parametrize("code", [0, 1, 130, -9])
def test_a_script_that_makes_another_exit_code_of_a_stop_has_been_stopped(code: int) -> None:
    agent = Agent().running()
    agent(d.PlanSeen(plan(1, ("here", 1), leaving=[Leaving("here", 2, "agent-1", 0)])))
    for local_rank in (0, 1):
        agent(said(local_rank, Stopping()))
    assert agent.exits(code, code)[0] == d.WriteEnded(EndedRecord("here", 0, Outcome.STOPPED, 143))


def test_a_script_that_was_stopped_from_outside_and_exits_0_takes_the_others_along() -> None:
    agent = Agent().running()
    agent(said(0, Stopping()))
    assert kinds(agent(d.ReplicaExited(0, 0, 0, 5.0))) == ["AskToStop"]
    agent(said(1, Stopping()))
    assert agent(d.ReplicaExited(0, 1, 0, 5.0)) == [
        d.WriteEnded(EndedRecord("here", 0, Outcome.STOPPED, 143))
    ]


def test_a_node_says_that_it_uses_the_library_when_all_its_replicas_have_said_hello() -> None:
    agent = Agent().running(count=2, library=False)
    assert agent(said(1, HELLO, 0)) == [], "no change in place could keep the other one"
    assert agent(said(0, HELLO, 0)) == [d.WriteRunning(0, library=True)]


def test_one_that_says_hello_after_the_signal_is_not_a_failure() -> None:
    agent = Agent().running(count=1, library=False)
    agent(d.PlanSeen(plan(1, ("here", 1))))
    agent(said(0, HELLO, 0))
    assert agent.exits(-15)[0] == d.WriteEnded(EndedRecord("here", 0, Outcome.STOPPED, 143))


def test_what_does_not_stop_in_time_is_killed_and_killed_again() -> None:
    agent = Agent().running()
    agent(d.PlanSeen(plan(1, ("here", 1))))
    assert deadline(agent.state) == 120.0
    assert agent.later(119) == []
    assert kinds(agent.later(1)) == ["Kill"]
    assert kinds(agent.later(KILL_AGAIN_AFTER)) == ["Kill"]
    why = "no checkpoint within 120 s"
    assert agent.exits(-9, -9)[0] == d.WriteEnded(EndedRecord("here", 0, Outcome.ABORTED, -9, unsaved=why))


def test_a_stop_that_could_not_save_says_why() -> None:
    agent = Agent().running()
    agent(d.Leave("SIGTERM", None))
    assert kinds(agent.later(OWN_STOP_AFTER)) == ["AskToStop"]
    agent(said(0, Stopping("No space left on device")))
    agent(said(1, Stopping()))
    why = "No space left on device"
    ended = d.WriteEnded(EndedRecord("here", 0, Outcome.STOPPED, 143, unsaved=why))
    assert ended in agent.exits(143, 143)
    agent(d.NodesSeen({"here": "agent-1"}))
    agent.later(OWN_STOP_AFTER)
    assert agent.state.exiting


def test_an_abort_kills_at_once() -> None:
    agent = Agent().running()
    assert kinds(agent(d.PlanSeen(plan(1, ("there", 1), transition=Transition.ABORT)))) == ["Kill"]


def test_the_first_failure_is_the_cause_and_takes_the_others_with_it() -> None:
    agent = Agent().running()
    assert agent(d.ReplicaExited(0, 1, -9, 5.0, "SIGKILL")) == [d.Kill((0,), "replica 1 failed")]
    ended = agent(d.ReplicaExited(0, 0, 1, 6.0, "Connection reset by peer"))
    failure = Failure(1, -9, "SIGKILL", 5.0)
    assert ended == [d.WriteEnded(EndedRecord("here", 0, Outcome.FAILED, -9, failure))]


def cause(actions: Sequence[d.Action]) -> Failure:
    (ended,) = (action for action in actions if isinstance(action, d.WriteEnded))
    assert ended.record.failure is not None
    assert ended.record.exit_code == ended.record.failure.exit_code
    return ended.record.failure


def test_a_replica_that_raised_its_error_first_is_the_cause_though_it_exits_last() -> None:
    agent = Agent().running()
    agent(d.ReplicaExited(0, 0, 1, 6.0, "KeyError: 1", evidence=d.Evidence("KeyError at a.py:1", 5.9)))
    earlier = d.Evidence("SystemExit at a.py:7", 5.5, exit_code=3)
    ended = agent(d.ReplicaExited(0, 1, -9, 7.0, "SystemExit: 3", evidence=earlier))
    assert cause(ended) == Failure(1, 3, "SystemExit: 3", 5.5, "SystemExit at a.py:7")


def test_an_error_that_tells_of_a_lost_peer_is_not_the_cause_where_there_is_another() -> None:
    agent = Agent().running(count=3)
    lost = d.Evidence("", 5.0, lost_peer=True)
    agent(d.ReplicaExited(0, 0, 1, 6.0, "Connection closed by peer", evidence=lost))
    agent(d.ReplicaExited(0, 1, -9, 6.1, "SIGKILL", signal_arrived=False))
    ended = agent(d.ReplicaExited(0, 2, -9, 6.2, "SIGKILL"))
    assert cause(ended) == Failure(1, -9, "SIGKILL", 6.1)


def test_an_error_that_tells_of_a_lost_peer_is_the_cause_where_there_is_no_other() -> None:
    agent = Agent().running()
    lost = d.Evidence("", 5.0, lost_peer=True)
    agent(d.ReplicaExited(0, 0, 1, 6.0, "Connection closed by peer", evidence=lost))
    ended = agent(d.ReplicaExited(0, 1, -9, 6.1, "SIGKILL"))
    assert cause(ended) == Failure(0, 1, "Connection closed by peer", 5.0, "", True)


def test_replicas_that_stopped_without_being_asked_take_the_others_along() -> None:
    agent = Agent().running()
    assert kinds(agent(d.ReplicaExited(0, 0, 143, 5.0))) == ["AskToStop"]
    assert agent(d.ReplicaExited(0, 1, 143, 5.0)) == [
        d.WriteEnded(EndedRecord("here", 0, Outcome.STOPPED, 143))
    ]


def test_an_idle_agent_returns_its_jobs_code() -> None:
    for state, code in ((JobState.DONE, 0), (JobState.STOPPED, 143), (JobState.FAILED, 1)):
        assert Agent()(d.StatusSeen(JobStatus("job", "run", state))) == [d.Exit(code, state.value)]
    failed = JobStatus("job", "run", JobState.FAILED, reason="it broke", exit_code=-9)
    assert Agent()(d.StatusSeen(failed)) == [d.Exit(137, "failed: it broke")]


def test_a_status_of_an_older_run_means_nothing() -> None:
    assert Agent()(d.StatusSeen(JobStatus("job", "older", JobState.DONE))) == []


def test_a_plan_of_another_run_or_agent_means_nothing() -> None:
    agent = Agent()
    assert agent(d.PlanSeen(plan(0, ("here", 1), run="older"))) == []
    other = plan(0, ("here", 1))
    placements = (replace(other.placements[0], agent="who was here before"),)
    assert agent(d.PlanSeen(replace(other, placements=placements))) == []


def test_a_claim_and_a_plan_that_is_written_again_mean_nothing() -> None:
    agent = Agent().running()
    assert agent(d.PlanSeen(replace(plan(0, ("here", 2)), fence=9))) == []
    assert agent(d.PlanSeen(replace(plan(-1), fence=9))) == []


def test_a_plan_that_was_overtaken_is_answered_for() -> None:
    agent = Agent()
    agent(d.PlanSeen(plan(1, ("there", 1), ("here", 1))))
    actions = agent(d.PlanSeen(plan(2, ("there", 1))))
    assert actions == [d.WriteEnded(EndedRecord("here", 1, Outcome.STOPPED, 143))]


def test_a_generation_that_was_never_heard_of_is_answered_for() -> None:
    agent = Agent()
    leaving = [Leaving("here", 1, "agent-1", 3), Leaving("here", 1, "an older agent", 2)]
    actions = agent(d.PlanSeen(plan(4, ("there", 1), leaving=leaving)))
    assert actions == [d.WriteEnded(EndedRecord("here", 3, Outcome.STOPPED, 143))]


def test_a_plan_without_replicas_is_waited_out() -> None:
    agent = Agent().running()
    assert kinds(agent(d.PlanSeen(plan(1)))) == ["AskToStop"]
    assert kinds(agent.exits(143, 143)) == ["WriteEnded"]
    assert agent(d.StatusSeen(JobStatus("job", "run", JobState.STOPPED, reason="asked"))) == [
        d.Exit(143, "stopped: asked")
    ]


def test_a_change_of_what_has_just_finished_is_not_run() -> None:
    agent = Agent().running()
    agent(d.PlanSeen(plan(1, ("here", 1), leaving=[Leaving("here", 2, "agent-1", 0)])))
    actions = agent.exits(0, 0)
    assert actions == [
        d.WriteEnded(EndedRecord("here", 0, Outcome.DONE)),
        d.WriteEnded(EndedRecord("here", 1, Outcome.DONE)),
    ]


def test_a_newcomer_is_not_ready_and_does_not_run_when_it_says_hello() -> None:
    agent = Agent()
    there = Leaving("there", 1, "agent-there", 0)
    agent(d.PlanSeen(plan(1, ("there", 1), ("here", 1), leaving=[there], transition=Transition.INPLACE)))
    assert kinds(agent(master(1))) == ["StartReplicas"]
    assert agent(said(0, HELLO, 1)) == [], "it has a long way to where the others are"
    assert agent(said(0, Ready(1))) == [d.WriteReady(1)]
    assert agent(said(0, Switched(1, None))) == [d.WriteRunning(1, library=True)]


def test_a_newcomer_that_said_hello_and_is_not_ready_in_time_is_late() -> None:
    agent = Agent()
    there = Leaving("there", 1, "agent-there", 0)
    agent(d.PlanSeen(plan(1, ("there", 1), ("here", 1), leaving=[there], transition=Transition.INPLACE)))
    agent(master(1))
    agent(said(0, HELLO, 1))
    assert agent.later(60.0) == [d.Kill((0,), "not ready in time")]
    assert agent.later(KILL_AGAIN_AFTER) == [d.Kill((0,), "it does not go")]


def test_a_leaving_node_is_taken_out_by_the_coordinator() -> None:
    agent = Agent().running()
    assert agent(d.Leave("SIGTERM", 99.0)) == [d.WriteDraining("SIGTERM", 99.0)]
    assert agent(d.Leave("again")) == []
    assert kinds(agent(d.PlanSeen(plan(1, ("there", 1))))) == ["AskToStop"]
    assert kinds(agent.exits(143, 143)) == ["WriteEnded", "Exit"]
    assert agent.state.exiting


def test_a_leaving_node_stops_by_itself_when_no_plan_comes() -> None:
    agent = Agent().running()
    agent(d.Leave("SIGTERM"))
    assert deadline(agent.state) == OWN_STOP_AFTER
    assert kinds(agent.later(OWN_STOP_AFTER)) == ["AskToStop"]


def test_a_leaving_node_waits_for_a_change_in_place_and_asks_to_be_woken_for_nothing_else() -> None:
    agent = Agent().running()
    agent(d.Leave("SIGTERM"))
    change = plan(1, ("there", 1), ("here", 1), transition=Transition.INPLACE)
    agent(d.PlanSeen(change))
    assert agent.later(2 * OWN_STOP_AFTER) == [], "it is not known yet where the change meets"
    assert deadline(agent.state) is None
    assert kinds(agent(master(1))) == ["TellPlan"]
    assert agent.later(2 * OWN_STOP_AFTER) == []
    assert deadline(agent.state) is None


@pytest.mark.parametrize(("others", "code"), [(True, 0), (False, 143)])
def test_drained_is_0_where_the_job_goes_on_and_143_where_it_can_not(others: bool, code: int) -> None:
    agent = Agent()
    if not others:
        agent(d.NodesSeen({"here": "agent-1"}))
    actions = agent(d.Leave("SIGTERM"))
    assert [a.code for a in actions if isinstance(a, d.Exit)] == [code]


def test_a_second_signal_does_not_wait() -> None:
    agent = Agent().running()
    agent(d.Leave("SIGINT"))
    assert kinds(agent(d.LeaveNow("SIGINT twice"))) == ["Kill", "Exit"]
    assert agent.later(1) == []


def test_an_agent_whose_name_was_taken_goes() -> None:
    agent = Agent().running()
    assert agent(d.NodesSeen({"there": "agent-there"})) == [], "a lease that ran out is taken anew"
    kill, leave = agent(d.NodesSeen({"here": "agent-2"}, "the agent at 10.0.0.2, process 7"))
    assert isinstance(kill, d.Kill)
    assert isinstance(leave, d.Exit)
    assert leave.code == 1
    assert "'here' was taken by the agent at 10.0.0.2, process 7" in leave.reason


def test_a_node_that_can_not_run_a_replica_says_why_and_goes() -> None:
    assert Agent()(d.Unfit("no port is free")) == [d.Exit(1, "no port is free")]


def test_an_agent_of_an_older_run_goes() -> None:
    agent = Agent().running()
    assert agent(d.SpecSeen("run")) == []
    actions = agent(d.SpecSeen("newer"))
    assert kinds(actions) == ["Kill", "Exit"]
    assert isinstance(actions[-1], d.Exit)
    assert actions[-1].code == 1


def test_a_job_that_has_ended_leaves_nothing_running() -> None:
    agent = Agent().running()
    assert kinds(agent(d.StatusSeen(JobStatus("job", "run", JobState.FAILED, exit_code=3)))) == ["Kill"]
    assert kinds(agent.exits(-9, -9)) == ["WriteEnded", "Exit"]


def test_a_store_that_never_comes_back_is_not_waited_for_for_ever() -> None:
    agent = Agent().running()
    agent(d.StoreAway())
    agent.later(1000)
    agent.exits(0, 0)
    assert deadline(agent.state) == agent.now + PATIENCE
    assert [a.code for a in agent.later(PATIENCE) if isinstance(a, d.Exit)] == [0]


def test_a_store_that_refuses_us_to_the_end_is_not_said_to_be_away() -> None:
    agent = Agent().running()
    agent(d.StoreAway())
    agent(d.StoreAway(refused=True))
    agent.exits(0, 0)
    (left,) = agent.later(PATIENCE)
    assert isinstance(left, d.Exit)
    assert "the store has refused us for 60 s" in left.reason


def test_a_store_that_comes_back_decides() -> None:
    agent = Agent().running()
    agent(d.StoreAway())
    agent.exits(0, 0)
    agent(d.StoreBack())
    assert agent.later(1000) == []


# Whatever comes, in whatever order ---------------------------------------------------------------

nodes = st.sampled_from(["here", "there", "elsewhere"])
generations = st.integers(0, 4)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    generation = draw(generations)
    names = draw(st.lists(nodes, unique=True, max_size=3))
    leaving = draw(st.lists(nodes, unique=True, max_size=2))
    made = plan(
        generation,
        *((name, draw(st.integers(1, 2))) for name in names),
        leaving=[Leaving(n, 1, "agent-1" if n == "here" else f"agent-{n}", generation - 1) for n in leaving],
        transition=draw(st.sampled_from([Transition.RESTART, Transition.ABORT])),
    )
    return made


events = st.one_of(
    st.builds(d.PlanSeen, plans()),
    st.builds(d.EndedSeen, generations, nodes, st.sampled_from(Outcome)),
    st.builds(master, generations),
    st.builds(said, st.just(0), st.just(HELLO), generations),
    st.builds(said, st.just(0), st.builds(StepFinished, st.integers(0, 99), st.just(0.0)), generations),
    st.builds(
        d.NodesSeen, st.sampled_from([{"here": "agent-1"}, {"here": "agent-1", "there": "agent-there"}])
    ),
    st.just(d.Leave("SIGTERM")),
    st.builds(lambda s: d.StatusSeen(JobStatus("job", "run", s)), st.sampled_from(JobState)),
    st.just(d.Tick()),
    st.just("the next replica exits"),
)


@given(st.lists(st.tuples(events, st.sampled_from([0, 0, 1, -9, 143])), max_size=60))
def test_every_generation_starts_once_in_order_and_is_answered_for(script: list[tuple[object, int]]) -> None:
    agent = Agent()
    started: list[int] = []
    ended: list[int] = []
    seen: list[int] = []
    for event, number in script:
        agent.now += 10.0
        held = agent.state.held
        if event == "the next replica exits":
            if held is None:
                continue
            event = d.ReplicaExited(held.generation, agent.alive[0].local_rank, number, agent.now)
        exiting = agent.state.exiting
        if isinstance(event, d.PlanSeen):
            seen.append(event.plan.generation)
        for action in agent(event):  # type: ignore[arg-type]
            assert not exiting, "it acts after its end"
            if isinstance(action, d.StartReplicas):
                assert agent.state.departure is None, "a leaving node starts nothing"
                assert set(started) <= set(ended), "two generations at once"
                assert all(
                    (gone.generation, gone.node) in agent.state.ended
                    or (agent.state.agents or {}).get(gone.node) != gone.agent
                    for gone in action.plan.leaving
                )
                started.append(action.plan.generation)
            if isinstance(action, d.WriteEnded):
                ended.append(action.record.generation)
                assert agent.state.held is None or agent.state.held.generation != ended[-1]
        if agent.state.exiting:
            break
    assert started == sorted(set(started)), "generations only grow"
    assert len(ended) == len(set(ended)), "each is answered for once"
    assert set(started) <= set(seen)
    if agent.state.held is None:
        assert set(started) <= set(ended)


# In place ----------------------------------------------------------------------------------------


def over(generation: int, *placements: tuple[str, int], leaving: Sequence[Leaving] = ()) -> Plan:
    return plan(generation, *placements, leaving=leaving, transition=Transition.INPLACE)


def change(agent: Agent, generation: int, *placements: tuple[str, int]) -> list[d.Action]:
    """Ask for a change in place; what is done about it."""
    actions = agent(d.PlanSeen(over(generation, *placements)))
    return actions + agent(master(generation))


def test_growing_in_place_starts_the_newcomers_beside_the_others() -> None:
    agent = Agent().running(count=1)
    new = over(1, ("here", 2))
    assert agent(d.PlanSeen(new)) == [d.OpenMaster(1)]
    found = master(1)
    assert agent(found) == [
        d.TellPlan(new, found.master),
        d.StartReplicas(new, found.master, (1,), join=True),
    ]
    assert agent(said(1, Ready(1))) == [d.WriteReady(1)]
    assert agent(said(0, Switched(1, None))) == []
    assert agent(said(1, Switched(1, None))) == [
        d.Adopt(new),
        d.WriteEnded(EndedRecord("here", 0, Outcome.STOPPED, 0)),
        d.WriteRunning(1, library=True),
    ]
    assert agent.state.held is not None
    assert [(r.local_rank, r.rank) for r in agent.state.held.replicas] == [(0, 0), (1, 1)]
    assert agent.later(1000) == []


def test_shrinking_in_place_waits_for_those_who_leave() -> None:
    agent = Agent().running(count=2)
    assert kinds(change(agent, 1, ("here", 1))) == ["OpenMaster", "TellPlan"]
    agent(said(0, Switched(1, None)))
    assert kinds(agent(d.ReplicaExited(0, 1, 0, 5.0))) == ["Adopt", "WriteEnded", "WriteRunning"]


def test_a_node_that_only_leaves_has_stopped_and_is_not_done() -> None:
    agent = Agent()
    agent(d.PlanSeen(plan(0, ("there", 1), ("here", 1))))
    agent(master(0))
    agent(said(0, HELLO, 0))
    assert kinds(change(agent, 1, ("there", 1))) == ["TellPlan"]
    assert agent(d.ReplicaExited(0, 0, 0, 5.0)) == [d.WriteEnded(EndedRecord("here", 0, Outcome.STOPPED, 0))]


@pytest.mark.parametrize(("switched", "outcome"), [(False, Outcome.DONE), (True, Outcome.STOPPED)])
def test_a_node_that_was_to_leave_is_done_if_its_script_was_at_its_end_first(
    switched: bool, outcome: Outcome
) -> None:
    agent = Agent()
    agent(d.PlanSeen(plan(0, ("there", 1), ("here", 1))))
    agent(master(0))
    agent(said(0, HELLO, 0))
    assert kinds(change(agent, 1, ("there", 1))) == ["TellPlan"]
    if switched:
        agent(said(0, Switched(1, None)))
    agent(said(0, Finished()))
    assert agent(d.ReplicaExited(0, 0, 0, 5.0)) == [d.WriteEnded(EndedRecord("here", 0, outcome, 0))]


def test_a_node_with_newcomers_only_does_not_wait_for_survivors_to_leave() -> None:
    agent = Agent()
    running = Leaving("there", 1, "agent-there", 0)
    agent(d.PlanSeen(over(1, ("there", 1), ("here", 1), leaving=[running])))
    actions = agent(master(1))
    assert kinds(actions) == ["StartReplicas"]
    assert isinstance(actions[0], d.StartReplicas)
    assert actions[0].join
    assert agent(said(0, Ready(1))) == [d.WriteReady(1)]
    assert agent(said(0, Switched(1, None))) == [d.WriteRunning(1, library=True)]


@pytest.mark.parametrize("base", [0, 1])
def test_the_next_change_of_a_node_whose_newcomers_are_just_about_to_switch(base: int) -> None:
    """What is planned on top of their generation waits for them: the others have said that it has begun."""
    agent = Agent()
    running = Leaving("there", 1, "agent-there", 0)
    agent(d.PlanSeen(over(1, ("there", 1), ("here", 1), leaving=[running])))
    agent(master(1))
    agent(said(0, Ready(1)))
    both = [Leaving("there", 1, "agent-there", 1), Leaving("here", 1, "agent-1", 1)]
    actions = agent(d.PlanSeen(replace(over(2, ("here", 1), leaving=both), base=base)))
    assert ("Kill" in kinds(actions)) == (base == 0)
    if base == 1:
        assert "WriteRunning" in kinds(agent(said(0, Switched(1, None))))
        assert "TellPlan" in kinds(agent(master(2)))


def test_a_survivor_whose_registration_is_missing_is_joined() -> None:
    """After an interruption of the store it registers again, and its replicas train meanwhile."""
    agent = Agent()
    running = Leaving("there", 1, "agent-there", 0)
    agent(d.NodesSeen({"here": "agent-1"}))
    agent(d.PlanSeen(over(1, ("there", 1), ("here", 1), leaving=[running])))
    actions = agent(master(1))
    assert isinstance(actions[0], d.StartReplicas)
    assert actions[0].join


@pytest.mark.parametrize("count", [0, 1], ids=["alone", "beside a survivor"])
def test_nothing_is_started_while_others_may_have_the_slots(count: int) -> None:
    """The agent stood still until its lease had run out."""
    agent = Agent()
    generation = 0
    if count:
        agent.running(count=count)
        generation = 1
    agent.state = replace(agent.state, lapsed=True)
    how = over(generation, ("here", 2)) if count else plan(generation, ("here", 2))
    assert agent(d.PlanSeen(how)) == agent(master(generation)) == []
    agent.state = replace(agent.state, lapsed=False)
    assert "StartReplicas" in kinds(agent(d.Tick()))


def test_where_nobody_survives_it_is_a_plain_start() -> None:
    agent = Agent()
    gone = Leaving("there", 1, "agent-there", 0)
    agent(d.EndedSeen(0, "there", Outcome.STOPPED))
    agent(d.PlanSeen(over(1, ("there", 1), ("here", 1), leaving=[gone])))
    actions = agent(master(1))
    assert kinds(actions) == ["StartReplicas", "WriteRunning"]
    assert isinstance(actions[0], d.StartReplicas)
    assert not actions[0].join


@pytest.mark.parametrize("code", [0, 1, -9, 76])
def test_a_newcomer_that_ends_costs_nothing(code: int) -> None:
    agent = Agent().running(count=1)
    change(agent, 1, ("here", 2))
    actions = agent(d.ReplicaExited(1, 1, code, 5.0, "why"))
    assert kinds(actions) == ["Withdraw", "WriteEnded"]
    assert isinstance(actions[1], d.WriteEnded)
    record = actions[1].record
    assert (record.generation, record.outcome, record.exit_code) == (1, Outcome.ABORTED, 0)
    assert record.failure is not None
    assert record.failure.rank == -1, "it is no replica's"
    assert agent.state.held is not None
    assert agent.state.held.generation == 0
    assert agent.later(1000) == []


def test_a_newcomer_that_is_late_costs_nothing() -> None:
    agent = Agent().running(count=1)
    change(agent, 1, ("here", 2))
    assert deadline(agent.state) == 60.0
    assert kinds(agent.later(60)) == ["Withdraw", "Kill", "WriteEnded"]
    assert agent(d.ReplicaExited(1, 1, -9, 5.0)) == []


def test_after_a_withdrawal_the_next_plan_is_carried_out_from_the_same_generation() -> None:
    agent = Agent().running(count=1)
    change(agent, 1, ("here", 2))
    assert kinds(change(agent, 2, ("here", 1))) == ["Withdraw", "Kill", "WriteEnded"]
    assert kinds(agent(d.ReplicaExited(1, 1, -9, 5.0))) == ["TellPlan"]
    actions = agent(said(0, Switched(2, None)))
    assert actions[1] == d.WriteEnded(EndedRecord("here", 0, Outcome.STOPPED, 0))


def test_a_survivor_that_dies_takes_the_newcomers_with_it() -> None:
    agent = Agent().running(count=1)
    change(agent, 1, ("here", 2))
    assert agent(d.ReplicaExited(0, 0, -9, 5.0, "SIGKILL")) == [d.Kill((1,), "replica 0 failed")]
    actions = agent(d.ReplicaExited(1, 1, -9, 5.0))
    outcomes = [(a.record.generation, a.record.outcome) for a in actions if isinstance(a, d.WriteEnded)]
    assert outcomes == [(0, Outcome.FAILED), (1, Outcome.ABORTED)]


def test_after_the_switch_a_death_is_the_new_generations() -> None:
    agent = Agent().running(count=1)
    change(agent, 1, ("here", 2))
    agent(said(1, Ready(1)))
    agent(said(0, Switched(1, None)))
    assert kinds(agent(d.ReplicaExited(1, 1, -9, 5.0, "SIGKILL"))) == ["Kill"]
    actions = agent(d.ReplicaExited(0, 0, -9, 5.0))
    outcomes = [(a.record.generation, a.record.outcome) for a in actions if isinstance(a, d.WriteEnded)]
    assert outcomes == [(0, Outcome.STOPPED), (1, Outcome.FAILED)]


def test_a_script_that_ends_meanwhile_is_done() -> None:
    agent = Agent().running(count=1)
    change(agent, 1, ("here", 2))
    actions = agent(d.ReplicaExited(0, 0, 0, 5.0))
    assert kinds(actions) == ["Withdraw", "Kill", "WriteEnded"]
    actions += agent(d.ReplicaExited(1, 1, -9, 5.0))
    outcomes = [(a.record.generation, a.record.outcome) for a in actions if isinstance(a, d.WriteEnded)]
    assert outcomes == [(1, Outcome.DONE), (0, Outcome.DONE)]


def test_a_script_without_the_library_is_restarted_instead() -> None:
    agent = Agent().running(count=1, library=False)
    assert kinds(agent(d.PlanSeen(over(1, ("here", 2))))) == ["AskToStop"]


def test_replicas_keep_their_slots_and_get_their_new_ranks() -> None:
    from adaptdl_elastic.agent.core.inplace_change import renumber

    numbers = renumber(plan(0, ("a", 2), ("b", 2)), plan(1, ("a", 1), ("c", 1), ("b", 3)))
    assert numbers.ranks == (0, None, 2, 3)
    assert numbers.newcomers == (1, 4)


def newcomers_of(held: d.LocalGeneration | None) -> tuple[d.Replica, ...]:
    return held.course.newcomers if held is not None and isinstance(held.course, d.Changing) else ()


in_place = st.one_of(
    events,
    st.builds(lambda p: d.PlanSeen(replace(p, transition=Transition.INPLACE)), plans()),
    st.builds(said, st.just(0), st.just(HELLO), generations),
    st.builds(said, st.integers(0, 1), st.builds(Ready, generations)),
    st.builds(said, st.integers(0, 1), st.builds(Switched, generations, st.none())),
    st.just("a newcomer exits"),
)


@given(st.lists(st.tuples(in_place, st.sampled_from([0, 0, 1, -9, 143])), max_size=60))
def test_with_changes_in_place_too_each_generation_is_answered_for_once(
    script: list[tuple[object, int]],
) -> None:
    agent = Agent()
    ended: list[int] = []
    for event, number in script:
        agent.now += 10.0
        held = agent.state.held
        if isinstance(event, str):
            pool = newcomers_of(held) if event == "a newcomer exits" else agent.alive
            one = next((r for r in pool if r.exit is None), None)
            if held is None or one is None:
                continue
            course, generation = held.course, held.generation
            if isinstance(course, d.Changing) and one in course.newcomers:
                generation = course.plan.generation
            elif one in held.orphans:
                generation = agent.state.acted
            event = d.ReplicaExited(generation, one.local_rank, number, agent.now)
        if isinstance(event, d.FromReplica) and isinstance(event.message, (Ready, Switched)):
            members = (*(held.replicas if held is not None else ()), *newcomers_of(held))
            if event.local_rank not in {r.local_rank for r in members}:
                continue
        for action in agent(event):  # type: ignore[arg-type]
            if isinstance(action, d.WriteEnded):
                ended.append(action.record.generation)
        if agent.state.exiting:
            break
    assert len(ended) == len(set(ended))
    held = agent.state.held
    assert held is None or held.generation not in ended, "what is held has not ended"


def test_an_agent_that_was_started_for_a_plan_leaves_with_its_last_replica() -> None:
    agent = Agent(on_demand=True).running()
    leaving = [Leaving("here", 2, "agent-1", 0)]
    assert kinds(agent(d.PlanSeen(plan(1, ("there", 1), leaving=leaving)))) == ["AskToStop"]
    assert kinds(agent.exits(143, 143)) == ["WriteEnded", "Exit"]
    assert agent.state.exiting


def test_an_agent_that_was_started_for_a_plan_stays_for_one_that_names_it_and_answers_one_that_did() -> None:
    agent = Agent(on_demand=True).running()
    assert "Exit" not in kinds(agent.exits(1, 1))
    late = Agent(on_demand=True)
    assert late(d.PlanSeen(plan(0, ("there", 1), ("here", 1)))) == []
    leaving = [Leaving("here", 1, "agent-1", 0)]
    assert kinds(late(d.PlanSeen(plan(1, ("there", 1), leaving=leaving)))) == ["WriteEnded", "Exit"]


def test_an_agent_that_a_person_has_started_waits_for_the_next_plan() -> None:
    assert Agent()(d.PlanSeen(plan(0, ("there", 1)))) == []
