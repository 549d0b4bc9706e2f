"""Long-term memory: what is learned from sessions, and how it is found. One policy a file."""

from kilburn.memory.learning import Learned, Learning, alearn, learn
from kilburn.submodules import attach

__all__ = ["Learned", "Learning", "alearn", "learn"]

attach(__name__)
