"""The CloudFormation example: what linters say, and that it agrees with the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "ec2"
TEMPLATE = EXAMPLES / "template.yaml"
PROVIDERS = ROOT / "autoscaler" / "providers"
ACTION = re.compile(r"\b(?:autoscaling|ec2|sqs):[A-Z][A-Za-z]+\b")


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


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    loaded = yaml.load(TEMPLATE.read_text(), _Loader)
    assert isinstance(loaded, dict)
    return loaded


def user_data(template: dict[str, Any], name: str) -> str:
    """The script, with something in the place of every substitution."""
    data = template["Resources"][name]["Properties"]["LaunchTemplateData"]["UserData"]
    text = data["Fn::Base64"]["Sub"][0]
    return re.sub(r"\$\{[A-Za-z:]+\}", "value", text)


@pytest.mark.processes
def test_cfn_lint_accepts_it() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("cfn-lint"), "--non-zero-exit-code", "informational", TEMPLATE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.parametrize("name", ["HeadTemplate", "NodeTemplate"])
def test_user_data_passes_shellcheck_and_fits(template: dict[str, Any], name: str, tmp_path: Path) -> None:
    script = tmp_path / f"{name}.sh"
    script.write_text(user_data(template, name))
    assert script.stat().st_size < 16 * 1024  # EC2's limit
    _shellcheck(script)


@pytest.mark.processes
def test_scripts_pass_shellcheck() -> None:
    scripts = sorted(EXAMPLES.glob("*.sh"))
    assert scripts
    for script in scripts:
        _shellcheck(script)


def _shellcheck(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "--shell=bash", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["HeadTemplate", "NodeTemplate"])
def test_the_python_and_the_units_inside_are_whole(template: dict[str, Any], name: str) -> None:
    text = user_data(template, name)
    for word in re.findall(r"<<'?([A-Z]+)'?\n", text):
        assert f"\n{word}\n" in text, word
    for code in re.findall(r"<<'(?:PUBLISH|FETCH)'\n(.*?)\n(?:PUBLISH|FETCH)\n", text, re.DOTALL):
        compile(code, name, "exec")
    for unit in re.findall(r"<<UNIT\n(.*?)\nUNIT\n", text, re.DOTALL):
        assert all(section in unit for section in ("[Unit]", "[Service]", "[Install]", "ExecStart="))


def test_commands_inside_have_the_options_they_use(template: dict[str, Any]) -> None:
    from adaptdl_elastic.autoscaler.commands.autoscale import autoscale

    known = {option for parameter in autoscale.params for option in parameter.opts}
    line = re.search(r"adaptdl autoscale (.*?)\nRestart", user_data(template, "HeadTemplate"), re.DOTALL)
    assert line is not None
    used = set(re.findall(r"--[a-z-]+", line.group(1)))
    assert used
    assert used <= known


def policy_actions(template: dict[str, Any]) -> set[str]:
    policies = template["Resources"]["HeadRole"]["Properties"]["Policies"]
    (autoscaler,) = (p for p in policies if p["PolicyName"] == "autoscaler")
    found: set[str] = set()
    for statement in autoscaler["PolicyDocument"]["Statement"]:
        found |= set(statement["Action"])
    return found


def actions_in_code() -> set[str]:
    """What the provider calls, by the names that its errors say."""
    found: set[str] = set()
    for source in PROVIDERS.rglob("*.py"):
        found |= set(ACTION.findall(source.read_text()))
    calls = re.findall(
        r"self\._(autoscaling|ec2|_?sqs)\.([a-z_]+)\(", (PROVIDERS / "ec2" / "provider.py").read_text()
    )
    for service, call in calls:
        if call != "get_paginator":
            found.add(f"{service}:{''.join(part.capitalize() for part in call.split('_'))}")
    return found | {"sqs:DeleteMessage"}  # DeleteMessageBatch needs this one


def test_the_role_may_do_what_the_code_does_and_nothing_else(template: dict[str, Any]) -> None:
    assert policy_actions(template) - {"sqs:GetQueueAttributes"} == actions_in_code() - {
        "sqs:GetQueueAttributes"
    }


def test_the_policy_on_the_page_is_the_templates(template: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "ec2.md").read_text()
    (block,) = (b for b in re.findall(r"```json\n(.*?)```", page, re.DOTALL) if '"Statement"' in b)
    shown: set[str] = set()
    for statement in json.loads(block)["Statement"]:
        shown |= set(statement["Action"])
    assert shown == policy_actions(template)
