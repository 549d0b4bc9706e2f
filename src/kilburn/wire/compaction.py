"""Compaction blocks: Anthropic's is read and written, found in a message, and put where the provider reads it.

The block stands for everything before it. The provider ignores whatever a prompt still has before the block (pins,
handles), so these are moved after it. What leaves a prompt is decided elsewhere, by a policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kilburn.errors import InvalidMessage
from kilburn.message import Kind, Message
from kilburn.model import Tokens
from kilburn.wire.editing import Whole, read_form, read_management, read_summarize, write
from kilburn.wire.messages import THOUGHTS, as_blocks
from kilburn.wire.plain import plain, type_name, unpack
from kilburn.wire.sent import OPENING

T = TypeVar("T", bound=msgspec.Struct)

EDITING = "context-management-2025-06-27"
THRESHOLD = "compact-2026-01-12"
ON_DEMAND = "compact-2026-09-04"


class CompactionBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A compaction block.

    Args:
        content: the summary; None if the provider's compaction failed, which changes nothing.
        encrypted_content: opaque; it is sent back as it came.
        signature: opaque too; of blocks that were made on demand.
    """

    type: str = "compaction"
    content: str | UnsetType | None = UNSET
    encrypted_content: str | UnsetType | None = UNSET
    signature: str | UnsetType | None = UNSET
    more: dict[str, Any] = {}

    @property
    def stands(self) -> bool:
        """Whether it stands for everything before it, that is, the compaction did not fail."""
        return isinstance(self.content, str)


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """An edit that the provider applied, and how much it cleared."""

    type: str
    cleared_input_tokens: Whole | UnsetType = UNSET
    cleared_tool_uses: Whole | UnsetType = UNSET
    cleared_thinking_turns: Whole | UnsetType = UNSET
    more: dict[str, Any] = {}


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """One sampling of the provider within a request: type "message", "compaction", or another."""

    type: str
    input_tokens: Whole | UnsetType = UNSET
    output_tokens: Whole | UnsetType = UNSET
    cache_read_input_tokens: Whole | UnsetType = UNSET
    cache_creation_input_tokens: Whole | UnsetType = UNSET
    more: dict[str, Any] = {}

    @property
    def tokens(self) -> Tokens:
        """What it cost."""
        fresh, reply, cached, created = (
            0 if count is UNSET else count
            for count in (self.input_tokens, self.output_tokens, self.cache_read_input_tokens, self.cache_creation_input_tokens)
        )
        return Tokens(prompt=fresh + cached + created, reply=reply, cached=cached, written=created)


class ProviderReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply says about the provider's own work on the prompt.

    Args:
        applied: the edits that were applied.
        iterations: what each sampling cost. Those of type "compaction" are counted nowhere else.
        paused: whether the provider stopped after its compaction, as `pause_after_compaction` asks.
    """

    applied: tuple[Applied, ...] = ()
    iterations: tuple[Iteration, ...] = ()
    paused: bool = False

    @property
    def beside(self) -> Tokens | None:
        """What compactions cost, which the reply's usage leaves out; None if there was none."""
        costs = [iteration.tokens for iteration in self.iterations if iteration.type == "compaction"]
        if not costs:
            return None
        return Tokens(
            prompt=sum(cost.prompt for cost in costs),
            reply=sum(cost.reply for cost in costs),
            cached=sum(cost.cached for cost in costs),
            written=sum(cost.written for cost in costs),
        )


def read_block(source: Any, where: str = "block") -> CompactionBlock:
    """Return a compaction block; `write` gives it back equal.

    Raises:
        InvalidMessage: another type, a field of the wrong type, or an empty summary, which the provider refuses.
    """
    block = read_form(CompactionBlock, plain(source, where), where)
    if block.type != "compaction":
        raise InvalidMessage(f"{where}.type: {block.type[:40]!r} is not compaction")
    if block.content == "":
        raise InvalidMessage(f"{where}.content is empty", advice="use null for a compaction that failed")
    return block


def block_in(text: str) -> CompactionBlock | None:
    """Return the compaction block in an opaque page's text, or None if it is another block, or malformed."""
    if '"type":"compaction"' not in text:
        return None
    try:
        return read_block(unpack(text))
    except InvalidMessage:
        return None


def compaction_block(message: Message) -> CompactionBlock | None:
    """Return the last compaction block of a message that has content, else the last one without; None if there is no block."""
    blocks = [block for part in message.parts if part.kind is Kind.OPAQUE and (block := block_in(part.text)) is not None]
    return next((block for block in reversed(blocks) if block.stands), blocks[-1] if blocks else None)


def read_report(source: Mapping[str, Any], where: str = "reply") -> ProviderReport:
    """Return the report in a reply's JSON.

    Raises:
        InvalidMessage: a field of the wrong type.
    """
    management = source.get("context_management") or {}
    usage = source.get("usage") or {}
    if not isinstance(management, dict) or not isinstance(usage, dict):
        raise InvalidMessage(f"{where}: context_management and usage are objects")
    return ProviderReport(
        applied=tuple(_read_list(Applied, management, "applied_edits", where)),
        iterations=tuple(_read_list(Iteration, usage, "iterations", where)),
        paused=source.get("stop_reason") == "compaction",
    )


def _read_list(form: type[T], holder: dict[str, Any], key: str, where: str) -> Iterator[T]:
    items = holder.get(key) or []
    if not isinstance(items, list):
        raise InvalidMessage(f"{where}.{key}: {type_name(items)} where a list belongs")
    for index, item in enumerate(items):
        yield read_form(form, item, f"{where}.{key}[{index}]")


def provider_report(message: Message) -> ProviderReport:
    """Return what the provider did with the prompt of a recorded reply; an empty report if it did nothing."""
    return read_report(unpack(message.extra).get("dict") or {})


def report_json(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Of what a reply says, the part worth keeping with its message: applied edits, costs of compactions, a pause.

    Raises:
        InvalidMessage: a field of the wrong type.
    """
    report = read_report(reply)
    fields: dict[str, Any] = {}
    if report.applied:
        fields["context_management"] = {"applied_edits": [write(item) for item in report.applied]}
    if report.beside is not None:
        fields["usage"] = {"iterations": [write(item) for item in report.iterations]}
    if report.paused:
        fields["stop_reason"] = "compaction"
    return fields


def betas_for(options: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the beta headers that a request needs: for its edits, and for the compaction blocks that it holds.

    Raises:
        InvalidMessage: edits or a compaction that the provider would refuse, or both in one request.
    """
    edits, demand = options.get("context_management"), options.get("compaction")
    if edits is not None:
        read_management(edits)
    if demand is not None:
        read_summarize(demand)
    if edits is not None and demand is not None:
        raise InvalidMessage("compaction and context_management in one request", advice="send one of them")
    kinds = [edit.get("type") for edit in (edits or {}).get("edits", ()) if isinstance(edit, dict)]
    blocks = [block for message in messages for block in _blocks(message)]
    betas = {
        EDITING: any(kind != "compact_20260112" for kind in kinds),
        THRESHOLD: "compact_20260112" in kinds or any(not block.get("signature") for block in blocks),
        ON_DEMAND: demand is not None or any(block.get("signature") for block in blocks),
    }
    return [beta for beta, required in betas.items() if required]


def _blocks(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    content = message.get("content")
    return (block for block in (content if isinstance(content, list) else ()) if block.get("type") == "compaction")


def put_block_first(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as the provider is to get them: the last compaction block with content first, exactly one, and after
    it what stood before it, in its order, so that it is read."""
    at = next(
        (
            (index, place)
            for index in range(len(messages) - 1, -1, -1)
            for place in range(len(messages[index]["content"]) - 1, -1, -1)
            if isinstance(messages[index]["content"], list) and _stands(messages[index]["content"][place])
        ),
        None,
    )
    if at is None:
        return list(messages)
    index, place = at
    content = messages[index]["content"]
    role = messages[index]["role"]
    earlier = [*messages[:index], {"role": role, "content": content[:place]}]
    if earlier[0]["content"] == OPENING:
        del earlier[0]
    carried = [{**message, "content": _without_blocks(message["content"])} for message in earlier]
    rest = [{**messages[index], "content": content[place + 1 :]}, *messages[index + 1 :]]
    thinks = rest[0]["content"] and rest[0]["content"][0].get("type") in THOUGHTS
    if thinks and (ahead := _join(carried)) and ahead[-1]["role"] == role:
        # A turn that thinks must begin with its thinking.
        carried.append({"role": "user", "content": OPENING})
    return _join([{"role": role, "content": [content[place]]}, *carried, *rest])


def _stands(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "compaction" and bool(block.get("content"))


def _without_blocks(content: Any) -> Any:
    return [block for block in content if block.get("type") != "compaction"] if isinstance(content, list) else content


def _join(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without empty messages, and neighbours of one role as one."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if not message["content"]:
            continue
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1] = {**joined[-1], "content": [*as_blocks(joined[-1]["content"]), *as_blocks(message["content"])]}
        else:
            joined.append(message)
    return joined
