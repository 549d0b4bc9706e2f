"""The KV cache in blocks: who owns which block, where each token of a sequence lies, what may be shared.

`blocks` is the pool, `table` one sequence, `tables` all sequences over a pool. Nothing in here holds a
key or a value: an engine owns the tensors, writes where `append` says, and copies what `copies` says.
"""
