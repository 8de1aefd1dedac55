"""A mutant that a test notices is told from one that none notices."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from mutants import Mutant, judged, mutants

SOURCE = """def clipped(value):
    if value > 9:
        return 9
    return value if value else 0
"""
TEST = "import clip\n\ndef test_it():\n    assert [clip.clipped(n) for n in (1, 9, 11)] == [1, 9, 9]\n"


def test_every_kind_of_change_is_made_on_its_own_line() -> None:
    changes = {(one.line, one.after.strip()) for one in mutants("clip.py", SOURCE)}
    assert changes == {
        (2, "if (value) <= (9):"),
        (2, "if value > 10:"),
        (3, "return 10"),
        (4, "return value if (not (value)) else 0"),
        (4, "return value if value else 1"),
    }


@pytest.mark.processes
def test_a_mutant_is_caught_or_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mutants.SECONDS", 200.0)  # a busy machine needs many to start pytest
    (tmp_path / "clip.py").write_text(SOURCE)
    (tmp_path / "test_clip.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p quick\npythonpath = .\n")
    found = [dataclasses.replace(one, tests=("test_clip.py",)) for one in mutants("clip.py", SOURCE)]
    of_one_line = [one for one in found if one.line == 2]
    survivors = {one.after.strip() for one in of_one_line if not judged(tmp_path, one)}
    assert (len(of_one_line), survivors) == (2, {"if value > 10:"})
    assert (tmp_path / "clip.py").read_text() == SOURCE
    broken = Mutant("clip.py", 1, "guard", "", "def clipped(value:", ("test_clip.py",))
    assert judged(tmp_path, broken) == "it cannot be imported"
