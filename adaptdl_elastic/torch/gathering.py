"""Gather a tensor of all replicas, for a loss over the pairs of a batch (contrastive losses, triplets).

Replicas average their gradients by their shares p_r of the batch: ḡ = Σ p_r g_r. With the rows x_r of replica
r, and its loss L_r of the rows of all, the derivative by the gathered rows is Σ_r p_r ∂L_r/∂x. Replica s gets
its own rows of it, divided by p_s. So ḡ is the gradient of Σ p_r L_r: of L, if all compute the same loss, and
of its mean, if each computes that of its own rows against all.

If a peer dies in the call, the models' gradients are given up, and the data loop repeats the step.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed

from adaptdl_elastic._session import Session
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._process_group import backends

__all__ = ["gather"]

dist: Any = torch.distributed  # its stub does not export all of it


@torch._disable_dynamo  # type: ignore[attr-defined]
def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of all replicas' `tensor`, in the order of ranks. Derivatives flow back to all of them.

    A collective: call it on all replicas, in a data loop that trains or in `adl.steps`. The number of rows
    may differ between replicas. A batch that does not count adds its rows on its own replica only. If a
    replica dies meanwhile, the result is this replica's own rows, and the step is repeated.

    Args:
        tensor: Tensor of any type, with the samples in its first dimension.

    Raises:
        ValueError: rows of replicas differ in shape or type.
        TypeError: the tensor is a single number.
        RuntimeError: the data loop does not train, or a replica is gone and this one cannot survive that.
    """
    session = current_session()
    loader = session.loader
    if loader is not None and not (loader.training or loader.training_loader_undecided):
        raise RuntimeError(
            "adl.gather in a data loop that does not train, in which a replica may have no batch: use the "
            "tensor itself there, and add up by an Accumulator"
        )
    alone = session.replicas == 1 or session.dry or session.joining
    rows = None if alone else _meet(session, tensor)
    found: torch.Tensor = _Gather.apply(tensor, rows)  # type: ignore[no-untyped-call]
    return found


class _Rows(NamedTuple):
    """Hold which of the gathered rows are this replica's, the number of all that count, and its share."""

    session: Session
    own: slice
    counting: int
    share: float


def _meet(session: Session, tensor: torch.Tensor) -> _Rows | None:
    """Exchange the numbers of rows; return None if a peer is gone."""
    loader, rank, shape = session.loader, session.rank, tuple(tensor.shape[1:])
    counts = loader is None or loader.local_samples > 0
    weight = loader.gradient_weight if loader is not None and loader.training else float(counts)
    head = [len(tensor) * counts, weight, hash((shape, tensor.dtype.itemsize)) % 2**32]
    heads = torch.zeros(session.replicas, 3, dtype=torch.float64, device=tensor.device)
    heads[rank] = torch.tensor(head, dtype=torch.float64)
    if not _add_up(session, heads):
        return None
    rows, weights, kinds = heads.T.tolist()
    if len(set(kinds)) > 1:
        raise ValueError(f"adl.gather of rows of shape {list(shape)}, {tensor.dtype}, and others elsewhere")
    start = int(sum(rows[:rank]))
    own = slice(start, start + len(tensor))
    return _Rows(session, own, int(sum(rows)), weight / (sum(weights) or 1.0))


class _Gather(torch.autograd.Function):
    """Gather rows; on one replica a copy, which `loss_reduction` finds in the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rows: _Rows | None) -> torch.Tensor:
        ctx.rows, ctx.shape = rows, tensor.shape
        if rows is not None:
            found = tensor.new_zeros((max(rows.counting, rows.own.stop), *tensor.shape[1:]))
            found[rows.own] = tensor
            counting = found[: rows.counting]
            # bytes and zeros, added up: exact for tensors of any type
            if not counting.numel() or _add_up(rows.session, counting.view(torch.uint8)):
                return found
            ctx.rows = None
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), rows = gradients, ctx.rows
        if rows is None:
            return gradient, None
        # 16 bits are too few for a sum
        wide = gradient.float() if gradient.dtype.itemsize < 4 else gradient
        whole = (wide[: rows.counting] * rows.share).contiguous()
        if _add_up(rows.session, whole) and rows.share:
            return (whole[rows.own] / rows.share).to(gradient.dtype), None
        return gradient.new_zeros(ctx.shape), None


def _add_up(session: Session, tensor: torch.Tensor) -> bool:
    """Add up a tensor over the replicas; return False if a peer is gone, and the step will be repeated."""
    group, call = backends.present(session), partial(dist.all_reduce, tensor, async_op=True)
    try:
        if group is None:
            call().wait()
        else:
            group.wait([group.queue(call)], backends.ARRIVES)
    except RuntimeError as error:
        if not session.recovery.armed:
            raise
        for model in session.models:
            model.giving_up(str(error))()
        return False
    return True
