"""Everything at once: a question about a log of any length, asked in branches, with the answer kept as a fact.

The log is never in a window. A captain's session forks a branch, and a recursive model works in it: its code cuts the log
and hands each piece to a run below, in a branch of its own; that one asks a model about pages of the piece. The windows are
folded by a policy, each sub-call can be read by its address, and what comes of it is a fact that cites the answer. The models
are programs here, so that it runs anywhere.

    python examples/long_log.py            # a log of 100,000 tokens
    python examples/long_log.py 10000000   # of 10 million, in half a minute

It prints:

    the log: 100,342 tokens
    answered: {'Porto': 165, 'Rio': 520, 'Turku': 289}
    right: True
    24 sub-calls in 17 branches; largest prompt of the root ... tokens, the captain's window ... tokens
    one of the sub-calls: Count the storms by harbour.
    remembered: Rio had the most storms.
    made from: captain p2
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import kilburn
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Reply, Request
from kilburn.move import Add
from kilburn.recursion.rlm import RecursiveModel

HARBOURS = {"Porto": 1, "Rio": 4, "Turku": 2}

ROOT = """
lines = context.splitlines(keepends=True)
size = len(lines) // 8 + 1
parts = ["".join(lines[at:at + size]) for at in range(0, len(lines), size)]
found = [rlm_query("Count the storms by harbour.", part) for part in parts]
answer["content"] = {name: sum(one[name] for one in found) for name in ["Porto", "Rio", "Turku"]}
answer["ready"] = True
"""

BELOW = """
import json
lines = context.splitlines()
prompts = ["Count the storms by harbour.\\n" + "\\n".join(lines[at:at + 400]) for at in range(0, len(lines), 400)]
found = [json.loads(reply) for reply in llm_query_batched(prompts)]
answer["content"] = {name: sum(one.get(name, 0) for one in found) for name in ["Porto", "Rio", "Turku"]}
answer["ready"] = True
"""


class Programs:
    """Writes the code that a model would write: at the top for pieces of the log, below for prompts."""

    name, form, context, tokenizer = "programs", "chat", None, "chars/4"

    def stream(self, request: Request) -> Iterator[Reply]:
        code = ROOT if "rlm_query" in str(request.messages) else BELOW
        call = Part(kind=Kind.CALL, text=json.dumps({"code": code}), call="c", name="repl")
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(call,)))


class Counting:
    """Answers a prompt as a careful model would."""

    name, form, context, tokenizer = "counting", "chat", None, "chars/4"

    def stream(self, request: Request) -> Iterator[Reply]:
        lines = str(request.messages[-1]["content"]).splitlines()[1:]
        storms = Counter(line.split()[2] for line in lines if line.endswith("storm"))
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=json.dumps(storms)),)))


def write_log(path: Path, tokens: int) -> Counter[str]:
    """Write a log of about so many tokens; returns its storms by harbour."""
    dice, storms = random.Random(0), Counter[str]()
    with path.open("w") as file:
        for day in range(tokens * 4 // 49):
            harbour, weather = dice.choice(list(HARBOURS)), dice.choice(["calm", "rain", "fog"])
            if dice.random() < HARBOURS[harbour] / 20:
                weather = "storm"
                storms[harbour] += 1
            file.write(f"day {day:07} {harbour} {dice.randrange(90):02} ships in, {dice.randrange(90):02} ships out, {weather}\n")
    return storms


def main(tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        storms = write_log(log, tokens)
        with kilburn.open(f"{folder}/agent.db", window=4000, policy="hybrid", tokenizer="chars/4") as store:
            print(f"the log: {log.stat().st_size // 4:,} tokens")
            captain = store.session("captain")
            captain.append({"role": "user", "content": "Which harbour has the most storms?"})

            branch = captain.fork("Ask the log.", inherit="task")
            result = RecursiveModel(Programs(), branch, sub=Counting(), depth=2).ask(
                "Count the storms.", log, kind=dict[str, int]
            )
            most = max(result.content, key=result.content.get)
            address = branch.branches.exit(f"{most} has the most storms.")

            print(f"{result.outcome}: {result.content}")
            print("right:", result.content == storms)
            names = [info.name for info in store.sessions() if "/" in info.name]
            print(
                f"{result.calls} sub-calls in {len(names)} branches; largest prompt of the root {result.resident:,} tokens,"
                f" the captain's window {captain.prompts.use} tokens"
            )
            deepest = max(names, key=len).removeprefix("captain/")
            print("one of the sub-calls:", captain.recall(f"{deepest}/p2").splitlines()[0])

            store.memory().collection.apply(
                Add(text=f"{most} had the most storms.", cites=((captain.number, captain.window.last),))
            )
            print("remembered:", store.search("which harbour had the most storms", where="facts", abstain=True)[0].text)
            print("made from: captain", address)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
