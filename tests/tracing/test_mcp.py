"""The SDK of MCP tells of our server by the same conventions, below the span of whoever asks."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import asyncio, json
import kilburn
from mcp.client import Client
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from kilburn.mcp import server

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)

async def ask():
    with kilburn.open(":memory:", window=4000, tokenizer="chars/4", embedder=None) as store:
        store.session("s").append({"role": "user", "content": "canary-0b1d"})
        with trace.get_tracer("client").start_as_current_span("client"):
            async with Client(server(store)) as client:
                await client.call_tool("recall", {"session": "s", "address": "p1"})

asyncio.run(ask())
spans = exporter.get_finished_spans()
[served] = [span for span in spans if span.name == "tools/call recall" and span.kind.name == "SERVER"]
[asked] = [span for span in spans if span.name == "client"]
print(json.dumps({
    "same": served.context.trace_id == asked.context.trace_id,
    "tool": served.attributes["gen_ai.tool.name"],
    "told": "canary" in str([dict(span.attributes) for span in spans]),
}))
"""


def test_a_call_of_a_tool_is_a_span_of_the_sdks_own() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"same": True, "tool": "recall", "told": False}
