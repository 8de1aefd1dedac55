from __future__ import annotations

import re
import struct
from pathlib import Path

import generations
import numpy as np
import pytest
from elastic_run import ROOT

SCRIPT = ROOT / "examples" / "adaptdl_tutorial.py"


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


@pytest.fixture(scope="module")
def idx_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scikit-learn's digits as MNIST's four files."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("idx")
    digits = load_digits()
    images = np.pad(digits.images.repeat(3, 1).repeat(3, 2), ((0, 0), (2, 2), (2, 2))) * 15
    for part, where in (("train", slice(0, 1280)), ("t10k", slice(1280, None))):
        write_idx(folder / f"{part}-images-idx3-ubyte", images[where])
        write_idx(folder / f"{part}-labels-idx1-ubyte", digits.target[where])
    return folder


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adaptdls_tutorial_runs_with_only_its_imports_changed(idx_images: Path, tmp_path: Path) -> None:
    environment = {
        "ADAPTDL_CHECKPOINT_PATH": str(tmp_path / "saved"),
        "ADAPTDL_TENSORBOARD_LOGDIR": str(tmp_path / "board"),
    }
    arguments = ["--data", str(idx_images), "--epochs", "2"]
    ended = generations.run(SCRIPT, 2, tmp_path, arguments, **environment)
    assert [e.code for e in ended] == [0, 0], ended
    accuracies = [float(a) for a in re.findall(r"held out: loss .*accuracy ([\d.]+)", ended[0].output)]
    assert len(accuracies) == 2
    assert accuracies[-1] >= 0.8
    assert "Traceback" not in ended[0].output
    assert list((tmp_path / "board").iterdir())
    # the job is over: a later start does nothing again, and has not lost it
    arguments += ["--save-model", str(tmp_path / "model.pt")]
    (again,) = generations.run(SCRIPT, 1, tmp_path, arguments, **environment, ADAPTDL_NUM_RESTARTS="1")
    assert again.code == 0, again
    assert "step" not in again.output
    assert (tmp_path / "model.pt").exists()
