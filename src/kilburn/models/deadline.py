"""A hard end for a streamed reply: with a read time-out alone, a slow server could go on for ever.

At the deadline the reply's socket is shut down, which wakes its reader. The reader can ask here whether the time had
passed, and decides what to raise.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Any


class Deadline:
    """Shuts a socket after so many seconds, unless the block ends before.

    Args:
        seconds: from the start of the block, or None for no end.
        source: a response of httpx2 whose socket is to be shut.
    """

    def __init__(self, seconds: float | None, source: Any) -> None:
        self.passed = False
        self._source = source
        self._timer = None if seconds is None else threading.Timer(seconds, self._shut)
        if self._timer is not None:
            self._timer.daemon = True

    def __enter__(self) -> Deadline:
        if self._timer is not None:
            self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _shut(self) -> None:
        self.passed = True
        stream = self._source.extensions.get("network_stream")
        wire = None if stream is None else stream.get_extra_info("socket")
        if wire is not None:
            # The other side has closed the socket already.
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
