"""What the measured links between a job's nodes say about sizes that it has not run at.

Nodes with slow links are a type of their own in the policy's question: a job's replicas wait for the slowest
link, so they are on nodes with fast links or on nodes with slow ones as far as these have room. On one node
both are alike. On several nodes a measured step counts for the type of its slowest node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.autoscaler.held_facts import Observed
from adaptdl_elastic.autoscaler.policy.policy_types import GoodputModel, NetworkPrior
from adaptdl_elastic.protocol.hints import JobHints, ProfileEntry, TypeProfile
from adaptdl_elastic.rendezvous.schema.node_links import APART, FAST, links_between, nodes_with_slow_links
from adaptdl_elastic.rendezvous.schema.records import Link, NodeRecord

T = TypeVar("T", JobHints, TypeProfile)

_SLOW = "slow-link"


def with_slow_links(name: str) -> str:
    """Return the name of the type of those nodes of a type that have slow links."""
    return f"{name} {_SLOW}".lstrip()


def declared(name: str) -> str:
    """Return the type of nodes whose links may be slow."""
    return name.removesuffix(_SLOW).rstrip() if name.endswith(_SLOW) else name


@dataclass(frozen=True)
class JobLinks:
    """The links between a job's nodes; None: unknown."""

    fast: Link | None = None  # the median of those between nodes with fast links
    slow: Link | None = None  # the median of those with an end at a node with slow links


def links_of(view: View) -> tuple[dict[str, JobLinks], frozenset[str]]:
    """Return the links of each job, and the nodes with slow links, as jobs with agents there see them."""
    found, slow = {}, set[str]()
    for job, agents in view.nodes.items():
        records = {node: seen.record for node, seen in agents.items()}
        links = list(links_between(records))
        if not links:
            continue
        rates = [link.bandwidth for _, link in links]
        # most jobs have links that are alike, for which nothing more is computed
        far = nodes_with_slow_links(records) if max(rates) > APART * min(rates) else frozenset[str]()
        slow |= far
        found[job] = JobLinks(
            _median([link for node, link in links if not far or not {node, link.node} & far]),
            _median([link for node, link in links if {node, link.node} & far] if far else []),
        )
    return found, frozenset(slow)


def _median(links: list[Link]) -> Link | None:
    links.sort(key=lambda link: link.bandwidth)
    return links[(len(links) - 1) // 2] if links else None


def still_valid(hints: JobHints, agents: Mapping[str, Observed[NodeRecord]]) -> JobHints:
    """Return a report without the step times on nodes whose links have changed since they were measured."""
    since = {node: seen.record.links_since for node, seen in agents.items() if seen.record.links_since >= 0}
    if not since:
        return hints
    # the generation of what was measured on another type of nodes is not known
    return _only(
        hints, lambda one: one.generation < 0 or all(since.get(node, -1) <= one.generation for node in one.on)
    )


def over_links(hints: JobHints, slow: frozenset[str], over_slow: bool) -> JobHints:
    """Return a report without the step times on several nodes over links of the other kind.

    Args:
        hints: The report.
        slow: The nodes with slow links.
        over_slow: Whether those over a slow link are kept, or the others.
    """
    return _only(hints, lambda one: not one.on or slow.isdisjoint(one.on) != over_slow) if slow else hints


def _only(hints: JobHints, keep: Callable[[ProfileEntry], bool]) -> JobHints:
    """Return a report with some of its step times, on all types of nodes."""
    found = _kept(hints, keep)
    elsewhere = tuple(_kept(one, keep) for one in found.elsewhere)
    return found if elsewhere == found.elsewhere else replace(found, elsewhere=elsewhere)


def _kept(told: T, keep: Callable[[ProfileEntry], bool]) -> T:
    """Return some of the step times of one type, and θ as far as they determine it on several nodes.

    What they do not determine is as in `goodput.fit_perf_params` before the first step on several nodes, or
    on more than two replicas.
    """
    kept, theta = tuple(one for one in told.profile if keep(one)), told.perf_params
    if len(kept) == len(told.profile):
        return told
    most = max((one.replicas for one in kept if one.nodes > 1), default=1)
    if theta is not None and most <= 2:
        a_c, b_c, a_n, _, a_r, b_r, gamma = theta
        a_n, b_n = a_r if most == 1 else a_n, b_r
        theta = a_c, b_c, a_n, b_n, a_r, b_r, gamma
    return replace(told, profile=kept, perf_params=theta)


def with_network(model: GoodputModel, hints: JobHints, link: Link | None) -> GoodputModel:
    """Return a model that expects of several nodes what the link allows, until their steps are measured."""
    if link is None or link.bandwidth >= FAST or hints.gradient_bytes is None:
        return model
    if model.corrections is not None and model.corrections.several:
        return model
    return replace(model, network=NetworkPrior(link.latency, hints.gradient_bytes / link.bandwidth))


def link_pause(hints: JobHints | None, links: JobLinks | None, paused: bool) -> float:
    """Return the seconds that a job's state takes to another node; 0: not known, or measured.

    Args:
        hints: The job's report.
        links: The links between its nodes.
        paused: Whether a pause of it was measured.
    """
    link = None if links is None else links.fast or links.slow
    if link is None or link.bandwidth >= FAST:
        return 0.0
    if hints is None or not hints.inplace or hints.state_bytes is None:
        return 0.0
    known = paused and any(entry.nodes > 1 for entry in hints.profile)
    return 0.0 if known else hints.state_bytes / link.bandwidth
