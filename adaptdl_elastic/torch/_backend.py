"""What differs between torch's backends when a group breaks, ends, and has done its work.

*A peer dies.* gloo: a collective raises, soon (its sockets are closed), or never ends. NCCL: nobody may
say anything for minutes. *The result of a collective is there.* gloo: when its future or `wait` ends. NCCL:
these end when it is queued, for the GPU to wait; whether it has arrived is asked of an event on the GPU
(`is_completed`). *To hang up.* gloo: shut its sockets down. NCCL: abort the communicator, which ends all
that is queued, with whatever is in memory then. *To leave a group that is in order.* gloo: destroy it.
NCCL: abort it, since that waits for no peer, and is what the self-test has tried. *To free a group that is
not.* gloo: never, if it has lost an operation, because its destructor would wait for that. NCCL: never,
because its destructor waits for threads that look at every operation that has failed.

Everything else of this library knows a group as a `Group`, one for each generation of a process. What is
said of NCCL is from the source of torch (ProcessGroupNCCL.cpp, 2.9 and later) and NCCL's documentation.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from adaptdl_elastic import env
from adaptdl_elastic._session import Session
from adaptdl_elastic.reducer import PeerLostError

dist: Any = torch.distributed  # its stub does not export all of it
log = logging.getLogger(__name__)

ARRIVES = timedelta(minutes=10)
"""How long a gradient may be on its way: torch's time limit of NCCL's collectives."""

_CONNECT = timedelta(seconds=3)  # each of the five times that gloo tries to reach one that may be dead
_TRANSFER = timedelta(seconds=60)  # that one tensor may take from one replica to another
_ABORT = 60.0  # seconds that an abort may take
_LAUNCH = 1.0  # seconds that a thread may take to queue a collective, before it is aborted all the same
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_SPIN, _PAUSE = 50, 0.00005  # looks without a pause at whether a collective has ended, then seconds between
_LOOK, _GRACE = 0.05, 0.2  # seconds between looks for a death; that a transfer has to end by itself then


class Group:
    """Torch's default group of one generation of this process; as such, of a backend that nobody knows.

    Args:
        backend: As `torch.distributed.init_process_group` was given it.
        session: Whose; None: of nobody who could lose a peer (the self-test).
    """

    early = False
    """Whether futures of collectives are done before their results are there."""

    tested = False
    """Whether changes in place must wait for the self-test."""

    def __init__(self, backend: str, session: Session | None = None) -> None:
        self.backend, self.session = backend, session

    @classmethod
    def place(cls) -> None:
        """Have this process use the device of its slot, unless the script has chosen one."""

    @classmethod
    def training_device(cls) -> torch.device:
        """Where a script with this backend most likely trains."""
        return torch.device("cpu")

    @classmethod
    def prepare(cls) -> None:
        """Set what the first group of a process must find that may change in place."""

    @classmethod
    def why_not(cls, session: Session) -> str | None:
        """Why such groups can not be made anew within a process of this script; None: they can."""
        known = "only groups of gloo and of NCCL are known to be re-made safely"
        return f"the backend is {session.backend}: {known}"

    @property
    def limits(self) -> dict[str, Any]:
        """Arguments for `init_process_group` where the others may be gone already."""
        return {}

    @property
    def device(self) -> torch.device:
        """Where what is sent must be, and where what is received arrives."""
        return torch.device("cpu")

    def forming(self) -> None:
        """Torch's group is about to be made."""

    def formed(self, patience: timedelta | None) -> None:
        """It has been made; `patience` is set where the others may be gone already.

        Raises RuntimeError when they are.
        """

    def relax(self) -> None:
        """All are there and have what they need: torch's own time limits from now on."""

    def hang_up(self) -> None:
        """Make every operation of the group end, here and at its other ends. From any thread."""

    @property
    def hung_up(self) -> bool:
        """Whether `hang_up` has begun: what ends from then on has not arrived, whatever it says."""
        return False

    def interrupt(self) -> None:
        """Let a transfer go on that waits for somebody who is gone."""

    def clear(self) -> None:
        """Hang up, and return when nothing of the group writes into anybody's memory any more."""
        self.hang_up()

    def quiesce(self) -> None:
        """Wait for what this replica has queued. All do it, then meet, then `leave`."""

    def leave(self) -> None:
        """Have no default group any more, whatever state it is in."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def wait(self, works: Sequence[Any], limit: timedelta) -> None:
        """Until the results of all `works` are there.

        Raises RuntimeError: one failed or took too long, or somebody has hung up.
        """
        for work in works:
            work.wait(limit)

    def queue(self, collective: Callable[[], Any]) -> Any:
        """`collective()`, which must not fall into the middle of hanging up."""
        return collective()

    def send(self, flat: torch.Tensor, peer: int) -> None:
        """Send a tensor on `device`; returns when it has been sent. RuntimeError: as `wait`."""
        dist.send(flat, peer)

    def receive(self, flat: torch.Tensor, peer: int) -> None:
        """Receive into a tensor on `device`, and have it there. RuntimeError: as `wait`."""
        dist.recv(flat, peer)

    def here(self) -> contextlib.AbstractContextManager[Any]:
        """For a thread that transfers: as the training thread has it."""
        return contextlib.nullcontext()


class Gloo(Group):
    """gloo: its sockets are remembered, because it can not be told to give up.

    Shutting them down is the only way to end a collective whose peer is another replica that waits in
    vain itself.
    """

    def __init__(self, backend: str, session: Session | None = None) -> None:
        super().__init__(backend, session)
        self._before: set[tuple[int, str]] = set()
        self._sockets: set[tuple[int, str]] = set()

    @classmethod
    def why_not(cls, session: Session) -> str | None:
        return None

    @property
    def limits(self) -> dict[str, Any]:
        return {"timeout": _CONNECT}

    def forming(self) -> None:
        self._before = _sockets()

    def formed(self, patience: timedelta | None) -> None:
        if patience is not None:
            _set_timeout(patience)
        self._sockets = _sockets() - self._before

    def relax(self) -> None:
        _set_timeout(dist.default_pg_timeout)

    def hang_up(self) -> None:
        ours, self._sockets = self._sockets, set()
        for descriptor, inode in ours & _sockets():
            try:
                with socket.socket(fileno=os.dup(descriptor)) as one:
                    if _inode(one.fileno()) == inode and one.getpeername():
                        one.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed a moment ago, or a listening one: gloo does not survive its end
                continue


class Nccl(Group):
    """NCCL, also with gloo beside it for tensors of the host ("cuda:nccl,cpu:gloo").

    Whether a collective has arrived is asked of the GPU, and counts only if nobody had hung up by then:
    an abort ends it as well. So nobody but us may abort, and torch's watchdog is told to leave it alone.
    """

    early = tested = True

    kind = "cuda"
    """The type of the devices it works on."""

    label = "NCCL"

    variables = {  # noqa: RUF012
        # 0: errors and time limits are left to us. 1 and 3 end the process; 2 aborts behind our back.
        _HANDLING: "0",
        # Else a thread of torch's has every process write what it was doing, and ends it afterwards.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
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
    def place(cls) -> None:
        slot, chosen = env.local_rank(), torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not chosen and slot < torch.cuda.device_count():
            torch.cuda.set_device(slot)

    @classmethod
    def training_device(cls) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def prepare(cls) -> None:
        for name, value in cls.variables.items():
            os.environ.setdefault(name, value)

    @classmethod
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
    def device(self) -> torch.device:
        models = [] if self.session is None else self.session.models
        for model in models:
            for parameter in model.module.parameters():
                found: torch.device = parameter.device
                return found
        return self.training_device()

    def forming(self) -> None:
        if self._beside is not None:
            self._beside.forming()

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

    def relax(self) -> None:
        if self._beside is not None:
            self._beside.relax()

    def hang_up(self) -> None:
        with self._lock:
            if self._hung_up or self._group is None:
                return
            self._hung_up = True  # before the abort: what ends because of it must not count
            self._aborting = threading.Thread(target=self._abort, name="adaptdl-abort", daemon=True)
            self._aborting.start()
        if self._beside is not None:
            self._beside.hang_up()

    @property
    def hung_up(self) -> bool:
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

    def interrupt(self) -> None:
        self.hang_up()

    def clear(self) -> None:
        if not self.aborted():
            self._end_process()

    def aborted(self, limit: float = _ABORT) -> bool:
        """Hang up, and wait until that is done; False: it takes longer than `limit` seconds."""
        self.hang_up()
        if self._aborting is not None:
            self._aborting.join(limit)
            return not self._aborting.is_alive()
        return True

    def _end_process(self) -> None:
        # Neither this process nor an orderly exit can count on the device any more.
        message = f"aborting {self.label}'s communicator takes more than {_ABORT:.0f} s"
        print(f"{message}: this replica ends, to restart from the last checkpoint", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    def quiesce(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def leave(self) -> None:
        if not dist.is_initialized() or dist.group.WORLD is not self._group:
            return
        self.clear()
        keep()
        torch.distributed.distributed_c10d._abort_process_group()  # of what is aborted: forget it

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

    def queue(self, collective: Callable[[], Any]) -> Any:
        with self._queueing:
            if self._hung_up:
                raise PeerLostError("a replica is gone")
            return collective()

    def send(self, flat: torch.Tensor, peer: int) -> None:
        self._exchange(dist.isend, flat, peer)

    def receive(self, flat: torch.Tensor, peer: int) -> None:
        self._exchange(dist.irecv, flat, peer)

    def _exchange(self, operation: Any, flat: torch.Tensor, peer: int) -> None:
        # As a batch, even of one: else torch makes a communicator for the two of them, and one more to abort.
        batch = [dist.P2POp(operation, flat, peer)]
        self.wait(self.queue(lambda: dist.batch_isend_irecv(batch)), _TRANSFER)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        device = self.device
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            yield
            torch.cuda.current_stream().synchronize()  # its stream is not the one that training goes on in


KINDS: dict[str, type[Group]] = {"gloo": Gloo, "nccl": Nccl}
"""By torch's name of the backend."""


def kind(backend: Any) -> type[Group]:
    """Which `Group` a backend needs, as `init_process_group` takes it: "nccl", "cpu:gloo,cuda:nccl"."""
    names = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}
    main = names - {"gloo"} or names
    return KINDS.get(main.pop(), Group) if len(main) == 1 else Group


def _nccl_version() -> Any:
    version: Any = torch.cuda.nccl.version
    return version()


def present(session: Session) -> Group | None:
    """This process's group of the present generation; None: torch's was made by the script."""
    found = session.group
    assert found is None or isinstance(found, Group)
    return found


def keep() -> None:
    """Never free the present default group: its destructor would wait, maybe for ever."""
    if dist.is_initialized():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))


def patiently(
    session: Session | None,
    group: Group | None,
    transfer: Callable[[], None],
    limit: timedelta | None = None,
) -> None:
    """Run `transfer`, unless somebody dies meanwhile, or it takes longer than `limit`.

    In a thread, because gloo does not notice when the other end dies in the middle of a tensor: then the
    thread is left to torch's time limit, and its group must never be freed. RuntimeError: what `transfer`
    raises, the loss of a replica, or the limit.
    """
    failed: list[BaseException] = []
    if group is not None:
        group.quiesce()  # the thread has a stream of its own

    def run() -> None:
        try:
            with group.here() if group is not None else contextlib.nullcontext():
                transfer()
        except BaseException as error:
            failed.append(error)

    if session is None:
        run()
    else:
        _watch(session, group, threading.Thread(target=run, name="adaptdl-transfer", daemon=True), limit)
    if failed:
        raise failed[0]


def _watch(session: Session, group: Group | None, thread: threading.Thread, limit: timedelta | None) -> None:
    began = time.monotonic()
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK)
        why = session.control.lost
        if why is None and limit is not None and time.monotonic() - began > limit.total_seconds():
            why = f"the replicas did not meet within {limit}"
        if why is not None and thread.is_alive():
            if group is not None:
                group.interrupt()
            thread.join(_GRACE)
            if thread.is_alive():
                session.transfer_stuck = True
                raise PeerLostError(why)


def _set_timeout(timeout: timedelta) -> None:
    torch.distributed.distributed_c10d._set_pg_timeout(timeout, None)


def _sockets() -> set[tuple[int, str]]:
    """(descriptor, inode) of every socket of this process."""
    descriptors = Path("/proc/self/fd")
    names: Iterable[int] = (
        [int(entry.name) for entry in descriptors.iterdir()] if descriptors.is_dir() else []
    )
    found = {(name, _inode(name)) for name in names}
    return {(name, inode) for name, inode in found if inode.startswith("socket:")}


def _inode(descriptor: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""
