"""Finds and loads the models that commands use."""

from __future__ import annotations

from contextlib import closing, nullcontext
from importlib.util import find_spec
from typing import Any

import kilburn
from kilburn.cli.screen import progress
from kilburn.errors import MissingExtra
from kilburn.kernel.resolve import resolve
from kilburn.kernel.store import Store
from kilburn.models.detection import detect
from kilburn.models.download import Progress
from kilburn.models.weights import catalogue, pull
from kilburn.terminal import line, say

CONNECT = "set OPENAI_API_KEY or ANTHROPIC_API_KEY, start Ollama, llama.cpp or vLLM on this machine, or give --model SPEC"
"""Advice on how to connect a language model."""


def closing_model(model: Any) -> Any:
    """Return a context that closes the model at its end."""
    return closing(model) if hasattr(model, "close") else nullcontext(model)


def open_for_agent(db: str | None, tenant: str | None, model: Any, *, window: int, policy: str, reply: int) -> Store:
    """Open a store for an agent, with a window that fits its model.

    Args:
        reply: maximum tokens of a reply.
    """
    size = min(window, getattr(model, "context", None) or window)
    return kilburn.open(
        db or "agent.db", window=size, policy=policy, tenant=tenant or "default", reserve=min(reply, size // 2), model=model
    )


def detected_model() -> str | None:
    """Return the spec of a model that is available on this machine, and name it on standard error; None if there is none."""
    model = detect()
    if model is None:
        return None
    say(line(f"{model.name} answers, because {model.reason}; choose another model with --model"))
    return model.spec


def load_model(spec: str) -> Any:
    """Load the model of a spec; see `open_model`. A missing file is downloaded first, with a progress bar."""
    with progress(f"loading {spec}", unit="bytes") as report:
        return open_model(spec, lambda _, have, total: report(have, total or None))


def open_model(spec: str | None, fetch: Progress | None = None) -> Any:
    """Load the model of a spec, a name of the catalogue, an `hf:` name or a GGUF file; None for "none".

    Args:
        fetch: download a missing file first, and report the progress to this function.

    Raises:
        SpecError: unknown name. ModelError, MissingExtra: the model is not available.
    """
    if spec is None or spec == "none":
        return None
    names = {item.name for item in catalogue() if item.form == "GGUF"}
    if not (spec.startswith("hf:") or spec.endswith(".gguf") or spec in names):
        return resolve("models", spec)
    if find_spec("xllamacpp") is None:
        # Checked before the download, which would be useless.
        raise MissingExtra("xllamacpp", "local")
    if fetch is not None:
        pull(spec, progress=fetch)
    return resolve("models", f"local({spec!r})")
