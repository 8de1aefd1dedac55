"""Store checkpoints in an S3 bucket.

 <prefix>/data/<id>/<file>       the states, one object each
 <prefix>/manifests/<id>.json    written last: without it there is no checkpoint
 <prefix>/finished.json          note how the run that wrote these ended; `--anew` moves all to
 <prefix>/archive-<time>/…       which has the same structure
 <prefix>/secret                 from which the secrets of the job's runs are derived; it is not moved

S3 has been strongly consistent since December 2020: an object that was put is listed. The manifest is put on
condition that it does not exist (`If-None-Match: *`), so only one of two writers commits. If the answer to
that is an error, or is lost, the manifest is read back: it may have been stored all the same, and boto3 may
have put it twice. Until that is known, the data of the checkpoint stay. S3 compares a CRC-32 before it stores
an object; objects that are read are compared with the manifest. An interrupted multipart upload leaves
invisible parts: `sweep` aborts it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, BinaryIO, cast

from adaptdl_elastic.storage import (
    DamagedError,
    Entry,
    Manifest,
    Storage,
    StorageError,
    Writing,
    decode_manifest,
    encode_manifest,
    sequence_number,
    verify,
)

_NOTE = "finished.json"
_MISSING = ("404", "NoSuchKey", "NotFound")


class S3Storage(Storage):
    """Store checkpoints at `s3://bucket/prefix`; boto3 finds credentials, region and endpoint as usual.

    Args:
        path: `s3://bucket/prefix`.
        options: arguments for `boto3.client`.

    Raises:
        ValueError: the path names no bucket.
    """

    def __init__(self, path: str, options: Mapping[str, Any] | None = None) -> None:
        import boto3
        from botocore.config import Config

        bucket, _, prefix = path.removeprefix("s3://").partition("/")
        if not bucket:
            raise ValueError(f"{path!r} names no bucket: use s3://bucket/prefix")
        self.path = path
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        config = Config(
            connect_timeout=5,
            read_timeout=60,
            retries={"mode": "standard", "max_attempts": 5},
            request_checksum_calculation="when_supported",
            response_checksum_validation="when_supported",
        )
        self.client = boto3.client("s3", **{"config": config, **(options or {})})
        # ids of checkpoints of this writer whose manifest may or may not have been stored
        self._doubtful: set[str] = set()

    def ids(self) -> list[str]:
        """Return the ids of the manifests."""
        names = (key.rpartition("/")[2].removesuffix(".json") for key in self._keys("manifests/"))
        return sorted(name for name in names if sequence_number(name))

    def manifest(self, checkpoint_id: str) -> Manifest:
        """Read and verify the manifest."""
        with self.get(self._manifest_key(checkpoint_id)) as file:
            return decode_manifest(file.read())

    def open(self, checkpoint_id: str, entry: Entry) -> BinaryIO:
        """Return a verified local copy of the file."""
        file = self.get(f"{self._prefix}data/{checkpoint_id}/{entry.file}")
        try:
            verify(file, entry)
        except BaseException:
            file.close()
            raise
        return file

    def check_writable(self) -> None:
        """Do nothing: missing permissions show at the first save, which reports its failure."""

    def begin(self, checkpoint_id: str) -> Writing:
        """Begin to write objects that no manifest names yet."""
        with suppress(Exception):  # a failed clean-up must not prevent a save
            self._settle()
        return _S3Writing(self, checkpoint_id)

    def remove(self, checkpoint_id: str) -> None:
        """Delete the manifest first, so that the checkpoint is not listed."""
        self._delete([self._manifest_key(checkpoint_id)])
        self._delete(self._keys(f"data/{checkpoint_id}/"))

    def sweep(self, keep: str | None = None) -> None:
        """Delete objects without a manifest, and abort unfinished uploads."""
        committed = {*self.ids(), keep}
        start = len(f"{self._prefix}data/")
        keys = self._keys("data/")
        self._delete([key for key in keys if key[start:].partition("/")[0] not in committed])
        with suppress(Exception):  # listing uploads needs a permission that no other call here needs
            uploads = self.client.list_multipart_uploads(Bucket=self._bucket, Prefix=f"{self._prefix}data/")
            for upload in uploads.get("Uploads", []):
                self.client.abort_multipart_upload(
                    Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )

    # The note of a run that has ended

    def read_note(self) -> bytes | None:
        """Return the note that `write_note` wrote, or None."""
        if self._note not in self._keys(_NOTE):
            return None
        try:
            with self.get(self._note) as file:
                return file.read()
        except DamagedError:  # deleted meanwhile
            return None

    def write_note(self, note: bytes, *, even_if_empty: bool) -> None:
        """Write a note about the run that wrote these checkpoints, if there are any or `even_if_empty`."""
        if even_if_empty or self.ids():
            with self._errors("cannot write to"):
                self.client.put_object(Bucket=self._bucket, Key=self._note, Body=note)

    def withdraw_note(self) -> None:
        """Delete the note if there is one."""
        self._delete(self._keys(_NOTE))

    def move_aside(self, name: str) -> str | None:
        """Copy all checkpoints below another prefix, then delete them here: oldest first, the note last.

        S3 cannot rename, but copies without a download. Returns the new place, or None if there is nothing to
        move.
        """
        manifests, data = sorted(self._keys("manifests/")), self._keys("data/")
        note = [key for key in self._keys(_NOTE) if key == self._note]
        if not (manifests or data or note):
            return None
        for key in (*data, *manifests, *note):
            new = f"{self._prefix}{name}/{key[len(self._prefix) :]}"
            with self._errors("cannot copy within"):
                self.client.copy({"Bucket": self._bucket, "Key": key}, self._bucket, new)
        for gone in (manifests, data, note):
            self._delete(gone)
        return f"s3://{self._bucket}/{self._prefix}{name}"

    @property
    def _note(self) -> str:
        return f"{self._prefix}{_NOTE}"

    def _settle(self) -> None:
        """List the manifests, and delete the data of doubtful checkpoints that have none."""
        if not self._doubtful:
            return
        for checkpoint_id in self._doubtful - set(self.ids()):
            self._delete(self._keys(f"data/{checkpoint_id}/"))
        self._doubtful.clear()

    # The client

    def _manifest_key(self, checkpoint_id: str) -> str:
        return f"{self._prefix}manifests/{checkpoint_id}.json"

    def _keys(self, below: str) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{self._prefix}{below}"
        )
        with self._errors("cannot list checkpoints in"):
            return [found["Key"] for page in pages for found in page.get("Contents", [])]

    def get(self, key: str) -> BinaryIO:
        """Return the object of a key as a file that is deleted when closed."""
        from botocore.exceptions import BotoCoreError, ClientError

        file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - the caller closes it
        try:
            self.client.download_fileobj(self._bucket, key, file)
        except (BotoCoreError, ClientError) as error:
            file.close()
            if _code(error) in _MISSING:
                raise DamagedError(f"s3://{self._bucket}/{key} is missing") from error
            # it is unknown whether the checkpoint is damaged: do not fall back to an older one
            raise StorageError(f"cannot read s3://{self._bucket}/{key}: {error}") from error
        file.seek(0)
        return file

    def _put(self, key: str, file: IO[bytes]) -> None:
        with self._errors("cannot write to"):
            self.client.upload_fileobj(file, self._bucket, key, ExtraArgs={"ChecksumAlgorithm": "CRC32"})

    def put_new(self, key: str, data: bytes) -> None:
        """Put an object that must not exist yet.

        Raise StorageError unless the object exists afterwards with exactly this content.
        """
        try:
            with self._errors("cannot write to"):
                self.client.put_object(Bucket=self._bucket, Key=key, Body=data, IfNoneMatch="*")
        except StorageError as error:
            with suppress(StorageError), self.get(key) as file:
                if file.read() == data:
                    return
            raise error from error.__cause__

    def agree(self, name: str, proposed: bytes) -> bytes:
        """Return the content of the object `name`, which is `proposed` if there was none.

        All callers get the same content, also if they ask at the same moment. Raises StorageError.
        """
        key = f"{self._prefix}{name}"
        # read first: some stores ignore the condition of `put_new`, and some users may only read
        with suppress(DamagedError), self.get(key) as file:
            return file.read()
        try:
            self.put_new(key, proposed)
        except StorageError as error:
            with suppress(DamagedError), self.get(key) as file:
                return file.read()
            raise error from error.__cause__
        return proposed

    def _delete(self, keys: list[str]) -> None:
        for start in range(0, len(keys), 1000):
            objects = [{"Key": key} for key in keys[start : start + 1000]]
            with self._errors("cannot delete from"):
                answer = self.client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}, ChecksumAlgorithm="CRC32"
                )
            for refused in answer.get("Errors", []):
                raise StorageError(f"cannot delete from {self.path}: {refused.get('Message')}")

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError, Boto3Error) as error:
            raise StorageError(f"{what} {self.path}: {error}") from error


class _S3Writing(Writing):
    def __init__(self, storage: S3Storage, checkpoint_id: str) -> None:
        super().__init__(checkpoint_id)
        self._storage = storage
        self._base = f"{storage._prefix}data/{checkpoint_id}/"

    @contextmanager
    def _file(self, file: str) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryFile() as spool:
            yield spool
            spool.seek(0)
            self._storage._put(self._base + file, spool)

    def commit(self, manifest: Manifest) -> None:
        present = set(self._storage._keys(f"data/{self.id}/"))
        missing = {self._base + entry.file for entry in manifest.states.values()} - present
        if missing:  # the writer of a newer generation has deleted them
            raise StorageError(f"{sorted(missing)[0]} is gone: another run uses {self._storage.path}")
        self._storage._doubtful.add(self.id)
        self._storage.put_new(self._storage._manifest_key(self.id), encode_manifest(manifest))
        self._storage._doubtful.discard(self.id)

    def abandon(self) -> None:
        if self.id in self._storage._doubtful:
            return
        with suppress(Exception):
            self._storage._delete(self._storage._keys(f"data/{self.id}/"))


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
