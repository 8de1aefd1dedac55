"""What the records of nodes say of a job's generations, as tables by (generation, node).

A record is written again for many reasons. A fact keeps the time at which it was first seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from adaptdl_elastic.protocol.channel import STOPPED
from adaptdl_elastic.protocol.messages import Groups
from adaptdl_elastic.rendezvous.schema.held import GenerationEnd, Held, PeerLoss
from adaptdl_elastic.rendezvous.schema.records import Outcome, Plan

R = TypeVar("R")

NodeOfGeneration = tuple[int, str]
"""(generation, node)."""


def empty() -> Mapping[Any, Any]:
    """Return a mapping without keys, which cannot change."""
    return MappingProxyType({})


@dataclass(frozen=True)
class Observed(Generic[R]):
    """A record, its revision, and when *this* process first saw it (by its own clock)."""

    record: R
    revision: int
    seen: float


@dataclass(frozen=True)
class Run:
    """A node's replicas have started in a generation, or have joined it."""

    agent: str
    time: float  # wall-clock time of that by the node's clock
    first_step: float | None
    library: bool
    survives: Groups | None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What nodes hold, and what follows for each generation."""

    held: Mapping[str, Observed[Held]] = field(default_factory=empty)
    # newcomers that are ready to join; the value is the generation
    ready: Mapping[NodeOfGeneration, Observed[int]] = field(default_factory=empty)
    # replicas that have started, or joined, also where they have ended since
    running: Mapping[NodeOfGeneration, Observed[Run]] = field(default_factory=empty)
    broken: Mapping[NodeOfGeneration, Observed[PeerLoss]] = field(default_factory=empty)
    ended: Mapping[NodeOfGeneration, Observed[GenerationEnd]] = field(default_factory=empty)


def facts_of(
    held: Mapping[str, Observed[Held]], plan: Plan | None, before: Facts
) -> dict[str, Mapping[Any, Observed[Any]]]:
    """Return the fields of `Facts`.

    Args:
        held: what nodes hold.
        plan: the job's plan, which names the generations whose end is asked for.
        before: the facts so far; equal ones keep the time at which they were seen.
    """
    tables: dict[str, dict[Any, Observed[Any]]] = {
        **{"held": dict(held), "ready": {}, "running": {}, "broken": {}, "ended": {}}
    }
    asked = list(_asked(plan))
    for node, seen in held.items():
        for name, generation, fact in _facts(seen.record, asked):
            known: Observed[Any] | None = getattr(before, name).get((generation, node))
            new = Observed(fact, seen.revision, seen.seen)
            tables[name][generation, node] = known if known is not None and known.record == fact else new
    return {name: MappingProxyType(table) for name, table in tables.items()}


def _asked(plan: Plan | None) -> Iterator[tuple[int, str, str]]:
    """Yield the (generation, node, agent) whose replicas a plan places or waits for."""
    if plan is None:
        return
    for leaving in plan.leaving:
        yield leaving.generation, leaving.node, leaving.agent
    for placement in plan.placements:
        yield plan.generation, placement.node, placement.agent


def _facts(held: Held, asked: Iterable[tuple[int, str, str]]) -> Iterator[tuple[str, int, Any]]:
    """Yield (table, generation, fact)."""
    for end in held.ends:
        if end.outcome is not Outcome.LOST:
            yield "ended", end.generation, end
        if end.ran:
            yield (
                "running",
                end.generation,
                Run(end.agent, end.started, end.first_step, end.library, end.survives),
            )
        if end.lost:
            yield "broken", end.generation, PeerLoss(end.generation, end.lost, end.failure)
    if held.runs >= 0:
        run = Run(held.agent, held.started, held.first_step, held.library, held.survives)
        yield "running", held.runs, run
    if held.ready:
        to = held.to if held.to >= 0 else held.generation
        yield "ready", to, to
    if held.loss is not None:
        yield "broken", held.loss.generation, held.loss
    for generation, node, agent in asked:
        left = node == held.node and held.has_left(generation, agent)
        if left and held.end_of(generation) is None:
            yield "ended", generation, GenerationEnd(generation, Outcome.STOPPED, STOPPED)
