"""The notebook examples/quickstart.ipynb, cell by cell in one process, as Jupyter runs it, and a report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ended
from units import blocks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_notebook_runs_and_its_job_is_done(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples/quickstart.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")
    # fewer epochs show the same
    for whole, fewer in (("until(24)", "until(12)"), ("--epochs=12", "--epochs=3")):
        assert sum(whole in text for text in code) == 1
        code = [text.replace(whole, fewer) for text in code]
    lines = [
        f"import subprocess\nsubprocess.run({text[1:]!r}, shell=True, check=True)" if text[0] == "!" else text
        for text in code
    ]
    script = tmp_path / "notebook.py"
    lines += ["assert min(sizes) == sizes[0] == 32, sizes", "assert accuracy > 0.8, accuracy"]
    script.write_text("\n".join(lines))
    for name in ("image_classification.py", "image_data.py"):
        (tmp_path / name).symlink_to(ROOT / "examples" / name)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    done = ended([sys.executable, str(script)], tmp_path, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "critical batch size" in done.stdout
    job, report = blocks("howto/batch-size.md", "bash", "test_quickstart")[0].splitlines()
    # the notebook's last cells are these two lines, without --html
    assert job.startswith("adaptdl-run --standalone --event-log=events.jsonl ")
    subprocess.run(report, shell=True, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert "critical batch size" in (tmp_path / "report.html").read_text()
