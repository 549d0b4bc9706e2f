"""Sandboxes, one a file. `cpython` is the default; `lockdown` and `interpreter` are what runs inside it."""

from kilburn.recursion.sandbox import Sandbox
from kilburn.submodules import attach

KIND = Sandbox
"""What each file here has a class of."""

attach(__name__)
