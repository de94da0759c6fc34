"""The engine that makes bases from a provider's driver."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from prized_gym.interface.engine import Engine
from prized_gym.recipe import Recipe
from prized_gym.sandbox import sweeping
from prized_gym.sandbox.account import Guarded, account_of
from prized_gym.sandbox.base import SandboxBase
from prized_gym.sandbox.builder import Builder, Built
from prized_gym.sandbox.dialer import Dialer
from prized_gym.sandbox.driver import Capabilities, Driver
from prized_gym.sandbox.plan import OPTIONS, Plan, make_plan, options_from_labels
from prized_gym.sandbox.pool import SandboxPool
from prized_gym.sandbox.setup import Setup

__all__ = ["OPTIONS", "Capabilities", "SandboxEngine"]


class SandboxEngine(Engine):
    """Bases are sandboxes of one provider; a subclass names it and makes its driver."""

    options: ClassVar[Mapping[str, Any]] = OPTIONS
    sandboxes: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def driver(cls, options: Mapping[str, Any]) -> Driver:
        """What makes the sandboxes.

        Args:
            options: as :attr:`options`, all of them.

        Raises:
            EngineUnavailableError: it cannot be used here.
        """

    @classmethod
    def build(cls, recipe: Recipe, options: Mapping[str, Any], timeout: float | None, progress: bool) -> SandboxBase:
        driver = cls.driver(options)
        assembly = _Assembly(driver, make_plan(recipe, options, driver.capabilities), recipe, timeout, progress)
        return assembly.base(None)

    @classmethod
    def connect(cls, id: str, options: Mapping[str, Any], timeout: float | None, progress: bool) -> SandboxBase:
        driver = cls.driver(options)
        account = account_of(driver)
        sandbox = Guarded(account.ask(lambda: driver.connect(id)), account)
        try:
            recipe = Recipe(())
            known = {**options, **options_from_labels(sandbox.labels, options)}
            plan = make_plan(recipe, known, driver.capabilities, connecting=True)
            return _Assembly(driver, plan, recipe, timeout, progress, kept_id=id).base(sandbox)
        except BaseException:
            sandbox.close()
            raise

    @classmethod
    def sweep(cls) -> list[str]:
        driver = cls.driver(cls.options)
        return sweeping.sweep(driver, account_of(driver))


class _Assembly:
    """Puts a base together.

    Args:
        driver: of the provider.
        plan: of the base.
        recipe: of its environments.
        timeout: seconds that one set-up may take; None for no limit.
        progress: show a progress bar.
        kept_id: of the kept sandbox that is connected to.
    """

    def __init__(
        self,
        driver: Driver,
        plan: Plan,
        recipe: Recipe,
        timeout: float | None,
        progress: bool,
        kept_id: str | None = None,
    ) -> None:
        self._started = time.monotonic()
        account = account_of(driver)
        dialer = Dialer(plan, driver.capabilities.reachable, account)
        self._builder = Builder(driver, account, plan, dialer, kept_id)
        self._timeout, self._progress = timeout, progress
        self._pool = SandboxPool(driver.capabilities, account, self._builder, plan, self._new_setup)
        self._base = partial(SandboxBase, self._pool, dialer, plan, recipe)

    def _new_setup(self, show: bool) -> Setup:
        return Setup(self._timeout, self._progress and show)

    def base(self, sandbox: Guarded | None) -> SandboxBase:
        """Set the base up, or take the sandbox that it is.

        Raises:
            SetupError, SetupTimeoutError: it could not be set up.
        """
        built: Built = self._builder.build(self._new_setup(True)) if sandbox is None else self._builder.adopt(sandbox)
        self._pool.parents.add(built)
        base = self._base()
        try:
            base.describe(time.monotonic() - self._started)
        except BaseException:
            base.close()
            raise
        return base
