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
    return {key: draw({**(optional or {}), **required}[key]) for key in draw(st.permutations(chosen))}


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


arguments = st.sampled_from(['{"path": "a"}', '{"path": "a"', "", "[1]", '"\\ud800"', '{"x":1e999}', '{"x": NaN}', "[" * 5000])
chat_call = shuffled(
    {"id": ids, "type": const("function"), "function": shuffled({"name": names, "arguments": arguments})}
) | shuffled({"id": ids, "type": const("custom"), "custom": shuffled({"name": names, "input": texts})})
several = st.lists(ids, min_size=1, max_size=3, unique=True)


@st.composite
def numbered(draw: st.DrawFn, block: Any, key: str) -> list[dict[str, Json]]:
    """Some of these blocks, each with an id of its own under `key`."""
    return [{**draw(block), key: number} for number in draw(several)]


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
    shuffled(
        {"role": const("assistant"), "tool_calls": numbered(chat_call, "id")}, {"content": st.none() | texts, **assistant_extras}
    ),
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


block_call = shuffled({"type": const("tool_use"), "id": ids, "name": names, "input": objects}, {"cache_control": cache})
result_content = st.none() | texts | st.lists(block_text | block_image | block_document, max_size=4)
block_result = shuffled(
    {"type": const("tool_result"), "tool_use_id": ids},
    {"content": result_content, "is_error": st.booleans(), "cache_control": cache},
)

assistant_blocks = block_text | block_thinking | block_redacted | block_served | block_served_result | block_unknown
user_blocks = block_text | block_image | block_document | block_unknown


assistant_tails = st.lists(assistant_blocks, max_size=3)
user_tails = st.lists(user_blocks, max_size=2)


@st.composite
def mixed(draw: st.DrawFn, first: Any, second: Any) -> list[Json]:
    """The items of two lists in any order."""
    return draw(st.permutations(draw(first) + draw(second)))


calling_blocks = mixed(numbered(block_call, "id"), assistant_tails)
envelope = {
    "id": const("msg_1"),
    "model": const("claude"),
    "stop_reason": st.none() | const("end_turn"),
    "type": const("message"),
}
anthropic_messages = st.one_of(
    shuffled({"role": const("assistant"), "content": texts | st.lists(assistant_blocks, max_size=4)}, envelope),
    shuffled({"role": const("assistant"), "content": calling_blocks}, envelope),
    shuffled({"role": const("user"), "content": texts | st.lists(user_blocks, max_size=4)}),
    shuffled({"role": const("user"), "content": mixed(numbered(block_result, "tool_use_id"), user_tails)}),
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


chat_plain = chat_messages.filter(lambda message: message["role"] != "tool" and not message.get("tool_calls"))
chat_tail = st.lists(chat_plain, max_size=1)
chat_calling = shuffled(
    {"role": const("assistant"), "tool_calls": numbered(chat_call, "id")}, {"content": st.none() | texts, **assistant_extras}
)
chat_result = shuffled({"role": const("tool"), "tool_call_id": ids, "content": texts | chat_parts})
anthropic_plain = anthropic_messages.filter(
    lambda message: all(
        block["type"] not in ("tool_use", "tool_result") for block in message["content"] if isinstance(block, dict)
    )
)
anthropic_tail = st.lists(anthropic_plain, max_size=1)


@st.composite
def chat_round(draw: st.DrawFn, number: int) -> list[dict[str, Json]]:
    """A message, maybe calls with all their results in any order, maybe an answer."""
    out = [draw(chat_plain)]
    if draw(st.booleans()):
        message = draw(chat_calling)
        calls = draw(st.permutations([call["id"] for call in message["tool_calls"]]))
        out += [message, *({**draw(chat_result), "tool_call_id": call} for call in calls)]
    return renumbered([*out, *draw(chat_tail)], f"-{number}")


@st.composite
def anthropic_round(draw: st.DrawFn, number: int) -> list[dict[str, Json]]:
    """The same in Anthropic's form: the results are in one user message, among other blocks."""
    out = [draw(anthropic_plain)]
    if draw(st.booleans()):
        blocks = draw(calling_blocks)
        calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
        results = [{**draw(block_result), "tool_use_id": call} for call in calls] + draw(user_tails)
        out += [{"role": "assistant", "content": blocks}, {"role": "user", "content": draw(st.permutations(results))}]
    return renumbered([*out, *draw(anthropic_tail)], f"-{number}")


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
sound_use = shuffled_known({"type": const("tool_use"), "id": ids, "name": const("read"), "input": objects})
sound_content = texts | st.lists(sound_text | sound_image | block_document, max_size=3)
sound_result = shuffled_known({"type": const("tool_result"), "tool_use_id": ids, "content": sound_content})
sound_question = visible | st.lists(sound_text | sound_image, min_size=1, max_size=3)
sound_before = st.lists(sound_thinking | sound_text | block_redacted, max_size=2)
sound_after = st.lists(sound_text | sound_image, max_size=2)
sound_answer = visible | st.lists(sound_text, min_size=1, max_size=2)


@st.composite
def sound_messages(draw: st.DrawFn) -> list[dict[str, Json]]:
    """A transcript that Anthropic's API takes as it is: only what its reference allows."""
    out = [{"role": "user", "content": draw(sound_question)}]
    for number in range(draw(st.integers(0, 2))):
        calls = [{**draw(sound_use), "id": f"t{number}-{place}"} for place in range(draw(st.integers(1, 3)))]
        results = [{**draw(sound_result), "tool_use_id": block["id"]} for block in draw(st.permutations(calls))]
        out.append({"role": "assistant", "content": draw(sound_before) + calls})
        out.append({"role": "user", "content": results + draw(sound_after)})
    if draw(st.booleans()):
        out.append({"role": "assistant", "content": draw(sound_answer)})
    return out


sound_part = shuffled_known({"type": const("text"), "text": texts})
sound_detail = shuffled_known({"url": urls}, {"detail": const("low")})
sound_picture = shuffled_known({"type": const("image_url"), "image_url": sound_detail})
sound_said = texts | st.lists(sound_part, min_size=1, max_size=2)
sound_asked = texts | st.lists(sound_part | sound_picture | chat_audio | chat_file, min_size=1, max_size=3)
sound_function = shuffled_known({"name": const("read"), "arguments": arguments})
sound_call = shuffled_known({"id": ids, "type": const("function"), "function": sound_function})
sound_beside = {"refusal": st.none() | texts, "name": visible, "reasoning_content": texts, "annotations": const([])}
sound_calls = st.lists(sound_call, min_size=1, max_size=3)
sound_calling = shuffled_known(
    {"role": const("assistant"), "tool_calls": sound_calls}, {"content": st.none() | sound_said, **sound_beside}
)
sound_tool = shuffled_known({"role": const("tool"), "tool_call_id": ids, "content": sound_said}, {"name": visible})
sound_first = st.lists(
    shuffled_known({"role": st.sampled_from(["system", "developer"]), "content": sound_said}, {"name": visible}), max_size=2
)
sound_next = st.lists(
    shuffled_known({"role": const("user"), "content": sound_asked}, {"name": visible})
    | shuffled_known({"role": const("assistant"), "content": sound_said}, sound_beside).filter(
        lambda message: message["content"] or not message.get("reasoning_content")
    )
    | shuffled_known({"role": const("function"), "name": const("read"), "content": st.none() | texts}),
    max_size=2,
)


@st.composite
def sound_chats(draw: st.DrawFn) -> list[dict[str, Json]]:
    """A transcript that OpenAI's chat API takes as it is: only what its reference allows."""
    out = draw(sound_first)
    for number in range(draw(st.integers(1, 2))):
        message = draw(sound_calling)
        message["tool_calls"] = [{**call, "id": f"call {number}-{place}"} for place, call in enumerate(message["tool_calls"])]
        results = [{**draw(sound_tool), "tool_call_id": call["id"]} for call in message["tool_calls"]]
        out = [*out, *draw(sound_next), message, *results]
    return out + draw(sound_next)
