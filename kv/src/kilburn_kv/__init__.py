"""The KV cache: the engine of a real model, and the bookkeeping of its blocks.

`blocks` is the pool, `table` is one sequence, and `tables` is all sequences over a pool. These three have no tensors:
the engine owns the tensors, writes where `append` says, and copies what `copies` says.
"""

from kilburn.submodules import attach

attach(__name__)
