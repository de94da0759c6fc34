"""What a provider cannot do, the pool makes up for: each capability, through what a user calls."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import prized_gym
from prized_gym.protocols import GymProtocol
from prized_gym.sandbox.driver import Sandbox, Shape
from prized_gym.sandbox.sweeping import OWNER_LABEL, is_orphan, owner
from tools.comparing import assert_same
from tools.processes import eventually
from tools.sandboxes import ZOO
from zoo import bad_server as bad
from zoo import plain_driver
from zoo import plain_variants as variants
from zoo.envs import Loaded, SpaceEnv
from zoo.plain_driver import PlainDriver, engine_of

BAD: dict[str, Any] = {
    "start": f"{sys.executable} {ZOO / 'bad_server.py'} --port 8000",
    "ready": "http://127.0.0.1:8000/health",
    "progress": False,
}
pytestmark = pytest.mark.timeout(180)


def base_of(provider: PlainDriver, env: Any = Loaded, **options: Any) -> prized_gym.Base:
    return prized_gym.Base(env, engine=engine_of(provider), progress=False, **options)


def bad_base(provider: PlainDriver, **options: Any) -> prized_gym.Base:
    return prized_gym.Base(engine=engine_of(provider), protocol=GymProtocol(), **{**BAD, **options})


# No forks


def test_without_forks_each_copy_is_set_up() -> None:
    provider = variants.Forkless()
    env = partial(SpaceEnv, "nested")
    with base_of(provider, env, setup="echo made > made", upload={__file__: "here.py"}) as base:
        forked = prized_gym.ForkedVectorEnv(base, num_envs=2)
        reference = SyncVectorEnv([env] * 2)
        assert_same(forked.reset(seed=3), reference.reset(seed=3))
        for _ in range(10):
            actions = reference.action_space.sample()
            assert_same(forked.step(actions), reference.step(actions))
        assert provider.created == 3
        with pytest.raises(prized_gym.EngineUnavailableError, match=r"branch.* provider cannot"):
            forked.branch(0, [1])
        # Nothing was ended by asking.
        actions = reference.action_space.sample()
        assert_same(forked.step(actions), reference.step(actions))
        forked.close()
        reference.close()
        copies = base.fork(2)
        for copy in copies:
            assert copy.files.read("made") == b"made\n" and copy.files.read("here.py") == Path(__file__).read_bytes()
            with pytest.raises(prized_gym.EngineUnavailableError, match="cannot"):
                copy.fork()
            copy.close()


def test_without_forks_a_reset_in_the_base_is_replayed() -> None:
    env = partial(SpaceEnv, "nested")
    with base_of(variants.Forkless(), env, reset_seed=7) as base:
        forked = prized_gym.ForkedVectorEnv(base, num_envs=2, reset_in="base", autoreset_mode="Disabled")
        reference = SyncVectorEnv([env] * 2)
        expected, _ = reference.reset(seed=[7, 7])
        for seed in (1, 2):
            assert_same(forked.reset(seed=seed)[0], expected)
        forked.close()
        reference.close()


def test_without_forks_copies_have_the_network_of_their_set_up() -> None:
    with pytest.raises(ValueError, match="pass the same for both"):
        base_of(variants.Forkless(), network="outbound")
    base_of(variants.Forkless(), network="outbound", copy_network="outbound").close()


def test_one_copy_that_cannot_be_set_up_is_a_failure_of_its_own(tmp_path: Path) -> None:
    counter = tmp_path / "count"
    # The base is the first to be set up; the second copy is the third.
    setup = f"echo x >> {counter}; test $(wc -l < {counter}) != 3"
    provider = variants.Busy(1, forks=False)
    with bad_base(provider, setup=setup) as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=3, on_failure="raise")
        with pytest.raises(prized_gym.SetupError, match="exited with code 1"):
            envs.reset(seed=0)
        assert (envs.reset(seed=0)[0] == 0).all()
        envs.close()
    assert provider.refused == 0 and provider.highest == 1


class Slow(variants.Forkless):
    """Makes sandboxes one after another, each when it may.

    Attributes:
        begun: set by the second creation, which then waits for ``go``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def create(self, shape: Shape, timeout: float) -> Sandbox:
        if self.created:
            self.begun.set()
            assert self.go.wait(60)
        return super().create(shape, timeout)


def test_copies_that_are_set_up_when_the_base_is_closed_are_ended() -> None:
    provider, before = Slow(), set(plain_driver.ALIVE)
    base = bad_base(provider)
    with ThreadPoolExecutor() as threads:
        forking = threads.submit(base.fork, 3)
        assert provider.begun.wait(60)
        base.close()
        provider.go.set()
        with pytest.raises(prized_gym.BaseDiedError, match="closed"):
            forking.result(60)
    assert eventually(lambda: set(plain_driver.ALIVE) <= before, 30)


def test_an_interrupt_leaves_no_copy_that_is_still_set_up() -> None:
    provider = Slow()
    with bad_base(provider) as base:
        before = set(plain_driver.ALIVE)

        def interrupt() -> None:
            assert provider.begun.wait(60)
            os.kill(os.getpid(), signal.SIGINT)

        with ThreadPoolExecutor() as threads:
            threads.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                base.fork(3)
        provider.go.set()
        made = provider.created
        assert eventually(lambda: provider.created == made or set(plain_driver.ALIVE) == before, 30)
        (copy,) = base.fork(1)
        copy.close()
        assert eventually(lambda: set(plain_driver.ALIVE) == before, 30)


# Capacity


def test_a_second_base_that_cannot_be_set_up_leaves_the_copies_that_fit(tmp_path: Path) -> None:
    counter = tmp_path / "count"
    provider = variants.Cramped(room=2)
    with bad_base(provider, setup=f"echo x >> {counter}; test $(wc -l < {counter}) = 1") as base:
        for _ in range(2):
            with pytest.raises(
                prized_gym.SandboxError, match=r"room for 2 of 3 copies.*not be set up.*code 1"
            ) as caught:
                base.fork(3)
            assert caught.value.fits == 2  # type: ignore[attr-defined]
        found = list(prized_gym.rollouts(base, range(6), 4, command="echo {seed}", timeout=60, progress=False))
        assert sorted(one.reward for one in found) == list(range(6))
        # Not tried each time there is no room.
        assert counter.read_text() == "x\n" * 2


def test_a_second_base_is_set_up_where_the_first_has_no_room() -> None:
    provider = variants.Cramped(room=3)
    with bad_base(provider) as base:
        plain_driver.FORKS.clear()
        envs = prized_gym.ForkedVectorEnv(base, num_envs=5)
        for _ in range(3):
            envs.reset(seed=0)
            assert (envs.step([bad.FINE] * 5)[1] == 1).all()
        assert [len(forks) for forks in provider.parents.values()] in ([9, 6], [9, 6, 0])
        # Once it is known what fits, no more is asked of either.
        assert plain_driver.FORKS == [4, 3, 2, 3, 2, 3, 2]
        assert len(base.fork(1)) == 1
        envs.close()


def test_what_fits_is_said_where_no_second_base_can_be_set_up() -> None:
    provider = variants.Cramped(room=2)
    made = bad_base(provider)
    kept = made.keep()
    engine = engine_of(provider)
    with prized_gym.Base.connect(kept, engine=engine, protocol=GymProtocol(), progress=False) as base:
        with pytest.raises(prized_gym.SandboxError, match="room for 2 of 3 copies") as caught:
            base.fork(3)
        assert caught.value.fits == 2  # type: ignore[attr-defined]
        envs = prized_gym.ForkedVectorEnv(base, num_envs=3)
        with pytest.raises(prized_gym.SandboxError, match="cannot be set up a second time elsewhere"):
            envs.reset(seed=0)
        envs.close()


def test_a_branch_is_made_in_part() -> None:
    with bad_base(variants.Cramped(room=3)) as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=3, on_failure="truncate")
        envs.reset(seed=0)
        # A copy has room for one fork of its own.
        base_provider = base._engine.provider  # type: ignore[attr-defined]
        base_provider.room = 1
        with pytest.raises(prized_gym.SandboxError, match="1 fit"):
            envs.branch(0, [1, 2])
        envs.close()


# A bare Python


def test_what_the_server_needs_is_brought_into_a_bare_image() -> None:
    with base_of(variants.Bare(), setup="! python3 -c 'import numpy' 2>/dev/null") as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=2)
        observations, _ = envs.reset(seed=0)
        assert observations.shape == (2, 4)
        assert base.exec("python3 -c 'import sys; print(sys.prefix)'").stdout.strip() == str(variants.empty_python())
        envs.close()


def test_a_server_of_ones_own_needs_nothing_brought(tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(
        "import http.server as http, sys\n"
        "http.HTTPServer(('127.0.0.1', int(sys.argv[2])), http.SimpleHTTPRequestHandler).serve_forever()\n"
    )
    with prized_gym.Base(
        engine=engine_of(variants.Bare()),
        upload={str(server): "server.py"},
        start="exec python3 server.py --port 8000",
        ready="http://127.0.0.1:8000/",
        channel="exec",
        progress=False,
    ) as base:
        assert base.http("/server.py").body == server.read_bytes()
        assert not base.exec("ls scratch/site", timeout=5).stdout


# Requests at once


@pytest.mark.parametrize("channel", ["http", "exec"])
def test_no_more_requests_at_once_than_the_provider_takes(channel: str) -> None:
    provider = variants.Busy(3)
    with bad_base(provider, channel=channel) as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=8, step_timeout=60)
        envs.reset(seed=0)
        for _ in range(3):
            assert (envs.step([bad.FINE] * 8)[1] == 1).all()
        envs.close()
        for copy in base.fork(6):
            assert copy.exec("sleep 0.05; echo x").stdout == "x\n"
            copy.close()
    assert provider.refused == 0 and provider.highest <= 3 and provider.answered > 10


class Unhurried(variants.Busy):
    """Takes its time for each request, once ``seconds`` are set."""

    seconds = 0.0

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        with super().request():
            time.sleep(self.seconds)
            yield


def test_what_a_step_waits_for_its_turn_is_not_of_its_time() -> None:
    provider = Unhurried(2)
    with bad_base(provider, channel="exec") as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=6, step_timeout=4, on_failure="raise")
        envs.reset(seed=0)
        provider.seconds = 1.0
        started = time.monotonic()
        assert (envs.step([bad.FINE] * 6)[1] == 1).all()
        # One after another, they took longer than any of them may.
        assert time.monotonic() - started > 4
        provider.seconds = 0.0
        envs.close()
    assert provider.refused == 0


def test_waiting_for_a_death_leaves_others_their_turn() -> None:
    provider = variants.Busy(1)
    with bad_base(provider) as base, ThreadPoolExecutor() as threads:
        waited, other = base.fork(2)
        waiting = threads.submit(waited.wait_dead, 60)
        time.sleep(0.2)
        other.close()
        assert not waiting.done()
        next(each for each in plain_driver.ALIVE if each.id == waited.id).kill("killed")
        assert waiting.result(30) == "killed"
        assert other.death == "closed"
    assert provider.refused == 0


def test_ending_what_hangs_does_not_wait_for_what_hangs() -> None:
    provider = variants.Busy(2)
    with bad_base(provider, channel="exec") as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=3, step_timeout=2, on_failure="truncate")
        envs.reset(seed=0)
        started = time.monotonic()
        *_, truncations, infos = envs.step([bad.HANG] * 3)
        assert truncations.all() and "did not answer within 2 s" in infos["failure"][2]
        assert time.monotonic() - started < 30
        envs.close()
    assert provider.refused == 0


# Labels


def test_what_a_lost_answer_made_is_deleted() -> None:
    provider = variants.Listing()
    provider.lose = 1
    with pytest.raises(prized_gym.SetupError, match="may have run"):
        base_of(provider)
    assert not provider.list({})
    with bad_base(provider) as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=2)
        provider.lose = 1
        with pytest.raises(prized_gym.SandboxError, match="the connection was lost"):
            envs.reset(seed=0)
        # Not asked a second time, and nothing is left of it.
        assert len(provider.list({})) == 1
        envs.reset(seed=0)
        assert len(provider.list({})) == 3
        envs.close()


def test_what_never_ran_is_asked_once_more_and_what_may_have_run_is_not() -> None:
    provider = variants.Listing()
    with bad_base(provider) as base:
        provider.refuse = 1
        assert base.exec("echo fine").stdout == "fine\n"
        provider.refuse = 2
        with pytest.raises(prized_gym.SandboxError, match="rate_limited") as caught:
            base.exec("echo twice")
        assert caught.value.happened == "never ran" and not provider.refuse
        assert "echo twice" not in provider.executed
        provider.lose = 1
        with pytest.raises(prized_gym.SandboxError, match="lost") as caught:
            base.exec("echo never mind")
        assert caught.value.happened == "may have run"
        assert provider.executed.count("echo never mind") == 1
        provider.refuse = 1
        envs = prized_gym.ForkedVectorEnv(base, num_envs=2, on_failure="truncate")
        envs.reset(seed=0)
        envs.close()


def test_sweep_deletes_what_dead_programs_left_and_nothing_else() -> None:
    provider = variants.Listing()
    engine = engine_of(provider)
    host, pid, started = owner().rsplit("/", 2)
    with prized_gym.Base(engine=engine, progress=False) as base:
        provider.make({OWNER_LABEL: f"{host}/{pid}/{int(started) + 1}"}, {}, 8000)
        orphans = {each.id for each in provider.list({})} - {base.id}
        of_a_dead_one = {OWNER_LABEL: f"{host}/{pid}/{int(started) + 1}"}
        others = [
            provider.make({OWNER_LABEL: f"other{host}/{pid}/1"}, {}, 8000),
            provider.make({}, {}, 8000),
            provider.make({**of_a_dead_one, "kept": "yes"}, {}, 8000),
        ]
        assert set(engine.sweep()) == orphans and engine.sweep() == []
        assert base.exec("echo here").stdout == "here\n"
        for other in others:
            assert other.death is None
            other.close()
    assert not is_orphan(owner()) and not is_orphan("") and not is_orphan("a/b/c")


# Quota


def test_forks_wait_until_the_deleted_are_gone_where_they_count() -> None:
    provider = variants.Counting(limit=4, lingers=0.5)
    with bad_base(provider) as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=3)
        for _ in range(3):
            envs.reset(seed=0)
        assert (envs.step([bad.FINE] * 3)[1] == 1).all() and provider.refused
        with pytest.raises(prized_gym.SandboxError, match="4 at most"):
            base.fork(2)
        envs.close()


# Expiry


def test_a_base_that_is_about_to_expire_is_replaced() -> None:
    with bad_base(variants.Expiring(60.5, 3600.0)) as base:
        before = base.id
        time.sleep(0.6)
        envs = prized_gym.ForkedVectorEnv(base, num_envs=2)
        envs.reset(seed=0)
        assert base.id != before and before not in {each.id for each in plain_driver.ALIVE}
        envs.close()


def test_the_end_of_a_lifetime_is_a_failure_and_no_reward() -> None:
    with bad_base(variants.Expiring(3600.0)) as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=2, on_failure="truncate")
        before = set(plain_driver.ALIVE)
        envs.reset(seed=0)
        victim = next(iter(plain_driver.ALIVE - before))
        victim.live(0.0)
        victim.timer.join()
        _, rewards, terminations, truncations, infos = envs.step([bad.FINE] * 2)
        ended = int(np.flatnonzero(truncations)[0])
        assert truncations.sum() == 1 and rewards[ended] == 0 and rewards[1 - ended] == 1 and not terminations.any()
        assert (
            f"({victim.id}" in infos["failure"][ended].replace("sandbox ", "") and "lifetime" in infos["failure"][ended]
        )
        envs.close()


# What is kept


def test_a_provider_that_keeps_nothing_says_so_and_the_base_lives_on() -> None:
    with base_of(PlainDriver(), None) as base:
        with pytest.raises(prized_gym.SandboxError, match="keeps no sandboxes"):
            base.keep()
        assert base.exec("echo here").stdout == "here\n"


def test_a_base_that_could_not_be_kept_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, lifetime_hours: float | None) -> str:
        raise prized_gym.SandboxError("no disk left")

    monkeypatch.setattr(variants.CrampedSandbox, "keep", full)
    with bad_base(variants.Cramped(room=3)) as base:
        with pytest.raises(prized_gym.SandboxError, match="no disk left"):
            base.keep()
        assert base.alive and len(base.fork(2)) == 2


# Cost


def test_what_the_provider_bills_is_in_the_usage() -> None:
    with bad_base(variants.Billing()) as base:
        fleet = base.fleet(1)
        assert np.isnan(fleet.usage(0).cost_usd)
        from prized_gym.interface.commands import Fresh, Reset

        fleet.fork({0: Reset(seed=0, fresh=Fresh(0))})
        assert not fleet.wait().failures
        usage = fleet.usage(0)
        assert usage.cost_usd == 1.0 and usage.seconds > 0
        fleet.close()
