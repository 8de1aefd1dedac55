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
