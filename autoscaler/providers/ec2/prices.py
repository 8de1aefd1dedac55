"""The price of an hour of an instance type: a given table for on-demand, EC2's history for spot."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from adaptdl_elastic.autoscaler.providers.base import ProviderError

PriceChanges = tuple[tuple[float, float], ...]
"""(Since when in seconds since the epoch, price per hour), oldest first."""


def parse_prices(text: str, source: str = "price table") -> dict[str, float]:
    """Return instance type → price per hour, from `{"g5.xlarge": 1.006}` or lines `g5.xlarge,1.006`.

    Raises:
        ProviderError: a line or entry is invalid; the text names it.
    """
    if text.lstrip().startswith("{"):
        try:
            entries: Iterable[tuple[str, object]] = list(json.loads(text).items())
        except json.JSONDecodeError as error:
            raise ProviderError(f"{source}: line {error.lineno}: {error.msg}") from None
    else:
        try:
            lines = list(csv.reader(io.StringIO(text)))
        except csv.Error as error:
            raise ProviderError(f"{source}: is no CSV table: {error}") from None
        rows = [row for row in lines if row and not row[0].startswith("#")]
        entries = [(row[0].strip(), row[1].strip() if len(row) == 2 else ",".join(row[1:])) for row in rows]
        entries = [entry for entry in entries if entry[0].lower() not in ("type", "instance_type")]
    return {name: _price(source, name, value) for name, value in entries}


def read_prices(path: Path) -> dict[str, float]:
    """Return the price table in a file."""
    try:
        return parse_prices(path.read_text(encoding="utf-8-sig"), str(path))
    except OSError as error:
        raise ProviderError(f"price table {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ProviderError(f"price table {path}: is no text: give JSON or CSV in UTF-8") from None


def parse_price_option(text: str) -> tuple[str, float]:
    """Parse `g5.xlarge=1.006`."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ProviderError(f"price {text!r}: write TYPE=PRICE, e.g. g5.xlarge=1.006")
    return name, _price("price", name, value)


def _price(source: str, name: str, value: object) -> float:
    try:
        price = float(str(value))
    except ValueError:
        price = math.nan
    if not (price >= 0 and math.isfinite(price)):
        raise ProviderError(f"{source}: {name}: {value!r} is not a price per hour, e.g. 1.006")
    return price


def spot_price_changes(history: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], PriceChanges]:
    """Return (type, zone) → price changes, from entries of EC2's DescribeSpotPriceHistory in any order."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for entry in history:
        change = (entry["Timestamp"].timestamp(), float(entry["SpotPrice"]))
        found.setdefault((entry["InstanceType"], entry["AvailabilityZone"]), []).append(change)
    return {key: tuple(sorted(changes)) for key, changes in found.items()}
