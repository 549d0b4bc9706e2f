"""LlamaIndex with a memory in a session: an agent answers 30 questions, each with a look into a log, in a window of 1,500 tokens.
Then it searches for what left the window first.

The model is LlamaIndex's own scripted one. Needs the extra `llamaindex`.

It prints:

    Pump 29 is fine.
    Of pump 0 I find: pump-0.log: pressure normal...
    kept: 124 messages
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
from kilburn.adapters.llamaindex import SessionMemory, tools

sizes: list[int] = []


def read(path: str) -> str:
    """Read a log."""
    return f"{path}: " + "pressure normal, " * 20


def reply(messages: Sequence[ChatMessage], **options: Any) -> ChatMessage:
    sizes.append(sum(len(str(message.content)) for message in messages) // 4)
    number = [str(message.content) for message in messages if message.role == "user"][-1].split()[2]
    if number == "said":
        if messages[-1].role == "tool":
            told = next(line for line in str(messages[-1].content).splitlines() if line.startswith("pump-0.log"))
            return ChatMessage(role="assistant", content=f"Of pump 0 I find: {told[:27]}...")
        search = ToolCallBlock(tool_call_id="s", tool_name="search_memory", tool_kwargs={"query": "pump-0.log"})
        return ChatMessage(role="assistant", blocks=[search])
    if messages[-1].role == "tool":
        return ChatMessage(role="assistant", content=f"Pump {number} is fine.")
    call = ToolCallBlock(tool_call_id=f"c{number}", tool_name="read", tool_kwargs={"path": f"pump-{number}.log"})
    return ChatMessage(role="assistant", blocks=[call])


async def main() -> None:
    with kilburn.open(":memory:", window=1500, policy="lru", embedder=None) as store:
        session = store.session("ana-1")
        memory = SessionMemory.of(session)
        agent = FunctionAgent(tools=[read, *tools(memory)], llm=MockFunctionCallingLLM(response_generator=reply), streaming=False)
        answer: Any = None
        for number in range(30):
            answer = await agent.run(f"Is pump {number} fine?", memory=memory)
        print(answer)
        print(await agent.run("What was said of pump 0?", memory=memory))
        print(f"kept: {len(session.contents.messages())} messages")
        print(f"largest request: {max(sizes)} tokens of 1500")


if __name__ == "__main__":
    asyncio.run(main())
