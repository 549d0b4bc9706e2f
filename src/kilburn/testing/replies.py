"""The replies of hosted providers: a JSON body, or the events of a stream, in the form of each of three APIs.

Written after the types of the packages `openai` 3.54 and `anthropic` 2.12 and their streaming code. OpenAI's chat
completions have no field for thinking; it stands in `reasoning_content`, as DeepSeek and vLLM send it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kilburn.message import Kind, Part
from kilburn.model import Finish

Json = dict[str, Any]
Event = tuple[str | None, Any]
"""The name of an event, or None if the API has no names, and its data."""

SIGNED = "scripted-"
"""Prefix of the scripted upstream's signatures."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One reply: its parts, the reason for its end, and the stop sequence if there is one."""

    parts: tuple[Part, ...]
    finish: Finish = Finish.STOP
    stop: str | None = None


class ReplyUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the prompt; those read from and written to the cache; tokens of the reply, and of its thinking."""

    prompt: int
    cached: int = 0
    written: int = 0
    reply: int = 0
    thought: int = 0


class Replied(msgspec.Struct, frozen=True, kw_only=True):
    """The complete answer to one request.

    Args:
        id: id of the reply without the API's prefix.
        created: seconds since the epoch.
        asked: the request's body.
        piece: characters of one token, and so of one delta.
    """

    id: str
    created: int
    asked: Json
    choices: tuple[Choice, ...]
    usage: ReplyUsage
    piece: int = 4

    @property
    def model(self) -> str:
        """The requested model."""
        return str(self.asked.get("model"))

    def pieces(self, text: str) -> list[str]:
        """Return a text in deltas."""
        return [text[at : at + self.piece] for at in range(0, len(text), self.piece)]


def encoded(event: Event) -> bytes:
    """Return an event as bytes of a stream."""
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def signature(thinking: str) -> str:
    """Return the scripted upstream's signature of thinking."""
    return SIGNED + base64.b64encode(hashlib.blake2b(thinking.encode(), digest_size=24).digest()).decode()


def whole(api: str, answer: Replied) -> Json:
    """Return the body of an unstreamed reply. `api`: "chat", "messages" or "responses"."""
    return _WHOLE[api](answer)


def events(api: str, answer: Replied) -> Iterator[Event]:
    """Return the events of a streamed reply, the last one included. `api`: "chat", "messages" or "responses"."""
    return _EVENTS[api](answer)


def _texts(parts: tuple[Part, ...], kind: Kind) -> str:
    return "".join(part.text for part in parts if part.kind is kind)


def _chat_finish(choice: Choice) -> str:
    return {Finish.CALLS: "tool_calls", Finish.LENGTH: "length"}.get(choice.finish, "stop")


def _chat_usage(usage: ReplyUsage) -> Json:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.reply,
        "total_tokens": usage.prompt + usage.reply,
        "prompt_tokens_details": {"cached_tokens": usage.cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.thought,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _chat_call(part: Part) -> Json:
    return {"id": part.call, "type": "function", "function": {"name": part.name, "arguments": part.text}}


def _logprob(token: str, top: int) -> Json:
    raw = list(token.encode())
    alternatives = [{"token": token if not rank else f"{rank}", "logprob": -0.25 - rank, "bytes": raw} for rank in range(top)]
    return {"token": token, "logprob": -0.25, "bytes": raw, "top_logprobs": alternatives}


def _chat_logprobs(answer: Replied, tokens: list[str]) -> Json | None:
    if not answer.asked.get("logprobs"):
        return None
    return {"content": [_logprob(token, answer.asked.get("top_logprobs") or 0) for token in tokens], "refusal": None}


def _chat_head(answer: Replied, kind: str) -> Json:
    head = {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}
    return {**head, "service_tier": "default", "system_fingerprint": "fp_scripted"}


def _whole_chat(answer: Replied) -> Json:
    choices = []
    for index, choice in enumerate(answer.choices):
        text, thought = _texts(choice.parts, Kind.TEXT), _texts(choice.parts, Kind.REASONING)
        refused = choice.finish is Finish.REFUSED
        message: Json = {"role": "assistant", "content": None if refused else text or None}
        message |= {"refusal": text if refused else None, "annotations": []}
        if thought:
            message["reasoning_content"] = thought
        if calls := [_chat_call(part) for part in choice.parts if part.kind is Kind.CALL]:
            message["tool_calls"] = calls
        logprobs = _chat_logprobs(answer, answer.pieces(text))
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": _chat_finish(choice)})
    return {**_chat_head(answer, "chat.completion"), "choices": choices, "usage": _chat_usage(answer.usage)}


def _chat_deltas(answer: Replied, choice: Choice) -> Iterator[tuple[Json, list[str]]]:
    """Yield each delta, with the tokens of the reply's text in it."""
    yield {"role": "assistant", "content": "", "refusal": None}, []
    field = "refusal" if choice.finish is Finish.REFUSED else "content"
    number = 0
    for part in choice.parts:
        if part.kind is Kind.CALL:
            call = _chat_call(part)
            yield {"tool_calls": [{"index": number, **call, "function": {**call["function"], "arguments": ""}}]}, []
            for piece in answer.pieces(part.text):
                yield {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}, []
            number += 1
        elif part.kind in (Kind.TEXT, Kind.REASONING):
            for piece in answer.pieces(part.text):
                thought = part.kind is Kind.REASONING
                yield {"reasoning_content" if thought else field: piece}, [] if thought else [piece]


def _events_chat(answer: Replied) -> Iterator[Event]:
    head = _chat_head(answer, "chat.completion.chunk")
    counted = bool((answer.asked.get("stream_options") or {}).get("include_usage"))
    tail = {"usage": None} if counted else {}

    def chunk(index: int, delta: Json, tokens: list[str], finish: str | None) -> Event:
        logprobs = _chat_logprobs(answer, tokens) if tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return None, {**head, "choices": [choice], **tail}

    running = [(index, choice, _chat_deltas(answer, choice)) for index, choice in enumerate(answer.choices)]
    while running:
        for at in list(running):
            index, choice, deltas = at
            if (following := next(deltas, None)) is None:
                yield chunk(index, {}, [], _chat_finish(choice))
                running.remove(at)
            else:
                yield chunk(index, *following, None)
    if counted:
        yield None, {**head, "choices": [], "usage": _chat_usage(answer.usage)}
    yield None, "[DONE]"


def _messages_usage(usage: ReplyUsage) -> Json:
    return {
        "input_tokens": usage.prompt - usage.cached - usage.written,
        "cache_creation_input_tokens": usage.written,
        "cache_read_input_tokens": usage.cached,
        "cache_creation": {"ephemeral_5m_input_tokens": usage.written, "ephemeral_1h_input_tokens": 0},
        "output_tokens": usage.reply,
        "service_tier": "standard",
    }


def _messages_head(answer: Replied) -> Json:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def _messages_end(choice: Choice) -> Json:
    reasons = {Finish.CALLS: "tool_use", Finish.LENGTH: "max_tokens", Finish.REFUSED: "refusal"}
    reason = "stop_sequence" if choice.stop is not None else reasons.get(choice.finish, "end_turn")
    return {"stop_reason": reason, "stop_sequence": choice.stop}


def _block(part: Part) -> Json:
    if part.kind is Kind.CALL:
        return {"type": "tool_use", "id": part.call, "name": part.name, "input": json.loads(part.text or "{}")}
    if part.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": part.text, "signature": signature(part.text)}
    if part.kind is Kind.OPAQUE:
        return dict(json.loads(part.text))
    return {"type": "text", "text": part.text}


def _whole_messages(answer: Replied) -> Json:
    choice = answer.choices[0]
    content = [_block(part) for part in choice.parts]
    return {**_messages_head(answer), "content": content, **_messages_end(choice), "usage": _messages_usage(answer.usage)}


def _block_deltas(answer: Replied, part: Part, block: Json) -> tuple[Json, list[Json]]:
    """Return the initial block and its deltas."""
    pieces = answer.pieces(part.text)
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces]
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in ("", *pieces)]
    if block["type"] == "thinking":
        deltas: list[Json] = [{"type": "thinking_delta", "thinking": piece} for piece in pieces]
        return {**block, "thinking": "", "signature": ""}, [*deltas, {"type": "signature_delta", "signature": block["signature"]}]
    return block, []


def _events_messages(answer: Replied) -> Iterator[Event]:
    choice, usage = answer.choices[0], _messages_usage(answer.usage)

    def event(name: str, **data: Any) -> Event:
        return name, {"type": name, **data}

    head: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 1}}
    yield event("message_start", message={**_messages_head(answer), **head})
    for index, part in enumerate(choice.parts):
        start, deltas = _block_deltas(answer, part, _block(part))
        yield event("content_block_start", index=index, content_block=start)
        if not index:
            yield event("ping")
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    yield event("message_delta", delta=_messages_end(choice), usage={"output_tokens": answer.usage.reply})
    yield event("message_stop")


_ECHOED: Json = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a response that repeat the request, with their defaults."""


def _response(answer: Replied, status: str, output: list[Json]) -> Json:
    request, usage = answer.asked, answer.usage
    echoed = {key: default if request.get(key) is None else request[key] for key, default in _ECHOED.items()}
    ended = status in ("completed", "incomplete")
    counted = {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.written},
        "output_tokens": usage.reply,
        "output_tokens_details": {"reasoning_tokens": usage.thought},
        "total_tokens": usage.prompt + usage.reply,
    }
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": answer.model,
        "output": output,
        **echoed,
        "usage": counted if ended else None,
    }


def _items(answer: Replied) -> list[tuple[Json, Part]]:
    choice, items = answer.choices[0], []
    cut = choice.finish is Finish.LENGTH
    encrypted = "reasoning.encrypted_content" in (answer.asked.get("include") or ())
    logprobs = "message.output_text.logprobs" in (answer.asked.get("include") or ())
    for index, part in enumerate(choice.parts):
        name = f"{answer.id}_{index}"
        status = "incomplete" if cut and index == len(choice.parts) - 1 else "completed"
        item: Json
        if part.kind is Kind.CALL:
            item = {"id": f"fc_{name}", "type": "function_call", "status": status, "call_id": part.call}
            item |= {"name": part.name, "arguments": part.text}
        elif part.kind is Kind.REASONING:
            item = {"id": f"rs_{name}", "type": "reasoning", "summary": []}
            if part.text:
                item["summary"] = [{"type": "summary_text", "text": part.text}]
            if encrypted:
                item["encrypted_content"] = signature(part.text)
        elif part.kind is Kind.OPAQUE:
            # What a provider does itself has an id of the reply, but where the script gives one.
            item = {"id": f"it_{name}", **json.loads(part.text)}
        else:
            content: Json = {"type": "output_text", "annotations": [], "logprobs": [], "text": part.text}
            if logprobs:
                top = answer.asked.get("top_logprobs") or 0
                content["logprobs"] = [_logprob(token, top) for token in answer.pieces(part.text)]
            if choice.finish is Finish.REFUSED:
                content = {"type": "refusal", "refusal": part.text}
            item = {"id": f"msg_{name}", "type": "message", "status": status, "role": "assistant", "content": [content]}
        items.append((item, part))
    return items


def _whole_responses(answer: Replied) -> Json:
    status = "incomplete" if answer.choices[0].finish is Finish.LENGTH else "completed"
    return _response(answer, status, [item for item, _ in _items(answer)])


def _events_responses(answer: Replied) -> Iterator[Event]:
    end = _whole_responses(answer)
    started = _response(answer, "in_progress", [])
    steps: list[tuple[str, Json]] = [("created", {"response": started}), ("in_progress", {"response": started})]
    for index, (item, part) in enumerate(_items(answer)):
        steps += _item_steps(answer, index, item, part)
    steps.append((end["status"], {"response": end}))
    for number, (name, data) in enumerate(steps):
        yield f"response.{name}", {"type": f"response.{name}", "sequence_number": number, **data}


def _item_steps(answer: Replied, index: int, item: Json, part: Part) -> list[tuple[str, Json]]:
    place = {"item_id": item.get("id"), "output_index": index}
    pieces = answer.pieces(part.text)
    steps: list[tuple[str, Json]]
    if item["type"] == "function_call":
        in_progress: Json = {**item, "status": "in_progress", "arguments": ""}
        steps = [("function_call_arguments.delta", {**place, "delta": piece}) for piece in pieces]
        steps.append(("function_call_arguments.done", {**place, "arguments": part.text}))
    elif item["type"] == "reasoning":
        in_progress = {**item, "summary": []}
        at, empty = {**place, "summary_index": 0}, {"type": "summary_text", "text": ""}
        steps = []
        for summary in item["summary"]:
            steps.append(("reasoning_summary_part.added", {**at, "part": empty}))
            steps += [("reasoning_summary_text.delta", {**at, "delta": piece}) for piece in pieces]
            steps.append(("reasoning_summary_text.done", {**at, "text": part.text}))
            steps.append(("reasoning_summary_part.done", {**at, "part": summary}))
    elif item["type"] == "message":
        in_progress = {**item, "status": "in_progress", "content": []}
        steps = _content_steps({**place, "content_index": 0}, item["content"][0], pieces)
    else:
        in_progress, steps = item, []
    added, completed = {"output_index": index, "item": in_progress}, {"output_index": index, "item": item}
    return [("output_item.added", added), *steps, ("output_item.done", completed)]


def _content_steps(at: Json, content: Json, pieces: list[str]) -> list[tuple[str, Json]]:
    if content["type"] == "refusal":
        steps = [("content_part.added", {**at, "part": {**content, "refusal": ""}})]
        steps += [("refusal.delta", {**at, "delta": piece}) for piece in pieces]
        steps.append(("refusal.done", {**at, "refusal": content["refusal"]}))
    else:
        steps = [("content_part.added", {**at, "part": {**content, "text": "", "logprobs": []}})]
        logprobs = content["logprobs"]
        for number, piece in enumerate(pieces):
            steps.append(("output_text.delta", {**at, "delta": piece, "logprobs": logprobs[number : number + 1]}))
        steps.append(("output_text.done", {**at, "text": content["text"], "logprobs": logprobs}))
    return [*steps, ("content_part.done", {**at, "part": content})]


_WHOLE: dict[str, Callable[[Replied], Json]] = {"chat": _whole_chat, "messages": _whole_messages, "responses": _whole_responses}
_EVENTS: dict[str, Callable[[Replied], Iterator[Event]]] = {
    "chat": _events_chat,
    "messages": _events_messages,
    "responses": _events_responses,
}
