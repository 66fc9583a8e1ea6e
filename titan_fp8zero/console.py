"""Where tables are printed."""

import sys

from rich.console import Console

WIDTH = 140
"""Columns where the output is no terminal: cells would be cut off at fewer."""


def stdout_console() -> Console:
    """As wide as the terminal, if stdout is one."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)
