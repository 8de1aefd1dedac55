"""What can only be seen with a GPU: cost of a step, memory, mixed precision, one command, a few minutes.

    PYTHONPATH=. python benchmarks/gpu_checks.py [--rounds 40] [--only CHECK] [--out gpu_checks.json]

Runs benchmarks/step_overhead.py on CUDA with NCCL, one replica per visible GPU up to two, in float32,
bfloat16 autocast and float16 with GradScaler; compares the trajectory with DDP's and the statistics with
those of the CPU; and measures the peak of memory that AdaptiveDataParallel adds. Of a change in place it
tries what one GPU allows: the self-test, groups that are aborted and made anew, the memory and threads
that they leave behind, a newcomer's warm-up, and state on its way from GPU memory into GPU memory. Exits
1 when a check fails, after having run all of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import queue
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent))
import step_overhead
from step_overhead import CASES, Options

from adaptdl_elastic import _session
from adaptdl_elastic.torch._elastic import state_transfer as transfer
from adaptdl_elastic.torch._gradient.estimator import Schedule
from adaptdl_elastic.torch._process_group import backends, selftest
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel

EVERY = Schedule(longest=1)


def adaptive(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, **options: Any) -> Any:
    adp = AdaptiveDataParallel(model, optimizer, name=name, **options)
    adp.gns.cheap_schedule = adp.gns.costly_schedule = EVERY
    adp._sampler._generator.manual_seed(0)
    return adp


def same_trajectory_as_ddp() -> dict[str, Any]:
    """Ten steps of the MLP, every one sampled; the same kernels in the same order must give equal bits."""
    torch.manual_seed(0)
    case = CASES["mlp"]
    model = case.model().cuda()
    other = copy.deepcopy(model)
    ours, theirs = case.optimizer(model), case.optimizer(other)
    pairs = [(adaptive(model, ours, "same"), ours), (DistributedDataParallel(other), theirs)]
    for _ in range(10):
        inputs, targets = (t.cuda() for t in case.data(case.local))
        for wrapped, optimizer in pairs:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(inputs), targets).backward()
            optimizer.step()
    different = sum(int((a != b).sum()) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert different == 0, f"{different} parameters differ"
    return {"different": different}


def same_statistics_as_on_the_cpu() -> dict[str, Any]:
    found = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        # NCCL has no CPU: the CPU's side has a group of its own.
        group = dist.new_group(backend="gloo") if device == "cpu" else None
        adp = adaptive(model, optimizer, device, process_group=group)
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            x = torch.randn(64, 20, generator=generator).to(device)
            y = torch.randn(64, 1, generator=generator).to(device)
            optimizer.zero_grad()
            (adp(x) - y).square().mean().backward()
            optimizer.step()
        adp._sampler.collect()
        found[device] = (adp.gns.sqr_avg(), adp.gns.var_avg())
    for cpu, cuda in zip(found["cpu"], found["cuda"], strict=True):
        assert abs(cpu - cuda) <= 1e-2 * abs(cpu) + 1e-6, found
    return found


def grad_scaler_skips_inf() -> dict[str, Any]:
    model = nn.Linear(64, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16)
    adp = adaptive(model, optimizer, "scaler", mp_scaler=scaler)
    for step in range(8):
        inputs = torch.randn(32, 64, device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
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
        before = torch.cuda.memory_allocated()
        model = case.model().cuda()
        optimizer = case.optimizer(model)
        wrapped = DistributedDataParallel(model) if wrap == "ddp" else adaptive(model, optimizer, "memory")
        batch = [t.cuda() for t in case.data(case.local)]
        for step in range(6):
            if step == 3:
                torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(batch[0]), batch[1]).backward()
            optimizer.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        size = 4 * sum(p.numel() for p in model.parameters())
        del model, optimizer, wrapped, batch
    copies = (peaks[1] - peaks[0]) / size
    assert copies <= 1.1, f"{copies:.2f} gradient-sized copies"
    return {"copies": copies}


def self_test(backend: str = "nccl") -> dict[str, Any]:
    """What a job asks before it changes in place. With two GPUs one of two processes is killed in it."""
    began = time.monotonic()
    why = selftest.ask_processes(backend, selftest.LIMIT)
    assert why is None, why
    return {"seconds": time.monotonic() - began}


def made_anew(backend: str = "nccl", times: int = 20) -> dict[str, Any]:
    """A world of one, aborted with an all-reduce under way and made anew: nothing may be left behind."""
    kind = backends.kind(backend)
    assert issubclass(kind, backends.Nccl)
    kind.prepare()
    used, threads, seconds = [], [], []
    for _ in range(times + 1):
        began = time.monotonic()
        group = selftest._join(kind, backend, dist.HashStore(), 0, 1, kind.devices()[0])
        flat = torch.ones(1 << 24, device=group.device)
        group.queue(lambda flat=flat: dist.all_reduce(flat, async_op=True))
        selftest._abort(group)
        seconds.append(time.monotonic() - began)
        used.append(_used(group.device))
        threads.append(len(list(Path("/proc/self/task").iterdir())))
    # The first one loads NCCL, and threads end a moment after their group.
    assert used[-1] - used[1] <= 16 << 20, f"bytes of the device in use after each: {used}"
    assert threads[-1] - threads[1] <= 4, f"threads after each: {threads}"
    return {
        "times": times,
        "seconds": sorted(seconds[1:])[times // 2],
        "bytes": used[-1] - used[1],
        "threads": threads,
    }


def _used(device: torch.device) -> int:
    """Bytes of the device that are in use, by whomever, without what torch could give back."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def newcomer(backend: str = "nccl") -> dict[str, Any]:
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

    def send(self, flat: torch.Tensor, peer: int) -> None:
        assert flat.device == self._device, flat.device
        self._sent.put(flat.clone())

    def receive(self, flat: torch.Tensor, peer: int) -> None:
        flat.copy_(self._sent.get())


def state_transfer(device: str = "cuda:0") -> dict[str, Any]:
    """Model and optimizer through the buckets of a transfer: equal, and on the device, in the end."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 1024, device=device)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    tensors: list[torch.Tensor] = []
    described = transfer.strip(state, tensors)
    slots: list[transfer.Slot] = []
    transfer._find_slots(described, slots)
    targets, group = [slot.fresh() for slot in slots], _Loop(torch.device(device))
    size = sum(tensor.nbytes for tensor in tensors)
    before = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    began = time.monotonic()

    def there_and_back() -> None:
        pairs = zip(transfer._buckets(tensors), transfer._buckets(targets), strict=True)
        for ours, theirs in pairs:
            transfer.send_bucket(group, ours, 0)
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
                row = rows[-1]
                print(
                    f"{model} {precision} ×{nproc}: wall ×{row['wall']:.3f}, CPU ×{row['cpu']:.3f}",
                    flush=True,
                )
    return rows


APART: list[Callable[[], dict[str, Any]]] = [self_test, made_anew, newcomer, state_transfer]
"""Checks that make groups of their own."""

TOGETHER: list[Callable[[], dict[str, Any]]] = [
    same_trajectory_as_ddp,
    same_statistics_as_on_the_cpu,
    grad_scaler_skips_inf,
    peak_memory,
]
"""Checks within one world of one."""


def passes(check: Callable[[], dict[str, Any]], found: dict[str, Any]) -> bool:
    """Run `check` and keep what it found, or why it failed."""
    name = check.__name__
    try:
        found[name] = check()
    except Exception as error:
        traceback.print_exc()
        found[name] = f"{type(error).__name__}: {error}"
        print(f"FAILED  {name}: {error}", flush=True)
        return False
    print(f"ok      {name}: {found[name]}", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", choices=[check.__name__ for check in (*APART, *TOGETHER)], help="one check")
    parser.add_argument("--out", help="write what was found to this file, as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is visible: run this on a machine that has one")
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    only = arguments.only
    failed = False
    for check in APART:
        failed |= only in (None, check.__name__) and not passes(check, found)
    if only is None or only in [check.__name__ for check in TOGETHER]:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        for check in TOGETHER:
            failed |= only in (None, check.__name__) and not passes(check, found)
        dist.destroy_process_group()
    if only is None:
        found["overheads"] = overheads(arguments.rounds)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=2) + "\n")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
