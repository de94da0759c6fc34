"""Everything a checkout needs, in virtual environments it sets up itself. Only Python (3.10 or later) and pip needed.

python3 dev.py quickstart     run examples/quickstart.py
python3 dev.py check          lint, types, and that no module imports from a layer above its own
python3 dev.py test           check, and all tests that can run here; at the end, which could not, and why
python3 dev.py test ARG...    those tests only, as pytest takes them: `test tests/ground`, `test -k branch -x`
python3 dev.py test-rllib     RLlib's test, which `test` runs too, in an environment of its own
python3 dev.py bench ...      a benchmark: `bench step`, `bench fork`, `bench sandbox`, `bench rollouts`

The sandbox tests need gVisor's runsc: where none is installed, scripts/get_runsc.py brings it into .tools/.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TOOLS = ROOT / ".tools"
RLLIB_TEST = "tests/integrations/test_rllib.py"
TESTS = (".venv-test", "test,test-integrations")
# RLlib wants one certain Gymnasium, older than what the other libraries are tested with.
RLLIB = (".venv-rllib", "test-rllib")
ENVIRONMENTS = {
    "quickstart": (".venv", ""),
    "bench": (".venv", ""),
    "test": TESTS,
    "check": TESTS,
    "test-rllib": RLLIB,
}

# What pytest answers.
OK, FAILED, NO_TESTS = 0, 1, 5


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def python_in(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def prepare(name: str, extra: str) -> Path:
    """The interpreter of the virtual environment ``name``, with this checkout and its extra installed."""
    folder = ROOT / name
    python = python_in(folder)
    # Debian ships Python without ensurepip: pip then installs into the environment from outside.
    has_pip = importlib.util.find_spec("ensurepip") is not None
    if not python.exists():
        print(f"setting up {name} ...", flush=True)
        venv.create(folder, with_pip=has_pip, symlinks=os.name != "nt")
    stamp = folder / "installed"
    wanted = (ROOT / "pyproject.toml").read_text() + (ROOT / "constraints.txt").read_text() + extra
    if not stamp.exists() or stamp.read_text() != wanted:
        pip = [str(python), "-m", "pip"] if has_pip else [sys.executable, "-m", "pip", "--python", str(python)]
        target = f"{ROOT}[{extra}]" if extra else str(ROOT)
        command = [
            *pip,
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-e",
            target,
            "-c",
            str(ROOT / "constraints.txt"),
        ]
        subprocess.run(command, check=True)
        stamp.write_text(wanted)
    return python


def run(python: Path, *command: str) -> int:
    """Run a module of an environment (or a script, by its path) here, showing how; its exit status."""
    print("$", " ".join(command), flush=True)
    words = [str(python), *command] if command[0].endswith(".py") else [str(python), "-m", *command]
    return subprocess.run(words, cwd=ROOT).returncode


def check(python: Path) -> int:
    """Lint, format, types and layers; the first failure's exit status."""
    for command in (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)):
        if code := run(python, *command):
            return code
    print("$ lint-imports", flush=True)
    return subprocess.run([python.with_name("lint-imports")], cwd=ROOT).returncode


def bring_runsc() -> str:
    """Let the tests find a runsc, fetched if need be; "" or why there is none."""
    if os.environ.get("RUNSC") or shutil.which("runsc"):
        return ""
    print(f"looking for runsc in {TOOLS.name} ...", flush=True)
    script = [sys.executable, str(ROOT / "scripts" / "get_runsc.py"), str(TOOLS)]
    fetched = subprocess.run(script, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    sys.stderr.write(fetched.stderr)
    if fetched.returncode:
        return fetched.stderr.strip() or f"scripts/get_runsc.py ended with {fetched.returncode}"
    os.environ["RUNSC"] = fetched.stdout.splitlines()[-1]
    os.environ["PATH"] = os.pathsep.join([str(TOOLS), os.environ.get("PATH", "")])
    return ""


def test(python: Path, arguments: list[str]) -> int:
    """Run the tests, several at a time, then one by one those that measure time; the worst exit status."""
    if any(argument.startswith("-m") for argument in arguments):
        return run(python, "pytest", *arguments)
    # More at a time than there are cores, since many wait.
    workers = ["-n", str(min(cores() + 1, 4)), "--dist", "worksteal"]
    code = run(python, "pytest", "-m", "not alone", *workers, *arguments)
    if code not in (OK, FAILED, NO_TESTS):
        return code
    return worst(code, run(python, "pytest", "-m", "alone", *arguments))


def test_rllib() -> int:
    """Run RLlib's test in its own environment."""
    try:
        python = prepare(*RLLIB)
    except (subprocess.CalledProcessError, OSError) as error:
        if os.environ.get("PRIZED_GYM_REQUIRE_ALL") == "1":
            raise
        not_run(f"{RLLIB_TEST}: the environment for RLlib could not be made: {error}")
        return OK
    return run(python, "pytest", RLLIB_TEST)


def worst(*codes: int) -> int:
    """The exit status of several runs of pytest: that no test was found counts only where none of them found any."""
    return max((code for code in codes if code != NO_TESTS), default=NO_TESTS)


def not_run(line: str) -> None:
    """Remember for the end of the run what could not be run; pytest adds its lines to the same file."""
    with open(os.environ["PRIZED_GYM_NOT_RUN"], "a") as file:
        file.write(line + "\n")


def run_tests(task: str, arguments: list[str]) -> int:
    """The commands ``test`` and ``test-rllib``."""
    if task == "test-rllib":
        return test_rllib()
    python = prepare(*TESTS)
    if not arguments and (code := check(python)):
        return code
    if missing := bring_runsc():
        not_run(f"runsc was not fetched: {missing}")
    if arguments:
        return test(python, arguments)
    code = test(python, ["--ignore", RLLIB_TEST])
    return code if code not in (OK, FAILED) else worst(code, test_rllib())


def main(arguments: list[str]) -> int:
    """Run one of the commands; its exit status."""
    if not arguments or arguments[0] not in ENVIRONMENTS:
        print(__doc__)
        return 2
    task, *rest = arguments
    if task in ("test", "test-rllib"):
        with tempfile.TemporaryDirectory() as directory:
            listed = Path(directory) / "not-run"
            listed.touch()
            os.environ["PRIZED_GYM_NOT_RUN"] = str(listed)
            code = run_tests(task, rest)
            if lines := dict.fromkeys(listed.read_text().splitlines()):
                print("\nNot run here:", *lines, sep="\n  ")
        return code
    # One of the benchmarks needs torch, which the tests' environment has.
    python = prepare(*(TESTS if arguments[:2] == ["bench", "rollouts"] else ENVIRONMENTS[task]))
    if task == "check":
        return check(python)
    return run(python, "examples/quickstart.py") if task == "quickstart" else run(python, "bench", *rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
