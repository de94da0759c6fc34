"""The fleet of sandboxes over real servers on this machine: semantics, faults, batches in flight."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import prized_gym
from prized_gym.protocols import EpisodeProtocol, GymProtocol
from prized_gym.wire import encode
from tools.comparing import assert_same, compare
from tools.sandboxes import ZOO
from zoo import bad_server as bad
from zoo import plain_driver
from zoo.envs import Loaded, SpaceEnv
from zoo.faulty import Faulty

BAD = {
    "start": f"{sys.executable} {ZOO / 'bad_server.py'} --port 8000",
    "ready": "http://127.0.0.1:8000/health",
}
pytestmark = pytest.mark.timeout(180)


def make(env: Any, num_envs: int, **options: Any) -> prized_gym.ForkedVectorEnv:
    return prized_gym.ForkedVectorEnv(env, num_envs=num_envs, engine="plain", progress=False, **options)


@pytest.mark.parametrize("channel", ["http", "exec"])
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
def test_the_same_as_sync_vector_env(mode: AutoresetMode, channel: str) -> None:
    env = partial(SpaceEnv, "nested")
    forked = make(env, 2, channel=channel, autoreset_mode=mode, fork_on="start")
    reference = SyncVectorEnv([env] * 2, autoreset_mode=mode)
    try:
        compare(forked, reference, 40, mode is AutoresetMode.DISABLED, masked=True)
    finally:
        forked.close()
        reference.close()


def test_object_spaces_and_partial_steps() -> None:
    env = partial(SpaceEnv, "graph", "oneof")
    forked, reference = make(env, 3, fork_on="start"), SyncVectorEnv([env] * 3)
    try:
        assert_same(forked.reset(seed=3), reference.reset(seed=3))
        for _ in range(20):
            actions = reference.action_space.sample()
            expected = reference.step(actions)
            forked.send(actions[1:], [1, 2])
            forked.send(actions[:1], [0])
            left = 3
            while left:
                obs, rewards, *_, indices = forked.recv(1)
                left -= len(indices)
                for position, index in enumerate(indices):
                    assert_same(obs[position], expected[0][index])
                    assert rewards[position] == expected[1][index]
    finally:
        forked.close()
        reference.close()


def test_forks_come_in_one_call_and_attributes_are_replayed() -> None:
    plain_driver.FORKS.clear()
    envs = make(Loaded, 3)
    try:
        envs.set_attr("value", [1, 2, 3])
        observations, _ = envs.reset(seed=1)
        assert list(observations[:, 0]) == [1, 2, 3]
        assert plain_driver.FORKS == [3]
        assert envs.call("add", 5) == (6, 7, 8)
        assert envs.get_attr("value") == (6, 7, 8)
        observations, _ = envs.reset(seed=1, options={"reset_mask": np.array([True, False, True])})
        assert plain_driver.FORKS == [3, 2]
        assert envs.get_attr("value") == (1, 7, 3)
    finally:
        envs.close()


def test_reset_in_the_base_and_several_environments() -> None:
    with prized_gym.Base([partial(Loaded, size=10), partial(Loaded, size=20)], engine="plain", progress=False) as base:
        assert base.num_envs == 2 and base.engine == "plain" and base.setup_seconds > 0
        envs = prized_gym.ForkedVectorEnv(base)
        observations, _ = envs.reset(seed=0)
        assert list(observations[:, 1]) == [9, 19]
        envs.close()


def test_what_the_environment_raises_arrives() -> None:
    envs = make(Faulty, 2)
    try:
        envs.reset(seed=0)
        with pytest.raises(ZeroDivisionError, match="the env divided by zero") as caught:
            envs.step([Faulty.STEP, Faulty.RAISE])
        assert "in step" in str(caught.value.__cause__)
        envs.reset(seed=0)
        with pytest.raises(prized_gym.CopyDiedError, match=r"copy 1 \(sandbox plain_\d+\) called sys.exit\(3\)"):
            envs.step([Faulty.STEP, Faulty.EXIT])
        envs.reset(seed=0)
        with pytest.raises(prized_gym.CopyDiedError, match=r"exited with code 7[\s\S]*last words"):
            envs.step([Faulty.STEP, Faulty.OS_EXIT])
        envs.reset(seed=0)
        with pytest.raises(prized_gym.CopyDiedError, match="killed by SIGSEGV"):
            envs.step([Faulty.STEP, Faulty.SEGFAULT])
        envs.reset(seed=0)
        with pytest.raises(prized_gym.CopyError, match=r"copy 1 .*expected float64 of shape \(2,\)"):
            envs.step([Faulty.STEP, Faulty.BAD_SHAPE])
        assert envs.reset(seed=0)[0].shape == (2, 2)
    finally:
        envs.close()


@pytest.mark.parametrize("channel", ["http", "exec"])
def test_a_copy_that_hangs_is_ended_with_its_stack(channel: str) -> None:
    envs = make(Faulty, 2, step_timeout=1.0, channel=channel)
    try:
        envs.reset(seed=0)
        with pytest.raises(prized_gym.CopyTimeoutError, match=r"did not answer within 1 s[\s\S]*hang_here"):
            envs.step([Faulty.HANG, Faulty.STEP])
        envs.reset(seed=0)
    finally:
        envs.close()


def test_a_limit_holds_where_none_was_given() -> None:
    envs = make(Faulty, 1, request_timeout=3.0, on_failure="truncate")
    try:
        envs.reset(seed=0)
        _, _, _, truncations, infos = envs.step([Faulty.HANG])
        assert truncations[0] and "no answer within 3 s" in infos["failure"][0]
        assert not envs.step([0])[3][0]
    finally:
        envs.close()


@pytest.fixture(scope="module")
def bad_base() -> Any:
    with prized_gym.Base(engine="plain", protocol=GymProtocol(max_answer_bytes=1 << 20), progress=False, **BAD) as base:
        yield base


FAULTS = {
    bad.GARBAGE: "is no HTTP",
    bad.HUGE: "announces 10000000000 bytes",
    bad.CHUNKED: "more than the 1048576 bytes",
    bad.SHAPE: r"expected float32 of shape \(3,\)",
    bad.PICKLE: "not allowed",
    bad.DIE: "exited with code 7",
    bad.HANG: "did not answer within 6 s",
    bad.CUT: "closed before the answer was complete",
    bad.GZIP: "encoded as",
    bad.INTERIM: "one interim answer after another",
    bad.NAN: "reward: expected a number",
    bad.NO_OBS: "no observation",
    bad.DTYPE: "expected float32",
}


def test_a_bad_server_is_the_failure_of_its_copy_and_nothing_else(bad_base: prized_gym.Base) -> None:
    count = bad.ACTIONS.n
    envs = prized_gym.ForkedVectorEnv(bad_base, num_envs=count, on_failure="truncate", step_timeout=6.0)
    try:
        envs.reset(seed=0)
        observations, rewards, terminations, truncations, infos = envs.step(np.arange(count))
        for action in range(count):
            if action in FAULTS:
                assert truncations[action] and rewards[action] == 0 and not observations[action].any()
                assert infos["_failure"][action]
                assert re.search(FAULTS[action], infos["failure"][action]), infos["failure"][action]
            else:
                assert rewards[action] == 1 and observations[action, 0] == 0.5 and not truncations[action]
        assert not os.path.exists("/tmp/pg-unpickled")
        # The answer nobody asked for is not taken for the next one, and the failed copies are forked anew.
        observations, rewards, *_ = envs.step(np.zeros(count, np.int64))
        assert (observations[[bad.FINE, bad.LATE]] == 0.5).all()
        assert (envs.step(np.zeros(count, np.int64))[0] == 0.5).all()
    finally:
        envs.close()


def test_a_sandbox_killed_in_mid_step(bad_base: prized_gym.Base) -> None:
    envs = prized_gym.ForkedVectorEnv(bad_base, num_envs=2, on_failure="truncate", step_timeout=20)
    try:
        envs.reset(seed=0)
        earlier = set(plain_driver.ALIVE)
        envs.reset(seed=0, options={"reset_mask": np.array([False, True])})
        (victim,) = plain_driver.ALIVE - earlier
        threading.Timer(0.3, victim.kill, ["evicted"]).start()
        *_, infos = envs.step([bad.FINE, bad.HANG])
        assert infos["failure"][1] == f"copy 1 (sandbox {victim.id}) ended: evicted"
        assert (envs.step([0, 0])[1] == [1, 0]).all()
    finally:
        envs.close()


def test_a_base_that_dies_is_rebuilt() -> None:
    with prized_gym.Base("CartPole-v1", engine="plain", progress=False) as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=2)
        before = base.id
        envs.reset(seed=0)
        next(sandbox for sandbox in plain_driver.ALIVE if sandbox.id == before).kill("gone")
        assert not base.alive
        with pytest.raises(prized_gym.BaseDiedError, match="gone"):
            base.exec("true")
        assert envs.reset(seed=0)[0].shape == (2, 4)
        assert base.alive and base.id != before
        envs.close()


def test_copies_in_hand(bad_base: prized_gym.Base) -> None:
    copies = bad_base.fork(2, labels={"purpose": "test"})
    assert copies[0].labels["purpose"] == "test"
    with copies[0] as copy, copies[1]:
        copy.files.write("notes/a.txt", "hello")
        assert copy.exec("cat notes/a.txt").check().stdout == "hello"
        assert copy.exec("exit 3").exit_code == 3
        with pytest.raises(prized_gym.SandboxError, match="exited with code 3"):
            copy.exec("echo no; exit 3").check()
        assert copy.exec("sleep 10", timeout=0.2).timed_out
        ends = time.monotonic() + 20
        while True:
            try:
                assert copy.http("/health").check().json() == {}
                break
            except prized_gym.SandboxError:  # a fork of this provider starts its server anew
                assert time.monotonic() < ends
                time.sleep(0.05)
        with pytest.raises(prized_gym.SandboxTimeoutError):
            copy.http("/step", method="POST", body=encode({"actions": [bad.HANG]}), timeout=0.3)
        with copy.fork()[0] as grandchild:
            assert grandchild.files.read("notes/a.txt") == b"hello"
    with pytest.raises(prized_gym.SandboxError):
        copies[0].exec("true")


def test_several_fleets_and_threads_at_a_time(bad_base: prized_gym.Base) -> None:
    seen: list[float] = []

    def train() -> None:
        envs = prized_gym.ForkedVectorEnv(bad_base, num_envs=3)
        envs.reset(seed=0)
        for _ in range(50):
            seen.append(float(envs.step([0, 0, 0])[1].sum()))
        envs.close()

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert seen == [3.0] * 150
    channel_threads = [thread.name for thread in threading.enumerate() if thread.name == "prized_gym-channels"]
    assert len(channel_threads) == 1


def test_a_batch_costs_little_and_keeps_its_connections(bad_base: prized_gym.Base) -> None:
    envs = prized_gym.ForkedVectorEnv(bad_base, num_envs=4)
    try:
        envs.reset(seed=0)
        sandboxes = [sandbox for sandbox in plain_driver.ALIVE if sandbox.connections]
        before = [sandbox.connections for sandbox in sandboxes]
        actions = np.zeros(4, np.int64)
        times = []
        for _ in range(100):
            started = time.perf_counter()
            envs.step(actions)
            times.append(time.perf_counter() - started)
        assert [sandbox.connections for sandbox in sandboxes] == before or bad_base.alive
        print(f"a step of 4 copies: {np.median(times) * 1e3:.2f} ms")
        assert np.median(times) < 0.1
    finally:
        envs.close()


EPISODES = """
import argparse, json, random
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlparse
class Env(BaseHTTPRequestHandler):
    def do_GET(self):
        seed = int(parse_qs(urlparse(self.path).query).get("seed", ["0"])[0])
        body = json.dumps({"seed": seed, "reward": random.Random(seed).random()}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
HTTPServer(("127.0.0.1", parser.parse_args().port), Env).serve_forever()
"""


@pytest.mark.parametrize("channel", ["http", "exec"])
def test_a_server_that_plays_whole_episodes(tmp_path: Path, channel: str) -> None:
    script = tmp_path / "server.py"
    script.write_text(EPISODES)
    with prized_gym.Base(
        engine="plain",
        upload={str(script): "server.py"},
        start=f"{sys.executable} server.py --port 8000",
        protocol=EpisodeProtocol(),
        channel=channel,
        progress=False,
    ) as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=2, autoreset_mode="SameStep")
        envs.reset(seed=5)
        _, rewards, terminations, _, infos = envs.step([0, 0])
        assert list(rewards) == [random.Random(5).random(), random.Random(6).random()] and terminations.all()
        assert list(infos["final_info"]["seed"]) == [5, 6]
        envs.close()
        assert base.http("/rollout?seed=9").json()["seed"] == 9


def test_setup_that_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = partial(prized_gym.Base, engine="plain", progress=False)
    with pytest.raises(prized_gym.SetupError, match=r"'echo half way; exit 9' exited with code 9[\s\S]*half way"):
        base(setup=["echo first", "echo half way; exit 9", "echo never"])
    out = capfd.readouterr().out
    assert "first" in out and "half way" in out and "never" not in out
    with pytest.raises(prized_gym.SetupError, match=r"exited with code 1 before it was ready[\s\S]*no such thing"):
        base(start="echo no such thing; exit 1", ready="http://127.0.0.1:8000/")
    with pytest.raises(prized_gym.SetupTimeoutError, match=r"not ready within setup_timeout=3 s[\s\S]*still loading"):
        base(start="echo still loading; sleep 60", ready="http://127.0.0.1:8000/", setup_timeout=3)
    with pytest.raises(prized_gym.SetupTimeoutError, match="setup_timeout=0.5 s"):
        base(setup=["sleep 60"], setup_timeout=0.5)
    with pytest.raises(prized_gym.SetupError, match="there is no"):
        base(upload={str(tmp_path / "missing"): "x"})
    with pytest.raises(TypeError, match="unexpected keyword argument 'cpus'"):
        base(cpus=3)
    with pytest.raises(TypeError, match="exclude each other"):
        base("CartPole-v1", start="x")


def test_a_base_without_an_environment() -> None:
    with prized_gym.Base(engine="plain", setup="echo 7 > seven", env_vars={"A": "b"}, progress=False) as base:
        assert base.exec("echo $A; cat seven").stdout == "b\n7\n"
        assert "a sandbox" in repr(base)
        with pytest.raises(prized_gym.PrizedGymError, match="no environment"):
            prized_gym.ForkedVectorEnv(base, num_envs=2)
    with pytest.raises(TypeError, match="needs an env"):
        prized_gym.Base(engine="local")
    with (
        prized_gym.Base("CartPole-v1", engine="local") as local,
        pytest.raises(prized_gym.EngineUnavailableError, match="is no sandbox"),
    ):
        local.exec("true")


def test_an_interrupt_leaves_an_env_that_reset_brings_back(bad_base: prized_gym.Base) -> None:
    envs = prized_gym.ForkedVectorEnv(bad_base, num_envs=2)
    try:
        envs.reset(seed=0)
        threading.Timer(0.4, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            envs.step([0, bad.HANG])
        with pytest.raises(prized_gym.InterruptedStepError):
            envs.step([0, 0])
        envs.reset(seed=0)
        assert (envs.step([0, 0])[1] == 1).all()
    finally:
        envs.close()
