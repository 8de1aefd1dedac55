"""Use process groups of NCCL."""

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

from adaptdl_elastic import _program, env
from adaptdl_elastic._session import Session
from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch._process_group.backends.base import ARRIVES, Group, keep, patiently
from adaptdl_elastic.torch._process_group.backends.gloo import Gloo

dist: Any = torch.distributed  # its stub does not export all of it
log = logging.getLogger(__name__)

_TRANSFER = timedelta(seconds=60)  # time limit for sending one tensor to another replica
ABORT_SECONDS = 60.0
"""Seconds that an abort may take before the process is ended."""
_LAUNCH = 1.0  # seconds that a thread may take to enqueue a collective before it is aborted all the same
_DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# checks for the end of a collective without a pause; then seconds between two checks
_SPIN, _PAUSE = 50, 0.00005


class Nccl(Group):
    """Use a group of NCCL, possibly with gloo for tensors of the host ("cuda:nccl,cpu:gloo").

    Whether a collective is complete is asked of the GPU, and counts only if the group had not been aborted by
    then, since an abort ends it, too. So only this library may abort, and torch's watchdog is configured not
    to.
    """

    completion_is_unreliable = tested = True

    kind = "cuda"
    """Type of the devices that it works on."""

    label = "NCCL"

    variables = {  # noqa: RUF012
        # 0: errors and time limits are left to this library. 1 and 3 end the process; 2 aborts by itself.
        _HANDLING: "0",
        # otherwise a thread of torch makes every process write a dump, and then ends it
        _DUMP: "0",
        # the watchdog sleeps four times as long after an error, once for each pending operation
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    }
    """Environment variables that torch must find when it makes a group."""

    def __init__(self, backend: str, session: Session | None = None) -> None:
        super().__init__(backend, session)
        self._group: Any = None
        self._beside = Gloo(backend, session) if "gloo" in backend else None
        self._lock, self._queueing = threading.Lock(), threading.Lock()
        self._aborting: threading.Thread | None = None
        self._hung_up = False
        # collectives whose tensors torch may hold
        self._works: list[Any] = []

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
        """Return what the result of a self-test depends on."""
        driver = Path("/proc/driver/nvidia/version")
        return "\n".join(
            [
                f"adaptdl-elastic {_program.version()}",
                f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {_nccl_version()}",
                # without their number: jobs see different numbers of the same devices
                ", ".join(sorted({torch.cuda.get_device_name(device) for device in cls.devices()})),
                driver.read_text() if driver.exists() else "no driver",
            ]
        )

    @classmethod
    def devices(cls) -> list[torch.device]:
        """Return the devices that the self-test may use."""
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
        # Otherwise a thread of torch calls the store, whose signatures are Python code, even while the
        # process ends.
        os.environ.setdefault(_DUMP, self.variables.get(_DUMP, "0"))
        if self._beside is not None:
            self._beside.forming()

    @override
    def formed(self, patience: timedelta | None) -> None:
        self._group = dist.group.WORLD
        if self._beside is not None:
            self._beside.formed(patience)
        if patience is not None:
            # NCCL connects at the first collective. That must not be in the middle of a step, where after a
            # death nothing would wake the thread. There will be only one communicator.
            patiently(self.session, self, lambda: self.first_collective(patience), patience)

    def first_collective(self, patience: timedelta) -> None:
        """Make the communicator, together with all other replicas."""
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
            self._hung_up = True  # before the abort: operations that end because of it must not count
            self._aborting = threading.Thread(target=self._abort, name="adaptdl-abort", daemon=True)
            self._aborting.start()
        if self._beside is not None:
            self._beside.abort()

    @property
    @override
    def is_aborted(self) -> bool:
        return self._hung_up

    def _abort(self) -> None:
        # NCCL frees memory that a thread that is enqueueing still uses; a thread blocked by the GPU is not
        # waited for longer.
        queueing = self._queueing.acquire(timeout=_LAUNCH)
        try:
            self._group.abort()
        except RuntimeError as error:
            log.warning("aborting a group of %s: %s", self.label, error)
            # the device may still use their tensors, which therefore stay with torch
            self._works = []
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
        """Abort, and wait for its end; return False if it takes longer than `limit` seconds."""
        self.abort()
        if self._aborting is not None:
            self._aborting.join(ABORT_SECONDS if limit is None else limit)
            return not self._aborting.is_alive()
        return True

    def _end_process(self) -> None:
        # neither this process nor a normal exit can rely on the device any more
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
        self._release(aborted=True)
        keep()
        # the group is aborted: only remove torch's references
        torch.distributed.distributed_c10d._abort_process_group()

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
                work.wait()  # it has ended: this raises its error
        if self._hung_up:
            raise PeerLostError("a replica is gone")

    @override
    def queue(self, collective: Callable[[], Any]) -> Any:
        with self._queueing:
            if self._hung_up:
                raise PeerLostError("a replica is gone")
            self._release(aborted=False)
            begun = collective()
            self._works += begun if isinstance(begun, list) else [begun]
            return begun

    def _release(self, aborted: bool) -> None:
        """Let torch free the tensors of collectives that have ended: of all of them after an abort.

        Torch's group holds the tensors of a collective until someone waits for it, and a group that was
        aborted is never freed. `synchronize` frees them without raising the collective's error. Before that
        it lets the current stream wait for the event behind the collective's kernel, so the allocator gives
        their memory to nothing on this stream that runs before that kernel has ended. After an abort a tensor
        may belong to another stream, so the device is waited for first: then no kernel reads it any more.
        """
        works, self._works = self._works, []
        if aborted and works:
            self.synchronize()
        for work in works:
            if aborted or work.is_completed():
                work.synchronize()
            else:
                self._works.append(work)

    @override
    def send(self, flat: torch.Tensor, peer: int, turn: timedelta = ARRIVES) -> None:
        self._exchange(dist.isend, flat, peer)

    @override
    def receive(self, flat: torch.Tensor, peer: int, turn: timedelta = ARRIVES) -> None:
        self._exchange(dist.irecv, flat, peer)

    def _exchange(self, operation: Any, flat: torch.Tensor, peer: int) -> None:
        # A batch, even of one: otherwise torch makes a communicator for these two ranks, which would have to
        # be aborted, too.
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
            torch.cuda.current_stream().synchronize()  # this thread's stream is not the training thread's


def _nccl_version() -> Any:
    version: Any = torch.cuda.nccl.version
    return version()
