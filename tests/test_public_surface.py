"""The public surface: what is public exists and is what the pages use, and every verb of the command line is documented."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from generate import ABSENT, command_line
from typer.core import TyperCommand, TyperGroup

import kilburn
from kilburn.cli.shell import load
from kilburn.errors import MissingExtra
from kilburn.submodules import exports
from startup import cost_of_import

ROOT = Path(__file__).resolve().parent.parent
PUBLIC_AT_MOST = {"kilburn": 213, "kilburn_kv": 30, "kilburn_lab": 15}
"""Names of a package. Whoever needs more has made something public that users do not need."""
PACKAGES = [importlib.import_module(name) for name in PUBLIC_AT_MOST if name not in ABSENT]
"""The product, and what is installed of the distributions beside it."""
MODULES = [
    name
    for package in PACKAGES
    for name in (package.__name__, *(info.name for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".")))
    if "__main__" not in name
]
AT_MOST = {"kilburn": (40, 10_000), "kilburn.opening": (215, 80_000)}
"""Modules and calls that an import takes, a little more than now; how long that is, lab/benchmarks/startup.py measures."""
HEAVY = {"anthropic", "matplotlib", "numpy", "openai", "rich", "typer", "xllamacpp"}


def test_every_public_name_is_there() -> None:
    """Ruff holds the rest: `__all__` is sorted (RUF022), and what is public has a docstring (D1)."""
    missing = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except MissingExtra:
            # An adapter's classes are made from the framework's; and what tunes a model is too large for the tests.
            assert name.startswith("kilburn.adapters.") or name == "kilburn_lab.training.tuning", name
            continue
        names = getattr(module, "__all__", [])
        assert exports().get(name, []) == names
        missing += [f"{name}.{each}" for each in names if each.startswith("_") or not hasattr(module, each)]
    assert not missing


def test_few_names_are_public() -> None:
    for package in PACKAGES:
        names = {each for name, each_of in exports().items() if name.split(".")[0] == package.__name__ for each in each_of}
        assert 0 < len(names) <= PUBLIC_AT_MOST[package.__name__]


def test_the_pages_import_only_public_names() -> None:
    """So does what users copy from: the examples, and the README."""
    texts = [(path, path.read_text(encoding="utf-8")) for path in sorted((ROOT / "examples").rglob("*.py"))]
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if path.parent.name != "reference":
            blocks = re.findall(r"^```python[^\n]*\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
            texts += [(path, block) for block in blocks]
    installed = {package.__name__ for package in PACKAGES}
    public = {(module, name) for module, names in exports().items() for name in names}
    used = {
        (node.module, each.name, path.relative_to(ROOT).as_posix())
        for path, text in texts
        for node in ast.walk(ast.parse(text, feature_version=(3, 11)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in installed
        for each in node.names
    }
    assert len(used) > 80
    assert not sorted(each for each in used if each[:2] not in public)


def test_the_promised_names_are_there() -> None:
    assert callable(kilburn.open)
    assert issubclass(kilburn.KilburnError, Exception)
    assert set(kilburn.__all__) <= set(dir(kilburn))


@pytest.mark.parametrize("module", AT_MOST)
def test_import_is_little_work_and_takes_no_heavy_package(module: str) -> None:
    """Work is counted, in modules and in calls: a time would be the machine's. `kilburn.open` imports `kilburn.opening`."""
    modules, calls = cost_of_import(module)
    assert set(modules) & HEAVY == set()
    assert 0 < len(modules) <= AT_MOST[module][0]
    assert 0 < calls <= AT_MOST[module][1]


def test_submodules_are_attributes_of_their_packages() -> None:
    """In an interpreter of its own: here they are imported already."""
    inner = [info.name for each in PACKAGES for info in pkgutil.walk_packages(each.__path__, each.__name__ + ".") if info.ispkg]
    assert "kilburn.adapters" in inner
    code = "import importlib, sys\nfor path in sys.argv[1:]:\n  found = importlib.import_module(path.split('.')[0])\n"
    code += "  for name in path.split('.')[1:]: found = getattr(found, name)\n  assert found.__name__ == path, path\n"
    code += "  assert not hasattr(found, 'nothing_of_this_name') and not hasattr(found, '__wrapped__'), path\n"
    subprocess.run([sys.executable, "-c", code, *inner, "kilburn.agents.loop", "kilburn.errors"], check=True)


def test_what_a_package_lacks_has_an_address() -> None:
    with pytest.raises(AttributeError, match=r"write `from kilburn\.agents\.loop import Agent`"):
        _ = kilburn.Agent
    with pytest.raises(ImportError, match=r"write `from kilburn\.agents\.tool import Tool`"):
        from kilburn import Tool  # noqa: F401
    with pytest.raises(ImportError, match=r"write `from kilburn\.models\.chat import Chat`"):
        from kilburn.agents import Chat  # noqa: F401
    with pytest.raises(AttributeError, match=r"write `from kilburn import Session`"):
        _ = kilburn.kernel.Sessio
    with pytest.raises(AttributeError, match=r"kilburn has no .connect.; it has .* open"):
        _ = kilburn.connect


@cache
def verbs() -> list[tuple[str, TyperCommand]]:
    """Every command of `kilburn`, groups walked through: ("models pull", command)."""
    found: list[tuple[str, TyperCommand]] = []

    def walk(prefix: str, command: TyperCommand | TyperGroup) -> None:
        if isinstance(command, TyperGroup):
            for name, inner in sorted(command.commands.items()):
                walk(f"{prefix} {name}".strip(), inner)
        else:
            found.append((prefix, command))

    walk("", load())
    return found


@cache
def page_of_verbs() -> str:
    return command_line()


@pytest.mark.parametrize(("verb", "command"), verbs(), ids=[verb.replace(" ", "-") for verb, _ in verbs()])
def test_every_verb_is_documented_with_an_example(verb: str, command: TyperCommand) -> None:
    assert command.help, f"kilburn {verb} says nothing under --help"
    section = re.search(rf"^## `kilburn {re.escape(verb)}`$(.*?)(?=^## |\Z)", page_of_verbs(), re.MULTILINE | re.DOTALL)
    assert section, f"the reference has no section on kilburn {verb}"
    assert f"$ kilburn {verb}" in section[1], f"no page under docs/ shows `$ kilburn {verb}` at work in a console block"
    for parameter in command.params:
        for option in parameter.opts:
            if option.startswith("--") and option != "--help" and not getattr(parameter, "hidden", False):
                assert f"`{option}" in section[1], f"kilburn {verb} {option} is missing from the reference"


TALKING = {"chat", "dashboard", "mcp", "serve"}
"""Verbs that go on until they are ended: they have no result to print."""

FOR_OTHERS = {"metrics alerts", "metrics board"}
"""Verbs that print a file of another program, in its own form."""


@pytest.mark.parametrize(("verb", "command"), verbs(), ids=[verb.replace(" ", "-") for verb, _ in verbs()])
def test_every_verb_shows_an_example_under_help_and_prints_json(verb: str, command: TyperCommand) -> None:
    assert re.search(rf"^ +kilburn {re.escape(verb)}\b", command.help or "", re.MULTILINE)
    assert verb in TALKING | FOR_OTHERS or any("--json" in parameter.opts for parameter in command.params)


def test_verbs_promised_to_users_exist() -> None:
    promised = {
        "models list",
        "models pull",
        "demo",
        "chat",
        "replay",
        "ps",
        "top",
        "show",
        "recall",
        "search",
        "export",
        "import",
        "fsck",
        "forget",
    }
    assert promised <= {verb for verb, _ in verbs()}
