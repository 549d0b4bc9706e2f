"""The OpenAI Agents SDK with a session that Kilburn keeps: an agent reads far more than its window, in one run.

The model is the SDK's own scripted one. Needs the extra `agents`.

It prints:

    Both pumps are fine.
    calls of the model: 13
    results kept: 12
    largest input: ... tokens of 1500
"""

from __future__ import annotations

import asyncio
import json

from agents.testing import ScriptedModel
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

import kilburn
from agents import Agent, RunConfig, Runner, function_tool
from kilburn.adapters.agents import AgentsSession, tools


@function_tool
def read(path: str) -> str:
    """Read a log."""
    return f"{path}: " + "pressure normal, " * 40


def calling(number: int) -> ResponseFunctionToolCall:
    arguments = json.dumps({"path": f"pump-{number}.log"})
    return ResponseFunctionToolCall(type="function_call", name="read", call_id=f"call{number}", arguments=arguments)


def saying(text: str) -> ResponseOutputMessage:
    content = ResponseOutputText(type="output_text", text=text, annotations=[], logprobs=[])
    return ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[content])


async def main() -> None:
    model = ScriptedModel([*({"output": [calling(n)]} for n in range(12)), {"output": [saying("Both pumps are fine.")]}])
    with kilburn.open(":memory:", window=1500, policy="lru") as store:
        opened = store.session("ana-1")
        session = AgentsSession(opened)
        agent = Agent(name="inspector", instructions="You inspect pumps.", tools=[read, *tools(session)], model=model)
        config = RunConfig(call_model_input_filter=session.window, tracing_disabled=True)
        result = await Runner.run(agent, "Are the pumps fine?", session=session, run_config=config, max_turns=20)
        print(result.final_output)
        print(f"calls of the model: {len(model.calls)}")
        print(f"results kept: {sum(page.kind == 'result' for page, _ in opened.contents.pages())}")
        print(f"largest input: {max(len(json.dumps(call.input)) // 4 for call in model.calls)} tokens of 1500")


if __name__ == "__main__":
    asyncio.run(main())
