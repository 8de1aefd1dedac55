"""A training step runs through few files of the product, and seldom changes file."""

from __future__ import annotations

from pathlib import Path

import generations
import pytest
import step_path


@pytest.mark.processes
def test_a_step_runs_through_few_files_of_the_product(tmp_path: Path) -> None:
    done = generations.run_alone(Path(step_path.__file__), tmp_path, "--least")
    assert done.code == 0, done.output
    # Lower these with each change that makes a step shorter. The support module prints the way of a step.
    ceilings = {"files": 31, "changes of file": 136, "calls": 222}
    found = dict(zip(ceilings, map(int, done.output.splitlines()[-1].split()), strict=True))
    assert not {name: found[name] for name, most in ceilings.items() if found[name] > most}
