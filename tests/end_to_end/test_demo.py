"""What `make demo` runs, shorter: it checks itself that it shows what a demonstration should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_run import ROOT, environment


@pytest.mark.slow
@pytest.mark.etcd
@pytest.mark.timeout(400)
def test_the_demonstration_grows_by_goodput_and_draws_its_picture(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--epochs=20"],
        env=environment(XDG_RUNTIME_DIR=str(tmp_path), ADAPTDL_DEMO_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for word in ("replicas", "pause", "batch size", "gain", "accuracy", "policy"):
        assert word in run.stderr, run.stderr  # the summary: stdout is the script's
    out = tmp_path / ".demo"
    assert (out / "run.png").read_bytes().startswith(b"\x89PNG")
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    grown = next(e for e in events if e["event"] == "generation" and e["replicas"] == 2)
    assert grown["cause"] == "policy"
    assert "goodput" in grown["reason"]
    assert {"batch_size", "epoch", "checkpoint", "exit"} <= {e["event"] for e in events}
