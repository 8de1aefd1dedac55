"""Memory that holds so many samples only, for replicas without a GPU."""

from __future__ import annotations

from typing import Any

import torch


def check(samples: int, most: int) -> None:
    if samples > most:
        raise torch.OutOfMemoryError(f"{samples} samples, where {most} fit\nand a second line")


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, most: int) -> torch.Tensor:
        ctx.most = most
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        check(len(gradient), ctx.most)
        return gradient, None


class Net(torch.nn.Linear):
    """A linear model through which no backward pass of more than `most` samples gets."""

    most = 10**9

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return in_backward(super().forward(inputs), self.most)


def in_backward(values: torch.Tensor, most: int) -> torch.Tensor:
    """`values`, through which no backward pass of more than so many samples gets."""
    result: torch.Tensor = _Backward.apply(values, most)  # type: ignore[no-untyped-call]
    return result
