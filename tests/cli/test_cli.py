"""The command line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from prized_gym import cli
from prized_gym.errors import EngineUnavailableError
from prized_gym.runsc import RunscUnavailable


def test_the_doctor_says_what_runs_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "inline", "local"]) == 0
    assert capsys.readouterr().out == "inline: can run here\nlocal: can run here\n"
    assert cli.main(["doctor", "nowhere"]) == 2
    assert "the engines are inline, local, gvisor" in capsys.readouterr().err


def test_the_doctor_says_how_to_get_runsc() -> None:
    environment = {**os.environ, "RUNSC": "/nowhere/runsc"}
    done = subprocess.run(
        [sys.executable, "-m", "prized_gym.cli", "doctor", "gvisor"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 1
    assert "gvisor: cannot run here" in done.stdout and "no executable runsc at /nowhere/runsc" in done.stdout
    assert "get_runsc.py" in done.stdout


def test_the_doctor_of_a_machine_that_has_it(gvisor: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", gvisor]) == 0
    out = capsys.readouterr().out
    assert "gvisor: can run here" in out and "ok       runsc:" in out and "memory limit" in out


def test_an_engine_that_cannot_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import prized_gym

    def missing(path: object = None) -> None:
        raise RunscUnavailable("no runsc on PATH, and RUNSC is not set", "Do this.")

    monkeypatch.setattr("prized_gym.runsc.Runsc.find", missing)
    with pytest.raises(prized_gym.EngineUnavailableError, match=r"no runsc on PATH[\s\S]*Do this[\s\S]*engine='local'"):
        prized_gym.Base("CartPole-v1", engine="gvisor")


def test_bench_is_handed_on() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prized_gym.cli", "bench", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "usage" in done.stdout


def test_a_system_without_what_sandboxes_need_is_sent_to_what_it_has() -> None:
    """As on Windows, where there is no fcntl."""
    program = (
        "import sys\n"
        "sys.modules['fcntl'] = None\n"
        "import prized_gym.cli\n"
        "print(prized_gym.cli.main(['doctor', 'gvisor']))\n"
        "try: prized_gym.Base('CartPole-v1', engine='gvisor')\n"
        "except prized_gym.PrizedGymError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gvisor: cannot run here\n") and done.stdout.count("Linux only") == 2
    assert done.stdout.count("engine='inline' runs anywhere") == 2


def test_on_another_system_no_engine_of_linux_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    from prized_gym import engines

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "eventfd")
    for name in ("local", "gvisor"):
        with pytest.raises(EngineUnavailableError, match="Linux") as caught:
            engines.load(name).check()
        assert "engine='inline'" in str(caught.value) and "prized engine" not in str(caught.value)
        assert "engine='local'" not in str(caught.value)
