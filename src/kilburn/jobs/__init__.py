"""Work in the background that any worker takes: what is to be done is read from the store, and nothing is queued."""

from __future__ import annotations

from kilburn.submodules import attach

attach(__name__)
