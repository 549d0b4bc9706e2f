"""Rotated on, a key is the key of the other position; and StreamingLLM comes out as if all were rotated by cache index."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaModel, LlamaRotaryEmbedding, apply_rotary_pos_emb

from kilburn_kv.observation import Observation, Selection
from kilburn_kv.presses.streaming import Streaming
from kilburn_kv.rotation import rotate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )


@pytest.fixture(scope="module")
def rope(config: LlamaConfig) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(config).to(DEVICE)


def at(rope: LlamaRotaryEmbedding, raw: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Unrotated keys, shape [heads, n, dim], rotated to positions by transformers itself."""
    cos, sin = rope(raw, positions[None].to(raw.device))
    return apply_rotary_pos_emb(raw[None], raw[None], cos, sin)[1][0]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_a_rotated_key_is_the_key_computed_at_the_other_position(rope: LlamaRotaryEmbedding) -> None:
    raw, old = random(2, 50, 16), torch.arange(50)
    new = torch.randperm(1500, generator=torch.Generator().manual_seed(1))[:50]
    turned = rotate(at(rope, raw, old), (new - old).to(DEVICE), rope.inv_freq)
    assert (turned - at(rope, raw, new)).abs().max() < 1e-4
    assert turned.dtype == torch.float32


def test_the_first_layers_keys_of_a_model_move_to_other_positions(config: LlamaConfig) -> None:
    torch.manual_seed(0)
    model = LlamaModel(config).eval().to(DEVICE)
    tokens = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    with torch.no_grad():
        near = model(tokens, position_ids=torch.arange(40, device=DEVICE)[None]).past_key_values
        far = model(tokens, position_ids=torch.arange(700, 740, device=DEVICE)[None]).past_key_values
    # A shift of all positions alike changes no attention, so here even deeper layers agree.
    for layer in range(2):
        turned = rotate(near.layers[layer].keys, torch.tensor(700), model.rotary_emb.inv_freq)
        assert (turned - far.layers[layer].keys).abs().max() < 1e-4
        assert (near.layers[layer].keys - far.layers[layer].keys).abs().max() > 1e-2


def test_no_shift_changes_no_bit_and_there_and_back_is_the_same(rope: LlamaRotaryEmbedding) -> None:
    keys = random(2, 3, 20, 16)
    for kind in (torch.float32, torch.bfloat16, torch.float64):
        same = rotate(keys.to(kind), torch.zeros(20, dtype=torch.int64), rope.inv_freq)
        assert torch.equal(same, keys.to(kind))
    shift = torch.arange(-900, 1100, 100, device=DEVICE)
    assert (rotate(rotate(keys, shift, rope.inv_freq), -shift, rope.inv_freq) - keys).abs().max() < 1e-5


def test_half_precision_is_rounded_once(rope: LlamaRotaryEmbedding) -> None:
    keys = random(2, 20, 16).to(torch.bfloat16)
    shift = torch.full((20,), 777, device=DEVICE)
    turned = rotate(keys, shift, rope.inv_freq)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(keys.to(torch.float32), shift, rope.inv_freq).to(torch.bfloat16))


def test_what_the_model_does_not_rotate_stays(rope: LlamaRotaryEmbedding) -> None:
    keys = random(2, 20, 24)
    turned = rotate(keys, torch.tensor(5), rope.inv_freq)
    assert torch.equal(turned[..., 16:], keys[..., 16:])
    assert torch.equal(turned[..., :16], rotate(keys[..., :16], torch.tensor(5), rope.inv_freq))


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    weights = (query @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(dim=-1)
    return weights @ values


class Stream:
    """A cache of one layer beside the raw keys, fed token by token; compressed by a press when it is over budget."""

    def __init__(self, rope: LlamaRotaryEmbedding, press: Streaming, budget: int) -> None:
        self.rope, self.press, self.budget, self.end = rope, press, budget, 0
        self.raw = self.keys = self.values = torch.zeros(2, 0, 16, device=DEVICE)
        self.positions = torch.zeros(0, dtype=torch.int64)
        self.shifts = torch.zeros(0, dtype=torch.int64)

    def token(self, seed: int) -> None:
        raw = random(2, 1, 16, seed=seed)
        self.raw = torch.cat((self.raw, raw), dim=1)
        self.keys = torch.cat((self.keys, at(self.rope, raw, torch.tensor([self.end]))), dim=1)
        self.values = torch.cat((self.values, random(2, 1, 16, seed=seed + 1000)), dim=1)
        self.positions = torch.cat((self.positions, torch.tensor([self.end])))
        self.shifts = torch.cat((self.shifts, torch.zeros(1, dtype=torch.int64)))
        self.end += 1

    def drop(self, keep: torch.Tensor) -> None:
        self.raw, self.keys, self.values = self.raw[:, keep], self.keys[:, keep], self.values[:, keep]
        self.positions, self.shifts = self.positions[keep], self.shifts[keep]

    def compress(self) -> Selection:
        seen = Observation(positions=self.positions, end=self.end, shifts=self.shifts)
        chosen = self.press.keep(seen, self.budget)
        turn = chosen.turn(seen)
        self.drop(chosen.keep)
        if chosen.shift is not None and turn is not None:
            self.keys = rotate(self.keys, turn, self.rope.inv_freq)
            self.shifts = chosen.shift
        return chosen

    def difference(self, seed: int) -> float:
        """Of the next token's attention from that where all keys and the query are rotated by index in the cache."""
        query, count = random(2, 1, 16, seed=seed), len(self.positions)
        ours = attend(at(self.rope, query, torch.tensor([self.end])), self.keys, self.values)
        by_index = at(self.rope, self.raw, torch.arange(count))
        paper = attend(at(self.rope, query, torch.tensor([count])), by_index, self.values)
        return float((ours - paper).abs().max())


def test_streaming_is_attention_over_keys_rotated_by_index_in_the_cache(rope: LlamaRotaryEmbedding) -> None:
    stream = Stream(rope, Streaming(sinks=4), 20)
    for seed in range(300):
        stream.token(seed)
    chosen = stream.compress()
    assert chosen.shift is not None
    assert chosen.shift.tolist() == [280] * 4 + [0] * 16
    assert stream.difference(5000) < 1e-5


def test_streaming_over_and_over_is_still_that(rope: LlamaRotaryEmbedding) -> None:
    stream = Stream(rope, Streaming(sinks=4), 20)
    worst = 0.0
    for seed in range(400):
        stream.token(seed)
        if len(stream.positions) > 20 + seed % 5:
            chosen = stream.compress()
            assert chosen.shift is not None
            assert chosen.shift.tolist() == [stream.end - 20] * 4 + [0] * 16
            worst = max(worst, stream.difference(5000 + seed))
    assert 0 < worst < 1e-5


def test_streaming_closes_the_gaps_of_evicted_pages_too(rope: LlamaRotaryEmbedding) -> None:
    stream = Stream(rope, Streaming(sinks=2), 12)
    for seed in range(40):
        stream.token(seed)
    stream.drop(torch.tensor([*range(32), *range(36, 40)]))
    chosen = stream.compress()
    assert chosen.shift is not None
    assert chosen.shift.tolist() == [28, 28, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0]
    assert stream.difference(5000) < 1e-5
    for seed in range(100, 103):
        stream.token(seed)
    stream.compress()
    assert stream.difference(5001) < 1e-5


def test_without_rotation_the_distance_stays() -> None:
    seen = Observation(positions=torch.arange(50), end=50, shifts=torch.zeros(50, dtype=torch.int64))
    chosen = Streaming(rotate=False).keep(seen, 10)
    assert (chosen.shift, chosen.turn(seen)) == (None, None)
    assert chosen.keep.tolist() == [0, 1, 2, 3, *range(44, 50)]
