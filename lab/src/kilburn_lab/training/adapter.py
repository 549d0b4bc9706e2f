"""A low-rank adapter (LoRA, arXiv 2106.09685): it is trained beside frozen weights, and merged into them for some replies.

To unmerge is to put the weights back that were there, and not to subtract: so they are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kilburn.errors import MissingExtra, SpecError
from kilburn.file import write_file
from kilburn_lab.training.transformer import Transformer

try:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load as read_tensors
    from safetensors.torch import save as tensors_of
    from torch import Tensor, nn
    from torch.nn.utils import parametrize
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "torch", "train") from error


class LowRank(nn.Module):
    """What is added to a matrix of weights: the product of two thin ones, of which the second begins as zeros."""

    def __init__(self, weight: Tensor, rank: int, chance: torch.Generator) -> None:
        super().__init__()
        out, width = weight.shape
        self.a = nn.Parameter(torch.randn(rank, width, generator=chance) * width**-0.5)
        self.b = nn.Parameter(torch.zeros(out, rank))

    def forward(self, weight: Tensor) -> Tensor:
        """The weights with what is added."""
        return weight + self.b @ self.a


def adapt(model: Transformer, rank: int, seed: int = 0) -> Transformer:
    """Freeze a transformer's weights, and let an adapter of this rank stand beside each matrix of its blocks."""
    chance = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for part in _matrices(model).values():
        parametrize.register_parametrization(part, "weight", LowRank(part.weight, rank, chance))
    return model


def save_adapter(path: Path, model: Transformer) -> None:
    """Write the adapter of a transformer, without its weights."""
    tensors: dict[str, Tensor] = {}
    for name, part in model.blocks.named_modules():
        if isinstance(part, LowRank):
            matrix = name.removesuffix(".parametrizations.weight.0")
            tensors |= {f"{matrix}.a": part.a.detach().contiguous(), f"{matrix}.b": part.b.detach().contiguous()}
    with write_file(path, force=True) as file:
        file.write(tensors_of(tensors))


def load_adapter(path: Path, model: Transformer) -> dict[str, Tensor]:
    """What an adapter adds to each matrix of a transformer, by name.

    Raises:
        SpecError: there is none, it is damaged, or it belongs to a transformer of another shape.
    """
    try:
        tensors = read_tensors(path.read_bytes())
        added = {name: tensors[f"{name}.b"] @ tensors[f"{name}.a"] for name in _matrices(model)}
        if any(added[name].shape != part.weight.shape for name, part in _matrices(model).items()):
            raise ValueError("the shapes differ")
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise SpecError(f"no adapter at {path}: {str(error)[:200]}", advice="give the .safetensors of a recipe") from error
    return added


@contextmanager
def merged(model: Transformer, added: dict[str, Tensor]) -> Iterator[Transformer]:
    """The transformer with an adapter merged in; afterwards its weights are what they were, to the bit."""
    matrices = _matrices(model)
    before = {name: part.weight.detach().clone() for name, part in matrices.items()}
    with torch.no_grad():
        try:
            for name, part in matrices.items():
                part.weight += added[name]
            yield model
        finally:
            for name, part in matrices.items():
                part.weight.copy_(before[name])


def _matrices(model: Transformer) -> dict[str, nn.Linear]:
    return {name: part for name, part in model.blocks.named_modules() if isinstance(part, nn.Linear)}
