from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import generations
import pytest
import torch
from fresh import Script
from hypothesis import given
from hypothesis import strategies as st

from adaptdl_elastic.torch import remaining_epochs_until
from adaptdl_elastic.torch.iterator import AdaptiveBPTTIterator, Remaining

SCRIPT = Path(__file__).parent / "scripts" / "sequences.py"


LAYOUTS = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 8)), max_size=5)


@given(st.integers(0, 400), LAYOUTS, st.integers(1, 9))
def test_every_token_is_read_once_whatever_the_layouts_were(
    size: int, layouts: list[tuple[int, int]], bptt_len: int
) -> None:
    read: Counter[int] = Counter()
    done: list[tuple[int, int]] = []
    for streams, batches in [*layouts, (3, 10_000)]:
        left = Remaining.after(size, done, bptt_len)
        rows = left.size // streams
        for row in range(0, min(batches * bptt_len, rows), bptt_len):
            length = min(bptt_len, rows - row)
            read.update(left.block(streams, 0, streams, row, length).flatten().tolist())
        done.append((streams, batches))
    assert max(read.values(), default=1) == 1
    assert size - sum(read.values()) < 3  # fewer than the streams of the last layout
    assert set(read) <= set(range(size))


@given(st.integers(1, 400), st.integers(1, 8), st.integers(0, 8), st.integers(1, 9))
def test_a_stop_in_the_middle_does_not_move_the_streams(
    size: int, streams: int, batches: int, bptt_len: int
) -> None:
    whole = Remaining.after(size, [], bptt_len)
    rows = whole.size // streams
    read = min(batches * bptt_len, rows)
    rest = Remaining.after(size, [(streams, batches)], bptt_len)
    if read < rows:
        expected = whole.block(streams, 0, streams, read, rows - read)
        assert (rest.block(streams, 0, streams, 0, rows - read) == expected).all()


def test_streams_run_side_by_side(script: Script) -> None:
    batches = []
    for _ in remaining_epochs_until(1):
        for text, target in AdaptiveBPTTIterator(list(range(13)), batch_size=2, bptt_len=4):
            batches.append((text.T.tolist(), target.T.tolist()))
    assert batches == [
        ([[0, 1, 2, 3], [6, 7, 8, 9]], [[1, 2, 3, 4], [7, 8, 9, 10]]),
        ([[4, 5], [10, 11]], [[5, 6], [11, 12]]),
    ]


def test_the_iterator_has_a_length_and_its_batches_text_and_target(script: Script) -> None:
    iterator = AdaptiveBPTTIterator(torch.arange(101), batch_size=5, bptt_len=7)
    assert len(iterator) == 3
    for _ in remaining_epochs_until(2):
        batches = list(iterator)
        assert len(batches) == 3
        assert batches[0].text.shape == batches[0].target.shape == (7, 5)


@pytest.mark.slow
def test_two_replicas_then_one_read_every_token_once(tmp_path: Path) -> None:
    size, batch_size, bptt_len = 1003, 6, 5
    environment = {"ADAPTDL_CHECKPOINT_PATH": str(tmp_path), "ADAPTDL_CHECKPOINT_INTERVAL": "0"}
    read: Counter[int] = Counter()
    total = None
    for generation, (replicas, stop_after) in enumerate([(2, 4), (1, 0)]):
        arguments = [*map(str, (size, batch_size, bptt_len, stop_after))]
        environment["ADAPTDL_NUM_RESTARTS"] = str(generation)
        ended = generations.run(SCRIPT, replicas, tmp_path, arguments, **environment)
        assert {e.code for e in ended} == {143 if stop_after else 0}, ended
        for replica in ended:
            result = json.loads(replica.output.splitlines()[-1])
            read.update(result["read"])
            assert all(streams == batch_size // replicas for _, streams in result["shapes"])
            total = result["total"]
    assert max(read.values()) == 1
    assert size - 1 - len(read) < batch_size
    assert total == len(read)  # the accumulator has seen the same, over all replicas and generations


@pytest.mark.parametrize("batch", [1, 2, 5, 8, 9])
def test_the_replicas_share_exactly_the_streams_of_the_batch(script: Script, batch: int) -> None:
    streams: list[int] = []
    for rank in range(3):
        script.restart(ADAPTDL_NUM_REPLICAS="3", ADAPTDL_REPLICA_RANK=str(rank))
        tokens = AdaptiveBPTTIterator(torch.arange(91), batch_size=batch, bptt_len=5)
        assert len(tokens) == -(-(90 // batch) // 5)
        helper = tokens._elastic
        for text, _ in tokens:
            assert helper.gradient_weight == pytest.approx(3 * helper.local_samples / batch)
            assert text.shape[1] == (helper.local_samples or min(2, batch))
            streams += text[0, : helper.local_samples].tolist()
            break
    assert sorted(streams) == [90 // batch * stream for stream in range(batch)]
