"""Stores: where pages, ledger, state and text index live below the window.

Each file is a store, or a part of the SQLite store.
"""

from kilburn.submodules import attach

attach(__name__)
