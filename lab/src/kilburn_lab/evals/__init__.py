"""Measurements: each reads a file that the caller names, or makes its own input from a seed.

No data is shipped, and no model judges a result.
"""

from kilburn.submodules import attach

attach(__name__)
