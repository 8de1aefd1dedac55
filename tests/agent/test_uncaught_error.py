"""What an error that nobody caught leaves for the agent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed

from adaptdl_elastic.agent.core.states import Evidence
from adaptdl_elastic.agent.runtime import failure_reports
from adaptdl_elastic.protocol import uncaught_error
from adaptdl_elastic.protocol.uncaught_error import UncaughtError
from adaptdl_elastic.reducer import PeerLostError


def raised(script: str, path: str = "/home/me/train.py") -> UncaughtError:
    """What is written of the error that a script ends with."""
    try:
        exec(compile(script, path, "exec"), {})
    except Exception as error:
        trace = error.__traceback__
        return uncaught_error.describe(error, trace.tb_next if trace is not None else None)
    raise AssertionError("it did not fail")


def test_an_error_of_a_loaders_worker_is_told_by_its_last_line(tmp_path: Path) -> None:
    text = "OSError: Caught OSError in DataLoader worker process 0.\nOriginal:\nOSError: no file 7\n"
    (tmp_path / "error.json").write_text(json.dumps({"message": {"message": text}}))
    assert failure_reports.describe(1, str(tmp_path / "error.json")) == "OSError: no file 7"


def test_a_peer_that_has_ended_well_is_an_error_of_the_script() -> None:
    found = raised("from adaptdl_elastic.reducer import PeerFinishedError\nraise PeerFinishedError('rank 1')")
    assert (found.lost_peer, found.kind.endswith(" at train.py:2 in <module>")) == (False, True)


def test_its_kind_is_its_type_and_the_innermost_line_of_the_users_code() -> None:
    script = "import json\n\ndef load(text):\n    return json.loads(text)\n\nload('{')\n"
    found = raised(script)
    assert found.kind == "json.decoder.JSONDecodeError at train.py:4 in load"
    assert found.message.startswith("JSONDecodeError: Expecting property name")
    assert not found.lost_peer


def test_an_error_may_say_that_restarts_do_not_help() -> None:
    script = "class Hopeless(Exception):\n    ends_job = True\n\nraise Hopeless('x')\n"
    assert raised(script).final
    assert not raised(script.replace("True", "False")).final


def test_messages_that_differ_are_of_one_kind() -> None:
    first, second = (raised(f"raise ValueError('tensor at {hex(n)} on rank {n}')") for n in (7, 8))
    assert first.message != second.message
    assert first.kind == second.kind == "ValueError at train.py:1 in <module>"


def test_another_line_or_type_is_another_kind() -> None:
    kinds = {raised(script).kind for script in ("1 / 0", "\n1 / 0", "[][0]", "int('x')")}
    assert len(kinds) == 4


def test_a_syntax_error_is_where_it_stands_and_is_not_tried_again() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("x = 1\nx +", "/home/me/train.py", "exec")
    found = uncaught_error.describe(caught.value, None)
    assert (found.kind, found.final) == ("SyntaxError at train.py:2", True)


def test_code_of_installed_packages_only_is_named_by_its_innermost_line() -> None:
    installed = str(Path(torch.distributed.__file__).with_name("module.py"))
    assert raised("1 / 0", installed).kind == "ZeroDivisionError at module.py:1 in <module>"


def because(cause: BaseException) -> BaseException:
    error = ValueError("no batch")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "lost_peer"),
    [
        (PeerLostError("rank 1 is gone"), True),
        (torch.distributed.DistNetworkError("Connection reset by peer"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:7"), True),
        (because(PeerLostError("rank 1 is gone")), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (torch.cuda.OutOfMemoryError("NCCL has no memory"), False),
        (SystemExit(3), False),
    ],
)
def test_errors_of_a_lost_peer_are_known(error: BaseException, lost_peer: bool, tmp_path: Path) -> None:
    found = uncaught_error.describe(error, None)
    assert found.lost_peer == lost_peer
    uncaught_error.write(found, tmp_path)
    _, evidence = failure_reports.examine(1, str(tmp_path / "error.json"))
    code = getattr(error, "code", 1)
    assert evidence == Evidence("" if lost_peer else found.kind, found.raised, lost_peer, exit_code=code)


@pytest.mark.parametrize(
    ("error", "temporary"),
    [
        (ConnectionResetError("Connection reset by peer"), True),
        (TimeoutError("timed out"), True),
        (OSError(28, "No space left on device"), True),
        (MemoryError(), True),
        (type("EndpointConnectionError", (Exception,), {})("no answer"), True),
        (because(ConnectionRefusedError(111, "Connection refused")), True),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), True),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), True),
        (RuntimeError("DataLoader timed out after 30 seconds"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (type("ClientError", (Exception,), {})("An error occurred (SlowDown)"), True),
        (FileNotFoundError(2, "No such file or directory"), False),
        (because(KeyError("label")), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_an_error_that_may_be_temporary_has_no_kind(error: BaseException, temporary: bool) -> None:
    assert (uncaught_error.describe(error, None).kind == "") is temporary


def test_an_error_that_is_raised_from_itself_is_described() -> None:
    error = ValueError("no such label")
    error.__cause__ = error
    found = uncaught_error.describe(error, None)
    assert (found.kind, found.lost_peer) == ("ValueError at no line", False)


@pytest.mark.parametrize(
    ("script", "final"),
    [
        ("import no_such_module", True),
        ("import json, no_such_module", True),
        ("def main():\n    import no_such_module\nmain()", False),
        ("from json import no_such_name", False),
        ("eval('1 +')", True),
        ("1 / 0", False),
    ],
)
def test_an_import_that_fails_is_not_tried_again(script: str, final: bool) -> None:
    assert raised(script).final is final


def test_the_step_is_that_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncaught_error, "count_steps", None)
    assert raised("1 / 0").step is None
    monkeypatch.setattr(uncaught_error, "count_steps", lambda: 100)
    assert raised("1 / 0").step == 100


@pytest.mark.parametrize(("code", "kind"), [(3, "exit code 3"), (-11, "SIGSEGV"), (-9, ""), (-15, "")])
def test_without_an_error_the_exit_code_is_the_kind(code: int, kind: str, tmp_path: Path) -> None:
    assert failure_reports.examine(code, str(tmp_path / "error.json"))[1] == Evidence(kind)


WHOLE = '{"kind": "", "message": "", "raised": 1.0, "lost_peer": false, "exit_code": '


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "x"}', "{", WHOLE + '"x"}', WHOLE + "0}"])
def test_a_record_that_was_not_finished_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / uncaught_error.RECORD).write_text(text)
    assert uncaught_error.read(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that ...",
        "unable to allocate shared memory(shm) for file </torch_7>: No space left on device (28)",
        "unable to write to file </torch_7>: No space left on device (28)",
        "Caught RuntimeError in DataLoader worker process 0.\nunable to open shared memory object </torch_7>",
    ],
)
def test_a_shared_memory_that_is_too_small_is_of_one_kind_with_the_remedy(tmp_path: Path, text: str) -> None:
    first, second = (raised("\n" * lines + f"raise RuntimeError({text!r})") for lines in (0, 3))
    assert first.kind == second.kind != ""
    uncaught_error.write(first, tmp_path)
    assert "num_workers=0" in failure_reports.examine(1, str(tmp_path / "error.json"))[0]
