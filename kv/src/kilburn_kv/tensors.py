"""torch, or the error that names the extra: modules of the KV level that hold tensors import it from here."""

from __future__ import annotations

from kilburn.errors import MissingExtra

try:
    import torch as torch
    from torch import Tensor as Tensor
except ModuleNotFoundError as error:  # pragma: no cover - the tests install the extra
    raise MissingExtra("torch", "torch") from error
