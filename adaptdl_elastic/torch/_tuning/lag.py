"""Decide which replica lags, and whether the network has changed: pure functions of what replicas report.

A replica lags if it is busy for much longer than the others in every step, so that they wait for it. The
comparison must not be misled by a busy machine. So each replica reports medians over its last steps, a
replica is compared with the median of the others, and a verdict changes only if successive reports agree;
the limit for its end is lower than the one for its beginning.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from adaptdl_elastic.torch._runtime.step_clock import StepParts

BEGINS = 2.0
"""Factor of the others' time from which a replica lags."""

ENDS = 1.5
"""Factor of the others' time below which it does not lag any more."""

AGREEING = 2
"""Successive reports that must agree before a verdict changes."""

LEAST_SECONDS = 0.05
"""Least time per step that the others lose before a replica is said to lag."""

LEAST_SHARE = 0.2
"""Least share of the time from step to step that the others lose."""

CHANGED = 1.5
"""Factor of a step's time by which the network makes steps slower or faster when it has changed."""

ALIKE = 1.25
"""Greatest factor between the times for which replicas are busy that are taken as the same."""

MOSTLY = 0.8
"""Least share of waiting in the change of a step, where replicas are not as busy as before."""

APART = 60.0
"""Least seconds between two changes of the network that are told."""

PERSISTS = 10.0
"""Seconds for which steps are slower or faster until the network is said to have changed."""

PARTS = {"data": "loading data", "compute": "computing", "communication": "sending gradients"}


class Report(NamedTuple):
    """Hold a replica's report about its last steps."""

    host: str
    parts: StepParts  # medians per step
    crowded: bool = False  # it computes on the host's cores, which are not more than the replicas there use
    node: str = ""


@dataclass(frozen=True)
class Lag:
    """Describe a replica that the others wait for."""

    rank: int
    host: str
    part: str  # the part of a step that takes longest beside the others': a key of `PARTS`
    ratio: float  # its busy time per step over that of the others
    seconds: float  # its busy time per step
    usual: float  # busy time of the other replicas

    @property
    def message(self) -> str:
        """Return what is wrong, and what to do."""
        return (
            f"replica {self.rank} on {self.host} is slow in {PARTS[self.part]}: it is busy for "
            f"{self.seconds * 1e3:.0f} ms per step, the others for {self.usual * 1e3:.0f} ms, and they wait "
            f"for it. Look what else runs on {self.host}; `adaptdl drain` takes the job off a node, and "
            f"`adaptdl-run --node-type` keeps replicas of a job on nodes of one type"
        )


class LagJudge:
    """Compare the replicas of one generation, and say which lag."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}  # rank → successive reports that contradict the present verdict
        self.lags: dict[int, Lag] = {}

    def judge(self, reports: Mapping[int, Report]) -> None:
        """Take one report of every replica, about the same steps; `lags` are the verdicts afterwards."""
        for rank, report in reports.items():
            others = [one for other, one in reports.items() if other != rank]
            found = compare(rank, report, others)
            if found.part == "compute" and report.crowded:
                # replicas that share all cores of a host slow each other down
                others = [one for one in others if one.host != report.host]
                found = compare(rank, report, others or [report])
            lagging = rank in self.lags
            if lagging and found.ratio > ENDS:
                self._seen[rank] = 0
                self.lags[rank] = found
                continue
            if not lagging and not _lags(found, report.parts):
                self._seen[rank] = 0
                continue
            self._seen[rank] = self._seen.get(rank, 0) + 1
            if self._seen[rank] >= AGREEING:
                self._seen[rank] = 0
                if lagging:
                    del self.lags[rank]
                else:
                    self.lags[rank] = found


class NetworkJudge:
    """Tell a change of the network from one of the machines: steps change by the waiting of the replicas.

    The replica that is waited for waits for the network alone, so the least time of waiting counts. Each
    generation and batch size has an object of its own.
    """

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None  # seconds per step: the busiest replica; all of it
        self._since: float | None = None  # when steps began to take another time
        self._said = -math.inf  # when the network was last found to have changed

    def judge(self, reports: Collection[Report], now: float) -> float | None:
        """Take one report of every replica, about the same steps.

        Returns:
            When the network has changed, if that is certain now; else None.
        """
        busy = max(report.parts.own for report in reports)
        step = busy + min(report.parts.waiting for report in reports)
        before = self._before
        if before is None or not _same_machines(before, (busy, step)):
            self._before, self._since = (busy, step), None
        elif 1 / CHANGED < step / before[1] < CHANGED:
            self._since = None
        else:
            # it is slow in at least half of the steps of a report
            self._since = now - 3 * step if self._since is None else self._since
            if now - self._since >= PERSISTS and now - self._said >= APART:
                since, self._before, self._since, self._said = self._since, (busy, step), None, now
                return since
        return None


def _same_machines(before: tuple[float, float], now: tuple[float, float]) -> bool:
    """Return whether steps may have changed by the network alone; of each, busy and all seconds are given.

    Where replicas share cores they are busy for less while the network is slow: they wait at other times.
    """
    if 1 / ALIKE < now[0] / max(before[0], 1e-9) < ALIKE:
        return True
    change, waiting = now[1] - before[1], (now[1] - now[0]) - (before[1] - before[0])
    return max(now[1], before[1]) >= CHANGED * min(now[1], before[1]) and waiting / change >= MOSTLY


def compare(rank: int, report: Report, others: Sequence[Report]) -> Lag:
    """Return how the replica `rank` compares with the others."""
    usual = StepParts(*(median(column) for column in zip(*(one.parts for one in others), strict=True)))
    seconds, reference = report.parts.own, median(one.parts.own for one in others)
    part = max(PARTS, key=lambda name: getattr(report.parts, name) - getattr(usual, name))
    return Lag(rank, report.host, part, seconds / max(reference, 1e-9), seconds, reference)


def _lags(found: Lag, parts: StepParts) -> bool:
    lost = found.seconds - found.usual
    return found.ratio >= BEGINS and lost >= max(LEAST_SECONDS, LEAST_SHARE * sum(parts))
