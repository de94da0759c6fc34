"""What a fork carries over, what it must not, and what is refused."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import prized_gym
from prized_gym import EngineUnavailableError, ForkedVectorEnv, ForkUnsafeError
from tools.libraries import need_here
from zoo.envs import Loaded
from zoo.generators import ManyGenerators

pytestmark = pytest.mark.timeout(180)


def test_eight_forks_share_what_the_base_loaded_and_diverge(tmp_path: Path) -> None:
    log = tmp_path / "log"
    envs = ForkedVectorEnv(lambda: Loaded(str(log), size=100_000), num_envs=8, fork_on="start")
    envs.reset(seed=0)
    assert log.read_text() == "built\n"
    assert len(set(envs.get_attr("secret"))) == 1
    assert len(set(envs.call("pid"))) == 8
    for _ in range(3):
        envs.step([0, 1] * 4)
    assert envs.get_attr("value") == (0, 3) * 4
    assert [table[0] for table in envs.get_attr("table")] == [0, 3] * 4
    envs.close()
    assert log.read_text() == "built\n"


def test_memory_is_shared_copy_on_write() -> None:
    size = 25_000_000

    class Big(Loaded):
        def memory(self) -> int:
            fields = dict(
                line.split(":", 1)
                for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
                if ":" in line
            )
            return int(fields["Private_Dirty"].split()[0]) * 1024

        def total(self) -> float:
            return float(self.table.sum())

    envs = ForkedVectorEnv(lambda: Big(size=size), num_envs=4)
    envs.reset(seed=0)
    assert envs.call("total") == (size * (size - 1) / 2,) * 4
    assert all(private < size for private in envs.call("memory"))
    envs.close()


@pytest.mark.parametrize("fork_on", ["reset", "episode", "start"])
def test_what_a_reset_keeps(fork_on: Any, engine: str) -> None:
    envs = ForkedVectorEnv(Loaded, num_envs=2, fork_on=fork_on, engine=engine)
    envs.reset(seed=0)
    envs.set_attr("size_set", [1, 2])
    envs.step([1, 1])
    envs.call("add", 10)
    envs.reset(seed=1)
    kept = fork_on == "start"
    assert envs.get_attr("value") == ((11, 11) if kept else (0, 0))
    # What set_attr set is replayed in new forks.
    assert envs.get_attr("size_set") == (1, 2)
    envs.step([1, 0])
    envs.reset(options={"reset_mask": np.array([True, False])})
    assert envs.get_attr("value") == ((12, 11) if kept else (0, 0))
    assert envs.get_attr("size_set") == (1, 2)
    envs.close()


def test_forking_is_lazy(tmp_path: Path) -> None:
    forks = tmp_path / "forks"

    def on_fork(env: Any, index: int, seed: int) -> None:
        with open(forks, "a") as file:
            file.write(f"{index}\n")

    envs = ForkedVectorEnv(Loaded, num_envs=3, on_fork=on_fork)
    assert not forks.exists()
    envs.set_attr("x", 5)
    assert not forks.exists()
    assert envs.get_attr("x") == (5, 5, 5)
    envs.get_attr("render_mode")
    envs.reset(seed=3)
    assert sorted(forks.read_text().split()) == ["0", "1", "2"]
    assert envs.get_attr("np_random_seed") == (3, 4, 5)
    envs.reset(seed=3)
    assert len(forks.read_text().split()) == 6
    envs.close()


@pytest.mark.parametrize("fork_on", ["reset", "start", "episode"])
def test_reset_in_the_base(fork_on: Any, tmp_path: Path) -> None:
    log = tmp_path / "resets"

    class Slow(ManyGenerators):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            with open(log, "a") as file:
                file.write(f"{seed}\n")
            self.position = 0
            observation, _ = super().reset(seed=seed)
            return observation, {"where": "base"}

        def step(self, action: Any) -> Any:
            self.position += 1
            return np.array(self.draws()), 0.0, self.position == 3, False, {}

    envs = ForkedVectorEnv(Slow, num_envs=3, reset_in="base", fork_on=fork_on, reset_seed=9)
    first, infos = envs.reset(seed=0)
    assert (first == first[0]).all() and list(infos["where"]) == ["base"] * 3
    again, _ = envs.reset(seed=5)
    assert again.tobytes() == first.tobytes()
    assert log.read_text() == "9\n"
    draws = envs.step([0, 0, 0])[0]
    assert len(np.unique(draws)) == draws.size
    assert envs.get_attr("position") == (1, 1, 1)
    with pytest.raises(ValueError, match="reset_in='base'"):
        envs.reset(options={"level": 3})
    masked, _ = envs.reset(options={"reset_mask": np.array([True, False, False])})
    assert masked[0].tobytes() == first[0].tobytes() and masked[1].tobytes() == draws[1].tobytes()
    if fork_on == "episode":
        for _ in range(3):
            observations, *_ = envs.step([0, 0, 0])
        assert log.read_text() == "9\n"
    envs.close()


def test_torch_in_the_base_then_in_eight_copies() -> None:
    need_here("torch", "torch")

    class Torch(Loaded):
        def __init__(self) -> None:
            import torch

            super().__init__()
            # As a careless user would: many threads, and a warm-up that starts them.
            torch.set_num_threads(4)
            self.net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 2))
            self.forward_and_backward()

        def forward_and_backward(self) -> float:
            import torch

            generator = torch.Generator().manual_seed(0)
            out = self.net(torch.rand(512, 256, generator=generator)).pow(2).sum()
            out.backward()
            return float(out.detach())

    envs = ForkedVectorEnv(Torch, num_envs=8, step_timeout=30, reset_timeout=30)
    envs.reset(seed=0)
    results = envs.call("forward_and_backward")
    assert len(set(results)) == 1
    envs.close()


def test_a_live_thread_is_refused() -> None:
    class Threaded(Loaded):
        def __init__(self) -> None:
            super().__init__()
            threading.Thread(target=time.sleep, args=(1000,), name="feeder", daemon=True).start()

    envs = ForkedVectorEnv(Threaded, num_envs=2)
    with pytest.raises(ForkUnsafeError, match=r"'feeder'(.|\n)*on_fork(.|\n)*gvisor(.|\n)*allow_threads=True"):
        envs.reset()
    envs.close()
    allowed = ForkedVectorEnv(Threaded, num_envs=2, allow_threads=True)
    allowed.reset()
    allowed.step([0, 0])
    allowed.close()


def test_a_native_thread_is_refused() -> None:
    class Native(Loaded):
        def __init__(self) -> None:
            import ctypes

            super().__init__()
            libc = ctypes.CDLL(None)
            thread = ctypes.c_ulong()
            libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.pause, ctypes.c_void_p), None)
            libc.pthread_setname_np(thread, b"grpc_worker")
            while len(os.listdir("/proc/self/task")) < 2:
                time.sleep(0.01)

    envs = ForkedVectorEnv(Native, num_envs=1)
    with pytest.raises(ForkUnsafeError, match=r"native thread \d+ named 'grpc_worker'"):
        envs.reset()
    envs.close()


def test_a_tqdm_bar_in_the_base_is_no_obstacle() -> None:
    class Bar(Loaded):
        def __init__(self) -> None:
            import io

            from tqdm import tqdm

            super().__init__()
            list(tqdm(range(3), file=io.StringIO()))
            assert threading.active_count() > 1

    envs = ForkedVectorEnv(Bar, num_envs=2)
    envs.reset()
    envs.close()


def test_cuda_in_the_base_is_refused() -> None:
    need_here("torch", "torch")

    class Cuda(Loaded):
        def __init__(self) -> None:
            import torch

            super().__init__()
            # There is no GPU to initialise here; this is what torch answers where there is one.
            torch.cuda.is_initialized = lambda: True

    envs = ForkedVectorEnv(Cuda, num_envs=1)
    with pytest.raises(ForkUnsafeError, match=r"CUDA(.|\n)*on_fork"):
        envs.reset()
    envs.close()


def test_blas_has_one_thread() -> None:
    class Env(Loaded):
        def variables(self) -> list[str | None]:
            return [os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")]

        def multiply(self) -> float:
            a = np.ones((500, 500))
            return float((a @ a).sum())

    envs = ForkedVectorEnv(Env, num_envs=2, warm_up=lambda env: env.unwrapped.multiply())
    assert envs.call("variables") == (["1", "1", "1"],) * 2
    assert envs.call("multiply") == (500.0**3,) * 2
    envs.close()


def test_open_files_have_their_own_offset(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("0123456789")

    class Reader(Loaded):
        def __init__(self) -> None:
            super().__init__()
            self.file = open(path, "rb", buffering=0)
            self.file.read(2)
            self.log = open(tmp_path / "log", "ab", buffering=0)  # type: ignore[assignment]

        def read(self, count: int) -> bytes:
            self.log.write(b"x")  # type: ignore[union-attr]
            return self.file.read(count)

    envs = ForkedVectorEnv(Reader, num_envs=3, fork_on="start")
    envs.reset()
    assert envs.call("read", 3) == (b"234",) * 3
    assert envs.call("read", 3) == (b"567",) * 3
    assert (tmp_path / "log").read_bytes() == b"x" * 6
    envs.close()


def test_files_without_a_name_have_their_own_offset_too(tmp_path: Path) -> None:
    """A temporary file never had one; others were deleted since, or opened with flags that no second opening takes."""

    class Reader(Loaded):
        def __init__(self) -> None:
            super().__init__()
            self.files = [
                tempfile.TemporaryFile(buffering=0),
                tempfile.TemporaryFile(buffering=0, dir="/dev/shm" if os.path.isdir("/dev/shm") else None),
                tempfile.NamedTemporaryFile(buffering=0),
                open(tmp_path / "deleted", "w+b", buffering=0),
                open(
                    os.open(tmp_path / "kept", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW), "w+b", buffering=0
                ),
                tempfile.TemporaryFile(),
                tempfile.TemporaryFile("w+"),
            ]
            (tmp_path / "deleted").unlink()
            for file in self.files[:5]:
                file.write(b"0123456789")
                file.seek(2)
            self.files[5].write(b"0123456789" * 10000)
            self.files[6].write("0123456789" * 10000)
            for file in self.files[5:]:
                file.seek(2)

        def read(self, count: int) -> str:
            parts = [file.read(count) for file in self.files]
            return "".join(part if isinstance(part, str) else part.decode() for part in parts)

    envs = ForkedVectorEnv(Reader, num_envs=3)
    envs.reset()
    assert envs.call("read", 3) == ("234" * 7,) * 3
    assert envs.call("read", 3) == ("567" * 7,) * 3
    envs.branch(0, [1])
    assert envs.call("read", 2) == ("89" * 5 + "89" * 2,) * 3
    envs.reset()
    assert envs.call("read", 3) == ("234" * 7,) * 3
    envs.close()


def test_files_that_cannot_be_opened_again_are_named(tmp_path: Path) -> None:
    text = """
        import ctypes, os, sys
        from prized_gym.engines.local import forking
        fd = os.open("mine", os.O_RDWR | os.O_CREAT)
        os.chmod("mine", 0)
        if os.geteuid() == 0:
            os.seteuid(65534)
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # may look at its own descriptors all the same
        warned = set()
        for _ in range(2):
            forking.warn_of_shared_offsets(forking.regular_files(()), warned)
    """
    command = [sys.executable, "-c", textwrap.dedent(text)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert f"- {tmp_path / 'mine'} (descriptor 3): Permission denied" in result.stderr
    assert "share one position" in result.stderr and result.stderr.count("mine") == 1


def test_descriptors_of_the_user_survive_and_ours_do_not_leak() -> None:
    class Piped(Loaded):
        def __init__(self) -> None:
            super().__init__()
            self.read_end, self.write_end = os.pipe()

        def use(self) -> bytes:
            os.write(self.write_end, b"y")
            return os.read(self.read_end, 1)

        def descriptors(self) -> list[str]:
            return [
                os.readlink(f"/proc/self/fd/{fd}")
                for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}")
            ]

    envs = ForkedVectorEnv(Piped, num_envs=5)
    envs.reset()
    assert envs.call("use") == (b"y",) * 5
    for listed in envs.call("descriptors"):
        # Its own socket and nobody else's.
        assert len([name for name in listed if name.startswith("socket:")]) == 1
    envs.close()


@pytest.mark.parametrize("overlay", [True, False])
def test_workdir(
    overlay: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not overlay:
        monkeypatch.setenv("PRIZED_GYM_NO_OVERLAY", "1")
    elif os.geteuid() != 0:
        pytest.skip("an overlay needs root or user namespaces")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "shared").write_text("base")

    class Writer(Loaded):
        def __init__(self) -> None:
            super().__init__()
            Path("made").write_text("by the base")
            self.log = open("log", "a", buffering=1)  # type: ignore[assignment]

        def write(self, text: str) -> None:
            Path("sub/shared").write_text(text)
            Path("own").write_text(text)
            self.log.write(text + "\n")  # type: ignore[union-attr]

        def look(self) -> tuple[str, list[str], str, str]:
            return (
                Path("sub/shared").read_text(),
                sorted(os.listdir(".")),
                Path("made").read_text(),
                Path("log").read_text(),
            )

        def delete(self) -> None:
            os.unlink("sub/shared")

        def absolute(self) -> str:
            return (tmp_path / "sub" / "shared").read_text()

    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    envs = ForkedVectorEnv(Writer, num_envs=3, workdir=tmp_path, fork_on="start")
    envs.reset()
    envs.call_some_async([0], "write", "zero")
    envs.call_wait()
    envs.call_some_async([1], "delete")
    envs.call_wait()
    seen = []
    for index in (0, 2):
        envs.call_some_async([index], "look")
        seen += envs.call_wait()
    assert seen[0] == ("zero", ["log", "made", "own", "sub"], "by the base", "zero\n")
    assert seen[1] == ("base", ["log", "made", "sub"], "by the base", "")
    assert (tmp_path / "sub" / "shared").read_text() == "base" and (tmp_path / "log").read_text() == ""
    assert not (tmp_path / "own").exists()
    if overlay:
        # The overlay serves absolute paths too; a duplicate cannot.
        assert "own" not in os.listdir(tmp_path)
        envs.call_some_async([0], "absolute")
        assert envs.call_wait() == ("zero",)
    envs.branch(0, [2])
    envs.call_some_async([2], "write", "two")
    envs.call_wait()
    envs.call_some_async([0, 2], "look")
    zero, two = envs.call_wait()
    assert zero[0] == "zero" and zero[3] == "zero\n"
    assert two[0] == "two" and two[3] == "zero\ntwo\n"
    envs.call_some_async([0], "write", "again")
    envs.call_wait()
    envs.call_some_async([0, 2], "look")
    zero, two = envs.call_wait()
    assert zero[0] == "again" and two[0] == "two"
    envs.close()
    assert not os.listdir(scratch)
    with pytest.raises(prized_gym.SetupError, match="not a directory"):
        ForkedVectorEnv(Writer, workdir=tmp_path / "missing")


def test_workdir_leaves_nothing_after_a_kill(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    scratch = tmp_path_factory.mktemp("scratch")
    script = (
        f"import sys, os; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import prized_gym\n"
        "from zoo.envs import Loaded\n"
        f"envs = prized_gym.ForkedVectorEnv(Loaded, num_envs=2, workdir={str(tmp_path)!r})\n"
        "envs.reset()\n"
        "print('ready', flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    for overlay in ("", "1"):
        trainer = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PRIZED_GYM_NO_OVERLAY": overlay, "TMPDIR": str(scratch)},
        )
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        assert os.listdir(scratch)
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
        deadline = time.monotonic() + 20
        while os.listdir(scratch):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_branch_is_a_live_fork_in_mid_episode() -> None:
    envs = ForkedVectorEnv("CartPole-v1", num_envs=4)
    envs.reset(seed=0)
    envs.step([0, 1, 0, 1])
    before = envs.step([1, 0, 1, 0])[0]
    observations = envs.branch(1, [0, 3])
    assert observations[[0, 3]].tobytes() == before[[1, 1]].tobytes()
    assert observations[[1, 2]].tobytes() == before[[1, 2]].tobytes()
    for _ in range(3):
        observations, *_ = envs.step([1, 1, 0, 1])
        assert (observations[0] == observations[1]).all() and (observations[3] == observations[1]).all()
        assert not (observations[2] == observations[1]).all()
    observations, *_ = envs.step([0, 1, 0, 1])
    assert not (observations[0] == observations[1]).all()
    # A branch of a branch, and the source goes.
    envs.branch(3, [1])
    envs.branch(1, [3])
    os.kill(int(envs.core.fleet.where(2).split()[1]), 9)
    with pytest.raises(prized_gym.CopyDiedError, match="copy 2"):
        envs.step([0, 0, 0, 0])
    envs.reset(seed=1)
    envs.close()


def test_branch_and_random_state() -> None:
    envs = ForkedVectorEnv(ManyGenerators, num_envs=4)
    envs.reset(seed=0)
    envs.step([0] * 4)
    envs.branch(0, [1, 2])
    draws = envs.step([0] * 4)[0]
    assert (draws[0] == draws[1]).all() and (draws[0] == draws[2]).all() and not (draws[0] == draws[3]).any()
    envs.branch(0, [1, 2], reseed=True)
    draws = envs.step([0] * 4)[0]
    assert len(np.unique(draws)) == draws.size
    envs.close()


def test_branch_outlives_its_source_and_is_reported_when_it_dies() -> None:
    envs = ForkedVectorEnv(Loaded, num_envs=3, on_failure="truncate")
    envs.reset(seed=0)
    envs.step([1, 0, 0])
    envs.branch(0, [2])
    os.kill(int(envs.core.fleet.where(0).split()[1]), 9)
    lost = 0
    for _ in range(5):
        observations, _, _, truncations, _ = envs.step([0, 0, 1])
        lost += truncations.astype(int)
    assert lost.tolist() == [1, 0, 0]
    assert observations[2, 0] == 6
    os.kill(int(envs.core.fleet.where(2).split()[1]), 9)
    for _ in range(5):
        _, _, _, truncations, _ = envs.step([0, 0, 1])
        lost += truncations.astype(int)
    assert lost.tolist() == [1, 0, 1]
    envs.close()


def test_branch_refuses_nonsense(engine: str) -> None:
    envs = ForkedVectorEnv(Loaded, num_envs=3, engine=engine)
    with pytest.raises(gym.error.ResetNeeded):
        envs.branch(0, [1])
    envs.reset()
    for source, targets in ((0, [0]), (0, [1, 1]), (5, [1]), (0, [-1])):
        with pytest.raises(ValueError):
            envs.branch(source, targets)
    if engine == "inline":
        with pytest.raises(EngineUnavailableError, match="engine='local'"):
            envs.branch(0, [1])
    envs.close()


def test_logging_and_locks_work_in_copies() -> None:
    class Logs(Loaded):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.RLock()
            logging.getLogger("x").warning("built")

        def log_it(self) -> bool:
            with self.lock:
                logging.getLogger("x").warning("in a copy")
            return True

    envs = ForkedVectorEnv(Logs, num_envs=4)
    assert envs.call("log_it") == (True,) * 4
    envs.close()


def test_many_copies() -> None:
    envs = ForkedVectorEnv("CartPole-v1", num_envs=200)
    envs.reset(seed=0)
    for _ in range(10):
        observations, *_ = envs.step(np.zeros(200, np.int64))
    assert len(np.unique(observations[:, 0])) > 190
    envs.close()
