"""What commands show: a line of progress and a table."""

import sys


def progress(text=""):
    """Replaces the line that is shown on a terminal, and says nothing to anything else."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def table(headings, rows):
    """Lines of a table. Columns of numbers are aligned to the right."""
    cells = [headings, *([_text(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    right = [any(isinstance(row[i], (int, float)) for row in rows) for i in range(len(headings))]
    pad = lambda text, i: text.rjust(widths[i]) if right[i] else text.ljust(widths[i])
    return ["  ".join(pad(text, i) for i, text in enumerate(row)).rstrip() for row in cells]


def _text(value):
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-2 else f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return str(value)


def one_line(error, length=300):
    """An exception as a short line of text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:length]
