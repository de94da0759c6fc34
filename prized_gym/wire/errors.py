"""The errors of the wire layer."""

from __future__ import annotations

import builtins

from prized_gym.errors import PrizedGymError

__all__ = ["ProtocolError", "RemoteError", "WireError"]


class WireError(PrizedGymError, ValueError):
    """A value cannot be sent, or what was received is malformed, too large or not what was announced."""


class ProtocolError(PrizedGymError, RuntimeError):
    """A server answered something its protocol does not allow.

    Attributes:
        url: what was asked, as the transport named it.
        status: the HTTP status, or None when there was no answer to speak of.
        body: the beginning of the answer as text, at most ``BODY_SHOWN`` characters.
    """

    BODY_SHOWN = 2000

    def __init__(self, message: str, *, url: str = "", status: int | None = None, body: bytes | str = b"") -> None:
        text = body if isinstance(body, str) else body[: 4 * self.BODY_SHOWN].decode("utf-8", "backslashreplace")
        self.url, self.status, self.body = url, status, text[: self.BODY_SHOWN]
        where = " ".join(part for part in (url, "" if status is None else f"(HTTP {status})") if part)
        super().__init__(": ".join(part for part in (where, message) if part) + (f"\n{self.body}" if self.body else ""))


class RemoteError(ProtocolError):
    """The environment behind the server raised.

    Attributes:
        type_name: the remote exception's class: a bare name for a built-in, else ``module.Name``.
        message: its text.
        arguments: its ``args`` where they are plain values, else its text alone.
        traceback: the remote traceback as text.
    """

    SHOWN = 20_000

    def __init__(
        self,
        type_name: str,
        message: str,
        traceback: str,
        *,
        arguments: tuple[object, ...] | None = None,
        url: str = "",
        status: int | None = None,
    ) -> None:
        self.type_name, self.message = type_name[:200], message[: self.SHOWN]
        self.arguments = (self.message,) if arguments is None else arguments
        self.traceback = traceback[-self.SHOWN :]
        text = f"{self.type_name}: {self.message}\n\nRemote traceback:\n{self.traceback}"
        super().__init__(text, url=url, status=status)

    def original(self) -> Exception:
        """The remote exception as its own type where that is a built-in or Gymnasium's, else this error.

        The name came from a sandbox, so only plain ``Exception`` classes of these two modules are looked up: no name can
        end the interpreter or import a module.
        """
        import gymnasium.error

        module, _, name = self.type_name.rpartition(".")
        homes = {"": builtins, "gymnasium.error": gymnasium.error}
        kind = getattr(homes.get(module), name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            return self
        try:
            error = kind(*self.arguments)
        except Exception:  # a class that wants other arguments than it was given to print
            return self
        error.__cause__ = self
        return error
