"""The price of an hour of an instance type: options and tags for on-demand, EC2's history for spot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from adaptdl_elastic.autoscaler.providers.base import ProviderError


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


def latest_spot_prices(history: Iterable[Mapping[str, object]]) -> dict[tuple[str, str], float]:
    """Return (type, zone) → newest price, from entries of EC2's DescribeSpotPriceHistory in any order."""
    newest: dict[tuple[str, str], tuple[object, float]] = {}
    for entry in history:
        key = (str(entry["InstanceType"]), str(entry["AvailabilityZone"]))
        stamp = entry["Timestamp"]
        if key not in newest or stamp > newest[key][0]:  # type: ignore[operator]
            newest[key] = (stamp, float(str(entry["SpotPrice"])))
    return {key: price for key, (_, price) in newest.items()}
