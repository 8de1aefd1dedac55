"""The second path of a notice: EventBridge puts it into an SQS queue, the autoscaler reads the queue.

It works where the node's own listener is dead. Delivery is at least once and in any order, so a notice
may come twice, or after its instance has gone; whoever reads signals must not mind.
"""

from __future__ import annotations

import json
import logging
from datetime import datetime
from typing import Any

from adaptdl_elastic.autoscaler.providers.base import Signal, SignalKind

logger = logging.getLogger(__name__)

SPOT_NOTICE_SECONDS = 120.0
_BATCH = 10  # the most that SQS hands out at once
_MAX_BATCHES = 20  # per look: the rest waits for the next


def parse_event(body: str) -> Signal | None:
    """The signal in one EventBridge event; None for an event that says nothing about an instance's end.

    Raises ValueError for what is no event at all.
    """
    event = json.loads(body)
    if not isinstance(event, dict) or not isinstance(event.get("detail"), dict):
        raise ValueError("not an EventBridge event")
    detail: dict[str, Any] = event["detail"]
    kind = event.get("detail-type")
    if kind == "EC2 Spot Instance Interruption Warning":
        when = datetime.fromisoformat(str(event["time"]).replace("Z", "+00:00")).timestamp()
        reason = f"spot interruption: {detail.get('instance-action', 'terminate')}"
        return Signal(SignalKind.INTERRUPTION, str(detail["instance-id"]), reason, when + SPOT_NOTICE_SECONDS)
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


class NoticeQueue:
    """Reads one SQS queue that belongs to this autoscaler alone (what is read is deleted)."""

    def __init__(self, sqs: Any, url: str) -> None:
        self._sqs = sqs
        self._url = url

    def read(self, wait_seconds: int = 0) -> tuple[Signal, ...]:
        """Every signal that is there. Botocore's errors go through to the caller."""
        signals: list[Signal] = []
        for _ in range(_MAX_BATCHES):
            answer = self._sqs.receive_message(
                QueueUrl=self._url, MaxNumberOfMessages=_BATCH, WaitTimeSeconds=wait_seconds
            )
            messages = answer.get("Messages", [])
            if not messages:
                break
            signals += [signal for m in messages if (signal := self._parse(m["Body"])) is not None]
            entries = [{"Id": str(i), "ReceiptHandle": m["ReceiptHandle"]} for i, m in enumerate(messages)]
            self._sqs.delete_message_batch(QueueUrl=self._url, Entries=entries)
        return tuple(signals)

    def _parse(self, body: str) -> Signal | None:
        try:
            return parse_event(body)
        except (ValueError, KeyError, TypeError):
            logger.warning("a message in %s is no EventBridge event and was dropped: %.100s", self._url, body)
            return None
