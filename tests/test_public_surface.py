"""The public surface: what is exported exists, is sorted and documented, and so is every verb of the command line."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest
import typer.main
from typer.core import TyperCommand, TyperGroup

import kilburn
import kilburn.budget
import kilburn.model
import kilburn.policy
import kilburn.store
from kilburn.cli import app
from startup import cost_of_import

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(info.name for info in pkgutil.walk_packages(kilburn.__path__, "kilburn.") if not info.name.endswith("__main__"))
SEAMS = (kilburn.budget.Counter, kilburn.model.Model, kilburn.policy.Policy, kilburn.store.Store)
MODULES_AT_MOST, CALLS_AT_MOST = 200, 60_000
"""Half as many again, and twice as many, as `import kilburn` takes; how long that is, benchmarks/startup.py measures."""
HEAVY = {"anthropic", "matplotlib", "numpy", "openai", "rich", "textual", "typer", "xllamacpp"}


def rank(name: str) -> tuple[int, str]:
    """The order of ruff's RUF022: constants, then classes, then functions, each by name."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2), name


def documented(owner: type, name: str) -> bool:
    """Whether a method says what it does, or does what a documented seam says."""
    return bool(inspect.getdoc(inspect.getattr_static(owner, name))) or any(
        inspect.getdoc(getattr(seam, name, None)) for seam in SEAMS
    )


def public_methods(owner: type) -> list[str]:
    kinds = (property, classmethod, staticmethod)
    return [
        name
        for name, value in vars(owner).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))
    ]


@pytest.fixture(scope="module", params=["kilburn", *MODULES])
def module(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def test_all_is_sorted_and_true(module: ModuleType) -> None:
    exported = getattr(module, "__all__", None)
    if exported is None:
        return
    assert list(exported) == sorted(set(exported), key=rank)
    missing = [name for name in exported if not hasattr(module, name)]
    assert not missing


def test_every_public_name_is_documented(module: ModuleType) -> None:
    bare = []
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        if not (inspect.isclass(thing) or inspect.isroutine(thing)):
            continue
        if not inspect.getdoc(thing):
            bare.append(name)
        if inspect.isclass(thing):
            bare += [f"{name}.{method}" for method in public_methods(thing) if not documented(thing, method)]
    assert not bare


def test_the_promised_names_are_there() -> None:
    assert callable(kilburn.open)
    assert issubclass(kilburn.KilburnError, Exception)
    assert set(kilburn.__all__) <= set(dir(kilburn))


def test_import_is_little_work_and_takes_no_heavy_package() -> None:
    """Work is counted, in modules and in calls: a time would be the machine's."""
    modules, calls = cost_of_import("kilburn")
    assert set(modules) & HEAVY == set()
    assert len(modules) <= MODULES_AT_MOST
    assert 0 < calls <= CALLS_AT_MOST


def verbs() -> list[tuple[str, TyperCommand]]:
    """Every command of `kilburn`, groups walked through: ("models pull", command)."""
    found: list[tuple[str, TyperCommand]] = []

    def walk(prefix: str, command: TyperCommand | TyperGroup) -> None:
        if isinstance(command, TyperGroup):
            for name, inner in sorted(command.commands.items()):
                walk(f"{prefix} {name}".strip(), inner)
        else:
            found.append((prefix, command))

    walk("", typer.main.get_command(app))
    return found


@pytest.mark.parametrize(("verb", "command"), verbs(), ids=[verb.replace(" ", "-") for verb, _ in verbs()])
def test_every_verb_is_documented_with_an_example(verb: str, command: TyperCommand) -> None:
    assert command.help, f"kilburn {verb} says nothing under --help"
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    section = re.search(rf"^## `kilburn {re.escape(verb)}`$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section, f"docs/reference/cli.md has no section on kilburn {verb}: run `python3 run.py reference`"
    assert f"$ kilburn {verb}" in section[1], f"no page under docs/ shows `$ kilburn {verb}` at work in a console block"
    for parameter in command.params:
        for option in parameter.opts:
            if option.startswith("--") and option != "--help" and not getattr(parameter, "hidden", False):
                assert f"`{option}" in section[1], f"kilburn {verb} {option} is missing from the reference"


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
    assert promised | {"eval paging"} <= {verb for verb, _ in verbs()}
