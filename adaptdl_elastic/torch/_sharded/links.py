"""Communicate for a sharded model whose parts have copies, and go on with zeros when a replica is lost.

torch's own hybrid sharding needs a mesh of two dimensions, in which every tensor of the model would live.
Here the parts of one copy are a mesh of one dimension, as without copies, and the copies of a part are a
group beside it: gradients are added up over the parts by torch, and over the copies by a hook behind that.

A collective that fails gives zeros once `absorb` is set, and so do all that follow it. The loop's body comes
to its end, the optimizer does not step, and the data loop begins the recovery.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from adaptdl_elastic._session import Session
from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch._process_group.backends import ARRIVES, Group, keep_object, present
from adaptdl_elastic.torch._sharded import fully_shard
from adaptdl_elastic.torch._sharded.layout import Layout


class Links:
    """The process groups of one sharded model in the present generation.

    Args:
        session: This process's session.

    Attributes:
        layout: How the replicas share the model.
        absorb: Whether a collective that fails gives zeros instead of raising.
        failure: Why a collective failed; None if none did.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        # as `fully_shard` makes it, and a newcomer keeps it until it joins
        self.layout = Layout(dist.get_world_size())
        self.absorb = False
        self.failure: BaseException | None = None
        self._parts: Any = None
        self._copies: Any = None

    def connect(self, layout: Layout, device: torch.device) -> Any:
        """Make the groups of a layout, and return torch's description of the mesh of its parts. A collective.

        Args:
            layout: The layout of the new generation.
            device: Device of the parameters.
        """
        self.layout, self.absorb, self.failure, self._copies = layout, False, None, None
        if layout.copies == 1:
            self._parts = None
            return fully_shard.mesh_info(device)
        if self._session.reducer is not None:
            # gloo does not wait long for a replica that is busy in its script
            self._session.reducer.barrier(tag="copies of parts")
        group, rank = self._group, dist.get_rank()
        rows = [range(copy * layout.parts, (copy + 1) * layout.parts) for copy in range(layout.copies)]
        # every replica takes part in making all of them, in the same order
        parts = [group.further([*ranks]) for ranks in rows]
        copies = [group.further(ranks) for ranks in layout.holders]
        self._parts, self._copies = parts[rank // layout.parts], copies[layout.part(rank)]
        return fully_shard.mesh_info(device, self._parts)

    @property
    def _group(self) -> Group:
        return present(self._session) or Group("")

    def run(self, collective: Callable[[], Any], result: torch.Tensor) -> None:
        """Carry out a collective that fills `result`; it is zero if this or an earlier one has failed.

        Args:
            collective: Begins it, and returns torch's `Work`.
            result: What it writes into.

        Raises:
            RuntimeError: it has failed, or an earlier one, where no data loop would notice it.
        """
        absorb = self.absorb and self._session.loader is not None
        if self.failure is None:
            work = None
            try:
                work = collective()
                if self._session.newcomer is None:
                    self._group.wait([work], ARRIVES)
            except RuntimeError as error:
                if self._session.transfer_stuck:
                    # it may still write into the memory
                    for one in (work, result, self._parts, self._copies):
                        keep_object(one)
                if not absorb:
                    raise
                self.failure = error
            else:
                return
        elif not absorb:
            raise PeerLostError(str(self.failure)) from self.failure
        result.zero_()

    def scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Add up `whole` over the replicas that hold one copy, and fill `part` with this replica's part.

        gloo does the same for a reduce-scatter, but copies the part only in `wait`, which has no end if a
        replica is lost.
        """
        self.run(lambda: dist.all_reduce(whole, group=self._parts, async_op=True), whole)
        part.copy_(whole.view(self.layout.parts, -1)[self.layout.part(dist.get_rank())].view_as(part))

    def add_copies(self, part: torch.Tensor) -> None:
        """Add up a tensor over the replicas that hold the same part, in place; nothing with one copy."""
        if self.layout.copies == 1:
            return
        self.run(lambda: dist.all_reduce(part, group=self._copies, async_op=True), part)
