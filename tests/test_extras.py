"""How an extra is installed beside a Kilburn of any origin: by real notes of installers, in interpreters of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kilburn import extras
from kilburn.errors import MissingExtra

ROOT = Path(__file__).resolve().parent.parent
METADATA = """Metadata-Version: 2.4
Name: kilburn
Version: 0.1.0
Requires-Dist: msgspec>=0.19
Provides-Extra: embed
Requires-Dist: numpy>=2; extra == 'embed'
Requires-Dist: onnx>=1.18; extra == "embed"
Provides-Extra: claude-tokens
Requires-Dist: ctok>=1.3; (python_version >= "3.12") and extra == 'claude-tokens'
Provides-Extra: kv
Requires-Dist: kilburn-kv==0.1.0; extra == 'kv'
Provides-Extra: all
Requires-Dist: kilburn[embed]; extra == 'all'
"""


def installed(folder: Path, note: Any, extra: str = "embed") -> str:
    """The command of a Kilburn that was installed into a folder, with an installer's note of where it came from."""
    (folder / "kilburn").mkdir(parents=True)
    (folder / "kilburn" / "__init__.py").touch()
    shutil.copy(Path(extras.__file__), folder / "kilburn")
    if note is not None:
        metadata = folder / "kilburn-0.1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(METADATA, encoding="utf-8")
        if note != "":
            (metadata / "direct_url.json").write_text(note if isinstance(note, str) else json.dumps(note), encoding="utf-8")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from kilburn.extras import command; print(command(sys.argv[2]))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, folder, extra], capture_output=True, text=True, check=True)
    return plain(done.stdout.strip())


def plain(command: str) -> str:
    """A command as it is where the shell finds this Python's pip."""
    return command.replace(f'"{sys.executable}" -m pip ', "pip ", 1)


def test_another_pip_than_that_of_this_python_is_not_named(tmp_path: Path) -> None:
    (tmp_path / "pip").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "pip").chmod(0o755)
    code = "from kilburn.extras import command; print(command('mcp'))"
    environment = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == f'"{sys.executable}" -m pip install -e "{ROOT}[mcp]"\n'


def test_a_checkout_is_named() -> None:
    assert plain(extras.command("mcp")) == f'pip install -e "{ROOT}[mcp]"'
    error = MissingExtra("numpy", "embed")
    assert error.advice == extras.command("embed")
    assert plain(extras.command("kv")) == f'pip install -e "{ROOT}" -e "{ROOT}/kv"'
    assert plain(extras.command("trl")) == f'pip install -e "{ROOT}" -e "{ROOT}/lab[trl]"'
    assert plain(extras.command("llama")) == f'pip install -e "{ROOT}" -e "{ROOT}/kv[llama]"'


def test_a_folder_is_named_while_it_is_there(tmp_path: Path) -> None:
    place = tmp_path / "a checkout"
    place.mkdir()
    note = {"url": place.as_uri(), "dir_info": {}}
    assert installed(tmp_path / "1", note) == f'pip install "{place}[embed]"'
    assert installed(tmp_path / "4", note, "lab") == f'pip install "{place}" "{place}/lab"'
    note["dir_info"] = {"editable": True}
    assert installed(tmp_path / "2", note) == f'pip install -e "{place}[embed]"'
    place.rmdir()
    assert installed(tmp_path / "3", note) == 'pip install "numpy>=2" "onnx>=1.18"'


def test_an_address_is_named(tmp_path: Path) -> None:
    git = {
        "url": "https://host.example/kilburn.git",
        "vcs_info": {"vcs": "git", "commit_id": "abc", "requested_revision": "main"},
    }
    said = installed(tmp_path / "1", git)
    assert said == 'pip install "kilburn[embed] @ git+https://host.example/kilburn.git@abc"'
    said = installed(tmp_path / "5", git, "kv")
    assert said == 'pip install "kilburn-kv @ git+https://host.example/kilburn.git@abc#subdirectory=kv"'
    said = installed(tmp_path / "2", git | {"subdirectory": "code"})
    assert said == 'pip install "kilburn[embed] @ git+https://host.example/kilburn.git@abc#subdirectory=code"'
    here = {"url": tmp_path.as_uri(), "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    assert installed(tmp_path / "4", here) == f'pip install "git+{tmp_path.as_uri()}@abc#egg=kilburn[embed]"'
    wheel = {"url": "https://host.example/kilburn-0.1.0-py3-none-any.whl", "archive_info": {}}
    assert installed(tmp_path / "6", wheel, "kv") == 'pip install "kilburn-kv==0.1.0"'
    archive = {"url": "https://host.example/kilburn.zip", "archive_info": {}}
    assert installed(tmp_path / "3", archive) == 'pip install "kilburn[embed] @ https://host.example/kilburn.zip"'


@pytest.mark.parametrize("note", ["", "{", "[]", '{"url": 7}', '{"url": "x", "vcs_info": 5}'])
def test_without_a_note_the_requirements_are_named(note: str, tmp_path: Path) -> None:
    assert installed(tmp_path, note, "all") == 'pip install "numpy>=2" "onnx>=1.18"'


def test_without_anything_the_checkout_is_asked_for(tmp_path: Path) -> None:
    assert installed(tmp_path, None) == 'pip install ".[embed]" in the checkout'


def test_a_marker_beside_the_extra(tmp_path: Path) -> None:
    assert installed(tmp_path, "", "claude-tokens") == 'pip install "ctok>=1.3"'


def test_no_hint_names_an_index_that_may_not_have_it() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs" / "howto").glob("*.md"), ROOT / "README.md"]
    wrong = [str(file) for file in files if file.name != "extras.py" and "install kilburn" in file.read_text(encoding="utf-8")]
    wrong += [str(file) for file in files if file.name != "extras.py" and "kilburn[" in file.read_text(encoding="utf-8")]
    assert not wrong


@pytest.mark.parametrize(
    "words", [("ps", "--db", "URL"), ("worker", "URL", "--once"), ("postgres", "tend", "URL"), ("fsck", "--db", "URL")]
)
def test_without_the_driver_of_postgresql_the_extra_is_named(words: tuple[str, ...]) -> None:
    code = "import sys; sys.modules['psycopg'] = None\nfrom kilburn.cli import main\nsys.exit(main(sys.argv[1:]))"
    given = [word.replace("URL", "postgresql://x@127.0.0.1:1/y") for word in words]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode in (1, 2)
    assert "psycopg is not installed" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_laboratory_that_is_not_there_is_named(tmp_path: Path) -> None:
    for entry in (Path(entry) for entry in sys.path if Path(entry).name == "site-packages"):
        for each in entry.iterdir():
            if not each.name.startswith("kilburn") and each.suffix != ".pth" and not (tmp_path / each.name).exists():
                (tmp_path / each.name).symlink_to(each)
    code = "from kilburn.cli import main; raise SystemExit(main(['lab', 'recall']))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])}
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "kilburn-lab" in done.stderr
    assert "pip" in done.stderr
    assert done.stderr.count("\n") == 1
