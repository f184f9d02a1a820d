"""Running an implementation on a case and holding it against the oracle."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

import jax_dma
import oracle
from cases import as_jax_mask, make

# Relative Frobenius error of (out, lse, each gradient), that the library promises.
TOLERANCE = {
    "bfloat16": (5e-3, 1e-3, 1e-2),
    "float16": (1e-3, 1e-3, 2e-3),
    "float32": (1e-5, 1e-5, 1e-4),
    "float64": (1e-13, 1e-13, 1e-12),
}


def fit(case, implementation):
    """The case in a dtype that the implementation computes in: the CUDA kernels take no float32."""
    return case.with_(dtype="float16") if implementation == "cuda" and case.dtype == "float32" else case


def attend(implementation, mask, options):
    """(q, k, v, bias) -> (out, lse)."""
    call = functools.partial(jax_dma.attention, return_lse=True, implementation=implementation, **options)
    return lambda q, k, v, bias: call(q, k, v, mask, bias)


def values_and_gradients(implementation, case, **more):
    """A function of Inputs, with the mask in the form that attention takes: (out, lse, dq, dk, dv[, dbias])."""

    def run(q, k, v, mask, bias, dout, dlse):
        function = attend(implementation, mask, {**case.options, **more})
        if bias is None:
            results, vjp = jax.vjp(lambda q, k, v: function(q, k, v, None), q, k, v)
        else:
            results, vjp = jax.vjp(function, q, k, v, bias)
        return *results, *vjp((dout, dlse))

    return run


def evaluate(implementation, case, inputs, **more):
    """Values and gradients as an oracle.Results of NumPy arrays, dtypes kept."""
    run = _compiled(implementation, case, tuple(more.items()))
    return oracle.Results(*map(np.asarray, run(*inputs._replace(mask=as_jax_mask(inputs.mask, case)))))


@functools.lru_cache(maxsize=4)  # several inputs of one case share a program
def _compiled(implementation, case, more):
    return jax.jit(values_and_gradients(implementation, case, **dict(more)))


def judge(case, inputs):
    """The oracle's results for the same inputs."""
    q, k, v, mask, bias, dout, dlse = inputs
    return oracle.attention(q, k, v, mask, bias, dout=dout, dlse=dlse, **case.oracle_options)


def relative_error(got, want, at_least=0.0):
    """Relative Frobenius error; not finite if anything in ``got`` is not. ``at_least`` bounds the denominator below."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    difference, norm = np.linalg.norm((got - want).ravel()), max(np.linalg.norm(want.ravel()), at_least)
    return difference / norm if norm > 0 else (0.0 if difference == 0 else np.inf)


def lse_error(got, want):
    """The error where lse is finite; -inf must stand exactly where it should."""
    got, empty = np.asarray(got), np.isneginf(want)
    assert np.array_equal(np.isneginf(got), empty), "lse must be -inf in exactly the rows that see no key"
    return relative_error(np.where(empty, 0, got), np.where(empty, 0, want))


def errors(got, want):
    """The error of each result by name."""
    found = {"out": relative_error(got.out, want.out), "lse": lse_error(got.lse, want.lse)}
    for name in ("dq", "dk", "dv", "dbias"):
        if getattr(want, name) is not None:
            found[name] = relative_error(
                getattr(got, name), getattr(want, name), want.dbias_norm if name == "dbias" else 0.0
            )
    return found


def assert_close(got, want, dtype, factor=1.0):
    """Each error within the promised tolerance for the dtype (times a factor); dbias comes in bias's own dtype."""
    found, (out, lse, gradient) = errors(got, want), TOLERANCE[str(dtype)]
    allowed = {name: factor * {"out": out, "lse": lse}.get(name, gradient) for name in found}
    if "dbias" in found:
        allowed["dbias"] = factor * max(gradient, TOLERANCE[str(got.dbias.dtype)][2])
    assert all(found[name] <= allowed[name] for name in found), f"errors {found}, allowed {allowed}"


def assert_exact_zeros(got, want):
    """What is 0 because nothing visible contributes must be exactly 0 (given cotangents without zeros)."""
    for name in ("out", "dq", "dk", "dv", "dbias"):
        if getattr(want, name) is not None:
            values = np.asarray(getattr(got, name))[getattr(want, name) == 0]
            assert not values.any(), f"{name} is not exactly 0 where nothing visible contributes"


def check(implementation, case, inputs=None, **more):
    """Values, all gradients, exact zeros and dtypes of an implementation on a case, against the oracle."""
    case = fit(case, implementation)
    inputs = make(case) if inputs is None else inputs
    got, want = evaluate(implementation, case, inputs, **more), judge(case, inputs)
    assert_close(got, want, case.dtype)
    assert_exact_zeros(got, want)
    for name, like in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v"), ("dbias", "bias"), ("lse", "dlse")):
        if getattr(got, name) is not None:
            assert getattr(got, name).dtype == getattr(inputs, like).dtype, f"dtype of {name}"


def largest_array(compiled):
    """The most elements of any array in a compiled program."""
    shapes = re.findall(r"\b(?:pred|bf16|[suf]\d+)\[([\d,]+)\]", compiled.as_text())
    return max(int(np.prod([int(n) for n in shape.split(",")], dtype=np.int64)) for shape in shapes)


def count_primitive(jaxpr, name):
    """How often a primitive occurs in a jaxpr, inner ones included."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    total = 0
    for equation in jaxpr.eqns:
        total += equation.primitive.name == name
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            total += count_primitive(inner, name) if _is_jaxpr(inner) else 0
    return total


def _is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def calls(compiled, name):
    """How often a compiled program calls the FFI target jax_dma_<name>."""
    return len(re.findall(rf'custom_call_target="jax_dma_{name}"', compiled.as_text()))


def weighted_sum(out, lse, dout, dlse):
    """A scalar whose gradient sends exactly the cotangents dout and dlse into out and lse."""
    wide = jnp.promote_types(out.dtype, jnp.float32)
    return (out.astype(wide) * dout.astype(wide)).sum() + (lse * dlse).sum()
