"""A distribution of another package, as its installer leaves it in a folder of `sys.path`."""

from __future__ import annotations

from pathlib import Path


def write_distribution(folder: Path, name: str, entry_points: str) -> None:
    """Write what names a distribution's entry points; its modules are put there by the caller."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
