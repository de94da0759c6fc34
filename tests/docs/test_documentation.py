"""What the documentation shows runs as printed."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.libraries import need_here

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(code: list[str], folder: Path) -> str:
    done = subprocess.run([sys.executable, *code], capture_output=True, text=True, timeout=150, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_readme_sessions(number: int, tmp_path: Path) -> None:
    block = BLOCKS[number]
    # As a script, and as someone pastes it.
    (tmp_path / "session.py").write_text(block)
    printed = run(["session.py"], tmp_path)
    assert printed == run(["-c", block], tmp_path)
    expected = re.findall(r"^print\(.*\)\s+# (.*)$", block, re.MULTILINE)
    assert printed.splitlines() == expected


def test_quickstart() -> None:
    printed = run([str(ROOT / "examples" / "quickstart.py")], ROOT)
    for word in ("warmed", "forked", "stepped", "saved"):
        assert re.search(rf"^{word} ", printed, re.MULTILINE)


SHOWN = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "prized_gym").rglob("*.py") if ">>> " in path.read_text()
)
NEEDED = {"sb3": ("stable_baselines3", "'prized-gym[sb3]'"), "tianshou": ("tianshou", "tianshou")}


@pytest.mark.parametrize("path", SHOWN)
@pytest.mark.filterwarnings("default")  # of the libraries that an example is about
def test_docstrings(path: str, request: pytest.FixtureRequest) -> None:
    for name, (library, install) in NEEDED.items():
        if path.endswith(f"integrations/{name}.py"):
            need_here(library, install)
    if "/runsc/" in path:
        request.getfixturevalue("runsc")
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted and not result.failed


def test_the_readme_names_every_engine_and_every_extra() -> None:
    # Asked of a fresh interpreter: other tests add engines of their own.
    engines = run(["-c", "from prized_gym.engines import ENGINES; print(*ENGINES)"], ROOT).split()
    assert "local" in engines
    for engine in engines:
        assert f"| `{engine}`" in README


def test_the_benchmarks_run() -> None:
    printed = run(["-m", "bench", "step", "--copies", "2", "--repeats", "1", "--seconds", "0.05"], ROOT)
    assert printed.count("| CartPole-v1") == 1 and "x Async" in printed
    printed = run(["-m", "bench", "fork", "--gigabytes", "0.01", "--repeats", "2", "--copies", "2"], ROOT)
    assert "0.01 GB" in printed


def test_dev_explains_itself() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "dev.py")], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 2 and "dev.py quickstart" in done.stdout and "dev.py test" in done.stdout
