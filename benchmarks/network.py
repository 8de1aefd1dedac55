"""Compare the policy on two nodes over a slow link with one node and with two nodes, for several models.

    python benchmarks/network.py [--out network.json] [--only "transformer 10 M, 0.1 Gbit/s"] [--table]

Needs root, `ip` and `tc`: each node is a network namespace with one core, and a token bucket (tbf) limits the
link between them. Every case has three runs of `SECONDS` from their first step on: `policy`, where a job on
one node may take the other, `one` and `two`, whose number of nodes is fixed. A run that is in the file is not
repeated; all take about 15 minutes. `--unknown-link` keeps the agents from measuring the link.

Work is optimizer steps of a fixed batch. Step times are medians of the second half of a run. A prediction is
that of `adaptdl explain` at the end of the policy's run.

    python benchmarks/network.py --fall 3 --gradients 8

Three nodes at 1 Gbit/s train a script that sleeps 20 ms a sample and has so many MB of gradients. A person
asks for one, two and three replicas, and then leaves it to the policy. The wire of the third node (or of the
one that --fall says) falls to 0.1 Gbit/s, and comes back. It prints the changes, and the steps a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

SECONDS = 30.0
"""Length of the measured part of a run."""

PATIENCE = 60.0
"""Longest time until the first step, or until the step that ends a run."""

BATCH = 16
# model and Gbit/s of the link
CASES = {
    "CNN, 0.1 Gbit/s": ("cnn", 0.1),
    "CNN, 1 Gbit/s": ("cnn", 1.0),
    "transformer 10 M, 0.1 Gbit/s": ("10", 0.1),
    "transformer 10 M, 1 Gbit/s": ("10", 1.0),
    "transformer 40 M, 1 Gbit/s": ("40", 1.0),
}
WAYS = {"policy": "1:2", "one": "1", "two": "2"}  # --nnodes
ADDRESSES = ("10.233.59.1", "10.233.59.2", "10.233.59.3")
ETCD = f"{ADDRESSES[0]}:2379"


class Transformer(nn.Module):
    """Encoder of 12 layers over a vocabulary of 1,000: 10 M parameters of width 256, 38 M of width 512."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.codes = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 12)
        self.head = nn.Linear(width, 1000)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layers(self.codes(codes)))
        return scores.transpose(1, 2)


def cnn() -> nn.Module:
    """0.3 M parameters, for images of 32 × 32."""
    widths, layers = (3, 32, 64, 128, 128), list[nn.Module]()
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def train(kind: str, steps: Path) -> None:
    """Train until the process is stopped; rank 0 writes the time of each step's end to a file."""
    import adaptdl_elastic.torch as adl

    torch.manual_seed(0)
    torch.set_num_threads(1)
    adl.init_process_group("gloo")
    asleep = 0.0
    if kind not in ("cnn", "10", "40"):
        asleep, width = 0.02, int(float(kind) * 250e3) // 10
        net, inputs, targets = nn.Linear(width, 10), torch.randn(4096, width), torch.randint(0, 10, (4096,))
    elif kind == "cnn":
        net, inputs, targets = cnn(), torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,))
    else:
        net = Transformer({"10": 256, "40": 512}[kind])
        inputs = targets = torch.randint(0, 1000, (20000, 32))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    model = adl.AdaptiveDataParallel(net, optimizer)
    data = torch.utils.data.TensorDataset(inputs, targets)
    loader = adl.AdaptiveDataLoader(data, batch_size=BATCH, shuffle=True)
    with steps.open("a", buffering=1) as log:
        for _ in adl.remaining_epochs_until(10**6):
            for batch, labels in loader:
                time.sleep(asleep * len(batch))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch), labels).backward()
                optimizer.step()
                if os.environ["RANK"] == "0":
                    log.write(f"{time.time()}\n")


@contextmanager
def link(gbits: float, count: int = 2) -> Iterator[tuple[str, ...]]:
    """Make network namespaces at one switch, each with a wire of so many Gbit/s, and yield their names."""
    switch, *names = (f"adl-{os.getpid()}-{name}" for name in ("s", *"abc"[:count]))
    with ExitStack() as stack:
        for name in (switch, *names):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for name, address in zip(names, ADDRESSES, strict=False):
            port = name[-1]
            peer = ["type", "veth", "peer", "name", port, "netns", switch]
            _ip("link", "add", "wire", "netns", name, *peer)
            _ip("-n", switch, "link", "set", "dev", port, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")
            pace(name, gbits, "add")
        yield tuple(names)


def pace(name: str, gbits: float, how: str = "change") -> None:
    """Give the wire of a namespace so many Gbit/s in both directions."""
    bucket = ["tbf", "rate", f"{1000 * gbits:g}mbit", "burst", "1mb", "latency", "50ms"]
    for where, device in ((name, "wire"), (f"{name[:-1]}s", name[-1])):
        _ip("netns", "exec", where, "tc", "qdisc", how, "dev", device, "root", *bucket)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def running(name: str, command: Sequence[str], log: Path, core: int | None = None) -> Iterator[None]:
    """Run a command in a network namespace, and end it with all its children."""
    from etcd_server import tied

    pinned = [] if core is None else ["taskset", "-c", str(core)]
    with log.open("w") as out:
        process = subprocess.Popen(
            tied(["/usr/bin/env", "ip", "netns", "exec", name, *pinned, *command]), stdout=out, stderr=out
        )
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            process.terminate()
            for one in psutil.wait_procs(family, 15)[1]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        process.wait()


@contextmanager
def store(node: str, folder: Path) -> Iterator[None]:
    """Run etcd in a network namespace."""
    from etcd_server import find_etcd

    url, peer = f"http://{ETCD}", "http://127.0.0.1:2380"
    etcd = [str(find_etcd()), "--data-dir", f"{folder}/etcd", "--initial-cluster", f"default={peer}"]
    etcd += ["--listen-client-urls", url, "--advertise-client-urls", url]
    etcd += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    with running(node, etcd, folder / "etcd.log"):
        time.sleep(2.0)
        yield


def fall(third: int, megabytes: float) -> None:
    """Let the wire of one of three nodes fall and come back; print the changes, and the steps a second."""
    tools = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as name, link(1.0, 3) as nodes, ExitStack() as stack:
        folder = Path(name)
        stack.enter_context(store(nodes[0], folder))
        steps = folder / "steps"
        for address, node in zip(ADDRESSES, nodes, strict=True):
            agent = [str(tools / "adaptdl-run"), "--rdzv-endpoint", ETCD, "--nnodes", "1:3"]
            agent += ["--rdzv-id", "job", "--node-name", node[-1], "--local-addr", address]
            agent += ["--checkpoint-path", f"{folder}/saved", "--checkpoint-interval", "0"]
            agent += ["--event-log", f"{folder}/{node[-1]}.events"]
            agent += [str(Path(__file__).resolve()), "--train", f"{megabytes:g}", str(steps)]
            stack.enter_context(running(node, agent, folder / f"{node[-1]}.log"))

        def scale(*what: str) -> None:
            ask = ["ip", "netns", "exec", nodes[0], str(tools / "adaptdl"), "scale", "job", *what]
            subprocess.check_call([*ask, "--etcd", ETCD], stdout=subprocess.DEVNULL)

        def told(seconds: float, text: str) -> None:
            begun = time.time()
            times = _times(steps, begun + seconds - _times(steps, 0.0)[0])
            half = [one for one in times if one > begun + seconds / 2]
            rate = (len(half) - 1) / (half[-1] - half[0])
            events = (json.loads(line) for path in folder.glob("*.events") for line in path.open())
            plans = {one["generation"]: one for one in events if one["event"] == "generation"}.values()
            found = [
                f"{one['time'] - begun:.1f} s: {one['replicas']}" for one in plans if one["time"] > begun
            ]
            print(f"{text}: {rate:.2f} steps/s; {', '.join(found) or 'no change'}", flush=True)

        _times(steps, 0.0)
        for count in (1, 2, 3):
            scale("--replicas", str(count))
            told(25.0, f"{count} asked for")
        scale("--auto")
        told(40.0, "left to the policy")
        pace(nodes[third - 1], 0.1)
        told(45.0, f"the wire of node {third} at 0.1 Gbit/s")
        pace(nodes[third - 1], 1.0)
        told(90.0, "at 1 Gbit/s again")


def run(kind: str, gbits: float, way: str, unknown: bool) -> dict[str, Any]:
    """Make one run; return what was seen of it."""
    tools = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as name, link(gbits) as nodes, ExitStack() as stack:
        folder = Path(name)
        stack.enter_context(store(nodes[0], folder))
        steps, load = folder / "steps", os.getloadavg()[0]
        for core, node in enumerate(nodes[: 1 if way == "one" else 2]):
            agent = [str(tools / "adaptdl-run"), "--rdzv-endpoint", ETCD, "--nnodes", WAYS[way]]
            agent += ["--rdzv-id", "job", "--node-name", node[-1], "--local-addr", ADDRESSES[core]]
            agent += ["--checkpoint-path", f"{folder}/saved", "--checkpoint-interval", "0"]
            agent += ["--event-log", f"{folder}/{node[-1]}.events"]
            agent += ["--port-range", "21000:21014"] if unknown else []  # too few ports to measure the link
            agent += [str(Path(__file__).resolve()), "--train", kind, str(steps)]
            stack.enter_context(running(node, agent, folder / f"{node[-1]}.log", core))
            if core == 0 and way == "policy":
                _times(steps, 0.0)  # the other one joins a job that trains
        times = _times(steps, SECONDS)
        explained: dict[str, Any] = {}
        if way == "policy":
            ask = ["ip", "netns", "exec", nodes[0], str(tools / "adaptdl"), "explain", "job", "--json"]
            explained = json.loads(subprocess.check_output([*ask, "--etcd", ETCD]))
        lines = (folder / "a.events").read_text().splitlines()
    events = [
        one for one in map(json.loads, lines) if one["event"] in ("started", "generation", "prediction")
    ]
    return {"way": way, "load": load, "times": times, "explained": explained, "events": events}


def _times(steps: Path, seconds: float) -> list[float]:
    """Wait for the first step that ends so long after the first one, and return the times of all."""
    deadline = time.time() + PATIENCE + seconds
    while time.time() < deadline:
        times = [float(line) for line in steps.read_text().split()] if steps.exists() else []
        if times and times[-1] - times[0] >= seconds:
            return times
        time.sleep(0.2)
    raise RuntimeError(f"no step within {PATIENCE + seconds:.0f} s")


def work(times: Sequence[float]) -> float:
    """Return the steps within `SECONDS`, the part of the last one included."""
    end = times[0] + SECONDS
    done = [one for one in times if one <= end]
    after = next((one for one in times if one > end), end + 1e-9)
    return len(done) - 1 + (end - done[-1]) / (after - done[-1])


def step_time(times: Sequence[float]) -> float:
    """Return the median seconds of the steps that end in the second half of a run, or of its last one."""
    gaps = [(end, end - begin) for begin, end in pairwise(times)]
    late = [gap for end, gap in gaps if end > times[0] + SECONDS / 2]
    return statistics.median(late or [gaps[-1][1]])


def row(name: str, runs: dict[str, Any]) -> str:
    """Return the row of a case in the table."""
    done = {way: work(runs[way]["times"]) for way in WAYS}
    told = runs["policy"]["explained"]
    rates = {
        option["replicas"]: option["goodput"]
        for option in (told["now"], told["one_more"], told["one_fewer"])
        if option and option["goodput"]
    }
    predicted = [
        f"{BATCH / rates[count]:.2f} / {step_time(runs[way]['times']):.2f}" if count in rates else "–"
        for way, count in (("one", 1), ("two", 2))
    ]
    own = step_time(runs["policy"]["times"]) * rates.get(told["replicas"], 0.0) / BATCH
    sizes = [one["replicas"] for one in runs["policy"]["events"] if one["event"] == "generation"]
    cells = [
        name,
        *(f"{done[way]:.0f}" for way in WAYS),
        f"{done['policy'] / max(done['one'], done['two']):.2f}",
    ]
    cells += [" → ".join(map(str, sizes)), *predicted, f"{1 / own:.2f}" if own else "–"]
    return f"| {' | '.join(cells)} | {max(one['load'] for one in runs.values()):.1f} |"


COLUMNS = (
    "case", "steps: policy", "one", "two", "policy / better", "nodes of the policy",
    "s on one: predicted / measured", "on two", "predicted / measured at the end", "load",
)  # fmt: skip


def main() -> None:
    """Make the runs that are not in the file yet, and print the table of complete cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("network.json"), help="results by case")
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--unknown-link", action="store_true", help="keep agents from measuring the link")
    parser.add_argument("--train", nargs=2, metavar=("MODEL", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--fall", type=int, choices=(1, 2, 3), help="the node whose wire falls")
    parser.add_argument("--gradients", type=float, default=8.0, help="MB of gradients")
    args = parser.parse_args()
    if args.fall:
        return fall(args.fall, args.gradients)
    if args.train:
        return train(args.train[0], Path(args.train[1]))
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in [] if args.table else [args.only] if args.only else CASES:
        runs = found.setdefault(name, {})
        for way in WAYS:
            if way not in runs:
                runs[way] = run(*CASES[name], way, args.unknown_link)
                args.out.write_text(json.dumps(found))
                print(f"{name}, {way}: {work(runs[way]['times']):.1f} steps", file=sys.stderr, flush=True)
    print(f"| {' | '.join(COLUMNS)} |\n{len(COLUMNS) * '|---'}|")
    for name, runs in found.items():
        if runs.keys() == WAYS.keys():
            print(row(name, runs))


if __name__ == "__main__":
    main()
