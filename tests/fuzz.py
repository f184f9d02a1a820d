"""A seeded fuzzer: calls drawn from the whole contract, each available implementation against the float64 oracle.

    python tests/fuzz.py --seconds 180             calls drawn from a seed, which is printed
    python tests/fuzz.py --seconds 600 --implementation cuda --implementation xla
    python tests/fuzz.py --call '{"T": 3, ...}'    one call again: what a failure prints, made as small as it gets

Exits with 1 if a call failed. `python -u` if the output goes to a file.
"""

import argparse
import contextlib
import dataclasses
import json
import re
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import jax_dma
import oracle
import test_masks as brute
from cases import INTERVAL_PATTERNS, PATTERNS, Case, Inputs, as_jax_mask, dtype_of, hidden_everywhere, make, poison
from jax_dma import masks
from support import TOLERANCE, lse_error, relative_error, weighted_sum

OPERANDS = ("q", "k", "v", "mask", "bias", "sinks", "dout", "dlse")
INTERVALS = (
    "causal", "sliding_window", "lengths", "prefix", "block_causal", "segments", "segments_of_pairs", "top_k"
)  # fmt: skip
DENSE = ("dense_top_k", "dense_relu", "plan_top_k")
HUGE = -9e29  # a bias that all but hides: whatever else a row sees outweighs it


@dataclasses.dataclass(frozen=True)
class Call(Case):
    """A :class:`cases.Case`, and beyond it:

    Attributes:
      seed, contents: of the contents, which are drawn anew for each pair of numbers.
      builder: which function of jax_dma.masks makes the mask; ``mask`` is then the pattern of what it is made from.
      window: an integer for the builder.
      also: a sliding window of twice that on top, for builders of intervals.
      extremes: what bias holds: "hidden" hides some positions and whole rows, "large" has large numbers, "huge" has
        very negative ones that do not hide.
      sinks: their dtype, or None.
      deterministic: the option.
      inner: what is applied to attention before it is differentiated, innermost first: "checkpoint", "save" (with a
        policy), or "vmap" and "scan", which take the first batch axis away.
      outer: "vmap" or "scan" over the function of values and gradients.
      shared: those of q, k and v that are the same along the first batch axis, and not mapped over it.
      frozen: operands whose gradient is not asked for.
      form: "vjp", "grad" of a scalar function, "twice": the derivative of the gradients in a random direction too, or
        "jvp": of plain JAX, that derivative of the values, which must agree with the gradients.
    """

    seed: int = 0
    contents: int = 0
    builder: str | None = None
    window: int = 8
    also: bool = False
    extremes: str | None = None
    sinks: str | None = None
    deterministic: bool = False
    inner: tuple[str, ...] = ()
    outer: str | None = None
    shared: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    form: str = "vjp"

    @property
    def maps(self):
        """How many batch axes the transformations take away."""
        return sum(name in ("vmap", "scan") for name in self.inner) + (self.outer is not None)

    def text(self):
        """JSON of what is not the default."""
        fields = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return json.dumps({name: value for name, value, default in fields if value != default})

    @classmethod
    def of(cls, text):
        """The call that a text describes."""
        return cls(**{name: tuple(x) if isinstance(x, list) else x for name, x in json.loads(text).items()})


# --- drawing ---------------------------------------------------------------------------------------------------------


def draw(seed):
    """A random call: mostly small, so that many are run, with a few of several tiles or of many heads."""
    rng = np.random.default_rng(seed)
    pick = lambda *options: options[rng.integers(len(options))]
    chance = lambda p: bool(rng.random() < p)
    length = lambda: int(pick(rng.integers(0, 4), rng.integers(1, 40), rng.integers(1, 150), rng.integers(1, 330)))
    K, G = int(rng.integers(1, 4)), pick(1, 1, 2, 3, 4, 5, 7, 8, 16)
    channels = lambda: int(pick(rng.integers(1, 20), rng.integers(1, 70), 64, rng.integers(1, 257)))
    call = dict(
        batch=tuple(int(n) for n in rng.integers(1, 4, rng.integers(0, 3))), T=length(), S=length(), N=K * G, K=K,
        H=channels(), dtype=pick("float32", "float32", "bfloat16", "bfloat16", "float16", "float16", "float64"),
        is_causal=chance(0.4), scale=pick(None, None, None, 0.2, 1.0, -0.3, 0.0),
        softcap=pick(None, None, None, 3.0, 20.0), deterministic=chance(0.2), seed=seed,
    )  # fmt: skip
    call["Hv"] = channels() if chance(0.3) else None
    if chance(0.03):
        call["batch"] = (0, *call["batch"])
    if chance(0.6):
        call.update(bias=pick(*PATTERNS), extremes=pick(None, None, "hidden", "large", "huge"))
        call["bias_dtype"] = None if call["dtype"] == "float64" else pick(None, None, "float32", "bfloat16")
    kind = pick("none", "dense", "dense", "plan", "intervals", *3 * ["builder"], "kept keys")
    if kind in ("dense", "plan"):
        call.update(mask=pick(*PATTERNS), plan=kind == "plan")
        if chance(0.25):
            call.update(mask=call["mask"][:2] + "TS", builder=pick(*DENSE), plan=False, window=int(rng.integers(1, 40)))
    elif kind == "intervals":
        call.update(mask=pick(*INTERVAL_PATTERNS))
    elif kind == "builder":
        call.update(mask=pick(*INTERVAL_PATTERNS), builder=pick(*INTERVALS), window=int(pick(1, 2, 5, 16, 60, 1000)))
        call["also"] = chance(0.25)
    elif kind == "kept keys":  # one score per key, long enough for the kept keys to be gathered
        call.update(mask=pick("B", "1") + pick("K", "1"), builder="top_k", window=int(rng.integers(1, 66)))
        call.update(S=int(rng.integers(384, 900)), T=int(rng.integers(1, 300)), H=min(call["H"], 40))
        if call.get("bias"):
            call["bias"] = call["bias"][0] + pick("K", "N", "1") + "1" + call["bias"][3]
    if chance(0.2):
        call["sinks"] = pick("float32", call["dtype"])
    call["inner"] = tuple(rng.permutation([x for x in ("checkpoint", "save", "vmap", "scan") if chance(0.12)]).tolist())
    call["outer"] = pick(None, None, None, None, None, "vmap", "scan")
    call["form"] = pick("vjp", "vjp", "grad")
    if call["dtype"] in ("float32", "float64") and call.get("extremes") is None and chance(0.15):
        call.update(form=pick("twice", "jvp"), outer=None)
    if chance(0.3):
        call["frozen"] = pick(("q", "k", "v"), ("bias", "sinks"), ("q",), ("k", "v"), ("q", "bias"))
    if call["form"] in ("twice", "jvp") or not ({"q", "k", "v"} - set(call.get("frozen", ())) or call.get("bias")):
        call["frozen"] = ()
    call = Call(**call)
    while call.maps > len(call.batch):
        call = call.with_(batch=(int(rng.integers(1, 4)), *call.batch))
    if call.maps and call.batch[0] and call.form in ("vjp", "grad") and chance(0.3):
        call = call.with_(shared=pick(("q",), ("k", "v"), ("v",), ("q", "k")))
    return call


def contents_of(call):
    """(operands of OPERANDS as a dict, the mask as the oracle takes it). Masks are in the form that attention takes."""
    rng = np.random.default_rng([call.seed, call.contents])
    inputs = make(call.with_(mask=None) if call.builder else call, [call.seed, call.contents, 1])
    if call.extremes is not None:
        inputs = inputs._replace(bias=extreme(call, inputs.bias, rng))
    elif call.bias is not None and not call.builder and inputs.q.size and inputs.k.size:
        inputs = poison(call, inputs)
    inputs = inputs._replace(**{name: np.repeat(getattr(inputs, name)[:1], call.batch[0], 0) for name in call.shared})
    if call.builder:
        mask, seen = built(call, rng)
        if call.maps and isinstance(mask, jax_dma.KeyIntervals):  # builders do not know how many batch axes q has
            mask = jax.tree.map(lambda x: x.reshape((1,) * (len(call.batch) + 2 - x.ndim) + x.shape), mask)
    else:
        mask, seen = as_jax_mask(inputs.mask, call), inputs.mask
    sinks = None if call.sinks is None else rng.standard_normal(call.N).astype(dtype_of(call.sinks))
    if call.extremes == "huge":
        # Kernels keep logits as float32 numbers. Where all of a row's are as large as -65504 they lose some of the
        # products, which the oracle keeps (and where they are larger still both lose them).
        lse = oracle.attention(*inputs[:3], seen, inputs.bias, **call.oracle_options).lse
        alone = (lse < -1e4) & (lse > -1e20)
        inputs = inputs._replace(
            dout=np.where(alone[..., None], 0, inputs.dout).astype(inputs.dout.dtype),
            dlse=np.where(alone, 0, inputs.dlse).astype(inputs.dlse.dtype),
        )
    values = (inputs.q, inputs.k, inputs.v, mask, inputs.bias, sinks, inputs.dout, inputs.dlse)
    return dict(zip(OPERANDS, values)), seen


def extreme(call, bias, rng):
    """bias with extreme values at random places and, for "hidden" and "huge", in whole rows and columns."""
    smallest = float(jnp.finfo(bias.dtype).min)
    values = {"hidden": [-np.inf, min(smallest, -1e30)], "large": [-100.0, 60.0, 100.0], "huge": [max(smallest, HUGE)]}
    if call.extremes == "hidden" and bias.dtype == np.float16:
        values["hidden"] = [-np.inf]  # float16's least number is above -1e30
    where = rng.random(bias.shape) < 0.3
    if call.extremes != "large":
        where |= (rng.random((*bias.shape[:-1], 1)) < 0.2) | (rng.random((*bias.shape[:-2], 1, bias.shape[-1])) < 0.1)
    return np.where(where, rng.choice(values[call.extremes], bias.shape), bias).astype(bias.dtype)


def built(call, rng):
    """What a builder makes, and the same by brute force (or by what was built, where that would take too long)."""
    T, S, window = call.T, call.S, call.window
    batch = call.batch if call.mask[0] == "B" else (1,) * len(call.batch)
    p, s = brute.positions(T, S)
    rows = int(np.prod(batch))
    ids = lambda length: brute.random_ids(rng, max(rows, 1), length)[:rows].reshape(*batch, length)
    one_head = lambda seen: seen[..., None, :, :]
    slow = rows * call.N * T * S > 300_000

    def each(function, *arrays):  # [*batch, T, S] of a function of one row of each array
        if T == 0 or S == 0:
            return np.zeros((*batch, T, S), bool)
        return np.array([function(*(x[i] for x in arrays)) for i in np.ndindex(*batch)], bool).reshape(*batch, T, S)

    if call.builder in DENSE:
        scores = rng.standard_normal(call.shape(call.mask)).astype(np.float32)
        if rng.random() < 0.5:
            scores = brute.nasty_scores(rng, scores.shape)
        if call.builder == "dense_relu":
            return jax.jit(masks.dense_relu)(scores), scores > 0
        causal = bool(rng.random() < 0.5)
        like = [jax.ShapeDtypeStruct((*call.batch, n, h, 1), np.float32) for n, h in ((T, call.N), (S, call.K))]
        if call.builder == "plan_top_k":
            mask = jax.jit(lambda x: jax_dma.plan_top_k(x, window, *like, is_causal=causal))(scores)
        else:
            mask = jax.jit(lambda x: masks.dense_top_k(x, window, is_causal=causal))(scores)
        if slow:
            return mask, np.asarray(mask.dense() if call.builder == "plan_top_k" else mask)
        may = s <= p if causal else np.ones((T, S), bool)
        kept = [brute.kept(scores[i], window, may) for i in np.ndindex(*scores.shape[:-2])]
        return mask, np.array(kept, bool).reshape(scores.shape)

    if call.builder == "causal":
        mask, seen = masks.causal(T, S), s <= p
    elif call.builder == "sliding_window":
        right = int(rng.integers(0, 4))
        mask, seen = masks.sliding_window(T, S, window, right), (p - window <= s) & (s <= p + right)
    elif call.builder in ("lengths", "prefix"):
        lengths = rng.integers(-1, S + 3, batch)
        mask = getattr(masks, call.builder)(lengths, T, S)
        seen = s < lengths[..., None, None]
        seen = one_head(seen | (s <= p) if call.builder == "prefix" else np.broadcast_to(seen, (*batch, T, S)))
    elif call.builder == "block_causal":
        mask, seen = masks.block_causal(window, T, S), (s // window <= p // window) & (p >= 0)
    elif call.builder == "segments":
        key_ids = ids(S)
        mask = jax.jit(lambda x: masks.segments(x, T))(key_ids)
        seen = one_head(each(lambda x: brute.same_run(x, T), key_ids))
    elif call.builder == "segments_of_pairs":
        query_ids, key_ids = ids(T), ids(S)
        mask = jax.jit(masks.segments)(query_ids, key_ids)
        number = lambda x: np.array(brute.number_from_last(x.tolist()), int).reshape(-1, 2)
        meet = lambda a, b: (number(a)[:, None] == number(b)[None]).all(-1) & (b >= 0)
        seen = one_head(each(meet, query_ids, key_ids))
    else:
        heads = {"N": call.N, "K": call.K, "1": 1}[call.mask[1]]
        scores = rng.standard_normal((*batch, heads, S)).astype(np.float32)
        if rng.random() < 0.5:
            scores = brute.nasty_scores(rng, scores.shape)
        causal = bool(rng.random() < 0.7)
        segment_ids = ids(S) if rng.random() < 0.3 else None
        valid = rng.random((*batch, S)) < 0.8 if rng.random() < 0.3 else None
        mask = jax.jit(
            lambda *x: masks.top_k(x[0], window, T, is_causal=causal, segment_ids=x[1], valid=x[2])
        )(scores, segment_ids, valid)  # fmt: skip
        if slow:
            seen = np.asarray(mask.dense(T))
        else:
            may = np.broadcast_to(s <= p if causal else np.ones((T, S), bool), (*batch, T, S))
            may = may if segment_ids is None else may & each(lambda x: brute.same_run(x, T), segment_ids)
            may = may if valid is None else may & valid[..., None, :]
            kept = [brute.kept(scores[i], window, may[i[:-1]]) for i in np.ndindex(*scores.shape[:-1])]
            seen = np.array(kept, bool).reshape(*scores.shape[:-1], T, S)
    if call.also:
        mask, seen = mask & masks.sliding_window(T, S, 2 * window), seen & (p - 2 * window <= s) & (s <= p)
    return mask, seen.reshape((1,) * (len(batch) + 3 - seen.ndim) + seen.shape)


# --- what an implementation computes ---------------------------------------------------------------------------------


def mapped(kind, function, size, shared, seed):
    """A function of operands with one more batch axis, which is taken away from them by vmap or scan.

    Operands of size 1 there, and shared ones, are not mapped. vmap finds the axis at a random place, and leaves it at
    one.
    """

    def run(*operands):
        rng = np.random.default_rng(seed)
        leaves, tree = jax.tree.flatten(operands)
        owner = [name for name, x in zip(OPERANDS, operands) for _ in jax.tree.leaves(x)]
        over = [n != "sinks" and n not in shared and x.shape[0] == size for n, x in zip(owner, leaves, strict=True)]
        fixed = [x if moves or n == "sinks" else x[0] for n, x, moves in zip(owner, leaves, over)]
        moving = [x for x, moves in zip(leaves, over) if moves]

        def one(moving):
            rest = iter(moving)
            return function(*tree.unflatten([next(rest) if moves else x for x, moves in zip(fixed, over)]))

        if kind == "scan":
            return jax.lax.scan(lambda carry, x: (carry, one(x)), (), moving)[1]
        axes = [int(rng.integers(x.ndim)) for x in moving]
        last = bool(rng.integers(2))
        results = jax.vmap(lambda *x: one(x), axes, -1 if last else 0)(
            *(jnp.moveaxis(x, 0, axis) for x, axis in zip(moving, axes))
        )
        return jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), results) if last else results

    return run


def program(call, implementation):
    """A function of OPERANDS: (out, lse), the gradients by name, and for "twice" the gradients' derivatives."""

    def attend(q, k, v, mask, bias, sinks):
        return jax_dma.attention(
            q, k, v, mask, bias, sinks=sinks, return_lse=True, deterministic=call.deterministic,
            implementation=implementation, **call.options,
        )  # fmt: skip

    function, at = attend, call.maps - 1
    for kind in call.inner:
        if kind == "checkpoint":
            function = jax.checkpoint(function)
        elif kind == "save":
            names = ("jax_dma_out", "jax_dma_lse", "jax_dma_plan")
            function = jax.checkpoint(function, policy=jax.checkpoint_policies.save_only_these_names(*names))
        else:
            shared = call.shared if at == 0 else ()
            function = mapped(kind, function, call.batch[at], shared, call.seed)
            at -= 1

    def run(q, k, v, mask, bias, sinks, dout, dlse):
        given = {n: x for n, x in zip(OPERANDS, (q, k, v, None, bias, sinks)) if x is not None}
        trained = {n: x for n, x in given.items() if n not in call.frozen}

        def results(trained):
            x = given | trained
            return function(x["q"], x["k"], x["v"], mask, x.get("bias"), x.get("sinks"))

        if call.form == "jvp":
            along = {n: jnp.asarray(direction(n, x.shape), x.dtype) for n, x in trained.items()}
            values, moved = jax.jvp(results, (trained,), (along,))
            return values, {}, {"moved": weighted_sum(*moved, dout, dlse)}
        if call.form == "vjp":
            values, vjp = jax.vjp(results, trained)
            return values, vjp((dout, dlse))[0]

        def loss(x):
            values = results(x)
            return weighted_sum(*values, dout, dlse), values

        if call.form == "grad":
            (_, values), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
            return values, gradients
        values, vjp = jax.vjp(results, trained)
        gradients = vjp((dout, dlse))[0]
        project = lambda x: sum(jnp.vdot(y, direction(name, y.shape)) for name, y in x.items())
        along = lambda x: project(jax.grad(loss, has_aux=True)(x)[0])
        return values, gradients, jax.grad(along)(trained)

    if call.outer is not None:
        run = mapped(call.outer, run, call.batch[0], call.shared, call.seed + 1)
    return jax.jit(run)


def direction(name, shape):
    """A fixed random direction for the derivative of gradients; the same array for operands mapped and not."""
    return np.random.default_rng(len(name) + OPERANDS.index(name)).standard_normal(shape).astype(np.float32)


# --- what is right ---------------------------------------------------------------------------------------------------


def expected(call, x, seen):
    """oracle.Results of a call, and the gradient of its sinks."""
    x = {name: None if y is None or name == "mask" else np.asarray(y).astype(np.float64) for name, y in x.items()}
    bias = np.zeros((1,) * x["q"].ndim) if x["bias"] is None else x["bias"]  # its gradient's norm is used below
    attend = lambda dout, dlse: oracle.attention(
        x["q"], x["k"], x["v"], seen, bias, dout=dout, dlse=dlse, **call.oracle_options
    )
    dout, dlse, sinks = x["dout"], x["dlse"], x["sinks"]
    if sinks is None:
        want, dsinks = attend(dout, dlse), None
    else:  # one more logit in each row, without a value
        plain = attend(None, None)
        total = np.logaddexp(plain.lse, sinks)
        share = np.exp(plain.lse - total)
        through_out = (dout * plain.out).sum(-1) * share * (1 - share)
        want = attend(dout * share[..., None], dlse * share + through_out)
        want = want._replace(out=plain.out * share[..., None], lse=total)
        dsinks = (dlse * (1 - share) - through_out).reshape(-1, call.N).sum(0)
    return want, dsinks


def floors(call, x, want):
    """Norms below which an error is not held against a result: where few numbers make it up, they may cancel.

    Each is a fraction of what random operands give when nothing cancels.
    """
    S, G = max(call.S, 1), call.N // call.K
    of = lambda y: np.asarray(y, np.float64)
    scale = abs(call.H**-0.5 if call.scale is None else call.scale)
    delta = np.sqrt(((of(x["dout"]) * want.out) ** 2).sum())  # of the sum that softmax's gradient subtracts
    logits = want.dbias_norm + delta
    return {
        "out": 0.25 * np.sqrt(want.out.size / S),
        "lse": 0.25 * np.sqrt(want.lse.size),
        "dq": 0.25 * scale * np.sqrt(call.H) * logits,
        "dk": 0.25 * scale * np.sqrt(call.H) * logits,
        "dv": 0.1 * np.sqrt(want.dv.size * call.T * G) / S,
        "dbias": max(want.dbias_norm, 0.5 * delta),
        "dsinks": 0.25 * np.sqrt(want.lse.size),
    }


def judge(call, x, seen, want, dsinks, got):
    """Raises AssertionError where results are not those of the oracle within what the library promises."""
    (out, lse), gradients = got[:2]
    tolerance = TOLERANCE[call.dtype]
    epsilon = np.finfo(np.float64 if call.dtype == "float64" else np.float32).eps
    scale = abs(call.H**-0.5 if call.scale is None else call.scale)
    bias = np.zeros(1) if x["bias"] is None else np.abs(np.asarray(x["bias"]).astype(np.float64))
    largest = scale * call.H**0.5 * 5 + bias[bias < 1e6].max(initial=0)  # logits are rounded relative to this
    floor = floors(call, x, want)
    errors, allowed = {}, {}

    def compare(name, got, want, limit):
        least = 6e-8 if got.dtype == np.float16 else 1e-36  # what is below is 0 to the hardware
        allowed[name] = limit + 8 * epsilon * largest
        if name == "lse":
            norm = np.linalg.norm(want[want > -np.inf])
            errors[name] = lse_error(got, want) * (min(1, norm / floor[name]) if norm else 1)
            return
        if name[1:] in call.shared or got.shape != want.shape:  # one example after the other, or summed over them
            got = np.asarray(got).astype(np.float64).sum(0, keepdims=want.ndim == got.ndim)
            want = want.sum(0, keepdims=True) if want.shape != got.shape and want.ndim == got.ndim else want
        errors[name] = relative_error(got, want, max(floor[name], np.sqrt(want.size) * least / limit))

    compare("out", out, want.out, tolerance[0])
    compare("lse", lse, want.lse, tolerance[1])
    for name, gradient in gradients.items():
        dtype = x[name].dtype.name
        assert gradient.dtype == x[name].dtype, f"the gradient of {name} is {gradient.dtype}, and {name} {dtype}"
        truth = dsinks if name == "sinks" else getattr(want, "d" + name)
        compare("d" + name, gradient, truth, max(tolerance[2], TOLERANCE[dtype][2]))
    bad = [name for name in errors if not errors[name] <= allowed[name]]
    assert not bad, "; ".join(f"{name} has error {errors[name]:.2e}, allowed {allowed[name]:.1e}" for name in bad)
    assert out.dtype.name == call.dtype and lse.dtype == x["dlse"].dtype, f"dtypes {out.dtype}, {lse.dtype}"
    if not call.shared and not call.outer:
        assert_zeros(call, x, seen, want, {"out": out} | {"d" + name: dx for name, dx in gradients.items()})


def assert_zeros(call, x, seen, want, got):
    """What nothing visible contributes to is exactly 0: a query's or key's whole row, or an element of bias."""
    for name in ("out", "dq", "dk", "dv"):
        if name in got and got[name].shape[-1] > 3:  # the sum of a few short numbers can happen to be 0
            zero = ~getattr(want, name).any(-1)
            assert not got[name][zero].any(), f"{name} is not exactly 0 where nothing is visible"
    if "dbias" in got and got["dbias"].size and x["q"].size and x["k"].size:
        inputs = Inputs(x["q"], x["k"], x["v"], seen, x["bias"], x["dout"], x["dlse"])
        assert not got["dbias"][hidden_everywhere(call, inputs)].any(), "dbias is not exactly 0 where all is hidden"


def judge_twice(call, x, seen, got):
    """The derivative of the gradients, against differences of the oracle's gradients."""
    if call.form == "jvp":
        want, dsinks = expected(call, x, seen)
        gradients = {n: dsinks if n == "sinks" else getattr(want, "d" + n) for n in ("q", "k", "v", "bias", "sinks")}
        terms = [g * direction(n, g.shape) for n, g in gradients.items() if x[n] is not None]
        error = abs(got["moved"].sum() - sum(t.sum() for t in terms)) / np.sqrt(sum((t**2).sum() for t in terms) + 1)
        assert error <= 1e-3, f"the derivative in a direction has error {error:.2e}, allowed 1e-3"
        return
    names = list(got)
    step = 1e-4
    ends = []
    for sign in (1, -1):
        moved = {n: np.asarray(x[n]).astype(np.float64) + sign * step * direction(n, x[n].shape) for n in names}
        want, dsinks = expected(call, {**x, **moved}, seen)
        ends.append([dsinks if n == "sinks" else getattr(want, "d" + n) for n in names])
    # The matrix of second derivatives is symmetric, so a row of it times the direction is this difference.
    want = [(a - b) / (2 * step) for a, b in zip(*ends)]
    total = max(np.sqrt(sum((w**2).sum() for w in want)), 1e-300)
    for name, w in zip(names, want):
        error = np.linalg.norm((np.asarray(got[name]).astype(np.float64) - w).ravel()) / total
        assert error <= 1e-3, f"the second derivative by {name} has error {error:.2e}, allowed 1e-3"


# --- running ---------------------------------------------------------------------------------------------------------


def device_for(implementation):
    """A context in which an implementation's platform is the default one."""
    if implementation in ("cpu", "cuda"):
        return jax.default_device(jax.devices(implementation)[0])
    return contextlib.nullcontext()


def failures(call, implementations, contents=1):
    """Runs a call on several implementations, each on several contents.

    Returns {name: (the call with the contents that went wrong, what went wrong)} and how many runs there were.
    """
    wrong, runs = {}, 0
    with jax.enable_x64(True) if "float64" in (call.dtype, call.sinks) else contextlib.nullcontext():
        calls = [call.with_(contents=call.contents + i) for i in range(contents)]
        inputs = [contents_of(each) for each in calls]
        right = [expected(each, x, seen) for each, (x, seen) in zip(calls, inputs)]
        for name in implementations:
            run = program(call, name)
            for each, (x, seen), want in zip(calls, inputs, right):
                try:
                    with device_for(name):
                        got = jax.tree.map(np.asarray, run(*x.values()))
                    judge(each, x, seen, *want, got)
                    if len(got) == 3:
                        judge_twice(each, x, seen, got[2])
                except Exception as error:  # whatever it is, it is a finding
                    plain = name in ("xla", "reference")
                    if "cannot serve this call" in str(error) or ("forward-mode" in str(error) and not plain):
                        break
                    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                    wrong.setdefault(name, (each, kind + " ".join(str(error).split())[:600]))
                runs += 1
    return wrong, runs


def smaller(call):
    """Calls with one thing less in them."""
    default = Call()
    plain = dict(
        inner=(), outer=None, shared=(), frozen=(), form="vjp", deterministic=False, sinks=None, extremes=None,
        softcap=None, scale=None, is_causal=False, also=False, plan=False, bias_dtype=None, Hv=None, dtype="float32",
    )  # fmt: skip
    for name, value in plain.items():
        if getattr(call, name) != value:
            yield call.with_(**{name: value})
    for i in range(len(call.inner)):
        yield call.with_(inner=call.inner[:i] + call.inner[i + 1 :])
    if call.bias is not None:
        yield call.with_(bias=None, extremes=None, bias_dtype=None)
        yield from (call.with_(bias=call.bias[:i] + "1" + call.bias[i + 1 :]) for i in range(4) if call.bias[i] != "1")
    if call.mask is not None:
        yield call.with_(mask=None, builder=None, window=default.window, plan=False, also=False)
    for i, n in enumerate(call.batch):
        before, after = call.batch[:i], call.batch[i + 1 :]
        yield call.with_(batch=before + after)
        if n > 1:
            yield call.with_(batch=(*before, 1, *after))
    if call.N > call.K:
        yield call.with_(N=call.K)
    if call.K > 1:
        yield call.with_(N=call.N // call.K, K=1)
    for name in ("T", "S", "H", "window"):
        n = getattr(call, name)
        yield from (call.with_(**{name: m}) for m in (1, n // 2, n - 1) if max(m, 1) < n or m == n - 1 >= 1)


def shrink(call, implementation, seconds=30):
    """A call with less in it that still fails, and what is wrong with it."""
    message, end = "it did not fail a second time", time.monotonic() + seconds
    candidates = iter([call])
    while (candidate := next(candidates, None)) is not None and time.monotonic() < end:
        if candidate.maps > len(candidate.batch) or (candidate.shared and not candidate.maps):
            continue
        try:
            found = failures(candidate, [implementation])[0]
        except Exception:  # a call that makes no sense
            continue
        if implementation in found:
            call, message = found[implementation]
            candidates = smaller(call)
    return call, message


def fuzz(seconds, seed, implementations, *, report=print, every=10, most_failures=10):
    """Draws and runs calls for a while: on all compiled kernels, and on the other implementations in turn.

    Returns how many calls were drawn, how many runs that were, and a text for each kind of failure.
    """
    begin = last = time.monotonic()
    calls, runs, found, kinds = 0, 0, [], set()
    kernels = [name for name in implementations if name in ("cpu", "cuda")]
    others = [name for name in implementations if name not in kernels]
    while time.monotonic() - begin < seconds and len(found) < most_failures:
        call = draw(seed + calls)
        in_turn = others if call.dtype == "float64" else others[calls % len(others) :][:1] if others else []
        try:
            wrong, more = failures(call, kernels + in_turn, contents=3)
        except Exception as error:  # while the mask was built
            wrong, more = {"every implementation": (call, f"{type(error).__name__}: {error}")}, 0
        calls, runs = calls + 1, runs + more
        name, (failed, text) = next(iter(wrong.items()), ("", (call, "")))
        kind = re.split(r"\d", text)[0]  # what comes before the first number
        if wrong and kind in kinds:
            report(f"again: {', '.join(wrong)}: {text}\n    {failed.text()}")
        elif wrong:
            kinds.add(kind)
            small, message = shrink(failed, name) if name in implementations else (failed, wrong[name][1])
            found.append(
                f"FAILED {', '.join(wrong)}: {message}\n"
                f"    python tests/fuzz.py --call '{small.text()}'\n"
                f"    drawn with --seed {call.seed} as: {failed.text()}"
            )
            report(found[-1])
        if calls % 50 == 0:
            jax.clear_caches()
        if time.monotonic() - last > every:
            last = time.monotonic()
            took = last - begin
            report(
                f"{calls} calls, {runs} runs, {runs / took:.1f} runs/s, {len(found)} failures, "
                f"{max(0, seconds - took):.0f} s left"
            )
    return calls, runs, found


def main(arguments=None):
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="fuzz.py", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="how long to draw calls (default 60)")
    parser.add_argument("--seed", type=int, help="of the first call, the next ones count up; default: from the clock")
    parser.add_argument("--implementation", action="append", help="only this one (repeatable); default: all that work")
    parser.add_argument("--call", metavar="JSON", help="run this one call, as a failure printed it")
    options = parser.parse_args(arguments)
    names = options.implementation or list(jax_dma.available_implementations())
    unknown = [name for name in names if name not in jax_dma.available_implementations()]
    if unknown:
        parser.error(f"{unknown[0]}: {jax_dma.status().get(unknown[0], 'there is no such implementation')}")
    warnings.simplefilter("ignore")
    if options.call:
        wrong, runs = failures(Call.of(options.call), names)
        print("\n".join(f"{name}: {text}" for name, (_, text) in wrong.items()) or f"{runs} runs, all right")
        return 1 if wrong else 0
    seed = time.time_ns() // 10**6 % 10**9 if options.seed is None else options.seed
    print(f"seed {seed}, implementations {', '.join(names)}", flush=True)
    calls, runs, found = fuzz(options.seconds, seed, names, report=lambda text: print(text, flush=True))
    print(f"seed {seed}: {calls} calls, {runs} runs, {len(found)} failures")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
