"""Counting tokens: `choice.counter_for` turns a model's name into a `kilburn.budget.Counter`.

Nothing heavy is imported before the first count. Counters return numbers only, never the tokens.
"""

from kilburn.submodules import attach

attach(__name__)
