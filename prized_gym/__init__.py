"""Fork a warm environment for every rollout, from inside the RL library you already use."""

from __future__ import annotations

import gymnasium as _gymnasium

from prized_gym.base import Base
from prized_gym.errors import (
    BaseDiedError,
    EngineUnavailableError,
    EpisodeOverError,
    ForkUnsafeError,
    InterruptedStepError,
    MissingExtraError,
    PrizedGymError,
    SandboxDiedError,
    SandboxError,
    SandboxTimeoutError,
    SetupError,
    SetupTimeoutError,
)
from prized_gym.interface.failure import CopyDiedError, CopyError, CopyTimeoutError, Failure
from prized_gym.interface.sandbox import Copy, KeptBase
from prized_gym.pricing import Prices
from prized_gym.rollouts import Rollout, Rollouts, Summary, rollouts
from prized_gym.vector.forked_env import ForkedEnv
from prized_gym.vector.forked_vector_env import ForkedVectorEnv
from prized_gym.vector.history import Episode
from prized_gym.version import __version__

__all__ = [
    "Base",
    "BaseDiedError",
    "Copy",
    "CopyDiedError",
    "CopyError",
    "CopyTimeoutError",
    "EngineUnavailableError",
    "Episode",
    "EpisodeOverError",
    "Failure",
    "ForkUnsafeError",
    "ForkedEnv",
    "ForkedVectorEnv",
    "InterruptedStepError",
    "KeptBase",
    "MissingExtraError",
    "Prices",
    "PrizedGymError",
    "Rollout",
    "Rollouts",
    "SandboxDiedError",
    "SandboxError",
    "SandboxTimeoutError",
    "SetupError",
    "SetupTimeoutError",
    "Summary",
    "__version__",
    "rollouts",
]

if "prized_gym/Forked-v0" not in _gymnasium.registry:
    _gymnasium.register(
        id="prized_gym/Forked-v0",
        entry_point="prized_gym.vector.forked_env:ForkedEnv",
        vector_entry_point="prized_gym.vector.forked_vector_env:ForkedVectorEnv",
    )
