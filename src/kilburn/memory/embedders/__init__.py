"""Embedders: what makes vectors of texts. One file each."""

from kilburn.submodules import attach

attach(__name__)
