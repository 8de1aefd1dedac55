"""GPT-2 124 M and ResNet-50 for gpu_checks.py: a step, its peak memory, and what a checkpoint stalls it."""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from adaptdl_elastic import checkpoint
from adaptdl_elastic.torch._gradient.out_of_memory import unguarded
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        found: torch.Tensor = x + self.mlp(self.after(x))
        return found


class Gpt2(nn.Module):
    """GPT-2 with tied embeddings; 124 M parameters as it is."""

    def __init__(
        self, words: int = 50257, length: int = 1024, width: int = 768, depth: int = 12, heads: int = 12
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        found: torch.Tensor = self.head(self.norm(self.blocks(self.words(tokens) + self.places(places))))
        return found.flatten(0, 1)


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.way = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.beside: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.beside = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.way(x) + self.beside(x))


def resnet(width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """ResNet-50 as it is."""
    layers: list[nn.Module] = [
        *(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    ]
    before = width
    for stage, depth in enumerate(depths):
        for index in range(depth):
            layers.append(Bottleneck(before, width << stage, 2 if stage and not index else 1))
            before = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


@dataclass(frozen=True)
class Work:
    """A model and a batch of it, on a device."""

    model: Callable[[], nn.Module]
    inputs: torch.Tensor
    targets: torch.Tensor

    def step(self, wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        with torch.autocast(self.inputs.device.type, torch.bfloat16):
            loss = cross_entropy(wrapped(self.inputs), self.targets)
        loss.backward()
        optimizer.step()


def gpt2(device: str) -> Work:
    """Return GPT-2 124 M and 16 texts of 1,024 tokens; a tiny one on the CPU."""
    large = device == "cuda"
    words, batch, length = (50257, 16, 1024) if large else (100, 2, 8)
    sizes = {} if large else {"words": words, "length": length, "width": 32, "depth": 2, "heads": 2}
    tokens = torch.randint(0, words, (batch, length + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    return Work(lambda: Gpt2(**sizes).to(device), inputs, targets)


def resnet50(device: str) -> Work:
    """Return ResNet-50 and 128 images, channels last; a tiny one on the CPU."""
    large = device == "cuda"
    batch, side = (128, 224) if large else (2, 32)
    images = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
    make: Callable[[], nn.Module] = resnet if large else lambda: resnet(8, (1, 1))
    targets = torch.randint(0, 1000, (batch,), device=device)
    return Work(lambda: make().to(device, memory_format=torch.channels_last), images, targets)  # type: ignore[call-overload]


def against_ddp(work: Work, steps: int) -> dict[str, Any]:
    """Return seconds of a step and peak bytes of plain DDP and of AdaptiveDataParallel."""
    found: dict[str, Any] = {"steps": steps}
    for label in ("ddp", "ours"):
        torch.manual_seed(0)
        gc.collect()
        before = allocated()
        model = work.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=work.inputs.is_cuda)
        wrapped: nn.Module
        if label == "ddp":
            wrapped = DistributedDataParallel(model)
        else:
            wrapped = AdaptiveDataParallel(model, optimizer, name=f"step-{work.inputs.dim()}")
        times = []
        for index in range(steps):
            if index == steps // 2 and work.inputs.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            # DDP's passes are not those of the library
            with unguarded() if label == "ddp" else nullcontext():
                work.step(wrapped, optimizer)
            synchronize()
            times.append(time.perf_counter() - begun)
        late = times[steps // 2 :]
        peak = torch.cuda.max_memory_allocated() - before if work.inputs.is_cuda else 0
        found[label] = {
            "first_20_mean_s": statistics.mean(times[1:21]),
            "median_s": statistics.median(late),
            "mean_s": statistics.mean(late),
            "peak_bytes": peak,
        }
        found["parameters"] = sum(one.numel() for one in model.parameters())
        del model, optimizer, wrapped
    found["mean_ratio"] = found["ours"]["mean_s"] / found["ddp"]["mean_s"]
    return found


def stalls(work: Work, saves: int = 3) -> dict[str, Any]:
    """Return the seconds that saving a model with its AdamW state holds the loop up, first and later.

    Each save begins after the one before has been written.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-checks-", ignore_cleanup_errors=True) as folder:
        return _stalls(work, saves, Path(folder))


def _stalls(work: Work, saves: int, folder: Path) -> dict[str, Any]:
    os.environ["ADAPTDL_CHECKPOINT_PATH"] = str(folder)
    model = work.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wrapped = AdaptiveDataParallel(model, optimizer, name="stalls")
    found = []
    done = threading.Event()
    # pinned memory is made beforehand in the first second or two
    for index in range(40 + 10 * saves):
        work.step(wrapped, optimizer)
        synchronize()
        if index >= 40 and index % 10 == 0:
            done.clear()
            begun = time.perf_counter()
            checkpoint.save_all_states(background=True, done=lambda _: done.set())
            found.append(time.perf_counter() - begun)
            assert done.wait(30), "the checkpoint is not written"
    size = max(sum(one.stat().st_size for one in each.rglob("*")) for each in folder.iterdir())
    return {"stalls_s": found, "bytes": size}


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
