"""Name what the library says of NCCL's self-test to the coordinator and to `adaptdl doctor`.

A verdict is a JSON file in the runtime directory of the user: `why` is the reason of a failure, else null.
"""

from __future__ import annotations

FILES = "selftest-*.json"

AGAIN = 3600.0
"""Seconds after which a failed test is repeated, since memory may have been short."""

NOT_ENDED = "self-test has not ended"
"""End of the reason why a job cannot change in place yet."""
