"""Find the nodes of a job whose links are slower than those of the others. Pure functions.

A node often has one wire, so all of its links are slow together. Its fastest link tells its wire's speed: a
link between a fast node and a slow one is slow, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from adaptdl_elastic.rendezvous.schema.records import NodeRecord

FAST = 1e9
"""Bytes per second of one connection from which a link counts as unknown: NCCL uses several of them."""

APART = 3.0
"""Ratio of the fastest links of two nodes from which on the slower node is said to have slow links."""

MOVED = 1.5
"""Ratio of two measurements of a node's fastest link from which on the link has changed."""


def fastest_links(agents: Mapping[str, NodeRecord]) -> dict[str, float]:
    """Return the bytes per second of each node's fastest link; nodes without a known link are left out.

    What the node itself has measured counts, since it measures again. Else what others have measured counts.
    """
    own = {
        node: [link.bandwidth for link in record.links if link.node in agents]
        for node, record in agents.items()
    }
    told: dict[str, list[float]] = {}
    for record in agents.values():
        for link in record.links:
            told.setdefault(link.node, []).append(link.bandwidth)
    known = {node: own[node] or told.get(node) for node in agents}
    return {node: max(rates) for node, rates in known.items() if rates}


def nodes_with_slow_links(agents: Mapping[str, NodeRecord]) -> frozenset[str]:
    """Return the nodes whose fastest link is `APART` times as slow as the fastest link of the job."""
    found = fastest_links(agents)
    limit = min(max(found.values(), default=0.0), FAST) / APART
    return frozenset(node for node, rate in found.items() if rate < limit)
