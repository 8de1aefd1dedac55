"""Compare the policy on two nodes over a slow link with one node and with two nodes, for several models.

    python benchmarks/network.py [--out network.json] [--only "transformer 10 M, 0.1 Gbit/s"] [--table]

Needs root, `ip` and `tc`: each node is a network namespace with one core, and a token bucket (tbf) limits the
link between them. Every case has three runs of `SECONDS` from their first step on: `policy`, where a job on
one node may take the other, `one` and `two`, whose number of nodes is fixed. A run that is in the file is not
repeated; all take about 15 minutes. `--unknown-link` keeps the agents from measuring the link.

Work is optimizer steps of a fixed batch. Step times are medians of the second half of a run. A prediction is
that of `adaptdl explain` at the end of the policy's run.
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
ADDRESSES = ("10.233.59.1", "10.233.59.2")
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
    if kind == "cnn":
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
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch), labels).backward()
                optimizer.step()
                if os.environ["RANK"] == "0":
                    log.write(f"{time.time()}\n")


@contextmanager
def link(gbits: float) -> Iterator[tuple[str, str]]:
    """Make two network namespaces with a link of so many Gbit/s, and yield their names."""
    names = f"adl-{os.getpid()}-a", f"adl-{os.getpid()}-b"
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        ends = [["wire", "netns", name] for name in names]
        _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _ip("-n", name, "link", "set", device, "up")
            bucket = ["tbf", "rate", f"{1000 * gbits:g}mbit", "burst", "1mb", "latency", "50ms"]
            _ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "wire", "root", *bucket)
        yield names


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


def run(kind: str, gbits: float, way: str, unknown: bool) -> dict[str, Any]:
    """Make one run; return what was seen of it."""
    from etcd_server import find_etcd

    tools = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as name, link(gbits) as nodes, ExitStack() as stack:
        folder = Path(name)
        url, peer = f"http://{ETCD}", "http://127.0.0.1:2380"
        etcd = [str(find_etcd()), "--data-dir", f"{folder}/etcd", "--initial-cluster", f"default={peer}"]
        etcd += ["--listen-client-urls", url, "--advertise-client-urls", url]
        etcd += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        stack.enter_context(running(nodes[0], etcd, folder / "etcd.log"))
        time.sleep(2.0)
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
    args = parser.parse_args()
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
