"""Let a model extract facts from a talk; here a script plays the model, and once answers badly.

The model sees the exchange and what is known already. Its answers are held to a JSON schema, a fact counts only if its words
were said, and an answer that cannot be used is asked for again, then recorded as failed and tried at the next call.

It prints:

    first call: stored nothing, failed p1-p2
    second call: stored f1
    third call: stored f2, retired f1
    what is known: Ana lives in Braga
    what was known: Ana lives in Porto
"""

from __future__ import annotations

import json

import kilburn
from kilburn.memory.learning import Learned
from kilburn.testing import Scripted


def fact(text: str, town: str) -> str:
    parts = {"subject": "Ana", "relation": "lives in", "object": town, "correction": False}
    return json.dumps({"facts": [{"message": 1, "text": text, **parts}]})


def told(learned: Learned) -> str:
    done = [f"stored {' '.join(learned.stored) or 'nothing'}"]
    done += [f"retired {' '.join(learned.retired)}"] if learned.retired else []
    done += [f"failed {' '.join(learned.failed)}"] if learned.failed else []
    return ", ".join(done)


def main() -> None:
    policy = "facts(summary=False)"
    with kilburn.open(":memory:", window=1_000, tokenizer="chars/4") as store:
        talk = store.session("monday", user="ana")
        talk.append({"role": "user", "content": "Ana lives in Porto."}, {"role": "assistant", "content": "Noted."})
        memory = store.memory("ana")
        print("first call:", told(memory.learn(talk, policy, Scripted(['{"facts": [{"te', ""]))))
        print("second call:", told(memory.learn(talk, policy, Scripted([fact("Ana lives in Porto", "Porto")]))))

        talk.append({"role": "user", "content": "Ana lives in Braga now."}, {"role": "assistant", "content": "Noted."})
        print("third call:", told(memory.learn(talk, policy, Scripted([fact("Ana lives in Braga", "Braga")]))))

        facts = memory.collection
        now = [page.id for page, _ in facts.pages()]
        print("what is known:", *map(facts.contents.text, now))
        print("what was known:", *[facts.contents.text(page.id) for page, _ in facts.pages(history=True) if page.id not in now])


if __name__ == "__main__":
    main()
