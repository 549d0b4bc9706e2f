"""The report of `kilburn_lab.evals.gateway`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kilburn.picture import picture
from kilburn_lab.evals.report import EvalReport, panel, row_of, table_of


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds from a request to the first byte of its streamed answer.

    Args:
        messages, tokens: of the history that the client resends, of which one message is new; a token is four characters.
        first: when the system sees the history for the first time.
        p50, p95: the middle one, and the 95th of 100, of the later requests.
        added_p50, added_p95: beyond the same figure without a proxy.
        ratio: p50, as a multiple of the pass-through proxy's.
        cpu: milliseconds that the system's processor worked for a request, its answer included.
    """

    messages: int
    tokens: int
    first: float
    p50: float
    p95: float
    added_p50: float
    added_p95: float
    ratio: float
    cpu: float | None = None


class GatewayRow(msgspec.Struct, frozen=True, kw_only=True):
    """One system.

    Args:
        rate: requests answered in a second, at 20 messages in the middle, the client and the stub on the same machine.
        cpu: milliseconds that the system's processor worked for one of them.
        failed: how many of them were not answered as they should be.
        memory: bytes that the system had after so many of them.
        wrong: streams, of those that ran at once, that lost or reordered an event, or did not end.
    """

    system: str
    latencies: list[Latency]
    rate: float
    cpu: float | None = None
    failed: int
    memory: list[tuple[int, float]]
    wrong: int

    def at(self, messages: int) -> Latency:
        """The latency at so many messages; KeyError if it was not measured."""
        return row_of(self.latencies, messages=messages)

    @property
    def growth(self) -> float | None:
        """Bytes that a thousand requests added in the second half of them; None if memory was read too seldom."""
        later = self.memory[len(self.memory) // 2 :]
        if len(later) < 2 or later[-1][0] == later[0][0]:
            return None
        return 1000 * (later[-1][1] - later[0][1]) / (later[-1][0] - later[0][0])


class GatewayReport(EvalReport, frozen=True, kw_only=True):
    """All systems."""

    rounds: int
    requests: int
    streams: int
    window: int
    cores: int
    rows: list[GatewayRow]

    def row(self, system: str) -> GatewayRow:
        """One system; KeyError if it was not measured."""
        return row_of(self.rows, system=system)

    def table(self) -> str:
        """Plain text: times to the first byte, then the rest."""
        floor = self.row("pass-through").rate
        times = (
            "system={system} | messages={one.messages:,} | tokens={one.tokens:,} | first time={one.first:.1f} ms | "
            "p50={one.p50:.2f} ms | p95={one.p95:.2f} ms | added p50={one.added_p50:+.2f} ms | p95={one.added_p95:+.2f} ms | "
            "x pass-through={one.ratio:.2f} | processor={one.cpu:.2f} ms"
        )
        loads = (
            "system={system} | requests/s={rate:,.0f} | x pass-through={ratio:.2f} | processor={cpu:.2f} ms | failed={failed} | "
            "memory at first={memory[0][1]:,.1f MiB} | at last={last[1]:,.1f MiB} | a thousand add={growth:,.1f MiB} | "
            "wrong streams={wrong}"
        )
        waits = [(row, row.at(one.messages)) for one in self.rows[0].latencies for row in self.rows]
        return "\n\n".join(
            [
                f"time to the first byte, {self.rounds} requests at 20 messages and a third of that at 1,000, the systems in "
                f"turn; window {self.window:,} tokens; {self.cores} cores for all",
                table_of(waits, times, ("system",), "-", system=lambda pair: pair[0].system, one=lambda pair: pair[1]),
                f"{self.requests:,} requests of 20 messages in the middle, 16 at once; then {self.streams} streams at once",
                table_of(
                    self.rows,
                    loads,
                    ("system",),
                    "-",
                    ratio=lambda row: row.rate / floor,
                    last=lambda row: row.memory[-1] if row.memory else None,
                ),
            ]
        )


def draw(path: Path, report: GatewayReport, *, force: bool = False) -> None:
    """Draw the time that each system adds to the first byte, and its memory; the file's suffix gives the format.

    Raises:
        SpecError, MissingExtra, OSError: see `kilburn.picture.picture`.
    """
    rows = [row for row in report.rows if row.memory]
    with picture(path, 9, 3.8, force=force) as figure:
        added, memory = figure.subplots(1, 2)
        small = {"fontsize": 8}
        sizes = [each.messages for each in rows[0].latencies]
        for index, size in enumerate(sizes):
            places = [at + 0.4 * index for at in range(len(rows))]
            own = [row.at(size) for row in rows]
            bars = added.barh(places, [max(each.added_p50, 0.01) for each in own], 0.36, label=f"{size:,} messages, p50")
            added.plot([max(each.added_p95, 0.01) for each in own], places, "|", color=bars[0].get_facecolor(), markersize=12)
        added.set_yticks([at + 0.2 * (len(sizes) - 1) for at in range(len(rows))], [row.system for row in rows])
        added.set_ylim(len(rows) - 0.3, -0.85)
        added.tick_params(axis="x", which="minor", labelbottom=False)
        panel(added, "To the first byte", small, xscale="log", xlabel="milliseconds added; the mark is p95")
        added.set_xlim(left=0.1)
        for row in rows:
            memory.plot([at for at, _ in row.memory], [size / 2**20 for _, size in row.memory], label=row.system)
        panel(memory, "Memory", small, xlabel="requests", ylabel="MiB", ylim=(0, None))
