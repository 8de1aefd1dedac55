"""Hold what differs between the releases of torch that this product runs with.

Each part names the release with which it can go, once that is the oldest. No other module asks for torch's
version or uses a name that the oldest release lacks (`tests/test_structure.py` checks the names). The one
exception is `torch._sharded.fully_shard`: it uses a private interface, and lists the releases that it was
tested with. Importing this module does not import torch, because that takes seconds, and `adaptdl-run`
answers typing errors at once.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from typing import Any

from adaptdl_elastic import __version__

OLDEST = "2.8"
"""Oldest release of torch that is supported."""


def installed() -> str | None:
    """Return the version of torch that is installed, without importing it; None if none is."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        # a build in its own folder has no metadata: it is taken to be new enough
        return OLDEST if find_spec("torch") else None


def why_not(version: str | None) -> str | None:
    """Return why this version of torch (None: no torch) cannot be used; None if it can."""
    found, oldest = ([int(part) for part in text.split(".")[:2]] for text in (version or "0", OLDEST))
    if found >= oldest:
        return None
    what = f"this is torch {version}" if version else "this Python has no torch"
    needed = f"torch >= {OLDEST}"
    return f"adaptdl-elastic {__version__} needs {needed}, and {what}: pip install '{needed}'"


def muon() -> Any:
    """Return the class of the optimizer Muon, or an empty tuple where there is none. This can go with 2.9."""
    import torch

    return getattr(torch.optim, "Muon", ())


def is_kept(saved: Any) -> bool:
    """Return whether a graph keeps a saved tensor as it is, not as what a hook has packed.

    Before 2.13 that cannot be asked. There hooks are registered that change nothing, which fails if there are
    others already. The hooks of an earlier call count as others.
    """
    if hasattr(saved, "unpack_hook"):
        return saved.unpack_hook is None
    try:
        saved.register_hooks(_same, _same)
    except RuntimeError as error:
        # a tensor that the backward pass does not need
        return "value None" in str(error)
    return True


def _same(tensor: Any) -> Any:
    return tensor
