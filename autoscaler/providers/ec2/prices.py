"""The price of an hour of an instance type: options and tags for on-demand, EC2's history for spot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from adaptdl_elastic.autoscaler.providers.base import ProviderError

PriceChanges = tuple[tuple[float, float], ...]
"""(Since when in seconds since the epoch, price per hour), oldest first."""


def parse_price_option(text: str) -> tuple[str, float]:
    """Parse `g5.xlarge=1.006`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ProviderError(f"price {text!r}: write TYPE=PRICE, e.g. g5.xlarge=1.006")
    try:
        price = float(value)
    except ValueError:
        price = math.nan
    if not (price >= 0 and math.isfinite(price)):
        raise ProviderError(f"price {text!r}: {value!r} is not a price per hour, e.g. 1.006")
    return name, price


def spot_price_changes(history: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], PriceChanges]:
    """Return (type, zone) → price changes, from entries of EC2's DescribeSpotPriceHistory in any order."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for entry in history:
        change = (entry["Timestamp"].timestamp(), float(entry["SpotPrice"]))
        found.setdefault((entry["InstanceType"], entry["AvailabilityZone"]), []).append(change)
    return {key: tuple(sorted(changes)) for key, changes in found.items()}
