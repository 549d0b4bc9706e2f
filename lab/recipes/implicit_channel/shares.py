"""What was counted on the implicit channel: shares with their intervals, and the tables of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kilburn_lab.evals.intervals import wilson
from kilburn_lab.evals.report import EvalReport, grid, row_of


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Right answers of a toy in one way.

    Args:
        toy: what it was trained with. way: see `implicit_channel.measurement.answers`.
        keep: mementos that stay; 0 for all.
        distance: mementos that came after the one that is asked for; None for all of them together.
        low, high: the 95% interval of the share (Wilson).
    """

    toy: str
    way: str
    keep: int
    distance: int | None
    right: int
    asked: int
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, toy: str, way: str, keep: int, distance: int | None, right: Sequence[bool]) -> Share:
        """From whether each answer is right."""
        low, high = wilson(sum(right), len(right))
        share = sum(right) / len(right)
        return cls(
            toy=toy, way=way, keep=keep, distance=distance, right=sum(right), asked=len(right), share=share, low=low, high=high
        )


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """How often a linear probe of one layer's keys and values at a memento tells a block's value.

    Args:
        memento: counted from the block's own, which is 0; -1 stands before the block.
        layer: from 1. The keys and values of layer 1 are made of the memento's text alone.
    """

    toy: str
    memento: int
    layer: int
    right: int
    asked: int
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, toy: str, memento: int, layer: int, right: Sequence[bool]) -> Probe:
        """From whether each value was told."""
        low, high = wilson(sum(right), len(right))
        share = sum(right) / len(right)
        return cls(toy=toy, memento=memento, layer=layer, right=sum(right), asked=len(right), share=share, low=low, high=high)


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """The largest difference of any answer's logit to the same logit under the mask."""

    toy: str
    keep: int
    evict: float
    restart: float


class Channel(EvalReport, frozen=True, kw_only=True):
    """All figures of one measurement.

    Args:
        samples: sequences, each with one question. parameters, layers: of each toy.
        steps: of each stage. seconds: of wall time, training and measuring.
    """

    seed: int
    samples: int
    parameters: int
    layers: int
    steps: list[int]
    seconds: float
    shares: list[Share]
    probes: list[Probe]
    gaps: list[Gap]

    def share(self, toy: str, way: str, keep: int = 0, distance: int | None = None) -> Share:
        """One figure; KeyError where it was not measured."""
        return row_of(self.shares, toy=toy, way=way, keep=keep, distance=distance)

    def table(self) -> str:
        """Plain text for people."""
        toys = list(dict.fromkeys(one.toy for one in self.shares))
        far = sorted({one.distance for one in self.shares if one.distance is not None})
        return "\n\n".join(
            [
                f"{self.parameters:,} parameters, {self.layers} layers, seed {self.seed}; {' + '.join(map(str, self.steps))} "
                f"steps, {self.samples} questions a figure, {self.seconds:.0f} s\n"
                "answers in percent: the best of ten, with 95% intervals; chance is 10",
                "Answers: everything seen; blocks masked; blocks' KV evicted; a new start from the mementos' text",
                grid(["toy", "full", "mask", "evict", "restart"], [self._ways(toy) for toy in toys], ("toy",)),
                "After evicting, by how many mementos came after the one that is asked for",
                grid(
                    ["toy", "mementos kept", *map(str, far)],
                    [self._far(toy, keep, far) for toy in toys for keep in (0, 1)],
                    ("toy",),
                ),
                "What a linear probe tells of a block's value from the KV of mementos, by layer; the memento before the block,\n"
                "its own, and those after it",
                grid(*self._probed(toys), ("toy",)),
                "Largest difference of a logit to the mask's",
                grid(
                    ["toy", "mementos kept", "evict", "restart"],
                    [[one.toy, str(one.keep or "all"), f"{one.evict:.1e}", f"{one.restart:.1e}"] for one in self.gaps],
                    ("toy",),
                ),
            ]
        )

    def _ways(self, toy: str) -> list[str]:
        return [toy, *(_percent(self.share(toy, way)) for way in ("full", "mask", "evict", "restart"))]

    def _far(self, toy: str, keep: int, far: Iterable[int]) -> list[str]:
        return [toy, str(keep or "all"), *(_percent(self.share(toy, "evict", keep, distance)) for distance in far)]

    def _probed(self, toys: Sequence[str]) -> tuple[list[str], list[list[str]]]:
        layers = sorted({one.layer for one in self.probes})
        cells = {(one.toy, one.memento, one.layer): one for one in self.probes}
        mementos = sorted({one.memento for one in self.probes})
        body = [
            [toy, f"{memento:+d}" if memento else "own", *(_percent(cells[toy, memento, layer]) for layer in layers)]
            for toy in toys
            for memento in mementos
        ]
        return ["toy", "memento", *(f"layer {layer}" for layer in layers)], body


def _percent(one: Share | Probe) -> str:
    return f"{100 * one.share:.1f} ({100 * one.low:.1f}-{100 * one.high:.1f})"
