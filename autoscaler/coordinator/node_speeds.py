"""Find nodes that are slower than others of their type, from the times that jobs need to compute on them.

A job reports how long its replicas compute for a batch on each node that it has run on
(`JobHints.node_times`), without waiting for each other. The logarithm of such a time is taken as the sum of a
number of the job and one of the node; alternating medians find both. Nodes of one type whose numbers differ
enough get different names in the policy's question, and so are types of their own there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.autoscaler.coordinator.job_models import Report
from adaptdl_elastic.protocol.hints import TIMES_KEPT, JobHints

APART = math.log(1.5)
"""Logarithm of the factor between the speeds of two nodes of a type from which on they are told apart."""

STAYS = math.log(1.3)
"""Logarithm of the factor down to which a node stays slow that was slow in the last question."""

GAP = math.log(1.2)
"""Logarithm of the factor between the speeds of two classes: noise makes smaller gaps."""

_LARGEST = math.log(1e3)  # largest ratio of a job's times that is believed, as a logarithm
_ROUNDS = 30  # of the iteration for the medians

Names = Mapping[str, str]
"""The type, or the class, of each node."""

Observation = tuple[str, str, str, float]
"""The script, the job (on a type of node), the node, and the logarithm of the job's time there."""


def observations(
    key: str, report: Report, machines: Mapping[str, tuple[str, str]], agents: Container[str], now: float
) -> Iterator[Observation]:
    """Yield what a job has measured of nodes lately, relative to its own model.

    Args:
        key: The `profile_key` of its script.
        report: Its report.
        machines: The type and the machine of each node.
        agents: The nodes whose times count.
        now: The time, on the clock of `Report.seen`.
    """
    hints = report.hints
    fixed, each, *_ = hints.perf_params or next(filter(None, (one.perf_params for one in hints.elsewhere)))
    for node, (size, seconds, time) in hints.node_times.items():
        recent = now - report.seen + max(0.0, hints.time - time) <= TIMES_KEPT
        if recent and seconds > 0 and node in agents:
            kind, machine = machines[node]
            yield key, f"{kind}/{report.job}", machine, math.log(seconds) - math.log(fixed + each * size)


def _medians(group: Any, values: Any) -> Any:
    """Return the median of the values of each group; groups are numbered from 0."""
    order, count = np.lexsort((values, group)), np.bincount(group)
    first, values = np.cumsum(count) - count, values[order]
    return (values[first + (count - 1) // 2] + values[first + count // 2]) / 2


def slowness(told: Iterable[Observation]) -> dict[str, float]:
    """Return by node the logarithm of its times over those of the fastest node that it was compared with.

    Only a job that has run on several nodes compares them. All jobs with one script have one vote on a node.
    """
    # of several times on one node, the shortest comes last
    by_node = {one[:3]: one[3] for one in sorted(told, key=lambda one: -one[3])}
    nodes_of = Counter(job for _, job, _ in by_node)
    kept = [(job, node, f"{node}/{script}") for script, job, node in by_node if nodes_of[job] > 1]
    if not kept:
        return {}
    (_, _, job), (names, _, node), (_, voter, vote) = (
        np.unique(column, return_index=True, return_inverse=True) for column in zip(*kept, strict=True)
    )
    log = np.array([one for (_, name, _), one in by_node.items() if nodes_of[name] > 1])
    slow, group, middle = np.zeros(len(names)), np.arange(len(names)), _medians(job, log)[job]
    log = middle + np.clip(log - middle, -_LARGEST, _LARGEST)
    for _ in range(_ROUNDS):
        level = _medians(job, log - slow[node])
        slow = _medians(node[voter], _medians(vote, log - level[job]))
        # nodes are compared if a chain of jobs joins them: these get the same number as their group
        first = np.full(len(level), len(names))
        np.minimum.at(first, job, group[node])
        np.minimum.at(group, node, first[job])
    fastest = np.full(len(names), np.inf)
    np.minimum.at(fastest, group, slow)
    return dict(zip(names.tolist(), (slow - fastest[group]).tolist(), strict=True))


@dataclass(frozen=True)
class NodeClasses:
    """The types of nodes, where nodes that are slower than others of their type are a type of their own."""

    type_of: Names = field(default_factory=dict)
    # by class of slow nodes, their type and the logarithm of the ratio of its step times to the type's
    slower: Mapping[str, tuple[str, float]] = field(default_factory=dict)

    def declared(self, name: str) -> str:
        """Return the type that the nodes of a class say."""
        return self.slower[name][0] if name in self.slower else name

    def slowest(self, nodes: Iterable[str]) -> str:
        """Return the slowest class of slow nodes among `nodes`; "" if none of them is slow."""
        found = {self.type_of.get(node, "") for node in nodes} & set(self.slower)
        return max(sorted(found), key=lambda name: self.slower[name][1], default="")

    @property
    def ratios(self) -> dict[tuple[str, str], float]:
        """The ratios of step times between each class of slow nodes and its type, as in `TypeRatios`."""
        up = {(kind, name): slow for name, (kind, slow) in self.slower.items()}
        return up | {(name, kind): -slow for (kind, name), slow in up.items()}

    def labelled(self, hints: JobHints, nodes: Iterable[str]) -> JobHints:
        """Return a report from `nodes` under the name of their class if they have proved slow meanwhile."""
        found = self.slowest(nodes)
        return replace(hints, node_type=found) if found and self.declared(found) == hints.node_type else hints


def classes(type_of: Names, slow: Mapping[str, float], before: Names) -> NodeClasses:
    """Return the classes of nodes; one that no job has measured is as fast as its type.

    Args:
        type_of: The type of each node.
        slow: By node, the logarithm of its times over those of the fastest.
        before: The class that each node had in the last question.
    """
    names, slower = dict(type_of), dict[str, tuple[str, float]]()
    was_slow = {node for node, name in before.items() if name != type_of.get(node)}
    # of a type's last class: the slowness of its nodes, in ascending order, its name and its number
    last: dict[str, tuple[list[float], str, int]] = {kind: ([], kind, 0) for kind in type_of.values()}
    found = ((own + (APART - STAYS) * (node in was_slow), node) for node, own in slow.items())
    for own, node in sorted(found):
        kind = type_of[node]
        others, name, number = last[kind]
        # the fastest node would be an outlier of many, and the last one would make chains
        if others and own - others[(len(others) - 1) // 2] >= APART and own - others[-1] >= GAP:
            others, name = [], f"{kind or 'nodes'}, slow {number + 1}"
            slower[name], last[kind] = (kind, slow[node]), (others, name, number + 1)
        others.append(own)
        names[node] = name
    return NodeClasses(names, slower)


def node_classes(view: View, reports: Mapping[str, Sequence[Report]], before: Names) -> NodeClasses:
    """Return the classes of a cluster's nodes. Nodes at one address are one machine, and so equally fast."""
    records = {node: seen.record for agents in view.nodes.values() for node, seen in agents.items()}
    machines = {node: (record.node_type, record.host or node) for node, record in records.items()}
    told: list[Observation] = []
    for key, found in reports.items():
        for one in found:
            # an error in a report: its job compares no nodes
            with suppress(Exception):
                # a job that has ended has no agents, and its measurements count
                told += observations(key, one, machines, view.nodes.get(one.job) or machines, view.now)
    slow = slowness(told)
    type_of = {node: kind for node, (kind, _) in machines.items()}
    return classes(type_of, {node: slow[of] for node, (_, of) in machines.items() if of in slow}, before)
