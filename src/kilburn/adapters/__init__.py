"""Kilburn in the frameworks that people have: one small module each.

Every turn of the framework is appended to a process, and what the framework sends to its model is the process's window. Each
module imports its framework when it is imported; docs/howto/adapters.md shows all of them at work.
"""

from kilburn.submodules import attach

attach(__name__)
