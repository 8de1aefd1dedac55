"""Submissions for tests."""

from __future__ import annotations

from typing import Any

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import encode
from adaptdl_elastic.rendezvous.schema.submissions import Signed, Submission
from adaptdl_elastic.rendezvous.store.base import Store


def submission_by(owner: str, job: str = "job", **more: Any) -> Submission:
    """Return a person's submission of a script."""
    given = {"mode": "script", "command": ("train.py",), "bundle": "0" * 64, **more}
    return Submission(job=job, owner=owner, **given)


def put_submission(store: Store, keys: Keys, asked: Submission) -> None:
    """Write a submission as its owner does, with a signature that nobody checks."""
    store.put(keys.submission(asked.job), encode(Signed(encode(asked), asked.owner, "-")))
