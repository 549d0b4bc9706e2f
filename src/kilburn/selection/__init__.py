"""What is in texts, and in the window that they stand in: lines and what they tell, facts, extracts, an agent's steps.

Pure functions, which policies, agents and measurements share. `selection` chooses for all: passages for an excerpt, and
lines for `extract` (of many pages) and `condense` (of one long output). `judge` holds a model's summary to its sources.
What is kept of a text is byte-identical.
"""

from kilburn.submodules import attach

attach(__name__)
