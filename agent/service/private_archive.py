"""Read the archive of variables that only one person's jobs get."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

from adaptdl_elastic.agent.service.archives import opened
from adaptdl_elastic.agent.service.blobs import BlobError

_MOST_BYTES = 1 << 20


def read_private(archive: Path, owner: str) -> Mapping[str, str]:
    """Return the variables of `submit --env` in an archive that `adaptdl submit` has made.

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
    values = content.get("variables")
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise BlobError("the job's variables cannot be read: they are no table of texts")
    if content.get("owner") != owner:
        raise BlobError(f"the job's variables are not those of {owner}")
    return values
