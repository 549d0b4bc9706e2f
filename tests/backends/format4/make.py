"""Makes `store.db` and `export.jsonl`, with all that a store has, and `wanted.json`, which says what is in them.

The files beside this were made by the Kilburn of commit 0b19d16, the last that wrote format 4, and are never made again.

    python make.py && gzip -9 store.db export.jsonl wanted.json
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import kilburn
from kilburn.move import Retire

WORDS = [f"word{number}" for number in range(300)]


def text_of(p: kilburn.Session, page: int) -> str | None:
    return None if p.window.at(page) == "dropped" else p.text(page)


def snapshot(path: str) -> dict[str, Any]:
    """Everything that a person can read of a store."""
    made: dict[str, Any] = {}
    with kilburn.open(path, window=700, policy="hybrid", tokenizer="chars/4", readonly=True) as store:
        for info in store.sessions():
            p = store.session(info.name)
            made[info.name] = {
                "pages": [
                    [
                        page.address,
                        str(state.at),
                        state.pinned,
                        state.importance,
                        None if state.at == "dropped" else p.text(page.id),
                    ]
                    for page, state in p.pages()
                ],
                "messages": p.messages(),
                "prompt": list(p.render()),
                "use": p.use,
            }
        facts = store.backend.pages(store.memory("ana").number)
        made["@memory/ana"] = {"pages": [[page.address, str(state.at)] for page, state in facts]}
    return made


def make(path: str) -> None:
    rng = random.Random(4)

    def text(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count)) + ".\n"

    with kilburn.open(path, window=700, policy="hybrid", tokenizer="chars/4") as store:
        p = store.session("work")
        p.append({"role": "system", "content": "You keep the log."}, {"role": "user", "content": "Read all files, please."})
        for step in range(14):
            function = {"name": "read", "arguments": json.dumps({"path": f"f{step}.py"})}
            call = {"id": f"c{step}", "type": "function", "function": function}
            p.append({"role": "assistant", "content": None, "tool_calls": [call]})
            p.append({"role": "tool", "tool_call_id": f"c{step}", "content": "\n".join(text(12) for _ in range(5))})
            if step % 4 == 3:
                asked = f"What is in f{step}? " + text(6)
                p.append({"role": "assistant", "content": text(20)}, {"role": "user", "content": asked})
        p.pin("p3")
        p.remember("p7", 0.7)
        p.recall("p5")
        p.search("word7")
        branch = p.fork("look at f3 alone")
        branch.append({"role": "assistant", "content": text(30)})
        for _ in range(6):
            branch.append({"role": "user", "content": text(40)}, {"role": "assistant", "content": text(40)})
        branch.exit("f3 is done")
        p.forget("p9")
        p.apply(Retire((11,)))
        q = store.session("talk", user="ana")
        for step in range(20):
            q.append({"role": ["user", "assistant"][step % 2], "content": text(25)})
        facts = store.memory("ana")
        facts.add("Ana lives in Porto")
        facts.add("to forget")
        facts.forget("p2")
        p.render()
        q.render()


if __name__ == "__main__":
    make("store.db")
    subprocess.run([sys.executable, "-m", "kilburn", "export", "--db", "store.db", "--out", "export.jsonl"], check=True)
    with open("wanted.json", "w", encoding="utf-8") as file:
        json.dump(snapshot("store.db"), file)
