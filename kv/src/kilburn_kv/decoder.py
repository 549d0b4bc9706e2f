"""A model of transformers that runs over slots, and a trial run that shows that its logits are the same as without them.

The caller's model is never changed. A `Decoder` is a copy of its modules with the same parameters and buffers, but
its own configs. So `generate`, masks, dropout and hooks of the model stay what they were, also while an engine runs
or after it failed. An architecture is refused if the trial run fails: if a layer bypasses this attention, or the
logits over slots differ.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kilburn.errors import UnsupportedModel
from kilburn_kv.attention import NAME, PROBE, ForwardPass, ForwardSegment, register
from kilburn_kv.rotation import rotate
from kilburn_kv.storage import CacheShape, Storage, span_of
from kilburn_kv.tensors import Tensor, torch

TOKENS = 12
"""Tokens of the longer of the two sequences of the trial run: few, because the model may be large."""

SHIFT = 5
"""By how many positions the trial run moves a sequence, to find out whether its keys can be rotated."""

CLOSE = {torch.float64: 5e-3, torch.float32: 5e-3, torch.float16: 0.1}
"""How far two computations may be apart: root mean square, as a share of the spread.

0.3 for other dtypes: in bfloat16 the 30 layers of SmolLM2 reach 0.13.
"""

MOST = 0.75
"""Tokens that have to be close. In half precision a router may choose other experts for a token because of rounding
alone."""


class Decoder:
    """A causal language model over slots.

    Args:
        model: of transformers. It shares parameters and buffers, and is not changed.

    Attributes:
        family: what transformers calls the architecture.
        vocabulary: token ids that it knows.
    """

    def __init__(self, model: Any) -> None:
        register()
        self.family = str(getattr(model.config, "model_type", type(model).__name__))
        self.model = twin(model, NAME)
        size = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
        if not isinstance(size, int):
            raise self.refusal("its config names no vocab_size")
        self.vocabulary = size

    def refusal(self, reason: str) -> UnsupportedModel:
        """The error for something that this architecture does not allow."""
        return UnsupportedModel(self.family, reason)

    def run(self, tokens: Sequence[int], places: Sequence[int], last: Sequence[int], step: ForwardPass) -> Tensor:
        """One forward pass over flat tokens at these positions: the logits after the tokens in `last`.

        Raises:
            UnsupportedModel: a layer did not attend to the step, or attended twice.
        """
        device = step.storage.device
        with torch.inference_mode(), step:
            out = self.model(
                input_ids=torch.tensor([list(tokens)], device=device),
                position_ids=torch.tensor([list(places)], device=device),
                use_cache=False,
                logits_to_keep=torch.tensor(last, device=device),
            )
        layers = step.storage.shape.layers
        if any(count != 1 for count in step.seen) or len(step.seen) != layers:
            missed = [layer for layer, count in enumerate(step.seen) if count != 1]
            raise self.refusal(f"of {layers} layers {missed} did not attend to the step exactly once")
        logits: Tensor = out.logits[0]
        return logits


def prove(decoder: Decoder, shape: CacheShape, inv_freq: Tensor) -> str:
    """The trial run: two short sequences over slots and alone; returns why keys cannot be rotated, or "" if they can.

    Raises:
        UnsupportedModel: the model's logits over slots differ, or it cannot be run over slots.
    """
    try:
        with _attention_named(decoder.model, PROBE):
            return _prove(decoder, shape, inv_freq)
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Whatever a model raises here, it means that the engine cannot run it.
        raise decoder.refusal(f"it cannot be run over slots: {type(error).__name__}: {str(error)[:200]}") from error


def _prove(decoder: Decoder, shape: CacheShape, inv_freq: Tensor) -> str:
    model = decoder.model
    chance = torch.Generator().manual_seed(0)
    low = min(3, decoder.vocabulary - 1)
    long, short = (torch.randint(low, decoder.vocabulary, (count,), generator=chance).tolist() for count in (TOKENS, TOKENS - 3))
    device, dtype = model.device, model.dtype
    storage = Storage(shape, 4 * TOKENS, dtype, device)
    # Three sequences, the third as the first but later; slots are taken in turn, so that none has a run of neighbours.
    feeds, starts = (long, short, long), (0, 0, SHIFT)
    slots = [array("q", range(row, 4 * TOKENS, 4)) for row in range(3)]
    found: list[list[Tensor]] = [[], [], []]
    done = 0
    for upto in (TOKENS - 5, TOKENS - 1, TOKENS):
        tokens: list[int] = []
        places: list[int] = []
        written = array("q")
        segments = []
        for row, feed in enumerate(feeds):
            piece = feed[done:upto]
            if piece:
                at = len(tokens)
                tokens += piece
                places += range(starts[row] + done, starts[row] + done + len(piece))
                written += slots[row][done : done + len(piece)]
                segments.append((row, ForwardSegment(at, len(tokens), span_of(slots[row][: done + len(piece)], device))))
        step = ForwardPass(storage, span_of(written, device), [segment for _, segment in segments])
        logits = decoder.run(tokens, places, range(len(tokens)), step)
        for row, segment in segments:
            found[row].append(logits[segment.start : segment.stop])
        done = upto
    with torch.inference_mode(), _attention_named(model, "eager"):
        for row, feed in enumerate((long, short)):
            expected = model(input_ids=torch.tensor([feed], device=device), use_cache=False).logits[0]
            _check_logits(decoder, torch.cat(found[row]), expected)
    rows = [torch.tensor(slots[row], device=device) for row in (0, 2)]
    (before, _), (after, _) = storage.gather(rows[0]), storage.gather(rows[1])
    turned = rotate(before, torch.full((TOKENS,), SHIFT, device=device), inv_freq)
    # Token by token, of each layer: the others may be close where a router chose otherwise for one.
    far = _distance(turned.transpose(1, 2).flatten(2), after.transpose(1, 2).flatten(2)) > CLOSE.get(dtype, 0.3)
    wrong = (far.float().mean(dim=1) > 1 - _least_share(dtype)).nonzero()[:, 0].tolist()
    return f"keys of layers {wrong} at other positions are not these keys rotated" if wrong else ""


def _check_logits(decoder: Decoder, found: Tensor, expected: Tensor) -> None:
    apart = _distance(found, expected)
    fine = (apart <= CLOSE.get(expected.dtype, 0.3)).float().mean().item()
    if not fine >= _least_share(expected.dtype):
        raise decoder.refusal(
            f"over slots it says something else than alone (logits differ by {apart.max().item():.2g} of their spread)"
        )


def _distance(found: Tensor, expected: Tensor) -> Tensor:
    """How far rows are apart, as a share of their spread; shape without the last dimension."""
    found, expected = found.float(), expected.float()
    return (found - expected).square().mean(dim=-1).sqrt() / expected.std(dim=-1).clamp_min(1e-30)


def _least_share(dtype: torch.dtype) -> float:
    return 1.0 if dtype in (torch.float32, torch.float64) else MOST


@contextmanager
def _attention_named(twin: Any, name: str) -> Iterator[None]:
    """Sets another attention in the configs of a twin for a while."""
    before = [(config, config._attn_implementation_internal) for config in _configs(twin)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own


def twin(model: Any, name: str) -> Any:
    """The modules of a model once more: same parameters, buffers and hooks, configs of their own, the attention of that name,
    never in training."""
    from transformers import PreTrainedConfig

    memo: dict[int, Any] = {}
    made: dict[int, torch.nn.Module] = {}

    def again(module: torch.nn.Module) -> torch.nn.Module:
        if id(module) not in made:
            other = made[id(module)] = type(module).__new__(type(module))
            # The dictionaries of parameters, buffers and hooks are the same objects: `model.to` reaches both.
            other.__dict__.update(module.__dict__)
            other.__dict__["training"] = False
            other.__dict__["_modules"] = {
                key: again(child) if child is not None else None for key, child in module._modules.items()
            }
            for key, value in module.__dict__.items():
                if isinstance(value, PreTrainedConfig):
                    other.__dict__[key] = copy.deepcopy(value, memo)
        return made[id(module)]

    whole = again(model)
    for config in _configs(whole):
        config._attn_implementation_internal = name
    return whole


def _configs(twin: Any) -> Iterator[Any]:
    """All configs that a model's modules read, each once, including nested ones."""
    from transformers import PreTrainedConfig

    waiting = [value for module in twin.modules() for value in module.__dict__.values() if isinstance(value, PreTrainedConfig)]
    known: set[int] = set()
    while waiting:
        config = waiting.pop()
        if id(config) not in known:
            known.add(id(config))
            waiting += [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
            yield config
