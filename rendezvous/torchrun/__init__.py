"""The plug-in `adaptdl-etcd` for plain torchrun.

    torchrun --rdzv-backend=adaptdl-etcd --rdzv-endpoint=HOST:PORT --rdzv-id=JOB --nnodes=1:4 script.py

Torch's own agent runs any script; nodes join and leave while it does. There is no coordinator, no goodput,
no warm start and no move in place this way: see docs/bare-metal.md, and `adaptdl-run` for those.

This module is loaded while torch imports its rendezvous package, so it imports nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "adaptdl-etcd"


class RefusedError(SystemExit, ValueError):
    """The options can not be used. torchrun lets it end the program: with one line, and no traceback."""


def registration() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """For the entry-point group `torchrun.handlers`."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler that torchrun's arguments ask for; it connects at its first rendezvous."""
    from adaptdl_elastic.rendezvous.torchrun.handler import AdaptdlEtcdHandler

    try:
        return AdaptdlEtcdHandler(params)
    except ValueError as error:
        raise RefusedError(f"torchrun: error: {error}") from None
