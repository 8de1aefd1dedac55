"""Decide and compute the policy in one call, for simulations in which no time passes meanwhile."""

from __future__ import annotations

from dataclasses import replace

from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.autoscaler.coordinator import rounds
from adaptdl_elastic.autoscaler.coordinator.decide import decide
from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings, Decided, Memory
from adaptdl_elastic.autoscaler.coordinator.policy_adapter import Policy
from adaptdl_elastic.rendezvous.schema.keys import Keys


def decide_at_once(
    view: View, memory: Memory, *, keys: Keys, fence: int, settings: CoordinatorSettings, policy: Policy
) -> Decided:
    """Return what the leader does, with the answer of the policy that it asks."""
    decided = decide(view, memory, keys=keys, fence=fence, settings=settings)
    if decided.ask is None:
        return decided
    answer = rounds.compute(policy, decided.ask, clock=lambda: 0.0)
    # the actions of the first decision are not carried out
    memory = replace(decided.memory, undecidable=memory.undecidable)
    return decide(view, memory, keys=keys, fence=fence, settings=settings, answer=answer)
