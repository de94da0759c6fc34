"""Fleets made of fleets: a limit, several bases or several machines, seen as one fleet."""
