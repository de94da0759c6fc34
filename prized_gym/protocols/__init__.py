"""What a server in a base speaks, without any I/O.

How a request travels, over HTTP or through a command inside the sandbox, is the channel's affair. A server of your own
is described by a subclass of :class:`Protocol`; only ``reset`` and ``step`` must be written. Each operation is a generator:
it yields a :class:`Request`, is sent the :class:`Response`, and returns what it read there. Answers come from a sandbox, so
each is bounded and checked before anything of it is used. :func:`drive` runs an operation over any function that brings a
request to a server:

    >>> def ask(request):
    ...     print(request.method, request.path)
    ...     return Response(200, {}, b'{"reward": 0.5, "text": "fine"}')
    >>> protocol = EpisodeProtocol("/rollout?seed={seed}", reward="reward")
    >>> drive(protocol.reset(7, None), ask)[1]              # asks nothing: the episode is played by the step
    {'seed': 7}
    >>> step = drive(protocol.step(0), ask)
    GET /rollout?seed=7
    >>> step.reward, step.terminated, step.info["text"]
    (0.5, True, 'fine')
"""

from prized_gym.interface.commands import Fresh
from prized_gym.protocols.base import (
    Exchange,
    Protocol,
    Request,
    Response,
    ServerDescription,
    StepAnswer,
    UnsupportedError,
    drive,
)
from prized_gym.protocols.episode import EpisodeProtocol
from prized_gym.protocols.gym import GymProtocol
from prized_gym.wire.errors import ProtocolError, RemoteError

__all__ = [
    "EpisodeProtocol",
    "Exchange",
    "Fresh",
    "GymProtocol",
    "Protocol",
    "ProtocolError",
    "RemoteError",
    "Request",
    "Response",
    "ServerDescription",
    "StepAnswer",
    "UnsupportedError",
    "drive",
]
