"""What the README shows of sandboxes runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prized_gym

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```python gvisor\n(.*?)```", README, re.DOTALL)


@pytest.mark.timeout(120)
def test_readme_sessions(gvisor: str, tmp_path: Path) -> None:
    assert BLOCKS
    for block in BLOCKS:
        done = subprocess.run(
            [sys.executable, "-c", block], capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines() == re.findall(r"^print\(.*\)\s+# (.*)$", block, re.MULTILINE)


COUNTER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
count = 0
class Counter(BaseHTTPRequestHandler):
    def do_POST(self):
        global count
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = asked["seed"] if self.path == "/begin" else count + asked["by"]
        body = json.dumps({"count": count, "reward": asked.get("by", 0), "over": count >= 10}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[2])), Counter).serve_forever()
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("engine", ["plain", "gvisor"])
def test_the_protocol_it_shows_steps_a_server(engine: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if engine == "gvisor":
        request.getfixturevalue("gvisor")
    shown: dict[str, Any] = {}
    (block,) = (each for each in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "(Protocol)" in each)
    exec(block, shown)
    (tmp_path / "counter.py").write_text(COUNTER)
    with prized_gym.Base(
        engine=engine,
        upload={str(tmp_path / "counter.py"): "counter.py"},
        start=f"{sys.executable if engine == 'plain' else 'python'} counter.py --port 8000",
        protocol=shown["Counter"](),
        progress=False,
    ) as base:
        envs = prized_gym.ForkedVectorEnv(base, num_envs=2)
        try:
            assert envs.reset(seed=3)[0].tolist() == [[3.0], [4.0]]
            observations, rewards, *_ = envs.step(np.array([4, 1]))
            assert observations.tolist() == [[7.0], [5.0]] and rewards.tolist() == [4.0, 1.0]
            assert envs.step(np.array([3, 0]))[2].tolist() == [True, False]
        finally:
            envs.close()
        found = prized_gym.rollouts(base, range(3), 2, policy=lambda observation, info: 2, progress=False)
        assert sorted((each.seed, each.reward, each.length) for each in found) == [(0, 10, 5), (1, 10, 5), (2, 8, 4)]
