"""Rollouts: a fresh fork for every episode, of anything, with the rewards collected."""

from prized_gym.rollouts.record import Rollout, Summary
from prized_gym.rollouts.run import Rollouts, rollouts

__all__ = ["Rollout", "Rollouts", "Summary", "rollouts"]
