"""The second path of a notice: EventBridge puts it into an SQS queue, the autoscaler reads the queue.

It works where the node's own listener is dead. Delivery is at least once and in any order, so a notice
may come twice, or after its instance has gone; whoever reads signals must not mind.
"""

from __future__ import annotations

import json
import logging
from datetime import datetime
from typing import Any

from adaptdl_elastic.autoscaler.providers.base import ProviderError, Signal, SignalKind
from adaptdl_elastic.autoscaler.providers.ec2.errors import FAILURES, explain

logger = logging.getLogger(__name__)

SPOT_NOTICE_SECONDS = 120.0
_BATCH = 10  # the most that SQS hands out at once
_MAX_BATCHES = 20  # per look: the rest waits for the next


def parse_event(body: str) -> Signal | None:
    """The signal in one EventBridge event; None for an event that says nothing about an instance's end.

    A notice whose time can not be read is believed, without a deadline. Raises ValueError for what is no
    event at all.
    """
    try:
        event = json.loads(body)
    except RecursionError:
        raise ValueError("nested beyond reason") from None
    if not isinstance(event, dict) or not isinstance(event.get("detail"), dict):
        raise ValueError("not an EventBridge event")
    detail: dict[str, Any] = event["detail"]
    kind = event.get("detail-type")
    if kind == "EC2 Spot Instance Interruption Warning":
        reason = f"spot interruption: {detail.get('instance-action', 'terminate')}"
        return Signal(SignalKind.INTERRUPTION, str(detail["instance-id"]), reason, _end(event.get("time")))
    if kind == "EC2 Instance Rebalance Recommendation":
        return Signal(SignalKind.REBALANCE, str(detail["instance-id"]), "rebalance recommendation")
    if kind == "EC2 Instance-terminate Lifecycle Action":
        return Signal(SignalKind.LIFECYCLE, str(detail["EC2InstanceId"]), "its group removes it")
    if kind == "EC2 Instance State-change Notification" and detail.get("state") in (
        "shutting-down",
        "terminated",
    ):
        return Signal(SignalKind.GONE, str(detail["instance-id"]), f"instance is {detail['state']}")
    return None


def _end(told: object) -> float | None:
    """When the instance goes that was told of at this time."""
    try:
        return datetime.fromisoformat(str(told).replace("Z", "+00:00")).timestamp() + SPOT_NOTICE_SECONDS
    except (ValueError, OverflowError):
        return None


class NoticeQueue:
    """Reads one SQS queue that belongs to this autoscaler alone (what is read is deleted)."""

    def __init__(self, sqs: Any, url: str) -> None:
        self._sqs = sqs
        self._url = url

    def read(self) -> tuple[tuple[Signal, ...], ProviderError | None]:
        """Every signal that is there, and what kept us from reading on.

        What was received counts whatever fails after it: once deleted, a message is told by nobody else.
        """
        signals: list[Signal] = []
        action = "sqs:ReceiveMessage"
        try:
            for _ in range(_MAX_BATCHES):
                action = "sqs:ReceiveMessage"
                answer = self._sqs.receive_message(QueueUrl=self._url, MaxNumberOfMessages=_BATCH)
                messages = answer.get("Messages", [])
                if not messages:
                    break
                signals += [signal for m in messages if (signal := self._parse(m["Body"])) is not None]
                entries = [
                    {"Id": str(i), "ReceiptHandle": m["ReceiptHandle"]} for i, m in enumerate(messages)
                ]
                action = "sqs:DeleteMessage"
                self._sqs.delete_message_batch(QueueUrl=self._url, Entries=entries)
        except FAILURES as error:
            return tuple(signals), explain(error, action, self._url)
        return tuple(signals), None

    def _parse(self, body: str) -> Signal | None:
        try:
            return parse_event(body)
        except (ValueError, KeyError, TypeError):
            logger.warning("a message in %s is no EventBridge event and was dropped: %.100s", self._url, body)
            return None
