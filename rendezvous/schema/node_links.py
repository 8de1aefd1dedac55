"""Find the nodes of a job whose links are slower than those of the others. Pure functions.

A node often has one wire, so all of its links are slow together. Its fastest link tells its wire's speed: a
link between a fast node and a slow one is slow, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from adaptdl_elastic.rendezvous.schema.records import Link, NodeRecord

FAST = 1e9
"""Bytes per second of one connection from which a link counts as unknown: NCCL uses several of them."""

APART = 3.0
"""Ratio of the fastest links of two nodes from which on the slower node is said to have slow links."""

MOVED = 1.5
"""Ratio of two measurements of a node's fastest link from which on the link has changed."""


def links_between(agents: Mapping[str, NodeRecord]) -> Iterator[tuple[str, Link]]:
    """Yield the links from agents of other hosts, which count, each with the node that has measured it."""
    for node, record in agents.items():
        for link in record.links:
            if link.node in agents and agents[link.node].host != record.host:
                yield node, link


def fastest_links(agents: Mapping[str, NodeRecord]) -> dict[str, float]:
    """Return the bytes per second of each node's fastest link; nodes without a known link are left out.

    The last measurement of a link counts, unless one of its nodes has measured other links later.
    """
    newest: dict[tuple[str, str], tuple[int, float]] = {}
    for node, link in links_between(agents):
        ends = (node, link.node) if node < link.node else (link.node, node)
        told = agents[node].links_at, link.bandwidth
        newest[ends] = max(told, newest.get(ends, told))
    found: dict[str, float] = {}
    for ends, (at, bandwidth) in newest.items():
        for node in ends:
            if at >= agents[node].links_at:
                found[node] = max(bandwidth, found.get(node, 0.0))
    return found


def nodes_with_slow_links(agents: Mapping[str, NodeRecord]) -> frozenset[str]:
    """Return the nodes whose fastest link is `APART` times as slow as the fastest link of the job."""
    found = fastest_links(agents)
    limit = min(max(found.values(), default=0.0), FAST) / APART
    return frozenset(node for node, rate in found.items() if rate < limit)
