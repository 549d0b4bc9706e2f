"""Long-term memory: what is learned from sessions, and how it is found. One policy a file."""

from kilburn.memory.learning import Learned, Learning, alearn, learn
from kilburn.memory.view import MemoryPolicy
from kilburn.submodules import attach

__all__ = ["Learned", "Learning", "alearn", "learn"]

KIND = MemoryPolicy
"""What a policy of the memory is; each is in a file here."""

attach(__name__)
