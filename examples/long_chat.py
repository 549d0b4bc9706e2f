"""Page a long chat through a small window, and have an early turn back exactly.

Three hundred turns go into a window of 1,000 tokens. The prompt stays below it after every one of
them; the first turns are far below by the end, and one recall brings any of them back.

It prints:

    300 turns, ... tokens in all
    largest prompt: ... tokens of 1000
    p7 again: Turn 7: the password of locker 7 is 7919.
    found by search: p100
"""

from __future__ import annotations

import kilburn

WINDOW = 1_000


def main() -> None:
    largest = total = 0
    with kilburn.open(":memory:", window=WINDOW, policy="lru", tokenizer="chars/4") as store:
        chat = store.session("lockers")
        for turn in range(1, 301):
            text = f"Turn {turn}: the password of locker {turn} is {turn * 1000 + 919}."
            chat.append({"role": "user" if turn % 2 else "assistant", "content": text})
            largest = max(largest, chat.render(format="chat").tokens)
            total += len(text) // 4
        print(f"300 turns, {total} tokens in all")
        print(f"largest prompt: {largest} tokens of {WINDOW}")
        assert largest <= WINDOW
        print("p7 again:", chat.recall("p7"))
        print("found by search:", store.search("password of locker 100", tokens=100)[0].address)


if __name__ == "__main__":
    main()
