"""The last decisions about a real job: asked for while it runs, written when it fails, without secrets."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from elastic_run import ElasticRun

from adaptdl_elastic.autoscaler.commands.replay import replayed

pytestmark = pytest.mark.processes

SCRIPT = """
import os
open("go").read()
raise RuntimeError("no https://me:planted-pw1@db/x with --token planted-tok1, planted-word1 "
                   + os.environ["MY_TOKEN"])
"""


def test_a_job_that_fails_leaves_decisions_that_can_be_replayed_and_hold_no_secret(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    os.mkfifo(tmp_path / "go")
    (tmp_path / "planted-path9").mkdir()
    arguments = ["--standalone", "--rdzv-id=demo", "--max-restarts=0", "--nproc-per-node=1"]
    arguments += ["--log-dir=logs", "--checkpoint-path=planted-path9", "train.py"]
    arguments += ["--token=planted-tok1", "--hf", "planted-word1"]
    with ElasticRun(arguments, tmp_path, {"MY_TOKEN": "planted-env1"}) as run:
        run.wait_for_event("started")
        run.wait_until_adaptdl_says("running", "status", "demo")
        said = run.adaptdl("doctor", "demo").stdout
        found = re.findall(r"^ok +decisions: .*: (\S+\.jsonl)$", said, re.MULTILINE)
        assert sorted(Path(one).name for one in found) == [
            "decisions-agent.jsonl",
            "decisions-coordinator.jsonl",
        ]
        (tmp_path / "go").write_text("")
        assert run.wait() == 1
    for one in found:
        text = Path(one).read_text()
        assert "planted" not in text, re.findall(r".{40}planted.{20}", text)
        *_, last = replayed(Path(one))
        assert re.fullmatch(r"\d+ decisions, the same as then", last)
        assert "failed" in text, "it was written again at the end"
