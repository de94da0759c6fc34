"""One tree of errors: ``except PrizedGymError`` catches whatever this library defines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parents[2] / "prized_gym")


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
