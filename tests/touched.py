"""Print the tests that belong to what differs from a commit: `python tests/touched.py [BASE]`, BASE being HEAD by default.

A package is touched if one of its modules differs, or imports a module that differs. Its tests are the folders and files that
`FOLDERS` names, or those of its own name. Tests that differ are printed themselves; a module that tests share stands for its
folder. What differs in kv/ or lab/ stands for kv/tests or lab/tests, which need `run.py test --all` to have installed torch.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
FOLDERS = {
    "kilburn": ("kernel", "wire", "test_file.py", "test_native.py", "test_public_surface.py"),
    "collections": ("kernel", "memory"),
    "forgetting": ("kernel", "backends"),
    "mcp": ("test_mcp.py",),
    "recursion": ("agents",),
    "search": ("backends", "kernel", "memory"),
    "selection": ("policies", "text"),
}
"""Tests of a package whose name is not theirs, below tests/. `kilburn` stands for the modules beside the packages."""
ALWAYS = ("test_house.py", "test_words.py")
PAGES = ("test_docs.py", "test_commands.py", "test_website.py")


def package_name(module: str) -> str:
    """Return the package of a module: `kernel` for `kilburn.kernel.store`, `kilburn` for `kilburn.page`."""
    parts = module.split(".")
    if parts[:3] == ["kilburn", "backends", "postgres"]:
        return "postgres"
    is_package = len(parts) > 1 and ((SOURCE / "kilburn" / parts[1]).is_dir() or parts[1] in FOLDERS)
    return parts[1] if is_package else "kilburn"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> Iterator[str]:
    """Yield what a file imports. `from a import b` may mean the module `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def changed_files(base: str) -> set[str]:
    """Return the paths that differ from a commit, untracked ones included."""
    commands = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    outputs = [subprocess.run(["git", *command], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True) for command in commands]
    return {line for output in outputs for line in output.stdout.splitlines()}


def tests_for(changed: set[str]) -> list[str]:
    """Return the paths of the tests to run, relative to the checkout."""
    modules = {module_name(ROOT / name) for name in changed if name.startswith("src/") and name.endswith(".py")}
    packages = {package_name(module) for module in modules}
    for path in SOURCE.rglob("*.py"):
        if modules & set(imported_modules(path)):
            packages.add(package_name(module_name(path)))
    names = {test for package in packages for test in FOLDERS.get(package, (package,))}
    names |= set(ALWAYS) if modules else set()
    names |= set(PAGES) if any(name.endswith(".md") for name in changed) else set()
    paths = {f"tests/{name}" for name in names}
    for name in changed:
        folder, _, rest = name.partition("/")
        if folder == "tests":
            paths.add(name if Path(name).name.startswith("test_") else str(Path(name).parent))
        elif folder in ("kv", "lab") and rest:
            paths.add(f"{folder}/tests")
        elif name in ("conftest.py", "pyproject.toml"):
            paths.add("tests")
    existing = sorted(path for path in paths if (ROOT / path).exists())
    # A test in a folder that runs as a whole is not named again.
    return [path for path in existing if not any(path != other and Path(other) in Path(path).parents for other in existing)]


if __name__ == "__main__":
    try:
        print(*tests_for(changed_files(*sys.argv[1:] or ["HEAD"])), sep="\n")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
