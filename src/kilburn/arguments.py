"""The door of a public class: arguments of a wrong type are refused before a method begins.

A method says in its annotations what it takes. What an annotation does not say, such as the range of a number or the form of
an address, the method checks itself.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from kilburn.errors import SpecError

__all__ = ["checked"]

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])
Fits = Callable[[Any], bool]

OWN = frozenset({"address", "model"})
"""Arguments that have an error of their own, whatever is given: what is no address is an unknown one, and a model is resolved."""

WORDS: dict[Any, str] = {
    str: "text, without half characters",
    int: "a whole number",
    float: "a finite number",
    type(None): "None",
}


def checked(cls: Class) -> Class:
    """Make each public method of a class, and its `__init__`, check the types of its arguments.

    Then it raises `SpecError` for a wrong type, for a number that is none (nan, infinity, True), and for text with half a
    character in it, which nothing can write. Nothing has changed then.
    """
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, checking(method))
    return cls


def checking(function: Function) -> Function:
    """A function that checks the types of its arguments first; see `checked`."""
    taken = list(inspect.signature(function).parameters.values())
    if not any(parameter.annotation not in (parameter.empty, "Any") for parameter in taken):
        return function

    @functools.cache
    def checks() -> list[tuple[int, str, Any, Fits]]:
        # What annotations name is known when the modules are there.
        hints = get_type_hints(function)
        found = []
        for at, parameter in enumerate(taken):
            fits = fitting(hints.get(parameter.name, Any)) if parameter.name not in OWN else None
            if fits is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                place = at if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else sys.maxsize
                found.append((place, parameter.name, hints[parameter.name], fits))
        return found

    @functools.wraps(function)
    def door(*given: Any, **named: Any) -> Any:
        for at, name, hint, fits in checks():
            if at < len(given):
                value = given[at]
            elif name in named:
                value = named[name]
            else:
                continue
            if not fits(value):
                what = f"{function.__qualname__.removesuffix('.__init__')}: {name}={_shown(value)}"
                raise SpecError(what, advice=f"give {_told(hint)}")
        return function(*given, **named)

    return door  # type: ignore[return-value]


def fitting(hint: Any) -> Fits | None:
    """What says whether a value fits an annotation; None where any value does."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        several = [fitting(each) for each in get_args(hint)]
        return None if None in several else lambda value: any(fits(value) for fits in several if fits is not None)
    if hint in EXACT:
        return EXACT[hint]
    if hint is Any:
        return None
    if inspect.isclass(origin) and issubclass(origin, Iterable):
        inner = [fitting(each) or _is_any for each in get_args(hint)]
        return lambda value: _is_several(value, origin, inner)
    if inspect.isclass(origin):
        return lambda value: isinstance(value, origin)
    # Other protocols are looked through by those who use them.
    if not inspect.isclass(hint) or hint is bool or (getattr(hint, "_is_protocol", False) and not _is_runtime(hint)):
        return None
    return lambda value: isinstance(value, hint)


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


EXACT: dict[Any, Fits] = {str: _is_text, int: _is_whole, float: _is_number, type(None): lambda value: value is None}


def _is_any(_: Any) -> bool:
    return True


def _is_several(value: Any, origin: type, inner: Sequence[Fits]) -> bool:
    """Whether a value is some of these. What can be gone through only once is not looked at."""
    if isinstance(value, str | bytes) or not isinstance(value, origin):
        return False
    if isinstance(value, Mapping):
        return all(map(inner[0], value)) and all(map(inner[-1], value.values()))
    return not isinstance(value, Collection) or all(map(inner[0], value))


def _is_runtime(hint: Any) -> bool:
    return bool(getattr(hint, "_is_runtime_protocol", False))


def _shown(value: Any) -> str:
    """A little of a value, whatever it is; a foreign object may say anything of itself, or fail to."""
    plain = isinstance(value, str | bytes | int | float | list | tuple | dict | set | types.NoneType)
    return ascii(value if not isinstance(value, str | bytes) else value[:80])[:80] if plain else f"a {type(value).__name__}"


def _told(hint: Any) -> str:
    """What an annotation takes, in words."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_told, get_args(hint))))
    return WORDS.get(hint) or re.sub(r"\b(?:\w+\.)+(?=\w)", "", str(hint) if get_args(hint) else hint.__name__)
