"""Policies, one file each. They decide and do nothing else: there is no store, no model and no clock here.

`kilburn.kernel.resolve` finds them by name: "lru" is class `Lru` of `kilburn.policies.lru`.
"""

from kilburn.policy import Policy
from kilburn.submodules import attach

KIND = Policy
"""What each file here has a class of."""

attach(__name__)
