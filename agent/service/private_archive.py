"""Read the archive of what only one person's jobs get: variables, and whom to tell of a job's end."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adaptdl_elastic.agent.service.archives import opened
from adaptdl_elastic.agent.service.blobs import BlobError

_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class PrivateArchive:
    """What a person has given with a job, which is not in the store.

    Attributes:
        variables: The variables of `submit --env`.
        notify: The commands and URLs of `submit --notify`.
    """

    variables: Mapping[str, str]
    notify: tuple[str, ...]


def read_private(archive: Path, owner: str) -> PrivateArchive:
    """Return what is in an archive that `adaptdl submit` has made.

    Args:
        archive: The archive.
        owner: Of the job that gets it. An archive's digest stands in the store for all to read, and another
            person's job must not get the variables by naming it.

    Raises:
        BlobError: it holds something else, or was made by another person.
    """
    content = None
    try:
        with opened(archive) as found:
            for member in found.entries():
                if member.name != "environment.json":
                    continue
                if member.size > _MOST_BYTES:
                    raise BlobError(f"they have {member.size} bytes: {_MOST_BYTES} may travel")
                text = io.BytesIO()
                found.copy(member, text)
                content = json.loads(text.getvalue())
    except BlobError as error:
        raise BlobError(f"the job's variables cannot be read: {error}") from None
    content = content if isinstance(content, dict) else {}
    values, notify = content.get("variables"), content.get("notify", [])
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise BlobError("the job's variables cannot be read: they are no table of texts")
    if not isinstance(notify, list) or not all(isinstance(one, str) for one in notify):
        raise BlobError("the job's notices cannot be read: they are no list of texts")
    if content.get("owner") != owner:
        raise BlobError(f"the job's variables are not those of {owner}")
    return PrivateArchive(values, tuple(notify))
