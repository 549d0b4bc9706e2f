"""The door of a public class: arguments of a wrong type are refused before a method begins.

A method says in its annotations what it takes. What an annotation does not say, such as the range of a number or the form of
an address, the method checks itself.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from kilburn.errors import SpecError

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])
Takes = Callable[[Any], Any]

UNFIT: Any = object()
"""What is taken of a value that does not fit."""

UNCHECKED = frozenset({"address", "model"})
"""Arguments that have an error of their own, whatever is given: what is no address is an unknown one, and a model is resolved."""

WORDS: dict[Any, str] = {
    str: "text, without half characters",
    int: "a whole number",
    float: "a finite number",
    bool: "True or False",
    type(None): "None",
}


def checked(cls: Class) -> Class:
    """Make each public method of a class, and its `__init__`, check the types of its arguments.

    Then it raises `SpecError` for a wrong type, for a number that is none (nan, infinity, True), and for text with half a
    character in it, which nothing can write. Nothing has changed then. Numbers of other libraries, such as numpy's, and
    subclasses of text and numbers are handed on as Python's own.
    """
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, checking(method))
    return cls


def checking(function: Function) -> Function:
    """A function that checks the types of its arguments first; see `checked`."""
    parameters = list(inspect.signature(function).parameters.values())
    if not any(parameter.annotation not in (parameter.empty, "Any") for parameter in parameters):
        return function

    @functools.cache
    def checks() -> list[tuple[int, str, Any, Takes]]:
        # What annotations name is known when the modules are there.
        hints = get_type_hints(function)
        checks_found = []
        for at, parameter in enumerate(parameters):
            take = taking(hints.get(parameter.name, Any)) if parameter.name not in UNCHECKED else None
            if take is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                place = at if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else sys.maxsize
                checks_found.append((place, parameter.name, hints[parameter.name], take))
        return checks_found

    @functools.wraps(function)
    def door(*args: Any, **kwargs: Any) -> Any:
        for at, name, hint, take in checks():
            if at < len(args):
                value = args[at]
            elif name in kwargs:
                value = kwargs[name]
            else:
                continue
            fit = take(value)
            if fit is value:
                continue
            if fit is UNFIT:
                raise _refusal(f"{function.__qualname__.removesuffix('.__init__')}: {name}", value, hint)
            if at < len(args):
                args = (*args[:at], fit, *args[at + 1 :])
            else:
                kwargs[name] = fit
        return function(*args, **kwargs)

    return door  # type: ignore[return-value]


def check_fields(struct: msgspec.Struct) -> None:
    """Check the fields of a struct that was just made, as `checked` checks arguments.

    Raises:
        SpecError: a field of a wrong type.
    """
    for name, hint, take in _fields(type(struct)):
        value = getattr(struct, name)
        fit = take(value)
        if fit is UNFIT:
            raise _refusal(f"{type(struct).__name__}: {name}", value, hint)
        if fit is not value:
            msgspec.structs.force_setattr(struct, name, fit)


@functools.cache
def _fields(cls: type[msgspec.Struct]) -> list[tuple[str, Any, Takes]]:
    fields = ((name, hint, taking(hint)) for name, hint in get_type_hints(cls).items() if name in cls.__struct_fields__)
    return [(name, hint, take) for name, hint, take in fields if take is not None and name not in UNCHECKED]


def plain_number(value: Any) -> Any:
    """Another library's number as Python's own; whatever else it is, as it is."""
    whole = _whole(value)
    number = _number(value) if whole is UNFIT else whole
    return value if number is UNFIT else number


def taking(hint: Any) -> Takes | None:
    """Return the converter for an annotation, or None if it accepts any value. The converter returns the value to continue with,
    mostly the argument itself, or `UNFIT` if the value does not fit."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        several = [taking(arg) for arg in get_args(hint)]
        return None if None in several else functools.partial(_first, [take for take in several if take is not None])
    if hint in EXACT:
        return EXACT[hint]
    if hint is Any:
        return None
    if is_typeddict(hint):
        return functools.partial(_instance, dict)
    if inspect.isclass(origin) and issubclass(origin, Iterable):
        return functools.partial(_several, origin, [taking(arg) or _any for arg in get_args(hint)])
    if inspect.isclass(origin):
        return functools.partial(_instance, origin)
    # Other protocols are looked through by those who use them.
    if not inspect.isclass(hint) or (getattr(hint, "_is_protocol", False) and not getattr(hint, "_is_runtime_protocol", False)):
        return None
    return functools.partial(_instance, hint)


def _first(several: Sequence[Takes], value: Any) -> Any:
    return next((fit for take in several if (fit := take(value)) is not UNFIT), UNFIT)


def _instance(cls: type, value: Any) -> Any:
    return value if isinstance(value, cls) else UNFIT


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        return UNFIT
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        return UNFIT
    return value if type(value) is str else str.__str__(value)


def _whole(value: Any) -> Any:
    if type(value) is int:
        return value
    try:
        return UNFIT if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return UNFIT


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return UNFIT
    try:
        number = float(value)
    except OverflowError:
        return UNFIT
    if not math.isfinite(number):
        return UNFIT
    exact: type = type(value)
    return value if exact in (int, float) else number


def _truth(value: Any) -> Any:
    # numpy's is no bool of Python's, and no number.
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    return bool(value) if type(value) is int and value in (0, 1) else UNFIT


def _none(value: Any) -> Any:
    return None if value is None else UNFIT


EXACT: dict[Any, Takes] = {str: _text, int: _whole, float: _number, bool: _truth, type(None): _none}


def _any(value: Any) -> Any:
    return value


def _several(origin: type, inner: Sequence[Takes], value: Any) -> Any:
    """Check each item of a collection. An iterator, which can be read only once, is returned unchecked."""
    if isinstance(value, str | bytes) or not isinstance(value, origin):
        return UNFIT
    if isinstance(value, Mapping):
        converted = {inner[0](key): inner[-1](item) for key, item in value.items()}
        if UNFIT in converted or any(item is UNFIT for item in converted.values()):
            return UNFIT
        same = all(map(operator.is_, converted, value)) and all(map(operator.is_, converted.values(), value.values()))
        return value if same else converted
    if not isinstance(value, Collection):
        return value
    fits = [inner[0](item) for item in value]
    if any(item is UNFIT for item in fits):
        return UNFIT
    if all(map(operator.is_, fits, value)):
        return value
    return next((kind(fits) for kind in (tuple, set, frozenset) if isinstance(value, kind)), fits)


def _refusal(argument: str, value: Any, hint: Any) -> SpecError:
    return SpecError(f"{argument}={_shown(value)}", advice=f"give {_told(hint)}")


def _shown(value: Any) -> str:
    """A little of a value, whatever it is; a foreign object may say anything of itself, or fail to."""
    plain = isinstance(value, str | bytes | int | float | list | tuple | dict | set | types.NoneType)
    return ascii(value if not isinstance(value, str | bytes) else value[:80])[:80] if plain else f"a {type(value).__name__}"


def _told(hint: Any) -> str:
    """What an annotation takes, in words."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_told, get_args(hint))))
    return WORDS.get(hint) or re.sub(r"\b(?:\w+\.)+(?=\w)", "", str(hint) if get_args(hint) else hint.__name__)
