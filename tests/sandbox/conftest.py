"""A plain provider, gVisor where it runs (or a skip that says why not), and a check that no sandbox is left."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import plain_driver
import pytest

from prized_gym import engines
from prized_gym.runsc import Runsc, RunscUnavailable, close_all, list_kept


@pytest.fixture(scope="session", autouse=True)
def plain_engine() -> Iterator[None]:
    engines.ENGINES["plain"] = "plain_driver:PlainEngine"
    yield
    del engines.ENGINES["plain"]


@pytest.fixture(autouse=True)
def no_plain_sandbox_left() -> Iterator[None]:
    before = set(plain_driver.ALIVE)
    yield
    assert not plain_driver.ALIVE - before


@pytest.fixture(scope="session", autouse=True)
def store() -> Iterator[None]:
    """An empty store of the session's own, unless it has one; whatever is left in it is a failure."""
    if "PRIZED_GYM_STORE" in os.environ:
        yield
        return
    path = Path(tempfile.mkdtemp(prefix="pg-", dir="/var/tmp"))
    os.environ["PRIZED_GYM_STORE"] = str(path)
    yield
    close_all()
    del os.environ["PRIZED_GYM_STORE"]
    left = sorted(str(entry.relative_to(path)) for entry in path.rglob("*") if entry.name not in ("lock", "kept"))
    shutil.rmtree(path)
    assert not left


@pytest.fixture(scope="session")
def gvisor(store: None) -> str:
    """The engine's name; the test is skipped where it cannot run, and fails where PRIZED_GYM_REQUIRE_RUNSC is 1."""
    try:
        Runsc.find()
    except RunscUnavailable as error:
        if os.environ.get("PRIZED_GYM_REQUIRE_RUNSC") == "1":
            pytest.fail(f"runsc is required here: {error}", pytrace=False)
        pytest.skip(f"runsc: {error.reason}")
    return "gvisor"


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    yield
    assert not list_kept()
