"""Pure functions over text: what its facts are, which lines to keep, whether a summary is to be trusted.

`extract` condenses a stretch of pages, `condense` one long output, `judge` and `complete` hold a model's
summary to its sources, `facts` and `identifiers` name what is in a text. No model, clock or I/O is used here;
whatever is kept is byte-identical.
"""
