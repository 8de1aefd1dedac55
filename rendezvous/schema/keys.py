"""Where things are kept in the store. Every key of a cluster lives under `/adaptdl/v1/<cluster>/`.

nodes/<node>/<job>                      NodeRecord, leased: one agent per node and job
jobs/<job>/spec                         JobSpec, written by the job's first agent
jobs/<job>/request                      JobRequest: what a person asked for (adaptdl scale, stop, checkpoint)
jobs/<job>/status                       JobStatus, written by the coordinator
jobs/<job>/hints                        sched_hints.JobHints: what rank 0 reports, relayed by its agent
jobs/<job>/plan                         Plan, written by the coordinator and by nobody else
reports/<job>/<g>/ready/<node>          ReadyRecord: this node could run generation g now
reports/<job>/<g>/running/<node>        RunningRecord: its replicas have started
reports/<job>/<g>/broken/<node>         BrokenRecord: somebody has died, its living replicas wait
parts/<job>/<name>/<n>                  PlanPart: what a large plan says of some nodes (plans.py)
jobs/<job>/checkpoint                   CheckpointRecord, written by rank 0's agent
jobs/<job>/generations/<g>/master       MasterRecord, written by the agent of rank 0
jobs/<job>/generations/<g>/ended/<node>     EndedRecord: its replicas are gone, and how they ended
coordinator/host                        leased: the agent that keeps a coordinator running as its child
coordinator/second                      leased: the agent of another node that keeps one that stands by
coordinator/leader                      LeaderRecord, leased: the coordinator that decides
coordinator/standby/<id>                LeaderRecord, leased: one that follows the store and waits to lead
secret                                  what agents derive secrets of runs from, where etcd may keep one
archiving/<job>                         leased: an agent puts the checkpoints of a finished run aside
drains/<node>                           DrainRequest: take this node's replicas away; deleted by its writer
autoscaler/leader                       LeaderRecord, leased: the autoscaler that buys and releases nodes
autoscaler/owner                        what tells this cluster from all others, in tags of what it rules
autoscaler/status                       AutoscalerStatus, written by that autoscaler
torchrun/<id>/nodes/<agent>             membership.Member, leased: an agent of plain torchrun
torchrun/<id>/{round,closed}            membership.Round and Closed, written by any of them
torchrun/<id>/rounds/<n>/master         MasterRecord, leased
events/<millis>-<suffix>                bounded log of what the coordinator did
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(kind: str, name: str) -> str:
    """Return `name` when it can be part of a key; raise ValueError naming the `kind` of thing otherwise."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{kind} {name!r} can not be used: letters, digits, '.', '_' and '-' only, "
            f"beginning with a letter or digit, at most 128 characters"
        )
    return name


@dataclass(frozen=True)
class Keys:
    """The keys of one cluster."""

    cluster: str = "default"

    def __post_init__(self) -> None:
        check_name("cluster", self.cluster)

    @property
    def root(self) -> str:
        """The prefix of everything that belongs to this cluster."""
        return f"/adaptdl/v1/{self.cluster}/"

    @property
    def nodes(self) -> str:
        """The prefix of every node's registrations."""
        return f"{self.root}nodes/"

    def node(self, node: str, job: str) -> str:
        """The registration of one agent."""
        return f"{self.nodes}{check_name('node', node)}/{check_name('job', job)}"

    @property
    def jobs(self) -> str:
        """The prefix of every job's keys."""
        return f"{self.root}jobs/"

    def job(self, job: str, *parts: str) -> str:
        """A key of one job, e.g. `job("mnist", "plan")`; without parts its prefix."""
        return f"{self.jobs}{check_name('job', job)}/" + "/".join(parts)

    def generation(self, job: str, generation: int, *parts: str) -> str:
        """A key of a generation, as `generation("mnist", 3, "ended", "host0")`; without parts its prefix.

        What only the coordinator reads is among the job's `reports`: agents follow all of the other.
        """
        if parts and parts[0] in ("ready", "running", "broken"):
            return self.reports(job, generation) + "/".join(parts)
        return self.job(job, "generations", str(generation), *(parts or ("",)))

    def reports(self, job: str, generation: int | None = None) -> str:
        """The prefix of what agents tell the coordinator about a generation (None: about all)."""
        prefix = f"{self.root}reports/{check_name('job', job)}/"
        return prefix if generation is None else f"{prefix}{generation}/"

    def parts(self, job: str, *parts: str) -> str:
        """A part of a large plan; without `parts` the prefix of all of a job's."""
        return f"{self.root}parts/{check_name('job', job)}/" + "/".join(parts)

    def torchrun(self, run_id: str, *parts: str) -> str:
        """A key of a plain torchrun run; without parts its prefix."""
        return f"{self.root}torchrun/{check_name('--rdzv-id', run_id)}/" + "/".join(parts)

    @property
    def secret(self) -> str:
        """A secret that all agents have in common. Kept only where nobody else reads the store."""
        return f"{self.root}secret"

    @property
    def coordinator_host(self) -> str:
        """Held by the agent whose child is the coordinator."""
        return f"{self.root}coordinator/host"

    @property
    def coordinator_second(self) -> str:
        """Held by an agent of another node whose child stands by."""
        return f"{self.root}coordinator/second"

    def coordinator_standby(self, identity: str) -> str:
        """Held by a coordinator that waits to lead."""
        return f"{self.root}coordinator/standby/{identity}"

    @property
    def coordinator_leader(self) -> str:
        """Held by the coordinator that decides."""
        return f"{self.root}coordinator/leader"

    @property
    def drains(self) -> str:
        """The prefix of every request to drain a node."""
        return f"{self.root}drains/"

    def drain(self, node: str) -> str:
        """The request to drain one node."""
        return f"{self.drains}{check_name('node', node)}"

    @property
    def autoscaler_leader(self) -> str:
        """Held by the autoscaler that buys and releases nodes."""
        return f"{self.root}autoscaler/leader"

    @property
    def autoscaler_owner(self) -> str:
        """Random, and for good: with the cluster's name it says whose an auto-scaling group is."""
        return f"{self.root}autoscaler/owner"

    @property
    def autoscaler_status(self) -> str:
        """What the autoscaler holds, wants and pays."""
        return f"{self.root}autoscaler/status"

    @property
    def events(self) -> str:
        """The prefix of the coordinator's bounded log."""
        return f"{self.root}events/"
