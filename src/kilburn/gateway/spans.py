"""A span of OpenTelemetry for each request to a model, where opentelemetry is installed and set up by the operator.

The names are those of the semantic conventions for generative AI. None of them is stable, so they stand here. No span holds
what was said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kilburn
from kilburn.gateway.exchange import Exchange

try:
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError:
    trace = None  # type: ignore[assignment]


OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
MODEL = "gen_ai.request.model"
STREAM = "gen_ai.request.stream"
CONVERSATION = "gen_ai.conversation.id"
FINISHED = "gen_ai.response.finish_reasons"
FIRST = "gen_ai.response.time_to_first_chunk"
INPUT = "gen_ai.usage.input_tokens"
OUTPUT = "gen_ai.usage.output_tokens"
CACHE_READ = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITTEN = "gen_ai.usage.cache_creation.input_tokens"
STATUS = "http.response.status_code"
ERROR = "error.type"


def spans(provider: Any = None) -> Callable[[Exchange], None]:
    """What makes a span of each exchange with a model; of none where opentelemetry is not installed.

    Args:
        provider: makes tracers; the global one if None.
    """
    if trace is None:
        return lambda exchange: None
    tracer = trace.get_tracer("kilburn.gateway", kilburn.__version__, tracer_provider=provider)
    parents = TraceContextTextMapPropagator()

    def record(exchange: Exchange) -> None:
        if not exchange.form or (provider is None and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)):
            # Nobody has set anything up that would take it.
            return
        began = int(exchange.began * 1e9)
        span = tracer.start_span(
            f"chat {exchange.model}".rstrip(),
            context=parents.extract({"traceparent": exchange.parent}) if exchange.parent else None,
            kind=trace.SpanKind.CLIENT,
            attributes=_attributes(exchange),
            start_time=began,
        )
        if exchange.problem or exchange.status >= 400:
            span.set_attribute(ERROR, exchange.problem or str(exchange.status))
            span.set_status(trace.StatusCode.ERROR)
        span.end(began + int(exchange.seconds * 1e9))

    return record


def _attributes(exchange: Exchange) -> dict[str, Any]:
    usage, after = exchange.usage, exchange.after
    given: dict[str, Any] = {
        OPERATION: "chat",
        PROVIDER: "anthropic" if exchange.form == "messages" else "openai",
        MODEL: exchange.model,
        STREAM: exchange.stream,
        CONVERSATION: exchange.session,
        FINISHED: [exchange.finish] if exchange.finish else None,
        FIRST: exchange.first,
        STATUS: exchange.status,
        "kilburn.tenant": exchange.key.tenant if exchange.key is not None else None,
        "kilburn.rounds": exchange.rounds,
        "kilburn.tokens.sent": exchange.sent,
        "kilburn.tokens.new": exchange.new,
        "kilburn.added_seconds": exchange.added,
    }
    if usage is not None:
        given |= {INPUT: usage.prompt, OUTPUT: usage.reply, CACHE_READ: usage.cached, CACHE_WRITTEN: usage.written}
    if after is not None:
        given |= {"kilburn.tokens.in_window": after.tokens_in_window, "kilburn.hit_rate": after.hit_rate}
    return {name: value for name, value in given.items() if value not in (None, "")}
