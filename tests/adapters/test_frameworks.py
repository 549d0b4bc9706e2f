"""pydantic-ai and LangGraph with scripted models: a long run stays in the window, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

import kilburn
from kilburn.testing import check_laws

WINDOW = 1500
WORDS = "words of the file " * 40


@pytest.fixture
def store() -> Iterator[kilburn.Store]:
    with kilburn.open(":memory:", window=WINDOW, policy="lru", embedder=None) as store:
        yield store


async def test_pydantic_ai(store: kilburn.Store) -> None:
    pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: pip install '.[pydantic-ai]' in the checkout")
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    from kilburn.adapters.pydantic_ai import WindowCapability

    session, sizes = store.session("s"), list[int]()

    def reply(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        sizes.append(sum(session.counter.count(str(getattr(part, "content", ""))) for each in messages for part in each.parts))
        calls = [part.tool_call_id for each in messages for part in each.parts if part.part_kind == "tool-call"]
        answers = [
            part.tool_call_id for each in messages for part in each.parts if part.part_kind in ("tool-return", "retry-prompt")
        ]
        assert sorted(calls) == sorted(answers)
        assert {tool.name for tool in info.function_tools} == {"read", "recall", "search_memory"}
        n = len(sizes)
        if n <= 8:
            return ModelResponse(
                [ToolCallPart("read", {"path": f"a{n}"}, f"x{n}"), ToolCallPart("read", {"path": f"b{n}"}, f"y{n}")]
            )
        if n == 9:
            return ModelResponse([ToolCallPart("search_memory", {"query": "a1"}, "s1")])
        return ModelResponse([TextPart("Done.")])

    agent = Agent(FunctionModel(reply), instructions="Be brief.", capabilities=[WindowCapability(session)])

    @agent.tool_plain
    def read(path: str) -> str:
        """Read a file."""
        return f"{path}: {WORDS}"

    result = await agent.run("Read on.")
    assert result.output == "Done."
    assert max(sizes) < WINDOW
    assert "a1" in next(
        session.contents.text(page.id) for page, _ in session.contents.pages() if page.call == "s1" and page.kind == "result"
    )
    assert [page.sources != () for page, _ in session.contents.pages() if page.kind == "result"].count(True) == 1
    assert len(result.all_messages()) == 20, "the run's own history is whole"
    assert sum(page.kind == "result" for page, _ in session.contents.pages()) == 17
    whole = ModelMessagesTypeAdapter.validate_json(result.all_messages_json())
    again = Agent(FunctionModel(reply), capabilities=[WindowCapability(session)], tools=[read])
    await again.run("Sure?", message_history=whole)
    assert [message["content"] for message in session.contents.messages()][-3:] == ["Done.", "Sure?", "Done."]


def test_pydantic_ai_keeps_files_and_the_names_of_tools(store: kilburn.Store) -> None:
    pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: pip install '.[pydantic-ai]' in the checkout")
    from pydantic_ai import Agent, AudioUrl, BinaryContent, DocumentUrl, ImageUrl
    from pydantic_ai.messages import FilePart, ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import FunctionModel

    from kilburn.adapters.pydantic_ai import WindowCapability

    session = store.session("s")
    pixel = BinaryContent(
        bytes.fromhex("89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"), media_type="image/png"
    )
    sound = BinaryContent(b"la" * 2000, media_type="audio/wav")
    asked = [
        "See these.",
        pixel,
        sound,
        ImageUrl("https://e.org/a.png"),
        AudioUrl("https://e.org/a.mp3"),
        DocumentUrl("https://e.org/a.pdf"),
    ]
    seen: list[Any] = []

    def reply(messages: Any, info: Any) -> ModelResponse:
        seen.append(messages)
        if len(seen) == 1:
            return ModelResponse([ToolCallPart("draw", {"what": "a"}, "c1")])
        return ModelResponse([TextPart("Done."), FilePart(sound)] if len(seen) == 2 else [TextPart("Yes.")])

    def draw(what: str) -> Any:
        """Draw."""
        return "here it is: " + "words " * 2000 if session.name == "short" else ["here it is", pixel]

    def agent() -> Agent[Any, Any]:
        return Agent(FunctionModel(reply), tools=[draw], capabilities=[WindowCapability(session)])

    with kilburn.open(":memory:", window=40_000, policy="lru", embedder=None) as wide:
        session = wide.session("s")
        agent().run_sync(asked)
        agent().run_sync("Sure?")  # a new run without a history: all of it comes from the session
    parts = [part for message in seen[-1] for part in message.parts]

    def plain(content: Any) -> list[Any]:
        return [getattr(each, "data", getattr(each, "url", each)) for each in content]

    assert plain(next(part.content for part in parts if part.part_kind == "user-prompt")) == plain(asked)
    (drawn,) = [part for part in parts if part.part_kind == "tool-return"]
    assert drawn.tool_name == "draw"
    beside = next(part.content for part in parts[parts.index(drawn) :] if part.part_kind == "user-prompt")
    assert pixel.data in plain(beside), "as in OpenAI's form, a tool's picture stands behind its result"
    assert any(part.part_kind == "file" and part.content.data == sound.data for part in parts)
    session = store.session("heard")
    agent().run_sync(["Hear this.", asked[4]])
    assert plain(seen[-1][-1].parts[-1].content) == ["Hear this.", asked[4].url]
    agent().run_sync("And?")
    assert any(plain(part.content) == ["Hear this.", asked[4].url] for message in seen[-1] for part in message.parts)
    session = store.session("short")
    seen.clear()
    agent().run_sync("Draw.")
    (drawn,) = [part for message in seen[1] for part in message.parts if part.part_kind == "tool-return"]
    assert drawn.tool_name == "draw"
    assert session.counter.count(drawn.model_response_str()) < WINDOW


def scripted(responses: list[Any]) -> tuple[Any, list[list[Any]]]:
    """A chat model of LangChain that replies by a script, and the messages of each prompt that it got."""
    from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel

    seen: list[list[Any]] = []

    class Model(FakeMessagesListChatModel):
        def bind_tools(self, tools: Any, **options: Any) -> Any:
            return self

        def _generate(self, messages: Any, *rest: Any, **options: Any) -> Any:
            seen.append(messages)
            return super()._generate(messages, *rest, **options)

    return Model(responses=responses), seen


def test_langgraph(store: kilburn.Store) -> None:
    pytest.importorskip("langchain", reason="LangChain is not installed: pip install '.[langgraph]' in the checkout")
    from langchain.agents import create_agent
    from langchain_core.messages import AIMessage
    from langgraph.checkpoint.memory import InMemorySaver

    from kilburn.adapters.langgraph import WindowMiddleware

    def read(path: str) -> str:
        """Read a file."""
        return f"{path}: {WORDS}"

    def calls(n: int) -> AIMessage:
        made = [{"name": "read", "args": {"path": f"{c}{n}"}, "id": f"{c}{n}"} for c in "ab"]
        return AIMessage(content="", tool_calls=made)

    search = AIMessage(content="", tool_calls=[{"name": "search_memory", "args": {"query": "a1"}, "id": "s1"}])
    model, seen = scripted(
        responses=[*(calls(n) for n in range(8)), search, AIMessage(content="Done."), AIMessage(content="Yes.")]
    )
    agent = create_agent(
        model, [read], system_prompt="Be brief.", middleware=[WindowMiddleware(store)], checkpointer=InMemorySaver()
    )
    thread: Any = {"configurable": {"thread_id": "ana"}, "recursion_limit": 100}
    state = agent.invoke({"messages": [{"role": "user", "content": "Read on."}]}, thread)
    assert state["messages"][-1].content == "Done."
    session = store.session("ana")
    assert sum(page.kind == "result" for page, _ in session.contents.pages()) == 17
    assert max(session.counter.count("".join(str(m.content) for m in each)) for each in seen) < WINDOW
    for each in seen:
        asked = [call["id"] for message in each for call in getattr(message, "tool_calls", ())]
        assert sorted(asked) == sorted(message.tool_call_id for message in each if message.type == "tool")
    agent.invoke({"messages": [{"role": "user", "content": "Sure?"}]}, thread)
    assert [message["content"] for message in session.contents.messages()][-3:] == ["Done.", "Sure?", "Yes."]
    assert len(json.dumps(session.contents.messages())) > 4 * WINDOW


async def test_llamaindex(store: kilburn.Store) -> None:
    pytest.importorskip("llama_index.core", reason="LlamaIndex is not installed: pip install '.[llamaindex]' in the checkout")
    from llama_index.core.base.llms.types import AudioBlock, ChatMessage, ImageBlock, TextBlock, ThinkingBlock, ToolCallBlock

    from kilburn.adapters.llamaindex import SessionMemory

    session = store.session("s")
    memory = SessionMemory.of(session)
    put = [ChatMessage(role="user", content="Read on.")]
    for n in range(10):
        call = ToolCallBlock(tool_call_id=f"c{n}", tool_name="read", tool_kwargs={"path": f"a{n}"})
        put.append(ChatMessage(role="assistant", blocks=[call]))
        put.append(ChatMessage(role="tool", content=f"a{n}: {WORDS}", additional_kwargs={"tool_call_id": f"c{n}"}))
    await memory.aput_messages(put)
    shown = await memory.aget()
    assert session.counter.count("".join(each.content or "" for each in shown)) < WINDOW
    assert shown[-1].content == put[-1].content
    asked = [block.tool_call_id for each in shown for block in each.blocks if isinstance(block, ToolCallBlock)]
    assert asked == [each.additional_kwargs["tool_call_id"] for each in shown if each.role == "tool"]
    assert SessionMemory.from_defaults(session).get_all() == put
    memory.set(put[:1])
    assert memory.get() == put[:1]
    memory.reset()
    assert memory.get() == []
    assert memory.get_all() == put
    with kilburn.open(":memory:", window=20_000, policy="lru", embedder=None) as wide:
        kept = SessionMemory.of(wide.session("s"))
        shown = [AudioBlock(audio=b"bGFsYQ==", format="wav"), ImageBlock(url="https://e.org/a.png"), TextBlock(text="See.")]
        told = [ThinkingBlock(content="A tune."), TextBlock(text="I hear it.")]
        kept.put_messages([ChatMessage(role="user", blocks=shown), ChatMessage(role="assistant", blocks=told)])
        assert [message.blocks for message in kept.get()] == [shown, told]


async def test_claude_agent_sdk(store: kilburn.Store) -> None:
    """What Claude's program sends to hooks, by the SDK's types; the program itself is not here."""
    pytest.importorskip(
        "claude_agent_sdk", reason="the Claude Agent SDK is not installed: pip install '.[claude-agent]' in the checkout"
    )
    from claude_agent_sdk import ClaudeAgentOptions

    from kilburn.adapters.claude_agent import keep

    session = store.session("s")
    options = ClaudeAgentOptions(**keep(session))
    assert options.hooks is not None

    async def hook(event: Any, **given: Any) -> Any:
        return await options.hooks[event][0].hooks[0](
            {"hook_event_name": event, **given}, given.get("tool_use_id"), {"signal": None}
        )

    assert await hook("UserPromptSubmit", prompt="Read a and b.") == {}
    await hook("PostToolUse", tool_name="Read", tool_input={"path": "a"}, tool_response={"text": "A"}, tool_use_id="t1")
    await hook("PostToolUseFailure", tool_name="Read", tool_input={"path": "b"}, error="no such file", tool_use_id="t2")
    await hook("Stop", stop_hook_active=False, last_assistant_message="b is missing.")
    said = json.dumps(session.contents.messages())
    assert [word in said for word in ("Read a and b.", "no such file", "b is missing.")] == [True] * 3
    assert [page.kind for page, _ in session.contents.pages()].count("result") == 2
    assert options.allowed_tools == ["mcp__kilburn__recall", "mcp__kilburn__search_memory"]


async def test_a_tool_that_raises_between_call_and_result(store: kilburn.Store) -> None:
    """Each framework goes on with its session, and the provider would take what it sends."""
    pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: pip install '.[pydantic-ai]' in the checkout")
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import FunctionModel

    from kilburn.adapters.pydantic_ai import WindowCapability

    session, asked = store.session("s"), list[Any]()

    def reply(messages: Any, info: Any) -> ModelResponse:
        asked.append([part for message in messages for part in message.parts])
        return ModelResponse([ToolCallPart("read", {"path": "a"}, "c1")] if len(asked) == 1 else [TextPart("As you like.")])

    def read(path: str) -> str:
        """Read a file."""
        raise RuntimeError("the disk is gone")

    agent = Agent(FunctionModel(reply), tools=[read], capabilities=[WindowCapability(session)])
    with pytest.raises(RuntimeError, match="disk"):
        await agent.run("Read a.")
    result = await agent.run("Do not read.")
    assert result.output == "As you like."
    calls = [part.tool_call_id for part in asked[-1] if part.part_kind == "tool-call"]
    answers = [part.tool_call_id for part in asked[-1] if part.part_kind in ("tool-return", "retry-prompt")]
    assert calls == answers
    check_laws(session)


def test_langgraph_goes_on_after_a_tool_that_raises(store: kilburn.Store) -> None:
    pytest.importorskip("langchain", reason="LangChain is not installed: pip install '.[langgraph]' in the checkout")
    from langchain.agents import create_agent
    from langchain_core.messages import AIMessage, ToolMessage
    from langgraph.checkpoint.memory import InMemorySaver

    from kilburn.adapters.langgraph import WindowMiddleware

    def read(path: str) -> str:
        """Read a file."""
        raise RuntimeError("the disk is gone")

    call = AIMessage(content="", tool_calls=[{"name": "read", "args": {"path": "a"}, "id": "c1"}])
    model, seen = scripted(responses=[call, AIMessage(content="As you like.")])
    agent = create_agent(model, [read], middleware=[WindowMiddleware(store)], checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "ana"}}
    with pytest.raises(RuntimeError, match="disk"):
        agent.invoke({"messages": [{"role": "user", "content": "Read a."}]}, thread)
    # The graph's own state has a call without a result; who goes on says what became of it.
    ended = ToolMessage(content="failed", tool_call_id="c1")
    agent.update_state(thread, {"messages": [ended]}, as_node="tools")
    state = agent.invoke({"messages": [{"role": "user", "content": "Do not read."}]}, thread)
    assert state["messages"][-1].content == "As you like."
    assert [message.type for message in seen[-1]] == ["human", "ai", "tool", "human"]
    check_laws(store.session("ana"))


async def test_claude_hooks_at_once(store: kilburn.Store) -> None:
    """Claude runs tools side by side, and may be stopped before a result."""
    pytest.importorskip(
        "claude_agent_sdk", reason="the Claude Agent SDK is not installed: pip install '.[claude-agent]' in the checkout"
    )
    from kilburn.adapters.claude_agent import keep

    session = store.session("s")
    hooks = keep(session)["hooks"]

    async def use(number: int) -> None:
        given = {"tool_name": "Read", "tool_input": {"n": number}, "tool_response": f"text {number}", "tool_use_id": f"t{number}"}
        await hooks["PostToolUse"][0].hooks[0](given, f"t{number}", {"signal": None})

    tasks = [asyncio.create_task(use(number)) for number in range(12)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await use(99)
    kinds = [page.kind for page, _ in session.contents.pages()]
    assert kinds.count("call") == kinds.count("result") >= 9
    check_laws(session)
