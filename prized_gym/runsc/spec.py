"""What a sandbox is made with: checked, written down, read again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from . import bundle
from .errors import RunscError
from .find import Runsc
from .python import PythonPaths, python_paths

Network = Literal["none", "outbound"]


@dataclass(frozen=True)
class Spec:
    """What a sandbox was made with; copies inherit it.

    Attributes:
        vcpu: most CPUs at a time.
        memory, disk: bytes.
        env_vars: for every command.
        network: ``"none"`` or ``"outbound"``.
        max_runtime_min: minutes after which it is ended; None for no limit.
        python: the interpreter and packages inside.
        mounts: more paths shown read-only, from path inside to path here.
    """

    vcpu: float
    memory: int
    disk: int
    env_vars: dict[str, str]
    network: Network
    max_runtime_min: float | None
    python: PythonPaths
    mounts: dict[str, str]

    @classmethod
    def from_arguments(
        cls,
        vcpu: float,
        memory_gb: float,
        disk_gb: float,
        env_vars: Mapping[str, str] | None,
        network: Network,
        max_runtime_min: float | None,
        python: PythonPaths | None,
        mounts: Mapping[str, str] | None,
    ) -> Spec:
        """Check the arguments of :meth:`Sandbox.create <prized_gym.runsc.Sandbox.create>`.

        Raises:
            ValueError: a size, the network or a mount makes no sense.
            OSError: what is to be mounted is not there.
        """
        _check_network(network)
        for value in (vcpu, memory_gb, disk_gb):
            if not value > 0:
                raise ValueError(f"vcpu, memory_gb and disk_gb must be positive, not {value!r}")
        if max_runtime_min is not None and not max_runtime_min > 0:
            raise ValueError("max_runtime_min must be positive, or None")
        binds = {_inside(path): os.path.abspath(host) for path, host in (mounts or {}).items()}
        for host in binds.values():
            os.stat(host)
        return cls(
            vcpu,
            int(memory_gb * (1 << 30)),
            int(disk_gb * (1 << 30)),
            strings(env_vars),
            network,
            max_runtime_min,
            python or python_paths(),
            binds,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Spec:
        """Read what :meth:`to_dict` gave, after JSON."""
        python = values["python"]
        paths = PythonPaths(
            python["executable"],
            python["base"],
            tuple(python["binds"]),
            tuple(python["search"]),
            tuple(python["sites"]),
        )
        return cls(**{**values, "python": paths})

    def to_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        return asdict(self)

    def with_network(self, network: Network | None) -> Spec:
        """Return the same with another network; None: its own.

        Raises:
            ValueError: the network makes no sense.
        """
        if network is None:
            return self
        _check_network(network)
        return replace(self, network=network)

    @property
    def outbound(self) -> bool:
        """Whether it has a network."""
        return self.network == "outbound"

    def check_network(self, runsc: Runsc) -> None:
        """Check that this machine can give it its network.

        Raises:
            RunscError: it cannot; it says what is missing.
        """
        if self.outbound and os.geteuid() != 0:
            raise RunscError("network='outbound' needs root, for /dev/net/tun; network='none' does not")
        if self.outbound and runsc.slirp4netns is None:
            raise RunscError(
                "network='outbound' needs slirp4netns: apt install slirp4netns, or scripts/get_runsc.py, or set SLIRP4NETNS"
            )


def strings(values: Mapping[str, str] | None) -> dict[str, str]:
    """Return a mapping of strings, from what may be None or hold something else."""
    return {str(key): str(value) for key, value in (values or {}).items()}


def _check_network(network: str) -> None:
    if network not in ("none", "outbound"):
        raise ValueError(f"network must be 'none' or 'outbound', not {network!r}")


def _inside(path: str) -> str:
    normal = os.path.normpath(path)
    if (
        not normal.startswith("/")
        or normal in ("/", "/ctl", "/proc", "/sys", "/dev", bundle.AGENT)
        or normal.startswith(("/ctl/", "/proc/", "/sys/", f"{bundle.AGENT}/"))
    ):
        raise ValueError(f"{path!r} is no place to mount something in a sandbox")
    return normal
