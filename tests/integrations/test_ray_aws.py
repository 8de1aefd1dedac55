"""The cluster of `examples/ray_aws.yaml`: what Ray and the interface of EC2 say of it, without an account."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator

pytestmark = pytest.mark.needs("ray")

EXAMPLES = Path(__file__).parents[2] / "examples"
CONSTRAINTS = Path(__file__).with_name("constraints.txt")


def cluster() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / "ray_aws.yaml").read_text())
    return found


def accept(asked: dict[str, Any]) -> dict[str, Any]:
    """Fill in Ray's defaults and check the result against its schema, as `ray up` does."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared: dict[str, Any] = prepare_config(asked)
    validate_config(prepared)
    return prepared


def test_ray_accepts_it() -> None:
    prepared = accept(cluster())
    assert prepared["available_node_types"]["head"]["resources"] == {"CPU": 0}, "no trial runs on the head"
    assert set(prepared["available_node_types"]) == {"head", "trials"}, "no node type of Ray's defaults"


def test_ray_refuses_a_name_that_is_wrong() -> None:
    from jsonschema import ValidationError

    with pytest.raises(ValidationError, match="setup_command"):
        accept({**cluster(), "setup_command": []})


@pytest.mark.parametrize("node_type", ["head", "trials"])
def test_ec2_knows_what_is_asked_of_it(node_type: str) -> None:
    interface = botocore.session.get_session().get_service_model("ec2")
    accepted = interface.operation_model("RunInstances").input_shape
    asked = cluster()["available_node_types"][node_type]["node_config"]
    found = ParamValidator().validate({**asked, "MinCount": 1, "MaxCount": 1}, accepted)
    assert not found.has_errors(), found.generate_report()
    kinds = interface.shape_for("InstanceType").enum
    assert asked["InstanceType"] in kinds


def test_the_cluster_file_has_the_tested_version_of_ray() -> None:
    (version,) = (line[5:] for line in CONSTRAINTS.read_text().splitlines() if line.startswith("ray=="))
    assert cluster()["docker"]["image"].startswith(f"rayproject/ray:{version}-py")


def test_its_nodes_have_the_script_and_its_modules() -> None:
    folder, _ = cluster()["file_mounts"].values()
    assert (EXAMPLES.parent / folder / "tune_ray.py").is_file()
    assert (EXAMPLES.parent / folder / "image_data.py").is_file()
