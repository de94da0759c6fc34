"""A policy acting in an environment that is served in a sandbox."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from prized_gym import background
from prized_gym.interface.commands import Reseed
from prized_gym.rollouts.policy import NoActionError, Policy, UserError, UserLoop
from prized_gym.rollouts.queue import Work
from prized_gym.rollouts.stepping import reset_of
from prized_gym.rollouts.ways import Outcome, Place, Way, beyond, finite
from prized_gym.sandbox.channels.channel import ChannelError
from prized_gym.sandbox.client import Client
from prized_gym.sandbox.failures import Watch

if TYPE_CHECKING:
    from prized_gym.sandbox.base import SandboxBase

_ANSWERING = 30.0


class PolicyWay(Way):
    """``policy(observation, info)`` acts until the episode ends.

    A plain policy is called by one thread, one call at a time; a coroutine function runs in the user's loop. A batched one
    gets whatever copies are waiting when it is free.
    """

    def __init__(self, handle: SandboxBase, policy: Policy, loop: UserLoop, from_base: bool) -> None:
        self._handle = handle
        self._policy = policy
        self._loop = loop
        self._from_base = from_base
        self._thread = background.Threads(1)
        self._waiting: list[tuple[Any, dict[str, Any], asyncio.Future[Any]]] = []
        self._asking: asyncio.Task[None] | None = None

    async def play(self, place: Place, work: Work, timeout: float | None) -> Outcome:
        client = self._handle.client(place.sandbox)
        try:
            return await self._play(client, place, work, beyond(timeout))
        finally:
            client.channel.close()

    async def _play(self, client: Client, place: Place, work: Work, limit: float) -> Outcome:
        if not await client.wait_ready(client.protocol.ready(), time.monotonic() + _ANSWERING, Watch(place.sandbox)):
            raise ChannelError("refused", "its server does not answer")
        observation, info = await client.command(place.slot, reset_of(work, self._from_base), limit)
        if work.start is not None:
            await client.command(place.slot, Reseed(work.seed), limit)
        total = 0.0
        while True:
            action = await self._act(observation, info)
            answer = await client.step(action, False, limit)
            observation, info = answer.obs, answer.info
            total += answer.reward
            place.length += 1
            place.so_far = info
            if answer.terminated or answer.truncated:
                return Outcome(finite(total), place.length, info)

    async def _act(self, observation: Any, info: dict[str, Any]) -> Any:
        if self._policy.batched:
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._waiting.append((observation, info, answer))
            if self._asking is None:
                self._asking = asyncio.get_running_loop().create_task(self._ask_for_all())
            return await answer
        return self._actions(await self._ask(observation, info), 1)[0]

    def _actions(self, answer: Any, count: int) -> list[Any]:
        """What the policy returned as one action per copy; a ``UserError`` if it is none."""
        try:
            leaves = self._policy.split(answer, count)
        except NoActionError as error:
            raise UserError("the policy", error) from error
        return [self._policy.single(leaves, number) for number in range(count)]

    async def _ask(self, observation: Any, info: Any) -> Any:
        """What the policy returned; what it raised as a ``UserError``."""
        return await self._loop.ask("the policy", self._thread, self._policy.function, observation, info)

    async def _ask_for_all(self) -> None:
        """Ask a batched policy for all copies that wait, until none does."""
        try:
            while self._waiting:
                # Those whose answers are in already join this batch.
                await asyncio.sleep(0)
                waiting, self._waiting = self._waiting, []
                waiting = [each for each in waiting if not each[2].done()]
                if waiting:
                    await self._ask_for(waiting)
        finally:
            self._asking = None

    async def _ask_for(self, waiting: list[tuple[Any, dict[str, Any], asyncio.Future[Any]]]) -> None:
        count = len(waiting)
        try:
            observations = self._policy.stack([each[0] for each in waiting])
            actions = self._actions(await self._ask(observations, [each[1] for each in waiting]), count)
        except Exception as error:
            for *_, answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (*_, answer), action in zip(waiting, actions, strict=True):
            if not answer.done():
                answer.set_result(action)

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
