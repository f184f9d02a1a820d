"""Calls from several Python threads at once: the results are those of one thread, from the first import on."""

import concurrent.futures
import os
import subprocess
import sys
import textwrap
import threading

import jax
import numpy as np
import pytest

import jax_dma
from cases import Case, as_jax_mask, make
from support import check, fit, values_and_gradients

THREADS = 6
CASES = [
    Case(T=90, S=150, mask="1KTS", bias="1KTS", is_causal=True),
    Case((3,), 140, 170, 4, 2, 16, mask="BK", bias="B11S"),
    Case((1,), 33, 260, 8, 2, 32, dtype="bfloat16", bias="1N1S", is_causal=True),
]


def at_once(function, arguments):
    """The results of one call for each argument, in threads that start together."""
    barrier = threading.Barrier(len(arguments))

    def run(argument):
        barrier.wait()
        return function(argument)

    with concurrent.futures.ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(run, arguments))


def test_one_program_in_many_threads(kernels, device):
    """Each thread has its own operands, and gets bit for bit what it gets alone; cpu and cuda keep no state."""
    for case in CASES:
        case = fit(case, kernels)
        run = jax.jit(values_and_gradients(kernels, case, deterministic=True))
        inputs = [make(case, seed) for seed in range(THREADS)]
        inputs = [x._replace(mask=as_jax_mask(x.mask, case)) for x in inputs]
        alone = [jax.tree.map(np.asarray, run(*x)) for x in inputs]

        def repeat(i):
            with jax.default_device(device):  # a thread has its own
                return [jax.tree.map(np.asarray, run(*inputs[i])) for _ in range(5)]

        for want, got in zip(alone, at_once(repeat, range(THREADS)), strict=True):
            for again in got:
                for a, b in zip(want, again, strict=True):
                    assert a.tobytes() == b.tobytes()


def test_tracing_and_compiling_in_many_threads(kernels, device):
    """Programs that differ in shape, mask and bias are traced, lowered and compiled at the same time."""

    def one(i):
        case = CASES[i % len(CASES)]
        with jax.default_device(device):
            check(kernels, case.with_(T=case.T + i), deterministic=bool(i % 2))
            return jax_dma.available_implementations()

    assert len(set(at_once(one, range(THREADS)))) == 1


FIRST_USE = """
import threading
import numpy as np

barrier, wrong = threading.Barrier({threads}), []


def first(i):
    try:
        barrier.wait()
        import jax_dma  # in all threads at once: the module lock is Python's, what comes after is ours

        q, k = np.full((1, 5, 4, 8), 0.5 + i, np.float32), np.ones((1, 7, 2, 8), np.float32)
        barrier.wait()
        out = jax_dma.attention(q, k, k, is_causal=bool(i % 2), implementation="cpu")
        assert np.array_equal(out, np.ones_like(q)), out
        assert jax_dma.status()["cpu"] == "available"
    except BaseException as error:
        wrong.append(repr(error))
        barrier.abort()


threads = [threading.Thread(target=first, args=(i,)) for i in range({threads})]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not wrong, wrong
"""


@pytest.mark.skipif(jax_dma.status()["cpu"] != "available", reason="the host kernels are not built")
def test_first_import_and_registration_in_many_threads():
    """Kernels are registered on first use, whoever is first."""
    program = textwrap.dedent(FIRST_USE).format(threads=8)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
