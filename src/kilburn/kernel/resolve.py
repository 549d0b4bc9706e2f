"""From a name to an object: `"lru"`, `"summarize(keep=4)"`, `"chain(mask(keep=3), fifo)"`, `"pkg.mod:Name"`.

A name is a path: `"lru"` at kind `policies` is class `Lru` of `kilburn.policies.lru`; else an entry
point of group `kilburn.policies`; else `pkg.mod:Name`. Arguments are literals or nested specs. There
is no registry, no factory, and nothing of a spec is ever evaluated as code.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from typing import Any

from kilburn.errors import SpecError

__all__ = ["locate", "names", "resolve"]


VERBS = {"policies": "plan", "models": "stream", "stores": "commit", "kv.presses": "keep"}
"""What a class of each kind can do, so that its neighbours in the package are not taken for one."""


def names(kind: str) -> list[str]:
    """The names that ship with Kilburn for a kind, such as `policies`, sorted."""
    package = importlib.import_module(f"kilburn.{kind}")
    return sorted(
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if not module.ispkg and hasattr(_class_of(kind, module.name), VERBS.get(kind, "__init__"))
    )


def resolve(kind: str, spec: Any) -> Any:
    """The object that a spec names.

    Args:
        kind: `policies`, `models` or `stores`: the package that bare names are looked up in.
        spec: a spec string; anything else is returned as it is.

    Raises:
        SpecError: a name that resolves to nothing, a spec that does not parse, or arguments that
            do not fit; the message lists the names there are.
    """
    if not isinstance(spec, str):
        return spec
    target, _, call = spec.strip().partition("(")
    dotted = target.replace(":", ".").strip()
    text = f"{_flat(dotted)}({call}" if "(" in spec else _flat(dotted)
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise SpecError(f"{spec!r} is not a spec: {error.msg}", advice="write name, name(key=value), or pkg.mod:Name") from None
    return _build(kind, node, spec, {_flat(dotted): target.strip()})


def _flat(dotted: str) -> str:
    return dotted.replace(".", "__dot__").replace("-", "_")


def _build(kind: str, node: ast.expr, spec: str, targets: dict[str, str]) -> Any:
    if isinstance(node, ast.Name):
        return _make(kind, targets.get(node.id, node.id), (), {}, spec)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        positional = [_argument(kind, argument, spec) for argument in node.args]
        named = {keyword.arg: _argument(kind, keyword.value, spec) for keyword in node.keywords if keyword.arg}
        if len(named) != len(node.keywords):
            raise SpecError(f"{spec!r} unpacks arguments", advice="write every argument out")
        return _make(kind, targets.get(node.func.id, node.func.id), positional, named, spec)
    raise SpecError(f"{spec!r} is not a spec", advice="write name, name(key=value), or pkg.mod:Name")


def _argument(kind: str, node: ast.expr, spec: str) -> Any:
    if isinstance(node, ast.Name | ast.Call):
        return _build(kind, node, spec, {})
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise SpecError(
            f"an argument of {spec!r} is neither a literal nor a spec", advice="use numbers, strings, lists, or nested specs"
        ) from None


def _make(kind: str, name: str, positional: Any, named: Any, spec: str) -> Any:
    made = locate(kind, name)
    if made is None:
        raise SpecError(f"no {kind} named {name!r}", advice=f"known: {', '.join(names(kind))}; or give pkg.mod:Name")
    try:
        return made(*positional, **named)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{spec!r}: {error}", advice=f"see the arguments of {name} in docs/reference") from error


def locate(kind: str, name: str) -> Any:
    """The class that a bare name, an entry point or `pkg.mod:Name` stands for; None where there is none.

    Raises:
        SpecError: the module of `pkg.mod:Name` cannot be imported.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute, None)
        except ImportError as error:
            raise SpecError(f"cannot import {module!r}: {error}", advice="is it installed, and on the path?") from error
    found = _class_of(kind, name)
    if found is not None:
        return found
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    for point in entry_points(group=f"kilburn.{kind}"):
        if point.name == name:
            return point.load()
    return None


def _class_of(kind: str, name: str) -> Any:
    """Class `Lru` of module `kilburn.policies.lru`; None where there is no such module or class."""
    if not name.isidentifier():
        return None
    path = f"kilburn.{kind}.{name}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        return None
    return getattr(module, "".join(piece.capitalize() for piece in name.split("_")), None)
