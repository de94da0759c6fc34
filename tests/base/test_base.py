"""Setting bases up: from anything that builds an environment, with every way it can go wrong."""

from __future__ import annotations

import gc
import os
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
from gymnasium.envs.registration import EnvSpec

import prized_gym
from prized_gym import Base, ForkedVectorEnv, SetupError, SetupTimeoutError
from prized_gym.sharing import SHARED
from tools.processes import own_descendants
from zoo.envs import Loaded, make_loaded
from zoo.faulty import Faulty, not_an_env

pytestmark = pytest.mark.timeout(180)


class FromThisModule(Loaded):
    pass


def one_step(envs: ForkedVectorEnv) -> None:
    envs.reset(seed=0)
    envs.action_space.seed(0)
    envs.step(envs.action_space.sample())


@pytest.mark.parametrize(
    "source",
    [
        "CartPole-v1",
        gym.spec("CartPole-v1"),
        "zoo.envs:make_loaded",
        "zoo.envs:Loaded",
        make_loaded,
        FromThisModule,
        lambda: FromThisModule(size=5),
    ],
    ids=["id", "spec", "module:function", "module:class", "function", "class", "lambda"],
)
def test_sources(source: Any, engine: str) -> None:
    with Base(source, engine=engine) as base:
        envs = ForkedVectorEnv(base, num_envs=2)
        one_step(envs)
        envs.close()
        assert not base.closed and base.alive
    assert base.closed


def test_an_env_registered_in_the_trainer_only() -> None:
    gym.register("OnlyHere-v0", entry_point=FromThisModule, max_episode_steps=3)
    try:
        envs = ForkedVectorEnv("OnlyHere-v0", num_envs=2)
        envs.reset(seed=0)
        for _ in range(3):
            *_, truncations, _ = envs.step([0, 0])
        assert truncations.all()
        assert repr(envs) == "ForkedVectorEnv(OnlyHere-v0, num_envs=2)"
        envs.close()
    finally:
        del gym.registry["OnlyHere-v0"]


def test_module_and_env_id() -> None:
    envs = gym.make_vec("prized_gym:prized_gym/Forked-v0", num_envs=2, env="zoo.envs:make_loaded")
    one_step(envs)  # type: ignore[arg-type]
    envs.close()


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import gymnasium as gym, numpy as np, prized_gym\n"
        "class Mine(gym.Env):\n"
        "    observation_space = gym.spaces.Box(0, 1, (2,))\n"
        "    action_space = gym.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        return np.zeros(2, np.float32), {'who': Mine.__name__, 'me': self.__class__}\n"
        "    def step(self, action):\n"
        "        return np.ones(2, np.float32), 1.0, False, False, {}\n"
        "print('main runs')\n"
        "factor = 3\n"
        "envs = prized_gym.ForkedVectorEnv(lambda: Mine(), num_envs=factor)\n"
        "_, infos = envs.reset(seed=0)\n"
        "assert infos['me'][0] is Mine, infos\n"
        "print(envs.step([0, 1, 0])[1])\n"
        "envs.close()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "main runs\n[1. 1. 1.]\n" and not done.stderr


def test_what_the_base_prints_reaches_the_user(capfd: pytest.CaptureFixture[str]) -> None:
    def make() -> gym.Env[Any, Any]:
        print("loading")
        print("careful", file=sys.stderr)
        return Faulty()

    envs = ForkedVectorEnv(make, num_envs=1)
    captured = capfd.readouterr()
    assert captured.out == "loading\n" and captured.err == "careful\n"
    envs.reset()
    envs.step([Faulty.PRINT])
    deadline = time.monotonic() + 20
    said = ""
    while "hello from the copy\n" not in said:
        assert time.monotonic() < deadline
        said += capfd.readouterr().out
    envs.close()


def test_a_factory_that_raises(engine: str) -> None:
    def make() -> gym.Env[Any, Any]:
        raise FileNotFoundError("no such data set")

    with pytest.raises(FileNotFoundError, match="no such data set") as caught:
        ForkedVectorEnv(make, num_envs=2, engine=engine)
    if engine == "local":
        assert "in make" in str(caught.value.__cause__)


def test_a_warm_up_that_raises(engine: str) -> None:
    def warm_up(env: Any) -> None:
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        Base(Loaded, warm_up=warm_up, engine=engine)


def test_a_factory_that_ends_the_process() -> None:
    def leave() -> gym.Env[Any, Any]:
        import os

        print("giving up", file=sys.stderr, flush=True)
        os._exit(9)

    with pytest.raises(SetupError, match=r"exited with code 9(.|\n)*giving up"):
        Base(leave)

    def exit_politely() -> gym.Env[Any, Any]:
        sys.exit("no licence")

    with pytest.raises(SetupError, match="no licence"):
        Base(exit_politely)


def test_a_factory_that_hangs() -> None:
    def make() -> gym.Env[Any, Any]:
        print("waiting for godot", file=sys.stderr, flush=True)
        time.sleep(1000)
        raise AssertionError

    with pytest.raises(SetupTimeoutError, match=r"setup_timeout=5 s(.|\n)*waiting for godot"):
        Base(make, setup_timeout=5.0)


def test_not_an_environment(engine: str) -> None:
    with pytest.raises(SetupError, match=r"builtins\.object, not a gymnasium\.Env"):
        Base(not_an_env, engine=engine)
    with pytest.raises(TypeError, match="callable that builds it"):
        Base(Loaded(), engine=engine)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got 3"):
        Base(3, engine=engine)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="no callable 'missing'"):
        Base("zoo.envs:missing", engine=engine)


def test_unknown_ids_get_gymnasiums_suggestion(engine: str) -> None:
    with pytest.raises(gym.error.NameNotFound, match="CartPole"):
        Base("CartPol-v1", engine=engine)


def test_unpicklable_factories_are_named() -> None:
    lock = threading.Lock()
    with pytest.raises(SetupError, match=r"environment factory 0 .*lock.*inside the function"):
        Base(lambda: Loaded(str(lock)))
    with pytest.raises(SetupError, match=r"warm_up .*cannot be sent"):
        Base(Loaded, warm_up=lambda env: lock.acquire())


def test_unknown_options_are_named(engine: str) -> None:
    for call in (
        lambda: Base("CartPole-v1", engine=engine, flavour=1),
        lambda: ForkedVectorEnv("CartPole-v1", engine=engine, flavour=1),
        lambda: gym.make("prized_gym/Forked-v0", env="CartPole-v1", engine=engine, flavour=1),
    ):
        with pytest.raises(TypeError, match="flavour"):
            call()
    with pytest.raises(ValueError, match=r"'nowhere'.*inline, local"):
        Base("CartPole-v1", engine="nowhere")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_envs": 0}, ValueError, "num_envs must be at least 1, got 0"),
        ({"num_envs": -1}, ValueError, "got -1"),
        ({"num_envs": 1.5}, TypeError, "1.5"),
        ({"fork_on": "never"}, ValueError, "fork_on='never'"),
        ({"reset_in": "space"}, ValueError, "reset_in='space'"),
        ({"on_failure": "ignore"}, ValueError, "on_failure='ignore'"),
        ({"autoreset_mode": "Sometimes"}, ValueError, "Sometimes"),
        ({"step_timeout": 0}, ValueError, "step_timeout"),
        ({"per_process": 2}, ValueError, "per_process=2"),
        ({"max_concurrent": 0}, ValueError, "max_concurrent"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ForkedVectorEnv("CartPole-v1", **options)


def test_options_of_the_base_belong_to_the_base() -> None:
    with Base("CartPole-v1", engine="inline") as base:
        with pytest.raises(TypeError, match="max_episode_steps.*Base"):
            ForkedVectorEnv(base, max_episode_steps=3)
        with pytest.raises(TypeError, match="workdir.*Base"):
            ForkedVectorEnv(base, workdir="/tmp")
        with pytest.raises(ValueError, match="engine='local'"):
            ForkedVectorEnv(base, engine="local")
    with pytest.raises(prized_gym.BaseDiedError, match="closed"):
        ForkedVectorEnv(base).reset()


def test_the_engine_of_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIZED_GYM_ENGINE", "inline")
    envs = ForkedVectorEnv("CartPole-v1")
    assert envs.base.engine == "inline"
    envs.close()
    monkeypatch.setenv("PRIZED_GYM_ENGINE", "bogus")
    with pytest.raises(ValueError, match=r"'bogus' \(from PRIZED_GYM_ENGINE\)"):
        ForkedVectorEnv("CartPole-v1")


def test_no_fork_no_local_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.fork")
    with pytest.raises(prized_gym.EngineUnavailableError, match="engine='inline'"):
        ForkedVectorEnv("CartPole-v1", engine="local")
    envs = ForkedVectorEnv("CartPole-v1", engine="inline")
    one_step(envs)
    envs.close()


def test_a_system_without_fork_gets_a_clear_word() -> None:
    script = (
        "import os, sys, select\n"
        "for name in ('fcntl', 'resource', 'termios', 'pwd'): sys.modules[name] = None\n"
        "del os.fork, select.poll, select.epoll\n"
        "import prized_gym\n"
        "try: prized_gym.ForkedVectorEnv('CartPole-v1', engine='local')\n"
        "except prized_gym.EngineUnavailableError as error: print(error)\n"
        "envs = prized_gym.ForkedVectorEnv('CartPole-v1', engine='inline')\n"
        "envs.reset(seed=0); envs.step([0]); envs.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "has no os.fork" in done.stdout and "Use engine='inline'" in done.stdout


def test_equal_specs_share_a_base() -> None:
    a = ForkedVectorEnv("CartPole-v1", num_envs=2)
    b = ForkedVectorEnv("CartPole-v1", num_envs=3)
    c = ForkedVectorEnv("CartPole-v1", max_episode_steps=7)
    d = gym.make("prized_gym/Forked-v0", env="CartPole-v1")
    assert a.base is b.base is d.unwrapped.base is not c.base  # type: ignore[attr-defined]
    base = a.base
    a.close()
    d.close()
    assert base.alive
    one_step(b)
    b.close()
    assert base.closed
    assert c.base.alive
    c.close()
    e = ForkedVectorEnv(Loaded)
    f = ForkedVectorEnv(Loaded)
    assert e.base is not f.base
    e.close()
    f.close()
    assert e.base.closed


def test_several_vector_envs_fork_one_base_at_the_same_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Base(lambda: Loaded(str(log))) as base:
        made = [ForkedVectorEnv(base, num_envs=2) for _ in range(3)]
        errors: list[BaseException] = []

        def use(envs: ForkedVectorEnv) -> None:
            try:
                for seed in range(20):
                    envs.reset(seed=seed)
                    for _ in range(5):
                        envs.step([1, 0])
                assert envs.get_attr("value") == (5, 0)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=use, args=(envs,)) for envs in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert not errors, errors
        for envs in made:
            envs.close()
    assert log.read_text() == "built\n"


def test_a_sequence_builds_each_distinct_callable_once(tmp_path: Path, engine: str) -> None:
    log = tmp_path / "log"

    def a() -> gym.Env[Any, Any]:
        return Loaded(str(log), size=3)

    def b() -> gym.Env[Any, Any]:
        return Loaded(str(log), size=4)

    envs = ForkedVectorEnv([a, b, a, a], engine=engine)
    assert envs.num_envs == 4
    if engine == "local":
        assert log.read_text() == "built\n" * 2
    observations, _ = envs.reset(seed=0)
    assert observations[:, 1].tolist() == [2, 3, 2, 2]
    envs.close()
    with pytest.raises(ValueError, match="num_envs=3.*4"):
        ForkedVectorEnv([a, b, a, a], num_envs=3, engine=engine)
    with pytest.raises(ValueError, match="empty"):
        ForkedVectorEnv([], engine=engine)
    with pytest.raises(TypeError, match=r"env\[1\]"):
        ForkedVectorEnv([a, 3], engine=engine)  # type: ignore[list-item]


def test_spaces_that_differ_name_the_copy(engine: str) -> None:
    class Other(Loaded):
        action_space = spaces.Discrete(3)

    with pytest.raises(SetupError, match="copy 2 has another action_space.*Discrete"):
        ForkedVectorEnv([Loaded, Loaded, Other], engine=engine)


@pytest.mark.parametrize(
    ("action", "words"), [(Faulty.BAD_SHAPE, r"shape \(3,\).*shape \(2,\)"), (Faulty.BAD_DTYPE, "complex")]
)
def test_an_observation_that_does_not_fit_names_the_copy(action: int, words: str, engine: str) -> None:
    envs = ForkedVectorEnv(Faulty, num_envs=2, engine=engine)
    envs.reset(seed=0)
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        envs.step([0, action])
    if sys.version_info >= (3, 11):
        assert "copy 1" in caught.value.__notes__[0]
    envs.close()


def test_warm_up_and_on_fork(engine: str) -> None:
    def on_fork(env: Any, index: int, seed: int) -> None:
        env.unwrapped.identity = (index, seed)

    with Base(Loaded, warm_up=lambda env: env.unwrapped.load(), on_fork=on_fork, engine=engine) as base:
        envs = ForkedVectorEnv(base, num_envs=3)
        assert envs.get_attr("warm") == (True, True, True)
        envs.reset(seed=40)
        first = envs.get_attr("identity")
        assert [index for index, _ in first] == [0, 1, 2]
        envs.reset(seed=40)
        assert envs.get_attr("identity") == ((0, 40), (1, 41), (2, 42))
        envs.close()


def test_render_mode() -> None:
    envs = ForkedVectorEnv("CartPole-v1", num_envs=2, render_mode="rgb_array")
    assert envs.render_mode == "rgb_array"
    envs.reset(seed=0)
    frames = envs.render()
    assert isinstance(frames, tuple) and len(frames) == 2 and frames[0].shape == (400, 600, 3)
    envs.close()
    with pytest.raises(SetupError, match="render_mode='human'"):
        ForkedVectorEnv(Loaded, render_mode="human")


def test_a_base_that_is_dropped_ends() -> None:
    gc.collect()  # what earlier tests left is not to go away meanwhile
    before = len(own_descendants())
    base = Base(Loaded)
    assert len(own_descendants()) > before
    del base


def test_a_fork_of_the_trainer_does_not_keep_the_base_alive() -> None:
    script = (
        "import os, time, prized_gym\n"
        "base = prized_gym.Base('CartPole-v1')\n"
        "print(base._handle._running._process.pid, flush=True)\n"
        "if os.fork() == 0:\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "time.sleep(60)\n"
    )
    import signal

    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    supervisor, child = int(trainer.stdout.readline()), int(trainer.stdout.readline())
    try:
        trainer.kill()
        trainer.wait()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{supervisor}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert Path(f"/proc/{child}").exists()
    finally:
        import os

        os.kill(child, signal.SIGKILL)
        trainer.stdout.close()


def test_max_episode_steps_is_a_time_limit_in_the_base(engine: str) -> None:
    for source in (Loaded, "CartPole-v1"):
        envs = ForkedVectorEnv(source, num_envs=2, max_episode_steps=4, engine=engine)
        envs.reset(seed=0)
        for _ in range(4):
            *_, truncations, _ = envs.step(np.array([0, 1]))
        assert truncations.all()
        envs.close()


def test_env_kwargs(engine: str) -> None:
    envs = ForkedVectorEnv(Loaded, env_kwargs={"size": 7}, engine=engine)
    assert envs.reset()[0][0, 1] == 6
    envs.close()
    envs = ForkedVectorEnv("CartPole-v1", env_kwargs={"sutton_barto_reward": True}, engine=engine)
    envs.reset(seed=0)
    assert envs.step([0])[1][0] == 0.0
    envs.close()


class Meeting(Faulty):
    """Is built once the file of the other has been seen."""

    def __init__(self, folder: str, own: str, other: str) -> None:
        super().__init__()
        (Path(folder) / f"{own}.{os.getpid()}").touch()
        deadline = time.monotonic() + 20
        while not list(Path(folder).glob(f"{other}.*")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{other} did not come")
            time.sleep(0.01)


def test_shared_bases_are_set_up_side_by_side_and_each_once(tmp_path: Path) -> None:
    specs = [
        EnvSpec("Meeting-v0", entry_point=Meeting, kwargs={"folder": str(tmp_path), "own": own, "other": other})
        for own, other in (("a", "b"), ("b", "a"), ("a", "b"))
    ]
    made: list[ForkedVectorEnv] = []
    threads = [threading.Thread(target=lambda spec=spec: made.append(ForkedVectorEnv(spec, 1))) for spec in specs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 3 and len({id(envs.base) for envs in made}) == 2
    assert len(list(tmp_path.iterdir())) == 2
    bases = [envs.base for envs in made]
    for envs in made[:2]:
        envs.close()
    assert sum(base.closed for base in {id(base): base for base in bases}.values()) < 2
    made[2].close()
    assert all(base.closed for base in bases)


def test_a_shared_base_that_cannot_be_set_up_is_not_kept() -> None:
    spec = EnvSpec("Never-v0", entry_point=not_an_env)
    for _ in range(2):
        with pytest.raises((SetupError, TypeError)):
            ForkedVectorEnv(spec, 1)
    assert not [entry for entry in SHARED._shared if entry.spec is spec]
