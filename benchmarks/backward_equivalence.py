"""Accuracy of the backward pass: gradients of q, k, v and bias for a random cotangent of out, against float64."""

import sys

import jax
from runner import run_accuracy


def compute(attend, workload, operands, dout, dlse):
    """dq, dk, dv and dbias."""
    trained = {name: x for name in ("q", "k", "v", "bias") if (x := getattr(operands, name)) is not None}
    _, vjp = jax.vjp(lambda x: attend(operands._replace(**x))[0], trained)
    return {f"d{name}": gradient for name, gradient in vjp(dout)[0].items()}


if __name__ == "__main__":
    sys.exit(run_accuracy(__doc__, compute))
