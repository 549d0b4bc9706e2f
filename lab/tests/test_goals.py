"""All goals in one run, and the page that is made from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "lab" / "benchmarks"
PAGE = ROOT / "docs" / "explanation" / "performance.md"


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "all.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600, check=False)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The scripts and the page, where they may be written."""
    for name in ("all.py", "figures.py", "ratios.py"):
        target = tmp_path / "lab" / "benchmarks" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((BENCHMARKS / name).read_bytes())
    for file in PAGE.parent.glob("performance.*"):
        target = tmp_path / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    return tmp_path


def test_the_page_is_as_the_saved_figures_say(copied: Path) -> None:
    pytest.importorskip("matplotlib", reason="the page has a picture: pip install '.[plots]'")
    done = subprocess.run(
        [sys.executable, str(copied / "lab/benchmarks/all.py"), "--page"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    page = copied / "docs" / "explanation" / "performance.md"
    assert page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8"), "run python lab/benchmarks/all.py --page"
    assert page.with_suffix(".svg").read_bytes()


def test_a_changed_figure_changes_the_page(copied: Path) -> None:
    pytest.importorskip("matplotlib", reason="the page has a picture: pip install '.[plots]'")
    saved = copied / "docs" / "explanation" / "performance.json"
    results = json.loads(saved.read_bytes())
    ratio = results[0]["ratios"][0]
    ratio |= {
        "what": "a figure of this test",
        "measured": 3.0,
        "baseline": 2.0,
        "against": "half",
        "goal": 1.5,
        "of": "ratio",
        "least": False,
    }
    ratio["unit"] = "ms"
    saved.write_text(json.dumps(results), encoding="utf-8")
    subprocess.run([sys.executable, str(copied / "lab/benchmarks/all.py"), "--page"], check=True)
    page = (copied / "docs" / "explanation" / "performance.md").read_text(encoding="utf-8")
    assert "| a figure of this test | 3 ms | 2 (half) | 1.50 | ≤ 1.5 × | yes |" in page
    assert page.split("<!-- What follows")[0] == PAGE.read_text(encoding="utf-8").split("<!-- What follows")[0]


@pytest.mark.slow
def test_one_part_prints_its_figures_with_their_goals(tmp_path: Path) -> None:
    done = run("--quick", "--only", "bulk", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert result["part"] == "bulk"
    assert not result.get("missing")
    for ratio in result["ratios"]:
        assert ratio["ratio"] == pytest.approx(ratio["measured"] / ratio["baseline"])
        assert ratio["met"] is (ratio["measured"] >= ratio["goal"])
    assert "1 of 1: bulk" in done.stderr


def test_what_has_no_time_left_is_said_not_to_be_measured(tmp_path: Path) -> None:
    done = run("--quick", "--only", "planning", "--minutes", "0", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not whole: planning: no time was left" in done.stdout
    assert "0 of 0 goals are met; 1 measurements are not whole." in done.stdout


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = run("--data", "nowhere", folder=tmp_path)
    assert done.returncode == 2
    assert "no folder nowhere" in done.stderr
