"""On-demand prices and the price of storage, from AWS's price list."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import pytest
from botocore.exceptions import ConnectTimeoutError
from moto_process import IMAGE, REGION, Moto, make_group
from thin_aws import Pricing, client_error, product

from adaptdl_elastic.autoscaler.providers.base import ProviderError
from adaptdl_elastic.autoscaler.providers.ec2.prices import HOURS_PER_MONTH, PriceList, listed_price
from adaptdl_elastic.autoscaler.providers.ec2.provider import PRICES_TAG, Ec2Provider
from adaptdl_elastic.autoscaler.providers.ec2.responses import Kind, Prices, instances_of, kind_of, pool_of

DAY = 86400.0
GB_HOUR = 0.08 / HOURS_PER_MONTH
DENIED = client_error("AccessDeniedException", "not authorized", "GetProducts")

# in the shape of AWS's answers; many attributes, and further terms, are left out
INSTANCE = """{"product": {"productFamily": "Compute Instance", "attributes": {"instanceType": "g5.xlarge",
"regionCode": "us-east-1", "operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA",
"capacitystatus": "Used", "marketoption": "OnDemand", "usagetype": "BoxUsage:g5.xlarge", "gpuMemory": "NA",
"licenseModel": "No License required", "operation": "RunInstances"}, "sku": "3DG6WBEEDC29ZPS7"},
"serviceCode": "AmazonEC2", "terms": {
"OnDemand": {"3DG6WBEEDC29ZPS7.JRTCKXETXF": {"priceDimensions": {"3DG6WBEEDC29ZPS7.JRTCKXETXF.6YS6EN2CT7":
{"unit": "Hrs", "endRange": "Inf", "description": "$1.006 per On Demand Linux g5.xlarge Instance Hour",
"appliesTo": [], "rateCode": "3DG6WBEEDC29ZPS7.JRTCKXETXF.6YS6EN2CT7", "beginRange": "0",
"pricePerUnit": {"USD": "1.0060000000"}}}, "sku": "3DG6WBEEDC29ZPS7", "effectiveDate": "2026-11-01T00:00:00Z",
"offerTermCode": "JRTCKXETXF", "termAttributes": {}}},
"Reserved": {"3DG6WBEEDC29ZPS7.38NPMPTW36": {"priceDimensions": {"3DG6WBEEDC29ZPS7.38NPMPTW36.2TG2D8R56U":
{"unit": "Quantity", "description": "Upfront Fee", "appliesTo": [], "pricePerUnit": {"USD": "7612"}},
"3DG6WBEEDC29ZPS7.38NPMPTW36.6YS6EN2CT7": {"unit": "Hrs", "pricePerUnit": {"USD": "0.2900000000"}}},
"sku": "3DG6WBEEDC29ZPS7", "offerTermCode": "38NPMPTW36",
"termAttributes": {"LeaseContractLength": "3yr", "PurchaseOption": "Partial Upfront"}}}},
"version": "20261101000000", "publicationDate": "2026-11-01T00:00:00Z"}"""
STORAGE = """{"product": {"productFamily": "Storage", "attributes": {"volumeApiName": "gp3",
"volumeType": "General Purpose", "regionCode": "us-east-1", "usagetype": "EBS:VolumeUsage.gp3",
"maxVolumeSize": "16 TiB", "storageMedia": "SSD-backed", "operation": ""}, "sku": "JG3KUJMBRGHV3N8G"},
"serviceCode": "AmazonEC2", "terms": {"OnDemand": {"JG3KUJMBRGHV3N8G.JRTCKXETXF": {"priceDimensions":
{"JG3KUJMBRGHV3N8G.JRTCKXETXF.6YS6EN2CT7": {"unit": "GB-Mo", "endRange": "Inf",
"description": "$0.08 per GB-month of General Purpose (gp3) provisioned storage - US East (N. Virginia)",
"appliesTo": [], "rateCode": "JG3KUJMBRGHV3N8G.JRTCKXETXF.6YS6EN2CT7", "beginRange": "0",
"pricePerUnit": {"USD": "0.0800000000"}}}, "sku": "JG3KUJMBRGHV3N8G", "offerTermCode": "JRTCKXETXF",
"effectiveDate": "2026-11-01T00:00:00Z", "termAttributes": {}}}}, "version": "20261101000000"}"""


@pytest.mark.parametrize(
    ("products", "price"),
    [
        ([INSTANCE], 1.006),
        ([STORAGE], 0.08),
        ([], 0.0),
        ([json.dumps({"terms": {}}), json.dumps({"terms": {"Reserved": {}}})], 0.0),
        ([json.dumps(product("0.0000000000")), INSTANCE, json.dumps(product("0.9"))], 1.006),
    ],
)
def test_the_on_demand_price_of_entries(products: list[str], price: float) -> None:
    assert listed_price(products) == price


class Listed:
    """A price list at a time that the test sets."""

    def __init__(self, region: str = REGION, **prices: str) -> None:
        self.now = 0.0
        self.pricing = Pricing(**prices)
        self.list = PriceList(self.pricing, region, lambda: self.now)


def test_the_price_list_is_asked_for_shared_linux_and_for_storage_by_region() -> None:
    listed = Listed(g5_xlarge="1.2580000000", gp3="0.0952000000")
    assert listed.list.of(["g5.xlarge"]) == {"g5.xlarge": 1.258}
    assert listed.pricing.filters == {
        **{"regionCode": REGION, "instanceType": "g5.xlarge", "operatingSystem": "Linux"},
        **{"tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used"},
        "marketoption": "OnDemand",
    }
    assert listed.list.of(["gp3"]) == {"gp3": pytest.approx(0.0952 / 730)}
    assert listed.pricing.filters == {
        **{"regionCode": REGION, "productFamily": "Storage", "volumeApiName": "gp3"}
    }


def test_an_entry_is_asked_for_once_a_day_and_the_last_one_holds_when_that_fails() -> None:
    listed = Listed(g5_xlarge="1")
    for listed.now in (0.0, 5.0, DAY - 1):
        assert listed.list.of(["g5.xlarge"]) == {"g5.xlarge": 1.0}
    assert len(listed.pricing.asked) == 1
    listed.now, listed.pricing.prices = DAY, {"g5.xlarge": "2"}
    assert listed.list.of(["g5.xlarge"]) == {"g5.xlarge": 2.0}
    listed.now, listed.pricing.fault = 2 * DAY, DENIED
    for _ in range(3):
        assert listed.list.of(["g5.xlarge"]) == {"g5.xlarge": 2.0}
    assert len(listed.pricing.asked) == 3, "not at every look, which would have to wait for it"
    listed.now, listed.pricing.fault, listed.pricing.prices = 2 * DAY + 300, None, {"g5.xlarge": "3"}
    assert listed.list.of(["g5.xlarge"]) == {"g5.xlarge": 3.0}


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (DENIED, "no permission for pricing:GetProducts on g5.xlarge: add it to the role in use"),
        (ConnectTimeoutError(endpoint_url="https://x"), "AWS cannot be reached"),
        (client_error("500", "<html>\n<p>no\n"), "<html> <p>no"),
        (KeyError("terms"), "terms"),
        (None, "it has no g5.xlarge in eu-central-1"),
    ],
)
def test_why_a_price_is_not_known(fault: Exception | None, why: str) -> None:
    listed = Listed()
    listed.pricing.fault = fault
    assert listed.list.of(["g5.xlarge"]) == {}
    assert listed.list.lacking["g5.xlarge"].startswith("the price list could not be read: ")
    assert why in listed.list.lacking["g5.xlarge"]
    assert "\n" not in listed.list.lacking["g5.xlarge"]


@pytest.mark.parametrize("region", ["cn-north-1", "us-gov-west-1"])
def test_accounts_that_have_no_list_do_not_ask(region: str) -> None:
    listed = Listed(region, g5_xlarge="1")
    assert listed.list.of(["g5.xlarge"]) == {}
    assert (listed.pricing.asked, region in listed.list.lacking["g5.xlarge"]) == ([], True)


DISKS = [
    {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 100, "VolumeType": "gp3", "Encrypted": True}},
    {"DeviceName": "/dev/sdb", "Ebs": {"VolumeSize": 50, "VolumeType": "st1"}},
    {"DeviceName": "/dev/sdc", "Ebs": {"VolumeType": "gp3"}},  # as large as the image says
    {"DeviceName": "/dev/sdd", "Ebs": {"VolumeSize": 50}},
    {"DeviceName": "/dev/sde", "VirtualName": "ephemeral0"},
    {"DeviceName": "/dev/sdf", "NoDevice": ""},
]


@pytest.mark.parametrize("group", [{}, {"MixedInstancesPolicy": {}}])
def test_the_volumes_of_a_node_are_those_of_its_template(group: dict[str, Any]) -> None:
    kind = kind_of(group, {"InstanceType": "g5.xlarge", "BlockDeviceMappings": DISKS})
    assert kind.volumes == (("gp3", 100.0), ("st1", 50.0), ("gp3", 0.0))
    assert kind_of(group, {"InstanceType": "g5.xlarge"}).volumes == ()


@pytest.mark.parametrize("spot", [False, True])
def test_the_price_of_an_instance_and_of_an_offer_has_its_volumes(spot: bool) -> None:
    bare = Prices({"g5.xlarge": 1.0}, {("g5.xlarge", "a"): ((0.0, 0.3), (1800.0, 0.4))})
    prices = bare.plus(0.01)
    kind = Kind(("g5.xlarge",), on_demand_above_base=0.0 if spot else 1.0)
    entry = {"InstanceId": "i-1", "LifecycleState": "InService", "InstanceType": "g5.xlarge"}
    group = {"AutoScalingGroupName": "workers", "Instances": [{**entry, "AvailabilityZone": "a"}]}
    group |= {"AvailabilityZones": ["a"], "DesiredCapacity": 1, "MinSize": 0, "MaxSize": 4}
    launch = datetime(1970, 1, 1, tzinfo=timezone.utc)
    (one,), _ = instances_of(group, kind, {"i-1": {"LaunchTime": launch}}, prices, {})
    offer = pool_of(group, kind, (one,), prices, {})
    now, first, second = (0.41, 0.31, 0.41) if spot else (1.01, 1.01, 1.01)
    assert (one.hourly_price, offer.hourly_price, offer.highest_price) == pytest.approx((now, now, now))
    assert one.cost(0.0, 3600.0) == pytest.approx((first + second) / 2)
    assert bare.spot["g5.xlarge", "a"][0] == (0.0, 0.3), "another group may have other volumes"


def with_disk(moto: Moto, name: str = "workers", **more: Any) -> None:
    """A group whose nodes have a volume of 100 GB, of gp3."""
    make_group(moto, name, **more)
    data: dict[str, Any] = {"ImageId": IMAGE, "InstanceType": "g5.xlarge", "BlockDeviceMappings": DISKS[:1]}
    if more.get("spot"):
        data["InstanceMarketOptions"] = {"MarketType": "spot"}
    moto.client("ec2").create_launch_template_version(LaunchTemplateName=name, LaunchTemplateData=data)


@pytest.mark.processes
def test_options_come_before_tags_and_tags_before_the_list(moto: Moto) -> None:
    types = ("g5.xlarge", "g6.xlarge", "g6e.xlarge")
    names = ["one", "two", "three"]
    for name, kind in zip(names, types, strict=True):
        make_group(moto, name, types=(kind,))
    pricing = Pricing(g5_xlarge="1.1", g6_xlarge="1.2", g6e_xlarge="1.3")
    ours = Ec2Provider(names, {"g5.xlarge": 3.1}, clients={"pricing": pricing})
    ours.tag("one", PRICES_TAG, "g5.xlarge=2.1 g6.xlarge=2.2")
    assert [pool.hourly_price for pool in ours.capacity().pools] == [3.1, 2.2, 1.3]
    assert pricing.asked == ["g6e.xlarge"], "the list is not asked for what is given"
    # nor for storage, where the templates name no volume
    ours.tag("one", PRICES_TAG, "")
    assert [pool.hourly_price for pool in ours.capacity().pools] == [3.1, 1.2, 1.3]


@pytest.mark.processes
def test_an_instance_of_a_type_that_its_group_launches_no_more_has_a_price(moto: Moto) -> None:
    make_group(moto, "workers", desired=1)
    data = {"ImageId": IMAGE, "InstanceType": "g6.xlarge"}
    moto.client("ec2").create_launch_template_version(LaunchTemplateName="workers", LaunchTemplateData=data)
    ours = Ec2Provider(["workers"], {"g6.xlarge": 0.8}, clients={"pricing": Pricing(g5_xlarge="1.1")})
    now = ours.capacity()
    assert [(one.instance_type, one.hourly_price) for one in now.instances] == [("g5.xlarge", 1.1)]
    assert now.pool("workers").hourly_price == 0.8


@pytest.mark.processes
def test_without_any_price_the_error_says_why_the_list_has_none(moto: Moto) -> None:
    make_group(moto, "workers")
    pricing = Pricing()
    pricing.fault = DENIED
    ours = Ec2Provider(["workers"], {}, clients={"pricing": pricing})
    with pytest.raises(ProviderError) as error:
        ours.capacity()
    assert "no price is known for g5.xlarge: give --price g5.xlarge=PRICE (the price list" in str(error.value)
    assert "no permission for pricing:GetProducts" in str(error.value)


@pytest.mark.processes
def test_the_volume_of_the_template_is_paid_for_with_each_node(moto: Moto) -> None:
    with_disk(moto, "spot", spot=True, desired=1)
    with_disk(moto, "demand", desired=1)
    make_group(moto, "bare", desired=1)
    spot = {("g5.xlarge", f"{REGION}a"): ((0.0, 0.3), (1.0, 0.4))}
    pricing = Pricing(gp3="0.08", g5_xlarge="1.258")
    ours = Ec2Provider(["spot", "demand", "bare"], {}, clients={"pricing": pricing}, spot_prices=lambda: spot)
    now, more = ours.capacity(), 100 * GB_HOUR
    assert now.warnings == ()
    expected = {"spot": 0.4 + more, "demand": 1.258 + more, "bare": 1.258}
    assert {one.pool: one.hourly_price for one in now.instances} == pytest.approx(expected)
    assert {pool.name: pool.hourly_price for pool in now.pools} == pytest.approx(expected)
    (changes,) = (one.price_changes for one in now.instances if one.pool == "spot")
    assert [price for _, price in changes] == pytest.approx([0.3 + more, 0.4 + more])
    assert pricing.asked.count("gp3") == 1


@pytest.mark.processes
def test_storage_without_a_price_is_left_out_and_said_once(moto: Moto) -> None:
    with_disk(moto, "spot", spot=True)
    with_disk(moto, "demand", desired=1)
    pricing = Pricing()
    pricing.fault = DENIED
    ours = Ec2Provider(["spot", "demand"], {"g5.xlarge": 1.0}, clients={"pricing": pricing})
    for _ in range(2):
        now = ours.capacity()
        (warning,) = now.warnings
        assert "no gp3 volume is on the bill: the price list could not be read: no permission" in warning
        assert [one.hourly_price for one in now.instances] == [1.0]
    assert pricing.asked == ["gp3"]
