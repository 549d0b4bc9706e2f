"""Weights that several tests run: the real SmolLM2, once per session, and a tiny random model for many cases."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kilburn.models.weights import pull
from kilburn_kv.weights import Weights, load, weights_of

# Two threads that wait for each other on a busy machine are many times slower than one.
torch.set_num_threads(1)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="session")
def smollm() -> Weights:
    """SmolLM2-135M in float32 on the CPU: every comparison of the tests holds there."""
    return load(pull("smollm2"))


def tiny_model(seed: int = 0, heads: int = 6, shared: int = 2, words: int = 97) -> LlamaForCausalLM:
    """Two layers of random weights with grouped heads; large enough weights that attention is not flat."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=16 * heads,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        initializer_range=0.3,
        eos_token_id=0,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="session", params=DEVICES)
def tiny(request: pytest.FixtureRequest) -> Weights:
    """The tiny model in float32, on each device that is there."""
    return weights_of(tiny_model().to(request.param))


@pytest.fixture(scope="session")
def speaker(smollm: Weights) -> Weights:
    """The tiny model with SmolLM2's tokenizer: nonsense in real words, quickly."""
    return weights_of(tiny_model(words=len(smollm.tokenizer)), smollm.tokenizer)
