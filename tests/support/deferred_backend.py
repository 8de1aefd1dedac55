"""A backend of torch.distributed on the CPU that behaves as NCCL does, over gloo.

Whoever asks a future or `wait` of a collective for an error gets none, ever; a collective whose peer has
died goes on for ever; `abort` ends whatever is under way, with garbage as its result. (That a future is
done means that this CPU, in place of a GPU's stream, has come to what follows the collective.) A group
holds the tensors of a collective until someone waits for it, and an aborted group is never freed.

`HELD` holds collectives back: (step, how many all-reduces of that step come before it). FAULT in
DEFERRED_FAULT breaks the backend: "hang" and "crash" do so in an abort, "once" lets no second group be
made.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from adaptdl_elastic import _session
from adaptdl_elastic.torch._process_group import backends

HELD: set[tuple[int, int]] = set()
FAULT = os.environ.get("DEFERRED_FAULT")
_groups: list[DeferredGroup] = []  # never freed: gloo may have lost an operation
_before: tuple[int, int] = (-1, 0)  # step, and all-reduces that have begun in it


class DeferredWork(dist._Work):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors, self._ended = tensors, threading.Event()
        self.shelf = list(tensors)  # the group holds it, too
        self._future: Any = torch.futures.Future()
        self._lock = threading.Lock()

    def end(self, finish: Callable[[torch.Tensor, int], None]) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            for index, tensor in enumerate(self.tensors):
                finish(tensor, index)
            self._ended.set()
        self._future.set_result(self.tensors)

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._ended.wait(timeout.total_seconds() or None)
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self.shelf.clear()

    def get_future(self) -> Any:
        return self._future


class DeferredGroup(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        if FAULT == "once" and _groups:
            raise RuntimeError("a second group cannot be made")
        self._lower = backends.Gloo("gloo")
        self._lower.forming()
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._size = size
        self._lower.formed(None)
        self._works: list[DeferredWork] = []
        self._shelves: list[list[torch.Tensor]] = []
        self._todo: queue.SimpleQueue[tuple[DeferredWork, Any, bool] | None] = queue.SimpleQueue()
        self._aborted = False
        self._lock = threading.Lock()
        _groups.append(self)
        threading.Thread(target=self._work, name="deferred", daemon=True).start()

    def _work(self) -> None:
        lost = False
        while (item := self._todo.get()) is not None:
            work, start, held = item
            copies = [tensor.clone() for tensor in work.tensors]
            try:
                start(copies).wait()
            except RuntimeError:
                lost = True
                continue  # it never ends, and nobody is told
            if not held:
                work.end(lambda tensor, index, copies=copies: tensor.copy_(copies[index]))
            del start  # it holds the group
        if not lost:
            self._gloo = None

    def _begin(self, tensors: list[torch.Tensor], start: Any, held: bool = False) -> DeferredWork:
        with self._lock:
            if self._aborted:
                raise dist.DistBackendError("the communicator was aborted")
            work = DeferredWork([tensor.detach() for tensor in tensors])
            self._works = [one for one in self._works if not one.is_completed()] + [work]
            self._shelves = [one for one in self._shelves if one] + [work.shelf]
            self._todo.put((work, start, held))
        return work

    def abort(self) -> None:
        if FAULT == "hang":
            threading.Event().wait()
        if FAULT == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        with self._lock:
            self._aborted, works, self._works = True, self._works, []
        for work in works:
            work.end(_garble)
        self._lower.abort()
        self._todo.put(None)

    def shutdown(self) -> None:
        self.abort()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> DeferredWork:
        global _before
        step = _session.current().step
        _before = (step, _before[1] + 1) if _before[0] == step else (step, 0)
        options = opts if opts is not None else dist.AllreduceOptions()
        return self._begin(tensors, lambda copies: self._gloo.allreduce(copies, options), _before in HELD)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> DeferredWork:
        options = opts if opts is not None else dist.BroadcastOptions()
        return self._begin(tensors, lambda copies: self._gloo.broadcast(copies, options))

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        (into,), (own,) = outputs, inputs
        return self._begin(into, lambda copies: self._gloo.allgather([copies], [own]))

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> DeferredWork:
        return self._begin(tensors, lambda copies: self._gloo.send(copies, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> DeferredWork:
        return self._begin(tensors, lambda copies: self._gloo.recv(copies, peer, tag))

    def barrier(self, opts: Any = None) -> DeferredWork:
        return self.allreduce([torch.zeros(1)])

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "deferred"


def _garble(tensor: torch.Tensor, _: int) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))


class Deferred(backends.Nccl):
    """The adapter for NCCL, told that its devices are the CPU."""

    kind, label = "cpu", "the deferred backend"

    @classmethod
    def fingerprint(cls) -> str:
        return f"deferred {FAULT}"

    @classmethod
    def devices(cls) -> list[torch.device]:
        return [torch.device("cpu")] * int(os.environ.get("DEFERRED_DEVICES", "2"))

    @classmethod
    def place(cls) -> None:
        pass

    @classmethod
    def training_device(cls) -> torch.device:
        return torch.device("cpu")


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> DeferredGroup:
    return DeferredGroup(store, rank, size, timeout)


dist.Backend.register_backend("deferred", _create, devices=["cpu"])
backends.KINDS["deferred"] = Deferred
