"""Names of an epoch loop's body that are read behind it, after a restart when all epochs were finished."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fresh import Script

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session
from adaptdl_elastic.torch._runtime.loop_names import names_read_behind


class Probe:
    """An iterator without items that looks at the frame which asks it for one."""

    found: set[str]

    def __iter__(self) -> Probe:
        return self

    def __next__(self) -> Any:
        self.found = names_read_behind(sys._getframe(1))
        raise StopIteration


LOOP = """
before = 0
for epoch in probe:
    before = before + epoch
    for i, batch in enumerate([1, 2]):
        loss, again = batch, batch
        unread = loss
"""


@pytest.mark.parametrize("inside", ["module", "function"])
@pytest.mark.parametrize(
    ("behind", "wanted"),
    [
        ("pass", set()),
        ("print(before)", set()),
        ("print(loss, epoch)", {"loss", "epoch"}),
        ("again = 3\nprint(again, i)", {"i"}),
        ("if before:\n    print(batch.item())", {"batch"}),
        ("print(print, unknown)", set()),
        ("for epoch in []:\n    print(epoch)", set()),
    ],
)
def test_names_that_are_read_behind_a_loop(inside: str, behind: str, wanted: set[str]) -> None:
    probe = Probe()
    text = LOOP + behind
    if inside == "function":
        text = f"def main(probe):\n{textwrap.indent(text, '    ')}\nmain(probe)"
    with contextlib.suppress(NameError):
        exec(compile(text, "script.py", "exec"), {"probe": probe})
    assert probe.found == wanted


def test_a_wrapper_of_the_epochs_needs_no_name() -> None:
    def bar(items: Any) -> Iterator[Any]:
        for item in items:
            yield item
        print(item)

    probe = Probe()
    with pytest.raises(NameError):
        list(bar(probe))
    assert probe.found == set()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Script]:
    path = str(tmp_path / "checkpoints")
    yield Script(monkeypatch, ADAPTDL_CHECKPOINT_PATH=path, ADAPTDL_CHECKPOINT_INTERVAL="0")
    _session.current().close()
    _session.reset()


def test_after_a_restart_behind_the_epochs_a_line_says_which_names_are_missing(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> tuple[int, int]:
        for epoch in adl.remaining_epochs_until(2):
            for batch in loader:
                last = int(batch[-1]) + 0 * epoch
        return epoch, last

    loader = adl.AdaptiveDataLoader(range(4), batch_size=2)
    assert run() == (1, 3)
    assert caplog.messages == []
    script.restart()
    loader = adl.AdaptiveDataLoader(range(4), batch_size=2)
    with pytest.raises(UnboundLocalError):
        run()
    (line,) = caplog.messages
    assert "all 2 epochs were finished before this restart" in line
    assert line.endswith("read behind the loop needs a value before it (epoch, last)")


def test_a_script_that_reads_no_such_name_is_told_nothing(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> int:
        seen = 0
        for _ in adl.remaining_epochs_until(2):
            for batch in loader:
                seen += len(batch)
        for step in adl.steps(2):
            done = step
        return seen + done

    for _ in range(2):
        loader = adl.AdaptiveDataLoader(range(4), batch_size=2)
        run()
        script.restart()
    assert caplog.messages == []
