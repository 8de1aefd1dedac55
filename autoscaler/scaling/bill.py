"""Charge each instance from its launch to its end, as its provider reports them. Pure.

An observation charges the time until its own moment. Price changes become known later: the prices are read
every few minutes. So the time since the last reading is charged at the latest price, and charged again,
with all changes, after the next reading.
"""

from __future__ import annotations

from adaptdl_elastic.autoscaler.providers.base import Instance
from adaptdl_elastic.autoscaler.scaling.scaling_types import Billed, Observation

# An instance that the provider lists so late after its launch is still charged from its launch.
_LATE_LISTING_SECONDS = 60.0


def bill(
    instance: Instance, before: Billed | None, start: float, seen: Observation
) -> tuple[Billed, float, float]:
    """Return (what of the instance is on the bill now, hours added, cost added); these may be negative.

    Args:
        instance: The instance, which may have ended.
        before: What of it was on the bill before; None: nothing.
        start: When the charge of an instance begins that was not on the bill and that was launched earlier.
        seen: The observation.
    """
    end = seen.now if instance.ended is None else instance.ended or (before.until if before else start)
    until = max(end, instance.launched)
    first = instance.launched if instance.launched > start - _LATE_LISTING_SECONDS else start
    old = before or Billed(min(until, first), min(until, first))
    # an instance that was stopped and started again has a new launch
    since = max(old.final, instance.launched)
    if instance.launched > old.until:  # what is on the bill of the time before its stop remains
        old = Billed(instance.launched, instance.launched)
    final = max(since, min(until, seen.capacity.priced))
    new = Billed(until, final, instance.cost(final, until))
    return new, (until - old.until) / 3600, instance.cost(since, final) + new.estimate - old.estimate
