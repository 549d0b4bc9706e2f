"""Agents: loops that decide when a model is called. One module each; none depends on a provider or a store."""

from kilburn.submodules import attach

attach(__name__)
