"""The demo: an agent reads the Python standard library, which every machine has, through a small window.

`explorer` reads it with the tools of `library`. `questions` makes questions, and `answers` answers them by `search`
and `recall`. `rivals` answer the same questions from what they kept. `job` runs everything, and `kilburn.cli.demo`
shows it.
"""

from kilburn.submodules import attach

attach(__name__)
