"""Byte streams into a sandbox, and what the host does with an agent that lies."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prized_gym.runsc import Sandbox, SandboxDied, SandboxTimeout, agent
from prized_gym.runsc.connection import FrameReader, Hub, Link
from tools.processes import eventually
from tools.sandboxes import COUNTER, get, http

ECHO = """
import socket, threading
server = socket.create_server(("127.0.0.1", 7000), backlog=100)
def echo(c):
    while data := c.recv(65536):
        c.sendall(data)
    c.close()
while True:
    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
"""


@pytest.fixture(scope="module")
def echo(shared: Sandbox) -> Sandbox:
    shared.files.write("echo.py", ECHO)
    shared.files.write("server.py", COUNTER)
    shared.exec("python3 echo.py > echo.log 2>&1", background=True)
    shared.exec("python3 server.py > server.log 2>&1", background=True)
    http(shared, 7000).close()
    http(shared).close()
    return shared


def test_refused(shared: Sandbox) -> None:
    with pytest.raises(ConnectionRefusedError, match=r"127\.0\.0\.1:9"):
        shared.connect_port(9)
    with pytest.raises(ValueError):
        shared.connect_port(0)


def test_megabytes_both_ways_at_once(echo: Sandbox) -> None:
    data = bytes(range(256)) * 40_000
    with echo.connect_port(7000) as stream:

        def send() -> None:
            stream.sendall(data)
            stream.shutdown(socket.SHUT_WR)

        threading.Thread(target=send).start()
        received = bytearray()
        while piece := stream.recv(1 << 20):
            received += piece
    assert received == data


def test_many_streams(echo: Sandbox) -> None:
    streams = [echo.connect_port(7000) for _ in range(40)]
    for number, stream in enumerate(streams):
        stream.sendall(b"%d" % number)
    assert [stream.recv(10) for stream in streams] == [b"%d" % number for number in range(40)]
    for stream in streams:
        stream.close()


def test_asyncio_over_a_sandbox_that_falls_asleep(echo: Sandbox) -> None:
    async def exchange() -> list[bytes]:
        reader, writer = await asyncio.open_connection(sock=echo.connect_port(7000))
        answers = []
        for word in (b"one", b"two", b"three"):
            assert echo.idle() and echo.stopped
            writer.write(word)
            answers.append(await asyncio.wait_for(reader.read(10), 10))
        writer.close()
        await writer.wait_closed()
        return answers

    assert asyncio.run(exchange()) == [b"one", b"two", b"three"]


def test_an_answer_that_is_awaited_keeps_it_awake(echo: Sandbox) -> None:
    with echo.connect_port(8000) as stream:
        stream.sendall(b"GET / HTTP/1.1\r\n")
        assert not echo.idle()
        stream.sendall(b"\r\n")
        assert stream.recv(5) == b"HTTP/"
        assert echo.idle()


def test_keep_alive(echo: Sandbox) -> None:
    connection = http(echo)
    first = int(get(connection))
    assert [int(get(connection)) for _ in range(100)] == list(range(first + 1, first + 101))
    connection.close()


@pytest.fixture
def link(tmp_path: Path) -> Iterator[tuple[Link, list[str]]]:
    """A link without a sandbox: the tests dial it as an agent would."""
    hub = Hub()
    reasons: list[str] = []
    made = Link(hub, tmp_path / "a.sock", reasons.append)
    made.listen()
    yield made, reasons
    made.died("test over")
    hub.stop()


def dial(link: Link, *messages: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    connection.connect(str(link.path))
    for message in messages:
        connection.sendall(message)
    return connection


def frame(text: str) -> bytes:
    return b"J" + len(text).to_bytes(4, "big") + text.encode()


CONTROL = frame('{"hello": "control"}')


GARBAGE = [
    CONTROL + CONTROL,
    b"\0\0\0\0\0",
    b"J\xff\xff\xff\xff",
    b"J\0\0\7\0",
    b"B\0\0\0\1x",
    frame("[1]"),
    frame("{"),
    frame("[" * 400),
    frame('{"hello": "stream", "number": "1"}'),
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_ends_its_connection_and_enough_of_it_the_sandbox(link: tuple[Link, list[str]], garbage: bytes) -> None:
    made, reasons = link
    with dial(made, CONTROL) as control:
        assert agent.receive_json(control) == {"jobs": []}
        for _ in range(30):
            with dial(made, garbage) as connection:
                assert connection.recv(10) == b""
        assert made.connected(1) is not None
    assert reasons == ["its agent broke the protocol again and again"]


def test_connections_that_say_nothing_are_bounded(link: tuple[Link, list[str]]) -> None:
    made, _ = link
    with contextlib.ExitStack() as open_ones:
        silent = []
        for number in range(140):
            silent.append(open_ones.enter_context(dial(made)))
            assert eventually(lambda: len(made._half_open) >= min(len(silent), 128)), (
                number
            )  # no faster than it accepts
        assert len(made._half_open) == 128
        assert silent[-1].recv(1) == b""
    assert eventually(lambda: not made._half_open)


def test_an_agent_that_never_comes(link: tuple[Link, list[str]]) -> None:
    made, _ = link
    with pytest.raises(SandboxTimeout):
        made.dial({"op": "exec"}, timeout=0.2)
    with dial(made, CONTROL) as control:
        agent.receive_json(control)
        with pytest.raises(SandboxTimeout):
            made.dial({"op": "exec"}, timeout=0.2)
        assert not made._waiting


def test_whoever_waits_hears_of_the_death(link: tuple[Link, list[str]]) -> None:
    made, _ = link
    with dial(made, CONTROL) as control:
        agent.receive_json(control)
        threading.Timer(0.1, lambda: made.died("hit by a test")).start()
        with pytest.raises(SandboxDied, match="hit by a test"):
            made.dial({"op": "exec"}, timeout=10)


def test_control_that_babbles_is_dropped(link: tuple[Link, list[str]]) -> None:
    made, _ = link
    with dial(made, CONTROL) as control:
        agent.receive_json(control)
        control.sendall(frame('{"quiet": 1}'))
        assert control.recv(10) == b""


def test_frames_in_pieces() -> None:
    reader = FrameReader()
    data = b"B\0\0\0\3abc" + frame("{}")
    assert [found for byte in data for found in reader.feed(bytes([byte]))] == [(b"B", b"abc"), (b"J", b"{}")]
    with pytest.raises(agent.BadFrame):
        list(FrameReader(100).feed(b"B\0\0\1\0"))


def test_another_process_that_closes_it_takes_nothing_away(create: Callable[..., Sandbox]) -> None:
    sandbox = create()
    sandbox.pause()
    sandbox.prepare()
    images = sandbox._life.runtime.directory / "images"
    before = list(images.iterdir())
    assert len(before) == 1
    pid = os.fork()
    if pid == 0:
        try:
            sandbox.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert list(images.iterdir()) == before
    [copy] = sandbox.fork()
    with copy:
        assert copy.exec("echo fine").stdout == b"fine\n"


def test_another_process_cannot_use_it(shared: Sandbox) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            shared.exec("true")
        except BaseException as error:
            os.write(write, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"SandboxStateError"
    os.close(read)
    os.close(write)
    assert shared.exec("echo fine").stdout == b"fine\n"
