"""What joins a healthy job cannot end it: real agents, replicas and a real etcd."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import JOB, LONG, TRAIN, Cluster

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(300)]

ONE_NODE_HAS_IT = """
import os
import runpy
import sys
sys.path += os.environ.get("ONLY_HERE", "").split()
import onlyhere
runpy.run_path(TRAIN, run_name="__main__")
"""


def test_a_node_without_a_module_is_left_out_and_the_other_trains_to_the_end(
    cluster: Cluster, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "onlyhere.py").touch()
    script = tmp_path / "s.py"
    script.write_text(ONE_NODE_HAS_IT.replace("TRAIN", repr(TRAIN)))
    first = cluster.start("a", str(script), *LONG, env={"ONLY_HERE": str(here)})
    first.wait_for_event("generation", generation=0)
    second = cluster.start("b", str(script), *LONG)
    cluster.wait_for_node("b", like="a")
    cluster.ask("scale", JOB, "--replicas", "2")
    said = cluster.wait_until_told("b is left out", "status", JOB)
    assert "No module named 'onlyhere'" in said
    assert "b is left out" in cluster.ask("nodes", "--json")
    cluster.finish(first, second)
    assert first.of("failure") == []
    cluster.check(replicas=1)
