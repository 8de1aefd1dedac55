"""An agent's decisions, moved by hand: events in, actions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adaptdl_elastic.agent.core import states as d
from adaptdl_elastic.agent.core.decisions import alive, decide
from adaptdl_elastic.protocol.messages import Hello, Pong, ReplicaMessage
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    JobSpec,
    Leaving,
    MasterRecord,
    Placement,
    Plan,
    Transition,
)

ME = d.AgentIdentity("here", "agent-1", JobSpec("job", "run"), hang_timeout=0.0)

HELLO, PONG = Hello("1", 100), Pong(0, False)


def said(local_rank: int, message: ReplicaMessage, generation: int = 0) -> d.FromReplica:
    """Return the event of a message, about the generation that it names, else the given one."""
    return d.FromReplica(getattr(message, "generation", generation), local_rank, message)


def plan(
    generation: int,
    *placements: tuple[str, int],
    leaving: Sequence[Leaving] = (),
    transition: Transition = Transition.RESTART,
    run: str = "run",
) -> Plan:
    agents = {"here": "agent-1"}
    placed = tuple(Placement(node, count, agents.get(node, f"agent-{node}")) for node, count in placements)
    return Plan("job", run, generation, placed, Cause.POLICY, transition, "why", leaving=tuple(leaving))


def master(generation: int) -> d.MasterSeen:
    return d.MasterSeen(MasterRecord(generation, "127.0.0.1", 1, 2))


class Agent:
    """Feeds events and keeps what was answered."""

    def __init__(self, **identity: object) -> None:
        self.state = d.State(me=replace(ME, **identity))  # type: ignore[arg-type]
        self.now = 0.0
        self(d.NodesSeen({"here": "agent-1", "there": "agent-there"}))

    def __call__(self, event: d.Event) -> list[d.Action]:
        self.state, actions = decide(self.state, event, self.now)
        return actions

    @property
    def alive(self) -> tuple[d.Replica, ...]:
        """The processes that have not exited."""
        return () if self.state.held is None else alive(self.state.held)

    def running(self, generation: int = 0, count: int = 2, library: bool = True) -> Agent:
        """With the replicas of a generation."""
        self(d.PlanSeen(plan(generation, ("here", count))))
        self(master(generation))
        for local_rank in range(count):
            if library:
                self(said(local_rank, HELLO, generation))
        return self

    def exits(self, *codes: int, generation: int = 0) -> list[d.Action]:
        actions: list[d.Action] = []
        for local_rank, code in enumerate(codes):
            actions += self(d.ReplicaExited(generation, local_rank, code, 5.0, "why it did"))
        return actions

    def later(self, seconds: float) -> list[d.Action]:
        self.now += seconds
        return self(d.Tick())


def kinds(actions: Sequence[d.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]
