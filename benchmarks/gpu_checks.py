"""What can only be seen with a GPU: cost of a step, memory, mixed precision, one command, a few minutes.

    PYTHONPATH=. python benchmarks/gpu_checks.py [--rounds 40] [--out gpu_checks.json]

Runs benchmarks/step_overhead.py on CUDA with NCCL, one replica per visible GPU up to two, in float32,
bfloat16 autocast and float16 with GradScaler; compares the trajectory with DDP's and the statistics with
those of the CPU; and measures the peak of memory that AdaptiveDataParallel adds. Exits 1 when a check
fails, after having run all of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
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

from adaptdl_elastic.torch._noise import Schedule
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", help="write what was found to this file, as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is visible: run this on a machine that has one")
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    failed = False
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    checks: list[Callable[[], dict[str, Any]]] = [
        same_trajectory_as_ddp,
        same_statistics_as_on_the_cpu,
        grad_scaler_skips_inf,
        peak_memory,
    ]
    for check in checks:
        try:
            found[check.__name__] = check()
            print(f"ok      {check.__name__}: {found[check.__name__]}", flush=True)
        except Exception as error:
            failed = True
            traceback.print_exc()
            found[check.__name__] = f"{type(error).__name__}: {error}"
            print(f"FAILED  {check.__name__}: {error}", flush=True)
    dist.destroy_process_group()
    found["overheads"] = overheads(arguments.rounds)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=2) + "\n")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
