"""Rotates cached keys to other positions (RoPE, Su et al., arXiv 2104.09864), without computing them again.

For rotations that pair the first half of a head with the second, as transformers' Llama does. A key still depends on
what was visible when it was computed, so at another position it is exact only in the first layer.
"""

from __future__ import annotations

from kilburn_kv.tensors import Tensor, torch


def rotate(keys: Tensor, shift: Tensor, inv_freq: Tensor) -> Tensor:
    """The keys as they would be `shift` positions further on; a new tensor of the same dtype.

    Angles are computed in float64 and the rotation in float32 (float64 for keys in float64), so half precision is
    rounded once for each call. The rounding of many small steps adds up, and in bfloat16 a very small step is lost.
    So rotate the original keys by the whole shift, not keys that were rotated before. Where the shift is 0 a key
    stays as it is, bit for bit.

    Args:
        keys: rotated already, shape [..., n, dim].
        shift: in positions, backwards where negative; shape [n], or anything that broadcasts to [..., n].
        inv_freq: the model's inverse frequencies, shape [m]; only the first 2m entries of a key are rotated.
    """
    half = inv_freq.shape[-1]
    angles = shift.to(keys.device, torch.float64)[..., None] * inv_freq.to(keys.device, torch.float64)
    exact = torch.promote_types(keys.dtype, torch.float32)
    cos, sin = angles.cos().to(exact), angles.sin().to(exact)
    first, second = keys[..., :half].to(exact), keys[..., half : 2 * half].to(exact)
    turned = keys.clone()
    turned[..., :half] = (first * cos).sub_(second * sin)
    turned[..., half : 2 * half] = (second * cos).add_(first * sin)
    return turned
