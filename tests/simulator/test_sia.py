"""The policy is compared with Sia's on one of its workloads."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from simulator.outcome_report import summarize

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT.parent / "shared" / "traces" / "hetero"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces in {TRACES}")


@pytest.fixture(scope="module")
def sia() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sia_benchmark", ROOT / "benchmarks" / "sia.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.exhaustive
def test_jobs_end_sooner_than_under_sia(sia: ModuleType) -> None:
    report = summarize(sia.replay(TRACES, 3, "goodput").outcome, fairness=False)
    assert report.average_jct < 0.97 * 2049.4  # Sia's, measured with the artifact
