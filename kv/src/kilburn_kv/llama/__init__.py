"""The same moves on llama.cpp: sequences in one context (`engine`), and slots of its server (`slots`).

`exact` says where llama.cpp is not exact. Calls that would end the session raise instead.
"""

from kilburn.submodules import attach

attach(__name__)
