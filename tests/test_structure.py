"""The import graph of the product: no cycles, and no use of another module's underscored names."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch_names
from code_lines import BESIDE, PRODUCT, by_folder
from import_graph import ROOT, Module, cycles, imports, measure, private_uses, product

MOST_PRIVATE_USES_OF_TESTS = 40
"""Places in which tests may use underscored names of the product; most are in `tests/support/insides.py`."""

MOST_CODE_LINES = 51_849
"""Lines of code of the product. Raise it only by the budget that an issue names."""

MOST_LINES_BESIDE = 69_818
"""Lines of code of tests, benchmarks and examples together. An issue may raise it by at most 300."""


@pytest.mark.parametrize(("folders", "most"), [(PRODUCT, MOST_CODE_LINES), (BESIDE, MOST_LINES_BESIDE)])
def test_the_code_does_not_grow(folders: tuple[str, ...], most: int) -> None:
    lines = by_folder(folders)
    print(lines)
    assert sum(lines.values()) <= most, lines


def test_there_is_no_import_cycle_of_any_kind_within_a_tree_or_between_trees() -> None:
    graph = imports(product())
    assert len(graph) > 300
    assert cycles(graph) == []


def test_no_module_uses_underscored_names_of_others() -> None:
    modules = product()
    paths = [module.path for module in modules.values()]
    assert [str(reach) for reach in private_uses(paths, modules)] == []


def test_tests_keep_to_public_names_but_for_a_few() -> None:
    """A name that tests need is an interface: make it public in its module, or use what is public already."""
    reaches = private_uses(sorted((ROOT / "tests").rglob("*.py")), product())
    assert len(reaches) < MOST_PRIVATE_USES_OF_TESTS, "\n".join(map(str, reaches))


def test_each_module_stands_in_the_map_of_its_folder() -> None:
    missing = []
    for file in (file for tree in PRODUCT for file in (ROOT / tree).rglob("__init__.py")):
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        packages = [one.parent.name for one in file.parent.glob("*/__init__.py")]
        names = [one.stem for one in file.parent.glob("*.py") if not one.stem.startswith("__")]
        missing += [
            f"{file.parent}/{name}" for name in (*names, *packages) if not re.search(rf"`{name}[`.]", text)
        ]
    assert missing == []


def test_only_one_module_asks_for_what_the_oldest_torch_lacks() -> None:
    """A name that the oldest torch knows is added by tests/support/torch_names.py; others go elsewhere."""
    known = torch_names.RECORD.read_text(encoding="utf-8").split()
    used = torch_names.used()
    assert len(used) > 100
    assert {name: modules for name, modules in used.items() if name not in known} == {}
    # the self-test of NCCL is repeated under another version
    assert used["torch.__version__"] == {"adaptdl_elastic.torch._process_group.backends.nccl"}


def test_names_of_torch_are_found_however_they_are_imported() -> None:
    text = "import torch.distributed as d, torch.nn\nfrom torch import optim as o\nx = d.a\nx.b\no.Muon"
    assert set(torch_names.names(ast.parse(text))) == {
        *("torch.distributed", "torch.distributed.a", "torch.distributed.a.b", "torch.nn"),
        *("torch.optim", "torch.optim.Muon"),
    }


def test_python_is_started_only_without_the_working_directory() -> None:
    """A `token.py` there would replace Python's own, and a `click.py` of another person would run."""
    starts = re.compile(r"(?:sys\.executable|python)(?:, \"-u\")?, \"-[mc]\"")
    found = {module.path.name for module in product().values() if starts.search(module.text)}
    assert found == {"fork_server.py", "_own_python.py"}


@pytest.mark.parametrize("script", ["docs/generate_picture.py", "benchmarks/figures.py"])
def test_pages_that_scripts_write_are_up_to_date_and_quoted_figures_are_theirs(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not ended.value.code


@pytest.mark.processes
def test_every_file_that_the_architecture_names_exists() -> None:
    text = (ROOT / "docs" / "contributing" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/.]+\.py)`", text))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [f"/{line}" for line in listed.splitlines()]
    assert named
    assert [name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in files)] == []


def test_every_kind_of_import_counts(tmp_path: Path) -> None:
    texts = {
        "a": "import b",
        "b": "def f():\n    from c import x",
        "c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a",
        "d": "import a",
    }
    modules = {name: Module(name, "t", tmp_path / f"{name}.py", text) for name, text in texts.items()}
    assert cycles(imports(modules)) == [["a", "b", "c"]]
    assert measure("t", modules).largest_cycle == 3


def test_a_use_of_an_underscored_name_of_another_module_is_found(tmp_path: Path) -> None:
    texts = {
        "a": "class A:\n    def __init__(self):\n        self._mine = 1\n        self._mine\n_other = 1",
        "b": "import torch\ndef f(a):\n    torch._dynamo\n    a._own = 1\n    return a._mine\n_own = 2",
    }
    modules = {}
    for name, text in texts.items():
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        modules[name] = Module(name, "t", path, text)
    paths = [module.path for module in modules.values()]
    assert [(reach.path.name, reach.name) for reach in private_uses(paths, modules)] == [("b.py", "_mine")]
