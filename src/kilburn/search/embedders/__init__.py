"""Embedders: what makes vectors of texts. One file each."""

from kilburn.retrieval import Embedder
from kilburn.submodules import attach

KIND = Embedder
"""What each file here has a class of."""

attach(__name__)
