"""Measurements: each task reads a file that the caller names, or makes its own input from a seed.

It refuses to hold data or to ask a model: what is scored here needs no judge.
"""
