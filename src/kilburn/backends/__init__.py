"""Stores: where pages, ledger, state and text index live below the window.

Each file is a store, or a part of the SQLite store.
"""

from kilburn.backend import Backend
from kilburn.submodules import attach

KIND = Backend
"""What each file here has a class of."""

attach(__name__)
