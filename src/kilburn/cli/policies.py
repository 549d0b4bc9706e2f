"""`policies`: lists the policies by the names that a spec uses."""

from __future__ import annotations

import inspect

from kilburn.cli.screen import show_records
from kilburn.cli.shell import Json, app
from kilburn.kernel.resolve import locate, names


@app.command()
def policies(json: Json = False) -> None:
    """List the policies that ship with Kilburn, with their arguments.

    Example:

        kilburn policies
    """
    rows = []
    for name in names("policies"):
        policy = locate("policies", name)
        arguments = ", ".join(_argument(parameter) for parameter in inspect.signature(policy).parameters.values())
        rows.append({"name": name, "arguments": arguments, "what": (inspect.getdoc(policy) or "").partition("\n")[0]})
    show_records(rows, {key: key for key in ("name", "arguments", "what")}, json=json)


def _argument(parameter: inspect.Parameter) -> str:
    """Return an argument as a spec writes it."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
