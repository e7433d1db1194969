"""How a command ends: its exit code, and what went wrong as one line on stderr."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from mok_modular.cli.common import print_json
from mok_modular.protocol.errors import MoKPeerError, MoKTimeoutError
from mok_modular.targets.build import BuildError
from mok_modular.targets.cuda.nvrtc import CompileError

FAILED, WRONG_ARGUMENTS = 1, 2
INTERRUPTED, CLOSED_PIPE = 128 + 2, 128 + 13
"""As a shell tells a process that SIGINT or SIGPIPE has ended."""


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parses `argv`, runs the command and returns its exit code.

    Raises SystemExit for wrong arguments, and what is an error of this program.
    """
    name, is_json = parser.prog, False
    try:
        args = parser.parse_args(argv)
        name, is_json = f"{parser.prog} {args.name}", args.json
        code = int(args.command(args))
        sys.stdout.flush()  # here, where a closed pipe is no error
        return code
    except KeyboardInterrupt:
        _tell(f"{name}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _close_output()
        return CLOSED_PIPE
    except (MoKTimeoutError, MoKPeerError, BuildError, ImportError, CompileError, MemoryError) as error:
        return _failed(name, is_json, error)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return _failed(name, is_json, error)
    except OSError as error:
        if error.filename is None:  # of no argument
            return _failed(name, is_json, error)
        return parser.exit(WRONG_ARGUMENTS, f"{name}: error: {_one_line(error)}\n")
    except ValueError as error:
        return parser.exit(WRONG_ARGUMENTS, f"{name}: error: {_one_line(error)}\n")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not allocate: on a CPU it says so in a plain RuntimeError."""
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def _failed(name: str, is_json: bool, error: Exception) -> int:
    _tell(f"{name}: {type(error).__name__}: {error}")
    if is_json:
        print_json({"ok": False, "error": str(error)})
    return FAILED


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _close_output() -> None:
    """What is still buffered goes nowhere, so that the interpreter's exit does not meet the closed pipe again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
