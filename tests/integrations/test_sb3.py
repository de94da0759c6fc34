"""``ForkedVecEnv`` where Stable-Baselines3 expects a ``VecEnv``."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from tools.libraries import need, need_here
from zoo.walk import Loud, Slow, Walk, bare_walk, cart, loud_walk, louder_walk

torch = need("torch", "torch")
need("stable_baselines3", "prized-gym[sb3]")

from stable_baselines3 import A2C, DQN, PPO, SAC, HerReplayBuffer  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.envs import BitFlippingEnv  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.monitor import Monitor, load_results  # noqa: E402
from stable_baselines3.common.vec_env import (  # noqa: E402
    DummyVecEnv,
    VecCheckNan,
    VecEnv,
    VecEnvWrapper,
    VecExtractDictObs,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
    VecVideoRecorder,
)

import prized_gym  # noqa: E402
from prized_gym.integrations.sb3 import ForkedVecEnv  # noqa: E402

Make = Callable[..., ForkedVecEnv]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    # Small networks learn faster on one thread, and repeat exactly.
    torch.set_num_threads(1)


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes ForkedVecEnvs that are closed after the test."""
    made: list[ForkedVecEnv] = []

    def build(*args: Any, **kwargs: Any) -> ForkedVecEnv:
        made.append(ForkedVecEnv(*args, **kwargs))
        return made[-1]

    yield build
    for envs in made:
        envs.close()


@pytest.fixture(scope="module")
def walks() -> Iterator[prized_gym.Base]:
    """One base for the tests that ask a walk many small things."""
    with prized_gym.Base(bare_walk) as base:
        yield base


def walk(kind: str = "box", action: str = "discrete", **kwargs: Any) -> Callable[..., gym.Env[Any, Any]]:
    return functools.partial(Walk, kind, action, **kwargs)


def sample(envs: VecEnv, generator: np.random.Generator) -> np.ndarray:
    return generator.integers(0, 2, envs.num_envs)


# What it is made of


def test_takes_what_a_forked_vector_env_takes(make: Make) -> None:
    assert make("CartPole-v1", num_envs=2).reset().shape == (2, 4)
    assert make(gym.spec("CartPole-v1"), 3).reset().shape == (3, 4)
    assert make(bare_walk).num_envs == 1
    assert make("zoo.walk:bare_walk", 2).reset().shape == (2, 2)
    assert make([bare_walk, loud_walk, bare_walk]).num_envs == 3
    with prized_gym.Base(bare_walk) as base:
        with pytest.raises(TypeError, match="warm_up"):
            ForkedVecEnv(base, 2, warm_up=print)
        envs = ForkedVecEnv(base, 2, fork_on="episode", max_concurrent=1)
        assert envs.base is base
        assert envs.reset().shape == (2, 2)
        envs.close()
        envs.close()
        assert not base.closed


def test_takes_the_place_of_the_class_in_make_vec_env() -> None:
    envs = make_vec_env(
        "CartPole-v1", n_envs=3, seed=7, vec_env_cls=ForkedVecEnv, vec_env_kwargs={"on_failure": "truncate"}
    )
    same = make_vec_env("CartPole-v1", n_envs=3, seed=7)
    assert isinstance(envs, ForkedVecEnv)
    assert envs.env_is_wrapped(Monitor) == [True] * 3
    np.testing.assert_array_equal(envs.reset(), same.reset())
    envs.close()


def test_an_id_that_only_this_process_knows() -> None:
    gym.register("OnlyHere-v0", entry_point=lambda **kwargs: Walk(limit=3, **kwargs), max_episode_steps=2)
    try:
        envs = make_vec_env("OnlyHere-v0", n_envs=2, vec_env_cls=ForkedVecEnv)
        envs.reset()
        envs.step([0, 1])
        assert envs.step([0, 1])[2].all()
        envs.close()
    finally:
        del gym.registry["OnlyHere-v0"]


@pytest.mark.parametrize("option", ["autoreset_mode", "copy", "nonsense"])
def test_refuses_options_that_make_no_sense(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        ForkedVecEnv("CartPole-v1", **{option: True})


def test_without_the_library_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['stable_baselines3'] = None; import prized_gym.integrations.sb3"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "MissingExtraError" in failed.stderr
    assert "pip install prized-gym[sb3]" in failed.stderr


# Reset and step


@pytest.mark.parametrize("kind", ["box", "discrete", "image", "dict", "tuple"])
def test_gives_what_dummy_vec_env_gives(make: Make, engine: str, kind: str) -> None:
    ours, theirs = make(walk(kind), 3, engine=engine), DummyVecEnv([walk(kind)] * 3)
    for envs in (ours, theirs):
        assert envs.seed(5) == [5, 6, 7]
    equal(ours.reset(), theirs.reset())
    generator = np.random.default_rng(0)
    ended = 0
    for _ in range(60):
        actions = sample(ours, generator)
        mine, reference = ours.step(actions), theirs.step(actions)
        equal(mine[:3], reference[:3])
        assert mine[1].dtype == reference[1].dtype == np.float32
        assert mine[2].dtype == np.bool_
        assert isinstance(mine[3], list)
        equal(mine[3], reference[3])
        equal(ours.reset_infos, theirs.reset_infos)
        ended += int(mine[2].sum())
    assert ended > 10


@pytest.mark.parametrize("action", ["discrete", "box", "multibinary", "multidiscrete", "dict", "tuple"])
def test_every_action_space(make: Make, action: str) -> None:
    ours, theirs = make(walk(action=action), 2), DummyVecEnv([walk(action=action)] * 2)
    for envs in (ours, theirs):
        envs.seed(1)
        envs.action_space.seed(3)
        envs.reset()
    for _ in range(20):
        actions = [ours.action_space.sample() for _ in range(2)]
        equal(ours.step(actions)[:3], theirs.step(actions)[:3])
    if action == "box":
        ours.reset()
        ours.step(np.array([0.5, -0.5]))
        assert [list(one) for one in ours.get_attr("action")] == [[0.5], [-0.5]]
        return
    equal(ours.get_attr("action"), theirs.get_attr("action"))


def test_refuses_actions_of_the_wrong_form(make: Make) -> None:
    envs = make(bare_walk, 2)
    envs.reset()
    with pytest.raises(ValueError, match="2 actions"):
        envs.step(np.zeros(3, dtype=np.int64))
    with pytest.raises(ValueError, match="copy 1"):
        envs.step(np.array([0, 7]))
    with pytest.raises(TypeError, match="integers"):
        envs.step(np.array([0.5, 0.5]))
    envs.step(np.array([0.0, 1.0]))


def test_terminal_observation_is_ones_own(make: Make) -> None:
    envs = make(walk(limit=3, edge=10, thrifty=True), 2)
    envs.reset()
    for _ in range(3):
        observations, _, dones, infos = envs.step(np.array([0, 1]))
    assert dones.all()
    for index, info in enumerate(infos):
        terminal = info["terminal_observation"]
        assert terminal[1] == np.float32(0.03)
        assert info["TimeLimit.truncated"] is True
        assert info["trail"][1] == 3
        assert envs.reset_infos[index] == {"start": observations[index][0]}
        terminal[:] = 100
    assert (observations < 100).all()
    observations, *_, infos = envs.step(np.array([0, 1]))
    assert (observations < 100).all()
    assert "terminal_observation" not in infos[0]
    assert infos[0]["TimeLimit.truncated"] is False


def test_an_end_that_is_also_cut_short_is_no_truncation(make: Make) -> None:
    envs = make(walk(limit=1), 1)
    envs.reset()
    envs.set_attr("place", 9)
    _, _, dones, infos = envs.step(np.array([1]))
    assert dones[0]
    assert infos[0]["TimeLimit.truncated"] is False


def test_seeds_and_options_serve_one_reset(make: Make) -> None:
    envs = make(bare_walk, 3)
    envs.seed(3)
    first = envs.reset()
    envs.seed(3)
    np.testing.assert_array_equal(envs.reset(), first)
    assert len({tuple(envs.reset().ravel()) for _ in range(6)}) > 1
    assert None not in envs.seed()

    envs.set_options({"wind": 1})
    assert envs.get_attr("options") == [None] * 3
    envs.reset()
    assert envs.get_attr("options") == [{"wind": 1}] * 3
    envs.reset()
    assert envs.get_attr("options") == [None] * 3
    each = [{"wind": np.array([1, 2])}, {}, {"wind": 2}]
    envs.seed(3)
    envs.set_options(each)
    np.testing.assert_array_equal(envs.reset(), first)
    equal(envs.get_attr("options"), [each[0], None, each[2]])
    assert [info["start"] for info in envs.reset_infos] == list(first[:, 0])
    envs.set_options(each[:2])
    with pytest.raises(ValueError, match="2 dictionaries for 3 copies"):
        envs.reset()


def test_reset_drops_a_pending_step(make: Make) -> None:
    envs = make(walk(limit=5), 2)
    envs.reset()
    envs.step_async(np.array([0, 1]))
    envs.seed(1)
    first = envs.reset()
    np.testing.assert_array_equal(first[:, 1], 0)
    assert envs.step(np.array([0, 1]))[0][0, 1] == np.float32(0.01)


def test_stepping_before_the_first_reset_is_the_environments_affair(make: Make) -> None:
    with pytest.raises(gym.error.ResetNeeded):
        make("CartPole-v1", 2).step(np.array([0, 1]))
    envs = make(walk("image"), 2)
    envs.set_attr("place", 0)
    envs.env_method("set_wrapper_attr", "steps", 4)
    assert envs.step(np.array([0, 1]))[0].shape == (2, 36, 36, 1)
    assert envs.get_attr("steps") == [5, 5]


# Attributes and methods


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        (None, [0, 1, 2]),
        (1, [1]),
        (-1, [2]),
        (np.int64(2), [2]),
        (np.array(0), [0]),
        ([2, 0], [2, 0]),
        ((0, -1), [0, 2]),
        (range(2), [0, 1]),
        (np.array([1, -2]), [1, 1]),
        ((i for i in (1, 2)), [1, 2]),
        ([], []),
    ],
)
def test_indices_in_every_form(make: Make, walks: prized_gym.Base, indices: Any, expected: list[int]) -> None:
    envs = make(walks, 3)
    for index in range(3):
        envs.set_attr("weight", index, indices=index)
    once = list(indices) if not hasattr(indices, "__len__") and hasattr(indices, "__next__") else indices
    assert envs.get_attr("weight", indices=once) == expected
    assert envs.env_method("scale", 2, indices=once, plus=1) == [2 * index + 1 for index in expected]
    assert envs.env_is_wrapped(Loud, indices=once) == [False] * len(expected)
    envs.set_attr("weight", 9, indices=once)
    assert envs.get_attr("weight") == [9 if index in expected else index for index in range(3)]


@pytest.mark.parametrize("indices", [3, -4, [0, 3]])
def test_an_index_out_of_range_is_refused(make: Make, walks: prized_gym.Base, indices: Any) -> None:
    envs = make(walks, 3)
    for ask in (envs.get_attr, functools.partial(envs.set_attr, value=1), envs.env_method):
        with pytest.raises(IndexError, match="num_envs=3"):
            ask("weight", indices=indices)
    with pytest.raises(IndexError, match="num_envs=3"):
        envs.env_is_wrapped(Loud, indices=indices)


def test_attributes(make: Make, engine: str) -> None:
    envs = make(loud_walk, 2, engine=engine)
    assert envs.get_attr("volume") == [3, 3]
    assert envs.has_attr("weight")
    assert envs.has_attr("lock"), "a lock cannot be carried over, but it is there"
    assert not envs.has_attr("nonsense")
    with pytest.raises(AttributeError):
        envs.get_attr("nonsense")
    envs.set_attr("weight", 5.0)
    envs.set_attr("extra", [1, 2])
    for _ in range(2):
        envs.reset()
        assert envs.get_attr("weight") == [5.0, 5.0]
        assert envs.get_attr("extra") == [[1, 2]] * 2
        assert envs.env_method("scale", 2.0) == [10.0, 10.0]
    # A callable value is returned, not called.
    envs.set_attr("weight", functools.partial(max, 1, 2))
    assert [weight() for weight in envs.get_attr("weight")] == [2, 2]


def test_env_is_wrapped(make: Make, engine: str) -> None:
    class Local(gym.Wrapper[Any, Any, Any, Any]):
        pass

    envs = make([bare_walk, loud_walk, louder_walk, lambda: Local(Walk())], engine=engine)
    assert envs.env_is_wrapped(Loud) == [False, True, True, False]
    assert envs.env_is_wrapped(gym.Wrapper) == [False, True, True, True]
    assert envs.env_is_wrapped(Local) == [False, False, False, True]
    assert envs.env_is_wrapped(Monitor, indices=-1) == [False]
    assert envs.env_is_wrapped(Walk) == [False] * 4, "the environment itself is no wrapper"


def test_images(make: Make) -> None:
    envs = make(walk(), 3, render_mode="rgb_array")
    assert envs.render_mode == "rgb_array"
    envs.reset()
    images = envs.get_images()
    assert [image.shape for image in images] == [(16, 32, 3)] * 3
    assert envs.render().shape == (32, 64, 3)
    assert envs.render("rgb_array").shape == (32, 64, 3)
    with pytest.warns(UserWarning, match="render modes"):
        envs.render("ansi")
    blind = make(bare_walk, 2)
    assert blind.render_mode is None
    with pytest.warns(UserWarning, match="render mode is None"):
        assert blind.get_images() == [None, None]


# Wrappers


def test_vec_monitor_and_frame_stack_and_check_nan(make: Make, tmp_path: Path) -> None:
    envs = VecFrameStack(VecCheckNan(VecMonitor(make(walk(limit=4, edge=10), 2), str(tmp_path / "log"))), n_stack=3)
    assert envs.reset().shape == (2, 6)
    for _ in range(4):
        observations, rewards, _, infos = envs.step(np.array([0, 1]))
    assert [info["episode"]["l"] for info in infos] == [4, 4]
    assert infos[0]["terminal_observation"].shape == (6,)
    np.testing.assert_array_equal(observations[:, :4], 0)
    envs.close()
    assert len(load_results(str(tmp_path))) == 2


def test_vec_normalize_is_the_same_as_over_dummy_vec_env(make: Make, tmp_path: Path) -> None:
    both = [VecNormalize(envs) for envs in (make(walk("dict"), 2), DummyVecEnv([walk("dict")] * 2))]
    generator = np.random.default_rng(0)
    for envs in both:
        envs.norm_obs_keys = ["position"]
        envs.seed(1)
    equal(*(envs.reset() for envs in both))
    for _ in range(30):
        actions = sample(both[0], generator)
        equal(*(envs.step(actions) for envs in both))
        equal(*(envs.get_original_obs() for envs in both))
    both[0].save(str(tmp_path / "norm.pkl"))
    loaded = VecNormalize.load(str(tmp_path / "norm.pkl"), make(walk("dict"), 2))
    equal(loaded.obs_rms["position"].mean, both[0].obs_rms["position"].mean)


def test_vec_transpose_image_and_extract_dict(make: Make) -> None:
    envs = VecTransposeImage(make(walk("image", limit=2), 2))
    assert envs.reset().shape == (2, 1, 36, 36)
    for _ in range(2):
        *_, infos = envs.step(np.array([0, 1]))
    assert infos[1]["terminal_observation"].shape == (1, 36, 36)
    assert VecExtractDictObs(make(walk("dict"), 2), "position").reset().shape == (2, 2)


def test_vec_video_recorder(make: Make, tmp_path: Path) -> None:
    need_here("moviepy", "moviepy")
    envs = VecVideoRecorder(
        make(walk(render_mode="rgb_array"), 2),
        str(tmp_path),
        lambda step: step == 0,
        video_length=5,
        name_prefix="walk",
    )
    envs.reset()
    for _ in range(7):
        envs.step(np.array([0, 1]))
    videos = list(tmp_path.glob("walk*.mp4"))
    assert len(videos) == 1
    assert videos[0].stat().st_size > 0


# Training


class Recorder(VecEnvWrapper):
    """Keeps the actions and rewards that pass through."""

    def __init__(self, envs: VecEnv) -> None:
        super().__init__(envs)
        self.seen: list[Any] = []

    def reset(self) -> Any:
        observations = self.venv.reset()
        self.seen.append(observations.copy())
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        self.seen.append(actions.copy())
        self.venv.step_async(actions)

    def step_wait(self) -> Any:
        result = self.venv.step_wait()
        self.seen.append((result[0].copy(), result[1].copy(), result[2].copy()))
        return result


def fast_ppo(envs: VecEnv, **options: Any) -> PPO:
    return PPO(
        "MlpPolicy",
        envs,
        n_steps=32,
        batch_size=32 * envs.num_envs,
        n_epochs=20,
        learning_rate=lambda left: 1e-3 * left,
        gae_lambda=0.8,
        gamma=0.98,
        seed=0,
        device="cpu",
        **options,
    )


def test_ppo_is_step_for_step_the_same_as_on_dummy_vec_env(make: Make) -> None:
    runs = [Recorder(envs) for envs in (make("CartPole-v1", 4), DummyVecEnv([lambda: gym.make("CartPole-v1")] * 4))]
    models = [fast_ppo(run).learn(1500) for run in runs]
    assert len(runs[0].seen) > 2 * 1500 / 4
    equal(runs[0].seen, runs[1].seen)
    equal(*(weights(model) for model in models))


def test_ppo_learns_cart_pole_and_repeats_exactly(make: Make) -> None:
    results = []
    for _ in range(2):
        envs = make("CartPole-v1", num_envs=8)
        model = fast_ppo(envs).learn(20_000)
        results.append((weights(model), envs.vector_env.history()[-1].length))
    equal(*results)
    mean = evaluate_ppo(model)
    assert mean >= 195


def evaluate_ppo(model: PPO) -> float:
    envs = VecMonitor(ForkedVecEnv("CartPole-v1", num_envs=4))
    envs.seed(123)
    returns, lengths = evaluate_policy(model, envs, n_eval_episodes=20, return_episode_rewards=True)
    envs.close()
    assert len(returns) == 20
    return float(np.mean(returns))


class Killer(BaseCallback):
    """Kills a copy every 3000 steps, and collects what was said about it."""

    def __init__(self) -> None:
        super().__init__()
        self.killed: list[int] = []
        self.failures: list[str] = []

    def _on_step(self) -> bool:
        self.failures += [info["failure"] for info in self.locals["infos"] if "failure" in info]
        if self.num_timesteps % 3000 < self.training_env.num_envs:
            victim = len(self.killed) % self.training_env.num_envs
            pid = self.training_env.env_method("pid", indices=victim)[0]
            os.kill(pid, signal.SIGKILL)
            self.killed.append(pid)
        return True


def test_ppo_learns_while_copies_are_killed(make: Make) -> None:
    envs = make(cart, num_envs=8, on_failure="truncate")
    killer = Killer()
    model = fast_ppo(envs).learn(20_000, callback=killer)
    assert len(killer.killed) == 6
    for pid, failure in zip(killer.killed, killer.failures, strict=True):
        assert f"pid {pid}" in failure
    assert evaluate_ppo(model) >= 195


@pytest.mark.parametrize("kind", ["box", "dict", "image"])
@pytest.mark.parametrize("algorithm", [PPO, A2C, DQN, SAC])
def test_algorithms_train_save_and_load(make: Make, tmp_path: Path, algorithm: Any, kind: str) -> None:
    envs = make(walk(kind, "box" if algorithm is SAC else "discrete"), 2)
    policy = {"box": "MlpPolicy", "dict": "MultiInputPolicy", "image": "CnnPolicy"}[kind]
    small = {"net_arch": [16]}
    if kind != "box":
        small["features_extractor_kwargs"] = {"cnn_output_dim" if kind == "dict" else "features_dim": 16}
    options: dict[str, Any] = {"seed": 1, "device": "cpu", "policy_kwargs": small}
    if algorithm is PPO:
        options.update(n_steps=16, batch_size=16, n_epochs=1)
    elif algorithm is not A2C:
        options.update(learning_starts=16, batch_size=8, buffer_size=100, train_freq=4)
    model = algorithm(policy, envs, **options).learn(64)
    assert model.num_timesteps >= 64
    model.save(tmp_path / "model")
    loaded = algorithm.load(tmp_path / "model", env=envs, device="cpu")
    equal(weights(loaded), weights(model))
    loaded.learn(32)


def test_her_asks_the_copies_for_rewards(make: Make) -> None:
    envs = make(functools.partial(BitFlippingEnv, n_bits=4, continuous=False), 2)
    model = DQN(
        "MultiInputPolicy",
        envs,
        replay_buffer_class=HerReplayBuffer,
        replay_buffer_kwargs={"n_sampled_goal": 2},
        learning_starts=40,
        batch_size=8,
        buffer_size=200,
        policy_kwargs={"net_arch": [16]},
        device="cpu",
        seed=0,
    ).learn(120)
    goals = np.array([[1, 0, 1, 0]] * 2)
    assert list(envs.env_method("compute_reward", goals, goals, None, indices=[0])[0]) == [0.0, 0.0]
    assert model.replay_buffer.env is not None


def test_training_and_evaluation_fork_one_base(tmp_path: Path) -> None:
    with prized_gym.Base("CartPole-v1") as base:
        envs, evaluation = VecMonitor(ForkedVecEnv(base, 4)), VecMonitor(ForkedVecEnv(base, 2))
        callback = EvalCallback(evaluation, n_eval_episodes=4, eval_freq=100, log_path=str(tmp_path), verbose=0)
        fast_ppo(envs).learn(1200, callback=callback)
        scores = np.load(tmp_path / "evaluations.npz")
        assert scores["results"].shape == (3, 4)
        envs.close()
        evaluation.close()
        assert not base.closed


@pytest.mark.filterwarnings("ignore:rich is experimental")
def test_progress_bar(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    need_here("rich", "prized-gym[sb3]")
    fast_ppo(make("CartPole-v1", 2)).learn(64, progress_bar=True)
    assert "64/64" in capfd.readouterr().out


def test_an_interrupted_run_can_learn_again(make: Make) -> None:
    class Interrupter(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps == 100:
                # In the middle of one of the next steps.
                threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
            return True

    envs = make(Slow, 2)
    model = fast_ppo(envs)
    with pytest.raises(KeyboardInterrupt):
        model.learn(10_000, callback=Interrupter())
    steps = model.num_timesteps
    assert model.learn(64).num_timesteps == 64 < steps


# Comparing


def weights(model: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in model.policy.state_dict().items()}


def equal(a: Any, b: Any) -> None:
    """Assert that two structures are equal, types of arrays included."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            equal(one, other)
    else:
        np.testing.assert_array_equal(a, b)
        assert np.asarray(a).dtype == np.asarray(b).dtype
