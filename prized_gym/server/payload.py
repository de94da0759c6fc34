"""A recipe as a file that the trainer writes and the server in its sandbox reads: a header of two lines, then a pickle.

This direction is trusted: the sandbox runs what the trainer sends. The header is read before anything is unpickled,
because a pickle of functions made by another minor version of Python crashes rather than fails.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

from prized_gym import by_value
from prized_gym.errors import PrizedGymError
from prized_gym.version import __version__

__all__ = ["PayloadError", "read_payload", "write_payload"]

_MAGIC = b"prized_gym payload 1\n"


class PayloadError(PrizedGymError, RuntimeError):
    """A payload is not one, is cut short, or was written by another version of Python."""


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def write_payload(path: str | Path | None, recipe: Any) -> bytes:
    """``recipe`` as a payload.

    Args:
        path: where to write it, or None to only return it.
        recipe: a ``prized_gym.recipe.Recipe``, or what one is made from: a callable that builds an environment, an
            ``EnvSpec``, or an env id. If it has a method ``dumps``, that pickles it.

    Returns:
        The payload's bytes.

    Raises:
        Exception: whatever pickling the recipe raises.
    """
    dumps = getattr(recipe, "dumps", None)
    pickled: bytes = dumps() if callable(dumps) else by_value.dumps(recipe)
    head = {"python": _python_version(), "library": __version__, "size": len(pickled)}
    payload = _MAGIC + json.dumps(head).encode() + b"\n" + pickled
    if path is not None:
        Path(path).write_bytes(payload)
    return payload


def read_payload(source: str | Path | bytes) -> Any:
    """What was given to ``write_payload``, from the payload or the file that holds it.

    Raises:
        PayloadError: it is no payload, is incomplete, or comes from another minor version of Python; nothing has
            been unpickled then.
        Exception: whatever unpickling raises, such as a ``ModuleNotFoundError`` for a package this machine lacks.
    """
    payload = source if isinstance(source, bytes) else Path(source).read_bytes()
    magic, line, pickled = payload[: len(_MAGIC)], *payload[len(_MAGIC) :].partition(b"\n")[::2]
    try:
        if magic != _MAGIC:
            raise ValueError
        head = json.loads(line)
        python, library, size = str(head["python"]), str(head["library"]), int(head["size"])
    except (ValueError, KeyError, TypeError):
        raise PayloadError("this is no payload of prized_gym: write one with prized_gym.server.write_payload") from None
    if python != _python_version():
        raise PayloadError(
            f"the payload was written by Python {python} (prized_gym {library}), this is {_python_version()} "
            f"(prized_gym {__version__}): functions cannot be sent between minor versions. Use {python} in the "
            "sandbox, or name the environment by an id or as module:function"
        )
    if len(pickled) != size:
        raise PayloadError(f"the payload is cut short: {len(pickled)} of {size} bytes")
    return pickle.loads(pickled)
