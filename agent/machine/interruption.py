"""What the cloud says about the machine we run on: who it is, and when it will be taken away.

On EC2 the instance metadata service (IMDSv2) is asked three things every second:

| path                                     | answer         | what it means                               |
|------------------------------------------|----------------|---------------------------------------------|
| spot/instance-action                     | 404, or JSON   | taken away at the given time (two minutes)  |
| autoscaling/target-lifecycle-state       | a word         | `Terminated`: the group removes the instance|
| events/recommendations/rebalance         | 404, or JSON   | likelier than usual to be taken away        |

Every request carries a session token that was had by PUT. One second, because the notice is to become
a plan within five; AWS suggests five seconds between looks, and a local request costs nothing.

Nothing is sent anywhere unless the machine is an EC2 instance by its firmware's own word, or
`AWS_EC2_METADATA_SERVICE_ENDPOINT` names a service: elsewhere 169.254.169.254 is a stranger, or a
route to nowhere that hangs.
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

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"  # the name that boto3 and the AWS SDKs use
DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"
DEFAULT_ENDPOINT = "http://169.254.169.254"
TOKEN_SECONDS = 21600  # the most that IMDSv2 grants
SPOT_NOTICE_SECONDS = 120.0  # what AWS promises; used where the notice's time can not be read
_FIRMWARE = ("sys_vendor", "board_vendor", "bios_vendor", "chassis_vendor")
_MAX_ANSWER = 1 << 16
_WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds between the attempts to learn who we are


@dataclass(frozen=True)
class InstanceIdentity:
    """Which machine this is, as far as the cloud is concerned."""

    instance: str
    instance_type: str | None = None
    zone: str | None = None
    preemptible: bool = False
    endpoint: str | None = None  # of the metadata service; None: there is none to watch


class NoticeKind(str, Enum):
    """What kind of end was announced."""

    SPOT = "spot"  # taken back: stop, hibernate or terminate
    LIFECYCLE = "lifecycle"  # its group removes it
    REBALANCE = "rebalance"  # at risk; nothing is decided yet


@dataclass(frozen=True)
class Notice:
    """One announcement. `deadline` is in seconds since the epoch; None: the cloud named no time."""

    kind: NoticeKind
    reason: str
    deadline: float | None = None

    @property
    def drain(self) -> bool:
        """Whether the node has to be left (a rebalance recommendation alone is only a risk)."""
        return self.kind is not NoticeKind.REBALANCE


class MetadataError(OSError):
    """The metadata service did not answer as IMDSv2 does."""


class RefusedError(MetadataError):
    """It answered, with a status that says nothing."""


class MetadataClient:
    """IMDSv2: a token by PUT, then GETs that carry it. Never through a proxy, never for long.

    Each request opens its own connection: the service drops idle ones, and a request that hangs must
    not be able to take a later one with it.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        timeout: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        parts = urllib.parse.urlsplit(endpoint)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{ENDPOINT_VARIABLE}={endpoint!r} is not an address like {DEFAULT_ENDPOINT}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._timeout = timeout
        self._clock = clock
        self._token = ""
        self._token_until = 0.0

    def get(self, path: str) -> str | None:
        """The text at `latest/<path>`, None where there is none (404); MetadataError otherwise."""
        status, body = self._request("GET", path, {"X-aws-ec2-metadata-token": self._fresh_token()})
        if status == 401:  # expired early, as after a stop and start of the instance
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
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
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
    """Who this machine is: from `ADAPTDL_INSTANCE_ID` and its like, else from EC2; None anywhere else.

    Takes a file read where it is no EC2 instance. A metadata service that does not answer, as while the
    instance boots, is asked five times in 7.5 s: a node without its name is never told of its end, and the
    autoscaler would take its instance for one that never became a node.
    """
    endpoint = environ.get(ENDPOINT_VARIABLE)
    named = environ.get("ADAPTDL_INSTANCE_ID")
    if named:
        return InstanceIdentity(
            instance=named,
            instance_type=environ.get("ADAPTDL_INSTANCE_TYPE") or None,
            zone=environ.get("ADAPTDL_ZONE") or None,
            preemptible=environ.get("ADAPTDL_PREEMPTIBLE", "") == "1",
            endpoint=endpoint or None,
        )
    if environ.get(DISABLED_VARIABLE, "").lower() == "true":
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
    """Whether the firmware says that this machine is an EC2 instance (Nitro, metal or Xen)."""
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
    """`spot/instance-action`, e.g. `{"action": "terminate", "time": "2017-09-18T08:22:00Z"}`.

    What is there but can not be read is still a notice: it is believed, with the deadline AWS promises.
    """
    try:
        content = json.loads(body)
        action, when = str(content["action"]), _epoch(str(content["time"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return Notice(NoticeKind.SPOT, "spot interruption (unreadable notice)", now + SPOT_NOTICE_SECONDS)
    return Notice(NoticeKind.SPOT, f"spot interruption: {action}", when)


def parse_rebalance(body: str) -> Notice:
    """`events/recommendations/rebalance`, e.g. `{"noticeTime": "2020-10-27T08:22:00Z"}`."""
    return Notice(NoticeKind.REBALANCE, "rebalance recommendation")


def parse_target_state(body: str) -> Notice | None:
    """`autoscaling/target-lifecycle-state`: None while the group wants the instance to stay."""
    state = body.strip()
    if state in ("Terminated", "Warmed:Terminated"):
        return Notice(NoticeKind.LIFECYCLE, f"its group takes it to {state}")
    return None


def _epoch(text: str) -> float:
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def look(client: MetadataClient, now: float) -> tuple[tuple[Notice, ...], MetadataError | None]:
    """Everything that the metadata service announces at this moment, the most urgent first; what failed.

    One path that is refused does not silence the others; a service that hangs is not asked for more.
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
    """Looks every `interval` seconds, and tells each kind of notice once (again when its time changes).

    A service that hangs, refuses or talks nonsense is asked again at the next interval for ever; what
    fails is said once, and once more when it works again.
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
        self._thread = threading.Thread(target=self._run, name="adaptdl-interruption", daemon=True)

    def start(self) -> Watcher:
        """Begin to look, in a thread of its own."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Look no more. Returns at once when it sleeps, after the present request otherwise."""
        self._end.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def look_once(self) -> None:
        """One look; the notices that are new are told."""
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
        """Within a second or two of what was told: an unreadable notice gets a new deadline at every look."""
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
    """Watch the machine that `discover` found; None where there is no metadata service to watch."""
    if identity is None or identity.endpoint is None:
        return None
    return Watcher(MetadataClient(identity.endpoint, timeout), on_notice, interval).start()
