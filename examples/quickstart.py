"""Set an environment up once, fork it into 8 copies, step them, and compare with building each copy anew.

    python examples/quickstart.py

Needs numpy only; takes a few seconds.
"""

import time

import gymnasium as gym
import numpy as np

import prized_gym


class Maze(gym.Env):
    """A grid world whose map of distances takes a while to compute: the slow set-up that rollouts should not repeat."""

    size = 60
    observation_space = gym.spaces.Box(0, size, (3,), np.float32)
    action_space = gym.spaces.Discrete(4)
    moves = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])

    def __init__(self):
        rng = np.random.default_rng(7)
        self.walls = rng.random((self.size, self.size)) < 0.25
        self.walls[-1, -1] = False
        # Distance of every cell from the goal, by relaxing until nothing changes: seconds of work.
        self.distance = np.where(self.walls, np.inf, 1e6)
        self.distance[-1, -1] = 0
        for _ in range(self.size * self.size * 4):
            padded = np.pad(self.distance, 1, constant_values=np.inf)
            neighbours = np.minimum.reduce([padded[2:, 1:-1], padded[:-2, 1:-1], padded[1:-1, 2:], padded[1:-1, :-2]])
            self.distance = np.where(self.walls, np.inf, np.minimum(self.distance, neighbours + 1))
        self.free = np.argwhere(self.distance < 1e6)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell = self.free[self.np_random.integers(len(self.free))]
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        target = np.clip(self.cell + self.moves[action], 0, self.size - 1)
        before = self.distance[tuple(self.cell)]
        if not self.walls[tuple(target)]:
            self.cell = target
        self.steps += 1
        after = self.distance[tuple(self.cell)]
        return self.observe(), float(before - after), bool(after == 0), self.steps >= 200, {}

    def observe(self):
        return np.array([*self.cell, self.steps % self.size], np.float32)


COPIES, RESETS, STEPS = 8, 5, 400

started = time.perf_counter()
base = prized_gym.Base(Maze)  # a process of its own, in which Maze() runs once
warmed = time.perf_counter() - started
print(f"warmed   one base in {warmed:.2f} s")

envs = prized_gym.ForkedVectorEnv(base, num_envs=COPIES)
times = []
for seed in range(RESETS):
    started = time.perf_counter()
    observations, infos = envs.reset(seed=seed)  # forks the base: 8 live copies with the map in memory
    times.append(time.perf_counter() - started)
print(f"forked   {COPIES} copies {RESETS} times, {np.median(times) * 1000:.0f} ms each time, reset included")

rng, total = np.random.default_rng(0), np.zeros(COPIES)
started = time.perf_counter()
for _ in range(STEPS):
    observations, rewards, terminations, truncations, infos = envs.step(rng.integers(0, 4, COPIES))
    total += rewards
seconds = time.perf_counter() - started
print(
    f"stepped  {STEPS * COPIES} steps at {STEPS * COPIES / seconds:,.0f} a second, {len(envs.history())} episodes finished"
)

envs.close()
base.close()

started = time.perf_counter()
Maze()
anew = time.perf_counter() - started
print(f"saved    building Maze() takes {anew:.2f} s:", end=" ")
print(f"{COPIES} copies, {RESETS} times, would have cost {anew * COPIES * RESETS:.0f} s;")
print(f"         warming and forking took {warmed + sum(times):.2f} s")
