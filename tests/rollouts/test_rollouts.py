"""Rollouts on this machine: the same rewards whoever acts, every failure told, nothing left however the loop ends."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import prized_gym
from prized_gym import Prices, Rollout, rollouts
from tools.processes import own_descendants
from zoo.faulty import Faulty

pytestmark = pytest.mark.timeout(60)


def lean(observation: Any, info: Any) -> int:
    return int(observation[2] > 0)


def lean_all(observations: Any, infos: list[dict[str, Any]]) -> Any:
    assert len(infos) == len(observations)
    return (observations[:, 2] > 0).astype(np.int64)


async def lean_slowly(observation: Any, info: Any) -> int:
    await asyncio.sleep(0.0005)
    return lean(observation, info)


async def lean_all_slowly(observations: Any, infos: list[dict[str, Any]]) -> Any:
    await asyncio.sleep(0.0005)
    return lean_all(observations, infos)


def cart_pole_rewards(seeds: Any) -> dict[int, float]:
    env, rewards = gym.make("CartPole-v1"), {}
    for seed in seeds:
        observation, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(lean(observation, {}))
            total += float(reward)
            over = terminated or truncated
        rewards[seed] = total
    return rewards


class Word(gym.Env[Any, Any]):
    """Says which process it is in, how often that one was reset, what options it got; draws from its generator."""

    observation_space = spaces.Dict({"draw": spaces.Box(0, 1, (), np.float64), "count": spaces.Discrete(100)})
    action_space = spaces.Tuple((spaces.Discrete(3), spaces.Text(5, charset="abc")))
    resets = 0

    def __init__(self, length: int = 3) -> None:
        self.length = length

    def _seen(self) -> dict[str, Any]:
        return {"draw": np.array(self.np_random.random()), "count": self.count}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        type(self).resets += 1
        self.count = 0
        return self._seen(), {"options": options, "resets": type(self).resets, "pid": os.getpid()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.count += 1
        seen = self._seen()
        return seen, float(seen["draw"]), False, self.count >= self.length, {"said": action[1]}


@pytest.fixture(scope="module")
def cart_pole() -> Any:
    with prized_gym.Base("CartPole-v1") as base:
        yield base


@pytest.fixture(scope="module")
def faulty() -> Any:
    with prized_gym.Base(Faulty, env_kwargs={"episode": 3}) as base:
        yield base


# What is given


@pytest.mark.parametrize(
    ("policy", "batched"), [(lean, False), (lean_all, True), (lean_slowly, False), (lean_all_slowly, True)]
)
def test_the_same_rewards_whoever_acts(cart_pole: prized_gym.Base, policy: Any, batched: bool) -> None:
    seeds = range(20)
    runs = rollouts(cart_pole, seeds, 4, policy=policy, batched=batched, progress=False)
    assert len(runs) == 20
    found = list(runs)
    expected = cart_pole_rewards(seeds)
    assert {each.seed: each.reward for each in found} == expected
    assert all(each.length == each.reward and each.failure is None and each.attempts == 1 for each in found)
    assert all(each.task is None and each.seconds > 0 and math.isnan(each.cost_usd) for each in found)
    summary = runs.summary()
    assert (summary.rollouts, summary.failed) == (20, 0)
    assert summary.mean_reward == pytest.approx(np.mean(list(expected.values())))
    assert summary.std_reward == pytest.approx(np.std(list(expected.values())))
    assert (summary.min_reward, summary.max_reward) == (min(expected.values()), max(expected.values()))
    assert summary.mean_length == summary.mean_reward
    assert summary.rollouts_per_second == pytest.approx(20 / summary.seconds)


@pytest.mark.parametrize("how", ["one", "base given", "inline"])
def test_other_engines_and_bases(how: str) -> None:
    options: dict[str, Any] = {"engine": "inline"} if how == "inline" else {}
    copies = 1 if how == "one" else 3
    runs = rollouts("CartPole-v1", range(5), copies, policy=lean, progress=False, **options)
    assert {each.seed: each.reward for each in runs} == cart_pole_rewards(range(5))
    assert runs._plan.base.closed


def test_every_rollout_is_a_fresh_fork_and_at_most_copies_are_alive() -> None:
    most = 0

    def act(observation: Any, info: Any) -> Any:
        nonlocal most
        most = max(most, len(own_descendants()))
        return (1, "ab")

    with prized_gym.Base(Word) as base:
        list(rollouts(base, range(1), 1, policy=act, progress=False))
        around, most = most - 1, 0
        infos: list[dict[str, Any]] = []

        def first(observation: Any, info: Any) -> Any:
            infos.append(info)
            return act(observation, info)

        found = list(rollouts(base, range(12), 3, policy=first, progress=False))
        # A copy that is replaced closes its environment in its own time.
        assert most <= around + 3 + 3
        starts = [info for info in infos if "resets" in info]
        assert len(starts) == 12 and {info["resets"] for info in starts} == {1}
        assert {f"pid {info['pid']}" for info in starts} == {each.copy_id for each in found}
        assert len({each.copy_id for each in found}) == 12
        assert all(each.output == {"said": "ab"} and each.length == 3 for each in found)
        assert list(own_descendants())


def test_groups_start_from_one_state_and_go_their_own_ways() -> None:
    starts: dict[str, list[tuple[float, Any]]] = {}

    def act(observation: Any, info: Any) -> Any:
        if "options" in info:
            starts.setdefault(str(info["options"]), []).append((float(observation["draw"]), info["pid"]))
        return (0, "c")

    tasks: list[Any] = [{"level": 3}, "say it"]
    runs = rollouts(Word, None, 4, tasks=tasks, per_task=3, policy=act, progress=False)
    found = sorted(runs, key=lambda each: each.seed)
    assert [(each.task, each.seed) for each in found] == [(tasks[0], seed) for seed in range(3)] + [
        (tasks[1], seed) for seed in range(3, 6)
    ]
    assert set(starts) == {"{'level': 3}", "{'task': 'say it'}"}
    for group in starts.values():
        assert len({draw for draw, _ in group}) == 1 and len(group) == 3
    assert len({each.reward for each in found}) == 6
    again = sorted(rollouts(Word, None, 2, tasks=tasks, per_task=3, policy=act, progress=False), key=lambda e: e.seed)
    assert [each.reward for each in again] == [each.reward for each in found]
    rewards = runs.summary().rewards
    assert {number: sorted(some) for number, some in rewards.items()} == {
        number: sorted(each.reward for each in found[3 * number : 3 * number + 3]) for number in range(2)
    }


def test_starting_from_a_reset_made_in_the_base() -> None:
    seen: set[float] = set()

    def act(observation: Any, info: Any) -> Any:
        if "options" in info:
            seen.add(float(observation["draw"]))
        return (0, "a")

    found = list(rollouts(Word, range(4), 2, policy=act, reset_in="base", progress=False))
    assert len(seen) == 1 and len({each.reward for each in found}) == 4


def test_seeds_are_read_as_places_become_free(cart_pole: prized_gym.Base) -> None:
    read = 0

    def endless() -> Any:
        nonlocal read
        for seed in itertools.count():
            read += 1
            yield seed

    runs = rollouts(cart_pole, endless(), 2, policy=lean, progress=False)
    with pytest.raises(TypeError, match="no length"):
        len(runs)
    for number, _ in enumerate(runs):
        assert read <= number + 3
        if number == 4:
            break
    assert "5 of ?" in repr(runs)


def test_pass_at_k_is_the_unbiased_estimator() -> None:
    def summary(*groups: list[float]) -> prized_gym.Summary:
        return prized_gym.Summary(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, dict(enumerate(groups)))

    some = summary([1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    assert some.pass_at(1) == pytest.approx(0.125)
    assert some.pass_at(2) == pytest.approx(0.25)
    assert some.pass_at(4) == pytest.approx(0.5)
    assert summary([0.5, 0.2]).pass_at(1, threshold=0.5) == 0.5
    with pytest.raises(ValueError, match="task 1 has 1 rewards"):
        summary([1.0, 1.0], [1.0]).pass_at(2)
    with pytest.raises(ValueError, match="at least 1"):
        some.pass_at(0)


def test_prices_and_the_bar(capsys: pytest.CaptureFixture[str], cart_pole: prized_gym.Base) -> None:
    runs = rollouts(cart_pole, range(3), 2, policy=lean, prices=Prices(sandbox_hour=3600.0))
    found = list(runs)
    assert all(each.cost_usd == pytest.approx(each.seconds) for each in found)
    assert runs.summary().cost_usd == pytest.approx(sum(each.seconds for each in found))
    bar = capsys.readouterr().err
    assert "3/3" in bar and "mean reward" in bar
    with pytest.raises(ValueError, match="vcpu_hour"):
        Prices(vcpu_hour=-1)
    assert "mean_reward" in runs._repr_html_() and "copy_id" in found[0]._repr_html_()


# In an event loop


async def collected(runs: Any) -> list[Rollout]:
    return [each async for each in runs]


@pytest.mark.parametrize("policy", [lean, lean_slowly])
def test_async_for(cart_pole: prized_gym.Base, policy: Any) -> None:
    async def main() -> list[list[Rollout]]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        both = await asyncio.gather(
            *(
                collected(rollouts(cart_pole, seeds, 2, policy=policy, progress=False))
                for seeds in (range(6), range(6, 12))
            )
        )
        ticking.cancel()
        # The loop was free for others.
        assert ticks > 3
        return list(both)

    found = asyncio.run(main())
    assert {each.seed: each.reward for each in found[0]} == cart_pole_rewards(range(6))
    assert {each.seed: each.reward for each in found[1]} == cart_pole_rewards(range(6, 12))


def test_a_coroutine_runs_in_the_loop_of_the_async_for(cart_pole: prized_gym.Base) -> None:
    async def main() -> None:
        here = asyncio.get_running_loop()

        async def act(observation: Any, info: Any) -> int:
            assert asyncio.get_running_loop() is here
            return lean(observation, info)

        found = await collected(rollouts(cart_pole, range(3), 2, policy=act, progress=False))
        assert [each.failure for each in found] == [None] * 3

    asyncio.run(main())


def copies_left(before: set[int]) -> list[str]:
    deadline = time.monotonic() + 10
    while (left := set(own_descendants()) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [line for pid, line in own_descendants().items() if pid in left]


@pytest.mark.parametrize("policy", [lean, lean_slowly])
def test_leaving_an_async_for_early(cart_pole: prized_gym.Base, policy: Any) -> None:
    before = set(own_descendants())

    async def main() -> None:
        async for each in rollouts(cart_pole, range(100), 3, policy=policy, progress=False):
            assert each.failure is None
            break
        runs = rollouts(cart_pole, itertools.count(), 3, policy=policy, progress=False)
        task = asyncio.create_task(collected(runs))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert copies_left(before) == []


@pytest.mark.parametrize("how", ["break", "raise", "close", "with", "never begun"])
def test_leaving_the_loop_early(cart_pole: prized_gym.Base, how: str) -> None:
    before = set(own_descendants())
    runs = rollouts(cart_pole, range(100), 4, policy=lean, progress=False)
    if how == "break":
        for _ in runs:
            break
    elif how == "raise":
        with pytest.raises(KeyError):
            for _ in runs:
                raise KeyError
    elif how == "close":
        iterator = iter(runs)
        next(iterator)
        iterator.close()  # type: ignore[attr-defined]
    elif how == "with":
        with runs:
            for number, _ in enumerate(runs):
                if number == 3:
                    break
    else:
        runs.close()
    assert copies_left(before) == []
    with pytest.raises(RuntimeError, match="call rollouts"):
        list(runs)
    # The base that was given is still there.
    assert next(iter(rollouts(cart_pole, range(1), policy=lean, progress=False))).reward > 0


# What goes wrong


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (Faulty.KILL, "SIGKILL"),
        (Faulty.OS_EXIT, "last words"),
        (Faulty.RAISE, "divided by zero"),
        (Faulty.EXIT, r"exit"),
        (Faulty.BAD_SHAPE, "shape"),
        (Faulty.HANG, "hang_here"),
        (Faulty.HANG_IN_C, "within 2 s"),
    ],
)
def test_a_rollout_that_fails_is_told_and_hurts_no_other(faulty: prized_gym.Base, action: int, words: str) -> None:
    def act(observation: Any, info: Any) -> int:
        return action if observation[1] == 2.0 else Faulty.STEP

    runs = rollouts(
        faulty, range(6), 3, policy=act, timeout=2.0 if "hang" in words or "within" in words else 60, progress=False
    )
    found = {each.seed: each for each in runs}
    bad = found.pop(2)
    assert bad.failure is not None and re.search(words, bad.failure), bad.failure
    assert math.isnan(bad.reward) and re.match(r"pid \d+$", bad.copy_id) and bad.copy_id in bad.failure
    assert sorted(found) == [0, 1, 3, 4, 5]
    assert all(each.reward == 3.0 and each.failure is None for each in found.values())
    assert (runs.summary().failed, runs.summary().mean_reward) == (1, 3.0)


def test_two_hundred_rollouts_with_one_in_ten_failing(faulty: prized_gym.Base) -> None:
    bad = [Faulty.KILL, Faulty.RAISE, Faulty.SEGFAULT, Faulty.EXIT]

    def act(observations: Any, infos: Any) -> Any:
        seeds = observations[:, 1].astype(int)
        starting = observations[:, 0] == 0
        return np.array(
            [
                bad[seed // 10 % 4] if start and seed % 10 == 7 else Faulty.STEP
                for seed, start in zip(seeds, starting, strict=True)
            ]
        )

    runs = rollouts(faulty, range(200), 8, policy=act, batched=True, progress=False)
    found = list(runs)
    assert sorted(each.seed for each in found) == list(range(200))
    assert sorted(each.seed for each in found if each.failure) == list(range(7, 200, 10))
    assert {each.reward for each in found if not each.failure} == {3.0}
    assert (runs.summary().rollouts, runs.summary().failed, runs.summary().mean_reward) == (200, 20, 3.0)


def test_a_failed_rollout_is_tried_again(tmp_path: Path, faulty: prized_gym.Base) -> None:
    tried: dict[int, int] = {}

    def act(observation: Any, info: Any) -> int:
        seed = int(observation[1])
        if observation[0] == 0:
            tried[seed] = tried.get(seed, 0) + 1
            if (seed == 1 and tried[seed] < 3) or seed == 2:
                return Faulty.KILL
        return Faulty.STEP

    prices = Prices(sandbox_hour=3600.0)
    found = {e.seed: e for e in rollouts(faulty, range(4), 2, policy=act, retries=2, prices=prices, progress=False)}
    assert {seed: each.attempts for seed, each in found.items()} == {0: 1, 1: 3, 2: 3, 3: 1}
    assert found[1].failure is None and found[1].reward == 3.0
    # The attempts that failed were paid for too.
    assert found[1].cost_usd > found[1].seconds
    assert "SIGKILL" in str(found[2].failure) and math.isnan(found[2].reward)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", ["raises", "no action", "outside", "async raises"])
def test_a_policy_that_fails(faulty: prized_gym.Base, kind: str, batched: bool) -> None:
    def act(observation: Any, info: Any) -> Any:
        if kind == "raises":
            raise LookupError("no such observation")
        action = "left" if kind == "no action" else 99
        return np.array([action] * len(info)) if batched else action

    async def act_slowly(observation: Any, info: Any) -> Any:
        await asyncio.sleep(0)
        raise LookupError("no such observation")

    policy = act_slowly if kind == "async raises" else act
    found = list(rollouts(faulty, range(3), 2, policy=policy, batched=batched, progress=False))
    assert len(found) == 3 and all(math.isnan(each.reward) for each in found)
    for each in found:
        said = "raised LookupError" if "raises" in kind else "returned "
        assert each.failure is not None and re.match(rf"copy \d \(pid \d+\): the policy {said}", each.failure)
        assert ("no such observation" if "raises" in kind else "99" if kind == "outside" else "left") in each.failure


@pytest.mark.parametrize(
    "answer",
    [
        lambda seeds: np.where(seeds == 2, 99, 0),
        lambda seeds: [1.5 if seed == 2 else 0 for seed in seeds],
        lambda seeds: [None if seed == 2 else 0 for seed in seeds],
    ],
)
def test_one_action_of_a_batch_that_is_none_fails_one_rollout(answer: Any) -> None:
    def act(observations: Any, infos: Any) -> Any:
        return answer(observations[:, 1].astype(int))

    found = {each.seed: each for each in rollouts(Seeded, range(1, 5), 3, policy=act, batched=True, progress=False)}
    assert [found[seed].reward for seed in (1, 3, 4)] == [3.0, 3.0, 3.0]
    # Copy 1 is row 1 of the batch at first, and another later.
    assert found[2].failure is not None
    assert re.match(r"copy 1 \(pid \d+\): the policy returned .* for copy 1:", found[2].failure)


class Seeded(gym.Env[Any, Any]):
    """Observes its seed; an episode has three steps."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seed, self.count = seed, 0
        return np.array([0.0, float(seed or 0)]), {"pid": os.getpid()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return np.array([self.count, float(self.seed or 0)]), 1.0, self.count == 3, False, {"pid": os.getpid()}


def test_a_fork_that_took_too_long_is_not_taken_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from prized_gym.engines.local import spawning

    monkeypatch.setattr(spawning, "FORK_TIMEOUT", 2.0)
    with prized_gym.Base(Seeded, progress=False) as base:
        pid = int(base._handle.where.split()[1])
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(3.0, os.kill, (pid, signal.SIGCONT)).start()
        found = list(rollouts(base, range(8), 2, policy=lambda observation, info: 0, progress=False, timeout=60))
        late = [each for each in found if each.failure is not None]
        assert late and all("has not forked them within 2 s" in str(each.failure) for each in late)
        played = [each for each in found if each.failure is None]
        assert len(found) == 8 and played
        for each in played:
            # Its own process, with its own seed.
            assert each.reward == 3.0 and each.copy_id == f"pid {each.output['pid']}"


def test_an_interrupt_in_a_policy_is_no_failure(cart_pole: prized_gym.Base) -> None:
    def act(observation: Any, info: Any) -> int:
        raise KeyboardInterrupt

    before = set(own_descendants())
    with pytest.raises(KeyboardInterrupt):
        list(rollouts(cart_pole, range(3), 2, policy=act, progress=False))
    assert copies_left(before) == []


def test_a_policy_that_never_answers(cart_pole: prized_gym.Base) -> None:
    async def act(observation: Any, info: Any) -> int:
        if float(observation[0]) == stuck:
            await asyncio.sleep(1000)
        return lean(observation, info)

    env = gym.make("CartPole-v1")
    stuck = float(env.reset(seed=1)[0][0])
    found = {each.seed: each for each in rollouts(cart_pole, range(3), 3, policy=act, timeout=3.0, progress=False)}
    assert re.search(r"within 3 s, of which the policy took \d", str(found.pop(1).failure))
    assert {seed: each.reward for seed, each in found.items()} == cart_pole_rewards((0, 2))


@pytest.mark.parametrize("batched", [False, True])
def test_an_answer_that_comes_too_late_is_nobodys(faulty: prized_gym.Base, batched: bool) -> None:
    """The first rollouts run out of time while the policy thinks; those in their places get their own."""
    slow = True

    async def act(observation: Any, info: Any) -> Any:
        nonlocal slow
        if slow:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                slow = False
                raise
        return np.zeros(len(info), np.int64) if batched else Faulty.STEP

    found = {e.seed: e for e in rollouts(faulty, range(6), 2, policy=act, batched=batched, timeout=2.0, progress=False)}
    assert [seed for seed, each in sorted(found.items()) if each.failure] == [0, 1]
    assert all(found[seed].reward == 3.0 for seed in range(2, 6))


def test_a_base_that_dies_while_the_policy_thinks() -> None:
    first = True

    async def act(observation: Any, info: Any) -> int:
        nonlocal first
        if first:
            first = False
            os.kill(int(base._handle.where.split()[1]), signal.SIGKILL)
        await asyncio.sleep(0.05)
        return lean(observation, info)

    with prized_gym.Base("CartPole-v1") as base:
        found = list(rollouts(base, range(6), 3, policy=act, retries=1, progress=False))
    assert {each.seed: each.reward for each in found} == cart_pole_rewards(range(6))


def test_a_hanging_copy_takes_none_of_a_batch_with_it(faulty: prized_gym.Base) -> None:
    def act(observations: Any, infos: Any) -> Any:
        return np.where((observations[:, 1] == 2) & (observations[:, 0] == 0), Faulty.HANG, Faulty.STEP)

    found = {e.seed: e for e in rollouts(faulty, range(5), 5, policy=act, batched=True, timeout=2.0, progress=False)}
    assert "hang_here" in str(found[2].failure)
    assert [seed for seed, each in sorted(found.items()) if each.failure] == [2]


def test_what_the_caller_does_is_none_of_the_copies_time(faulty: prized_gym.Base) -> None:
    for number, each in enumerate(rollouts(faulty, range(4), 2, policy=lambda o, i: 0, timeout=3.0, progress=False)):
        assert each.failure is None and each.seconds < 3.0
        if number == 0:
            time.sleep(3.5)
    (slow,) = rollouts(faulty, [1], policy=lambda o, i: time.sleep(0.6) or 0, timeout=1.0, progress=False)
    assert re.search(r"within 1 s, of which the policy took \d+\.\d", str(slow.failure))


def test_what_has_ended_is_given_before_an_error_of_the_seeds(faulty: prized_gym.Base) -> None:
    def seeds() -> Any:
        yield from range(2)
        raise RuntimeError("no more seeds")

    found = []
    with pytest.raises(RuntimeError, match="no more seeds"):
        for each in rollouts(faulty, seeds(), 2, policy=lambda o, i: 0, progress=False):
            found.append(each.seed)
    assert found


def test_a_fork_that_fails_is_the_failure_of_its_rollouts(
    faulty: prized_gym.Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prized_gym.engines.local.fleet import LocalFleet

    fork, forks = LocalFleet.fork, 0

    def sometimes(self: Any, first: Any) -> None:
        nonlocal forks
        forks += 1
        if forks in (2, 3):
            raise prized_gym.PrizedGymError("no more processes")
        fork(self, first)

    monkeypatch.setattr(LocalFleet, "fork", sometimes)
    found = list(rollouts(faulty, range(6), 2, policy=lambda o, i: 0, retries=2, progress=False))
    assert sorted(each.seed for each in found) == list(range(6)) and not any(each.failure for each in found)
    assert max(each.attempts for each in found) > 1


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), asyncio.CancelledError(), GeneratorExit()])
def test_whatever_a_policy_raises_in_the_loop_is_its_rollouts_failure(
    faulty: prized_gym.Base, error: BaseException
) -> None:
    async def act(observation: Any, info: Any) -> int:
        if observation[0] == 0 and observation[1] == 1:
            raise error
        return 0

    found = {each.seed: each for each in rollouts(faulty, range(4), 2, policy=act, timeout=20, progress=False)}
    assert sorted(found) == [0, 1, 2, 3]
    assert [seed for seed, each in sorted(found.items()) if each.failure] == [1]
    assert "the policy raised " in str(found[1].failure)


def test_callables_that_return_a_coroutine(cart_pole: prized_gym.Base) -> None:
    import functools

    for act in (lambda o, i: lean_slowly(o, i), functools.partial(lean_slowly)):
        found = list(rollouts(cart_pole, range(3), 2, policy=act, progress=False))
        assert {each.seed: each.reward for each in found} == cart_pole_rewards(range(3))


def test_context_variables_reach_a_coroutine(cart_pole: prized_gym.Base) -> None:
    whose: contextvars.ContextVar[str] = contextvars.ContextVar("whose", default="lost")
    seen = set()

    async def act(observation: Any, info: Any) -> int:
        seen.add(whose.get())
        return lean(observation, info)

    async def main() -> None:
        whose.set("mine")
        await collected(rollouts(cart_pole, range(2), policy=act, progress=False))

    asyncio.run(main())
    assert seen == {"mine"}


def test_close_in_the_loop_ends_it(cart_pole: prized_gym.Base) -> None:
    before = set(own_descendants())
    runs = rollouts(cart_pole, range(100), 3, policy=lean, progress=False)
    assert bool(rollouts(cart_pole, iter([1]), policy=lean, progress=False))
    count = 0
    for _ in runs:
        count += 1
        runs.close()
        assert copies_left(before) == []
    assert count == 1
    iterator = iter(again := rollouts(cart_pole, range(3), policy=lean, progress=False))
    again.close()
    assert list(iterator) == []

    async def main() -> int:
        count = 0
        async with rollouts(cart_pole, range(100), 3, policy=lean, progress=False) as runs:
            async for _ in runs:
                count += 1
                if count == 2:
                    break
        assert copies_left(before) == []
        return count

    assert asyncio.run(main()) == 2


def test_a_base_is_closed_with_its_runs() -> None:
    async def main() -> None:
        base = prized_gym.Base("CartPole-v1")
        async for _ in rollouts(base, range(100), 3, policy=lean, progress=False):
            break
        started = time.monotonic()
        base.close()
        assert time.monotonic() - started < 30
        base = prized_gym.Base("CartPole-v1")
        found = []
        async for each in rollouts(base, range(100), 3, policy=lean_slowly, progress=False):
            found.append(each)
            base.close()
        assert 1 <= len(found) < 100

    asyncio.run(main())


class NoNumber(Word):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, _, _, _, info = super().step(action)
        return seen, math.nan, True, False, info


def test_a_reward_that_is_no_number() -> None:
    (one,) = rollouts(NoNumber, [5], policy=lambda observation, info: (0, "a"), progress=False)
    assert "no finite number: nan" in str(one.failure)


def test_a_base_that_dies_is_rebuilt_and_its_rollouts_tried_again() -> None:
    with prized_gym.Base("CartPole-v1") as base:
        found = []
        for each in rollouts(base, range(30), 3, policy=lean, retries=1, progress=False):
            found.append(each)
            if len(found) == 5:
                os.kill(int(base._handle.where.split()[1]), signal.SIGKILL)
        assert {each.seed: each.reward for each in found} == cart_pole_rewards(range(30))
        assert max(each.attempts for each in found) == 2


def test_a_closed_base_is_said_to_be_closed() -> None:
    base = prized_gym.Base("CartPole-v1")
    base.close()
    with pytest.raises(prized_gym.BaseDiedError, match="is closed"):
        list(rollouts(base, range(3), policy=lean, progress=False))


SCRIPT = """
import os, sys, prized_gym
def act(observation, info):
    return int(observation[2] > 0)
base = prized_gym.Base("CartPole-v1")
number = 0
for each in prized_gym.rollouts(base, range(10 ** 9), 4, policy=act, progress=False):
    number += 1
    if number == 10:
        print("going", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_outlives_a_trainer(how: signal.Signals) -> None:
    before = set(own_descendants())
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"going\n"
    below = set(own_descendants()) - before - {process.pid}
    assert len(below) >= 2
    time.sleep(0.05)
    process.send_signal(how)
    process.wait(10)
    said = process.stderr.read().decode()
    process.stdout.close()
    process.stderr.close()
    if how is signal.SIGINT:
        assert said.rstrip().endswith("KeyboardInterrupt"), said
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, TypeError, "got none"),
        ({"policy": lean, "command": "true"}, TypeError, "got policy, command"),
        ({"policy": 3}, TypeError, "policy must be a callable.*, got 3"),
        ({"policy": lambda observation: 0}, TypeError, r"takes \(observation, info\), got <function"),
        ({"policy": lean, "reward": "score"}, TypeError, "environment's"),
        ({"policy": lean, "seeds": 100}, TypeError, r"range\(100\), got 100"),
        ({"policy": lean, "seeds": None}, TypeError, "needs seeds="),
        ({"policy": lean, "per_task": 2}, ValueError, "pass tasks="),
        ({"policy": lean, "tasks": "abc", "seeds": None}, TypeError, "tasks must be a list"),
        ({"policy": lean, "tasks": ["a", "b"], "seeds": range(3)}, ValueError, "3 seeds for 2 tasks"),
        ({"policy": lean, "tasks": ["a"], "seeds": None, "reset_in": "base"}, ValueError, "one reset"),
        ({"policy": lean, "copies": 0}, ValueError, "copies must be at least 1"),
        ({"policy": lean, "retries": -1}, ValueError, "retries must be at least 0"),
        ({"policy": lean, "timeout": 0}, ValueError, "timeout must be a positive"),
        ({"policy": lean, "reset_in": "there"}, ValueError, "reset_in='there'"),
        ({"policy": lean, "vcpu": 2}, TypeError, "vcpu: an option of the base"),
        ({"command": "true"}, prized_gym.EngineUnavailableError, "engine='gvisor'"),
        ({"request": "/x"}, prized_gym.EngineUnavailableError, "engine='local'"),
        ({"episode": lean}, prized_gym.EngineUnavailableError, "use policy="),
        ({"command": "true", "batched": True}, TypeError, "batched=True"),
        ({"command": "true", "reset_in": "base"}, TypeError, "reset_in='base'"),
    ],
)
def test_arguments_that_do_not_fit(
    cart_pole: prized_gym.Base, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        rollouts(cart_pole, **{"seeds": range(3), **arguments})


@pytest.mark.parametrize(
    ("seeds", "error", "words"), [([1, -2], ValueError, "non-negative integer, got -2"), (["a"], TypeError, "'str'")]
)
def test_seeds_that_are_none(cart_pole: prized_gym.Base, seeds: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        list(rollouts(cart_pole, seeds, policy=lean, progress=False))


def test_a_base_of_several_environments_is_refused() -> None:
    factories = [lambda: gym.make("CartPole-v1"), lambda: gym.make("CartPole-v1")]
    with pytest.raises(ValueError, match="2 copies of their own kinds"):
        rollouts(factories, range(3), policy=lean, progress=False)
