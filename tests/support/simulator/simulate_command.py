"""The command of `benchmarks/replay.py`: replay a workload under a policy."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from adaptdl_elastic.autoscaler.cli import CommandError, Finite, OptionError, echo, refuse
from adaptdl_elastic.autoscaler.policy import Objective, PolicySettings
from adaptdl_elastic.autoscaler.policy.policy_types import FAIREST, LEAST_FAIR
from simulator.application import Application, read_application
from simulator.baselines import OBEDIENT, POLICIES, make_policy
from simulator.engine import FixedCluster, Simulation, SimulationOptions
from simulator.outcome_report import Report, summarize
from simulator.synthetic import generate_workload, write_applications
from simulator.workload import (
    Submission,
    WorkloadError,
    read_workload,
)

EVENTS_PAY_BELOW = 10.0
"""Pause in seconds below which deciding on every arrival and completion pays off."""


@click.command()
@click.option(
    "--workload", type=click.Path(path_type=Path), help="CSV: name,time,application,num_replicas,batch_size."
)
@click.option(
    "--apps", type=click.Path(path_type=Path), help="Folder with a folder of traces per application."
)
@click.option(
    "--generate",
    type=click.IntRange(min=1),
    metavar="JOBS",
    help="Generate this many jobs instead of reading --workload.",
)
@click.option(
    "--hours",
    type=Finite(min=0.01, max=8760),
    default=8.0,
    show_default=True,
    help="Hours over which the generated jobs are submitted.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Random seed of --generate and --declared-sigma.",
)
@click.option("--nodes", type=click.IntRange(min=1), default=16, show_default=True, help="Number of nodes.")
@click.option("--slots", type=click.IntRange(min=1), default=4, show_default=True, help="Slots per node.")
@click.option(
    "--policy", type=click.Choice(POLICIES), default="goodput", show_default=True, help="Policy that decides."
)
@click.option(
    "--rescale-cost",
    type=Finite(min=0, max=86400),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Pause of a job whenever its replicas change, in seconds.",
)
@click.option(
    "--interval",
    type=Finite(min=1, max=86400),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two decisions.",
)
@click.option(
    "--events/--rounds",
    default=None,
    help="Also decide when a job arrives, ends or reports. [default: if --rescale-cost is below 10]",
)
@click.option(
    "--objective",
    type=click.Choice([o.value for o in Objective]),
    default="completion",
    show_default=True,
    help="Aim for short completion times, or a high power mean of speedups.",
)
@click.option(
    "--fairness",
    type=Finite(min=FAIREST, max=LEAST_FAIR),
    default=1.0,
    show_default=True,
    help="Exponent p of the power mean of --objective speedup.",
)
@click.option(
    "--declared-sigma",
    type=Finite(min=0, max=10),
    default=0.0,
    help="Multiply the declared lengths of jobs by a log-normal error of this sigma.",
)
@click.option("--undeclared", is_flag=True, help="Jobs do not declare their lengths.")
@click.option(
    "--through-coordinator",
    is_flag=True,
    help="Run the real coordinator, with simulated agents that follow its plans at once.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(**given: Any) -> None:
    """Replay a workload with a simulated clock and say what became of its jobs.

    Without --workload and --apps a workload is generated (--generate).
    """
    if given["objective"] != Objective.SPEEDUP.value:
        refuse(("fairness",), "is for --objective speedup")
    try:
        report = _run(given)
    except (WorkloadError, ValueError) as error:
        raise CommandError(str(error)) from None
    values = {"policy": given["policy"], "rescale_cost": given["rescale_cost"], **dataclasses.asdict(report)}
    if given["as_json"]:
        click.echo(json.dumps(values))
    else:
        _show(values)


def _run(given: Mapping[str, Any]) -> Report:
    workload, apps = _inputs(given)
    cost = given["rescale_cost"]
    _check_sizes(given, workload)
    policy, tuned = make_policy(given["policy"])
    if given["through_coordinator"]:
        from simulator.through_coordinator import ThroughCoordinator

        policy = ThroughCoordinator(policy)
    rng = np.random.default_rng(given["seed"])
    factors = np.exp(rng.normal(0.0, given["declared_sigma"], len(workload)))
    options = SimulationOptions(
        pause=cost,
        interval=given["interval"],
        events=cost < EVENTS_PAY_BELOW if given["events"] is None else given["events"],
        tuned=tuned,
        declared={job.name: float(x) for job, x in zip(workload, factors, strict=True)},
        undeclared=given["undeclared"],
    )
    settings = PolicySettings(objective=Objective(given["objective"]), fairness=given["fairness"])
    cluster = FixedCluster(given["nodes"], given["slots"])
    return summarize(Simulation(workload, apps, cluster, policy, settings, options).run())


def _check_sizes(given: Mapping[str, Any], workload: tuple[Submission, ...]) -> None:
    """Refuse a job of fixed size that can never run, since the replay would not end."""
    nodes, slots = given["nodes"], given["slots"]
    for job in workload if given["policy"] in OBEDIENT else ():
        if job.num_replicas > nodes * slots:
            raise WorkloadError(
                f"job {job.name} asks for {job.num_replicas} replicas, {nodes} nodes of {slots} slots have "
                f"{nodes * slots}; give --nodes or --slots, or another --policy, which chooses sizes itself"
            )


def _inputs(given: Mapping[str, Any]) -> tuple[tuple[Submission, ...], dict[str, Application]]:
    if (given["workload"] is None) != (given["apps"] is None):
        raise OptionError("--workload and --apps go together: jobs, and the traces of their applications")
    if given["workload"] is not None:
        if given["generate"]:
            raise OptionError("give either --workload and --apps, or --generate")
        refuse(("hours",), "is for --generate")
        workload = read_workload(given["workload"])
        names = sorted({job.application for job in workload})
        return workload, {name: read_application(given["apps"] / name) for name in names}
    workload = generate_workload(given["generate"] or 40, given["hours"], given["seed"])
    return workload, _made_up(workload, given)


def _made_up(workload: tuple[Submission, ...], given: Mapping[str, Any]) -> dict[str, Application]:
    import tempfile

    names = sorted({job.application for job in workload})
    with tempfile.TemporaryDirectory() as folder:
        write_applications(Path(folder), given["nodes"], given["slots"])
        return {name: read_application(Path(folder) / name) for name in names}


def _show(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name} {x:.2f}" for name, x in value.items())
        elif isinstance(value, float):
            value = f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3f}"
        echo(f"{key.replace('_', ' '):22s} {value}")


if __name__ == "__main__":
    sys.exit(simulate())
