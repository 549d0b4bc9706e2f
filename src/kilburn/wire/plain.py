"""Makes plain JSON data from what a caller passes in: a checked deep copy, or an error that says where."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from kilburn.errors import InvalidMessage

NOT_JSON = (msgspec.DecodeError, UnicodeError, RecursionError)
"""What decoding raises for what is no JSON: UTF-8 is a matter of its own, and so is depth."""

DEPTH = 100
"""Levels of nesting that a message may have; providers accept far fewer."""

VALUES = 100_000
"""Values that JSON inside a text may have: it is read for what it says, and one that says so much says nothing to anybody."""

_BITS = 14_000
"""Longest integer in bits: Python refuses to write more than 4,300 digits."""


def check_text(value: str, where: str) -> str:
    """Return the string itself, as an exact `str`, if it can be written in UTF-8. NUL is allowed.

    Raises:
        InvalidMessage: a lone surrogate, with its position.
    """
    exact = value if type(value) is str else str.__str__(value)
    if not exact.isascii():
        try:
            exact.encode("utf-8")
        except UnicodeEncodeError as broken:
            raise InvalidMessage(
                f"{where}: lone surrogate U+{ord(exact[broken.start]):04X} at character {broken.start}",
                advice="decode the text with errors='replace' before it comes here",
            ) from None
    return exact


def plain(value: Any, where: str = "message", depth: int = 0) -> Any:
    """Return a deep copy made of dict, list, str, int, float, bool and None only; strings are shared.

    Tuples become lists. Objects with `model_dump`, as the providers' SDKs return them, become dicts,
    at any level.

    Raises:
        InvalidMessage: a value that JSON cannot carry, a key that is no string, a lone surrogate, or
            more than `DEPTH` levels.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return check_text(value, where)
    if isinstance(value, int | float):
        return _number(value, where)
    if depth >= DEPTH:
        raise InvalidMessage(f"{where[:200]}: nested more than {DEPTH} levels deep")
    if isinstance(value, dict):
        return _object(value, where, depth)
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if not isinstance(value, type) and callable(getattr(value, "model_dump", None)):
        return plain(_dump(value, where), where, depth)
    raise InvalidMessage(f"{where}: {type(value).__name__} is not JSON", advice="use dict, list, str, int, float, bool or None")


def _object(value: dict[Any, Any], where: str, depth: int) -> dict[str, Any]:
    copy: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise InvalidMessage(f"{where}: the key {str(key)[:40]!r} is {type(key).__name__}, not a string")
        name = check_text(key, f"{where}, a key")
        copy[name] = plain(item, f"{where}.{name[:40]}", depth + 1)
    return copy


def _number(value: int | float, where: str) -> int | float:
    if isinstance(value, int):
        if value.bit_length() > _BITS:
            raise InvalidMessage(f"{where}: an integer of {value.bit_length()} bits", advice="send it as a string")
        return int(value)
    if not math.isfinite(value):
        raise InvalidMessage(f"{where}: {value} is not JSON", advice="use null, or a string")
    return float(value)


def _dump(value: Any, where: str) -> dict[str, Any]:
    """Return the fields that an SDK's object was made from. The SDKs fill unset fields with None, which their own APIs do not
    always accept; other pydantic models may have their role as a default."""
    options = {"exclude_unset": True} if callable(getattr(value, "to_dict", None)) else {"exclude_none": True}
    try:
        dumped = value.model_dump(**options)
    except (TypeError, ValueError) as error:
        raise InvalidMessage(f"{where}: {type(value).__name__}.model_dump failed: {str(error)[:200]}") from error
    if not isinstance(dumped, dict):
        raise InvalidMessage(f"{where}: {type(value).__name__}.model_dump gave {type(dumped).__name__}, not a dict")
    return dumped


def pack(value: Any) -> str:
    """Compact JSON of plain data; the same data gives the same text."""
    return msgspec.json.encode(value).decode("utf-8")


def unpack(extra: str | None) -> dict[str, Any]:
    """Return the JSON object of an `extra`; {} for None.

    Raises:
        InvalidMessage: not a JSON object.
    """
    if extra is None:
        return {}
    try:
        value = msgspec.json.decode(extra)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidMessage(f"extra is not a JSON object: {extra[:80]!r}")
    return value


def load_object(text: str) -> dict[str, Any] | None:
    """The JSON object in a text, or None if it is something else, nested too deeply, or may have more than `VALUES` values."""
    if len(text) > VALUES and sum(map(text.count, ",[{")) > VALUES:
        return None
    try:
        value = msgspec.json.decode(text)
        return plain(value) if isinstance(value, dict) else None
    except (msgspec.DecodeError, RecursionError, ValueError, InvalidMessage):
        return None


def string_at(holder: dict[str, Any], key: str, where: str, *, empty: bool = False) -> str:
    """Return the string under `key`, not empty unless `empty` is set.

    Raises:
        InvalidMessage: it is missing, empty, or of another type.
    """
    value = holder.get(key)
    if not isinstance(value, str) or not (value or empty):
        problem = "is missing" if key not in holder else "is empty" if value == "" else f"is {type_name(value)}, not a string"
        raise InvalidMessage(f"{where}.{key} {problem}")
    return value


def type_name(value: Any) -> str:
    """Return a value's type in words for a message: `null`, `list`, `int`."""
    return "null" if value is None else type(value).__name__


def whole_number(value: Any) -> Any:
    """Return a whole number such as 100.0 as an int, and any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def counted(usage: Any) -> dict[str, Any]:
    """Return a report of usage whose whole numbers are ints, at every level, or {} for a value of another type."""
    if not isinstance(usage, dict):
        return {}
    return {key: counted(value) if isinstance(value, dict) else whole_number(value) for key, value in usage.items()}
