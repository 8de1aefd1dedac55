from __future__ import annotations

import errno
import io
import json
import os
import threading
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from forbidden import unwritable
from fresh import Script
from numbers_state import Number, save
from polling import until

from adaptdl_elastic import _session, checkpoint
from adaptdl_elastic import storage as storage_module
from adaptdl_elastic._session import Identity
from adaptdl_elastic.checkpoint import CheckpointError, CheckpointSaveError, TensorState, state_copy
from adaptdl_elastic.checkpoint.manager import CheckpointManager
from adaptdl_elastic.checkpoint.state_copy import HostBuffers, copy_to_host
from adaptdl_elastic.storage import DirectoryStorage, Manifest


class Model(TensorState):
    def __init__(self, module: torch.nn.Module, name: str = "model") -> None:
        super().__init__(name)
        self.module = module
        self.loaded = checkpoint.load_state(self)

    def state_dict(self) -> Any:
        return self.module.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.module.load_state_dict(state_dict)


def saved_ids(tmp_path: Path) -> list[str]:
    return DirectoryStorage(tmp_path / "saved").ids()


def damage(tmp_path: Path, checkpoint_id: str, file: str) -> None:
    path = tmp_path / "saved" / checkpoint_id / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_state_is_restored_in_the_next_generation(script: Script) -> None:
    assert not Number("n", 7).loaded
    saved = save(kind="stop", step=5)
    assert (saved.kind, saved.step, saved.error) == ("stop", 5, None)
    script.restart()
    again = Number("n")
    assert (again.loaded, again.value) == (True, 7)
    assert checkpoint.loaded_id() == saved.id


def test_nothing_is_saved_without_a_path(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADAPTDL_CHECKPOINT_PATH")
    assert not Number("n").loaded
    assert checkpoint.save_all_states() is None


def test_names_are_unique_and_not_empty(script: Script) -> None:
    Number("n")
    with pytest.raises(ValueError, match="already a state named 'n'"):
        Number("n")
    with pytest.raises(ValueError, match="non-empty"):
        Number("")


def test_tensors_are_restored_exactly_and_their_file_runs_no_code(script: Script) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.system, ("touch /tmp/adaptdl-evil",))

    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    Model(module)
    script.resume()
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    assert Model(other).loaded
    for a, b in zip(module.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    file = io.BytesIO()
    torch.save(Evil(), file)
    file.seek(0)
    with pytest.raises(CheckpointError, match="not tensors or plain values"):
        Model(module, "other").load(file)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ("a", "b", 1),
        ("a", "a", 0),
        ("", "b", 0),
        ("4c1b79b0-6f0a-4c39-9a0c-0a1cf2a3b9a6", "b", 0),  # torchrun --standalone's
        ("none", "b", 0),
    ],
)
def test_a_checkpoint_of_another_job_is_told(
    script: Script, caplog: pytest.LogCaptureFixture, first: str, second: str, told: int
) -> None:
    script.restart(ADAPTDL_JOB_ID=first)
    Number("n")
    script.resume(ADAPTDL_JOB_ID=second)
    Number("n")
    assert caplog.text.count("is of job a, and this is job b") == told
    assert caplog.text.count("two jobs") == told


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(
    script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    number = Number("n", 1)
    other = Number("other", 1)
    checkpoint.save_all_states()
    number.value = other.value = 2
    newest = save()
    damage(tmp_path, newest.id, "n.state")
    script.restart()
    # all of one checkpoint: never `other` of the newest with `n` of the one before
    assert (Number("n").value, Number("other").value) == (1, 1)
    assert newest.id in caplog.text
    assert "n.state does not match its checksum" in caplog.text


def lose_manifest(directory: Path, how: str) -> None:
    path = directory / "manifest.json"
    if how == "another's":
        other = next(other for other in directory.parent.iterdir() if other != directory)
        path.write_bytes((other / path.name).read_bytes())
    elif how == "damaged":
        path.write_bytes(path.read_bytes()[:-3])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["missing", "damaged", "another's"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_as_many_whole_checkpoints_are_kept_whatever_lies_between_them(
    script: Script, tmp_path: Path, how: str, when: str
) -> None:
    script.restart(ADAPTDL_CHECKPOINT_KEEP="3")
    number = Number("n")
    first, second, third = [save().id for _ in range(3)]
    lost = second if when == "before" else third  # nobody has tried to load the older one
    if when == "before":
        lose_manifest(tmp_path / "saved" / lost, how)
    script.restart()
    number = Number("n")
    if when == "after":
        lose_manifest(tmp_path / "saved" / lost, how)
    whole = [id for id in (first, second, third) if id != lost]
    for _ in range(4):
        number.value += 1
        newest = save()
        whole = [*whole, newest.id][-3:]
        assert [id for id in saved_ids(tmp_path) if id != lost] == whole
        # it goes when it would go if it were whole: nobody who still writes is older than those
        assert (lost in saved_ids(tmp_path)) == (whole[0] < lost)


def test_a_folder_without_manifest_stays_while_whole_checkpoints_are_too_few(
    script: Script, tmp_path: Path
) -> None:
    Number("n")
    checkpoint.save_all_states()
    others = [tmp_path / "saved" / f"0000000{number}-g00000-someone" for number in (0, 1, 9)]
    for other in others:  # one who copies an old checkpoint back, and one who is ahead
        other.mkdir()
        (other / "n.state").write_bytes(b"1")
    checkpoint.save_all_states()
    assert [other for other in others if not other.exists()] == []
    assert len(saved_ids(tmp_path)) == 5


@pytest.mark.parametrize("below", ["", "below"])
def test_a_path_that_is_no_directory_is_an_error_and_no_fresh_start(
    script: Script, tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").write_text("")
    script.restart(ADAPTDL_CHECKPOINT_PATH=str(tmp_path / "file" / below))
    with pytest.raises(CheckpointError, match=r"Not a directory.*not starting afresh"):
        Number("n")


def test_trouble_with_the_disk_is_told_and_leaves_the_checkpoint_before(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    number = Number("n", 1)
    Model(torch.nn.Linear(100, 100))
    before = save()
    number.value = 2

    def full(file: Any, view: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(storage_module, "write_all", full)
        checkpoint.save_all_states(kind="periodic", background=True)
        assert checkpoint.flush(60)
        with pytest.raises(CheckpointSaveError, match="No space left on device"):
            checkpoint.save_all_states(kind="stop")
    assert "No space left on device; the checkpoint before stays" in caplog.text
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [(e["event"], e["kind"]) for e in events] == [
        ("checkpoint_failed", "periodic"),
        ("checkpoint_failed", "stop"),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
        with pytest.raises(CheckpointSaveError, match="Permission denied"):
            checkpoint.save_all_states()
    assert [p.name for p in (tmp_path / "saved").iterdir()] == [before.id]
    number.value = 3
    save()  # there is room again
    script.restart()
    assert Number("n").value == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_torch_reports_a_really_full_device_as_such(script: Script) -> None:
    state = Model(torch.nn.Linear(2000, 2000))
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises((OSError, RuntimeError)) as caught:  # noqa: PTH123
        state.save(storage_module.ChecksumWriter(full))  # type: ignore[arg-type]
    from adaptdl_elastic.checkpoint.manager import root_cause

    cause = root_cause(caught.value)
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC


def test_an_error_that_is_raised_from_itself_is_its_own_root_cause() -> None:
    from adaptdl_elastic.checkpoint.manager import root_cause

    error = ValueError("cannot be saved")
    error.__cause__ = error
    assert root_cause(error) is error


def test_a_directory_without_write_permission_is_told_at_the_start(script: Script) -> None:
    with unwritable() as folder:
        script.restart(ADAPTDL_CHECKPOINT_PATH=str(folder))
        with pytest.raises(CheckpointError, match="Permission denied"):
            Number("n")


def test_a_relative_path_stays_where_it_was_when_the_script_changes_its_directory(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script.restart(ADAPTDL_CHECKPOINT_PATH="relative")
    Number("n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpoint.save_all_states()
    assert (tmp_path / "relative").is_dir()


class Slow(Number):
    """A state whose writing, not its copy, waits until it is let go."""

    def __init__(self, name: str, value: int = 0) -> None:
        super().__init__(name, value)
        self.writing, self.go = threading.Event(), threading.Event()

    def write_snapshot(self, snapshot: Any, fileobj: Any) -> None:
        self.writing.set()
        assert self.go.wait(100)
        super().write_snapshot(snapshot, fileobj)


def test_a_periodic_save_is_left_out_while_one_is_written_and_a_stop_comes_after_it(
    script: Script, tmp_path: Path
) -> None:
    """Each holds the state as it was when the save was asked for."""
    slow, done = Slow("n", 1), []
    checkpoint.save_all_states(kind="periodic", background=True, done=done.append)
    assert slow.writing.wait(60)
    assert done == []
    slow.value = 2  # training goes on
    checkpoint.save_all_states(kind="periodic", background=True, done=done.append)
    checkpoint.save_all_states(kind="request", background=True, done=done.append)
    slow.value = 3
    threading.Timer(0.05, slow.go.set).start()
    save(kind="stop", done=done.append)
    assert [saved.kind for saved in done] == ["periodic", "request", "stop"]
    held = [(tmp_path / "saved" / saved.id / "n.state").read_bytes() for saved in done]
    assert held == [b"1", b"2", b"3"]


def test_saving_that_has_failed_for_longer_than_two_intervals_is_reported_until_it_succeeds(
    script: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script.restart(ADAPTDL_CHECKPOINT_INTERVAL="30")
    number, reporter = Number("n", 1), Mock()
    manager = checkpoint.manager_of(_session.current())
    monkeypatch.setitem(vars(_session.current()), "metrics", reporter)
    monkeypatch.setattr(_session.Session, "started", True)
    with monkeypatch.context() as patch:
        patch.setattr(number, "write_snapshot", Mock(side_effect=OSError(errno.ENOSPC, "disk full")))
        for since in (float("inf"), float("-inf")):  # no time has passed, and more than two intervals of 30 s
            reporter.report_problem.assert_not_called()
            manager.saved_at = since
            checkpoint.save_all_states(kind="periodic", background=True)
            assert checkpoint.flush(60)
    about, line = reporter.report_problem.call_args.args
    assert about == "checkpoints"
    assert "longer than two intervals of 30 s" in line
    assert "disk full" in line
    assert "checkpoint before stays" not in caplog.text
    checkpoint.save_all_states()
    reporter.report_problem.assert_called_with("checkpoints", None)


def test_a_stop_that_takes_too_long_goes_on_with_the_checkpoint_before(script: Script) -> None:
    slow = Slow("n", 1)
    slow.go.set()
    checkpoint.save_all_states()
    slow.go.clear()
    slow.value = 2
    script.set(ADAPTDL_CHECKPOINT_TIMEOUT="0.05")
    with pytest.raises(CheckpointSaveError, match=r"longer than 0.05 s"):
        checkpoint.save_all_states(kind="stop")
    script.restart()
    assert Number("n").value == 1
    slow.go.set()


def test_a_bad_setting_says_what_is_wrong(script: Script) -> None:
    script.set(ADAPTDL_CHECKPOINT_KEEP="none")
    with pytest.raises(ValueError, match="ADAPTDL_CHECKPOINT_KEEP=none"):
        Number("n")


def test_a_save_holds_what_was_not_claimed_when_it_was_asked_for(script: Script, tmp_path: Path) -> None:
    """Not what is left by the time it is written: the script goes on, and claims states and ends epochs."""
    Number("early", 1)
    for name, expires in (("claimed", None), ("ended", 0)):
        Number(name, 2).expires = expires
    script.resume()
    slow = Slow("early")
    checkpoint.save_all_states(kind="periodic", background=True)
    assert slow.writing.wait(60)
    claimed = Number("claimed")
    assert claimed.value == 2
    claimed.value = 3
    checkpoint.end_epoch(0)
    slow.go.set()
    assert checkpoint.flush(60)
    assert set(newest_states(tmp_path)) == {"early", "claimed", "ended"}
    checkpoint.save_all_states()
    assert set(newest_states(tmp_path)) == {"early", "claimed"}


def test_rot_is_not_carried_over_under_new_checksums(
    script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Number("early", 1)
    Number("late", 22)
    before = save()
    script.restart()
    Number("early")
    damage(tmp_path, before.id, "late.state")  # in place, while it is open
    save()
    assert "'late' has rotted" in caplog.text
    assert set(newest_states(tmp_path)) == {"early"}
    script.restart()
    assert not Number("late").loaded


def test_a_state_that_the_checkpoint_does_not_know_is_told(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    Number("old")
    script.resume()
    Number("new")
    assert "has no state 'new'" in caplog.text


def test_states_of_an_epoch_are_dropped_with_it(
    script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Number("kept")
    kept.expires = None
    gone = Number("gone")
    gone.expires = 3
    script.resume()
    Number("kept")
    checkpoint.end_epoch(2)
    assert "has not asked for: gone; they are kept" in caplog.text
    checkpoint.save_all_states()
    assert set(newest_states(tmp_path)) == {"kept", "gone"}
    checkpoint.end_epoch(3)
    checkpoint.save_all_states()
    assert set(newest_states(tmp_path)) == {"kept"}


def test_a_replica_that_takes_rank_0s_place_goes_on_with_its_checkpoints(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, gone = Number("n", 1), Number("gone", 1)
    Number("late", 5)
    gone.expires = 0
    first = save()
    snapshots = checkpoint.snapshot_states(["n"])
    script.restart(ADAPTDL_REPLICA_RANK="1", ADAPTDL_NUM_REPLICAS="2")  # it joins in place, and loads nothing
    checkpoint.restore_states(snapshots)
    number = Number("n")
    checkpoint.end_epoch(0)
    session = _session.current()
    session.identity = Identity(rank=0, replicas=1, generation=2)
    number.value = 2
    saved = save()
    manifest = DirectoryStorage(tmp_path / "saved").manifest(saved.id)
    assert set(manifest.states) == {"n", "late"}
    assert (manifest.history, manifest.generation) == ((first.id,), 2)


def commit(tmp_path: Path, checkpoint_id: str) -> None:
    """Save a checkpoint as another process does."""
    writing = DirectoryStorage(tmp_path / "saved").begin(checkpoint_id)
    with writing.state("n") as file:
        file.write(b"1")
    writing.commit(Manifest(id=checkpoint_id, states=writing.entries))


def test_a_generation_that_was_replaced_saves_no_more(script: Script, tmp_path: Path) -> None:
    """Cut off from the store and not from the directory of checkpoints it does not know that it has been."""
    script.restart(ADAPTDL_GENERATION="3")
    Number("n", 1)
    first = save()
    commit(tmp_path, "00000002-g00004-another")
    with pytest.raises(CheckpointSaveError, match="generation 4 has saved there, and this is generation 3"):
        checkpoint.save_all_states()
    assert saved_ids(tmp_path) == [first.id, "00000002-g00004-another"]
    script.restart(ADAPTDL_GENERATION="0")  # a launch by hand counts from 0 again
    Number("n")
    save()
    assert len(saved_ids(tmp_path)) == 3


def test_a_late_checkpoint_of_a_replaced_generation_is_passed_over(
    script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Number("n", 1)
    checkpoint.save_all_states()
    newer, late, after = "00000002-g00004-b", "00000005-g00003-a", "00000006-g00004-b"
    commit(tmp_path, newer)
    commit(tmp_path, late)
    script.restart(ADAPTDL_CHECKPOINT_ID=newer)
    checkpoint.load_state(Number("n", load=False))
    assert checkpoint.loaded_id() == newer
    assert f"checkpoint {late} is passed over: generation 3 saved it after {newer}" in caplog.text
    damage(tmp_path, newer, "manifest.json")
    script.restart(ADAPTDL_CHECKPOINT_ID=newer)
    checkpoint.load_state(Number("n", load=False))
    assert checkpoint.loaded_id() == late
    commit(tmp_path, after)
    script.restart(ADAPTDL_CHECKPOINT_ID=newer)
    checkpoint.load_state(Number("n", load=False))
    assert checkpoint.loaded_id() == after


def newest_states(tmp_path: Path) -> dict[str, Any]:
    storage = DirectoryStorage(tmp_path / "saved")
    return storage.manifest(storage.ids()[-1]).states


def test_the_error_names_the_state_that_does_not_fit_the_script(script: Script) -> None:
    Model(torch.nn.Linear(2, 2))
    script.resume()
    with pytest.raises(CheckpointError, match=r"state 'model' of checkpoint .* does not fit"):
        Model(torch.nn.Linear(3, 3))


def test_only_rank_0_writes_and_every_replica_syncs(script: Script, tmp_path: Path) -> None:
    synced = []

    class Synced(Number):
        def sync(self) -> None:
            synced.append(self.name)

    script.restart(ADAPTDL_REPLICA_RANK="1", ADAPTDL_NUM_REPLICAS="2")
    Synced("b", load=False)
    Synced("a", load=False)
    assert checkpoint.save_all_states() is None
    assert synced == ["a", "b"]  # by name: replicas that registered in another order still meet
    assert not (tmp_path / "saved").exists()


def test_all_replicas_go_on_from_the_checkpoint_that_rank_0_chose(script: Script, tmp_path: Path) -> None:
    number = Number("n", 1)
    checkpoint.save_all_states()
    number.value = 2
    newest = save()
    sent: list[Any] = []
    script.restart(ADAPTDL_NUM_REPLICAS="2")
    assert checkpoint.agree(lambda value: sent.append(value) or value) == newest.id
    script.restart(ADAPTDL_REPLICA_RANK="1")
    assert checkpoint.agree(lambda value: sent[0]) == newest.id
    damage(tmp_path, newest.id, "n.state")  # on this replica's node only: it must not fall back alone
    script.restart()
    with pytest.raises(CheckpointError):
        checkpoint.agree(lambda value: sent[0])
    script.restart(ADAPTDL_CHECKPOINT_PATH=str(tmp_path / "not shared"))
    with pytest.raises(CheckpointError, match="must be shared by all nodes"):
        checkpoint.agree(lambda value: sent[0])


def test_every_replica_hears_why_rank_0_can_not_go_on(script: Script) -> None:
    script.restart(ADAPTDL_NUM_REPLICAS="2", ADAPTDL_CHECKPOINT_ID="00000001-gone")
    sent: list[Any] = []
    with pytest.raises(CheckpointError, match="00000001-gone"):
        checkpoint.agree(lambda value: sent.append(value) or value)
    script.restart(ADAPTDL_REPLICA_RANK="1")
    with pytest.raises(CheckpointError, match=r"rank 0: .*00000001-gone"):
        checkpoint.agree(lambda value: sent[0])


def test_a_replica_does_not_load_what_rank_0_does_not(script: Script) -> None:
    Number("n", 1)
    script.resume(ADAPTDL_REPLICA_RANK="1", ADAPTDL_NUM_REPLICAS="2")
    assert checkpoint.agree(lambda value: (None, None)) is None
    assert not Number("n").loaded
    script.restart()
    Number("n")
    with pytest.raises(CheckpointError, match="rank 0 starts afresh"):
        checkpoint.agree(lambda value: (None, None))


def test_states_move_from_memory_to_memory(script: Script) -> None:
    module = torch.nn.Linear(2, 2)
    Model(module)
    number = Number("n", 5)
    before = [p.clone() for p in module.parameters()]
    snapshots = checkpoint.snapshot_states()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    number.value = 6
    checkpoint.restore_states(snapshots)
    assert number.value == 5
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    script.restart()  # another replica, whose states register later
    checkpoint.restore_states(snapshots)
    fresh = Model(torch.nn.Linear(2, 2))
    assert fresh.loaded
    assert all(torch.equal(a, b) for a, b in zip(before, fresh.module.parameters(), strict=True))
    assert checkpoint.snapshot_states(["model"]).keys() == {"model"}


class Kinds(TensorState):
    """A state dict of all kinds of containers."""

    def __init__(self, content: Any = None) -> None:
        super().__init__("kinds")
        self.content = content
        checkpoint.load_state(self)

    def state_dict(self) -> Any:
        return self.content

    def load_state_dict(self, state_dict: Any) -> None:
        self.content = state_dict


class _OnGpu(torch.Tensor):
    is_cuda = True


def test_memory_of_the_first_copy_is_allocated_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_copy, "pinned_like", lambda source: torch.zeros(source.shape))
    buffers, weight = HostBuffers(), torch.ones(3, 4).as_subclass(_OnGpu)
    buffers.prepare({"model": {"weight": weight, "tied": weight}, "step": torch.ones(2)})
    until("nothing is allocated", lambda: buffers.take(torch.empty(3, 4)) is not None, 60)
    assert buffers.take(torch.empty(3, 4)) is None, "a tensor that occurs twice is copied once"
    assert buffers.take(torch.empty(2)) is None, "memory is pinned only for tensors of GPUs"


@pytest.mark.parametrize("through", ["checkpoint", "memory"])
def test_containers_come_back_as_what_they_were(script: Script, through: str) -> None:
    metadata = OrderedDict({"": {"version": 2}})
    ordered = OrderedDict(b=torch.ones(2), a=1)
    ordered._metadata = metadata  # type: ignore[attr-defined]
    original = {
        "milestones": Counter({3: 2, 5: 1}),
        "lists": ({"deep": [defaultdict(list, {1: [2.0]}), defaultdict(None, {1: 2})]},),
        "model": ordered,
        "size": torch.Size([2, 3]),
    }
    Kinds(original)
    if through == "memory":
        snapshots = checkpoint.snapshot_states()
        script.restart()
        checkpoint.restore_states(snapshots)
    else:
        script.resume()
    content = Kinds().content
    deep = content["lists"][0]["deep"]
    assert type(content["milestones"]) is Counter
    assert sorted(content["milestones"].elements()) == [3, 3, 5]
    assert (type(deep[0]), deep[0][7], deep[0][1]) == (defaultdict, [], [2.0])
    assert deep[1] == {1: 2}
    assert type(content["model"]) is OrderedDict
    assert list(content["model"]) == ["b", "a"]
    assert content["model"]._metadata == metadata
    assert content["model"]._metadata is not metadata
    assert type(content["size"]) is torch.Size


def test_one_state_by_itself(script: Script, tmp_path: Path) -> None:
    number = Number("n", 3)
    checkpoint.save_state(number, tmp_path / "alone")
    number.value = 4
    assert checkpoint.load_state(number, tmp_path / "alone")
    assert number.value == 3
    assert not checkpoint.load_state(number, tmp_path / "elsewhere")


def test_a_copy_shares_nothing_with_the_original_and_keeps_what_was_shared() -> None:
    shared = torch.ones(2)
    original = OrderedDict(
        a=shared, b=[shared, (1, np.float64(0.5))], c={"x": None, 3: torch.tensor(2.0, requires_grad=True)}
    )
    copied = copy_to_host(original, "state")
    shared.add_(1)
    assert torch.equal(copied["a"], torch.ones(2))
    assert copied["a"] is copied["b"][0]
    assert type(copied["b"][1][1]) is float
    assert not copied["c"][3].requires_grad
    file = io.BytesIO()
    torch.save(copied, file)
    file.seek(0)
    torch.load(file, weights_only=True)


def test_a_state_that_can_not_be_copied_is_told_and_does_not_end_the_training(
    script: Script, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    Number("n", 1)
    checkpoint.save_all_states()
    kinds = Kinds({"hook": print})
    checkpoint.save_all_states(kind="periodic", background=True)
    assert "TypeError: kinds.hook is a builtins.builtin_function" in caplog.text
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [event["kind"] for event in events if event["event"] == "checkpoint_failed"] == ["periodic"]
    with pytest.raises(CheckpointSaveError, match=r"cannot save a checkpoint to .*kinds\.hook"):
        checkpoint.save_all_states()
    kinds.content = {}
    save()


class Arriving(DirectoryStorage):
    """A directory in which a checkpoint arrives after it has been looked for so often."""

    def __init__(self, path: Path, looks: int) -> None:
        super().__init__(path / "saved")
        self._elsewhere, self._here, self._looks = path / "elsewhere", path / "saved", looks

    def ids(self) -> list[str]:
        self._looks -= 1
        if self._looks == 0:
            self._elsewhere.rename(self._here)
        return super().ids()


def manager_without_its_checkpoint(tmp_path: Path, wait: float, looks: int) -> tuple[Any, str]:
    Number("n", 7)
    checkpoint.save_all_states()
    (saved,) = saved_ids(tmp_path)
    (tmp_path / "saved").rename(tmp_path / "elsewhere")
    return CheckpointManager(Arriving(tmp_path, looks), recorded=saved, writes=False, wait=wait), saved


@pytest.mark.parametrize("exactly", [True, False])
def test_a_checkpoint_that_is_being_copied_is_waited_for(script: Any, tmp_path: Path, exactly: bool) -> None:
    manager, saved = manager_without_its_checkpoint(tmp_path, wait=100.0, looks=3)
    assert manager.open(saved if exactly else None) == saved
    with manager.claim("n") as content:
        assert content.read()


def test_a_checkpoint_is_waited_for_no_longer_than_told(script: Any, tmp_path: Path) -> None:
    manager, saved = manager_without_its_checkpoint(tmp_path, wait=0.0, looks=3)
    with pytest.raises(CheckpointError, match=f"checkpoint {saved} is recorded for this job and is not in"):
        manager.open()
