"""Language models, one file each. The name in a spec is a module here, and the class has the module's name.

    scripted, echo     public fakes
    local              a GGUF file in this process, by llama.cpp
    chat               any endpoint that speaks OpenAI's chat completions
    messages           Anthropic's messages endpoint

The other modules are shared by them: where weights come from, how errors are named, when a call is repeated. No SDK
or runtime is imported until a model is created.
"""

from kilburn import tracing  # noqa: F401 -- from now on it sees each question to a model
from kilburn.model import Model
from kilburn.submodules import attach

KIND = Model
"""What each file here has a class of."""

attach(__name__)
