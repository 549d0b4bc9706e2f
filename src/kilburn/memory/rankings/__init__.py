"""Rankings: what puts the candidates of a search in order. One file each."""

from kilburn.submodules import attach

attach(__name__)
