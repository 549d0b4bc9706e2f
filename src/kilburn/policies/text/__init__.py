"""Pure functions over text: what its facts are, which lines to keep, whether a summary is to be trusted.

No models, no I/O; whatever is kept is byte-identical. Policies build on it.
"""
