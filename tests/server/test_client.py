"""The client that runs a protocol over a channel, against the env server as a real process."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from prized_gym import background
from prized_gym.interface.commands import Call, Fresh, Reseed, Reset, SetAttr, Start
from prized_gym.protocols import (
    EpisodeProtocol,
    Exchange,
    GymProtocol,
    Protocol,
    ProtocolError,
    RemoteError,
    Request,
    StepAnswer,
)
from prized_gym.sandbox.channels.channel import ChannelError
from prized_gym.sandbox.channels.http import Dialed, HttpChannel
from prized_gym.sandbox.client import Client
from tools.server import Server, free_port, server

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def counter() -> Iterator[Server]:
    with server("--factory", "zoo.served:make", "--render-mode", "ansi") as running:
        yield running


@pytest.fixture
def client(counter: Server) -> Iterator[Client]:
    made = client_of(counter.port)
    run(made.describe())
    yield made
    close(made)


def client_of(port: int, protocol: Protocol | None = None, timeout: float = 20.0) -> Client:
    async def dial() -> Dialed:
        sock = socket.socket()
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except BaseException:
            sock.close()
            raise
        return Dialed(sock)

    return Client(protocol or GymProtocol(), HttpChannel(dial, f"127.0.0.1:{port}"), timeout)


def run(doing: Any) -> Any:
    return background.run(doing, 30.0)


def close(client: Client) -> None:
    background.loop().call_soon_threadsafe(client.channel.close)


def test_every_command(client: Client) -> None:
    obs, info = run(client.command(Reset(5, {"level": 3}, fresh=Fresh(7, copy=2, attributes={"level": 9})), None))
    assert (obs[:2].tolist(), info["seed"]) == ([0, 3], 5)
    assert run(client.command(Call("add", (1,), {"b": 2}), None)) == {"sum": 3, "level": 9}
    assert run(client.command(Call("render"), None)) == "a frame"
    assert run(client.command(SetAttr({"level": 4}), None)) is None
    assert run(client.command(Call("level"), None)) == 4
    draws = []
    for command in (Reseed(3), Start(Fresh(3))):
        run(client.command(Reset(1), None))
        assert run(client.command(command, None)) is None
        draws.append(run(client.step(1, False, None)).info["draws"])
    run(client.command(Reset(None, reseed=3), None))
    draws.append(run(client.step(1, False, None)).info["draws"])
    assert draws[0] == draws[1] and draws[0][:2] == draws[2][:2]
    with pytest.raises(RemoteError, match="the env says no"):
        run(client.command(Call("fail"), None))
    with pytest.raises(ProtocolError, match="a seed is not negative"):
        run(client.command(Reseed(-1), None))
    assert "in _serve" in run(client.stack(5.0))


def test_a_step_that_ends_the_episode_is_followed_by_a_reset(client: Client) -> None:
    class Forgetful(GymProtocol):
        """Has no reset in its answers."""

        def step(self, action: Any, *, then_reset: bool = False) -> Exchange[StepAnswer]:
            answer = yield from super().step(action)
            return answer

    forgetful = Forgetful()
    forgetful.description = client.protocol.description
    for protocol in (client.protocol, forgetful):
        client.protocol = protocol
        run(client.reset(1, None, None))
        answers = [run(client.step(1, True, None)) for _ in range(3)]
        assert [answer.terminated for answer in answers] == [False, False, True]
        assert [answer.reset is not None for answer in answers] == [False, False, True]
        assert answers[2].obs[0] == 3 and answers[2].reset[0][0] == 0


class Slow(GymProtocol):
    """Spins for a while in each of several requests."""

    closed = 0

    def spin(self, seconds: float, times: int, limit: float | None = None) -> Exchange[int]:
        try:
            for _ in range(times):
                request = next(self.call("spin", (seconds,)))
                yield Request(request.method, request.path, request.headers, request.body, limit)
            return times
        finally:
            self.closed += 1


def test_an_operation_has_one_time_limit_for_all_its_requests(counter: Server) -> None:
    protocol = Slow()
    client = client_of(counter.port, protocol)
    try:
        assert run(client.run(protocol.spin(0.01, 3), 20.0)) == 3
        started = time.monotonic()
        with pytest.raises(ChannelError, match="no answer within") as caught:
            run(client.run(protocol.spin(0.3, 90), 1.0))
        assert caught.value.kind == "timeout" and time.monotonic() - started < 15
        # A limit of its own is longer or shorter than what the operation has left.
        assert run(client.run(protocol.spin(0.3, 1, 20.0), 0.01)) == 1
        with pytest.raises(ChannelError, match=r"no answer within 0\.05 s"):
            run(client.run(protocol.spin(0.5, 1, 0.05), 20.0))
        assert protocol.closed == 4
    finally:
        close(client)


def test_an_operation_that_is_cancelled_is_closed(counter: Server) -> None:
    protocol = Slow()
    client = client_of(counter.port, protocol)

    async def cancel() -> None:
        task = asyncio.ensure_future(client.run(protocol.spin(0.2, 50)))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        run(cancel())
        assert protocol.closed == 1
    finally:
        close(client)


def test_waiting_for_a_server(counter: Server) -> None:
    ends = time.monotonic() + 20
    for protocol in (GymProtocol(), EpisodeProtocol(), EpisodeProtocol(ready="/health")):
        client = client_of(counter.port, protocol)
        assert run(client.wait_ready(None, ends, lambda: False)) is True
        assert run(client.wait_ready(Request("GET", "/stack"), ends, lambda: False)) is True
        looks = iter([False, False, True])
        assert run(client.wait_ready(Request("GET", "/no"), ends, looks.__next__)) is False
        close(client)
    with free_port() as port:
        for protocol in (GymProtocol(), EpisodeProtocol()):
            client = client_of(port, protocol)
            assert run(client.wait_ready(None, time.monotonic() + 0.2, lambda: False)) is False
            close(client)


def test_large_answers_arrive_whole_and_are_no_more_than_allowed(counter: Server) -> None:
    client = client_of(counter.port)
    try:
        run(client.describe())
        large = run(client.command(Call("huge", (9,)), None))
        assert large.nbytes == 9 << 20 and not large.any()
        image = np.random.default_rng(1).integers(0, 255, 5 << 20, np.uint8)
        run(client.command(SetAttr({"image": image}), None))
        assert np.array_equal(run(client.command(Call("image"), None)), image)
        client.protocol.max_answer_bytes = 1 << 20
        with pytest.raises(ChannelError, match="1048576 may be read") as caught:
            run(client.command(Call("image"), None))
        assert caught.value.kind == "large"
    finally:
        close(client)


def test_a_request_played_by_an_episode_protocol(counter: Server) -> None:
    client = client_of(counter.port, EpisodeProtocol("/health?seed={seed}", reward=lambda answer: answer["pid"]))
    try:
        assert run(client.reset(3, None, None))[1] == {"seed": 3}
        answer = run(client.step(0, True, None))
        assert answer.reward == counter.process.pid and answer.terminated
        assert answer.reset is not None and json.dumps(answer.info)
    finally:
        close(client)
