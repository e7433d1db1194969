"""Targets: how a plan runs. `host` is the CPU."""
