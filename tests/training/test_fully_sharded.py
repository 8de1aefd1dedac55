"""AdaptiveFSDP: checkpoints of any number of replicas, parts that move, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import replicas
import sharded_cases
import torch
from fake_loader import FakeLoader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint
from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._process_group.backends import Group
from adaptdl_elastic.torch._sharded import fully_shard as private
from adaptdl_elastic.torch._sharded.doubt import StepInDoubt
from adaptdl_elastic.torch._sharded.layout import Layout
from adaptdl_elastic.torch._sharded.links import Links

pytestmark = [sharded_cases.needs_tested_torch, pytest.mark.usefixtures("alone")]


def assert_close(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(theirs[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.processes
def test_a_checkpoint_of_two_is_continued_by_three_and_by_a_plain_model(tmp_path: Path) -> None:
    wanted = replicas.run(sharded_cases.save, 2, str(tmp_path))[0]
    assert_close(replicas.run(sharded_cases.load, 3, str(tmp_path))[2], wanted)
    net = sharded_cases.network(seed=1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    model = adl.AdaptiveDataParallel(net, optimizer)
    assert checkpoint.load_state(model._state, tmp_path)
    sharded_cases.step(model, optimizer)
    assert_close({name: value.tolist() for name, value in net.state_dict().items()}, wanted)


@pytest.mark.slow
@pytest.mark.processes
def test_parts_that_move_keep_weights_states_and_references() -> None:
    first, second = replicas.run(sharded_cases.turned, 2)
    assert first["equal"]
    assert second["equal"]
    assert first["parts"] == [3, 3, 1, 1]  # of 7, 7, 3 and 3 rows: what the second one had
    assert second["parts"] == [4, 4, 2, 2]
    net = sharded_cases.network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        sharded_cases.step(net, optimizer)
    assert_close(first["next"], {name: value.tolist() for name, value in net.state_dict().items()})


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("count", "needed"), [(4, ((0, 2), (1, 3))), (2, ((0, 1),)), (3, ())])
def test_copies_of_parts_train_and_measure_as_one_copy_does(
    count: int, needed: tuple[tuple[int, ...], ...]
) -> None:
    for one, found in replicas.run(replicas.each, count, sharded_cases.with_copies, [(1,), (2,)]):
        assert found["needed"] == needed
        assert_close(found["weights"], one["weights"])
        assert found["statistics"] == pytest.approx(one["statistics"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_copies_train_mixed_tied_frozen_recomputed_and_compiled_parts_alike() -> None:
    kinds = ["float32", "bfloat16", "momentum"]
    cases = [(1, kinds), (2, [*kinds, "again", "compiled"])]
    for one, found in replicas.run(replicas.each, 4, sharded_cases.kinds_with_copies, cases):
        for kind, weights in found.items():
            assert_close(weights, one.get(kind, one["float32"]))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("copies", [1, 2])
def test_a_newcomer_runs_a_batch_that_does_not_count(copies: int) -> None:
    assert replicas.run(sharded_cases.newcomer, 1, copies) == [True]


def reducer(**has: Any) -> Any:
    return SimpleNamespace(**has, close=lambda: None)


def test_replicas_wait_for_each_other_before_they_make_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    session, made = current_session(), list[Any]()

    def further(_: Group, ranks: list[int]) -> Any:
        made.append(ranks)
        return torch.distributed.group.WORLD

    monkeypatch.setattr(Group, "further", further)
    session.reducer = reducer(barrier=lambda tag: made.append(tag))
    Links(session).connect(Layout(1, 2), torch.device("cpu"))
    assert made == ["copies of parts", [0], [1], [0, 1]]


def test_a_replica_lost_outside_of_data_loops_gives_no_zeros() -> None:
    session, tensor = current_session(), torch.ones(2)
    links = Links(session)
    links.absorb, links.layout = True, Layout(1, 2)

    def lost() -> None:
        raise RuntimeError("rank 1 is gone")

    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        links.run(lost, tensor)
    with FakeLoader([[1]], 1, current_local_bsz=1):
        links.run(lost, tensor)
    assert tensor.tolist() == [0, 0]
    with pytest.raises(PeerLostError, match="rank 1 is gone"):  # the loop was left by `break`
        links.run(lost, tensor)


def test_a_step_in_doubt_is_taken_back_with_the_states_that_it_has_added() -> None:
    net, _ = sharded_cases.sharded()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    before = sharded_cases.weights(net)
    assert all(optimizer.state[param] == {} for param in net.parameters())
    doubt = StepInDoubt(RuntimeError(), optimizer, {})
    sharded_cases.step(net, optimizer)
    doubt.put_back(optimizer)
    assert all(torch.equal(value, before[name]) for name, value in sharded_cases.weights(net).items())
    assert all(optimizer.state[param] == {} for param in net.parameters())


def test_a_replica_lost_before_parts_move_leaves_them_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = sharded_cases.sharded()
    model, session = adl.AdaptiveFSDP(net, optimizer, copies=2), current_session()
    session.reducer = reducer(allreduce=lambda own, *_, **__: own)
    with monkeypatch.context() as patch:
        patch.setattr(Links, "connect", lambda *_: torch.zeros(1).view(2))
        with pytest.raises(RuntimeError, match="shape"):
            model.reinit_process_group()
    model.reinit_process_group()


def test_an_unsupported_use_of_fsdp_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    net = sharded_cases.network()
    fully_shard(net[0])
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(ValueError, match=r"call fully_shard\(model\) last"):
        adl.AdaptiveFSDP(net, optimizer)
    with pytest.raises(TypeError, match="AdaptiveFSDP"):
        adl.AdaptiveDataParallel(net, optimizer)
    net = sharded_cases.network()
    fully_shard(net, ignored_params={net[0].bias})
    with pytest.raises(ValueError, match=r"'0\.bias' is not sharded"):
        adl.AdaptiveFSDP(net, torch.optim.AdamW(net.parameters()))
    net = sharded_cases.network()
    fully_shard(net, offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(ValueError, match="leave out offload_policy"):
        adl.AdaptiveFSDP(net, torch.optim.AdamW(net.parameters()))
    net = sharded_cases.network()
    fully_shard(net, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
    with pytest.raises(ValueError, match=r"this mesh is DeviceMesh\(\(dp=1\).*: give fully_shard no mesh"):
        adl.AdaptiveFSDP(net, torch.optim.AdamW(net.parameters()))
    net, optimizer = sharded_cases.sharded()
    with pytest.raises(TypeError, match="supports no mp_scaler: leave it out and train in bfloat16"):
        adl.AdaptiveFSDP(net, optimizer, mp_scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="copies must be 1 or 2, got 3"):
        adl.AdaptiveFSDP(net, optimizer, copies=3)
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "get_backend", lambda: "nccl")
        with pytest.raises(ValueError, match="copies=2 communicates by gloo only, and the backend is nccl"):
            adl.AdaptiveFSDP(net, optimizer, copies=2)
    monkeypatch.setattr(private, "TESTED", ("2.99",))
    with pytest.raises(ValueError, match=r"it needs torch 2\.99, and this is torch "):
        adl.AdaptiveFSDP(net, optimizer)


def test_gathered_parameters_are_no_thawed_ones() -> None:
    net, optimizer = sharded_cases.sharded()
    model = adl.AdaptiveFSDP(net, optimizer)
    with torch.no_grad():
        model(torch.ones(1, 5))
    assert not model.thawed  # the root's parameters stay gathered after the forward pass
    model.refuse_thawed("a test")


def test_gradients_that_are_not_synchronised_are_refused_where_they_would_be_lost() -> None:
    net: Any
    net, optimizer = sharded_cases.sharded()
    model = adl.AdaptiveFSDP(net, optimizer)
    inputs = torch.ones(8, 5)

    def train() -> None:
        for batch in adl.AdaptiveDataLoader(inputs, batch_size=4):  # type: ignore[arg-type]
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    net.set_requires_gradient_sync(False)
    model(inputs)  # outside of a loop, where no change comes
    with pytest.raises(RuntimeError, match=r"leave out set_requires_gradient_sync\(False\)"):
        train()
    net.set_requires_gradient_sync(True)
    net[0].set_requires_gradient_sync(False)  # of one layer only
    with pytest.raises(RuntimeError, match=r"leave out set_requires_gradient_sync\(False\)"):
        train()
    net[0].set_requires_gradient_sync(True)
    train()
    assert model.attempted_steps == 2


def test_gradients_that_were_not_stepped_yet_are_known() -> None:
    net, optimizer = sharded_cases.sharded()
    model = adl.AdaptiveFSDP(net, optimizer)
    known = []

    def passes() -> None:
        model(torch.ones(4, 5)).square().mean().backward()
        known.append(model.accumulates_by_hand)

    model(torch.ones(4, 5))
    assert not model.accumulates_by_hand
    passes()
    optimizer.step()
    assert not model.accumulates_by_hand  # the gradients are still there
    passes()
    optimizer.zero_grad()
    assert not model.accumulates_by_hand
    passes()
    for param in net.parameters():
        param.grad = None
    assert not model.accumulates_by_hand
    assert known == [True, True, True]


def test_a_pass_that_adds_to_gradients_that_were_stepped_is_refused() -> None:
    net, optimizer = sharded_cases.sharded()
    model = adl.AdaptiveFSDP(net, optimizer)
    inputs: Any = torch.ones(12, 5)

    def train(drop: Callable[[], None]) -> int:
        for batch in adl.AdaptiveDataLoader(inputs, batch_size=4):
            model(batch).square().mean().backward()
            optimizer.step()
            drop()
        return model.attempted_steps

    assert train(optimizer.zero_grad) == 3
    assert train(lambda: optimizer.zero_grad(set_to_none=False)) == 6
    optimizer.zero_grad()
    assert train(model.zero_grad) == 9
    assert train(lambda: net.zero_grad(set_to_none=False)) == 12
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\) after each step"):
        train(lambda: None)
    assert model.attempted_steps == 13


@pytest.mark.parametrize("sharded", [True, False])
def test_a_boundary_between_two_backward_passes_waits_for_the_step(
    sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = sharded_cases.sharded() if sharded else _plain()
    model: Any = (adl.AdaptiveFSDP if sharded else adl.AdaptiveDataParallel)(net, optimizer)
    boundaries: list[tuple[int, int, int]] = []
    boundary = current_session().consensus.boundary

    def passed(position: Any, last: bool = False) -> None:
        boundaries.append(position)
        boundary(position, last)

    monkeypatch.setattr(current_session().consensus, "boundary", passed)
    loader: Any = adl.AdaptiveDataLoader(torch.ones(20, 5), batch_size=4)  # type: ignore[arg-type]
    for _ in adl.remaining_epochs_until(2):
        for turn, batch in enumerate(loader):
            last = turn % 2 == 1
            with contextlib.nullcontext() if sharded or last else model.no_sync():
                model(batch).square().mean().backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    # The gradients of the fifth batch are part of the next epoch's first step.
    assert boundaries == [(0, 0, 0), (0, 1, 0), (0, 1, 8), (0, 1, 16), (1, 1, 8), (1, 1, 16)]


def _plain() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    net = sharded_cases.network()
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)
