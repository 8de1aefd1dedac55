"""Restore a TensorState that is too large to be copied before every step, e.g. an average of all parameters.

A loop's body usually changes such a State after `optimizer.step()`. If the gradients of a step did not
arrive, `optimizer.step()` is called all the same but does nothing. At that call the State is still as it was
when the window began, so it is copied there. A step that succeeds needs no copy.

A script may instead change the State before `optimizer.step()`. This is detected at the first step that does
so, and from the next window on the State is copied when a window begins. If that first step fails, training
restarts from the checkpoint.

A change is detected without reading the whole State. Autograd keeps a version counter of each tensor. Some
elements are compared as well, because a change through `tensor.data` does not raise the counter. A change
through `tensor.data` that happens before `optimizer.step()` and spares all of these elements is not detected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from adaptdl_elastic import checkpoint
from adaptdl_elastic.torch._elastic.state_transfer import fill, strip

_LARGEST_TENSORS = 4  # largest tensors of a State, of which elements are compared
_OTHER_TENSORS = 8  # other tensors of which elements are compared
_SAMPLED_ELEMENTS = 16  # compared elements of each of these tensors, spread over it
_CHECKED_WINDOWS = 3  # first windows in which elements are compared at the step, which waits for the device


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a few elements of a tensor, spread over it, as a view of shape (n,).

    Raises:
        RuntimeError: it has no plain storage (sparse).
    """
    offset = tensor.storage_offset()
    stored = tensor.untyped_storage().nbytes() // tensor.element_size() - offset
    reachable = min(tensor.numel(), stored)
    count = min(_SAMPLED_ELEMENTS, reachable)
    return tensor.detach().as_strided((count,), (max(1, reachable // _SAMPLED_ELEMENTS),), offset)


class StateMarks:
    """Record marks of a TensorState by which a later change is detected.

    Args:
        state: The State; its `state_dict` must return the tensors themselves, not copies.

    Raises:
        RuntimeError: a tensor has no version counter (inference mode) or no plain storage (sparse).
    """

    def __init__(self, state: checkpoint.TensorState) -> None:
        self.tensors: list[torch.Tensor] = []  # kept alive, so that no other tensor gets their addresses
        self.plain = strip(state.state_dict(), self.tensors)
        self._versions = [tensor._version for tensor in self.tensors]
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]
        self._elements = [elements.clone() for elements in self._sampled()]

    def _sampled(self) -> Iterator[torch.Tensor]:
        """Yield a few elements of the largest tensors and of some others, as views."""
        by_size = sorted(self.tensors, key=torch.Tensor.numel)
        others, largest = by_size[:-_LARGEST_TENSORS], by_size[-_LARGEST_TENSORS:]
        yield from map(sampled, [*largest, *others[:: len(others) // _OTHER_TENSORS + 1]])

    def written(self) -> bool:
        """Return whether a version counter of these tensors has changed since. Takes microseconds."""
        return any(
            tensor._version != version for tensor, version in zip(self.tensors, self._versions, strict=True)
        )

    def same_as(self, later: StateMarks) -> bool:
        """Return whether the State has not changed between these marks and `later`.

        Waits for the tensors' device.
        """
        return (
            self._addresses == later._addresses
            and self._versions == later._versions
            and bool(self.plain == later.plain)
            and all(
                torch.equal(one.view(torch.uint8), other.view(torch.uint8))
                for one, other in zip(self._elements, later._elements, strict=True)
            )
        )


class LargeState:
    """Restore one large TensorState of the script.

    Raises:
        RuntimeError: changes of this State cannot be recognised, see `StateMarks`.
        ValueError: its `state_dict` returns copies.
    """

    def __init__(self, state: checkpoint.TensorState) -> None:
        self._state = state
        self._began = StateMarks(state)
        if not self._began.same_as(StateMarks(state)):
            raise ValueError("its state_dict() returns other tensors at each call")
        self._copy: list[torch.Tensor] | None = None  # tensors as they were when the window began
        self._spare: list[torch.Tensor] | None = None  # memory of the last copy, used again
        self._changed_before_step = False
        self._windows = 0

    def begin_window(self) -> None:
        """Record marks of the State; copy it if the script is known to change it before the step."""
        self._began = StateMarks(self._state)
        self._copy = None
        self._windows += 1
        if self._changed_before_step:
            self._make_copy(self._began)

    def before_step(self) -> None:
        """Check whether the script has changed the State before `optimizer.step()`, which will step now."""
        if self._changed_before_step:
            return
        if self._windows <= _CHECKED_WINDOWS:
            self._changed_before_step = not self._began.same_as(StateMarks(self._state))
        else:
            self._changed_before_step = self._began.written()

    def step_left_out(self) -> None:
        """Copy the State at an `optimizer.step()` that does nothing, if it has not changed in this window."""
        if self._copy is None:
            now = StateMarks(self._state)
            if self._began.same_as(now):
                self._make_copy(now)

    def _make_copy(self, marks: StateMarks) -> None:
        kinds = [_kind(tensor) for tensor in marks.tensors]
        if self._spare is None or [_kind(tensor) for tensor in self._spare] != kinds:
            self._spare = [torch.empty_like(tensor) for tensor in marks.tensors]
        if marks.tensors:
            with torch.no_grad():
                torch._foreach_copy_(self._spare, [tensor.detach() for tensor in marks.tensors])
        self._copy = self._spare

    def can_be_put_back(self) -> bool:
        """Return whether the State has a copy, or has not changed."""
        return self._copy is not None or self._began.same_as(StateMarks(self._state))

    def put_back(self) -> None:
        """Restore the State to its value at the start of the window. May be called more than once."""
        if self._copy is not None:
            self._state.restore(fill(self._began.plain, iter(self._copy)))


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
