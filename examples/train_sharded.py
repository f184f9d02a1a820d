"""Trains the demo's model with data, context and tensor parallelism over all devices, and checks it against one.

    python examples/train_sharded.py
    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python examples/train_sharded.py

The mesh has three axes: ``data`` splits the batch, ``context`` the sequence and ``tensor`` the heads and the hidden
units. Outside attention, XLA splits the model by what the weights and the batch say. Attention is a ``jax.shard_map``:
there, :mod:`jax_dma.context` builds the dynamic mask from the scores of all keys, and attends over keys that are split.
The same model is then trained on one device, from the same weights and with the same batches, and losses are compared.
"""

import argparse
import sys
import time

import demo
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tqdm import tqdm

from jax_dma import context

AXES = ("data", "context", "tensor")
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}  # of a loss, in bits per byte, after up to a few hundred steps


class SplitAttention(demo.Attention):
    """The demo's attention, over a mesh."""

    def __init__(self, mesh, method, *arguments):
        super().__init__(*arguments)
        self.mesh, self.method = mesh, method

    def __call__(self, x):
        q, k, v = self.project(x)
        array, per_key = P("data", "context", "tensor"), P("data", "tensor", "context")
        attend = jax.shard_map(self.attend, mesh=self.mesh, in_specs=(array, array, array, per_key), out_specs=array)
        return self.output(attend(q, k, v, self.scores(v)).reshape(x.shape[:2] + (-1,)))

    def attend(self, q, k, v, scores):
        """On each device: its part of the batch, its heads, its queries and its keys."""
        mask = None if self.window is None else context.top_k(scores, self.window, axis="context")
        return context.attention(
            q, k, v, mask, scores[..., None, :], axis="context", method=self.method, is_causal=True,
            implementation=self.implementation,
        )  # fmt: skip


def sharding_of(path):
    """How a weight is split: the layers that lead to heads or hidden units by columns, those that lead back by rows."""
    name = [str(key.key) for key in path if hasattr(key, "key")]
    if {"query", "key", "value", "up"} & set(name):
        return P(None, "tensor")
    return P("tensor", None) if {"output", "down"} & set(name) else P()


def split_model(plain, mesh, method):
    """The same model with the same weights, over a mesh."""
    model = nnx.clone(plain)
    for block in model.blocks:
        old = block.attention
        block.attention = SplitAttention(mesh, method, old.window, old.implementation, nnx.Rngs(0))
    state = nnx.state(plain, nnx.Param)
    place = lambda path, x: jax.device_put(x, NamedSharding(mesh, sharding_of(path)))
    nnx.update(model, jax.tree_util.tree_map_with_path(place, state))
    return model


def train(name, model, batches, place, rate):
    """Trains in place; returns the loss of every step, and the seconds of the fastest."""
    optimizer = nnx.Optimizer(model, optax.adamw(rate, b2=0.95, weight_decay=0.1), wrt=nnx.Param)
    losses, seconds = [], []
    with tqdm(batches, f"{name:>10}", unit="step") as bar:
        for batch in bar:
            begin = time.perf_counter()
            losses.append(float(demo.train_step(model, optimizer, place(batch))))
            seconds.append(time.perf_counter() - begin)
            bar.set_postfix_str(f"{losses[-1]:.4f} bits per byte")
    return np.array(losses), min(seconds)


def weights_on_a_device(model):
    """How many of the weights, and how many there are."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return sum(x.addressable_shards[0].data.size for x in leaves), sum(x.size for x in leaves)


def sizes(devices, wanted):
    """The sizes of the mesh axes: as asked for; the others share what devices there are."""
    limits = {"data": demo.BATCH, "context": demo.CONTEXT // 64, "tensor": demo.KV_HEADS}
    found = {axis: wanted[axis] or 1 for axis in AXES}
    grown = True
    while grown:  # double one after the other
        grown = False
        for axis in ("context", "tensor", "data"):
            fits = devices % (2 * np.prod(list(found.values()))) == 0 and limits[axis] % (2 * found[axis]) == 0
            if wanted[axis] is None and fits:
                found[axis], grown = 2 * found[axis], True
    for axis, size in found.items():
        if limits[axis] % size:
            sys.exit(f"--{axis} {size}: it must divide {limits[axis]}")
    if (needed := int(np.prod(list(found.values())))) > devices:
        sys.exit(f"a mesh of {' x '.join(map(str, found.values()))} needs {needed} devices, and there are {devices}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: %(default)s)")
    parser.add_argument("--window", type=int, default=demo.WINDOW, help="keys that a query sees; 0: all of its past")
    parser.add_argument("--method", choices=context.METHODS, default="all_gather", help="of context parallelism")
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=int, help=f"size of the mesh axis {axis} (default: by what there is)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--implementation", choices=("cuda", "cpu", "xla"), help="of jax_dma.attention")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")

    shape = sizes(jax.device_count(), {axis: getattr(options, axis) for axis in AXES})
    devices = jax.devices()[: int(np.prod(list(shape.values())))]
    mesh = jax.make_mesh(tuple(shape.values()), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
    print("mesh:", ", ".join(f"{axis} {size}" for axis, size in shape.items()), f"({devices[0].device_kind})")
    if jax.device_count() == 1:
        print("there is one device and nothing to split; --help shows how to make several of a CPU")

    text, _ = demo.load_text()
    batches = list(demo.random_batches(text, options.steps, options.seed))
    plain = demo.LanguageModel(options.window or None, options.implementation, nnx.Rngs(options.seed))
    split = split_model(plain, mesh, options.method)
    print("weights on each device: {:,} of {:,}".format(*weights_on_a_device(split)))
    on_mesh = lambda batch: jax.device_put(batch, NamedSharding(mesh, P("data")))
    rate = demo.PEAK_LEARNING_RATE / 5
    split_losses, split_time = train("on the mesh", split, batches, on_mesh, rate)
    losses, one_time = train("one device", plain, batches, jnp.asarray, rate)

    worst, allowed = float(np.abs(split_losses - losses).max()), TOLERANCE[jnp.dtype(demo.DTYPE).name]
    print("\nbits per byte   first step   last step   fastest step")
    for name, x, seconds in (("on the mesh", split_losses, split_time), ("one device", losses, one_time)):
        print(f"{name:<13}   {x[0]:10.5f}   {x[-1]:9.5f}   {1e3 * seconds:9.1f} ms")
    same = worst <= allowed
    print(f"largest difference in any step: {worst:.1e}, {'the same' if same else 'NOT the same'} (to {allowed:g})")
    sys.exit(not same)


if __name__ == "__main__":
    main()
