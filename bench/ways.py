"""A costly environment, and the ways to give each rollout a sandbox of its own with it."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from prized_gym import Copy
from prized_gym.base import Base
from prized_gym.errors import SandboxError
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
        write_wheel(wheel)
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


def write_wheel(path: Path) -> None:
    """Write the package of the environment as a wheel."""
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
            rewards[one.seed] = reward_of(one)
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


def reward_of(one: Any) -> float:
    """The reward of a rollout.

    Raises:
        RuntimeError: it failed.
    """
    if one.failure is not None:
        raise RuntimeError(f"the rollout of seed {one.seed} failed: {one.failure}")
    return float(one.reward)
