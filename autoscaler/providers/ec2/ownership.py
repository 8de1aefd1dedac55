"""Mark by a tag which cluster controls an auto-scaling group, so that two clusters do not.

EC2 has no compare-and-swap for tags. A cluster that takes a group reads the tags, writes its own, reads them
again, and reads them whenever it reads the group. If two begin at the same moment, the one that wrote first
notices at its next read, and ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptdl_elastic.autoscaler.providers.base import NotOursError

OWNER_TAG = "adaptdl-elastic:owner"


def tags_of(group: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a group in an answer of DescribeAutoScalingGroups."""
    return {str(tag["Key"]): str(tag.get("Value", "")) for tag in group.get("Tags", [])}


def another(group: Mapping[str, Any], me: str) -> str:
    """Return the cluster other than `me` that owns the group; "" if there is none, or `me` is ""."""
    owner = tags_of(group).get(OWNER_TAG, "")
    return owner if me and owner not in ("", me) else ""


def refuse(group: Mapping[str, Any], me: str, ruling: bool) -> None:
    """Raise NotOursError if the group belongs to another cluster; `ruling`: `me` had it before."""
    owner = another(group, me)
    if not owner:
        return
    name = group["AutoScalingGroupName"]
    if ruling:
        raise NotOursError(
            f"auto-scaling group {name!r} has been taken over by cluster {owner} (this one is {me}): "
            f"this autoscaler ends and leaves its nodes"
        )
    raise NotOursError(
        f"auto-scaling group {name!r} belongs to cluster {owner}, and this one is {me}: give each cluster "
        f"groups of its own, end the other's `adaptdl autoscale`, or take the group from it with --take-over"
    )


def tag(group: str, key: str, value: str) -> dict[str, object]:
    """Return a tag of a group that its instances do not inherit."""
    return {
        "ResourceId": group,
        "ResourceType": "auto-scaling-group",
        "Key": key,
        "Value": value,
        "PropagateAtLaunch": False,
    }
