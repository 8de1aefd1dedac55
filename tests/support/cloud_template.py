"""The user data of the EC2 template, and the tags of its groups, as CloudFormation hands them over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

TEMPLATE = Path(__file__).resolve().parents[2] / "autoscaler" / "providers" / "ec2" / "stack.yaml"


class _Loader(yaml.SafeLoader):
    """CloudFormation's short forms, as {"tag": value}."""


def _tag(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    if isinstance(node, yaml.ScalarNode):
        return {suffix: loader.construct_scalar(node)}
    if isinstance(node, yaml.SequenceNode):
        return {suffix: loader.construct_sequence(node, deep=True)}
    assert isinstance(node, yaml.MappingNode)
    return {suffix: loader.construct_mapping(node, deep=True)}


_Loader.add_multi_constructor("!", _tag)


def load_template() -> dict[str, Any]:
    """Return the template; a short form such as `!Ref X` is {"Ref": "X"}."""
    loaded = yaml.load(TEMPLATE.read_text(), _Loader)
    assert isinstance(loaded, dict)
    return loaded


class UnknownNameError(Exception):
    """The template refers to a name that has no value."""


def user_data(resource: str, values: Mapping[str, str], boot_seconds: int | None = None) -> str:
    """Return the user data of a launch template, with a value in the place of every reference.

    Args:
        resource: The launch template's logical name.
        values: What parameters, attributes (`Resource.Attribute`) and pseudo parameters stand for. Parameters
            that are not here have their default.
        boot_seconds: The limit of a boot instead of the template's.

    Raises:
        UnknownNameError: a name has no value.
    """
    template = load_template()
    known = _with_defaults(template, values)
    data = template["Resources"][resource]["Properties"]["LaunchTemplateData"]["UserData"]
    text = _resolved(data["Fn::Base64"], known)
    if boot_seconds is not None:
        text, changed = re.subn(r"^boot_seconds=\d+$", f"boot_seconds={boot_seconds}", text, flags=re.M)
        assert changed == 1, "the user data has one line boot_seconds=NUMBER"
    return text


def group_tags(resource: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of an auto-scaling group; arguments and errors as for `user_data`."""
    template = load_template()
    known = _with_defaults(template, values)
    tags = template["Resources"][resource]["Properties"]["Tags"]
    named = {one["Key"]: one["Value"] for one in tags if one["Key"] != "adaptdl-elastic:routes"}
    return {key: _resolved(value, known) for key, value in named.items()}


def _with_defaults(template: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, str]:
    names = {*template["Parameters"], *template["Resources"]}
    wrong = {name for name in values if "::" not in name and name.partition(".")[0] not in names}
    if wrong:
        raise UnknownNameError(f"the template has no {', '.join(sorted(wrong))}")
    described = template["Parameters"].items()
    return {**{name: str(one["Default"]) for name, one in described if "Default" in one}, **values}


def _resolved(value: Any, known: Mapping[str, str]) -> str:
    """Return what a text, a reference or a substitution stands for."""
    if not isinstance(value, dict):
        return str(value)
    ((function, given),) = value.items()
    function = function.removeprefix("Fn::")
    if function in ("Ref", "GetAtt"):
        return _value(given if isinstance(given, str) else ".".join(given), known)
    if function == "If":
        return _resolved(given[1 if _holds(load_template()["Conditions"][given[0]], known) else 2], known)
    if function != "Sub":
        raise UnknownNameError(f"tests/support/cloud_template.py does not know !{function}")
    text, own = (given, {}) if isinstance(given, str) else given
    names = {**known, **{name: _resolved(one, known) for name, one in own.items()}}

    def put(found: re.Match[str]) -> str:
        name = found[1]
        return "${" + name[1:] + "}" if name.startswith("!") else _value(name, names)

    return re.sub(r"\$\{([^}]*)\}", put, text)


def _holds(condition: Mapping[str, Any], known: Mapping[str, str]) -> bool:
    """Return whether a condition holds, which is an equality, or several of which one has to hold."""
    ((function, given),) = condition.items()
    if function == "Or":
        return any(_holds(one, known) for one in given)
    left, right = given
    return _resolved(left, known) == str(right)


def _value(name: str, known: Mapping[str, str]) -> str:
    if name not in known:
        raise UnknownNameError(f"the test has no value for {name}")
    return known[name]
