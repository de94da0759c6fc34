"""Gymnasium's vector environment over forks of a warm base."""
