"""Runs every ```python block of README.md and docs/*.md: the blocks of a file in order, in one namespace.

    python docs/run_blocks.py [FILE ...]

A block that raises fails the run with its file and line. What a block prints is compared with the ```text block that
follows it, if one does. JAX is given two CPU devices, for the blocks that divide work between devices.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import contextlib
import io
import re
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def run(path):
    """Runs the blocks of one file; returns how many passed, and whether all did."""
    text, namespace = path.read_text(), {"__name__": path.stem}
    for count, match in enumerate(BLOCK.finditer(text)):
        code, expected = match.groups()
        first_line, printed = text.count("\n", 0, match.start(1)), io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * first_line + code, str(path), "exec"), namespace)
        except Exception:
            traceback.print_exc()
            return count, False
        if expected is not None and [x.rstrip() for x in printed.getvalue().splitlines()] != expected.splitlines():
            print(
                f"{path}, line {first_line + 1}: the block printed\n{printed.getvalue()}and the page says\n{expected}"
            )
            return count, False
    return len(BLOCK.findall(text)), True


def main():
    paths = [Path(name) for name in sys.argv[1:]] or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    failed = []
    for path in paths:
        began, name = time.perf_counter(), os.path.relpath(path, ROOT)
        count, passed = run(path)
        print(
            f"{'ok  ' if passed else 'FAIL'} {name}: {count} blocks passed, {time.perf_counter() - began:.1f} s",
            flush=True,
        )
        failed += [] if passed else [name]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
