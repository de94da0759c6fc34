"""What must be right in a base before it is forked, and in a copy straight after."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import re
import stat
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from prized_gym.engines.local.processes import libc
from prized_gym.errors import ForkUnsafeError

_POOL_SIZES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
SINGLE_THREADED = {**dict.fromkeys(_POOL_SIZES, "1"), "TOKENIZERS_PARALLELISM": "false"}
"""The environment of a base process: no pool of threads is started that a copy would wait for in vain, and N copies
do not fight for the cores with N pools."""

_POOL_LIBRARIES = re.compile(r"lib(gomp|iomp5|omp|openblas|scipy_openblas|mkl_|blis)[^/]*$")
# SDL's timer thread sleeps unless a program sets SDL timers; pygame's surfaces and clock do without it.
_SAFE_THREAD_NAMES = ("pt_autograd", "OpenBLAS", "iou-", "SDLTimer")

_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20


def check(allow_threads: bool, what: str = "the base") -> None:
    """Refuse to fork a process that holds what a fork cannot carry over.

    Args:
        allow_threads: do not mind threads.
        what: this process, in words: the base, or a copy that is to be branched.

    Raises:
        ForkUnsafeError: a live thread that is no known-safe pool (unless ``allow_threads``), or CUDA initialised.
    """
    _check_cuda(what)
    _stop_tqdm_monitor()
    if allow_threads:
        return
    unsafe = [*_python_threads(), *_native_threads()]
    if unsafe:
        raise ForkUnsafeError(
            f"{what} has {len(unsafe)} live thread{'s' if len(unsafe) > 1 else ''} that a fork would not copy, so that "
            "a copy could wait for it for ever:\n"
            + "\n".join(unsafe)
            + ("\nStart it in `on_fork` instead, " if what == "the base" else "\nEnd it before branch(), ")
            + 'run the environment in a whole forked sandbox (engine="gvisor"), or pass allow_threads=True if the copies '
            "do not need it."
        )


def settle(look: Callable[[], None]) -> None:
    """Bring a base into the state that is cheap to fork, once, after everything in it is warm.

    Garbage is collected and the rest hidden from the collector, which would otherwise write to every object of every
    copy; the pages are collapsed to huge ones, which makes forking gigabytes a matter of milliseconds.

    Args:
        look: called between the two, while the collector can still tell of every object that is left.
    """
    gc.collect()
    look()
    gc.freeze()
    _collapse_pages()


def single_thread_torch() -> None:
    """Keep torch from waiting, in a copy, for the worker threads of its base: the first thing done in a copy too."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)


def fork() -> int:
    """``os.fork`` without Python's warning about threads, which :func:`check` has looked at more closely."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


_KEPT_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_SYNC | getattr(os, "O_DIRECT", 0)
"""What an open file keeps of the flags it was opened with; others, like ``O_TMPFILE`` or ``O_NOFOLLOW``, say what to open."""


@dataclass
class OpenFile:
    """A regular file the base holds open; perhaps one without a name, such as ``tempfile.TemporaryFile``."""

    fd: int
    flags: int
    close_on_exec: bool
    path: str

    def open_anew(self) -> int:
        """A descriptor of the same file, deleted or not, with an offset of its own.

        Raises:
            OSError: it cannot be opened again.
        """
        return os.open(f"/proc/self/fd/{self.fd}", self.flags & _KEPT_FLAGS | os.O_CLOEXEC)


def regular_files(ours: Iterable[int]) -> list[OpenFile]:
    """The regular files open in this process, apart from the descriptors in ``ours``."""
    skip = set(ours)
    found: list[OpenFile] = []
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for name in names:
        fd = int(name)
        if fd in skip or fd <= 2:
            continue
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.fstat(fd).st_mode):
                path = os.readlink(f"/proc/self/fd/{fd}")
                if path.startswith("/memfd:"):
                    # Memory that is shared on purpose.
                    continue
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                close_on_exec = bool(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)
                found.append(OpenFile(fd, flags, close_on_exec, path))
    return found


def warn_of_shared_offsets(files: Iterable[OpenFile], warned: set[str]) -> None:
    """Name, on stderr, the files that copies cannot open anew: all of them share one offset there.

    Args:
        files: what :func:`regular_files` found.
        warned: the paths that were named before; those named here are added.
    """
    found: list[str] = []
    for file in files:
        # Nothing is read through a descriptor that stands for a path only.
        if file.path in warned or file.flags & getattr(os, "O_PATH", 0):
            continue
        try:
            os.close(file.open_anew())
        except OSError as error:
            warned.add(file.path)
            found.append(f"- {file.path} (descriptor {file.fd}): {error.strerror}")
    if found:
        sys.stderr.write(
            "prized_gym: these files are open in the base and cannot be opened again, so that its copies share one position "
            "in each of them, and one copy's reading moves it for all. Open them in `on_fork`, or read with os.pread:\n"
            + "\n".join(found)
            + "\n"
        )
        sys.stderr.flush()


def reopen(files: Iterable[OpenFile], moved: tuple[str, str] | None = None) -> None:
    """Give this copy an offset of its own in each file; forks share one otherwise.

    Args:
        files: what :func:`regular_files` found before the fork.
        moved: a directory of which this copy has its own view, and where that is: files below the one are opened by
            their path below the other.
    """
    before, after = (path.rstrip("/") + "/" for path in moved) if moved is not None else ("", "")
    for file in files:
        with contextlib.suppress(OSError):
            offset = os.lseek(file.fd, 0, os.SEEK_CUR)
            new = None
            if before and file.path.startswith(before):
                with contextlib.suppress(OSError):
                    new = os.open(after + file.path[len(before) :], file.flags & _KEPT_FLAGS)
            if new is None:
                new = file.open_anew()
            os.lseek(new, offset, os.SEEK_SET)
            os.dup2(new, file.fd, inheritable=not file.close_on_exec)
            os.close(new)


def _check_cuda(what: str) -> None:
    torch: Any = sys.modules.get("torch")
    initialised = False
    with contextlib.suppress(Exception):
        initialised = bool(torch is not None and torch.cuda.is_initialized())
    if not initialised:
        initialised = any(path.startswith("/dev/nvidia") and "ctl" not in path for path in _open_paths())
    if initialised:
        raise ForkUnsafeError(
            f"CUDA is initialised in {what}, and a CUDA context does not survive a fork. "
            + (
                "Keep the model on the CPU while warming up and move it to the GPU in "
                "`on_fork=lambda env, index, seed: ...`, which runs in each copy."
                if what == "the base"
                else "Branch copies of an environment that computes on the CPU."
            )
        )


def _open_paths() -> list[str]:
    paths: list[str] = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                paths.append(os.readlink(f"/proc/self/fd/{name}"))
    return paths


def _stop_tqdm_monitor() -> None:
    """End the thread of tqdm's that watches over progress bars: it does nothing that a copy needs.

    Found among the threads: the class whose bar started it, such as tqdm.auto's, holds it, not tqdm's own.
    """
    for thread in threading.enumerate():
        if thread.name == "tqdm_monitor" and hasattr(thread, "tqdm_cls"):
            with contextlib.suppress(Exception):
                thread.tqdm_cls.monitor_interval = 0
                thread.tqdm_cls.monitor = None
                thread.exit()  # type: ignore[attr-defined]


def _python_threads() -> list[str]:
    return [
        f"- Python thread {thread.name!r}{', daemon' if thread.daemon else ''}{_place(thread)}"
        for thread in threading.enumerate()
        if thread is not threading.current_thread()
    ]


def _place(thread: threading.Thread) -> str:
    """Where a thread is, in two lines."""
    # Not kept in a variable: the frames of all threads include this one, which would then refer to itself.
    frame = sys._current_frames().get(thread.ident or -1)
    if frame is None:
        return ""
    return ", at\n" + "".join(traceback.format_list(traceback.extract_stack(frame)[-2:])).rstrip()


def _native_threads() -> list[str]:
    """Threads that Python does not know of and that are not the idle workers of a BLAS or OpenMP pool."""
    known = {thread.native_id for thread in threading.enumerate()}
    try:
        tasks = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return []
    foreign = [task for task in tasks if task not in known]
    if not foreign:
        return []
    main_name = _task_name(os.getpid())
    has_pool = _has_pool_library()
    found: list[str] = []
    for task in foreign:
        name = _task_name(task)
        # Pool workers carry the name of the thread that started them. They hold no lock while idle, and neither BLAS
        # nor OpenMP is used with more than one thread in a copy.
        if name is None or (name == main_name and has_pool) or name.startswith(_SAFE_THREAD_NAMES):
            continue
        found.append(f"- native thread {task} named {name!r} (started by a library, not by Python)")
    return found


def _task_name(task: int) -> str | None:
    try:
        with open(f"/proc/self/task/{task}/comm") as file:
            return file.read().strip()
    except OSError:
        return None


def _has_pool_library() -> bool:
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        return any(_POOL_LIBRARIES.search(line.rstrip()) for line in maps)
    return False


def _collapse_pages() -> None:
    """Collapse large private anonymous mappings to huge pages. Best effort: older kernels refuse, which is harmless."""
    library = libc()
    if library is None:
        return
    madvise = library.madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in _large_anonymous_mappings():
        first, last = -(-start // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        if last > first:
            madvise(first, last - first, _MADV_COLLAPSE)


def _large_anonymous_mappings() -> list[tuple[int, int]]:
    """Private writable anonymous mappings of 4 MB and more that are at least half resident."""
    found: list[tuple[int, int]] = []
    current: tuple[int, int] | None = None
    try:
        with open("/proc/self/smaps") as smaps:
            for line in smaps:
                if line[0] in "0123456789abcdef":
                    fields = line.split()
                    start, _, end = fields[0].partition("-")
                    name = fields[5] if len(fields) > 5 else ""
                    writable_private = fields[1].startswith("rw") and fields[1].endswith("p")
                    anonymous = fields[4] == "0" and (not name or name == "[heap]" or name.startswith("[anon"))
                    span = (int(start, 16), int(end, 16))
                    current = span if writable_private and anonymous and span[1] - span[0] >= 2 * _HUGE_PAGE else None
                elif current is not None and line.startswith("Rss:"):
                    if int(line.split()[1]) * 1024 * 2 >= current[1] - current[0]:
                        found.append(current)
                    current = None
    except OSError:
        return []
    return found
