"""Every causal language model of transformers, made tiny and random: run exactly by the engine, or refused by name.

The configs come from the classes' own defaults with small sizes put in, so a new architecture of a new transformers is
judged too. `python kv/tests/architectures.py` judges all of them and prints a table; the tests take some.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from kilburn.errors import UnsupportedModel
from kilburn_kv.compression import compress
from kilburn_kv.engine import Engine
from kilburn_kv.generation import generate
from kilburn_kv.presses import press
from kilburn_kv.weights import weights_of

WORDS = 97
LAYERS = 4
LARGEST = 16_000_000
"""Parameters up to which a model counts as tiny."""

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), WORDS),
    **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size", "ngram_vocab_size_base"), WORDS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "word_embed_proj_dim", "lru_width"), 64),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "attention_hidden_size", "embedding_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_blocks"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("swa_num_attention_heads", "index_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "dff"), 48),
    **dict.fromkeys(("expert_ffn_hidden_size", "intermediate_size_mlp", "moe_shared_expert_intermediate_size", "dim_ff"), 48),
    **dict.fromkeys(("dense_intermediate_size", "shared_experts_intermediate_size", "feed_forward_size", "block_ffn_dim"), 48),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "attention_head_size", "dim_head", "index_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "adapter_rank"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size", "local_attention", "window_size"), 8),
    **dict.fromkeys(("attention_window_size", "local_attn_chunk_length"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "model_max_length"), 256),
    **dict.fromkeys(("context_length", "max_target_positions", "max_source_positions"), 256),
    **dict.fromkeys(("mamba_d_state", "mamba_d_head", "mamba_n_heads", "mamba_num_heads", "mamba_head_dim", "n_mamba_heads"), 8),
    **dict.fromkeys(("ssm_state_size", "state_size", "linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "ple_embed_dim", "pronunciation_embed_dim"), 8),
    **dict.fromkeys(("num_codebooks", "image_size", "patch_size"), 8),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
}
"""What is put in where a config has such a field."""

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
INDEXER = {"indexer_budget": 8, "indexer_compress_ratio": 2, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16}
HALF = ["full_attention", "sliding_attention"] * (LAYERS // 2)

FAMILIES: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA},
    "granitemoehybrid": {**MAMBA},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": HALF},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * (LAYERS // 2)},
    "qwen4_exp_text": {**INDEXER},
    "qwen4_exp": {"text_config": {**INDEXER}},
    "dots3_note_text": {"layer_types": ["indexed_attention"] * LAYERS},
    "zamba": {
        "attention_hidden_size": 128,
        "num_hidden_layers": 9,
        "layers_block_type": (["linear_attention"] * 2 + ["hybrid"]) * 3,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}
"""Fields that an architecture needs beside `SIZES` to be made at all, by name."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mixtral, no window": ("mixtral", {"sliding_window": None}),
    "starcoder2, window": ("starcoder2", {"sliding_window": 8}),
    "phi3, window": ("phi3", {"sliding_window": 8}),
    "lfm2, convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)}),
    "qwen2, window": (
        "qwen2",
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2)},
    ),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama, llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            }
        },
    ),
    "llama, yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}},
    ),
    "llama, dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    "bert, decoder": ("bert", {"is_decoder": True}),
    "falcon, old": ("falcon", {"alibi": True, "multi_query": True, "new_decoder_architecture": False}),
    "gemma2, no window": ("gemma2", {"layer_types": ["full_attention"] * LAYERS}),
    "gemma2, no window, no cap": ("gemma2", {"layer_types": ["full_attention"] * LAYERS, "attn_logit_softcapping": None}),
    "gpt_oss, no window": ("gpt_oss", {"layer_types": ["full_attention"] * LAYERS}),
    "smollm3, no NoPE": ("smollm3", {"no_rope_layers": [1] * LAYERS}),
}
"""The same architecture set otherwise, where that makes a difference to the engine."""

CANNOT: dict[str, str] = {
    "blt": "four models in one, whose sizes hang together: not made tiny here",
    "gemma3n": "gemma3n_text with a tower that takes the package timm: judged as that",
    "dots3_note": "dots3_note_text with towers for images and sound: judged as that",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "a draft model: it has no keys and values but those of another model"
    ),
}
"""What is not judged, and why."""


@dataclass(frozen=True)
class Verdict:
    """What became of one architecture.

    Args:
        how: "exact", "exact, not rotated", "refused", "skipped" (see `CANNOT`), "NOT MADE" or "WRONG".
        why: in words.
        seconds: that it took.
    """

    name: str
    how: str
    why: str = ""
    seconds: float = 0.0


def names() -> list[str]:
    """Everything that can be judged."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def config_of(name: str) -> PreTrainedConfig:
    """A tiny config of an architecture or of one of its variants."""
    family, more = VARIANTS.get(name, (name, {}))
    return _shrunk(CONFIG_MAPPING[family], {**FAMILIES.get(family, {}), **more})


def _shrunk(kind: Any, more: dict[str, Any]) -> PreTrainedConfig:
    base = {key: value for key, value in more.items() if not key.startswith("_")}
    default = more.get("_default") or kind()
    told = {**vars(default), **dict.fromkeys(getattr(kind, "attribute_map", {}))}
    given = {key: value for key, value in SIZES.items() if key in told and told.get(key, 0) is not None}
    if "qk_rope_head_dim" in told:  # latent attention: what is rotated counts as the head's dim, and no heads are shared
        given.update({key: value for key, value in {"head_dim": 8, "num_key_value_heads": 4}.items() if key in given})
    long = [
        told.get(key)
        for key in ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers")
        if isinstance(told.get(key), int)
    ]
    for key, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            given[key] = _shrunk(type(value), {"_default": value, **base.pop(key, {})})
        elif isinstance(value, list) and long and len(value) == long[0] and value:
            given[key] = value[:LAYERS]
    given.update(base)
    return kind(**{key: value for key, value in given.items() if key not in more.get("_without", ())})


def model_of(config: PreTrainedConfig, seed: int = 0) -> Any:
    """A model of random weights, large enough that attention is not flat and norms do not commute with rotations."""
    torch.manual_seed(seed)
    if config.model_type.startswith("musicgen"):  # the auto class hands the whole config to what takes the decoder's
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = kind._from_config(config.decoder, attn_implementation="eager")
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > LARGEST:
        raise OverflowError(f"{count} parameters")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model = model.float().eval()
    with torch.inference_mode():
        rows = getattr(model.config, "num_codebooks", 1) if config.model_type.startswith("musicgen") else 1
        logits = model(input_ids=torch.tensor([[5, 6, 7, 8]] * rows), use_cache=False).logits
    assert logits.isfinite().all(), "its logits are not finite"
    return model


def judged(name: str) -> Verdict:
    """What becomes of one architecture."""
    began = time.perf_counter()
    if name in CANNOT:
        return Verdict(name, "skipped", CANNOT[name])
    try:
        model = model_of(config_of(name))
    except Exception as error:
        return Verdict(name, "NOT MADE", " ".join(f"{type(error).__name__}: {str(error)[:300]}".split()))
    try:
        how, why = _judged(model)
    except Exception as error:
        how, why = "WRONG", f"{type(error).__name__}: {str(error)[:300]}"
    return Verdict(name, how, " ".join(why.split()), time.perf_counter() - began)


def _judged(model: Any) -> tuple[str, str]:
    before = {key: id(value) for key, value in vars(model).items()}
    implementation = model.config._attn_implementation
    try:
        weights = weights_of(model)
    except UnsupportedModel as error:
        _unchanged(model, before, implementation)
        return "refused", error.what
    engine = Engine(weights, 512, size=4, chunk=7)
    chance = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, WORDS, (count,), generator=chance).tolist() for count in (21, 13)]
    expected = [_plain(model, prompt, 28) for prompt in prompts]
    found = generate(engine, [engine.open(prompt) for prompt in prompts], 28, stops=())
    if found != expected:
        return "WRONG", f"says {found}, not {expected}"
    sequence = engine.open(prompts[0])
    engine.evict(sequence, 3, 9)
    engine.prefill(sequence, prompts[1])
    masked = _masked(model, prompts[0] + prompts[1], len(prompts[0]), 3, 9)
    assert sequence.logits is not None
    gap = float((sequence.logits - masked).abs().max() / masked.std())
    if not gap < 1e-3:
        return "WRONG", f"eviction is not masking: {gap:.2g}"
    _unchanged(model, before, implementation)
    sequence = engine.open(prompts[0])
    if weights.fixed:
        try:
            compress(engine, sequence, press("streaming(sinks=2)"), 12)
        except UnsupportedModel as error:
            return ("exact, not rotated", error.what) if len(sequence) == 21 else ("WRONG", "refused too late")
        return "WRONG", "keys were rotated that cannot be"
    keys = _keys(model, prompts[0], 0)
    for layer, (here, there) in enumerate(zip(keys, _keys(model, prompts[0], 40), strict=True)):
        if not torch.allclose(weights.rotate(here, torch.tensor(40)), there, atol=1e-3 * float(there.std())):
            return "WRONG", f"layer {layer} is not rotated so"
    compress(engine, sequence, press("streaming(sinks=2)"), 12)
    return "exact", ""


def _unchanged(model: Any, before: dict[str, int], implementation: Any) -> None:
    assert {key: id(value) for key, value in vars(model).items()} == before
    assert model.config._attn_implementation == implementation


def _plain(model: Any, prompt: list[int], limit: int) -> list[int]:
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": limit, "eos_token_id": None, "pad_token_id": 0}
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return [int(token) for token in made[0, len(prompt) :]]


def _masked(model: Any, tokens: list[int], at: int, start: int, stop: int) -> torch.Tensor:
    count = len(tokens)
    seen = torch.ones((count, count), dtype=torch.bool).tril()
    seen[at:, start:stop] = False
    mask = torch.zeros((1, 1, count, count)).masked_fill_(~seen, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits[0, -1]
    return logits


def _keys(model: Any, tokens: list[int], start: int) -> list[torch.Tensor]:
    cache = DynamicCache(config=model.config)
    places = torch.arange(start, start + len(tokens))[None]
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens]), position_ids=places, cache=cache, use_cache=True)
    return [layer.keys[0] for layer in cache.layers]


def main() -> None:
    """Judge those that are named, or all; print a table, and fail where one is wrong or was not made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    chosen = parser.parse_args().names or names()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    counts: dict[str, int] = {}
    print("| architecture | verdict | why |\n|---|---|---|")
    for name in chosen:
        verdict = judged(name)
        counts[verdict.how] = counts.get(verdict.how, 0) + 1
        print(f"| {verdict.name} | {verdict.how} | {verdict.why.replace('|', '/')} |", flush=True)
    print("\n" + ", ".join(f"{count} {how}" for how, count in sorted(counts.items())))
    sys.exit(not counts.keys().isdisjoint(("WRONG", "NOT MADE")))


if __name__ == "__main__":
    main()
