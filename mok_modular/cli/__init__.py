"""The command `mok-modular`: `commands.main`, a module per command, and what the commands show."""

from mok_modular.cli.commands import main

__all__ = ["main"]
