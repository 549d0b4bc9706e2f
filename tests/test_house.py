"""The shape of the house: sizes, names and directions that reviews would otherwise have to repeat."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))

FILE_LINES = 400
FUNCTION_LINES = 60
PARAMETERS = 10
METHODS = 12
SAYS_NOTHING = {"base", "common", "core", "helper", "helpers", "manager", "misc", "util", "utils"}
MOCKS = ("Mock(", "MagicMock", "AsyncMock", "mock.patch", "@patch", "monkeypatch." + "setattr", "unittest" + ".mock")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def functions_of(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def is_command(function: Function) -> bool:
    """Whether it is a verb of the command line: its parameters are the verb's options."""
    return any(
        "command" in ast.unparse(decorator) or "callback" in ast.unparse(decorator) for decorator in function.decorator_list
    )


def own_imports(node: ast.AST) -> Iterator[int]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.ImportFrom) and (inner.level or (inner.module or "").split(".")[0] == "kilburn"):
            yield inner.lineno
        if isinstance(inner, ast.Import) and any(alias.name.split(".")[0] == "kilburn" for alias in inner.names):
            yield inner.lineno


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether it catches everything, and neither raises again nor logs it with its traceback."""
    catches_all = handler.type is None or (
        isinstance(handler.type, ast.Name) and handler.type.id in {"Exception", "BaseException"}
    )
    logs = any(isinstance(inner, ast.Attribute) and ast.unparse(inner) == "log.exception" for inner in ast.walk(handler))
    return catches_all and not logs and not any(isinstance(inner, ast.Raise) for inner in ast.walk(handler))


def lines_of(findings: list[str]) -> str:
    return "\n" + "\n".join(findings)


def test_there_is_something_to_measure() -> None:
    assert len(SOURCES) > 10
    assert len(TESTS) > 3


def test_files_are_small_and_named_after_things() -> None:
    found = []
    for path in SOURCES:
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > FILE_LINES:
            found.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {FILE_LINES}; it holds two things")
        if path.stem in SAYS_NOTHING or path.parent.name in SAYS_NOTHING:
            found.append(f"{path.relative_to(ROOT)}: the name says nothing")
    assert not found, lines_of(found)


def test_functions_are_short_and_take_little() -> None:
    found = []
    for path in SOURCES:
        for function in functions_of(tree_of(path)):
            where = f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
            # A verb's signature is the list of its options, which has no bound here either.
            first = function.body[0].lineno if is_command(function) else function.lineno
            size = (function.end_lineno or first) - first + 1
            if size > FUNCTION_LINES:
                found.append(f"{where}: {size} lines, at most {FUNCTION_LINES}")
            taken = len(function.args.posonlyargs) + len(function.args.args) + len(function.args.kwonlyargs)
            if taken > PARAMETERS and not is_command(function):
                found.append(f"{where}: {taken} parameters, at most {PARAMETERS}")
    assert not found, lines_of(found)


def test_classes_offer_few_methods() -> None:
    found = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                methods = [item for item in node.body if isinstance(item, Function) and not item.name.startswith("_")]
                public = [method.name for method in methods if "property" not in map(ast.unparse, method.decorator_list)]
                if len(public) > METHODS:
                    found.append(
                        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {len(public)} public methods, at most {METHODS}"
                    )
    assert not found, lines_of(found)


def test_no_own_import_hides_in_a_function() -> None:
    found = []
    for path in SOURCES:
        for function in functions_of(tree_of(path)):
            found += [
                f"{path.relative_to(ROOT)}:{line} {function.name}: imports kilburn inside a function"
                for line in own_imports(function)
            ]
    assert not found, lines_of(found)


def test_nothing_swallows_every_exception() -> None:
    found = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler) and swallows(node):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: catches everything and lets nothing out")
    assert not found, lines_of(found)


def test_nothing_evaluates_text_or_unpickles() -> None:
    found = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.func.id}")
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found += [
                f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
                for name in names
                if name.split(".")[0] in {"pickle", "shelve", "marshal"}
            ]
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


@pytest.mark.parametrize("path", SOURCES + EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(tree_of(path)), "no module docstring: what this is, and what it refuses to be"
