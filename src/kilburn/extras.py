"""How an extra is installed beside this Kilburn, wherever it is from: no package index is known to have it.

Installers note where a package came from (`direct_url.json`, PEP 610): a folder, a repository, an archive. Without such a note
the extra's own requirements are named, which any index has.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


BESIDE = {
    "kv": ("kilburn-kv", "kv", ""),
    "torch": ("kilburn-kv[torch]", "kv", "[torch]"),
    "llama": ("kilburn-kv[llama]", "kv", "[llama]"),
    "vllm": ("kilburn-kv[vllm]", "kv", "[vllm]"),
    "lab": ("kilburn-lab", "lab", ""),
    "train": ("kilburn-lab[train]", "lab", "[train]"),
    "trl": ("kilburn-lab[trl]", "lab", "[trl]"),
}
"""Extras that are distributions of their own: the requirement, its folder beside the product, and the extra in it."""


def command(extra: str) -> str:
    """The command that installs an extra, into the Python that runs."""
    return f"{_pip()} install {_wanted(extra)}"


def _pip() -> str:
    """Return `pip` if the shell's `pip` is that of this Python, else this Python by its path, because its environment need not be
    active."""
    import shutil
    import sys
    from pathlib import Path

    path = shutil.which("pip")
    if not sys.executable or (path and Path(path).parent == Path(sys.executable).parent):
        return "pip"
    return f'"{sys.executable}" -m pip'


@cache
def _wanted(extra: str) -> str:
    """What to install for an extra."""
    # Only where something is missing.
    from importlib.metadata import PackageNotFoundError, distribution
    from pathlib import Path

    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "src" / "kilburn").is_dir() and (checkout / "pyproject.toml").is_file():
        return _folder(checkout, extra, "-e ")
    try:
        installed = distribution("kilburn")
    except PackageNotFoundError:
        return f'".[{extra}]" in the checkout'
    origin = _origin(installed.read_text("direct_url.json"), extra)
    return origin or " ".join(_requirements(installed.requires or [], extra))


def _origin(note: str | None, extra: str) -> str:
    """Return the requirement from which to install an extra, derived from an installer's note of the package's origin; "" if the
    origin is missing or unknown."""
    import json
    from pathlib import Path
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        record = json.loads(note or "{}")
        url = record.get("url", "")
        if url.startswith("file:"):
            place = Path(url2pathname(urlsplit(url).path))
            if not place.exists():
                return ""
            if place.is_dir() and "vcs_info" not in record:
                flag = "-e " if record.get("dir_info", {}).get("editable") else ""
                return _folder(place, extra, flag)
        if extra in BESIDE and url.endswith(".whl"):
            return ""  # it holds the product alone
        name, folder, _ = BESIDE.get(extra, (f"kilburn[{extra}]", "", ""))
        folder = "/".join(filter(None, (record.get("subdirectory"), folder)))
        below = f"subdirectory={folder}" if folder else ""
        if "vcs_info" in record:
            local = url.startswith("file:")
            url = f"{record['vcs_info']['vcs']}+{url}@{record['vcs_info']['commit_id']}"
            if local:
                # Before an @ such an address must have a host.
                return f'"{url}#{"&".join(filter(None, [f"egg={name}", below]))}"'
        if below:
            url += f"#{below}"
    except (ValueError, TypeError, AttributeError, KeyError):
        return ""
    return f'"{name} @ {url}"' if "://" in url else ""


def _folder(place: Path, extra: str, flag: str) -> str:
    """What to install an extra from, in a checkout: what is beside the product comes together with it."""
    if extra not in BESIDE:
        return f'{flag}"{place}[{extra}]"'
    _, folder, inner = BESIDE[extra]
    return f'{flag}"{place}" {flag}"{place / folder}{inner}"'


def _requirements(requires: list[str], extra: str) -> list[str]:
    """The requirements of an extra, in quotes, those of extras within it among them."""
    requirements: dict[str, None] = {}
    for line in requires:
        requirement, _, marker = line.partition(";")
        if f'extra == "{extra}"' not in marker.replace("'", '"'):
            continue
        if requirement.startswith("kilburn["):
            for inner in requirement.strip()[len("kilburn[") : -1].split(","):
                requirements.update(dict.fromkeys(_requirements(requires, inner.strip())))
        else:
            requirements[f'"{requirement.strip()}"'] = None
    return list(requirements)
