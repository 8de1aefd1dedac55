"""The GPUs of a machine, from the driver's files."""

from __future__ import annotations

from pathlib import Path

from adaptdl_elastic.agent.machine.graphics import gpus


def test_gpus_are_counted_and_the_model_is_read(tmp_path: Path) -> None:
    for name in ("0000:00:1e.0", "0000:00:1f.0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "information").write_text("Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   11\n")
    assert gpus(tmp_path) == (2, "NVIDIA A100-SXM4-40GB")


def test_a_machine_without_the_driver_has_none(tmp_path: Path) -> None:
    assert gpus(tmp_path / "missing") == (0, "")
