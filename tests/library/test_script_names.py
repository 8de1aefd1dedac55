"""Names that a loop assigns only now and then, in a process that continues the loop.

The scripts of `test_loop_grammar` have such names at module level, through changes, deaths and restarts.
"""

from __future__ import annotations

import contextlib
import io
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elastic_run import run_agent
from fake_agent import FakeAgent
from fresh import Script

from adaptdl_elastic import _codec, checkpoint, collective
from adaptdl_elastic.protocol import uncaught_error
from adaptdl_elastic.torch._runtime.script_names import MOST_BYTES, ScriptNames

Globals = dict[str, Any]


class Left(Exception):
    """Raised by a script where its process is to end."""


@pytest.fixture
def script(script: Script, monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.setattr(uncaught_error, "explain", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return script


def run(text: str, name: str = "__main__", **given: Any) -> Globals:
    """Run a script, and return its global names, also if it has raised `Left`."""
    names: Globals = {"__name__": name, "Left": Left, **given}
    with contextlib.suppress(Left):
        exec(compile(text, "/home/me/train.py", "exec"), names)
    return names


LOOP = """
import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint
loader = adl.AdaptiveDataLoader(range(8), batch_size=2)
best = 7
for epoch in adl.remaining_epochs_until(2):
    for batch in loader:
        if (epoch, batch[0]) == (0, 0):
            rare, best = value, 1
        if (epoch, batch[0]) == at:
            checkpoint.save_all_states()
            raise Left
"""


@pytest.mark.parametrize("at", [(0, 4), (1, 0), None], ids=["in the epoch", "in a later one", "behind all"])
def test_a_name_that_only_the_first_batch_assigns_exists_after_a_restart(
    script: Script, at: tuple[int, int] | None
) -> None:
    run(LOOP, at=at, value=0.25)
    script.restart()
    assert run(LOOP, at=None, value=None)["rare"] == 0.25
    script.restart()
    behind = run(LOOP, at=None, value=None)
    assert (behind["rare"], behind["epoch"]) == (0.25, 1)


def test_a_name_that_the_script_assigns_before_the_loop_keeps_that_value(script: Script) -> None:
    assert run(LOOP, at=(0, 4), value=0.25)["best"] == 1
    script.restart()
    assert run(LOOP, at=None, value=None)["best"] == 7
    script.restart()
    assert run(f"rare = 'new'\n{LOOP}", at=None, value=None)["rare"] == "new"


def test_later_values_of_the_others_do_not_replace_the_number_of_the_epoch(script: Script) -> None:
    names = ScriptNames()

    def load(**values: int) -> None:
        names.load(io.BytesIO(_codec.encode(values)))

    load(epoch=0, found=3)
    text = """
for epoch in range(2):
    names.loop_begins(True)
    load(epoch=1, found=4)
    seen.append((epoch, found))
    found = 5
"""
    assert run(text, names=names, load=load, seen=[])["seen"] == [(0, 4), (1, 5)]


def test_only_names_of_the_main_module_are_kept(script: Script) -> None:
    run(LOOP, "trainer", at=(0, 4), value=0.25)
    script.restart()
    assert "rare" not in run(LOOP, "trainer", at=None, value=None)


PLAIN = [None, True, 3, 0.5, "text", b"bytes", (1, [2.0, {"a": None}]), np.float32(2), np.bool_(True)]
NOT_PLAIN = [object(), torch.zeros(1), [torch.zeros(1)], np.zeros(1), print, "x" * (MOST_BYTES + 1)]


@pytest.mark.parametrize("value", [*PLAIN, torch.tensor(0.5, requires_grad=True)], ids=repr)
def test_plain_values_are_kept(script: Script, value: Any) -> None:
    assert saved(rare=value) == {"rare": value}


@pytest.mark.parametrize("value", NOT_PLAIN, ids=lambda value: type(value).__name__)
def test_other_values_are_left_out(script: Script, value: Any) -> None:
    assert saved(rare=value, other=1) == {"other": 1}


HALF = "x" * (MOST_BYTES // 2)
ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("assigned", "kept"),
    [
        ({"rare": ITSELF}, {}),
        ({"first": HALF, "second": HALF, "third": 3}, {"first": HALF, "third": 3}),
        ({"__doc__": "text", "_own": 1}, {"_own": 1}),
        ({"before": 2, "rare": 3}, {"rare": 3}),
    ],
    ids=[
        "a value that contains itself",
        "more than the limit",
        "a name of Python",
        "one from before the loop",
    ],
)
def test_some_names_are_left_out(script: Script, assigned: Globals, kept: Globals) -> None:
    assert saved(**assigned) == kept


def test_names_that_differ_between_replicas_on_purpose_are_left_out(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def combine(value: Any, reduce_fn: Any, _tag: str) -> Any:
        """Return the values of two replicas, of which the other one is not the main one."""
        theirs = {("is_main", False), ("rank", 1), ("seen", 4)}
        return reduce_fn(value, (theirs, theirs))

    monkeypatch.setattr(collective, "combine", combine)
    assert saved(is_main=True, rank=0, seen=4, loss=0.25) == {"seen": 4, "loss": 0.25}


def test_a_long_list_is_not_read_to_its_end(script: Script) -> None:
    # an object at the end would be met
    class Last(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            for _ in range(MOST_BYTES):
                yield 0.5
            raise AssertionError("it was read to its end")

    assert saved(rare=Last([0.5])) == {}


def saved(**assigned: Any) -> Globals:
    """Return what is saved of names that a script assigns behind the beginning of its loop."""
    names = ScriptNames()
    given: Globals = {"__name__": "__main__", "names": names, "before": 1}
    exec("names.loop_begins(False)", given)
    given.update(assigned)
    file = io.BytesIO()
    names.sync()
    names.save(file)
    checkpoint.unregister(names)
    found: Globals = _codec.decode(file.getvalue())
    return found


# Errors ------------------------------------------------------------------------------------------

IN_A_FUNCTION = f"def main():\n{textwrap.indent(LOOP.strip(), '    ')}\n"


def error_of(text: str, **given: Any) -> NameError:
    """Return the error that a script ends with, as the fork server and the interpreter have handled it."""
    with pytest.raises(NameError) as caught:
        run(text, **given)
    if uncaught_error.explain is not None:
        uncaught_error.explain(caught.value, caught.tb)
    sys.excepthook(NameError, caught.value, caught.tb)
    return caught.value


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{IN_A_FUNCTION}    print(rare)\nmain()", 6),
        (f"{IN_A_FUNCTION}    print([rare for _ in range(2)])\nmain()", 6),
        (f"{IN_A_FUNCTION}    return (lambda: rare)\nmain()()", None),
        (f"{IN_A_FUNCTION}    show = lambda: rare\n    show()\nmain()", 6),
        (f"{LOOP}\ndef show():\n    print(rare)\nshow()", 6),
        (f"{LOOP}\ndef show():\n    print(rare)\n    rare = 0\nshow()", None),
        (f"{LOOP}\nprint(epoc)", None),
    ],
    ids=["local", "comprehension", "a closure that has left", "closure", "object", "another's local", "typo"],
)
def test_the_error_of_a_name_that_a_loop_assigns_names_the_loop_and_ends_the_job(
    script: Script, capsys: pytest.CaptureFixture[str], text: str, line: int | None
) -> None:
    run(text, at=(0, 4), value=object())
    script.restart()
    error = error_of(text, at=None, value=None)
    found = uncaught_error.describe(error, error.__traceback__)
    remedy = f"assign `rare` before the loop, train.py line {line}, because"
    assert found.final is (line is not None)
    assert (remedy in capsys.readouterr().err.splitlines()[-1]) is found.final
    assert (remedy in found.message) is found.final
    assert found.message.count("before the loop") == found.final, "it is said once"


def test_the_error_of_a_process_that_did_not_continue_is_an_ordinary_one(script: Script) -> None:
    text = f"{IN_A_FUNCTION}    del rare\n    print(rare)\nmain()"
    error = error_of(text, at=None, value=1)
    assert not uncaught_error.describe(error, None).final
    assert "before the loop" not in str(error)


# Processes ---------------------------------------------------------------------------------------

KILLED = """
import os
import torch
import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint

def main():
    adl.init_process_group("gloo")
    for epoch in adl.remaining_epochs_until(1):
        for batch in adl.AdaptiveDataLoader(range(8), batch_size=2):
            if adl.current_dataloader().current_index == 0:
                val_loss = 0.25
            elif not os.path.exists("killed"):
                open("killed", "w").close()
                checkpoint.save_all_states()
                os.kill(os.getpid(), 9)
    print("validation loss", val_loss)

main()
"""


@pytest.mark.processes
def test_a_function_that_lacks_a_name_after_a_restart_is_not_restarted_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KILLED)
    done = run_agent(tmp_path, "--standalone", "--max-restarts=3", "train.py")
    assert done.returncode == 1
    assert "restart 1 of 3" in done.stderr
    assert "restart 2 of 3" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "failed, and a restart would not help: rank 0: UnboundLocalError" in last
    assert "assign `val_loss` before the loop, train.py line 9" in last


@pytest.mark.processes
def test_a_module_has_its_names_after_a_restart(tmp_path: Path) -> None:
    head, body = KILLED.split("def main():\n")
    (tmp_path / "train.py").write_text(head + textwrap.dedent(body.replace("main()\n", "")))
    done = run_agent(tmp_path, "--standalone", "--max-restarts=3", "train.py")
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 3" in done.stderr
    assert "validation loss 0.25" in done.stdout


JOINED = """
import time
from signs import sign
import torch
import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session

def main():
    adl.init_process_group("gloo")
    net = torch.nn.Linear(1, 1)
    session = _session.current()
    model = adl.AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in adl.steps(1000):
        if step == 0:
            val_loss = 0.25
        if step == 2 and adl.world_size() == 1:
            sign("at")
        deadline = time.monotonic() + 200
        while step >= 2 and session.generation == 0 and not session.consensus.round_open:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        model(torch.zeros(1, 1)).sum().backward()
    print("validation loss", val_loss)

main()
"""


@pytest.mark.processes
@pytest.mark.parametrize("at", ["module level", "function"])
def test_a_newcomer_has_the_names_of_a_module_and_is_told_about_those_of_a_function(
    tmp_path: Path, at: str
) -> None:
    text = JOINED
    if at == "module level":
        head, body = text.split("def main():\n")
        text = head + textwrap.dedent(body.replace("main()\n", ""))
    (tmp_path / "train.py").write_text(text)
    with FakeAgent(tmp_path / "train.py", tmp_path) as job:
        job.start(1)
        job.wait_for("at")
        job.rescale(2)
        first, newcomer = job.running
        assert first.join() == 0, job.outputs()
        assert newcomer.join() == (1 if at == "function" else 0), job.outputs()
        expected = "assign `val_loss` before the loop, train.py line 13"
        assert (expected if at == "function" else "validation loss 0.25") in newcomer.text()
