"""Embedders: what makes vectors of texts. One file each."""
