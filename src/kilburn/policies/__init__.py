"""Policies, a file each. A policy decides which pages move. It uses no store, no model and no clock.

`kilburn.kernel.resolve` finds them by name: "lru" is class `Lru` of `kilburn.policies.lru`.
"""
