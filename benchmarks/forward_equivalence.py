"""Accuracy of the forward pass: out and lse of every implementation and peer against a float64 evaluation."""

import sys

from runner import run_accuracy


def compute(attend, workload, operands, dout, dlse):
    """out and lse."""
    out, lse = attend(operands)
    return {"out": out, "lse": lse}


if __name__ == "__main__":
    sys.exit(run_accuracy(__doc__, compute))
