"""Who answers questions from a prompt: an exact reader that is no model, a model, or weights that run here.

Models and weights are held to one of a few forms: an answer, and where memory is offered, a search or a recall.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kilburn.errors import MissingExtra, ModelError
from kilburn.kernel.resolve import resolve
from kilburn.model import Model
from kilburn.models.weights import catalogue, find
from kilburn_lab.evals.metered import filled
from kilburn_lab.evals.questions import RunQuestion

ANSWER, SEARCH, RECALL = "answer", "search_memory", "recall"
"""What a reader does next: an answer, or a memory tool."""

ARGUMENTS = {SEARCH: "query", RECALL: "address"}
"""What the text is to a memory tool."""

Said = tuple[str, str]
"""One of these, and its text: the answer, what to search for, an address."""

LENGTH = 48
"""Tokens of an answer or of a query."""

SYSTEM = "You answer questions about a session of a programmer, whose last part or whose parts you are shown."
ASKED = "Reply with JSON that has one key, answer: the exact value, copied from the session, and nothing else."
OFFERED = (
    "What you are shown is not the whole session. If it does not have the value, do not guess: reply with the key search_memory "
    "and the rarest words of the question, or with the key recall and the address of a page that is marked as out, such as p12. "
    "You are then shown what was found, and asked again."
)


class Reader(Protocol):
    """Answers from a prompt, at whose end the question stands.

    Attributes:
        name: tells it from other readers.
    """

    name: str

    def reply(self, question: RunQuestion, prompt: str, results: Sequence[str], *, tools: bool) -> Said:
        """What it does next, after these results of memory tools.

        Args:
            tools: whether it may search or recall; otherwise it has to answer.
        """
        ...


class ExactReader:
    """Finds the text around an answer, if the prompt has it whole. It searches for the question, then recalls the best hit."""

    name = "exact"

    def reply(self, question: RunQuestion, prompt: str, results: Sequence[str], *, tools: bool) -> Said:
        """What the prompt has where the answer stands; else a search, then a recall."""
        if found := re.findall(question.fact, prompt, re.MULTILINE):
            return ANSWER, found[-1]
        if tools and not results:
            return SEARCH, question.text
        best = re.search(r"p\d+", results[-1]) if tools else None
        return (RECALL, best[0]) if best is not None else (ANSWER, "")


class ModelReader:
    """A model, held to a JSON schema.

    Args:
        model: of any form that Kilburn knows.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.name = model.name

    def reply(self, question: RunQuestion, prompt: str, results: Sequence[str], *, tools: bool) -> Said:
        """What the model writes; no answer if it fails, or writes something else."""
        forms = [{verb: {"type": "string"}} for verb in _verbs(tools)]
        try:
            found = filled(self.model, *_words(question, prompt, tools), forms, 2 * LENGTH, dict[str, str])
        except ModelError:
            found = None
        [(verb, text)] = found.items() if found is not None and len(found) == 1 else [(ANSWER, "")]
        return (verb, text) if verb in _verbs(tools) else (ANSWER, "")


class Writer(Protocol):
    """Weights that continue a conversation; `kilburn_kv.writing.EngineWriter` is the real one."""

    name: str

    def write(self, system: str, asked: str, verbs: Sequence[str], length: int) -> Said:
        """Greedily, JSON with one of these keys and a text of so many tokens at most."""
        ...


class WeightsReader:
    """Weights that run in this process, held to the form token by token.

    Args:
        writer: of these weights.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.name = writer.name

    def reply(self, question: RunQuestion, prompt: str, results: Sequence[str], *, tools: bool) -> Said:
        """What the weights write."""
        return self.writer.write(*_words(question, prompt, tools), _verbs(tools), LENGTH)


def _verbs(tools: bool) -> tuple[str, ...]:
    return (ANSWER, SEARCH, RECALL) if tools else (ANSWER,)


def _words(question: RunQuestion, prompt: str, tools: bool) -> tuple[str, str]:
    asked = f"<session>\n{prompt}\n</session>\n\nQuestion: {question.text}\n{ASKED}"
    return SYSTEM, f"{asked} {OFFERED}" if tools else asked


def reader_of(spec: str) -> Reader:
    """The exact reader for "exact"; weights for a name of `kilburn models list` or a path; else the model of a spec.

    Raises:
        Unavailable: weights that are not here. SpecError: no such model. MissingExtra. UnsupportedModel.
    """
    if spec == ExactReader.name:
        return ExactReader()
    where = Path(spec).expanduser()
    if where.exists() or spec in {known.name for known in catalogue()}:
        try:
            from kilburn_kv.writing import load_writer
        except ModuleNotFoundError as error:
            raise MissingExtra(error.name or "kilburn_kv", "torch") from error
        return WeightsReader(load_writer(where if where.is_dir() else find(spec)))
    return ModelReader(resolve("models", spec))
