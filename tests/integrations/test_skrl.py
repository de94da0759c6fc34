"""skrl: ``wrap_env(envs)``."""

from __future__ import annotations

from typing import Any

import pytest

from tools.libraries import need
from zoo.walk import Walk

torch = need("torch", "torch")
need("skrl", "skrl")

from skrl.agents.torch.ppo import PPO, PPO_CFG  # noqa: E402
from skrl.envs.wrappers.torch import wrap_env  # noqa: E402
from skrl.memories.torch import RandomMemory  # noqa: E402
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model  # noqa: E402
from skrl.trainers.torch import SequentialTrainer  # noqa: E402

import prized_gym  # noqa: E402


class Policy(CategoricalMixin, Model):
    def __init__(self, **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        CategoricalMixin.__init__(self)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))

    def compute(self, inputs: dict[str, Any], role: str = "") -> Any:
        return self.net(inputs["observations"]), {}


class Value(DeterministicMixin, Model):
    def __init__(self, **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def compute(self, inputs: dict[str, Any], role: str = "") -> Any:
        return self.net(inputs["observations"]), {}


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_trains(mode: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    envs = prized_gym.ForkedVectorEnv("CartPole-v1", 4, autoreset_mode=mode)
    env = wrap_env(envs, verbose=False)
    assert env.num_envs == 4
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": "cpu"}
    models = {"policy": Policy(**spaces), "value": Value(**spaces)}
    settings = PPO_CFG(rollouts=16, learning_epochs=2)
    settings.experiment.write_interval = settings.experiment.checkpoint_interval = 0
    agent = PPO(models=models, memory=RandomMemory(memory_size=16, num_envs=4, device="cpu"), cfg=settings, **spaces)
    before = [parameter.detach().clone() for parameter in models["policy"].parameters()]
    trainer = SequentialTrainer(
        env=env,
        agents=agent,
        cfg={"timesteps": 96, "headless": True, "disable_progressbar": True, "close_environment_at_exit": False},
    )
    trainer.train()
    assert any((old != new).any() for old, new in zip(before, models["policy"].parameters(), strict=True))
    assert len(envs.history()) > 4
    env.close()
    assert envs.closed


def test_renders_through_call() -> None:
    envs = prized_gym.ForkedVectorEnv(Walk, 2, render_mode="rgb_array", autoreset_mode="SameStep")
    env = wrap_env(envs, verbose=False)
    env.reset()
    assert [frame.shape for frame in env.render()] == [(16, 32, 3)] * 2
    env.close()


def test_without_autoreset_the_error_says_what_is_missing() -> None:
    envs = prized_gym.ForkedVectorEnv(Walk, 2, autoreset_mode="Disabled")
    env = wrap_env(envs, verbose=False)
    env.reset()
    with pytest.raises(prized_gym.EpisodeOverError, match="autoreset is disabled"):
        for _ in range(20):
            env.step(torch.zeros(2, 1, dtype=torch.int64))
    env.close()
