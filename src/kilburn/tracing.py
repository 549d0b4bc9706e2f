"""OpenTelemetry spans for model calls, tools, agents, requests, and the compactions in the ledger.

The names are those of the semantic conventions for generative AI, v0.1.0 (semantic-conventions-genai). None of them is stable, so
they are defined here. This module does not import OpenTelemetry: a program that has set it up has imported it. In any other
program, a span costs one dictionary lookup. No span contains texts of messages. An error of an exporter ends no call.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

import kilburn.model
from kilburn.event import Act, Event
from kilburn.model import Delta, Model, Reply, Request, Tokens

log = logging.getLogger("kilburn")

SCOPE = "kilburn"

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
MODEL = "gen_ai.request.model"
STREAM = "gen_ai.request.stream"
LIMIT = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
CONVERSATION = "gen_ai.conversation.id"
COMPACTED = "gen_ai.conversation.compacted"
"""True if the prompt is not the whole conversation. By the conventions, it is never false."""
AGENT = "gen_ai.agent.name"
TOOL = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
CALL = "gen_ai.tool.call.id"
FINISHED = "gen_ai.response.finish_reasons"
FIRST = "gen_ai.response.time_to_first_chunk"
INPUT = "gen_ai.usage.input_tokens"
OUTPUT = "gen_ai.usage.output_tokens"
CACHE_READ = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITTEN = "gen_ai.usage.cache_write.input_tokens"
CACHE_CREATED = "gen_ai.usage.cache_creation.input_tokens"
"""The name of `CACHE_WRITTEN` in v1.41."""
RECORDS = "gen_ai.memory.record.count"
ERROR = "error.type"

PROVIDERS = {"messages": "anthropic", "chat": "openai"}
"""Names of providers in the conventions, by the module of a model or the name of a form."""

FAILED = ("failed", "illegal", "refused", "rejected", "empty", "truncated")
"""Outcomes of a compaction that are errors."""

MAX_TEXT = 200
"""Characters of a text in an attribute, which a client or a model may have chosen."""

MAX_WAITING = 10_000
"""Spans that may wait for the thread that ends them."""

DRAIN_TIMEOUT = 5.0
"""Seconds to wait for these spans when the program ends."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_about: ContextVar[Mapping[str, Any]] = ContextVar("kilburn.tracing.about")
"""Attributes that all spans inside the current one share."""

provider: Any = None
"""A `TracerProvider` for Kilburn's spans; None for that of the program."""

_tracers: list[tuple[Any, Any]] = []
"""The last provider, and its tracer."""

_reported: set[str] = set()


def tracer() -> Any:
    """Return the tracer; None if the program has not set up OpenTelemetry."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    with _log_errors():
        source = api.get_tracer_provider() if provider is None else provider
        if isinstance(source, api.ProxyTracerProvider | api.NoOpTracerProvider):
            return None
        if not _tracers or _tracers[0][0] is not source:
            _tracers[:] = [(source, api.get_tracer(SCOPE, kilburn.__version__, tracer_provider=source))]
        return _tracers[0][1]
    return None


class Span:
    """An open span. Without a tracer, its methods do nothing.

    Args:
        real: the span of OpenTelemetry.
        about: see `begin`.
    """

    __slots__ = ("_about", "_ended", "_real")

    def __init__(self, real: Any = None, about: Mapping[str, Any] | None = None) -> None:
        self._real, self._about, self._ended = real, about or {}, False

    @property
    def wanted(self) -> bool:
        """Return whether the span is recorded."""
        return self._real is not None

    def set(self, attributes: Mapping[str, Any], name: str | None = None) -> None:
        """Add attributes, except those that are None or "", and change the name."""
        if self._real is None:
            return
        with _log_errors():
            for key, value in attributes.items():
                if value is not None and value != "":
                    self._real.set_attribute(key, _bounded(value))
            if name is not None:
                self._real.update_name(name[:MAX_TEXT])

    def fail(self, kind: str) -> None:
        """Record that the operation failed, by the kind of the error."""
        if self._real is None:
            return
        self.set({ERROR: kind})
        with _log_errors():
            self._real.set_status(sys.modules["opentelemetry.trace"].StatusCode.ERROR)

    def end(self, at: float | None = None) -> None:
        """End the span. Later calls have no effect.

        Args:
            at: the time, in seconds since the epoch; None for now.
        """
        if self._real is None or self._ended:
            return
        self._ended = True
        if _aside is None:
            _end(self._real, at)
        else:
            _aside.put(self._real, time.time() if at is None else at)

    @contextmanager
    def current(self, more: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Make this the current span while the block runs.

        Args:
            more: attributes for all spans that begin in the block.
        """
        if self._real is None:
            yield
            return
        context: Any = sys.modules["opentelemetry.context"]
        token = context.attach(sys.modules["opentelemetry.trace"].set_span_in_context(self._real))
        token_before = _about.set({**self._about, **more} if more else self._about)
        try:
            yield
        finally:
            _about.reset(token_before)
            context.detach(token)

    def carried(self) -> dict[str, str]:
        """Return the headers with which another program continues this trace."""
        if self._real is None:
            return {}
        headers: dict[str, str] = {}
        with _log_errors():
            _w3c().inject(headers, sys.modules["opentelemetry.trace"].set_span_in_context(self._real))
        return headers

    @property
    def trace(self) -> str:
        """Return the id of the trace in hex; "" if the span is not recorded."""
        return "" if self._real is None else f"{self._real.get_span_context().trace_id:032x}"


NONE = Span()


class _Aside:
    """A thread that ends spans, because an exporter may be slow."""

    def __init__(self) -> None:
        import queue  # needed only by programs that export spans

        self._full = queue.Full
        self._spans: queue.Queue[tuple[Any, float]] = queue.Queue(MAX_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, real: Any, at: float) -> None:
        """End a span at a time. If too many spans wait, it is dropped."""
        try:
            self._spans.put_nowait((real, at))
        except self._full:
            _report(OverflowError())
            return
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="kilburn-spans", daemon=True)
                    self._thread.start()

    @property
    def waiting(self) -> int:
        """Return the number of waiting spans."""
        return self._spans.qsize()

    def _work(self) -> None:
        while True:
            _end(*self._spans.get())
            self._spans.task_done()

    def drain(self) -> None:
        """Wait until no span waits, up to `DRAIN_TIMEOUT` seconds."""
        until = time.monotonic() + DRAIN_TIMEOUT
        with self._spans.all_tasks_done:
            while self._spans.unfinished_tasks and (remaining := until - time.monotonic()) > 0:
                self._spans.all_tasks_done.wait(remaining)


_aside: _Aside | None = None


def end_aside() -> None:
    """End the spans of this program in a separate thread from now on."""
    global _aside
    _aside = _aside or _Aside()


def drain() -> None:
    """Wait until finished spans are exported, up to `DRAIN_TIMEOUT` seconds."""
    if _aside is not None:
        _aside.drain()


def waiting() -> int:
    """Return the number of spans that wait for their export."""
    return 0 if _aside is None else _aside.waiting


def _end(real: Any, at: float | None) -> None:
    with _log_errors():
        real.end(None if at is None else int(at * 1e9))


def begin(
    name: str,
    attributes: Mapping[str, Any],
    *,
    kind: str = "INTERNAL",
    about: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    at: float | None = None,
) -> Span:
    """Begin a span below the current one.

    Args:
        attributes: attributes of the span, except those that are None or "".
        kind: the kind by OpenTelemetry.
        about: attributes for all spans that begin in it, too.
        headers: headers of a request, which name the parent if there is no current span.
        at: the time of the begin, in seconds since the epoch; None for now.
    """
    tracer_in_use = tracer()
    if tracer_in_use is None:
        return NONE
    api: Any = sys.modules["opentelemetry.trace"]
    shared = {**_about.get({}), **(about or {})}
    with _log_errors():
        values = {key: _bounded(value) for key, value in {**shared, **attributes}.items() if value is not None and value != ""}
        real = tracer_in_use.start_span(
            name.strip()[:MAX_TEXT],
            context=None if headers is None or api.get_current_span().get_span_context().is_valid else _parse_parent(headers),
            kind=api.SpanKind[kind],
            attributes=values,
            start_time=None if at is None else int(at * 1e9),
        )
        return Span(real, shared)
    return NONE


@contextmanager
def span(
    name: str, attributes: Mapping[str, Any], *, kind: str = "INTERNAL", about: Mapping[str, Any] | None = None
) -> Iterator[Span]:
    """Record the block as a span; see `begin`."""
    new_span = begin(name, attributes, kind=kind, about=about)
    if not new_span.wanted:
        yield new_span
        return
    with new_span.current():
        try:
            yield new_span
        except BaseException as error:
            new_span.fail(type(error).__name__)
            raise
        finally:
            new_span.end()


def carried(work: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return a function for another thread, whose spans belong to the span that is current here."""
    return work if tracer() is None else partial(copy_context().run, work)


@contextmanager
def compacting(session: Any) -> Iterator[None]:
    """Record the compactions in the block as spans, from the session's ledger after the block.

    Args:
        session: a `kilburn.Session`.
    """
    if tracer() is None:
        yield
        return
    name, head = session.name, session.ledger.head
    # Without a compaction, this span is never ended, and so never exported.
    first = begin("compact", {OPERATION: "compact"}, about={CONVERSATION: name})
    began = time.time()
    with first.current():
        yield
    current = first
    for event in compactions(session, head):
        if current is NONE:
            current = begin("compact", {OPERATION: "compact", CONVERSATION: name}, at=began)
        data, outcome = event.data, str(event.data.get("outcome", "done"))
        answers = data.get("asked")
        current.set(
            {
                "kilburn.policy": event.policy,
                "kilburn.cause": event.cause,
                "kilburn.outcome": outcome,
                "kilburn.tokens.freed": data.get("freed"),
                "kilburn.moves": data.get("moves"),
                "kilburn.asked": len(answers) if isinstance(answers, Sequence) else None,
                "kilburn.event": event.number,
            },
            f"compact {event.policy}",
        )
        if outcome in FAILED:
            current.fail(outcome)
        # A later compaction of the same append began when the previous one ended.
        began = event.time
        current.end(event.time if current is not first else None)
        current = NONE


def compactions(session: Any, start: int) -> Iterator[Event]:
    """Yield the COMPACT events after an event, and then the last eviction by the kernel. These are not receipts: changes by hand,
    and the kernel's other evictions and folds, are not among them."""
    evictions: Event | None = None
    with _log_errors():
        for event in session.backend.events(session.number, start):
            if event.act is Act.COMPACT:
                yield event
            elif event.act is Act.EVICT and event.policy == "kernel":
                evictions = event
        if evictions is not None:
            yield evictions


def used(usage: Tokens | None) -> dict[str, Any]:
    """Return the attributes for a provider's token counts of a reply."""
    if not isinstance(usage, Tokens) or not usage.sound:
        return {}
    return {
        INPUT: usage.prompt,
        OUTPUT: usage.reply,
        CACHE_READ: usage.cached,
        CACHE_WRITTEN: usage.written,
        CACHE_CREATED: usage.written,
    }


def _watched(model: Model, request: Request) -> Iterator[Delta | Reply]:
    """Stream a reply, and record a span from the request to the reply."""
    if tracer() is None:
        return model.stream(request)
    place = type(model).__module__.rpartition(".")[2]
    name = str(getattr(model, "name", ""))
    attributes = {
        OPERATION: "chat",
        PROVIDER: PROVIDERS.get(place, place),
        MODEL: name,
        LIMIT: request.max_tokens,
        TEMPERATURE: request.temperature,
    }
    kind = "CLIENT" if getattr(model, "elsewhere", False) else "INTERNAL"
    return _pieces(begin(f"chat {name}", attributes, kind=kind), model, request)


def _pieces(new_span: Span, model: Model, request: Request) -> Iterator[Delta | Reply]:
    began, first = time.perf_counter(), True
    pieces: Iterator[Delta | Reply] | None = None
    try:
        with new_span.current():
            pieces = iter(model.stream(request))
        while True:
            with new_span.current():
                piece = next(pieces, None)
            if piece is None:
                return
            if first:
                first = False
                new_span.set({FIRST: time.perf_counter() - began})
            if isinstance(piece, Reply):
                new_span.set({FINISHED: [str(piece.finish)], **used(piece.usage)})
                new_span.end()
            yield piece
    except GeneratorExit:
        raise
    except BaseException as error:
        new_span.fail(type(error).__name__)
        raise
    finally:
        new_span.end()
        close = getattr(pieces, "close", None)
        if close is not None:
            close()


def _parse_parent(headers: Mapping[str, str]) -> Any:
    """Return the context that headers name; an empty one if they name none."""
    present = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    return _w3c().extract(present, sys.modules["opentelemetry.context"].Context())


def _w3c() -> Any:
    """Return the propagator of the W3C headers, whichever propagators the program has chosen."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return str(value)[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8")
    return value


@contextmanager
def _log_errors() -> Iterator[None]:
    """Log an exception in place of raising it: the operator may have installed any SDK, and no call may fail because of it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- see above
        _report(error)


def _report(error: Exception) -> None:
    """Log each kind of error once."""
    kind = type(error).__name__
    if kind not in _reported:
        _reported.add(kind)
        log.warning("OpenTelemetry failed, and a span was lost: %s", kind)


kilburn.model.watch = _watched
