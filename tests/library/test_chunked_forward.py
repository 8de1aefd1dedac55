"""A batch in chunks gives the same as the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_memory import check

from adaptdl_elastic.torch._gradient.chunked_forward import (
    NotChunkableError,
    chunk_sizes,
    count_samples,
    is_out_of_memory,
    run_in_chunks,
)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.dropout = torch.nn.Dropout()
        self.largest = 0

    def forward(self, inputs: torch.Tensor, offset: torch.Tensor, scale: float = 1.0) -> Any:
        check(len(inputs), 4)
        self.largest = max(self.largest, len(inputs))
        hidden = self.dropout(torch.tanh(self.layer(inputs))) * scale + offset
        return {"logits": hidden, "loss": hidden.square().mean(), "time first": (hidden.T, "name")}


def test_outputs_and_gradients_are_those_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    net, inputs, offset = Net(), torch.randn(11, 3), torch.randn(3)
    net.dropout.p = 0.0
    found = run_in_chunks(net, (inputs, offset), {"scale": 2.0}, 11, None, 4)
    assert net.largest == 4
    hidden = torch.tanh(net.layer(inputs)) * 2 + offset
    torch.testing.assert_close(found["logits"], hidden)
    torch.testing.assert_close(found["time first"][0], hidden.T)
    assert found["time first"][1] == "name"
    torch.testing.assert_close(found["loss"], hidden.square().mean())
    gradients = [
        torch.autograd.grad(loss + logits.sum(), net.layer.weight)[0]
        for loss, logits in ((found["loss"], found["logits"]), (hidden.square().mean(), hidden))
    ]
    torch.testing.assert_close(*gradients)


def test_losses_that_are_divided_by_the_items_of_the_whole_batch_add_up() -> None:
    inputs = torch.randn(11, 3)

    def loss(inputs: torch.Tensor, num_items_in_batch: int) -> torch.Tensor:
        return inputs.square().sum() / num_items_in_batch

    found = run_in_chunks(loss, (inputs,), {"num_items_in_batch": 33}, 11, None, 4)
    torch.testing.assert_close(found, inputs.square().mean())


def test_dropout_is_the_same_when_a_chunk_is_computed_again() -> None:
    torch.manual_seed(0)
    net = Net()
    net.layer.weight.data.zero_()
    net.layer.bias.data.fill_(1.0)
    found = run_in_chunks(net, (torch.randn(8, 3), torch.zeros(3)), {}, 8, None, 4)["logits"]
    found.sum().backward()
    kept = (found != 0).sum(dim=0)  # what was dropped has no gradient
    torch.testing.assert_close(net.layer.bias.grad, kept * 2 * (1 - torch.tanh(torch.tensor(1.0)) ** 2))


def test_samples_in_the_second_dimension() -> None:
    inputs = torch.arange(12.0).view(2, 6)
    found = run_in_chunks(lambda x: (x + 1, x.sum(0)), (inputs,), {}, 6, 1, 4)
    assert torch.equal(found[0], inputs + 1)
    assert torch.equal(found[1], inputs.sum(0))


def test_a_dimension_that_happens_to_have_the_size_of_a_chunk_is_not_taken_for_samples() -> None:
    found = run_in_chunks(lambda x: x.expand(4, -1), (torch.arange(8.0),), {}, 8, None, 4)
    assert found.shape == (4, 8)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (lambda x: x.new_zeros(5), "an output of shape [5] has no dimension of samples"),
        (lambda x: object(), "it returns a object"),
        (lambda x: [0] * len(x), "its outputs are different structures for different samples"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(output: Any, why: str) -> None:
    with pytest.raises(NotChunkableError, match=f"^{why.replace('[', '.')[:20]}"):
        run_in_chunks(output, (torch.arange(8.0),), {}, 8, None, 4)


def test_inputs_that_are_no_samples() -> None:
    with pytest.raises(NotChunkableError, match="its inputs are no tensors of samples"):
        run_in_chunks(lambda x: x, ([torch.zeros(3)] * 8,), {}, 8, None, 4)


def test_sizes_of_chunks() -> None:
    assert chunk_sizes(11, 4) == [4, 4, 3]
    assert chunk_sizes(8, 4) == [4, 2, 2]
    assert chunk_sizes(4, 2) == [2, 2]
    assert chunk_sizes(3, 1) == [1, 1, 1]


def test_how_many_samples_there_are() -> None:
    inputs = (torch.zeros(2), {"x": torch.zeros(6, 4)})
    assert count_samples(inputs, 6, None) == 6
    assert count_samples(inputs, None, None) == count_samples(inputs, 5, None) == 2
    assert count_samples(inputs, None, 1) == 4
    assert count_samples(("text",), 6, None) is None


def test_errors_of_exhausted_memory_are_recognised() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("size mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))
