"""Every function of `env`: what it reads, in which order, and what it says of what cannot be meant."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from code_lines import PRODUCT, ROOT

from adaptdl_elastic import env
from adaptdl_elastic.env import EnvironmentVariableError
from adaptdl_elastic.protocol import environment

ALONE: dict[str, Any] = {
    "checkpoint_path": None,
    "share_path": None,
    "job_id": None,
    "master_addr": "127.0.0.1",
    "master_port": 0,
    "replica_rank": 0,
    "num_replicas": 1,
    "num_nodes": 1,
    "local_rank": 0,
    "num_restarts": 0,
    "generation": 0,
    "adaptdl_sched_version": None,
    "supervisor_url": None,
    "from_ray": False,
    "rescale": "auto",
    "secret": None,
    "checkpoint_interval": 30.0,
    "checkpoint_timeout": 120.0,
    "checkpoint_keep": 3,
    "checkpoint_wait": 0.0,
    "report_interval": 2.0,
    "hang_timeout": None,
    "memory_limit": None,
    "batch_size_limit": None,
}

# (function, variable of ours, text, value; torchrun's variable, text, value)
TORCHRUN = [
    ("job_id", "ADAPTDL_JOB_ID", "mine", "mine", "TORCHELASTIC_RUN_ID", "theirs", "theirs"),
    ("master_addr", "ADAPTDL_MASTER_ADDR", "node-1", "node-1", "MASTER_ADDR", "node-2", "node-2"),
    ("master_port", "ADAPTDL_MASTER_PORT", "65535", 65535, "MASTER_PORT", "29500", 29500),
    ("replica_rank", "ADAPTDL_REPLICA_RANK", "3", 3, "RANK", "2", 2),
    ("num_replicas", "ADAPTDL_NUM_REPLICAS", "9", 9, "WORLD_SIZE", "8", 8),
    ("num_nodes", "ADAPTDL_NUM_NODES", "5", 5, "GROUP_WORLD_SIZE", "4", 4),
    ("local_rank", "ADAPTDL_LOCAL_RANK", "1", 1, "LOCAL_RANK", "2", 2),
    ("num_restarts", "ADAPTDL_NUM_RESTARTS", "6", 6, "TORCHELASTIC_RESTART_COUNT", "7", 7),
    ("generation", "ADAPTDL_GENERATION", "6", 6, "TORCHELASTIC_RESTART_COUNT", "7", 7),
    ("generation", "ADAPTDL_GENERATION", "6", 6, "ADAPTDL_NUM_RESTARTS", "7", 7),
]

OURS_ALONE = [
    ("checkpoint_path", "ADAPTDL_CHECKPOINT_PATH", "s3://bucket/x", "s3://bucket/x"),
    ("share_path", "ADAPTDL_SHARE_PATH", "/data", "/data"),
    ("adaptdl_sched_version", "ADAPTDL_SCHED_VERSION", "0.2", "0.2"),
    ("supervisor_url", "ADAPTDL_SUPERVISOR_URL", "http://x:1", "http://x:1"),
    ("rescale", "ADAPTDL_RESCALE", "restart", "restart"),
    ("secret", "ADAPTDL_SECRET", "clé", "clé".encode()),
    ("checkpoint_interval", "ADAPTDL_CHECKPOINT_INTERVAL", "0.5", 0.5),
    ("checkpoint_interval", "ADAPTDL_CHECKPOINT_INTERVAL", "0", 0.0),
    ("checkpoint_timeout", "ADAPTDL_CHECKPOINT_TIMEOUT", "0", 0.0),
    ("checkpoint_keep", "ADAPTDL_CHECKPOINT_KEEP", "1", 1),
    ("checkpoint_wait", "ADAPTDL_CHECKPOINT_WAIT", "9.5", 9.5),
    ("report_interval", "ADAPTDL_REPORT_INTERVAL", "0.1", 0.1),
    ("hang_timeout", "ADAPTDL_HANG_TIMEOUT", "20", 20.0),
    ("hang_timeout", "ADAPTDL_HANG_TIMEOUT", "0", None),
    ("memory_limit", "ADAPTDL_MEMORY_LIMIT", "48", 48),
    ("batch_size_limit", "ADAPTDL_BATCH_SIZE_LIMIT", "48", 48),
]

MALFORMED = [
    ("master_port", "ADAPTDL_MASTER_PORT", "http", "a port from 0 to 65535 is needed"),
    ("master_port", "MASTER_PORT", "65536", "a port from 0 to 65535"),
    ("master_port", "ADAPTDL_MASTER_PORT", "-1", "a port from 0"),
    ("replica_rank", "ADAPTDL_REPLICA_RANK", "-1", "a whole number of at least 0"),
    ("replica_rank", "RANK", "first", "a whole number"),
    ("num_replicas", "ADAPTDL_NUM_REPLICAS", "0", "a whole number of at least 1"),
    ("num_replicas", "WORLD_SIZE", "2.0", "a whole number of at least 1 is needed"),
    ("num_nodes", "ADAPTDL_NUM_NODES", "0", "a whole number of at least 1"),
    ("num_nodes", "GROUP_WORLD_SIZE", "x", "a whole number"),
    ("local_rank", "LOCAL_RANK", "-2", "a whole number of at least 0"),
    ("num_restarts", "ADAPTDL_NUM_RESTARTS", "1e3", "a whole number"),
    (
        "checkpoint_interval",
        "ADAPTDL_CHECKPOINT_INTERVAL",
        "30s",
        "a number of seconds, 0 or more, is needed",
    ),
    ("checkpoint_interval", "ADAPTDL_CHECKPOINT_INTERVAL", "-1", "a number of seconds, 0 or more"),
    ("checkpoint_interval", "ADAPTDL_CHECKPOINT_INTERVAL", "nan", "a number of seconds, 0 or more"),
    ("checkpoint_interval", "ADAPTDL_CHECKPOINT_INTERVAL", "inf", "a number of seconds, 0 or more"),
    ("checkpoint_keep", "ADAPTDL_CHECKPOINT_KEEP", "0", "a whole number of at least 1"),
    ("rescale", "ADAPTDL_RESCALE", "never", "auto, inplace or restart"),
]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {name for _, _, _, _, name, _, _ in TORCHRUN}
    for name in [name for name in os.environ if name.startswith("ADAPTDL_") or name in theirs]:
        monkeypatch.delenv(name)


def call(name: str) -> Any:
    function: Callable[[], Any] = getattr(env, name)
    return function()


def test_every_function_is_looked_at_here() -> None:
    functions = {
        name
        for name, thing in vars(env).items()
        if callable(thing) and getattr(thing, "__module__", "") == env.__name__ and name[0].islower()
    }
    assert functions == set(ALONE)


@pytest.mark.parametrize("name", ALONE)
def test_a_script_that_is_alone(name: str) -> None:
    assert call(name) == ALONE[name]


def test_a_process_that_took_its_rank_away_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of a replica of torchrun, which keeps torchrun's numbers within a role."""
    monkeypatch.setenv("ROLE_RANK", "2")
    monkeypatch.setenv("ROLE_WORLD_SIZE", "4")
    assert (env.replica_rank(), env.num_replicas()) == (0, 1)


@pytest.mark.parametrize(("name", "ours", "text", "value", "theirs", "other", "second"), TORCHRUN)
def test_our_variable_comes_first_then_torchruns(
    monkeypatch: pytest.MonkeyPatch, name: str, ours: str, text: str, value: Any, theirs: str, other: str,
    second: Any,
) -> None:  # fmt: skip
    if name == "replica_rank":
        monkeypatch.setenv("ADAPTDL_NUM_REPLICAS", "9")
    monkeypatch.setenv(theirs, other)
    assert call(name) == second
    monkeypatch.setenv(ours, text)
    assert call(name) == value
    monkeypatch.setenv(ours, "")  # set to nothing is not set
    assert call(name) == second


@pytest.mark.parametrize(("name", "variable", "text", "value"), OURS_ALONE)
def test_variables_of_this_library_are_read(
    monkeypatch: pytest.MonkeyPatch, name: str, variable: str, text: str, value: Any
) -> None:
    monkeypatch.setenv(variable, text)
    assert call(name) == value
    monkeypatch.setenv(variable, "")
    assert call(name) == ALONE[name]


@pytest.mark.parametrize(("name", "variable", "text", "message"), MALFORMED)
def test_the_error_names_a_malformed_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, variable: str, text: str, message: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(EnvironmentVariableError, match=f"^{variable}={text}: .*{message}"):
        call(name)


def test_a_rank_must_be_below_the_number_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert env.replica_rank() == 2
    monkeypatch.setenv("ADAPTDL_NUM_REPLICAS", "2")
    with pytest.raises(EnvironmentVariableError, match="rank 2 of 2 replicas"):
        env.replica_rank()


def test_names_of_variables_stand_in_one_file_only() -> None:
    one = re.compile(r"(ADAPTDL|TORCHELASTIC|PET|AWS)_[A-Z_]*[A-Z]")
    found = {
        (str(path.relative_to(ROOT)), node.value)
        for folder in PRODUCT
        for path in (ROOT / folder).rglob("*.py")
        if not any(part.is_symlink() for part in path.parents) and path != Path(environment.__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and one.fullmatch(node.value)
    }
    assert found == set()
