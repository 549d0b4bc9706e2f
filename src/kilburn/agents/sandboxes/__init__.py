"""Sandboxes, one a file. `cpython` is the default; `lockdown` and `interpreter` are what runs inside it."""

from kilburn.submodules import attach

attach(__name__)
