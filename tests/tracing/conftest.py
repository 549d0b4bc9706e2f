"""Spans that a test can read, by the official SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.conftest import gateway  # noqa: F401
from kilburn import tracing


class Told:
    """What an exporter was given."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> list[Any]:
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
