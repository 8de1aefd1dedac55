"""Open the storage that the path of a checkpoint directory names."""

from __future__ import annotations

from adaptdl_elastic.storage import DirectoryStorage, Storage
from adaptdl_elastic.storage.s3 import S3Storage


def open_storage(path: str) -> Storage:
    """Return the storage for `s3://bucket/prefix`, or for a directory, which need not exist yet.

    Raises:
        ValueError: the path has another scheme.
    """
    scheme, separator, rest = path.partition("://")
    if not separator:
        return DirectoryStorage(path)
    if scheme == "file":
        return DirectoryStorage(rest)
    if scheme == "s3":
        return S3Storage(path)
    raise ValueError(f"checkpoints can be kept in a directory or in s3://bucket/prefix, not in {path!r}")
