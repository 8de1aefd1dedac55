"""Find out from the autograd graph whether a loss is a sum over the samples of a batch, or compares them.

Replicas average their gradients. If the loss is a mean over the samples, the average is the gradient of the
whole batch, on any number of replicas. If it is a sum, the average is smaller the more replicas there are,
and accumulation changes it as well. The graph is read once, before the first backward pass of a model. A sum
that is divided, or weighted sample by sample, may be a mean, and is not reported.

A product of two matrices that both depend on the samples has rows of one sample and columns of another, or is
a sum over the samples. So is a matrix of distances, and a quotient of two sums. Such a loss depends on the
samples that one replica has, unless it is one of gathered rows (`adl.gather`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.autograd.graph import Node

from adaptdl_elastic import _frames
from adaptdl_elastic.torch._gradient.accumulation import tensors_with_gradients

_ADDED = ("Neg", "Add", "Sub", "Clone", "Alias", "View", "Squeeze", "ToCopy")
"""Beginnings of names of nodes above a sum that leave it a sum."""

_GATHERED = "_Gather"
"""Beginning of the name of the node of `adl.gather`, above which the samples are those of all replicas."""

_DIVIDED = ("Div", "Mean", "Std", "Var", _GATHERED)
"""Beginnings of names of nodes that may make a sum a mean."""

_PRODUCTS = ("Mm", "Bmm", "Cdist", "EuclideanDist")
"""Beginnings of names of nodes whose result has a row for each row of one input and of another."""

_MEAN, _SUM = 1, 2
"""Values of a loss function's `_saved_reduction`."""

_MOST_NODES = 1000
"""Most nodes between a sum and the output that are looked at."""


def examine(output: Any, samples: int, report: Callable[[str], None]) -> Callable[[Any], None] | None:
    """Return a function that calls `report` if a loss sums or compares the samples of `output`.

    Args:
        output: Output of a model that is trained, in a structure of torch's pytree.
        samples: Samples in the batch, more than 1.
        report: Takes a line that says what is wrong and what to do.

    Returns:
        A function of the first argument of `torch.autograd.backward`, to be called before the backward pass;
        None if the output has no graph.
    """
    outputs = {tensor.grad_fn for tensor in tensors_with_gradients(output) if tensor.grad_fn is not None}

    def look(losses: Any) -> None:
        # the nodes are torch's own, and another version may name their attributes differently
        with contextlib.suppress(Exception):
            roots = [one.grad_fn for one in (losses if isinstance(losses, tuple | list) else [losses])]
            if (name := _find_sum([*roots], outputs, samples)) is not None:
                report(
                    f"the loss of {_frames.script_line()} is a sum over the samples of a batch ({name}), so "
                    f"its gradient depends on the number of replicas: divide it by len(batch), or give the "
                    f"loss function reduction='mean'"
                )
            elif samples > 1 and (name := _find_pairs(roots, outputs, samples)) is not None:
                report(
                    f"the loss of {_frames.script_line()} compares the samples of a batch with each other "
                    f"({name}), so it depends on how many of them a replica has: compute it of "
                    f"adl.gather(output), which has the rows of all replicas"
                )

    return look if outputs else None


def _find_sum(left: list[Any], outputs: set[Any], samples: int) -> str | None:
    """Return the name of a node that sums over the samples of `outputs`; None if there is none."""
    while left:
        node = left.pop()
        name, below = node.name(), [follower for follower, _ in node.next_functions if follower]
        sizes: tuple[int, ...] = getattr(node, "_saved_self_sym_sizes", None) or ()
        summed = name == "SumBackward0" and len(sizes) > 0 and sizes[0] % samples == 0
        reduced = getattr(node, "_saved_reduction", None) == _SUM
        if summed or (reduced and getattr(node, "_saved_weight", None) is None):
            if _reaches(below, outputs, samples):
                return str(name).removesuffix("0").removesuffix("Backward")
        elif name.startswith(_ADDED) or (name.startswith("Mul") and _keeps(node, samples)):
            left += below
    return None


def _keeps(node: Node, samples: int) -> bool:
    """Return whether a sum stays one behind `node`, which does not divide it by the number of samples."""
    name, edges = node.name(), list(node.next_functions)
    if name.startswith(_DIVIDED) or getattr(node, "_saved_reduction", None) == _MEAN:
        return False
    if name != "MulBackward0" or all(edge[0] for edge in edges):
        return True
    factor = getattr(node, "_saved_other" if edges[0][0] else "_saved_self")
    return bool(factor.numel() == 1 and float(factor) >= 2 / samples)


def _reaches(left: list[Node], outputs: set[Any], samples: int) -> bool:
    """Return whether one of `outputs` follows one of the nodes `left` by nodes that keep a sum."""
    seen: set[Node] = set()
    while left and len(seen) < _MOST_NODES:
        node = left.pop()
        if node in outputs:
            return True
        if node not in seen and _keeps(node, samples):
            seen.add(node)
            left += [follower for follower, _ in node.next_functions if follower]
    return False


def _find_pairs(roots: list[Any], outputs: set[Any], samples: int) -> str | None:
    """Return the name of a node that compares the samples of `outputs`; None if there is none."""
    for node in _walk(roots, outputs):
        name, shape = node.name(), node._input_metadata[0].shape
        if name.startswith(_PRODUCTS):
            mixes = len(shape) == 2 or shape[0] == 1
        else:  # a quotient of two numbers of the batch
            mixes = name.startswith("Div") and all(size % samples for size in shape)
        edges = [follower for follower, _ in node.next_functions[:2]]
        if mixes and all(e and not outputs.isdisjoint(_walk([e], outputs)) for e in edges) and edges[1:]:
            return str(name).removesuffix("0").removesuffix("Backward")
    return None


def _walk(left: list[Any], ends: set[Any]) -> Iterator[Any]:
    """Yield the nodes from `left` down to `ends` and to gathered rows, the nearest first."""
    left, seen = [*left], set[Any]()
    for node in left:
        if node in seen or len(seen) > _MOST_NODES:
            continue
        seen.add(node)
        yield node
        if node not in ends and not node.name().startswith(_GATHERED):
            left += [follower for follower, _ in node.next_functions if follower]
