"""Torture: random sessions under every policy, with mishaps at every effect, and a judge who looks from outside.

    kilburn eval torture --seconds 60 --seed 1

Exceptions and cancellations strike at counts, questions and awaits; threads and processes look on and write meanwhile;
odd values come in everywhere. A violation is one broken promise, with the seed that brings it back.
"""
