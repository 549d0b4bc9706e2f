"""Spans that a test can read, by the official SDK."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from gateway.conftest import gateway  # noqa: F401
from kilburn import tracing


class Served(SpanProcessor):
    """Counts the open spans of requests: a client has its reply before the server's span ends."""

    def __init__(self) -> None:
        self.open, self.changed = 0, threading.Condition()

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._count(span, 1)

    def on_end(self, span: Any) -> None:
        self._count(span, -1)

    def _count(self, span: Any, step: int) -> None:
        if span.kind is SpanKind.SERVER:
            with self.changed:
                self.open += step
                self.changed.notify_all()

    def wait(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: not self.open, timeout=60)


class Told:
    """What an exporter was given."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.served = Served()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.provider.add_span_processor(self.served)

    @property
    def spans(self) -> list[Any]:
        self.served.wait()
        tracing.drain()
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[Any]:
        """The spans whose name begins so, the earliest first."""
        return sorted((each for each in self.spans if each.name.startswith(name)), key=lambda each: each.start_time or 0)

    def above(self, span: Any) -> list[str]:
        """The names of the spans that a span is in, the nearest first."""
        known, names = {each.context.span_id: each for each in self.spans}, []
        while span.parent is not None and span.parent.span_id in known:
            span = known[span.parent.span_id]
            names.append(span.name)
        return names


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    tracing.provider = made.provider
    yield made
    tracing.provider = None
