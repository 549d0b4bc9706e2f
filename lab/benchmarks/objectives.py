"""The largest prompt and the exact answers of sessions with 2 to 16 questions, with an internal state and without.

The agent is scripted and knows nothing but its prompt, so the figures are the policy's alone. Compared are
MEM1, nothing leaving at all, the oldest leaving at twice MEM1's peak, and MEM1 with states that say nothing.
"""

from __future__ import annotations

from figures import Row, emit, parser
from questions import Episode, make, play, scripted

WINDOW = 1_000_000
COURSES = (
    ("mem1", "mem1", "full", False),
    ("nothing leaves", "fifo", "none", False),
    ("fifo, twice mem1's peak", "fifo", "none", True),
    ("mem1, states say nothing", "mem1", "blank", False),
)


def measure(counts: list[int], seeds: int) -> list[Row]:
    """A row for each course and number of questions; the ratio is that of its own peak at the smallest number."""
    rows: list[Row] = []
    first: dict[str, int] = {}
    for count in counts:
        tasks = [make(count, seed) for seed in range(seeds)]
        narrow = WINDOW
        for name, policy, states, bounded in COURSES:
            window = 2 * narrow if bounded else WINDOW
            played: list[Episode] = [play(task, policy, window, scripted(states)) for task in tasks]
            peak = max(episode.peak for episode in played)
            narrow = peak if name == "mem1" else narrow
            first.setdefault(name, peak)
            rows.append(
                {
                    "course": name, "objectives": count, "exact": sum(episode.points for episode in played) / seeds,
                    "peak": peak, "without question": max(episode.peak - episode.question for episode in played),
                    "x": peak / first[name], "shipped": sum(episode.shipped for episode in played) // seeds,
                    "turns": sum(episode.turns for episode in played) / seeds,
                }
            )  # fmt: skip
    return sorted(rows, key=lambda row: [name for name, *_ in COURSES].index(str(row["course"])))


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--objectives", type=int, action="append", help="2, 4, 8 and 16 where none is given")
    options.add_argument("--seeds", type=int, default=5)
    asked = options.parse_args()
    note = f"{asked.seeds} seeded tasks each; exact: answers that match, on average; tokens of four characters."
    emit("objectives", measure(sorted(asked.objectives or [2, 4, 8, 16]), asked.seeds), asked.json, note)


if __name__ == "__main__":
    main()
