"""Foreign JSON to messages and back: OpenAI's chat form and Anthropic's messages form.

`form` reads and rebuilds, `chat` and `messages` render for a provider, `validity` checks what a provider would
refuse. Nothing here knows pages, windows or stores: it sees messages only.
"""

from kilburn.submodules import attach

attach(__name__)
