"""Runs pytest with the host kernels of a build folder in place of the installed ones (``make sanitize``).

    python tests/sanitized.py build/sanitize tests/test_attention.py --implementation cpu
"""

import importlib.util
import pathlib
import sys

import pytest

[library] = pathlib.Path(sys.argv[1]).glob("_cpu.*.so")
spec = importlib.util.spec_from_file_location("jax_dma._cpu", library)
sys.modules["jax_dma._cpu"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["jax_dma._cpu"])
# One process, without the plugins that start others: a report of the sanitizers ends it, with a trace on stderr.
sys.exit(pytest.main(["-p", "no:xdist", "-p", "no:cacheprovider", *sys.argv[2:]]))
