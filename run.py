#!/usr/bin/env python3
"""Everything about this checkout with one command, given only Python and pip.

    python3 run.py demo [ARGS]     run the demo on real input; ARGS go to `kilburn demo`
    python3 run.py test            ruff, mypy, the import contracts and the default tests: ten minutes
    python3 run.py test --all      every test at full length, with coverage, kv and lab: an hour, and torch to install
    python3 run.py test --touched [BASE]
                                   the tests of the packages that differ from BASE (HEAD) and of those that import them
    python3 run.py test ARGS       pytest alone, with ARGS
    python3 run.py reference       write docs/reference/ and docs/design/surface.txt from the code
    python3 run.py docs [ARGS]     build the documentation as a site in build/site/; --serve shows it, --help has the rest

It creates `.venv` beside itself on first use and reuses it while pyproject.toml stays the same. It changes no other Python
environment and needs only the standard library.
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
EXTRAS = {"demo": "", "demo with a model": "local", "test": "test", "all": "test-all"}
"""The extras of each environment. Each environment holds those before it."""
NEEDS = {"demo": "demo", "test": "test", "reference": "all", "docs": "all"}
"""The environment of each command; `test --all` and tests of kv and lab need `all`, `demo --model` one with a model."""
BESIDE = ["kv", "lab"]
"""Folders of the distributions that `all` installs beside the product."""

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

SOURCES = [os.path.join(ROOT, *folder.split("/")) for folder in ("src", "kv/src", "lab/src")]
"""Where the three packages lie. import-linter reads all three, and needs none of them installed."""


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


def packages(environment):
    """Return pip's arguments for an environment: the product, and for `all` the distributions beside it."""
    extras = EXTRAS[environment]
    targets = ["%s[%s]" % (ROOT, extras) if extras else ROOT]
    if environment == "all":
        # llama-cpp-python is compiled when it is installed.
        kv_extras = "torch,llama" if shutil.which("c++") else "torch"
        targets += ["%s[%s]" % (os.path.join(ROOT, "kv"), kv_extras), os.path.join(ROOT, "lab")]
    return [word for target in targets for word in ("--editable", target)]


def fingerprint(environment):
    """Return a digest of what an environment is made from: equal digests mean that it is current."""
    sources = b""
    for folder in ("", *BESIDE):
        with open(os.path.join(ROOT, folder, "pyproject.toml"), "rb") as file:
            sources += file.read()
    sources += ("%s %s" % (packages(environment), sys.version)).encode("utf-8")
    return hashlib.sha256(sources).hexdigest()


def stamp_path(environment):
    return os.path.join(VENV, "kilburn-%s.stamp" % environment.replace(" ", "-"))


def is_ready(environment):
    """Return whether .venv holds this environment, or one that includes it."""
    if not os.path.exists(PYTHON):
        return False
    names = list(EXTRAS)
    for name in names[names.index(environment) :]:
        try:
            with open(stamp_path(name), encoding="ascii") as file:
                if file.read() == fingerprint(name):
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


def install(environment):
    """Install this checkout with the extras of an environment; return at once if it is current."""
    if is_ready(environment):
        return
    pip = [*make_venv(), "install", "--disable-pip-version-check", "--no-input", "--retries", "8", "--timeout", "60", "--quiet"]
    if environment == "all" and not shutil.which("c++"):
        say("there is no C++ compiler: the tests of llama-cpp-python will be skipped")
    say("installing into .venv: %s" % " ".join(packages(environment)[1::2]))
    started = time.time()
    for wait in (5, 20, None):
        if subprocess.call([*pip, *packages(environment)], env=compiling(), stdin=subprocess.DEVNULL) == 0:
            break
        if wait is None:
            stop("pip could not install (its own words are above); check the network or the package index, then run this again")
        say("pip failed; trying again in %d seconds" % wait)
        time.sleep(wait)
    with open(stamp_path(environment), "w", encoding="ascii") as file:
        file.write(fingerprint(environment))
    say("installed in %.0f s" % (time.time() - started))


def install_browser():
    """Install Debian's Chromium for the browser tests of the dashboard, which are skipped without it."""
    if any(map(shutil.which, ("chromium", "chromium-browser"))) or not shutil.which("apt-get") or os.geteuid() != 0:
        return
    say("installing Debian's chromium for the tests of the dashboard")
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "env": dict(os.environ, DEBIAN_FRONTEND="noninteractive")}
    for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        if subprocess.call(["apt-get", "-qq", *command], **quiet) != 0:
            say("chromium could not be installed; the browser tests of the dashboard will be skipped")
            return


def tool(name, *args, **variables):
    """Run a program of .venv in the checkout with additional environment variables; return its exit status."""
    program = os.path.join(BIN, name + (".exe" if os.name == "nt" else ""))
    return subprocess.call([program, *args], cwd=ROOT, env=dict(os.environ, **variables))


def touched(base):
    """Return the tests of the packages that differ from a commit and of the packages that import them."""
    command = [PYTHON, os.path.join(ROOT, "tests", "touched.py"), *base]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return done.stdout.decode("utf-8").split()


def check(environment):
    """Run the static checks; return the names of those that failed. mypy needs torch to check kv and lab."""
    failed = []
    for name, command in CHECKS:
        say(name)
        paths = ["src"] if name == "mypy" and environment == "test" else []
        if tool(*command, *paths, PYTHONPATH=os.pathsep.join(SOURCES)) != 0:
            failed.append(name)
    if failed:
        say("FAILED: " + ", ".join(failed))
    return failed


def test(args):
    """Run the static checks and the tests, or pytest alone where arguments name what to run."""
    parallel = ["-n", str(min(max(os.cpu_count() or 1, 2), 4)), "--dist", "worksteal"]
    if args[:1] == ["--touched"]:
        install("test")
        paths = touched(args[1:])
        if not paths:
            say("no test belongs to what differs")
            return 0
        say("pytest " + " ".join(paths))
        return tool("pytest", *parallel, *paths)
    if args not in ([], ["--all"]):
        install("all" if any(arg.startswith(("kv", "lab")) for arg in args) else "test")
        return tool("pytest", *args)
    environment = "all" if args else "test"
    install(environment)
    options, variables = parallel, {}
    if environment == "all":
        install_browser()
        options = [*parallel, "-m", "", "--cov", "--cov-report=term", "tests", "kv/tests", "lab/tests"]
        variables = {"KILBURN_TESTS": "all"}
    failed = check(environment)
    say("pytest " + " ".join(options))
    started = time.time()
    status = tool("pytest", *options, **variables)
    say("the tests took %.0f s%s" % (time.time() - started, "" if args else "; `test --all` runs the long ones too"))
    return status or int(bool(failed))


def main(args):
    if sys.version_info[:2] < OLDEST:
        newer_python()
    if not args or args[0] not in NEEDS:
        print(__doc__)
        return 0 if args and args[0] in ("-h", "--help") else 2
    command, rest = args[0], args[1:]
    if command == "test":
        return test(rest)
    with_model = command == "demo" and any(arg.startswith("--model") for arg in rest)
    install("demo with a model" if with_model else NEEDS[command])
    if command == "demo":
        # In the caller's folder: paths among the arguments are relative to it.
        return subprocess.call([os.path.join(BIN, "kilburn" + (".exe" if os.name == "nt" else "")), "demo", *rest])
    script = "generate.py" if command == "reference" else "website.py"
    return tool("python", os.path.join("docs", script), *rest)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except subprocess.CalledProcessError as error:
        stop("%s failed with status %d; what it printed above says why" % (" ".join(error.cmd), error.returncode))
