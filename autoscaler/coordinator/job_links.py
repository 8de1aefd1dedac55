"""What the measured links between a job's nodes say about sizes that it has not run at."""

from __future__ import annotations

from dataclasses import replace

from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.autoscaler.policy.policy_types import GoodputModel, NetworkPrior
from adaptdl_elastic.protocol.hints import JobHints
from adaptdl_elastic.rendezvous.schema.records import Link

FAST = 1e9
"""Bytes per second of one connection from which the link counts as unknown: NCCL uses several of them."""


def links_of(view: View) -> dict[str, Link]:
    """Return the median of the links between the nodes of each job, unless it is unknown or `FAST`."""
    found = {}
    for job, agents in view.nodes.items():
        links = [link for seen in agents.values() for link in seen.record.links if link.node in agents]
        links.sort(key=lambda link: link.bandwidth)
        if links and (middle := links[(len(links) - 1) // 2]).bandwidth < FAST:
            found[job] = middle
    return found


def with_network(model: GoodputModel, hints: JobHints, link: Link | None) -> GoodputModel:
    """Return a model that expects of several nodes what the link allows, until their steps are measured."""
    if link is None or hints.gradient_bytes is None:
        return model
    if model.corrections is not None and model.corrections.several:
        return model
    return replace(model, network=NetworkPrior(link.latency, hints.gradient_bytes / link.bandwidth))


def link_pause(hints: JobHints | None, link: Link | None, paused: bool) -> float:
    """Return the seconds that a job's state takes to another node; 0: not known, or measured.

    Args:
        hints: The job's report.
        link: The link between its nodes.
        paused: Whether a pause of it was measured.
    """
    if hints is None or not hints.inplace or link is None or hints.state_bytes is None:
        return 0.0
    known = paused and any(entry.nodes > 1 for entry in hints.profile)
    return 0.0 if known else hints.state_bytes / link.bandwidth
