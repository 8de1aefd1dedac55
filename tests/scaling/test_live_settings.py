"""What a running autoscaler takes over from the tags of its groups, and what it refuses."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from scaling_cluster import Cluster

from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.autoscaler.scaling.live_settings import changed, usable
from adaptdl_elastic.autoscaler.scaling.setting_texts import parse_change
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

NOW = 1_000_000.0


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("max-hourly-cost=6", {"max_hourly_cost": 6.0}),
        ("max-hourly-cost=", {"max_hourly_cost": None}),
        ("hour-value=0", {"hour_value": 0.0}),
        ("max-nodes=8", {"max_nodes": 8.0}),
        ("utilisation=0.5:1", {"low": 0.5, "high": 1.0}),
        ("utilisation=", {"low": None, "high": None}),
        ("deadline=2h", {"deadlines/*": NOW + 7200}),
        ("deadline=train=90s", {"deadlines/train": NOW + 90}),
        ("deadline=train=", {"deadlines/train": None}),
        ("deadline=", {"deadlines/*": None}),
        ("max-job-cost=train=50", {"max_job_costs/train": 50.0}),
    ],
)
def test_the_text_of_a_change_is_parsed(text: str, values: dict[str, float | None]) -> None:
    assert parse_change(text, NOW) == values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-hourly-cost", "give KEY=VALUE, where KEY is hour-value, max-hourly-cost"),
        ("queue-url=x", "give KEY=VALUE, where KEY is"),
        ("max-hourly-cost=much", "'much' is no number"),
        ("utilisation=1", "LOW:HIGH"),
        ("deadline=soon", "2h30m"),
        ("deadline=a b=2h", "'a b' cannot be used"),
        ("max-job-cost=train=much", "[JOB=]AMOUNT"),
    ],
)
def test_a_change_that_cannot_be_read_is_one_line(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_change(text, NOW)


def test_values_hold_instead_of_those_given_and_others_stay() -> None:
    base = ScalingSettings(max_nodes=4, max_hourly_cost=10.0, deadlines={"a": 1.0, "*": 2.0})
    values = {"max_nodes": 8.0, "deadlines/a": 5.0, "deadlines/b": 6.0, "max_job_costs/*": 50.0}
    assert changed(base, values) == ScalingSettings(
        max_nodes=8, max_hourly_cost=10.0, deadlines={"a": 5.0, "*": 2.0, "b": 6.0}, max_job_costs={"*": 50.0}
    )


@pytest.mark.parametrize(
    "values",
    [
        {"max_nodes": 2.5},
        {"max_nodes": math.inf},
        {"max_nodes": -1.0},
        {"max_hourly_cost": math.nan},
        {"max_hourly_cost": 0.0},
        {"max_job_costs/train": -1.0},
        {"max_job_costs": 1.0},
        {"max_nodes/train": 1.0},
        {"grow_after": 1.0},
        {"low": 2.0},
    ],
)
def test_values_out_of_range_and_unknown_names_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"needs|there is no setting"):
        changed(ScalingSettings(), values)


def test_tags_hold_before_the_command_line(store: MemoryStore) -> None:
    cluster = Cluster(store)
    cluster.ruler.change(ScalingSettings(max_nodes=1))
    cluster.provider.settings = ("max-nodes=3", "max-job-cost=", "max-hourly-cost=much")
    cluster.submit(nodes=3).ticks(5)
    assert len(cluster.instances) == 3
    assert cluster.events("settings") == [{"message": "set by tags: max_nodes 3"}]
    (warning,) = (one for one in cluster.events("warning") if "tag" in one["message"])
    assert "what a tag says cannot be used: 'max-hourly-cost=much'" in warning["message"]
    # a change holds from the next look on
    cluster.provider.settings = ("max-nodes=4",)
    cluster.tick()
    assert cluster.events("settings")[-1] == {"message": "set by tags: max_nodes 4"}


def test_a_value_that_does_not_fit_cancels_no_limit_of_what_may_be_spent() -> None:
    base = ScalingSettings(min_nodes=0, max_nodes=4)
    values = {"min_nodes": 5.0, "max_hourly_cost": 12.0, "max_job_costs/a": 7.0, "nonsense": 1.0}
    settings, taken, refused = usable(base, values)
    assert settings == replace(base, max_hourly_cost=12.0, max_job_costs={"a": 7.0})
    assert taken == {"max_hourly_cost": 12.0, "max_job_costs/a": 7.0}
    assert len(refused) == 2
    assert any("--min-nodes 5 and --max-nodes 4" in why for why in refused)


def test_values_that_fit_only_together_are_all_taken() -> None:
    base = ScalingSettings(min_nodes=3, max_nodes=4)
    settings, taken, refused = usable(base, {"max_nodes": 2.0, "min_nodes": 1.0, "low": 2.0})
    assert (settings.min_nodes, settings.max_nodes) == (1, 2)
    assert set(taken) == {"max_nodes", "min_nodes"}
    assert len(refused) == 1


def test_a_live_setting_that_contradicts_the_command_line_is_a_warning_only(store: MemoryStore) -> None:
    cluster = Cluster(store)
    cluster.ruler.change(ScalingSettings(min_nodes=1, max_nodes=2))
    cluster.submit(nodes=2)
    cluster.provider.settings = ("max-nodes=0",)
    cluster.tick()
    assert len(cluster.instances) == 2
    (warning,) = cluster.status().warnings
    assert "what a tag says cannot be used" in warning
    assert "--min-nodes 1 and --max-nodes 0" in warning
