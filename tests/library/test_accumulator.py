from __future__ import annotations

import enum
import linecache
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import insides
import numpy as np
import pytest
import replicas
import torch
from accumulator_cases import rank_one_adds
from fresh import Script
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ports import free_port

from adaptdl_elastic import _frames, _session, checkpoint
from adaptdl_elastic.torch import AdaptiveDataLoader, remaining_epochs_until
from adaptdl_elastic.torch.accumulator import Accumulator

SIZE = 12


class Kind(enum.Enum):
    ONE = 1


class Word(str, enum.Enum):  # str() of which is "Word.ONE"
    ONE = "one"


@pytest.mark.parametrize(
    "value",
    [
        [np.arange(3.0)],
        [{"a": (np.zeros((2, 2), np.uint16), 1)}],
        np.arange(4)[::-1],
        np.arange(3, dtype=">i4"),
        ([np.float32(2), np.bool_(True)],),
        [torch.ones(2), None, b"x", {1, 2}],
        list(np.array(["a", "b"])),
        ([np.str_("a"), {np.str_("b")}, {"c": np.str_("d")}], np.bytes_(b"e"), Word.ONE),
        torch.ones(2),
        0.5,
        np.str_("ab"),
    ],
)
def test_accumulated_values_come_back_after_a_restart(script: Script, value: Any) -> None:
    for life in range(3):
        sums = Accumulator()
        sums["x"] += value  # counted once, in the first life
        sums[("a", np.int64(1))] += 1
        if life < 2:
            script.resume()
    with sums.synchronized():
        assert sums[("a", 1)] == 1
        np.testing.assert_equal(plain(sums["x"]), plain(value))


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("s", np.array(["a"]), "cannot add a ndarray to 's'.* of type numpy.str_"),
        ("b", np.bytes_(b"a"), "cannot add a bytes_ to 'b'"),
        ("t", [np.array(["2020-01-01"], dtype="M8[D]")], "cannot add a list to 't'.*numpy.datetime64"),
        ("l", np.zeros(1, np.longdouble), "cannot add a ndarray to 'l'.*numpy.longdouble"),
        ("l", np.longdouble(1), "cannot add a longdouble to 'l'"),
        ("o", [1, [object()]], r"cannot add a list to 'o': accumulator.o\[1\]\[0\] is a builtins.object"),
        ("d", [{Kind.ONE: 1}], r"cannot add a list to 'd': .*\.Kind"),
        (Kind.ONE, 1, r"cannot add a int to <Kind.ONE: 1>: .*\.Kind"),
        (("a", frozenset()), 1, "frozenset"),
        ("n", None, "cannot add a NoneType to 'n'"),
    ],
)
def test_values_that_no_checkpoint_can_hold_are_refused_where_they_are_added(
    script: Script, key: Any, value: Any, message: str
) -> None:
    sums = Accumulator()
    with pytest.raises(TypeError, match=message):
        sums[key] += value
    with pytest.raises(TypeError, match=message):
        Accumulator({key: value})
    with sums.synchronized(), pytest.raises(TypeError, match=message):
        sums[key] = value
    assert checkpoint.save_all_states() is not None


def test_a_sum_holds_on_to_no_graph_and_no_callers_buffer(script: Script) -> None:
    sums, array = Accumulator(), np.zeros(2)
    loss = torch.ones(2, requires_grad=True) * 2
    sums["loss"] += loss
    sums["counts"] += array
    sums["list"] += [array, loss]
    array += 1
    with sums.synchronized():
        in_list, its_loss = sums["list"]
        assert not any(tensor.requires_grad for tensor in (sums["loss"], its_loss))
        assert sums["counts"].tolist() == in_list.tolist() == [0, 0]


def loader() -> AdaptiveDataLoader[Any]:
    return AdaptiveDataLoader(range(SIZE), batch_size=4)  # type: ignore[arg-type]


def stop() -> None:
    _session.current().consensus.request({"kind": "stop", "reason": "test"})


def test_sums_can_be_added_to_and_not_read_before_they_are_synchronized(script: Script) -> None:
    sums = Accumulator(a=1)
    sums["a"] += 2
    sums["b"] += 1.5
    sums["b"] -= 0.5
    sums.update({"a": 1}, c=4)
    sums.subtract(c=1)
    sums += {"d": 7}
    sums -= {"d": 2}
    with sums.synchronized():
        assert dict(sums) == {"a": 4, "b": 1.0, "c": 3, "d": 5}
        assert "a" in sums
        assert len(sums) == 4
        assert sums.get("x", 9) == 9
        sums["a"] = 10
        del sums["b"]
    sums["a"] += 1
    with sums.synchronized():
        assert dict(sums) == {"a": 11, "c": 3, "d": 5}
        sums.clear()
    with sums.synchronized():
        assert dict(sums) == {}


@pytest.mark.parametrize(
    "read",
    [
        lambda sums: len(sums),
        lambda sums: list(sums),
        lambda sums: "a" in sums,
        lambda sums: sums.get("a"),
        lambda sums: sums.clear(),
        lambda sums: sums.pop("a"),
    ],
)
def test_reading_outside_of_synchronized_says_what_to_do(script: Script, read: Any) -> None:
    sums = Accumulator(a=1)
    with pytest.raises(RuntimeError, match=r"with accumulator.synchronized\(\)"):
        read(sums)


def test_overwriting_outside_of_synchronized_says_what_to_do(script: Script) -> None:
    sums = Accumulator(a=1, b=2)
    with pytest.raises(TypeError, match=r"accumulator\['a'\] \+= x"):
        sums["a"] = 3
    with pytest.raises(TypeError, match=r"can only be added to.* call clear\(\) inside"):
        sums["a"] = sums["b"] + 1


def test_a_value_that_cannot_be_added_is_refused_at_once(script: Script) -> None:
    sums = Accumulator()
    for bad in ({}, object(), None):
        with pytest.raises(TypeError, match="cannot add a"):
            sums["a"] += bad
    with pytest.raises(TypeError, match="cannot subtract a str"):
        sums["a"] -= "x"
    with pytest.raises(TypeError, match="cannot add a"):
        Accumulator(a=None)


def test_one_can_not_be_made_inside_a_data_loop(script: Script) -> None:
    for _ in remaining_epochs_until(1):
        for _ in loader():
            with pytest.raises(RuntimeError, match="make it before the loop"):
                Accumulator()


def evaluate(stops: set[tuple[int, int]], shown: list[Any]) -> None:
    """Two epochs, each with two loops and what people do between them. Stops once at each (epoch, batch)."""
    whole = Accumulator()
    whole["outside"] += 1
    for epoch in remaining_epochs_until(2):
        sums = Accumulator()
        for name in ("first", "second"):
            for batch in loader():
                sums[name] += int(batch.sum())
                whole["samples"] += len(batch)
                at = (epoch, int(batch[0]) // 4 + (3 if name == "second" else 0))
                if at in stops:
                    stops.discard(at)
                    stop()
            sums["between"] += 1
            with sums.synchronized():
                shown.append((epoch, name, dict(sums)))
                if name == "first":
                    sums.clear()
        with whole.synchronized():
            shown.append((epoch, "whole", dict(whole)))


def run_with_stops(script: Script, stops: set[tuple[int, int]]) -> list[Any]:
    """What every place showed, which must be the same whenever it is run again."""
    seen: dict[tuple[int, str], Any] = {}
    for _ in range(20):
        shown: list[Any] = []
        code = 0
        try:
            evaluate(stops, shown)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        for epoch, name, sums in shown:
            assert seen.setdefault((epoch, name), sums) == sums
        if not code:
            return list(seen.items())
        assert code == 143
        script.restart()
    raise AssertionError("it does not come to its end")


TOTAL = sum(range(SIZE))


def expected() -> list[Any]:
    result: list[Any] = []
    for epoch in range(2):
        result.append(((epoch, "first"), {"first": TOTAL, "between": 1}))
        result.append(((epoch, "second"), {"second": TOTAL, "between": 1}))
        result.append(((epoch, "whole"), {"outside": 1, "samples": 2 * SIZE * (epoch + 1)}))
    return result


@settings(max_examples=12, deadline=None)
@given(stops=st.sets(st.tuples(st.integers(0, 1), st.integers(0, 5)), max_size=5))
@example(stops=set())
@example(stops={(0, 1), (0, 3), (0, 4), (1, 0), (1, 4)})  # a second restart after clear()
def test_sums_are_the_same_wherever_it_was_stopped(
    stops: set[tuple[int, int]], tmp_path_factory: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        script = Script(
            patch,
            ADAPTDL_CHECKPOINT_PATH=str(tmp_path_factory.mktemp("saved")),
            ADAPTDL_CHECKPOINT_INTERVAL="0",
        )
        assert run_with_stops(script, stops) == expected()
    _session.reset()


def test_accumulators_of_finished_epochs_leave_the_checkpoint(script: Script) -> None:
    for _ in remaining_epochs_until(5):
        Accumulator()["a"] += 1
        for _ in loader():
            pass
    assert not [name for name in _session.current().states if "accumulator" in name]


def test_a_replica_that_joins_late_is_shown_what_the_others_were_shown(script: Script) -> None:
    """A newcomer in the loop of epoch 0, while the others have come to epoch 1 and look back for it."""
    whole = Accumulator()
    seen = []
    ahead: dict[str, Any] = {}
    for epoch in remaining_epochs_until(2):
        sums = Accumulator()
        for batch in loader():
            sums["a"] += int(batch.sum())
            whole["a"] += 1
        if epoch == 0:
            behind = checkpoint.snapshot_states()
        with sums.synchronized(), whole.synchronized():
            seen.append((dict(sums), dict(whole)))
        ahead |= checkpoint.snapshot_states()
    script.restart(ADAPTDL_NUM_REPLICAS="2", ADAPTDL_REPLICA_RANK="1")  # no collective can be answered
    session = _session.current()
    checkpoint.restore_states({name: s for name, s in behind.items() if "accumulator" in name})
    whole = Accumulator()
    session.epoch = 0
    sums = Accumulator()
    checkpoint.restore_states({name: s for name, s in ahead.items() if "accumulator" in name})
    with sums.synchronized(), whole.synchronized():
        assert (dict(sums), dict(whole)) == seen[0]


def test_a_state_in_memory_holds_what_is_not_synchronized_yet(script: Script) -> None:
    sums = Accumulator()
    sums["a"] += 1
    before = checkpoint.snapshot_states([insides.state(sums).name])
    sums["a"] += 5
    checkpoint.restore_states(before)
    with sums.synchronized():
        assert sums["a"] == 1


# ----------------------------------------------------------------- additions outside of data loops, run again


def test_additions_that_a_script_guards_differently_after_a_restart_count_once_each(script: Script) -> None:
    for life in range(3):
        sums = Accumulator()
        if life == 0:
            sums["a"] += 15
        with sums.synchronized():
            assert dict(sums) == {"a": 15}
        if life == 0:
            sums["a"] -= 5
        if life == 1:
            sums.update({"a": 6, "b": 6})
        if life == 2:
            sums -= {"b": 5, "c": 5}
        script.resume()
    sums = Accumulator()
    with sums.synchronized():
        assert dict(sums) == {"a": 15}
    with sums.synchronized():
        assert dict(sums) == {"a": 16, "b": 1, "c": -5}


def test_equal_additions_in_different_places_are_different_ones(script: Script) -> None:
    for life in range(4):
        sums = Accumulator()
        if life == 0:
            sums["n"] += 1
        if life == 1:
            sums["n"] += 1
        if life == 2:
            sums["n"] += 1
        if life < 3:
            script.resume()
    with sums.synchronized():
        assert sums["n"] == 3


def add_one(sums: Accumulator) -> None:
    sums["n"] += 1


def test_additions_by_one_function_are_told_apart_by_its_callers(script: Script) -> None:
    for life in range(3):
        sums = Accumulator()
        if life == 0:
            add_one(sums)
        add_one(sums)
        if life == 2:
            add_one(sums)
        else:
            script.resume()
    with sums.synchronized():
        assert sums["n"] == 3


def stop_at_the_next_boundary() -> None:
    """It waits for the decision."""
    stop()
    while not _session.current().consensus.round_open:
        time.sleep(0.001)


def before_a_loop(script: Script, *lives: Callable[[Accumulator], None]) -> dict[Any, Any]:
    """Add before the data loop of an epoch; all lives but the last are stopped soon after that begins."""
    for life, add in enumerate(lives):
        with pytest.raises(SystemExit) if life < len(lives) - 1 else nullcontext():
            for _ in remaining_epochs_until(1):
                sums = Accumulator()
                add(sums)
                for _ in AdaptiveDataLoader(range(SIZE), batch_size=1):  # type: ignore[arg-type]
                    sums["seen"] += 1
                    if life < len(lives) - 1:
                        stop_at_the_next_boundary()
                with sums.synchronized():
                    found = dict(sums)
            assert found.pop("seen") == SIZE
            return found
        script.restart()
    raise AssertionError("the epoch was over before")


def test_before_a_data_loop_that_was_begun_only_new_additions_count(script: Script) -> None:
    """All known ones were made there, in whatever number: one, two or three replicas may share samples."""

    def add(sums: Accumulator, shares: int, restarted: bool) -> None:
        if restarted:
            sums["restarted"] += 1
            sums["restarted"] += 1
        for _ in range(shares):
            sums["samples"] += 1

    lives = [partial(add, shares=shares, restarted=shares == 6) for shares in (3, 6, 2)]
    assert before_a_loop(script, *lives) == {"samples": 3, "restarted": 2}


@pytest.mark.parametrize(
    ("first", "then", "total"),
    [
        ((1,), (1, 10, 100), 1),  # the same work in more parts
        ((1, 10, 100), (1,), 111),
        ((7, 8), (6, 8), 15),
        ((0.25,), (0.5,), 0.25),  # a time or a loss, measured again
        (("a",), ("b",), "a"),
    ],
)
def test_one_statement_that_adds_other_values_after_a_restart(
    script: Script, first: Any, then: Any, total: Any
) -> None:
    def add(sums: Accumulator, values: Sequence[Any]) -> None:
        for value in values:
            sums["x"] += value

    assert before_a_loop(script, partial(add, values=first), partial(add, values=then)) == {"x": total}


def test_more_additions_in_an_epoch_that_was_left_before_the_restart_are_not_made(script: Script) -> None:
    for times in (1, 3):
        for _ in remaining_epochs_until(1):
            sums = Accumulator()
            for _ in range(times):
                sums["x"] += 1
            break
        if times == 1:
            script.resume()
    with sums.synchronized():
        assert sums["x"] == 1


def test_work_divided_into_more_parts_after_a_restart_counts_once(script: Script) -> None:
    """A plain validation loop whose batches follow the batch size: its sums and its counter stay together."""

    def add(sums: Accumulator, size: int) -> None:
        for _ in range(100 // size):
            sums["batches"] += 1
            sums["loss"] += 0.5 * size
            sums["samples"] += size

    lives = [partial(add, size=size) for size in (20, 10, 20)]
    assert before_a_loop(script, *lives) == {"batches": 5, "loss": 50.0, "samples": 100}


def test_shares_before_a_data_loop_outside_of_epochs_count_once(script: Script) -> None:
    """Two replicas made three additions each. One replica makes all six."""
    for shares in (3, 6):
        sums = Accumulator()
        for _ in range(shares):
            sums["samples"] += 1
        loop = iter(AdaptiveDataLoader(range(SIZE), batch_size=1))  # type: ignore[arg-type]
        next(loop)
        if shares == 3:
            stop_at_the_next_boundary()
            with pytest.raises(SystemExit):
                next(loop)
            script.restart()
    loop.close()
    with sums.synchronized():
        assert sums["samples"] == 3


def outside_of_epochs(stopped: str) -> dict[Any, Any]:
    """A loop before the epochs and one in them, stopped in one of them; what was summed in the first one."""
    sums = Accumulator()
    for _ in AdaptiveDataLoader(range(SIZE), batch_size=1):  # type: ignore[arg-type]
        sums["n"] += 1
        if stopped == "before":
            stop_at_the_next_boundary()
    for _ in remaining_epochs_until(1):
        for _ in AdaptiveDataLoader(range(SIZE), batch_size=1):  # type: ignore[arg-type]
            if stopped == "inside":
                stop_at_the_next_boundary()
    with sums.synchronized():
        return dict(sums)


def test_a_data_loop_outside_of_epochs_that_runs_again_counts_once(script: Script) -> None:
    for stopped in ("before", "inside", "inside"):
        with pytest.raises(SystemExit):
            outside_of_epochs(stopped)
        script.restart()
    assert outside_of_epochs("nowhere") == {"n": SIZE}


EDITED = """
def run(sums):
    sums['n'] += 1
    for _ in range(2):
        sums['m'] += 2
"""


def test_a_script_that_was_edited_elsewhere_adds_nothing_twice(script: Script, tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    for source in (
        EDITED,
        "import sys\n\nUNUSED = 1\n" + EDITED.replace("    for", "    print('x')\n\n    for"),
    ):
        names: dict[str, Any] = {}
        path.write_text(source)
        linecache.checkcache()
        _frames.lines_of.cache_clear()
        exec(compile(source, str(path), "exec"), names)
        sums = Accumulator()
        run = names["run"]
        run(sums)
        script.resume()
    sums = Accumulator()
    with sums.synchronized():
        assert dict(sums) == {"n": 1, "m": 4}


def test_an_edit_of_a_running_script_does_not_change_what_its_lines_are(tmp_path: Path) -> None:
    path = tmp_path / "running.py"
    path.write_text("found.append(statements(None))\n")
    code, found = compile(path.read_text(), str(path), "exec"), list[str]()
    for _ in range(2):
        exec(code, {"found": found, "statements": _frames.running_statements})
        path.write_text("# a line above\nfound.append(statements(None))\n")
        linecache.checkcache()  # as the traceback of any error does
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("rank", "then", "total"),
    [
        (1, (5, 6), 5 + 6),  # rank 0 had made three before the restart
        (1, (5,), 5),
        (1, (4, 6), 5 + 6),  # measured again, and one that the run had not come to
        (0, (1, 2, 3, 4), 5 + 4),
        (2, (1, 2), 5),  # it had made none: work of others that moved here
    ],
)
def test_a_replica_is_compared_with_the_one_that_had_its_rank(
    script: Script, monkeypatch: pytest.MonkeyPatch, rank: int, then: Sequence[int], total: int
) -> None:
    for life, (place, values) in enumerate([(0, (1, 2, 3)), (1, (5,)), (rank, then)]):
        sums = Accumulator()
        with monkeypatch.context() as patch:
            patch.setattr(_session.current(), "rank", place)
            for value in values:
                sums["x"] += value
        state = insides.state(sums)
        if life == 0:
            made = state.additions
        elif life == 1:
            state.additions |= made
            checkpoint.save_all_states()
        else:
            with sums.synchronized():
                assert sums["x"] == total
        script.restart()


@pytest.mark.processes
def test_an_addition_that_one_replica_has_made_is_known_to_all_of_them(tmp_path: Path) -> None:
    for _ in range(2):
        assert replicas.run(rank_one_adds, 2, tmp_path, free_port()) == [{"all": 2, "one": 1}] * 2


def test_a_newcomer_adds_nothing_before_the_loop_in_which_it_joins(script: Script) -> None:
    name = insides.state(Accumulator()).name
    preview = checkpoint.snapshot_states([name])
    now: dict[str, Any] = {}
    for joins in (False, True):
        script.restart()
        session = _session.current()
        session.joining = joins
        if joins:
            checkpoint.restore_states(preview)
        sums = Accumulator()
        sums["made while it came"] += 1
        if joins:
            sums["by a newcomer"] += 1
            checkpoint.restore_states(now)
            session.joining = False
        else:
            insides.state(sums).sync()
            now = checkpoint.snapshot_states([name])
    with sums.synchronized():
        assert dict(sums) == {"made while it came": 1}
