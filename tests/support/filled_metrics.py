"""A cluster in a store in memory that fills every metric of a coordinator."""

from __future__ import annotations

from at_once import decide_at_once
from coordinator_pump import Pump

from adaptdl_elastic.autoscaler.diagnostics.prometheus import CoordinatorMetrics
from adaptdl_elastic.protocol.hints import Straggler
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus, JobCost
from adaptdl_elastic.rendezvous.schema.records import GpuUsage, NodeUsage, encode


def filled_pump() -> Pump:
    """Return a cluster in which every metric has a value."""
    pump = Pump()
    pump.job("a")
    pump.node("n0", "a", 4)
    pump.job("b", min_replicas=9)
    pump.node("n0", "b", 4)
    pump.settle()
    agent = pump.agents[0]
    figures = {"throughput": 5000.0, "efficiency": 0.8, "gain": 3.0, "lr_factor": 2.0, "progress": 0.25}
    agent.report(pump.plan("a"), **figures, goodput=3900.0)
    pump.ask("a", replicas=2)
    pump.settle()
    stragglers = (Straggler(3, "n7", "data", 3.5),)
    agent.report(pump.plan("a"), **figures, stragglers=stragglers, reported={"loss": 0.25})
    gpu = GpuUsage(0.5, 3 << 30, 80 << 30)
    pump.store.put(
        pump.keys.usage_of("n0"), encode(NodeUsage("n0", 0.75, 2 << 30, 8 << 30, (gpu,), pump.view().wall))
    )
    pump.store.put(
        pump.keys.autoscaler_status,
        encode(AutoscalerStatus("static", 1, 1, 2.5, 7.0, jobs=(JobCost("a", 6.5, 2.5, 9.0, 3600.0),))),
    )
    return pump.settle()


def observe(pump: Pump, metrics: CoordinatorMetrics) -> None:
    """Tell the metrics of one more decision."""
    metrics.leading(True)
    view = pump.view()
    memory = pump.memory
    pump.ask("a", replicas=3)
    decided = decide_at_once(
        pump.view(), memory, keys=pump.keys, fence=pump.fence, settings=pump.settings, policy=pump.policy
    )
    metrics.decided(view, decided, 0.01)
