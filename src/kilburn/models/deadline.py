"""A hard end for a reply that streams: a read time-out alone lets a server that trickles go on for ever.

At the deadline the reply's socket is shut, which wakes whoever reads from it. The reader asks `passed`, and raises.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Any

__all__ = ["Deadline"]


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
            # A socket that the other side has closed already is as good as shut.
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
