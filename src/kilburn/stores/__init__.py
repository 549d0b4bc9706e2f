"""Stores: where pages, ledger, state and text index live below the window.

Each file is one store or one part of the SQLite store; a store refuses to decide anything.
"""
