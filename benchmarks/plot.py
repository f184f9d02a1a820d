"""Charts of result files: time and TFLOP/s against length, time against sparsity, and bars for everything else.

Writes ``<result>_<chart>_<pass>.png`` beside the first file, or in --out. Several files are drawn together.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

_BARS = 14  # workloads in one bar chart


def read(paths):
    """(rows with a time, environment of the first file)."""
    files = [json.loads(Path(path).read_text()) for path in paths]
    return [row for file in files for row in file["rows"] if row.get("ms")], files[0]["environment"]


def _by_implementation(rows, x, y):
    """{implementation: sorted [(x, y)]}."""
    series = {}
    for row in rows:
        series.setdefault(row["implementation"], []).append((x(row), y(row)))
    return {name: sorted(points) for name, points in series.items()}


def _style(row_ours):
    return {"linewidth": 2.2, "marker": "o"} if row_ours else {"linewidth": 1.2, "marker": ".", "linestyle": "--"}


def lines(rows, x, y, labels, title, path, log=True):
    """A line for each implementation; those of jax_dma are solid."""
    ours = {row["implementation"] for row in rows if row["ours"]}
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, points in _by_implementation(rows, x, y).items():
        axes.plot(*zip(*points), label=name, **_style(name in ours))
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    _finish(figure, axes, title, path)


def bars(rows, title, path):
    """A group of bars for each workload, and the arithmetic limit as a mark."""
    names = list(dict.fromkeys(row["workload"] for row in rows))
    kinds = list(dict.fromkeys(row["implementation"] for row in rows))
    figure, axes = plt.subplots(figsize=(max(7, 1.1 * len(names)), 4.8))
    width = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        times = {row["workload"]: row["ms"] for row in rows if row["implementation"] == kind}
        at = [j for j, name in enumerate(names) if name in times]
        axes.bar([j + (i - (len(kinds) - 1) / 2) * width for j in at], [times[names[j]] for j in at], width, label=kind)
    limits = {row["workload"]: row["limit_ms"] for row in rows if row.get("limit_ms")}
    for j, name in enumerate(names):
        if name in limits:
            label = "limit" if name == next(iter(limits)) else None
            axes.hlines(limits[name], j - 0.42, j + 0.42, colors="black", linestyles=":", label=label)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes.set_yscale("log")
    axes.set_ylim(bottom=min([row["ms"] for row in rows] + list(limits.values())) / 2)
    axes.set_ylabel("milliseconds")
    _finish(figure, axes, title, path)


def _finish(figure, axes, title, path):
    axes.set_title(title, fontsize=9)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(path)


def _length_families(rows):
    """Groups of rows that differ in T alone: {title: rows}, where there are at least three lengths."""
    families = {}
    for row in rows:
        shape = row["shape"]
        if shape["T"] != shape["S"]:
            continue
        same = {k: v for k, v in shape.items() if k not in ("name", "T", "S", "groups", "description")}
        families.setdefault(json.dumps(same, sort_keys=True), []).append(row)
    kept = [group for group in families.values() if len({row["shape"]["T"] for row in group}) >= 3]
    return {_family_title(group[0]["shape"]): group for group in kept}


def _family_title(shape):
    mask = f" {shape['mask']['kind']} {shape['mask']['size']:g}" if shape["mask"] else ""
    bias = f" {shape['bias']} bias" if shape["bias"] else ""
    causal = " causal" if shape["causal"] else ""
    return f"B{shape['B']} N{shape['N']} K{shape['K']} H{shape['H']} {shape['dtype']}{causal}{mask}{bias}"


def _sparsity(row):
    """Percent of the 128 x 128 blocks that are empty, for the workloads made to vary it; else None."""
    if not set(row["shape"]["groups"]) & {"sparsity"}:
        return None
    mask = row["shape"]["mask"]
    return 100 * (1 - mask["size"]) if mask["kind"] == "block_sparse" else 0.0


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="JSON files that a benchmark wrote")
    parser.add_argument("--out", metavar="DIR", help="folder of the PNG files")
    options = parser.parse_args(argv)
    rows, environment = read(options.results)
    first = Path(options.results[0])
    folder = Path(options.out) if options.out else first.parent
    folder.mkdir(parents=True, exist_ok=True)
    suffix = f"{environment['device']}, jax {environment['jax']}"
    for which in dict.fromkeys(row["pass"] for row in rows):
        of_pass = [row for row in rows if row["pass"] == which]
        path = lambda chart: folder / f"{first.stem}_{chart}_{which.replace('+', '_')}.png"
        drawn = set()
        length = lambda row: row["shape"]["T"]
        for i, (title, group) in enumerate(_length_families(of_pass).items()):
            drawn |= {row["workload"] for row in group}
            title = f"{which}: {title}\n{suffix}"
            lines(group, length, lambda r: r["ms"], ("T = S", "milliseconds"), title, path(f"length{i}"))
            lines(group, length, lambda r: r["tflops"], ("T = S", "TFLOP/s"), title, path(f"tflops{i}"))
        sparse = [row for row in of_pass if _sparsity(row) is not None]
        if len({_sparsity(row) for row in sparse}) >= 3:
            drawn |= {row["workload"] for row in sparse}
            labels = ("percent of 128 x 128 blocks that are empty", "milliseconds")
            title = f"{which}: mask and bias, {_family_title({**sparse[0]['shape'], 'mask': None})}\n{suffix}"
            lines(sparse, _sparsity, lambda r: r["ms"], labels, title, path("sparsity"), log=False)
        rest = [row for row in of_pass if row["workload"] not in drawn]
        names = list(dict.fromkeys(row["workload"] for row in rest))
        for i in range(0, len(names), _BARS):
            part = [row for row in rest if row["workload"] in names[i : i + _BARS]]
            bars(part, f"{which}\n{suffix}", path(f"bars{i // _BARS}"))


if __name__ == "__main__":
    main()
