"""The store in PostgreSQL: for many programs on many machines."""

from kilburn.submodules import attach

attach(__name__)
