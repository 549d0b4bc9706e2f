"""What every test shares: Hypothesis profiles, a way to forbid the network, and what the markers promise.

A test that uses a fixture with a language model is marked `model` and `slow`; a test without that marker finds no model on the
machine. A test that takes much processor time and is not marked `slow` is named at the end of the run; it does not fail, because
how long a test takes depends on the machine.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import kilburn.opening  # noqa: F401 -- the parts of the kernel that a test may use without a store are registered

# Two threads that wait for each other on a busy machine are many times slower than one. Children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# On a busy machine a command is long enough to tell of its progress, between the lines that a test compares.
os.environ["KILBURN_QUIET"] = "1"
# Tests commit to stores thousands of times. A disk takes milliseconds for each, a folder in memory takes none. Programs must be
# able to run there, and what a whole run leaves must fit.
MEMORY, ROOM = Path("/dev/shm"), 2 << 30
if MEMORY.is_dir() and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
# Tests start Python hundreds of times. Where an environment forbids to keep bytecode, each start compiles all of Kilburn.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# No key of a provider and no model server of the machine is used where a test names no model.
for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
    os.environ.pop(name, None)
os.environ["KILBURN_MODEL_SERVERS"] = ""
# Workers of xdist have another one than a person's pipe, which has none.
os.environ.pop("COLUMNS", None)

LANGUAGE_MODELS = {"local", "smollm", "speaker", "weights"}
"""The fixtures that bring a language model."""
SECONDS = 10.0
"""Processor time that a test may take, with the programs that it starts and all rows of its parametrisation, before it is
named. The whole default run takes some 900."""

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30)
settings.register_profile("all", parent=settings.get_profile("default"), max_examples=100)
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("deep", parent=settings.get_profile("default"), max_examples=2_000)
FULL = os.environ.get("KILBURN_TESTS") == "all"
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "all" if FULL else "ci" if os.environ.get("CI") else "default"))

LOOPBACK = {"127.0.0.1", "::1", "localhost", ""}
_guard = {"offline": False}


def _refuse_network(event: str, args: tuple[object, ...]) -> None:
    if not _guard["offline"]:
        return
    if event == "socket.connect":
        target = args[1]
        if isinstance(target, tuple) and target[0] not in LOOPBACK:
            raise PermissionError(f"this test runs without a network, and something connects to {target!r}")
    if event == "socket.getaddrinfo" and args[0] not in LOOPBACK and args[0] is not None:
        raise PermissionError(f"this test runs without a network, and something looks up {args[0]!r}")


sys.addaudithook(_refuse_network)


@pytest.fixture(scope="session", autouse=True)
def temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Folders that something makes for itself are in pytest's too, and go with it."""
    tempfile.tempdir = str(tmp_path_factory.mktemp("temporary"))


@pytest.fixture
def offline() -> Iterator[None]:
    """Refuse every connection but the loopback's, for the length of a test."""
    _guard["offline"] = True
    yield
    _guard["offline"] = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests whose fixtures bring a language model, and those that use one as slow."""
    for item in items:
        if LANGUAGE_MODELS & set(getattr(item, "fixturenames", ())) and item.get_closest_marker("model") is None:
            item.add_marker("model")
        if item.get_closest_marker("model") is not None:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def no_unmarked_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's models and its TLS certificates from a test that is not marked `model`.

    Each new HTTP client reads every certificate of the machine, which takes 20 ms. These tests connect to the loopback only.
    """
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("KILBURN_HOME", "/nonexistent")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        monkeypatch.setenv("SSL_CERT_DIR", "/nonexistent")


def spent() -> float:
    """Seconds of processor time that this process and those that it waited for have taken."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Measure what a test takes that is not marked slow. It travels with the report, as workers have no screen."""
    before = spent()
    try:
        return (yield)
    finally:
        if item.get_closest_marker("slow") is None:
            item.user_properties.append(("processor", spent() - before))


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    """Name a failed test where others are dots: a run that is cut off has no summary."""
    if not report.failed:
        return None
    outcome, letter = ("failed", "F") if report.when == "call" else ("error", "E")
    return outcome, f"{letter} {report.nodeid} ", "FAILED" if outcome == "failed" else "ERROR"


def remove_torn(folder: Path) -> list[str]:
    """Remove the records of coverage in a folder that cannot be combined, and return their names.

    A program that is killed while it writes its record leaves half of one. Some halves can be opened all the same, and then
    combining all records fails, and with it a run whose tests passed.
    """
    import coverage

    torn = []
    for path in sorted(folder.glob(".coverage.*")):
        try:
            coverage.CoverageData(no_disk=True).update(coverage.CoverageData(str(path), read_only=True))
        except coverage.CoverageException:
            torn.append(path.name)
            path.unlink()
    return torn


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Before pytest-cov combines the records of all programs, remove the torn ones, and say so."""
    outcome = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.pluginmanager.has_plugin("_cov") and not hasattr(session.config, "workerinput"):
        torn = remove_torn(session.config.rootpath)
        if torn and reporter is not None:
            reporter.ensure_newline()
            reporter.line(f"coverage: removed {len(torn)} records that programs left half written when they were killed")
    return outcome


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that should be faster, or marked."""
    taken: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            if getattr(report, "when", "") == "call":
                taken[report.nodeid.partition("[")[0]] += dict(report.user_properties).get("processor", 0.0)
    slow = [(test, seconds) for test, seconds in taken.most_common() if seconds > SECONDS]
    if slow:
        terminalreporter.section("slow, and not marked so")
        for test, seconds in slow:
            terminalreporter.line(f"{seconds:4.0f} s of processor time: {test}")
