"""What a node holds of a job: one record per job and node, which its agent keeps up to date.

"Has left generation g", "runs g" and "how g ended" are questions about this record. It outlives the agent
that wrote it; an agent that follows on the node carries its ends on. The coordinator reads it; other agents
follow `Left`, the part of it that they wait for, which is written far less often.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from adaptdl_elastic.protocol.messages import Groups
from adaptdl_elastic.rendezvous.schema.records import (
    MOST_SLOTS,
    RECORD_CONFIG,
    Failure,
    Outcome,
    Slot,
)

MOST_ENDS = 3
"""Ends that a record keeps: of a change that was given up, the generation before, and a recovery after it."""

_Slots = Annotated[tuple[Slot, ...], Field(max_length=MOST_SLOTS)]


class Course(str, Enum):
    """What a node's replicas do."""

    TRAINING = "training"  # they start or train
    JOINING = "joining"  # newcomers get ready to join replicas of other nodes
    CHANGING = "changing"  # they change to another generation in place
    RECOVERING = "recovering"  # they change to a generation without the dead
    STOPPING = "stopping"  # they were asked to save and exit
    KILLING = "killing"


@dataclass(frozen=True, config=RECORD_CONFIG)
class PeerLoss:
    """A generation lost replicas, and the living ones of this node wait for a plan without the dead."""

    generation: int
    lost: _Slots = ()  # LOCAL_RANKs of this node's dead replicas; (): replicas of other nodes died
    failure: Failure | None = None  # of the first of them


@dataclass(frozen=True, config=RECORD_CONFIG)
class LeftEnd:
    """The end of a generation on a node, as other agents need it."""

    generation: int
    outcome: Outcome
    last_step: float | None = None  # wall-clock time of the end of the last step


@dataclass(frozen=True, config=RECORD_CONFIG)
class GenerationEnd:
    """How a generation ended on a node, whose slots are free since then."""

    generation: int
    outcome: Outcome
    exit_code: int = 0
    failure: Failure | None = None
    unsaved: str = ""  # why rank 0, if it was here, could not save at the end
    ran: bool = False  # its replicas had started, or joined
    library: bool = False  # all of them had said hello
    survives: Groups | None = None  # as in `Held`
    lost: _Slots = ()  # LOCAL_RANKs of those that died while others lived on
    first_step: float | None = None  # as in `Held`
    agent: str = ""  # the agent that had it
    # wall-clock times by the agent's clock
    started: float = 0.0
    last_step: float | None = None  # end of the last step
    time: float = 0.0

    @property
    def short(self) -> LeftEnd:
        """What other agents need of it."""
        return LeftEnd(self.generation, self.outcome, self.last_step)


@dataclass(frozen=True, config=RECORD_CONFIG)
class Left:
    """What a node has left of a job."""

    node: str
    agent: str = ""  # `NodeRecord.agent` of the writer
    up_to: int = -1  # every generation that counted on the agent, up to this one, has ended or never starts
    ends: Annotated[tuple[LeftEnd, ...], Field(max_length=8)] = ()  # the last ones, the newest last

    def end_of(self, generation: int) -> LeftEnd | None:
        """Return how a generation ended here; None: it has not, it never started, or that is forgotten."""
        return next((end for end in reversed(self.ends) if end.generation == generation), None)

    def has_left(self, generation: int, agent: str) -> bool:
        """Return whether a generation that counted on `agent` has ended here, or will never start here."""
        known = self.end_of(generation) is not None
        return known or (agent in ("", self.agent) and generation <= self.up_to)


@dataclass(frozen=True, config=RECORD_CONFIG)
class Held:
    """What a node holds of a job, and what it has dealt with."""

    node: str
    agent: str = ""  # `NodeRecord.agent` of the writer
    sequence: int = 0  # grows with each record of this agent
    acted: int = -1  # every generation up to this one is held here, has ended or never starts here
    generation: int = -1  # the one whose replicas are here; -1: none
    course: Course = Course.TRAINING
    to: int = -1  # the generation that they change to; -1: none
    ready: bool = False  # the newcomers here are ready to join
    library: bool = False  # all replicas have said hello
    # they survive the death of others while of each of these groups of its ranks one lives; None: they do not
    survives: Groups | None = None
    first_step: float | None = None  # wall-clock time of the end of the generation's first step
    loss: PeerLoss | None = None  # the newest one; None: no replica was lost
    ends: Annotated[tuple[GenerationEnd, ...], Field(max_length=8)] = ()  # the last ones, the newest last
    started: float = 0.0  # wall-clock time when the generation began here

    @property
    def left(self) -> Left:
        """What the node has left."""
        before = [one - 1 for one in (self.generation, self.to) if one >= 0]
        ends = tuple(end.short for end in self.ends)
        return Left(self.node, self.agent, min([self.acted, *before]), ends)

    @property
    def runs(self) -> int:
        """The generation whose replicas have started here, or joined; -1: none."""
        return -1 if self.course is Course.JOINING else self.generation

    @property
    def generations(self) -> set[int]:
        """The generations that are here, or were, as far as that is not forgotten."""
        return {self.generation, self.to, *(end.generation for end in self.ends)}

    def end_of(self, generation: int) -> GenerationEnd | None:
        """Return how a generation ended here; None: it has not, it never started, or that is forgotten."""
        return next((end for end in reversed(self.ends) if end.generation == generation), None)

    def has_left(self, generation: int, agent: str) -> bool:
        """Return whether a generation that counted on `agent` has ended here, or will never start here."""
        if self.end_of(generation) is not None:
            return True
        under_way = generation in (self.generation, self.to)
        return agent in ("", self.agent) and generation <= self.acted and not under_way
