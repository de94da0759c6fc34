"""PPO from Stable-Baselines3 on forked copies, evaluated on copies of the same base.

    pip install prized-gym[sb3]
    python examples/sb3_ppo.py
    python examples/sb3_ppo.py --env Pendulum-v1 --copies 4 --steps 50000

Then the same number of steps is taken on Stable-Baselines3's own vector environments, and the times are printed. CartPole
sets up at once and steps in microseconds, so stepping it in this very process (DummyVecEnv) is fastest; what forks save is
setting up, which `warm_model.py` and `big_dataset.py` show.
"""

import argparse
import time

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor

import prized_gym
from prized_gym.integrations.sb3 import ForkedVecEnv

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1", help="the id of a Gymnasium environment")
    parser.add_argument("--copies", type=int, default=8, help="how many copies to train on")
    parser.add_argument("--steps", type=int, default=20_000, help="how many steps to train, over all copies")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compare-steps", type=int, default=500, help="how many steps of each copy to compare speeds by"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # small networks are faster on one thread

    # Set up once; training and evaluation fork it.
    base = prized_gym.Base(args.env)
    envs = VecMonitor(ForkedVecEnv(base, num_envs=args.copies))
    evaluation_envs = VecMonitor(ForkedVecEnv(base, num_envs=4))
    print(f"set up: {base!r}")

    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=32,
        batch_size=32 * args.copies,
        n_epochs=20,
        learning_rate=lambda left: 1e-3 * left,
        gae_lambda=0.8,
        gamma=0.98,
        seed=args.seed,
        device="cpu",
    )
    evaluation = EvalCallback(evaluation_envs, n_eval_episodes=20, eval_freq=max(1, args.steps // args.copies // 4))
    started = time.perf_counter()
    model.learn(args.steps, callback=evaluation)
    print(f"trained {model.num_timesteps} steps in {time.perf_counter() - started:.1f} s")
    print(f"mean return of 20 evaluation episodes: {evaluation.last_mean_reward:.1f}")
    envs.close()
    evaluation_envs.close()
    base.close()

    def make_env() -> gym.Env:
        return gym.make(args.env)

    print(f"\n{args.copies} copies, {args.compare_steps} steps of each:")
    for name, make_vec in (
        ("ForkedVecEnv ", lambda: ForkedVecEnv(make_env, num_envs=args.copies)),
        ("SubprocVecEnv", lambda: SubprocVecEnv([make_env] * args.copies)),
        ("DummyVecEnv  ", lambda: DummyVecEnv([make_env] * args.copies)),
    ):
        started = time.perf_counter()
        vec = make_vec()
        vec.seed(args.seed)
        vec.reset()
        ready = time.perf_counter()
        actions = np.array([vec.action_space.sample() for _ in range(args.copies)])
        for _ in range(args.compare_steps):
            vec.step(actions)
        seconds = time.perf_counter() - ready
        vec.close()
        rate = args.compare_steps * args.copies / seconds
        print(f"  {name}  first observation after {ready - started:5.2f} s, then {rate:8.0f} steps per second")
