"""Training in small: a kit for recipes that train a mechanism, and the model that uses what they trained.

A recipe has a world of its own in which the mechanism is needed by construction, and a transformer of some hundred thousand
parameters. `words` is the tokenizer, `transformer` the weights, `steps` the losses, `course` a run that can be killed and goes
on, `report` its figures, `recipe` the command line. `model` lets a trained checkpoint answer in the real kernel.
"""
