"""A gateway in a process of its own, that says how many steps its Python took: calls and returns, in all threads.

`python counted.py DB UPSTREAM WINDOW`: prints the gateway's address; each line on standard input is answered with the count,
the line "settle" after all memory that is not used went back to the machine. The end of standard input ends it.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import threading
from typing import Any

from kilburn.gateway.app import Settings, build
from kilburn.testing.upstream import serving

STEPS = itertools.count()


def step(*_: Any) -> None:
    next(STEPS)


def main(db: str, upstream: str, window: str) -> None:
    settings = Settings(db=db, upstream=upstream, window=int(window), tokenizer="chars/4", embedder=None)
    libc = ctypes.CDLL(None)
    threading.setprofile(step)
    with serving(build(settings)) as url:
        print(url, flush=True)
        for line in sys.stdin:
            if line == "settle\n":
                gc.collect()
                if hasattr(libc, "malloc_trim"):
                    libc.malloc_trim(0)
            print(next(STEPS), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
