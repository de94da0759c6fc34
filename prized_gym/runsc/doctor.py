"""What sandboxes need of this machine: what is there, what is missing, and how to get it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass

from . import cgroups
from .errors import RunscError, RunscUnavailable
from .find import HOW, Runsc
from .store import store_path


@dataclass(frozen=True)
class Check:
    """One thing that sandboxes need, looked at.

    Attributes:
        name: of the thing.
        ok: whether it is there.
        needed: whether no sandbox runs without it; otherwise only the part that ``detail`` names is missing.
        detail: what was found.
        remedy: how to get it, when it is missing.
    """

    name: str
    ok: bool
    needed: bool
    detail: str
    remedy: str = ""


def diagnose(path: str | None = None) -> list[Check]:
    """Check everything the sandboxes need, in the order in which they need it. Never raises; takes a second or two.

    Args:
        path: of the runsc to try; None: ``RUNSC`` in the environment, else ``PATH``.
    """
    checks = [_system(), _unshare()]
    if not all(check.ok for check in checks):
        return checks
    checks += [_namespaces(), _store(), *_runsc(path), *_limits(), _network(path), _fork_safety()]
    return [check for check in checks if check is not None]


def _system() -> Check:
    ok = sys.platform.startswith("linux") and platform.machine() in ("x86_64", "aarch64")
    return Check(
        "system",
        ok,
        True,
        f"{platform.system()} on {platform.machine()}",
        "" if ok else "gVisor needs Linux on x86-64 or arm64.",
    )


def _unshare() -> Check:
    found = shutil.which("unshare")
    return Check("unshare", found is not None, True, found or "not on PATH", "" if found else "Install util-linux.")


def _namespaces() -> Check:
    from .runtime import namespaces_command

    root = os.geteuid() == 0
    try:
        done = subprocess.run(
            [*namespaces_command(), "true"], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError, RunscUnavailable) as error:
        return Check("namespaces", False, True, str(error))
    if done.returncode == 0:
        return Check(
            "namespaces",
            True,
            True,
            "as root" if root else "as this user, by a user namespace; network='outbound' needs root",
        )
    hint = "In a container, allow unshare and mount (--privileged, or a seccomp profile and CAP_SYS_ADMIN)."
    if not root:
        hint = (
            "Run as root, or allow user namespaces (kernel.unprivileged_userns_clone=1, "
            "kernel.apparmor_restrict_unprivileged_userns=0). " + hint
        )
    return Check("namespaces", False, True, done.stderr.strip()[:300], hint)


def _store() -> Check:
    try:
        path = store_path()
        free = shutil.disk_usage(path).free / (1 << 30)
    except (RunscError, OSError) as error:
        return Check("store", False, True, str(error), "Set PRIZED_GYM_STORE to a directory with a short path.")
    return Check(
        "store",
        free > 1,
        True,
        f"{path}, {free:.1f} GiB free for checkpoints",
        "" if free > 1 else "Free some space, or set PRIZED_GYM_STORE.",
    )


def _runsc(path: str | None) -> list[Check]:
    try:
        found = Runsc.find(path)
    except RunscUnavailable as error:
        return [Check("runsc", False, True, error.reason, error.remedy or HOW)]
    except Exception as error:
        return [Check("runsc", False, True, f"{type(error).__name__}: {error}", HOW)]
    return [Check("runsc", True, True, f"{found.path}, {found.version}: runs, checkpoints and restores")]


def _limits() -> list[Check]:
    found = cgroups.parents()
    remedy = "Run as root on a machine (or in a container) whose cgroups are writable."
    instead = {
        "memory": "memory_gb is not enforced: a copy can take the machine's memory",
        "cpu": "vcpu is not enforced: copies share the machine's CPUs",
        "pids": "processes are limited inside each copy only",
    }
    return [
        Check(
            f"{name} limit",
            name in found,
            False,
            f"by cgroup in {found[name]}" if name in found else instead[name],
            "" if name in found else remedy,
        )
        for name in cgroups.CONTROLLERS
    ] + [Check("disk limit", True, False, "disk_gb is the size of a file system in memory")]


def _network(path: str | None) -> Check:
    missing = []
    if os.geteuid() != 0:
        missing.append("root")
    if not os.path.exists("/dev/net/tun"):
        missing.append("/dev/net/tun (modprobe tun; in a container, pass the device)")
    try:
        slirp = Runsc(Runsc.locate(path), "").slirp4netns
    except RunscUnavailable:
        slirp = None
    if slirp is None:
        missing.append("slirp4netns (apt install slirp4netns, or scripts/get_runsc.py, or set SLIRP4NETNS)")
    if missing:
        return Check(
            "outbound network",
            False,
            False,
            "network='outbound' cannot be used; network='none' can",
            "Missing: " + ", ".join(missing) + ".",
        )
    return Check(
        "outbound network",
        True,
        False,
        f"by {slirp}. A guest can reach what this machine serves on its outside addresses, not its loopback",
    )


def _fork_safety() -> Check:
    ok = hasattr(os, "pidfd_open")
    return Check("death watch", ok, False, "by pidfd and by control socket" if ok else "by control socket only")
