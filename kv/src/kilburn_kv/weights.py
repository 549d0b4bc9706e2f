"""Weights of a decoder that the engine can run: a transformers model, its tokenizer, and what names them.

Reads a GGUF file (dequantised when loaded) or a folder that `save_pretrained` wrote. A model is refused if a layer
does not attend to all earlier tokens, or its rotation depends on the length, because its cache would not mean what
the engine assumes. The config shows most of these cases; the others are found by running a few tokens.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kilburn.errors import MissingExtra, SpecError, Unavailable
from kilburn_kv.decoder import Decoder, prove
from kilburn_kv.prefixes import PrefixKey
from kilburn_kv.rotation import rotate
from kilburn_kv.storage import CacheShape
from kilburn_kv.tensors import torch

__all__ = ["load", "weights_of"]

log = logging.getLogger("kilburn")

SMALL = 256_000_000
"""Bytes of a GGUF file up to which a converted copy is kept by default."""


@dataclass(frozen=True)
class Weights:
    """A model that is loaded.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer, or None where there is none: then only token ids go in and out.
        digest: SHA-256 of the weights' bytes, hex: equal digests are equal weights.
        shape: of what it caches.
        inv_freq: the rotation's inverse frequencies, shape [dim / 2], float32.
        decoder: the model as an engine runs it; `model` itself is never changed.
        fixed: why cached keys cannot be rotated to other positions; empty if they can.
    """

    model: Any
    tokenizer: Any
    digest: str
    shape: CacheShape
    inv_freq: torch.Tensor = field(repr=False)
    decoder: Decoder = field(repr=False)
    fixed: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, keys and values."""
        found: torch.dtype = self.model.dtype
        return found

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        found: torch.device = self.model.device
        return found

    @property
    def stops(self) -> frozenset[int]:
        """Tokens that end a reply."""
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        ends = self.model.config.eos_token_id if ends is None else ends
        return frozenset(ends if isinstance(ends, list) else [ends] if ends is not None else [])

    def key(self, tenant: str = "") -> PrefixKey:
        """The key under which sequences of this model and tenant share blocks and spilled files."""
        return PrefixKey(self.digest, str(self.dtype).removeprefix("torch."), tenant)

    def check_rotation(self) -> None:
        """Check that cached keys can be rotated to other positions.

        Raises:
            UnsupportedModel: this architecture pairs the entries of a key in another way, or has layers that do not rotate.
        """
        if self.fixed:
            raise self.decoder.refusal(f"{self.fixed}: what is cached has to stay at its position")

    def rotate(self, keys: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Cached keys as they would be `shift` positions further on; see `kilburn_kv.rotation.rotate`.

        Raises:
            UnsupportedModel: see `check_rotation`.
        """
        self.check_rotation()
        return rotate(keys, shift, self.inv_freq)

    @property
    def words(self) -> Any:
        """The tokenizer.

        Raises:
            SpecError: there is none.
        """
        if self.tokenizer is None:
            raise SpecError("these weights have no tokenizer", advice="give token ids, or load a folder with a tokenizer")
        return self.tokenizer

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text alone, without those that begin a sequence."""
        found: list[int] = self.words.encode(text, add_special_tokens=False)
        return found

    def text(self, tokens: list[int]) -> str:
        """The text of tokens, special ones included."""
        found: str = self.words.decode(tokens)
        return found


def load(path: str | Path, *, dtype: str = "float32", device: str = "cpu", keep: bool | None = None) -> Weights:
    """Read weights from a GGUF file or from a folder of transformers.

    Args:
        path: e.g. what `kilburn.models.weights.find("smollm2")` returns.
        dtype: "float32", "bfloat16" or "float16", of weights and cache.
        device: as torch names it: "cpu", "cuda".
        keep: for a GGUF file, whether to keep a copy in transformers' own format beside it (four bytes a weight),
            which loads in a second instead of fifteen; None keeps it for files under 256 MB.

    Raises:
        Unavailable: no such file, or transformers cannot read it. SpecError: a dtype that is none. UnsupportedModel:
        the engine cannot run such a model exactly. MissingExtra.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging as chatter
    except ModuleNotFoundError as error:
        raise MissingExtra("transformers", "torch") from error
    where = Path(path)
    kind = getattr(torch, dtype, None)
    if kind not in (torch.float32, torch.bfloat16, torch.float16):
        raise SpecError(f"dtype={dtype!r} is none of float32, bfloat16, float16")
    if not where.exists():
        raise Unavailable(f"there are no weights at {where}", advice="pull some: kilburn models pull smollm2")
    chatter.disable_progress_bar()  # type: ignore[no-untyped-call]
    digest = _digest(where)
    copy = where.parent / "converted" / f"{digest[:32]}-1"
    folder = where
    options: dict[str, Any] = {}
    if copy.is_dir():
        folder = copy
    elif where.is_file():
        folder, options = where.parent, {"gguf_file": where.name}
    extra: dict[str, Any] = {**options, "quantization_config": GgufConfig(dequantize=True)} if options else {}
    wanted = torch.float32 if options else kind
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted, local_files_only=True, **extra)
        known = bool(options) or any(folder.glob("tokenizer*"))
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **options) if known else None
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise Unavailable(f"transformers cannot read {where}: {error}", advice="give a GGUF file or a folder of it") from error
    if options and (keep or (keep is None and where.stat().st_size < SMALL)):
        _keep_copy(model, tokenizer, copy)
    model.to(device, kind)  # type: ignore[arg-type]
    return weights_of(model, tokenizer, digest)


def _keep_copy(model: Any, tokenizer: Any, place: Path) -> None:
    """Write a copy, whole or not at all."""
    try:
        place.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            made = Path(scratch) / "copy"
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
            made.rename(place)
    except OSError as error:
        # It only saves time: a folder that cannot be written, or that another process has just filled, is no reason to fail.
        log.info("no converted copy of the weights is kept: %s", error)


def weights_of(model: Any, tokenizer: Any = None, digest: str | None = None) -> Weights:
    """Weights from a model that is in memory; without a digest, that of its parameters is taken.

    The model is not changed, and can be used beside the engine. Its config is checked first; then a dozen tokens run
    over slots and alone, and must give the same logits.

    Raises:
        UnsupportedModel: the engine cannot run it exactly; its `family` and the message say which and why.
    """
    decoder = Decoder(model)
    inv_freq = _rotation_of(model, decoder)
    shape = _shape_of(model, decoder)
    fixed = prove(decoder, shape, inv_freq)
    return Weights(model, tokenizer, digest or _digest_of(model), shape, inv_freq, decoder, fixed)


def _rotation_of(model: Any, decoder: Decoder) -> torch.Tensor:
    """The inverse frequencies by which all layers rotate. Raises for a config that the engine cannot run."""
    config = model.config.get_text_config(decoder=True)
    # As in transformers' own caches: without a list of layers, a window or chunks apply to all layers.
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    kinds = set(
        getattr(config, "layer_types", None) or (["full_attention"] if window is None else [f"a window of {window} tokens"])
    )
    if kinds != {"full_attention"}:
        raise decoder.refusal(f"it has layers of {', '.join(sorted(map(str, kinds)))}")
    if getattr(config, "is_encoder_decoder", False):
        raise decoder.refusal("it is the decoder of an encoder")
    rotary = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor)]
    if not rotary:
        raise decoder.refusal("its positions are no rotation of keys")
    for module in rotary:
        kind = getattr(module, "rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise decoder.refusal(f"its rotation depends on the length ({kind})")
    found: torch.Tensor = rotary[0].inv_freq.detach().to(torch.float32)
    if any(module.inv_freq.shape != found.shape or not torch.equal(module.inv_freq.float(), found) for module in rotary):
        raise decoder.refusal("its layers rotate by different frequencies")
    return found


def _shape_of(model: Any, decoder: Decoder) -> CacheShape:
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None) or 0
    shared = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // (heads or 1)
    told = (getattr(config, "num_hidden_layers", None), heads, shared, dim)
    if not all(isinstance(each, int) and each > 0 for each in told) or heads % shared:
        raise decoder.refusal(f"its config tells no shape of keys and values (layers, heads, heads of keys, entries: {told})")
    return CacheShape(config.num_hidden_layers, shared, heads // shared, dim)


def _digest(where: Path) -> str:
    """Of a file, or of the weights in a folder."""
    files = [where] if where.is_file() else sorted([*where.glob("*.safetensors"), *where.glob("config.json")])
    whole = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()


def _digest_of(model: Any) -> str:
    whole = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in sorted(model.state_dict().items()):
        whole.update(name.encode())
        whole.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()
