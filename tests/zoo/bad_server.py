"""A server that speaks this library's protocol until it is stepped; then it does what the action says.

python bad_server.py --port PORT
"""

import argparse
import os
import pickle
import socket
import threading
import time

import numpy as np
from gymnasium import spaces

from prized_gym.wire import encode, space_to_data

(FINE, GARBAGE, HUGE, CHUNKED, SHAPE, PICKLE, DIE, HANG, CUT, GZIP, INTERIM, NAN, LATE, NO_OBS, DTYPE) = range(15)
OBS = spaces.Box(-1, 1, (3,), np.float32)
ACTIONS = spaces.Discrete(15)


def body(**fields):
    return encode(fields)


def http(content, kind="application/msgpack", status="200 OK", extra=""):
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n{extra}\r\n"
    return head.encode() + content


def step(obs=None, reward=1.0, **more):
    obs = np.full(3, 0.5, np.float32) if obs is None else obs
    return {"obs": obs, "reward": reward, "terminated": False, "truncated": False, "info": {}, **more}


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/pg-unpickled",)


def flood(sock, chunked):
    block = b"x" * 65536
    if chunked:
        sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    else:
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n")
    while True:
        sock.sendall(b"10000\r\n" + block + b"\r\n" if chunked else block)


def answer_step(sock, action):
    if action == GARBAGE:
        sock.sendall(os.urandom(2000) + b"\r\n\r\n")
    elif action in (HUGE, CHUNKED):
        flood(sock, action == CHUNKED)
    elif action == SHAPE:
        sock.sendall(http(body(steps=[step(np.zeros(4, np.float32))], reset=None)))
    elif action == DTYPE:
        sock.sendall(http(body(steps=[step(np.zeros(3, np.complex128))], reset=None)))
    elif action == NO_OBS:
        sock.sendall(http(body(steps=[{"reward": 1.0}], reset=None)))
    elif action == PICKLE:
        sock.sendall(http(pickle.dumps(Bomb())))
    elif action == DIE:
        print("the last words of a bad server", flush=True)
        os._exit(7)
    elif action == HANG:
        time.sleep(1000)
    elif action == CUT:
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")
        sock.shutdown(socket.SHUT_RDWR)
    elif action == GZIP:
        sock.sendall(http(b"\x1f\x8b", extra="Content-Encoding: gzip\r\n"))
    elif action == INTERIM:
        while True:
            sock.sendall(b"HTTP/1.1 102 Processing\r\n\r\n")
    elif action == NAN:
        sock.sendall(http(body(steps=[step(reward="much")], reset=None)))
    else:
        sock.sendall(http(body(steps=[step()], reset=None)))
        if action == LATE:
            sock.sendall(http(b"nobody asked for this"))


def serve(sock):
    buffer = b""
    try:
        while True:
            while b"\r\n\r\n" not in buffer:
                data = sock.recv(65536)
                if not data:
                    return
                buffer += data
            head, _, buffer = buffer.partition(b"\r\n\r\n")
            length = 0
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            while len(buffer) < length:
                buffer += sock.recv(65536)
            content, buffer = buffer[:length], buffer[length:]
            path = head.split(b" ")[1]
            if path == b"/health":
                sock.sendall(http(b"{}", "application/json"))
            elif path == b"/stack":
                sock.sendall(http(b"a stack of a bad server", "text/plain"))
            elif path == b"/spaces":
                sock.sendall(
                    http(
                        body(
                            observation_space=space_to_data(OBS), action_space=space_to_data(ACTIONS), metadata={},
                            render_mode=None, spec=None, seconds=0.5,
                        )
                    )
                )  # fmt: skip
            elif path == b"/reset":
                sock.sendall(http(body(obs=np.zeros(3, np.float32), info={})))
            else:
                from prized_gym.wire import decode

                answer_step(sock, int(decode(content)["actions"][0]))
    except OSError:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    with socket.create_server(("127.0.0.1", parser.parse_args().port)) as server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()
