"""What a node says of an agent that it cannot start, and when it tries again."""

from __future__ import annotations

import ssl
import threading
from pathlib import Path

from submitted_jobs import submission_by

from adaptdl_elastic.agent.service.agents import Agents
from adaptdl_elastic.agent.service.blobs import Blobs
from adaptdl_elastic.agent.service.decisions import MOST_FAILURES
from adaptdl_elastic.agent.service.stand_in import Membership
from adaptdl_elastic.rendezvous.services.admission import JobState, Request
from adaptdl_elastic.rendezvous.services.service_client import ServiceClient
from adaptdl_elastic.rendezvous.services.service_config import ServiceConfig, ServiceDirectory
from adaptdl_elastic.rendezvous.store.memory import MemoryStore


def test_a_job_that_a_node_has_given_up_is_tried_again_when_it_is_resumed(tmp_path: Path) -> None:
    config = ServiceConfig("lab", "id", "n1", "127.0.0.1", "https://127.0.0.1:1")
    client, changed = ServiceClient(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)), threading.Event()
    agents = Agents(config, ServiceDirectory(tmp_path), 1, Blobs(tmp_path / "blobs"), client, changed.set)
    submission = submission_by("alice", command=("t.py",))
    request, store = Request(submission, None, JobState()), MemoryStore()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / submission.bundle).write_bytes(b"nonsense")
    membership = Membership(store, store.lease(60.0))
    for failures in range(1, MOST_FAILURES + 1):
        changed.clear()
        agents.start(request, [], membership)
        changed.wait()
        assert agents.states()["job"].failures == failures
        assert agents.given_up == (("job",) if failures == MOST_FAILURES else ())
    assert "Not a gzipped file" in agents.problems["job"]
    agents.forget("job")  # it is stopped
    assert (agents.states(), agents.problems) == ({}, {})
    store.close()
