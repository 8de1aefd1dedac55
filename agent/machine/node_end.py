"""`python -m adaptdl_elastic.agent.machine.node_end`: the dead man's switch of a node (docs/howto/ec2.md).

It runs beside the agent, in a process of its own: a node whose agent has ended or never started costs as
much. When the node has to leave, the agent is asked to stop first, so that it saves; then the instance leaves
its group, whose desired capacity is lowered with it, since the group would replace one that only stops.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from adaptdl_elastic.agent.machine.dead_mans_switch import DEFAULT_SECONDS, LEAST_SECONDS, Look, watch
from adaptdl_elastic.agent.machine.interruption import discover
from adaptdl_elastic.protocol.environment import CLUSTER, ETCD
from adaptdl_elastic.protocol.hints import MalformedHintsError
from adaptdl_elastic.protocol.hints import decode as decode_hints
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import NodeRecord, Plan
from adaptdl_elastic.rendezvous.store.base import Store, StoreError, read_record
from adaptdl_elastic.rendezvous.store.connect import StoreOptions, connect

logger = logging.getLogger(__name__)

STOP_SECONDS = 180.0
"""Seconds that the agent has to save and end; its unit gives it 110."""

_ATTEMPTS, _PAUSE = 5, 20.0  # to leave the group, and seconds between two attempts


def take_look(endpoint: str, cluster: str, instance: str, environ: Mapping[str, str]) -> Look:
    """Connect to the store and look whether this node is accounted for.

    The connection is a new one each time: certificates that are missing or refused may be there later.
    """
    try:
        with connect(endpoint, options=StoreOptions.from_environment(environ)) as store:
            return read_look(store, Keys(cluster), instance)
    except (StoreError, ValueError) as error:
        return Look(trouble=str(error))
    except Exception as error:  # a defect must not keep a node for ever
        logger.exception("looking at the store")
        return Look(trouble=f"{type(error).__name__}: {error}")


def read_look(store: Store, keys: Keys, instance: str) -> Look:
    """Read from the store whether this node is accounted for.

    Raises:
        StoreError: the store cannot be read.
    """
    autoscaler = store.get(keys.autoscaler_leader) is not None
    coordinator = store.get(keys.coordinator_leader) is not None
    plans = _plans_on(store, keys, instance)
    if not plans:
        return Look("", autoscaler, coordinator, False, _kept(store, keys, instance))
    steps = tuple((plan.job, _last_step(store, keys, plan)) for plan in plans)
    return Look("", autoscaler, coordinator, True, steps if all(step for _, step in steps) else None)


def _kept(store: Store, keys: Keys, instance: str) -> tuple[tuple[str, int], ...]:
    """Return what stands for the steps of a node without a replica.

    It changes with each report of an autoscaler that keeps the node, as `--min-nodes` asks it to.
    """
    item = store.get(keys.autoscaler_status)
    status = read_record(AutoscalerStatus, item)
    if item is None or status is None or any(i.instance == instance and i.leaves for i in status.idle):
        return ()
    return (("autoscaler", item.mod_revision),)


def _last_step(store: Store, keys: Keys, plan: Plan) -> int:
    """Return the last step that a job has reported since it was started; 0 if it has reported none."""
    item = store.get(keys.job(plan.job, "hints"))
    try:
        hints = None if item is None else decode_hints(item.value)
    except MalformedHintsError:
        return 0
    return 0 if hints is None or hints.generation < plan.first else hints.step


def _plans_on(store: Store, keys: Keys, instance: str) -> list[Plan]:
    """Return the newest plans of jobs with replicas on this node, and whose agent is registered."""
    found = []
    for item in store.range(keys.nodes).items:
        node = read_record(NodeRecord, item)
        if node is None or node.instance != instance:
            continue
        plan = read_record(Plan, store.get(keys.job(node.job, "plan")))
        if plan is not None and plan.run == node.run and any(p.node == node.node for p in plan.placements):
            found.append(plan)
    return found


def end_node(
    instance: str,
    stop: Callable[[], None],
    autoscaling: Callable[[], Any],
    power_off: Callable[[], None],
    wait: Callable[[float], None],
) -> None:
    """Stop the agent, then end the instance.

    Args:
        instance: this instance.
        stop: asks the agent to save and end, and waits for that.
        autoscaling: returns a boto3 client of EC2 Auto Scaling.
        power_off: switches the machine off, if it cannot leave its group.
        wait: called with the seconds between two attempts.
    """
    try:
        stop()
        logger.warning("the agent has ended")
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the agent could not be stopped, and goes with the machine: %s", error)
    for attempt in range(_ATTEMPTS):
        if attempt:
            wait(_PAUSE)
        try:
            autoscaling().terminate_instance_in_auto_scaling_group(
                InstanceId=instance, ShouldDecrementDesiredCapacity=True
            )
        except Exception as error:  # whatever it is: what remains is to switch the machine off
            logger.warning("%s cannot leave its group: %s", instance, error)
        else:
            logger.warning("%s leaves its group, which orders no other in its place", instance)
            return
    logger.warning("%s is switched off instead: its group may order another one", instance)
    power_off()


def parse_options(arguments: list[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """Return the options of the command line; print an error and exit if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m adaptdl_elastic.agent.machine.node_end",
        description="End this EC2 instance if its autoscaler and etcd have not been heard for long.",
    )
    parser.add_argument("--etcd", default=environ.get(ETCD), help="etcd of the cluster")
    parser.add_argument("--cluster", default=environ.get(CLUSTER) or Keys().cluster)
    parser.add_argument(
        "--after", type=_silence, default=DEFAULT_SECONDS, help="seconds of silence, or without a step"
    )
    parser.add_argument("--stop", required=True, help="command that stops the agent and waits for its end")
    options = parser.parse_args(arguments)
    if not options.etcd:
        parser.error("no etcd was given: give --etcd HOST:PORT or set ADAPTDL_ETCD")
    return options


def main(
    arguments: list[str],
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """Watch until the node has to leave, and end it; return the exit code.

    Args:
        arguments: the command line.
        environ: the environment.
        clock: monotonic seconds.
        wait: called with the seconds between two looks.
    """
    options = parse_options(arguments, environ)
    logging.basicConfig(level=logging.WARNING, format="adaptdl: %(message)s")
    identity = discover(environ)
    if identity is None:
        print("adaptdl: this is no EC2 instance, or its metadata service does not answer", file=sys.stderr)
        return 1
    watch(
        lambda: take_look(options.etcd, options.cluster, identity.instance, environ),
        logger.warning,
        clock,
        wait,
        options.after,
    )
    end_node(
        identity.instance,
        lambda: _run(shlex.split(options.stop)),
        autoscaling_client,
        lambda: _run(["systemctl", "poweroff"]),
        wait,
    )
    return 0


def _silence(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not LEAST_SECONDS <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: give at least {LEAST_SECONDS:g} seconds")
    return seconds


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=STOP_SECONDS)


def autoscaling_client() -> Any:
    """Return boto3's client of the Auto Scaling API."""
    import boto3  # only when the node ends: it takes a second and memory

    return boto3.client("autoscaling")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
