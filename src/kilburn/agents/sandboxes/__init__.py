"""Sandboxes, one a file. `cpython` is the default; `lockdown` and `interpreter` are what runs inside it."""
