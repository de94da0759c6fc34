"""What an engine is: it makes bases, and a base makes fleets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gymnasium.envs.registration import EnvSpec

from prized_gym.batch import AnySpace
from prized_gym.errors import EngineUnavailableError
from prized_gym.interface.fleet import UNLIMITED, Fleet, TimeLimits
from prized_gym.interface.sandbox import KeptBase, SandboxHandle
from prized_gym.recipe import Recipe


@dataclass
class Description:
    """What a base tells of its environments.

    Attributes:
        observation_space, action_space: of one copy.
        metadata: a copy of the environment's.
        render_mode: the environment's.
        spec: the environment's spec, if it has one.
        seconds: how long building and warming up took.
    """

    observation_space: AnySpace
    action_space: AnySpace
    metadata: dict[str, Any]
    render_mode: str | None
    spec: EnvSpec | None
    seconds: float


class BaseHandle(ABC):
    """A base, as its engine holds it: live, or about to be built anew from its recipe if it has died."""

    description: Description

    @property
    def seconds(self) -> float:
        """How long setting it up took."""
        return self.description.seconds

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the base can be forked as it is, as far as is known."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The base's pid or sandbox id, for messages."""

    @property
    def copy_size(self) -> tuple[float, float] | None:
        """The vCPUs and the GB of memory that each copy is given and charged for; None where it takes what it uses."""
        return None

    @property
    def tells_cost(self) -> bool:
        """Whether the usage of a copy has what its provider bills for it."""
        return False

    @abstractmethod
    def revive(self) -> None:
        """Build the base anew from its recipe, its environment reset as before, if it has died. Thread-safe.

        Raises:
            BaseDiedError: it is closed, or there is no recipe.
            Exception: what building it raised.
        """

    @abstractmethod
    def fleet(self, size: int, limits: TimeLimits = UNLIMITED, labels: Mapping[str, str] | None = None) -> Fleet:
        """A fleet of ``size`` copies, none of them forked yet.

        Args:
            size: how many.
            limits: what the fleet enforces.
            labels: of its copies, where copies have labels; None: the base's.

        Raises:
            BaseDiedError: the base is closed.
        """

    @abstractmethod
    def reset_environment(self, seed: int | None) -> None:
        """Reset the environment in the base, for copies to start from; once, further calls do nothing.

        Raises:
            BaseDiedError: the base is gone.
            Exception: what ``env.reset`` raised.
        """

    def sandbox(self) -> SandboxHandle:
        """The base as the sandbox that it is.

        Raises:
            EngineUnavailableError: it is none.
            BaseDiedError: it is closed.
        """
        raise EngineUnavailableError(
            f"this base ({self.where}) is no sandbox: commands, files, fork() and keep() need engine='gvisor' or another "
            "whose bases are sandboxes"
        )

    @abstractmethod
    def close(self) -> None:
        """End the base and whatever is left of its copies. Can be called again, never raises."""


class Engine(ABC):
    """Makes bases of one kind."""

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    """The keyword options of this engine and their defaults."""

    sandboxes: ClassVar[bool] = False
    """Whether its bases are whole sandboxes, with commands, files and servers; then it has :meth:`connect` too."""

    @classmethod
    @abstractmethod
    def check(cls) -> None:
        """Raise :class:`~prized_gym.errors.EngineUnavailableError` where this engine cannot run, saying what can."""

    @classmethod
    @abstractmethod
    def build(cls, recipe: Recipe, options: Mapping[str, Any], timeout: float | None, progress: bool) -> BaseHandle:
        """Set a base up. A recipe without sources is possible where ``sandboxes`` is set.

        Raises:
            SetupError: it could not be set up; SetupTimeoutError: not within ``timeout`` seconds.
            Exception: what the user's factory or ``warm_up`` raised.
        """

    @classmethod
    def is_id(cls, text: str) -> bool:
        """Whether a string is the id of a kept base of this engine, and no env id."""
        return False

    @classmethod
    def connect(cls, id: str, options: Mapping[str, Any], timeout: float | None, progress: bool) -> BaseHandle:
        """A base that was kept, from whichever process.

        Raises:
            EngineUnavailableError: bases of this engine cannot be kept.
        """
        raise EngineUnavailableError(
            f"a base of engine={cls.name!r} ends with its process: there is none to connect to"
        )

    @classmethod
    def kept(cls) -> list[KeptBase]:
        """The bases of this engine that :meth:`prized_gym.Base.keep` left behind, oldest first; none where it keeps none.

        Raises:
            EngineUnavailableError: the engine cannot run here.
        """
        return []

    @classmethod
    def remove(cls, id: str) -> bool:
        """Delete a kept base. Copies forked from it are not touched.

        Returns:
            Whether there was one.

        Raises:
            EngineUnavailableError: the engine cannot run here.
        """
        return False

    @classmethod
    def sweep(cls) -> list[str]:
        """Delete kept bases that have expired, and what programs left behind that are no more.

        Returns:
            The ids or names of what was deleted.

        Raises:
            EngineUnavailableError: the engine cannot run here.
        """
        return []
