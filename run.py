#!/usr/bin/env python3
"""Everything about this checkout with one command, given only Python and pip.

    python3 run.py demo [ARGS]     the main job on real input; ARGS go to `kilburn demo`
    python3 run.py test            every check: ruff, mypy, import-linter, pytest (with coverage where CI=true)
    python3 run.py test --quick    ruff and the quick tests; it ends by saying how long they took, and what it left out
    python3 run.py test ARGS       pytest alone, with ARGS
    python3 run.py reference       write docs/reference/ and docs/design/surface.txt from the code
    python3 run.py docs [ARGS]     build the documentation as a site in build/site/; --serve shows it, --help has the rest

It makes `.venv` beside itself on first use and leaves it alone while pyproject.toml stays the same.
It refuses to touch any other Python, and to need anything but the standard library.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time

OLDEST = (3, 11)
NEWER = ["python3.14", "python3.13", "python3.12", "python3.11"]
ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
BIN = os.path.join(VENV, "Scripts" if os.name == "nt" else "bin")
PYTHON = os.path.join(BIN, "python.exe" if os.name == "nt" else "python")
EXTRAS = {"demo": "local", "test": "test", "reference": "test", "docs": "test"}
BESIDE = ["kv", "lab"]
"""The folders of the distributions beside the product."""
INCLUDES = {"demo": ["demo", "test"], "test": ["test"], "reference": ["test"], "docs": ["test"]}
"""Which sets of extras serve a command: the tests' set holds the demo's."""

LLAMA = [
    "-DGGML_NATIVE=OFF",
    "-DGGML_CPU_REPACK=OFF",
    "-DGGML_CCACHE=OFF",
    "-DLLAVA_BUILD=OFF",
    "-DLLAMA_OPENSSL=OFF",
]
"""What llama-cpp-python compiles for the tests: portable code, because for some processors gcc 12 makes it crash, and no
more of llama.cpp than is used, which takes two fifths off the time."""

CHECKS = [
    ("ruff", ["ruff", "check", "--output-format=concise", "."]),
    ("ruff format", ["ruff", "format", "--check", "."]),
    ("mypy", ["mypy"]),
    ("import-linter", ["lint-imports", "--no-cache"]),
]


APART = [
    *("tests/dashboard", "tests/demo", "tests/doors", "tests/models", "tests/torture"),
    *("tests/test_docs.py", "kv/tests", "lab/tests"),
]
"""Tests of what stands on the rest: the quick run leaves them out."""
QUICK = ["-m", "not slow and not model", "--hypothesis-profile", "quick", *("--ignore=" + name for name in APART)]
LEFT_OUT = "left out: mypy, import-linter, tests marked `slow` or `model`, most of Hypothesis's examples, and %s"


def say(text):
    print("run.py: " + text, flush=True)


def stop(text):
    sys.exit("run.py: " + text)


def newer_python():
    """Start over on a newer Python where this one is too old, or say what to install."""
    for name in NEWER:
        path = shutil.which(name)
        if path is not None:
            say("this is Python %d.%d; going on with %s" % (sys.version_info[0], sys.version_info[1], path))
            sys.exit(subprocess.call([path, os.path.abspath(__file__), *sys.argv[1:]]))
    stop(
        "Kilburn needs Python %d.%d or later and this is %s; install one (Debian, Ubuntu: apt install python3.11 python3.11-venv)"
        % (OLDEST[0], OLDEST[1], sys.version.split()[0])
    )


def extras_of(command):
    """What a command needs beside the package. What takes minutes to compile is for CI, or for who asks with CI=true."""
    extras = EXTRAS[command]
    return extras + ",llama" if extras == "test" and os.environ.get("CI") else extras


def packages_of(extras):
    """What pip installs for a set of extras: the product, and for the tests the distributions beside it."""
    beside = [os.path.join(ROOT, name) for name in BESIDE] if extras.startswith("test") else []
    return [word for each in ["%s[%s]" % (ROOT, extras), *beside] for word in ("--editable", each)]


def stamp_of(extras):
    """What an environment was made from: equal stamps mean that nothing needs doing."""
    made_from = b""
    for folder in ("", *BESIDE):
        with open(os.path.join(ROOT, folder, "pyproject.toml"), "rb") as file:
            made_from += file.read()
    made_from += ("%s %s %s" % (extras, ROOT, sys.version)).encode("utf-8")
    return hashlib.sha256(made_from).hexdigest()


def stamp_path(extras):
    return os.path.join(VENV, "kilburn-%s.stamp" % extras)


def is_ready(command):
    if not os.path.exists(PYTHON):
        return False
    for name in INCLUDES[command]:
        extras = extras_of(name)
        try:
            with open(stamp_path(extras), encoding="ascii") as file:
                if file.read() == stamp_of(extras):
                    return True
        except OSError:
            continue
    return False


def runs(command):
    """Whether a command ends well; what it prints is not shown."""
    return subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


def has(module):
    """Whether this Python has a module (Debian ships venv without ensurepip, and pip apart)."""
    return runs([sys.executable, "-c", "import " + module])


def make_venv():
    """Create .venv and return the pip command that installs into it."""
    own_pip = [PYTHON, "-m", "pip"]
    if os.path.exists(PYTHON) and runs([*own_pip, "--version"]):
        return own_pip
    package = "python%d.%d-venv" % sys.version_info[:2]
    if not has("venv"):
        stop("this Python has no venv module; on Debian or Ubuntu: apt install %s" % package)
    say("making the virtual environment .venv")
    if has("ensurepip"):
        subprocess.check_call([sys.executable, "-m", "venv", "--clear", VENV])
        return own_pip
    if not has("pip"):
        stop("this Python has neither ensurepip nor pip; on Debian or Ubuntu: apt install %s python3-pip" % package)
    subprocess.check_call([sys.executable, "-m", "venv", "--clear", "--without-pip", VENV])
    return [sys.executable, "-m", "pip", "--python", PYTHON]


def compiling():
    """The environment for pip: how to compile llama-cpp-python, unless the caller has set that."""
    environment = dict(os.environ)
    if "CMAKE_ARGS" not in environment:
        lean = os.path.join(VENV, "llama.cmake")
        with open(lean, "w", encoding="ascii") as file:
            # llama-cpp-python insists on this part of llama.cpp, and then uses none of it.
            file.write("set(LLAMA_BUILD_COMMON OFF)\n")
        environment["CMAKE_ARGS"] = " ".join([*LLAMA, shlex.quote("-DCMAKE_PROJECT_llama.cpp_INCLUDE=" + lean)])
    return environment


def install(command):
    """Install this checkout with the extras that the command needs; quick when nothing changed."""
    if is_ready(command):
        return
    extras = extras_of(command)
    pip = [*make_venv(), "install", "--disable-pip-version-check", "--no-input", "--retries", "8", "--timeout", "60", "--quiet"]
    if extras == "test":
        say("the tests of llama-cpp-python, which takes minutes to compile, will be skipped; CI=true installs it, and needs g++")
    environment = compiling()
    takes = "some minutes" if extras.startswith("test") else "a minute or two"
    say("installing kilburn[%s] into .venv; the first time this takes %s" % (extras, takes))
    began = time.time()
    for wait in (5, 20, None):
        if subprocess.call([*pip, *packages_of(extras)], env=environment, stdin=subprocess.DEVNULL) == 0:
            break
        if wait is None:
            stop("pip could not install (its own words are above); check the network or the package index, then run this again")
        say("pip failed; trying again in %d seconds" % wait)
        time.sleep(wait)
    with open(stamp_path(extras), "w", encoding="ascii") as file:
        file.write(stamp_of(extras))
    say("installed in %.0f s" % (time.time() - began))


def install_browser():
    """Chromium, for the tests of the dashboard, where CI has none: as Debian packages it. Without it they are skipped."""
    if not os.environ.get("CI") or any(map(shutil.which, ("chromium", "chromium-browser"))) or not shutil.which("apt-get"):
        return
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if root and not shutil.which("sudo"):
        return
    say("installing Debian's chromium, for the tests of the dashboard")
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "env": dict(os.environ, DEBIAN_FRONTEND="noninteractive")}
    for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        if subprocess.call([*root, "apt-get", "-qq", *command], **quiet) != 0:
            say("it could not be installed; the tests of the dashboard in a browser will be skipped")
            return


def tool(name, *args):
    """Run one of the environment's programs in the checkout; return its exit status."""
    program = os.path.join(BIN, name + (".exe" if os.name == "nt" else ""))
    return subprocess.call([program, *list(args)], cwd=ROOT)


def test(args):
    """All checks, the quick ones, or pytest alone where arguments name what to run. Pytest's summary comes last."""
    quick = args == ["--quick"]
    if args and not quick:
        return tool("pytest", *args)
    failed = []
    for name, command in CHECKS[:2] if quick else CHECKS:
        say(name)
        if tool(*command) != 0:
            failed.append(name)
    if failed:
        say("FAILED: " + ", ".join(failed))
    options = ["-n", str(min(max(os.cpu_count() or 1, 2), 4)), "--dist", "worksteal"]
    if quick:
        options += QUICK
    elif os.environ.get("CI"):
        options += ["--cov", "--cov-report=term"]
    say("pytest " + " ".join(options))
    began = time.time()
    status = tool("pytest", *options)
    if quick:
        say("the quick tests took %.0f s" % (time.time() - began))
        say(LEFT_OUT % ", ".join(APART))
    return status or int(bool(failed))


def main(args):
    if sys.version_info[:2] < OLDEST:
        newer_python()
    if not args or args[0] not in EXTRAS:
        print(__doc__)
        return 0 if args and args[0] in ("-h", "--help") else 2
    command, rest = args[0], args[1:]
    install(command)
    if command == "demo":
        program = os.path.join(BIN, "kilburn" + (".exe" if os.name == "nt" else ""))
        return subprocess.call([program, "demo", *rest])
    if command == "reference":
        return tool("python", os.path.join("docs", "generate.py"))
    if command == "docs":
        return tool("python", os.path.join("docs", "website.py"), *rest)
    if not rest:
        install_browser()
    return test(rest)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except subprocess.CalledProcessError as error:
        stop("%s failed with status %d; what it printed above says why" % (" ".join(error.cmd), error.returncode))
