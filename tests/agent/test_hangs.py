"""Which replica hangs: no processes, no clock."""

from __future__ import annotations

import pytest
from agent_script import play

WHY = "does not answer for 30 s: it hangs, or is stopped (--hang-timeout)"
# two replicas that have taken a step
RESILIENT = "me hang_timeout=30.0; run 2 resilient; 0,1 step"
# replica 2 joins the two, and has taken no step yet
GROWS = "plan 1 here*3 inplace; master; 2 hello; 2 ready"

SCENARIOS = {
    "a silent replica is asked and only one that does not answer is killed": f"""
        {RESILIENT} -> due=15
        later 15 -> ping 0,1
        0 pong -> due=30
        later 15 -> say replica 1 {WHY}; kill 1 {WHY}; ping 0
        1 exits -9 "SIGKILL: killed from outside" -> lost 0 1 -9 message={WHY} time=5; broken 0 lost=1 ...""",
    # until the first step it loads data, and compiles
    "without resilience a hang is a failure with its reason": f"""
        me hang_timeout=30.0; run 2; later 1000; 0,1 step
        later 15; 0 pong; later 15; 1 exits -9 SIGKILL -> ping 0,1; say ...; kill 1 ...; ping 0; kill 0 ...
        0 exits -9 -> ended 0 failed exit_code=-9 failure=1 -9 message={WHY} time=5""",
    "steps are signs of life": f"""
        {RESILIENT}; later 14; 0,1 step; later 14; 0,1 step; later 14; 0,1 step; later 14 -> nothing""",
    "an agent that was stopped itself asks first": f"{RESILIENT}; later 10_000 -> ping 0,1",
    "a replica may be silent for half a minute unless another limit is given": """
        me hang_timeout=<None|10.0>; run 2 resilient; 0,1 step -> due=<30|5>""",
    "no replica is asked where the watch is switched off": """
        run 2 resilient; 0,1 step -> nothing; due=-
        later 10_000 -> nothing""",
    "a script without the library is not asked": "me hang_timeout=None; run 2 plain; later 10_000 -> nothing",
    "when all answer but take no step all are killed after a moment": f"""
        {RESILIENT}; later 15; 0,1 pong; later 15; 0,1 pong -> ping 0,1; ping 0,1
        later 5 -> say replica 0: no step for 35 s after step 7...; kill 0,1 replica 0 failed
        0,1 exits -9 -> ended 0 failed exit_code=-9 failure=0 -9 message=no step for 35 s after step 7...""",
    "replicas that wait for a plan take no step and do not hang": f"""
        {RESILIENT}; 0 peer_lost
        {"later 15; 0,1 pong; " * 10}later 15 -> {"; ".join(11 * ["ping 0,1"])}""",
    "a change that is under way hides no hang": f"""
        {RESILIENT}; plan 1 here*1 there*1 inplace; master
        later 15; 0 pong; later 15 -> ping 0,1; say replica 1 {WHY}; kill 1 {WHY}; ping 0""",
    "steps of other replicas do not count": f"""
        {RESILIENT}; later 15; 0 step step=8; later 15
        -> ping 0,1; say replica 1 {WHY}; kill 1 {WHY}; ping 0""",
    # the two wait for the gradients of the third
    "a newcomer is asked from when it has joined": f"""
        me hang_timeout=None; run 2 resilient; 0,1 step; {GROWS}
        0,1,2 switched -> adopt 1; ended 0 stopped; running 1 library resilient
        later 30; 0,1 pong; later 30 -> ping 0,1,2; say ...; kill 2 ...; ping 0,1
        2 exits -9 -> lost 1 2 ...; broken 1 lost=2 ...""",
    "replicas that wait for a newcomer are not killed before it": f"""
        {RESILIENT}; {GROWS}; later 14; 0,1,2 switched
        later 1; 0,1 pong; later 13; later 1; later 1; 0,1 pong; later 13 -> ping 0,1; ping 2; ping 0,1
        later 1 -> say replica 2 {WHY}; kill 2 {WHY}""",
    # while it warms up no replica waits for it
    "a newcomer to replicas of other nodes is asked as well": """
        me hang_timeout=30.0; plan 1 there*1 here*1 left=there:0 inplace; master; 0 hello; 0 ready
        later 1000 -> nothing
        0 switched; later 15 -> running 1 library; ping 0""",
    "after the last epoch no replica is to take a step": f"""
        {RESILIENT}; 0,1 epochs_finished; {"later 15; 0,1 pong; " * 10}later 15
        -> {"; ".join(11 * ["ping 0,1"])}""",
}


@pytest.mark.parametrize("script", SCENARIOS.values(), ids=SCENARIOS)
def test_a_hang_is_found_as_in_the_scenario(script: str) -> None:
    play(script)
