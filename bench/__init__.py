"""Benchmarks: ``python -m bench step``, ``fork``, ``sandbox`` and ``rollouts``.

Each compares within one run, in interleaved repeats, and reports medians and ratios: absolute times say more about the
machine than about the library.
"""
