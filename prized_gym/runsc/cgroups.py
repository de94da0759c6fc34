"""Memory, CPU and process limits by cgroup, version 1 or 2, and what was used, as far as this machine lets us."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CONTROLLERS = ("memory", "cpu", "pids")
_COUNTERS = ("cpuacct",)  # limit nothing; a part of cpu in version 2


def _mounts() -> tuple[dict[str, Path], Path | None]:
    """Find where each version 1 controller is mounted, and where version 2 is."""
    first: dict[str, Path] = {}
    second: Path | None = None
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split(" ")
        if kind == "cgroup":
            for option in options.split(","):
                if option in CONTROLLERS or option in _COUNTERS:
                    first.setdefault(option, Path(where))
        elif kind == "cgroup2" and second is None:
            second = Path(where)
    return first, second


def _own() -> dict[str, str]:
    """Read this process's own cgroup per version 1 controller; version 2 under the empty name."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path
    return own


def parents() -> dict[str, Path]:
    """Find the writable cgroup of each controller in which groups can be made; a controller left out cannot be used."""
    try:
        first, second = _mounts()
        own = _own()
    except OSError:
        return {}
    found: dict[str, Path] = {}
    for controller, where in first.items():
        # Below the own group, so that limits set on this process go on holding. In a container the mount may show the
        # own group as its root.
        for parent in (where / own.get(controller, "/").lstrip("/"), where):
            if parent.is_dir() and os.access(parent, os.W_OK):
                found[controller] = parent
                break
    if second is not None:
        for parent in (second / own.get("", "/").lstrip("/"), second):
            # A group that holds processes cannot pass controllers on, except the root.
            try:
                enabled = (parent / "cgroup.subtree_control").read_text().split()
            except OSError:
                continue
            if os.access(parent, os.W_OK):
                for controller in CONTROLLERS:
                    if controller in enabled:
                        found.setdefault(controller, parent)
    return found


@dataclass
class Group:
    """The cgroups of one sandbox.

    Attributes:
        paths: the directory of each, by controller.
        out_of_memory: an eventfd that becomes readable where memory has run out, with version 1 only.
    """

    paths: dict[str, Path] = field(default_factory=dict)
    out_of_memory: int | None = None
    _keep: list[int] = field(default_factory=list)

    @property
    def joins(self) -> list[Path]:
        """The files to which a process writes its pid to enter the group."""
        return [path / "cgroup.procs" for path in dict.fromkeys(self.paths.values())]

    def limit_cpus(self, cpus: float) -> None:
        """Set the limit in CPUs, separately from :func:`make` because a restore would be slowed down by it."""
        path = self.paths.get("cpu")
        if path is None:
            return
        quota = max(1000, int(cpus * 100_000))
        for file, value in (("cpu.max", f"{quota} 100000"), ("cpu.cfs_quota_us", str(quota))):  # version 2, version 1
            try:
                if (path / file).exists():
                    (path / file).write_text(value)
            except OSError:
                continue

    def killed(self) -> bool:
        """Return whether the kernel killed something in the group for lack of memory."""
        path = self.paths.get("memory")
        if path is None:
            return False
        for name in ("memory.events", "memory.oom_control"):
            try:
                for line in (path / name).read_text().splitlines():
                    key, _, value = line.partition(" ")
                    if key == "oom_kill" and int(value) > 0:
                        return True
            except (OSError, ValueError):
                continue
        return False

    def remove(self) -> bool:
        """Remove the group; return False while processes of it are still ending."""
        for fd in [*self._keep, *([] if self.out_of_memory is None else [self.out_of_memory])]:
            os.close(fd)
        self._keep, self.out_of_memory = [], None
        done = True
        for path in dict.fromkeys(self.paths.values()):
            try:
                path.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                done = False
        return done


def make(name: str, where: dict[str, Path], *, memory: int, processes: int) -> Group:
    """Make a group with limits, but for CPUs, which :meth:`Group.limit_cpus` limits later.

    Args:
        name: of the directory, in each parent.
        where: what :func:`parents` gave.
        memory: bytes.
        processes: host threads.
    """
    group = Group()
    for controller, parent in where.items():
        path = parent / name
        try:
            path.mkdir(exist_ok=True)
        except OSError:
            continue
        group.paths[controller] = path
        second = (path / "cgroup.controllers").exists()
        settings = {
            ("memory", True): {"memory.max": str(memory), "memory.swap.max": "0", "memory.oom.group": "1"},
            ("memory", False): {"memory.limit_in_bytes": str(memory), "memory.memsw.limit_in_bytes": str(memory)},
            ("cpu", True): {},
            ("cpu", False): {},
            ("pids", True): {"pids.max": str(processes)},
            ("pids", False): {"pids.max": str(processes)},
        }.get((controller, second), {})
        for file, value in settings.items():
            try:
                (path / file).write_text(value)
            except OSError:
                continue
        if controller == "memory" and not second:
            _watch(group, path)
    return group


def used(paths: Mapping[str, Path]) -> tuple[float | None, float | None]:
    """Read what the processes in a group use.

    Args:
        paths: the directories of the group, by controller.

    Returns:
        CPU time in seconds and memory in bytes; None for what the group does not count.
    """
    seconds = memory = None
    for controller, file, scale in (("cpuacct", "cpuacct.usage", 1e-9), ("cpu", "cpu.stat", 1e-6)):
        try:
            first = (paths[controller] / file).read_text().split("\n", 1)[0]
        except (KeyError, OSError):
            continue
        words = first.split()
        if words and words[0] in ("usage_usec", words[-1]):  # in version 1, cpu.stat holds other things
            seconds = int(words[-1]) * scale
            break
    try:
        lines = (paths["memory"] / "memory.stat").read_text().splitlines()
        counts = {name: int(count) for name, _, count in (line.partition(" ") for line in lines)}
        # The guest's memory is shared memory to the host; what else is cached are files, such as the checkpoint's image.
        memory = float(
            counts.get("total_rss", counts.get("anon", 0)) + counts.get("total_shmem", counts.get("shmem", 0))
        )
    except (KeyError, OSError, ValueError):
        pass
    return seconds, memory


def note(directory: Path, where: dict[str, Path]) -> None:
    """Record in a runtime's directory where its groups are, since another process may have other parents.

    Args:
        directory: of the runtime.
        where: what :func:`parents` gave.
    """
    (directory / "cgroups").write_text("".join(f"{parent}\n" for parent in set(where.values())))


def remove_all(directory: Path) -> bool:
    """Remove the groups of a runtime whose processes are gone; return False while some are still ending."""
    try:
        noted = (directory / "cgroups").read_text().splitlines()
    except OSError:
        return True
    done = True
    for parent in noted:
        for path in Path(parent).glob(f"prized-gym-{directory.name}-*"):
            try:
                path.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                done = False
    return done


def _watch(group: Group, path: Path) -> None:
    """Have the kernel signal when version 1 runs out of memory: it kills one process only, and half a sandbox is none."""
    try:
        control = os.open(path / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        group._keep.append(control)
        group.out_of_memory = event
        (path / "cgroup.event_control").write_text(f"{event} {control}")
    except OSError:
        return
