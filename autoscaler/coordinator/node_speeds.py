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
from adaptdl_elastic.autoscaler.coordinator.job_models import Report, reports_by_script
from adaptdl_elastic.protocol.hints import JobHints

APART = 1.5
"""Factor between the speeds of two nodes of a type from which on they are told apart."""

MEMORY = 4 * 3600.0
"""Seconds after which a node's time is forgotten: what slowed the node may be over, so jobs try it again."""

_ROUNDS = 50  # of the iteration for the least squares

Observation = tuple[str, str, float]
"""A script, a node, and the logarithm of the time of a batch there, relative to the script's model."""


def observations(key: str, reports: Sequence[Report], now: float) -> Iterator[Observation]:
    """Yield what jobs with the script `key` have measured of nodes lately."""
    widest = max(reports, key=lambda report: (report.hints.max_profiled_replicas, report.seen)).hints
    if widest.perf_params is None:
        return
    fixed, each = widest.perf_params[:2]
    for report in reports:
        for one in report.hints.node_times:
            if now - report.seen + report.hints.time - one.time <= MEMORY and one.seconds > 0:
                yield key, one.node, math.log(one.seconds / (fixed + each * one.atomic_bsz))


def slowness(found: Iterable[Observation]) -> dict[str, float]:
    """Return by node the logarithm of its times over those of the fastest node that it was compared with."""
    told = list(found)
    if not told:
        return {}
    scripts, nodes = (
        {name: i for i, name in enumerate(dict.fromkeys(one[k] for one in told))} for k in (0, 1)
    )
    script = np.array([scripts[one[0]] for one in told])
    node = np.array([nodes[one[1]] for one in told])
    log = np.array([one[2] for one in told])
    slow, group = np.zeros(len(nodes)), np.arange(len(nodes))
    for _ in range(_ROUNDS):
        level = np.bincount(script, log - slow[node]) / np.bincount(script)
        slow = np.bincount(node, log - level[script]) / np.bincount(node)
        # nodes that no chain of scripts joins cannot be compared
        first = np.full(len(scripts), len(nodes))
        np.minimum.at(first, script, group[node])
        np.minimum.at(group, node, first[script])
    fastest = np.full(len(nodes), np.inf)
    np.minimum.at(fastest, group, slow)
    return dict(zip(nodes, (slow - fastest[group]).tolist(), strict=True))


@dataclass(frozen=True)
class NodeClasses:
    """The types of nodes, where nodes that are slower than others of their type are a type of their own."""

    type_of: Mapping[str, str] = field(default_factory=dict)  # by node
    slower: Mapping[str, float] = field(
        default_factory=dict
    )  # log ratio of the times to the type's, by class
    type_of_class: Mapping[str, str] = field(default_factory=dict)

    def slowest(self, nodes: Iterable[str]) -> str:
        """Return the slowest class of slow nodes among `nodes`; "" if none of them is slow."""
        found = {self.type_of[node] for node in nodes if node in self.type_of} & set(self.slower)
        return max(sorted(found), key=lambda name: self.slower[name], default="")

    def labelled(self, hints: JobHints) -> JobHints:
        """Return a report of measurements on nodes that proved slow meanwhile under the name of their class."""
        latest = max((one.time for one in hints.node_times), default=0.0)
        found = self.slowest(one.node for one in hints.node_times if one.time == latest)
        return replace(hints, node_type=found) if self.type_of_class.get(found) == hints.node_type else hints

    @property
    def ratios(self) -> dict[tuple[str, str], float]:
        """The logarithms of the ratios of step times between types and their classes, by (from, to)."""
        down = {(self.type_of_class[name], name): slow for name, slow in self.slower.items()}
        return down | {(name, base): -slow for (base, name), slow in down.items()}


def classes(type_of: Mapping[str, str], slow: Mapping[str, float]) -> NodeClasses:
    """Return the classes of nodes; one that no job has measured is as fast as its type."""
    names, slower, base = dict(type_of), dict[str, float](), dict[str, str]()
    level, name_of = dict[str, float](), dict(zip(type_of.values(), type_of.values(), strict=True))
    for node in sorted(type_of, key=lambda node: (slow.get(node, 0.0), node)):
        own, kind = slow.get(node, 0.0), type_of[node]
        if own - level.get(kind, 0.0) > math.log(APART):
            degree = round(own / math.log(APART))
            name_of[kind] = f"{kind or 'nodes'}, {APART**degree:.1f} times slower"
        level[kind], names[node] = own, name_of[kind]
        if names[node] != kind:
            slower.setdefault(names[node], own)
            base[names[node]] = kind
    return NodeClasses(names, slower, base)


def node_classes(view: View, reports: Mapping[str, Sequence[Report]] | None = None) -> NodeClasses:
    """Return the classes of a cluster's nodes. Nodes at one address are one machine, and so equally fast."""
    records = {node: seen.record for agents in view.nodes.values() for node, seen in agents.items()}
    reports = reports_by_script(view) if reports is None else reports
    machine = {node: record.host for node, record in records.items()}
    found = [
        (script, machine.get(node, node), log)
        for key, told in reports.items()
        for script, node, log in observations(key, told, view.now)
    ]
    slow = slowness(found)
    times = {node: slow[host] for node, host in machine.items() if host in slow}
    return classes({node: record.node_type for node, record in records.items()}, times)
