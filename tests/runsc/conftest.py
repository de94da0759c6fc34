"""Sandboxes that are closed again."""

from collections.abc import Callable, Iterator

import pytest

from prized_gym.runsc import Runsc, Sandbox, runtime

SMALL = {"memory_gb": 0.5, "disk_gb": 0.05, "vcpu": 2, "max_runtime_min": 5}


@pytest.fixture(autouse=True)
def every_sandbox_is_closed() -> Iterator[None]:
    """Each test closes what it made or connected to, also where another sandbox keeps the runtime running."""

    def users() -> int:
        return sum(each._users for each in runtime._runtimes.values())

    before = users()
    yield
    assert users() == before


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
