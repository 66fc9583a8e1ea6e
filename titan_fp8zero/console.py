"""Where tables are printed."""

import shutil

from rich.console import Console

WIDTH = 160
"""Columns that every table fits into: at fewer, cells would be cut off, or whole columns."""


def stdout_console() -> Console:
    """As wide as the terminal, and never narrower than tables: a terminal wraps their lines."""
    return Console(width=max(WIDTH, shutil.get_terminal_size().columns))
