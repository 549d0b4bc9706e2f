"""What a vLLM's prefix cache saves through `Vllm`, what an edit costs, and what a second tenant can tell.

It needs a running vLLM, so the tests do not run it: docs/howto/vllm.md says how to start one. Times are to
the first piece of a reply, in seconds, medians of the rounds; each round has a text of its own, and the
conditions of a round come in a new order. `told` is the share of pairs in which the prompt that another
tenant had sent before came back faster than one that nobody had sent: 0.5 is what guessing gets.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import time
from collections.abc import Sequence
from typing import Any

from figures import Row, emit, median, parser
from kilburn.model import Reply, Request
from kilburn_kv.vllm import Vllm

WORDS = [
    "river",
    "city",
    "long",
    "cold",
    "loud",
    "warm",
    "blue",
    "stone",
    "paper",
    "night",
    "bridge",
    "winter",
    "garden",
    "letter",
    "window",
    "train",
]


class Server:
    """Where the vLLM is, and tenants of it that nobody was before."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.secret = secrets.token_hex(16)

    def tenant(self, label: str | None) -> Vllm:
        return Vllm(self.model, self.url, tenant=label, secret=None if label is None else self.secret)


def conversation(dice: random.Random, messages: int, words: int) -> list[dict[str, Any]]:
    """Messages of so many words each, unlike all others from the first word on."""
    return [
        {"role": ("user", "assistant")[at % 2], "content": " ".join(dice.choices(WORDS, k=words))}
        for at in range(messages - (messages + 1) % 2)
    ]


def ask(model: Vllm, messages: Sequence[dict[str, Any]]) -> tuple[float, int, int]:
    """Seconds to the first piece, tokens of the prompt, tokens of it that were cached."""
    start = time.perf_counter()
    pieces = model.stream(Request(messages=messages, max_tokens=4, temperature=0.0))
    next(pieces)
    seconds = time.perf_counter() - start
    *_, reply = pieces
    assert isinstance(reply, Reply)
    assert reply.usage is not None
    return seconds, reply.usage.prompt, reply.usage.cached


def edited(messages: Sequence[dict[str, Any]], at: int) -> list[dict[str, Any]]:
    changed = [dict(message) for message in messages]
    changed[at]["content"] = "Indeed, " + changed[at]["content"]
    return changed


def edits(server: Server, dice: random.Random, rounds: int, messages: int, words: int) -> list[Row]:
    """A conversation sent anew, as it was, longer by a turn, and edited in three places."""
    kinds = ["cold", "the same again", "one turn more", "edit of the last message", "edit in the middle", "edit of the first"]
    found: dict[str, list[tuple[float, int, int, int]]] = {kind: [] for kind in kinds}
    with server.tenant("edits") as model:
        ask(model, conversation(dice, 1, 4))
        for _ in range(rounds):
            talk = conversation(dice, messages, words)
            found["cold"].append((*ask(model, talk), 0))
            more = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
            variants = {
                kinds[1]: talk,
                kinds[2]: talk + more,
                kinds[3]: edited(talk, len(talk) - 1),
                kinds[4]: edited(talk, len(talk) // 2),
                kinds[5]: edited(talk, 0),
            }
            for kind in dice.sample(kinds[1:], len(variants)):
                ask(model, talk)
                foreseen = model.preview(Request(messages=variants[kind])).reusable
                found[kind].append((*ask(model, variants[kind]), -1 if foreseen is None else foreseen))
    base = median([seconds for seconds, *_ in found["cold"]])
    return [
        {
            "prompt": kind,
            "seconds": median([run[0] for run in runs]),
            "x": median([run[0] for run in runs]) / base,
            "tokens": median([run[1] for run in runs]),
            "cached": median([run[2] for run in runs]),
            "foreseen": median([run[3] for run in runs]),
            "foreseen right": sum(run[2] == run[3] for run in runs) / len(runs),
        }
        for kind, runs in found.items()
    ]


def spying(server: Server, dice: random.Random, rounds: int, messages: int, words: int) -> list[Row]:
    """What a second sender sees of a prompt that the first sent, against one that nobody sent."""
    rows: list[Row] = []
    for name, labels in {"no salt": (None, None), "a salt per tenant": ("one", "two")}.items():
        with server.tenant(labels[0]) as one, server.tenant(labels[1]) as two:
            ask(two, conversation(dice, 1, 4))
            taken: list[tuple[float, int, int]] = []
            free: list[tuple[float, int, int]] = []
            before = two.metrics()
            for _ in range(rounds):
                theirs, nobodys = conversation(dice, messages, words), conversation(dice, messages, words)
                ask(one, theirs)
                for runs, talk in dice.sample([(taken, theirs), (free, nobodys)], 2):
                    runs.append(ask(two, talk))
            hits = two.metrics().since(before).hits
        faster = [(a[0] < b[0]) + 0.5 * (a[0] == b[0]) for a in taken for b in free]
        rows.append(
            {
                "cache": name,
                "sent before": median([run[0] for run in taken]),
                "x": median([run[0] for run in taken]) / median([run[0] for run in free]),
                "never sent": median([run[0] for run in free]),
                "cached": max(run[2] for run in taken),
                "hits": -1 if hits is None else hits,
                "told": sum(faster) / len(faster),
            }
        )
    return rows


def measure(arguments: argparse.Namespace) -> None:
    server = Server(arguments.url, arguments.model)
    dice = random.Random(secrets.token_hex(8))
    size = (arguments.messages, arguments.words)
    with server.tenant(None) as model:
        about = model.metrics()
    note = f"{arguments.rounds} rounds, blocks of {about.block} tokens, {about.blocks} blocks"
    emit("reuse: prompts", edits(server, dice, arguments.rounds, *size), arguments.json, note)
    emit("reuse: tenants", spying(server, dice, arguments.rounds, *size), arguments.json, note)


if __name__ == "__main__":
    wanted = parser(__doc__)
    wanted.add_argument("--url", default=os.environ.get("KILBURN_VLLM", "http://127.0.0.1:8000"), help="of the vLLM")
    wanted.add_argument("--model", default="smollm2", help="its name there")
    wanted.add_argument("--rounds", type=int, default=10)
    wanted.add_argument("--messages", type=int, default=9, help="in a conversation")
    wanted.add_argument("--words", type=int, default=110, help="in a message")
    measure(wanted.parse_args())
