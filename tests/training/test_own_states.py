"""How States of the script are put back: which are copied, and how changes of the others are recognised."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session, checkpoint
from adaptdl_elastic.checkpoint.state_copy import strip
from adaptdl_elastic.torch._elastic import state_marks, state_transfer, step_snapshot
from adaptdl_elastic.torch._elastic.step_snapshot import LargeState

pytestmark = pytest.mark.usefixtures("alone")


class Kept(checkpoint.TensorState):
    tensor: torch.Tensor

    def state_dict(self) -> Any:
        return {"tensor": self.tensor}

    def digest(self, tensor: torch.Tensor) -> Hashable:
        self.tensor = tensor
        return state_marks.digest(self)


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


@pytest.mark.parametrize("where", ["cpu", "elsewhere"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_digest_depends_on_the_position(
    change: Callable[[torch.Tensor], torch.Tensor], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "elsewhere":  # as on a GPU, in blocks
        monkeypatch.setattr(state_marks, "BLOCK", 1000)
        monkeypatch.setattr(state_marks, "fingerprint", state_marks.block_sums)
    kept, before = Kept("kept"), counts()
    assert kept.digest(before) == kept.digest(before.clone())
    assert kept.digest(before) != kept.digest(change(before))


@pytest.mark.parametrize("how", ["fingerprint", "block_sums"])
def test_every_kind_of_tensor_has_a_digest(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_marks, "fingerprint", getattr(state_marks, how))
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


class History(checkpoint.State):
    """A pickled State of more than 4096 bytes, whose copy takes `cost` seconds of the clock that is given."""

    def __init__(self, clock: list[float], cost: float) -> None:
        super().__init__("history")
        self.clock, self.cost, self.text = clock, cost, "a" * 5000

    def save(self, fileobj: BinaryIO) -> None:
        self.clock[0] += self.cost
        fileobj.write(self.text.encode())

    def load(self, fileobj: BinaryIO) -> None:
        self.text = fileobj.read().decode()


@pytest.mark.parametrize(("cost", "put_back"), [(0.009, True), (0.011, False)])
def test_a_larger_pickled_state_is_copied_while_that_takes_a_hundredth_of_a_step(
    cost: float, put_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(step_snapshot.time, "monotonic", lambda: clock[0])
    history, states, session = History(clock, cost), step_snapshot.UserStates(), _session.current()
    for _ in range(12):
        states.begin_window(session)
        clock[0] = round(clock[0]) + 1.0  # a window takes a second
        history.text += "b"
    assert (states.why_irreparable(session) is None) == put_back
    states.put_back(session)
    assert history.text.count("b") == (11 if put_back else 12)


def test_a_large_state_that_changes_through_data_only_in_a_later_step_is_noticed() -> None:
    """Autograd does not count it; the elements that are looked at differ."""
    kept = Kept("kept")
    kept.tensor = torch.zeros(5000)
    large = LargeState(kept)
    for _ in range(5):
        large.begin_window()
        large.before_step()
    large.begin_window()
    kept.tensor.data.add_(1.0)
    large.step_left_out()
    assert not large.can_be_put_back()


@pytest.mark.parametrize("shape", ["expanded", "transposed", "a part", "empty", "complex"])
def test_marks_take_tensors_of_every_layout(shape: str) -> None:
    plain = torch.arange(6000.0).reshape(60, 100)
    kept = Kept("kept")
    kept.tensor = {
        "expanded": torch.tensor(3.0).expand(5000),
        "transposed": plain.t(),
        "a part": plain[:, 3:],
        "empty": torch.zeros(0, 3),
        "complex": torch.complex(plain, plain).conj(),
    }[shape]
    large = LargeState(kept)
    large.begin_window()
    large.step_left_out()
    assert large.can_be_put_back()


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_a_large_quantised_state_is_read_whole_instead_of_by_elements() -> None:
    kept = Kept("kept")
    kept.tensor = torch.quantize_per_tensor(torch.ones(9000), 0.1, 0, torch.qint8)
    states = step_snapshot.UserStates()
    states.begin_window(_session.current())
    assert states.why_irreparable(_session.current()) is None


class Many(Kept):
    """Four large tensors that never change, and others."""

    def __init__(self) -> None:
        super().__init__("many")
        self.tensors = [torch.ones(9000) for _ in range(4)] + [torch.ones(100) for _ in range(20)]
        self.seen = {1}

    def state_dict(self) -> Any:
        return {"tensors": self.tensors, "seen": self.seen}

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen = set(state_dict["seen"])
        for tensor, saved in zip(self.tensors, state_dict["tensors"], strict=True):
            tensor.copy_(saved)


def test_a_change_through_data_of_all_but_the_largest_tensors_is_noticed() -> None:
    many = Many()
    large = LargeState(many)
    large.begin_window()
    for tensor in many.tensors[4:]:
        tensor.data.add_(1.0)
    large.step_left_out()
    assert not large.can_be_put_back()


def test_a_set_beside_the_tensors_is_put_back() -> None:
    many = Many()
    large = LargeState(many)
    large.begin_window()
    large.step_left_out()
    many.seen.add(2)
    many.tensors[0].add_(1.0)
    large.put_back()
    assert many.seen == {1}
    assert many.tensors[0].tolist() == [1.0] * 9000


def test_tensors_of_dicts_in_another_order_are_not_taken_for_each_other() -> None:
    def skeleton(*names: str) -> Any:
        return strip({name: torch.zeros(3) for name in names}, [])

    assert state_transfer.same_skeleton(skeleton("a", "b"), skeleton("a", "b"))
    assert not state_transfer.same_skeleton(skeleton("a", "b"), skeleton("b", "a"))


@pytest.mark.parametrize(("declared", "copied"), [(False, []), (True, ["kept"])])
def test_a_state_of_an_adapter_is_put_back_if_it_says_that_steps_change_it(
    declared: bool, copied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kept, "__module__", "adaptdl_elastic.torch.frameworks.huggingface")
    monkeypatch.setattr(Kept, "part_of_step", declared)
    Kept("kept").tensor = torch.zeros(3)
    assert [*step_snapshot.copies_of_script(_session.current())] == copied


class Given(checkpoint.TensorState):
    def __init__(self, value: Any) -> None:
        super().__init__("given")
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def mark(self, value: Any) -> dict[str, int]:
        self.value = value
        return state_marks.marks_of_script(_session.current())


def test_values_that_a_newcomer_has_from_a_copy_are_those_of_the_others() -> None:
    """The others' equal strings are one object, their numbers are numpy's, and sets have any order."""
    history = [{"loss": 1, "tag": "train"}, {"loss": 2, "tag": "train"}]
    given = Given(None)
    whole = given.mark({"history": history, "best": np.float64(0.5), "seen": {8, 16}})
    part = pickle.loads(pickle.dumps(history[:1]))
    assert whole == given.mark({"history": [*part, history[1]], "best": 0.5, "seen": {16, 8}})
    assert whole != given.mark({"history": [*part, history[1]], "best": 0.6, "seen": {16, 8}})


def test_a_state_that_writes_pickles_is_compared_by_their_values() -> None:
    class Written(checkpoint.State):
        values: Any = ()

        def save(self, fileobj: BinaryIO) -> None:
            for value in self.values:
                pickle.dump(value, fileobj)

    state = Written("written")

    def mark(*values: Any) -> dict[str, int]:
        state.values = values
        return state_marks.marks_of_script(_session.current())

    one = "".join(["tra", "in"])
    other = "".join(["tra", "in"])
    assert mark(1, [one, one]) == mark(1, [one, other]) != mark(1, [one, "test"])
    assert mark(1, True) != mark(1, False)


def test_values_are_attributes_and_each_is_a_value_of_its_name() -> None:
    values = adl.Values(best=0.0, patience=3)
    values.best = torch.tensor(0.5)
    values.patience -= 1
    assert (values.best, values.patience) == (0.5, 2)
    assert {"best", "patience"} <= _session.current().states.keys()
    with pytest.raises(AttributeError, match=r"give it to adl.Values, as in Values\(bset=0\)"):
        values.bset = 1.0
    with pytest.raises(AttributeError):
        values.state_dict()
    with pytest.raises(TypeError, match="'best' cannot be a set"):
        values.best = {1}
