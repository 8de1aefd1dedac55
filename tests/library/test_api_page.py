from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATOR = ROOT / "docs" / "generate_api.py"


@pytest.fixture(scope="module")
def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_api", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.processes
def test_the_api_page_says_what_the_docstrings_say() -> None:
    run = subprocess.run(
        [sys.executable, str(GENERATOR), "--check"], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr


def test_every_public_name_is_documented(generator: Any) -> None:
    missing = []
    for short in generator.MODULES:
        module = generator.Module(f"adaptdl_elastic.{short}")
        for name in module.public():
            found = module.find(name)
            if found is not None and not ast.get_docstring(found[1]):
                missing.append(f"{short}.{name}")
    assert missing == []


def test_every_module_that_a_script_can_import_is_on_the_page(generator: Any) -> None:
    """`extensions` is for packages that extend this one; `protocol` and `storage` are the library's own."""
    library = ROOT / "adaptdl_elastic"
    modules = {path.stem for path in library.glob("*.py")} - {"__init__", "extensions"}
    there = modules | {"torch", "checkpoint"}
    there |= {f"torch.{path.stem}" for path in (library / "torch").glob("*.py")}
    frameworks = {path.stem for path in (library / "torch" / "frameworks").glob("*.py")} - {"__init__"}
    there |= {f"torch.frameworks.{name}" for name in frameworks}
    assert {name for name in there if "_" not in (name[0], name.rpartition(".")[2][0])} == {
        *generator.MODULES
    }


def test_what_the_lists_of_the_page_name_is_there(generator: Any) -> None:
    names = [(short, name) for short, listed in generator.FIRST.items() for name in listed.split()]
    for short, owners in generator.INTERNAL.items():
        names += [
            (short, f"{owner}.{name}" if owner else name)
            for owner in owners
            for name in owners[owner].split()
        ]
    for short, name in names:
        assert generator.lookup(generator.Module(f"adaptdl_elastic.{short}"), name), f"{short}.{name}"


def test_what_is_not_for_scripts_is_described_nowhere(generator: Any) -> None:
    page = generator.render()
    assert "- `giving_up(" not in page
    assert "`giving_up`" in page.partition("## Not for scripts")[2]
    assert "### `agree(" not in page
    assert "- `is_optim_step() -> bool`" in page
    assert "| [`checkpoint.State`](#adaptdl_elasticcheckpoint) |" in page


def test_a_docstring_becomes_markdown(generator: Any) -> None:
    text = generator.markdown("""Do it::

        now()

    Args:
        what: This,
            and that.

    Raises:
        ValueError: never.
    """)
    assert text == (
        "Do it:\n\n    now()\n\n**Args**\n\n- `what`: This,\n  and that.\n\n"
        "**Raises**\n\n- `ValueError`: never.\n"
    )
