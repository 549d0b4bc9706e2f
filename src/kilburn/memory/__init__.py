"""Long-term memory: what is learned from sessions, and how it is found. One policy a file."""

from kilburn.memory.learning import Learned, Learning
from kilburn.memory.view import MemoryPolicy
from kilburn.submodules import attach

__all__ = ["Learned", "Learning"]

KIND = MemoryPolicy
"""What a policy of the memory is; each is in a file here."""

attach(__name__)
