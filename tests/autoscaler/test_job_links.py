"""The link between two nodes, on its way from a registration to the coordinator's decision."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_pump import Pump
from coordinator_script import play

from adaptdl_elastic.autoscaler.coordinator.slots import Ledger
from adaptdl_elastic.autoscaler.diagnostics.rows import node_rows
from adaptdl_elastic.autoscaler.policy import allocate
from adaptdl_elastic.protocol.hints import ProfileEntry
from adaptdl_elastic.rendezvous.schema.records import Link

# of a step with 16 samples on one replica: 62 samples/s
THETA = (0.02, 0.015, 0.0, 0.0, 0.0, 0.0, 1.0)
ONE = ProfileEntry(1, 1, 16, 0.26, 0.26, 99, 99)


TRANSFORMER: dict[str, Any] = {"init_batch_size": 16, "max_batch_size": None, "local_bsz_bounds": None}


@pytest.fixture
def pump() -> Pump:
    return Pump(policy=allocate)


def grown(pump: Pump, bandwidth: float, *measured: ProfileEntry) -> None:
    """Let a node join a transformer of 10 M parameters with AdamW, which runs on another one."""
    pump.job("a", max_replicas=2, max_nodes=2)
    first = pump.node("n0", "a", 1, reports=False)
    pump.settle()
    first.report(
        pump.plan("a"), **TRANSFORMER, gradient_bytes=40e6, state_bytes=120e6, perf_params=THETA,
        profile=(ONE, *measured), max_profiled_replicas=1, inplace=True,
    )  # fmt: skip
    second = pump.node("n1", "a", 1, reports=False)
    second.register(host="another", links=(Link("n0", 1e-4, bandwidth),))
    pump.later(120.0).settle()


@pytest.mark.parametrize(
    ("bandwidth", "nodes"),
    [(12.3e6, {"n0"}), (500e6, {"n0", "n1"}), (2e9, {"n0", "n1"})],
)
def test_a_job_grows_over_a_link_only_where_its_gradients_allow_it(
    pump: Pump, bandwidth: float, nodes: set[str]
) -> None:
    grown(pump, bandwidth)
    assert set(pump.placed("a")) == nodes
    play(pump, "ask a replicas=2; settle -> n0=1 n1=1")


def test_the_pause_of_the_first_change_over_a_link_is_that_of_moving_the_state(pump: Pump) -> None:
    grown(pump, 500e6)
    assert "pays the 0.24 s pause" in pump.plan("a").reason


def test_measured_steps_replace_the_prediction_from_the_link(pump: Pump) -> None:
    grown(pump, 12.3e6, ProfileEntry(2, 2, 8, 0.14, 0.15, 99, 99))
    assert set(pump.placed("a")) == {"n0", "n1"}


def test_a_change_that_the_next_report_refutes_is_taken_back_within_two_seconds(pump: Pump) -> None:
    grown(pump, 500e6)
    assert set(pump.placed("a")) == {"n0", "n1"}
    first = next(agent for agent in pump.agents if agent.node == "n0")
    slow = ProfileEntry(2, 2, 8, 4.0, 4.0, 0, 3)
    first.report(
        pump.plan("a"), **TRANSFORMER, perf_params=(0.02, 0.015, 3.86, 0.0, 0.0, 0.0, 1.0),
        profile=(ONE, slow), max_profiled_replicas=2, inplace=True,
    )  # fmt: skip
    pump.later(2.0)
    assert set(pump.placed("a")) == {"n0"}


def test_nodes_are_shown_with_their_links(pump: Pump) -> None:
    grown(pump, 12.3e6)
    rows = node_rows(pump.view(), Ledger(pump.view()))
    assert [row["links"] for row in rows] == [{}, {"n0": [1e-4, 12.3e6]}]
