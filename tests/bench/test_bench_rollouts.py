"""`bench rollouts`: one run at a tiny size, what it adds up, and that an interrupt leaves nothing behind."""

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest

from bench import rollouts, ways
from bench.__main__ import main
from prized_gym.pricing import PRIZED_2_VCPU_4_GB, Prices

TINY = ["--copies", "2", "--batches", "1", "--megabytes", "4", "--repeats", "1"]

needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "pip")), reason="torch and pip are needed"
)


@needs_packages
@pytest.mark.timeout(400)
def test_a_run_prints_every_row(
    gvisor: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["rollouts", *TINY]) == 0
    printed = capsys.readouterr().out
    cells = {row[0]: row[1:] for row in _rows(printed)}
    assert list(cells) == ["each rollout runs in", *(f"({letter}) {rollouts.TITLES[letter]}" for letter in "abcd")]
    for row in list(cells.values())[1:]:
        assert re.fullmatch(r"\d+\.\d s", row[0])
        assert re.fullmatch(r"\d+\.\d s \(\d+\.\d-\d+\.\d\)", row[1])
        assert re.fullmatch(r"\$\d+\.\d{3}", row[2])
    assert cells[f"(a) {rollouts.TITLES['a']}"][3] == "1.00 (1.00-1.00)"
    assert len(re.findall(r"Setting the base of \([abc]\) up, once: \d", printed)) == 3
    assert re.search(r"\(d\) / \(a\): \d", printed)
    assert re.search(r"rollouts\(\) / by hand: \d", printed)
    assert not list(tmp_path.iterdir())


@needs_packages
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("row", "sandboxes"), [("a", 3), ("d", 2)], ids=["forks", "set-ups"])
def test_an_interrupt_leaves_nothing(gvisor: str, tmp_path: Path, row: str, sandboxes: int) -> None:
    # Short, for the sockets in it.
    store = Path(tempfile.mkdtemp(prefix="pg-", dir="/var/tmp"))
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench", "rollouts", *TINY, "--batches", "50", "--rows", row],
            env={**os.environ, "TMPDIR": str(_made(tmp_path / "files")), "PRIZED_GYM_STORE": str(store)},
            stdout=log,
            stderr=log,
        )
    try:
        ends = time.monotonic() + 90
        while len(list(store.glob("*/sandboxes/*"))) < sandboxes:
            assert process.poll() is None and time.monotonic() < ends, (tmp_path / "log").read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.wait(30)
        assert process.returncode == -signal.SIGINT, (tmp_path / "log").read_text()
        assert not list((tmp_path / "files").iterdir())
        assert {entry.name for entry in store.iterdir()} <= {"lock", "kept"}
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(store)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(SystemExit, match="--copies must be at least 1"):
        main(["rollouts", "--copies", "0"])
    with pytest.raises(SystemExit):
        main(["rollouts", "--rows", "z"])


def test_the_cost_of_a_hundred_rollouts() -> None:
    class Kept(ways.RunningBase):
        def __init__(self) -> None:
            self.setup_seconds = 100.0

    class Paused(Kept):
        base_runs = False

    batches = [ways.Batch(10.0, {}, 70.0), ways.Batch(5.0, {}, 30.0), ways.Batch(7.0, {}, 50.0)]
    hourly = Prices(sandbox_hour=3600.0)
    # 25 at once: the first batch and three later ones.
    assert rollouts._cost(Paused(), batches, 25, hourly) == pytest.approx(100 + 70 + 3 * 40)
    assert rollouts._cost(Kept(), batches, 25, hourly) == pytest.approx(100 + 70 + 3 * 40 + 10 + 3 * 6)
    sized = Prices(vcpu_hour=1800.0, gb_hour=900.0)
    assert rollouts._cost(Paused(), batches, 25, sized) == pytest.approx(290 * (0.5 * 2 + 0.25 * 4))


def test_prices_given_replace_the_default() -> None:
    parser = argparse.ArgumentParser()
    rollouts.add_arguments(parser)
    assert rollouts._prices(parser.parse_args([])) == PRIZED_2_VCPU_4_GB
    given = parser.parse_args(["--vcpu-hour", "0.05", "--gb-hour", "0.01"])
    assert rollouts._prices(given) == Prices(vcpu_hour=0.05, gb_hour=0.01)


def test_another_reward_for_a_known_seed_is_an_error() -> None:
    rewards = rollouts.Rewards()
    rewards.check("one way", [1, 2], {1: 0.5, 2: 0.25})
    rewards.check("another", [2], {2: 0.25})
    with pytest.raises(RuntimeError, match="another: the reward of seed 1 is 0.75, and was 0.5 before"):
        rewards.check("another", [1], {1: 0.75})
    with pytest.raises(RuntimeError, match="seed 3"):
        rewards.check("another", [3], {})


def test_the_wheel_lists_its_files(tmp_path: Path) -> None:
    path = tmp_path / ways.WHEEL
    ways.write_wheel(path)
    with zipfile.ZipFile(path) as wheel:
        record = wheel.read("benched_policy-1.0.dist-info/RECORD").decode()
        assert [line.split(",")[0] for line in record.splitlines()] == wheel.namelist()


def _rows(printed: str) -> list[list[str]]:
    lines = [line for line in printed.splitlines() if line.startswith("| ") and not line.startswith("| -")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
