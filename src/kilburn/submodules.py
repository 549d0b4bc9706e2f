"""The submodules and names of a package as its attributes, each imported when it is first used; and where a name lives.

So `kilburn.open` and `kilburn.adapters.clients.wrap` work after `import kilburn`, which stays cheap. A name that is in no such
place is an error that says which public modules have it. They are read from the sources, when it is asked for: there is no list
to keep.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

PUBLIC = r"^__all__ = \[(.*?)\]"

PACKAGES = ("kilburn", "kilburn_kv", "kilburn_lab")
"""Where names live: the product, and the distributions beside it that are installed."""

MAX_PLACES = 4
"""Places that an error names at most."""


def attach(package: str, names: Mapping[str, str] | None = None) -> None:
    """Let a package import its submodules when they are used as attributes; every package here calls it.

    A name that is nothing here raises AttributeError, in `from package import name` ImportError. Both say where it lives.

    Args:
        names: names that the package re-exports, each with its module, which is imported when the name is first used.
    """
    exported = names or {}
    module = sys.modules[package]

    def attribute(name: str) -> Any:
        if name in exported:
            value = getattr(importlib.import_module(exported[name]), name)
            setattr(module, name, value)
            return value
        path = f"{package}.{name}"
        if name.isidentifier() and not name.startswith("_"):
            try:
                return importlib.import_module(path)
            except ModuleNotFoundError as error:
                if error.name != path:
                    raise
        message = f"{package} has no {name!r}{_advice(name, package)}"
        if sys._getframe(1).f_code.co_name == "_handle_fromlist":
            # `from package import name` is asking. It would drop an AttributeError, and what that says.
            raise ImportError(message, name=package)
        raise AttributeError(message)

    vars(module).update(__getattr__=attribute, __dir__=lambda: sorted({*vars(module), *exported}))


@cache
def exports() -> dict[str, list[str]]:
    """Return the public modules of the installed packages, each with its public names: those with an `__all__`. The function
    reads the sources and imports nothing."""
    # Only for an error, and for the reference.
    import re
    from importlib.util import find_spec
    from pathlib import Path

    specs = [spec for package in PACKAGES if (spec := find_spec(package)) is not None and spec.origin is not None]
    modules: dict[str, list[str]] = {}
    for spec in specs:
        root = Path(spec.origin or "").parent
        for file in sorted(root.rglob("*.py")):
            names = re.search(PUBLIC, file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
            if names is not None:
                module = ".".join([spec.name, *file.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
                modules[module] = re.findall(r'"(\w+)"', names[1])
    return modules


def _advice(name: str, package: str) -> str:
    """Return the end of a sentence that says where a name, or one that is nearly the same, can be imported from, or else what the
    package has."""
    if name.startswith("_"):
        return ""
    modules: dict[str, list[str]] = {}
    for module, names in exports().items():
        for candidate in names:
            modules.setdefault(candidate, []).append(module)
    near = sorted(
        (candidate for candidate in modules if candidate.lower() == name.lower()), key=lambda candidate: candidate != name
    )
    if not near:
        import difflib  # only for an error

        near = difflib.get_close_matches(name, modules, 2, 0.8)
    lines = [f"from {module} import {candidate}" for candidate in near for module in modules[candidate]]
    more = "" if len(lines) <= MAX_PLACES else f", and {len(lines) - MAX_PLACES} more"
    if lines:
        return f"; write {' or '.join(f'`{line}`' for line in lines[:MAX_PLACES])}{more}"
    public_names = getattr(sys.modules[package], "__all__", ())
    return f"; it has {', '.join(public_names)}" if public_names else ""
