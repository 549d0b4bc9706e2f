"""The same moves on llama.cpp: sequences in one context (`engine`), and slots of its server (`slots`).

What llama.cpp cannot do exactly, these say; what would end the process, they refuse first.
"""
