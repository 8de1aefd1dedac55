"""Submissions for tests."""

from __future__ import annotations

from typing import Any

from adaptdl_elastic.rendezvous.schema.submissions import Submission


def submission_by(owner: str, job: str = "job", **more: Any) -> Submission:
    """Return a person's submission of a script."""
    given = {"mode": "script", "command": ("train.py",), "bundle": "0" * 64, **more}
    return Submission(job=job, owner=owner, **given)
