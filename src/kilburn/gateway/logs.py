"""One line of JSON for each exchange: who, what, how long, how many tokens. Never a key or a query, and of the headers only the
client's own id of the request.

What was said is left out unless it is asked for.
"""

from __future__ import annotations

import threading
from typing import IO, Any

import msgspec

from kilburn.gateway.exchange import Exchange
from kilburn.gateway.users import logged
from kilburn.terminal import say, spelled

__all__ = ["Log"]

MAX_PATH_CHARS = 200
"""Characters of a path, which a client may choose."""

FIELDS = (
    "form",
    "model",
    "session",
    "stream",
    "rounds",
    "sent",
    "new",
    "finish",
    "problem",
    "unread",
    "warnings",
    "trace",
)
"""What is in a line if it is known."""


def log_line(exchange: Exchange) -> dict[str, Any]:
    """Return the fields of an exchange's log line. Seconds are rounded to tenths of milliseconds."""
    line: dict[str, Any] = {
        "time": round(exchange.began, 3),
        "id": exchange.id,
        "client": exchange.client,
        "method": exchange.method,
        "path": exchange.path[:MAX_PATH_CHARS],
        "status": exchange.status,
        "seconds": round(exchange.seconds, 4),
        "bytes": exchange.size,
    }
    if exchange.key is not None:
        line |= {"key": exchange.key.name, "tenant": exchange.key.tenant, "user": logged(exchange.key.user)}
    if exchange.client_name:
        line["named"] = exchange.client_name
    line |= {name: getattr(exchange, name) for name in FIELDS if getattr(exchange, name)}
    if exchange.warnings and exchange.logged_body is None:
        # Behind a colon stand words of the conversation.
        line["warnings"] = [warning.partition(":")[0] for warning in exchange.warnings]
    line |= {name: round(value, 4) for name in ("first", "waited", "added") if (value := getattr(exchange, name)) is not None}
    if exchange.usage is not None:
        line["usage"] = {name: getattr(exchange.usage, name) for name in ("prompt", "cached", "written", "reply")}
    if exchange.stats_after is not None:
        line |= {"tokens_in_window": exchange.stats_after.tokens_in_window, "hit_rate": exchange.stats_after.hit_rate}
    if exchange.logged_body is not None:
        line["asked"] = exchange.logged_body.decode("utf-8", "replace")
    return line


class Log:
    """Writes log lines. A line that cannot be written is counted in `lost`, reported once on standard error, and fails no
    request.

    Args:
        out: where lines go, in text.
    """

    def __init__(self, out: IO[str]) -> None:
        self.lost = 0
        self._out = out
        self._lock = threading.Lock()

    def observe(self, exchange: Exchange) -> None:
        """Write one line."""
        line = spelled(msgspec.json.encode(log_line(exchange)).decode("utf-8"))
        try:
            with self._lock:
                self._out.write(line + "\n")
                self._out.flush()
        except (OSError, ValueError) as error:
            if not self.lost:
                say(f"the log cannot be written: {error}")
            self.lost += 1
