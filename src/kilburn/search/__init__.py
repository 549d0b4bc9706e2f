"""Search: what a query finds in sessions, facts and documents, by words and by meaning, and how sure that is."""

from kilburn.submodules import attach

attach(__name__)
