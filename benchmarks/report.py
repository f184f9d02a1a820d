"""Tables on the terminal, and result files that say what they were measured with."""

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jaxlib

_HERE = Path(__file__).resolve().parent


def table(rows, columns):
    """Lines of a table: ``columns`` is a list of (heading, row -> value); numbers are aligned to the right."""
    cells = [[heading for heading, _ in columns]] + [[_text(get(row)) for _, get in columns] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    right = [all(_is_number(row[i]) for row in cells[1:]) and len(cells) > 1 for i in range(len(columns))]
    pad = lambda text, i: text.rjust(widths[i]) if right[i] else text.ljust(widths[i])
    lines = ["  ".join(pad(text, i) for i, text in enumerate(row)).rstrip() for row in cells]
    return [lines[0], "  ".join("-" * w for w in widths), *lines[1:]]


def _text(value):
    if value is None:
        return "-"
    if isinstance(value, float):
        if value == 0:
            return "0"
        return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return str(value)


def _is_number(text):
    return bool(re.fullmatch(r"-|[-+]?[\d.]+(e[-+]?\d+)?|inf|nan", text))


def show(rows, columns):
    """Prints a table."""
    print("\n".join(table(rows, columns)), flush=True)


def device_name():
    """The name of the device that is measured."""
    device = jax.devices()[0]
    return _cpu_name() if device.platform == "cpu" else device.device_kind


def environment(commit=None):
    """What a result depends on: device, versions, commit, date and command line."""
    device = jax.devices()[0]
    return {
        "device": device_name(),
        "platform": device.platform,
        "device_count": len(jax.devices()),
        "runtime": " ".join(getattr(device.client, "platform_version", "").split()),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or None,
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "commit": commit or _output("git", "-C", str(_HERE), "describe", "--always", "--dirty", "--tags") or None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(_without_folders(x) for x in sys.argv),
    }


def _without_folders(argument):
    name, equals, value = argument.rpartition("=")
    return name + equals + (os.path.basename(value) if os.path.isabs(value) else value)


def _cpu_name():
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found[1].strip() if found else platform.machine()


def _output(*command):
    """What a command prints, or "" if it cannot be run."""
    if shutil.which(command[0]) is None:
        return ""
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else ""


def write_json(path, rows, commit=None):
    """Writes rows with their environment; the folder is created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(commit), "rows": rows}, indent=1, default=str) + "\n")
