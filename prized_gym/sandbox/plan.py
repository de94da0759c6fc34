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
from prized_gym.sandbox.driver import Capabilities, Shape
from prized_gym.sandbox.sweeping import OWNER_LABEL, owner

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

RUN_LABEL = "prized_gym.run"

SERVER_LABEL = "prized_gym.server"
"""Tells whoever connects to a kept base what server is in it."""

SITE = "site"
"""Below the scratch directory: what was brought along for an image with a bare Python."""


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
        bare: the sandbox has a Python of its own, into which what our server needs is brought.
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
    bare: bool

    @property
    def has_server(self) -> bool:
        """Whether a server runs in the sandbox."""
        return self.start is not None or self.payload is not None


def make_plan(recipe: Recipe, options: Mapping[str, Any], capabilities: Capabilities, connecting: bool = False) -> Plan:
    """Make the plan that a recipe and options describe.

    Args:
        recipe: of the environments; without sources for a server of the user's own, or for none.
        options: as :data:`OPTIONS`, all of them.
        capabilities: of the provider.
        connecting: the base exists already, with its server.

    Raises:
        TypeError, ValueError: the options make no sense.
        SetupError: the recipe cannot be pickled.
    """
    start, protocol, ready = (options[name] for name in ("start", "protocol", "ready"))
    _check_server(recipe, start, protocol, ready, connecting)
    request, port = _ready(ready, options["port"])
    channel = _channel(options["channel"], capabilities.reachable)
    networks = _networks(options, capabilities)
    payload = b""
    if recipe.sources:
        from prized_gym.server import write_payload

        protocol = GymProtocol(copy=False)  # a fleet copies observations into its buffers
        payload = write_payload(None, recipe)
    return Plan(
        setup=_commands(options["setup"]),
        upload={os.fspath(local): str(remote) for local, remote in (options["upload"] or {}).items()},
        start=start,
        payload=payload or None,
        port=port,
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
                RUN_LABEL: RUN,
                OWNER_LABEL: owner(),
                SERVER_LABEL: _server_label(recipe, start, port, channel),
            },
            network=networks[0],
            port=port,
            payload=payload,
        ),
        copy_network=networks[1],
        channel=channel,
        request_timeout=_positive("request_timeout", options["request_timeout"]) or REQUEST_TIMEOUT,
        bare=capabilities.python == "bare",
    )


def _check_server(recipe: Recipe, start: Any, protocol: Any, ready: Any, connecting: bool) -> None:
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


def _channel(asked: Any, reachable: bool) -> Literal["http", "exec"]:
    channel: Any = asked or ("http" if reachable else "exec")
    if channel not in ("http", "exec"):
        raise ValueError(f"channel must be 'http' or 'exec', got {channel!r}")
    if channel == "http" and not reachable:
        raise ValueError("channel='http', but this engine's sandboxes cannot be reached: use channel='exec'")
    return channel  # type: ignore[no-any-return]


def _networks(options: Mapping[str, Any], capabilities: Capabilities) -> tuple[str, str]:
    """The network of the base and that of its copies."""
    for name in ("network", "copy_network"):
        if options[name] not in ("none", "outbound"):
            raise ValueError(f"{name} must be 'none' or 'outbound', got {options[name]!r}")
    base, copies = str(options["network"]), str(options["copy_network"])
    if base != copies and not capabilities.forks:
        raise ValueError(
            f"network={base!r} and copy_network={copies!r}, but this engine's copies are set up as the base is, with the "
            "network that set-up needs: pass the same for both"
        )
    return base, copies


def start_command(plan: Plan, scratch: str) -> str:
    """Write the shell command that runs the server to its end, its output in a file and its exit code in another."""
    start = plan.start
    if start is None:
        payload, failure = shlex.quote(f"{scratch}/payload"), shlex.quote(f"{scratch}/failure")
        site = shlex.quote(f"{scratch}/{SITE}")
        python = f"env PYTHONPATH={site}${{PYTHONPATH:+:$PYTHONPATH}} python3" if plan.bare else "python"
        start = f"exec {python} -m prized_gym.server --pickle {payload} --port {plan.port} --failure {failure}"
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
    """Find the options that follow from the labels of a kept base, where the caller gave none."""
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


def _ready(ready: Any, port: Any) -> tuple[Request | None, int]:
    """The request that a ready URL stands for, and the server's port."""
    if ready is None:
        return None, DEFAULT_PORT if port is None else int(port)
    parts = urlsplit(ready)
    if parts.scheme != "http" or parts.hostname not in ("127.0.0.1", "localhost"):
        raise ValueError(f"ready must be a URL of the server inside, such as http://127.0.0.1:8000/, got {ready!r}")
    found = parts.port or 80
    if port not in (None, found):
        raise ValueError(f"port={port}, but ready={ready!r} names port {found}")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Request("GET", path), found


def _positive(name: str, value: Any) -> float | None:
    if value is not None and not value > 0:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return None if value is None else float(value)
