"""Adapters to RL libraries that do not take a Gymnasium ``VectorEnv`` as it is. Each imports its library when imported."""
