"""Trains a small byte-level language model twice, with dynamic-mask attention and with full attention.

    python examples/demo.py

The text is the language reference that ships with Python (``pydoc_data.topics``); nothing is downloaded. Every key has
a learned score. Under the dynamic mask a query sees the WINDOW highest-scored keys of its past; the score is also the
attention bias, which is how it is trained. The two models differ in the mask and in nothing else: same initial weights,
same bias, same batches. At the end: held-out bits per byte of both, a sample, and a picture of the loss curves and of
what one layer's heads see.
"""

import argparse
import pydoc_data.topics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import jax_dma

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONTEXT = 256  # bytes that the model is given
WINDOW = 64  # keys that a query sees under the dynamic mask
BATCH = 8  # windows of text per step
LAYERS, WIDTH, HIDDEN = 3, 128, 384
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
RECENCY = (
    0.5,
    0.0,
)  # slope of each key/value head's scores along the positions: a local head, and one by content alone
PEAK_LEARNING_RATE = 4.5e-3
DTYPE = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16  # of activations; weights are float32


# ---------------------------------------------------------------------------------------------------------------- data


def load_text():
    """The language reference as bytes, cut into (training, held-out)."""
    topics = pydoc_data.topics.topics
    # Some topics contain others. Each paragraph is kept once, or held-out text would stand in the training text.
    paragraphs = dict.fromkeys(p.strip("\n") for name in sorted(topics) for p in topics[name].split("\n\n"))
    text = np.frombuffer("\n\n".join(paragraphs).encode(), np.uint8).astype(np.int32)
    return np.split(text, [int(0.9 * len(text))])


def random_batches(text, steps, seed):
    """``steps`` batches [BATCH, CONTEXT + 1] of windows that start anywhere."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        start = rng.integers(0, len(text) - CONTEXT, (BATCH, 1))
        yield text[start + np.arange(CONTEXT + 1)]


def consecutive_batches(text):
    """The whole text as [batches, BATCH, CONTEXT + 1]; an incomplete last batch is dropped."""
    count = (len(text) - 1) // (CONTEXT * BATCH)
    start = np.arange(count * BATCH)[:, None] * CONTEXT
    return text[start + np.arange(CONTEXT + 1)].reshape(count, BATCH, CONTEXT + 1)


# --------------------------------------------------------------------------------------------------------------- model


def linear(n_in, n_out, rngs):
    return nnx.Linear(n_in, n_out, use_bias=False, dtype=DTYPE, rngs=rngs)


def norm(size, rngs):
    return nnx.RMSNorm(size, dtype=DTYPE, rngs=rngs)


def rotate(x):
    """Rotary position embedding of x [B, T, heads, H]."""
    frequency = 10_000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    rotated = [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)]
    return jnp.concatenate(rotated, -1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with a learned bias per key; ``window`` None is full attention."""

    def __init__(self, window, implementation, rngs):
        self.window, self.implementation = window, implementation
        self.query = linear(WIDTH, HEADS * HEAD_DIM, rngs)
        self.key = linear(WIDTH, KV_HEADS * HEAD_DIM, rngs)
        self.value = linear(WIDTH, KV_HEADS * HEAD_DIM, rngs)
        self.output = linear(HEADS * HEAD_DIM, WIDTH, rngs)
        self.query_norm, self.key_norm = norm(HEAD_DIM, rngs), norm(HEAD_DIM, rngs)
        self.score = linear(KV_HEADS * HEAD_DIM, KV_HEADS, rngs)
        self.gain = nnx.Param(jnp.ones(KV_HEADS, jnp.float32))

    def scores(self, v):
        """One score for each key and key/value head, float32 [B, K, S], from the values [B, S, K, H].

        The first term is that of "Trainable Dynamic Mask Sparse Attention", with a learned gain. The second grows with
        the position, as in ALiBi: in a head that has it, old keys make room for new ones.
        """
        content = nnx.softplus(self.score(v.reshape(v.shape[:2] + (-1,))).astype(jnp.float32))
        position = jnp.arange(v.shape[1], dtype=jnp.float32)[:, None]
        return jnp.swapaxes(self.gain[...] * content + position * jnp.array(RECENCY, jnp.float32), 1, 2)

    def mask_and_bias(self, v):
        scores = self.scores(v)
        mask = None if self.window is None else jax_dma.masks.top_k(scores, self.window)  # KeyIntervals, O(S) memory
        return mask, scores[..., None, :]  # the same bias for all queries: [B, K, 1, S]

    def project(self, x):
        heads = lambda x: x.reshape(x.shape[:2] + (-1, HEAD_DIM))
        q, k = self.query_norm(heads(self.query(x))), self.key_norm(heads(self.key(x)))
        return rotate(q), rotate(k), heads(self.value(x))

    def __call__(self, x):
        q, k, v = self.project(x)
        mask, bias = self.mask_and_bias(v)
        out = jax_dma.attention(q, k, v, mask, bias, is_causal=True, implementation=self.implementation)
        return self.output(out.reshape(x.shape[:2] + (-1,)))


class Block(nnx.Module):
    def __init__(self, window, implementation, rngs):
        self.attention_norm, self.attention = norm(WIDTH, rngs), Attention(window, implementation, rngs)
        self.mlp_norm, self.up, self.down = (
            norm(WIDTH, rngs),
            linear(WIDTH, 2 * HIDDEN, rngs),
            linear(HIDDEN, WIDTH, rngs),
        )

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        gate, up = jnp.split(self.up(self.mlp_norm(x)), 2, -1)
        return x + self.down(nnx.silu(gate) * up)


class LanguageModel(nnx.Module):
    def __init__(self, window, implementation, rngs):
        self.embed = nnx.Embed(256, WIDTH, dtype=DTYPE, rngs=rngs)
        self.blocks = nnx.List([Block(window, implementation, rngs) for _ in range(LAYERS)])
        self.norm, self.head = norm(WIDTH, rngs), linear(WIDTH, 256, rngs)

    def __call__(self, tokens):
        """Logits float32 [B, T, 256] of the byte after each of tokens [B, T]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)

    def mask(self, tokens, layer):
        """The KeyIntervals of one layer, for tokens [B, T]."""
        x = self.embed(tokens)
        for block in self.blocks[:layer]:
            x = block(x)
        block = self.blocks[layer]
        _, _, v = block.attention.project(block.attention_norm(x))
        return block.attention.mask_and_bias(v)[0]


# ------------------------------------------------------------------------------------------------ training and testing


def bits_per_byte(model, batch):
    """Mean cross-entropy, in bits, of windows [B, CONTEXT + 1]."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:])
    return losses.mean() / jnp.log(2.0)


@nnx.jit
def train_step(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(bits_per_byte)(model, batch)
    optimizer.update(model, gradients)
    return loss


def train(name, model, text, steps, seed):
    """Trains in place; returns the loss of every step."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, PEAK_LEARNING_RATE, max(1, steps // 20), max(2, steps), 0.02 * PEAK_LEARNING_RATE
    )
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)
    losses, compiled = [], None
    with tqdm(random_batches(text, steps, seed), name, total=steps, unit="step") as bar:
        for step, batch in enumerate(bar):
            losses.append(train_step(model, optimizer, batch))
            if step % 5 == 0:  # reading the loss waits for the step, and the bar should tell the truth
                recent, now = float(np.mean(losses[-5:])), time.perf_counter()
                compiled = compiled or now
                speed = f"{step * BATCH * CONTEXT / (now - compiled):,.0f} tokens/s" if step else "compiled"
                bar.set_postfix_str(f"{recent:.3f} bits per byte, {speed}")
    return np.array(losses)


@nnx.jit
def test(model, batches):
    return jax.lax.map(lambda batch: bits_per_byte(model, batch), batches).mean()


@nnx.jit(static_argnames="length")
def sample(model, context, key, *, length, temperature=0.7):
    """``length`` bytes after context [CONTEXT], one at a time; the context moves along."""

    def step(context, key):
        logits = model(context[None])[0, -1]
        byte = jax.random.categorical(key, logits / temperature).astype(context.dtype)
        return jnp.append(context[1:], byte), byte

    return jax.lax.scan(step, context, jax.random.split(key, length))[1]


# ------------------------------------------------------------------------------------------------------------- results


def draw(path, curves, scores, mask):
    """Loss curves {name: losses} beside the mask [heads, T, S] of one layer."""
    figure, (left, *right) = plt.subplots(1, 1 + len(mask), figsize=(5 + 4 * len(mask), 4.2), layout="constrained")
    for name, losses in curves.items():
        kernel = np.ones(min(10, len(losses))) / min(10, len(losses))
        smooth = np.convolve(losses, kernel, "valid")
        left.plot(np.arange(len(smooth)) + len(kernel), smooth, label=f"{name}: {scores[name]:.3f} held out")
    left.set(xlabel="step", ylabel="bits per byte (training, mean of 10 steps)", title="Loss")
    left.grid(alpha=0.3)
    left.legend()
    for head, (axes, visible) in enumerate(zip(right, mask)):
        axes.imshow(visible, cmap="Blues", interpolation="nearest")
        axes.set(xlabel="key", ylabel="query", title=f"Keys seen by key/value head {head}, layer {LAYERS - 1}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def implementation_in_use(requested):
    """The name that attention() resolves to for the default device."""
    best = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend(), "xla")
    return requested or (best if best in jax_dma.available_implementations() else "xla")


def readable(text):
    return bytes(np.asarray(text, np.uint8)).decode(errors="replace")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps of each model (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights, the batches and the sample (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo_output"), help="folder for the picture (default: %(default)s)"
    )
    parser.add_argument(
        "--implementation",
        choices=("cuda", "cpu", "xla", "reference"),
        help="of jax_dma.attention (default: the best for the device)",
    )
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    text, held_out = load_text()
    name = implementation_in_use(options.implementation)
    print(f"{len(text):,} bytes of text to learn, {len(held_out):,} held out")
    print(
        f"jax_dma {jax_dma.__version__}, implementation {name}, on {jax.devices()[0].device_kind}, "
        f"{jnp.dtype(DTYPE).name}"
    )

    models, curves, scores = {}, {}, {}
    for kind, window in (("dynamic mask", WINDOW), ("full attention", None)):
        model = LanguageModel(window, options.implementation, nnx.Rngs(options.seed))
        curves[kind] = train(f"{kind:>14}", model, text, options.steps, options.seed)
        scores[kind] = float(test(model, consecutive_batches(held_out)))
        models[kind] = model

    print(f"\nheld-out bits per byte after {options.steps} steps of {BATCH * CONTEXT:,} bytes")
    print(f"  dynamic mask, {WINDOW:3} keys per query   {scores['dynamic mask']:.3f}")
    print(f"  full attention, {CONTEXT:3} keys per query {scores['full attention']:.3f}")

    model = models["dynamic mask"]
    end = CONTEXT + int(np.argmax(held_out[CONTEXT:] == ord(" ")))  # the end of a word
    context = held_out[end - CONTEXT : end]
    continuation = sample(model, context, jax.random.key(options.seed), length=250)
    print("\n--- held-out text, then [what the dynamic-mask model makes of it] ---")
    print(f"{readable(context[-120:])}[{readable(continuation)}]")

    picture = options.out / "demo.png"
    intervals = model.mask(jnp.asarray(context[None]), LAYERS - 1)
    draw(picture, curves, scores, np.asarray(intervals.dense(CONTEXT)[0]))
    print(
        f"\nTrained and tested with implementation {name!r} in {time.perf_counter() - began:.0f} s. "
        f"Loss curves and mask: {picture}"
    )
    for other, reason in jax_dma.status().items():
        if options.implementation is None and other == {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend()) != name:
            print(f"The compiled kernels did not run. {other}: {reason}")


if __name__ == "__main__":
    main()
