"""One tree of errors: ``except PrizedGymError`` catches whatever this library defines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parents[2] / "prized_gym")

FOUND = """
import importlib, inspect, pkgutil
import prized_gym

for module in pkgutil.walk_packages(prized_gym.__path__, "prized_gym."):
    if module.name.rpartition(".")[2] == "__main__":
        continue
    try:
        loaded = importlib.import_module(module.name)
    except ImportError as error:
        # An adapter whose library is not installed here.
        assert module.name.startswith("prized_gym.integrations."), (module.name, error)
        continue
    for name, value in vars(loaded).items():
        own = inspect.isclass(value) and value.__module__ == module.name
        if own and issubclass(value, BaseException) and not name.startswith("_"):
            print(f"{module.name}.{name}", issubclass(value, prized_gym.PrizedGymError))
"""

ELSEWHERE = {
    # The agent runs inside a sandbox, on a bare interpreter: this library is not there. On the host, what it breaks of the
    # protocol becomes a RunscError.
    "prized_gym.runsc.agent.frames.BadFrame",
}


def test_every_exception_class_is_a_prized_gym_error() -> None:
    done = subprocess.run([sys.executable, "-c", FOUND], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = dict(line.split() for line in done.stdout.splitlines())
    assert {"prized_gym.errors.SetupError", "prized_gym.wire.errors.ProtocolError"} <= found.keys()
    assert {name for name, ours in found.items() if ours == "False"} == ELSEWHERE


def test_an_error_is_still_what_python_calls_it() -> None:
    import prized_gym
    from prized_gym.runsc import RunscError, SandboxTimeout

    assert issubclass(prized_gym.SetupTimeoutError, TimeoutError)
    assert issubclass(prized_gym.MissingExtraError, ImportError)
    assert issubclass(prized_gym.EpisodeOverError, AssertionError)
    assert issubclass(SandboxTimeout, TimeoutError) and issubclass(SandboxTimeout, RunscError)


def test_the_errors_need_the_standard_library_only() -> None:
    """The helper processes of ``prized_gym.runsc`` import them on an interpreter without site-packages."""
    program = (
        "import sys, types\n"
        "package = sys.modules['prized_gym'] = types.ModuleType('prized_gym')\n"
        f"package.__path__ = [{PACKAGE!r}]\n"
        "from prized_gym.runsc import Runsc, RunscError\n"
        "from prized_gym.errors import PrizedGymError\n"
        "assert issubclass(RunscError, PrizedGymError)\n"
        "assert not {'numpy', 'gymnasium'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, timeout=60)
