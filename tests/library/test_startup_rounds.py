"""Replicas of torchrun's agents in a store that outlives a round, as with its c10d backend."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
import torch.distributed

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


def test_a_round_is_not_misled_by_the_keys_of_the_round_before() -> None:
    """A node that joins restarts all replicas, with the same store and the same number of restarts."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **os.environ,
        "ADAPTDL_SECRET": "s",
        "WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    for _ in range(2):
        with ExitStack() as stack:
            replicas = [
                stack.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-c", SUM],
                        env={**common, "RANK": rank, "LOCAL_RANK": rank},
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
                for rank in ("1", "0")
            ]
            for replica in replicas:
                stack.callback(replica.kill)
            assert [replica.communicate(timeout=PATIENCE)[0] for replica in replicas] == ["2.0\n", "2.0\n"]
