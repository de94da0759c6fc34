"""A store of the session's own, a runsc that works (or a skip that says why not), and sandboxes that are closed again."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sandbox_tools as tools

from prized_gym.runsc import Runsc, RunscUnavailable, Sandbox, close_all, list_kept

SMALL = {"memory_gb": 0.5, "disk_gb": 0.05, "vcpu": 2, "max_runtime_min": 5}


@pytest.fixture(scope="session", autouse=True)
def store() -> Iterator[Path]:
    """An empty store; whatever the session leaves in it is a failure."""
    path = Path(tempfile.mkdtemp(prefix="pg-", dir="/var/tmp"))
    os.environ["PRIZED_GYM_STORE"] = str(path)
    yield path
    close_all()
    left = sorted(str(entry.relative_to(path)) for entry in path.rglob("*") if entry.name not in ("lock", "kept"))
    kept = list_kept()
    shutil.rmtree(path)
    assert not left
    assert not kept
    assert not tools.processes_of(path)


@pytest.fixture(scope="session")
def runsc(store: Path) -> Runsc:
    try:
        return Runsc.find()
    except RunscUnavailable as error:
        if os.environ.get("PRIZED_GYM_REQUIRE_RUNSC") == "1":
            pytest.fail(f"runsc is required here: {error}", pytrace=False)
        pytest.skip(f"runsc: {error.reason}")


@pytest.fixture
def create(runsc: Runsc) -> Iterator[Callable[..., Sandbox]]:
    """Makes sandboxes, closed at the end of the test."""
    made: list[Sandbox] = []

    def make(**options: object) -> Sandbox:
        made.append(Sandbox.create(runsc=runsc, **{**SMALL, **options}))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.close()


@pytest.fixture(scope="session")
def shared(runsc: Runsc) -> Iterator[Sandbox]:
    """One sandbox for the tests that leave it as it was."""
    with Sandbox.create(runsc=runsc, **SMALL) as sandbox:
        yield sandbox
