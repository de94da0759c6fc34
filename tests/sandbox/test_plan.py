"""What a user's options come to: checked where they are given, defaults filled in, and the command that runs the server."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from prized_gym.protocols import EpisodeProtocol, GymProtocol
from prized_gym.recipe import Recipe
from prized_gym.sandbox.driver import Capabilities
from prized_gym.sandbox.plan import (
    DEFAULT_PORT,
    OPTIONS,
    REQUEST_TIMEOUT,
    SERVER_LABEL,
    Plan,
    make_plan,
    options_from_labels,
    start_command,
)
from prized_gym.sandbox.sweeping import OWNER_LABEL, is_orphan
from zoo.envs import Loaded

NOTHING = Recipe(())
ENV = Recipe((Loaded,))


def plan(recipe: Recipe = NOTHING, can: Capabilities | None = None, connecting: bool = False, **options: Any) -> Plan:
    return make_plan(recipe, {**OPTIONS, **options}, can or Capabilities(), connecting)


def test_nothing_asked_for_is_a_sandbox_without_a_server() -> None:
    made = plan()
    assert not made.has_server and made.payload is None and made.protocol is None and made.ready is None
    assert (made.setup, dict(made.upload), made.port, made.channel) == ((), {}, DEFAULT_PORT, "http")
    assert made.request_timeout == REQUEST_TIMEOUT and not made.bare and made.copy_network == "none"
    shape = made.shape
    assert (shape.vcpu, shape.memory_gb, shape.disk_gb, shape.max_runtime_min) == (None, None, None, 60.0)
    assert shape.network == "none" and dict(shape.env_vars) == {}
    assert shape.labels[SERVER_LABEL] == f"none {DEFAULT_PORT} http"
    assert not is_orphan(shape.labels[OWNER_LABEL])


def test_an_environment_is_served_by_our_own_server() -> None:
    made = plan(ENV, port=9000)
    assert made.has_server and isinstance(made.protocol, GymProtocol) and made.port == 9000
    assert made.payload is not None and made.shape.payload == made.payload
    assert made.shape.labels[SERVER_LABEL] == "gym 9000 http"


def test_a_server_of_ones_own() -> None:
    protocol = EpisodeProtocol()
    made = plan(start="python app.py", ready="http://127.0.0.1:8123/health?full=1", protocol=protocol)
    assert made.has_server and made.payload is None and made.protocol is protocol and made.port == 8123
    assert made.ready is not None and (made.ready.method, made.ready.path) == ("GET", "/health?full=1")
    assert made.shape.labels[SERVER_LABEL] == "own 8123 http"


@pytest.mark.parametrize(
    ("ready", "path", "port"),
    [
        ("http://127.0.0.1:8000/", "/", 8000),
        ("http://localhost:1", "/", 1),
        ("http://127.0.0.1/a/b", "/a/b", 80),
        ("http://127.0.0.1:8000?x=1", "/?x=1", 8000),
    ],
)
def test_a_ready_url_names_the_port(ready: str, path: str, port: int) -> None:
    made = plan(start="serve", ready=ready)
    assert made.ready is not None and (made.ready.path, made.port) == (path, port)
    assert plan(start="serve", ready=ready, port=port) == made


def test_what_is_given_in_other_types_is_made_plain() -> None:
    made = plan(
        setup=["a", "b"],
        upload={Path("x.py"): Path("y.py")},
        env_vars={"N": 3},
        labels={"run": 7},
        vcpu=2,
        memory_gb=1,
        request_timeout=5,
    )
    assert made.setup == ("a", "b") and dict(made.upload) == {"x.py": "y.py"}
    assert dict(made.shape.env_vars) == {"N": "3"} and made.shape.labels["run"] == "7"
    assert (made.shape.vcpu, made.shape.memory_gb, made.request_timeout) == (2.0, 1.0, 5.0)
    assert plan(setup="one command").setup == ("one command",)


def test_labels_of_the_users_own_do_not_hide_ours() -> None:
    made = plan(labels={SERVER_LABEL: "mine", OWNER_LABEL: "me"})
    assert made.shape.labels[SERVER_LABEL] == f"none {DEFAULT_PORT} http" and made.shape.labels[OWNER_LABEL] != "me"


def test_requests_travel_as_the_provider_lets_them() -> None:
    assert plan(can=Capabilities(reachable=False)).channel == "exec"
    assert plan(channel="exec").channel == "exec"
    with pytest.raises(ValueError, match="cannot be reached: use channel='exec'"):
        plan(can=Capabilities(reachable=False), channel="http")


def test_copies_that_are_set_up_anew_have_the_network_of_the_base() -> None:
    forkless = Capabilities(forks=False)
    assert plan(network="outbound").copy_network == "none"
    made = plan(can=forkless, network="outbound", copy_network="outbound")
    assert (made.shape.network, made.copy_network) == ("outbound", "outbound")
    with pytest.raises(ValueError, match="pass the same for both"):
        plan(can=forkless, network="outbound")


@pytest.mark.parametrize(
    ("recipe", "options", "error", "message"),
    [
        (ENV, {"start": "serve"}, TypeError, "env and start= .*exclude each other"),
        (ENV, {"protocol": GymProtocol()}, TypeError, "exclude each other"),
        (NOTHING, {"start": "serve", "protocol": "gym"}, TypeError, "must be a .*Protocol, got 'gym'"),
        (NOTHING, {"protocol": GymProtocol()}, TypeError, "pass the command that starts it as start="),
        (NOTHING, {"ready": "http://127.0.0.1:8000/"}, TypeError, "pass the command that starts it as start="),
        (Recipe((), warm_up=print), {}, TypeError, "concern an env"),
        (Recipe((), env_kwargs={"a": 1}), {"start": "serve"}, TypeError, "concern an env"),
        (
            NOTHING,
            {"start": "s", "ready": "https://127.0.0.1/"},
            ValueError,
            "must be a URL of the server inside.*'https",
        ),
        (NOTHING, {"start": "s", "ready": "http://example.com/"}, ValueError, "must be a URL of the server inside"),
        (NOTHING, {"start": "s", "ready": "8000"}, ValueError, "must be a URL of the server inside"),
        (NOTHING, {"start": "s", "ready": "http://127.0.0.1:1/", "port": 2}, ValueError, "port=2, but .* names port 1"),
        (NOTHING, {"channel": "ssh"}, ValueError, "channel must be 'http' or 'exec', got 'ssh'"),
        (NOTHING, {"network": "all"}, ValueError, "network must be 'none' or 'outbound', got 'all'"),
        (NOTHING, {"copy_network": None}, ValueError, "copy_network must be 'none' or 'outbound', got None"),
        (NOTHING, {"setup": [1]}, TypeError, r"setup must be a shell command or a list of them, got \[1\]"),
        (NOTHING, {"setup": 5}, TypeError, "setup must be a shell command"),
        (NOTHING, {"vcpu": 0}, ValueError, "vcpu must be positive, got 0"),
        (NOTHING, {"memory_gb": -1}, ValueError, "memory_gb must be positive, got -1"),
        (NOTHING, {"disk_gb": float("nan")}, ValueError, "disk_gb must be positive, got nan"),
        (NOTHING, {"max_runtime_min": 0}, ValueError, "max_runtime_min must be positive"),
        (NOTHING, {"request_timeout": 0}, ValueError, "request_timeout must be positive"),
    ],
)
def test_what_makes_no_sense_is_refused(
    recipe: Recipe, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(recipe, **options)


# A kept base tells the next program what server is in it


def test_the_labels_of_a_kept_base_stand_in_for_what_was_not_given() -> None:
    labels = plan(ENV, port=9000, channel="exec").shape.labels
    found = options_from_labels(labels, OPTIONS)
    assert isinstance(found.pop("protocol"), GymProtocol)
    assert found == {"port": 9000, "channel": "exec"}
    connected = plan(connecting=True, **options_from_labels(labels, OPTIONS))
    assert (connected.port, connected.channel, connected.start) == (9000, "exec", None)


def test_what_was_given_counts_more_than_the_labels() -> None:
    labels = plan(ENV, port=9000, channel="exec").shape.labels
    given = {**OPTIONS, "protocol": EpisodeProtocol(), "ready": "http://127.0.0.1:1/", "channel": "http"}
    assert options_from_labels(labels, given) == {}


def test_labels_that_are_not_ours_say_nothing() -> None:
    for labels in ({}, {SERVER_LABEL: ""}, {SERVER_LABEL: "gymnastics x ssh"}, {"other": "gym 1 http"}):
        assert options_from_labels(labels, OPTIONS) == {}


# The command that runs the server


@pytest.mark.parametrize("directory", ["scratch", "a directory with 'quotes'"])
def test_the_start_command_leaves_output_and_exit_code(tmp_path: Path, directory: str) -> None:
    made = plan(start='echo "it\'s" up; echo down >&2; cat; (exit 7)')
    scratch = tmp_path / directory
    subprocess.run(["sh", "-c", start_command(made, str(scratch))], check=True, input=b"nobody reads this", timeout=60)
    assert (scratch / "server.log").read_text() == "it's up\ndown\n"
    assert (scratch / "exit").read_text() == "7\n"
    assert sorted(path.name for path in scratch.iterdir()) == ["exit", "server.log"]


def test_our_own_server_is_started_with_what_was_brought_along() -> None:
    host, bare = (start_command(plan(ENV, can), "/s") for can in (Capabilities(), Capabilities(python="bare")))
    for command in (host, bare):
        assert f"-m prized_gym.server --pickle /s/payload --port {DEFAULT_PORT} --failure /s/failure" in command
    assert "PYTHONPATH" not in host and "env PYTHONPATH=/s/site${PYTHONPATH:+:$PYTHONPATH} python3 -m" in bare
