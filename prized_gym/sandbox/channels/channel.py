"""What a channel is: it brings one request to the server in a copy and its answer back, bounded in size and time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from prized_gym.errors import PrizedGymError
from prized_gym.protocols import Request, Response

ErrorKind = Literal["refused", "closed", "timeout", "garbage", "large"]


class ChannelError(PrizedGymError):
    """A request got no answer.

    Attributes:
        kind: ``refused`` (nobody listens), ``closed`` (the server ended before its answer did), ``timeout``, ``garbage``
            (no HTTP), ``large`` (more than may be read).
        answered: whether any byte of an answer had come.
    """

    def __init__(self, kind: ErrorKind, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.answered = answered


class Channel(ABC):
    """One server, reached one way. Used in the background loop only."""

    @property
    def waited(self) -> float:
        """Seconds that requests have waited for their turn so far, which count toward no time limit."""
        return 0.0

    @abstractmethod
    async def ask(self, request: Request, *, limit: int, timeout: float) -> Response:
        """Bring a request to the server.

        Args:
            request: what to ask.
            limit: bytes that the body of the answer may have; no more is read.
            timeout: seconds until the whole answer must be there, from when it is the request's turn.

        Raises:
            ChannelError: there is none.
            SandboxError: the sandbox is not one to ask.
        """

    @abstractmethod
    async def reach(self, timeout: float) -> None:
        """Only find out whether anybody listens. Raises as :meth:`ask`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of every connection; what is in flight fails. The channel can be used again."""


def name_of(request: Request) -> str:
    """How errors name a request."""
    return f"{request.method} {request.path[:200]}"
