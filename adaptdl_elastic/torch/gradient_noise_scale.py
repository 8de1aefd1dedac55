"""Gradient noise scale of a model while it trains: |G|² and tr Σ, smoothed, by parameter group.

`adaptdl_elastic.torch.AdaptiveDataParallel` makes one (`model.gns`) and feeds it; a script only reads
it. Where the numbers come from is written in `adaptdl_elastic.torch._gradient.estimator`.
"""

from __future__ import annotations

from adaptdl_elastic.torch._gradient.noise_scale import AdamGradientNoiseScale, GradientNoiseScale

__all__ = ["AdamGradientNoiseScale", "GradientNoiseScale"]
