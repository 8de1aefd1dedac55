"""Replicas of torchrun's agents in a store that outlives a round, as with its c10d backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import generations
import pytest
import torch.distributed
from warm_agent import CONTEXT

dist: Any = torch.distributed

pytestmark = pytest.mark.processes

SUM = """
import torch, adaptdl_elastic.torch as adl
adl.init_process_group("gloo")
total = torch.ones(1)
torch.distributed.all_reduce(total)
print(total.item())
"""
PATIENCE = 100.0


def test_a_round_is_not_misled_by_the_keys_of_the_round_before(tmp_path: Path) -> None:
    """A node that joins restarts all replicas, with the same store and the same number of restarts."""
    (tmp_path / "script.py").write_text(SUM)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "ADAPTDL_SECRET": "s",
        "WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    for _ in range(2):
        outputs = [str(tmp_path / rank) for rank in "10"]
        replicas = [
            CONTEXT.Process(
                target=generations.main,
                args=(str(tmp_path / "script.py"), {**common, "RANK": rank, "LOCAL_RANK": rank}, output),
            )
            for rank, output in zip("10", outputs, strict=True)
        ]
        for replica in replicas:
            replica.start()
        for replica in replicas:
            replica.join(PATIENCE)
            replica.kill()
        assert [Path(output).read_text() for output in outputs] == ["2.0\n", "2.0\n"]
