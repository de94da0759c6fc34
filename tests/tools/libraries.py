"""Importing the libraries these tests are about."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import pytest


def need(module: str, install: str) -> Any:
    """Import ``module``, or skip the whole test file; with ``PRIZED_GYM_REQUIRE_ALL=1`` a missing one is a failure."""
    return _import(module, install, allow_module_level=True)


def need_here(module: str, install: str) -> Any:
    """Import ``module``, or skip the test that asks; with ``PRIZED_GYM_REQUIRE_ALL=1`` a missing one is a failure."""
    return _import(module, install, allow_module_level=False)


def _import(module: str, install: str, allow_module_level: bool) -> Any:
    with warnings.catch_warnings():
        # What a library warns of while it is imported is not ours to mend.
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(module)
        except ImportError as error:
            if os.environ.get("PRIZED_GYM_REQUIRE_ALL") == "1":
                raise
            pytest.skip(
                f"{module} is not installed ({error}): pip install {install}", allow_module_level=allow_module_level
            )
