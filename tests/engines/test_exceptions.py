"""Exceptions of the environment are caught by their class, with what they carry, whatever that class wants to be built from."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prized_gym import ForkedVectorEnv, SetupError
from prized_gym.engines.local.messages import dump_exception, load_exception
from zoo.envs import Loaded


class Keywords(Exception):
    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"failed with {code} in {where}")
        self.code, self.where = code, where


class Worded(Exception):
    """Pickle would word its message once more."""

    def __init__(self, code: int) -> None:
        super().__init__(f"failed with {code}")


class Derived(Keywords):
    def __init__(self) -> None:
        super().__init__(7, where="here")


class OfTheSystem(OSError):
    def __init__(self, number: int, first: str, second: str) -> None:
        super().__init__(number, f"{first} {second}")
        self.lock = threading.Lock()
        self.kept = 5


class WithItsOwnNew(Exception):
    def __new__(cls, a: int, b: int) -> WithItsOwnNew:
        return super().__new__(cls)

    def __init__(self, a: int, b: int) -> None:
        self.both = a, b


class WithoutArguments(KeyError):
    def __init__(self, *, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"no {self.name}"


class NotFound(ImportError):
    def __init__(self, module: str) -> None:
        super().__init__(f"no {module}", name=module)


def held() -> Exception:
    return ValueError("held", threading.Lock())


def decoding() -> Exception:
    try:
        json.loads("{")
    except Exception as error:
        return error
    raise AssertionError


EXCEPTIONS: dict[str, tuple[Callable[[], Exception], Callable[[Any], object]]] = {
    "keywords": (lambda: Keywords(3, where="x"), lambda e: (str(e), e.code, e.where)),
    "worded": (lambda: Worded(3), lambda e: (str(e), e.args)),
    "derived": (Derived, lambda e: (str(e), e.code)),
    "system": (lambda: OfTheSystem(2, "not", "there"), lambda e: (str(e), e.errno, e.strerror, e.kept)),
    "new": (lambda: WithItsOwnNew(1, 2), lambda e: e.both),
    "bare": (lambda: WithoutArguments(name="key"), lambda e: (str(e), e.name)),
    "import": (lambda: NotFound("there"), lambda e: (str(e), e.name)),
    "plain": (lambda: ZeroDivisionError("by zero"), str),
    "decoding": (decoding, lambda e: (str(e), e.pos, e.doc)),
    "process": (lambda: subprocess.CalledProcessError(3, ["x"]), lambda e: (str(e), e.returncode)),
    "held": (held, lambda e: (e.args[0], "lock" in e.args[1])),
}


class Raising(Loaded):
    def fail(self, which: str) -> None:
        raise EXCEPTIONS[which][0]()


@pytest.fixture(scope="module")
def envs() -> Iterator[ForkedVectorEnv]:
    made = ForkedVectorEnv(Raising, num_envs=2)
    made.reset(seed=0)
    yield made
    made.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("which", EXCEPTIONS)
def test_an_exception_is_caught_by_its_class(envs: ForkedVectorEnv, which: str) -> None:
    make, look = EXCEPTIONS[which]
    original = make()
    with pytest.raises(type(original)) as caught:
        envs.call("fail", which)
    expected = ("held", True) if which == "held" else look(original)
    assert look(caught.value) == expected
    assert "in fail" in str(caught.value.__cause__)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_a_group_comes_with_its_exceptions() -> None:
    group = ExceptionGroup("several", [Keywords(1, where="a"), ExceptionGroup("more", [Worded(2), ValueError("b")])])  # noqa: F821
    back: Any = load_exception(dump_exception(group))
    first, more = back.exceptions
    assert (type(first), first.code, str(more.exceptions[0])) == (Keywords, 1, "failed with 2")
    assert str(back) == str(group)


def test_what_raises_in_the_set_up_is_caught_by_its_class_too() -> None:
    def broken() -> Any:
        raise Keywords(4, where="the set-up")

    with pytest.raises(Keywords, match="failed with 4 in the set-up") as caught:
        ForkedVectorEnv(broken, num_envs=1)
    assert caught.value.code == 4

    class Unsendable(Exception):
        lock = None

    def unsendable() -> Any:
        Unsendable.lock = threading.Lock()  # type: ignore[assignment]
        raise Unsendable("of a class that cannot be sent")

    with pytest.raises(SetupError, match="of a class that cannot be sent"):
        ForkedVectorEnv(unsendable, num_envs=1)
