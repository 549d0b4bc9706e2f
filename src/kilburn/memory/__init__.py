"""Long-term memory: what is learned from sessions, and how it is found. One policy a file."""
