"""LlamaIndex with a memory in a process: an agent answers 30 questions, each with a look into a log, in a window of 1,500 tokens.

The model is LlamaIndex's own scripted one. Needs the extra `llamaindex`.

It prints:

    Pump 29 is fine.
    kept: 120 messages
    largest request: ... tokens of 1500
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.llms.mock import MockFunctionCallingLLM

import kilburn
from kilburn.adapters.llamaindex import ProcessMemory

sizes: list[int] = []


def read(path: str) -> str:
    """Read a log."""
    return f"{path}: " + "pressure normal, " * 20


def reply(messages: Sequence[ChatMessage], **options: Any) -> ChatMessage:
    sizes.append(sum(len(str(message.content)) for message in messages) // 4)
    number = [str(message.content) for message in messages if message.role == "user"][-1].split()[2]
    if messages[-1].role == "tool":
        return ChatMessage(role="assistant", content=f"Pump {number} is fine.")
    call = ToolCallBlock(tool_call_id=f"c{number}", tool_name="read", tool_kwargs={"path": f"pump-{number}.log"})
    return ChatMessage(role="assistant", blocks=[call])


async def main() -> None:
    with kilburn.open(":memory:", window=1500, policy="lru", embedder=None) as store:
        process = store.process("ana-1")
        agent = FunctionAgent(tools=[read], llm=MockFunctionCallingLLM(response_generator=reply), streaming=False)
        answer: Any = None
        for number in range(30):
            answer = await agent.run(f"Is pump {number} fine?", memory=ProcessMemory.of(process))
        print(answer)
        print(f"kept: {len(process.messages())} messages")
        print(f"largest request: {max(sizes)} tokens of 1500")


if __name__ == "__main__":
    asyncio.run(main())
