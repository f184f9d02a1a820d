"""Tables and charts of the benchmark page: a section for each file in benchmarks/results, whatever is in it.

Device, versions and commit are those that the file records. Rows of timed workloads become charts, and a table for each
pass with a column for each implementation; rows of any other kind become a table of their fields.
"""

import contextlib
import importlib
import io
import json
import math
import re
import sys
import tempfile
from pathlib import Path


def write(folder, out):
    """Writes benchmarks.md and its charts into ``out``; docs/benchmarks.md, beside that, includes it."""
    out.mkdir(exist_ok=True)
    for old in out.glob("*"):
        old.unlink()
    parts = []
    for path in sorted(Path(folder, "results").glob("*.json")):
        result = json.loads(path.read_text())
        result = result if isinstance(result, dict) else {"rows": result}
        rows = result.get("rows", [])
        timed = [row for row in rows if _is_timed(row)]
        parts.append(f"## {path.stem}\n\n{_origin(result, path)}")
        for which in dict.fromkeys(row["pass"] for row in timed):
            parts.append(f"### {path.stem}: {which}\n\n{_times([row for row in timed if row['pass'] == which])}")
        for title, group in _others(row for row in rows if not _is_timed(row)).items():
            parts.append(f"### {path.stem}: by {_plain(title)}\n\n{_fields(group)}")
        for name, content in _charts(Path(folder), path, rows, timed).items():
            (out / name).write_bytes(content)
            parts.append(f"![{name.removesuffix('.png').replace('_', ' ')}](generated/{name})")
    (out / "benchmarks.md").write_text("\n\n".join(parts) + "\n")


def _is_timed(row):
    return isinstance(row.get("shape"), dict) and {"workload", "pass", "implementation"} <= row.keys()


def _origin(result, path):
    """What a file was measured with, in a few lines."""
    # `python -m jax_dma bench --json` has the device and the versions beside the rows.
    environment = result.get("environment") or {"device": result.get("device"), **result.get("versions", {})}
    known = {
        "device": "**{}**", "device_count": "devices: {}", "cpu_cores": "{} CPU cores", "runtime": "runtime {}",
        "driver": "driver {}", "python": "Python {}", "jax": "jax {}", "jaxlib": "jaxlib {}", "jax_dma": "jax_dma {}",
        "commit": "commit `{}`", "date": "{}",
    }  # fmt: skip
    environment = {**environment, "date": str(environment.get("date", ""))[:10]}
    facts = [text.format(environment[key]) for key, text in known.items() if environment.get(key) not in (None, "")]
    command = f"`{environment['command']}`, " if environment.get("command") else ""
    call = f"`{result['explanation']}`, " if isinstance(result.get("explanation"), str) else ""
    return f"{', '.join(facts) or 'Not recorded'}\\\n{command}{call}[{path.name}](../benchmarks/results/{path.name})"


def _times(rows):
    """A row for each workload, a column of milliseconds for each implementation; notes on what did not run."""
    names = list(dict.fromkeys(row["implementation"] for row in sorted(rows, key=lambda row: not row.get("ours"))))
    ours = [name for name in names if any(row["implementation"] == name and row.get("ours") for row in rows)]
    workloads, limits = {}, any(row.get("limit_ms") for row in rows)
    for row in rows:
        workloads.setdefault(row["workload"], {})[row["implementation"]] = row
    compares = 0 < len(ours) < len(names)

    def line(workload, by_name):
        first = next(iter(by_name.values()))
        times = {name: row["ms"] for name, row in by_name.items() if row.get("ms")}
        best = lambda these: min((times[name] for name in these if name in times), default=math.nan)
        ratio = best(ours) / best([name for name in names if name not in ours])
        return [
            f"`{workload}`", _problem(first["shape"]), *[_number(times.get(name)) for name in names],
            *[_number(first.get("limit_ms"))] * limits, *["-" if math.isnan(ratio) else f"{ratio:.2f}"] * compares,
        ]  # fmt: skip

    headings = ["workload", "problem", *[_with_family(name, rows) for name in names], *["limit"] * limits]
    headings += ["ours / best peer"] * compares
    body = _table(headings, [line(*item) for item in workloads.items()])
    notes = dict.fromkeys(
        f"- `{row['implementation']}`, `{row['workload']}`: {_plain(row['error'])}" for row in rows if row.get("error")
    )
    explained = "Milliseconds."
    if limits:
        explained += " The limit is the larger of arithmetic at the device's peak rate and bytes at its bandwidth."
    return "\n\n".join([explained, body, *(["\n".join(notes)] if notes else [])])


def _with_family(name, rows):
    """An implementation's name, with the family of CUDA kernels that its profile shows."""
    kernels = str([row.get("kernels") for row in rows if row["implementation"] == name])
    families = sorted(set(re.findall(r"jax_dma_(sm\d+)_", kernels)))
    return f"`{name}`" + (f" ({', '.join(families)})" if families else "")


def _problem(shape):
    """A workload in a few words."""
    lengths = f"T{shape['T']}" + (f" S{shape['S']}" if shape["S"] != shape["T"] else "")
    channels = f"H{shape['H']}" + (f" Hv{shape['Hv']}" if shape.get("Hv", shape["H"]) != shape["H"] else "")
    parts = [f"B{shape['B']} {lengths} N{shape['N']} K{shape['K']} {channels} {shape['dtype']}"]
    parts += ["causal"] * bool(shape.get("causal"))
    if shape.get("mask"):
        parts.append(f"mask {shape['mask']['kind']} {shape['mask']['size']:g}")
    if shape.get("bias"):
        parts.append(f"bias per {shape['bias']}")
    return ", ".join(parts)


def _others(rows):
    """Rows that are no timed workloads, by their first field."""
    groups = {}
    for row in rows:
        groups.setdefault(next(iter(row), ""), []).append(row)
    return groups


def _fields(rows):
    """A table of all fields that hold one value."""
    scalar = lambda value: value is None or isinstance(value, (str, int, float))
    values = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
    values = {key: x for key, x in values.items() if all(map(scalar, x)) and any(y not in (None, "") for y in x)}
    return _table([key.replace("_", " ") for key in values], zip(*([_number(y) for y in x] for x in values.values())))


def _charts(folder, path, rows, timed):
    """From the names of charts to PNG files, drawn by the scripts that benchmarks are drawn with."""
    sys.path.insert(0, str(folder))
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        if any(row.get("ms") for row in timed):
            file = Path(out, path.name)  # without the rows that are not of workloads
            file.write_text(json.dumps({**json.loads(path.read_text()), "rows": timed}))
            importlib.import_module("plot").main([str(file), "--out", out])
        if any("kind" in row and "forward_ms" in row for row in rows):
            importlib.import_module("long_context").plot(rows, str(Path(out, f"{path.stem}.png")))
        return {file.name: file.read_bytes() for file in sorted(Path(out).glob("*.png"))}


def _table(headings, rows):
    cells = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(str(x).replace("|", "\\|") for x in row) + " |" for row in cells)


def _number(value):
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return _plain(value)
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _plain(value):
    """Text in which nothing is Markdown."""
    return re.sub(r"([\\`*_<>\[\]])", r"\\\1", " ".join(str(value).split()))
