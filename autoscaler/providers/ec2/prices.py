"""The price of an hour of an instance type: options and tags for on-demand, EC2's history for spot."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from adaptdl_elastic.autoscaler.providers.base import ProviderError
from adaptdl_elastic.autoscaler.providers.ec2.errors import explained

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


def read_spot_prices(ec2: Any, types: Sequence[str], seconds: float) -> dict[tuple[str, str], PriceChanges]:
    """Return (type, zone) → price changes of the last seconds; the price in force before them is the first.

    Args:
        ec2: A boto3 client.
        types: Instance types.
        seconds: 0 for the present price only.

    Raises:
        ProviderError: EC2 does not tell.
    """
    with explained("ec2:DescribeSpotPriceHistory"):
        pages = ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=list(types),
            ProductDescriptions=["Linux/UNIX", "Linux/UNIX (Amazon VPC)"],
            StartTime=datetime.fromtimestamp(time.time() - seconds, timezone.utc),
        )
        return spot_price_changes(entry for page in pages for entry in page["SpotPriceHistory"])


def spot_price_changes(history: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], PriceChanges]:
    """Return (type, zone) → price changes, from entries of EC2's DescribeSpotPriceHistory in any order."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for entry in history:
        change = (entry["Timestamp"].timestamp(), float(entry["SpotPrice"]))
        found.setdefault((entry["InstanceType"], entry["AvailabilityZone"]), []).append(change)
    return {key: tuple(sorted(changes)) for key, changes in found.items()}
