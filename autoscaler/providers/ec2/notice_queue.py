"""Read interruption notices from an SQS queue, into which EventBridge puts them.

This works even if the node's own watcher is dead. Messages come at least once and in any order, so a notice
may come twice, or after its instance has gone; readers of signals must accept that.
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
_BATCH = 10  # most messages that SQS returns at once
_MAX_BATCHES = 20  # most batches per read; the rest waits for the next read


def parse_event(body: str) -> Signal | None:
    """Return the signal in one EventBridge event; None if it does not announce an instance's end.

    A notice with an unreadable time counts, without a deadline.

    Raises:
        ValueError: the text is no event.
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
    """Return when an instance ends whose notice was given at this time; None if the time is unreadable."""
    try:
        return datetime.fromisoformat(str(told).replace("Z", "+00:00")).timestamp() + SPOT_NOTICE_SECONDS
    except (ValueError, OverflowError):
        return None


class NoticeQueue:
    """Reads one SQS queue that belongs to this autoscaler alone; messages are deleted after reading."""

    def __init__(self, sqs: Any, url: str) -> None:
        self._sqs = sqs
        self._url = url

    def read(self) -> tuple[tuple[Signal, ...], ProviderError | None]:
        """Return all waiting signals, and the error that ended the reading, if any.

        Messages count even if a later call fails, since deleted messages do not come again.
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
