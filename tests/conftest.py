"""Which implementations the suite runs on, and where.

Every test that takes the ``implementation`` fixture runs once for each implementation usable here. Its "cuda" version
is marked ``gpu`` and skipped where there is no GPU; ``pytest -m gpu`` on a GPU machine runs exactly those. With
``--implementation NAME`` (repeatable) only the named ones run, and it is an error if one of them is not usable.

"CASES" and a number, in docstrings: a kind of fault that other attention libraries shipped, which the test rules out.
"""

import os

# Before jax is imported: eight host devices for the shard_map tests, and no hoarding of GPU memory by xdist workers.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

import jax_dma  # noqa: E402

STATUS = jax_dma.status()

hypothesis.settings.register_profile(
    "suite",
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser):
    parser.addoption(
        "--implementation", action="append", default=[], help="test only this implementation; it must be usable"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")


def pytest_report_header():
    return [f"jax {jax.__version__}, jax_dma from {os.path.dirname(jax_dma.__file__)}"] + [
        f"  {name}: {text}" for name, text in STATUS.items()
    ]


def pytest_generate_tests(metafunc):
    named = metafunc.config.getoption("--implementation")
    for name in named:
        if STATUS.get(name) != "available":
            raise pytest.UsageError(f"--implementation={name}: {STATUS.get(name, 'there is no such implementation')}")
    usable = [name for name, text in STATUS.items() if text == "available" or name == "cuda"]
    usable = [name for name in usable if name != "pallas" or name in named]  # compiles slowly; see test_pallas.py
    chosen = [name for name in usable if not named or name in named]
    suitable = {
        "implementation": chosen,
        "kernels": [name for name in chosen if name in ("cpu", "cuda")],  # the compiled ones
        "linear": [name for name in chosen if name != "reference"],  # those in O(T + S) memory
    }
    for fixture in set(suitable).intersection(metafunc.fixturenames):
        names = [
            pytest.param(name, marks=pytest.mark.gpu) if name in ("cuda", "pallas") else name
            for name in suitable[fixture]
        ]
        metafunc.parametrize(fixture, names)


def pytest_collection_modifyitems(items):
    if STATUS["cuda"] != "available":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=f"cuda: {STATUS['cuda']}"))


@pytest.fixture(autouse=True, scope="module")
def bounded_memory():
    """A few thousand compiled programs in one process would not be."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def device(request):
    """The device that a test's arrays live on: a GPU for tests marked gpu, else the host."""
    chosen = jax.devices("cuda" if request.node.get_closest_marker("gpu") else "cpu")[0]
    with jax.default_device(chosen):
        yield chosen
