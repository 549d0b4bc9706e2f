"""Collections: memories and documents, segments that nobody speaks in; and their rules of validity."""

from kilburn.submodules import attach

attach(__name__)
