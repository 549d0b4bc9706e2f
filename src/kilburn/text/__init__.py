"""What is in texts, and in the window that they stand in: lines and what they tell, facts, extracts, an agent's steps.

Pure functions, which policies, agents and measurements share. `extract` chooses lines of many pages, `condense` of one
long output, `selection` for an excerpt; `judge` holds a model's summary to its sources. What is kept of a text
is byte-identical.
"""
