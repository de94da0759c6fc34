"""The version has one place."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import prized_gym
from prized_gym.version import __version__

ROOT = Path(__file__).parents[2]


def test_the_package_and_its_distribution_have_the_same_version() -> None:
    assert prized_gym.__version__ == __version__ == importlib.metadata.version("prized-gym")
    found = [
        path for path in (ROOT / "prized_gym").rglob("*.py") if re.search(r"^__version__\s*=", path.read_text(), re.M)
    ]
    assert [path.name for path in found] == ["version.py"]
    assert f'"{__version__}"' not in (ROOT / "pyproject.toml").read_text().split("dependencies")[0]


def test_a_payload_is_written_and_read_without_the_rest_of_the_package() -> None:
    # The package itself is a stand-in: what its own __init__ imports does not count.
    code = """
import sys, types
package = types.ModuleType("prized_gym")
package.__path__ = [sys.argv[1]]
sys.modules["prized_gym"] = package
from prized_gym.server.payload import read_payload, write_payload
assert read_payload(write_payload(None, "CartPole-v1")) == "CartPole-v1"
names = sorted(name for name in sys.modules if name.startswith("prized_gym."))
assert [name.partition(".")[2] for name in names] == ["by_value", "errors", "server", "server.payload", "version"], names
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "prized_gym")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
