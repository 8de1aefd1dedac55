"""A loss over the pairs of a batch is that of the whole batch on any number of replicas."""

from __future__ import annotations

import gather_cases as cases
import pytest
import replicas
import torch
from fake_loader import FakeLoader

import adaptdl_elastic.torch as adl


@pytest.mark.processes
@pytest.mark.parametrize("counts", [[3, 3, 2], [5, 3, 0], [8]], ids=str)
def test_the_mean_of_the_gradients_is_that_of_the_whole_batch(counts: list[int]) -> None:
    given = [(loss, counts) for loss in cases.LOSSES]
    for (loss, _), *found in zip(
        given, *replicas.run(replicas.each, len(counts), cases.of_shares, given), strict=True
    ):
        wanted = cases.whole(loss)
        if loss == "own_rows":  # each replica has the loss of its own rows
            mean = sum(float(one[0]) * count / 8 for one, count in zip(found, counts, strict=True))
            assert mean == pytest.approx(float(wanted[0]), abs=1e-6)
        for one, count in zip(found, counts, strict=True):
            if loss != "own_rows" and count:
                assert float(one[0]) == pytest.approx(float(wanted[0]), abs=1e-6), loss
            for ours, theirs in zip(one[1:], wanted[1:], strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.processes
def test_rows_of_any_type_arrive_bit_by_bit() -> None:
    numbers, truths, halves, pairs, odd, empty, turned = replicas.run(cases.of_all_types, 2)[1]
    assert numbers.tolist() == [0, 0, 1]
    assert truths.tolist() == [[True, False]] * 3
    assert (halves.dtype, halves.tolist()) == (torch.bfloat16, [[0.5, 0.5], [1.5, 1.5]])
    assert pairs.tolist() == [0j, 1 + 0j]
    assert pairs.imag.signbit().all()
    assert odd[0] == float("-inf")
    assert odd[1].isnan()
    assert empty.tolist() == [[1.0, 1.0]]
    assert turned.tolist() == [[1.0, 1.0]] * 3


@pytest.mark.processes
def test_rows_of_different_shapes_are_an_error_on_all_replicas() -> None:
    first, second = replicas.run(cases.apart, 2)
    assert "rows of shape [2]" in first
    assert "rows of shape [3]" in second


@pytest.mark.processes
def test_a_death_in_the_middle_of_it_fails_the_step_and_not_the_body() -> None:
    assert replicas.run(cases.dies, 2, dies=1) == [[True, True], None]


@pytest.mark.usefixtures("alone")
def test_one_replica_gets_its_own_rows_and_their_derivative() -> None:
    tensor = torch.randn(3, 2, requires_grad=True)
    rows = adl.gather(tensor)
    assert torch.equal(rows, tensor)
    (rows * 2).sum().backward()
    assert torch.equal(tensor.grad, torch.full((3, 2), 2.0))


@pytest.mark.usefixtures("alone")
def test_a_loop_that_does_not_train_is_refused() -> None:
    with FakeLoader([[4]], 4, 4), pytest.raises(RuntimeError, match="does not train"):
        adl.gather(torch.ones(4, 2))
