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
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
MODULES = (
    *("torch", "torch.data", "torch.epoch", "torch.parallel", "torch.accumulator", "torch.iterator"),
    *("torch.scaling_rules", "torch.gradient_noise_scale", "checkpoint", "collective", "reducer", "env"),
    *("goodput", "sched_hints", "utils"),
)
SECTIONS = re.compile(r"(Args|Raises|Returns|Yields|Attributes):\s*$")
HEAD = """# API

What a training script can import. Made from the docstrings by `make api`; change those.
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
        """`__all__`, or every definition without an underscore."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return [str(name) for name in ast.literal_eval(node.value)]
        return [name for name in self.definitions if not name.startswith("_")]

    def find(self, name: str) -> tuple[str, Definition] | None:
        """The module that defines a name, and the definition; None for what is no class or function."""
        if name in self.definitions:
            return self.name, self.definitions[name]
        module, original = self.imports.get(name, ("", ""))
        return Module(module).find(original) if module.startswith("adaptdl_elastic") else None


def markdown(docstring: str | None) -> str:
    """A docstring as Markdown: literal blocks stay code, sections become lists."""
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
    """What a caller writes."""
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


def render_members(node: ast.ClassDef) -> Iterator[str]:
    """Public methods and properties that say something."""
    for member in methods(node):
        text = ast.get_docstring(member)
        if member.name.startswith("_") or not text or any(d.endswith(".setter") for d in decorators(member)):
            continue
        is_property = "property" in decorators(member)
        shown = member.name if is_property else signature(member)
        body = "\n".join(f"  {line}".rstrip() for line in markdown(text).splitlines())
        yield f"- `{shown}`\n\n{body}\n"


def render() -> str:
    """The whole page."""
    modules = [Module(f"adaptdl_elastic.{name}") for name in MODULES]
    below = {name for module in modules[1:] for name in module.public()}
    parts, seen = [HEAD], set[tuple[str, str]]()
    for module in modules:
        parts += [f"## {module.name}\n", markdown(ast.get_docstring(module.tree))]
        listed = [name for name in module.public() if module is modules[0] and name in below]
        if listed:
            parts.append(f"Described below: {', '.join(f'`{name}`' for name in listed)}.\n")
        for name in module.public():
            found = module.find(name)
            if name in listed or found is None or (found[0], name) in seen:
                continue
            seen.add((found[0], name))
            parts += render_definition(found[1])
    return "\n".join(part for part in parts if part)


def render_definition(node: Definition) -> Iterator[str]:
    """A class with its members, or a function."""
    yield f"### `{signature(node)}`\n"
    yield markdown(ast.get_docstring(node))
    if isinstance(node, ast.ClassDef):
        yield from render_members(node)


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
