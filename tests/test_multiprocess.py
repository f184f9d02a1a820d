"""Several processes, each with some of the devices, under ``jax.distributed``: one device's values and gradients."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

WORKER = Path(__file__).with_name("multiprocess_worker.py")
PROCESSES = 2
SECONDS = 150


def free_port():
    try:
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            return listener.getsockname()[1]
    except OSError as error:
        pytest.skip(f"no port to meet at: {error}")


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_processes(platform):
    """Batch and heads, queries, and both kinds of context parallelism, over devices of two processes."""
    if len(jax.devices(platform)) < (1 if platform == "cpu" else PROCESSES):
        pytest.skip(f"needs {PROCESSES} GPUs")
    address = f"localhost:{free_port()}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), address, str(PROCESSES), str(number), platform], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for number in range(PROCESSES)
    ]  # fmt: skip
    try:
        printed = [worker.communicate(timeout=SECONDS)[0] for worker in workers]
    except subprocess.TimeoutExpired:
        pytest.fail(f"no end after {SECONDS} seconds")
    finally:
        for worker in workers:
            worker.kill()
    for worker, text in zip(workers, printed):
        assert worker.returncode == 0, text
        assert text.count("same as one device") == 4, text
