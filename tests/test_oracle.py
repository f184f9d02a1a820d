"""The judge is judged: the oracle's gradients against central differences of its own values, its rules by hand."""

import numpy as np
import pytest

import oracle
from cases import Case, make

CASES = {
    "everything": Case((2,), 5, 7, 4, 2, 3, Hv=2, dtype="float64", mask="BNTS", bias="1KTS", softcap=1.5, scale=0.8),
    "causal": Case((1,), 5, 4, 2, 1, 3, dtype="float64", bias="1N1S", is_causal=True),
    "intervals": Case((2,), 4, 6, 2, 1, 3, dtype="float64", mask="BK", bias="B1T1"),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_derivatives_of_the_values(name):
    case = CASES[name]
    inputs = make(case)

    def loss(q, k, v, bias):
        out, lse, *_ = oracle.attention(q, k, v, inputs.mask, bias, **case.oracle_options)
        return (out * inputs.dout).sum() + (np.where(np.isneginf(lse), 0, lse) * inputs.dlse).sum()

    operands = [inputs.q, inputs.k, inputs.v, inputs.bias]
    _, _, *gradients, _ = oracle.attention(
        *operands[:3], inputs.mask, inputs.bias, dout=inputs.dout, dlse=inputs.dlse, **case.oracle_options
    )
    rng, step = np.random.default_rng(1), 1e-5
    for i, gradient in enumerate(gradients):
        direction = rng.standard_normal(operands[i].shape)
        moved = lambda sign: [x + sign * step * direction if j == i else x for j, x in enumerate(operands)]
        slope = (loss(*moved(1)) - loss(*moved(-1))) / (2 * step)
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-7, atol=1e-9)


def test_by_hand():
    """Two keys with logits log 1 and log 3: lse log 4, weights 1/4 and 3/4; a hidden third one changes nothing."""
    q, k = np.ones((1, 1, 1)), np.zeros((3, 1, 1))
    v = np.array([4.0, 8.0, 1e9]).reshape(3, 1, 1)
    bias = np.array([0.0, np.log(3.0), np.nan]).reshape(1, 1, 3)
    out, lse, *_ = oracle.attention(q, k, v, np.array([True, True, False]).reshape(1, 1, 3), bias)
    np.testing.assert_allclose(out.item(), 7.0)
    np.testing.assert_allclose(lse.item(), np.log(4.0))


def test_a_row_that_sees_nothing():
    case = Case((1,), 3, 2, 1, 1, 2, dtype="float64", is_causal=True)  # query 0 stands before key 0
    inputs = make(case)
    dout = np.where(np.arange(3)[None, :, None, None] == 0, np.nan, inputs.dout)
    results = oracle.attention(inputs.q, inputs.k, inputs.v, is_causal=True, dout=dout, dlse=inputs.dlse)
    assert not results.out[0, 0].any() and np.isneginf(results.lse[0, 0]).all() and not results.dq[0, 0].any()
    assert all(np.isfinite(x).all() for x in (results.dq, results.dk, results.dv))
