"""Drivers that break their contract or have a bad day, and arguments of forks and kept bases that make no sense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import prized_gym
from prized_gym import SandboxError, rollouts
from prized_gym.interface.fleet import Usage
from zoo import plain_driver
from zoo.plain_driver import PlainDriver, PlainSandbox, engine_of
from zoo.plain_variants import Cramped, CrampedSandbox

pytestmark = pytest.mark.timeout(60)


def base_of(driver: PlainDriver) -> prized_gym.Base:
    return prized_gym.Base(engine=engine_of(driver), setup="true", progress=False)


class Miscounting(PlainDriver):
    """Makes ``more`` forks than it is asked for."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.more = more

    def make(self, labels: Mapping[str, str], env: Mapping[str, str], port: int) -> PlainSandbox:
        return MiscountingSandbox(self, dict(labels), dict(env), port)


class MiscountingSandbox(PlainSandbox):
    driver: Miscounting

    def copies(self, n: int, labels: Mapping[str, str]) -> list[PlainSandbox]:
        return super().copies(n + self.driver.more, labels)


@pytest.mark.parametrize("more", [1, -1, -2])
def test_a_driver_that_miscounts_is_told_and_nothing_of_it_is_left(more: int) -> None:
    with base_of(Miscounting(more)) as base:
        before = set(plain_driver.ALIVE)
        with pytest.raises(SandboxError, match=rf"was to be forked 2 times, and its driver gave {2 + more} forks"):
            base.fork(2)
        assert before == plain_driver.ALIVE
        found = list(rollouts(base, range(2), 2, command="echo 1", progress=False))
        assert len(found) == 2 and all("could not be forked" in str(each.failure) for each in found)


class Forgetful(PlainDriver):
    """Whatever is deleted is, but the answer is lost; and nobody knows what anything has used."""

    def make(self, labels: Mapping[str, str], env: Mapping[str, str], port: int) -> PlainSandbox:
        return ForgetfulSandbox(self, dict(labels), dict(env), port)


class ForgetfulSandbox(PlainSandbox):
    def close(self) -> None:
        super().close()
        raise SandboxError("the answer was lost", happened="may have run")

    def usage(self) -> Usage:
        raise SandboxError("rate_limited")


def test_rollouts_survive_a_deletion_and_a_bill_that_fail() -> None:
    with pytest.warns(RuntimeWarning, match="may not have been deleted"), base_of(Forgetful()) as base:
        found = {each.seed: each for each in rollouts(base, range(4), 2, command="echo {seed}", progress=False)}
        assert {seed: each.reward for seed, each in found.items()} == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}


class Full(Cramped):
    """Its disk has no room for anything kept."""

    def make(self, labels: Mapping[str, str], env: Mapping[str, str], port: int) -> PlainSandbox:
        return FullSandbox(self, dict(labels), dict(env), port)


class FullSandbox(CrampedSandbox):
    def keep(self, lifetime_hours: float | None) -> str:
        raise SandboxError("the disk is full")


def test_a_base_that_could_not_be_kept_lives_on() -> None:
    with base_of(Full(4)) as base:
        with pytest.raises(SandboxError, match="the disk is full"):
            base.keep()
        assert base.alive and base.exec("echo here").stdout == "here\n"
        (copy,) = base.fork(1)
        assert copy.alive


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"n": 1.5}, TypeError, "n must be an int, got 1.5"),
        ({"n": None}, TypeError, "n must be an int, got None"),
        ({"n": 0}, ValueError, "n must be at least 1"),
        ({"labels": "abc"}, TypeError, "labels must be a dict of strings or None, got 'abc'"),
        ({"network": "bogus"}, ValueError, "network='bogus'"),
        ({"timeout": "soon"}, ValueError, "timeout must be a positive number .*'soon'"),
        ({"timeout": float("nan")}, ValueError, "timeout must be a positive number .*nan"),
    ],
)
def test_arguments_of_a_fork(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with base_of(PlainDriver()) as base:
        (copy,) = base.fork()
        for forked in (base, copy):
            with pytest.raises(error, match=words):
                forked.fork(**arguments)
        assert base.fork(labels={"step": 5})[0].labels["step"] == "5"


@pytest.mark.parametrize("id", [None, 5, b"sb_1"])
def test_an_id_is_text(id: Any) -> None:
    for ask in (prized_gym.Base.connect, prized_gym.Base.remove):
        with pytest.raises(TypeError, match="id must be the string that keep"):
            ask(id, engine=engine_of(PlainDriver()))
