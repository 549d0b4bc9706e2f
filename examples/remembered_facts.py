"""Learn facts from what a user says, see what was true before, and forget.

No model is needed: patterns find the facts. Each fact cites the message that it was made from, a newer one supersedes an
older one without deleting it, and forgetting a message forgets what was made from it.

It prints:

    learned: The user lives in Porto.
    learned: The user lives in Braga.
    what was true in between: The user lives in Porto.
    made from monday p1: I live in Porto.
    forgotten: p1, @memory/ana f1
    what is left: The user lives in Braga.
"""

from __future__ import annotations

import time

import kilburn
from kilburn import Session


def hear(talk: Session, said: str) -> None:
    talk.append({"role": "user", "content": said}, {"role": "assistant", "content": "Noted."})


def main() -> None:
    with kilburn.open(":memory:", window=1_000, tokenizer="chars/4") as store:
        memory = store.memory("ana")
        monday, friday = (store.session(name, user="ana") for name in ("monday", "friday"))
        hear(monday, "I live in Porto.")
        print("learned:", *[memory.recall(address) for address in memory.learn(monday).stored])
        between = time.time()
        hear(friday, "I now live in Braga.")
        print("learned:", *[memory.recall(address) for address in memory.learn(friday).stored])

        ((before, _),) = memory.pages(at=between)
        print("what was true in between:", memory.collection.contents.text(before.id))
        ((_, cited),) = before.cites
        print(f"made from monday p{cited}: {monday.recall(f'p{cited}')}")

        print("forgotten:", ", ".join(monday.forget(f"p{cited}")))
        print("what is left:", *[memory.collection.contents.text(page.id) for page, _ in memory.pages(history=True)])


if __name__ == "__main__":
    main()
