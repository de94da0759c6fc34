"""Connections to servers in sandboxes, dialed in threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from prized_gym import background
from prized_gym.recipe import Recipe
from prized_gym.sandbox.account import Account
from prized_gym.sandbox.channels.channel import ChannelError
from prized_gym.sandbox.channels.http import Dialed
from prized_gym.sandbox.dialer import Dialer
from prized_gym.sandbox.driver import Capabilities
from prized_gym.sandbox.plan import OPTIONS, make_plan


class _Slow:
    """A sandbox whose connections take until they are let through."""

    id, scratch, asleep = "slow", "/scratch", False

    def __init__(self) -> None:
        self.dialed, self.let = threading.Event(), threading.Event()
        self.ours, self.theirs = socket.socketpair()

    def hold(self) -> Any:
        return contextlib.nullcontext()

    def connect(self, port: int, timeout: float = 10.0) -> Dialed:
        self.dialed.set()
        assert self.let.wait(30)
        return Dialed(self.ours)


def test_a_connection_that_comes_after_it_was_given_up_is_closed() -> None:
    sandbox = _Slow()
    plan = make_plan(Recipe(("CartPole-v1",)), OPTIONS, Capabilities())
    channel = Dialer(plan, True, Account(None)).channel(sandbox)  # type: ignore[arg-type]
    try:
        background.run(channel.reach(0.2), 30)
        raise AssertionError("it was not to be reached")
    except ChannelError as error:
        assert error.kind == "timeout"
    assert sandbox.dialed.is_set()
    sandbox.let.set()
    sandbox.theirs.settimeout(30)
    with sandbox.theirs:
        assert sandbox.theirs.recv(1) == b""  # closed, and by no garbage collector
