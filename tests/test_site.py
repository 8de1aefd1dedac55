"""`make docs` builds the site without a warning, and it needs no other server."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from pathlib import Path

import pytest
from commands import ended

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import hooks  # noqa: E402

from adaptdl_elastic import _explained  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-d", str(there)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = ended(command, ROOT, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    return there


@pytest.mark.processes
def test_no_page_requests_anything_from_another_server(site: Path) -> None:
    fetched = re.compile(
        r'<(?:script|img|iframe)[^>]* src="https?:|<link[^>]* rel="(?!canonical)[^>]*"https?:'
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        assert not fetched.search(page.read_text(encoding="utf-8")), page


@pytest.mark.processes
def test_the_api_leaves_out_what_is_not_for_scripts(site: Path) -> None:
    shown = (site / "reference/api/torch.data.html").read_text(encoding="utf-8")
    assert 'id="adaptdl_elastic.torch.data.AdaptiveDataLoaderHelper.autoscale_batch_size"' in shown
    assert 'id="adaptdl_elastic.torch.data.AdaptiveDataLoaderHelper.settled"' not in shown
    index = (site / "reference/adaptdl.html").read_text(encoding="utf-8")
    assert "autoscale" in index


def test_every_module_that_a_script_can_import_has_a_page() -> None:
    """`extensions` is for packages that extend this one; `protocol` and `storage` are the library's own."""
    library = ROOT / "adaptdl_elastic"
    modules = {path.stem for path in library.glob("*.py")} - {"__init__", "extensions"}
    there = modules | {"torch", "checkpoint"}
    there |= {f"torch.{path.stem}" for path in (library / "torch").glob("*.py")}
    frameworks = {path.stem for path in (library / "torch" / "frameworks").glob("*.py")} - {"__init__"}
    there |= {f"torch.frameworks.{name}" for name in frameworks}
    assert {name for name in there if "_" not in (name[0], name.rpartition(".")[2][0])} == {*hooks.MODULES}


def test_every_definition_of_these_modules_has_a_docstring() -> None:
    missing = []
    for short in hooks.MODULES:
        path = ROOT / "adaptdl_elastic" / Path(*short.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                missing += [f"{short}.{node.name}"] * (not ast.get_docstring(node))
    assert missing == []


def test_each_name_that_is_left_out_exists() -> None:
    for short, owners in hooks.INTERNAL.items():
        if short.startswith("torch.frameworks"):
            continue
        module = importlib.import_module(f"adaptdl_elastic.{short}")
        for owner, names in owners.items():
            for name in names.split():
                assert hasattr(getattr(module, owner) if owner else module, name), f"{short}.{owner}.{name}"


def test_the_page_of_messages_has_a_heading_for_each_anchor_in_the_words_of_a_message() -> None:
    page = (ROOT / "docs" / "howto" / "when-it-fails.md").read_text(encoding="utf-8")
    assert re.findall("^### (.+)$", page, re.MULTILINE) == _explained.EXPLAINED
    messages = [
        node.value
        for part in ("adaptdl_elastic", "agent", "autoscaler", "rendezvous")
        for file in (ROOT / part).rglob("*.py")
        if file.name != "_explained.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    gone = [words for words in _explained.EXPLAINED if not any(words in message for message in messages)]
    assert gone == []


@pytest.mark.processes
def test_the_anchors_of_messages_are_those_of_the_site(site: Path) -> None:
    shown = (site / "howto/when-it-fails.html").read_text(encoding="utf-8")
    assert [words for words in _explained.EXPLAINED if f'id="{_explained.anchor(words)}"' not in shown] == []


@pytest.mark.parametrize(
    ("message", "anchor"),
    [
        ("etcd cannot be reached (x): it runs on n1, the first node of cluster c", "first-node-of-cluster"),
        ("n1: etcd cannot listen on n1:1 (in use): end what listens there", "etcd-cannot-listen-on"),
        ("n1: runs cluster 'c' of another `adaptdl cluster up`: choose", "of-another-adaptdl-cluster-up"),
    ],
)
def test_a_message_leads_to_the_heading_that_says_most(message: str, anchor: str) -> None:
    link = f" ({_explained.PAGE}#{anchor})"
    assert _explained.see(message) == link
    assert _explained.see(message + link) == ""
    assert _explained.see("there is no job 'x'") == ""
