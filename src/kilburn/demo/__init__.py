"""The demo: an agent reads the Python standard library, which every machine has, through a small window.

`explorer` reads it with the tools of `library`. `questions` makes questions, and `answers` answers them with `search` and
`recall`. `rivals` answers the same questions from a window without a store. `job` runs everything, and `kilburn.cli.demo`
prints it.
"""

from kilburn.submodules import attach

attach(__name__)
