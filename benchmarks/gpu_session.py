"""One session on a GPU: the workloads that matter, ours and the peers in the same run, within a time budget.

Everything is written to OUT/gpu_session.json after each workload, so that a session that is cut short keeps what it
measured; the table comes last.
"""

import argparse
import sys
import time
from pathlib import Path

import report
import runner
from workloads import FORWARD, TRAINING


def _extend(parser):
    runner.add_timing_arguments(parser)
    parser.add_argument("--out", default=".", metavar="DIR", help="folder of gpu_session.json")
    parser.add_argument("--no-peers", action="store_true", help="leave the peers out")
    parser.add_argument("--forward-only", action="store_true", help="leave forward + backward out")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no further workload is begun")


def main(argv=None):
    begin = time.monotonic()
    options = runner.arguments(__doc__, ["gpu"], argv, _extend)
    if options.implementations == "*":  # `xla` and `reference` are not what a session on a GPU is for
        options.found = [i for i in options.found if i.name not in ("xla", "reference")]
    if options.no_peers:
        options.found = [i for i in options.found if i.ours]
    if not options.found:
        sys.exit("nothing to measure: the compiled kernels are not available; python -m jax_dma says why")
    passes = [FORWARD] if options.forward_only else [FORWARD, TRAINING]
    path = Path(options.json or Path(options.out) / "gpu_session.json")
    rows, left_out = [], []
    for workload in options.workloads:
        if time.monotonic() - begin > options.budget:
            left_out.append(workload.name)
            continue
        fresh = runner.performance(argparse.Namespace(**{**vars(options), "workloads": [workload]}), passes)
        rows += fresh
        for row in fresh:
            text = f"{row['ms']:.3f} ms" if row["ms"] else row["error"]
            name = f"{row['workload']} {row['pass']} {row['implementation']}"
            print(f"[{time.monotonic() - begin:5.0f} s] {name}: {text}", flush=True)
        report.write_json(path, rows, options.commit)
    print()
    runner.show_performance(rows, options)
    if left_out:
        print("not begun within the budget:", ", ".join(left_out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
