"""Rollouts in sandboxes of gVisor: four ways to the same rewards, and whatever fails in one is told and ends with it."""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prized_gym
from prized_gym import Prices, rollouts
from prized_gym.protocols import EpisodeProtocol
from tools.processes import left_of, sentry_of
from tools.sandboxes import ROOT, SMALL, ZOO
from zoo.episode_server import play

pytestmark = pytest.mark.timeout(90)

EPISODE = """
import json, random, sys
seed, how = int(sys.argv[1]), sys.argv[2]
print("playing")
reward = round(random.Random(seed).random(), 6)
if how == "json":
    print(json.dumps({"reward": reward, "length": 4}))
else:
    print(reward)
"""


@pytest.fixture(scope="module")
def base(gvisor: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[prized_gym.Base]:
    program = tmp_path_factory.mktemp("episodes") / "episode.py"
    program.write_text(EPISODE)
    with prized_gym.Base(
        engine=gvisor,
        upload={str(ZOO / "episode_server.py"): "episode_server.py", str(program): "episode.py"},
        start="exec python episode_server.py 8123",
        ready="http://127.0.0.1:8123/rollout",
        **SMALL,
    ) as base:
        yield base
        # Whatever the tests did, no copy is left.
        assert not copies_of(base)


def by_http(copy: prized_gym.Copy, seed: int) -> dict[str, Any]:
    copy.files.write("note", str(seed).encode())
    assert copy.exec("cat note").check().stdout == str(seed)
    return copy.http(f"/rollout?seed={seed}").check().json()


async def by_http_slowly(copy: prized_gym.Copy, seed: int, task: Any = None) -> float:
    answer = await copy.http_async(f"/rollout?seed={seed}")
    return float(answer.check().json()["reward"])


def copies_of(base: prized_gym.Base) -> Any:
    """The sandboxes forked from a base that have not been ended."""
    handle: Any = base.sandbox_handle()
    return handle.pool.copies


@pytest.mark.parametrize(
    ("way", "length"),
    [
        ({"request": "/rollout?seed={seed}"}, 1),
        ({"request": EpisodeProtocol("/rollout?seed={seed}")}, 1),
        ({"command": "python episode.py {seed} plain"}, 1),
        ({"command": "python episode.py {seed} json"}, 4),
        ({"command": "python episode.py {seed} json", "reward": lambda text: float(re.findall(r"0\.\d+", text)[0])}, 1),
        ({"episode": by_http}, 1),
        ({"episode": by_http_slowly}, 1),
    ],
    ids=["request", "protocol", "command", "command-json", "command-function", "episode", "episode-async"],
)
def test_four_ways_to_the_same_rewards(base: prized_gym.Base, way: Any, length: int) -> None:
    runs = rollouts(base, range(5), 3, prices=Prices(vcpu_hour=1800.0), progress=False, **way)
    found = {each.seed: each for each in runs}
    assert {seed: each.reward for seed, each in found.items()} == {seed: play(seed) for seed in range(5)}
    assert all(each.failure is None and each.length == length for each in found.values())
    assert len({each.copy_id for each in found.values()}) == 5
    assert all(each.cost_usd == pytest.approx(each.seconds) for each in found.values())  # of two vCPUs
    if "request" in way:
        # Each copy's server has played once in the base, and this episode.
        assert {each.output["played"] for each in found.values()} == {found[0].output["played"]}
    assert base.http("/rollout?seed=1").json()["reward"] == play(1)


def test_tasks_come_quoted(base: prized_gym.Base) -> None:
    tasks = ["it's; rm -rf ~ $HOME &do=die", {"level": 3}]
    runs = rollouts(base, None, 4, tasks=tasks, per_task=2, request="/rollout?seed={seed}&task={task}", progress=False)
    found = sorted(runs, key=lambda each: each.seed)
    assert [(each.task, each.output["task"]) for each in found] == [
        *[(tasks[0], tasks[0])] * 2,
        *[(tasks[1], '{"level": 3}')] * 2,
    ]
    found = list(rollouts(base, None, 2, tasks=tasks, command="echo {task}; echo {seed}.5 {}", progress=False))
    assert ["0.5 {}" in str(each.failure) for each in sorted(found, key=lambda each: each.seed)] == [True, False]
    found = list(rollouts(base, None, 2, tasks=tasks, command="echo {task}; echo {seed}.5", progress=False))
    assert {each.output: each.reward for each in found} == {f"{tasks[0]}\n0.5\n": 0.5, '{"level": 3}\n1.5\n': 1.5}
    seen = []
    for each in rollouts(base, None, 2, tasks=[1, 2], episode=lambda copy, seed, task: seen.append(task) or task):
        assert each.reward == each.task
    assert sorted(seen) == [1, 2]


def test_an_episode_server_is_an_environment_of_one_step(base: prized_gym.Base, gvisor: str) -> None:
    with prized_gym.Base(
        engine=gvisor,
        upload={str(ZOO / "episode_server.py"): "episode_server.py"},
        start="python episode_server.py 9000 threaded",
        ready="http://127.0.0.1:9000/rollout",
        protocol=EpisodeProtocol("/rollout?seed={seed}"),
        **SMALL,
    ) as threaded:
        envs = prized_gym.ForkedVectorEnv(threaded, num_envs=2)
        try:
            envs.reset(seed=4)
            _, rewards, terminations, _, infos = envs.step(np.zeros(2, np.int64))
            assert rewards.tolist() == [play(4), play(5)] and terminations.all()
            assert infos["seed"].tolist() == ["4", "5"]
        finally:
            envs.close()
        # The policy's way on the same server: its only action plays the episode.
        found = list(rollouts(threaded, range(3), 3, policy=lambda observation, info: 0, progress=False))
        assert {each.seed: each.reward for each in found} == {seed: play(seed) for seed in range(3)}


async def lean_slowly(observation: Any, info: Any) -> int:
    return int(observation[2] > 0)


def test_a_policy_has_the_same_rewards_here_and_on_the_local_engine(gvisor: str) -> None:
    def lean(observation: Any, info: Any) -> int:
        return int(observation[2] > 0)

    def lean_all(observations: Any, infos: Any) -> Any:
        return (observations[:, 2] > 0).astype(np.int64)

    with prized_gym.Base("CartPole-v1", engine=gvisor, **SMALL) as there, prized_gym.Base("CartPole-v1") as here:
        for options in ({}, {"tasks": [{}], "per_task": 4, "seeds": range(5, 9)}):
            arguments: Any = {"seeds": range(4), "copies": 4, "progress": False, **options}
            expected = {each.seed: each.reward for each in rollouts(here, policy=lean, **arguments)}
            for policy, batched in ((lean, False), (lean_all, True), (lean_slowly, False)):
                found = list(rollouts(there, policy=policy, batched=batched, **arguments))
                assert [each.failure for each in found] == [None] * 4
                assert {each.seed: each.reward for each in found} == expected
        # What the policy does wrong is told as on the local engine.
        (bad,) = rollouts(there, [0], policy=lambda observation, info: 7, progress=False)
        assert str(bad.failure).startswith("copy 0 (sandbox sbx_") and "the policy returned 7: " in str(bad.failure)


def test_a_paused_base_is_forked(base: prized_gym.Base) -> None:
    base.pause()
    try:
        found = list(rollouts(base, range(3), 3, request="/rollout?seed={seed}", progress=False))
    finally:
        base.resume()
    assert {each.seed: each.reward for each in found} == {seed: play(seed) for seed in range(3)}


def _raise(copy: prized_gym.Copy, seed: int) -> float:
    raise LookupError(f"nothing for {seed}")


def _exit(copy: prized_gym.Copy, seed: int) -> float:
    sys.exit(3)


async def _exit_slowly(copy: prized_gym.Copy, seed: int) -> float:
    sys.exit(3)


async def _cancelled(copy: prized_gym.Copy, seed: int) -> float:
    raise asyncio.CancelledError


def _die(copy: prized_gym.Copy, seed: int) -> float:

    os.kill(sentry_of(copy.id), signal.SIGKILL)
    copy.exec("sleep 60")
    return 1.0


def _fill(copy: prized_gym.Copy, seed: int) -> float:
    copy.exec("head -c 200000000 /dev/zero > big").check()
    return 1.0


async def _raise_slowly(copy: prized_gym.Copy, seed: int) -> float:
    await asyncio.sleep(0)
    return _raise(copy, seed)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ({"request": "/rollout?seed={seed}&do=die"}, r"exited with code 7(.|\n)*last words of the server"),
        ({"request": "/rollout?seed={seed}&do=hang"}, r"within 2 s"),
        ({"request": "/rollout?seed={seed}&do=none"}, r"no reward"),
        ({"request": "/rollout?seed={seed}&do=garbage"}, r"no JSON"),
        ({"request": "/rollout?seed={seed}&do=refuse"}, r"500"),
        ({"command": "echo so sad >&2; exit 3"}, r"exited with code 3(.|\n)*so sad"),
        ({"command": "echo not a number"}, r"must be the reward.*'not a number'"),
        ({"command": "true"}, r"must be the reward"),
        ({"command": "echo NaN"}, r"no finite number"),
        ({"command": "sleep 100"}, r"within 2 s"),
        ({"episode": _raise}, r"the episode raised LookupError: nothing for 1(.|\n)*in _raise"),
        ({"episode": _raise_slowly}, r"the episode raised LookupError"),
        ({"episode": _exit}, r"the episode raised SystemExit: 3"),
        ({"episode": _exit_slowly}, r"the episode raised SystemExit: 3"),
        ({"episode": _cancelled}, r"the episode raised .*CancelledError"),
        ({"episode": lambda copy, seed: next(iter([]))}, r"the episode raised StopIteration"),
        ({"command": "echo '{}'", "tasks": [object()]}, r"no 'reward' among the keys"),
        ({"command": "echo {task}", "tasks": [object()]}, r"the task <object .* is neither a string nor JSON"),
        ({"episode": _die}, r"ended: (.|\n)*in _die"),
        ({"episode": _fill}, r"No space left"),
        ({"episode": lambda copy, seed: {"score": 1}}, r"no 'reward' among the keys \['score'\]"),
        ({"episode": lambda copy, seed: "good"}, r"'good' is no finite number"),
        ({"episode": lambda copy, seed: time.sleep(3) or copy.exec("true")}, r"within 2 s"),
        ({"episode": lambda copy, seed: 1, "reward": lambda given: given["x"]}, r"reward= raised TypeError"),
    ],
)
def test_what_fails_in_one_is_told(base: prized_gym.Base, way: Any, words: str) -> None:
    arguments = {"seeds": [1], "timeout": 2.0 if "within" in words else 30.0, "progress": False, **way}
    (one,) = rollouts(base, **arguments)
    assert one.failure is not None and re.search(words, one.failure), one.failure
    assert one.copy_id in one.failure and math.isnan(one.reward)
    assert base.http("/rollout?seed=1").json()["reward"] == play(1)


def test_an_episode_that_never_ends_keeps_no_other_from_its_turn(base: prized_gym.Base) -> None:
    stuck = threading.Event()

    def episode(copy: prized_gym.Copy, seed: int) -> float:
        if seed < 3:
            stuck.wait(60)
        return play(seed)

    try:
        found = {each.seed: each for each in rollouts(base, range(6), 2, episode=episode, timeout=3.0, progress=False)}
    finally:
        stuck.set()
    assert [seed for seed, each in sorted(found.items()) if each.failure] == [0, 1, 2]
    assert [found[seed].reward for seed in range(3, 6)] == [play(seed) for seed in range(3, 6)]


def test_close_in_the_loop_ends_it(base: prized_gym.Base) -> None:
    async def main() -> None:
        async with rollouts(base, range(9), 2, command="echo 1", progress=False) as runs:
            async for _ in runs:
                await runs.aclose()
        assert not copies_of(base)

    runs = rollouts(base, range(9), 2, command="echo 1", progress=False)
    count = 0
    for _ in runs:
        count += 1
        runs.close()
    assert count < 9 and not copies_of(base)
    asyncio.run(main())


def test_what_an_episode_takes_and_says(base: prized_gym.Base) -> None:
    def warm(copy: prized_gym.Copy, seed: int, temperature: float = 0.7) -> dict[str, Any]:
        return {"reward": 1, "temperature": temperature, "length": 10**400}

    for tasks in (None, ["a"]):
        seeds = [0] if tasks is None else None
        runs = rollouts(base, seeds, tasks=tasks, episode=warm, progress=False)
        (one,) = runs
        assert one.output["temperature"] == 0.7 and one.length == 1 and runs.summary().mean_length == 1
    command = """printf '{"reward": 2, "\\342\\200\\250": 1}'"""  # with a line separator of Unicode
    (one,) = rollouts(base, [0], command=command, progress=False)
    assert one.reward == 2.0
    (one,) = rollouts(base, None, tasks=[np.int64(3)], command="echo {task}", progress=False)
    assert one.reward == 3.0

    async def act(copy: prized_gym.Copy, seed: int) -> float:
        return 5.0

    (one,) = rollouts(base, [0], episode=lambda copy, seed: act(copy, seed), progress=False)
    assert one.reward == 5.0


def test_forty_rollouts_with_one_in_ten_failing(base: prized_gym.Base) -> None:
    def episode(copy: prized_gym.Copy, seed: int) -> Any:
        if seed % 10 == 3:
            kinds = [_raise, _die, _fill, lambda copy, seed: copy.http("/rollout?do=die")]
            return kinds[seed // 10](copy, seed)
        return by_http(copy, seed)

    runs = rollouts(base, range(40), 8, episode=episode, progress=False)
    found = {each.seed: each for each in runs}
    assert sorted(found) == list(range(40))
    assert sorted(seed for seed, each in found.items() if each.failure) == [3, 13, 23, 33]
    good = {seed: play(seed) for seed in range(40) if seed % 10 != 3}
    assert {seed: found[seed].reward for seed in good} == good
    assert runs.summary().mean_reward == pytest.approx(np.mean(list(good.values())))


def test_a_failed_rollout_is_tried_again_in_a_fresh_fork(base: prized_gym.Base) -> None:
    tried: list[str] = []

    def episode(copy: prized_gym.Copy, seed: int) -> float:
        tried.append(copy.id)
        if len(tried) < 3:
            raise LookupError
        return 1.0

    (one,) = rollouts(base, [1], episode=episode, retries=2, progress=False)
    assert (one.reward, one.attempts, one.failure) == (1.0, 3, None) and len(set(tried)) == 3


def test_leaving_early_deletes_the_copies(base: prized_gym.Base) -> None:
    hanging = {"command": "[ {seed} = 0 ] && echo 1 || sleep 100"}

    async def main() -> None:
        async for each in rollouts(base, range(6), 3, progress=False, **hanging):
            assert each.reward == 1
            break
        while copies_of(base):
            await asyncio.sleep(0.05)

    for _ in rollouts(base, range(6), 3, progress=False, **hanging):
        break
    assert not copies_of(base)
    threading.Timer(1.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        list(rollouts(base, range(6), 3, progress=False, command="sleep 100"))
    assert not copies_of(base)
    started = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - started < 80  # a command takes 100
    with pytest.raises(KeyError):
        for _ in rollouts(base, range(6), 3, progress=False, **hanging):
            raise KeyError
    assert not copies_of(base)


def test_a_base_that_dies_is_built_anew_and_those_under_way_end(gvisor: str) -> None:
    with prized_gym.Base(engine=gvisor, **SMALL) as base:
        killed = threading.Event()

        def episode(copy: prized_gym.Copy, seed: int) -> float:
            if seed == 2:
                os.kill(sentry_of(base.id), signal.SIGKILL)
                killed.set()
            elif seed == 3:
                killed.wait(30)
                time.sleep(0.5)
            return float(seed)

        found = [(e.seed, e.reward, e.failure) for e in rollouts(base, range(8), 2, episode=episode, progress=False)]
        assert sorted(found) == [(seed, float(seed), None) for seed in range(8)]
        assert not copies_of(base)


def test_a_base_that_cannot_be_built_anew_ends_the_run_after_those_under_way(gvisor: str) -> None:
    with prized_gym.Base(engine=gvisor, **SMALL) as made:
        kept = made.keep()
    with prized_gym.Base.connect(kept, engine=gvisor) as base:

        def episode(copy: prized_gym.Copy, seed: int) -> float:
            if seed == 0:
                assert prized_gym.Base.remove(kept, engine=gvisor)
                os.kill(sentry_of(base.sandbox_handle().own.id), signal.SIGKILL)
            return float(seed)

        found = []
        with pytest.raises(prized_gym.BaseDiedError, match="the base"):
            for each in rollouts(base, range(100), 2, episode=episode, progress=False):
                found.append((each.seed, each.reward, each.failure))
        assert {(0, 0.0, None), (1, 1.0, None)} <= set(found)


TRAINER = """
import prized_gym
base = prized_gym.Base(engine="gvisor", memory_gb=1, disk_gb=0.05, progress=False)
number = 0
for each in prized_gym.rollouts(base, range(10 ** 9), 2, command="echo 1", progress=False):
    number += 1
    if number == 3:
        print("now", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_a_trainer(gvisor: str, how: signal.Signals, tmp_path: Path) -> None:

    store = Path(f"/var/tmp/pg-r{os.getpid()}-{how}")
    environment = {**os.environ, "PRIZED_GYM_STORE": str(store), "PYTHONPATH": str(ROOT)}
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, env=environment, cwd=tmp_path)
    try:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"now\n"
        time.sleep(0.2)
        trainer.send_signal(how)
        trainer.wait(20)
        trainer.stdout.close()
        ends = time.monotonic() + 10
        while (left := left_of(store)) and time.monotonic() < ends:
            time.sleep(0.05)
        assert not left
    finally:
        trainer.kill()
        shutil.rmtree(store, ignore_errors=True)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"request": "rollout"}, TypeError, "target such as"),
        ({"request": EpisodeProtocol("/x"), "reward": "y"}, TypeError, "pass one of them"),
        ({"command": " "}, TypeError, "command must be a shell command"),
        ({"episode": 3}, TypeError, "episode must be a callable, got 3"),
        ({"episode": lambda copy: 1}, TypeError, r"must take \(copy, seed\)"),
        ({"policy": print}, prized_gym.PrizedGymError, "no environment"),
    ],
)
def test_arguments_that_do_not_fit(
    base: prized_gym.Base, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        rollouts(base, range(3), **arguments)
