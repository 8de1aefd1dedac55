"""What simulated agents and coordinators decided is decided again, from their files."""

from __future__ import annotations

from pathlib import Path

import pytest
from faultsim.run import run

from adaptdl_elastic.autoscaler.commands.replay import replayed
from adaptdl_elastic.rendezvous.decision_record import Recorder


def test_every_decision_of_a_run_is_decided_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recorder] = []
    initialise = Recorder.__init__

    def keep(self: Recorder, core: str, path: Path | None) -> None:
        initialise(self, core, path)
        made.append(self)

    monkeypatch.setattr(Recorder, "__init__", keep)
    monkeypatch.setattr(Recorder, "most_calls", 100)
    monkeypatch.setattr(Recorder, "segments", None)  # all of them
    # fifteen agents and four coordinators decide in this one
    assert run(9).defects == []
    decisions, file = 0, tmp_path / "decisions"
    for recorder in made:
        file.write_text("\n".join([*recorder.lines(), ""]))
        *_, last = replayed(file)
        decisions += int(last.split()[0])
    assert decisions > 500
