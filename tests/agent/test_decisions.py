"""What an agent does about what it is told: no processes, no store, no clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agent_script import HELLO, Agent, agent_of, master, plan, play, said
from hypothesis import given
from hypothesis import strategies as st

from adaptdl_elastic.agent.core import states as d
from adaptdl_elastic.agent.core.inplace_change import renumber
from adaptdl_elastic.protocol.messages import Ready, StepFinished, Switched
from adaptdl_elastic.rendezvous.schema.held import Held, Left, LeftEnd
from adaptdl_elastic.rendezvous.schema.records import JobState, JobStatus, Outcome, Plan, Transition

STARTS = {
    "rank 0 opens the store of a generation and then starts": """
        plan 0 here*2 there*1 -> open 0
        later 0 -> nothing
        master -> start 0 0,1; running 0""",
    "the others wait for the store": """
        plan 0 there*1 here*1 -> nothing
        master -> start 0 0; running 0""",
    "the store of another generation does not count": "master 0; plan 1 there*1 here*1 -> nothing",
    "a generation waits for those who leave the one before": """
        plan 1 here*1 left=there:0 -> nothing
        ended 0 there stopped -> open 1""",
    "a node that has vanished is not waited for": """
        plan 1 here*1 left=there:0 -> nothing
        nodes here=agent-1 there=other -> open 1""",
    "no node has vanished before the registrations were read": """
        knows agents=None; plan 1 here*1 left=there:0 -> nothing
        nodes here=agent-1 there=agent-there -> nothing""",
    "a planned change saves, ends and starts again": """
        run 2; plan 1 here*1 left=here:0 -> stop 0,1 - why
        later 1 -> nothing
        0,1 exits 143 -> ended 0 stopped exit_code=143; open 1""",
    "a script that ended before a plan that was replaced is not started again": """
        ended 0 there done; left third agent-third 1
        plan 2 here*1 left=there:0,third:1 -> ended 2 done""",
    "a script that failed or was killed in between is started again": """
        ended 0 there done; ended 1 third <failed|aborted>; plan 2 here*1 left=there:0,third:1 -> open 2""",
    "a plan of another run or of another agent is not carried out": """
        plan 0 here*1 run=older -> nothing
        plan 0 predecessor@here*1 -> nothing""",
    "a plan that is written again with another fence changes nothing": """
        run 2; plan 0 here*2 fence=9 -> nothing
        plan -1 fence=9 -> nothing""",
    "a plan that was overtaken is answered for": """
        plan 1 there*1 here*1; plan 2 there*1 -> ended 1 stopped exit_code=143""",
    "a generation whose plan was never seen is answered for": """
        plan 4 there*1 left=here:3,older@here:2 -> ended 3 stopped exit_code=143""",
    "a plan without replicas is waited out": """
        run 2; plan 1 -> stop 0,1 - why
        0,1 exits 143 -> ended 0 stopped exit_code=143
        status stopped reason=asked -> exit 143 stopped: asked""",
    "a change of a script that has just finished is not run": """
        run 2; plan 1 here*1 left=here:0
        0,1 exits 0 -> ended 0 done; ended 1 done""",
    "nothing is started while others may have the slots": """
        <|run 1; >knows lapsed=True; plan <0 here*2|1 here*2 inplace>; master -> nothing
        knows lapsed=False; later 0 -> <start 0 0,1; running 0|tell 1; start 1 1 join>""",
    "all replicas of a node have said hello before it can change them in place": """
        run 2 plain; 1 hello -> nothing
        0 hello -> running 0 library""",
}

STOPS = {
    "a script without the library is stopped by a signal": """
        run 2 plain; plan 1 here*1 -> stop - 0,1 why
        0 exits -15; 1 exits 1 -> ended 0 stopped exit_code=143; open 1""",
    "a script that exits with 0 after our signal is stopped and not done": """
        run 2 plain; plan 1 here*1 left=here:0
        0 exits <0|0|0|130|-15>; 1 exits <0|143|1|0|0> -> ended 0 stopped exit_code=143; open 1""",
    "a script that ends before our signal arrives is done": """
        run 1 plain; plan 1 here*1 left=here:0
        0 exits 0 arrived=False -> ended 0 done; ended 1 done""",
    "a script that fails before our signal arrives has failed": """
        run 1 plain; plan 1 here*1 left=here:0
        0 exits 3 arrived=False -> ended 0 failed exit_code=3 failure=0 3 message=why time=5; ...""",
    "replicas that were at their end when the signal came have ended by themselves": """
        run 2 plain; 0 finished; plan 1 here*1 left=here:0; 0 exits 0
        1 <finished; 1 exits 0|exits 143>
        -> <ended 0 done; ended 1 done|ended 0 stopped exit_code=143; open 1>""",
    "a script that makes another exit code of a stop has been stopped": """
        run 2; plan 1 here*1 left=here:0; 0,1 stopping
        0,1 exits <0|1|130|-9> -> ended 0 stopped exit_code=143; open 1""",
    "a replica that was stopped from outside takes the others along": """
        run 2; 0 <stopping; 0 exits 0|exits 143> -> stop 1 - another replica stopped
        1 <stopping; 1 exits 0|exits 143> -> ended 0 stopped exit_code=143""",
    "a replica that says hello after the signal has not failed": """
        run 1 plain; plan 1 here*1; 0 hello
        0 exits -15 -> ended 0 stopped exit_code=143; open 1""",
    "replicas that do not stop in time are killed and killed again": """
        run 2; plan 1 here*1 -> due=120
        later 119 -> nothing
        later 1 -> kill 0,1 no checkpoint within 120 s
        later 5 -> kill 0,1 it does not go
        0,1 exits -9 -> ended 0 aborted exit_code=-9 unsaved=no checkpoint within 120 s; open 1""",
    "a stop that could not save says why": """
        run 2; nodes here=agent-1; leave SIGTERM
        later 5 -> stop 0,1 - SIGTERM
        0 stopping "unsaved=No space left on device"; 1 stopping; 0,1 exits 143
        -> ended 0 stopped exit_code=143 unsaved=No space left on device
        -> exit 143 stopped: SIGTERM; its state is not saved: No space left on device; exiting=True""",
    "an abort kills at once": "run 2; plan 1 there*1 abort -> kill 0,1 generation 1 ...: why",
}

FAILURES = {
    "the first failure is the cause and takes the other replicas with it": """
        run 2; 1 exits -9 SIGKILL -> kill 0 replica 1 failed
        0 exits 1 "Connection reset by peer" time=6.0
        -> ended 0 failed exit_code=-9 failure=1 -9 message=SIGKILL time=5""",
    "the replica that raised its error first is the cause though it exits last": """
        run 2; 0 exits 1 "KeyError: 1" time=6.0 raised=5.9 "kind=KeyError at a.py:1"
        1 exits -9 "SystemExit: 3" time=7.0 raised=5.5 "kind=SystemExit at a.py:7" exit_code=3
        -> ended 0 failed exit_code=3 failure=1 3 message=SystemExit: 3 time=5.5 kind=SystemExit at a.py:7""",
    "an error that tells of a lost peer is not the cause where there is another": """
        run 3; 0 exits 1 "Connection closed by peer" time=6.0 raised=5.0 lost_peer=True
        1 exits -9 SIGKILL time=6.1 arrived=False
        2 exits -9 SIGKILL time=6.2 -> ended 0 failed exit_code=-9 failure=1 -9 message=SIGKILL time=6.1""",
    "an error that tells of a lost peer is the cause where there is no other": """
        run 2; 0 exits 1 "Connection closed by peer" time=6.0 raised=5.0 lost_peer=True
        1 exits -9 SIGKILL time=6.1
        -> ended 0 failed exit_code=1 failure=0 1 message=Connection closed by peer time=5 lost_peer""",
}

ENDS = {
    "an agent without replicas returns its job's exit code": """
        status <done|stopped|failed|failed "reason=it broke" exit_code=-9>
        -> exit <0 done|143 stopped|1 failed|137 failed: it broke>""",
    "a status of an older run means nothing": "status done run=older -> nothing",
    "a job that has ended leaves nothing running": """
        run 2; status failed exit_code=3 -> kill 0,1 the job has failed...
        0,1 exits -9 -> ended 0 aborted exit_code=-9; exit 3 failed""",
    "a node that leaves is taken out by the coordinator": """
        run 2; leave SIGTERM 99.0 -> draining SIGTERM 99
        leave again -> nothing
        plan 1 there*1 -> stop 0,1 - why
        0,1 exits 143 -> ended 0 stopped exit_code=143; exit 0 drained: SIGTERM; exiting=True""",
    "a node that leaves stops by itself when no plan comes": """
        run 2; leave SIGTERM -> due=5
        later 5 -> stop 0,1 - SIGTERM""",
    "a node that leaves waits for a change in place and asks to be woken for nothing else": """
        run 2; leave SIGTERM; plan 1 there*1 here*1 inplace
        later 10 -> nothing; due=-
        master -> tell 1
        later 10 -> nothing; due=-""",
    "a drained node exits with 0 where the job goes on and with 143 where it cannot": """
        <|nodes here=agent-1; >leave SIGTERM -> draining SIGTERM -; exit <0 drained|143 stopped>: SIGTERM""",
    "a second signal does not wait": """
        run 2; leave SIGINT
        leave_now "SIGINT twice" -> kill 0,1 SIGINT twice; exit 143 SIGINT twice
        later 1 -> nothing""",
    "an agent whose name was taken exits, and one whose lease ran out does not": """
        run 2; nodes there=agent-there -> nothing
        nodes here=agent-2 "holder=the agent at 10.0.0.2, process 7" -> kill 0,1 ...
        -> exit 1 ...'here' was taken by the agent at 10.0.0.2, process 7...""",
    "a node that cannot run a replica says why and exits": """
        unfit "no port is free" -> exit 1 no port is free""",
    "an agent of an older run exits": """
        run 2; spec run -> nothing
        spec newer -> kill 0,1 ...; exit 1 ...""",
    "a store that never comes back is not waited for for ever": """
        run 2; store_away; later 1000; 0,1 exits 0 -> due=1060
        later 60 -> exit 0 done here; the store has been away for 60 s...""",
    "a store that refuses the agent to the end is not said to be away": """
        run 2; store_away; store_away True; 0,1 exits 0
        later 60 -> exit 0 done here; the store has refused us for 60 s...""",
    "a store that comes back decides": """
        run 2; store_away; 0,1 exits 0; store_back
        later 1000 -> nothing""",
    "an agent that was started for a plan leaves with its last replica": """
        me on_demand=True; run 2; plan 1 there*1 left=here:0 -> stop 0,1 - why
        0,1 exits 143
        -> ended 0 stopped exit_code=143; exit 0 generation 1 has no replica on this node; exiting=True""",
    "an agent that was started for a plan stays for one that names it": """
        me on_demand=True; run 2
        0,1 exits 1 -> kill 1 ...; ended 0 failed...""",
    "an agent that was started for a plan answers it before it leaves": """
        me on_demand=True; plan 0 there*1 here*1 -> nothing
        plan 1 there*1 left=here:0 -> ended 0 stopped exit_code=143; exit 0 ...""",
    "an agent that a person has started waits for the next plan": "plan 0 there*1 -> nothing",
}

IN_PLACE = {
    "growing in place starts the newcomers beside the others": """
        run 1; plan 1 here*2 inplace -> open 1
        master -> tell 1; start 1 1 join
        1 ready -> ready 1
        0 switched -> nothing
        1 switched -> adopt 1; ended 0 stopped; running 1 library; ranks=0:0,1:1
        later 1000 -> nothing""",
    "shrinking in place waits for those who leave": """
        run 2; plan 1 here*1 inplace; master -> open 1; tell 1
        0 switched; 1 exits 0 -> adopt 1; ended 0 stopped; running 1 library""",
    "a node that only leaves has stopped and is not done": """
        plan 0 there*1 here*1; master; 0 hello
        plan 1 there*1 inplace; master -> tell 1
        0 exits 0 -> ended 0 stopped""",
    "a node that was to leave is done if its script was at its end first": """
        plan 0 there*1 here*1; master; 0 hello
        plan 1 there*1 inplace; master; <|0 switched; >0 finished
        0 exits 0 -> ended 0 <done|stopped>""",
    "a newcomer to another node's replicas is not ready and does not run when it says hello": """
        plan 1 there*1 here*1 left=there:0 inplace; master -> start 1 0 join
        0 hello -> nothing
        0 ready -> ready 1
        0 switched -> running 1 library""",
    "a newcomer that said hello and is not ready in time is killed": """
        plan 1 there*1 here*1 left=there:0 inplace; master; 0 hello
        later 60 -> kill 0 not ready in time
        later 5 -> kill 0 it does not go""",
    "the next change waits for newcomers that are about to switch if it is based on them": """
        plan 1 there*1 here*1 left=there:0 inplace; master; 0 ready
        plan 2 here*1 left=there:1,here:1 inplace base=1 -> nothing
        0 switched generation=1 -> running 1 library; open 2
        master -> tell 2""",
    "a change that is based on an older generation does not wait for newcomers": """
        plan 1 there*1 here*1 left=there:0 inplace; master; 0 ready
        plan 2 here*1 left=there:1,here:1 inplace base=0 -> kill 0 another plan""",
    # after an interruption of the store its agent registers again, and its replicas train meanwhile
    "a survivor whose registration is missing is joined": """
        nodes here=agent-1; plan 1 there*1 here*1 left=there:0 inplace; master -> start 1 0 join""",
    "where no replica survives a change in place is a plain start": """
        ended 0 there stopped; plan 1 there*1 here*1 left=there:0 inplace; master -> start 1 0; running 1""",
    "a newcomer that ends costs nothing": """
        run 1; plan 1 here*2 inplace; master
        1 exits <0|1|-9|76> -> withdraw 1 newcomer 1: why; ended 1 aborted failure=-1 <0|1|-9|76> ...; held=0
        later 1000 -> nothing""",
    "a newcomer that is late costs nothing": """
        run 1; plan 1 here*2 inplace; master -> due=60
        later 60 -> withdraw 1 newcomers not ready within 60 s; kill 1 newcomers...; ended 1 aborted ...
        1 exits -9 -> nothing""",
    "after a withdrawal the next plan is carried out from the same generation": """
        run 1; plan 1 here*2 inplace; master
        plan 2 here*1 inplace; master -> withdraw 1 why; kill 1 why; ended 1 aborted ...
        1 exits -9 -> tell 2
        0 switched -> adopt 2; ended 0 stopped; running 2 library""",
    "a survivor that dies takes the newcomers with it": """
        run 1; plan 1 here*2 inplace; master
        0 dies -> kill 1 replica 0 failed
        1 exits -9 -> ended 0 failed exit_code=-9 ...; ended 1 aborted...""",
    "a death after the switch is one of the new generation": """
        run 1; plan 1 here*2 inplace; master; 1 ready; 0 switched
        1 dies -> kill 0 replica 1 failed
        0 exits -9 -> ended 0 stopped; ended 1 failed exit_code=-9 ...""",
    "a script that ends during a change is done": """
        run 1; plan 1 here*2 inplace; master
        0 exits 0 -> withdraw 1 the script came to its end; kill 1 ...; ended 1 done
        1 exits -9 -> ended 0 done""",
    "a script without the library is restarted instead": "run 1 plain; plan 1 here*2 inplace -> stop - 0 why",
}

SCENARIOS = {**STARTS, **STOPS, **FAILURES, **ENDS, **IN_PLACE}


@pytest.mark.parametrize("script", SCENARIOS.values(), ids=SCENARIOS)
def test_an_agent_decides_as_in_the_scenario(script: str) -> None:
    play(script)


def test_replicas_keep_their_slots_and_get_their_new_ranks() -> None:
    numbers = renumber(plan(0, "a*2", "b*2"), plan(1, "a*1", "c*1", "b*3"))
    assert (numbers.ranks, numbers.newcomers) == ((0, None, 2, 3), (1, 4))
    numbers = renumber(plan(1, "a:1,2", "b:3,0"), plan(2, "b:0,1", "a:2,0"))
    assert (numbers.ranks, numbers.newcomers) == ((None, 2, None, 0), (1, 3))


# Whatever comes, in whatever order ---------------------------------------------------------------

nodes = st.sampled_from(["here", "there", "elsewhere"])
generations = st.integers(0, 4)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    generation = draw(generations)
    names = draw(st.lists(nodes, unique=True, max_size=3))
    leaving = draw(st.lists(nodes, unique=True, max_size=2))
    return plan(
        generation,
        *(f"{name}*{draw(st.integers(1, 2))}" for name in names),
        draw(st.sampled_from(["restart", "abort"])),
        left=",".join(f"{name}:{generation - 1}" for name in leaving),
    )


events = st.one_of(
    st.builds(d.PlanSeen, plans()),
    st.builds(
        lambda g, node, how: d.LeftSeen(Left(node, agent_of(node), ends=(LeftEnd(g, how),))),
        *(generations, nodes, st.sampled_from(Outcome)),
    ),
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


in_place = st.one_of(
    events,
    st.builds(lambda p: d.PlanSeen(replace(p, transition=Transition.INPLACE)), plans()),
    st.builds(said, st.integers(0, 1), st.builds(Ready, generations)),
    st.builds(said, st.integers(0, 1), st.builds(Switched, generations, st.none())),
    st.just("a newcomer exits"),
)


def possible(agent: Agent, event: d.Event | str, code: int) -> d.Event | None:
    """Return the event if it can happen now. In place of a text: the end of a replica."""
    held = agent.state.held
    change = held.course if held is not None and isinstance(held.course, d.Changing) else None
    newcomers = () if change is None else change.newcomers
    members = (*(() if held is None else held.replicas), *newcomers)
    if isinstance(event, d.FromReplica) and isinstance(event.message, Ready | Switched):
        return event if event.local_rank in {r.local_rank for r in members} else None
    if not isinstance(event, str):
        return event
    pool = newcomers if event == "a newcomer exits" else agent.alive
    one = next((r for r in pool if r.exit is None), None)
    if held is None or one is None:
        return None
    generation = agent.state.acted if one in held.orphans else held.generation
    if change is not None and one in newcomers:
        generation = change.plan.generation
    return d.ReplicaExited(generation, one.local_rank, code, agent.now)


@pytest.mark.parametrize("kind", [events, in_place], ids=["restarts", "changes in place"])
@given(data=st.data())
def test_every_generation_starts_once_in_order_and_is_answered_for(
    kind: st.SearchStrategy[d.Event | str], data: st.DataObject
) -> None:
    agent, started, ended, seen, told = Agent(), list[int](), list[int](), list[int](), Held("here")
    for drawn, code in data.draw(st.lists(st.tuples(kind, st.sampled_from([0, 0, 1, -9, 143])), max_size=60)):
        agent.now += 10.0
        event = possible(agent, drawn, code)
        if isinstance(event, d.PlanSeen):
            seen.append(event.plan.generation)
        for action in agent(event) if event is not None else ():
            if isinstance(action, d.StartReplicas):
                if not action.join:
                    assert agent.state.departure is None, "a leaving node starts nothing"
                    assert set(started) <= set(ended), "two generations at once"
                    for gone in action.plan.leaving:
                        said_so = agent.state.left.get(gone.node)
                        left = said_so is not None and said_so.has_left(gone.generation, gone.agent)
                        away = (agent.state.agents or {}).get(gone.node) != gone.agent
                        assert left or away or gone.node == "here"
                started.append(action.plan.generation)
            if isinstance(action, d.WriteHeld):
                ended += [end.generation for end in action.held.ends if end not in told.ends]
                told = action.held
        held = agent.state.held
        assert held is None or held.generation not in ended, "what is held has not ended"
        if agent.state.exiting:
            break
    assert started == sorted(set(started)), "generations only grow"
    assert len(ended) == len(set(ended)), "each is answered for once"
    assert set(started) <= set(seen)
    if agent.state.held is None:
        assert set(started) <= set(ended)
