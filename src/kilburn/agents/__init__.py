"""Agents: loops that decide when a model is called. Each is a file; none depends on a provider or a store."""

from kilburn.submodules import attach

attach(__name__)
