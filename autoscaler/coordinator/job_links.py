"""What the measured links between a job's nodes say about sizes that it has not run at."""

from __future__ import annotations

from dataclasses import replace

from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.autoscaler.policy.policy_types import GoodputModel, NetworkPrior
from adaptdl_elastic.protocol.hints import JobHints
from adaptdl_elastic.rendezvous.schema.records import Link

FAST = 1e9
"""Bytes per second of one connection from which the link counts as unknown: NCCL uses several of them."""


CHANGED = 1.5
"""Factor of the predicted goodput from which on a job is faster than what it has measured before."""


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
    corrections = model.corrections
    if _outdated(hints, link):
        corrections = corrections and replace(corrections, several=())
        model = replace(model, perf_params=model.perf_params._replace(alpha_n=0.0, beta_n=0.0))
    if corrections is not None and corrections.several:
        return model
    network = NetworkPrior(link.latency, hints.gradient_bytes / link.bandwidth)
    return replace(model, network=network, corrections=corrections)


def _outdated(hints: JobHints, link: Link) -> bool:
    """Return whether the job's steps on several nodes were measured before the link changed.

    The next change returns to several nodes. There they are outdated until steps are as slow as they say.
    """
    if hints.nodes == 1:
        return link.changed == hints.generation
    slow = hints.goodput is not None and hints.goodput < CHANGED * (hints.predicted_goodput or 0.0)
    return 0 <= link.changed == hints.generation - 1 and not slow


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
