"""Measurements of policies: `paging`, `drift` and `kv`, each on a file that the caller names, or on input made from a seed.

What is scored needs no judge: names, words and units of a cache are there or they are not.
"""
