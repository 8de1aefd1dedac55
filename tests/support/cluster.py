"""Several agents of one job on one machine, one etcd, and a record of everything that is written there."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastic_run import ElasticRun
from etcd_server import EtcdServer
from history import Recorder, violations

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import NodeRecord, decode
from adaptdl_elastic.rendezvous.store.base import Change, Store
from adaptdl_elastic.rendezvous.store.connect import StoreOptions, connect

JOB = "job"
SCRIPTS = Path(__file__).parents[1] / "agent" / "scripts"
TRAIN, PLAIN = str(SCRIPTS / "train.py"), str(SCRIPTS / "plain.py")
EPOCHS = 60
LONG = (str(EPOCHS), "0.1")  # epochs, seconds per step: it lasts until somebody lets it `hurry`


class Cluster:
    """`start` nodes; `check` at the end holds what happened against the protocol.

    options: by which the test itself is let into the store. env: of the agents, and of `adaptdl`. name: of
    the cluster, whose part of the etcd is its own.
    """

    def __init__(
        self,
        etcd: EtcdServer,
        directory: Path,
        stack: ExitStack,
        options: StoreOptions | None = None,
        env: Mapping[str, str] | None = None,
        name: str = "default",
    ) -> None:
        self.etcd, self.directory, self._stack = etcd, directory, stack
        self.keys = Keys(name)
        self._env = {"ADAPTDL_CLUSTER": name, **(env or {})}
        self.agents: dict[str, ElasticRun] = {}  # by node, or node#2 for its second agent
        self.saved = directory / "saved"
        self.store: Store = stack.enter_context(connect(etcd.endpoint, options=options))
        self.recorder = Recorder(self.store, self.keys)
        stack.callback(self.recorder.close)

    def start(
        self,
        node: str,
        *arguments: str,
        nodes: str = "1:3",
        endpoint: str = "",
        env: dict[str, str] | None = None,
    ) -> ElasticRun:
        """`adaptdl-run` as on that node."""
        command = [
            *(f"--rdzv-endpoint={endpoint or self.etcd.endpoint}", f"--rdzv-id={JOB}"),
            *(f"--node-name={node}", f"--nnodes={nodes}", "--no-autoscale"),
            *(f"--checkpoint-path={self.saved}", "--checkpoint-interval=0.5", *arguments),
        ]
        run = self._stack.enter_context(ElasticRun(command, self.directory, {**self._env, **(env or {})}))
        earlier = sum(label.partition("#")[0] == node for label in self.agents)
        self.agents[f"{node}#{earlier + 1}" if earlier else node] = run
        return run

    def train(self, node: str, *options: str, **given: Any) -> ElasticRun:
        """An agent whose replicas train until the end is near; `given` is as for `start`."""
        return self.start(node, *options, TRAIN, *LONG, **given)

    def together(self, *nodes: str, **given: Any) -> list[ElasticRun]:
        """Agents of these nodes, once a replica trains on each; the first has rank 0 and the coordinator."""
        runs = []
        for node in nodes:
            runs.append(self.train(node, **given))
            if len(runs) == 1:
                runs[0].wait_for_event("generation")
        grown = self.scale(len(nodes), runs[-1])
        for run in runs:
            for event in ("generation", "started"):
                run.wait_for_event(event, generation=grown["generation"])
        return runs

    def ask(self, *arguments: str) -> str:
        """The command `adaptdl`, as in another terminal."""
        first = next(iter(self.agents.values()))
        done = first.adaptdl(*arguments, "--etcd", self.etcd.endpoint, env=self._env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wait_for_state(self, state: str) -> None:
        """Until `adaptdl ls` says so of the job, which is after the agents have heard of it."""
        self.wait_until_told(f'"state": "{state}"', "ls", "--json")

    def wait_until_told(self, text: str, *arguments: str) -> str:
        """Ask by a command until its answer has this text; the answer."""
        first = next(iter(self.agents.values()))
        return first.wait_until_adaptdl_says(text, *arguments, "--etcd", self.etcd.endpoint, env=self._env)

    def scale(self, replicas: int, seen_by: ElasticRun) -> dict[str, object]:
        """Until so many replicas train; the generation's event as that agent wrote it."""
        self.ask("scale", JOB, "--replicas", str(replicas))
        return seen_by.wait_for_event("generation", replicas=replicas)

    def wait_for_node(self, node: str, like: str) -> str:
        """Until its agent has joined the run that the agent of the node `like` is of; that run."""
        keys = self.keys
        known = self.store.range(keys.nodes)
        runs = {item.key: decode(NodeRecord, item.value).run for item in known.items}
        wanted = runs[keys.node(like, JOB)]
        if runs.get(keys.node(node, JOB)) != wanted:
            with self.store.watch(keys.nodes, known.revision + 1) as changes:
                assert any(
                    change.key == keys.node(node, JOB)
                    and change.value is not None
                    and decode(NodeRecord, change.value).run == wanted
                    for change in changes
                )
        return wanted

    def hurry(self) -> None:
        """What the test is about has been seen: the job may come to its end."""
        (self.directory / "hurry").touch()

    def finish(self, *runs: ElasticRun) -> None:
        """Let the job end, and all these agents with it."""
        self.hurry()
        for run in runs:
            assert run.wait() == 0, run.text()

    def samples(self) -> dict[int, int]:
        """Samples of each finished epoch, whichever node had rank 0.

        An agent that is killed takes along what its replica has said of an epoch that has just ended: then
        the others' replicas are asked.
        """
        runs = self.agents.values()
        told: dict[int, int] = {e["epoch"]: e["samples"] for run in runs for e in run.of("epoch")}
        if all(run.process.poll() != -signal.SIGKILL for run in runs):
            return told
        said = re.findall(r"^epoch (\d+) had (\d+)$", "\n".join(run.said() for run in runs), re.MULTILINE)
        return {**{int(epoch): int(samples) for epoch, samples in said}, **told}

    def weights(self) -> list[str]:
        """Where each replica arrived that came to the end of the script."""
        lines = [line for run in self.agents.values() for line in run.said().splitlines()]
        return [line.split()[1] for line in lines if line.startswith("weights ")]

    def check(self, replicas: int) -> None:
        """Equal parameters on all replicas at the end, each sample of each epoch once, a lawful history."""
        wrong = {e: self.samples().get(e) for e in range(EPOCHS) if self.samples().get(e) != 200}
        assert not wrong, wrong
        weights = self.weights()
        assert len(weights) == replicas, weights
        assert len(set(weights)) == 1, weights
        found = self.violations()
        assert not found, "\n".join(found)

    def write_history(self) -> None:
        """Leave every change in the store beside the logs: what to look at when a test has failed."""
        lines = [f"{one.revision} {one.kind} {one.key} {one.value}\n" for one in self.history()]
        (self.directory / "history.txt").write_text("".join(lines))

    def history(self) -> list[Change]:
        """Every change that there was in the store so far."""
        return self.recorder.changes()

    def violations(self) -> list[str]:
        """What the history checker finds."""
        logs: dict[str, Sequence[dict[str, object]]] = {name: run.events for name, run in self.agents.items()}
        return violations(self.recorder.changes(), self.keys, JOB, logs)
