"""One training step at 131,072 tokens and a forward pass at 1,048,576 tokens, on one GPU, with dynamic masks.

    python examples/long_context.py [--train 131072] [--forward 1048576] [--window 2048]

The model is a small byte-level transformer; the text is the source code of Python's own library. In every layer and
head each query sees the WINDOW highest-scored keys of its past, wherever they are, at a cost of O(T * WINDOW). Beside
it stands the same step with full attention, which costs O(T^2): measured at the training length, and worked out from
that for the other. On a CPU the lengths are shorter.
"""

import argparse
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jax_dma

WIDTH, HIDDEN, LAYERS = 512, 1536, 4
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
ON_CPU = jax.default_backend() == "cpu"
DTYPE = jnp.float32 if ON_CPU else jnp.bfloat16  # of activations; weights are float32


def read_text(length):
    """``length`` + 1 bytes of the library's source, as token ids [1, length + 1]."""
    text, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if size > length:
            break
        text.append(path.read_bytes())
        size += len(text[-1])
    tokens = np.frombuffer(b"".join(text), np.uint8).astype(np.int32)
    if len(tokens) <= length:
        raise SystemExit(f"Python's library here is {len(tokens):,} bytes long; ask for fewer tokens than that")
    return jnp.asarray(tokens[None, : length + 1])


def linear(n_in, n_out, rngs):
    return nnx.Linear(n_in, n_out, use_bias=False, dtype=DTYPE, rngs=rngs)


def rotate(x):
    """Rotary position embedding of x [B, T, heads, H]."""
    frequency = 10_000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


class Layer(nnx.Module):
    """Attention with a dynamic mask (``window`` None: full attention), and a gated MLP."""

    def __init__(self, window, rngs):
        self.window = window
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, dtype=DTYPE, rngs=rngs) for _ in range(2)])
        self.qkv = linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, rngs)
        self.score = linear(KV_HEADS * HEAD_DIM, KV_HEADS, rngs)
        self.output = linear(HEADS * HEAD_DIM, WIDTH, rngs)
        self.up, self.down = linear(WIDTH, 2 * HIDDEN, rngs), linear(HIDDEN, WIDTH, rngs)

    def attend(self, x):
        heads = self.qkv(x).reshape(x.shape[:2] + (-1, HEAD_DIM))
        q, k, v = jnp.split(heads, [HEADS, HEADS + KV_HEADS], axis=2)
        q, k = rotate(q).astype(DTYPE), rotate(k).astype(DTYPE)
        # One score for each key: it selects the keys, and as the bias it is trained.
        scores = jnp.swapaxes(nnx.softplus(self.score(v.reshape(v.shape[:2] + (-1,))).astype(jnp.float32)), 1, 2)
        mask = None if self.window is None else jax_dma.masks.top_k(scores, self.window)
        out = jax_dma.attention(q, k, v, mask, scores[..., None, :], is_causal=True)
        return self.output(out.reshape(x.shape[:2] + (-1,)))

    def __call__(self, x):
        x = x + self.attend(self.norms[0](x))
        gate, up = jnp.split(self.up(self.norms[1](x)), 2, -1)
        return x + self.down(nnx.silu(gate) * up)


class LanguageModel(nnx.Module):
    def __init__(self, window, rngs):
        self.embed = nnx.Embed(256, WIDTH, dtype=DTYPE, rngs=rngs)
        self.layers = nnx.List([Layer(window, rngs) for _ in range(LAYERS)])
        self.norm, self.head = nnx.RMSNorm(WIDTH, dtype=DTYPE, rngs=rngs), linear(WIDTH, 256, rngs)

    def __call__(self, tokens):
        """Bits per byte of tokens [1, T + 1], each from those before it."""
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = nnx.remat(Layer.__call__)(layer, x)
        logits = self.head(self.norm(x)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean() / jnp.log(2.0)


def training_step(model, optimizer, tokens):
    loss, gradients = nnx.value_and_grad(lambda model: model(tokens))(model)
    optimizer.update(model, gradients)
    return loss


def measure(step, *arguments):
    """Seconds of a second run of ``step``, and the result of it."""
    jax.block_until_ready(step(*arguments))
    begin = time.perf_counter()
    result = jax.block_until_ready(step(*arguments))
    return time.perf_counter() - begin, float(result)


def peak_bytes():
    """The most memory in use so far on the device, or None where it does not say (CPU)."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("peak_bytes_in_use")


def report(what, tokens, seconds, note=""):
    peak = peak_bytes()
    memory = f", peak {peak / 2**30:6.1f} GiB" if peak else ""
    tqdm.write(f"{what:<34} {tokens:>9,} tokens {seconds:9.2f} s {tokens / seconds:>12,.0f} tokens/s{memory}{note}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    train, forward, window = (8192, 32_768, 512) if ON_CPU else (131_072, 1_048_576, 2048)
    parser.add_argument("--train", type=int, default=train, help=f"tokens of the training step ({train})")
    parser.add_argument("--forward", type=int, default=forward, help=f"tokens of the forward pass ({forward})")
    parser.add_argument("--window", type=int, default=window, help=f"keys that each query sees ({window})")
    parser.add_argument("--no-full", action="store_true", help="leave full attention out")
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, window {args.window}, {LAYERS} layers, {HEADS} heads of {HEAD_DIM}")

    progress = tqdm(total=2 if args.no_full else 4, leave=False)

    def models(window):
        model = LanguageModel(window, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    tokens = read_text(args.train)
    seconds, loss = measure(nnx.jit(training_step), *models(args.window), tokens)
    report("training step, dynamic mask", args.train, seconds, f"   {loss:.2f} bits per byte")
    progress.update()
    longer = read_text(args.forward)
    seconds, loss = measure(nnx.jit(lambda model, tokens: model(tokens)), models(args.window)[0], longer)
    report("forward pass, dynamic mask", args.forward, seconds, f"   {loss:.2f} bits per byte")
    progress.update()
    if not args.no_full:
        full, loss = measure(nnx.jit(training_step), *models(None), tokens)
        report("training step, full attention", args.train, full, f"   {loss:.2f} bits per byte")
        progress.update()
        forward, _ = measure(nnx.jit(lambda model, tokens: model(tokens)), models(None)[0], tokens)
        scaled = forward * (args.forward / args.train) ** 2
        report("forward pass, full attention", args.forward, scaled, "   (worked out from the shorter one)")
        progress.update()
    progress.close()


if __name__ == "__main__":
    main()
