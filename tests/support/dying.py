"""How replicas of tests' scripts die, each at a place that the test chooses."""

import os
import signal
import time

from adaptdl_elastic import collective
from adaptdl_elastic.reducer import Reducer
from adaptdl_elastic.torch._elastic import regroup, state_transfer


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def tear(tag, left, how="SIGKILL"):
    """Send ourselves, rank 0, a signal when rank 1 alone has the result of the `left`-th collective `tag`."""
    combine, spread = Reducer.combine, Reducer.spread

    def combined(self, call):
        nonlocal left
        left -= tag in call.tag
        return combine(self, call)

    def spread_to_one(self, kind, sequence, payload):
        if left > 0:
            return spread(self, kind, sequence, payload)
        self._send(1, kind, sequence.to_bytes(8, "big") + payload)
        os.kill(os.getpid(), getattr(signal, how))

    Reducer.combine, Reducer.spread = combined, spread_to_one


def get_into_trouble():
    """Do what TROUBLE says: crash, hang, call a collective, or die in that function of a change."""
    trouble = os.environ.get("TROUBLE")
    if trouble == "crash":
        raise RuntimeError("trouble")
    while trouble == "hang":
        time.sleep(1)
    if trouble == "collective":
        collective.allreduce(1)
    elif trouble is not None:
        setattr(state_transfer if trouble == "take" else regroup, trouble, die)
