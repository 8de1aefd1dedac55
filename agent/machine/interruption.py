"""Read from the cloud which instance this machine is, and when it will be taken away.

On EC2 three paths of the instance metadata service (IMDSv2) are read every second:

| path                                     | answer         | what it means                               |
|------------------------------------------|----------------|---------------------------------------------|
| spot/instance-action                     | 404, or JSON   | taken away at the given time (two minutes)  |
| autoscaling/target-lifecycle-state       | a word         | `Terminated`: the group removes the instance|
| events/recommendations/rebalance         | 404, or JSON   | likelier than usual to be taken away        |

Every request carries a session token, which a PUT returns. The interval is one second because a notice must
become a plan within five seconds. AWS suggests intervals of five seconds, and a local request is cheap.

Nothing is sent unless the firmware says that the machine is an EC2 instance, or
`AWS_EC2_METADATA_SERVICE_ENDPOINT` names a service. On other machines 169.254.169.254 may be another service,
or a route without an answer.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path

from adaptdl_elastic.protocol import environment

logger = logging.getLogger(__name__)

DEFAULT_ENDPOINT = "http://169.254.169.254"
TOKEN_SECONDS = 21600  # the longest lifetime that IMDSv2 grants
SPOT_NOTICE_SECONDS = 120.0  # the time that AWS promises; used if a notice has no readable time
_FIRMWARE = ("sys_vendor", "board_vendor", "bios_vendor", "chassis_vendor")
_MAX_ANSWER = 1 << 16
_WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds between the attempts to read the instance's identity


@dataclass(frozen=True)
class InstanceIdentity:
    """The machine as an instance of the cloud."""

    instance: str
    instance_type: str | None = None
    zone: str | None = None
    preemptible: bool = False
    endpoint: str | None = None  # of the metadata service; None: there is none


class NoticeKind(str, Enum):
    """The kind of an announced end."""

    SPOT = "spot"  # spot instance taken back: stopped, hibernated or terminated
    LIFECYCLE = "lifecycle"  # removed by its auto-scaling group
    TIME_LIMIT = "time limit"  # of a batch system
    REBALANCE = "rebalance"  # at risk; nothing is decided yet


@dataclass(frozen=True)
class Notice:
    """One announcement. `deadline` is in seconds since the epoch; None: the cloud gave no time."""

    kind: NoticeKind
    reason: str
    deadline: float | None = None

    @property
    def drain(self) -> bool:
        """Whether the replicas must leave the node (a rebalance recommendation is only a risk)."""
        return self.kind is not NoticeKind.REBALANCE


class MetadataError(OSError):
    """The metadata service did not answer as IMDSv2 does."""


class RefusedError(MetadataError):
    """The metadata service answered with an unexpected status."""


class MetadataClient:
    """A client of IMDSv2: a token by PUT, then GETs that carry it. It uses no proxy and short time-outs.

    Each request opens its own connection, because the service drops idle ones, and a request that hangs must
    not affect a later one.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        timeout: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        parts = urllib.parse.urlsplit(endpoint)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(
                f"{environment.METADATA_ENDPOINT}={endpoint!r} is not an address like {DEFAULT_ENDPOINT}"
            )
        self._host, self._port = parts.hostname, parts.port or 80
        self.timeout = timeout
        self._clock = clock
        self._token = ""
        self._token_until = 0.0

    def get(self, path: str) -> str | None:
        """Return the text at `latest/<path>`; None if there is none (404).

        Raises:
            MetadataError: any other answer, or none.
        """
        status, body = self._request("GET", path, {"X-aws-ec2-metadata-token": self._fresh_token()})
        if status == 401:  # the token expired early, as after a stop and start of the instance
            self._token = ""
            status, body = self._request("GET", path, {"X-aws-ec2-metadata-token": self._fresh_token()})
        if status == 404:
            return None
        if status != 200:
            raise RefusedError(f"GET {path}: status {status}")
        return body

    def _fresh_token(self) -> str:
        if not self._token or self._clock() >= self._token_until:
            header = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
            status, body = self._request("PUT", "api/token", header)
            if status != 200 or not body:
                raise MetadataError(f"PUT api/token: status {status}")
            self._token, self._token_until = body.strip(), self._clock() + TOKEN_SECONDS / 2
        return self._token

    def _request(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self.timeout)
        try:
            connection.request(method, f"/latest/{path}", headers=dict(headers))
            response = connection.getresponse()
            return response.status, response.read(_MAX_ANSWER).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise MetadataError(f"{method} {path}: {error or type(error).__name__}") from None
        finally:
            connection.close()


def discover(
    environ: Mapping[str, str] = os.environ,
    timeout: float = 1.0,
    firmware: Path = Path("/sys/class/dmi/id"),
    wait: Callable[[float], None] = time.sleep,
) -> InstanceIdentity | None:
    """Return this machine's identity from `ADAPTDL_INSTANCE_ID` and so on, else from EC2, else None.

    On a machine that is no EC2 instance this only reads a file. A metadata service that does not answer, as
    while the instance boots, is asked five times within 7.5 s: without an identity the node would not be told
    of interruptions, and the autoscaler would take its instance for one without an agent.
    """
    endpoint = environ.get(environment.METADATA_ENDPOINT)
    named = environ.get(environment.INSTANCE_ID)
    if named:
        return InstanceIdentity(
            instance=named,
            instance_type=environ.get(environment.INSTANCE_TYPE) or None,
            zone=environ.get(environment.ZONE) or None,
            preemptible=environ.get(environment.PREEMPTIBLE, "") == "1",
            endpoint=endpoint or None,
        )
    if environ.get(environment.METADATA_DISABLED, "").lower() == "true":
        return None
    if not endpoint and not on_ec2(firmware):
        return None
    client = MetadataClient(endpoint or DEFAULT_ENDPOINT, timeout)
    for pause in (*_WAITS, None):
        try:
            return _ask(client, endpoint or DEFAULT_ENDPOINT)
        except MetadataError as error:
            if pause is not None:
                wait(pause)
                continue
            logger.warning(
                "this is an EC2 instance, but its metadata service does not answer (%s): this node is not "
                "told of interruptions, and an autoscaler takes its instance for one without an agent; in a "
                "container set the instance's HttpPutResponseHopLimit to 2, or ADAPTDL_INSTANCE_ID",
                error,
            )
    return None


def on_ec2(firmware: Path = Path("/sys/class/dmi/id")) -> bool:
    """Return whether the firmware says that this machine is an EC2 instance (Nitro, metal or Xen)."""
    for name in _FIRMWARE:
        try:
            if "amazon ec2" in (firmware / name).read_text(errors="replace").lower():
                return True
        except OSError:
            continue
    return False


def _ask(client: MetadataClient, endpoint: str) -> InstanceIdentity | None:
    instance = client.get("meta-data/instance-id")
    if not instance:
        return None
    return InstanceIdentity(
        instance=instance.strip(),
        instance_type=client.get("meta-data/instance-type"),
        zone=client.get("meta-data/placement/availability-zone"),
        preemptible=(client.get("meta-data/instance-life-cycle") or "").strip() == "spot",
        endpoint=endpoint,
    )


def parse_instance_action(body: str, now: float) -> Notice:
    """Parse `spot/instance-action`, e.g. `{"action": "terminate", "time": "2017-09-18T08:22:00Z"}`.

    An unreadable text is still a notice; it gets the deadline that AWS promises.
    """
    try:
        content = json.loads(body)
        action, when = str(content["action"]), _epoch(str(content["time"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return Notice(NoticeKind.SPOT, "spot interruption (unreadable notice)", now + SPOT_NOTICE_SECONDS)
    return Notice(NoticeKind.SPOT, f"spot interruption: {action}", when)


def parse_rebalance(body: str) -> Notice:
    """Parse `events/recommendations/rebalance`, e.g. `{"noticeTime": "2020-10-27T08:22:00Z"}`."""
    return Notice(NoticeKind.REBALANCE, "rebalance recommendation")


def parse_target_state(body: str) -> Notice | None:
    """Parse `autoscaling/target-lifecycle-state`; None while the group keeps the instance."""
    state = body.strip()
    if state in ("Terminated", "Warmed:Terminated"):
        return Notice(NoticeKind.LIFECYCLE, f"its group takes it to {state}")
    return None


def _epoch(text: str) -> float:
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def look(client: MetadataClient, now: float) -> tuple[tuple[Notice, ...], MetadataError | None]:
    """Return the present notices, the most urgent first, and the first error.

    A path that is refused does not hide the others. After a time-out the other paths are not tried.
    """
    found: list[Notice] = []
    failed: MetadataError | None = None
    parsers: tuple[tuple[str, Callable[[str], Notice | None]], ...] = (
        ("spot/instance-action", lambda body: parse_instance_action(body, now)),
        ("autoscaling/target-lifecycle-state", parse_target_state),
        ("events/recommendations/rebalance", parse_rebalance),
    )
    for path, parse in parsers:
        try:
            body = client.get(f"meta-data/{path}")
        except RefusedError as error:
            failed = failed or error
            continue
        except MetadataError as error:
            failed = failed or error
            break
        notice = None if body is None else parse(body)
        if notice is not None:
            found.append(notice)
    return tuple(found), failed


class Watcher:
    """A thread that checks every `interval` seconds and reports each kind of notice once.

    A notice is reported again if its time changes. If the service hangs, refuses or answers nonsense, it is
    asked again at the next interval. An error is logged once, and so is its end.
    """

    def __init__(
        self,
        client: MetadataClient,
        on_notice: Callable[[Notice], None],
        interval: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._on_notice = on_notice
        self._interval = interval
        self._clock = clock
        self._told: dict[NoticeKind, float | None] = {}
        self._failing = False
        self._end = threading.Event()
        self.thread = threading.Thread(target=self._run, name="adaptdl-interruption", daemon=True)

    def start(self) -> Watcher:
        """Start the thread; return the watcher."""
        self.thread.start()
        return self

    def stop(self) -> None:
        """Stop checking; wait for a request under way."""
        self._end.set()
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(timeout=5.0)

    def look_once(self) -> None:
        """Check once and report new notices."""
        notices, failed = look(self._client, self._clock())
        for notice in notices:
            self._tell(notice)
        if failed is not None and not self._failing:
            logger.warning("instance metadata: %s; still trying every %.0f s", failed, self._interval)
        elif failed is None and self._failing:
            logger.info("instance metadata answers again")
        self._failing = failed is not None

    def _tell(self, notice: Notice) -> None:
        if notice.kind in self._told and self._same(notice):
            return
        self._told[notice.kind] = notice.deadline
        self._on_notice(notice)

    def _same(self, notice: Notice) -> bool:
        """Return whether a notice was reported already with about this deadline.

        An unreadable notice gets a new deadline at every check.
        """
        told = self._told[notice.kind]
        if told is None or notice.deadline is None:
            return told is notice.deadline
        return notice.deadline >= told - 1.0

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                self.look_once()
            except Exception:
                logger.exception("watching for interruptions goes on")
            self._end.wait(self._interval)


def watch(
    identity: InstanceIdentity | None,
    on_notice: Callable[[Notice], None],
    interval: float = 1.0,
    timeout: float = 1.0,
) -> Watcher | None:
    """Watch the machine that `discover` found; None if it has no metadata service."""
    if identity is None or identity.endpoint is None:
        return None
    return Watcher(MetadataClient(identity.endpoint, timeout), on_notice, interval).start()
