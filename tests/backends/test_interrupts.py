"""An interrupt may come between any two lines: a store's object goes on as before."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.testing.stores import batch_of

FILES = ("sqlite.py", "schema.py", "contextlib.py")


class Interrupt:
    """Raises KeyboardInterrupt at the nth line that runs in these files."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def test_a_write_goes_on_after_an_interrupt_at_any_line(tmp_path: Path) -> None:
    with Sqlite(tmp_path / "k.db", synchronous="OFF") as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        before = sys.gettrace()
        head, at, interrupted = 0, 0, 0
        while interrupted == at:
            at += 1
            sys.settrace(Interrupt(at))
            try:
                backend.commit(info.number, batch_of(head, {head + 1: "text"}))
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(before)
            head = backend.segments()[0].head
            backend.commit(info.number, batch_of(head, {head + 1: "text"}))
            head += 1
        assert interrupted > 20
        assert len(list(backend.pages(info.number))) == head
        assert inspect_store(backend) == []
