"""Groups of NCCL."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from typing_extensions import override

from adaptdl_elastic import env
from adaptdl_elastic._session import Session
from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch._process_group.backends.base import Group, keep, patiently
from adaptdl_elastic.torch._process_group.backends.gloo import Gloo

dist: Any = torch.distributed  # its stub does not export all of it
log = logging.getLogger(__name__)

_TRANSFER = timedelta(seconds=60)  # that one tensor may take from one replica to another
ABORT_SECONDS = 60.0
"""How long an abort may take before the process ends."""
_LAUNCH = 1.0  # seconds that a thread may take to queue a collective, before it is aborted all the same
_DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_SPIN, _PAUSE = 50, 0.00005  # looks without a pause at whether a collective has ended, then seconds between


class Nccl(Group):
    """NCCL, also with gloo beside it for tensors of the host ("cuda:nccl,cpu:gloo").

    Whether a collective has arrived is asked of the GPU, and counts only if nobody had hung up by then:
    an abort ends it as well. So nobody but us may abort, and torch's watchdog is told to leave it alone.
    """

    completion_is_unreliable = tested = True

    kind = "cuda"
    """The type of the devices it works on."""

    label = "NCCL"

    variables = {  # noqa: RUF012
        # 0: errors and time limits are left to us. 1 and 3 end the process; 2 aborts behind our back.
        _HANDLING: "0",
        # Else a thread of torch's has every process write what it was doing, and ends it afterwards.
        _DUMP: "0",
        # The watchdog sleeps four times as long after an error, once for each operation under way.
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    }
    """What torch must find in the environment when it makes a group."""

    def __init__(self, backend: str, session: Session | None = None) -> None:
        super().__init__(backend, session)
        self._group: Any = None
        self._beside = Gloo(backend, session) if "gloo" in backend else None
        self._lock, self._queueing = threading.Lock(), threading.Lock()
        self._aborting: threading.Thread | None = None
        self._hung_up = False

    @classmethod
    @override
    def place(cls) -> None:
        slot, chosen = env.local_rank(), torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not chosen and slot < torch.cuda.device_count():
            torch.cuda.set_device(slot)

    @classmethod
    @override
    def training_device(cls) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @classmethod
    @override
    def prepare(cls) -> None:
        for name, value in cls.variables.items():
            os.environ.setdefault(name, value)

    @classmethod
    @override
    def why_not(cls, session: Session) -> str | None:
        found = os.environ.get(_HANDLING)
        if _HANDLING in cls.variables and found != cls.variables[_HANDLING]:
            return f"{_HANDLING}={found} has torch abort, or end the process, by itself: leave it unset"
        for model in session.models:
            if any(parameter.device.type != cls.kind for parameter in model.module.parameters()):
                return f"a part of the model {model.name!r} is not on a {cls.kind} device"
        return None

    @classmethod
    def fingerprint(cls) -> str:
        """What the result of a self-test holds for."""
        driver = Path("/proc/driver/nvidia/version")
        return "\n".join(
            [
                f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {_nccl_version()}",
                driver.read_text() if driver.exists() else "no driver",
                *(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
            ]
        )

    @classmethod
    def devices(cls) -> list[torch.device]:
        """What the self-test may use."""
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]

    @property
    @override
    def device(self) -> torch.device:
        models = [] if self.session is None else self.session.models
        for model in models:
            for parameter in model.module.parameters():
                found: torch.device = parameter.device
                return found
        return self.training_device()

    @override
    def forming(self) -> None:
        # Else a thread of torch's asks the store, whose signatures are Python's, also while the process ends.
        os.environ.setdefault(_DUMP, self.variables.get(_DUMP, "0"))
        if self._beside is not None:
            self._beside.forming()

    @override
    def formed(self, patience: timedelta | None) -> None:
        self._group = dist.group.WORLD
        if self._beside is not None:
            self._beside.formed(patience)
        if patience is not None:
            # The first collective is when NCCL connects: not in the middle of a step, where a death
            # would find a thread in it that nothing wakes. One communicator is all there will be.
            patiently(self.session, self, lambda: self.first_collective(patience), patience)

    def first_collective(self, patience: timedelta) -> None:
        """Make the communicator, with all others."""
        one = torch.zeros(1, device=self.device)
        self.wait([self.queue(lambda: dist.all_reduce(one, async_op=True))], patience)

    @override
    def restore_timeouts(self) -> None:
        if self._beside is not None:
            self._beside.restore_timeouts()

    @override
    def abort(self) -> None:
        with self._lock:
            if self._hung_up or self._group is None:
                return
            self._hung_up = True  # before the abort: what ends because of it must not count
            self._aborting = threading.Thread(target=self._abort, name="adaptdl-abort", daemon=True)
            self._aborting.start()
        if self._beside is not None:
            self._beside.abort()

    @property
    @override
    def is_aborted(self) -> bool:
        return self._hung_up

    def _abort(self) -> None:
        # NCCL frees what a thread that is just queueing works with; one that the GPU holds up waits for us.
        queueing = self._queueing.acquire(timeout=_LAUNCH)
        try:
            self._group.abort()
        except RuntimeError as error:
            log.warning("aborting a group of %s: %s", self.label, error)
        finally:
            if queueing:
                self._queueing.release()

    @override
    def unblock(self) -> None:
        self.abort()

    @override
    def abort_and_drain(self) -> None:
        if not self.aborted():
            self._end_process()

    def aborted(self, limit: float | None = None) -> bool:
        """Hang up, and wait until that is done; False: it takes longer than `limit` seconds."""
        self.abort()
        if self._aborting is not None:
            self._aborting.join(ABORT_SECONDS if limit is None else limit)
            return not self._aborting.is_alive()
        return True

    def _end_process(self) -> None:
        # Neither this process nor an orderly exit can count on the device any more.
        message = f"aborting {self.label}'s communicator takes more than {ABORT_SECONDS:.0f} s"
        print(f"{message}: this replica ends, to restart from the last checkpoint", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    @override
    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @override
    def destroy(self) -> None:
        if not dist.is_initialized() or dist.group.WORLD is not self._group:
            return
        self.abort_and_drain()
        keep()
        torch.distributed.distributed_c10d._abort_process_group()  # of what is aborted: forget it

    @override
    def wait(self, works: Sequence[Any], limit: timedelta) -> None:
        deadline, looks = time.monotonic() + limit.total_seconds(), 0
        for work in works:
            while not work.is_completed():
                if self._hung_up:
                    raise PeerLostError("a replica is gone")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"a collective of {self.label} took more than {limit}")
                looks += 1
                time.sleep(0.0 if looks < _SPIN else _PAUSE)
        if not self._hung_up:
            for work in works:
                work.wait()  # it has ended: this raises what it ended with
        if self._hung_up:
            raise PeerLostError("a replica is gone")

    @override
    def queue(self, collective: Callable[[], Any]) -> Any:
        with self._queueing:
            if self._hung_up:
                raise PeerLostError("a replica is gone")
            return collective()

    @override
    def send(self, flat: torch.Tensor, peer: int) -> None:
        self._exchange(dist.isend, flat, peer)

    @override
    def receive(self, flat: torch.Tensor, peer: int) -> None:
        self._exchange(dist.irecv, flat, peer)

    def _exchange(self, operation: Any, flat: torch.Tensor, peer: int) -> None:
        # As a batch, even of one: else torch makes a communicator for the two of them, and one more to abort.
        batch = [dist.P2POp(operation, flat, peer)]
        self.wait(self.queue(lambda: dist.batch_isend_irecv(batch)), _TRANSFER)

    @contextlib.contextmanager
    @override
    def here(self) -> Iterator[None]:
        device = self.device
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            yield
            torch.cuda.current_stream().synchronize()  # its stream is not the one that training goes on in


def _nccl_version() -> Any:
    version: Any = torch.cuda.nccl.version
    return version()
