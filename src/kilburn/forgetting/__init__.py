"""Forgetting: what was made from what, and its erasure from every place."""

from kilburn.submodules import attach

attach(__name__)
