"""The main job on input that every machine has: the Python standard library through a small window.

`explorer` reads it with the tools of `library`, `questions` asks, `answers` answers by `search` and `recall`,
`rivals` are asked the same with what they kept; `job` runs it all and `kilburn.cli.demo` shows it.
"""
