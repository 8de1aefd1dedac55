"""The digest by which a change of a large State in an abandoned step is seen."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from adaptdl_elastic import checkpoint
from adaptdl_elastic.torch._elastic import user_state


class Kept(checkpoint.TensorState):
    tensor: torch.Tensor

    def state_dict(self) -> Any:
        return {"tensor": self.tensor}

    def digest(self, tensor: torch.Tensor) -> Hashable:
        self.tensor = tensor
        return user_state._digest(self)


def counts() -> torch.Tensor:
    tensor = torch.zeros(5000, dtype=torch.int64)
    tensor[100:103] = 5
    return tensor


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A count moved to another bin."""
    tensor = tensor.clone()
    tensor[100] -= 1
    tensor[107] += 1
    return tensor


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """What weights that grow evenly with the position would not see."""
    tensor = tensor.clone()
    tensor[100:103] += torch.tensor([1, -2, 1])
    return tensor


CHANGES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda tensor: tensor.roll(1),
    lambda tensor: tensor.roll(1000),
    lambda tensor: tensor.flip(0),
    moved,
    spread,
]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("where", ["cpu", "elsewhere"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_digest_depends_on_the_position(
    change: Callable[[torch.Tensor], torch.Tensor], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "elsewhere":  # as on a GPU, in blocks
        monkeypatch.setattr(user_state, "_BLOCK", 1000)
        monkeypatch.setattr(user_state, "_fingerprint", user_state._block_sums)
    kept, before = Kept("kept"), counts()
    assert kept.digest(before) == kept.digest(before.clone())
    assert kept.digest(before) != kept.digest(change(before))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("how", ["_fingerprint", "_block_sums"])
def test_every_kind_of_tensor_has_a_digest(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_state, "_fingerprint", getattr(user_state, how))
    kept, plain = Kept("kept"), torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    tensors = {
        "transposed": plain.t(),
        "a part": plain.reshape(-1)[3:],
        "a parameter": torch.nn.Parameter(plain),
        "half": plain.bfloat16(),
        "bits": plain > 0,
        "complex": torch.complex(plain, plain),
        "conjugate": torch.complex(plain, plain).conj(),
        "long complex": torch.complex(plain.double(), plain.double()),
        "a number": torch.tensor(3.0),
        "expanded": torch.tensor(3.0).expand(4),
    }
    for name, tensor in tensors.items():
        other = tensor.detach().clone(memory_format=torch.contiguous_format)
        assert kept.digest(tensor) == kept.digest(other), name
        other.reshape(-1)[-1] = 1 - other.reshape(-1)[-1].real.int()
        assert kept.digest(tensor) != kept.digest(other), name
    empty = torch.zeros(0, 3)
    assert kept.digest(empty) == kept.digest(empty.clone())
