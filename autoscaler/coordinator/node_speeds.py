"""Find nodes that are slower than others of their type, from the times that jobs need to compute on them.

A job reports how long its replicas compute for a batch on each node that it has run on
(`JobHints.node_times`), without waiting for each other. The logarithm of such a time is taken as the sum of a
number of the script and one of the node; least squares find both. Nodes of one type whose numbers differ
enough get different names in the policy's question, and so are types of their own there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.autoscaler.coordinator.job_models import Report
from adaptdl_elastic.protocol.hints import JobHints

APART = 1.5
"""Factor between the speeds of two nodes of a type from which on they are told apart."""

MEMORY = 4 * 3600.0
"""Seconds after which a node's time is forgotten: what slowed the node may be over, so jobs try it again."""

_ROUNDS = 50  # of the iteration for the least squares

Observation = tuple[str, str, float]
"""What was measured (a script on a type of node), on which node, and the logarithm of its time there."""


def observations(
    key: str, reports: Sequence[Report], type_of: Mapping[str, str], now: float
) -> Iterator[Observation]:
    """Yield what jobs with the script `key` have measured of nodes lately, relative to the script's model."""
    widest = max(reports, key=lambda report: report.hints.max_profiled_replicas).hints
    fixed, each, *_ = widest.perf_params or (1.0, 0.0)
    for report in reports:
        for node, (size, seconds, time) in report.hints.node_times.items():
            recent = now - report.seen + report.hints.time - time <= MEMORY
            if recent and seconds > 0 and node in type_of:
                yield f"{type_of[node]}/{key}", node, math.log(seconds / (fixed + each * size))


def slowness(told: Sequence[Observation]) -> dict[str, float]:
    """Return by node the logarithm of its times over those of the fastest node that it was compared with."""
    (_, script), (names, node) = (np.unique([one[k] for one in told], return_inverse=True) for k in (0, 1))
    log, slow, group = np.array([one[2] for one in told]), np.zeros(len(names)), np.arange(len(names))
    for _ in range(_ROUNDS if told else 0):
        level = np.bincount(script, log - slow[node]) / np.bincount(script)
        slow = np.bincount(node, log - level[script]) / np.bincount(node)
        # nodes are compared if a chain of scripts joins them: these get the same number as their group
        first = np.full(len(level), len(names))
        np.minimum.at(first, script, group[node])
        np.minimum.at(group, node, first[script])
    fastest = np.full(len(names), np.inf)
    np.minimum.at(fastest, group, slow)
    return dict(zip(names.tolist(), (slow - fastest[group]).tolist(), strict=True))


@dataclass(frozen=True)
class NodeClasses:
    """The types of nodes, where nodes that are slower than others of their type are a type of their own."""

    type_of: Mapping[str, str] = field(default_factory=dict)  # by node
    # by class of slow nodes, their type and the logarithm of the ratio of its step times to the type's
    slower: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    def declared(self, name: str) -> str:
        """Return the type that the nodes of a class say."""
        return self.slower[name][0] if name in self.slower else name

    def slowest(self, nodes: Iterable[str]) -> str:
        """Return the slowest class of slow nodes among `nodes`; "" if none of them is slow."""
        found = {self.type_of.get(node, "") for node in nodes} & set(self.slower)
        return max(sorted(found), key=lambda name: self.slower[name][1], default="")

    def labelled(self, hints: JobHints) -> JobHints:
        """Return a report from nodes that have proved slow meanwhile under the name of their class."""
        latest = max((told[2] for told in hints.node_times.values()), default=0.0)
        found = self.slowest(node for node, told in hints.node_times.items() if told[2] == latest)
        return replace(hints, node_type=found) if found and self.declared(found) == hints.node_type else hints


def classes(type_of: Mapping[str, str], slow: Mapping[str, float]) -> NodeClasses:
    """Return the classes of nodes; one that no job has measured is as fast as its type."""
    names, slower = dict[str, str](), dict[str, tuple[str, float]]()
    last = {kind: (0.0, kind) for kind in type_of.values()}  # slowness and name of the last node of a type
    for own, node in sorted((slow.get(node, 0.0), node) for node in type_of):
        kind, (before, name) = type_of[node], last[type_of[node]]
        if own - before > math.log(APART):
            name = f"{kind or 'nodes'}, {APART ** round(own / math.log(APART)):.1f} times slower"
            slower.setdefault(name, (kind, own))
        names[node], last[kind] = name, (own, name)
    return NodeClasses(names, slower)


def node_classes(view: View, reports: Mapping[str, Sequence[Report]]) -> NodeClasses:
    """Return the classes of a cluster's nodes. Nodes at one address are one machine, and so equally fast."""
    records = {node: seen.record for agents in view.nodes.values() for node, seen in agents.items()}
    type_of = {node: record.node_type for node, record in records.items()}
    told = [one for key, found in reports.items() for one in observations(key, found, type_of, view.now)]
    slow = slowness([(script, records[node].host or node, log) for script, node, log in told])
    return classes(type_of, {node: slow.get(record.host or node, 0.0) for node, record in records.items()})
