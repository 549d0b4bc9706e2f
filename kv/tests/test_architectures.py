"""What the engine does not understand it refuses by name; what it takes it runs exactly.

Some architectures; `python kv/tests/architectures.py` judges all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedConfig

from kilburn.errors import UnsupportedModel
from kilburn_kv.engine import Engine
from kilburn_kv.generation import generate
from kilburn_kv.spill import Spill
from kilburn_kv.weights import weights_of

from .architectures import CANNOT, config_of, judged, model_of, names
from .conftest import tiny_model

EXACT = [
    *("llama", "llama, yarn", "llama, llama3", "qwen2", "qwen3", "qwen3_moe", "gemma", "granite", "olmo2", "phi", "gpt_neox"),
    *("mistral, no window", "phi3", "stablelm", "nemotron"),
]
FIXED = ["glm", "cohere", "smollm3", "hunyuan_v1_dense"]
"""Other pairs of entries, a layer without positions, a norm behind the rotation."""

REFUSED = {
    "mistral": "a window of 8 tokens",
    "phi3, window": "a window of 8 tokens",
    "starcoder2, window": "a window of 8 tokens",
    "moshi": "a window of 8 tokens",
    "gemma2": "sliding_attention",
    "gemma2, no window": "softcap",
    "gpt_oss, no window": "s_aux",
    "llama4_text": "chunked_attention",
    "llama, dynamic": "depends on the length",
    "deepseek_v2": "keys of",
    "deepseek_v3": "keys of",
    "doge": "a mask",
    "gpt_neox_japanese": "did not attend to the step exactly once",
    "mllama": r"\[3\] did not attend",
    "falcon": "cannot be run over slots",
    "lfm2, convolutions": "conv",
    "mamba": "linear_attention",
    "gpt2": "no rotation of keys",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_what_is_taken_says_what_generate_says(name: str) -> None:
    """Also: eviction is masking, keys are rotated as the model's own cache has them, the model is as it was."""
    verdict = judged(name)
    assert verdict.how == "exact", verdict


@pytest.mark.parametrize("name", FIXED)
def test_keys_that_cannot_be_rotated_stay_where_they_are(name: str) -> None:
    """A press that would rotate is refused before anything leaves."""
    verdict = judged(name)
    assert verdict.how == "exact, not rotated", verdict


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=REFUSED[name]) as caught:
        weights_of(model_of(config_of(name)))
    assert caught.value.family
    assert caught.value.family in str(caught.value)


def test_every_architecture_is_judged_or_has_a_reason_not_to_be() -> None:
    assert set(names()) >= {*EXACT, *FIXED, *REFUSED, *CANNOT}
    assert all(CANNOT.values())
    assert isinstance(config_of("qwen2"), PreTrainedConfig)


def test_a_page_of_such_a_model_comes_back_at_its_own_place_only(tmp_path: Path) -> None:
    engine = Engine(weights_of(model_of(config_of("glm"))), 128, size=4)
    sequence = engine.open(range(5, 45))
    sequence.table.label(1, 10, 20)
    spill = Spill(tmp_path)
    saved = spill.save_page(engine, sequence, 1)
    engine.evict(sequence, 10, 20)
    with pytest.raises(UnsupportedModel, match="glm"):
        spill.restore_page(engine, sequence, saved, 40)
    assert (len(sequence), sequence.end, sequence.table.pages.items()) == (30, 40, {})
    found = spill.restore_page(engine, sequence, saved)
    assert not isinstance(found, str)
    assert len(sequence) == 40


def padded(model: LlamaForCausalLM) -> list[list[int]]:
    """What the caller's model says to prompts of two lengths in one batch, padded on the left."""
    prompts = [[5, 9, 31, 7, 64, 12, 8], [44, 3]]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    made: torch.Tensor = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=10, eos_token_id=None, pad_token_id=0
    )
    found: list[list[int]] = made[:, longest:].tolist()
    return found


def test_the_callers_model_says_the_same_before_beside_and_after_an_engine() -> None:
    model = tiny_model()
    model.train()
    before, implementation = padded(model.eval()), model.config._attn_implementation
    model.train()
    weights = weights_of(model)
    assert model.training, "whether it trains is the caller's business"
    model.eval()
    assert padded(model) == before
    engines = [Engine(weights, 128), Engine(weights, 64, size=4)]
    sequences = [engine.open([5, 9, 31]) for engine in engines]
    assert padded(model) == before
    said = [generate(engine, [sequence], 5, stops=())[0] for engine, sequence in zip(engines, sequences, strict=True)]
    assert said[0] == said[1]
    assert padded(model) == before
    hook = model.get_decoder().layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no more"):
        engines[0].prefill(sequences[0], [4])
    hook.remove()
    assert padded(model) == before
    assert model.config._attn_implementation == implementation
    del engines, sequences, weights
    assert padded(model) == before


def test_a_refused_model_is_as_it_was() -> None:
    model = tiny_model()
    model.config.sliding_window = 6
    before = dict(vars(model))
    with pytest.raises(UnsupportedModel, match="llama"):
        weights_of(model)
    assert vars(model) == before


def fail(*_: object) -> None:
    raise RuntimeError("no more")


def test_a_layer_that_does_not_attend_is_noticed_in_every_step() -> None:
    """A layer that is taken out after the proof: the step is refused, and nothing was taken."""
    model = tiny_model()
    engine = Engine(weights_of(model), 64)
    sequence = engine.open([5, 6, 7])
    layer = engine.weights.decoder.model.get_decoder().layers[1]
    layer.self_attn.layer_idx = 0
    with pytest.raises(UnsupportedModel, match=r"\[0, 1\] did not attend"):
        engine.prefill(sequence, [8])
    layer.self_attn.layer_idx = 1
    assert (sequence.end, len(sequence)) == (3, 3)
    engine.prefill(sequence, [8])
