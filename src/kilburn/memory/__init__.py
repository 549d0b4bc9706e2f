"""Long-term memory: what is learned from sessions, and how it is found. One policy a file."""

from kilburn.memory.view import MemoryPolicy
from kilburn.submodules import attach

KIND = MemoryPolicy
"""What a policy of the memory is; each is in a file here."""

attach(__name__)
