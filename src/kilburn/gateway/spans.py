"""Spans of OpenTelemetry for requests to a model, where the operator has set it up: one for each request, and below it one for
each call of the upstream, each call of our tools, and each compaction. No span holds what was said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kilburn import tracing
from kilburn.gateway.exchange import Exchange
from kilburn.gateway.form import Form
from kilburn.model import Tokens

METHOD = "http.request.method"
ROUTE = "http.route"
STATUS = "http.response.status_code"


def begin(exchange: Exchange, headers: Mapping[str, str]) -> None:
    """Begin the span of a request to a model, as a part of the client's span, if it names one."""
    parents = {"traceparent": exchange.parent, "tracestate": headers.get("tracestate", "")} if exchange.parent else {}
    attributes = {
        METHOD: exchange.method,
        ROUTE: exchange.path,
        "kilburn.request.id": exchange.id,
        "kilburn.request.client": exchange.client_name,
        "kilburn.tenant": exchange.key.tenant if exchange.key is not None else None,
    }
    exchange.span = tracing.begin(
        f"{exchange.method} {exchange.path}", attributes, kind="SERVER", headers=parents, at=exchange.began
    )


def call(exchange: Exchange, form: Form, *, compacted: bool) -> tracing.Span:
    """Begin the span of one call of the upstream."""
    if not exchange.span.wanted:
        return tracing.NONE
    attributes = {
        tracing.OPERATION: "chat",
        tracing.PROVIDER: "anthropic" if form.name == "messages" else "openai",
        tracing.MODEL: exchange.model,
        tracing.STREAM: exchange.stream or None,
        tracing.CONVERSATION: exchange.session,
        tracing.COMPACTED: True if compacted else None,
        "kilburn.request.id": exchange.id,
        "kilburn.pages": exchange.pages,
        "kilburn.round": exchange.rounds,
    }
    return tracing.begin(f"chat {exchange.model}", attributes, kind="CLIENT")


def answered(span: tracing.Span, finish: str, usage: Tokens | None) -> None:
    """Record the reply in the span of a call of the upstream."""
    span.set({tracing.FINISHED: [finish] if finish else None, **tracing.used(usage)})


def end(exchange: Exchange) -> None:
    """End the span of a request."""
    span = exchange.span
    if not span.wanted:
        return
    attributes: dict[str, Any] = {
        STATUS: exchange.status,
        tracing.MODEL: exchange.model,
        tracing.CONVERSATION: exchange.session,
        "kilburn.form": exchange.form,
        "kilburn.rounds": exchange.rounds,
        "kilburn.tokens.sent": exchange.sent,
        "kilburn.tokens.new": exchange.new,
        "kilburn.added_seconds": exchange.added,
        "kilburn.unread": exchange.unread,
    }
    if exchange.stats_after is not None:
        attributes |= {
            "kilburn.tokens.in_window": exchange.stats_after.tokens_in_window,
            "kilburn.hit_rate": exchange.stats_after.hit_rate,
        }
    span.set(attributes)
    if exchange.problem or exchange.status >= 400:
        span.fail(exchange.problem or str(exchange.status))
    span.end(exchange.began + exchange.seconds)
