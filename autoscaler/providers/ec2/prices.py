"""The price of an hour: options, tags and AWS's price list for on-demand, EC2's history for spot."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from adaptdl_elastic.autoscaler.providers.base import ProviderError
from adaptdl_elastic.autoscaler.providers.ec2.errors import explained

PriceChanges = tuple[tuple[float, float], ...]
"""(Since when in seconds since the epoch, price per hour), oldest first."""

HOURS_PER_MONTH = 730.0
"""Hours of the month for which the price list names the price of storage.

Source: https://aws.amazon.com/calculator/calculator-assumptions. AWS bills by the second, and divides by the
hours of the calendar month, which are 672 to 744.
"""

# after which an entry is asked for again; the second: after an error
_KEPT_SECONDS, _RETRY_SECONDS = 86400.0, 300.0
# fields of an entry; without the last two, reservations and capacity blocks would be found, too
_LINUX = "operatingSystem=Linux tenancy=Shared preInstalledSw=NA capacitystatus=Used marketoption=OnDemand"


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


def listed_price(products: Iterable[str]) -> float:
    """Return the on-demand price of a unit in US dollars; the highest of several, 0 if there is none.

    `products` are entries of GetProducts, as JSON.
    """
    terms = [term for one in products for term in json.loads(one)["terms"].get("OnDemand", {}).values()]
    found = [dimension["pricePerUnit"] for term in terms for dimension in term["priceDimensions"].values()]
    return max((float(price.get("USD", 0)) for price in found), default=0.0)


class PriceList:
    """AWS's list of prices. An entry is read once a day; if that fails, the former price holds.

    Args:
        client: A boto3 client of `pricing` in the region `home`.
        region: The region whose prices are wanted.
        clock: Monotonic seconds.

    Attributes:
        lacking: Type → why its price could not be read at the last failure.
    """

    home = "us-east-1"
    """One of the few regions that have the list. It has the prices of all regions."""

    def __init__(self, client: Any, region: str, clock: Callable[[], float]) -> None:
        self._client, self._region, self._clock = client, region, clock
        self._known, self._until, self.lacking = dict[str, float](), dict[str, float](), dict[str, str]()

    def of(self, kinds: Collection[str]) -> dict[str, float]:
        """Return prices of an hour; those that are not known are missing.

        Args:
            kinds: Instance types, for Linux on demand, and types of EBS volumes, for one GB.
        """
        for kind in kinds:
            if self._clock() >= self._until.get(kind, -math.inf):
                self._until[kind] = self._clock() + _KEPT_SECONDS
                try:
                    self._known[kind] = self._read(kind)
                except (ProviderError, AttributeError, LookupError, TypeError, ValueError) as error:
                    self.lacking[kind] = f"the price list could not be read: {' '.join(str(error).split())}"
                    self._until[kind] = self._clock() + _RETRY_SECONDS
        return {kind: self._known[kind] for kind in kinds if kind in self._known}

    def _read(self, kind: str) -> float:
        # the name of an instance type has a dot
        fields = f"{_LINUX} instanceType" if "." in kind else "productFamily=Storage volumeApiName"
        pairs = [pair.split("=") for pair in f"regionCode={self._region} {fields}={kind}".split()]
        filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in pairs]
        # accounts of these regions are valid nowhere else
        if self._region.startswith(("cn-", "us-gov-", "us-iso", "eusc-")):
            raise ProviderError(f"there is none for {self._region}")
        with explained("pricing:GetProducts", kind):
            answer = self._client.get_products(ServiceCode="AmazonEC2", Filters=filters)
        if not (price := listed_price(answer["PriceList"])):
            raise ProviderError(f"it has no {kind} in {self._region}")
        return price if "." in kind else price / HOURS_PER_MONTH
