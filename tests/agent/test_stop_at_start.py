"""A stop while a job waits at its start for a checkpoint that cannot be read."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from elastic_run import ElasticRun
from numbers_state import write
from polling import until

from adaptdl_elastic.storage import DirectoryStorage

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(600)]

SCRIPT = """
import errno, time
import adaptdl_elastic.torch as adl
from adaptdl_elastic import storage

def opened(path):
    if EARLY:
        from adaptdl_elastic import _session
        open("opened", "w").close()
        while not _session.current().stop_asked: time.sleep(0.01)
    raise OSError(errno.EIO, "Input/output error")

storage.open_regular = opened
adl.init_process_group("gloo")
raise RuntimeError("it has started")
"""


@pytest.mark.parametrize(
    ("how", "replicas", "early"),
    [("SIGTERM", 1, False), ("SIGINT", 2, False), ("stop", 2, False), ("stop", 1, True)],
)
def test_a_stop_ends_the_wait_for_a_checkpoint(tmp_path: Path, how: str, replicas: int, early: bool) -> None:
    write(DirectoryStorage(tmp_path / "saved"), {"a": b"1"})
    (tmp_path / "script.py").write_text(SCRIPT.replace("EARLY", str(early)))
    # longer than the test waits: only the interrupted wait ends it
    options = ["--checkpoint-timeout=250", f"--nproc-per-node={replicas}", "--checkpoint-path=saved"]
    with ElasticRun(["--standalone", "--rdzv-id=job", *options, "script.py"], tmp_path) as run:
        run.wait_for_event("started")
        # before that the agent does not know that the script can save
        if early:
            until("nothing is opened", (tmp_path / "opened").exists)
        else:
            run.wait_until_adaptdl_says("waiting for it, 300 s at most", "status", "job")
        if how == "stop":
            stopped = run.adaptdl("stop", "job", "--wait")
            assert stopped.returncode == 0, stopped.stderr
            assert stopped.stdout == "job is stopping\n"
        else:
            run.process.send_signal(getattr(signal, how))
        assert run.wait() == 143, run.text()
        reason = "stopped as asked; no checkpoint is saved" if how == "stop" else f"stopped: {how}"
        assert [event["reason"] for event in run.of("exit")] == [reason]
        assert [event["message"] for event in run.of("failure")] == []
        assert "Traceback" not in run.text()
    assert len(DirectoryStorage(tmp_path / "saved").ids()) == 1
