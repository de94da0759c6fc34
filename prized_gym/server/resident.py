"""The client that lives in a sandbox whose server cannot be reached from outside: commands hand it requests.

One file of plain standard-library Python, uploaded and started in the base, so that it is in every copy. A command is a
shell of a few instructions, `CALL`: it writes one line into a pipe and prints the line that comes back, with no Python
to start. A request is `NUMBER PAYLOAD`, its answer `NUMBER PAYLOAD`; a payload is base64 of a JSON head, a newline and
the body, or `@FILE` where it is too long for an argument or an output. There are several lanes, each with two pipes,
so that a server that hangs can still be asked where.

    python3 resident.py DIRECTORY PORT LANES
"""

import base64
import http.client
import json
import os
import socket
import sys
import threading

INLINE = 1000
"""Characters up to which an answer goes through the pipe, from which a shell reads byte by byte."""

PRINTED = 1 << 20
"""Characters up to which an answer is printed by the command; longer ones stay in a file for the host to fetch."""

CALL = (
    'printf "%s\\n" "$1" >"$0.in" && while read -r answer; do case $answer in '
    '"${1%% *} <"*) exec cat "${answer#*<}";; "${1%% *} "*) printf "%s\\n" "$answer"; exit 0;; esac; done <"$0.out"; exit 1'
)
"""The command: `sh -c CALL DIRECTORY/LANE REQUEST`. It skips answers to commands that were killed before they read them."""


class Lane:
    """One request at a time: a pair of pipes, and a connection to the server that is kept."""

    def __init__(self, path: str, port: int) -> None:
        self.path = path
        self.port = port
        self.connection: http.client.HTTPConnection | None = None
        for name in (".in", ".out"):
            if os.path.exists(path + name):
                os.unlink(path + name)
            os.mkfifo(path + name, 0o600)
        # Open for both, so that neither has an end when a command closes it, or finds one when it opens it.
        self.requests = os.open(path + ".in", os.O_RDWR)
        self.answers = os.open(path + ".out", os.O_RDWR | os.O_NONBLOCK)

    def run(self) -> None:
        pending = b""
        while True:
            while b"\n" not in pending:
                pending += os.read(self.requests, 1 << 16)
            line, _, pending = pending.partition(b"\n")
            number, _, payload = line.decode("ascii", "replace").partition(" ")
            try:
                head, body = self.read(payload)
                answer, content = self.ask(head, body)
            except Exception as error:
                answer, content = {"error": type(error).__name__, "message": str(error)[:500], "kind": kind(error)}, b""
            try:
                self.reply(number, json.dumps(answer).encode() + b"\n" + content)
            except Exception as error:
                sys.stderr.write("resident: " + repr(error) + "\n")

    def read(self, payload: str) -> "tuple[dict, bytes]":  # type: ignore[type-arg]
        if payload.startswith("@"):
            with open(payload[1:], "rb") as file:
                data = file.read()
            os.unlink(payload[1:])
        else:
            data = base64.b64decode(payload)
        head, _, body = data.partition(b"\n")
        return json.loads(head), body

    def ask(self, head: "dict", body: bytes) -> "tuple[dict, bytes]":  # type: ignore[type-arg]
        if head["method"] == "CONNECT":
            socket.create_connection(("127.0.0.1", self.port), head["timeout"]).close()
            return {"status": 200, "headers": []}, b""
        reused = self.connection is not None
        for attempt in (1, 2):
            if self.connection is None:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=head["timeout"])
                connection.connect()
                self.connection = connection
            assert self.connection.sock is not None
            self.connection.sock.settimeout(head["timeout"])
            try:
                self.connection.request(head["method"], head["path"], body or None, head["headers"])
                response = self.connection.getresponse()
                content = response.read(head["limit"] + 1)
            except Exception as error:
                self.drop()
                stale = isinstance(error, (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError))
                if attempt == 1 and reused and stale and head["again"]:
                    continue
                raise
            if len(content) > head["limit"]:
                self.drop()
                return {"error": "large", "message": "", "kind": "large"}, b""
            if response.will_close:
                self.drop()
            return {"status": response.status, "headers": [[k.lower(), v] for k, v in response.getheaders()]}, content
        raise AssertionError("unreachable")

    def drop(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    def reply(self, number: str, data: bytes) -> None:
        text = number + " " + base64.b64encode(data).decode()
        if len(text) > PRINTED:
            with open(self.path + ".answer", "wb") as file:
                file.write(data)
            text = number + " @" + self.path + ".answer"
        elif len(text) > INLINE:
            with open(self.path + ".answer", "w") as file:
                file.write(text + "\n")
            text = number + " <" + self.path + ".answer"
        try:
            os.write(self.answers, text.encode() + b"\n")
        except BlockingIOError:
            # Full of answers that nobody has read.
            os.read(self.answers, 1 << 20)
            os.write(self.answers, text.encode() + b"\n")


def kind(error: Exception) -> str:
    """What the host calls an error."""
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, (http.client.RemoteDisconnected, http.client.IncompleteRead, OSError)):
        return "closed"
    return "garbage"


def main() -> None:
    """Serve every lane until killed."""
    directory, port, lanes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    os.makedirs(directory, exist_ok=True)
    threads = []
    for number in range(lanes):
        lane = Lane(os.path.join(directory, str(number)), port)
        threads.append(threading.Thread(target=lane.run, daemon=True))
        threads[-1].start()
    with open(os.path.join(directory, "ready"), "w") as file:
        file.write("ready\n")
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
