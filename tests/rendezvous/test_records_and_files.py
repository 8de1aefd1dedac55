"""Codecs: what is written comes back, and what is not ours is refused by name."""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptdl_elastic.protocol import hints
from adaptdl_elastic.rendezvous.local import runtime_file
from adaptdl_elastic.rendezvous.schema import held, submissions
from adaptdl_elastic.rendezvous.schema import records as r
from adaptdl_elastic.rendezvous.schema.keys import Keys, check_name
from adaptdl_elastic.rendezvous.store.etcd_v2 import close_value, open_value
from adaptdl_elastic.rendezvous.store.etcd_v3 import range_end

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
PLANS = st.builds(
    r.Plan,
    job=NAMES,
    run=st.text(),
    generation=st.integers(0, 10**6),
    placements=st.lists(st.builds(r.Placement, NAMES, st.integers(1, 8), st.text())).map(tuple),
    cause=st.sampled_from(r.Cause),
    transition=st.sampled_from(r.Transition),
    reason=st.text(),
)


@given(PLANS)
def test_a_plan_comes_back(plan: r.Plan):
    text = r.encode(plan)
    assert r.decode(r.Plan, text) == plan
    assert json.loads(text)["v"] == r.VERSION
    ranks = [rank for node in dict.fromkeys(p.node for p in plan.placements) for rank in plan.ranks(node)]
    assert set(ranks) <= set(range(plan.replicas))


@pytest.mark.parametrize("text", ['{"v":7,"id":"x"}', '{"id":"x","v":7}', ' { "v" : 7 }', '{"v":7}'])
def test_a_newer_version_is_refused_with_both_named(text: str):
    with pytest.raises(
        r.NewerRecordError, match=r"leader: .*version 7 .* reads 1 and 2: .*too old: upgrade it here$"
    ):
        r.decode(r.LeaderRecord, text, "leader")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{",
        "{}",
        "3",
        "\x00",
        '{"v":1}',
        '{"v":"x"}',
        '{"v":1,"id":{}}',
        "[" * 5000,
        "é",
        '{"v":1,"id":NaN}',
    ],
)
def test_garbage_is_refused_with_its_key(text: str):
    with pytest.raises(r.MalformedRecordError, match=r"^the/key: "):
        r.decode(r.LeaderRecord, text, "the/key")


@given(st.text())
def test_any_text_is_a_record_or_malformed(text: str):
    for kind in (r.Plan, r.NodeRecord, r.JobStatus):
        with pytest.raises(r.MalformedRecordError):
            r.decode(kind, text)


# The fields without a default of the records of 0.1.0, which lack every later field.
NEEDED = """
NodeRecord node job run agent host slots; JobSpec job run; JobStatus job run state; DrainRequest node reason
Plan job run generation placements cause transition reason; Placement node replicas; JobRequest
Leaving node replicas agent generation; MasterRecord generation host port; Held node
Left node; LeftEnd generation outcome; PeerLoss generation; GenerationEnd generation outcome
Failure rank exit_code; LeaderRecord id; CheckpointRecord id path; ServiceRecord node host port slots
Submission job owner mode command bundle
JobHints job generation nodes replicas init_batch_size batch_size atomic_bsz
"""
HINTS = {"job": "j", **dict.fromkeys(NEEDED.split()[-6:], 1)}


@pytest.mark.parametrize("text", NEEDED.strip().replace("\n", ";").split(";"))
def test_no_record_needs_a_field_that_the_release_before_does_not_write(text: str):
    name, *written = text.split()
    kind: Any = next(
        getattr(module, name) for module in (r, held, submissions, hints) if hasattr(module, name)
    )
    needed = {one.name for one in fields(kind) if one.default is one.default_factory is MISSING}
    assert needed <= set(written)


def test_records_are_read_one_release_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(r, "VERSION", 3)
    assert r.decode(r.LeaderRecord, '{"v":2,"id":"x","colour":"red"}') == r.LeaderRecord("x")
    assert hints.decode(json.dumps({**HINTS, "colour": "red"})) == hints.JobHints(**HINTS)
    with pytest.raises(r.NewerRecordError, match=r"version 1 .* reads 2 and 3: upgrade its writer$"):
        r.decode(r.LeaderRecord, '{"v":1,"id":"x"}')


@given(st.text(), st.sampled_from(["", "0123abc"]), st.integers(0, 10**9))
def test_v2_heads_come_off(value: str, lease: str, revision: int):
    closed = close_value(value, lease, revision)
    opened, owner, number = open_value(closed)
    assert (opened, owner) == (value, lease)
    assert number == (revision if lease or value.startswith("\x01") else 0)


@given(st.text(max_size=5), st.text(max_size=5))
def test_the_end_of_a_prefix(prefix: str, key: str):
    start, end, data = prefix.encode(), range_end(prefix), key.encode()
    inside = data >= (start or b"\0") and (data < end or end == b"\0")
    if data:  # there is no empty key
        assert inside == data.startswith(start) or data == b"\0"


@pytest.mark.parametrize("name", ["", "a/b", "-a", ".a", "a b", "é", "a" * 129, "..", "a\n"])
def test_names_that_can_not_be_keys(name: str):
    with pytest.raises(ValueError, match=r"job .* cannot be used"):
        check_name("job", name)


def test_clusters_do_not_share_prefixes():
    assert not Keys("one2").root.startswith(Keys("one").root)


def test_a_runtime_file_comes_back(tmp_path: Path):
    folder = tmp_path / "adaptdl"
    mine = runtime_file.RuntimeFile("127.0.0.1:1", "default", "job", os.getpid())
    dead = runtime_file.RuntimeFile("127.0.0.1:2", "default", "dead", 2**22 - 3)
    assert runtime_file.read_all(folder) == []
    path = runtime_file.write(mine, folder)
    runtime_file.write(dead, folder)
    (folder / "junk.json").write_text("junk")
    assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    assert runtime_file.read_all(folder) == [mine]
    assert runtime_file.find("job", folder) == mine
    assert runtime_file.find("other", folder) is None
    runtime_file.remove("job", os.getpid() + 1, folder)  # not ours
    assert runtime_file.find("job", folder) == mine
    runtime_file.remove("job", os.getpid(), folder)
    runtime_file.remove("job", os.getpid(), folder)
    assert runtime_file.find("job", folder) is None


def test_a_directory_that_others_can_enter_is_not_trusted(tmp_path: Path):
    folder = tmp_path / "adaptdl"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(runtime_file.RuntimeFileError, match="XDG_RUNTIME_DIR"):
        runtime_file.write(_record(), folder)
    runtime_file.write(_record(), tmp_path / "own").rename(folder / "job.json")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    for path in (folder, tmp_path / "link"):
        assert runtime_file.read_all(path) == []


def _record() -> runtime_file.RuntimeFile:
    return runtime_file.RuntimeFile("127.0.0.1:1", "default", "job", os.getpid())


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the runtime directory of a user."""
    directory = tmp_path / "own"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    return directory


def test_one_of_a_user_has_the_lock_of_a_job(own: Path) -> None:
    mine, other, theirs = (runtime_file.Announcement(job) for job in ("job", "a", "job"))
    assert (mine.take(), other.take(), theirs.take(), theirs.take()) == (True, True, False, False)
    mine.release()
    assert theirs.take()
    theirs.release()
    other.release()
    assert [path for path in own.rglob("*") if path.is_file()] == []
