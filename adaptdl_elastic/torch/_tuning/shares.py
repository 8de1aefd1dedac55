"""Choose how many samples of a batch each replica takes: pure functions.

Replicas of unequal speed finish together if each takes samples in proportion to its speed. A *share* is the
fraction of a batch that a replica takes; the total batch size, and with it the learning rate and the number
of steps, stay what they are.

Shares change only if that pays: a step must become shorter by `WORTH`, judged by medians over several steps,
and two successive reports must agree (`ShareChooser`). So replicas whose speeds agree within `WORTH` keep
equal shares, and a noisy machine does not move them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adaptdl_elastic.torch._tuning.lag import Report

WORTH = 1.15
"""Factor by which a step must become shorter for the shares to change."""

AGREEING = 2
"""Successive reports that must call for a change."""

STEPS = 1000
"""Shares are whole multiples of 1 / `STEPS`, so that all replicas compute with the same numbers."""

Shares = tuple[int, ...]
"""Share of each replica, by rank, in units of 1 / `STEPS`."""


def allocate(samples: int, shares: Sequence[int], least: int = 1, most: int | None = None) -> tuple[int, ...]:
    """Divide `samples` in proportion to `shares`, so that the last replica is done as early as possible.

    Args:
        samples: Number of samples.
        shares: Positive weights, by rank.
        least: Least number of each replica, if there are enough samples.
        most: Largest number of each replica, unless all of them together have more.

    Returns:
        Numbers by rank, whose sum is `samples`.
    """
    replicas = len(shares)
    low = min(least, samples // replicas)
    high = samples if most is None else max(most, -(-samples // replicas))
    total = sum(shares)
    found = [min(max(samples * share // total, low), high) for share in shares]
    while (left := samples - sum(found)) != 0:
        step = 1 if left > 0 else -1
        open_ = [r for r in range(replicas) if low <= found[r] + step <= high]
        if step > 0:  # the replica that would finish first
            rank = min(open_, key=lambda r: ((found[r] + 1) / shares[r], r))
        else:  # the replica that would finish last
            rank = max(open_, key=lambda r: (found[r] / shares[r], -r))
        found[rank] += step
    return tuple(found)


def choose(reports: Mapping[int, Report]) -> Shares | None:
    """Return the shares at which all replicas would be busy equally long; None if a report is unusable."""
    speeds = []
    for rank in sorted(reports):
        report = reports[rank]
        if report.samples < 1 or report.parts.own <= 0:
            return None
        speeds.append(report.samples / report.parts.own)
    total = sum(speeds)
    return tuple(max(1, round(STEPS * speed / total)) for speed in speeds)


def improvement(reports: Mapping[int, Report], counts: Sequence[int]) -> float:
    """Return the factor by which a step becomes shorter if the replicas take `counts` samples."""
    per_sample = [reports[rank].parts.own / reports[rank].samples for rank in sorted(reports)]
    now = max(report.parts.own for report in reports.values())
    return now / max(max(c * s for c, s in zip(counts, per_sample, strict=True)), 1e-9)


class ShareChooser:
    """Suggest shares once successive reports agree that they pay."""

    def __init__(self) -> None:
        self._agreeing = 0
        self.suggestion: Shares | None = None

    def take(self, reports: Mapping[int, Report], least: int, most: int | None) -> None:
        """Take one report of every replica; `suggestion` is the answer afterwards.

        Args:
            reports: What each replica reports about the same steps, by rank.
            least: Least number of samples of a replica in a step.
            most: Largest number, None: no limit.
        """
        shares, samples = choose(reports), sum(report.samples for report in reports.values())
        pays = shares is not None and improvement(reports, allocate(samples, shares, least, most)) >= WORTH
        self._agreeing = self._agreeing + 1 if pays else 0
        self.suggestion = shares if self._agreeing >= AGREEING else None
