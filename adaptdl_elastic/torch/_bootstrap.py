"""The one module that knows all parts of the training library, and puts them together.

Every public module takes its session from here, so that the parts are known before one of them is needed.
"""

from __future__ import annotations

from adaptdl_elastic import _session
from adaptdl_elastic._session import Session
from adaptdl_elastic.torch import _habits
from adaptdl_elastic.torch._control import Control
from adaptdl_elastic.torch._inplace import Rescaler
from adaptdl_elastic.torch._metrics import Metrics
from adaptdl_elastic.torch._recovery import Recovery


def _consensus(session: Session) -> Control:
    return Control(session, session.rescaling.handlers())


_session.install(
    _session.Parts(
        consensus=_consensus,
        reporter=Metrics,
        recovery=Recovery,
        rescaling=Rescaler,
        may_change=_habits.may_change,
    )
)


def current_session() -> Session:
    """Return this process's session, all of whose parts can be made."""
    return _session.current()
