"""Instances of the benchmark: what is none is said in one line that names the file and what is wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOB: dict[str, Any] = {
    "name": "a",
    "perf_params": [0.1, 0.01, 0.5, 0.01, 0.1, 0.01, 1.5],
    "grad": [1.0, 10.0],
    "init_batch_size": 32,
    "max_batch_size": 256,
    "min_local_bsz": 8,
    "max_local_bsz": 64,
    "min_replicas": 0,
    "max_replicas": 4,
}
INSTANCE: dict[str, Any] = {"name": "x", "num_nodes": 2, "gpus_per_node": 4, "jobs": [JOB]}


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("policy_benchmark", ROOT / "benchmarks" / "policy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


Solve = Callable[..., tuple[int, str, str]]


@pytest.fixture
def solve(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Solve:
    """Exit status, output and errors of the benchmark with these instances and options."""

    def run(*instances: object, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        paths = []
        for i, instance in enumerate(instances):
            paths.append(tmp_path / f"{i}.json")
            paths[-1].write_text(json.dumps(instance))
        monkeypatch.setattr(sys, "argv", ["policy.py", "--json", *map(str, paths), *options])
        status = benchmark.main()
        return (status, *capsys.readouterr())

    return run


def test_an_instance_is_solved(solve: Solve) -> None:
    status, output, errors = solve(INSTANCE, {**INSTANCE, "name": "empty", "jobs": []})
    assert status == 0, errors
    full, empty = json.loads(output)
    assert (full["instance"], list(full["allocation"]), full["objective"] >= 1) == ("x", ["a"], True)
    assert (empty["instance"], empty["allocation"], empty["objective"]) == ("empty", {}, 0.0)


@pytest.mark.parametrize(
    ("instance", "complaint"),
    [
        ([1, 2], "not an instance"),
        ({"num_nodes": 2, "gpus_per_node": 4, "jobs": []}, "name: "),
        ({**INSTANCE, "num_nodes": -2}, "num_nodes: Input should be greater than or equal to 1"),
        ({**INSTANCE, "num_nodes": 10**9}, "num_nodes: Input should be less than or equal to 100000"),
        ({**INSTANCE, "num_nodes": "4"}, "num_nodes: Input should be a valid integer"),
        ({**INSTANCE, "gpus_per_node": 0}, "gpus_per_node: Input should be greater"),
        ({**INSTANCE, "jobs": None}, "jobs: "),
        ({**INSTANCE, "jobs": [JOB, JOB]}, "jobs: a occur more than once"),
        ({**INSTANCE, "jobs": [{**JOB, "min_replicas": 8}]}, "jobs.0: a: min_replicas 8 is more than max_re"),
        ({**INSTANCE, "jobs": [{**JOB, "min_local_bsz": 99}]}, "a: min_local_bsz 99 is more than max_local"),
        ({**INSTANCE, "jobs": [{**JOB, "perf_params": [1, 2]}]}, "jobs.0.perf_params"),
        ({**INSTANCE, "jobs": [{**JOB, "perf_params": [float("nan")] * 7}]}, "jobs.0.perf_params"),
        ({**INSTANCE, "jobs": [{**JOB, "perf_params": [0, 0, 0, 0, 0, 0, 1]}]}, "take no time at all"),
        ({**INSTANCE, "jobs": [{**JOB, "grad": [0, 0]}]}, "a: grad: neither a gradient nor noise"),
        ({**INSTANCE, "jobs": [{**JOB, "init_batch_size": 0}]}, "jobs.0.init_batch_size"),
    ],
)
def test_a_malformed_instance_is_refused_in_one_line(
    solve: Solve, tmp_path: Path, instance: object, complaint: str
) -> None:
    status, output, errors = solve(instance)
    assert (status, output) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith(str(tmp_path / "0.json"))
    assert complaint in line


@pytest.mark.parametrize("bounds", [{"x": 4.0, "other": 1}, {"what": "upper bounds", "bounds": {"x": 4.0}}])
@pytest.mark.parametrize("beside", [True, False])
def test_bounds_are_read_flat_or_under_their_name(
    solve: Solve, tmp_path: Path, bounds: dict[str, Any], beside: bool
) -> None:
    file = tmp_path / ("bounds.json" if beside else "mine.json")
    file.write_text(json.dumps(bounds))
    status, output, errors = solve(INSTANCE, options=() if beside else ("--bounds", str(file)))
    assert status == 0, errors
    (found,) = json.loads(output)
    assert found["gap"] == pytest.approx(1 - found["objective"] / 4.0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "not bounds, which are a JSON object such as"),
        ("[1, 2]", "Input should be a valid dictionary"),
        ('{"x": "many"}', "x: Input should be a valid number"),
        ('{"bounds": {"x": 0}}', "x: Input should be greater than 0"),
        ('{"x": NaN}', "x: Input should be"),
        (b"\xff", "not bounds"),
    ],
)
def test_a_file_without_bounds_is_refused_in_one_line(
    solve: Solve, tmp_path: Path, text: str | bytes | None, complaint: str
) -> None:
    file = tmp_path / "mine.json"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    status, output, errors = solve(INSTANCE, options=("--bounds", str(file)))
    assert (status, output) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith(str(file))
    assert complaint in line
