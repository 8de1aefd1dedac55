"""Whose failure it is: of nodes at the first start of a job, of newcomers, and when they are tried again."""

from __future__ import annotations

import pytest
from coordinator_pump import Pump
from coordinator_script import play

BAD = 'fail "name x" kind="NameError at train.py:3 in <module>"'
THREE = """
        job a max_replicas=2 min_nodes=2 min_replicas=2 max_nodes=2
        node n0 a steps=False; node n1 a steps=False; node n2 a steps=False; settle -> rank0=n0 n0=1 n1=1"""
ONE = "job a max_replicas=2 min_nodes=1 max_nodes=2 max_restarts=1; node n0 a"

OWNERS = {
    "a node that fails at the first start is left out": f"""{THREE}
        n1 {BAD}; later 3 -> n0=1 n2=1 restarts=0 "...n1 is left out: name x..."
        later 650 -> n0=1 n2=1 running""",
    "rank 0's node that fails at the first start is left out": f"""{THREE}
        n0 {BAD}; later 3 -> n1=1 n2=1 restarts=0 "...n0 is left out: name x...\"""",
    "two nodes that fail at the first start are left out": f"""{THREE}
        node n3 a steps=False; n0 {BAD}; later 3 -> restarts=0
        n1 fail "y" kind="ImportError at train.py:1"; later 3 -> n2=1 n3=1 restarts=0
        later 500 -> n2=1 n3=1 "...n0 is left out: name x; n1 is left out: y\"""",
    "a node that fails at the first start has none in its place": f"""
        job a max_replicas=2 min_nodes=2 min_replicas=2 max_nodes=2 max_restarts=1
        node n0 a steps=False; node n1 a steps=False; settle
        n1 {BAD}; later 3 -> restarts=1 n0=1 n1=1
        n1 {BAD}; later 3 -> failed""",
    "a node that saved the newest checkpoint and then fails is left out like another": f"""
        {ONE} steps=False; node n1 a steps=False; settle; ask a replicas=2; settle -> n0=1 n1=1
        checkpoint a 7; n0 {BAD}; later 3 -> n1=1 restarts=0""",
    "a newcomer that fails where nothing else can run ends the job like its script": f"""
        {ONE}; settle; n0 steps=False; node n1 a steps=False; ask a replicas=2; settle -> n0=1 n1=1
        n0 vanish; later 30 -> n1=1
        n1 {BAD}; later 60
        n1 {BAD}; later 30 -> failed""",
    "a newcomer without which a job is too small is tried again after ten minutes": f"""
        job a max_replicas=2 min_nodes=2 min_replicas=2 max_nodes=2 max_restarts=1
        node n0 a; node n1 a; settle -> n0=1 n1=1
        n1 vanish; later 30 -> nowhere
        node n2 a steps=False; n0 steps=False; later 5 -> n0=1 n2=1
        n2 {BAD}; later 540 -> pending nowhere
        n2 steps=True; later 130 -> running n0=1 n2=1""",
    "a node whose code has changed leaves a restart to the others, and all of them end the job": f"""
        {ONE}; node n1 a; ask a replicas=2; settle -> n0=1 n1=1
        n1 fail "t.py" kind="changed code" final=True; later 3 -> n0=1 restarts=0 "...n1 is left out: t.py..."
        n0 fail "t.py" kind="changed code" final=True; later 3 -> failed""",
    "changed code is no failure of a size": """
        job a max_replicas=2 max_nodes=1; node n0 a 2; ask a replicas=1; settle -> n0=1
        ask a replicas=2; settle -> n0=2
        n0 fail "t.py" kind="changed code" final=True; later 3 -> failed limited_to=None""",
    "a node with other code that joins a restart ends nothing": f"""
        {ONE.replace(";", " rescale=restart;", 1)}; settle -> n0=1
        node n1 a steps=False; ask a replicas=2; settle -> n0=1 n1=1
        n1 fail "t.py" kind="changed code" final=True; later 3 -> n0=1 restarts=0""",
    "a change that would be a restart waits while code differs": """
        job a max_replicas=2 max_nodes=1 rescale=restart; node n0 a 2; ask a replicas=2; settle -> n0=2
        n0 register changed="t.py"; ask a replicas=1; settle -> n0=2 "keeps its size: t.py has changed..."
        n0 register changed=""; settle -> n0=1""",
    "a newcomer that never starts is tried again after ten minutes and then after twenty": """
        job a max_nodes=2 max_replicas=2; node n0 a 1; settle; node n1 a holds_start=True
        ask a replicas=2; settle -> n0=1 n1=1
        later 21 -> n0=1 "...n1 is left out: it did not start within 20 s"
        later 530 -> n0=1
        later 71 -> n0=1 n1=1
        later 21 -> n0=1
        later 1130 -> n0=1
        later 71 -> n0=1 n1=1""",
    "a limit of the batch size is lifted by the first plan after ten minutes": """
        job a max_replicas=2 max_nodes=1; node n0 a 2; ask a replicas=1; settle
        n0 fail "cuBLAS" kind="RuntimeError at m.py:1" worked_batch=48; settle -> limited_to=48
        later 300; n0 fail "SIGKILL" exit_code=-9; settle; later 3 -> limited_to=48
        later 300; n0 fail "SIGKILL" exit_code=-9; settle; later 3 -> n0=1 limited_to=None""",
}


@pytest.mark.parametrize("script", OWNERS.values(), ids=OWNERS)
def test_a_failure_belongs_to_its_owner(script: str) -> None:
    play(Pump(), script)
