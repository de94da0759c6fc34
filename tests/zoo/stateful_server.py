"""A server with threads, a child process, a database in WAL mode, an open log file and a torch model, all in use."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

ballast = os.urandom(1 << 20) * 50
database = sqlite3.connect("state.db", check_same_thread=False)
database.execute("pragma journal_mode=wal")
database.execute("create table notes (text)")
database.execute("insert into notes values ('base')")
database.commit()
log = open("server.txt", "a", buffering=1)
log.write("base\n")
child = subprocess.Popen(
    [sys.executable, "-S", "-u", "-c", "n = 0\nfor line in iter(input, ''):\n    n += 1\n    print(n, line)"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
)  # fmt: skip
ticks = 0
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
lock = threading.Lock()


def tick():
    global ticks
    while True:
        time.sleep(0.01)
        ticks += 1


threading.Thread(target=tick, daemon=True).start()


def use(word):
    with lock:
        database.execute("insert into notes values (?)", (word,))
        database.commit()
        log.write(word + "\n")
        child.stdin.write(word + "\n")
        before = ticks
        time.sleep(0.05)
        torch.manual_seed(len(word))
        return {
            "notes": [row[0] for row in database.execute("select text from notes")],
            "integrity": database.execute("pragma integrity_check").fetchone()[0],
            "log": open("server.txt").read().split(),
            "child": child.stdout.readline().strip(),
            "child_pid": child.pid,
            "ticking": ticks > before,
            "output": model(torch.ones(8)).item(),
            "draw": torch.rand(()).item(),
            "ballast": len(ballast),
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        content = json.dumps({} if self.path == "/" else use(self.path[1:])).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


use("warm")
ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
