"""Rollouts of a costly environment under gVisor: forks of a warm base against sandboxes set up from scratch, with their cost.

The set-up makes a virtual environment, installs a package into it with pip (nothing is downloaded: torch is this machine's),
copies weights in and starts a server that loads them as a torch model; one request plays one episode, a forward pass through
all of it. A batch is timed from the fork, or the creates, to its last
reward. The ways take turns, batch by batch, and equal seeds must give equal rewards in all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from bench.machine import describe, table
from bench.ways import KINDS, REQUEST, Batch, Fork, Recipe, Way, reward_of
from prized_gym import Copy, engines
from prized_gym.base import Base
from prized_gym.errors import EngineUnavailableError
from prized_gym.pricing import PRIZED_2_VCPU_4_GB, Prices
from prized_gym.rollouts.run import rollouts

SCALE = 100
"""Rollouts whose cost is shown."""

TITLES = {
    "a": "A fork of the running base",
    "b": "A fork of the base, paused",
    "c": "A fork of a paused base with the packages and files only, starting the server",
    "d": "A new sandbox, set up from scratch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--copies", type=int, default=8, help="rollouts at once, a batch (default: 8)")
    parser.add_argument("--batches", type=int, default=3, help="batches after the first (default: 3)")
    parser.add_argument("--megabytes", type=int, default=500, help="size of the model (default: 500)")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=[*TITLES, "e"],
        default=[*TITLES, "e"],
        help="ways to measure: "
        + "; ".join(f"{letter}: {title[0].lower()}{title[1:]}" for letter, title in TITLES.items())
        + "; e: rollouts() against the same harness written by hand (default: all)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns of each harness in e (default: 3)")
    prices = parser.add_argument_group("prices", "US dollars; default: Prized's of a sandbox of 2 vCPU and 4 GB")
    prices.add_argument("--sandbox-hour", type=float, help="an hour of one sandbox, whatever its size")
    prices.add_argument("--vcpu-hour", type=float, help="an hour of one vCPU")
    prices.add_argument("--gb-hour", type=float, help="an hour of one GB of memory")


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    for name in ("copies", "batches", "megabytes", "repeats"):
        if getattr(options, name) < 1:
            raise SystemExit(f"--{name} must be at least 1")
    for package in ("torch", "pip"):
        if importlib.util.find_spec(package) is None:
            raise SystemExit(
                f"the sandboxes use what is installed here, and {package} is not: python -m pip install {package}"
            )
    try:
        engines.load("gvisor").check()
    except EngineUnavailableError as error:
        raise SystemExit(str(error)) from error
    prices = _prices(options)
    print(describe(), flush=True)
    with contextlib.ExitStack() as stack:
        recipe = Recipe(Path(stack.enter_context(tempfile.TemporaryDirectory())), options.megabytes)
        needed = recipe.memory * (options.copies + len({*options.rows} & {"a", "b", "c"}) + 1)
        if needed > (free := _available()):
            raise SystemExit(
                f"about {needed / 1e9:.0f} GB of memory are needed and {free / 1e9:.0f} GB are available: "
                "choose fewer --rows or --copies, or fewer --megabytes"
            )
        rewards = Rewards()
        bar = stack.enter_context(tqdm(desc="setting up", bar_format="{desc}: {elapsed}", leave=False))
        ways: dict[str, Way] = {}
        for letter in TITLES:
            if letter in options.rows:
                ways[letter] = stack.enter_context(KINDS[letter](recipe))
        batches = _take_turns(ways, options, rewards, bar)
        print(_table(ways, batches, options.copies, prices))
        if "e" in options.rows:
            known = ways.get("a")
            base = known.base if isinstance(known, Fork) else stack.enter_context(recipe.with_server())
            print(_compare(base, options, rewards, bar))


def _take_turns(
    ways: dict[str, Way], options: argparse.Namespace, rewards: Rewards, bar: Any
) -> dict[str, list[Batch]]:
    """The batches of each way: in each round every way plays the same seeds."""
    batches: dict[str, list[Batch]] = {letter: [] for letter in ways}
    for number in range(options.batches + 1):
        seeds = range(number * options.copies + 1, (number + 1) * options.copies + 1)
        for letter, way in ways.items():
            bar.set_description(f"batch {number + 1} of {options.batches + 1}, {letter}")
            batch = way.batch(seeds)
            rewards.check(TITLES[letter], seeds, batch.rewards)
            batches[letter].append(batch)
    return batches


def _table(ways: dict[str, Way], batches: dict[str, list[Batch]], copies: int, prices: Prices) -> str:
    if not ways:
        return ""
    rows, lines = [], []
    later = {letter: [batch.seconds for batch in those[1:]] for letter, those in batches.items()}
    for letter, way in ways.items():
        ratio = _ratio(later[letter], later["a"]) if "a" in later else "-"
        rows.append(
            [
                f"({letter}) {TITLES[letter]}",
                f"{batches[letter][0].seconds:.1f} s",
                _spread(later[letter]),
                f"${_cost(way, batches[letter], copies, prices):.3f}",
                ratio,
            ]
        )
        if way.setup_seconds:
            lines.append(f"Setting the base of ({letter}) up, once: {way.setup_seconds:.1f} s.")
    header = ["each rollout runs in", f"first batch of {copies}", "each later batch", f"{SCALE} rollouts cost", "x (a)"]
    lines.append(
        f"Later batches: medians of {len(next(iter(later.values())))} interleaved rounds (least-greatest); x (a): of the "
        "ratios within a round. Costs: what the seconds of every sandbox come to under the prices given, from the call that "
        f"makes it to its end, the base's set-up and running time included, scaled to {SCALE} rollouts."
    )
    if "a" in later and "d" in later:
        lines.append(f"Later batches, (d) / (a): {_ratio(later['d'], later['a'])}.")
    return "\n".join([table(header, rows), *lines])


def _cost(way: Way, batches: Sequence[Batch], copies: int, prices: Prices) -> float:
    """US dollars for 100 rollouts: the first batch, and later ones as the median of those measured."""
    more = max(0.0, SCALE / copies - 1.0)
    first, later = batches[0], batches[1:]
    seconds = first.sandbox_seconds + more * statistics.median(batch.sandbox_seconds for batch in later)
    seconds += way.setup_seconds
    if way.base_runs:
        seconds += first.seconds + more * statistics.median(batch.seconds for batch in later)
    return prices.cost(seconds=seconds, vcpu=Recipe.VCPU, memory_gb=Recipe.MEMORY_GB)


def _compare(base: Base, options: argparse.Namespace, rewards: Rewards, bar: Any) -> str:
    """Row e: the seconds that the same rollouts take by ``rollouts`` and by hand, in turns."""
    seeds = range(1, options.batches * options.copies + 1)
    harnesses: list[Callable[[Base, Sequence[int], int], dict[int, float]]] = [_by_rollouts, _by_hand]
    times: dict[str, list[float]] = {harness.__name__: [] for harness in harnesses}
    for repeat in range(options.repeats):
        bar.set_description(f"by hand, turn {repeat + 1} of {options.repeats}")
        # Whoever goes first meets another state of the machine than whoever goes second.
        for harness in harnesses if repeat % 2 else reversed(harnesses):
            started = time.perf_counter()
            played = harness(base, seeds, options.copies)
            times[harness.__name__].append(time.perf_counter() - started)
            rewards.check(harness.__name__, seeds, played)
    ours, theirs = times.values()
    return (
        f"(e) {len(seeds)} rollouts, {options.copies} at once, to the end of the last copy: rollouts() {_spread(ours)}, the "
        f"same harness by hand with threads {_spread(theirs)}; rollouts() / by hand: {_ratio(ours, theirs)}."
    )


def _by_rollouts(base: Base, seeds: Sequence[int], copies: int) -> dict[int, float]:
    return {one.seed: reward_of(one) for one in rollouts(base, seeds, copies, request=REQUEST, progress=False)}


def _by_hand(base: Base, seeds: Sequence[int], copies: int) -> dict[int, float]:
    """What one would write without ``rollouts``: fork a batch, play it in threads, delete it, fork the next."""

    def play(copy: Copy, seed: int) -> float:
        reward = float(copy.http(REQUEST.format(seed=seed)).check().json()["reward"])
        copy.close()
        return reward

    played: dict[int, float] = {}
    for start in range(0, len(seeds), copies):
        some = seeds[start : start + copies]
        with ThreadPoolExecutor(copies) as pool:
            forks = base.fork(len(some))
            try:
                played.update(zip(some, pool.map(play, forks, some), strict=True))
            finally:
                for fork in forks:
                    fork.close()
    return played


# Numbers


class Rewards:
    """The rewards seen, by seed: equal seeds must give equal ones, or something other than the environment was measured."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}

    def check(self, where: str, seeds: Iterable[int], rewards: dict[int, float]) -> None:
        """Compare with what was seen before.

        Raises:
            RuntimeError: a reward is missing, or another one.
        """
        for seed in seeds:
            if seed not in rewards or rewards[seed] != self._known.setdefault(seed, rewards[seed]):
                raise RuntimeError(
                    f"{where}: the reward of seed {seed} is {rewards.get(seed)}, and was {self._known.get(seed)} before"
                )


def _prices(options: argparse.Namespace) -> Prices:
    given = {name: getattr(options, name) for name in ("sandbox_hour", "vcpu_hour", "gb_hour")}
    given = {name: value for name, value in given.items() if value is not None}
    return Prices(**given) if given else PRIZED_2_VCPU_4_GB


def _available() -> float:
    """Bytes of memory that can be had."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return math.inf


def _spread(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.1f} s ({min(times):.1f}-{max(times):.1f})"


def _ratio(these: Sequence[float], those: Sequence[float]) -> str:
    ratios = [one / other for one, other in zip(these, those, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
