"""Weights that answer in a fixed form."""

from __future__ import annotations

import pytest

from kilburn.errors import SpecError
from kilburn_kv.weights import Weights, weights_of
from kilburn_kv.writing import EngineWriter


def test_weights_answer_with_one_of_the_keys_and_one_text(speaker: Weights) -> None:
    writer = EngineWriter(speaker, "smollm2")
    asked = "<session>\nkame listens on port 31245.\n</session>\nQuestion: On which port does kame listen?\nReply with JSON."
    first = writer.write("You answer.", asked, ("answer",), 8)
    assert first[0] == "answer"
    assert '"' not in first[1]
    assert first == writer.write("You answer.", asked, ("answer",), 8)
    assert writer.write("You answer.", asked, ("answer", "search_memory", "recall"), 4)[0] in {
        "answer",
        "search_memory",
        "recall",
    }
    assert len(speaker.tokens(writer.write("You answer.", asked, ("answer",), 1)[1])) <= 1


def test_weights_without_a_chat_template_are_refused(speaker: Weights) -> None:
    with pytest.raises(SpecError):
        EngineWriter(weights_of(speaker.model, None, "x"), "bare")
