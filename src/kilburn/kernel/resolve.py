"""From a name to an object: `"lru"`, `"summarize(keep=4)"`, `"chain(mask(keep=3), fifo)"`, `"pkg.mod:Name"`.

A name is a path: `"lru"` at kind `policies` is class `Lru` of `kilburn.policies.lru`; else an entry point of group
`kilburn.policies`; else `pkg.mod:Name`. Arguments are literals or nested specs, of the types that the class annotates.
There is no registry and no factory, and nothing in a spec is evaluated as code. Only a class of the right kind is called: a
policy has `plan`, a model has `stream`, a store has a store's verbs.

`pkg.mod:Name` imports a module, which runs its code. If a spec comes from someone else (a gateway's request, a shared
file), say `foreign=False`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import pkgutil
import types
import typing
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

from kilburn.errors import KilburnError, SpecError

__all__ = ["resolve"]


MAX_SPEC_CHARS = 10_000
"""Characters of a spec."""


def names(kind: str) -> list[str]:
    """The names that ship with Kilburn for a kind, such as `policies`, sorted."""
    package = importlib.import_module(_home(kind))
    return sorted(
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if not module.ispkg and _class_of(kind, module.name) is not None
    )


def resolve(kind: str, spec: Any, *, foreign: bool = True) -> Any:
    """The object that a spec names.

    Args:
        kind: the package that bare names are looked up in: `policies`, `models`, `stores`; or `kilburn_kv.presses`, beside it.
        spec: a spec string, or an object of the kind, which is returned as it is.
        foreign: whether the spec may name classes from outside Kilburn: `pkg.mod:Name`, and entry points of installed
            packages.

    Raises:
        SpecError: a name that resolves to nothing or to something of another kind, a spec that does not
            parse, or arguments that do not fit; the message lists the names there are.
    """
    if not isinstance(spec, str):
        if isinstance(spec, type) or not all(callable(getattr(spec, verb, None)) for verb in _verbs_of(kind)):
            raise SpecError(f"{_short(spec)} is none of the {kind}: they have {_named(kind)}", advice="give a spec or an object")
        return spec
    target, bracket, call = spec.strip().partition("(")
    target = target.strip()
    # A path is not a name in Python's grammar, so a name takes its place while the arguments are read.
    stand_in = target.replace("-", "_") if ":" not in target and "." not in target else "path"
    node = _parsed(f"{stand_in}{bracket}{call}", spec)
    target_node = node.func if isinstance(node, ast.Call) else node
    if not isinstance(target_node, ast.Name) or target_node.id != stand_in:
        raise SpecError(f"{_short(spec)} is not a spec", advice="write name, name(key=value), or pkg.mod:Name")
    return _build(kind, node, spec, target, foreign)


def _home(kind: str) -> str:
    """The package that holds a kind."""
    return kind if kind.startswith("kilburn_") else f"kilburn.{kind}"


@cache
def _verbs_of(kind: str) -> dict[str, int]:
    """The verbs of a kind, and the arguments that each must have, without the object itself. The protocol that the kind's package
    calls `KIND` says it; of an abstract class, its abstract methods."""
    protocol = importlib.import_module(_home(kind)).KIND
    abstract = getattr(protocol, "__abstractmethods__", ())
    verbs = {}
    for name, method in vars(protocol).items():
        if inspect.isfunction(method) and (name in abstract if abstract else not name.startswith("_")):
            parameters = list(inspect.signature(method).parameters.values())[1:]
            verbs[name] = sum(
                parameter.default is parameter.empty
                and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
                for parameter in parameters
            )
    return verbs


def _parsed(text: str, spec: str) -> ast.expr:
    problem = f"more than {MAX_SPEC_CHARS:,} characters"
    if len(text) <= MAX_SPEC_CHARS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python's warnings about code do not apply to a spec
                return ast.parse(text, mode="eval").body
        except SyntaxError as error:
            problem = error.msg
        except (ValueError, RecursionError, MemoryError) as error:
            problem = str(error) or "nested too deep"
    raise SpecError(f"{_short(spec)} is not a spec: {problem}", advice="write name, name(key=value), or pkg.mod:Name")


def _build(kind: str, node: ast.expr, spec: str, name: str, foreign: bool) -> Any:
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    if isinstance(node, ast.Call):
        positional = [_argument(kind, argument, spec, foreign) for argument in node.args]
        keywords = {keyword.arg: _argument(kind, keyword.value, spec, foreign) for keyword in node.keywords if keyword.arg}
        if len(keywords) != len(node.keywords):
            raise SpecError(f"{_short(spec)} unpacks arguments", advice="write every argument out")
    cls = locate(kind, name, foreign=foreign)
    if cls is None:
        hint = f"a provider's model is chat({_short(name)}) or messages({_short(name)})" if kind == "models" else ""
        listing = f"known: {', '.join(names(kind))}; {hint or 'or give pkg.mod:Name'}"
        raise SpecError(f"no {kind} named {_short(name)}", advice=listing)
    _check_arguments(cls, positional, keywords, spec, name)
    try:
        return cls(*positional, **keywords)
    except KilburnError:
        raise
    except Exception as error:
        raise SpecError(f"{_short(spec)}: {error}", advice=_takes_what(cls, name)) from error


def _check_arguments(cls: type, positional: list[Any], keywords: dict[str, Any], spec: str, name: str) -> None:
    """Check arguments against what a class annotates.

    Raises:
        SpecError: one that it does not have, or lacks, or of another type.
    """
    try:
        signature = inspect.signature(cls)
        hints = typing.get_type_hints(cls.__init__)  # type: ignore[misc]
    except (TypeError, ValueError, NameError, AttributeError):
        return  # a foreign class need not say what it takes
    try:
        arguments = signature.bind(*positional, **keywords).arguments
    except TypeError as error:
        raise SpecError(f"{_short(spec)}: {error}", advice=_takes_what(cls, name)) from None
    for key, value in arguments.items():
        parameter = signature.parameters[key]
        if parameter.kind is parameter.VAR_KEYWORD:
            value = tuple(value.values())
        several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for item in value if several else (value,):
            if not _is_a(item, hints.get(key, Any)):
                annotation = _annotation(parameter)
                raise SpecError(f"{_short(spec)}: {key} is {annotation}, not {_short(item)}", advice=_takes_what(cls, name))


def _takes_what(cls: type, name: str) -> str:
    """What a class takes, as a sentence."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return f"see the arguments of {_short(name)}"
    descriptions = []
    for parameter in parameters:
        kind, usual = _annotation(parameter), "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        descriptions.append(parameter.name + (f": {kind}" if kind else "") + usual)
    return f"{name} takes {', '.join(descriptions) or 'no arguments'}"


def _annotation(parameter: inspect.Parameter) -> str:
    empty = parameter.annotation is parameter.empty
    return "" if empty else inspect.formatannotation(parameter.annotation).strip("'")


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says. What cannot be told from outside counts as right."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    kind = origin or (type(None) if hint is None else hint)
    if hint is Any:
        return True
    if kind is typing.Annotated:
        return _is_a(value, inner[0])
    if kind in (typing.Union, types.UnionType):
        return any(_is_a(value, item) for item in inner)
    if kind is typing.Literal:
        return any(type(value) is type(item) and value == item for item in inner)
    if not isinstance(kind, type):
        return True
    if kind in (int, float):
        # To Python True is a number, and 1e999 is one that is not finite.
        fits = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
        return fits and (isinstance(value, int) or math.isfinite(value))
    if getattr(kind, "_is_protocol", False):
        return all(hasattr(value, item) for item in vars(kind) if not item.startswith("_"))
    if not isinstance(value, kind) or (origin is not None and isinstance(value, str)):
        return False  # a text is no list of texts
    if isinstance(value, Mapping):
        parts = [(key, inner[0]) for key in value] + [(item, inner[1]) for item in value.values()] if inner else []
    else:
        parts = [(item, inner[0]) for item in value] if inner and isinstance(value, list | tuple | set | frozenset) else []
    return all(_is_a(item, item_hint) for item, item_hint in parts)


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
    cls = _class_of(kind, name)
    if cls is not None or not foreign:
        return cls
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    for point in entry_points(group=_home(kind)):
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
        cls = getattr(importlib.import_module(module), attribute, None)
    except (Exception, SystemExit) as error:
        raise SpecError(
            f"cannot import {_short(module)}: {error}", advice="install it, or name its folder: PYTHONPATH=FOLDER"
        ) from error
    if not isinstance(cls, type) or not _is_of(kind, cls):
        raise SpecError(f"{_short(path)} is no class of {kind}: those have {_named(kind)}", advice="name a class that has it")
    return cls


def _is_of(kind: str, cls: type) -> bool:
    """Whether a class has the verbs of a kind, each with the right arguments. Nothing is called."""
    return all(_takes(inspect.getattr_static(cls, verb, None), count + 1) for verb, count in _verbs_of(kind).items())


def _takes(method: Any, count: int) -> bool:
    """Whether it is a method that can be called with so many positional arguments, the object included."""
    if not inspect.isfunction(method):
        return False
    parameters = inspect.signature(method).parameters.values()
    ordered = [
        parameter for parameter in parameters if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    maximum = float("inf") if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters) else len(ordered)
    return sum(parameter.default is parameter.empty for parameter in ordered) <= count <= maximum


def _named(kind: str) -> str:
    return ", ".join(f"{verb}()" for verb in _verbs_of(kind))


def _short(text: Any) -> str:
    quoted = repr(text)
    return quoted if len(quoted) <= 200 else f"{quoted[:200]}..."


def _class_of(kind: str, name: str) -> Any:
    """Class `Lru` of module `kilburn.policies.lru`; None where there is no such module or class of the kind."""
    if not name.isidentifier():
        return None
    path = f"{_home(kind)}.{name}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        return None
    cls = getattr(module, "".join(piece.capitalize() for piece in name.split("_")), None)
    return cls if isinstance(cls, type) and _is_of(kind, cls) else None
