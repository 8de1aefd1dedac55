"""Wrong arguments get one line that names them, not a traceback from somewhere below."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import Script
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session, checkpoint, collective, reducer, sched_hints, utils
from adaptdl_elastic.torch.data import AdaptiveDataLoaderMixin
from adaptdl_elastic.torch.scaling_rules import AdamScale, LEGWScale

DATA = TensorDataset(torch.zeros(10, 2))


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Script]:
    yield Script(monkeypatch, ADAPTDL_EVENT_LOG=str(tmp_path / "events"))
    _session.reset()


HINTS = sched_hints.post_sched_hints
ANY: Any = None  # arguments that no type checker would let pass

CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a sampler of what has no length": (lambda: adl.ElasticSampler(ANY or 5), TypeError, "int has none"),
    "an epoch below 0": (lambda: adl.ElasticSampler(DATA).set_epoch(-1), ValueError, "-1, 0"),
    "an epoch that is no number": (lambda: adl.ElasticSampler(DATA).set_epoch(ANY), ValueError, "None, 0"),
    "a loader of no data set": (lambda: adl.AdaptiveDataLoader(ANY or 5), ValueError, "int has no length"),
    "an argument that DataLoader lacks": (lambda: adl.AdaptiveDataLoader(DATA, foo=1), TypeError, "foo"),
    "a mixin's batch size": (lambda: AdaptiveDataLoaderMixin(-1), ValueError, "batch_size=-1"),
    "epochs": (lambda: adl.remaining_epochs_until(-1), ValueError, "-1"),
    "a backend that is none": (lambda: adl.init_process_group("glooo"), ValueError, "glooo.*gloo, "),
    "no backend": (lambda: adl.init_process_group(ANY), ValueError, "backend=None"),
    "loading what is no state": (lambda: checkpoint.load_state(ANY), TypeError, "NoneType"),
    "saving what is no state": (lambda: checkpoint.save_state(ANY, "x"), TypeError, "NoneType"),
    "a state without a name": (lambda: checkpoint.State(""), ValueError, "non-empty"),
    "a reduction that is none": (lambda: collective.allreduce(1, ANY or "max"), TypeError, "reduce_fn"),
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
