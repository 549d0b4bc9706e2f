"""The gateway: an HTTP server between an agent and its model, that gives the agent's history a one-level store.

`app.build` makes the ASGI application, `kilburn serve` runs it. A client's history becomes appends to a session of its tenant
(`history`), a prompt within the window goes upstream (`relay`, `upstream`), and the model's memory calls are answered here.
"""

from kilburn.submodules import attach

attach(__name__)
