"""Describe the survivors of a death to each other, and find out who knows what. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from adaptdl_elastic._values import Place
from adaptdl_elastic.torch._data.accumulator_state import Sums

Where = tuple[int, int, bool]
"""(epoch, data loop, whether that loop is over). Orders replicas by how far they are in the script."""


@dataclass(frozen=True)
class Mark:
    """Record the position in a data loop at which all replicas last had the same accumulator sums."""

    place: Place
    index: int  # samples handed out before this position
    sums: Sums


@dataclass
class SurvivorReport:
    """Describe one replica to the other survivors."""

    rank: int
    step: int  # last committed step
    position: Where
    index: int  # samples of the data loop's committed steps
    training: bool  # in a training loop
    partially_restored: bool  # the donor of its model died during the transfer: the model is a mixture
    buffers_diverged: bool  # the replicas' buffers may differ since a training loop ended
    synced: dict[str, int] = field(default_factory=dict)  # accumulator → number of syncs
    unsynced: tuple[str, ...] = ()  # accumulators with sums that only this replica has
    marked: bool = False  # its Mark holds sums that only this replica has
    mark: int | None = None  # index of its Mark in the running data loop
    seeds: dict[str, int] = field(default_factory=dict)  # loader's key → seed of its order
    announced: Place = (0, 0)  # last data loop that the others were told
    memory: dict[str, Any] = field(default_factory=dict)  # what `MemoryLimit` saves


class UnrecoverableStateError(RuntimeError):
    """Raised if the survivors have no common state from which to continue."""


def newest_sums(everybody: list[SurvivorReport]) -> dict[str, int]:
    """Return for each accumulator the largest number of syncs that a survivor has seen."""
    newest: dict[str, int] = {}
    for one in everybody:
        for name, count in one.synced.items():
            newest[name] = max(count, newest.get(name, 0))
    return newest


def knows_sums_alone(some: list[SurvivorReport], everybody: list[SurvivorReport]) -> bool:
    """Return whether a replica in `some` has sums that only it knows.

    Sums are known elsewhere if another replica has finished a sync that this replica has not finished.
    """
    newest = newest_sums(everybody)
    return any(one.synced[name] == newest[name] for one in some for name in one.unsynced)


def newest_step(everybody: list[SurvivorReport]) -> int:
    """Return the largest committed step of a survivor with a whole model.

    Raises:
        UnrecoverableStateError: no survivor has one.
    """
    steps = [one.step for one in everybody if not one.partially_restored]
    if not steps:
        raise UnrecoverableStateError("no survivor has a whole model")
    return max(steps)
