"""A server in the manner of an eval harness, plain ``http.server``: GET /rollout?seed=N plays an episode.

python episode_server.py PORT [threaded]
"""

import json
import os
import random
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

PLAYED = 0


def play(seed):
    return round(random.Random(seed).random(), 6)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        global PLAYED
        PLAYED += 1
        asked = {name: values[0] for name, values in parse_qs(urlparse(self.path).query).items()}
        what = asked.get("do", "")
        if what == "die":
            print("last words of the server", file=sys.stderr, flush=True)
            os._exit(7)
        if what == "hang":
            time.sleep(1000)
        answer = {"reward": play(int(asked.get("seed", 0))), "played": PLAYED, **asked}
        if what == "none":
            del answer["reward"]
        body = b"not JSON" if what == "garbage" else json.dumps(answer).encode()
        self.send_response(500 if what == "refuse" else 200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


if __name__ == "__main__":
    kind = ThreadingHTTPServer if "threaded" in sys.argv else HTTPServer
    kind(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
