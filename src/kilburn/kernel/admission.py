"""Makes pages from messages: their costs and groups, and which of them are pinned on arrival.

Everything is checked before anything changes, so an error leaves the session as it was.
"""

from __future__ import annotations

import itertools
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from types import MappingProxyType

import msgspec

from kilburn.budget import Counter
from kilburn.errors import DuplicateCall, Forgotten, InvalidMessage, LawBroken, OrphanResult
from kilburn.kernel.capabilities import capabilities
from kilburn.kernel.window import WindowState
from kilburn.message import TRUST_OF_ROLE, Kind, Message, Part, Role, Trust
from kilburn.page import Page, Place, address_of, digest_of
from kilburn.wire.plain import unpack
from kilburn.wire.sent import (
    COMPACTION,
    form_of,
    is_compaction,
    is_plain,
    is_sent,
    sent_name,
    sent_text,
    stands,
    strings_beside,
)

LABEL = 60

_RESULT = re.compile(r'"type":\s*"(?:\w+_tool_result|\w+_search_call|mcp_call|code_interpreter_call)"')
"""The type of a block with a result, in the forms of Anthropic and OpenAI. Within a string, its quotes would be escaped."""

BOUND = frozenset({Kind.REASONING, Kind.OPAQUE})
"""Parts of an assistant's message that its provider accepts only unchanged: thinking, and calls that it carries out
itself. They move with their whole message, but for a compaction: it is read without what was said behind it."""


def cost_of(counter: Counter, part: Part, role: Role, leftovers: str | None = None, number: int = 1) -> int:
    """What one part costs in a prompt, in tokens, including its message's envelope: everything that is sent of it in the
    dearer form, and nothing else.

    Args:
        leftovers: its message's extra, or the part of it that is kept with this part.
        number: of the page in whose place it stands. A system message that is not the first stands in a frame.
    """
    if role is Role.SYSTEM and number > 1:
        return counter.count("<system>\n\n</system>") + cost_of(counter, part, role, leftovers)
    if is_plain(part, role, leftovers):
        name_tokens = counter.count(sent_name(part.name, part.call)) if part.kind is Kind.RESULT else 0
        return counter.count(part.text) + name_tokens + counter.envelope
    form = unpack(leftovers).get("form")
    strings = strings_beside(part, role, leftovers)
    beside = capabilities.attachments.strings_tokens(counter, strings) if strings else 0
    if part.kind is Kind.IMAGE and role in (Role.USER, Role.TOOL):
        tokens = capabilities.attachments.image_cost(counter, part.text, low='"detail":"low"' in (part.extra or ""))
    elif part.kind in (Kind.REASONING, Kind.OPAQUE, Kind.IMAGE) and not any(
        is_sent(part, role, form, into) for into in ("chat", "messages")
    ):
        return beside
    elif part.kind is Kind.OPAQUE:
        tokens = capabilities.attachments.block_tokens(counter, part.text)
    else:
        tokens = counter.count(sent_text(part, role, form))
    if part.kind in (Kind.CALL, Kind.RESULT):
        tokens += counter.count(sent_name(part.name, part.call))
    return tokens + beside + counter.envelope


def pages_of(
    messages: Sequence[Message],
    window: WindowState,
    counter: Counter,
    time: float,
    cited: Mapping[tuple[int, int], Page] = MappingProxyType({}),
) -> tuple[list[Page], dict[str, str]]:
    """The pages of these messages, numbered on from the window's last, and the texts of their digests.

    What a provider made of the prompt, its compaction, has all that the prompt shows among its sources. A second one cites the
    first, which leads on to all before it, and what came since. If a message with one has sources, they are those of the
    compaction, and not of what was said beside it.

    Raises:
        OrphanResult, DuplicateCall, InvalidMessage, LawBroken: nothing was admitted.
        Forgotten: a page that one of them was made from is.
    """
    pages: list[Page] = []
    texts: dict[str, str] = {}
    calls: dict[str, Page] = {}
    answered: set[str] = set()
    call_names = {part.call for message in messages for part in message.parts if part.call}
    # If another writer has called a tool meanwhile, this state is stale and will not be written, so its calls can be omitted.
    earlier_calls = (
        {call: page for call, page in window.calls.among(call_names).items() if page in window.pages} if call_names else {}
    )
    call_ids = [part.call for message in messages for part in message.parts if part.kind is Kind.CALL] if call_names else []
    if earlier_calls or len(call_ids) > len(set(call_ids)):
        messages, earlier_calls = _with_distinct_calls(messages, earlier_calls, window)
    # The place among these pages of the last compaction.
    last: int | None = None
    for offset, message in enumerate(messages):
        if not message.parts:
            raise InvalidMessage("a message without parts", advice="an empty message is one empty text part")
        trust, made_of, cites = _trust(message, window, cited, pages), message.sources, message.cites
        summary_trust = trust
        summaries = [part for part in message.parts if part.kind is Kind.OPAQUE and is_compaction(part)]
        summed = bool(summaries)
        if summed:
            prompt = pages[last:] if last is not None else (*window.visible(), *pages)
            prompt_pages = [page for page in prompt if page.id not in window.stubs]
            made_of = tuple(dict.fromkeys((*message.sources, *(page.id for page in prompt_pages))))
            summary_trust = min([trust, *(page.trust for page in prompt_pages)])
            trust = _trust(msgspec.structs.replace(message, sources=(), cites=()), window, cited, pages)
        bound = message.role is Role.ASSISTANT and any(part.kind in BOUND and part not in summaries for part in message.parts)
        speaker = _speaker(message) if message.extra is not None and '"name"' in message.extra else None
        first = window.last + len(pages) + 1
        for position, part in enumerate(message.parts):
            number = window.last + len(pages) + 1
            leftovers = _leftovers(part, message) if position else message.extra
            label = _label(part, trust)
            extra = extra_text(part.extra, leftovers, _words(part, label) if part.kind is Kind.OPAQUE else "")
            is_summary = part in summaries
            holds_result = part.kind is Kind.OPAQUE and _RESULT.search(part.text) is not None
            beside = summed and not is_summary
            call = (
                None if part.call is None and part.kind is Kind.TEXT else _call_of(part, window, earlier_calls, calls, answered)
            )
            group = number if part.kind is Kind.CALL else 0 if call is None else call.group
            page = Page(
                id=number,
                digest=digest_of(part.text),
                extra=digest_of(extra) if extra else "",
                kind=part.kind,
                role=message.role,
                message=window.turn + offset + 1,
                tokens=cost_of(counter, part, message.role, leftovers, number),
                time=time,
                trust=summary_trust if is_summary else Trust.TOOL if holds_result else trust,
                group=first if bound and not is_summary else group,
                answers=0 if call is None else call.id,
                call=part.call,
                name=part.name,
                sources=() if beside else made_of,
                cites=() if beside else cites,
                order=(number, 0),
                label=label,
                speaker=speaker,
            )
            if part.kind is Kind.CALL and part.call is not None:
                calls[part.call] = page
            if is_summary:
                last, made_of, cites = len(pages), (number,), ()
            pages.append(page)
            texts[page.digest] = part.text
            if extra:
                # Leftovers of the wire form are content of their own, hashed like any.
                texts[page.extra] = extra
    return pages, texts


def _with_distinct_calls(
    messages: Sequence[Message], earlier_calls: dict[str, int], window: WindowState
) -> tuple[Sequence[Message], dict[str, int]]:
    """Return messages whose calls have ids of their own in this session, and the earlier calls that they name, with their pages.

    Some models count their calls from 0 in every reply. A call whose id is taken gets another one, `ID_N` with the number of its
    message, and its results get the same: a result belongs to the newest call of its id that waits for one.

    Args:
        earlier_calls: the calls of the session whose ids the messages name.
    """
    waiting = {page.call: page.id for page in map(window.pages.__getitem__, sorted(window.open)) if page.call}
    names = {
        call: next((candidate for candidate in reversed(waiting) if _is_renamed(candidate, call)), call) for call in earlier_calls
    }
    calls = earlier_calls | {name: waiting[name] for name in names.values() if name in waiting}
    assigned: set[str] = set()
    out: list[Message] = []
    for number, message in enumerate(messages, window.turn + 1):
        call_ids: set[str] = set()
        for part in message.parts:
            # Two calls of one message with the same id are an error of this message.
            if part.kind is Kind.CALL and part.call and part.call not in call_ids:
                call_ids.add(part.call)
                names[part.call] = _free_id(part.call, number, assigned | earlier_calls.keys(), window)
                assigned.add(names[part.call])
        renamed = [names.get(part.call or "", part.call) for part in message.parts]
        parts = zip(message.parts, renamed, strict=True)
        changed = tuple(part if part.call == call else msgspec.structs.replace(part, call=call) for part, call in parts)
        out.append(message if changed == message.parts else msgspec.structs.replace(message, parts=changed))
    return out, calls


def _free_id(call: str, number: int, reserved: Set[str], window: WindowState) -> str:
    """Return an id for a call of message `number` that no call has: its own one if that is free."""
    if call not in reserved:
        return call
    candidates = chain([f"{call}_{number}"], (f"{call}_{number}_{count}" for count in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in reserved and candidate not in window.calls)


def _is_renamed(call: str, original: str) -> bool:
    """Return whether a call has this id, or was given another one because the id was taken."""
    return call == original or re.fullmatch(re.escape(original) + r"_\d+(_\d+)?", call) is not None


def attachments_above(messages: Iterable[Message], counter: Counter, tokens: int) -> Iterator[tuple[str, int]]:
    """Yield what each image and each provider's block in these messages is, and its tokens, if it costs more than `tokens`."""
    for message in messages:
        for part in message.parts:
            if part.kind in (Kind.IMAGE, Kind.OPAQUE):
                cost = cost_of(counter, part, message.role, message.extra)
                if cost > tokens:
                    yield _label(part, TRUST_OF_ROLE[message.role]), cost


def _trust(message: Message, window: WindowState, cited: Mapping[tuple[int, int], Page], new_pages: Sequence[Page]) -> Trust:
    pages = ChainMap({page.id: page for page in new_pages}, window.pages) if message.sources else window.pages
    role_trust = TRUST_OF_ROLE[message.role]
    if message.trust is not None and message.trust > role_trust:
        raise LawBroken(
            7, f"a {message.role} message cannot have trust {message.trust.name}", advice="leave trust out, or lower it"
        )
    lowest = role_trust if message.trust is None else message.trust
    unknown = [source for source in message.sources if source not in pages]
    if unknown:
        raise InvalidMessage(f"sources {unknown[:3]} are no pages of this session", advice="cite pages that were recalled here")
    for source in message.sources:
        if source in window.pages and window.at(source) is Place.DROPPED:
            # The text may still hold what was forgotten while it was made.
            raise Forgotten(f"{address_of(source)}, of which this was made, was forgotten", advice="make it anew")
    missing = [f"{address_of(page)} of segment {segment}" for segment, page in message.cites if (segment, page) not in cited]
    if missing:
        raise InvalidMessage(f"it cites {missing[0]}, which is not there", advice="cite pages of other segments of this tenant")
    trusts = [cited[key].trust for key in message.cites]
    return min([lowest, *trusts, *(pages[source].trust for source in message.sources)])


def _speaker(message: Message) -> str | None:
    """The name of who speaks, on one line, if the message gives one. A function's name is that of a tool."""
    if message.role not in (Role.USER, Role.ASSISTANT):
        return None
    name = (unpack(message.extra).get("dict") or {}).get("name")
    return " ".join(name.split())[:LABEL] or None if isinstance(name, str) else None


def _leftovers(part: Part, message: Message) -> str | None:
    """What a part that is not the first keeps of its message's extra; the first one keeps all of it. A part that is only sent in
    the form it came in keeps the name of that form, because the first part may leave before it."""
    return form_of(message.extra) if part.extra is not None or part.kind in (Kind.REASONING, Kind.OPAQUE) else None


def _call_of(
    part: Part, window: WindowState, earlier_calls: Mapping[str, int], calls: dict[str, Page], answered: set[str]
) -> Page | None:
    """The page of the call that a result, or an image inside it, belongs to; None for what belongs to none.

    Args:
        earlier_calls: the calls of the session.
        calls: those of the same messages; `answered` are the ids of which these have the result already.

    Raises:
        InvalidMessage, DuplicateCall, OrphanResult.
    """
    earlier = earlier_calls.get(part.call or "")
    if part.kind is Kind.CALL:
        if not part.call:
            raise InvalidMessage("a tool call without an id", advice="give every call an id of its own")
        if earlier is not None or part.call in calls:
            raise DuplicateCall(f"two calls of one message have the id {part.call!r}", advice="give every call an id of its own")
        return None
    page = calls.get(part.call or "") or (window.pages[earlier] if earlier is not None else None)
    if part.kind is Kind.RESULT:
        if page is None:
            raise OrphanResult(
                f"no call with id {part.call!r} in this session", advice="append the assistant message with the call first"
            )
        if earlier is not None and window.at(earlier) == Place.DROPPED:
            raise OrphanResult(f"call {part.call!r} was forgotten", advice="its result has no place; leave it out")
        if part.call in answered or (earlier is not None and earlier not in window.open):
            raise OrphanResult(f"call {part.call!r} has its result already", advice="append one result a call")
        answered.add(part.call or "")
    return page


def extra_text(part: str | None, message: str | None, words: str = "") -> str:
    """The leftovers of a part and of its message, as they are stored, with the words by which a provider's block is found; "" for
    none."""
    if not part and not message and not words:
        return ""
    fields = {"part": part, "message": message, "words": words}
    return msgspec.json.encode({key: value for key, value in fields.items() if value}).decode()


def _words(part: Part, label: str) -> str:
    """Return what can be read and searched of a provider's block: its label, its text, and that of its PDFs; "" if it has no
    text, or is a compaction, which repeats what the session has said."""
    if is_compaction(part):
        return ""
    attachments = capabilities.attachments
    words = f"{attachments.readable_text(part.text)}\n{attachments.document_text(part.text)}".strip()
    return f"[{label}]\n{words}" if words else ""


def _label(part: Part, trust: Trust) -> str:
    """Return one line on what the part is, for its handle. Tools and web pages, which a provider's own tools quote in the
    assistant's message, choose no word of a handle, as it stands in a user message."""
    if part.kind is Kind.CALL:
        return line_of(f"{part.name}({part.text.strip().strip('{}')})")
    if part.kind is Kind.RESULT:
        return ""  # the call's label is used, and disappears when the call is forgotten
    if part.kind in (Kind.TEXT, Kind.REASONING):
        return line_of(part.text)
    if part.kind is Kind.IMAGE:
        return capabilities.attachments.describe_image(part.text)
    if is_compaction(part):
        return COMPACTION if stands(part) else "failed compaction"
    return line_of(capabilities.attachments.describe(part.text, use_name=trust >= Trust.USER))


def line_of(text: str) -> str:
    """A text as one line of at most `LABEL` characters."""
    line = " ".join(text.lstrip()[: 4 * LABEL].split())
    return line if len(line) <= LABEL else line[: LABEL - 1] + "…"


def pins_on_arrival(pages: Sequence[Page], window: WindowState, capacity: int) -> dict[int, str]:
    """The new pages that are pinned without being asked for (law 3): system messages, and the task.

    A leading system message is pinned if all pins then take at most three quarters of the capacity (for a longer one the planner
    pins an excerpt), and a later one if they take at most half. The task, the first user message, is pinned if it takes at most a
    quarter, and all pins then at most half.
    """
    pinned: dict[int, str] = {}
    pinned_tokens = sum(window.cost(page) for page in window.pins)
    # Whether anything but system messages came before. From 64 messages on it is taken for granted: no long session is searched.
    began = window.spoken_messages > 0 or window.turn >= 64 or any(page.role is not Role.SYSTEM for page in window.pages.values())
    for page in pages:
        leading = not began
        task = leading and page.role is Role.USER and page.kind is Kind.TEXT
        began = began or page.role is not Role.SYSTEM
        if page.role is Role.SYSTEM and pinned_tokens + page.tokens <= (3 * capacity // 4 if leading else capacity // 2):
            pinned[page.id] = "system"
        elif task and page.tokens <= capacity // 4 and pinned_tokens + page.tokens <= capacity // 2:
            pinned[page.id] = "task"
        else:
            continue
        pinned_tokens += page.tokens
    return pinned
