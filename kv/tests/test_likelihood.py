"""How likely a text is after a prompt: as one plain forward pass says, whatever was read before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cli.terminal import kilburn
from kilburn.errors import SpecError
from kilburn_kv.likelihood import Likelihood
from kilburn_kv.weights import Weights

LONG = "one two three " * 60
SHORT = ["The parser drops", "The parser drops the last", "The parser", "Nothing alike", "The parser drops the last", "The"]
PROMPTS = [*SHORT, LONG, LONG + "four " * 50]
TEXT = " line of <|im_end|> every file, été.\n"


def plainly(weights: Weights, prompt: str, text: str) -> list[float]:
    before, tokens = (weights.tokenizer.encode(each, split_special_tokens=True) for each in (prompt, text))
    with torch.inference_mode():
        logits = weights.model(input_ids=torch.tensor([before + tokens])).logits[0].float().log_softmax(-1)
    return [-logits[len(before) - 1 + at, token].item() for at, token in enumerate(tokens)]


def test_losses_are_those_of_one_forward_pass_whatever_was_read_before(speaker: Weights) -> None:
    reader = Likelihood(speaker)
    for prompt in PROMPTS:
        found = reader.losses(prompt, TEXT)
        assert [loss.nats for loss in found] == pytest.approx(plainly(speaker, prompt, TEXT), abs=1e-4)


def test_a_text_has_the_same_tokens_after_every_prompt_and_they_cover_it(speaker: Weights) -> None:
    reader = Likelihood(speaker)
    places = {tuple((loss.start, loss.stop) for loss in reader.losses(prompt, TEXT)) for prompt in PROMPTS}
    assert len(places) == 1
    assert {at for start, stop in places.pop() for at in range(start, stop)} == set(range(len(TEXT)))
    assert reader.count(TEXT) == len(reader.losses("a", TEXT)) > 8
    assert reader.losses("a", "") == []


def test_what_cannot_be_read_is_refused_and_harms_nothing(speaker: Weights) -> None:
    reader = Likelihood(speaker)
    before = reader.losses("The parser", TEXT)
    for prompt, text in (("", TEXT), ("word " * reader.context, TEXT)):
        with pytest.raises(SpecError):
            reader.losses(prompt, text)
    assert reader.losses("The parser", TEXT) == before


def test_the_verb_reads_with_the_weights_of_a_folder_and_goes_on(speaker: Weights, tmp_path: Path) -> None:
    speaker.model.save_pretrained(tmp_path / "weights")
    speaker.tokenizer.save_pretrained(tmp_path / "weights")
    out = tmp_path / "readings.jsonl"
    words = ("lab", "equivalence", "--model", tmp_path / "weights", "--dtype", "float32", "--sample", 4, "--steps", 2)
    words = (*words, "--window", 300, "--policy", "hybrid", "--out", out)
    said = kilburn(*words)
    assert said.status == 0, said.err
    assert said.out.startswith("separates: ")
    assert max(map(len, said.out.splitlines())) <= 120
    before = out.read_bytes()
    again = kilburn(*words, "--resume", "--json")
    assert [row["policy"] for row in again.json["rows"]] == ["task", "stranger", "tail", "hybrid", "full"]
    assert out.read_bytes() == before
    assert kilburn(*words).status == 2
    assert kilburn("lab", "equivalence", "--resume").status == 2
