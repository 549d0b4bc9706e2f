"""Language models, a file each: a spec's name is a module here, and its class is the module's name.

    scripted, echo     public fakes
    local              a GGUF file in this process, by llama.cpp
    chat               any endpoint that speaks OpenAI's chat completions
    messages           Anthropic's messages endpoint

Beside them stands what they share: where weights come from, how errors are named, when a call is made
again. Nothing here imports an SDK or a runtime until a model is made.
"""
