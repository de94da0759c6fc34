"""Progress: a bar where a line can be redrawn, a line now and then where it cannot."""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from prized_gym import progress

# The clock of the child runs a hundred times as fast as the test's, from the import on.
PROGRAM = """
import sys, time
import prized_gym.progress as progress

class Clock:
    now = 0.0
    def monotonic(self):
        return self.now

clock = progress.time = Clock()
kind, enabled, seconds = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])
if kind == "waiting":
    with progress.waiting("setting up the base", enabled) as tick:
        for _ in range(seconds * 10):
            clock.now += 0.1
            tick()
else:
    with progress.bar(seconds, "rollouts", "rollout", enabled) as bar:
        for step in range(seconds):
            clock.now += 1.0
            bar.set_postfix_str(f"mean reward {step}", refresh=False)
            bar.update()

import threading
# tqdm's own watches over slow bars, and would stay: a process with threads is not to be forked, and the trainer's may be.
assert threading.active_count() == 1, threading.enumerate()
"""


def command(kind: str, enabled: bool, seconds: int) -> list[str]:
    return [sys.executable, "-c", PROGRAM, kind, str(enabled), str(seconds)]


def in_a_file(path: Path, kind: str, enabled: bool = True, seconds: int = 200) -> str:
    """What a program writes to stderr where that is a file."""
    with open(path, "wb") as file:
        subprocess.run(command(kind, enabled, seconds), stderr=file, check=True, timeout=60)
    return path.read_bytes().decode()


def in_a_terminal(kind: str, enabled: bool = True, seconds: int = 200) -> str:
    """What a program writes to stderr where that is a terminal."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 80, 0, 0))
        process = subprocess.Popen(command(kind, enabled, seconds), stderr=theirs)
        os.close(theirs)
        written = b""
        deadline = time.monotonic() + 60
        while True:
            if not select.select([ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
                process.kill()
                pytest.fail(f"the program is still running after {written!r}")
            try:
                piece = os.read(ours, 65536)
            except OSError:  # what a terminal gives once nobody has it open any more
                break
            if not piece:
                break
            written += piece
        assert process.wait(60) == 0, written
        return written.decode()
    finally:
        os.close(ours)


def test_a_wait_in_a_log_is_a_line_now_and_then(tmp_path: Path) -> None:
    text = in_a_file(tmp_path / "log", "waiting")
    assert "\r" not in text and text.endswith("\n")
    lines = text.splitlines()
    assert all(re.fullmatch(r"setting up the base: \d\d:\d\d", line) for line in lines)
    times = [int(line[-5:-3]) * 60 + int(line[-2:]) for line in lines]
    assert times[0] == 2 and len(times) == 6, lines
    assert all(later - sooner >= 10 for sooner, later in itertools.pairwise(times)), lines
    assert all(abs(later - 2 * sooner) <= 1 for sooner, later in itertools.pairwise(times[1:])), lines


def test_a_bar_in_a_log_is_a_line_now_and_then_and_one_at_the_end(tmp_path: Path) -> None:
    text = in_a_file(tmp_path / "log", "bar")
    assert "\r" not in text and text.endswith("\n")
    lines = text.splitlines()
    assert len(lines) == 7
    assert lines[0] == "rollouts: 2/200 in 00:02, 1 rollout/s, mean reward 1"
    assert lines[-1] == "rollouts: 200/200 in 03:20, 1 rollout/s, mean reward 199"


def test_a_short_wait_is_not_shown_and_a_short_run_has_one_line(tmp_path: Path) -> None:
    assert in_a_file(tmp_path / "log", "waiting", seconds=1) == ""
    assert in_a_file(tmp_path / "log", "bar", seconds=1) == "rollouts: 1/1 in 00:01, 1 rollout/s, mean reward 0\n"


@pytest.mark.parametrize("kind", ["waiting", "bar"])
def test_progress_that_is_turned_off_writes_nothing(tmp_path: Path, kind: str) -> None:
    assert in_a_file(tmp_path / "log", kind, enabled=False) == ""
    assert in_a_terminal(kind, enabled=False) == ""


def test_a_terminal_has_one_line_that_is_redrawn() -> None:
    waited = in_a_terminal("waiting", seconds=20)
    assert waited.count("\rsetting up the base: ") > 10 and "\n" not in waited, waited
    run = in_a_terminal("bar", seconds=20)
    assert "\rrollouts: 100%" in run and "20/20" in run and run.count("\n") == 1, run


def test_where_stderr_is_closed_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = open(tmp_path / "log", "w")
    file.close()
    for stream in (None, file):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.bar(None, "rollouts", "rollout", True) as bar:
            bar.update()
