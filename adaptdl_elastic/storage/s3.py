"""Store checkpoints in an S3 bucket.

 <prefix>/.adaptdl/data/<id>/<file>       the states, one object each
 <prefix>/.adaptdl/manifests/<id>.json    written last: without it there is no checkpoint
 <prefix>/finished.json                   says how the run that wrote these checkpoints has ended
 <prefix>/archive-<time>/…                where `--anew` moves all of that, in the same structure
 <prefix>/.adaptdl/secret-<digest>        from which the job's secrets are derived; it is not moved

Earlier versions wrote to `<prefix>/data` and `<prefix>/manifests`. Their checkpoints are read, removed and
moved from there. In all four folders only names with an id belong to this storage: a user's objects may lie
beside them.

S3 has been strongly consistent since December 2020: an object that was put is listed. The manifest is put on
condition that it does not exist (`If-None-Match: *`), so only one of two writers commits. If the answer to
that is an error, or is lost, the manifest is read back: it may have been stored all the same, and boto3 may
have put it twice. Until that is known, the data of the checkpoint stay. S3 compares a CRC-32 before it stores
an object; objects that are read are compared with the manifest. An interrupted multipart upload leaves
invisible parts: `sweep` aborts it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
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
    is_id,
    unreadable,
    verified,
)

_NOTE = "finished.json"
# below the prefix: where checkpoints are written, and where earlier versions wrote them
_HOMES = (_HOME, _EARLIER) = (".adaptdl/", "")
_KINDS = ("Contents", "CommonPrefixes")  # of what a page of keys lists: objects, and folders
_SERVER_ERROR = 500  # the first of the statuses of errors that may pass
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
        # id → its home, as `ids` has found it or this writer has chosen it
        self._homes: dict[str, str] = {}

    def ids(self) -> list[str]:
        """Return the ids of the manifests."""
        self._homes = {
            name: home for home in reversed(_HOMES) for name in self._names(f"{home}manifests/", ".json")
        }
        return sorted(self._homes)

    def manifest(self, checkpoint_id: str) -> Manifest:
        """Read and verify the manifest."""
        with self.get(self._manifest_key(checkpoint_id)) as file:
            return decode_manifest(file.read())

    def open(self, checkpoint_id: str, entry: Entry) -> BinaryIO:
        """Return a verified local copy of the file."""
        home = self._home(checkpoint_id)
        return verified(self.get(f"{self._prefix}{home}data/{checkpoint_id}/{entry.file}"), entry)

    def check_writable(self) -> None:
        """Do nothing: missing permissions show at the first save, which reports its failure."""

    def begin(self, checkpoint_id: str) -> Writing:
        """Begin to write objects that no manifest names yet."""
        with suppress(Exception):  # a failed clean-up must not prevent a save
            self._settle()
        return _S3Writing(self, checkpoint_id)

    def remove(self, checkpoint_id: str) -> None:
        """Delete the manifest first, so that the checkpoint is not listed."""
        home = self._home(checkpoint_id)
        self._delete([self._manifest_key(checkpoint_id)])
        self._delete(self._keys(f"{home}data/{checkpoint_id}/"))

    def sweep(self, keep: str | None = None) -> None:
        """Delete the objects of ids without a manifest, and abort unfinished uploads to ids."""
        committed = {*self.ids(), keep}
        self._delete(self._data(but=committed))
        with suppress(Exception):  # listing uploads needs a permission that no other call here needs
            for below in (f"{self._prefix}{home}data/" for home in _HOMES):
                pages = self.client.get_paginator("list_multipart_uploads")
                for page in [*pages.paginate(Bucket=self._bucket, Prefix=below)]:
                    for upload in page.get("Uploads", []):
                        checkpoint_id, slash, _ = upload["Key"].removeprefix(below).partition("/")
                        if slash and is_id(checkpoint_id):
                            named = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                            self.client.abort_multipart_upload(Bucket=self._bucket, **named)

    # The note of a run that has ended

    def read_note(self) -> bytes | None:
        """Return the note that `write_note` wrote, or None."""
        if not self._notes():
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
        self._delete(self._notes())

    def move_aside(self, name: str) -> str | None:
        """Copy all checkpoints below another prefix, then delete them here: oldest first, the note last.

        S3 cannot rename, but copies without a download. Returns the new place, or None if there is nothing to
        move.
        """
        manifests = [self._manifest_key(one) for one in self.ids()]
        data = self._data()
        note = self._notes()
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

    def _notes(self) -> list[str]:
        return [key for key in self._keys(_NOTE) if key == self._note]

    def _settle(self) -> None:
        """List the manifests, and delete the data of doubtful checkpoints that have none."""
        if not self._doubtful:
            return
        for checkpoint_id in self._doubtful - set(self.ids()):
            self._delete(self._keys(f"{_HOME}data/{checkpoint_id}/"))
        self._doubtful.clear()

    # The client

    def _home(self, checkpoint_id: str) -> str:
        if checkpoint_id not in self._homes:
            self.ids()
        return self._homes.get(checkpoint_id, _HOME)

    def _manifest_key(self, checkpoint_id: str) -> str:
        return f"{self._prefix}{self._home(checkpoint_id)}manifests/{checkpoint_id}.json"

    def _data(self, but: Container[str | None] = ()) -> list[str]:
        """Return the keys of the data of all ids, except some."""
        folders = ((f"{home}data/", one) for home in _HOMES for one in self._names(f"{home}data/", "/"))
        return [key for data, one in folders if one not in but for key in self._keys(f"{data}{one}/")]

    def _keys(self, below: str, delimiter: str = "") -> list[str]:
        """Return the keys below; with a delimiter, those without one more, and those of the folders."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{self._prefix}{below}", Delimiter=delimiter
        )
        with self._errors("cannot list checkpoints in"):
            found = [one for page in pages for kind in _KINDS for one in page.get(kind, [])]
        return [one.get("Key") or one["Prefix"] for one in found]

    def _names(self, folder: str, end: str) -> list[str]:
        """Return the ids that lie directly in a folder, as names with this end."""
        found = (key.removeprefix(self._prefix + folder) for key in self._keys(folder, "/"))
        return [name[: -len(end)] for name in found if name.endswith(end) and is_id(name[: -len(end)])]

    def get(self, key: str) -> BinaryIO:
        """Return the object of a key as a file that is deleted when closed."""
        with ExitStack() as closing:
            try:
                file = cast(BinaryIO, closing.enter_context(tempfile.TemporaryFile()))
                self.client.download_fileobj(self._bucket, key, file)
                file.seek(0)
            except Exception as error:
                if _code(error) in _MISSING:
                    raise DamagedError(f"s3://{self._bucket}/{key} is missing") from error
                # it is unknown whether the checkpoint is damaged: do not fall back to an older one
                found = unreadable(f"s3://{self._bucket}/{key}", error)
                found.may_pass = found.may_pass and _may_pass(error)
                raise found from error
            closing.pop_all()
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
            found = StorageError(f"{what} {self.path}: {error}")
            found.may_pass = _may_pass(error)
            raise found from error


class _S3Writing(Writing):
    def __init__(self, storage: S3Storage, checkpoint_id: str) -> None:
        super().__init__(checkpoint_id)
        self._storage = storage
        storage._homes[checkpoint_id] = _HOME
        self._below = f"{_HOME}data/{checkpoint_id}/"
        self._base = storage._prefix + self._below

    @contextmanager
    def _file(self, file: str) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryFile() as spool:
            yield spool
            spool.seek(0)
            self._storage._put(self._base + file, spool)

    def commit(self, manifest: Manifest) -> None:
        present = set(self._storage._keys(self._below))
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
            self._storage._delete(self._storage._keys(self._below))


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _may_pass(error: BaseException) -> bool:
    """Return whether it is worth to try again later: no answer has come, or an error of the server's own."""
    from boto3.exceptions import RetriesExceededError
    from botocore.exceptions import ConnectionError, HTTPClientError

    response = getattr(error, "response", None) or {}
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return status >= _SERVER_ERROR or isinstance(
        error, ConnectionError | HTTPClientError | RetriesExceededError | OSError
    )
