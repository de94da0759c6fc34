"""Shared fixtures: the engines, a store of the session's own, runsc where it runs, and checks that nothing is left behind."""

from __future__ import annotations

import collections
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prized_gym.runsc import Runsc, RunscUnavailable, close_all, list_kept
from tools.processes import own_descendants, processes_of


def pytest_configure() -> None:
    # A shell ignores Ctrl-C for what it runs in the background, and children inherit that; tests send it to themselves.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what could not run here, and why; dev.py says it once more at the end of all its runs."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        what = "file" if report.when == "collect" else "test"
        counts[what, reason.removeprefix("Skipped: ")] += 1
    lines = [f"{count} {what}{'s' if count > 1 else ''}: {reason}" for (what, reason), count in counts.items()]
    if lines:
        terminalreporter.section("not run here")
        terminalreporter.write_line("\n".join(lines))
        if path := os.environ.get("PRIZED_GYM_NOT_RUN"):
            with open(path, "a") as file:
                file.write("\n".join([*lines, ""]))


@pytest.fixture(params=["local", "inline"])
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine that runs with no more than this machine."""
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Each test ends every process that the library started for it."""
    before = set(own_descendants())
    yield
    if not set(own_descendants()) - before:
        return
    # Only now, since it takes long where torch is loaded.
    gc.collect()
    deadline = time.monotonic() + 20
    while set(own_descendants()) - before:
        if time.monotonic() > deadline:
            left = {pid: line for pid, line in own_descendants().items() if pid not in before}
            pytest.fail(f"left running: {left}")
        time.sleep(0.02)


@pytest.fixture(scope="session", autouse=True)
def store() -> Iterator[Path]:
    """An empty store of the session's own; whatever the session leaves in it is a failure."""
    path = Path(tempfile.mkdtemp(prefix="pg-", dir="/var/tmp"))
    os.environ["PRIZED_GYM_STORE"] = str(path)
    yield path
    close_all()
    left = sorted(str(entry.relative_to(path)) for entry in path.rglob("*") if entry.name not in ("lock", "kept"))
    kept = list_kept()
    del os.environ["PRIZED_GYM_STORE"]
    shutil.rmtree(path)
    assert not left
    assert not kept
    assert not processes_of(path)


@pytest.fixture(scope="session")
def runsc(store: Path) -> Runsc:
    """The machine's runsc; skips where there is none that works, and fails where PRIZED_GYM_REQUIRE_RUNSC is 1."""
    try:
        return Runsc.find()
    except RunscUnavailable as error:
        if os.environ.get("PRIZED_GYM_REQUIRE_RUNSC") == "1":
            pytest.fail(f"runsc is required here: {error}", pytrace=False)
        pytest.skip(f"runsc: {error.reason}")


@pytest.fixture(scope="session")
def gvisor(runsc: Runsc) -> str:
    """The name of the engine that runs on runsc."""
    return "gvisor"


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    """The test leaves no kept sandbox."""
    yield
    assert not list_kept()


@pytest.fixture(scope="session", autouse=True)
def plain_engine() -> Iterator[None]:
    """The engine "plain": the zoo's provider that needs nothing but this machine's processes."""
    from prized_gym import engines

    engines.ENGINES["plain"] = "zoo.plain_driver:PlainEngine"
    yield
    del engines.ENGINES["plain"]


@pytest.fixture(autouse=True)
def no_plain_sandbox_left() -> Iterator[None]:
    """Each test closes every sandbox of the plain provider."""

    def alive() -> set[object]:
        driver = sys.modules.get("zoo.plain_driver")
        return set(driver.ALIVE) if driver else set()

    before = alive()
    yield
    assert not alive() - before
