"""Convert a model's statistics if the script has changed the initial batch size since the checkpoint."""

from __future__ import annotations

import logging
from typing import Protocol

from adaptdl_elastic import _session
from adaptdl_elastic.torch._gradient.noise_scale import GradientNoiseScale
from adaptdl_elastic.torch._runtime.position import script_position

logger = logging.getLogger(__name__)


class _Model(Protocol):
    """Define the attribute of a model that this module uses."""

    gns: GradientNoiseScale


def change_units(model: _Model, saved: int, initial: int) -> None:
    """Convert the statistics of a checkpoint from initial batch size `saved` to `initial`."""
    logger.warning(
        "the checkpoint is of batch_size=%d, and it is %d now: gradient statistics begin anew, and "
        "progress is counted in steps of the new size",
        saved,
        initial,
    )
    gns = model.gns
    progress = gns.get_progress()
    gns.change_units(initial / saved)
    first: object = _session.current().models[0]
    if progress and first is model:
        script_position().start_progress *= gns.get_progress() / progress
