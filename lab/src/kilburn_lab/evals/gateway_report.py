"""The report of `kilburn_lab.evals.gateway`."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kilburn_lab.evals.report import EvalReport, row_of, table_of


class Goal(NamedTuple):
    """What a request may take: milliseconds that the gateway adds to the first byte, and of the processor."""

    added: float
    cpu: float


GOALS = {20: Goal(2.0, 2.0), 1000: Goal(3.0, 5.0)}
"""By the messages of a history."""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds from a request to the first byte of its answer; of one that is not streamed, to its last.

    Args:
        streamed: whether the answer is.
        messages, tokens: of the history that the client resends, of which one message is new; a token is four characters.
        first: when the system sees the history for the first time.
        p50, p95: the middle one, and the 95th of 100, of the later requests.
        added_p50, added_p95: beyond the same figure without a proxy.
        ratio: p50, as a multiple of the pass-through proxy's.
        cpu: milliseconds that the system's processor worked for a request until its answer was over, the middle one.
        behind: milliseconds that it worked afterwards for each message that was new to it, until it was quiet: at vectors, for
            example. A request brings two, with its answer.
        cpu_ratio: `cpu`, as a multiple of the pass-through proxy's.
    """

    streamed: bool = True
    messages: int
    tokens: int
    first: float
    p50: float
    p95: float
    added_p50: float
    added_p95: float
    ratio: float
    cpu: float | None = None
    behind: float | None = None
    cpu_ratio: float | None = None


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """The first request of a new conversation, in a gateway whose store has so many sessions.

    Args:
        first: milliseconds to the first byte, the middle one. cpu: of the processor, the middle one.
        ratio: `cpu`, as a multiple of that in the store with the fewest.
    """

    sessions: int
    first: float
    cpu: float
    ratio: float


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

    def at(self, messages: int, *, streamed: bool = True) -> Latency:
        """The latency at so many messages; KeyError if it was not measured."""
        return row_of(self.latencies, messages=messages, streamed=streamed)

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
    search: str = ""
    rows: list[GatewayRow]
    beginnings: tuple[Beginning, ...] = ()

    def table(self) -> str:
        """Plain text: times to the first byte, then the rest."""
        floor = self.row("pass-through").rate
        times = (
            "system={system} | messages={one.messages:,} | first time={one.first:.1f} ms | "
            "p50={one.p50:.2f} ms | p95={one.p95:.2f} ms | added={one.added_p50:+.2f} ms | goal={goal.added:.0f} ms | "
            "x={one.ratio:.2f} | processor={one.cpu:.2f} ms | goal={goal.cpu:.0f} ms | x={one.cpu_ratio:.2f} | "
            "behind={one.behind:.2f} ms"
        )
        begun = "sessions={sessions:,} | first byte={first:.2f} ms | processor={cpu:.2f} ms | x={ratio:.2f}"
        loads = (
            "system={system} | requests/s={rate:,.0f} | x pass-through={ratio:.2f} | processor={cpu:.2f} ms | failed={failed} | "
            "memory at first={memory[0][1]:,.1f MiB} | at last={last[1]:,.1f MiB} | a thousand add={growth:,.1f MiB} | "
            "wrong streams={wrong}"
        )
        own = self.rows[-1].system if len(self.rows) < 3 else self.rows[2].system

        def waits(*, streamed: bool) -> str:
            found = [one for one in self.rows[0].latencies if one.streamed == streamed]
            pairs = [(row, row.at(one.messages, streamed=streamed)) for one in found for row in self.rows]
            return table_of(
                pairs,
                times,
                ("system",),
                "-",
                system=lambda pair: pair[0].system,
                one=lambda pair: pair[1],
                goal=lambda pair: GOALS.get(pair[1].messages) if pair[0].system == own else None,
            )

        tokens = " and ".join(f"{one.tokens:,}" for one in self.rows[0].latencies if one.streamed)
        return "\n\n".join(
            [
                f"time to the first byte of a streamed answer, {self.rounds} requests at 20 messages and a third of that at "
                f"1,000 ({tokens} tokens), the systems in turn; x: of pass-through; behind: what is done for a new message when "
                f"its request is over; window {self.window:,} tokens; {self.cores} cores for all; searches go by "
                f"{self.search or 'nothing'}",
                waits(streamed=True),
                "the same to the last byte of an answer that is not streamed",
                waits(streamed=False),
                "a new conversation, by the sessions in the store; x: of the fewest",
                table_of(self.beginnings, begun, (), "-"),
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
