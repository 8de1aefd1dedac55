from __future__ import annotations

import contextlib
import threading

import pytest

from adaptdl_elastic.utils import print_exc


def test_an_error_of_a_function_is_printed_and_raised(capsys: pytest.CaptureFixture[str]) -> None:
    @print_exc
    def divide(a: int, *, by: int) -> float:
        """Its own docstring."""
        return a / by

    assert divide(6, by=3) == 2
    assert capsys.readouterr().err == ""
    with pytest.raises(ZeroDivisionError):
        divide(1, by=0)
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert "return a / by" in said
    assert "ZeroDivisionError" in said
    assert (divide.__name__, divide.__doc__) == ("divide", "Its own docstring.")


def test_an_error_of_a_thread_without_reader_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A thread whose owner asks for no result, as a pool's."""

    @print_exc
    def work() -> None:
        raise LookupError("nothing there")

    def swallow() -> None:
        with contextlib.suppress(LookupError):
            work()

    thread = threading.Thread(target=swallow)
    thread.start()
    thread.join()
    assert "LookupError: nothing there" in capsys.readouterr().err


def test_leaving_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A stop at a checkpoint ends the process so."""

    @print_exc
    def leave() -> None:
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        leave()
    assert capsys.readouterr().err == ""
