"""Anthropic's context editing and compaction: the request's `context_management` and `compaction`, typed.

These are read strictly and written back equal: an unknown field is kept under `more`, and a known one of the wrong
type is an error that says where. `policy_spec` makes a policy's spec from such settings, `provider_edits` a request from a
policy. The forms follow the official SDK's beta types (MIT). For replies see `kilburn.wire.compaction`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Protocol, TypeVar, runtime_checkable

import msgspec
from msgspec import UNSET, UnsetType

from kilburn.errors import InvalidMessage, SpecError
from kilburn.wire.plain import plain, type_name

__all__ = ["policy_spec", "provider_edits"]

T = TypeVar("T", bound=msgspec.Struct)

Whole = Annotated[int, msgspec.Meta(ge=0)]
"""A whole number, 0 or more."""

MIN_COMPACT_TRIGGER = 50_000
"""Smallest trigger, in input tokens, that the provider accepts for `compact_20260112`."""


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """A number with its unit: `{"type": "input_tokens", "value": 100000}`; "all" has no value."""

    type: str
    value: Whole | UnsetType = UNSET
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
    """An unknown edit, which is passed on unchanged."""

    type: str
    more: dict[str, Any] = {}


Edit = CompactEdit | ClearToolUsesEdit | ClearThinkingEdit | OtherEdit


class Management(msgspec.Struct, frozen=True, kw_only=True):
    """`context_management` of a request: the edits, in order."""

    edits: tuple[Edit, ...] = ()
    more: dict[str, Any] = {}


class SummarizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`compaction` of a request: compact all of its messages now and say nothing else."""

    type: str = "summarize"
    instructions: str | UnsetType | None = UNSET
    more: dict[str, Any] = {}


@runtime_checkable
class Editable(Protocol):
    """A policy with settings that the provider has too."""

    def edit(self) -> Edit:
        """Return the provider's form of these settings."""
        ...


def write(form: Any) -> Any:
    """Return the JSON of a form, equal to what it was read from."""
    if isinstance(form, msgspec.Struct):
        fields = {name: write(getattr(form, name)) for name in form.__struct_fields__ if name != "more"}
        return {name: value for name, value in fields.items() if value is not UNSET} | getattr(form, "more", {})
    return [write(item) for item in form] if isinstance(form, tuple) else form


Reader = Callable[[Any, str], Any]


def read_form(form: type[T], source: Any, where: str, **readers: Reader) -> T:
    """Return a form from plain data: known fields by their types, those in `readers` by their readers, all others under `more`.

    Raises:
        InvalidMessage: not an object, a field of the wrong type, or one that is missing.
    """
    if not isinstance(source, dict):
        raise InvalidMessage(f"{where}: {type_name(source)} where an object belongs")
    fields = {field.name: field for field in msgspec.structs.fields(form) if field.name != "more"}
    values: dict[str, Any] = {}
    for key, value in source.items():
        if key in readers:
            values[key] = readers[key](value, f"{where}.{key}")
        elif key in fields:
            try:
                values[key] = msgspec.convert(value, fields[key].type)
            except msgspec.ValidationError as error:
                problem, _, inside = str(error).partition(" - at `$")
                raise InvalidMessage(f"{where}.{key}{inside.rstrip('`')}: {problem}") from error
    missing = next((name for name, field in fields.items() if field.required and name not in values), None)
    if missing is not None:
        raise InvalidMessage(f"{where}.{missing} is missing")
    return form(**values, more={key: value for key, value in source.items() if key not in values})


def amount(*types: str, minimum: int = 1, null: bool = False) -> Reader:
    """Reads an `Amount` of one of these units, of at least `minimum`; null where that is allowed."""

    def read(value: Any, where: str) -> Amount | None:
        if value is None and null:
            return None
        quantity = read_form(Amount, value, where)
        if quantity.type not in types:
            raise InvalidMessage(f"{where}.type: {quantity.type[:40]!r} is none of {', '.join(types)}")
        if quantity.value is UNSET:
            raise InvalidMessage(f"{where}.value is missing")
        if quantity.value < minimum:
            raise InvalidMessage(f"{where}.value: {quantity.value} is below {minimum}")
        return quantity

    return read


def _turns(value: Any, where: str) -> Amount | str:
    if value == "all":
        return "all"
    if isinstance(value, dict) and value.get("type") == "all":
        return read_form(Amount, value, where)
    turns: Amount = amount("thinking_turns")(value, where)
    return turns


_EDITS: dict[str, tuple[type[Edit], dict[str, Reader]]] = {
    "compact_20260112": (CompactEdit, {"trigger": amount("input_tokens", minimum=MIN_COMPACT_TRIGGER, null=True)}),
    "clear_tool_uses_20250919": (
        ClearToolUsesEdit,
        {
            "trigger": amount("input_tokens", "tool_uses"),
            "keep": amount("tool_uses", minimum=0),
            "clear_at_least": amount("input_tokens", null=True),
        },
    ),
    "clear_thinking_20251015": (ClearThinkingEdit, {"keep": _turns}),
}


def read_management(source: Any, where: str = "context_management") -> Management:
    """Return the edits of a request.

    Raises:
        InvalidMessage: what is wrong, and where; also the same edit twice, and thinking that is not
            listed first, which the provider refuses.
    """
    return read_form(Management, plain(source, where), where, edits=_read_edits)


def _read_edits(value: Any, where: str) -> tuple[Edit, ...]:
    if not isinstance(value, list):
        raise InvalidMessage(f"{where}: {type_name(value)} where a list of edits belongs")
    edits = tuple(_read_edit(item, f"{where}[{index}]") for index, item in enumerate(value))
    kinds = [edit.type for edit in edits]
    for index, kind in enumerate(kinds):
        if kind in kinds[:index]:
            raise InvalidMessage(f"{where}[{index}]: {kind[:40]} is listed twice", advice="give each edit once")
        if kind.startswith("clear_thinking") and index:
            raise InvalidMessage(f"{where}[{index}]: {kind[:40]} stands behind another edit", advice="list it first")
    return edits


def _read_edit(source: Any, where: str) -> Edit:
    kind = source.get("type") if isinstance(source, dict) else None
    form, readers = _EDITS.get(str(kind), (OtherEdit, {}))
    return read_form(form, source, where, **readers)


def read_summarize(source: Any, where: str = "compaction") -> SummarizeRequest:
    """Return an on-demand compaction.

    Raises:
        InvalidMessage: what is wrong, and where.
    """
    form = read_form(SummarizeRequest, plain(source, where), where)
    if form.type != "summarize":
        raise InvalidMessage(f"{where}.type: {form.type[:40]!r} is not summarize")
    return form


def plain_amount(quantity: object, unit: str) -> object:
    """Return the plain number of an amount in that unit, `{"type": unit, "value": 3}`; anything else as it is."""
    if isinstance(quantity, Mapping) and quantity.keys() == {"type", "value"} and quantity["type"] == unit:
        value: object = quantity["value"]
        return value
    return quantity


def provider_edits(policy: object) -> dict[str, Any]:
    """Return the `context_management` that makes the provider do what a policy, or a chain of policies, does here.

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


def policy_spec(source: Any) -> str:
    """Return the spec of the policy that does here what a `context_management` asks of the provider.

    Raises:
        InvalidMessage: it is malformed. SpecError: it holds what no policy here does, or nothing.
    """
    management = read_management(source)
    specs = [_edit_spec(edit) for edit in management.edits]
    if not specs:
        raise SpecError("no edits", advice="list at least one")
    return specs[0] if len(specs) == 1 else f"chain({', '.join(specs)})"


def _edit_spec(edit: Edit) -> str:
    unknown = [*getattr(edit, "more", {}), *(name for name in _amounts(edit) if name)]
    if isinstance(edit, OtherEdit) or unknown:
        unsupported = edit.type if isinstance(edit, OtherEdit) else f"{unknown[0]} of {edit.type}"
        raise SpecError(f"no policy here does {unsupported[:80]}", advice="leave it to the provider")
    settings = {name: _value(name, getattr(edit, name)) for name in edit.__struct_fields__ if name not in ("type", "more")}
    arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items() if value is not UNSET and value is not None)
    name = edit.type.rpartition("_")[0]
    return f"{name}({arguments})" if arguments else name


def _amounts(edit: Edit) -> list[str]:
    """Unknown fields inside of an edit's amounts."""
    values = [getattr(edit, name) for name in edit.__struct_fields__]
    return [key for value in values if isinstance(value, Amount) for key in value.more]


def _value(name: str, setting: Any) -> Any:
    """Return what a policy takes for it: a plain number where the unit is the usual one, else the object."""
    if isinstance(setting, tuple):
        return list(setting)
    if not isinstance(setting, Amount):
        return setting
    if setting.type == "all":
        return "all"
    return write(setting) if name == "trigger" and setting.type != "input_tokens" else setting.value
