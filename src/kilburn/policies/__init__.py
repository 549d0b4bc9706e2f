"""Policies, a file each. They decide and do nothing else: no store, no model, no clock in here.

`kilburn.kernel.resolve` finds them by name: "lru" is class `Lru` of `kilburn.policies.lru`.
"""
