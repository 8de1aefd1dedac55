"""Two jobs share this machine: the first grows, makes room for the second, and the other way round.

    python examples/two_jobs.py

An etcd, one agent per job, and the coordinator that the first of them starts. What is printed is the
coordinator's own log: every plan with its reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.store.connect import connect

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # the etcd is the tests'

from etcd_server import EtcdServer

SCRIPT = Path(__file__).with_name("image_classification.py")


def start(etcd: str, name: str, slots: int, epochs: int, folder: Path) -> subprocess.Popen[bytes]:
    """One `adaptdl-run`, as somebody would start it in a terminal of their own."""
    command = [sys.executable, "-m", "adaptdl_elastic.agent", f"--rdzv-endpoint={etcd}", f"--rdzv-id={name}"]
    command += [f"--nproc-per-node=1:{slots}", f"--checkpoint-path={folder / name}"]
    command += [str(SCRIPT), f"--epochs={epochs}"]
    output = (folder / f"{name}.log").open("wb")
    return subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)


def follow(store: Store, keys: Keys, grown: threading.Event, seen: list[dict[str, object]]) -> None:
    """Print every plan, and tell when the first job has grown."""
    began = None
    with store.watch(keys.events, store.range(keys.events).revision + 1) as watch:
        for change in watch:
            event = json.loads(change.value or "{}")
            if event.get("event") not in ("plan", "state"):
                continue
            began = began or event["time"]
            seen.append(event)
            what = event["state"] if event["event"] == "state" else _replicas(event["replicas"])
            when = f"{event['time'] - began:6.1f} s"
            print(f"{when}  {event['job']:<7} {what:<11} {event['reason']}", flush=True)
            if event["event"] == "plan" and event["replicas"] > 1:
                grown.set()


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--slots", type=int, default=2, help="replicas that fit on this machine")
    parser.add_argument(
        "--epochs", type=int, default=30, help="of the first job; the second has half as many"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for everything")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, EtcdServer() as etcd, connect(etcd.endpoint) as store:
        folder, grown = Path(name), threading.Event()
        seen: list[dict[str, object]] = []
        arguments = (store, Keys(), grown, seen)
        threading.Thread(target=follow, args=arguments, daemon=True).start()
        jobs = [start(etcd.endpoint, "first", given.slots, given.epochs, folder)]
        try:
            grown.wait(given.timeout / 4)
            jobs.append(start(etcd.endpoint, "second", given.slots, given.epochs // 2, folder))
            codes = [job.wait(given.timeout) for job in jobs]
        except subprocess.TimeoutExpired:
            print(f"not done after {given.timeout:g} s: stopping both; fewer --epochs, or more --timeout")
            return 1
        finally:
            for job in jobs:
                job.terminate()
                job.wait()
        for label, code in zip(("first", "second"), codes, strict=True):
            if code:
                print(f"{label} ended with {code}:", (folder / f"{label}.log").read_text()[-2000:])
        return max(codes)


if __name__ == "__main__":
    sys.exit(main())
