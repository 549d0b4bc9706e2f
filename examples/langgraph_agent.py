"""A LangChain agent on LangGraph with both of its memories in Kilburn: the window of each thread, and LangGraph's store.

One thread reads far more than its window, and a node of its own keeps a finding in the store; another thread finds it there.
The model is scripted. Needs the extra `langgraph`.

It prints:

    Both pumps are fine.
    results kept: 12
    largest request: ... tokens of 1500
    found by another thread: {'text': 'Pump 7 is K-4711.'}, score ...
    and by Kilburn's own search: {"text": "Pump 7 is K-4711."}
"""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.tools import ToolRuntime, tool
from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver

import kilburn
from kilburn.adapters.langgraph import WindowMiddleware
from kilburn.adapters.langgraph_store import KilburnStore

FINDINGS = ("pumps", "findings")
sizes: list[int] = []
found: list[Any] = []


class Model(FakeMessagesListChatModel):
    """Says what it is told to, and measures what it is asked."""

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self

    def _generate(self, messages: Any, *rest: Any, **options: Any) -> Any:
        sizes.append(sum(len(str(message.content)) for message in messages) // 4)
        return super()._generate(messages, *rest, **options)


@tool
def read(path: str, runtime: ToolRuntime) -> str:
    """Read a log."""
    if path == "pump-7.log":
        runtime.store.put(FINDINGS, path, {"text": "Pump 7 is K-4711."})
    return f"{path}: " + "pressure normal, " * 40


@tool
def findings(query: str, runtime: ToolRuntime) -> str:
    """What was found before."""
    found.extend(runtime.store.search(FINDINGS, query=query, limit=1))
    return found[0].value["text"]


def calling(name: str, **arguments: str) -> AIMessage:
    number = arguments.get("path", "c")
    return AIMessage(content="", tool_calls=[{"name": name, "args": arguments, "id": number}])


def ask(store: kilburn.Store, thread: str, text: str, *replies: AIMessage) -> str:
    agent = create_agent(
        Model(responses=list(replies)),
        [read, findings],
        middleware=[WindowMiddleware(store)],
        checkpointer=InMemorySaver(),
        store=KilburnStore(store),
    )
    config = {"configurable": {"thread_id": thread}, "recursion_limit": 100}
    return agent.invoke({"messages": [{"role": "user", "content": text}]}, config)["messages"][-1].content


def main() -> None:
    with kilburn.open(":memory:", window=1500, policy="lru", embedder=None) as store:
        calls = [calling("read", path=f"pump-{n}.log") for n in range(12)]
        print(ask(store, "ana-1", "Are the pumps fine?", *calls, AIMessage(content="Both pumps are fine.")))
        print(f"results kept: {sum(page.kind == 'result' for page, _ in store.session('ana-1').contents.pages())}")
        print(f"largest request: {max(sizes)} tokens of 1500")
        ask(store, "ana-2", "What is pump 7?", calling("findings", query="pump 7"), AIMessage(content="It is K-4711."))
        print(f"found by another thread: {found[0].value}, score {found[0].score:.2f}")
        print(f"and by Kilburn's own search: {store.search('K-4711', where='facts')[0].text}")


if __name__ == "__main__":
    main()
