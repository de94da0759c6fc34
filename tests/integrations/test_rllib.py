"""RLlib: ``.environment("prized_gym/Forked-v0")`` with vectorized env runners. In a process of its own: Ray starts many."""

from __future__ import annotations

import subprocess
import sys

from tools.libraries import need

need("ray.rllib", "'ray[rllib]' torch")

SCRIPT = """
import prized_gym, ray
from ray.rllib.algorithms.ppo import PPOConfig

ray.init(num_cpus=2, include_dashboard=False)
config = (
    PPOConfig()
    .environment("prized_gym/Forked-v0", env_config={"env": "CartPole-v1"})
    .env_runners(gym_env_vectorize_mode="vector_entry_point", num_envs_per_env_runner=4, num_env_runners=0)
    .training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=1)
)
algorithm = config.build_algo()
results = [algorithm.train() for _ in range(2)]
assert isinstance(algorithm.env_runner.env.unwrapped, prized_gym.ForkedVectorEnv)
print("RETURN", results[-1]["env_runners"]["episode_return_mean"])
algorithm.stop()
ray.shutdown()
"""


def test_trains() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split("RETURN")[1]) > 5
