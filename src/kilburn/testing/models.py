"""The conformance kit for models: `check_model` holds an implementation to the contract of `Model`.

It asks for a few tokens at a time, so it can run against a real model. What the model says is not judged.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kilburn.budget import Counter
from kilburn.errors import ModelError, Refused, Unavailable
from kilburn.message import Kind, Role
from kilburn.model import Delta, Finish, Model, Reply, Request, complete

_FINISHES = set(Finish)
_CAP = 8
_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Another one, please."},
]


def check_model(make: Callable[[], Model]) -> None:
    """Raise `AssertionError` if a model breaks its contract.

    Args:
        make: returns a model that is ready to answer. It is called once for each check, so its models may share what
            is expensive. The model must be able to answer three short messages.
    """
    for check in (
        _check_attributes,
        _check_stream,
        _check_roles,
        _check_cap,
        _check_no_messages,
        _check_request_is_left_alone,
        _check_early_close,
        _check_threads,
        _check_short_time,
    ):
        model = make()
        try:
            check(model)
        finally:
            close = getattr(model, "close", None)
            if close is not None:
                close()


def _request(**more: Any) -> Request:
    return Request(**{"messages": _TALK, "max_tokens": _CAP, "temperature": 0.0, **more})


def _check_attributes(model: Model) -> None:
    assert isinstance(model, Model), f"{type(model).__name__} lacks name, form, context, tokenizer or stream"
    assert model.name, "a model has a name"
    assert model.form in ("chat", "messages"), f"form is {model.form!r}; it is chat or messages"
    assert model.context is None or model.context > 0, f"context is {model.context}; it is None or a number of tokens"
    counter = model.tokenizer
    if isinstance(counter, str):
        assert counter, "tokenizer names a counter, or is one"
        return
    assert isinstance(counter, Counter), "tokenizer is neither a name nor a Counter"
    assert counter.count("") == 0, "the empty text has no tokens"
    assert counter.count("a word") > 0, "a text has tokens"
    assert counter.envelope >= 0, "an envelope is never negative"


def _check_stream(model: Model) -> None:
    pieces = list(model.stream(_request()))
    assert pieces, "a stream ends with a reply; this one is empty"
    deltas, reply = pieces[:-1], pieces[-1]
    assert isinstance(reply, Reply), f"a stream ends with a Reply, not {type(reply).__name__}"
    assert all(isinstance(piece, Delta) for piece in deltas), "all but the last piece are deltas"
    spoken = "".join(piece.text for piece in deltas if isinstance(piece, Delta) and not piece.reasoning)
    thought = "".join(piece.text for piece in deltas if isinstance(piece, Delta) and piece.reasoning)
    assert spoken == reply.text, f"the deltas say {spoken!r}, the reply {reply.text!r}"
    reasoning = "".join(part.text for part in reply.message.parts if part.kind is Kind.REASONING)
    assert thought == reasoning, f"the reasoning deltas say {thought!r}, the reply {reasoning!r}"
    _check_reply(reply)


def _check_reply(reply: Reply) -> None:
    assert reply.message.role is Role.ASSISTANT, f"a reply's role is assistant, not {reply.message.role}"
    assert reply.message.parts, "a reply has a part at least; an empty one has an empty text"
    assert reply.finish in _FINISHES, f"finish is {reply.finish!r}; it is one of {sorted(_FINISHES)}"
    calls = [part.call for part in reply.calls]
    assert all(calls), "each call has an id"
    assert len(set(calls)) == len(calls), "no two calls have one id"
    if reply.usage is not None:
        usage = reply.usage
        assert min(usage.prompt, usage.reply, usage.cached, usage.written) >= 0, "usage is never negative"
        assert usage.cached + usage.written <= usage.prompt, "cached and written tokens are parts of the prompt's"


def _check_roles(model: Model) -> None:
    """The model accepts a system prompt at the place of its form."""
    rules = "You answer with one word."
    if model.form == "chat":
        request = _request(messages=[{"role": "system", "content": rules}, *_TALK])
    else:
        request = _request(system=rules)
    _check_reply(complete(model, request))


def _check_cap(model: Model) -> None:
    reply = complete(model, _request(max_tokens=2))
    if reply.usage is not None:
        assert reply.usage.reply <= 2, f"the reply has {reply.usage.reply} tokens where 2 were asked for"


def _check_no_messages(model: Model) -> None:
    try:
        complete(model, _request(messages=[]))
    except Refused:
        _check_reply(complete(model, _request()))
        return
    raise AssertionError("a request without messages raises Refused")


def _check_request_is_left_alone(model: Model) -> None:
    request = _request()
    messages = copy.deepcopy(list(request.messages))
    complete(model, request)
    assert list(request.messages) == messages, "a model does not change the messages of a request"


def _check_early_close(model: Model) -> None:
    """A stream that is closed early releases its resources, and the model can still answer."""
    complete(model, _request())
    threads = threading.active_count()
    for _ in range(3):
        stream: Iterator[Any] = model.stream(_request(max_tokens=200))
        assert next(stream) is not None
        close = getattr(stream, "close", None)
        assert close is not None, "a stream is a generator: it can be closed"
        close()
        assert next(stream, None) is None, "a closed stream gives nothing more"
    end = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= threads, "a stream that was closed early left a thread running"
    _check_reply(complete(model, _request()))


def _check_threads(model: Model) -> None:
    with ThreadPoolExecutor(2) as pool:
        for reply in pool.map(lambda _: complete(model, _request(max_tokens=4)), range(2)):
            _check_reply(reply)


def _check_short_time(model: Model) -> None:
    """With a timeout that no network can meet, the model answers or raises `Unavailable`, and can answer afterwards."""
    try:
        _check_reply(complete(model, _request(timeout=0.001)))
    except Unavailable:
        pass
    except ModelError as error:
        raise AssertionError(f"a time-out raises Unavailable, not {type(error).__name__}") from error
    _check_reply(complete(model, _request()))
