"""Sandboxes, one a file. `cpython` is the default; `lockdown` and `interpreter` are what runs inside it."""

from kilburn.recursion.sandbox import Sandbox
from kilburn.submodules import attach

KIND = Sandbox
"""The class of which each module here has a subclass."""

attach(__name__)
