from __future__ import annotations

from datetime import datetime, timezone

import pytest

from adaptdl_elastic.autoscaler.providers.base import ProviderError
from adaptdl_elastic.autoscaler.providers.ec2.prices import (
    parse_price_option,
    spot_price_changes,
)
from adaptdl_elastic.autoscaler.providers.ec2.responses import Kind, Prices, trouble_of


def test_the_option() -> None:
    assert parse_price_option("g5.xlarge=1") == ("g5.xlarge", 1.0)
    with pytest.raises(ProviderError, match="TYPE=PRICE"):
        parse_price_option("1.0")
    for wrong in ("-1", "nan", "inf", "much", ""):
        with pytest.raises(ProviderError, match="is not a price per hour"):
            parse_price_option(f"g5.xlarge={wrong}")


def test_the_price_changes_of_each_type_and_zone_in_order() -> None:
    def entry(hour: int, price: str, zone: str = "a") -> dict[str, object]:
        return {
            "InstanceType": "g5.xlarge",
            "AvailabilityZone": zone,
            "SpotPrice": price,
            "Timestamp": datetime(2026, 11, 21, hour, tzinfo=timezone.utc),
        }

    history = [entry(2, "0.4"), entry(1, "0.3"), entry(1, "0.5", "b")]
    one, two = (datetime(2026, 11, 21, hour, tzinfo=timezone.utc).timestamp() for hour in (1, 2))
    assert spot_price_changes(history) == {
        ("g5.xlarge", "a"): ((one, 0.3), (two, 0.4)),
        ("g5.xlarge", "b"): ((one, 0.5),),
    }


def test_an_unknown_spot_price_is_taken_for_on_demand() -> None:
    prices = Prices({"g5.xlarge": 1.0}, {("g5.xlarge", "a"): ((0.0, 0.4), (1.0, 0.3))})
    assert prices.of("g5.xlarge", "a", True) == 0.3
    assert prices.of("g5.xlarge", "b", True) == 1.0
    assert prices.cheapest(["g5.xlarge"], ["a", "b"], True) == (0.3, "g5.xlarge")
    assert prices.dearest(["g5.xlarge"], ["a", "b"], True) == 1.0


@pytest.mark.parametrize(
    ("base", "fraction", "terms"),
    [(0, 1.0, "dddd"), (0, 0.0, "ssss"), (2, 0.0, "ddss"), (0, 0.5, "dsds"), (1, 0.25, "ddss")],
)
def test_a_mixed_group_launches_by_its_terms(base: int, fraction: float, terms: str) -> None:
    kind = Kind(("g5.xlarge",), base, fraction, mixed=True)
    found = ""
    for _ in range(4):
        found += "s" if kind.next_is_spot(found.count("d"), found.count("s")) else "d"
    assert found == terms


def test_only_the_newest_launch_counts() -> None:
    def activity(status: str, text: str = "Launching a new EC2 instance") -> dict[str, object]:
        return {
            "Description": text,
            "StatusCode": status,
            "StatusMessage": "no capacity",
            "StartTime": datetime(2026, 11, 21, tzinfo=timezone.utc),
        }

    assert trouble_of([]) == ("", 0.0)
    assert trouble_of([activity("Successful"), activity("Failed")]) == ("", 0.0)
    assert trouble_of([activity("InProgress"), activity("Failed")])[0] == "no capacity"
    assert trouble_of([activity("Failed", "Terminating EC2 instance"), activity("Successful")]) == ("", 0.0)
