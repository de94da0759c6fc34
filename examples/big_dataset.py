"""A table of a gigabyte, loaded once for sixteen copies. Prints the memory they hold, and what they would hold apart.

    pip install prized-gym
    python examples/big_dataset.py
    python examples/big_dataset.py --gigabytes 4 --copies 32

The environment walks through rows of the table (measurements of a thousand days) and is rewarded for guessing which way the
next one goes. A fork shares every page of its base that neither of them writes to, and nobody writes to the table.
"""

import argparse
import glob
import os
import time
from typing import Any

import gymnasium as gym
import numpy as np

import prized_gym

COLUMNS = 16


class Table(gym.Env[np.ndarray, int]):
    """Guess whether the first column goes up or down."""

    def __init__(self, gigabytes: float = 1.0) -> None:
        # In earnest this would be np.load or a query; a random walk takes as long and needs no file.
        rows = int(gigabytes * 1e9 / (COLUMNS * 4))
        self.table = np.random.default_rng(0).standard_normal((rows, COLUMNS), dtype=np.float32)
        np.cumsum(self.table, axis=0, out=self.table)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (COLUMNS,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def pid(self) -> int:
        return os.getpid()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.row = int(self.np_random.integers(len(self.table) - 1001))
        self.last = self.row + 1000
        return self.table[self.row], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.row += 1
        up = self.table[self.row, 0] > self.table[self.row - 1, 0]
        return self.table[self.row], float(up == bool(action)), False, self.row == self.last, {}


def memory_gb(pid: int) -> float:
    """What one process holds; of a page it shares with others, its share (the proportional set size)."""
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) * 1024 / 1e9


def descendants() -> list[int]:
    """The processes below this one."""
    found, queue = [], [os.getpid()]
    while queue:
        for path in glob.glob(f"/proc/{queue.pop()}/task/*/children"):
            with open(path) as children:
                found += (new := [int(pid) for pid in children.read().split()])
            queue += new
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="the size of the table")
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000, help="steps of each copy")
    args = parser.parse_args()

    started = time.perf_counter()
    base = prized_gym.Base(Table, env_kwargs={"gigabytes": args.gigabytes})
    print(f"table of {args.gigabytes:g} GB loaded in {time.perf_counter() - started:.1f} s")

    envs = prized_gym.ForkedVectorEnv(base, num_envs=args.copies)
    started = time.perf_counter()
    envs.reset(seed=0)
    print(f"forked into {args.copies} copies in {time.perf_counter() - started:.2f} s")

    started = time.perf_counter()
    envs.action_space.seed(0)
    for _ in range(args.steps):
        envs.step(envs.action_space.sample())
    rate = args.steps * args.copies / (time.perf_counter() - started)
    print(f"{rate:.0f} steps per second")

    pids = envs.call("pid")
    shares = [memory_gb(pid) for pid in pids]
    everything = sum(memory_gb(pid) for pid in descendants())
    envs.close()
    base.close()

    # The same environment in a process by itself, measured the same way.
    alone_env = gym.vector.AsyncVectorEnv([lambda: Table(args.gigabytes)], context="fork")
    alone_env.reset(seed=0)
    alone = memory_gb(alone_env.call("pid")[0])
    alone_env.close()

    print(
        f"memory: {everything:.2f} GB for the base and {args.copies} copies, each copy's share {np.mean(shares):.3f} GB"
    )
    print(
        f"one process that loads the table by itself holds {alone:.2f} GB; {args.copies} of those: {alone * args.copies:.1f} GB"
    )
