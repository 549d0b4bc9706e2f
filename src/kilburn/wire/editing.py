"""Anthropic's context editing and compaction: the request's `context_management` and `compaction`, typed.

Read strictly, written back equal: a field that is not known here is kept under `more`, a known one of
the wrong type is an error that says where. The same settings become a policy's spec (`policy_of`), and
a policy's settings a request (`edits_of`). Forms after the official SDK's beta types (MIT). It refuses
to know what a reply holds (see `kilburn.wire.compaction`) and to carry out any edit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec
from msgspec import UNSET, UnsetType

from kilburn.errors import InvalidMessage, SpecError
from kilburn.wire.plain import plain, type_of

__all__ = [
    "COMPACT_LEAST",
    "Amount",
    "ClearThinkingEdit",
    "ClearToolUsesEdit",
    "CompactEdit",
    "Edit",
    "Editable",
    "Management",
    "OtherEdit",
    "Summarize",
    "amount",
    "edits_of",
    "number_of",
    "policy_of",
    "read_management",
    "read_summarize",
    "write",
]

COMPACT_LEAST = 50_000
"""Smallest trigger, in input tokens, that the provider takes for `compact_20260112`."""


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """A number with its unit: `{"type": "input_tokens", "value": 100000}`; "all" has no value."""

    type: str
    value: int | UnsetType = UNSET
    more: dict[str, Any] = {}


class CompactEdit(msgspec.Struct, frozen=True, kw_only=True):
    """`compact_20260112`: summarise all of the prompt once it is longer than the trigger."""

    type: str = "compact_20260112"
    trigger: Amount | UnsetType | None = UNSET
    pause_after_compaction: bool | UnsetType = UNSET
    instructions: str | UnsetType | None = UNSET
    more: dict[str, Any] = {}


class ClearToolUsesEdit(msgspec.Struct, frozen=True, kw_only=True):
    """`clear_tool_uses_20250919`: placeholders for the oldest tool results."""

    type: str = "clear_tool_uses_20250919"
    trigger: Amount | UnsetType = UNSET
    keep: Amount | UnsetType = UNSET
    clear_at_least: Amount | UnsetType | None = UNSET
    exclude_tools: tuple[str, ...] | UnsetType | None = UNSET
    clear_tool_inputs: bool | tuple[str, ...] | UnsetType | None = UNSET
    more: dict[str, Any] = {}


class ClearThinkingEdit(msgspec.Struct, frozen=True, kw_only=True):
    """`clear_thinking_20251015`: no thinking of older assistant turns."""

    type: str = "clear_thinking_20251015"
    keep: Amount | str | UnsetType = UNSET
    more: dict[str, Any] = {}


class OtherEdit(msgspec.Struct, frozen=True, kw_only=True):
    """An edit that is not known here: carried whole."""

    type: str
    more: dict[str, Any] = {}


Edit = CompactEdit | ClearToolUsesEdit | ClearThinkingEdit | OtherEdit


class Management(msgspec.Struct, frozen=True, kw_only=True):
    """`context_management` of a request: the edits, in order."""

    edits: tuple[Edit, ...] = ()
    more: dict[str, Any] = {}


class Summarize(msgspec.Struct, frozen=True, kw_only=True):
    """`compaction` of a request: compact all of its messages now and say nothing else."""

    type: str = "summarize"
    instructions: str | UnsetType | None = UNSET
    more: dict[str, Any] = {}


@runtime_checkable
class Editable(Protocol):
    """A policy whose settings the provider knows too."""

    def edit(self) -> Edit:
        """The provider's form of these settings."""
        ...


def write(form: Any) -> Any:
    """The JSON of a form, equal to what it was read from."""
    if isinstance(form, msgspec.Struct):
        known = {name: write(getattr(form, name)) for name in form.__struct_fields__ if name != "more"}
        return {name: value for name, value in known.items() if value is not UNSET} | getattr(form, "more", {})
    return [write(item) for item in form] if isinstance(form, tuple) else form


Reader = Callable[[Any, str], Any]


def read_fields(source: Any, where: str, readers: dict[str, Reader]) -> dict[str, Any]:
    """Arguments for a form: known fields read by their readers, all others under `more`.

    Raises:
        InvalidMessage: not an object, or a field of the wrong type.
    """
    if not isinstance(source, dict):
        raise InvalidMessage(f"{where}: {type_of(source)} where an object belongs")
    read = {key: readers[key](value, f"{where}.{key}") for key, value in source.items() if key in readers}
    return {**read, "more": {key: value for key, value in source.items() if key not in readers}}


def amount(*types: str, least: int = 1) -> Reader:
    """Reads an `Amount` of one of these units, of at least `least`."""

    def read(value: Any, where: str) -> Amount:
        given = Amount(**read_fields(value, where, {"type": string, "value": whole}))
        if given.type not in types:
            raise InvalidMessage(f"{where}.type: {given.type[:40]!r} is none of {', '.join(types)}")
        if given.value is UNSET:
            raise InvalidMessage(f"{where}.value is missing")
        if given.value < least:
            raise InvalidMessage(f"{where}.value: {given.value} is below {least}")
        return given

    return read


def string(value: Any, where: str) -> str:
    """A string.

    Raises:
        InvalidMessage: it is not.
    """
    if not isinstance(value, str):
        raise InvalidMessage(f"{where}: {type_of(value)} where a string belongs")
    return value


def whole(value: Any, where: str) -> int:
    """A whole number, 0 or more.

    Raises:
        InvalidMessage: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidMessage(f"{where}: {str(value)[:40]!r} where a whole number belongs")
    return value


def or_null(read: Reader) -> Reader:
    """The same reader, with null allowed."""
    return lambda value, where: None if value is None else read(value, where)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidMessage(f"{where}: {type_of(value)} where true or false belongs")
    return value


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise InvalidMessage(f"{where}: {type_of(value)} where a list of tool names belongs")
    return tuple(string(name, f"{where}[{index}]") for index, name in enumerate(value))


def _flag_or_names(value: Any, where: str) -> bool | tuple[str, ...]:
    return value if isinstance(value, bool) else _names(value, where)


def _turns(value: Any, where: str) -> Amount | str:
    if value == "all":
        return "all"
    if isinstance(value, dict) and value.get("type") == "all":
        return Amount(**read_fields(value, where, {"type": string}))
    given: Amount = amount("thinking_turns")(value, where)
    return given


_EDITS: dict[str, tuple[type[Edit], dict[str, Reader]]] = {
    "compact_20260112": (
        CompactEdit,
        {
            "type": string,
            "trigger": or_null(amount("input_tokens", least=COMPACT_LEAST)),
            "pause_after_compaction": _flag,
            "instructions": or_null(string),
        },
    ),
    "clear_tool_uses_20250919": (
        ClearToolUsesEdit,
        {
            "type": string,
            "trigger": amount("input_tokens", "tool_uses"),
            "keep": amount("tool_uses", least=0),
            "clear_at_least": or_null(amount("input_tokens")),
            "exclude_tools": or_null(_names),
            "clear_tool_inputs": or_null(_flag_or_names),
        },
    ),
    "clear_thinking_20251015": (ClearThinkingEdit, {"type": string, "keep": _turns}),
}


def read_management(source: Any, where: str = "context_management") -> Management:
    """The edits of a request.

    Raises:
        InvalidMessage: what is wrong, and where; also the same edit twice, and thinking that is not
            listed first, which the provider refuses.
    """
    return Management(**read_fields(plain(source, where), where, {"edits": _read_edits}))


def _read_edits(value: Any, where: str) -> tuple[Edit, ...]:
    if not isinstance(value, list):
        raise InvalidMessage(f"{where}: {type_of(value)} where a list of edits belongs")
    edits = tuple(_read_edit(item, f"{where}[{index}]") for index, item in enumerate(value))
    kinds = [edit.type for edit in edits]
    for index, kind in enumerate(kinds):
        if kind in kinds[:index]:
            raise InvalidMessage(f"{where}[{index}]: {kind[:40]} is listed twice", advice="give each edit once")
        if kind.startswith("clear_thinking") and index:
            raise InvalidMessage(f"{where}[{index}]: {kind[:40]} stands behind another edit", advice="list it first")
    return edits


def _read_edit(source: Any, where: str) -> Edit:
    kind = string(source.get("type"), f"{where}.type") if isinstance(source, dict) else ""
    made, readers = _EDITS.get(kind, (OtherEdit, {"type": string}))
    edit: Edit = made(**read_fields(source, where, readers))
    return edit


def read_summarize(source: Any, where: str = "compaction") -> Summarize:
    """An on-demand compaction.

    Raises:
        InvalidMessage: what is wrong, and where.
    """
    form = Summarize(**read_fields(plain(source, where), where, {"type": string, "instructions": or_null(string)}))
    if form.type != "summarize":
        raise InvalidMessage(f"{where}.type: {form.type[:40]!r} is not summarize")
    return form


def number_of(given: object, unit: str) -> object:
    """The plain number of an amount in that unit, `{"type": unit, "value": 3}`; anything else as it is."""
    if isinstance(given, Mapping) and given.keys() == {"type", "value"} and given["type"] == unit:
        value: object = given["value"]
        return value
    return given


def edits_of(policy: object) -> dict[str, Any]:
    """The `context_management` that makes the provider do what a policy, or a chain of policies, does here.

    Raises:
        SpecError: the provider cannot do it.
    """
    members = getattr(policy, "policies", (policy,))
    edits = []
    for member in members:
        if not isinstance(member, Editable):
            raise SpecError(
                f"the provider has nothing like {member!r}"[:200], advice="use compact, clear_tool_uses, clear_thinking"
            )
        edits.append(write(member.edit()))
    try:
        read_management({"edits": edits})
    except InvalidMessage as error:
        raise SpecError(f"the provider would refuse {policy!r}: {error.what}"[:300], advice=error.advice) from error
    return {"edits": edits}


def policy_of(source: Any) -> str:
    """The spec of the policy that does here what a `context_management` asks of the provider.

    Raises:
        InvalidMessage: it is malformed. SpecError: it holds what no policy here does, or nothing.
    """
    management = read_management(source)
    specs = [_spec_of(edit) for edit in management.edits]
    if not specs:
        raise SpecError("no edits", advice="list at least one")
    return specs[0] if len(specs) == 1 else f"chain({', '.join(specs)})"


def _spec_of(edit: Edit) -> str:
    unknown = [*getattr(edit, "more", {}), *(name for name in _amounts(edit) if name)]
    if isinstance(edit, OtherEdit) or unknown:
        what = edit.type if isinstance(edit, OtherEdit) else f"{unknown[0]} of {edit.type}"
        raise SpecError(f"no policy here does {what[:80]}", advice="leave it to the provider")
    given = {name: _value(name, getattr(edit, name)) for name in edit.__struct_fields__ if name not in ("type", "more")}
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not UNSET and value is not None)
    name = edit.type.rpartition("_")[0]
    return f"{name}({arguments})" if arguments else name


def _amounts(edit: Edit) -> list[str]:
    """Unknown fields inside of an edit's amounts."""
    values = [getattr(edit, name) for name in edit.__struct_fields__]
    return [key for value in values if isinstance(value, Amount) for key in value.more]


def _value(name: str, given: Any) -> Any:
    """What a policy takes for it: a plain number where the unit is the usual one, else the object."""
    if isinstance(given, tuple):
        return list(given)
    if not isinstance(given, Amount):
        return given
    if given.type == "all":
        return "all"
    return write(given) if name == "trigger" and given.type != "input_tokens" else given.value
