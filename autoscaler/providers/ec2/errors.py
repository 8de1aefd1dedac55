"""Translate botocore's errors for users of the autoscaler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import botocore.exceptions as boto
from botocore.parsers import ResponseParserError

from adaptdl_elastic._explained import see
from adaptdl_elastic.autoscaler.providers.base import (
    NoPermissionError,
    ProviderError,
    TryLaterError,
    UnknownInstanceError,
)


class NotWaitingError(ProviderError):
    """The instance does not wait in that lifecycle hook (any more)."""


_DENIED = frozenset(
    {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "Client.UnauthorizedOperation"}
)
_CREDENTIALS = frozenset(
    {"AuthFailure", "ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "SignatureDoesNotMatch"}
)
_LATER = frozenset(
    {
        # throttling that boto3's own retries did not overcome
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "ServiceUnavailable",
        "InternalFailure",
        "InternalError",
        # the group is busy with another activity
        "ScalingActivityInProgress",
        "ResourceContention",
        "ResourceInUse",
        # quotas and capacity
        "LimitExceeded",
        "InsufficientInstanceCapacity",
        "InstanceLimitExceeded",
        "VcpuLimitExceeded",
        "MaxSpotInstanceCountExceeded",
        "SpotMaxPriceTooLow",
    }
)


FAILURES = (boto.ClientError, boto.BotoCoreError, ResponseParserError)
"""All errors that a call through botocore raises."""


def explain(error: Exception, action: str, what: str = "") -> ProviderError:
    """Return an error that says why `action` (in IAM's terms) on `what` failed, and what to do."""
    where = f" on {what}" if what else ""
    if isinstance(error, boto.ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
        message = str(error.response.get("Error", {}).get("Message", "")) or code
        if code in _DENIED:
            denied = f"no permission for {action}{where}: add it to the role in use"
            return NoPermissionError(denied + see(denied))
        if code in _CREDENTIALS:
            return NoPermissionError(
                f"AWS refuses the credentials ({code}): renew them, or check AWS_PROFILE"
            )
        if code in _LATER:
            return TryLaterError(f"{action}{where}: {code}: {message}")
        if code.endswith("NonExistentQueue") or code.endswith("QueueDoesNotExist"):
            return ProviderError(f"{action}{where}: there is no such queue: check --queue-url and --region")
        if code == "ValidationError" and "No active Lifecycle Action" in message:
            return NotWaitingError(f"{action}{where}: {message}")
        if code == "ValidationError" and "not found" in message and "nstance" in message:
            return UnknownInstanceError(f"{what} is not an instance of the group: {message}")
        return ProviderError(f"{action}{where}: {code}: {message}")
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        return NoPermissionError("no AWS credentials: give the instance a role, or set AWS_PROFILE")
    if isinstance(error, boto.NoRegionError):
        return ProviderError("no AWS region: set AWS_REGION (or AWS_DEFAULT_REGION), or give --region")
    if isinstance(error, boto.ProfileNotFound):
        return ProviderError(f"{error}: check AWS_PROFILE or --profile")
    if isinstance(error, ResponseParserError):
        return TryLaterError(f"{action}{where}: not an answer of AWS: {str(error).splitlines()[0]}")
    if isinstance(error, (boto.ConnectionError, boto.HTTPClientError)):
        return TryLaterError(f"{action}{where}: AWS cannot be reached: {error}")
    return ProviderError(f"{action}{where}: {error}")


@contextmanager
def explained(action: str, what: str = "") -> Iterator[None]:
    """Raise botocore's errors inside the block as ProviderErrors."""
    try:
        yield
    except FAILURES as error:
        raise explain(error, action, what) from error
