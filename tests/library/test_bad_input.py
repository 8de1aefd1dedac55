"""Wrong arguments get one line that names them, not a traceback from somewhere below."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import insides
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint, collective, reducer, sched_hints, utils
from adaptdl_elastic.torch.data import AdaptiveDataLoaderHelper, AdaptiveDataLoaderMixin
from adaptdl_elastic.torch.iterator import AdaptiveBPTTIterator
from adaptdl_elastic.torch.scaling_rules import AdamScale, LEGWScale

DATA = TensorDataset(torch.zeros(10, 2))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


STREAM = Stream()


pytestmark = pytest.mark.usefixtures("script")


HINTS = sched_hints.post_sched_hints
LOADER, BPTT = adl.AdaptiveDataLoader, AdaptiveBPTTIterator
HELPER: Any = AdaptiveDataLoaderHelper
ANY: Any = None  # arguments that no type checker would let pass


def adapt(*arguments: Any) -> None:
    LOADER(DATA, batch_size=8).autoscale_batch_size(*arguments)


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a sampler of what has no length": (lambda: adl.ElasticSampler(ANY or 5), TypeError, "int has none"),
    "an epoch below 0": (lambda: adl.ElasticSampler(DATA).set_epoch(-1), ValueError, "-1, 0"),
    "an epoch that is a truth": (lambda: adl.ElasticSampler(DATA).set_epoch(True), ValueError, "True, 0"),
    "a seed": (lambda: adl.ElasticSampler(DATA, True, ANY or "x"), TypeError, "seed='x'"),
    "a sampler's shuffle": (lambda: adl.ElasticSampler(DATA, ANY or "no"), TypeError, "shuffle='no'"),
    "shuffle": (lambda: LOADER(DATA, shuffle=ANY or "no"), TypeError, "shuffle='no': give True or False"),
    "shuffling a stream": (lambda: LOADER(STREAM, shuffle=ANY or "no"), TypeError, "shuffle='no'"),
    "drop_last": (lambda: LOADER(DATA, drop_last="no"), TypeError, "drop_last='no': give True or False"),
    "a shuffle of 2": (lambda: LOADER(DATA, shuffle=ANY or 2), TypeError, "shuffle=2: give True or False"),
    "half a drop_last": (lambda: LOADER(DATA, drop_last=1.0), TypeError, "drop_last=1.0: give True or False"),
    "truths": (lambda: LOADER(DATA, drop_last=np.array([True, False])), TypeError, "drop_last=array"),
    "accumulation": (
        lambda: LOADER(DATA).autoscale_batch_size(8, None, ANY or "no"), TypeError, "accumulation='no'"
    ),
    "no writer": (lambda: LOADER(DATA).to_tensorboard(None, 0), TypeError, "writer=None: give a"),
    "a maximum below the batch": (lambda: adapt(4), ValueError, "at least the batch size, 8"),
    "half a maximum": (lambda: adapt(2.5), ValueError, "at least the batch size, 8"),
    "one bound": (lambda: adapt(64, 3), ValueError, "give a pair"),
    "a bound of no sample": (lambda: adapt(64, (0, 8)), ValueError, "1 <= smallest <= largest"),
    "bounds that are exchanged": (lambda: adapt(64, (9, 8)), ValueError, "1 <= smallest <= largest"),
    "bounds above the batch": (lambda: adapt(64, (16, 32)), ValueError, "above the batch size, 8"),
    "bounds below the batch": (lambda: adapt(64, (1, 4)), ValueError, "gradient_accumulation=True"),
    "shuffle of a stream": (lambda: LOADER(STREAM, shuffle=True), ValueError, "shuffle inside the stream"),
    "a sampler of a stream": (lambda: LOADER(STREAM, sampler=range(4)), ValueError, "an order of its own"),
    "a stream out of order": (
        lambda: LOADER(STREAM, num_workers=1, in_order=False), ValueError, "leave it out"
    ),
    "the length of a stream": (lambda: len(LOADER(STREAM)), TypeError, "no length"),
    "no sampler": (lambda: LOADER(DATA, sampler=ANY or 3), TypeError, "sampler=3: give"),
    "an index outside of loops": (lambda: HELPER(4).current_index, RuntimeError, "inside of its context"),
    "skipping outside of loops": (lambda: HELPER(4).skipdone(), RuntimeError, "inside of context"),
    "no URL": (lambda: adl.init_process_group("gloo", ANY or 5), TypeError, "init_method=5: give a URL"),
    "rows of tokens": (lambda: BPTT(torch.zeros(3, 3).long(), 2, 2), ValueError, r"shape \(3, 3\)"),
    "fractions as tokens": (lambda: BPTT(torch.rand(10), 2, 2), ValueError, "integer tokens"),
    "one token": (lambda: BPTT([1], 2, 2), ValueError, "at least two"),
    "a length of 0": (lambda: BPTT([1, 2, 3], 2, 0), ValueError, "bptt_len=0"),
    "no streams": (lambda: BPTT([1, 2, 3], 0, 2), ValueError, "batch_size=0"),
    "an argument of BPTT": (lambda: BPTT([1, 2], 2, 2, repeat=True), TypeError, "unknown arguments: repeat"),
    "accumulation of tokens": (
        lambda: BPTT([1, 2, 3], 2, 2).autoscale_batch_size(8, gradient_accumulation=True),
        ValueError, "gradient_accumulation",
    ),
    "no tokens": (lambda: BPTT(ANY, 4, 5), ValueError, "integer tokens.*got a NoneType"),
    "words": (lambda: BPTT(ANY or ["a", "b"], 4, 5), ValueError, "integer tokens.*got a list"),
    "truths as tokens": (lambda: BPTT(torch.ones(9).bool(), 4, 5), ValueError, r"got torch\.bool of shape"),
    "more streams than tokens": (lambda: BPTT(range(10), 40, 5), ValueError, "batch_size=40: 10 tokens"),
    "bounds of tokens only": (
        lambda: BPTT(range(99), 4, 5, local_bsz_bounds=(1, 9)), ValueError, "without max_batch_size"
    ),
    "a length of a truth": (lambda: BPTT(range(99), 4, True), ValueError, "bptt_len=True"),
    "reporting an event": (lambda: adl.report(event=3), ValueError, r"report\(event=…\): every event has"),
    "reporting a vector": (lambda: adl.report(x=torch.zeros(2)), TypeError, r"got Tensor of shape \(2,\)"),
    "reporting a complex number": (lambda: adl.report(x=1j), TypeError, "got complex"),
    "an epoch that is no number": (lambda: adl.ElasticSampler(DATA).set_epoch(ANY), ValueError, "None, 0"),
    "a loader of no data set": (lambda: adl.AdaptiveDataLoader(ANY or 5), ValueError, "int has no length"),
    "an argument that DataLoader lacks": (lambda: adl.AdaptiveDataLoader(DATA, foo=1), TypeError, "foo"),
    "a mixin's batch size": (lambda: AdaptiveDataLoaderMixin(-1), ValueError, "batch_size=-1"),
    "no backend": (lambda: adl.init_process_group(ANY), ValueError, "backend=None"),
    "loading what is no state": (lambda: checkpoint.load_state(ANY), TypeError, "NoneType"),
    "saving what is no state": (lambda: checkpoint.save_state(ANY, "x"), TypeError, "NoneType"),
    "a reduction that is none": (lambda: collective.allreduce(1, ANY or "max"), TypeError, "reduce_fn"),
    "a rank of text": (lambda: reducer.Reducer(ANY or "0", 1), ValueError, "rank '0' of 1 replicas"),
    "a rank of a truth": (lambda: reducer.Reducer(True, 2), ValueError, "rank True of 2 replicas"),
    "a port below 0": (lambda: reducer.Reducer(0, 2, "::1", -1), ValueError, "root_port=-1: give an integer"),
    "a port above all": (lambda: collective.initialize("::1", 99999, 0, 2), ValueError, "root_port=99999"),
    "a host of numbers": (lambda: collective.initialize(ANY or 5, 0, 0, 2), TypeError, "root_host=5: give"),
    "a tag of numbers": (lambda: collective.broadcast(1, tag=ANY or 5), TypeError, "tag=5: give a string"),
    "a rank outside": (lambda: reducer.Reducer(2, 1), ValueError, "rank 2 of 1"),
    "hints that are none": (lambda: sched_hints.post_sched_hints(ANY or 5), TypeError, "dictionary.*got 5"),
    "bounds in hints": (lambda: HINTS({"localBszBounds": 5}), TypeError, "localBszBounds=5: give a list"),
    "a model in hints": (lambda: HINTS({"perfParams": 5}), TypeError, "perfParams=5: give a list"),
    "an object in hints": (lambda: HINTS({"initBatchSize": DATA}), TypeError, "hints are numbers"),
    "decorating no function": (lambda: utils.print_exc(ANY or 5), TypeError, "got 5"),
    "a power that is no number": (lambda: AdamScale(ANY or "x"), ValueError, "power.*got 'x'"),
    "warm-up of nan epochs": (lambda: LEGWScale(math.nan, 9), ValueError, "base_warmup_epochs.*got nan"),
    "warm-up of no number": (lambda: LEGWScale(ANY or "1", 9), ValueError, "base_warmup_epochs.*got '1'"),
    "a data size of none": (lambda: LEGWScale(1, ANY), ValueError, "data_size.*got None"),
    "reporting an object": (lambda: adl.report(x=object()), TypeError, "got object"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named(name: str) -> None:
    call, error, message = CALLS[name]
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    sampler = adl.ElasticSampler(DATA, True, np.int64(3))  # type: ignore[arg-type]
    sampler.set_epoch(np.int64(1), np.int64(3))  # type: ignore[arg-type]
    assert (sampler.epoch, sampler.index, len(list(sampler))) == (1, 3, 7)
    assert len(BPTT(range(101), 5, np.int64(7))) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, False, True, 0, 1, np.False_, np.True_, np.int64(0), np.int64(1)])
def test_values_that_plainly_mean_true_or_false_are_accepted(given: Any) -> None:
    """torch's DataLoader has shuffle=None for its default, and argparse's type=int gives 0 and 1."""
    meant = bool(given)
    loader = LOADER(DATA, 4, given, drop_last=given)
    loader.autoscale_batch_size(8, (1, 4), given)
    held = (loader.sampler.shuffle, loader.drop_last, insides.helper(loader).limits.accumulation)  # type: ignore[attr-defined]
    assert all(value is meant for value in held), held
    assert adl.ElasticSampler(DATA, given).shuffle is meant
    assert len(loader) == (2 if meant else 3)
    if not meant:
        LOADER(STREAM, 4, given, drop_last=given)


def test_nan_and_infinity_are_reported_as_text(tmp_path: Path) -> None:
    adl.report(
        a=math.nan, b=-math.inf, c=np.float32(0.5), d=torch.tensor([2]), e=Fraction(1, 4), f=None, g=True
    )
    (event,) = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [event[name] for name in "abcdefg"] == ["nan", "-inf", 0.5, 2, 0.25, None, True]
