"""KV bytes and speed of a long generation in blocks: all kept, evicted behind mementos, and restarted from their text.

The real SmolLM2-135M, which was never trained to write blocks: their structure is forced on it, so the
peaks follow from the lengths that are asked for, and the words mean nothing. What is measured is that
the bytes go when they should and what it costs. The ways take turns, a step each, so that a noisy
moment hits all of them; `tokens_s` is over all, `last_s` over the last quarter, re-prefills included.
Bytes are those of whole blocks of the pool.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from pathlib import Path

import torch

from figures import Row, emit, parser
from kilburn.models.weights import pull
from kilburn_kv.engine import Engine
from kilburn_kv.generation import Sampling
from kilburn_kv.memento import OFF, Markers, MementoRules
from kilburn_kv.reasoning import Point, ReasoningRun, stream
from kilburn_kv.weights import Weights, load
from kilburn_lab.picture import check_picture, picture, plain_axes

PROMPT = "Question: a farmer has 17 sheep and buys 5 more every week. When has he 100? Let us think step by step.\n"
WAYS = ("full", "memento", "restart")
COLOURS = {"full": "#718096", "memento": "#2b6cb0", "restart": "#dd6b20"}


class Way:
    """One sequence with an engine of its own, and the seconds that each of its tokens was ready after."""

    def __init__(self, name: str, weights: Weights, tokens: int, memento: MementoRules) -> None:
        self.name = name
        prompt = weights.tokens(PROMPT)
        engine = Engine(weights, len(prompt) + tokens, share=False)
        self._steps: Generator[tuple[int, ...], None, ReasoningRun] = stream(
            engine, engine.open(prompt), tokens, memento, Sampling(temperature=0.8, top_k=50, seed=1), stops=()
        )
        self.clock: list[tuple[int, float]] = [(0, 0.0)]
        self.end: ReasoningRun | None = None

    def step(self) -> bool:
        began = time.perf_counter()
        try:
            made = len(next(self._steps))
        except StopIteration as end:
            self.end = end.value
            return False
        done, seconds = self.clock[-1]
        self.clock.append((done + made, seconds + time.perf_counter() - began))
        return True

    def speed(self, share: float = 0.0) -> float:
        """Tokens a second behind this share of all tokens."""
        last = self.clock[-1]
        first = next(point for point in self.clock if point[0] >= share * last[0])
        return (last[0] - first[0]) / (last[1] - first[1])


def rules(name: str, weights: Weights, block: int, memento: int) -> MementoRules:
    """One token a marker, as a model has that was trained with them: SmolLM2's own for code and issues stand in."""
    markers = Markers.of(
        weights.tokens,
        block_start="<issue_start>",
        block_end="<issue_closed>",
        summary_start="<jupyter_start>",
        summary_end="<empty_output>",
    )
    return MementoRules(
        markers,
        keep_last_n_blocks=OFF if name == "full" else 0,
        restart_mode=name == "restart",
        max_block_tokens=block,
        max_summary_tokens=memento,
        force_start=True,
    )


def draw(path: Path, ends: dict[str, ReasoningRun], title: str) -> None:
    """The sawtooth, to the format that the file's name says."""
    with picture(path, 8, 3.6, letters="none") as figure:
        axes = figure.add_subplot()
        for name, end in ends.items():
            points = corners(end.trace)
            axes.plot(
                [point.made for point in points],
                [point.slots * end.unit / 1e6 for point in points],
                color=COLOURS[name],
                lw=1.4,
                ls=(0, (3, 2)) if name == "restart" else "-",
                label=f"{name}: peak {end.peak / 1e6:.1f} MB",
            )
        axes.set_xlabel("tokens generated", fontsize=9)
        axes.set_ylabel("keys and values, MB", fontsize=9)
        axes.set_title(title, loc="left", fontsize=10)
        axes.tick_params(labelsize=8)
        plain_axes(axes, grid=0.2)
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.legend(frameon=False, fontsize=8.5, loc="upper left")


def corners(trace: Sequence[Point]) -> list[Point]:
    """The points at which the bytes change, and those just before."""
    kept = [
        point
        for before, point, after in zip(trace, trace[1:], trace[2:], strict=False)
        if not before.slots == point.slots == after.slots
    ]
    return [trace[0], *kept, trace[-1]]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--tokens", type=int, default=2000, help="tokens to generate, forced ones included")
    options.add_argument("--block", type=int, default=256, help="tokens of a block")
    options.add_argument("--memento", type=int, default=24, help="tokens of a memento")
    options.add_argument("--threads", type=int, default=1, help="of torch")
    options.add_argument("--plot", type=Path, help="draw the sawtooth to this file")
    given = options.parse_args()
    if given.plot is not None:
        check_picture(given.plot)
    torch.set_num_threads(given.threads)
    weights = load(pull("smollm2"))
    ways = [Way(name, weights, given.tokens, rules(name, weights, given.block, given.memento)) for name in WAYS]
    going = ways
    while going:
        going = [way for way in going if way.step()]
        ways = [*ways[1:], ways[0]]
        going = [way for way in ways if way in going]
    ends = {name: way.end for name in WAYS for way in ways if way.name == name and way.end is not None}
    clocks = {way.name: way for way in ways}
    rows: list[Row] = [
        {
            "way": name,
            "blocks": len(end.blocks),
            "peak MB": end.peak / 1e6,
            "end MB": end.trace[-1].slots * end.unit / 1e6,
            "x": end.peak / ends["full"].peak,
            "peak tokens": end.peak_cached,
            "tokens/s": clocks[name].speed(),
            "tokens/s, last quarter": clocks[name].speed(0.75),
        }
        for name, end in ends.items()
    ]
    title = f"SmolLM2-135M, {given.tokens} tokens in forced blocks of {given.block} with mementos of {given.memento}"
    emit("memento", rows, given.json, f"{title}; {given.threads} thread(s), float32")
    if given.plot is not None:
        draw(given.plot, ends, title)


if __name__ == "__main__":
    main()
