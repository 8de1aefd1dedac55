"""Connect the parts of the training library with the session; only this module imports all of them.

Every public module gets its session from here, so that the parts are installed before they are needed.
"""

from __future__ import annotations

from functools import partial

from adaptdl_elastic import _session
from adaptdl_elastic._session import Session
from adaptdl_elastic._values import Command
from adaptdl_elastic.torch._elastic import eligibility
from adaptdl_elastic.torch._elastic.recovery import Recovery
from adaptdl_elastic.torch._elastic.rescale import Rescaler
from adaptdl_elastic.torch._runtime.consensus import BoundaryConsensus
from adaptdl_elastic.torch._tuning.memory_limit import LIMIT, memory_limit
from adaptdl_elastic.torch._tuning.reporter import Metrics


def _consensus(session: Session) -> BoundaryConsensus:
    made = BoundaryConsensus(session, {**session.rescaling.handlers(), LIMIT: partial(_lower_limit, session)})
    if session.lost_early is not None:
        made.on_lost(session.lost_early)
    return made


def _lower_limit(session: Session, command: Command) -> None:
    """Take over a limit of the memory that a replica has found. On all replicas at the same boundary."""
    if memory_limit(session).lower(command["largest"], command["why"]):
        loader = session.training_loader
        if loader is not None:
            loader.fit_memory()


_session.install(
    _session.Parts(
        consensus=_consensus,
        metrics=Metrics,
        recovery=Recovery,
        rescaling=Rescaler,
        may_change=eligibility.may_change,
    )
)


# The session of this process. Imported from here, it has all parts of the library installed.
current_session = _session.current
