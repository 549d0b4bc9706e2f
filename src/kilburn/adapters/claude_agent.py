"""The Claude Agent SDK: hooks that keep a session in a process, and the memory tools as its own MCP server.

    options = ClaudeAgentOptions(**keep(store.session("ana-1")))

Claude's own program makes its prompt, and the hooks see what is said: the user's prompts, every tool call with its result, and
the last words of each turn. So nothing is lost when it compacts, and the model can search for it.
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
    """The options for a conversation that is kept in a session: its hooks, and the tools `recall` and `search_memory`.

    Args:
        recollections: long-term memory to put beside the user's prompts.
    """
    history = KeptHistory(session)
    server = create_sdk_mcp_server(SERVER, tools=[_tool(history, spec) for spec in OFFERED])
    allowed = [f"mcp__{SERVER}__{spec.name}" for spec in OFFERED]
    return {"hooks": hooks(history, recollections), "mcp_servers": {SERVER: server}, "allowed_tools": allowed}


def hooks(history: KeptHistory, recollections: Recollections | None = None) -> dict[Any, list[HookMatcher]]:
    """The hooks alone."""

    async def prompted(given: Any, call: str | None, context: Any) -> Any:
        await asyncio.to_thread(history.append, [{"role": "user", "content": given["prompt"]}])
        found = await asyncio.to_thread(recollections.about, given["prompt"]) if recollections is not None else None
        if found is None:
            return {}
        text = "".join(part.text for part in found.parts if part.kind is Kind.TEXT)
        return {"hookSpecificOutput": {"hookEventName": "UserPromptSubmit", "additionalContext": text}}

    async def used(given: Any, call: str | None, context: Any) -> Any:
        if given["tool_name"].startswith(f"mcp__{SERVER}__"):
            return {}  # recalled text is there already
        said = given.get("error") or given.get("tool_response") or ""
        text = said if isinstance(said, str) else msgspec.json.encode(said, enc_hook=str).decode()
        number = given["tool_use_id"]
        block = {"type": "tool_use", "id": number, "name": given["tool_name"], "input": given["tool_input"]}
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": number, "content": text}
        if "error" in given:
            result["is_error"] = True
        turn = [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        await asyncio.to_thread(history.append, turn)
        return {}

    async def stopped(given: Any, call: str | None, context: Any) -> Any:
        if text := given.get("last_assistant_message"):
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
