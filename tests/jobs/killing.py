"""A worker that kills itself: `python killing.py PLACE RECEIPTS LEFT [COUNT]`.

It works for a place until nothing is to be done, and is killed before or after the verb of its backend that writes as the
LEFT-th, counted from 1; 0 for never. Each receipt is a line of the file RECEIPTS.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from kilburn.backend import Backend
from kilburn.backends import places
from kilburn.jobs.worker import Did, Ways, Worker
from kilburn.kernel.claims import kept
from kilburn.model import Request
from kilburn.testing import Scripted

VERBS = ("segment", "begin", "commit", "erase", "keep_vectors", "drop_vectors", "keep_setting", "replace_setting")

LEASE = 0.2
"""Seconds of a claim: what a killed worker had is soon another's, and what a slow one has, too."""


def kept_lines(request: Request) -> str:
    """What a model writes that keeps all that users said, a line each: the note that it was shown, and what is new."""
    text = str(request.messages[-1]["content"])
    nonce = text.split(" ", 1)[0]
    parts = [part.partition(":\n") for part in text.split(f"{nonce} ")[1:]]
    note = next(said for who, _, said in parts if who == "the note now").replace("(empty)", "").strip()
    return "\n".join(filter(None, [note, *(said.strip() for who, _, said in parts if who.startswith("user"))]))


class Keeping(Scripted):
    """A model that keeps all that users said, without end."""

    def stream(self, request: Request) -> Iterator[Any]:
        """What was said."""
        self.enqueue(kept_lines)
        return super().stream(request)


class Fuse:
    """Kills this program at a step."""

    def __init__(self, left: int) -> None:
        self.left = left

    def step(self) -> None:
        """One step nearer."""
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def fused(kind: type[Any], fuse: Fuse) -> type[Any]:
    """A kind of backend whose verbs that write burn a fuse, before and after."""

    def burning(name: str) -> Any:
        def verb(self: Any, *given: Any, **more: Any) -> Any:
            writes = not self.readonly and more.get("create", True)
            if writes:
                fuse.step()
            made = getattr(kind, name)(self, *given, **more)
            if writes:
                fuse.step()
            return made

        return verb

    return type("Fused", (kind,), {name: burning(name) for name in VERBS})


def opened(fuse: Fuse, place: str, **options: Any) -> Backend:
    """The backend of a place, with a fuse."""
    if places.is_url(place):
        from kilburn.backends.postgres.store import Postgres

        made: Backend = fused(Postgres, fuse)(place, **options)
        return made
    from kilburn.backends.sqlite import Sqlite

    options["synchronous"] = "NORMAL" if options.pop("durable") else "OFF"
    return fused(Sqlite, fuse)(place, **options)


def main(place: str, receipts: str, left: int) -> None:
    """Work, or be killed."""
    fuse = Fuse(left)
    places.OPENERS |= dict.fromkeys(("", "postgresql"), lambda where, **options: opened(fuse, where, **options))
    lines = os.open(receipts, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def told(did: Did) -> None:
        if did.receipt is not None:
            os.write(lines, f"{' '.join(did.receipt.whole)}\n".encode())
        if did.error:
            os.write(lines, f"error: {did.kind}: {did.error}\n".encode())

    ways = Ways(learn=("consolidate('core/human')",), model=Keeping(), embedder="hashing(64)", lease=LEASE)
    with Worker(place, ("default",), ways, told=told) as worker:
        while worker.once():
            pass
        with places.open_backend(place, readonly=True) as store:  # type: ignore[attr-defined]
            print("done" if not kept(store) else "left")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
