"""Epoch loops that go on where they were.

    for epoch in remaining_epochs_until(30):
        for inputs, targets in training_loader:
            ...
        for inputs, targets in validation_loader:
            ...
        lr_scheduler.step()

After a restart the script runs again from its top; the loop then begins with the epoch that was under
way, and the data loop that was under way goes on at its sample. Of data loops that had ended the body runs
once, without effect (`adaptdl_elastic.torch.batch_counts`), so that names it sets exist behind them.
So code *before* an epoch loop, and code of the epoch *before* the data loop that was under way, may run
again. What must happen once per epoch, as `lr_scheduler.step()`, belongs at the end of the body, after
its last data loop: it has then either not run yet, or the epoch is over and is not offered again. An
epoch is over when its body has ended (by `continue`, too). `break` leaves the epoch unfinished.

A data loop that was left by `break` is over as soon as the script comes to the next one, or to the end of
the epoch. An exception that leaves both loops ends neither: the next epoch loop, in this process or after a
checkpoint was saved and the script started again, goes on with the batch that it was raised in. What is left
in the middle of an accumulation window is dropped from the gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from adaptdl_elastic import _frames, checkpoint, env
from adaptdl_elastic.protocol.messages import EpochsFinished
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._data.checks import integer
from adaptdl_elastic.torch._runtime.position import script_position

__all__ = ["current_epoch", "finished_epochs", "remaining_epochs_until"]


def remaining_epochs_until(epoch: int) -> Iterator[int]:
    """Iterate over the epochs that are left of `epoch`, counted from 0, after any number of restarts.

    A second loop goes on counting: `remaining_epochs_until(10)` followed by
    `remaining_epochs_until(15)` runs epochs 0 to 9, then 10 to 14.

    Args:
        epoch: How many epochs shall have been run when the loop ends, 0 or more.

    Raises:
        ValueError: `epoch` is negative or not an integer.
        RuntimeError: another epoch loop is still under way.
    """
    until = integer(epoch)
    if until is None or until < 0:
        raise ValueError(f"remaining_epochs_until({epoch!r}): give the number of epochs, 0 or more")
    return _run(until)


def _run(until: int) -> Iterator[int]:
    session, state = current_session(), script_position()
    if session.epoch is not None:
        raise RuntimeError(
            f"an epoch loop is under way (epoch {session.epoch}): a new one can begin only after it has ended"
        )
    session.start()
    if session.consensus.loops_over:
        session.consensus.loops_over = False
        session.send(EpochsFinished(False))
    state.until, state.body = until, _frames.script_frame().f_code
    state.epoch_loops += 1
    ran = False
    try:
        while state.finished < until:
            yield state.begin_epoch()
            state.end_epoch()
            ran = True
        if ran:
            safe = session.recovery
            safe.recover_if_peer_lost()
            # Waiting, because nobody's end may come before another one's last loop or epoch.
            state.announce((state.finished, 0), "the end of the epochs", wait=True)
            safe.retry_on_peer_loss(lambda: session.consensus.save("exit"))
        elif until and session.channel is None and session.rank == 0 and checkpoint.loaded_id():
            print(
                f"all {until} epochs are finished in {env.checkpoint_path()}: set another "
                f"ADAPTDL_CHECKPOINT_PATH to train anew",
                file=sys.stderr,
            )
        session.consensus.loops_over = True
        session.send(EpochsFinished(True))
    finally:
        session.epoch = None


def current_epoch() -> int | None:
    """Return the running epoch, counted from 0; None outside an epoch loop."""
    return current_session().epoch


def finished_epochs() -> int:
    """How many epochs have been finished, in this generation and before."""
    return script_position().finished
