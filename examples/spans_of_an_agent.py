"""The spans of an agent: its model, a tool, a branch, and what left its window, as OpenTelemetry gets them.

Needs the extra `otel`. A program of yours sets up an exporter of its own; the one here keeps spans in memory.

It prints:

    invoke_agent id=work finish=stop
      chat a-model id=work
      execute_tool read id=work
      chat a-model id=work
      execute_tool branch id=work
        invoke_agent branch id=work/b1 finish=returned
          chat a-model id=work/b1
          execute_tool read id=work/b1
          compact fifo id=work/b1 outcome=done
          chat a-model id=work/b1
          execute_tool return id=work/b1
      chat a-model id=work
"""

from __future__ import annotations

import json
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import kilburn
from kilburn.agents.branch import Branching
from kilburn.message import Kind, Message, Part, Role
from kilburn.testing import Scripted

SHOWN = ("gen_ai.conversation.id", "kilburn.outcome", "kilburn.finish")


def calls(call: str, tool: str, **arguments: Any) -> Message:
    part = Part(kind=Kind.CALL, text=json.dumps(arguments), call=call, name=tool)
    return Message(role=Role.ASSISTANT, parts=(part,))


def read(path: str) -> str:
    """What is in a file."""
    return f"{path}:\n" + "a line of it\n" * 150


def main() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

    script = [
        calls("c1", "read", path="lexer.py"),
        calls("c2", "branch", description="read the parser", prompt="Read parser.py; what is wrong?"),
        calls("d1", "read", path="parser.py"),
        calls("d2", "return", message="It drops the last line."),
        "The parser drops the last line.",
    ]
    model = Scripted(script, name="a-model")
    with kilburn.open(":memory:", window=1500, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        Branching(model, [read], store.session("work")).run("Find the bug.")

    depths: dict[int, int] = {}
    for span in sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0):
        depth = depths.get(span.parent.span_id, -1) + 1 if span.parent is not None else 0
        depths[span.context.span_id] = depth
        given = dict(span.attributes or {})
        said = [f"{name.rpartition('.')[2]}={given[name]}" for name in SHOWN if name in given]
        print("  " * depth + span.name, *said)


if __name__ == "__main__":
    main()
