"""Bases and copies as sandboxes of gVisor: the same semantics as everywhere, and whole forks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import prized_gym
from prized_gym.engines.gvisor import GvisorEngine
from prized_gym.runsc import delete_kept, diagnose
from tools.comparing import assert_same, compare
from tools.libraries import need_here
from tools.sandboxes import SMALL, ZOO
from zoo.envs import Loaded, SpaceEnv
from zoo.faulty import Faulty
from zoo.generators import Draws, HiddenGenerators

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", params=["http", "exec"])
def spaces_base(gvisor: str, request: pytest.FixtureRequest) -> Iterator[prized_gym.Base]:
    env = partial(SpaceEnv, "nested")
    with prized_gym.Base(env, engine=gvisor, channel=request.param, **SMALL) as base:
        yield base


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
def test_the_same_as_sync_vector_env(spaces_base: prized_gym.Base, mode: AutoresetMode) -> None:
    forked = prized_gym.ForkedVectorEnv(spaces_base, num_envs=2, autoreset_mode=mode, fork_on="start")
    reference = SyncVectorEnv([partial(SpaceEnv, "nested")] * 2, autoreset_mode=mode)
    try:
        compare(forked, reference, 25, mode is AutoresetMode.DISABLED, masked=True)
    finally:
        forked.close()
        reference.close()


def test_branch_and_attributes(spaces_base: prized_gym.Base) -> None:
    envs = prized_gym.ForkedVectorEnv(spaces_base, num_envs=3)
    try:
        envs.set_attr("steps", 5)
        envs.reset(seed=0)
        assert envs.get_attr("steps") == (0, 0, 0)
        envs.action_space.seed(0)
        actions = envs.action_space.sample()
        envs.step(actions)
        observations = envs.branch(0, [1, 2])
        assert_same(observations["image"][0], observations["image"][2])
        assert envs.get_attr("steps") == (1, 1, 1)
        *_, infos = envs.step(actions)
        draws = envs.call("render")
        assert all((draw == draws[0]).all() for draw in draws)
    finally:
        envs.close()


def test_large_actions_and_observations_travel_by_commands_too(gvisor: str) -> None:
    class Wide(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (300_000,), np.float64)
        action_space = gym.spaces.Box(-np.inf, np.inf, (50_000,), np.float64)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.arange(300_000.0), {}

        def step(self, action: Any) -> Any:
            return np.full(300_000, action.sum()), 1.0, False, False, {}

    envs = prized_gym.ForkedVectorEnv(Wide, num_envs=1, engine=gvisor, channel="exec", **SMALL)
    try:
        assert_same(envs.reset()[0][0], np.arange(300_000.0))
        assert (envs.step(np.ones((1, 50_000)))[0] == 50_000).all()
    finally:
        envs.close()


def test_fork_on_episode_and_reset_in_base(gvisor: str) -> None:
    with prized_gym.Base(Loaded, engine=gvisor, warm_up=lambda env: env.load(), **SMALL) as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=2, reset_in="base", max_concurrent=1)
        secret = envs.get_attr("secret")
        assert secret[0] == secret[1] and envs.get_attr("warm") == (True, True)
        envs.reset(seed=1)
        envs.step([1, 0])
        assert envs.get_attr("value") == (1, 0)
        envs.reset(seed=1)
        assert envs.get_attr("value") == (0, 0) and envs.get_attr("secret") == secret
        envs.close()


def test_seeds_give_the_same_rewards_on_local_and_gvisor(gvisor: str) -> None:
    seen = []
    for engine, options in (("local", {"progress": False}), (gvisor, {**SMALL, "memory_gb": 3})):
        envs = prized_gym.ForkedVectorEnv(Draws, num_envs=3, engine=engine, **options)
        observations, _ = envs.reset(seed=3)
        rewards = [envs.step([0, 0, 0])[1] for _ in range(5)]
        seen.append((observations, np.array(rewards)))
        envs.close()
    assert_same(seen[0], seen[1])
    assert len(np.unique(seen[0][1])) == 15


NEIGHBOUR = """
import gymnasium as gym
from gymnasium import spaces
import beside_the_neighbour

class Neighbour(gym.Env):
    observation_space = spaces.Discrete(100)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return beside_the_neighbour.ANSWER, {}

    def step(self, action):
        return beside_the_neighbour.ANSWER, 1.0, False, False, {}
"""


def test_generators_that_no_attribute_holds_are_reseeded(gvisor: str) -> None:
    envs = prized_gym.ForkedVectorEnv(HiddenGenerators, num_envs=3, engine=gvisor, **SMALL)
    seen = [envs.reset()[0], envs.step([0, 0, 0])[0], envs.reset()[0], envs.reset(seed=1)[0]]
    # Without those that are made in the first reset.
    assert np.array_equal(envs.reset(seed=1)[0], seen[-1])
    draws = np.delete(np.asarray(seen), slice(13, 15), axis=-1)
    assert all(len(np.unique(draws[..., column])) == draws[..., column].size for column in range(draws.shape[-1]))
    envs.branch(0, [1, 2], reseed=True)
    after = envs.step([0, 0, 0])[0]
    assert len(np.unique(after)) == after.size
    envs.close()


def test_a_module_and_its_neighbours_are_found(gvisor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIZED_GYM_ENGINE", gvisor)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    (tmp_path / "beside_the_neighbour.py").write_text("ANSWER = 42\n")
    (tmp_path / "nothing_to_do_with_it.py").touch()

    def make() -> Any:
        import neighbour

        return neighbour.Neighbour()

    for env in ("neighbour:Neighbour", make):
        envs = prized_gym.ForkedVectorEnv(env, num_envs=1, **SMALL)
        assert envs.base.engine == "gvisor"
        assert envs.reset(seed=0)[0][0] == 42
        if isinstance(env, str):
            listing = envs.base.exec(f"ls {tmp_path}; ls -a /root /home").stdout
            assert "neighbour.py" in listing and "nothing_to_do_with_it.py" not in listing
        envs.close()


@pytest.fixture(scope="module")
def stateful(gvisor: str) -> Iterator[prized_gym.Base]:
    with prized_gym.Base(
        engine=gvisor,
        upload={str(ZOO / "stateful_server.py"): "app/stateful_server.py"},
        setup=["cd app && ls"],
        start="cd app && exec python stateful_server.py",
        ready="http://127.0.0.1:8000/",
        **{**SMALL, "memory_gb": 3},
    ) as base:
        yield base


def test_a_server_goes_on_in_eight_copies(stateful: prized_gym.Base) -> None:
    started = time.monotonic()
    copies = stateful.fork(8)
    try:
        answers = [copy.http(f"/copy{number}").check().json() for number, copy in enumerate(copies)]
        print(f"8 copies of a base with torch and 50 MB have answered after {time.monotonic() - started:.2f} s")
        for number, answer in enumerate(answers):
            words = ["warm", f"copy{number}"]
            assert answer["notes"] == ["base", *words] and answer["integrity"] == "ok"
            assert answer["log"] == ["base", *words]
            assert answer["child"] == f"2 copy{number}"
            assert answer["ticking"] and answer["ballast"] == 50 << 20
        assert len({answer["output"] for answer in answers}) == len({answer["draw"] for answer in answers}) == 1
        (grandchild,) = copies[3].fork()
        assert grandchild.http("/again").json()["notes"] == ["base", "warm", "copy3", "again"]
        assert copies[3].http("/own").json()["notes"] == ["base", "warm", "copy3", "own"]
        grandchild.close()
        copies[0].pause()
        with pytest.raises(prized_gym.SandboxError, match="paused"):
            copies[0].exec("true")
        copies[0].resume()
        assert copies[0].http("/more").json()["child"] == "3 more"
    finally:
        for copy in copies:
            copy.close()
    # The base itself has seen nothing of it, and can be used between forks.
    assert stateful.http("/base").json()["notes"] == ["base", "warm", "base"]
    assert "copy" not in stateful.exec("cat app/server.txt").check().stdout


def test_files_and_directories(stateful: prized_gym.Base, tmp_path: Path) -> None:
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/x").write_text("x")
    stateful.files.upload(tmp_path / "deep", "up")
    with stateful.fork()[0] as copy:
        assert copy.files.read("up/er/x") == b"x"
        assert [info.name for info in copy.files.list("up")] == ["er"]
        copy.files.remove("up")
        copy.files.download("app", tmp_path / "down")
        assert (tmp_path / "down/server.txt").exists()
    assert stateful.files.read("up/er/x") == b"x"


def test_nothing_of_the_host_is_in_reach(stateful: prized_gym.Base, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "s"))
        unix.listen()
        os.environ["A_SECRET_OF_THE_TRAINER"] = "x"
        probe = f"""
import os, socket, signal
for path in ("/etc/shadow", "/root/.ssh", "/root/.bashrc", "/home/user/.bashrc", {str(tmp_path)!r}):
    assert not os.path.exists(path), path
assert "A_SECRET_OF_THE_TRAINER" not in os.environ
for address in ({str(tmp_path / "s")!r}, ("127.0.0.1", {tcp.getsockname()[1]}), ("10.0.2.2", 22), ("1.1.1.1", 53)):
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    sock.settimeout(1)
    try:
        sock.connect(address)
    except OSError:
        continue
    raise AssertionError(address)
try:
    os.kill({os.getpid()}, 0)
except ProcessLookupError:
    pass
else:
    raise AssertionError("a host process can be signalled")
try:
    open("/usr/x", "w")
except OSError:
    print("confined")
"""
        try:
            with stateful.fork()[0] as copy:
                assert copy.exec(["python", "-c", probe]).check().stdout.strip() == "confined"
        finally:
            del os.environ["A_SECRET_OF_THE_TRAINER"]


@pytest.mark.usefixtures("nothing_kept")
def test_a_kept_base_is_forked_by_another_process(gvisor: str) -> None:
    base = prized_gym.Base(Loaded, engine=gvisor, **SMALL)
    base.exec("echo kept > note")
    secret = prized_gym.ForkedVectorEnv(base, num_envs=1).get_attr("secret")[0]
    kept = base.keep()
    assert base.closed
    try:
        program = f"""
import prized_gym
envs = prized_gym.ForkedVectorEnv({kept!r}, num_envs=2, engine="gvisor", progress=False)
envs.reset(seed=0)
print(*envs.get_attr("secret"), envs.base.exec("cat note").stdout)
envs.close()
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == [secret, secret, "kept"], done.stderr
        with prized_gym.Base.connect(kept, engine=gvisor, progress=False) as again:
            assert again.id == kept and again.exec("cat note").stdout == "kept\n"
    finally:
        delete_kept(kept)
    with pytest.raises(prized_gym.SandboxError, match="kept"):
        prized_gym.Base.connect(kept, engine=gvisor)


@pytest.mark.usefixtures("nothing_kept")
def test_kept_bases_are_listed_removed_and_expire(gvisor: str) -> None:
    with (
        pytest.raises(ValueError, match="lifetime_hours must be positive"),
        prized_gym.Base(engine=gvisor, **SMALL) as base,
    ):
        base.keep(lifetime_hours=0)
    kept = []
    for lifetime in (1.0, None, 0.2 / 3600):
        base = prized_gym.Base(engine=gvisor, labels={"purpose": "test"}, **SMALL)
        kept.append(base.keep(lifetime))
        with pytest.raises(prized_gym.BaseDiedError, match="closed"):
            base.exec("true")
        base.close()
    time.sleep(0.2)
    found = {each.id: each for each in prized_gym.Base.kept()}
    assert set(found) == set(kept) == {each.id for each in prized_gym.Base.kept(engine=gvisor)}
    listed = found[kept[0]]
    assert listed.engine == "gvisor" and listed.labels["purpose"] == "test" and (listed.size or 0) > 1 << 20
    assert 0 <= listed.age < 120 and listed.expires is not None and 0 < listed.expires - listed.created <= 3600
    assert found[kept[1]].expires is None
    with pytest.raises(prized_gym.SandboxError, match="has expired"):
        prized_gym.Base.connect(kept[2], engine=gvisor)
    assert kept[2] in GvisorEngine.sweep()
    assert prized_gym.Base.remove(kept[0]) and not prized_gym.Base.remove(kept[0])
    assert prized_gym.Base.remove(kept[1], engine=gvisor) and not prized_gym.Base.remove("CartPole-v1")
    assert prized_gym.Base.kept(engine="local") == [] and not prized_gym.Base.remove(kept[1], engine="local")


def test_outbound_for_setup_and_none_for_copies(gvisor: str) -> None:
    if not next(check for check in diagnose() if check.name == "outbound network").ok:
        pytest.skip("network='outbound' cannot be used here")
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("10.255.255.255", 1))
            address = probe.getsockname()[0]
        connect = f"python -c 'import socket; socket.create_connection((\"{address}\", {port}), 5)'"
        with prized_gym.Base(engine=gvisor, network="outbound", setup=[connect], **SMALL) as base:
            assert base.exec(connect).exit_code == 0
            with base.fork()[0] as copy:
                assert copy.exec(connect).exit_code != 0


@pytest.mark.alone
def test_timings(gvisor: str) -> None:
    """Printed, and bounded loosely: the machine that runs the tests does other things too."""
    for channel, limit in (("http", 30.0), ("exec", 150.0)):
        envs = prized_gym.ForkedVectorEnv("CartPole-v1", num_envs=1, engine=gvisor, channel=channel, **SMALL)
        try:
            envs.reset(seed=0)
            times = []
            for _ in range(60):
                started = time.perf_counter()
                envs.step([0])
                times.append((time.perf_counter() - started) * 1e3)
            print(f"{channel}: a step of one copy takes {np.median(times):.2f} ms (at least {min(times):.2f})")
            assert np.median(times) < limit
        finally:
            envs.close()


def test_history_says_what_was_used(gvisor: str) -> None:
    envs = prized_gym.ForkedVectorEnv("CartPole-v1", num_envs=2, engine=gvisor, **SMALL)
    try:
        envs.reset(seed=0)
        while len(envs.history()) < 3:
            envs.step([0, 1])
        for episode in envs.history():
            assert 0 < episode.vcpu_seconds < 30
            assert 1e-3 < episode.gb_seconds / episode.seconds < 1
    finally:
        envs.close()


def test_stable_baselines3_learns_the_same_as_on_local(gvisor: str) -> None:
    need_here("stable_baselines3", "'prized-gym[sb3]'")
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecMonitor

    from prized_gym.integrations.sb3 import ForkedVecEnv

    learnt = []
    for engine in (gvisor, "local"):
        options = SMALL if engine == gvisor else {}
        venv = VecMonitor(ForkedVecEnv("CartPole-v1", num_envs=2, engine=engine, **options))
        try:
            model = PPO("MlpPolicy", venv, n_steps=32, batch_size=32, n_epochs=2, seed=3, device="cpu").learn(128)
            assert len(model.ep_info_buffer or ()) > 1
            learnt.append([parameter.detach().numpy().copy() for parameter in model.policy.parameters()])
        finally:
            venv.close()
    assert len(learnt[0]) > 4
    for one, other in zip(*learnt, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_fails_inside_is_told(gvisor: str) -> None:
    envs = prized_gym.ForkedVectorEnv(Faulty, num_envs=2, engine=gvisor, step_timeout=4, **SMALL)
    try:
        envs.reset(seed=0)
        with pytest.raises(ZeroDivisionError):
            envs.step([Faulty.STEP, Faulty.RAISE])
        envs.reset(seed=0)
        with pytest.raises(
            prized_gym.CopyDiedError, match=r"sandbox sbx_\w+\) lost its server, which was killed by SIGKILL"
        ):
            envs.step([Faulty.KILL, Faulty.STEP])
        envs.reset(seed=0)
        with pytest.raises(prized_gym.CopyTimeoutError, match="hang_here"):
            envs.step([Faulty.HANG, Faulty.STEP])
        envs.reset(seed=0)
    finally:
        envs.close()
    with pytest.raises(RuntimeError, match="no env today") as caught:
        prized_gym.Base(_broken, engine=gvisor, **SMALL)
    assert "in _broken" in str(caught.value.__cause__)


def _broken() -> Any:
    raise RuntimeError("no env today")
