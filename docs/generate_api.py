"""Render the public docstrings to docs/api.md.

python docs/generate_api.py            write it
python docs/generate_api.py --check    exit 1 when it is not what it would write

Reads the source without importing it, so it needs nothing installed.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
SCRIPT = (
    *("torch", "torch.data", "torch.epoch", "torch.parallel", "torch.fully_sharded"),
    *("torch.accumulator", "torch.value", "torch.iterator"),
    *("torch.scaling_rules", "torch.gradient_noise_scale", "checkpoint", "collective"),
    *("torch.frameworks.huggingface", "torch.frameworks.accelerate", "torch.frameworks.lightning"),
)
SELDOM = ("reducer", "env", "goodput", "sched_hints", "utils")
MODULES = (*SCRIPT, *SELDOM)
# What most scripts do with: the table at the top.
FIRST = {
    "torch": "init_process_group rank world_size report",
    "torch.data": "AdaptiveDataLoader AdaptiveDataLoaderHelper.autoscale_batch_size current_dataloader",
    "torch.epoch": "remaining_epochs_until current_epoch",
    "torch.parallel": "AdaptiveDataParallel",
    "torch.fully_sharded": "AdaptiveFSDP",
    "torch.accumulator": "Accumulator",
    "checkpoint": "State TensorState load_state",
    "collective": "allreduce broadcast",
}
# By these the parts of the library call each other. A script that did would break.
INTERNAL = {
    "torch.data": {
        "AdaptiveDataLoaderHelper": "window_samples local_samples gradient_weight adaptive "
        "training_loader_undecided settled resolve_batch_size train ended pause begin_window begin_batch "
        "end_batch epoch_done "
        "limits sync_local_bsz replaces",
    },
    "torch.parallel": {
        "AdaptiveDataParallel": "reinit_process_group absorb_failures giving_up stuck failure clear_failure "
        "hand_over data_loop_begins stepping skipped_step step_left_out drop_window "
        "has_own_process_group accumulates_by_hand window_under_way attempted_steps progress statistics "
        "load_statistics why_not_resilient snapshot_step",
    },
    "torch.fully_sharded": {
        "AdaptiveFSDP": "hand_over reinit_process_group absorb_failures giving_up stuck failure "
        "clear_failure data_loop_begins stepping skipped_step step_left_out drop_window "
        "has_own_process_group accumulates_by_hand window_under_way attempted_steps "
        "progress statistics load_statistics why_not_resilient snapshot_step thawed refuse_thawed "
        "sync_buffers begin_step end_step begin_zero_grad scale gain initial_batch_size",
    },
    "torch.gradient_noise_scale": {
        "GradientNoiseScale": "set_progress set_accum_scale accum_count should_zero_grad reset_accumulation "
        "count_micro_batch due measured record advance state_dict load_state_dict",
    },
    "torch.frameworks.huggingface": {
        "ElasticTrainerMixin": "become_first begin_training windows get_batch_samples training_step "
        "set_epoch_fraction create_scheduler counters take_counters history take_history",
    },
    "torch.frameworks.accelerate": {
        "Accelerator": "accumulate print save save_model save_state init_trackers log",
    },
    "torch.frameworks.lightning": {
        "ElasticStrategy": "setup_environment setup process_dataloader on_train_start on_train_end "
        "begin_epoch steps ends training_step validation_step test_step predict_step optimizer_step",
    },
    "checkpoint": {"": "agree end_epoch restore_states snapshot_states"},
    "reducer": {"": "Reducer"},
}
INHERITED = {"LoaderBatchSize", "OptimizerSteps", "StepsModel"}
"""Base classes that have no place of their own on the page; their members stand below the derived class."""

SECTIONS = re.compile(r"(Args|Raises|Returns|Yields|Attributes):\s*$")
HEAD = """# API

What a training script can import. Made from the docstrings by `make api`; change those.

Most scripts do with these (`import adaptdl_elastic.torch as adl`; other names are under `adaptdl_elastic`):

| name | what it is |
|---|---|
"""
BELOW = """# What a script seldom needs

Errors of the collectives, the environment, the goodput model, and what a job reports of itself.
"""
LAST = """## Not for scripts

Names without an underscore by which the parts of the library call each other. They may change at any
time, and a script that calls them breaks:
"""

Definition = ast.ClassDef | ast.FunctionDef


class Module:
    """One module's source: its public names, where they are defined, and what they say."""

    def __init__(self, name: str) -> None:
        self.name = name
        path = ROOT / Path(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.tree = ast.parse(file.read_text(encoding="utf-8"))
        self.definitions = {n.name: n for n in self.tree.body if isinstance(n, Definition)}
        self.imports = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and not node.level
            for alias in node.names
        }

    def public(self) -> list[str]:
        """`__all__`, or every name that is imported as itself, and every definition without an underscore."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return [str(name) for name in ast.literal_eval(node.value)]
        again = [
            alias.name
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name == alias.asname
        ]
        return again + [name for name in self.definitions if not name.startswith("_")]

    def find(self, name: str) -> tuple[str, Definition] | None:
        """Return the module that defines a name, and the definition; None if it is no class or function."""
        if name in self.definitions:
            return self.name, self.definitions[name]
        module, original = self.imports.get(name, ("", ""))
        return Module(module).find(original) if module.startswith("adaptdl_elastic") else None

    def methods(self, node: ast.ClassDef) -> list[ast.FunctionDef]:
        """Return the methods of a class of this module, then those of its bases in `INHERITED`."""
        found = methods(node)
        for base in node.bases:
            of = self.find(ast.unparse(base)) if ast.unparse(base) in INHERITED else None
            if of is not None and isinstance(of[1], ast.ClassDef):
                own = {member.name for member in found}
                found += [member for member in Module(of[0]).methods(of[1]) if member.name not in own]
        return found


def markdown(docstring: str | None) -> str:
    """Convert a docstring to Markdown: literal blocks stay code, sections become lists."""
    if not docstring:
        return ""
    lines, out, in_section = inspect.cleandoc(docstring).splitlines(), [], False
    for line in lines:
        if SECTIONS.match(line):
            in_section = True
            out += [f"**{line.strip().removesuffix(':')}**", ""]
        elif in_section and line.startswith("    ") and not line.startswith("     "):
            item, colon, text = line.strip().partition(": ")
            out.append(f"- `{item}`: {text}" if colon else f"- {line.strip()}")
        elif in_section and line.startswith("     "):
            out.append(f"  {line.strip()}")
        else:
            in_section = in_section and not line
            out.append(re.sub(r"::$", ":", line))
    return "\n".join(out).strip() + "\n"


def signature(node: Definition) -> str:
    """Return the signature as a caller writes it."""
    if isinstance(node, ast.ClassDef):
        init = next((m for m in methods(node) if m.name == "__init__"), None)
        return f"class {node.name}{arguments(init) if init else ''}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}{arguments(node)}{returns}"


def arguments(node: ast.FunctionDef) -> str:
    """Without `self`."""
    text = ast.unparse(node.args)
    return f"({re.sub(r'^(self|cls)(, |$)', '', text)})"


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Of its own, not inherited ones."""
    return [member for member in node.body if isinstance(member, ast.FunctionDef)]


def decorators(node: ast.FunctionDef) -> set[str]:
    """By name."""
    return {ast.unparse(decorator) for decorator in node.decorator_list}


def render_members(members: list[ast.FunctionDef], hidden: Collection[str]) -> Iterator[str]:
    """Public methods and properties that say something."""
    for member in members:
        text = ast.get_docstring(member)
        if member.name in hidden:
            continue
        if member.name.startswith("_") or not text or any(d.endswith(".setter") for d in decorators(member)):
            continue
        is_property = "property" in decorators(member)
        shown = member.name if is_property else signature(member)
        body = "\n".join(f"  {line}".rstrip() for line in markdown(text).splitlines())
        yield f"- `{shown}`\n\n{body}\n"


def sentence(docstring: str | None) -> str:
    """Return the first sentence, as a cell of a table."""
    text = " ".join((docstring or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:]) ", text, maxsplit=1)[0].rstrip(".:").replace("|", "\\|")


def lookup(module: Module, name: str) -> Definition | None:
    """Return the definition of a name of a module, or of `Class.method`."""
    found = module.find(name.partition(".")[0])
    member = name.partition(".")[2]
    if found is None or not member:
        return found[1] if found else None
    owner = found[1]
    assert isinstance(owner, ast.ClassDef)
    return next((method for method in Module(found[0]).methods(owner) if method.name == member), None)


def render_first() -> Iterator[str]:
    """Render the rows of the table at the top."""
    short_cut = Module("adaptdl_elastic.torch").public()
    for short, names in FIRST.items():
        module = Module(f"adaptdl_elastic.{short}")
        for name in names.split():
            found = lookup(module, name)
            assert found is not None, f"{short}.{name}"
            text = sentence(ast.get_docstring(found))
            if text.startswith(("See ", "`")):  # a module of one class says it itself
                text = sentence(ast.get_docstring(module.tree))
            shown = f"adl.{name}" if name in short_cut else f"{short}.{name}"
            if "." in name:
                shown = f"loader.{name.partition('.')[2]}"
            yield f"| [`{shown}`](#{module.name.replace('.', '')}) | {text} |"


def render_last() -> Iterator[str]:
    """One line for each class or module that has names which are not for scripts."""
    for short, owners in INTERNAL.items():
        for owner, names in owners.items():
            of = f"adaptdl_elastic.{short}" + (f".{owner}" if owner else "")
            yield f"* of `{of}`: {', '.join(f'`{name}`' for name in names.split())}"


def render() -> str:
    """Render the whole page."""
    modules = [Module(f"adaptdl_elastic.{name}") for name in MODULES]
    below = {name for module in modules[1:] for name in module.public()}
    parts, seen = [HEAD + "\n".join(render_first()) + "\n"], set[tuple[str, str]]()
    for short, module in zip(MODULES, modules, strict=True):
        if short == SELDOM[0]:
            parts.append(BELOW)
        parts += [f"## {module.name}\n", markdown(ast.get_docstring(module.tree))]
        listed = [name for name in module.public() if module is modules[0] and name in below]
        if listed:
            parts.append(f"Described below: {', '.join(f'`{name}`' for name in listed)}.\n")
        hidden = INTERNAL.get(short, {})
        for name in module.public():
            found = module.find(name)
            if name in listed or found is None or (found[0], name) in seen:
                continue
            if name in hidden.get("", "").split():
                continue
            seen.add((found[0], name))
            parts += render_definition(*found, hidden.get(name, "").split())
    parts += [LAST, "\n".join(render_last()) + "\n"]
    return "\n".join(part for part in parts if part)


def render_definition(module: str, node: Definition, hidden: Collection[str] = ()) -> Iterator[str]:
    """Render a class with its members, or a function."""
    yield f"### `{signature(node)}`\n"
    yield markdown(ast.get_docstring(node))
    if isinstance(node, ast.ClassDef):
        yield from render_members(Module(module).methods(node), hidden)


def main() -> int:
    """Write the page, or compare it."""
    page = render()
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page
        if not current:
            print("docs/api.md is not what the docstrings say: run `make api`", file=sys.stderr)
        return 0 if current else 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
