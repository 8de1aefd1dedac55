"""Read the objects under an S3 prefix as a map-style data set.

One object is one sample. The keys are listed once, sorted, so that every replica has the same indices.
Objects can be cached in a directory that all replicas of a node share. Large objects are read in ranges,
several at a time. boto3 repeats failed requests; this module repeats requests whose connection broke in the
middle of a body.

A data set is picklable and safe to fork: each process makes its own client.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch.utils.data import Dataset

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS = 5  # to read a range
RETRY_SECONDS = 0.2  # wait before the second attempt; doubles with each attempt


class S3DatasetError(Exception):
    """Raised if a prefix or an object cannot be read; the message says which one and what to do."""


@dataclass(frozen=True)
class S3Object:
    """Describe one object as it was listed."""

    key: str
    size: int
    etag: str


def _bytes(data: bytes, key: str) -> Any:
    return data


class S3Dataset(Dataset[T], Generic[T]):
    """Read the objects under `url` by index, one sample per object.

    Args:
        url: `s3://bucket/prefix`.
        decode: Function that makes a sample from an object's bytes and key; by default the sample is the
            bytes. With worker processes it must be picklable, unless their start method is `fork`.
        cache: Directory in which objects are kept, made if missing; None: no cache. Nothing is ever removed
            from it.
        suffix: Suffix of the keys to include, e.g. ".jpg".
        part_bytes: Size of the ranges in which larger objects are read, in bytes.
        parallel: Number of ranges of one object that are read at the same time.
        client: Function that makes an S3 client, e.g. for another endpoint or other credentials; by default
            `boto3.client("s3")` with adaptive retries.

    Raises:
        S3DatasetError: the prefix cannot be listed or holds no object.
    """

    def __init__(
        self,
        url: str,
        decode: Callable[[bytes, str], T] = _bytes,
        *,
        cache: str | os.PathLike[str] | None = None,
        suffix: str = "",
        part_bytes: int = 8 << 20,
        parallel: int = 4,
        client: Callable[[], Any] | None = None,
    ) -> None:
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if not url.startswith("s3://") or not bucket:
            raise S3DatasetError(f"{url!r} names no bucket: use s3://bucket/prefix")
        if part_bytes < 1 or parallel < 1:
            raise S3DatasetError(f"part_bytes {part_bytes} and parallel {parallel} must be positive")
        self.url, self._bucket = url, bucket
        self._decode = decode
        self._cache = None if cache is None else Path(cache)
        self._part_bytes, self._parallel = part_bytes, parallel
        self._make_client = client or _default_client
        self.clients: dict[int, Any] = {}
        self.objects: Sequence[S3Object] = tuple(self._list(prefix, suffix))
        if not self.objects:
            raise S3DatasetError(
                f"{url} holds no object" + (f" whose key ends in {suffix!r}" if suffix else "")
            )

    def __len__(self) -> int:
        return len(self.objects)

    def __getitem__(self, index: int) -> T:
        found = self.objects[index]
        return self._decode(self.read(found), found.key)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "clients": {}}

    def read(self, found: S3Object) -> bytes:
        """Return the bytes of an object, from the cache if they are there.

        Raises:
            S3DatasetError: the object cannot be read, or has changed since it was listed.
        """
        path = self._path(found)
        if path is not None:
            try:
                data = path.read_bytes()
            except OSError:  # missing or not readable
                pass
            else:
                if len(data) == found.size:
                    return data
                logger.warning("%s is damaged and is read again from S3", path)
        data = self._fetch(found)
        if path is not None:
            _keep(path, data)
        return data

    # -- S3

    @property
    def _client(self) -> Any:
        """S3 client of this process; each process has its own, as connections do not survive a fork."""
        pid = os.getpid()
        if pid not in self.clients:
            self.clients = {pid: self._make_client()}
        return self.clients[pid]

    def _list(self, prefix: str, suffix: str) -> Iterator[S3Object]:
        """Yield every object in the order of keys, without the objects that stand for folders."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            for page in pages:
                for entry in page.get("Contents", []):
                    if entry["Key"].endswith(suffix) and not entry["Key"].endswith("/"):
                        yield S3Object(entry["Key"], int(entry["Size"]), str(entry["ETag"]).strip('"'))
        except (BotoCoreError, ClientError) as error:
            raise S3DatasetError(f"cannot list {self.url}: {error}") from error

    def _fetch(self, found: S3Object) -> bytes:
        parts = [
            (start, min(start + self._part_bytes, found.size))
            for start in range(0, max(found.size, 1), self._part_bytes)
        ]
        if len(parts) == 1:
            return self._range(found, *parts[0])
        with ThreadPoolExecutor(min(self._parallel, len(parts))) as pool:
            return b"".join(pool.map(lambda part: self._range(found, *part), parts))

    def _range(self, found: S3Object, start: int, end: int) -> bytes:
        """Return bytes [start, end) of the listed version of an object; repeat the request if it fails."""
        from botocore.exceptions import BotoCoreError, ClientError

        where = f"s3://{self._bucket}/{found.key}"
        arguments = {} if end - start == found.size else {"Range": f"bytes={start}-{end - 1}"}
        for attempt in range(_ATTEMPTS):
            try:
                answer = self._client.get_object(
                    Bucket=self._bucket, Key=found.key, IfMatch=f'"{found.etag}"', **arguments
                )
                data: bytes = answer["Body"].read()
                if len(data) == end - start:
                    return data
                problem: object = f"{len(data)} bytes of {end - start}"
            except ClientError as error:
                code = str(error.response.get("Error", {}).get("Code", ""))
                if code in ("PreconditionFailed", "412", "NoSuchKey", "404"):
                    raise S3DatasetError(
                        f"{where} has been changed or deleted since the dataset was made: make it again"
                    ) from error
                if int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) < 500:
                    raise S3DatasetError(f"cannot read {where}: {error}") from error
                problem = error
            except (BotoCoreError, OSError) as error:
                problem = error
            if attempt + 1 < _ATTEMPTS:
                time.sleep(RETRY_SECONDS * 2**attempt)
        raise S3DatasetError(f"cannot read {where} in {_ATTEMPTS} attempts: {problem}")

    # -- the cache

    def _path(self, found: S3Object) -> Path | None:
        """Return the object's file in the cache, named by key and version; None without a cache."""
        if self._cache is None:
            return None
        name = hashlib.sha256(f"{self._bucket}\0{found.key}\0{found.etag}".encode()).hexdigest()
        return self._cache / name[:2] / name[2:]


def _default_client() -> Any:
    import boto3
    from botocore.config import Config

    return boto3.session.Session().client(
        "s3", config=Config(retries={"mode": "adaptive", "max_attempts": 8}, max_pool_connections=16)
    )


def _keep(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically, as other processes may write it too; log errors only."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        logger.warning("could not keep %s: %s", path, error)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
