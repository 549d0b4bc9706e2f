"""Checks of the numbers that policies are given."""

from __future__ import annotations


def check_tokens(**settings: int | None) -> None:
    """Refuse a negative number of tokens, each passed under its name; None leaves the choice to the policy.

    Raises:
        ValueError: one is.
    """
    for name, value in settings.items():
        if value is not None and value < 0:
            raise ValueError(f"{name}={value} is not a number of tokens; give 0 or more, or None")


def check_timeout(seconds: float) -> None:
    """Refuse a time in which no model can answer.

    Raises:
        ValueError: it is not above 0.
    """
    if not seconds > 0:
        raise ValueError(f"timeout={seconds} seconds leave no time; give more than 0")
