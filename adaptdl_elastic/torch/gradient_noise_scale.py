"""Estimate the gradient noise scale of a model during training: |G|² and tr Σ, smoothed, by parameter group.

`adaptdl_elastic.torch.AdaptiveDataParallel` creates the estimate (`model.gns`) and updates it; a script only
reads it. `adaptdl_elastic.torch._gradient.estimator` describes how the numbers are computed.
"""

from __future__ import annotations

from adaptdl_elastic.torch._gradient.noise_scale import AdamGradientNoiseScale, GradientNoiseScale

__all__ = ["AdamGradientNoiseScale", "GradientNoiseScale"]
