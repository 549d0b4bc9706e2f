"""Spans of OpenTelemetry for what takes time: model calls, tools, agents, requests, and the compactions that the ledger tells of.

The names are those of the semantic conventions for generative AI, v0.1.0 (semantic-conventions-genai). None of them is stable, so
they stand here. Nothing here imports OpenTelemetry. A program that has set it up has imported it; in any other there is nobody to
tell, and a span costs one look into a dictionary. No span holds what was said. What an exporter does wrong ends no call.
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
"""True where the prompt is not the whole conversation; never false, as the conventions want it."""
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
"""What v1.41 called the same."""
RECORDS = "gen_ai.memory.record.count"
ERROR = "error.type"

PROVIDERS = {"messages": "anthropic", "chat": "openai"}
"""What the conventions call the maker of a form, by the module of a model or the form's name."""

FAILED = ("failed", "illegal", "refused", "rejected", "empty", "truncated")
"""Outcomes of a compaction that are errors."""

LONGEST = 200
"""Characters of a text in an attribute; a client, or a model, may have chosen it."""

WAITING = 10_000
"""Spans that may wait for the thread that ends them."""

PATIENCE = 5.0
"""Seconds for which a program that ends waits for them."""

Given = ParamSpec("Given")
Result = TypeVar("Result")

_about: ContextVar[Mapping[str, Any]] = ContextVar("kilburn.tracing.about")
"""What all spans that begin inside have in common."""

provider: Any = None
"""A `TracerProvider` that takes Kilburn's spans instead of the program's own; None for that one."""

_known: list[tuple[Any, Any]] = []
"""The provider that was met last, and what makes spans of it."""

_told: set[str] = set()


def tracer() -> Any:
    """What makes spans; None where nobody has set up anything that would take them."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    try:
        there = api.get_tracer_provider() if provider is None else provider
        if isinstance(there, api.ProxyTracerProvider | api.NoOpTracerProvider):
            return None
        if not _known or _known[0][0] is not there:
            _known[:] = [(there, api.get_tracer(SCOPE, kilburn.__version__, tracer_provider=there))]
        return _known[0][1]
    except Exception as error:  # noqa: BLE001 -- whatever the operator has installed
        _fails(error)
        return None


class Span:
    """A span that goes on; of one that nobody wants, nothing here does anything.

    Args:
        real: OpenTelemetry's own.
        about: see `begin`.
    """

    __slots__ = ("_about", "_ended", "_real")

    def __init__(self, real: Any = None, about: Mapping[str, Any] | None = None) -> None:
        self._real, self._about, self._ended = real, about or {}, False

    @property
    def wanted(self) -> bool:
        """Whether somebody takes it."""
        return self._real is not None

    def set(self, given: Mapping[str, Any], name: str | None = None) -> None:
        """Say more of it. What is None or "" is left out."""
        if self._real is None:
            return
        try:
            for key, value in given.items():
                if value is not None and value != "":
                    self._real.set_attribute(key, _bounded(value))
            if name is not None:
                self._real.update_name(name[:LONGEST])
        except Exception as error:  # noqa: BLE001 -- as above
            _fails(error)

    def fail(self, kind: str) -> None:
        """It ended in an error, of which only the kind is said."""
        if self._real is None:
            return
        self.set({ERROR: kind})
        try:
            self._real.set_status(sys.modules["opentelemetry.trace"].StatusCode.ERROR)
        except Exception as error:  # noqa: BLE001 -- as above
            _fails(error)

    def end(self, at: float | None = None) -> None:
        """It is over; what comes after the first call counts no more.

        Args:
            at: when, in seconds since the epoch; None for now.
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
        """What begins inside belongs to it.

        Args:
            more: what the spans that begin there have too.
        """
        if self._real is None:
            yield
            return
        context: Any = sys.modules["opentelemetry.context"]
        token = context.attach(sys.modules["opentelemetry.trace"].set_span_in_context(self._real))
        before = _about.set({**self._about, **more} if more else self._about)
        try:
            yield
        finally:
            _about.reset(before)
            context.detach(token)

    def carried(self) -> dict[str, str]:
        """The headers that tell another program that it works for this span."""
        if self._real is None:
            return {}
        found: dict[str, str] = {}
        try:
            _w3c().inject(found, sys.modules["opentelemetry.trace"].set_span_in_context(self._real))
        except Exception as error:  # noqa: BLE001 -- as above
            _fails(error)
        return found

    @property
    def trace(self) -> str:
        """The id of its trace, in hex; "" where nobody wants it."""
        return "" if self._real is None else f"{self._real.get_span_context().trace_id:032x}"


NONE = Span()


class _Aside:
    """A thread that ends spans, because whoever exports them may be slow."""

    def __init__(self) -> None:
        import queue  # a program that exports nothing has no use for it

        self._full = queue.Full
        self._spans: queue.Queue[tuple[Any, float]] = queue.Queue(WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, real: Any, at: float) -> None:
        """End a span that was over at a time; if too many wait, it is not told."""
        try:
            self._spans.put_nowait((real, at))
        except self._full:
            _fails(OverflowError())
            return
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="kilburn-spans", daemon=True)
                    self._thread.start()

    @property
    def waiting(self) -> int:
        """Spans that wait."""
        return self._spans.qsize()

    def _work(self) -> None:
        while True:
            _end(*self._spans.get())
            self._spans.task_done()

    def drain(self) -> None:
        """Wait until none waits, a little while at most."""
        until = time.monotonic() + PATIENCE
        with self._spans.all_tasks_done:
            while self._spans.unfinished_tasks and (left := until - time.monotonic()) > 0:
                self._spans.all_tasks_done.wait(left)


_aside: _Aside | None = None


def end_aside() -> None:
    """Have spans of this program ended by a thread of their own from now on."""
    global _aside
    _aside = _aside or _Aside()


def drain() -> None:
    """Wait until spans that are over are told, `PATIENCE` seconds at most."""
    if _aside is not None:
        _aside.drain()


def waiting() -> int:
    """Spans that wait to be told."""
    return 0 if _aside is None else _aside.waiting


def _end(real: Any, at: float | None) -> None:
    try:
        real.end(None if at is None else int(at * 1e9))
    except Exception as error:  # noqa: BLE001 -- as above
        _fails(error)


def begin(
    name: str,
    given: Mapping[str, Any],
    *,
    kind: str = "INTERNAL",
    about: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    at: float | None = None,
) -> Span:
    """A span that begins now, below the current one.

    Args:
        given: what is known of it; what is None or "" is left out.
        kind: as OpenTelemetry names it.
        about: what all spans that begin in it have too.
        headers: of whoever asked, which may say what span this is a part of; that counts where there is no current one.
        at: when it began, in seconds since the epoch; None for now.
    """
    made = tracer()
    if made is None:
        return NONE
    api: Any = sys.modules["opentelemetry.trace"]
    shared = {**_about.get({}), **(about or {})}
    try:
        attributes = {key: _bounded(value) for key, value in {**shared, **given}.items() if value is not None and value != ""}
        real = made.start_span(
            name.strip()[:LONGEST],
            context=None if headers is None or api.get_current_span().get_span_context().is_valid else _parent_of(headers),
            kind=api.SpanKind[kind],
            attributes=attributes,
            start_time=None if at is None else int(at * 1e9),
        )
    except Exception as error:  # noqa: BLE001 -- as above
        _fails(error)
        return NONE
    return Span(real, shared)


@contextmanager
def span(
    name: str, given: Mapping[str, Any], *, kind: str = "INTERNAL", about: Mapping[str, Any] | None = None
) -> Iterator[Span]:
    """What happens inside, as a span; see `begin`."""
    made = begin(name, given, kind=kind, about=about)
    if not made.wanted:
        yield made
        return
    with made.current():
        try:
            yield made
        except BaseException as error:
            made.fail(type(error).__name__)
            raise
        finally:
            made.end()


def carried(work: Callable[Given, Result]) -> Callable[Given, Result]:
    """The same work for another thread, which then belongs to the span that is current here."""
    return work if tracer() is None else partial(copy_context().run, work)


@contextmanager
def compacting(session: Any) -> Iterator[None]:
    """Tell of the compactions that happen inside, from what the session's ledger says of them when they are over.

    Args:
        session: a `kilburn.Session`.
    """
    if tracer() is None:
        yield
        return
    name, head = session.name, session.ledger.head
    # It is told only if there was a compaction: a span that is never ended is never exported.
    first = begin("compact", {OPERATION: "compact"}, about={CONVERSATION: name})
    began = time.time()
    with first.current():
        yield
    made = first
    for event in compactions(session, head):
        if made is NONE:
            made = begin("compact", {OPERATION: "compact", CONVERSATION: name}, at=began)
        data, outcome = event.data, str(event.data.get("outcome", "done"))
        asked = data.get("asked")
        made.set(
            {
                "kilburn.policy": event.policy,
                "kilburn.cause": event.cause,
                "kilburn.outcome": outcome,
                "kilburn.tokens.freed": data.get("freed"),
                "kilburn.moves": data.get("moves"),
                "kilburn.asked": len(asked) if isinstance(asked, Sequence) else None,
                "kilburn.event": event.number,
            },
            f"compact {event.policy}",
        )
        if outcome in FAILED:
            made.fail(outcome)
        # One that the policy was asked for later in the same append began where the one before it ended.
        began = event.time
        made.end(event.time if made is not first else None)
        made = NONE


def compactions(session: Any, after: int) -> Iterator[Event]:
    """The compactions that a session's ledger has after an event, and last what the kernel evicted itself, as one. Nothing is
    written for their sake."""
    own: Event | None = None
    try:
        for event in session.backend.events(session.number, after):
            if event.act is Act.COMPACT:
                yield event
            elif event.act is Act.EVICT and event.policy == "kernel":
                own = event
        if own is not None:
            yield own
    except Exception as error:  # noqa: BLE001 -- whoever asked for the append must not fail by what is told of it
        _fails(error)


def used(usage: Tokens | None) -> dict[str, Any]:
    """What a provider says that a reply cost."""
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
    """The pieces of a reply, as a span from the question to the reply."""
    if tracer() is None:
        return model.stream(request)
    place = type(model).__module__.rpartition(".")[2]
    name = str(getattr(model, "name", ""))
    given = {
        OPERATION: "chat",
        PROVIDER: PROVIDERS.get(place, place),
        MODEL: name,
        LIMIT: request.max_tokens,
        TEMPERATURE: request.temperature,
    }
    kind = "CLIENT" if getattr(model, "elsewhere", False) else "INTERNAL"
    return _pieces(begin(f"chat {name}", given, kind=kind), model, request)


def _pieces(made: Span, model: Model, request: Request) -> Iterator[Delta | Reply]:
    began, first = time.perf_counter(), True
    pieces: Iterator[Delta | Reply] | None = None
    try:
        with made.current():
            pieces = iter(model.stream(request))
        while True:
            with made.current():
                piece = next(pieces, None)
            if piece is None:
                return
            if first:
                first = False
                made.set({FIRST: time.perf_counter() - began})
            if isinstance(piece, Reply):
                made.set({FINISHED: [str(piece.finish)], **used(piece.usage)})
                made.end()
            yield piece
    except GeneratorExit:
        raise
    except BaseException as error:
        made.fail(type(error).__name__)
        raise
    finally:
        made.end()
        close = getattr(pieces, "close", None)
        if close is not None:
            close()


def _parent_of(headers: Mapping[str, str]) -> Any:
    """The context that headers name; that of nobody if they name none."""
    named = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    return _w3c().extract(named, sys.modules["opentelemetry.context"].Context())


def _w3c() -> Any:
    """What writes and reads these headers, whatever other ones the program has chosen."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return str(value)[:LONGEST].encode("utf-8", "replace").decode("utf-8")
    return value


def _fails(error: Exception) -> None:
    """Say once of each kind of error that something is not told."""
    kind = type(error).__name__
    if kind not in _told:
        _told.add(kind)
        log.warning("OpenTelemetry failed, and something was not told: %s", kind)


kilburn.model.watch = _watched
