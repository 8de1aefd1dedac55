"""What replicas, other nodes and strangers get to know, and what not."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
from decided import plan
from elastic_run import ElasticRun
from torch.distributed import TCPStore

from adaptdl_elastic.agent.core import states as d
from adaptdl_elastic.agent.launch import store_environment
from adaptdl_elastic.agent.runtime.generation_store import GenerationStore, Joined
from adaptdl_elastic.agent.terminal.run_options import parse

SOON = 60.0  # seconds, for what is only waited for when a test fails


class Node(GenerationStore):
    """One agent's part in a meeting."""

    def __init__(self) -> None:
        self.posted: queue.SimpleQueue[object] = queue.SimpleQueue()
        super().__init__("127.0.0.1", None, self.posted.put)

    def joined(self, start: d.StartReplicas) -> Joined:
        self.join(start)
        joined = self.posted.get(timeout=SOON)
        assert isinstance(joined, Joined)
        return joined


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made: list[Node] = []
    yield made
    for node in made:
        node.close()


def start_of(node: Node) -> d.StartReplicas:
    return d.StartReplicas(plan(1, ("here", 1)), node.open(1), (0,))


def test_a_secret_is_made_and_reaches_the_other_nodes(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ADAPTDL_SECRET", raising=False)
    nodes += [Node(), Node()]
    start = start_of(nodes[0])
    assert nodes[1].joined(start).secret == nodes[0].secret
    assert len(nodes[0].secret or "") == 32


def test_a_secret_that_was_given_does_not_travel(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTDL_SECRET", "xyzzy")
    nodes += [Node(), Node()]
    start = start_of(nodes[0])
    assert nodes[1].joined(start).secret == "xyzzy"
    stranger = TCPStore("127.0.0.1", start.master.port, is_master=False)
    assert stranger.get("adaptdl/secret") == b""
    monkeypatch.delenv("ADAPTDL_SECRET")
    nodes.append(Node())
    joined = nodes[2].joined(start)
    assert joined.secret is None
    assert "has an ADAPTDL_SECRET: set the same" in joined.why


@pytest.mark.etcd
@pytest.mark.timeout(600)
def test_replicas_are_not_told_how_to_get_into_the_store(tmp_path: Path) -> None:
    script = tmp_path / "names.py"
    script.write_text("import os; print([n for n in os.environ if n.startswith('ADAPTDL_ETCD')], 'seen')\n")
    given = {"ADAPTDL_ETCD_PASSWORD": "hidden", "ADAPTDL_ETCD_USER": "me", "ADAPTDL_ETCD_TIMEOUT": "20"}
    with ElasticRun(["--standalone", str(script)], tmp_path, given) as run:
        assert run.wait() == 0
        assert "[] seen" in run.text()


FOREIGN = {
    "ADAPTDL_ETCD_CA": "/other",
    "ADAPTDL_ETCD_USER": "other",
    "ADAPTDL_ETCD_TIMEOUT": "3",
    "HOME": "/h",
}


def test_a_coordinator_of_a_standalone_job_gets_no_credentials_of_an_etcd() -> None:
    before = dict(os.environ)
    options = parse(["--standalone", "--etcd-timeout=9", __file__], FOREIGN)
    assert store_environment(options, FOREIGN) == {"ADAPTDL_ETCD_TIMEOUT": "9", "HOME": "/h"}
    assert os.environ == before


def test_what_the_command_line_says_of_the_store_goes_before_the_environment() -> None:
    options = parse(["--etcd=e:1", "--etcd-ca=/mine", "--rdzv-id=job", __file__], FOREIGN)
    assert store_environment(options, FOREIGN) == {**FOREIGN, "ADAPTDL_ETCD_CA": "/mine"}
