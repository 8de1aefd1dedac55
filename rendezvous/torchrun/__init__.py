"""The plug-in `adaptdl-etcd` for plain torchrun.

    torchrun --rdzv-backend=adaptdl-etcd --rdzv-endpoint=HOST:PORT --rdzv-id=JOB --nnodes=1:4 script.py

torch's own agent runs any script, and nodes may join and leave while it runs. There is no coordinator, no
goodput model, no warm start and no change in place: use `adaptdl-run` for those
(docs/howto/from-torchrun.md). torch loads this module while it imports its own rendezvous package, so this
module imports nothing of torch.

| question | module |
|---|---|
| Which agents are in a round? (pure) | `membership` |
| How does this node follow and write the store? | `roster` |
| How does torch's agent use it? | `handler`, `handler_options` |
| Where do the members of a round meet? | `gathering` |
| How does a program with a WorkerSpec run the agent of `adaptdl-run`? | `elastic_agent` |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "adaptdl-etcd"


class RefusedError(SystemExit, ValueError):
    """An option is invalid. torchrun lets this exception end the program, with one line and no traceback."""


def registration() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that torch calls to create a handler (entry-point group `torchrun.handlers`)."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return the handler for torchrun's arguments; it connects to the store at its first rendezvous."""
    from adaptdl_elastic.rendezvous.torchrun.handler import AdaptdlEtcdHandler

    try:
        return AdaptdlEtcdHandler(params)
    except ValueError as error:
        raise RefusedError(f"torchrun: error: {error}") from None
