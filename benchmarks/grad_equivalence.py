"""Accuracy of training end to end: jax.grad of a scalar loss of out and lse, through the making of the dynamic mask.

Where a workload's mask comes from its bias, the mask is made inside the differentiated function, as a model would.
"""

import sys

import jax
import jax.numpy as jnp
from runner import run_accuracy
from workloads import dynamic_mask, has_dynamic_mask


def compute(attend, workload, operands, dout, dlse):
    """dq, dk, dv and dbias of sum(out * dout) + sum(lse * dlse)."""
    trained = {name: x for name in ("q", "k", "v", "bias") if (x := getattr(operands, name)) is not None}

    def loss(x):
        called_with = operands._replace(**x)
        if has_dynamic_mask(workload):
            called_with = called_with._replace(mask=dynamic_mask(workload, x["bias"]))
        out, lse = attend(called_with)
        finite = jnp.where(jnp.isfinite(lse), lse, 0)  # -inf where a query sees no key
        return jnp.vdot(out.astype(dlse.dtype), dout.astype(dlse.dtype)) + jnp.vdot(finite, dlse)

    return {f"d{name}": gradient for name, gradient in jax.grad(loss)(trained).items()}


if __name__ == "__main__":
    sys.exit(run_accuracy(__doc__, compute, lse_gradient=True))
