"""Arguments of `init_process_group`; how replicas meet is tested where they train."""

from __future__ import annotations

from typing import Any

import numpy as np
import parallel_cases as cases
import pytest
import torch.distributed as dist
from fresh import Script
from torch.testing._internal.distributed.fake_pg import FakeStore

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session, collective
from adaptdl_elastic._session import Identity
from adaptdl_elastic.torch._startup import checked_backend

pytestmark = pytest.mark.usefixtures("script")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gloo", None, 2, 5), "rank=5: give an integer from 0 to 1"),
        (("gloo", None, 2, -1), "rank=-1: give an integer from 0 to 1"),
        (("gloo", None, 1, True), "rank=True"),
        (("gloo", None, 1, 0.0), r"rank=0\.0"),
        (("gloo", None, 0, 0), "world_size=0: give an integer of at least 1"),
        (("gloo", None, "2", 0), "world_size='2'"),
        (("gloo", None, 1.5, 0), r"world_size=1\.5"),
        (("gloo", None, True, 0), "world_size=True"),
        (("undefined",), "backend='undefined': there are gloo, "),
        ((5,), "backend=5"),
        (("cpu:gloo,nccl",), "backend='cpu:gloo,nccl'.*cpu:gloo,cuda:nccl"),
        (("cpu:glue",), "backend='cpu:glue'"),
        ((":gloo",), "backend=':gloo'"),
        (("",), "backend=''"),
    ],
)
def test_impossible_arguments_are_refused_and_change_nothing(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adl.init_process_group(*arguments)
    assert _session.current().identity == Identity.from_environment()
    assert _session.current().backend is None
    adl.init_process_group("gloo")  # put right
    assert (adl.rank(), adl.world_size()) == (0, 1)


def test_a_rank_of_the_environment_does_not_fit_a_smaller_world(script: Script) -> None:
    script.restart(ADAPTDL_NUM_REPLICAS="4", ADAPTDL_REPLICA_RANK="3")
    with pytest.raises(ValueError, match="world_size=2, and this is rank 3 by the environment"):
        adl.init_process_group("gloo", None, 2)
    assert adl.world_size() == 4


def test_where_the_others_can_not_be_met_everything_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADAPTDL_MASTER_PORT", raising=False)
    with pytest.raises(ValueError, match="2 replicas and no ADAPTDL_MASTER_PORT"):
        adl.init_process_group("gloo", None, 2, 0)
    assert _session.current().identity == Identity.from_environment()


@pytest.mark.parametrize("backend", ["gloo", "GLOO", "cpu:gloo"])
def test_backends_are_spelt_as_torch_spells_them(backend: str) -> None:
    adl.init_process_group(backend, world_size=np.int64(1), rank=np.int64(0))  # type: ignore[arg-type]
    assert dist.get_world_size() == 1
    assert collective.allreduce(2) == 2


def test_a_model_before_the_process_group_names_what_to_call() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        cases.adaptive()


def test_a_newcomer_warms_up_on_torchs_fake_backend() -> None:
    """Under its planned rank and size, before it meets the others."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    model = cases.Net()
    optimizer = cases.sgd(model)
    adp = adl.AdaptiveDataParallel(model, optimizer)
    cases.steps(adp, optimizer, 2)
    assert adp.gns.steps == 2


def test_one_backend_for_each_kind_of_device() -> None:
    assert checked_backend("cpu:gloo,CUDA:nccl") == "cpu:gloo,cuda:nccl"
