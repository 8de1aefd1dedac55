"""What can only be seen with a GPU: changes in place, a step, memory, mixed precision, in six minutes.

    PYTHONPATH=. python benchmarks/gpu_checks.py [--only CHECK] [--minutes 6] [--out gpu_checks.json]

Each check is a process of its own with a time limit, so one that fails, crashes or hangs does not hinder the
others. The file is written after each check. Checked are: the self-test, groups that are aborted and formed
again, a newcomer's warm-up, state on its way from GPU memory into GPU memory, two and three ranks on one GPU
(gpu_ranks.py), the trajectory against DDP's, the statistics against those of the CPU, a GradScaler, the peak
of memory, a step of GPT-2 124 M and of ResNet-50, and what a checkpoint of 1.5 GB stalls. With --overheads
benchmarks/step_overhead.py runs as well, on CUDA with NCCL. Exits 1 when a check has failed, after having run
all of them. With --device cpu all is tried at a tiny size, on a stand-in for NCCL: that finds typing errors.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_models
import gpu_ranks
import step_overhead
from step_overhead import CASES, Options

from adaptdl_elastic import _session
from adaptdl_elastic.checkpoint.state_copy import strip
from adaptdl_elastic.torch._elastic import state_transfer as transfer
from adaptdl_elastic.torch._process_group import backends, selftest
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel

SMALL = bool({"cpu", "--device=cpu"} & set(sys.argv[1:]))
DEVICE, BACKEND = ("cpu", "deferred") if SMALL else ("cuda", "nccl")


def adaptive(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, **options: Any) -> Any:
    adp = AdaptiveDataParallel(model, optimizer, name=name, **options)
    adp.gns.gap = 1
    adp._sampler._generator.manual_seed(0)
    return adp


def same_trajectory_as_ddp() -> dict[str, Any]:
    """Ten steps of the MLP, every one sampled; the same kernels in the same order must give equal bits."""
    torch.manual_seed(0)
    case = CASES["mlp"]
    model = case.model().to(DEVICE)
    other = copy.deepcopy(model)
    ours, theirs = case.optimizer(model), case.optimizer(other)
    pairs = [(adaptive(model, ours, "same"), ours), (DistributedDataParallel(other), theirs)]
    for _ in range(10):
        inputs, targets = (t.to(DEVICE) for t in case.data(case.local))
        for wrapped, optimizer in pairs:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(inputs), targets).backward()
            optimizer.step()
    different = sum(int((a != b).sum()) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert different == 0, f"{different} parameters differ"
    return {"different": different}


def same_statistics_as_on_the_cpu() -> dict[str, Any]:
    found = {}
    for label, device in (("cpu", "cpu"), ("gpu", DEVICE)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        # NCCL has no CPU: the CPU's side has a group of its own.
        group = dist.new_group(backend="gloo") if label == "cpu" else None
        adp = adaptive(model, optimizer, label, process_group=group)
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            x = torch.randn(64, 20, generator=generator).to(device)
            y = torch.randn(64, 1, generator=generator).to(device)
            optimizer.zero_grad()
            (adp(x) - y).square().mean().backward()
            optimizer.step()
        adp._sampler.collect()
        found[label] = (adp.gns.sqr_avg(), adp.gns.var_avg())
    for cpu, cuda in zip(found["cpu"], found["gpu"], strict=True):
        assert abs(cpu - cuda) <= 1e-2 * abs(cpu) + 1e-6, found
    return found


def grad_scaler_skips_inf() -> dict[str, Any]:
    model = nn.Linear(64, 8).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=not SMALL)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**16)
    adp = adaptive(model, optimizer, "scaler", mp_scaler=scaler)
    for step in range(12):  # a measurement counts after eight of them
        inputs = torch.randn(32, 64, device=DEVICE)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16 if SMALL else torch.float16):
            loss = adp(inputs).square().mean() * (float("inf") if step == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    adp._sampler.collect()
    assert adp.gns.var_avg() < float("inf")
    assert adp.gns.var_avg() > 0.0
    return {"var": adp.gns.var_avg(), "steps": adp.gns.steps, "skipped": adp.gns.skipped}


def peak_memory() -> dict[str, Any]:
    """Peak bytes beyond DDP's, in units of the gradient; 1 is allowed on one replica."""
    case = CASES["transformer"]
    peaks = []
    for wrap in ("ddp", "ours"):
        torch.manual_seed(0)
        before = gpu_models.allocated()
        model = case.model().to(DEVICE)
        optimizer = case.optimizer(model)
        wrapped = DistributedDataParallel(model) if wrap == "ddp" else adaptive(model, optimizer, "memory")
        batch = [t.to(DEVICE) for t in case.data(case.local)]
        for step in range(6):
            if step == 3 and not SMALL:
                torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(batch[0]), batch[1]).backward()
            optimizer.step()
        gpu_models.synchronize()
        peaks.append(0 if SMALL else torch.cuda.max_memory_allocated() - before)
        size = 4 * sum(p.numel() for p in model.parameters())
        del model, optimizer, wrapped, batch
    copies = (peaks[1] - peaks[0]) / size
    assert copies <= 1.1, f"{copies:.2f} gradient-sized copies"
    return {"copies": copies}


def self_test(backend: str = BACKEND) -> dict[str, Any]:
    """What a job asks before it changes in place. With two GPUs one of two processes is killed in it."""
    began = time.monotonic()
    why = selftest.ask_processes(backend, selftest.LIMIT)
    assert why is None, why
    return {"seconds": time.monotonic() - began}


def made_anew(backend: str = BACKEND, times: int = 20) -> dict[str, Any]:
    """A world of one, aborted with an all-reduce under way and made anew: nothing may be left behind."""
    kind = backends.kind(backend)
    assert issubclass(kind, backends.Nccl)
    kind.prepare()
    used, held, threads, seconds = [], [], [], []
    storages: list[StorageWeakRef] = []
    for _ in range(times + 1):
        began = time.monotonic()
        group = selftest._join(kind, backend, dist.HashStore(), 0, 1, kind.devices()[0])
        flat = torch.ones(1 << (24 if group.device.type == "cuda" else 18), device=group.device)
        storages.append(StorageWeakRef(flat.untyped_storage()))
        group.queue(lambda flat=flat: dist.all_reduce(flat, async_op=True))
        selftest._abort(group)
        del flat
        held.append(gpu_models.allocated())
        seconds.append(time.monotonic() - began)
        used.append(_used(group.device))
        threads.append(_threads())
    assert held[-1] <= held[0], f"bytes of tensors after each: {held}"
    end = time.monotonic() + 30.0  # threads end a moment after their group, and hold tensors until then
    while (alive := sum(not one.expired() for one in storages)) > 1:
        assert time.monotonic() < end, f"{alive} tensors of aborted collectives are left"
        time.sleep(0.01)
    # The first one loads NCCL.
    assert used[-1] - used[1] <= 16 << 20, f"bytes of the device in use after each: {used}"
    while _threads() - threads[1] > 4:
        assert time.monotonic() < end, f"threads after each: {threads}"
        time.sleep(0.01)
    return {
        "times": times,
        "seconds": sorted(seconds[1:])[times // 2],
        "bytes": used[-1] - used[1],
        "tensor_bytes": held[-1] - held[0],
        "threads": threads,
    }


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _used(device: torch.device) -> int:
    """Bytes of the device that are in use, by whomever, without what torch could give back."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def newcomer(backend: str = BACKEND) -> dict[str, Any]:
    """A model that warms up on torch's fake backend and then joins a world, as a newcomer's does."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    kind = backends.kind(backend)
    assert issubclass(kind, backends.Nccl)
    kind.prepare()
    device = kind.devices()[0]
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    adp = adaptive(model, optimizer, "newcomer")

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            adp(torch.randn(32, 64, device=device)).square().mean().backward()
            optimizer.step()

    train()
    dist.destroy_process_group()
    began = time.monotonic()
    group = selftest._join(kind, backend, dist.HashStore(), 0, 1, device)
    adp.reinit_process_group()
    joined = time.monotonic() - began
    train()
    group.destroy()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    _session.reset()
    return {"seconds": joined}


class _Loop(backends.Group):
    """Sends to itself, through memory of the device: NCCL has no two ranks on one GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("loop")
        self._device, self._sent = device, queue.SimpleQueue[torch.Tensor]()

    @property
    def device(self) -> torch.device:
        return self._device

    def here(self) -> Any:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else super().here()

    def send(self, flat: torch.Tensor, peer: int, turn: timedelta = backends.ARRIVES) -> None:
        assert flat.device == self._device, flat.device
        self._sent.put(flat.clone())

    def receive(self, flat: torch.Tensor, peer: int, turn: timedelta = backends.ARRIVES) -> None:
        flat.copy_(self._sent.get())


def state_transfer(device: str = "cpu" if SMALL else "cuda:0") -> dict[str, Any]:
    """Model and optimizer through the buckets of a transfer: equal, and on the device, in the end."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 1024, device=device)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    tensors: list[torch.Tensor] = []
    described = strip(state, tensors)
    targets, group = transfer._fresh(described), _Loop(torch.device(device))
    size = sum(tensor.nbytes for tensor in tensors)
    before = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    began = time.monotonic()

    def there_and_back() -> None:
        pairs = zip(transfer._buckets(tensors), transfer._buckets(targets), strict=True)
        for ours, theirs in pairs:
            transfer.send_bucket(group, ours, [0])
            transfer._receive(group, theirs, 0)

    backends.patiently(_session.current(), group, there_and_back)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    extra = (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0) - before
    for ours, theirs in zip(tensors, targets, strict=True):
        assert ours.device == theirs.device, (ours.device, theirs.device)
        assert torch.equal(ours, theirs)
    _session.reset()
    return {"bytes": size, "seconds": seconds, "extra": extra}


def overheads(rounds: int) -> list[dict[str, Any]]:
    replicas = [1] + ([2] if torch.cuda.device_count() > 1 else [])
    rows = []
    for model in CASES:
        rule = "adamscale" if model == "transformer" else "adascale"
        for precision in ("fp32", "bf16", "fp16"):
            for nproc in replicas:
                options = Options(model, nproc, rule, rounds, 120.0, 2048, "cuda", precision)
                rows.append({**asdict(options), **asdict(step_overhead.run(options))})
                print(rows[-1], flush=True)
    return rows


def ranks_10m() -> dict[str, Any]:
    """Two and three ranks on one GPU: grow, shrink, kill, and memory after each."""
    return gpu_ranks.change(DEVICE, 100_000 if SMALL else 10_000_000, deaths=1 if SMALL else 2)


def ranks_100m() -> dict[str, Any]:
    """The same with 100 M parameters, where a step takes 0.3 s."""
    return gpu_ranks.change(DEVICE, 200_000 if SMALL else 100_000_000, deaths=1, seconds=3.0)


def gpt2_step() -> dict[str, Any]:
    return gpu_models.against_ddp(gpu_models.gpt2(DEVICE), 4 if SMALL else 120)


def resnet50_step() -> dict[str, Any]:
    return gpu_models.against_ddp(gpu_models.resnet50(DEVICE), 4 if SMALL else 120)


def checkpoint_stalls() -> dict[str, Any]:
    """GPT-2 with its AdamW state is 1.5 GB."""
    return gpu_models.stalls(gpu_models.gpt2(DEVICE))


APART: dict[Callable[[], dict[str, Any]], float] = {
    self_test: 60,
    made_anew: 60,
    newcomer: 40,
    state_transfer: 40,
}
"""Checks that make groups of their own, and the seconds that each may take."""

TOGETHER: dict[Callable[[], dict[str, Any]], float] = {
    same_trajectory_as_ddp: 40,
    same_statistics_as_on_the_cpu: 40,
    grad_scaler_skips_inf: 40,
    peak_memory: 40,
    gpt2_step: 60,
    resnet50_step: 60,
    checkpoint_stalls: 60,
}
"""Checks within one world of one, and the seconds that each may take."""

RANKS: dict[Callable[[], dict[str, Any]], float] = {ranks_10m: 110, ranks_100m: 120}
"""Checks that run a job, and the seconds that each may take. They are last: there may be no time for all."""

CHECKS = {one.__name__: one for one in (*APART, *TOGETHER, *RANKS)}
LIMITS = {one.__name__: limit for one, limit in (*APART.items(), *TOGETHER.items(), *RANKS.items())}


def run_here(name: str) -> dict[str, Any]:
    """Run one check in this process, and return what it found, or why it failed."""
    check = CHECKS[name]
    if SMALL:
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # of the self-test's processes
        importlib.import_module("deferred_backend")
    try:
        if check in TOGETHER:
            dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
        return {"ok": True, **check()}
    except Exception as error:
        traceback.print_exc()
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def run_apart(command: list[str], limit: float) -> dict[str, Any]:
    """Run one check in a process of its own, which writes what it found to the file that is added."""
    with tempfile.TemporaryDirectory() as folder:
        out, said, begun = Path(folder) / "found.json", Path(folder) / "said", time.monotonic()
        with said.open("w") as stream:
            process = subprocess.Popen(
                [*command, "--out", str(out)], stdout=stream, stderr=stream, start_new_session=True
            )
        try:
            process.wait(limit)
            why = f"it ended with code {process.returncode}"
        except subprocess.TimeoutExpired:
            why = f"it did not end within {limit:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        found: dict[str, Any] = {"ok": False, "error": why}
        if out.exists() and out.read_text().endswith("\n"):
            found = json.loads(out.read_text())
        if not found["ok"]:
            found["output"] = said.read_text(errors="replace")[-3000:]
        return {**found, "took": round(time.monotonic() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", choices=list(CHECKS), help="one check, in this process")
    parser.add_argument("--minutes", type=float, default=6.0, help="time of all checks")
    parser.add_argument("--overheads", action="store_true", help="also benchmarks/step_overhead.py: minutes")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", help="write what was found to this file, as JSON")
    arguments = parser.parse_args()
    if not SMALL and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is visible: run this on a machine that has one")
    out = None if arguments.out is None else Path(arguments.out)
    if arguments.only is not None:
        found = run_here(arguments.only)
        print(json.dumps(found), flush=True)
        if out is not None:
            out.write_text(json.dumps(found) + "\n")
        sys.stdout.flush()
        os._exit(0 if found["ok"] else 1)  # threads of an aborted group may never end
    end = time.monotonic() + 60 * arguments.minutes
    name = "a CPU" if SMALL else torch.cuda.get_device_name()
    everything: dict[str, Any] = {"device": name, "torch": torch.__version__}
    for name, limit in LIMITS.items():
        left = min(limit, end - time.monotonic())
        command = [sys.executable, __file__, "--only", name, "--device", arguments.device]
        found = run_apart(command, left) if left > 0 else {"ok": False, "error": "no time was left"}
        everything[name] = found
        print(f"{'ok    ' if found['ok'] else 'FAILED'}  {name}: {json.dumps(found)}", flush=True)
        if out is not None:
            out.write_text(json.dumps(everything, indent=2) + "\n")
    if arguments.overheads:
        everything["overheads"] = overheads(arguments.rounds)
        if out is not None:
            out.write_text(json.dumps(everything, indent=2) + "\n")
    raise SystemExit(0 if all(everything[name]["ok"] for name in CHECKS) else 1)


if __name__ == "__main__":
    main()
