"""Decide which agents a node service starts and stops. Pure: the clock is passed in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord
from adaptdl_elastic.rendezvous.services.admission import Request, admit

MOST_FAILURES = 5
"""Failures in a row after which an agent is not started again."""

STEADY_SECONDS = 60.0
"""Seconds after whose passing an agent's end is no failure to start."""

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Shortest and longest pause between two attempts to start an agent."""

STOP_SECONDS = 150.0
"""Seconds that an agent may take to save and leave before it is killed."""


class Step(str, Enum):
    """What is done about an agent."""

    START = "start"
    TERMINATE = "terminate"
    KILL = "kill"


@dataclass(frozen=True)
class AgentState:
    """What the service knows of one job's agent here. Times are those of the service's clock.

    Attributes:
        alive: Whether the agent runs, or is being prepared.
        since: When it was started last.
        failures: How often in a row it has ended soon after its start.
        not_before: When it may be started again.
        terminated: When it was told to leave; None: it was not.
        standing: Whether only the node is registered for the job, and no agent runs.
    """

    alive: bool = False
    since: float = 0.0
    failures: int = 0
    not_before: float = 0.0
    terminated: float | None = None
    standing: bool = False

    @property
    def given_up(self) -> bool:
        """Whether it is not started again."""
        return self.failures >= MOST_FAILURES

    def started(self, now: float) -> AgentState:
        """Return the state after a start."""
        return replace(self, alive=True, since=now, terminated=None, standing=False)

    def postponed(self, now: float) -> AgentState:
        """Return the state after a start that this node is no reason for."""
        return replace(self, alive=False, standing=False, not_before=now + LONGEST_PAUSE_SECONDS / 10)

    def ended(self, now: float, exit_code: int | None) -> AgentState:
        """Return the state after the agent's end.

        An exit with 0 while the job goes on is one of a node where the job has no replicas any more, or that
        is drained: it is tried again, without end.
        """
        ended = replace(self, alive=False, standing=False)
        if exit_code == 0 or now - self.since > STEADY_SECONDS:
            return replace(ended, failures=0, not_before=now + SHORTEST_PAUSE_SECONDS)
        pause = min(LONGEST_PAUSE_SECONDS, SHORTEST_PAUSE_SECONDS * 2.0**self.failures)
        return replace(ended, failures=self.failures + 1, not_before=now + pause)


def decide(
    requests: Iterable[Request],
    slots: int,
    agents: Mapping[str, AgentState],
    now: float,
    vanished: Collection[str] = (),
    unused: bool = False,
) -> dict[str, Step]:
    """Return what is to be done now, by job.

    Args:
        requests: The submissions of the cluster whose signatures are valid.
        slots: How many replicas fit on all nodes.
        agents: The agents of this node.
        now: The time of the service's clock.
        vanished: Jobs whose submission is no longer in the store; their agents go on. Others without a
            request belong to people who were revoked, and are stopped.
        unused: Whether no job begins on this node (`Submitted.unused`).
    """
    known = {one.submission.job: one for one in requests}
    verdicts = admit(known.values(), slots)
    steps: dict[str, Step] = {}
    for job, agent in agents.items():
        request = known.get(job)
        unwanted = job not in vanished if request is None else request.cancelled_by is not None
        if agent.standing and (unused or (request is not None and request.over)):
            unwanted = True  # an agent ends by itself
        if not agent.alive or not unwanted:
            continue
        if agent.terminated is None:
            steps[job] = Step.TERMINATE
        elif now - agent.terminated > STOP_SECONDS:
            steps[job] = Step.KILL
    for job, verdict in verdicts.items():
        agent = agents.get(job, AgentState())
        if not verdict.admitted or agent.alive or unused:
            continue
        if not agent.given_up and now >= agent.not_before:
            steps[job] = Step.START
    return steps


def hopeless(
    requests: Iterable[Request], services: Mapping[str, ServiceRecord], unused: Collection[str]
) -> dict[str, str]:
    """Return the jobs that no node can start, and what the nodes say of each.

    A job waits for a node on which it has run, and which is away or drained.

    Args:
        requests: The submissions of the cluster whose signatures are valid.
        services: The registrations, by node.
        unused: Nodes on which no job begins.
    """
    nodes = {node: service for node, service in services.items() if node not in unused}
    waiting = [one for one in requests if not one.over and not one.run.agents]
    jobs = [one.submission.job for one in waiting if nodes.keys() >= set(one.run.ran_on)]
    return {
        job: "; ".join(f"{node}: {service.problems.get(job, '')}" for node, service in sorted(nodes.items()))
        for job in jobs
        if nodes and all(job in service.given_up for service in nodes.values())
    }
