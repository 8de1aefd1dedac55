"""Decide as `core.decisions` does, and keep the last decisions so that they can be replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from adaptdl_elastic.agent.core import decisions
from adaptdl_elastic.agent.core.states import Event, State, Step
from adaptdl_elastic.rendezvous.decision_record import FILE, Recorder

if TYPE_CHECKING:
    from pathlib import Path


class DecisionRecorder(Recorder):
    """Decides for an agent, and keeps the last decisions."""

    def __init__(self, logs: Path) -> None:
        super().__init__("agent", logs / FILE.format("agent"))

    def decide(self, state: State, event: Event, now: float) -> Step:
        """Return the new state and the actions."""
        call = self.add({"state": state}, (now, state.lapsed, event))
        after, actions = decisions.decide(state, event, now)
        call[1] = {"actions": actions}
        return after, actions


def again(
    state: Mapping[str, Any], now: float, lapsed: bool, event: Event
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the new state and what is decided, for the inputs that were kept of a call."""
    after, actions = decisions.decide(replace(state["state"], lapsed=lapsed), event, now)
    return {"state": after}, {"actions": actions}
