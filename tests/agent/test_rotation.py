"""Passwords and certificates of the store are replaced under a running job of two agents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import JOB, Cluster
from elastic_run import ElasticRun
from guarded_etcd import GuardedEtcd

NODES = ("first", "second")
NEXT_PASSWORD = "second-password"
pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Job:
    """Two agents of one job, a replica on each, at an etcd with TLS and users."""

    guarded: GuardedEtcd
    cluster: Cluster
    agents: list[ElasticRun]

    def train_on(self) -> None:
        """Wait until each agent's replica has gone on; rank 0's agent says so."""
        agent = self.agents[0]
        agent.wait_for_event("epoch", after=len(agent.events))

    def resize(self) -> None:
        """Ask for other sizes, and get them: agents, coordinator and `adaptdl` are all let in."""
        seen = len(self.agents[0].events)
        self.cluster.ask("scale", JOB, "--replicas", "1", "--wait")
        self.agents[0].wait_for_event("generation", replicas=1, after=seen)
        seen = len(self.agents[1].events)  # it has written before that there are two
        self.cluster.ask("scale", JOB, "--replicas", "2")
        self.agents[1].wait_for_event("generation", replicas=2, after=seen)

    def finish(self) -> None:
        """Let the job end, and see that nothing was lost: no sample, no generation, no registration."""
        self.cluster.finish(*self.agents)
        causes = {str(event["cause"]) for agent in self.agents for event in agent.of("generation")}
        assert causes <= {"start", "manual"}
        assert [agent.of("failure") for agent in self.agents] == [[], []]
        self.cluster.check(replicas=2)

    def vanished(self) -> set[str]:
        """Return the nodes whose registration has vanished at some time so far."""
        nodes = {self.cluster.keys.node(node, JOB): node for node in NODES}
        gone = {change.key for change in self.cluster.history() if change.kind == "delete"}
        return {node for key, node in nodes.items() if key in gone}


@contextmanager
def two_agents(folder: Path) -> Iterator[Job]:
    """Start them; the second one has a password file of its own."""
    with GuardedEtcd(folder / "etcd") as guarded, ExitStack() as stack:
        # a busy machine may take long to start etcd again, which agents must not report
        environ = {**guarded.environ, "ADAPTDL_ETCD_TIMEOUT": "60"}
        cluster = Cluster(guarded.etcd, folder, stack, guarded.admin_options(), environ)
        (folder / "password-of-second").write_text(guarded.password_file.read_text())
        first = cluster.train("first")
        first.wait_for_event("generation")
        own = {"ADAPTDL_ETCD_PASSWORD_FILE": str(folder / "password-of-second")}
        second = cluster.train("second", env=own)
        cluster.scale(2, second)
        yield Job(guarded, cluster, [first, second])
        for agent in (first, second):  # pytest shows it when the test has failed
            print(agent.text())


def test_a_job_goes_on_while_the_store_refuses_its_password_and_then_its_certificates(tmp_path: Path) -> None:
    """Each for longer than a lease; the files of the password come one by one."""
    with two_agents(tmp_path) as job:
        job.guarded.change_password(NEXT_PASSWORD)
        for agent in job.agents:
            agent.wait_for_event("store", state="refused")
        job.guarded.restart()  # nothing that was let in before goes on
        refused = job.agents[0].adaptdl("ls", "--etcd", job.guarded.etcd.endpoint, env=job.guarded.environ)
        assert refused.returncode == 1
        assert "refused the login" in refused.stderr
        for agent, file in zip(
            job.agents, (job.guarded.password_file, tmp_path / "password-of-second"), strict=True
        ):
            for _ in range(3):
                job.train_on()
            file.write_text(NEXT_PASSWORD)
            agent.wait_for_event("store", state="back")
            assert "the store refuses us, training goes on: etcd refused the login" in agent.text()
            assert "the store lets us in again" in agent.text()
            assert "password" in agent.of("store")[0]["message"]
        job.resize()
        assert job.vanished() == set()
        seen = [len(agent.events) for agent in job.agents]
        job.guarded.replace_authority()
        for agent, after in zip(job.agents, seen, strict=True):
            agent.wait_for_event("store", state="refused", after=after)
        for _ in range(3):
            job.train_on()
        job.guarded.write_certificates()
        for agent, after in zip(job.agents, seen, strict=True):
            agent.wait_for_event("store", state="back", after=after)
            assert "training goes on: TLS with etcd is refused" in agent.text()
        job.resize()
        job.finish()
