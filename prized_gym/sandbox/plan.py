"""What a user asked of a base in a sandbox, checked and with defaults filled in."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from prized_gym.protocols import GymProtocol, Protocol, Request
from prized_gym.recipe import Recipe
from prized_gym.sandbox.driver import Shape

DEFAULT_PORT = 8000
REQUEST_TIMEOUT = 300.0

OPTIONS: dict[str, Any] = {
    "setup": (),
    "upload": None,
    "start": None,
    "ready": None,
    "port": None,
    "protocol": None,
    "env_vars": None,
    "vcpu": None,
    "memory_gb": None,
    "disk_gb": None,
    "max_runtime_min": 60,
    "labels": None,
    "network": "none",
    "copy_network": "none",
    "channel": None,
    "request_timeout": REQUEST_TIMEOUT,
}
"""The options that every sandbox engine has, and their defaults."""

RUN = secrets.token_hex(4)
"""Labels everything that this process makes."""


SERVER_LABEL = "prized_gym.server"
"""Tells whoever connects to a kept base what server is in it."""


@dataclass(frozen=True)
class Plan:
    """How a base is set up.

    Attributes:
        setup: shell commands, run one after another.
        upload: what is copied in before them: local path to path inside.
        start: the command that starts the server; None if there is none.
        payload: for the server of this library, the recipe to write into the sandbox.
        port: where the server listens, on 127.0.0.1.
        ready: what is asked until the server is ready; None for what the protocol says.
        protocol: what the server speaks; None if it is not stepped as an environment.
        shape: of the sandbox.
        copy_network: the network of its copies.
        channel: how requests travel.
        request_timeout: seconds an answer may take unless something else limits it.
    """

    setup: tuple[str, ...]
    upload: Mapping[str, str]
    start: str | None
    payload: bytes | None
    port: int
    ready: Request | None
    protocol: Protocol | None
    shape: Shape
    copy_network: str
    channel: Literal["http", "exec"]
    request_timeout: float

    @property
    def has_server(self) -> bool:
        return self.start is not None or self.payload is not None


def make_plan(recipe: Recipe, options: Mapping[str, Any], reachable: bool, connecting: bool = False) -> Plan:
    """The plan that a recipe and options describe.

    Args:
        reachable: whether a server inside can be reached by HTTP.
        connecting: the base exists already, with its server.

    Raises:
        TypeError, ValueError: the options make no sense.
        SetupError: the recipe cannot be pickled.
    """
    start, protocol, ready, port = (options[name] for name in ("start", "protocol", "ready", "port"))
    if recipe.sources and (start is not None or protocol is not None):
        raise TypeError(
            "env and start= (or protocol=) exclude each other: an env is served by this library's own server; "
            "for a server of your own leave env out and pass protocol="
        )
    if protocol is not None and not isinstance(protocol, Protocol):
        raise TypeError(f"protocol must be a prized_gym.protocols.Protocol, got {protocol!r}")
    if start is None and not connecting and (ready is not None or protocol is not None):
        raise TypeError("ready= and protocol= describe a server: pass the command that starts it as start=")
    if not recipe.sources and (recipe.warm_up is not None or recipe.on_fork is not None or recipe.env_kwargs):
        raise TypeError("warm_up, on_fork and env_kwargs concern an env; a server of your own does these things itself")
    request, found = _ready(ready)
    if port is None:
        port = found or DEFAULT_PORT
    elif found not in (None, port):
        raise ValueError(f"port={port}, but ready={ready!r} names port {found}")
    channel: Any = options["channel"] or ("http" if reachable else "exec")
    if channel not in ("http", "exec"):
        raise ValueError(f"channel must be 'http' or 'exec', got {channel!r}")
    if channel == "http" and not reachable:
        raise ValueError("channel='http', but this engine's sandboxes cannot be reached: use channel='exec'")
    payload = None
    if recipe.sources:
        from prized_gym.server import write_payload

        protocol = GymProtocol(copy=False)  # a fleet copies observations into its buffers
        payload = write_payload(None, recipe)
    return Plan(
        setup=_commands(options["setup"]),
        upload={os.fspath(local): str(remote) for local, remote in (options["upload"] or {}).items()},
        start=start,
        payload=payload,
        port=int(port),
        ready=request,
        protocol=protocol,
        shape=Shape(
            vcpu=_positive("vcpu", options["vcpu"]),
            memory_gb=_positive("memory_gb", options["memory_gb"]),
            disk_gb=_positive("disk_gb", options["disk_gb"]),
            max_runtime_min=_positive("max_runtime_min", options["max_runtime_min"]),
            env_vars={str(name): str(value) for name, value in (options["env_vars"] or {}).items()},
            labels={
                **{str(name): str(value) for name, value in (options["labels"] or {}).items()},
                "prized_gym.run": RUN,
                SERVER_LABEL: _server_label(recipe, start, port, channel),
            },
            network=_network("network", options["network"]),
        ),
        copy_network=_network("copy_network", options["copy_network"]),
        channel=channel,
        request_timeout=_positive("request_timeout", options["request_timeout"]) or REQUEST_TIMEOUT,
    )


def start_command(plan: Plan, scratch: str) -> str:
    """The shell command that runs the server to its end, its output in a file and its exit code in another."""
    start = plan.start
    if start is None:
        payload, failure = shlex.quote(f"{scratch}/payload"), shlex.quote(f"{scratch}/failure")
        start = f"exec python -m prized_gym.server --pickle {payload} --port {plan.port} --failure {failure}"
    directory, command = shlex.quote(scratch), shlex.quote(start)
    return (
        f"mkdir -p {directory} && if command -v bash >/dev/null; then shell=bash; else shell=sh; fi; "
        f'"$shell" -c {command} >{directory}/server.log 2>&1 </dev/null; '
        f"echo $? >{directory}/exit.part; mv {directory}/exit.part {directory}/exit"
    )


def _server_label(recipe: Recipe, start: str | None, port: int, channel: str) -> str:
    kind = "gym" if recipe.sources else "none" if start is None else "own"
    return f"{kind} {port} {channel}"


def options_from_labels(labels: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that follow from the labels of a kept base, where the caller gave none."""
    kind, port, channel = (labels.get(SERVER_LABEL, "").split(" ") + ["", "", ""])[:3]
    found: dict[str, Any] = {}
    if options["protocol"] is None and kind == "gym":
        found["protocol"] = GymProtocol(copy=False)
    if options["port"] is None and options["ready"] is None and port.isdecimal():
        found["port"] = int(port)
    if options["channel"] is None and channel in ("http", "exec"):
        found["channel"] = channel
    return found


def _commands(setup: Any) -> tuple[str, ...]:
    if isinstance(setup, str):
        return (setup,)
    if not isinstance(setup, Sequence) or not all(isinstance(command, str) for command in setup):
        raise TypeError(f"setup must be a shell command or a list of them, got {setup!r}")
    return tuple(setup)


def _ready(ready: Any) -> tuple[Request | None, int | None]:
    """The request that a ready URL stands for, and its port."""
    if ready is None:
        return None, None
    parts = urlsplit(ready)
    if parts.scheme != "http" or parts.hostname not in ("127.0.0.1", "localhost"):
        raise ValueError(f"ready must be a URL of the server inside, such as http://127.0.0.1:8000/, got {ready!r}")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Request("GET", path), parts.port or 80


def _positive(name: str, value: Any) -> float | None:
    if value is not None and not value > 0:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return None if value is None else float(value)


def _network(name: str, value: Any) -> str:
    if value not in ("none", "outbound"):
        raise ValueError(f"{name} must be 'none' or 'outbound', got {value!r}")
    return str(value)
