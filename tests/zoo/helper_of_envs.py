"""A module beside the environments."""

ANSWER = 42
