"""Keys: shown once, hashed in the file, valid until they are revoked, also while a gateway runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kilburn.cli import main
from kilburn.errors import SpecError
from kilburn.gateway.keys import Key, Keys, add_key, read_keys, revoke_key
from kilburn.gateway.limits import Bucket, check_listening, is_loopback


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_opens_what_it_was_made_for_until_it_is_revoked(file: Path) -> None:
    made, secret = add_key(file, Key(tenant="acme", user="ana", memory=300, upstream="ACME_KEY"))
    keys = Keys(file)
    assert keys.find(secret.encode()) == made
    assert (made.tenant, made.user, made.memory, made.upstream) == ("acme", "ana", 300, "ACME_KEY")
    revoke_key(file, made.name)
    assert keys.find(secret.encode()) is None
    assert [key.name for key in read_keys(file) if key.revoked] == [made.name]


def test_a_key_that_is_added_later_is_valid_at_once(file: Path) -> None:
    add_key(file, Key())
    keys = Keys(file)
    _, later = add_key(file, Key(tenant="late"))
    found = keys.find(later.encode())
    assert found is not None
    assert found.tenant == "late"


@pytest.mark.parametrize(
    "change",
    [
        lambda secret: secret[:-1],
        lambda secret: secret + "A",
        lambda secret: secret[:-1] + ("A" if secret[-1] != "A" else "B"),
        lambda secret: secret.upper(),
        lambda secret: secret.replace("kilburn-", "kilburn-00000000"),
        lambda secret: secret + "\n",
        lambda secret: "",
        lambda secret: "kilburn-" + "0" * 8 + secret[16:],
    ],
)
def test_a_key_that_is_almost_right_is_wrong(file: Path, change: Any) -> None:
    _, secret = add_key(file, Key())
    assert Keys(file).find(change(secret).encode()) is None


def test_the_digest_of_a_key_is_no_key(file: Path) -> None:
    made, _ = add_key(file, Key())
    assert Keys(file).find(made.digest.encode()) is None
    assert Keys(file).find(f"kilburn-{made.name}-{made.digest}".encode()) is None


def test_the_file_holds_no_key_and_only_its_owner_reads_it(file: Path) -> None:
    _, secret = add_key(file, Key())
    assert secret.encode() not in file.read_bytes()
    assert secret[17:30].encode() not in file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"version": 2, "keys": []}',
        b'{"version": 1, "keys": [{"name": "12345678"}]}',
        b'{"version": 1, "keys": [{"name": "../../etc", "digest": ""}]}',
    ],
)
def test_a_damaged_file_lets_nobody_in(file: Path, damage: bytes) -> None:
    _, secret = add_key(file, Key())
    keys = Keys(file)
    whole = file.read_bytes()
    file.write_bytes(damage)
    with pytest.raises(SpecError, match="is not a keys file"):
        keys.find(secret.encode())
    with pytest.raises(SpecError):
        add_key(file, Key())
    assert file.read_bytes() == damage
    file.write_bytes(whole)
    assert keys.find(secret.encode()) is not None


def test_a_field_of_a_later_version_is_not_passed_over(file: Path) -> None:
    add_key(file, Key())
    data = json.loads(file.read_bytes())
    data["keys"][0]["only_from"] = "10.0.0.1"
    file.write_text(json.dumps(data))
    with pytest.raises(SpecError, match="only_from"):
        Keys(file)


def test_a_file_that_others_may_write_to_is_refused(file: Path) -> None:
    add_key(file, Key())
    file.chmod(0o666)
    with pytest.raises(SpecError, match="other users may write"):
        Keys(file)


def test_a_file_that_goes_away_lets_nobody_in(file: Path) -> None:
    _, secret = add_key(file, Key())
    keys = Keys(file)
    file.unlink()
    with pytest.raises(SpecError, match="kilburn keys add"):
        keys.find(secret.encode())


def test_a_pipe_or_a_folder_in_place_of_the_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises((SpecError, OSError)):
            read_keys(path)


def test_keys_that_are_added_at_once_are_all_there(file: Path) -> None:
    program = "import sys; from kilburn.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "keys", "add", "--keys", str(file)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(4)]
    secrets = [process.communicate()[0].strip() for process in started]
    assert len(read_keys(file)) == len(set(secrets)) == 4
    keys = Keys(file)
    assert all(keys.find(secret.encode()) for secret in secrets)


@pytest.mark.parametrize("wrong", [Key(tenant=" "), Key(user="\0"), Key(upstream="sk-proj-12345"), Key(memory=-1), Key(rate=-1)])
def test_an_option_that_cannot_be_makes_no_key(file: Path, wrong: Key) -> None:
    with pytest.raises(SpecError) as caught:
        add_key(file, wrong)
    assert "sk-proj" not in str(caught.value)
    assert not file.exists()


def test_the_command_line_shows_a_key_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--keys", str(file)]
    assert main(["keys", "add", "for \x1b[31mana", "--tenant", "acme", *given]) == 0
    secret = capsys.readouterr().out.strip()
    assert re.fullmatch("kilburn-[0-9a-f]{8}-[A-Za-z0-9_-]{43}", secret)
    name = secret.split("-")[1]
    assert main(["keys", "list", *given]) == 0
    shown = capsys.readouterr().out
    assert name in shown
    assert "acme" in shown
    assert secret[17:] not in shown
    assert "\x1b" not in shown
    assert main(["keys", "revoke", name, *given]) == 0
    assert main(["keys", "list", "--json", *given]) == 0
    said = capsys.readouterr().out
    assert json.loads(said.partition("\n")[2])[0]["revoked"] > 0
    assert "digest" not in said
    assert main(["keys", "revoke", secret, *given]) == 2
    assert secret not in capsys.readouterr().err


def test_others_are_not_served_without_keys() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.9.1"):
        assert is_loopback(host)
        check_listening(host, None)
    for host in ("0.0.0.0", "::", "10.0.0.3", "example.com", "", "127.0.0.1.example.com", "2130706433"):
        with pytest.raises(SpecError, match="no keys"):
            check_listening(host, None)
        check_listening(host, object())


def test_a_bucket_gives_its_rate_and_says_when_there_is_more() -> None:
    now = [0.0]
    bucket = Bucket(40, lambda: now[0])
    assert [bucket.take() for _ in range(11)] == [0.0] * 10 + [1.5]
    now[0] = 1.0
    assert bucket.take() == pytest.approx(0.5)
    now[0] = 1.5
    assert [bucket.take(), bucket.take()] == pytest.approx([0.0, 1.5])
