"""Prompts for models that manage a memory, from the file `prompts.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path

_PROMPTS: dict[str, str] = tomllib.loads(Path(__file__).with_name("prompts.toml").read_text("utf-8"))


def prompt(name: str) -> str:
    """Return the system prompt with this name."""
    return _PROMPTS[name].replace("\n", " ")
