"""Attention in Pallas kernels that Triton compiles: for a GPU on which the compiled kernels were not built.

A block of the kernels is some queries, with all heads of a group as rows (padded to a power of two, head fastest), or
some keys. What a mask or bias holds for all heads of a group is read once and repeated for the rows. Which tiles a
block visits is a list made in JAX from the bitmaps of a dense mask or the bounds of intervals (:mod:`jax_dma.tiles`),
so that the loop over them is a counted one, which Triton pipelines.

The backward pass has a kernel for dq, by queries, and one for dk and dv, by keys, which also writes the gradient of a
bias that varies over both. If that is broadcast over the batch or over key/value heads, it has a kernel of its own, by
its tiles, which walks what it is broadcast over. Nothing is added atomically, so all gradients are deterministic. The
gradient of another bias is summed from row or column sums that the first two write.
"""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_dma.implementations.ffi import result_type
from jax_dma.reference import HIDE_BELOW
from jax_dma.tiles import KEY_TILE, queries_per_tile, unpack_bits


_LOG2E = math.log2(math.e)

# (rows, keys, warps, stages of the pipeline) of a kernel's blocks, by the channels that a head is padded to. Two blocks
# of 64 rows, 64 keys and 4 warps share a multiprocessor: while one waits for memory or products, the other computes.
# At 256 channels, float32 biases of query heads bring the shared memory to 225 KiB.
_BLOCKS = {
    "forward": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (128, 64, 8, 2)},
    "dq": {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (128, 32, 8, 2)},
    "dkv": {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (32, 64, 8, 3)},
    "dbias": {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (64, 32, 8, 1)},
}


def _blocks(kernel, channels, interpret):
    """The entry of _BLOCKS, which is for 227 KiB of shared memory, or less for GPUs that have only 99 KiB."""
    rows, keys, warps, stages = _BLOCKS[kernel][max(64, pl.next_power_of_2(channels))]
    if not interpret and str(jax.devices("cuda")[0].compute_capability) not in ("9.0", "10.0", "10.3"):
        return max(rows // 2, 32), max(keys // 2, 32), warps, 1
    return rows, keys, warps, stages


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The static half of a kernel: sizes, options and block shapes."""

    batch: tuple[int, ...]
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int
    causal: bool
    scale: float
    softcap: float
    rows: int  # of a block of queries
    keys: int  # of a block of keys
    warps: int
    stages: int
    interpret: bool

    @property
    def G(self):
        return self.N // self.K

    @property
    def rows_per_query(self):
        return pl.next_power_of_2(self.G)

    @property
    def queries(self):
        return self.rows // self.rows_per_query

    @property
    def query_blocks(self):
        return pl.cdiv(self.T, self.queries)

    @property
    def key_blocks(self):
        return pl.cdiv(self.S, self.keys)

    @property
    def query_blocks_per_tile(self):
        return queries_per_tile(self.G) // self.queries

    @property
    def key_blocks_per_tile(self):
        return KEY_TILE // self.keys

    @classmethod
    def of(cls, kernel, *, call, batch, q, v, interpret):
        (T, N, H), (S, K, Hv) = q.shape[-3:], v.shape[-3:]
        rows, keys, warps, stages = _blocks(kernel, max(H, Hv), interpret)
        per_query = pl.next_power_of_2(N // K)
        rows = max(per_query, 16, min(rows, pl.next_power_of_2(T) * per_query))
        options = (call.causal, call.scale, call.softcap)
        return cls(batch, T, S, N, K, H, Hv, *options, rows, keys, warps, stages, bool(interpret))


def _call(kernel, name, sizes, operands, results, places, *, interpret):
    """The results, by name, of a kernel that is given sizes, a namespace of references and its place among places."""
    operands = {name: x for name, x in operands.items() if x is not None}
    names = [*operands, *results]

    def body(*refs):
        given = dict.fromkeys(_OPERANDS) | dict(zip(names, refs))
        kernel(sizes, SimpleNamespace(**given), _unravel(pl.program_id(0), places))

    types = [result_type(shape, dtype, operands["q"]) for shape, dtype in results.values()]
    found = pl.pallas_call(
        body,
        out_shape=types,
        grid=(math.prod(places),),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        interpret=interpret,
        name=f"jax_dma_pallas_{name}",
    )(*operands.values())
    return dict(zip(results, found))


_OPERANDS = ("q", "k", "v", "bits", "start", "end", "bias", "listed", "count", "seen", "dout", "lse", "lost", "delta")
_OPERANDS += ("dbias", "row_sums", "column_sums")


def _unravel(i, sizes):
    indices = []
    for size in reversed(sizes):
        i, index = _divide(i, size)
        indices.append(index)
    return indices[::-1]


def _divide(i, size):
    """Quotient and remainder of integers that are not negative."""
    if isinstance(i, int) or size == 1:
        return (i, 0) if size == 1 else divmod(i, size)
    size = jnp.full_like(i, size)
    return jax.lax.div(i, size), jax.lax.rem(i, size)


def _both(*masks):
    """The conjunction of masks that broadcast; None stands for True."""
    found = None
    for mask in masks:
        if mask is not None:
            found = mask if found is None else found & mask
    return found


def _load(ref, batch, index, mask=None):
    """What stands at an index of arrays and scalars that broadcast; 0 where mask is False."""
    index = (*(0 if size == 1 else i for size, i in zip(ref.shape, batch)), *index)
    shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))
    if not shape:
        return ref[index]
    view = ref.at[index]
    if mask is None:
        return plgpu.load(view)
    return plgpu.load(view, mask=jnp.broadcast_to(mask, shape), other=0)


def _store(ref, batch, index, x, mask):
    index = (*(0 if size == 1 else i for size, i in zip(ref.shape, batch)), *index)
    mask = None if mask is None else jnp.broadcast_to(mask, x.shape)
    plgpu.store(ref.at[index], x.astype(ref.dtype), mask=mask)


def _dot(a, b, contract):
    axes, precision = ((contract[:1], contract[1:]), ((), ())), jax.lax.Precision.DEFAULT  # float32 in tf32
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def _channels(size):
    """Indices of the channels padded for a kernel, and which are there (None: all)."""
    padded = max(16, pl.next_power_of_2(size))
    h = jnp.arange(padded, dtype=jnp.int32)
    return h, None if padded == size else h < size


class _Queries:
    """The rows of a block of queries, along an axis of the logits."""

    def __init__(self, c, refs, batch, head, block, axis=0):
        self.c, self.refs, self.batch, self.head, self.axis = c, refs, batch, head, axis
        first, some_past = block * c.queries, c.T % queries_per_tile(c.G)
        self.query = first + jnp.arange(c.queries, dtype=jnp.int32)
        self.query_mask = self.query < c.T if some_past else None
        row = jnp.arange(c.rows, dtype=jnp.int32)
        self.t = first + (row >> c.rows_per_query.bit_length() - 1)
        g = row & c.rows_per_query - 1
        self.n = head * c.G + g
        self.mask = _both(g < c.G if c.rows_per_query > c.G else None, self.t < c.T if some_past else None)

    def __call__(self, x):
        return None if x is None else jnp.expand_dims(x, 1 - self.axis)

    def alike(self, heads):
        """Whether a mask or bias of so many heads is the same for all heads of a group: it is then read by query."""
        return heads in (1, self.c.K)

    def index(self, heads, queries):
        """(indices of heads and queries, which of them are there) of a mask or bias."""
        if not self.alike(heads):
            return (self(self.n), 0 if queries == 1 else self(self.t)), self(self.mask)
        head = 0 if heads == 1 else self.head
        return ((head, 0), None) if queries == 1 else ((head, self(self.query)), self(self.query_mask))

    def spread(self, x, heads=1):
        """What was read of a mask or bias, repeated for the rows."""
        if not self.alike(heads) or jnp.ndim(x) == 0 or x.shape[self.axis] == 1:
            return x
        x = jnp.expand_dims(x, self.axis + 1)
        x = jnp.broadcast_to(x, (*x.shape[: self.axis + 1], self.c.rows_per_query, *x.shape[self.axis + 2 :]))
        return x.reshape(self.c.rows, -1) if self.axis == 0 else x.reshape(-1, self.c.rows)

    def load(self, ref, channels):
        """[rows, channels] of an array [*batch, T, N, channels]."""
        h, there = _channels(channels)
        mask = _both(None if self.mask is None else self.mask[:, None], None if there is None else there[None, :])
        return _load(ref, self.batch, (self.t[:, None], self.n[:, None], h[None, :]), mask)

    def load_rows(self, ref):
        """[rows] of an array [*batch, T, N]."""
        return _load(ref, self.batch, (self.t, self.n), self.mask)

    def store(self, ref, x, channels):
        h, there = _channels(channels)
        mask = _both(None if self.mask is None else self.mask[:, None], None if there is None else there[None, :])
        _store(ref, self.batch, (self.t[:, None], self.n[:, None], h[None, :]), x, mask)

    def store_rows(self, ref, x):
        _store(ref, self.batch, (self.t, self.n), x, self.mask)


class _Keys:
    """A block of keys, along an axis of the logits."""

    def __init__(self, c, refs, batch, head, block, axis=1):
        self.batch, self.head, self.axis, self.block = batch, head, axis, block
        self.lane = jnp.arange(c.keys, dtype=jnp.int32)
        self.s = block * c.keys + self.lane
        self.mask = self.s < c.S if c.S % KEY_TILE else None

    def __call__(self, x):
        return None if x is None else jnp.expand_dims(x, 1 - self.axis)

    def load(self, ref, channels):
        """[keys, channels] of an array [*batch, S, K, channels]."""
        h, there = _channels(channels)
        mask = _both(None if self.mask is None else self.mask[:, None], None if there is None else there[None, :])
        return _load(ref, self.batch, (self.s[:, None], self.head, h[None, :]), mask)

    def store(self, ref, x, channels):
        h, there = _channels(channels)
        mask = _both(None if self.mask is None else self.mask[:, None], None if there is None else there[None, :])
        _store(ref, self.batch, (self.s[:, None], self.head, h[None, :]), x, mask)


def _visible(c, refs, rows, keys):
    """Which logits are visible, as an array that broadcasts to them; None for all. A bias is not asked."""
    visible, causal = _both(rows(rows.mask), keys(keys.mask)), c.causal
    if refs.start is not None:
        heads = refs.start.shape[-2]
        (head, t), there = rows.index(heads, c.T)
        mask = _both(keys(keys.mask), there if jnp.ndim(head) else None)
        start, end = (_load(ref, rows.batch, (head, keys(keys.s)), mask) for ref in (refs.start, refs.end))
        start, end = jnp.maximum(start, 0), jnp.minimum(end, c.T)
        if causal:
            start, causal = jnp.maximum(start, keys(keys.s) - (c.S - c.T)), False
        # start <= t < end in one comparison: as unsigned numbers, negative differences are large
        inside = (t - start).astype(jnp.uint32) < jnp.maximum(end - start, 0).astype(jnp.uint32)
        visible = _both(visible, rows.spread(inside, heads))
    if causal:
        visible = _both(visible, rows.spread(keys(keys.s) <= rows(rows.query) + (c.S - c.T)))
    if refs.bits is not None:
        visible = _both(visible, rows.spread(_bits(c, refs.bits, rows, keys), refs.bits.shape[-3]))
    return visible


def _bits(c, ref, rows, keys):
    """Which positions the packed bits of a mask show."""
    *_, heads, queries, words = ref.shape
    index, mask = rows.index(heads, queries)
    if words == 1:
        return (_load(ref, rows.batch, (*index, 0), mask) & 1) != 0
    found, lane = None, keys(keys.lane)
    for i in range(c.keys // 32):
        word = _load(ref, rows.batch, (*index, keys.block * (c.keys // 32) + i), mask)
        found = word if found is None else jnp.where(lane < 32 * i, found, word)
    return (found & (jnp.uint32(1) << (lane & 31).astype(jnp.uint32))) != 0


def _logits(c, refs, rows, keys, products):
    """(logits, d logits / d (scale * product) or None) of products of rows and keys, whether visible or not.

    A bias that hides makes them -1e30 or less. See _in_products for their unit.
    """
    logits, slope = products if _in_products(c, refs.bias) else products * c.scale, None
    if c.softcap:
        capped = jnp.tanh(logits / c.softcap)
        logits, slope = c.softcap * capped, 1 - capped * capped
    if refs.bias is not None:
        *_, heads, queries, columns = refs.bias.shape
        index, mask = rows.index(heads, queries)
        mask = _both(mask, keys(keys.mask) if columns > 1 else None)
        bias = _load(refs.bias, rows.batch, (*index, 0 if columns == 1 else keys(keys.s)), mask)
        logits = logits + rows.spread(bias.astype(jnp.float32), heads)
    return logits, slope


def _in_products(c, bias):
    """Whether logits stay products that are not scaled: one multiplication, before the exponential, does for both."""
    return bias is None and not c.softcap and c.scale > 0


def _exp2(c, x):
    if c.interpret:
        return jnp.exp2(x)
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)  # jnp.exp2 spends three more instructions on denormal results
    asm = "ex2.approx.ftz.f32 $0, $1;"
    return plgpu.elementwise_inline_asm(asm, args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape])[0]


def _live_keys(c, refs, batch, head, query_block):
    """(how many blocks of keys a block of queries meets, how many there are, the function of a number to an index).

    The function gives all blocks of keys, those to be met first.
    """
    if refs.count is None:
        count = c.key_blocks
        if c.causal:
            last = (query_block + 1) * c.queries + c.S - c.T  # keys before this one may be visible
            count = jnp.minimum(_divide(jnp.maximum(last, 0) + c.keys - 1, c.keys)[0], count)
        return count, c.key_blocks, lambda i: i
    return _listed(refs, batch, head, _divide(query_block, c.query_blocks_per_tile)[0], c.key_blocks_per_tile)


def _live_queries(c, refs, batch, head, key_block):
    """The same for a block of keys: the blocks of queries that it meets, the last first."""
    if refs.count is None:
        count = c.query_blocks
        if c.causal:
            first = jnp.maximum(key_block * c.keys - (c.S - c.T), 0)  # the first query that may see the first key
            count = jnp.maximum(count - _divide(first, c.queries)[0], 0)
        return count, c.query_blocks, lambda i: c.query_blocks - 1 - i
    return _listed(refs, batch, head, _divide(key_block, c.key_blocks_per_tile)[0], c.query_blocks_per_tile)


def _listed(refs, batch, head, tile, parts):
    """The same from a list of tiles, each of which is some blocks; the last may lie past the end."""
    index = lambda ref: (0 if ref.shape[len(batch)] == 1 else head, 0 if ref.shape[len(batch) + 1] == 1 else tile)
    count = _load(refs.count, batch, index(refs.count)) * parts

    def block(i):
        tile, part = _divide(i, parts)
        return _load(refs.listed, batch, (*index(refs.listed), tile)) * parts + part

    return count, refs.listed.shape[-1] * parts, block


def _walk(refs, count, block, step, state):
    """The state after step(index of a block, state) for so many blocks."""
    if refs.count is None:
        return jax.lax.fori_loop(0, count, lambda i, state: step(block(i), state), state)

    def ahead(i, carry):  # an index that was loaded in the step before lets the pipeline load its block without waiting
        index, state = carry
        return block(jnp.minimum(i + 1, count - 1)), step(index, state)

    return jax.lax.fori_loop(0, count, ahead, (block(0), state))[1]


def _forward_kernel(c, refs, place):
    batch, head, block = _place(c, place, c.query_blocks, last_first=True)
    rows = _Queries(c, refs, batch, head, block)
    q = rows.load(refs.q, c.H)
    count, _, key_block = _live_keys(c, refs, batch, head, block)

    def step(block, state):
        m, total, out = state
        keys = _Keys(c, refs, batch, head, block)
        logits, _ = _logits(c, refs, rows, keys, _dot(q, keys.load(refs.k, c.H), (1, 1)))
        visible = _visible(c, refs, rows, keys)
        if visible is not None:
            logits = jnp.where(jnp.broadcast_to(visible, logits.shape), logits, -jnp.inf)
        new_m = jnp.maximum(m, logits.max(1))
        shift = jnp.where(new_m == -jnp.inf, 0.0, new_m)
        if _in_products(c, refs.bias):
            unit = c.scale * _LOG2E
            shift = shift * unit
            weights, rescale = _exp2(c, logits * unit - shift[:, None]), _exp2(c, m * unit - shift)
        else:  # differences first: log2(e) times a large bias would be rounded too much
            weights, rescale = _exp2(c, (logits - shift[:, None]) * _LOG2E), _exp2(c, (m - shift) * _LOG2E)
        v = keys.load(refs.v, c.Hv)
        out = out * rescale[:, None] + _dot(weights.astype(v.dtype), v, (1, 0))
        return new_m, total * rescale + weights.sum(1), out

    zeros = jnp.zeros((c.rows,), jnp.float32)
    state = (zeros - jnp.inf, zeros, jnp.zeros((c.rows, _channels(c.Hv)[0].shape[0]), jnp.float32))
    m, total, out = _walk(refs, count, key_block, step, state)
    empty = total == 0
    if refs.bias is not None:  # a row all of whose logits it hides; in other rows they have weighed nothing
        empty = empty | (m <= HIDE_BELOW)
    total = jnp.where(empty, 1.0, total)
    rows.store(refs.out, jnp.where(empty[:, None], 0.0, out / total[:, None]), c.Hv)
    m = m * c.scale if _in_products(c, refs.bias) else m
    m, log_total = jnp.where(empty, 0.0, m), jnp.log(total)
    lse = m + log_total
    rows.store_rows(refs.lse, jnp.where(empty, -jnp.inf, lse))
    rows.store_rows(refs.lost, m - lse + log_total)


def _place(c, place, blocks, last_first):
    """(batch indices, key/value head, block) of a program; long blocks come first where the causal rule makes some."""
    if c.causal:
        block, *batch, head = place
        return batch, head, blocks - 1 - block if last_first else block
    *batch, head, block = place
    return batch, head, block


def _places(c, blocks):
    return (blocks, *c.batch, c.K) if c.causal else (*c.batch, c.K, blocks)


def _gradient_of_logits(c, refs, rows, keys, q, k, v, dout, lse, lost, delta):
    """(weights, gradient of the logits, that of the products before they are scaled) of a block."""
    product = lambda of_rows, of_keys: _dot(*((of_rows, of_keys) if rows.axis == 0 else (of_keys, of_rows)), (1, 1))
    logits, slope = _logits(c, refs, rows, keys, product(q, k))
    if _in_products(c, refs.bias):
        weights = _exp2(c, logits * (c.scale * _LOG2E) - rows(lse))
    else:
        weights = _exp2(c, (logits - rows(lse)) * _LOG2E - rows(lost))
    visible = _visible(c, refs, rows, keys)
    if visible is not None:
        weights = jnp.where(jnp.broadcast_to(visible, weights.shape), weights, 0.0)
    dlogits = weights * (product(dout, v) - rows(delta))
    return weights, dlogits, dlogits if slope is None else dlogits * slope


def _wide(x):
    """float16 has too little range for gradients: their products are in tf32, which holds its mantissa."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _dq_kernel(c, refs, place):
    batch, head, block = _place(c, place, c.query_blocks, last_first=True)
    rows = _Queries(c, refs, batch, head, block)
    q, dout = rows.load(refs.q, c.H), rows.load(refs.dout, c.Hv)
    of_rows = [rows.load_rows(x) for x in (refs.lse, refs.lost, refs.delta)]
    count, _, key_block = _live_keys(c, refs, batch, head, block)

    def step(block, state):
        dq, *sums = state
        keys = _Keys(c, refs, batch, head, block)
        k, v = keys.load(refs.k, c.H), keys.load(refs.v, c.Hv)
        _, dlogits, dproducts = _gradient_of_logits(c, refs, rows, keys, q, k, v, dout, *of_rows)
        k = _wide(k)
        return dq + _dot(dproducts.astype(k.dtype), k, (1, 0)), *(x + dlogits.sum(1) for x in sums)

    sums = [] if refs.row_sums is None else [jnp.zeros((c.rows,), jnp.float32)]
    dq, *sums = _walk(refs, count, key_block, step, (jnp.zeros(q.shape, jnp.float32), *sums))
    rows.store(refs.dq, c.scale * dq, c.H)
    if sums:
        rows.store_rows(refs.row_sums, sums[0])


def _dkv_kernel(c, refs, place):
    batch, head, block = _place(c, place, c.key_blocks, last_first=False)
    keys = _Keys(c, refs, batch, head, block, axis=0)  # transposed: what dk and dv multiply needs no transposition then
    k, v = keys.load(refs.k, c.H), keys.load(refs.v, c.Hv)
    count, of, query_block = _live_queries(c, refs, batch, head, block)
    per_head = refs.column_sums is not None and refs.column_sums.shape[-2] == c.N != c.K

    def step(block, state):
        dk, dv, *sums = state
        rows = _Queries(c, refs, batch, head, block, axis=1)
        q, dout = rows.load(refs.q, c.H), rows.load(refs.dout, c.Hv)
        of_rows = [rows.load_rows(x) for x in (refs.lse, refs.lost, refs.delta)]
        weights, dlogits, dproducts = _gradient_of_logits(c, refs, rows, keys, q, k, v, dout, *of_rows)
        dv = dv + _dot(weights.astype(dout.dtype), dout, (1, 0))
        q = _wide(q)
        dk = dk + _dot(dproducts.astype(q.dtype), q, (1, 0))
        if refs.dbias is not None:
            _store_dbias(refs, rows, keys, dlogits)
        if per_head:
            dlogits = dlogits.reshape(c.keys, c.queries, c.rows_per_query)
        return dk, dv, *(x + dlogits.sum(1) for x in sums)

    shape = (c.keys, c.rows_per_query) if per_head else (c.keys,)
    sums = [] if refs.column_sums is None else [jnp.zeros(shape, jnp.float32)]
    state = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32), *sums)
    dk, dv, *sums = _walk(refs, count, query_block, step, state)
    keys.store(refs.dk, c.scale * dk, c.H)
    keys.store(refs.dv, dv, c.Hv)
    if refs.dbias is not None:

        def hidden(i, _):
            rows = _Queries(c, refs, batch, head, query_block(i), axis=1)
            _store_dbias(refs, rows, keys, jnp.zeros((c.keys, c.rows), jnp.float32))

        jax.lax.fori_loop(count, of, hidden, None)
    if per_head:
        g = jnp.arange(c.rows_per_query, dtype=jnp.int32)
        mask = _both((g < c.G)[None, :], None if keys.mask is None else keys.mask[:, None])
        _store(refs.column_sums, batch, (head * c.G + g[None, :], keys.s[:, None]), sums[0], mask)
    elif sums:
        _store(refs.column_sums, batch, (head, keys.s), sums[0], keys.mask)


def _dbias_kernel(c, refs, place):
    """A tile of the gradient of a bias that varies over queries and keys, summed over what else is broadcast."""
    *bias_batch, bias_head, query_block, key_block = place
    shape = refs.dbias.shape
    heads = shape[-3]
    summed = [full if size == 1 else 1 for size, full in zip(shape, c.batch)] + [c.K if heads == 1 else 1]

    def seen(i):
        *batch, head = (a + b for a, b in zip(_unravel(i, summed), (*bias_batch, bias_head)))
        tiles = (_divide(query_block, c.query_blocks_per_tile)[0], _divide(key_block, c.key_blocks_per_tile)[0])
        index = (0 if size == 1 else x for size, x in zip(refs.seen.shape[len(batch) :], (head, *tiles)))
        return _load(refs.seen, batch, tuple(index)) != 0

    def add(i, total):
        *batch, head = (a + b for a, b in zip(_unravel(i, summed), (*bias_batch, bias_head)))
        rows, keys = _Queries(c, refs, batch, head, query_block), _Keys(c, refs, batch, head, key_block)
        operands = [rows.load(refs.q, c.H), keys.load(refs.k, c.H), keys.load(refs.v, c.Hv)]
        operands += [rows.load(refs.dout, c.Hv), *(rows.load_rows(x) for x in (refs.lse, refs.lost, refs.delta))]
        return total + _gradient_of_logits(c, refs, rows, keys, *operands)[1]

    live, step = None, add
    if c.causal:
        live = key_block * c.keys < (query_block + 1) * c.queries + c.S - c.T
    if refs.seen is not None and any(1 not in sizes for sizes in zip(refs.seen.shape, summed)):
        step = lambda i, total: jax.lax.cond(seen(i), add, lambda _, total: total, i, total)
    elif refs.seen is not None:  # one answer for all: the loop is left without a condition, and is pipelined
        live = _both(live, seen(0))
    zeros = jnp.zeros((c.rows, c.keys), jnp.float32)
    run = lambda: jax.lax.fori_loop(0, math.prod(summed), step, zeros)
    total = run() if live is None else jax.lax.cond(live, run, lambda: zeros)
    keys = _Keys(c, refs, bias_batch, 0, key_block)
    _store_dbias(refs, _Queries(c, refs, bias_batch, bias_head, query_block), keys, total)


def _store_dbias(refs, rows, keys, dlogits):
    """Stores gradients of logits, or their sums over the heads of a group, as gradients of bias."""
    c, (*_, heads, queries, _) = rows.c, refs.dbias.shape
    if rows.alike(heads):
        shape = (c.queries, c.rows_per_query)
        dlogits = dlogits.reshape((*shape, c.keys) if rows.axis == 0 else (c.keys, *shape)).sum(rows.axis + 1)
    index, mask = rows.index(heads, queries)
    _store(refs.dbias, rows.batch, (*index, keys(keys.s)), dlogits, _both(mask, keys(keys.mask)))


def _seen(visibility, c):
    """Which tiles a mask shows: bool [*batch|1, K|1, query tiles|1, key tiles|1]; None for no mask."""
    key_tiles = pl.cdiv(c.S, KEY_TILE)
    if visibility.bits is not None:
        words = visibility.tiles_by_query[..., 0, :]
        return unpack_bits(words, key_tiles) if visibility.bits.shape[-1] > 1 else (words & 1) != 0
    if visibility.start is not None:
        smallest_start, largest_end, _, _ = jnp.split(visibility.bounds[..., :key_tiles], 4, axis=-2)
        tile = queries_per_tile(c.G)
        t0 = (jnp.arange(pl.cdiv(c.T, tile), dtype=jnp.int32) * tile).reshape((1,) * (len(c.batch) + 1) + (-1, 1))
        return (smallest_start < jnp.minimum(t0 + tile, c.T)) & (largest_end > t0)
    return None


def _lists(seen, c, by_key):
    """For each tile of queries all tiles of keys, those to visit first, and their number; or the other way round.

    By key, the last come first.
    """
    if seen is None:
        return None, None
    queries, keys, tile = pl.cdiv(c.T, queries_per_tile(c.G)), pl.cdiv(c.S, KEY_TILE), queries_per_tile(c.G)
    length = queries if by_key else keys
    seen = jnp.swapaxes(seen, -1, -2) if by_key else seen
    seen = jnp.broadcast_to(seen, (*seen.shape[:-1], length))
    number = jnp.arange(length, dtype=jnp.int32)
    order = length - 1 - number if by_key else number  # the causal rule then takes from the end of the list
    order = jnp.sort(jnp.where(seen, order, order + length), axis=-1) % length
    listed = length - 1 - order if by_key else order
    if c.causal:
        t, s = jnp.arange(queries)[:, None], jnp.arange(keys)[None, :]
        live = s * KEY_TILE < (t + 1) * tile + c.S - c.T
        seen = seen & (live.T if by_key else live)
    return listed, seen.sum(-1, dtype=jnp.int32)


def _copied_in_words(bias):
    """A bias that is one per key or query in float32: the pipeline copies no less than four bytes."""
    return bias if bias is None or min(bias.shape[-2:]) > 1 else bias.astype(jnp.float32)


def forward(*operands, call, interpret):
    """[out, lse]. ``interpret``: in plain JAX, to test the kernels where there is no GPU."""
    from jax_dma.op import batch_shape

    q, k, v, visibility, bias, _ = call.unflatten(operands)
    batch = batch_shape(q, operands)
    c = _Sizes.of("forward", call=call, batch=batch, q=q, v=v, interpret=interpret)
    listed, count = _lists(_seen(visibility, c), c, by_key=False)
    given = dict(q=q, k=k, v=v, bits=visibility.bits, start=visibility.start, end=visibility.end)
    given |= dict(bias=_copied_in_words(bias), listed=listed, count=count)
    rows = ((*batch, c.T, c.N), jnp.float32)
    results = dict(out=((*batch, c.T, c.N, c.Hv), q.dtype), lse=rows, lost=rows)
    places = _places(c, c.query_blocks)
    found = _call(_forward_kernel, "forward", c, given, results, places, interpret=interpret)
    return [found["out"], jnp.stack([found["lse"], found["lost"]], -1)]


def backward(*operands, call, interpret):
    """[dq, dk, dv] and, if asked for, dbias."""
    from jax_dma.op import batch_shape, dbias_shape

    q, k, v, visibility, bias, (out, lse, dout, dlse) = call.unflatten(operands)
    batch = batch_shape(q, operands)
    lse, lost = lse[..., 0], lse[..., 1]
    empty = lse == -jnp.inf  # the cotangents of such rows may hold anything
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - dlse
    delta, lse = jnp.where(empty, 0, delta), jnp.where(empty, 0, lse)
    dout = jnp.where(empty[..., None], 0, dout)

    if _in_products(call, bias):
        lse = (lse + lost) * _LOG2E
    lost = lost * _LOG2E
    given = dict(q=q, k=k, v=v, bits=visibility.bits, start=visibility.start, end=visibility.end)
    given |= dict(bias=_copied_in_words(bias), dout=dout, lse=lse, lost=lost, delta=delta)
    sizes = functools.partial(_Sizes.of, call=call, batch=batch, q=q, v=v, interpret=interpret)
    by_rows = call.want_dbias and bias.shape[-1] == 1
    by_columns = call.want_dbias and not by_rows and bias.shape[-2] == 1
    by_tiles = call.want_dbias and not by_rows and not by_columns
    shape = dbias_shape(call, bias, batch) if call.want_dbias else None

    c = sizes("dq")
    seen = _seen(visibility, c)
    listed, count = _lists(seen, c, by_key=False)
    results = dict(dq=((*batch, *q.shape[-3:]), q.dtype))
    if by_rows:
        results["row_sums"] = ((*batch, c.T, c.N), jnp.float32)
    lists = dict(listed=listed, count=count)
    dq = _call(_dq_kernel, "dq", c, given | lists, results, _places(c, c.query_blocks), interpret=interpret)

    c = sizes("dkv")
    listed, count = _lists(seen, c, by_key=True)
    results = dict(dk=((*batch, *k.shape[-3:]), k.dtype), dv=((*batch, *v.shape[-3:]), v.dtype))
    if by_columns:
        results["column_sums"] = ((*batch, c.N if bias.shape[-3] == c.N else c.K, c.S), jnp.float32)
    if by_tiles and shape[:-3] == batch and shape[-3] >= c.K:  # nothing is summed but the heads of a group
        results["dbias"] = (shape, bias.dtype)
    lists = dict(listed=listed, count=count)
    dkv = _call(_dkv_kernel, "dkv", c, given | lists, results, _places(c, c.key_blocks), interpret=interpret)
    gradients = [dq["dq"], dkv["dk"], dkv["dv"]]
    if not call.want_dbias:
        return gradients

    if "dbias" in dkv:
        return [*gradients, dkv["dbias"]]
    if by_rows:
        sums = jnp.swapaxes(dq["row_sums"], -1, -2)[..., None]
    elif by_columns:
        sums = dkv["column_sums"][..., None, :]
    else:
        c = sizes("dbias")
        given["seen"] = None if seen is None else seen.astype(jnp.int32)
        results = dict(dbias=(shape, bias.dtype))
        places = (*shape[:-3], min(shape[-3], c.K), c.query_blocks, c.key_blocks)
        return [*gradients, _call(_dbias_kernel, "dbias", c, given, results, places, interpret=interpret)["dbias"]]
    if shape[-3] == c.K < sums.shape[-3]:
        sums = sums.reshape((*batch, c.K, c.G, *sums.shape[-2:])).sum(-3)
    axes = tuple(i for i, size in enumerate(shape) if size == 1 != sums.shape[i])
    return [*gradients, sums.sum(axes, keepdims=True).astype(bias.dtype)]
