"""What the README shows of sandboxes runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
