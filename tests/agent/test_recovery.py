"""What an agent does when replicas die and the others live on: no processes, no store, no clock."""

from __future__ import annotations

import pytest
from agent_script import play

SURVIVED = {
    "the coordinator hears once that all replicas are resilient": """
        run 2; 1 resilient -> nothing
        0 resilient -> running 0 library resilient
        0 resilient -> nothing""",
    "a death kills no other replica": """
        run 2 resilient; 0 dies -> lost 0 0 -9 message=SIGKILL time=5
        -> broken 0 lost=0 failure=0 -9 message=SIGKILL time=5""",
    "without resilience of all the living a death is a failure": """
        run 3<|; 1 resilient|; 0 resilient>; 0 dies -> kill 1,2 replica 0 failed""",
    "an exception is a failure": "run 2 resilient; 0 exits 1 -> kill 1 replica 0 failed",
    "an error of a newcomer that has joined is a death to the others": """
        run 1 resilient; plan 1 here*2 inplace; master; 1 ready; <0 switched|0,1 switched; 1 step step=3>
        1 exits 1 "KeyError: 1" raised=5.9 "kind=KeyError at a.py:1"
        -> ...; broken 1 lost=1 ...; alive=0; held=1""",
    "an error of a newcomer on a node of its own is a death to the others": """
        plan 1 there*1 here*1 left=there:0 inplace; master; 0 ready; 0 switched; 0 resilient
        0 exits 1 "KeyError: 1" raised=5.9 "kind=KeyError at a.py:1"
        -> ...; broken 1 lost=0 ...; ended 1 failed exit_code=1 ...""",
    "an error of a newcomer is a failure where the others do not survive or it tells of a lost peer": """
        run 1<| resilient>; plan 1 here*2 inplace; master; 1 ready; 0,1 switched
        1 exits 1 "KeyError: 1" raised=5.9 lost_peer=<False|True> -> kill 0 replica 1 failed""",
    "an error of a newcomer is a failure after the next planned change": """
        run 1 resilient; plan 1 here*2 inplace; master; 1 ready; 0,1 switched
        plan 2 here*3 inplace; master; 2 ready; 0,1,2 switched
        1 exits 1 "KeyError: 1" raised=5.9 -> kill 0,2 replica 1 failed""",
    "a replica that was asked to stop may die of it": """
        run 2 resilient; plan 1 here*1
        0 dies -> kill 1 replica 0 failed""",
    "survivors go on under their new ranks": """
        run 3 resilient; 0 dies
        plan 1 here:1,2 recover -> open 1
        master -> tell 1
        2 switched -> nothing
        1 switched -> adopt 1; ended 0 stopped; running 1 library resilient; ranks=1:0,2:1""",
    "a later generation knows nothing of the dead before it": """
        run 3 resilient; 0 dies; plan 1 here:1,2 recover; master; 1,2 switched
        2 dies -> lost 1 ...; broken 1 lost=2 ...""",
    "a second death is added to the first": """
        run 3 resilient; 1 dies
        0 dies -> lost 0 0 ...; broken 0 lost=0,1 ...""",
    "what the living report is passed on once": """
        run 2 resilient; 1 peer_lost -> broken 0
        0 peer_lost -> nothing
        0 dies -> lost 0 0 ...; broken 0 lost=0 ...""",
    "a report of the generation that is being left does not count": """
        run 2 resilient; plan 1 here*2 there*1 recover; master -> open 1; tell 1
        0 peer_lost -> nothing""",
    "a death during the recovery is one of the new generation": """
        run 3 resilient; 0 dies; plan 1 here:1,2 recover; master
        1 dies -> lost 1 1 ...; broken 1 lost=1 ...
        plan 2 here:2 recover; master -> open 2; tell 2; ended 1 stopped exit_code=143
        2 switched -> adopt 2; ended 0 stopped; running 2 library resilient""",
    "a plan that counts on a dead replica is answered": """
        run 3 resilient; 0,1 dies; plan 1 here:1,2 recover
        master -> tell 1; broken 1 lost=1 ...""",
    "a plan that counts on a node whose replicas are all dead is answered": """
        run 1 resilient; 0 dies -> broken 0 lost=0 ...; ended 0 failed...
        plan 1 here*1 there*1 recover -> broken 1 lost=0; ended 1 aborted exit_code=143""",
    # the plan was made while the store was away from this node
    "a plan that counts on a node whose script has ended is answered with that": """
        run 1 resilient; 0 exits 0 -> ended 0 done
        plan 1 here*1 recover -> ended 1 done""",
    "the last death is a failure, and no replica is said to go on": """
        run 2 resilient; 0 dies
        1 dies -> broken 0 lost=0,1 ...
        -> ended 0 failed exit_code=-9 failure=0 -9 message=SIGKILL time=5""",
    "replicas that a recovery does not name are told and leave": """
        run 2 resilient; plan 1 there*1 recover; master -> tell 1
        0,1 exits 0 -> ended 0 stopped""",
    "a replica that cannot go on fails the new generation": """
        run 2 resilient; 0 dies; plan 1 here:1 recover; master
        1 exits 1 LBFGS time=6.0
        -> ended 0 stopped; ended 1 failed exit_code=1 failure=1 1 message=LBFGS time=6""",
    "replicas that cannot go on are killed and their slots reported": """
        run 2; plan 1 here*2 there*1 recover -> kill 0,1 generation 1 goes on without the dead...
        0,1 exits -9 -> ended 0 aborted...; broken 1 lost=0,1; ended 1 aborted...""",
    "what replicas survive is said as the first of them says it": """
        run 2; 1 resilient groups=((0,2),) -> nothing
        0 resilient groups=((0,1),(2,)) -> running 0 library resilient 0,1 2
        1 dies -> lost 0 1 ...; broken 0 lost=1 ...""",
    "groups are said again after a recovery": """
        run 3; 0,1,2 resilient groups=((0,1),); 0 dies; plan 1 here:1,2 recover; master -> ...; tell 1
        2 switched; 2 resilient generation=1 groups=((1,),) -> ...
        1 switched -> adopt 1; ended 0 stopped; running 1 library
        1 resilient generation=1 groups=((0,),) -> running 1 library resilient 0""",
    "a death while the others meet is survived by what was said before": """
        run 3; 0,1,2 resilient groups=((0,1,2),); 0 dies; plan 1 here:1,2 recover; master
        2 switched; 2 resilient generation=1 groups=((0,1),); 1 dies -> ...; broken 1 lost=1 ...
        plan 2 here:2 recover; master -> ...; tell 2; ended 1 stopped exit_code=143""",
    "groups of the generation before say nothing after a change": """
        run 1; 0 resilient groups=((0,),); plan 1 here*2 inplace; master; 1 ready; 0,1 switched
        -> ...; running 1 library
        <0 dies|1 resilient generation=1 groups=((0,),)> -> <kill 1 replica 0 failed|nothing>""",
    "groups of the generation before are not those of a replica that loses a peer": """
        run 1; 0 resilient groups=((0,),); plan 1 here*1 there*1 inplace; master
        0 peer_lost generation=1 -> adopt 1; ended 0 stopped; running 1 library; broken 1
        plan 2 here:0 recover -> kill 0 ...""",
    "an abort ends the waiting": """
        run 2 resilient; 0 dies
        plan 1 here*2 abort -> kill 1 generation 1 begins anew: why""",
}

# two replicas are about to be three
GROWING = "run 2 resilient; plan 1 here*3 inplace; master; 2 ready"

DURING_A_CHANGE = {
    "before any replica has switched a death withdraws the change": f"""
        {GROWING}
        0 dies -> lost 0 0 ...; broken 0 lost=0 ...
        -> withdraw 1 a replica was lost; kill 2 a replica was lost; ended 1 aborted...
        plan 2 here:1 recover; master -> open 2; tell 2
        2 exits -9; 1 switched -> adopt 2; ended 0 stopped; running 2 library resilient""",
    "a leaver that dies after another has left is lost to the generation that they leave": """
        run 2 resilient; plan 1 there*2 inplace; master; 0 switched
        1 dies -> lost 0 1 ...; broken 0 lost=1 ...
        0 exits 0 -> ended 0 ...""",
    "a death elsewhere withdraws the change": f"""
        {GROWING}
        0 peer_lost -> broken 0; withdraw 1 a replica was lost; kill 2 ...; ended 1 aborted...""",
    "a recovery overtakes a change that no replica has made": f"""
        {GROWING}
        plan 2 here*2 there*1 recover; master
        -> withdraw 1 why; kill 2 why; ended 1 aborted...; open 2; tell 2; acted=1""",
    "after a replica has switched a death is one of the new generation": f"""
        {GROWING}; 1 switched
        0 dies -> adopt 1; kill 2 ...
        -> lost 1 0 ...; ended 0 stopped; running 1 library resilient; broken 1 lost=0,2 ...
        2 exits -9; plan 2 here:1 recover; master -> open 2; tell 2""",
    "a newcomer that was killed during the switch holds nothing up": f"""
        {GROWING}; 1 switched; 0 dies<; 2 exits -9|>; plan 2 here:1 recover; master; 1 switched<|; 2 exits -9>
        plan 3 here:1,2 inplace; master -> open 3; tell 3; start 3 2 join""",
    "a newcomer that was killed during the switch keeps its slot until it has exited": f"""
        {GROWING}; 1 switched; 0 dies; plan 2 here:1 recover; master; 1 switched
        plan 3 here:1,2 inplace; master -> nothing
        2 exits -9 -> tell 3; start 3 2 join""",
    "a newcomer that dies during the switch is one of the dead": f"""
        {GROWING}; 1 switched
        2 dies -> adopt 1; kill 2 ...
        -> lost 1 2 ...; ended 0 stopped; running 1 library resilient; broken 1 lost=2 ...
        later 0 -> held=1; ranks=0:0,1:1""",
    "survivors that miss a peer of the new generation are in it": f"""
        {GROWING}
        0 peer_lost generation=1 -> adopt 1; kill 2 ...
        -> ended 0 stopped; running 1 library resilient; broken 1 lost=2 ...""",
    "replicas that lose a peer while they switch go on though they are not resilient": """
        run 1; plan 1 here*1 there*1 inplace; master; 0 peer_lost generation=1
        plan 2 here:0 recover; master -> open 2; tell 2""",
    "a leaver that dies on its way out is no loss": """
        run 3 resilient; plan 1 here*2 inplace; master; 0,1 switched
        2 dies -> adopt 1; ended 0 stopped; running 1 library resilient
        later 1 -> nothing; ranks=0:0,1:1; alive=0,1""",
    "a replacement takes the free slot and ranks after the survivors": """
        run 2 resilient; 0 dies; plan 1 here:1 recover; master; 1 switched
        plan 2 here:1,0 inplace; master -> open 2; tell 2; start 2 0 join
        0 ready; 0,1 switched -> ready 2; adopt 2; ended 1 stopped; running 2 ...; ranks=1:0,0:1""",
    "a node that leaves gives the coordinator time after each change": """
        run 2 resilient; leave notice; plan 1 here*2 there*1 inplace; master; later 5; 0 switched
        1 switched -> adopt 1; ended 0 stopped; running 1 library resilient
        later 4 -> nothing
        later 1 -> stop 0,1 - notice""",
}

# all epochs are behind its replicas
OVER = "run 2 resilient; 0,1 epochs_finished"
# replicas on two nodes
APART = """plan 0 here*1 there*1; master; 0 hello; 0 resilient; 0 epochs_finished
        plan 1 here*1 recover"""

AT_THE_END = {
    "what a replica that dies after the last epoch had still to do is not done": f"""
        {OVER} -> nothing
        <0|1> dies -> lost 0 <0|1> ...; broken 0 lost=<0|1> ...
        <1|0> exits 0 -> ended 0 failed...""",
    "a replica that dies after the others have ended is a failure": f"""
        {OVER}; 0 exits 0 -> nothing
        1 dies -> broken 0 lost=1 ...; ended 0 failed...""",
    "a replica that ends well while the others train is a failure with a reason": """
        run 2 resilient; <1 exits 0; 0 peer_lost|0 peer_lost; 1 exits 0>
        -> <|broken 0;> kill 0 replica 1 failed
        0 exits -9 -> ended 0 failed failure=1 0 message=exit code 0 in the middle of training...""",
    "epochs that begin after the last one are like the others": f"""
        {OVER}; 1 epochs_finished finished=False
        1 dies -> lost 0 1 ...; broken 0 lost=1 ...""",
    "a newcomer that dies after the last epoch is reported": """
        run 1 resilient; plan 1 here*2 inplace; master
        1 ready; 1 resilient; 1 switched; 1 epochs_finished
        0 switched -> adopt 1; ended 0 stopped; running 1 library resilient
        0 epochs_finished; 1 dies -> lost 1 1 ...; broken 1 lost=1 ...""",
    "the loss of a node after the last epoch disturbs no other": f"""
        {APART}
        master -> tell 1; adopt 1; ended 0 stopped; running 1 library resilient
        0 exits 0 -> ended 1 done""",
    "after the loss of rank 0 behind the last epoch the others must still switch": f"""
        {APART.replace("here*1 there*1", "there*1 here*1")}
        master -> tell 1""",
}

SCENARIOS = {**SURVIVED, **DURING_A_CHANGE, **AT_THE_END}


@pytest.mark.parametrize("script", SCENARIOS.values(), ids=SCENARIOS)
def test_replicas_survive_a_death_as_in_the_scenario(script: str) -> None:
    play(script)
