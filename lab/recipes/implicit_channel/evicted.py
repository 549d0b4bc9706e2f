"""What a model of transformers still answers about text whose keys and values were evicted.

Eight notes name an owner and a password; the memento behind a note says that it was read, and neither of the two. The
same questions are asked with the note there, with its keys and values cut out while the memento's stay, and after a
new start from the memento's text. Two things are measured: whether the answer comes word for word, and whether it is
the most probable of the eight answers of its kind, which is easier.

    report = ask(model, tokenizer)
    print(report.table())
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from implicit_channel.slices import Slices, additive
from kilburn.errors import MissingExtra, SpecError
from kilburn_lab.evals.intervals import wilson
from kilburn_lab.evals.report import EvalReport, grid

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "torch", "torch") from error


CASES = (
    ("Falcon", "Martha Quinn", "copper-lantern-52"),
    ("Harbor", "Tobias Renn", "velvet-anchor-17"),
    ("Juniper", "Amara Okafor", "silent-meadow-88"),
    ("Granite", "Lukas Brandt", "orange-kettle-31"),
    ("Comet", "Elena Petrova", "frozen-violin-64"),
    ("Willow", "Samuel Ortega", "marble-pigeon-29"),
    ("Beacon", "Priya Nair", "hollow-thunder-75"),
    ("Saffron", "Ingrid Dahl", "purple-compass-43"),
)
"""Project, owner, password."""

_BEFORE = "These are the notes of an operations team.\n\n"
_NOTE = (
    "The project {project} runs on two servers in the north hall, and its backups are taken every night. "
    "The owner of {project} is {owner}. The password of {project} is {password}. "
    "The last review found nothing to change, and the next one is in spring.\n\n"
)
_MEMENTO = "Summary: the note about {project} was read. It names the owner and the password of {project}.\n\n"
_QUESTIONS = {"owner": "The owner of {project} is", "password": "The password of {project} is"}
_WAYS = ("full", "evict", "restart")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One question in one way.

    Args:
        exact: every token of the answer was the most probable one. chosen: of the eight answers of its kind
            it had the highest log-probability a token.
        logprob: of the answer, nats a token. margin: what it is above the mean of the other seven.
    """

    project: str
    kind: str
    way: str
    exact: bool
    chosen: bool
    logprob: float
    margin: float


class Evicted(EvalReport, frozen=True, kw_only=True):
    """All answers. `gap` is the largest difference of a logit between eviction and masking, at the questions' ends."""

    model: str
    answers: list[Answer]
    gap: float

    def of(self, way: str, kind: str) -> list[Answer]:
        """The answers of one way and kind."""
        return [one for one in self.answers if (one.way, one.kind) == (way, kind)]

    def table(self) -> str:
        """Plain text for people."""
        body = []
        for kind in _QUESTIONS:
            for way in _WAYS:
                found = self.of(way, kind)
                count = len(found)
                chosen = sum(one.chosen for one in found)
                low, high = wilson(chosen, count)
                body.append(
                    [
                        kind,
                        way,
                        f"{sum(one.exact for one in found)}/{count}",
                        f"{chosen}/{count} ({100 * low:.0f}-{100 * high:.0f}%)",
                        f"{sum(one.logprob for one in found) / count:.2f}",
                        f"{sum(one.margin for one in found) / count:+.2f}",
                    ]
                )
        return (
            f"{self.model}: {len(CASES)} notes, a note evicted behind a memento that does not say what it named\n"
            f"chosen: of the {len(CASES)} answers of a kind the most probable one (by chance 1/{len(CASES)}); "
            "nats a token; margin: above the other answers\n\n"
            + grid(["asked", "way", "exact", "chosen", "log-prob", "margin"], body, ("asked",))
            + f"\n\nlargest difference of a logit, evicted to masked: {self.gap:.1e}"
        )


def ask(model: Any, tokenizer: Any, *, name: str = "", done: Callable[[int, int], None] | None = None) -> Evicted:
    """Ask every question in every way.

    Args:
        model: a causal model of transformers, in evaluation. tokenizer: its own.
        name: for the report. done: called with how many notes are done, and of how many.

    Raises:
        SpecError: a tokenizer without which there is no text.
    """
    if tokenizer is None:
        raise SpecError("this model has no tokenizer", advice="give a model with its tokenizer")

    def tokens(text: str) -> Tensor:
        opens = [tokenizer.bos_token_id] if text == _BEFORE and tokenizer.bos_token_id is not None else []
        return torch.tensor([opens + tokenizer.encode(text, add_special_tokens=False)], device=model.device)

    answers: list[Answer] = []
    gap = 0.0
    for number, (project, owner, password) in enumerate(CASES):
        parts = [text.format(project=project, owner=owner, password=password) for text in (_BEFORE, _NOTE, _MEMENTO)]
        before, note, memento = map(tokens, parts)
        for kind, form in _QUESTIONS.items():
            question = tokens(form.format(project=project))
            options = [tokens(" " + case[1 + (kind == "password")] + ".") for case in CASES]
            for way in _WAYS:
                slices = Slices(model)
                slices.feed(torch.cat((before, memento) if way == "restart" else (before, note, memento), 1))
                if way == "evict":
                    slices.cut(before.shape[1], before.shape[1] + note.shape[1])
                logits = slices.feed(question)[:, -1]
                if way == "evict":
                    whole = torch.cat((before, note, memento, question), 1)
                    masked = _masked(model, whole, before.shape[1], note.shape[1], question.shape[1])
                    gap = max(gap, float((logits - masked).abs().max()))
                scored = _scored(slices, logits, options)
                answers.append(_answer(project, kind, way, scored, number))
        if done is not None:
            done(number + 1, len(CASES))
    return Evicted(model=name, answers=answers, gap=gap)


def _masked(model: Any, ids: Tensor, start: int, count: int, asked: int) -> Tensor:
    """Logits of the last token where the question masks `count` tokens from `start` on, in one pass."""
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    seen[-asked:, start : start + count] = False
    with torch.inference_mode():
        logits: Tensor = model(ids, attention_mask=additive(seen, model.dtype), use_cache=False).logits[:, -1]
    return logits


def _scored(slices: Slices, logits: Tensor, options: list[Tensor]) -> list[tuple[float, bool]]:
    """For each option its log-probability a token, and whether each of its tokens was the most probable."""
    widest = max(option.shape[1] for option in options)
    padded = torch.cat([torch.nn.functional.pad(option, (0, widest - option.shape[1])) for option in options])
    slices.repeat(len(options))
    later = slices.feed(padded)[:, :-1]
    told = torch.cat((logits.expand(len(options), -1)[:, None], later), 1).float().log_softmax(-1)
    found = []
    for row, option in zip(told, options, strict=True):
        count = option.shape[1]
        nats = row[:count].gather(1, option.T)[:, 0]
        found.append((float(nats.mean()), bool((row[:count].argmax(1) == option[0]).all())))
    return found


def _answer(project: str, kind: str, way: str, scored: list[tuple[float, bool]], right: int) -> Answer:
    nats, exact = scored[right]
    others = [one for at, (one, _) in enumerate(scored) if at != right]
    return Answer(
        project=project,
        kind=kind,
        way=way,
        exact=exact,
        chosen=nats > max(others),
        logprob=nats,
        margin=nats - sum(others) / len(others),
    )
