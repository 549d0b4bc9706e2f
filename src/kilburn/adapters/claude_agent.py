"""The Claude Agent SDK: hooks that keep a conversation in a session, and the memory tools as an MCP server in the program.

    options = ClaudeAgentOptions(**keep(store.session("ana-1")))

Claude's own program makes its prompt. The hooks receive the user's prompts, every tool call with its result, and the last reply
of each turn. So nothing is lost when it compacts, and the model can search for it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from kilburn.adapters.history import KeptHistory, Recollections
from kilburn.errors import MissingExtra
from kilburn.kernel.session import Session
from kilburn.memory.memory_tools import OFFERED
from kilburn.message import Kind
from kilburn.model import ToolSpec

try:
    from claude_agent_sdk import HookMatcher, SdkMcpTool, create_sdk_mcp_server
except ImportError as error:
    raise MissingExtra("claude-agent-sdk", "claude-agent") from error

__all__ = ["hooks", "keep"]

SERVER = "kilburn"
"""The name of the MCP server with the tools."""


def keep(session: Session, *, recollections: Recollections | None = None) -> dict[str, Any]:
    """Return the options for a conversation that is kept in a session: its hooks, and the tools `recall` and `search_memory`.

    Args:
        recollections: long-term memory to put beside the user's prompts.
    """
    history = KeptHistory(session)
    server = create_sdk_mcp_server(SERVER, tools=[_tool(history, spec) for spec in OFFERED])
    allowed = [f"mcp__{SERVER}__{spec.name}" for spec in OFFERED]
    return {"hooks": hooks(history, recollections), "mcp_servers": {SERVER: server}, "allowed_tools": allowed}


def hooks(history: KeptHistory, recollections: Recollections | None = None) -> dict[Any, list[HookMatcher]]:
    """Return the hooks alone."""

    async def prompted(event: Any, call: str | None, context: Any) -> Any:
        await asyncio.to_thread(history.append, [{"role": "user", "content": event["prompt"]}])
        memories = await asyncio.to_thread(recollections.about, event["prompt"]) if recollections is not None else None
        if memories is None:
            return {}
        text = "".join(part.text for part in memories.parts if part.kind is Kind.TEXT)
        return {"hookSpecificOutput": {"hookEventName": "UserPromptSubmit", "additionalContext": text}}

    async def used(event: Any, call: str | None, context: Any) -> Any:
        if event["tool_name"].startswith(f"mcp__{SERVER}__"):
            return {}  # recalled text is stored already
        output = event.get("error") or event.get("tool_response") or ""
        text = output if isinstance(output, str) else msgspec.json.encode(output, enc_hook=str).decode()
        number = event["tool_use_id"]
        block = {"type": "tool_use", "id": number, "name": event["tool_name"], "input": event["tool_input"]}
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": number, "content": text}
        if "error" in event:
            result["is_error"] = True
        turn = [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        await asyncio.to_thread(history.append, turn)
        return {}

    async def stopped(event: Any, call: str | None, context: Any) -> Any:
        if text := event.get("last_assistant_message"):
            await asyncio.to_thread(history.append, [{"role": "assistant", "content": text}])
        return {}

    used_by = [HookMatcher(hooks=[used])]
    return {
        "UserPromptSubmit": [HookMatcher(hooks=[prompted])],
        "PostToolUse": used_by,
        "PostToolUseFailure": used_by,
        "Stop": [HookMatcher(hooks=[stopped])],
    }


def _tool(history: KeptHistory, spec: ToolSpec) -> SdkMcpTool[Any]:
    async def answer(arguments: dict[str, Any]) -> dict[str, Any]:
        text = await asyncio.to_thread(history.answer, spec.name, msgspec.json.encode(arguments).decode())
        return {"content": [{"type": "text", "text": text}]}

    return SdkMcpTool(name=spec.name, description=spec.description, input_schema=spec.parameters, handler=answer)
