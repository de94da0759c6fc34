"""TorchRL: ``GymWrapper(envs)``."""

from __future__ import annotations

import pytest

from tools.libraries import need

torch = need("torch", "torch")
for _part in ("collectors", "envs", "modules", "objectives"):
    need(f"torchrl.{_part}", "torchrl")
need("tensordict", "tensordict")

from tensordict.nn import TensorDictModule  # noqa: E402
from torchrl.collectors import Collector  # noqa: E402
from torchrl.envs import GymWrapper  # noqa: E402
from torchrl.envs.utils import check_env_specs  # noqa: E402
from torchrl.modules import ProbabilisticActor, ValueOperator  # noqa: E402
from torchrl.objectives import ClipPPOLoss  # noqa: E402
from torchrl.objectives.value import GAE  # noqa: E402

import prized_gym  # noqa: E402

# TorchRL's own: it announces its next release.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl", "ignore::FutureWarning:torchrl")


@pytest.mark.parametrize("mode", ["Disabled", "SameStep"])
def test_collects(mode: str) -> None:
    envs = prized_gym.ForkedVectorEnv("CartPole-v1", 3, autoreset_mode=mode, max_episode_steps=5)
    wrapped = GymWrapper(envs)
    check_env_specs(wrapped)
    wrapped.set_seed(0)
    rollout = wrapped.rollout(12, break_when_any_done=False)
    assert rollout.batch_size == (3, 12)
    done = rollout["next", "done"].squeeze(-1)
    assert done[:, [4, 9]].all()
    assert done.sum() == 6
    # The observation an episode ended with is in its step (an odd number of pushes makes a speed); the next step starts
    # from that of the reset.
    assert (rollout["next", "observation"][:, 4, 1].abs() > 0.1).all()
    assert (rollout["observation"][:, 5, 1].abs() <= 0.05).all()
    assert (rollout["next", "truncated"].squeeze(-1) == done).all()
    envs.close()


def test_the_wrong_mode_is_refused_and_the_right_one_named() -> None:
    envs = prized_gym.ForkedVectorEnv("CartPole-v1", 3)
    with pytest.raises(RuntimeError, match=r"SAME_STEP or DISABLED.*NEXT_STEP"):
        GymWrapper(envs)
    envs.close()


def test_trains() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    envs = prized_gym.ForkedVectorEnv("CartPole-v1", 4, autoreset_mode="Disabled")
    wrapped = GymWrapper(envs, categorical_action_encoding=True)
    network = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
    loss = ClipPPOLoss(actor, critic)
    advantage = GAE(gamma=0.98, lmbda=0.9, value_network=critic)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-3)
    before = [parameter.detach().clone() for parameter in actor.parameters()]
    collector = Collector(wrapped, actor, frames_per_batch=128, total_frames=512)
    frames = 0
    for batch in collector:
        frames += batch.numel()
        for _ in range(4):
            advantage(batch)
            values = loss(batch.reshape(-1))
            total = values["loss_objective"] + values["loss_critic"] + values["loss_entropy"]
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
    assert frames == 512
    assert any((old != parameter).any() for old, parameter in zip(before, actor.parameters(), strict=True))
    assert len(envs.history()) > 4
    collector.shutdown()
    envs.close()
