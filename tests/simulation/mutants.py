"""Change single lines of the pure modules, and see whether the tests that run these lines notice.

    python tests/simulation/mutants.py [--seed 1] [--mutants 40] [--least 34]

Each mutant is a copy of the product in which one comparison is turned, one number changed or one condition
negated. The three kinds are drawn in equal numbers, and evenly over the modules. Tests that run the changed
line (as coverage.py has seen) run on the copy, for at most 15 s together. A test that fails has caught the
mutant. So has one that does not end, if it ends without the change.
Exit code 1: fewer were caught than asked.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

import coverage
from product_copy import copy_to, run_tests

SECONDS = 15.0
# of tests that run a line, by their durations under coverage.py; drawn at random
SECONDS_OF_TESTS = 12.0
# modules, and the tests of each
SUBJECTS = {
    "adaptdl_elastic/torch/_data/partition.py": "tests/library/test_partition.py",
    "adaptdl_elastic/torch/_gradient/estimator.py": "tests/training",
    "agent/core/*.py": "tests/agent",
    "autoscaler/coordinator/[dfrs]*.py": "tests/autoscaler",
    "autoscaler/policy/*.py": "tests/policy",
    "adaptdl_elastic/goodput.py": "tests/goodput",
    "adaptdl_elastic/_codec.py": "tests/library/test_codec.py tests/library/test_messages.py",
}
_TURNED = {
    **{ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is"},
}

_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Mutant:
    """A change of one line; `tests` are those that run the line."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    tests: tuple[str, ...] = ()


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """Yield every change of one line within the functions of a module."""
    lines = source.splitlines()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in (inner for statement in function.body for inner in ast.walk(statement)):
            for kind, place, text in _changes(node, source):
                if place.lineno == place.end_lineno:
                    # columns are of UTF-8
                    raw = lines[place.lineno - 1].encode()
                    after = raw[: place.col_offset] + text.encode() + raw[place.end_col_offset :]
                    yield Mutant(file, place.lineno, kind, raw.decode(), after.decode())


def _changes(node: ast.AST, source: str) -> Iterator[tuple[str, ast.expr, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sides = [ast.get_source_segment(source, side) for side in (node.left, node.comparators[0])]
        yield "comparison", node, f"({sides[0]}) {_TURNED[type(node.ops[0])]} ({sides[1]})"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        # a tolerance may be another number of its size
        if node.value == 0 or abs(node.value) > _TOLERANCE:
            changed = node.value + 1 if isinstance(node.value, int) else node.value * 2 or 1.0
            yield "constant", node, repr(changed)
    elif isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare):
        yield "guard", node.test, f"(not ({ast.get_source_segment(source, node.test)}))"


def covered(copy: Path, files: list[str], tests: str) -> dict[str, dict[int, dict[str, float]]]:
    """Return, by file and line, the tests that run the line, with their durations in seconds."""
    data, results = (copy / f".{kind}-{re.sub('[^a-z]', '', tests)}" for kind in ("coverage", "results"))
    options = [f"--cov={copy}", "--cov-context=test", "--cov-report=", "--cov-config=/dev/null"]
    options += [f"--junitxml={results}", "-o", "junit_family=xunit1"]
    os.environ["COVERAGE_FILE"] = str(data)
    if run_tests(copy, ["--quick", *tests.split(), *options], 300) not in (0, 1):
        raise SystemExit(f"{tests}: the tests do not run on a copy of the product")
    seconds: Counter[str] = Counter()
    failing = set()
    for case in ElementTree.parse(results).iter("testcase"):
        name = f"{case.get('file')}::{case.get('name')}".partition("[")[0]
        seconds[name] += float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            failing.add(name)
    seen = coverage.CoverageData(str(data))
    seen.read()
    measured = {str(Path(name).resolve()): name for name in seen.measured_files()}
    found: dict[str, dict[int, dict[str, float]]] = {}
    for file in files:
        name = measured.get(str((copy / file).resolve()))
        lines = seen.contexts_by_lineno(name) if name else {}
        found[file] = {
            line: {
                test: seconds[test] for test in sorted({re.split(r"[|\[]", c)[0] for c in by if c} - failing)
            }
            for line, by in lines.items()
        }
    return found


def _affordable(tests: dict[str, float], chance: random.Random) -> tuple[str, ...]:
    """Return tests drawn at random whose durations (seconds) fit into `SECONDS_OF_TESTS`."""
    found, left = [], SECONDS_OF_TESTS
    for name in chance.sample(list(tests), len(tests)):
        if tests[name] <= left:
            found.append(name)
            left -= tests[name]
    return tuple(found)


def chosen(copy: Path, seed: int, number: int) -> list[Mutant]:
    """Return `number` mutants of lines that tests run, evenly over the subjects and the kinds of change."""
    chance, found = random.Random(seed), list[Mutant]()
    for place, (pattern, tests) in enumerate(SUBJECTS.items()):
        files = [str(path.relative_to(copy)) for path in sorted(copy.glob(pattern))]
        by_line = covered(copy, files, tests)
        drawn = [
            dataclasses.replace(mutant, tests=_affordable(by_line[file][mutant.line], chance))
            for file in files
            for mutant in mutants(file, (copy / file).read_text(encoding="utf-8"))
            if by_line[file].get(mutant.line)
        ]
        candidates = [mutant for mutant in drawn if mutant.tests]
        share = number // len(SUBJECTS) + (place < number % len(SUBJECTS))
        chance.shuffle(candidates)
        for _ in range(min(share, len(candidates))):
            had = Counter(mutant.kind for mutant in found)
            rarest = min(candidates, key=lambda mutant: had[mutant.kind])
            candidates.remove(rarest)
            found.append(rarest)
    names = sorted({name for mutant in found for name in mutant.tests})
    if run_tests(copy, ["--quick", "--collect-only", *names], 120) != 0:
        raise SystemExit("the tests that run the changed lines cannot be collected without the changes")
    return found


def judged(copy: Path, mutant: Mutant) -> str:
    """Return how a mutant was caught; empty: it survived."""
    path = copy / mutant.file
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    lines[mutant.line - 1] = mutant.after + "\n"
    try:
        path.write_text("".join(lines), encoding="utf-8")
        code = run_tests(copy, ["--quick", "-x", *mutant.tests], SECONDS)
    finally:
        path.write_text(source, encoding="utf-8")
    if code == -1 and run_tests(copy, ["--quick", *mutant.tests], SECONDS) == -1:
        return ""
    # 2 and 4: `chosen` has seen that the tests can be collected without the change
    unimportable = "it cannot be imported"
    how = {0: "", 1: "a test fails", 2: unimportable, 4: unimportable, -1: "it does not end"}
    if code not in how:
        raise SystemExit(f"{mutant.file}:{mutant.line}: pytest has ended with {code}")
    return how[code]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("seed", 1), ("mutants", 40), ("least", 34)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for name in ("one", "other"):
            copies.put(copy_to(Path(folder).resolve() / name))
        first = copies.get()
        todo = chosen(first, given.seed, given.mutants)
        os.environ.pop("COVERAGE_FILE", None)
        copies.put(first)

        def judge(mutant: Mutant) -> str:
            copy = copies.get()
            try:
                return judged(copy, mutant)
            finally:
                copies.put(copy)

        caught = 0
        with ThreadPoolExecutor(2) as pool:
            for mutant, how in zip(todo, pool.map(judge, todo), strict=True):
                caught += bool(how)
                print(f"{mutant.file}:{mutant.line}: {how or 'SURVIVED'}", flush=True)
                if not how:
                    print(f"    -{mutant.before.strip()}\n    +{mutant.after.strip()}", flush=True)
    print(f"{caught} of {len(todo)} caught, {given.least} are asked for (seed {given.seed})")
    return 0 if caught >= given.least else 1


if __name__ == "__main__":
    sys.exit(main())
