"""What a call of ``rollouts()`` asks for: how episodes are played, in what, for how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prized_gym.background import Threads
from prized_gym.base import Base
from prized_gym.errors import EngineUnavailableError
from prized_gym.pricing import Prices
from prized_gym.rollouts.policy import Policy, UserLoop
from prized_gym.rollouts.queue import RolloutQueue
from prized_gym.rollouts.stepping import PolicyRunner

if TYPE_CHECKING:
    from prized_gym.rollouts.ways import Way


@dataclass(frozen=True)
class RolloutPlan:
    """What is to be done, and with what.

    Attributes:
        base: what is forked.
        name: how an episode is played: ``"policy"``, ``"request"``, ``"command"`` or ``"episode"``.
        what: the policy, request, command or function.
        copies, batched, reward, timeout, reset_in, prices, labels: as for :func:`rollouts`.
        with_tasks: whether there are tasks.
    """

    base: Base
    name: str
    what: Any
    copies: int
    batched: bool
    reward: str | Callable[[Any], float] | None
    timeout: float | None
    reset_in: str
    prices: Prices | None
    labels: Mapping[str, str] | None
    with_tasks: bool

    def check(self) -> None:
        """Check what can be checked before anything is forked.

        Raises:
            EngineUnavailableError: it plays in a sandbox, and the base is none.
            TypeError, ValueError: an argument that does not fit.
        """
        if self.name == "policy":
            self.policy()
            return
        if not self.base.is_sandbox:
            raise EngineUnavailableError(
                f"{self.name}= plays in a sandbox, and a base of engine={self.base.engine!r} is none: use policy=, or "
                "engine='gvisor' or another whose bases are sandboxes"
            )
        loop = UserLoop()
        self.way(loop).close()

    def policy(self) -> Policy:
        """The policy, with the spaces of the base."""
        return Policy(self.what, self.batched, self.base.action_space)

    def runner(self, queue: RolloutQueue, loop: UserLoop, thread: Threads | None) -> PolicyRunner:
        """What plays the queue with the policy."""
        return PolicyRunner(
            self.base,
            self.copies,
            self.policy(),
            queue,
            timeout=self.timeout,
            reset_in=self.reset_in,
            prices=self.prices,
            labels=self.labels,
            loop=loop,
            thread=thread,
        )

    def way(self, loop: UserLoop) -> Way:
        """How an episode is played in a sandbox without a policy."""
        from prized_gym.rollouts import ways

        if self.name == "request":
            return ways.RequestWay(self.what, self.reward, loop)
        if self.name == "command":
            return ways.CommandWay(self.what, self.reward, loop)
        return ways.EpisodeWay(self.what, self.reward, loop, self.with_tasks)
