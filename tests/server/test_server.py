"""The env server, end to end: a real process, real sockets."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import threading
import time

import gymnasium as gym
import numpy as np
import pytest

from prized_gym.protocols import Fresh, GymProtocol, ProtocolError, RemoteError, Request, drive
from prized_gym.server import write_payload
from prized_gym.wire import decode, encode
from tools.server import Client, Server, free_port, server
from zoo.served import Counter, Everything

COUNTER = ("--factory", "zoo.served:make")


@pytest.fixture(scope="module")
def counter():
    with server(*COUNTER, "--render-mode", "rgb_array") as running:
        yield running


def post(path: str, **fields) -> Request:
    return Request("POST", path, {"Content-Type": "application/msgpack"}, encode(fields))


def test_an_id_gives_the_same_episode_as_gymnasium() -> None:
    env = gym.make("CartPole-v1")
    with server("--env", "CartPole-v1") as running:
        client = running.client()
        described = client.protocol.description
        assert described.observation_space == env.observation_space
        assert described.action_space == env.action_space
        assert described.metadata["render_fps"] == env.metadata["render_fps"]
        assert described.spec["id"] == "CartPole-v1"
        assert described.spec["max_episode_steps"] == 500
        for seed in (1, 2**40):
            expected, obs = env.reset(seed=seed)[0], client.ask("reset", seed, None)[0]
            assert obs.dtype == expected.dtype
            over = False
            while not over:
                assert obs.tobytes() == expected.tobytes()
                action = env.action_space.sample()
                expected, reward, terminated, truncated, _ = env.step(action)
                answer = client.ask("step", action)
                assert (answer.reward, answer.terminated, answer.truncated) == (reward, terminated, truncated)
                obs, over = answer.obs, terminated or truncated
    env.close()


def test_health_tells_what_is_served(counter: Server) -> None:
    client = counter.client()
    health = json.loads(client.send(Request("GET", "/health")).body)
    assert health["ready"] is True
    assert health["env"] == "zoo.served:make"
    assert health["pid"] == counter.process.pid
    assert client.ask("ready") is True


def test_reset_step_and_what_is_in_an_info(counter: Server) -> None:
    client = counter.client()
    obs, info = client.ask("reset", 5, {"level": 4})
    assert obs.dtype == np.float32
    assert obs[:2].tolist() == [0, 4]
    assert info["seed"] == 5
    assert info["big"] == 2**100
    assert info["odd"] == "<not sent: set {1, 2}>"
    step = client.ask("step", np.int64(2))
    assert (step.reward, step.terminated, step.truncated, step.reset) == (1.5, False, False, None)
    assert isinstance(step.info["draws"], tuple)
    assert step.info["image"].tolist() == [[2, 2], [2, 2]]
    step.info["image"][0, 0] = 9  # its own memory
    assert client.ask("reset", 2**70, None)[1]["seed"] == 2**70


def test_several_steps_in_one_request_stop_at_the_end(counter: Server) -> None:
    client = counter.client()
    client.ask("reset", 1, None)
    first = client.ask("steps", [1, 2])
    assert [step.obs[:2].tolist() for step in first] == [[1, 1], [2, 2]]
    rest = client.ask("steps", [3, 0, 1], then_reset=True)
    assert len(rest) == 1
    assert rest[0].terminated
    assert rest[0].reset is not None


def test_a_step_that_ends_the_episode_can_reset_at_once(counter: Server) -> None:
    client = counter.client()
    client.ask("reset", 1, None)
    for _ in range(2):
        assert client.ask("step", 3, then_reset=True).reset is None
    step = client.ask("step", 3, then_reset=True)
    assert step.obs[:2].tolist() == [3, 3]  # not what the reset wrote over it
    obs, info = step.reset
    assert obs[:2].tolist() == [0, -1]
    assert info["seed"] is None
    # Nor what the next step wrote over what an earlier one of the same request gave.
    first, second = client.ask("steps", [1, 2])
    assert [first.obs[0], second.obs[0]] == [1, 2]


def test_every_kind_of_space_both_ways() -> None:
    env = Everything()
    with server("--factory", "zoo.served:Everything") as running:
        client = running.client()
        assert client.protocol.description.observation_space == env.observation_space
        obs, _ = client.ask("reset", 3, None)
        expected, _ = env.reset(seed=3)
        assert encode(obs) == encode(expected)
        assert type(obs["graph"]) is type(expected["graph"])
        for _ in range(10):
            action = env.action_space.sample()
            step = client.ask("step", action)
            assert encode(step.obs) == encode(action)
            assert step.info["tuple"] is True


def test_call_reads_attributes_and_calls_methods(counter: Server) -> None:
    client = counter.client()
    assert client.ask("call", "add", (2,), {"b": 5})["sum"] == 7
    assert client.ask("call", "length") == 3
    assert client.ask("call", "action_space") == Counter.action_space
    client.ask("set_attr", {"level": (1, "two"), "unheard": np.arange(3)})
    assert client.ask("call", "add", (2,))["level"] == (1, "two")
    assert client.ask("call", "unheard").tolist() == [0, 1, 2]
    with pytest.raises(RemoteError, match=r"'deep'.*type object cannot be sent"):
        client.ask("call", "opaque")
    with pytest.raises(RemoteError) as caught:
        client.ask("call", "nothing_of_the_kind")
    assert isinstance(caught.value.original(), AttributeError)


def test_render(counter: Server) -> None:
    frame = counter.client().ask("render")
    assert frame.shape == (4, 5, 3)
    assert frame.dtype == np.uint8


def test_a_fresh_copy_gets_its_own_random_state(counter: Server) -> None:
    client = counter.client()

    def draws(seed: int) -> tuple:
        client.ask("reset", 1, None)
        client.ask("reseed", seed)
        return client.ask("step", 0).info["draws"]

    assert draws(5) == draws(5)
    assert all(a != b for a, b in zip(draws(5), draws(6), strict=True))
    client.ask("reset", None, None, fresh=Fresh(5, attributes={"level": 77}))
    assert client.ask("call", "add", (1,))["level"] == 77
    client.ask("start", Fresh(6, copy=3))


# Errors of the environment


def test_an_exception_comes_with_its_type_and_traceback(counter: Server) -> None:
    client = counter.client()
    with pytest.raises(RemoteError) as caught:
        client.ask("call", "fail")
    error = caught.value
    assert (error.type_name, error.message, error.status) == ("ValueError", "the env says no", 500)
    assert "served.py" in error.traceback
    original = error.original()
    assert type(original) is ValueError
    assert original.args == ("the env says no",)
    with pytest.raises(RemoteError) as caught:
        client.ask("call", "fail", ("key",))
    assert repr(caught.value.original()) == "KeyError('missing')"
    with pytest.raises(RemoteError) as caught:
        client.ask("call", "fail", ("own",))
    assert caught.value.original() is caught.value
    assert caught.value.type_name == "zoo.served.OwnError"
    with pytest.raises(RemoteError) as caught:
        client.ask("call", "fail", ("exit",))
    assert caught.value.type_name == "SystemExit"
    with pytest.raises(RemoteError, match="RecursionError"):
        client.ask("call", "recurse")
    assert client.ask("call", "length") == 3  # and the server goes on


def test_an_observation_that_lies_is_refused_by_the_reader() -> None:
    with server("--factory", "zoo.served:Liar") as running:
        client = running.client()
        client.ask("reset", 1, None)
        for action in range(5):
            with pytest.raises(ProtocolError, match=r"/step.*observation: expected float32 of shape \(3,\), got "):
                client.ask("step", action)


def test_an_observation_that_cannot_be_sent_is_named() -> None:
    with server("--factory", "zoo.served:Unsendable") as running:
        client = running.client()
        with pytest.raises(RemoteError, match=r"observation\['a'\]\[0\]: a value of type object cannot be sent"):
            client.ask("reset", 1, None)


def test_an_answer_over_the_limit_is_an_error() -> None:
    with server(*COUNTER, "--max-bytes", str(1 << 20)) as running:
        client = running.client()
        with pytest.raises(RemoteError, match="over the limit of 1048576 bytes"):
            client.ask("call", "huge", (2,))
        assert client.ask("call", "length") == 3


# Requests that make no sense

BAD = {
    "no action": post("/step"),
    "an action and actions": post("/step", action=1, actions=[1]),
    "no actions": post("/step", actions=[]),
    "a seed of text": post("/reset", seed="one"),
    "a seed of true": post("/reset", seed=True),
    "a negative seed": post("/reseed", seed=-1),
    "options of text": post("/reset", options="x"),
    "no name": post("/call"),
    "args of text": post("/call", name="add", args="x"),
    "no values": post("/set_attr"),
    "no fresh": post("/start"),
    "no base": post("/reset", base=True),
    "an odd then_reset": post("/step", action=1, then_reset=5),
    "a list": Request("POST", "/reset", {"Content-Type": "application/msgpack"}, encode([1])),
    "JSON": Request("POST", "/reset", {"Content-Type": "application/msgpack"}, b'{"seed": 1}'),
    "a pickle": Request("POST", "/reset", {"Content-Type": "application/msgpack"}, b"\x80\x04cos\nsystem\n."),
}


@pytest.mark.parametrize("request_", BAD.values(), ids=BAD.keys())
def test_a_request_that_makes_no_sense_is_a_400(counter: Server, request_: Request) -> None:
    client = counter.client()
    answer = client.send(request_)
    assert answer.status == 400
    assert decode(answer.body)["error"]["message"]
    assert client.ask("call", "length") == 3  # on the same connection


def test_unknown_paths_methods_and_types(counter: Server) -> None:
    client = counter.client()
    answer = client.send(Request("GET", "/nowhere"))
    assert answer.status == 404
    assert "/reset" in decode(answer.body)["error"]["message"]
    with pytest.raises(ProtocolError, match=r"http://127.0.0.1:\d+/nowhere \(HTTP 404\): there is no '/nowhere'"):
        drive(client.protocol.call("x"), lambda request: answer)
    assert client.send(Request("GET", "/step")).status == 405
    assert client.send(Request("POST", "/spaces")).status == 405
    assert client.send(Request("POST", "/close", {"Content-Type": "text/plain"})).status == 415
    assert client.send(Request("POST", "/close")).status == 415


def raw(running: Server, data: bytes, end: bool = False) -> bytes:
    """All that comes back for these bytes until the server closes."""
    sock = running.connect()
    try:
        sock.sendall(data)
    except OSError:
        pass
    if end:
        sock.shutdown(socket.SHUT_WR)
    got = b""
    try:
        while more := sock.recv(65536):
            got += more
    except ConnectionError:
        pass
    return got


GARBAGE = {
    "nothing": (b"", 0),
    "no HTTP": (b"hello\r\n\r\n", 400),
    "another HTTP": (b"PRI * HTTP/2.0\r\n\r\n", 400),
    "HTTP without a host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "an empty head": (b"\r\n\r\n\r\n\r\n", 400),
    "a head within a head": (b"GET / HTTP/1.1\nHost: a\n\nGET /health HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n", 400),
    "a header without a colon": (b"GET /health HTTP/1.1\r\nHost: a\r\nnonsense\r\n\r\n", 400),
    "a negative length": (b"POST /step HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", 400),
    "a length that is text": (b"POST /step HTTP/1.1\r\nHost: a\r\nContent-Length: lots\r\n\r\n", 400),
    "two lengths": (b"POST /step HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
    "another coding": (b"POST /step HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
    "chunks": (b"POST /step HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", 411),
    "a body too large": (b"POST /step HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000000\r\n\r\n", 413),
    "a huge length": (b"POST /step HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 50 + b"\r\n\r\n", 400),
    "a head without end": (b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000, 431),
    "half a request": (b"POST /step HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nhalf", 0),
    "random bytes": (random.Random(1).randbytes(5000) + b"\r\n\r\n", 400),
}


@pytest.mark.parametrize(("data", "status"), GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_refused_and_the_server_goes_on(counter: Server, data: bytes, status: int) -> None:
    got = raw(counter, data, end=True)
    assert got.startswith(f"HTTP/1.1 {status} ".encode()) if status else got == b""
    assert counter.client().ask("call", "length") == 3


def test_a_body_over_the_limit_is_a_413_even_while_it_is_sent() -> None:
    with server(*COUNTER, "--max-bytes", "1000000") as running:
        size = 30_000_000
        head = f"POST /step HTTP/1.1\r\nHost: a\r\nContent-Type: application/msgpack\r\nContent-Length: {size}\r\n\r\n"
        got = raw(running, head.encode() + b"x" * size, end=True)
        assert got.startswith(b"HTTP/1.1 413 ")
        assert b"over the limit of 1000000" in got
        running.client().ask("reset", 1, None)


def test_a_large_body_within_the_limit_arrives(counter: Server) -> None:
    client = counter.client()
    value = np.random.default_rng(1).integers(0, 255, 8 << 20, np.uint8)
    client.ask("set_attr", {"large": value})
    assert np.array_equal(client.ask("call", "large"), value)


def test_the_ways_of_http(counter: Server) -> None:
    closing = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    assert b"Connection: close" in raw(counter, closing)
    assert raw(counter, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    assert raw(counter, b"GET /spaces HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    # Requests sent ahead are answered in order.
    ahead = b"GET /spaces HTTP/1.1\r\nHost: a\r\n\r\nGET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n" + closing
    got = raw(counter, ahead)
    assert re.findall(rb"HTTP/1\.1 (\d+)", got) == [b"200", b"404", b"200"]
    # One byte at a time.
    sock = counter.connect()
    for byte in closing:
        sock.sendall(bytes([byte]))
    assert sock.recv(100).startswith(b"HTTP/1.1 200 ")
    # A body announced and awaited.
    sock = counter.connect()
    body = encode({"name": "length"})
    sock.sendall(
        b"POST /call HTTP/1.1\r\nHost: a\r\nContent-Type: application/msgpack\r\nExpect: 100-continue\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    sock.sendall(body)
    assert sock.recv(100).startswith(b"HTTP/1.1 200 ")


def test_nothing_is_read_after_a_request_that_was_the_last() -> None:
    with server(*COUNTER) as running:
        client = running.client()
        client.ask("reset", 1, None)
        body = encode({"actions": [1]})
        head = b"POST /step HTTP/1.1\r\nHost: a\r\nContent-Type: application/msgpack\r\nContent-Length: %d\r\n" % len(
            body
        )
        hang = encode({"name": "spin", "args": [0.5]})
        last = head.replace(b"/step", b"/call").replace(b"%d" % len(body), b"%d" % len(hang))
        sock = running.connect()
        sock.sendall(last + b"Connection: close\r\n\r\n" + hang)
        # While the last is worked on.
        client.ask("stack")
        sock.sendall(head + b"\r\n" + body)
        got = b""
        while data := sock.recv(65536):
            got += data
        assert got.count(b"HTTP/1.1 ") == 1
        assert client.ask("step", 1).obs[0] == 1.0


def test_a_word_to_go_on_does_not_come_into_another_answer() -> None:
    with server(*COUNTER) as running:
        call = encode({"name": "spin", "args": [0.5]})
        head = b"POST /call HTTP/1.1\r\nHost: a\r\nContent-Type: application/msgpack\r\nContent-Length: %d\r\n" % len(
            call
        )
        sock = running.connect()
        sock.sendall(head + b"\r\n" + call + head + b"Expect: 100-continue\r\n\r\n")
        got = sock.recv(100)
        assert got.startswith(b"HTTP/1.1 200 ")
        sock.sendall(call)
        while got.count(b"result") < 2:
            got += sock.recv(1000)
        assert b"100 Continue" not in got


def test_too_many_requests_ahead_are_refused(counter: Server) -> None:
    hold = counter.client()
    holding = threading.Thread(target=hold.ask, args=("call", "spin", (0.5,)))
    holding.start()
    await_busy(counter)
    got = raw(counter, b"GET /spaces HTTP/1.1\r\nHost: a\r\n\r\n" * 20)
    holding.join()
    assert got.count(b"HTTP/1.1 200 ") <= 8
    assert counter.client().ask("call", "length") == 3


# One thread for the environment, another for who asks about it


def health(running: Server) -> dict:
    client = running.client(described=False)
    try:
        return json.loads(client.send(Request("GET", "/health")).body)
    finally:
        client.close()


def await_busy(running: Server) -> None:
    deadline = time.monotonic() + 20
    while health(running)["busy_seconds"] == 0.0:
        assert time.monotonic() < deadline


def test_one_connection_serves_many_requests(counter: Server) -> None:
    client = counter.client()
    client.ask("reset", 1, None)
    local = client.connection.sock.getsockname()
    for _ in range(200):
        client.ask("step", 1, then_reset=True)
    assert client.connection.sock.getsockname() == local


def test_health_and_stack_are_answered_while_a_step_runs() -> None:
    with server(*COUNTER) as running:
        slow, quick = running.client(), running.client()
        results: list = []
        holding = threading.Thread(target=swallow, args=(lambda: results.append(slow.ask("call", "hold")),))
        holding.start()
        await_busy(running)
        times = []
        for _ in range(20):
            started = time.perf_counter()
            assert quick.ask("ready") is True
            times.append(time.perf_counter() - started)
        assert sorted(times)[10] < 0.5
        assert health(running)["busy_seconds"] > 0
        assert "in hold" in quick.ask("stack")
        assert not results
        running.process.kill()
        holding.join()


def test_a_client_that_goes_away_during_a_step_harms_nobody() -> None:
    with server(*COUNTER) as running:
        for _ in range(5):
            client = running.client(described=False)
            request = next(GymProtocol().call("spin", (0.05,)))
            client.connection.request("POST", request.path, request.body, dict(request.headers))
            client.close()
        half = running.connect()
        half.sendall(b"POST /step HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\nhalf")
        half.close()
        assert running.client().ask("call", "length") == 3


def test_many_connections(counter: Server) -> None:
    clients = [counter.client(described=False) for _ in range(50)]
    for client in clients:
        assert client.ask("ready") is True
    errors: list[Exception] = []

    def call(client: Client) -> None:
        try:
            for _ in range(5):
                assert client.ask("call", "length") == 3
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(client,)) for client in clients[:10]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    assert not errors


# Beginning and end


def test_a_server_says_503_until_its_environment_is_built(tmp_path) -> None:
    gate = tmp_path / "gate"
    environment = {"SERVED_ENVS_GATE": str(gate)}
    with (
        free_port() as port,
        server("--factory", "zoo.served:slow_to_build", wait=False, port=port, env=environment) as running,
    ):
        client = running.client(described=False)
        deadline = time.monotonic() + 30
        while True:
            try:
                assert client.ask("ready") is False
                break
            except ConnectionRefusedError:
                client.close()
                assert time.monotonic() < deadline
                time.sleep(0.02)
        with pytest.raises(ProtocolError, match="HTTP 503"):
            client.ask("describe")
        gate.touch()
        running.await_ready()
        assert client.ask("ready") is True


def test_a_failing_build_ends_with_its_traceback() -> None:
    with server("--factory", "zoo.served:broken", wait=False) as running:
        code, _, err = running.end()
    assert code == 1
    assert "RuntimeError: cannot be built" in err


@pytest.mark.parametrize(
    "args",
    [(), ("--env", "CartPole-v1", "--factory", "a:b"), ("--env", "CartPole-v1", "--nonsense")],
    ids=["nothing", "two", "unknown"],
)
def test_arguments_that_make_no_sense(args: tuple[str, ...]) -> None:
    with server(*args, wait=False) as running:
        code, _, err = running.end()
    assert code == 2
    assert "usage: python -m prized_gym.server" in err


def test_options_reach_the_environment() -> None:
    args = ("--kwargs", '{"length": 50}', "--max-episode-steps", "2", "--render-mode", "ansi")
    with server(*COUNTER, *args, "--warm-up", "zoo.served:warm_up") as running:
        client = running.client()
        assert client.protocol.description.render_mode == "ansi"
        assert client.ask("reset", 1, None)[1]["warm"] is True
        assert client.ask("call", "length") == 50
        assert client.ask("render") == "a frame"
        assert not client.ask("step", 1).truncated
        assert client.ask("step", 1).truncated


def test_a_reset_in_the_base() -> None:
    with server(*COUNTER, "--reset-in-base", "7") as running:
        client = running.client()
        first, info = client.ask("reset", None, None, fresh=Fresh(1), base=True)
        assert info["seed"] == 7
        assert info["episodes"] == 1
        again, _ = client.ask("reset", None, None, fresh=Fresh(2), base=True)
        assert first.tolist() == again.tolist()
        client.ask("step", 1)
        with pytest.raises(ProtocolError, match="moved on"):
            client.ask("reset", None, None, base=True)
    with server(*COUNTER) as running:
        client = running.client()
        client.ask("reset_base", 7)
        client.ask("reset_base", 8)
        assert client.ask("reset", None, None, base=True)[0].tolist() == first.tolist()


def swallow(function, *args) -> None:
    """Calls it where its failing is expected."""
    try:
        function(*args)
    except (OSError, http.client.HTTPException):
        pass


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("busy", [False, True])
def test_a_signal_closes_the_environment(number: int, code: int, busy: bool) -> None:
    with server(*COUNTER) as running:
        client = running.client()
        holding = threading.Thread(target=swallow, args=(client.ask, "call", "hold"))
        if busy:
            holding.start()
            await_busy(running)
        running.process.send_signal(number)
        returned, out, err = running.end()
        if busy:
            holding.join()
    assert returned == code
    assert out.count("closed the env") == 1
    assert "Traceback" not in err


def test_close_answers_and_ends() -> None:
    with server(*COUNTER) as running:
        client = running.client()
        client.ask("close")
        code, out, _ = running.end()
    assert code == 0
    assert out.count("closed the env") == 1


def test_a_killed_server_is_an_error_at_once() -> None:
    with server(*COUNTER) as running:
        client = running.client()
        caught: list[Exception] = []

        def hold() -> None:
            try:
                client.ask("call", "hold")
            except Exception as error:
                caught.append(error)

        holding = threading.Thread(target=hold)
        holding.start()
        await_busy(running)
        os.kill(running.process.pid, signal.SIGKILL)
        holding.join(timeout=20)
        assert not holding.is_alive()
    assert isinstance(caught[0], OSError)


# A recipe from the trainer


def test_a_pickled_recipe_is_served(tmp_path) -> None:
    from prized_gym.recipe import Recipe

    class Local(gym.Env):  # pickled by value: the server cannot import it
        observation_space = gym.spaces.Discrete(9)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return self.start, {}

        def step(self, action):
            return np.int64(1), 0.0, True, False, {"copy": self.copy}

    def on_fork(env, index, seed):
        env.unwrapped.copy = (index, seed)

    Local.__module__ = "__main__"
    make, on_fork.__module__ = (lambda: Local()), "__main__"
    make.__module__ = "__main__"
    recipe = Recipe((make,), warm_up=lambda env: setattr(env, "start", 4), on_fork=on_fork)
    recipe.warm_up.__module__ = "__main__"
    path = tmp_path / "recipe"
    write_payload(path, recipe)
    with server("--pickle", str(path)) as running:
        client = running.client()
        obs, _ = client.ask("reset", 1, None, fresh=Fresh(11, copy=2))
        assert obs == 4
        assert isinstance(obs, np.int64)
        assert client.ask("step", 0).info["copy"] == (2, 11)


def test_a_payload_of_another_python_is_refused_before_it_is_unpickled(tmp_path) -> None:
    path, trace = tmp_path / "recipe", tmp_path / "trace"

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(trace),)

    payload = write_payload(None, Trap())
    import sys

    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    path.write_bytes(payload.replace(f'"python": "{here}"'.encode(), b'"python": "3.7"', 1))
    with server("--pickle", str(path), wait=False) as running:
        code, _, err = running.end()
    assert code == 1
    assert "written by Python 3.7" in err
    assert f"this is {here}" in err
    assert not trace.exists()
    for broken in (payload[:-1], payload[:30], b"", b"\x80\x04N."):
        path.write_bytes(broken)
        with server("--pickle", str(path), wait=False) as running:
            code, _, err = running.end()
        assert code == 1
        assert "PayloadError" in err
        assert not trace.exists()
