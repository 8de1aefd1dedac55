"""Whose an auto-scaling group is: a tag says which cluster rules it, so that two do not.

EC2 has no compare-and-swap for tags. Who takes a group reads its tags, writes its own and reads them again,
and looks at them whenever it looks at the group: of two that begin in the same moment the one that wrote
first finds out, at its next look at the latest, and ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adaptdl_elastic.autoscaler.providers.base import NotOursError

OWNER_TAG = "adaptdl-elastic:owner"


def tags_of(group: Mapping[str, Any]) -> dict[str, str]:
    """The tags of a group as DescribeAutoScalingGroups tells them."""
    return {str(tag["Key"]): str(tag.get("Value", "")) for tag in group.get("Tags", [])}


def another(group: Mapping[str, Any], me: str) -> str:
    """Which cluster other than `me` the group belongs to; "" where there is none, or where we are nobody."""
    owner = tags_of(group).get(OWNER_TAG, "")
    return owner if me and owner not in ("", me) else ""


def refuse(group: Mapping[str, Any], me: str, ruling: bool) -> None:
    """NotOursError when the group is another cluster's; `ruling`: it was ours a moment ago."""
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
    """A tag of a group that its instances do not get."""
    return {
        "ResourceId": group,
        "ResourceType": "auto-scaling-group",
        "Key": key,
        "Value": value,
        "PropagateAtLaunch": False,
    }
