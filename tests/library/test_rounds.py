"""Rounds that rank 0 opens just when the replicas leave their generation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import insides

from adaptdl_elastic.torch._runtime.consensus import BoundaryConsensus

NOW = (0, 0, 0)


def replica(rank: int, generation: int = 1) -> tuple[BoundaryConsensus, list[Any]]:
    """One of two replicas, and the control messages that it has sent to the other one."""
    sent: list[Any] = []
    reducer = SimpleNamespace(
        send_control=lambda _, message: sent.append(message), replicas=2, finished=None, rank=rank
    )
    session: Any = SimpleNamespace(
        rank=rank,
        replicas=2,
        generation=generation,
        reducer=reducer,
        last_step_time=None,
        recovery=SimpleNamespace(on_lost=lambda: None),
    )
    return BoundaryConsensus(session), sent


def want(consensus: BoundaryConsensus, kind: str) -> None:
    insides.lead(consensus, "want", {"kind": kind})


def test_a_round_is_opened_for_the_present_generation() -> None:
    leader, sent = replica(0)
    want(leader, "switch")
    assert sent == [("prepare", 1, 1)]
    assert leader.round_open

    follower, _ = replica(1)
    follower.on_message(0, sent[0])
    assert follower.round_open


def test_a_round_of_an_earlier_generation_lets_no_replica_wait() -> None:
    """Rank 0's control thread may send a message of the old generation over the new one's connections."""
    follower, sent = replica(1, generation=2)
    follower.on_message(0, ("prepare", 7, 1))
    assert not follower.round_open
    assert not sent
    follower.boundary(NOW)  # would wait for a decision that never comes


def test_no_round_is_opened_between_two_generations() -> None:
    leader, sent = replica(0)
    leader.abandon()
    want(leader, "stop")
    want(leader, "switch")
    assert not sent
    assert not leader.round_open
    leader.session.generation = 2  # type: ignore[misc]
    insides.lead(leader, "renew", True)
    assert sent == [("prepare", 2, 2)], "what may be asked for only once must still be done"


def test_a_replica_lost_while_rank_0_opens_a_round_leaves_no_round_open() -> None:
    """The training thread leaves the generation when the control thread has begun to open a round."""
    leader, sent = replica(0)
    take = leader.generation_of_round

    def and_then_leave() -> int | None:
        generation = take()
        leader.abandon()
        leader.session.generation = 2  # type: ignore[misc]
        return generation

    leader.generation_of_round = and_then_leave  # type: ignore[method-assign]
    want(leader, "switch")
    assert sent == [("prepare", 1, 1)]
    assert not leader.round_open
    leader.boundary(NOW)  # would wait for ever


def test_a_batch_size_of_an_earlier_generation_is_not_agreed_on() -> None:
    """A newcomer that came in an evaluation loop had no loader yet that could change its batch size."""
    leader, sent = replica(0)
    want(leader, "switch")
    better = {"kind": "batch_size", "atomic": 8, "accumulation": 0}
    leader.polls.append(lambda: better if leader.session.generation == 1 else None)
    insides.lead(leader, "tick", None)
    leader.abandon()
    leader.session.generation = 2  # type: ignore[misc]
    insides.lead(leader, "renew", False)
    assert sent == [("prepare", 1, 1)]
    assert not leader.round_open
    want(leader, "stop")
    assert sent == [("prepare", 1, 1), ("prepare", 3, 2)], "the next round opens as ever"


def test_a_batch_size_of_this_generation_is_agreed_on() -> None:
    leader, sent = replica(0)
    leader.polls.append(lambda: {"kind": "batch_size", "atomic": 8, "accumulation": 0})
    insides.lead(leader, "tick", None)
    assert sent == [("prepare", 1, 1)]


def test_of_a_broken_round_only_what_must_not_be_lost_is_asked_for_again() -> None:
    leader, sent = replica(0)
    want(leader, "switch")
    want(leader, "stop")
    leader.abandon()
    leader.session.generation = 2  # type: ignore[misc]
    insides.lead(leader, "renew", True)
    assert sent[0] == ("prepare", 1, 1)
    assert sent[1:] == [("prepare", 3, 2)]
    assert insides.running_commands(leader) == [{"kind": "stop"}]
