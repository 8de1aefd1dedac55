"""The keys of the store. Every key of a cluster begins with `/adaptdl/v1/<cluster>/`.

nodes/<node>/<job>                      NodeRecord, leased: a node that may have replicas of a job
jobs/<job>/spec                         JobSpec, written by the job's first agent
jobs/<job>/request                      JobRequest: what a user asked for (adaptdl scale, stop, checkpoint)
jobs/<job>/status                       JobStatus, written by the coordinator
jobs/<job>/hints                        protocol.hints.JobHints: what rank 0 reports, relayed by its agent
jobs/<job>/plan                         Plan, written only by the coordinator
jobs/<job>/left/<node>                  Left: what the node has left, for agents that wait for that
reports/<job>/<node>                    Held: what the node holds of the job, and how that ended
jobs/<job>/checkpoint                   CheckpointRecord, written by rank 0's agent
jobs/<job>/generations/<g>/master       MasterRecord, written by the agent of rank 0
coordinator/host                        leased: the agent or service whose child process is a coordinator
coordinator/second                      leased: that of another node, whose coordinator stands by
coordinator/leader                      LeaderRecord, leased: the coordinator that decides
coordinator/standby/<id>                LeaderRecord, leased: a coordinator that may lead next
secret                                  random; agents derive the secrets of runs from it
archiving/<job>                         leased: an agent moves the checkpoints of a finished run aside
usage/<node>                            NodeUsage, leased: written every few seconds by an agent or service
drains/<node>                           DrainRequest: take this node's replicas away; deleted by its writer
autoscaler/leader                       LeaderRecord, leased: the autoscaler that buys and releases nodes
autoscaler/owner                        random id of the cluster, for tags of cloud resources
autoscaler/status                       AutoscalerStatus, written by that autoscaler
torchrun/<id>/nodes/<agent>             membership.Member, leased: an agent of plain torchrun
torchrun/<id>/{round,closed}            MembershipRound and Closed, written by any of these agents
torchrun/<id>/rounds/<n>/master         MasterRecord, leased
services/<node>                         ServiceRecord, leased: the node's service
submissions/<job>                       Signed Submission, written by `adaptdl submit`
cancellations/<job>                     Signed Cancellation, written by `adaptdl cancel`
resumptions/<job>                       Signed Resumption, written by `adaptdl resume`
outcomes/<job>/status                   JobStatus of a submitted job that ended and was forgotten
events/<millis>-<suffix>                bounded log of what coordinator and autoscaler did
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus
from adaptdl_elastic.rendezvous.schema.held import Held, Left

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""Regular expression of the names of clusters, nodes and jobs."""

_NAME = re.compile(NAME_PATTERN)

# The records whose type follows from their key. "*" is a name, "#" the number of a generation.
_RECORDS: dict[str, type[Any]] = {
    "nodes/*/*": records.NodeRecord,
    "drains/*": records.DrainRequest,
    "usage/*": records.NodeUsage,
    "coordinator/leader": records.LeaderRecord,
    "autoscaler/status": AutoscalerStatus,
    "jobs/*/spec": records.JobSpec,
    "jobs/*/request": records.JobRequest,
    "jobs/*/status": records.JobStatus,
    "jobs/*/plan": records.Plan,
    "jobs/*/checkpoint": records.CheckpointRecord,
    "jobs/*/generations/#/master": records.MasterRecord,
    "jobs/*/left/*": Left,
    "reports/*/*": Held,
}
_PATHS = "|".join(f"({path})" for path in _RECORDS)
_RECORD_KEY = re.compile(_PATHS.replace("*", "[^/]+").replace("#", "[0-9]{1,18}"))
_TYPES = tuple(_RECORDS.values())


def check_name(kind: str, name: str) -> str:
    """Return `name` if it can be part of a key; else raise ValueError, which names the `kind` of thing."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{kind} {name!r} cannot be used: letters, digits, '.', '_' and '-' only, "
            f"beginning with a letter or digit, at most 128 characters"
        )
    return name


class _Key:
    """A key, or the prefix of several, below a cluster's root."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, keys: Keys, owner: type[Keys]) -> str:
        return keys.root + self._path


class _KeyOf(_Key):
    """The key of a node or job: a function of its name."""

    def __get__(self, keys: Keys, owner: type[Keys]) -> Callable[[str], str]:  # type: ignore[override]
        kind = "node" if self._path in ("drains/", "usage/", "services/") else "job"
        return lambda name: f"{keys.root}{self._path}{check_name(kind, name)}"


@dataclass(frozen=True)
class Keys:
    """The keys of one cluster. Names that end with a slash are prefixes."""

    cluster: str = "default"

    nodes, jobs, events = _Key("nodes/"), _Key("jobs/"), _Key("events/")
    drains, drain = _Key("drains/"), _KeyOf("drains/")
    usage, usage_of = _Key("usage/"), _KeyOf("usage/")
    services, service = _Key("services/"), _KeyOf("services/")
    submissions, submission = _Key("submissions/"), _KeyOf("submissions/")
    cancellations, cancellation = _Key("cancellations/"), _KeyOf("cancellations/")
    resumptions, resumption = _Key("resumptions/"), _KeyOf("resumptions/")
    outcomes = _Key("outcomes/")
    # a secret that all agents share; written only if other users cannot read the store
    secret = _Key("secret")
    coordinators = _Key("coordinator/")
    coordinator_host, coordinator_second = _Key("coordinator/host"), _Key("coordinator/second")
    coordinator_leader = _Key("coordinator/leader")
    autoscaler_leader, autoscaler_status = _Key("autoscaler/leader"), _Key("autoscaler/status")
    # the cluster's random, permanent id, with which its auto-scaling groups are tagged
    autoscaler_owner = _Key("autoscaler/owner")

    def __post_init__(self) -> None:
        check_name("cluster", self.cluster)

    @property
    def root(self) -> str:
        """The prefix of every key of this cluster."""
        return f"/adaptdl/v1/{self.cluster}/"

    def parse(self, key: str) -> tuple[str, ...]:
        """Return the parts of a key below the root, e.g. `("drains", "host0")`; () for any other key."""
        return tuple(key.removeprefix(self.root).split("/")) if key.startswith(self.root) else ()

    def decode(self, key: str, text: str) -> Any:
        """Return the record in a key's value; None if no type of record belongs to the key.

        Raises:
            MalformedRecordError: the value is no such record.
        """
        found = _RECORD_KEY.fullmatch(key, len(self.root)) if key.startswith(self.root) else None
        return None if found is None else records.decode(_TYPES[(found.lastindex or 0) - 1], text, key)

    def node(self, node: str, job: str) -> str:
        """Return the key of one agent's registration."""
        return f"{self.nodes}{check_name('node', node)}/{check_name('job', job)}"

    def job(self, job: str, *parts: str) -> str:
        """Return a key of one job, e.g. `job("mnist", "plan")`; without parts the prefix of its keys."""
        return f"{self.jobs}{check_name('job', job)}/" + "/".join(parts)

    def generation(self, job: str, generation: int, *parts: str) -> str:
        """Return a key of one generation: `generation("mnist", 3, "master")`; without parts a prefix."""
        return self.job(job, "generations", str(generation), *(parts or ("",)))

    def left(self, job: str, node: str) -> str:
        """Return the key of what a node has left of a job. Agents follow it."""
        return self.job(job, "left", check_name("node", node))

    def held(self, job: str, node: str) -> str:
        """Return the key of what a node holds of a job. Only coordinators and commands read it."""
        return self.reports(job) + check_name("node", node)

    def reports(self, job: str) -> str:
        """Return the prefix of what nodes hold of a job."""
        return f"{self.root}reports/{check_name('job', job)}/"

    def torchrun(self, run_id: str, *parts: str) -> str:
        """Return a key of a run of plain torchrun; without parts the prefix of its keys."""
        return f"{self.root}torchrun/{check_name('--rdzv-id', run_id)}/" + "/".join(parts)

    def coordinator_standby(self, identity: str) -> str:
        """Return the key held by a coordinator that stands by."""
        return f"{self.coordinators}standby/{identity}"

    def outcome(self, job: str, *parts: str) -> str:
        """Return a key of how one job ended: `outcome("mnist", "status")`; without parts the prefix."""
        return f"{self.outcomes}{check_name('job', job)}/" + "/".join(parts)
