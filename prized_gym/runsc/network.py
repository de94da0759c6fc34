"""A network namespace with user-mode NAT for one sandbox: outbound connections, nothing inbound."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

NAMESERVER = "10.0.2.3"  # slirp4netns's own resolver, as a guest sees it


def find_slirp4netns(beside: str | None = None) -> str | None:
    """Find slirp4netns by ``SLIRP4NETNS`` in the environment, on ``PATH``, or in the directory of the runsc ``beside``."""
    given = os.environ.get("SLIRP4NETNS")
    if given:
        return given if os.access(given, os.X_OK) else None
    found = shutil.which("slirp4netns")
    if found is None and beside is not None:
        candidate = Path(beside).resolve().parent / "slirp4netns"
        if os.access(candidate, os.X_OK):
            return str(candidate)
    return found


def hide_sysctls() -> None:
    """Put an empty directory over ``/proc/sys/net``, in this process's own mount namespace.

    runsc refuses a netstack of its own where it can read those settings.
    """
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k,mode=755", "none", "/proc/sys/net"], check=True, capture_output=True
    )


def make_namespace(path: Path) -> None:
    """Make a network namespace that lives as long as its mount at ``path``."""
    path.touch()
    subprocess.run(["unshare", f"--net={path}", "true"], check=True, capture_output=True)


def remove_namespace(path: Path) -> None:
    """Remove what :func:`make_namespace` made."""
    subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)
    path.unlink(missing_ok=True)


def slirp_command(slirp4netns: str, namespace: Path, ready_fd: int) -> list[str]:
    """Build the command that serves a namespace; it writes to ``ready_fd`` once the interface is up."""
    options = ["--configure", "--mtu=65520", "--disable-host-loopback", f"--ready-fd={ready_fd}", "--netns-type=path"]
    return [slirp4netns, *options, str(namespace), "tap0"]
