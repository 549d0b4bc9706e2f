"""Hypothesis strategies for messages and transcripts of both wire forms, odd ones included.

It refuses to import what is tested: the shapes come from the providers' references.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Json = Any

texts = st.text(max_size=12) | st.sampled_from(["", " ", "\n", "a\nb", "\x00", "{}", "naïve 文字 🦉", "</system>"])
keys = st.sampled_from(["x_note", "metadata", "weight", "index", "prefix"])
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
objects = st.dictionaries(texts, values, max_size=3)
ids = st.sampled_from(["call_1", "toolu_01A", "a b", "é", "kilburn-x", "x" * 60, "c2", "c3", "c4"])
names = st.sampled_from(["read", "list_files", "functions.read", "ünicode"])
cache = st.just({"type": "ephemeral"}) | st.just({"type": "ephemeral", "ttl": "1h"})
urls = st.sampled_from(["https://example.org/a.png", "data:image/png;base64,QUJD", "data:image/tiff;base64,QQ==", "file:///a"])


@st.composite
def shuffled(draw: st.DrawFn, required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Json]:
    """A dict with these keys (values are strategies), some unknown ones, in any order."""
    given = {key: draw(value) for key, value in required.items()}
    for key, value in (optional or {}).items():
        if draw(st.booleans()):
            given[key] = draw(value)
    if draw(st.integers(0, 5)) == 0:
        given.update(draw(st.dictionaries(keys, values, max_size=2)))
    order = draw(st.permutations(list(given))) if draw(st.booleans()) else list(given)
    return {key: given[key] for key in order}


@st.composite
def shuffled_known(draw: st.DrawFn, required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Json]:
    """A dict with these keys and no others, in any order."""
    chosen = [*required, *(key for key in optional or {} if draw(st.booleans()))]
    given = {key: draw({**(optional or {}), **required}[key]) for key in draw(st.permutations(chosen))}
    return given


def const(value: Json) -> st.SearchStrategy[Json]:
    return st.just(value)


chat_text = shuffled({"type": const("text"), "text": texts})
chat_image = shuffled(
    {"type": const("image_url"), "image_url": shuffled({"url": urls}, {"detail": st.sampled_from(["low", "high"])})}
)
chat_audio = shuffled({"type": const("input_audio"), "input_audio": const({"data": "QQ==", "format": "wav"})})
chat_file = shuffled({"type": const("file"), "file": const({"file_id": "file-1"})})
chat_unknown = shuffled({"type": const("video_url"), "video_url": objects})
chat_refusal = shuffled({"type": const("refusal"), "refusal": texts})
chat_parts = st.lists(chat_text | chat_image | chat_audio | chat_file | chat_unknown, max_size=4)


def chat_call(call: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Json]]:
    arguments = st.sampled_from(
        ['{"path": "a"}', '{"path": "a"', "", "[1]", '"\\ud800"', '{"x":1e999}', '{"x": NaN}', "[" * 5000]
    )
    function = shuffled({"name": names, "arguments": arguments})
    custom = shuffled({"name": names, "input": texts})
    return shuffled({"id": call, "type": const("function"), "function": function}) | shuffled(
        {"id": call, "type": const("custom"), "custom": custom}
    )


def chat_calls() -> st.SearchStrategy[list[dict[str, Json]]]:
    several = st.lists(ids, min_size=1, max_size=3, unique=True)
    return several.flatmap(lambda chosen: st.tuples(*(chat_call(const(call)) for call in chosen)).map(list))


assistant_extras = {
    "refusal": st.none() | texts,
    "audio": st.none() | const({"id": "audio_1"}),
    "function_call": st.none() | const({"name": "f", "arguments": "{}"}),
    "reasoning_content": st.none() | texts,
    "reasoning": texts | objects,
    "annotations": const([]),
    "name": texts,
}
chat_messages = st.one_of(
    shuffled(
        {"role": st.sampled_from(["system", "developer"]), "content": texts | st.lists(chat_text, max_size=3)}, {"name": texts}
    ),
    shuffled({"role": const("user"), "content": texts | chat_parts}, {"name": texts}),
    shuffled(
        {"role": const("assistant"), "content": st.none() | texts | st.lists(chat_text | chat_refusal, max_size=3)},
        assistant_extras,
    ),
    shuffled({"role": const("assistant"), "tool_calls": chat_calls()}, {"content": st.none() | texts, **assistant_extras}),
    shuffled({"role": const("assistant"), "content": texts, "tool_calls": st.none() | const([])}),
    shuffled({"role": const("tool"), "tool_call_id": ids, "content": texts | chat_parts}, {"name": texts}),
    shuffled({"role": const("function"), "name": names, "content": st.none() | texts}),
)

block_text = shuffled({"type": const("text"), "text": texts}, {"cache_control": cache, "citations": st.none() | const([])})
image_source = st.one_of(
    shuffled({"type": const("base64"), "media_type": st.sampled_from(["image/png", "image/webp"]), "data": const("QUJD")}),
    shuffled({"type": const("url"), "url": urls}),
    shuffled({"type": const("file"), "file_id": const("file_1")}),
)
block_image = shuffled({"type": const("image"), "source": image_source}, {"cache_control": cache})
block_document = shuffled({"type": const("document"), "source": const({"type": "text", "media_type": "text/plain", "data": "d"})})
block_thinking = shuffled({"type": const("thinking"), "thinking": texts, "signature": texts})
block_redacted = shuffled({"type": const("redacted_thinking"), "data": texts})
block_served = shuffled({"type": const("server_tool_use"), "id": ids, "name": const("web_search"), "input": objects})
block_served_result = shuffled({"type": const("web_search_tool_result"), "tool_use_id": ids, "content": const([])})
block_unknown = shuffled({"type": const("hologram"), "depth": values})


def block_call(call: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Json]]:
    return shuffled({"type": const("tool_use"), "id": call, "name": names, "input": objects}, {"cache_control": cache})


def block_result(call: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Json]]:
    content = st.none() | texts | st.lists(block_text | block_image | block_document, max_size=4)
    return shuffled(
        {"type": const("tool_result"), "tool_use_id": call},
        {"content": content, "is_error": st.booleans(), "cache_control": cache},
    )


assistant_blocks = block_text | block_thinking | block_redacted | block_served | block_served_result | block_unknown
user_blocks = block_text | block_image | block_document | block_unknown


@st.composite
def with_calls(draw: st.DrawFn, block: Any, others: Any) -> list[Json]:
    chosen = draw(st.lists(ids, min_size=1, max_size=3, unique=True))
    blocks = [draw(block(const(call))) for call in chosen] + draw(st.lists(others, max_size=3))
    return draw(st.permutations(blocks))


envelope = {
    "id": const("msg_1"),
    "model": const("claude"),
    "stop_reason": st.none() | const("end_turn"),
    "type": const("message"),
}
anthropic_messages = st.one_of(
    shuffled({"role": const("assistant"), "content": texts | st.lists(assistant_blocks, max_size=4)}, envelope),
    shuffled({"role": const("assistant"), "content": with_calls(block_call, assistant_blocks)}, envelope),
    shuffled({"role": const("user"), "content": texts | st.lists(user_blocks, max_size=4)}),
    shuffled({"role": const("user"), "content": with_calls(block_result, user_blocks)}),
    shuffled({"role": const("system"), "content": texts | st.lists(block_text, max_size=3)}),
)


def renumbered(transcript: list[dict[str, Json]], salt: str) -> list[dict[str, Json]]:
    """The transcript with call ids that no other has."""
    for message in transcript:
        for call in message.get("tool_calls") or []:
            call["id"] += salt
        if message.get("role") == "tool":
            message["tool_call_id"] += salt
        for block in message["content"] if isinstance(message.get("content"), list) else []:
            for key in ("id", "tool_use_id"):
                if block["type"] in ("tool_use", "tool_result") and key in block:
                    block[key] += salt
    return transcript


@st.composite
def chat_round(draw: st.DrawFn, number: int) -> list[dict[str, Json]]:
    """A user's message, maybe calls with all their results in any order, maybe an answer."""
    others = chat_messages.filter(lambda message: message["role"] != "tool" and not message.get("tool_calls"))
    out = [draw(others)]
    if draw(st.booleans()):
        message = draw(
            shuffled({"role": const("assistant"), "tool_calls": chat_calls()}, {"content": st.none() | texts, **assistant_extras})
        )
        calls = draw(st.permutations([call["id"] for call in message["tool_calls"]]))
        results = [
            draw(shuffled({"role": const("tool"), "tool_call_id": const(call), "content": texts | chat_parts})) for call in calls
        ]
        out += [message, *results]
    return renumbered([*out, *draw(st.lists(others, max_size=1))], f"-{number}")


@st.composite
def anthropic_round(draw: st.DrawFn, number: int) -> list[dict[str, Json]]:
    others = anthropic_messages.filter(
        lambda message: all(
            block["type"] not in ("tool_use", "tool_result") for block in message["content"] if isinstance(block, dict)
        )
    )
    out = [draw(others)]
    if draw(st.booleans()):
        calls = draw(with_calls(block_call, assistant_blocks))
        chosen = [block["id"] for block in calls if block["type"] == "tool_use"]
        results = [draw(block_result(const(call))) for call in chosen] + draw(st.lists(user_blocks, max_size=2))
        out += [{"role": "assistant", "content": calls}, {"role": "user", "content": draw(st.permutations(results))}]
    return renumbered([*out, *draw(st.lists(others, max_size=1))], f"-{number}")


@st.composite
def chapters(draw: st.DrawFn, kinds: tuple[Any, ...] = (chat_round, anthropic_round)) -> list[list[dict[str, Json]]]:
    """Rounds of the given forms, in each of which every call has its result."""
    chosen = [draw(st.sampled_from(kinds)) for _ in range(draw(st.integers(1, 3)))]
    return [draw(kind(number)) for number, kind in enumerate(chosen)]


def transcripts(*kinds: Any) -> st.SearchStrategy[list[dict[str, Json]]]:
    """The messages of such rounds, in a row."""
    rounds = chapters(kinds) if kinds else chapters()
    return rounds.map(lambda parts: [message for part in parts for message in part])


visible = st.text(min_size=1, max_size=12).filter(str.strip)
sound_text = shuffled_known({"type": const("text"), "text": visible}, {"citations": st.none() | const([])})
sound_image = shuffled_known(
    {"type": const("image"), "source": const({"type": "base64", "media_type": "image/png", "data": "QQ=="})}
)
sound_thinking = shuffled_known({"type": const("thinking"), "thinking": texts, "signature": visible})


@st.composite
def sound_messages(draw: st.DrawFn) -> list[dict[str, Json]]:
    """A transcript that Anthropic's API takes as it is: only what its reference allows."""
    out = [{"role": "user", "content": draw(visible | st.lists(sound_text | sound_image, min_size=1, max_size=3))}]
    for number in range(draw(st.integers(0, 2))):
        calls = [
            draw(
                shuffled_known(
                    {"type": const("tool_use"), "id": const(f"t{number}-{place}"), "name": const("read"), "input": objects}
                )
            )
            for place in range(draw(st.integers(1, 3)))
        ]
        before = draw(st.lists(sound_thinking | sound_text | block_redacted, max_size=2))
        out.append({"role": "assistant", "content": before + calls})
        results = []
        for block in draw(st.permutations(calls)):
            content = draw(texts | st.lists(sound_text | sound_image | block_document, max_size=3))
            results.append(
                draw(shuffled_known({"type": const("tool_result"), "tool_use_id": const(block["id"]), "content": const(content)}))
            )
        out.append({"role": "user", "content": results + draw(st.lists(sound_text | sound_image, max_size=2))})
    if draw(st.booleans()):
        out.append({"role": "assistant", "content": draw(visible | st.lists(sound_text, min_size=1, max_size=2))})
    return out
