"""Kill a writing process at a random moment, reopen its file, and look whether anything is missing.

A child process appends messages and says after each one that it is safe. The parent kills it with a
signal that cannot be caught, opens the same file and compares every acknowledged message with what
the child must have written.

It prints:

    the child was killed after it acknowledged ... messages
    missing: 0, different: 0
    the session goes on: p...
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path

import kilburn
from kilburn.errors import UnknownAddress


def text_of(number: int) -> str:
    return f"Message {number}. " + f"{number * 7919} " * 50


def write_for_ever(path: str) -> None:
    """The child: append, then acknowledge on standard output."""
    with kilburn.open(path, window=2_000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("diary")
        for number in range(1, 1_000_000):
            session.append({"role": "user", "content": text_of(number)})
            print(number, flush=True)


def kill_a_writer(path: str) -> int:
    """Start a child, kill it while it writes, and return the last number it acknowledged."""
    last = 0
    with subprocess.Popen([sys.executable, __file__, path], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        until = random.randint(50, 150)
        for line in child.stdout:
            last = int(line) if line.endswith("\n") else last
            if last == until:
                child.kill()
    return last


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "diary.db")
        acknowledged = kill_a_writer(path)
        print(f"the child was killed after it acknowledged {acknowledged} messages")
        with kilburn.open(path, window=2_000, policy="fifo", tokenizer="chars/4") as store:
            session = store.session("diary")
            missing = different = 0
            for number in range(1, acknowledged + 1):
                try:
                    different += session.recall(f"p{number}") != text_of(number)
                except UnknownAddress:
                    missing += 1
            print(f"missing: {missing}, different: {different}")
            assert missing == different == 0
            print("the session goes on:", session.append({"role": "user", "content": "Still here."}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_for_ever(sys.argv[1])
    else:
        main()
