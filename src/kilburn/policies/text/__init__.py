"""Pure functions over text: what its facts are, which lines to keep, whether a summary is to be trusted.

`extract` condenses a stretch of pages, `condense` one long output, `passages` cuts for the search
index, `judge` and `complete` hold a model's summary to its sources, `facts` and `identifiers` name
what is in a text. The package refuses models, clocks and I/O; whatever it keeps is byte-identical.
"""
