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
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tqdm.auto import tqdm

from bench.machine import describe, table
from prized_gym import Copy, engines
from prized_gym.base import Base
from prized_gym.errors import EngineUnavailableError, SandboxError
from prized_gym.pricing import PRIZED_2_VCPU_4_GB, Prices
from prized_gym.rollouts.run import rollouts

PACKAGE = '''
"""A policy made of square matrices, and an episode with it."""

import torch

WIDTH = 1024


class Policy(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))

    def forward(self, state):
        for layer in self.layers:
            state = state + 0.1 * torch.tanh(layer(state))
        return state


def save(path, megabytes):
    torch.manual_seed(0)
    torch.save(Policy(max(1, round(megabytes * 1e6 / (4 * WIDTH * WIDTH)))).state_dict(), path)


def load(path):
    weights = torch.load(path, weights_only=True, mmap=True)
    with torch.device("meta"):
        policy = Policy(len(weights))
    policy.load_state_dict(weights, assign=True)
    return policy


def episode(policy, seed):
    state = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        reward = torch.sigmoid(policy(state)[0, 0]).item()
    return {"seed": seed, "reward": round(reward, 4)}
'''

SERVER = '''
"""GET /rollout?seed=N plays one episode."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import benched_policy
import torch

torch.set_num_threads(1)  # the copies share the cores
policy = benched_policy.load("weights.pt")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        target = urlsplit(self.path)
        answer = {}
        if target.path == "/rollout":
            answer = benched_policy.episode(policy, int(parse_qs(target.query)["seed"][0]))
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


benched_policy.episode(policy, 0)  # so that every copy inherits a server that has already played
HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
'''

WHEEL = "benched_policy-1.0-py3-none-any.whl"
SETUP = (
    # Debian's Python has no ensurepip: then the environment comes without pip, which can install into it from outside.
    "python -m venv ~/.venv || python -m venv --without-pip --clear ~/.venv",
    # Torch is this machine's: nothing is downloaded.
    "python -c 'import sys; print(*sys.path[1:], sep=chr(10))' > $(echo ~/.venv/lib/python3*/site-packages)/machine.pth",
    "python -m pip --python ~/.venv/bin/python install --quiet --no-index --no-deps --disable-pip-version-check "
    f"./{WHEEL}",
)
START = "exec ~/.venv/bin/python server.py"
READY = "http://127.0.0.1:8000/health"
REQUEST = "/rollout?seed={seed}"

PATIENCE = 600.0
"""Seconds a set-up or a rollout may take: on few cores a batch of set-ups is slow."""

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
    return {one.seed: _reward(one) for one in rollouts(base, seeds, copies, request=REQUEST, progress=False)}


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


# The environment


class Recipe:
    """How the environment is set up, from files in a directory.

    Args:
        directory: written to, and there as long as this is used.
        megabytes: size of the model.
    """

    VCPU: ClassVar[float] = 2
    MEMORY_GB: ClassVar[float] = 4

    def __init__(self, directory: Path, megabytes: int) -> None:
        wheel, server, weights = directory / WHEEL, directory / "server.py", directory / "weights.pt"
        _write_wheel(wheel)
        server.write_text(SERVER)
        # Not here: this process has no use for torch.
        program = f"import benched_policy; benched_policy.save({str(weights)!r}, {megabytes})"
        command = [sys.executable, "-c", program]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(wheel)}, stdin=subprocess.DEVNULL)
        self.memory = round(megabytes * 1e6 + 400e6)
        """Bytes that a sandbox may take: the weights, which the model maps and does not copy, torch, gVisor."""
        self._options: dict[str, Any] = {
            "engine": "gvisor",
            "vcpu": self.VCPU,
            # A large model gets what it needs; the price stays that of the usual size.
            "memory_gb": max(self.MEMORY_GB, 1 + megabytes / 1000),
            "disk_gb": 1 + megabytes / 1000,
            "upload": {str(path): path.name for path in (wheel, server, weights)},
            "setup": SETUP,
            "setup_timeout": PATIENCE,
            "progress": False,
        }

    def with_server(self) -> Base:
        """A base with everything."""
        return Base(**self._options, start=START, ready=READY)

    def without_server(self) -> Base:
        """A base with the package, the weights and the server's file."""
        return Base(**self._options)


def _write_wheel(path: Path) -> None:
    information = f"{path.name.removesuffix('-py3-none-any.whl')}.dist-info"
    files = {
        "benched_policy.py": PACKAGE,
        f"{information}/METADATA": "Metadata-Version: 2.1\nName: benched-policy\nVersion: 1.0\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: prized_gym\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{information}/RECORD"
    files[record] = "".join(f"{name},,\n" for name in (*files, record))
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


# The ways


@dataclass(frozen=True)
class Batch:
    """One batch of rollouts.

    Attributes:
        seconds: from the fork, or the creates, to the last reward.
        rewards: by seed.
        sandbox_seconds: of all its sandboxes together, each from the call that made it to its end.
    """

    seconds: float
    rewards: dict[int, float]
    sandbox_seconds: float


class Way(ABC):
    """A way to give each rollout a sandbox of its own. A context manager; leaving it ends what it keeps.

    Attributes:
        setup_seconds: of a base; 0.0 if there is none.
        base_runs: whether its base runs, and is paid for, while batches are played.
    """

    setup_seconds: float = 0.0
    base_runs: ClassVar[bool] = False

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    @abstractmethod
    def batch(self, seeds: Sequence[int]) -> Batch:
        """Play one episode for each seed, all at once."""

    def __enter__(self) -> Way:
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027
        """End what it keeps."""


class Fork(Way):
    """Forks of a base."""

    base: Base

    def __enter__(self) -> Fork:
        started = time.perf_counter()
        self.base = self._build()
        self.setup_seconds = time.perf_counter() - started
        return self

    def __exit__(self, *_: object) -> None:
        self.base.close()

    def _build(self) -> Base:
        return self._recipe.with_server()

    def _played(self) -> dict[str, Any]:
        """How ``rollouts`` plays an episode."""
        return {"request": REQUEST}

    def batch(self, seeds: Sequence[int]) -> Batch:
        rewards, passed, started = {}, [], time.perf_counter()
        runs = rollouts(self.base, seeds, len(seeds), timeout=PATIENCE, progress=False, **self._played())
        for one in runs:
            # A copy ends as its reward comes.
            passed.append(time.perf_counter() - started)
            rewards[one.seed] = _reward(one)
        return Batch(max(passed), rewards, sum(passed))


class RunningBase(Fork):
    """Forks of a base that runs."""

    base_runs: ClassVar[bool] = True


class PausedBase(Fork):
    """Forks of a base that is paused."""

    def _build(self) -> Base:
        return _paused(self._recipe.with_server())


class PackagesOnly(Fork):
    """Forks of a paused base without a server, which is started in each."""

    def _build(self) -> Base:
        return _paused(self._recipe.without_server())

    def _played(self) -> dict[str, Any]:
        return {"episode": _start_and_play}


class FromScratch(Way):
    """Sandboxes set up one by one, all of a batch at once."""

    def batch(self, seeds: Sequence[int]) -> Batch:
        arrived: queue.SimpleQueue[tuple[int, float, float] | BaseException] = queue.SimpleQueue()
        ended: queue.SimpleQueue[float] = queue.SimpleQueue()
        over = threading.Event()

        def play(seed: int) -> None:
            created = time.perf_counter()
            try:
                with self._recipe.with_server() as base:
                    if over.is_set():
                        return
                    answer = base.http(REQUEST.format(seed=seed), timeout=PATIENCE).check().json()
                    arrived.put((seed, float(answer["reward"]), time.perf_counter()))
                ended.put(time.perf_counter() - created)
            except BaseException as error:
                arrived.put(error)

        # Daemons, so that nothing waits for set-ups after an interrupt: what they have made ends with this process, and
        # earlier if that goes on.
        threads = [threading.Thread(target=play, args=(seed,), daemon=True) for seed in seeds]
        rewards, last, started = {}, 0.0, time.perf_counter()
        try:
            for thread in threads:
                thread.start()
            for _ in threads:
                got = arrived.get()
                if isinstance(got, BaseException):
                    raise got
                seed, reward, when = got
                rewards[seed], last = reward, max(last, when)
        finally:
            over.set()
        for thread in threads:
            thread.join()
        return Batch(last - started, rewards, sum(ended.get() for _ in threads))


KINDS: dict[str, type[Way]] = {"a": RunningBase, "b": PausedBase, "c": PackagesOnly, "d": FromScratch}


def _paused(base: Base) -> Base:
    try:
        base.pause()
    except BaseException:
        base.close()
        raise
    return base


def _start_and_play(copy: Copy, seed: int) -> float:
    copy.exec(f"{START} >server.log 2>&1", background=True)
    ends = time.monotonic() + PATIENCE
    while True:
        try:
            copy.http("/health").check()
            break
        except SandboxError:
            if time.monotonic() > ends or not copy.alive:
                raise
            time.sleep(0.05)
    return float(copy.http(REQUEST.format(seed=seed), timeout=PATIENCE).check().json()["reward"])


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


def _reward(one: Any) -> float:
    if one.failure is not None:
        raise RuntimeError(f"the rollout of seed {one.seed} failed: {one.failure}")
    return float(one.reward)


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
