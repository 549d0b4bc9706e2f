"""Recursive models: code in a sandbox that asks models about a text of any length."""

from kilburn.submodules import attach

attach(__name__)
