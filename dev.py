"""Everything a checkout needs, in a virtual environment it sets up itself. Only Python (3.10 or later) and pip needed.

python3 dev.py quickstart     run examples/quickstart.py
python3 dev.py test           lint, types and all tests that can run here (add pytest arguments as you like)
python3 dev.py check          lint and types only
python3 dev.py bench ...      a benchmark: `bench step`, `bench fork`, `bench sandbox`, `bench rollouts`
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TESTS = "test,test-integrations"
ENVIRONMENTS = {
    "quickstart": (".venv", ""),
    "bench": (".venv", ""),
    "test": (".venv-test", TESTS),
    "check": (".venv-test", TESTS),
}


# What pytest answers.
OK, FAILED, NO_TESTS = 0, 1, 5


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def python_in(folder: Path) -> Path:
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


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in ENVIRONMENTS:
        print(__doc__)
        return 2
    task, *rest = arguments
    # One of the benchmarks needs torch, which the tests' environment has.
    python = str(prepare(*ENVIRONMENTS["test" if arguments[:2] == ["bench", "rollouts"] else task]))

    def run(*command: str) -> int:
        print("$", " ".join(Path(part).name if part == python else part for part in command), flush=True)
        return subprocess.run(command, cwd=ROOT).returncode

    if task == "quickstart":
        return run(python, "examples/quickstart.py")
    if task == "bench":
        return run(python, "-m", "bench", *rest)
    for check in (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)):
        if code := run(python, "-m", *check):
            return code
    if task == "check":
        return 0
    if any(argument.startswith("-m") for argument in rest):
        return run(python, "-m", "pytest", *rest)
    # Several at a time, more than there are cores, since many wait; then, one by one, those that measure time.
    workers = str(min(cores() + 1, 4))
    beside = run(python, "-m", "pytest", "-n", workers, "--dist", "worksteal", "-m", "not alone", *rest)
    if beside not in (OK, FAILED, NO_TESTS):
        return beside
    alone = run(python, "-m", "pytest", "-m", "alone", *rest)
    return min(beside, alone) if NO_TESTS in (beside, alone) else max(beside, alone)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
