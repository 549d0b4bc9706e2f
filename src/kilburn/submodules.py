"""The submodules of a package as its attributes, each imported when it is first used; and where a name lives.

So `kilburn.adapters.clients.wrap` works after `import kilburn`, which stays cheap. A name that is in no such place is an error
that says which modules export it. They are read from the sources, when it is asked for: there is no list to keep.
"""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from typing import Any

EXPORTS = re.compile(r"^__all__ = \[(.*?)\]", re.MULTILINE | re.DOTALL)

PACKAGES = ("kilburn", "kilburn_kv", "kilburn_lab")
"""Where names live: the product, and the distributions beside it that are installed."""

NAMED = 4
"""Places that an error names at most."""


def attach(package: str) -> None:
    """Let a package import its submodules when they are used as attributes; every package here calls it.

    A name that is nothing here raises AttributeError, in `from package import name` ImportError. Both say where it lives.
    """

    def attribute(name: str) -> Any:
        path = f"{package}.{name}"
        if name.isidentifier() and not name.startswith("_"):
            try:
                return importlib.import_module(path)
            except ModuleNotFoundError as error:
                if error.name != path:
                    raise
        said = f"{package} has no {name!r}{_advice(name, package)}"
        if sys._getframe(1).f_code.co_name == "_handle_fromlist":
            # `from package import name` is asking. It would drop an AttributeError, and what that says.
            raise ImportError(said, name=package)
        raise AttributeError(said)

    vars(sys.modules[package])["__getattr__"] = attribute


@cache
def exports() -> dict[str, list[str]]:
    """Every public name that is defined in a module below the top, with the modules that export it, sorted. What the commands
    of the command line are called is not among them."""
    # Only for an error.
    from importlib.util import find_spec
    from pathlib import Path

    specs = [spec for package in PACKAGES if (spec := find_spec(package)) is not None and spec.origin is not None]
    roots = {spec.name: Path(spec.origin or "").resolve().parent for spec in specs}
    found: dict[str, list[str]] = {}
    for package, file in [(name, file) for name, place in roots.items() for file in sorted(place.rglob("*.py"))]:
        text = file.read_text(encoding="utf-8")
        names = EXPORTS.search(text)
        module = ".".join([package, *file.relative_to(roots[package]).with_suffix("").parts]).removesuffix(".__init__")
        own = names is not None and module != package and not module.startswith(f"{package}.cli")
        for name in re.findall(r'"(\w+)"', names[1]) if names and own else ():
            # What a package exports again is named where it is defined.
            if re.search(rf"^(?:(?:class|def|async def) {name}\b|{name}\b.* = )", text, re.MULTILINE):
                found.setdefault(name, []).append(module)
    return found


def _advice(name: str, package: str) -> str:
    """Where a name lives, or one that is nearly the same, or else what the package has, as the end of a sentence."""
    if name.startswith("_"):
        return ""
    known = exports()
    near = sorted((each for each in known if each.lower() == name.lower()), key=lambda each: each != name)
    if not near:
        import difflib  # only for an error

        near = difflib.get_close_matches(name, known, 2, 0.8)
    lines = [f"from {module} import {each}" for each in near for module in known[each]]
    more = "" if len(lines) <= NAMED else f", and {len(lines) - NAMED} more"
    if lines:
        return f"; write {' or '.join(f'`{line}`' for line in lines[:NAMED])}{more}"
    own = getattr(sys.modules[package], "__all__", ())
    return f"; it has {', '.join(own)}" if own else ""
