"""Judge each pool by the useful work that its money buys, and by how often its price has turned. Pure.

A node costs its boot and its work. The time in which it has no replica is not counted: idle nodes are not the
pool's fault. Of the work of a lost node the last `lost_work` seconds were not useful, or only the last
`interruption_cost` seconds if its end was announced. The money of earlier purchases counts half as much with
each verdict. If less than two thirds of the money bought useful work, the pool waits from the second such
purchase in a row on, twice as long after each. An on-demand pool closes after `max_wasted` of them where less
than one third did.

The nodes that live on count as well: with their work since the last verdict, if they were bought before it.
So both sums cover the same time, and a node that has lived for long hides only as much waste as it does work
meanwhile. Other nodes of the purchase that is judged do not count: they have not outlived it yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from adaptdl_elastic.autoscaler.scaling.economics import HOUR, ScalingSettings
from adaptdl_elastic.autoscaler.scaling.scaling_types import CHEAPER, Known, PoolMemory

# Fractions of useful money below which a pool waits, and closes.
_WAITS_BELOW, _CLOSES_BELOW = 2 / 3, 1 / 3
# A pool waits from so long to so long.
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1800.0, 86400.0
# At most so much work of one node counts.
_MOST_WORK_SECONDS = 6 * HOUR
# The price has turned if an exchanged node costs so many times what it cost when it was bought.
_TURNED = 1.2
# A turn of the price counts 1/e after so many hours.
FORGET_TURN_HOURS = 4.0
# The next node counts as so many times as dear for each turn.
_DEARER_PER_TURN = 4.0


def lost(
    pool: PoolMemory, entry: Known, now: float, settings: ScalingSettings, living: Iterable[Known]
) -> PoolMemory:
    """Return the pool's account after a node was lost; nodes bought before the last verdict share it.

    A node that was idle for `idle_after` leaves the account as it is: only a minimum of nodes kept it.

    Args:
        pool: The account until now.
        entry: The lost node.
        now: Seconds since the epoch.
        settings: The user's settings.
        living: The nodes of all pools that are still there.
    """
    end = entry.leaving_since if entry.leaving else entry.absent or now
    if entry.idle_since is not None and end - entry.idle_since >= settings.idle_after:
        return pool
    fresh, weight = entry.first_seen >= pool.judged, _price(entry) / HOUR
    boot = min((entry.became or now) - entry.first_seen, settings.boot_timeout)
    work = min(entry.work, _MOST_WORK_SECONDS)
    useful = max(0.0, work - (settings.interruption_cost if entry.leaving else settings.lost_work))
    if not fresh:
        return replace(pool, spent=pool.spent + (boot + work) * weight, gained=pool.gained + useful * weight)
    older = [other for other in living if other.pool == entry.pool and other.first_seen < pool.judged]
    window = min(now - pool.judged, _MOST_WORK_SECONDS)
    meanwhile = sum(min(other.work, window) * _price(other) / HOUR for other in older)
    spent = pool.spent / 2 + (boot + work) * weight + meanwhile
    gained = pool.gained / 2 + useful * weight + meanwhile
    pool = replace(pool, spent=spent, gained=gained, judged=now)
    if gained >= _WAITS_BELOW * spent:
        return replace(pool, wasted=0)
    pool = replace(pool, wasted=pool.wasted + 1)
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
    """Return the pool's account after a node was released: its work was useful.

    The price has turned if the node was exchanged because its price rose. Nodes bought before the last turn
    share that turn. The records of older versions do not say what a node cost (0).
    """
    worth = min(entry.work, _MOST_WORK_SECONDS) * _price(entry) / HOUR
    pool = replace(pool, spent=pool.spent + worth, gained=pool.gained + worth)
    rose = 0 < entry.bought_at * _TURNED < entry.hourly_price
    if entry.leaving == CHEAPER and rose and entry.first_seen > pool.turned:
        pool = replace(pool, turns=pool.turns + 1, turned=entry.leaving_since)
    return pool


def surcharge(pool: PoolMemory) -> float:
    """Return the fraction by which the next node counts as dearer than it is."""
    return float(_DEARER_PER_TURN**pool.turns - 1)


def turns_told(pool: PoolMemory) -> list[str]:
    """Return what users are told while turns of the price make the pool count as clearly dearer."""
    dearer = 1 + surcharge(pool)
    text = f"its price has risen while nodes were at work, so it counts as {dearer:.1f} times as dear for now"
    return [text] if dearer > _TURNED else []


def _price(entry: Known) -> float:
    """Return the price per hour of a node; 1 if no price is known."""
    return entry.hourly_price or 1.0
