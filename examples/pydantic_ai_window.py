"""pydantic-ai with a window in a session: an agent reads far more than its window, in one run.

The model is a function. Needs the extra `pydantic-ai`.

It prints:

    All pumps are fine.
    the run's own messages: 26
    largest request: ... tokens of 1500
"""

from __future__ import annotations

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

import kilburn
from kilburn.adapters.pydantic_ai import WindowCapability


def read(path: str) -> str:
    """Read a log."""
    return f"{path}: " + "pressure normal, " * 40


def main() -> None:
    sizes: list[int] = []

    def reply(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        sizes.append(sum(len(str(getattr(part, "content", ""))) for each in messages for part in each.parts) // 4)
        if len(sizes) > 12:
            return ModelResponse([TextPart("All pumps are fine.")])
        return ModelResponse([ToolCallPart("read", {"path": f"pump-{len(sizes)}.log"}, f"call{len(sizes)}")])

    with kilburn.open(":memory:", window=1500, policy="lru") as store:
        agent = Agent(FunctionModel(reply), tools=[read], capabilities=[WindowCapability(store.session("ana-1"))])
        result = agent.run_sync("Are the pumps fine?")
    print(result.output)
    print(f"the run's own messages: {len(ModelMessagesTypeAdapter.validate_json(result.all_messages_json()))}")
    print(f"largest request: {max(sizes)} tokens of 1500")


if __name__ == "__main__":
    main()
