"""From a name to an object: `"lru"`, `"summarize(keep=4)"`, `"chain(mask(keep=3), fifo)"`, `"pkg.mod:Name"`.

A name is a path: `"lru"` at kind `policies` is class `Lru` of `kilburn.policies.lru`; else an entry point of group
`kilburn.policies`; else `pkg.mod:Name`. Arguments are literals or nested specs. There is no registry and no factory,
and nothing in a spec is evaluated as code. Only a class of the right kind is called: a policy has `plan`, a model has
`stream`, a store has a store's verbs.

`pkg.mod:Name` imports a module, which runs its code. If a spec comes from someone else (a gateway's request, a shared
file), say `foreign=False`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import warnings
from typing import Any

from kilburn.errors import KilburnError, SpecError

__all__ = ["locate", "names", "resolve"]


VERBS: dict[str, dict[str, int]] = {
    "policies": {"plan": 1},
    "models": {"stream": 1},
    "stores": {
        "process": 1,
        "processes": 0,
        "commit": 2,
        "pages": 1,
        "read": 1,
        "citing": 2,
        "events": 1,
        "texts": 1,
        "search": 1,
        "entries": 1,
        "passages": 1,
        "erase": 1,
        "close": 0,
        "unembedded": 2,
        "keep_vectors": 2,
        "vectors": 1,
        "drop_vectors": 1,
    },
    "kv.presses": {"keep": 2},
    "agents.disciplines": {"choose": 1},
    "memory": {"plan": 1},
    "memory.rankings": {"rank": 2},
    "memory.embedders": {"embed": 1},
    "agents.sandboxes": {"run": 1, "get": 1, "close": 0},
}
"""The verbs of each kind, and the arguments of each verb in order, without the object itself."""

LONGEST = 10_000
"""Characters of a spec."""


def names(kind: str) -> list[str]:
    """The names that ship with Kilburn for a kind, such as `policies`, sorted."""
    package = importlib.import_module(f"kilburn.{kind}")
    return sorted(
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if not module.ispkg and _class_of(kind, module.name) is not None
    )


def resolve(kind: str, spec: Any, *, foreign: bool = True) -> Any:
    """The object that a spec names.

    Args:
        kind: `policies`, `models`, `stores` or `kv.presses`: the package that bare names are looked up in.
        spec: a spec string, or an object of the kind, which is returned as it is.
        foreign: whether the spec may name classes from outside Kilburn: `pkg.mod:Name`, and entry points of installed
            packages.

    Raises:
        SpecError: a name that resolves to nothing or to something of another kind, a spec that does not
            parse, or arguments that do not fit; the message lists the names there are.
    """
    if not isinstance(spec, str):
        if isinstance(spec, type) or not all(callable(getattr(spec, verb, None)) for verb in VERBS[kind]):
            raise SpecError(f"{_short(spec)} is none of the {kind}: they have {_verbs(kind)}", advice="give a spec or an object")
        return spec
    target, bracket, call = spec.strip().partition("(")
    target = target.strip()
    # A path is not a name in Python's grammar, so a name takes its place while the arguments are read.
    stand_in = target.replace("-", "_") if ":" not in target and "." not in target else "path"
    node = _parsed(f"{stand_in}{bracket}{call}", spec)
    named = node.func if isinstance(node, ast.Call) else node
    if not isinstance(named, ast.Name) or named.id != stand_in:
        raise SpecError(f"{_short(spec)} is not a spec", advice="write name, name(key=value), or pkg.mod:Name")
    return _build(kind, node, spec, target, foreign)


def _parsed(text: str, spec: str) -> ast.expr:
    what = f"more than {LONGEST:,} characters"
    if len(text) <= LONGEST:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's warnings about code do not apply to a spec
                return ast.parse(text, mode="eval").body
        except SyntaxError as error:
            what = error.msg
        except (ValueError, RecursionError, MemoryError) as error:
            what = str(error) or "nested too deep"
    raise SpecError(f"{_short(spec)} is not a spec: {what}", advice="write name, name(key=value), or pkg.mod:Name")


def _build(kind: str, node: ast.expr, spec: str, name: str, foreign: bool) -> Any:
    positional: list[Any] = []
    named: dict[str, Any] = {}
    if isinstance(node, ast.Call):
        positional = [_argument(kind, argument, spec, foreign) for argument in node.args]
        named = {keyword.arg: _argument(kind, keyword.value, spec, foreign) for keyword in node.keywords if keyword.arg}
        if len(named) != len(node.keywords):
            raise SpecError(f"{_short(spec)} unpacks arguments", advice="write every argument out")
    made = locate(kind, name, foreign=foreign)
    if made is None:
        raise SpecError(f"no {kind} named {_short(name)}", advice=f"known: {', '.join(names(kind))}; or give pkg.mod:Name")
    try:
        return made(*positional, **named)
    except KilburnError:
        raise
    except Exception as error:
        raise SpecError(f"{_short(spec)}: {error}", advice=f"see the arguments of {_short(name)} in docs/reference") from error


def _argument(kind: str, node: ast.expr, spec: str, foreign: bool) -> Any:
    if isinstance(node, ast.Name):
        return _build(kind, node, spec, node.id, foreign)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _build(kind, node, spec, node.func.id, foreign)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise SpecError(
            f"an argument of {_short(spec)} is neither a literal nor a spec",
            advice="use numbers, strings, lists, or nested specs",
        ) from None


def locate(kind: str, name: str, *, foreign: bool = True) -> Any:
    """The class that a bare name, an entry point or `pkg.mod:Name` stands for; None if there is none.

    Args:
        foreign: see `resolve`. If it is False, only modules of Kilburn are imported.

    Raises:
        SpecError: the module of `pkg.mod:Name` cannot be imported, what it names is no class of the kind,
            or it is foreign and must not be.
    """
    if ":" in name:
        return _foreign(kind, name, foreign)
    found = _class_of(kind, name)
    if found is not None or not foreign:
        return found
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    for point in entry_points(group=f"kilburn.{kind}"):
        if point.name == name:
            return _foreign(kind, point.value.partition("[")[0].strip(), foreign)
    return None


def _foreign(kind: str, path: str, allowed: bool) -> type:
    if not allowed:
        raise SpecError(f"{_short(path)} is not Kilburn's", advice=f"this place takes only: {', '.join(names(kind))}")
    module, _, attribute = path.partition(":")
    if not attribute.isidentifier() or not all(piece.isidentifier() for piece in module.split(".")):
        raise SpecError(f"{_short(path)} is no path of a class", advice="write pkg.mod:Name")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except (Exception, SystemExit) as error:
        raise SpecError(f"cannot import {_short(module)}: {error}", advice="is it installed, and on the path?") from error
    if not isinstance(found, type) or not _is_of(kind, found):
        raise SpecError(f"{_short(path)} is no class of {kind}: those have {_verbs(kind)}", advice="name a class that has it")
    return found


def _is_of(kind: str, made: type) -> bool:
    """Whether a class has the verbs of a kind, each with the right arguments. Nothing is called."""
    return all(_takes(inspect.getattr_static(made, verb, None), given + 1) for verb, given in VERBS[kind].items())


def _takes(method: Any, given: int) -> bool:
    """Whether it is a method that can be called with so many positional arguments, the object included."""
    if not inspect.isfunction(method):
        return False
    parameters = inspect.signature(method).parameters.values()
    ordered = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    most = float("inf") if any(one.kind is one.VAR_POSITIONAL for one in parameters) else len(ordered)
    return sum(one.default is one.empty for one in ordered) <= given <= most


def _verbs(kind: str) -> str:
    return ", ".join(f"{verb}()" for verb in VERBS[kind])


def _short(text: Any) -> str:
    said = repr(text)
    return said if len(said) <= 200 else f"{said[:200]}..."


def _class_of(kind: str, name: str) -> Any:
    """Class `Lru` of module `kilburn.policies.lru`; None where there is no such module or class of the kind."""
    if not name.isidentifier():
        return None
    path = f"kilburn.{kind}.{name}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        return None
    found = getattr(module, "".join(piece.capitalize() for piece in name.split("_")), None)
    return found if isinstance(found, type) and _is_of(kind, found) else None
