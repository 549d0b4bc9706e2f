"""Rules about the sources that neither Ruff nor import-linter can hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

SAYS_NOTHING = {"base", "common", "core", "helper", "helpers", "manager", "misc", "util", "utils"}
MOCKS = ("Mock(", "MagicMock", "AsyncMock", "mock.patch", "@patch", "monkeypatch." + "setattr", "unittest" + ".mock")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def functions_of(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def own_imports(node: ast.AST) -> Iterator[int]:
    """The lines that import kilburn."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.ImportFrom) and (inner.level or (inner.module or "").split(".")[0] == "kilburn"):
            yield inner.lineno
        if isinstance(inner, ast.Import) and any(alias.name.split(".")[0] == "kilburn" for alias in inner.names):
            yield inner.lineno


def lines_of(findings: list[str]) -> str:
    return "\n" + "\n".join(findings)


def test_files_are_named_after_things() -> None:
    found = [str(path.relative_to(ROOT)) for path in SOURCES if path.stem in SAYS_NOTHING]
    assert not found, lines_of(found)


def test_there_is_something_to_measure() -> None:
    assert len(SOURCES) > 10
    assert len(TESTS) > 3


def test_no_own_import_hides_in_a_function() -> None:
    found = []
    for path in SOURCES:
        for function in functions_of(tree_of(path)):
            found += [
                f"{path.relative_to(ROOT)}:{line} {function.name}: imports kilburn inside a function"
                for line in own_imports(function)
            ]
    assert not found, lines_of(found)


def test_the_package_imports_no_recipe_and_no_benchmark() -> None:
    beside = {path.stem for folder in ("recipes", "benchmarks") for path in (ROOT / folder).iterdir()}
    found = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found += [f"{path.relative_to(ROOT)}: {name}" for name in names if name.split(".")[0] in beside]
    assert {"channel", "traces", "ledgers"} <= beside
    assert not found, lines_of(found)


def test_no_comment_is_a_banner() -> None:
    found = []
    for path in SOURCES:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.match(r"\s*#\s*[-=#*~]{3,}", line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, lines_of(found)


def test_tests_use_real_parts() -> None:
    found = []
    for path in TESTS:
        text = path.read_text(encoding="utf-8")
        if path != Path(__file__).resolve():
            found += [f"{path.relative_to(ROOT)}: {mock}" for mock in MOCKS if mock in text]
    assert not found, lines_of(found)


def asserts_something(function: Function) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert | ast.With | ast.AsyncWith):
            return True
        if isinstance(node, ast.Call) and any(
            word in ast.unparse(node.func) for word in ("check", "validate", "assert", "raises", "run_state_machine")
        ):
            return True
    return False


def test_every_test_asserts_something() -> None:
    found = []
    for path in TESTS:
        for function in functions_of(tree_of(path)):
            if function.name.startswith("test") and not asserts_something(function):
                found.append(f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: asserts nothing")
    assert not found, lines_of(found)
