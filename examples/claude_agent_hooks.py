"""The Claude Agent SDK with hooks that keep the session in a store: what Claude read is found in a later session.

Claude's own program runs, as the SDK brings it; the provider is scripted and on this machine. Needs the extra `claude-agent`.

It prints:

    Claude: The pump is fine.
    Claude: Its serial number is K-4711.
    kept: user text: Read pump.log.
    kept: assistant call: {"file_path":".../pump.log"}
    kept: tool result: ..."content":"serial number K-4711, pressure normal..."...
    kept: assistant text: The pump is fine.
    kept: user text: What is the pump's serial number?
    kept: assistant text: Its serial number is K-4711.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from claude_agent_sdk import AssistantMessage, ClaudeAgentOptions, TextBlock, query

import kilburn
from kilburn.adapters.claude_agent import keep
from kilburn.testing.upstream import Upstream, calling, serving


async def ask(prompt: str, session: kilburn.Session, url: str, folder: Path) -> None:
    here = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CONFIG_DIR": str(folder / "claude"),
        "NO_PROXY": "127.0.0.1",
    }
    options = ClaudeAgentOptions(**keep(session), model="claude-sonnet-4-5", cwd=folder, env=here, setting_sources=[])
    async for message in query(prompt=prompt, options=options):
        for block in message.content if isinstance(message, AssistantMessage) else ():
            if isinstance(block, TextBlock):
                print(f"Claude: {block.text}")


async def main() -> None:
    with tempfile.TemporaryDirectory() as name, kilburn.open(":memory:", window=8000, embedder=None) as store:
        folder, session = Path(name), store.session("pumps")
        log = folder / "pump.log"
        log.write_text("serial number K-4711, pressure normal\n")
        upstream = Upstream(
            calling(("Read", {"file_path": str(log)})),
            "The pump is fine.",
            calling(("mcp__kilburn__search_memory", {"query": "pump serial number"})),
            lambda sent: "Its serial number is K-4711." if "K-4711" in str(sent.body["messages"][-1]) else "I do not know.",
        )
        with serving(upstream) as url:
            await ask("Read pump.log.", session, url, folder)
            await ask("What is the pump's serial number?", session, url, folder)
        for page, _ in session.contents.pages():
            print(f"kept: {page.role} {page.kind}: {session.contents.text(page.id)}")


if __name__ == "__main__":
    asyncio.run(main())
