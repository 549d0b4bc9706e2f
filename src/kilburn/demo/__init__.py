"""The main job on input that every machine has: the Python standard library through a small window.

`explorer` works, `questions` asks, `answers` answers from memory alone, `rivals` try the same with
what they kept, `job` runs it all, `report` shows it. It refuses to be needed by anything else.
"""
