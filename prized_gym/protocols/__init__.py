"""What a server in a base speaks: requests are built and answers are read here, without any I/O."""

from prized_gym.protocols.base import (
    EpisodeProtocol,
    Fresh,
    GymProtocol,
    Protocol,
    ProtocolError,
    RemoteError,
    Request,
    Response,
    ServerDescription,
    StepAnswer,
)

__all__ = [
    "EpisodeProtocol",
    "Fresh",
    "GymProtocol",
    "Protocol",
    "ProtocolError",
    "RemoteError",
    "Request",
    "Response",
    "ServerDescription",
    "StepAnswer",
]
