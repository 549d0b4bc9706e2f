"""Workers that kill themselves, before or after a verb of their backend that writes.

python -m jobs.killing each FOLDER FIRST EVERY
python -m jobs.killing together PLACE RECEIPTS WORKERS SEED
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from jobs.work import EMBEDDER, check_done, fill
from kilburn.backend import Backend
from kilburn.backends import places
from kilburn.jobs.claims import kept, try_again
from kilburn.jobs.worker import Did, Ways, Worker
from kilburn.model import Request
from kilburn.testing import Scripted

VERBS = ("segment", "begin", "commit", "erase")
PART_VERBS = (("vectors", "add"), ("vectors", "drop"), ("settings", "put"), ("settings", "replace"))

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

    class Fused(kind):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for part, name in [(self, name) for name in VERBS] + [(getattr(self, part), name) for part, name in PART_VERBS]:
                setattr(part, name, self.burning(getattr(part, name)))

        def burning(self, verb: Any) -> Any:
            def do(*args: Any, **options: Any) -> Any:
                writes = not self.readonly and options.get("create", True)
                if writes:
                    fuse.step()
                result = verb(*args, **options)
                if writes:
                    fuse.step()
                return result

            return do

    return Fused


def opened(fuse: Fuse, place: str, **options: Any) -> Backend:
    """The backend of a place, with a fuse."""
    if places.is_url(place):
        from kilburn.backends.postgres.store import Postgres

        made: Backend = fused(Postgres, fuse)(place, **options)
        return made
    from kilburn.backends.sqlite import Sqlite

    options["synchronous"] = "NORMAL" if options.pop("durable") else "OFF"
    made = fused(Sqlite, fuse)(place, **options)
    return cast(Backend, made)


def work(place: str, receipts: Path, left: int) -> None:
    """Work until nothing is to be done; be killed at step `left`, counted from 1, or never for 0. Each receipt is a line of the
    file `receipts`, and each error."""
    fuse = Fuse(left)
    places.OPENERS |= dict.fromkeys(("", "postgresql"), lambda where, **options: opened(fuse, where, **options))
    lines = os.open(receipts, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def told(did: Did) -> None:
        if did.receipt is not None:
            os.write(lines, f"{' '.join(did.receipt.whole)}\n".encode())
        if did.error:
            os.write(lines, f"error: {did.kind}: {did.error}\n".encode())

    ways = Ways(learn=("consolidate('core/human')",), model=Keeping(), embedder=EMBEDDER, lease=LEASE)
    with Worker(place, ("default",), ways, report=told) as worker, closing(places.open_backend(place)) as backend:
        while worker.once() or (not left and kept(backend)):
            # What the killed ones had is free when their claims have ended; what has killed several rests until somebody
            # says otherwise.
            if not left:
                try_again(backend)
                time.sleep(LEASE / 4)


def started(place: str, receipts: Path, left: int) -> int:
    """Start a worker in a process of its own; returns its number."""
    child = os.fork()
    if child == 0:
        try:
            work(place, receipts, left)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def ended(child: int) -> bool:
    """Wait for a worker; returns whether it was killed.

    Raises:
        SystemExit: it failed.
    """
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, -signal.SIGKILL):
        sys.exit(1)
    return status != 0


def each_step(folder: Path, first: int, every: int) -> None:
    """Over a file, that is the same before each: kill a worker at every step, from one on; then others finish."""
    fresh, place, receipts = folder / "fresh.db", folder / "a.db", folder / "receipts"
    fill(str(fresh))
    for left in itertools.count(first, every):
        for old in (*folder.glob("a.db*"), receipts):
            old.unlink(missing_ok=True)
        shutil.copy(fresh, place)
        killed = ended(started(str(place), receipts, left))
        assert not ended(started(str(place), receipts, 0))
        check_done(str(place), receipts)
        if not killed:
            print(left)
            return


def together(place: str, receipts: Path, workers: int, seed: int) -> None:
    """Several workers at once, each killed at some step and followed by another, until one finds nothing to do."""
    chance, kills = random.Random(seed), 0
    fill(place)
    running = {started(place, receipts, chance.randint(1, 12)) for _ in range(workers)}
    while running:
        child, status = os.wait()
        running.remove(child)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, -signal.SIGKILL), code
        if code:
            kills += 1
            running.add(started(place, receipts, chance.randint(1, 12 + 2 * kills)))
    assert not ended(started(place, receipts, 0))
    check_done(place, receipts)
    print(kills)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["each", folder, first, every]:
            each_step(Path(folder), int(first), int(every))
        case ["together", place, receipts, workers, seed]:
            together(place, Path(receipts), int(workers), int(seed))
