"""Judge each pool by the useful work that its money buys, and by how often its price has turned. Pure.

Machines that are lost soon cost their boot and what was done since the last checkpoint. So a node that is
lost without a notice has done no useful work in its last `lost_work` seconds. A purchase counts half as much
as the next one. If less than two thirds of the money bought useful work, the pool waits from the second such
purchase in a row on, twice as long after each. An on-demand pool closes after `max_wasted` of them where less
than one third did.
"""

from __future__ import annotations

from dataclasses import replace

from adaptdl_elastic.autoscaler.scaling.economics import HOUR, ScalingSettings
from adaptdl_elastic.autoscaler.scaling.scaling_types import CHEAPER, Known, PoolMemory

# Fractions of useful money below which a pool waits, and closes.
_WAITS_BELOW, _CLOSES_BELOW = 2 / 3, 1 / 3
# A pool waits from so long to so long.
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1800.0, 86400.0
# The price has turned if an exchanged node costs so many times what it cost when it was bought.
_TURNED = 1.2
# A turn of the price counts 1/e after so many hours.
FORGET_TURN_HOURS = 2.0
# So many turns count at most.
_MOST_TURNS = 15.0


def lost(pool: PoolMemory, entry: Known, now: float, settings: ScalingSettings) -> PoolMemory:
    """Return the pool's account after a node was lost; nodes bought before the last verdict share it."""
    fresh = entry.first_seen >= pool.judged
    weight, fade = (entry.hourly_price or 1.0) / HOUR, 0.5 if fresh else 1.0
    useful = entry.work if entry.leaving else max(0.0, entry.work - settings.lost_work)
    spent = pool.spent * fade + (now - entry.first_seen) * weight
    gained = pool.gained * fade + useful * weight
    pool = replace(pool, spent=spent, gained=gained)
    if not fresh:
        return pool
    if gained >= _WAITS_BELOW * spent:
        return replace(pool, judged=now, wasted=0)
    pool = replace(pool, judged=now, wasted=pool.wasted + 1)
    what = (
        f"its nodes are lost too soon: of the last {spent:.2f} that they cost {gained:.2f} bought useful "
        f"work, {pool.wasted} purchases in a row less than two thirds"
    )
    if pool.wasted >= settings.max_wasted and gained < _CLOSES_BELOW * spent and not entry.preemptible:
        what += ": look at the job's and a node's log, then start the autoscaler again"
        return replace(pool, closed=pool.closed or what)
    wait = min(_FIRST_WAIT_SECONDS * 2 ** min(pool.wasted - 2, 20), _LONGEST_WAIT_SECONDS)
    return pool if pool.wasted < 2 else replace(pool, trouble=what, until=max(pool.until, now + wait))


def given_back(pool: PoolMemory, entry: Known) -> PoolMemory:
    """Return the pool's account after a node was released: its work was useful."""
    worth = entry.work * (entry.hourly_price or 1.0) / HOUR
    pool = replace(pool, spent=pool.spent + worth, gained=pool.gained + worth)
    if entry.leaving == CHEAPER and entry.hourly_price > _TURNED * entry.bought_at:
        pool = replace(pool, turns=min(2 * pool.turns + 1, _MOST_TURNS))
    return pool


def surcharge(pool: PoolMemory) -> float:
    """Return the fraction by which the next node counts as dearer than it is."""
    return float(2**pool.turns - 1)
