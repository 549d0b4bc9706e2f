"""The implicit channel: what reaches an answer through a memento's keys and values, though its text says nothing of it.

Three toys (see `implicit_channel.curriculum`), and one that was never trained, answer questions on blocks
that are there, masked, evicted, or left out of a new start from the mementos' text. A linear probe then looks
for the value in the mementos' keys and values.

    report = measure(Setting(seed=0))
    print(report.table())
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from implicit_channel.curriculum import ALL, FULL, VALUES, Batch, Shape, Stage, Task, build, save, train
from implicit_channel.shares import Channel, Gap, Probe, Share
from implicit_channel.slices import Slices, additive
from kilburn.errors import MissingExtra, SpecError

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "torch", "torch") from error


STAGES = (("full", FULL), ("memento", ALL), ("handing on", 1))
"""The toys, by what they saw in training. The last continues from the second; the two others begin from random weights."""

WAYS = ("full", "mask", "evict", "restart")
_ROWS = 500
_PENALTIES = (1.0, 10.0, 100.0, 1000.0)
"""Of the ridge regression; one is chosen on a tenth of the rows that it is fitted on."""

Heard = Callable[[str], None]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """How it is measured.

    Args:
        seed: for weights and data; what is measured comes from another stream than what is trained on.
        steps: of the optimiser in each of the three stages.
        rows: sequences a step. rate: the highest learning rate.
        samples: sequences that each figure is counted on, a question each.
        task, shape: see `implicit_channel.curriculum`.

    Raises:
        SpecError: a number that means nothing.
    """

    seed: int = 0
    steps: tuple[int, int, int] = (200, 200, 500)
    rows: int = 32
    rate: float = 3e-3
    samples: int = 1000
    task: Task = Task()
    shape: Shape = Shape()

    def __post_init__(self) -> None:
        if self.seed < 0 or self.samples < 2 * VALUES or self.task.blocks < 3:
            raise SpecError(
                f"seed {self.seed}, {self.samples} samples of {self.task.blocks} blocks",
                advice=f"give a seed of 0, {2 * VALUES} samples, 3 blocks, or more",
            )
        for (_, keep), steps in zip(STAGES, self.steps, strict=True):
            Stage(keep=keep, steps=steps, rows=self.rows, rate=self.rate)


def measure(setting: Setting | None = None, *, folder: Path | None = None, heard: Heard | None = None) -> Channel:
    """Train the toys and measure each.

    Args:
        folder: where the toys are written, a folder each; nowhere where None.
        heard: called with a line now and then, for people.

    Raises:
        OSError: a toy cannot be written.
    """
    chosen = setting or Setting()
    say = heard or (lambda line: None)
    began = time.perf_counter()
    model = build(chosen.task, chosen.shape, chosen.seed)
    found = [_measured("untrained", model, chosen, say)]
    for (name, keep), steps in zip(STAGES, chosen.steps, strict=True):
        if keep == ALL:
            model = build(chosen.task, chosen.shape, chosen.seed)
        chance = torch.Generator().manual_seed(2 * chosen.seed)
        stage = Stage(keep=keep, steps=steps, rows=chosen.rows, rate=chosen.rate)
        train(model, chosen.task, stage, chance, _hearing(name, steps, say))
        found.append(_measured(name, model, chosen, say))
        if folder is not None:
            save(model, chosen.task, folder / name.replace(" ", "-"))
    return Channel(
        seed=chosen.seed,
        samples=chosen.samples,
        parameters=sum(part.numel() for part in model.parameters()),
        layers=chosen.shape.layers,
        steps=list(chosen.steps),
        seconds=time.perf_counter() - began,
        shares=[share for each, _, _ in found for share in each],
        probes=[one for _, each, _ in found for one in each],
        gaps=[one for _, _, each in found for one in each],
    )


def _hearing(name: str, steps: int, say: Heard) -> Callable[[int, float, float], None]:
    began = time.perf_counter()

    def hear(step: int, loss: float, right: float) -> None:
        if step % 50 < 4 or step == steps:
            say(f"{name}: step {step} of {steps}, loss {loss:.3f}, right {right:.0%}, {time.perf_counter() - began:.0f} s")

    return hear


def _measured(name: str, model: Any, setting: Setting, say: Heard) -> tuple[list[Share], list[Probe], list[Gap]]:
    chance = torch.Generator().manual_seed(2 * setting.seed + 1)
    batch = setting.task.draw(setting.samples, chance)
    counted = shares(name, model, setting.task, batch)
    said = ", ".join(f"{one.way} {one.share:.1%}" for one in counted if one.distance is None and one.keep == ALL)
    say(f"{name}: {said}")
    looked = probe(name, model, setting.task, batch, setting.seed)
    return counted, looked, [gap(name, model, setting.task, batch, keep) for keep in (ALL, 1)]


def shares(name: str, model: Any, task: Task, batch: Batch) -> list[Share]:
    """How many answers are right in each way, in all and by the mementos that came after the one that is asked for.

    The most probable of the ten values is the answer, whatever else would be more probable: so chance is one in ten.
    """
    found = []
    right_tokens = batch.ids[:, -1] - task.answer.start
    distances = task.blocks - 1 - batch.asked[:, 0]
    for keep in (ALL, 1):
        for way in WAYS if keep == ALL else ("evict",):
            told = answers(model, task, batch, way, keep)[:, task.answer]
            right = told.argmax(-1) == right_tokens
            found.append(Share.of(name, way, keep, None, right.tolist()))
            if way == "evict":
                for distance in range(task.blocks):
                    found.append(Share.of(name, way, keep, distance, right[distances == distance].tolist()))
    return found


def gap(name: str, model: Any, task: Task, batch: Batch, keep: int = ALL) -> Gap:
    """How far the logits of the answers after an eviction, and after a restart, are from those under the mask."""
    few = Batch(batch.ids[:_ROWS], batch.asked[:_ROWS])
    masked = answers(model, task, few, "mask", keep)
    evicted, restarted = (answers(model, task, few, way, keep) for way in ("evict", "restart"))
    return Gap(toy=name, keep=keep, evict=float((evicted - masked).abs().max()), restart=float((restarted - masked).abs().max()))


def answers(model: Any, task: Task, batch: Batch, way: str, keep: int = ALL) -> Tensor:
    """Logits [rows, vocabulary] of the first answer of each row.

    Args:
        way: `full`: everything is visible. `mask`: evicted blocks are masked. `evict`: a block's keys and values are
            cut out of the cache when its memento is complete. `restart`: the prompt is the mementos' text, computed
            again.
        keep: what stays; see `implicit_channel.curriculum.ALL`.

    Raises:
        SpecError: no such way.
    """
    if way not in WAYS:
        raise SpecError(f"no way {way!r}", advice=f"there are {', '.join(WAYS)}")
    ask = task.questions + 2
    found = []
    for ids in torch.split(batch.ids[:, :ask], _ROWS):
        if way == "restart":
            gone = [one for one, _ in task.leaving(keep)]
            stays = [at for at in range(ask) if not any(start <= at < stop for start, stop in gone)]
            found.append(Slices(model).feed(ids[:, stays])[:, -1])
        elif way == "evict":
            found.append(_evicting(model, task, ids, keep).feed(ids[:, task.questions :])[:, -1])
        else:
            mask = additive(task.seen(FULL if way == "full" else keep)[:ask, :ask], model.dtype)
            with torch.inference_mode():
                found.append(model(ids, attention_mask=mask, use_cache=False).logits[:, -1])
    return torch.cat(found)


def _evicting(model: Any, task: Task, ids: Tensor, keep: int) -> Slices:
    """The cache after the last memento, each range cut when it is to leave."""
    slices = Slices(model)
    fed = 0
    for (start, stop), at in task.leaving(keep):
        if at > fed:
            slices.feed(ids[:, fed:at])
            fed = at
        slices.cut(start, stop)
    return slices


def probe(name: str, model: Any, task: Task, batch: Batch, seed: int) -> list[Probe]:
    """How well a linear probe of a memento's keys and values tells the value of the second block.

    The memento before that block cannot know the value; its own memento saw the block; later ones saw only mementos.
    Two thirds of the rows fit the probe (a ridge regression on the ten values), the others are asked.
    """
    spans = task.spans
    told = _values(task, batch)
    held: list[list[list[Tensor]]] = []
    for ids in torch.split(batch.ids, _ROWS):
        slices = _evicting(model, task, ids, ALL)
        held.append([slices.held(span.memento, span.stop) for span in spans])
    order = torch.randperm(len(told), generator=torch.Generator().manual_seed(seed))
    cut = 2 * len(told) // 3
    found = []
    for memento in range(len(spans)):
        for layer in range(len(held[0][0])):
            features = torch.cat([part[memento][layer] for part in held])[order].double()
            right = _told(features[:cut], told[order[:cut]], features[cut:]) == told[order[cut:]]
            found.append(Probe.of(name, memento - 1, layer + 1, right.tolist()))
    return found


def _values(task: Task, batch: Batch) -> Tensor:
    """The value that the second block states."""
    span = task.spans[1]
    facts = batch.ids[:, span.start : span.memento].max(1).values
    told: Tensor = (facts - task.facts) % VALUES
    return told


def _told(known: Tensor, values: Tensor, asked: Tensor) -> Tensor:
    """Which value a ridge regression on `known` tells for each of `asked`."""
    cut = 9 * len(known) // 10
    mean, scale = known.mean(0), known.std(0) + 1e-6
    known, asked = (known - mean) / scale, (asked - mean) / scale
    targets = torch.nn.functional.one_hot(values, VALUES).double() - 1 / VALUES

    def fitted(rows: int, penalty: float) -> Any:
        some = known[:rows]
        inner = some.T @ some + penalty * torch.eye(some.shape[1], dtype=some.dtype)
        return torch.linalg.solve(inner, some.T @ targets[:rows])

    scores = [float(((known[cut:] @ fitted(cut, one)).argmax(1) == values[cut:]).double().mean()) for one in _PENALTIES]
    best = max(range(len(scores)), key=lambda at: (scores[at], _PENALTIES[at]))
    told: Tensor = (asked @ fitted(len(known), _PENALTIES[best])).argmax(1)
    return told
