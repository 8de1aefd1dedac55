"""The output of a job that is followed on several nodes, which are played."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from adaptdl_elastic.autoscaler.cli import CommandError
from adaptdl_elastic.autoscaler.commands.logs import Followers, chosen
from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord
from adaptdl_elastic.rendezvous.services.service_client import (
    ServiceClient,
    ServiceError,
    ServiceRefusedError,
)
from adaptdl_elastic.rendezvous.services.submitted import Submitted

PATIENCE = 120.0


class Nodes(ServiceClient):
    """Answers as the services of nodes do. A request that waits is kept until `more` is set.

    Attributes:
        texts: Output of each node, or the error with which it answers.
        kept: Set while a request is kept.
    """

    def __init__(self, **texts: str | ServiceError) -> None:
        self.texts = texts
        self.kept, self.more = threading.Event(), threading.Event()

    def get_json(self, service: ServiceRecord, path: str, **values: Any) -> Any:
        text = self.texts[service.node]
        if isinstance(text, ServiceError):
            raise text
        after = values["after"]
        if values["wait"] and len(text) == after:
            self.kept.set()
            assert self.more.wait(PATIENCE)
            text = str(self.texts[service.node])
        return {"text": text[after:], "offset": len(text), "running": False}

    def found(self) -> Submitted:
        return Submitted({node: ServiceRecord(node, "127.0.0.1", 1, 1) for node in self.texts}, (), {})


def test_the_end_of_a_job_does_not_wait_for_output_that_never_comes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`adaptdl logs -f` ended up to 5 s after its job."""
    nodes = Nodes(n1="[rank0]: begins\n")
    followers = Followers(nodes, "job", chosen, to_the_end=True)
    followers.start(nodes.found())
    assert nodes.kept.wait(PATIENCE)  # its node keeps the request for more
    nodes.texts["n1"] = "[rank0]: begins\n[rank0]: ends\n"
    followers.finish()
    assert capsys.readouterr().out == "[rank0]: begins\n[rank0]: ends\n"
    nodes.more.set()  # the answer that comes late is not printed a second time
    for thread in threading.enumerate():
        if thread.name == "n1":
            thread.join(PATIENCE)
    assert capsys.readouterr().out == ""


def test_a_node_that_does_not_answer_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = Nodes(n1="[rank0]: begins\n", n2=ServiceError("n2 does not answer"))
    followers = Followers(nodes, "job", chosen, to_the_end=False)
    followers.start(nodes.found())
    followers.finish()
    said = capsys.readouterr()
    assert said.out == "[rank0]: begins\n"
    assert said.err == "adaptdl: n2 does not answer; what it has of the output is not shown\n"


@pytest.mark.parametrize("to_the_end", [True, False])
def test_a_node_that_refuses_ends_the_command(to_the_end: bool) -> None:
    nodes = Nodes(n1=ServiceRefusedError("n1 refuses: it belongs to alice", 403))
    followers = Followers(nodes, "job", chosen, to_the_end)
    followers.start(nodes.found())
    with pytest.raises(CommandError, match="belongs to alice"):
        followers.wait(PATIENCE) if to_the_end else followers.finish()
