"""Long-term memory: what is learned from sessions, and how it is found. One policy a file."""

from kilburn.memory.learning import Learned, Learning, alearn, learn

__all__ = ["Learned", "Learning", "alearn", "learn"]
