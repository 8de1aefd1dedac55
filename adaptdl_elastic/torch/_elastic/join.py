"""Let a new replica (a newcomer) join a running generation.

This is the newcomer's side of the protocol that `rescale` describes. The newcomer runs the script from a
preview of the others' states, in a placeholder process group without peers. It waits at the data loop that
the others are running, and then receives every state from the memory of a running replica.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from typing import Any

import torch

from adaptdl_elastic import _codec, checkpoint, collective
from adaptdl_elastic._session import Session
from adaptdl_elastic.protocol import environment
from adaptdl_elastic.protocol.messages import Ready
from adaptdl_elastic.torch._elastic import eligibility, regroup, state_transfer
from adaptdl_elastic.torch._process_group import backends, capability, placeholder
from adaptdl_elastic.torch._process_group.store import FOREVER, generation_store
from adaptdl_elastic.torch._runtime.position import BEHIND_ALL, script_position


class Newcomer:
    """Bring a newcomer from its start to the position of the running replicas."""

    def __init__(self, session: Session, backend: str, store: Any) -> None:
        self.session, self.backend, self._store = session, backend, store
        self._attempt = 0
        self._at: tuple[int, int] = (0, 0)  # epoch and data loop where the others can be joined

    @property
    def before_epochs(self) -> bool:
        """Whether the running replicas had not come to an epoch when the last preview was written."""
        return self._at[0] < 0

    def preview(self, step: dict[str, Any] | None = None) -> None:
        """Load a preview: the position and the states of the running replicas when rank 0 wrote it.

        Args:
            step: Message with a new preview; None: wait for the first one.
        """
        again = step is not None
        step = step or self._next()
        states = regroup.unpack_states(step["preview"])
        if again:  # keep the own position: the newcomer runs through the script up to the new place
            states.pop("adaptdl-loops", None)
        epoch, loop = step["at"]
        if epoch >= 0 and loop > BEHIND_ALL:  # with epoch < 0 the first epoch is still to come
            collective.give_up("the running replicas are behind their epochs, where no replica can join")
        self._at = (epoch, loop)
        self.session.past_results.take(step["results"])
        checkpoint.restore_states(states)

    def _next(self) -> dict[str, Any]:
        key = f"step/{self._attempt}"
        self._store.wait([key], FOREVER)
        step: dict[str, Any] = _codec.decode(self._store.get(key))
        if "refused" in step:
            collective.give_up(step["refused"])
        return step

    # the loop may be in `torch.inference_mode`, whose tensors are of no use to training
    @torch.inference_mode(False)
    def arrive(self, place: tuple[int, int], loader: str) -> bool:
        """Reach a data loop, and join the running replicas if they are in it.

        Args:
            place: Epoch and data loop.
            loader: Key of the loop's loader.

        Returns:
            True after joining; False if the others have passed this loop, so that it must be skipped.
        """
        session, known = self.session, capability.known_capability(self.session)
        if known is not None:
            known.require_verified()  # before the other replicas rely on this one
        eligibility.scan_user_objects(session)  # now, while no replica waits for it
        while place >= self._at:
            self._store.set(f"arrived/{self._attempt}/{session.rank}", loader)
            session.send(Ready(session.generation))
            self._attempt += 1
            step = self._next()
            if "elsewhere" in step:
                collective.give_up(
                    f"data loop {place[1]} of epoch {place[0]} is over loader {loader} here, and over "
                    f"{step['elsewhere']} on the running replicas (is it for a variable of theirs?)"
                )
            if "preview" in step:
                self.preview(step)
                continue
            self._join()
            return True
        return False

    def _join(self) -> None:
        session, began = self.session, time.monotonic()
        placeholder.leave()
        regroup.form(session, self._store, self._attempt - 1)
        state_transfer.take(session)
        session.joining = False
        known = capability.known_capability(session)
        if known is not None:
            known.agree()  # the others have agreed already: otherwise they would not change in place
        os.environ.pop(environment.JOIN, None)
        state = script_position()
        regroup.finish(session, (state.finished, state.entered, state.index), began)
        session.newcomer = None


def begin_joining(session: Session, backend: str) -> None:
    """Do the work of `init_process_group` in a newcomer: load a preview, and enter a placeholder group.

    The placeholder group has the planned number of replicas.
    """
    host, port = os.environ[environment.MASTER_ADDR], int(os.environ[environment.MASTER_PORT])
    store = generation_store(host, port, session.generation)
    found = session.newcomer = Newcomer(session, backend, store)
    session.start()
    checkpoint.agree(lambda _: (None, None))  # nothing is loaded from disk
    session.joining = True
    # A newcomer calls lr_scheduler.step() at ends of epochs without the optimizer steps before. That is no
    # mistake: it receives the optimizer and the scheduler when it joins.
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
    found.preview()
    hook = sys.excepthook
    placeholder.enter(backend, session.rank, session.replicas)
    sys.excepthook = hook
    _warm_up(backends.kind(backend).training_device())


def _warm_up(device: torch.device) -> None:
    """Run a small backward pass now; otherwise the others would wait for the setup in torch's first one."""
    layer = torch.nn.Linear(64, 64, device=device)
    layer(torch.ones(64, 64, device=device)).sum().backward()
