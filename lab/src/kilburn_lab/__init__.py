"""The laboratory: measurements of policies, memory and caches, and what they alone need.

It imports Kilburn, and Kilburn never imports it. Its verbs appear as `kilburn lab` where it is installed.
"""

from kilburn.submodules import attach

attach(__name__)
