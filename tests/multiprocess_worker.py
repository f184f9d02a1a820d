"""One of several processes that hold one mesh together: run by test_multiprocess.py, with

python multiprocess_worker.py ADDRESS PROCESSES NUMBER PLATFORM

On a CPU each has two devices and computes in float32; with PLATFORM cuda each has one GPU, and computes in bfloat16.
"""

import functools
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu" if sys.argv[4] == "cpu" else "cuda,cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_dma
from jax_dma import context

ON_CPU = sys.argv[4] == "cpu"
DEVICES = 2 if ON_CPU else 1  # of a process
DTYPE, TOLERANCE = (jnp.float32, 1e-5) if ON_CPU else (jnp.bfloat16, 3e-2)


def gradients(attention, q, k, v, bias, dout):
    out, vjp = jax.vjp(lambda q, k, v, bias: attention(q, k, v, None, bias, is_causal=True), q, k, v, bias)
    return out, *vjp(dout)


def main(address, processes, number):
    jax.distributed.initialize(address, processes, number, None if ON_CPU else [number])
    n = jax.device_count()
    assert jax.process_count() == processes and n == DEVICES * processes
    rng = np.random.default_rng(0)  # every process makes the same arrays, and holds its part of them
    q, dout = (rng.standard_normal((4, 64, 4, 8)).astype(DTYPE) for _ in range(2))
    k, v = (rng.standard_normal((4, 64, 2, 8)).astype(DTYPE) for _ in range(2))
    bias = rng.standard_normal((1, 4, 64, 64)).astype(DTYPE)
    want = jax.jit(functools.partial(gradients, jax_dma.attention))(q, k, v, bias, dout)

    def check(name, attention, mesh, specs, move=lambda x, axis: x, back=lambda x, axis: x):
        operands = [move(q, 1), move(k, 1), move(v, 1), move(bias, (-2, -1)), move(dout, 1)]
        place = lambda x, spec: jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, spec), lambda index: np.asarray(x)[index]
        )
        whole = NamedSharding(mesh, P())
        run = jax.jit(functools.partial(gradients, attention), out_shardings=whole)
        got = run(*map(place, operands, specs))
        got = [np.asarray(x.addressable_data(0)) for x in got]
        for x, y, axis in zip(got, want, (1, 1, 1, 1, (-2, -1))):
            x, y = (np.asarray(z).astype(np.float32) for z in (back(x, axis), y))
            np.testing.assert_allclose(x, y, rtol=10 * TOLERANCE, atol=TOLERANCE, err_msg=name)
        print(f"{name}: same as one device", flush=True)

    auto = lambda **sizes: jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    array = P("d", None, "h")
    mesh = auto(d=processes, h=DEVICES)
    check("batch and heads", jax_dma.attention, mesh, (array, array, array, P(None, "h"), array))
    rows = P("h", "d")  # the processes hold different queries
    check("queries", jax_dma.attention, auto(h=DEVICES, d=processes), (rows, P("h"), P("h"), P(None, None, "d"), rows))
    for method in context.METHODS:
        mesh = auto(c=n)
        attention = functools.partial(context.attention, axis="c", method=method, order="zigzag", mesh=mesh)
        part = P(None, "c")
        move, back = (functools.partial(change, shards=n) for change in (context.reorder, context.restore))
        move, back = (lambda x, axis, f=f: np.asarray(f(x, axis=axis)) for f in (move, back))
        check(method, attention, mesh, (part, part, part, P(None, None, "c"), part), move, back)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
