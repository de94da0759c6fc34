"""What the agent and the host both know of the inside of a sandbox."""

from __future__ import annotations

from typing import Final

SOCKET: Final = "/ctl/a.sock"
"""Where the host listens."""
HOME: Final = "/home/user"
UID: Final = 1000
"""Of the user and of its group."""
MAX_PROCESSES: Final = 1024
"""The user's processes, threads included: a fork bomb meets this limit before it meets the host."""
