"""Decide as `decide` does, and keep the last decisions so that they can be replayed.

Of each view only the records that differ from the view before are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.coordinator.decide import decide
from adaptdl_elastic.autoscaler.coordinator.decision_types import (
    CoordinatorSettings,
    Decided,
    Memory,
    PolicyAnswer,
)
from adaptdl_elastic.rendezvous.decision_record import Recorder
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobState

if TYPE_CHECKING:
    from pathlib import Path

_NOTHING = View(0.0, 0.0)
_PARTS = tuple(one.name for one in fields(View) if one.name != "usage")  # no decision reads a node's load


class DecisionRecorder(Recorder):
    """Decides for one leader, and keeps the last decisions."""

    def __init__(self, path: Path | None, keys: Keys, fence: int, settings: CoordinatorSettings) -> None:
        super().__init__("coordinator", path)
        self._keys, self._fence, self._settings = keys, fence, settings
        self._seen = _NOTHING

    def decide(self, view: View, memory: Memory, answer: PolicyAnswer | None) -> Decided:
        """Return what is decided about a view; write the file after a failure, or if a person has asked."""
        changes = _changes(_NOTHING if self.begins else self._seen, view)
        parts = sum(len(change[0]) for change in changes.values() if isinstance(change, tuple))
        jobs = changes["jobs"][0] if "jobs" in changes and self._seen is not _NOTHING else {}
        asked = any(_asks(self._seen.jobs.get(name), job) for name, job in jobs.items())
        self._seen = view
        state = {"cluster": self._keys.cluster, "fence": self._fence, "settings": self._settings}
        call = self.add(state | {"memory": memory}, (view.now, changes, answer), parts)
        same: dict[str, Any] = {"fence": self._fence, "settings": self._settings, "answer": answer}
        try:
            decided = decide(view, memory, keys=self._keys, **same)
            call[1] = _kept(decided)
        finally:
            if asked or call[1] is None:
                self.write()
        return decided


def _asks(before: JobView | None, job: JobView) -> bool:
    """Return whether a job has failed just now, or a person has just asked for its decisions."""
    failed = [one and one.status and one.status.record.state is JobState.FAILED for one in (before, job)]
    asked = [one.request.record.decisions if one and one.request else 0 for one in (before, job)]
    return bool(failed[1] and not failed[0]) or asked[1] > asked[0]


def _changes(before: View, after: View) -> dict[str, Any]:
    """Return the parts of a view that differ; of a mapping its new records, and its order if not kept."""
    found: dict[str, Any] = {}
    for name in _PARTS:
        old, new = getattr(before, name), getattr(after, name)
        if isinstance(new, Mapping):
            records = {at: record for at, record in new.items() if old.get(at) is not record}
            kept = list(new) == [*old, *(at for at in records if at not in old)]
            if records or not kept:
                found[name] = records, None if kept else tuple(new)
        elif new is not old and new != old:
            found[name] = new
    return found


def _changed(before: View, changes: Mapping[str, Any]) -> View:
    """Return the view that differs from another one by `_changes`."""
    parts = dict(changes)
    for name, change in changes.items():
        if isinstance(getattr(before, name), Mapping):
            both = {**getattr(before, name), **change[0]}
            parts[name] = both if change[1] is None else {at: both[at] for at in change[1]}
    return replace(before, **parts)


def _kept(decided: Decided) -> dict[str, Any]:
    asked = decided.ask and decided.ask.number
    return {"actions": decided.actions, "next at": decided.wake_at, "round of the policy": asked}


def again(
    state: Mapping[str, Any], now: float, changes: Mapping[str, Any], answer: PolicyAnswer | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the new state and what is decided, for the inputs that were kept of a call."""
    view = _changed(state.get("view", _NOTHING), changes)
    same: dict[str, Any] = {"fence": state["fence"], "settings": state["settings"], "answer": answer}
    decided = decide(view, state["memory"], keys=Keys(state["cluster"]), **same)
    return {**state, "memory": decided.memory, "view": view}, _kept(decided)
