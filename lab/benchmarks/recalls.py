"""Whether a recall should consult the policy: an agent that recalls what it misses, with and without a move for it.

Recorded runs are fed to a process, event by event. Where an action needs a name that the window does not show, the
agent recalls the output that had it, with the tool, whose result becomes a page. Then nothing more happens, or the
recalled page is loaded too: if it was recalled before in the last 20 messages, or every time. If a recall told a
policy more than its result shows the model, the names of later actions would stand in the window more often.
"""

from __future__ import annotations

import json

import kilburn
from figures import Row, emit, parser
from kilburn.errors import KernelError
from kilburn.kernel.session import Session
from kilburn.memory import memory_tools
from kilburn.message import Kind, Message, Part, Role
from kilburn.move import Load
from kilburn.page import Place, parse_address
from kilburn_lab.evals.references import names
from kilburn_lab.evals.sample import Sample, sample_of

SOON = 20
"""Messages within which a second recall of a page is "soon"."""


class Agent:
    """Recalls what it needs and does not see."""

    def __init__(self, session: Session, loads: str) -> None:
        self.session, self.loads = session, loads
        self.last: dict[int, int] = {}
        self.recalls = self.again = self.loaded = 0

    def say(self, role: str, text: str) -> str:
        return self.session.append({"role": role, "content": text})

    def seen(self) -> set[str]:
        return {name for message in self.session.render() for name in names(json.dumps(message, ensure_ascii=False))}

    def recall(self, address: str) -> None:
        arguments, call = json.dumps({"address": address}), f"recall-{self.recalls}"
        part = Part(kind=Kind.CALL, text=arguments, call=call, name="recall")
        self.session.append(Message(role=Role.ASSISTANT, parts=(part,)))
        self.session.append(memory_tools.call(self.session, "recall", arguments).message(call))
        page, _ = parse_address(address)
        soon = self.session.window.turn - self.last.get(page, -SOON - 1) <= SOON
        self.last[page] = self.session.window.turn
        self.recalls, self.again = self.recalls + 1, self.again + soon
        if (self.loads == "every time" or (self.loads == "soon again" and soon)) and self.session.window.at(page) != Place.IN:
            try:
                self.session.edits.apply(Load((page,)))
                self.loaded += 1
            except KernelError:
                pass  # it cannot stand there any more


def measure(sample: Sample, policy: str, window: int, loads: str) -> Row:
    """How many of the names that actions needed stood in the window before any recall for them."""
    needed = shown = 0
    agents = []
    for run in sample.runs:
        with kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4") as store:
            agent = Agent(store.session("run"), loads)
            outputs: list[str] = []
            for index, step in enumerate(run.steps):
                agent.say("assistant", step.thought)
                for reference in sample.wanted.get(run.id, ()):
                    if reference.step == index:
                        needed += 1
                        there = reference.name in agent.seen()
                        shown += there
                        if not there and loads != "no recalls":
                            agent.recall(outputs[reference.origins[-1]])
                agent.say("assistant", step.action)
                outputs.append(agent.say("user", step.observation))
            agents.append(agent)
    return {
        "policy": policy, "window": window, "loaded": loads, "needed": needed, "shown": shown / max(1, needed),
        "recalls": sum(one.recalls for one in agents), "soon again": sum(one.again for one in agents),
        "loads": sum(one.loaded for one in agents),
    }  # fmt: skip


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--data", help="recorded runs, in any form that `kilburn replay` reads; made-up ones where none are given"
    )
    options.add_argument("--runs", type=int, default=60, help="runs that have such names")
    options.add_argument("--window", type=int, action="append", help="tokens; 2000 and 4000 where none is")
    options.add_argument("--policy", action="append", help="hybrid and lru where none is")
    asked = options.parse_args()
    sample = sample_of(asked.data, asked.runs, referring=True)
    rows: list[Row] = []
    for policy in asked.policy or ["hybrid", "lru"]:
        for window in asked.window or [2000, 4000]:
            some = [measure(sample, policy, window, loads) for loads in ("never", "no recalls", "soon again", "every time")]
            rows += [row | {"x": float(row["shown"]) / max(1e-9, float(some[0]["shown"]))} for row in some]
    emit("recalls", rows, asked.json, f"{len(sample.runs)} runs; one token is four characters")


if __name__ == "__main__":
    main()
