"""PPO on copies that are whole sandboxes: each is a live fork of one gVisor sandbox in which the environment runs.

    pip install prized-gym[sb3]
    python examples/gvisor_ppo.py
    python examples/gvisor_ppo.py --engine local

What differs from training on forked processes is one argument, engine="gvisor": there, an environment may start servers, write
files or run programs nobody trusts. CartPole does none of it and learns the same on both, so here it only shows what a step
costs: a request to a sandbox instead of a word in shared memory. gVisor needs Linux and its runsc (`prized-gym doctor gvisor`).
"""

import argparse
import subprocess
import sys
import time

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecMonitor

import prized_gym
from prized_gym.integrations.sb3 import ForkedVecEnv


class Report(BaseCallback):
    """Prints how it goes, once per update."""

    def __init__(self):
        super().__init__()
        self.started = time.perf_counter()

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        returns = [episode["r"] for episode in self.model.ep_info_buffer]
        rate = self.num_timesteps / (time.perf_counter() - self.started)
        shown = f"{np.mean(returns[-20:]):6.1f}" if returns else "  none"
        print(
            f"{self.num_timesteps:6d} steps  mean return of the last 20 episodes {shown}  {rate:6.0f} steps/s",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="gvisor", help="gvisor, or local for forked processes")
    parser.add_argument("--copies", type=int, default=4, help="how many copies to train on")
    parser.add_argument("--steps", type=int, default=6_000, help="how many steps to train, over all copies")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)

    try:
        base = prized_gym.Base("CartPole-v1", engine=args.engine)  # set up once
    except prized_gym.EngineUnavailableError as error:
        print(error, file=sys.stderr)
        sys.exit(subprocess.call([sys.executable, "-m", "prized_gym.cli", "doctor", args.engine], stdout=sys.stderr))
    print(f"set up in {base.setup_seconds:.1f} s: {base!r}")

    envs = VecMonitor(ForkedVecEnv(base, num_envs=args.copies))
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=512 // args.copies,
        batch_size=128,
        learning_rate=2e-3,
        gae_lambda=0.9,
        gamma=0.98,
        seed=args.seed,
        device="cpu",
    )
    started = time.perf_counter()
    model.learn(args.steps, callback=Report())
    seconds = time.perf_counter() - started
    print(f"trained {model.num_timesteps} steps in {seconds:.1f} s on {args.copies} copies, engine={args.engine!r}")

    # Stepping alone, without learning.
    envs.reset()
    actions = np.zeros(args.copies, dtype=int)
    started, steps = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < 2:
        envs.step(actions)
        steps += args.copies
    print(f"stepped by itself: {steps / seconds:.0f} steps/s")
    envs.close()
    base.close()
