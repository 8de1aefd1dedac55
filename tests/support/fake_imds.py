"""A strict IMDSv2: no token, no answer (401); nothing armed, 404; the time to live is checked.

Where moto's stand-in accepts calls without a token and answers 500, this one behaves as AWS documents.
Runs in a thread of the test, or on its own: `python tests/support/fake_imds.py --instance i-1`
prints its address; lines on its standard input arm it (`spot 120`, `rebalance`, `target Terminated`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
import uuid
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PREFIX = "/latest/meta-data/"


class FakeImds:
    """One instance's metadata service, on loopback and a port of its own if no address is given."""

    def __init__(
        self,
        instance: str = "i-0123456789abcdef0",
        instance_type: str = "g5.xlarge",
        zone: str = "eu-central-1a",
        life_cycle: str = "spot",
        address: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self.values: dict[str, str] = {
            "instance-id": instance,
            "instance-type": instance_type,
            "placement/availability-zone": zone,
            "instance-life-cycle": life_cycle,
            "autoscaling/target-lifecycle-state": "InService",
        }
        self.tokens: set[str] = set()
        self.requests: list[tuple[str, str, int]] = []
        self.hang = threading.Event()  # set: accept, and never answer
        self.hanging = threading.Event()  # a request has come that is not answered
        self.release = threading.Event()
        self.connections = 0  # counted in the order of their coming, whatever becomes of them
        self.broken = False  # answer 500 to everything
        self.failing: dict[str, int] = {}  # path → status that it is answered with
        self.looked = threading.Condition()
        self._server = _counting(self)(address, _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def role(self, name: str) -> None:
        """Give the instance a role, with credentials that are good for six hours."""
        until = datetime.fromtimestamp(time.time() + 21600, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        keys = {"AccessKeyId": "ASIATESTING", "SecretAccessKey": "testing", "Token": "testing"}
        self.values["iam/security-credentials/"] = name
        self.values[f"iam/security-credentials/{name}"] = json.dumps(
            {"Code": "Success", "Type": "AWS-HMAC", "Expiration": until, **keys}
        )

    def spot(self, seconds: float = 120.0, action: str = "terminate") -> float:
        """Announce the end; its time, truncated to whole seconds as AWS writes it."""
        end = float(int(time.time() + seconds))
        stamp = datetime.fromtimestamp(end, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.values["spot/instance-action"] = json.dumps({"action": action, "time": stamp})
        return end

    def rebalance(self) -> None:
        self.values["events/recommendations/rebalance"] = json.dumps({"noticeTime": "2026-11-21T04:00:00Z"})

    def target(self, state: str) -> None:
        self.values["autoscaling/target-lifecycle-state"] = state

    def expire_tokens(self) -> None:
        self.tokens.clear()

    def wait_for(self, path: str, count: int = 1, timeout: float = 60.0) -> None:
        """Until `path` has been asked for `count` more times."""
        with self.looked:
            want = count + self._count(path)
            if not self.looked.wait_for(lambda: self._count(path) >= want, timeout):
                raise TimeoutError(f"nobody asked for {path}")

    def _count(self, path: str) -> int:
        return sum(asked == PREFIX + path for _, asked, _ in self.requests)

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, path: str, token: str, ttl: str) -> tuple[int, str]:
        if self.broken:
            return 500, "internal error"
        if path == "/latest/api/token":
            if method != "PUT":
                return 405, ""
            if not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
                return 400, "bad time to live"
            self.tokens.add(fresh := uuid.uuid4().hex)
            return 200, fresh
        if method != "GET":
            return 405, ""
        if token not in self.tokens:
            return 401, "unauthorized"
        if path.removeprefix(PREFIX) in self.failing:
            return self.failing[path.removeprefix(PREFIX)], "trouble"
        value = self.values.get(path.removeprefix(PREFIX)) if path.startswith(PREFIX) else None
        return (404, "not found") if value is None else (200, value)


def _counting(imds: FakeImds) -> type[ThreadingHTTPServer]:
    class Server(ThreadingHTTPServer):
        def verify_request(self, request: object, client_address: object) -> bool:
            imds.connections += 1  # one thread accepts them all
            return True

    return Server


def _handler(imds: FakeImds) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            if imds.hang.is_set():
                imds.hanging.set()
                imds.release.wait()
                return
            token = self.headers.get("X-aws-ec2-metadata-token", "")
            ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            status, text = imds.answer(self.command, self.path, token, ttl)
            body = text.encode()
            with imds.looked:  # before the answer: whoever has read that finds the request counted
                imds.requests.append((self.command, self.path, status))
                imds.looked.notify_all()
            with contextlib.suppress(ConnectionError):  # whoever asked may not wait for the answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = _serve

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instance", default="i-0123456789abcdef0")
    parser.add_argument("--type", default="g5.xlarge")
    parser.add_argument("--zone", default="eu-central-1a")
    parser.add_argument("--life-cycle", default="spot")
    parser.add_argument("--address", default="127.0.0.1:0")
    parser.add_argument("--role")
    options = parser.parse_args()
    host, _, port = options.address.rpartition(":")
    imds = FakeImds(options.instance, options.type, options.zone, options.life_cycle, (host, int(port)))
    if options.role:
        imds.role(options.role)
    print(imds.endpoint, flush=True)
    for line in sys.stdin:  # ends with whoever started it
        word, *rest = line.split()
        if word == "spot":
            imds.spot(float(rest[0]) if rest else 120.0)
        elif word == "rebalance":
            imds.rebalance()
        elif word == "target":
            imds.target(rest[0])
    imds.close()


if __name__ == "__main__":
    main()
