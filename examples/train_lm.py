"""Trains a language model of 80 million parameters on 16,384 bytes of context, with dynamic-mask and full attention.

    python examples/train_lm.py                  # both models, one after the other, each in a process of its own
    python examples/train_lm.py --resume         # goes on where an interrupted run left off
    python examples/train_lm.py --preset cpu     # the same at toy size, which is the default on a CPU

The text is source code and documentation that is installed anyway: Python's library, and packages that this example
imports. A token is a byte. Both models have a learned score for each key as bias; they have the same initial weights,
batches and number of steps, and differ in one thing: a query sees all of its past, or WINDOW keys of it, chosen by
score and age. At the end: held-out bits per byte, tokens per second, peak memory, and a picture. Checkpoints are
orbax's, and a run that was interrupted and resumed has the same losses as one that was not.

A step at the size for a GPU, 2 sequences of 16,384 bytes, in TFLOP and in ms that an H200 may take for it:

    matrix products outside attention   6 * 80.6e6 parameters * 32,768 bytes                        15.9      53
    full attention                      12 layers * 14 * 2 * 16 heads * 64 * 16,384^2 / 2           46.2     120
    WINDOW 1024, keys gathered          12 layers * 14 * 2 * 16 heads * 64 * 16,384 * 1,536          8.7      30
    what lies between the products      12 layers * 100 passes over 32,768 * 768 bfloat16              -      30

14 is 4 forward and 10 backward; nothing outside the attention kernels is multiplied twice (see STORED). In all 200 ms
with full attention and 110 ms with the dynamic mask: 4 minutes for 800 steps of both. Compilation, evaluation and
checkpoints add 2. The backward pass finds 6.1 GiB stored; weights and optimizer have 0.9 GiB.
"""

import argparse
import dataclasses
import functools
import hashlib
import importlib.util
import json
import platform
import pydoc_data.topics
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

import jax_dma
import jax_dma.flax

KINDS = {"dynamic": "dynamic mask", "full": "full attention"}
KV_HEADS = 4
# By how much a key's score grows for each WINDOW of bytes that it is younger, in the choice of keys, for each key/value
# head. The first head sees the last WINDOW bytes whatever the scores are, the last one chooses by the scores alone. The
# scores differ by about 0.5 at first.
RECENCY = (1e4, 4.0, 0.5, 0.0)


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 768
    hidden: int = 2048  # of the MLP
    layers: int = 12
    heads: int = 16
    head_dim: int = 64
    context: int = 16_384  # bytes
    window: int = 1024  # keys that a query sees under the dynamic mask
    batch: int = 2  # sequences
    steps: int = 800
    rate: float = 1e-3  # peak of the learning rate
    dtype: str = "bfloat16"  # of activations; weights are float32
    seed: int = 0  # of weights and batches


PRESETS = {
    "gpu": Config(),
    "cpu": Config(
        width=64, hidden=192, layers=2, heads=8, head_dim=16, context=1024, window=128, steps=60, rate=5e-3,
        dtype="float32",
    ),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- text


def documents():
    """(name, bytes) of every document: the topics of Python's help() as one, and modules except tests."""
    topics = [topic for _, topic in sorted(pydoc_data.topics.topics.items())]
    yield "python/topics", "\n\n".join(dict.fromkeys("\n\n".join(topics).split("\n\n"))).encode()  # some contain others
    roots = {"python": Path(sysconfig.get_path("stdlib"))}
    for package in ("jax", "flax", "optax", "numpy"):
        roots[package] = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    for package, root in roots.items():
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).parts
            left_out = {"site-packages", "pydoc_data"}.intersection(parts) or any("test" in part for part in parts)
            if path.is_file() and not left_out:
                yield "/".join((package, *parts)), path.read_bytes()


def load_text():
    """(training text, held-out text) as bytes, and what there is to say about them."""
    parts, seen, digest = ([], []), set(), hashlib.sha256()
    for name, text in sorted(documents()):  # files of a package are neighbours, so far-away bytes can be of use
        fingerprint = hashlib.sha256(text).digest()
        if fingerprint in seen:  # a copy could stand in both parts
            continue
        seen.add(fingerprint)
        digest.update(fingerprint)
        held_out = hashlib.sha256(name.encode()).digest()[0] % 20 == 0
        parts[held_out].append(f"# {name}\n".encode() + text + b"\n\n")
    training, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    about = {"documents": len(seen), "bytes": len(training), "held_out_bytes": len(held_out)}
    return training, held_out, about | {"sha256": digest.hexdigest()}


def batch_of(text, config, step):
    """The batch int32 [B, context + 1] of a step: a function of seed and step, so resuming needs nothing else."""
    rng = np.random.default_rng((config.seed, step))
    start = rng.integers(0, len(text) - config.context, (config.batch, 1))
    return text[start + np.arange(config.context + 1)].astype(np.int32)


def held_out_batches(text, config, most=64):
    """int32 [batches, B, context + 1], of at most ``most`` sequences evenly spread over the text."""
    there = (len(text) - 1) // config.context
    chosen = np.linspace(0, there - 1, min(most, there) // config.batch * config.batch, dtype=int)
    start = config.context * chosen.reshape(-1, config.batch, 1)
    return text[start + np.arange(config.context + 1)].astype(np.int32)


# --------------------------------------------------------------------------------------------------------------- model


class Block(nnx.Module):
    def __init__(self, config, window, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs) for _ in range(2)])
        self.attention = jax_dma.flax.DynamicMaskAttention(
            config.width, config.heads, window, num_kv_heads=KV_HEADS, head_dim=config.head_dim, score="linear",
            rotary=functools.partial(jax_dma.flax.rotary, base=100_000.0), norm_epsilon=1e-6,
            recency=[x / window for x in RECENCY], a_init=nnx.initializers.ones_init(), dtype=config.dtype, rngs=rngs,
        )  # fmt: skip
        self.up, self.down = linear(config.width, 2 * config.hidden), linear(config.hidden, config.width)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        gate, up = jnp.split(self.up(self.norms[1](x)), 2, -1)
        return x + self.down(nnx.silu(gate) * up)


# What the backward pass finds stored. It computes anew what lies between matrix products, which is cheap and large.
STORED = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names("jax_dma_out", "jax_dma_lse"),
)


class LanguageModel(nnx.Module):
    def __init__(self, config, window, rngs):
        self.dtype = config.dtype
        # A product with one-hot vectors, not a look-up: its gradient is a product too, summed in float32.
        self.embed = nnx.Linear(256, config.width, use_bias=False, dtype=config.dtype, rngs=rngs)
        layers = nnx.vmap(lambda rngs: Block(config, window, rngs))  # one Block whose weights have a leading axis
        self.layers = nnx.split_rngs(splits=config.layers)(layers)(rngs)
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.head = nnx.Linear(config.width, 256, use_bias=False, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens):
        """Bits float32 [B, T] that each but the first of tokens [B, T + 1] takes, given those before it."""
        x = self.embed(jax.nn.one_hot(tokens[:, :-1], 256, dtype=self.dtype))
        block, weights = nnx.split(self.layers)
        layer = jax.checkpoint(lambda x, weights: nnx.merge(block, weights)(x), policy=STORED, prevent_cse=False)
        x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, weights)  # compiled once for all layers
        logits = self.head(self.norm(x)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]) / jnp.log(2.0)


@functools.cache  # runs of one process share what is compiled
def functions(config, kind):
    """(start() -> state, step(state, tokens) -> (state, loss), bits(weights, tokens) -> [T] mean over the batch)."""
    window = config.window if kind == "dynamic" else config.context  # a window of all is full attention
    make = lambda: LanguageModel(config, window, nnx.Rngs(config.seed))
    model = nnx.graphdef(nnx.eval_shape(make))
    warmup, last = config.steps // 20 + 1, config.steps + 1
    rates = optax.warmup_cosine_decay_schedule(0, config.rate, warmup, last, end_value=config.rate / 20)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates, b2=0.95, weight_decay=0.1))

    def start():
        weights = nnx.state(make(), nnx.Param)
        return {"weights": weights, "optimizer": optimizer.init(weights)}

    def bits(weights, tokens):
        return nnx.merge(model, weights)(tokens).mean(0)

    def step(state, tokens):
        loss, gradients = jax.value_and_grad(lambda weights: bits(weights, tokens).mean())(state["weights"])
        updates, optimizer_state = optimizer.update(gradients, state["optimizer"], state["weights"])
        return {"weights": optax.apply_updates(state["weights"], updates), "optimizer": optimizer_state}, loss

    return jax.jit(start), jax.jit(step, donate_argnums=0), jax.jit(bits)


# ------------------------------------------------------------------------------------------------------------ training


def train(config, kind, text, folder, resume=False, until=None):
    """Trains one model, up to step ``until``, and returns all that is known about the run, as a dict for JSON.

    The folder gets a checkpoint of the weights, the optimizer's state and the history after each quarter of the steps.
    Everything else follows from the config and the step.
    """
    training, held_out, about = text
    until, fourth, tenth = until or config.steps, -(-config.steps // 4), -(-config.steps // 10)
    history = {"config": dataclasses.asdict(config), "text": about, "loss": [], "seconds": [], "held_out": []}
    folder = (Path(folder) / "checkpoints" / kind).resolve()
    manager = ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=1))
    if first := manager.latest_step() or 0:
        if not resume:
            raise SystemExit(f"{folder} holds step {first} of a run: --resume it, remove it, or name another --output")
        saved = manager.restore(first, args=ocp.args.Composite(history=ocp.args.JsonRestore()))["history"]
        if any(saved[entry] != history[entry] for entry in ("config", "text")):
            raise SystemExit(f"the run in {folder} has another configuration or text: {saved['config']}")
        history = saved

    start, step, bits = functions(config, kind)
    like, begin = jax.eval_shape(start), time.perf_counter()
    step = step.lower(like, batch_of(training, config, 0)).compile()
    history["compile_seconds"] = time.perf_counter() - begin
    if first:
        state = manager.restore(first, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))["state"]
    else:
        state = start()
    batches, bytes_per_step = held_out_batches(held_out, config), config.batch * config.context

    def evaluate(at):
        losses = np.mean([bits(state["weights"], batch) for batch in batches], 0)
        history["held_out"].append([at, float(losses.mean())])
        history["held_out_by_position"] = [float(part.mean()) for part in np.array_split(losses, 16)]

    with tqdm(total=config.steps, initial=first, desc=f"{KINDS[kind]:>14}", unit="step", mininterval=1) as bar:
        for at in range(first + 1, until + 1):
            begin = time.perf_counter()
            state, loss = step(state, batch_of(training, config, at))
            history["loss"].append(round(float(loss), 5))  # waits for the step
            history["seconds"].append(round(time.perf_counter() - begin, 5))
            if at % tenth == 0 or at == config.steps:
                evaluate(at)
            if at % fourth == 0 or at == until:
                manager.save(at, args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), history=ocp.args.JsonSave(history),
                ))  # fmt: skip
            recent, speed = np.mean(history["loss"][-20:]), bytes_per_step / np.median(history["seconds"][-20:])
            bar.set_postfix_str(f"{recent:.3f} bits per byte, {speed:,.0f} tokens/s", refresh=False)
            bar.update()
    manager.close()  # waits for what is still being written

    memory = jax.local_devices()[0].memory_stats() or {}
    return history | {
        "parameters": sum(x.size for x in jax.tree.leaves(state["weights"])),
        "tokens_per_second": bytes_per_step / float(np.median(history["seconds"])),
        "peak_bytes": memory.get("peak_bytes_in_use"),  # of this process, so of this model
        "step_temporary_bytes": getattr(step.memory_analysis(), "temp_size_in_bytes", None),
    }


def environment(commit=None):
    """What the results depend on."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    if commit is None and shutil.which("git"):
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    best = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend())
    return {
        "device": jax.devices()[0].device_kind,
        "implementation": best if best in jax_dma.available_implementations() else "xla",
        "commit": commit,
        "python": platform.python_version(),
    } | {module.__name__: module.__version__ for module in (jax, flax, optax, ocp, jax_dma)}


# ------------------------------------------------------------------------------------------------------------- results


def report(results, folder):
    """Prints a table of results {kind: what train returned}, and writes them, and a picture of them, to the folder."""
    Path(folder, "train_lm.json").write_text(json.dumps(results) + "\n")
    print(f"\n{'':16}{'held out':>10}{'steps':>8}{'tokens/s':>12}{'training':>11}{'compiling':>11}{'peak memory':>13}")
    for kind, r in results.items():
        peak = f"{r['peak_bytes'] / 2**30:.1f} GiB" if r["peak_bytes"] else "not known"
        print(
            f"{KINDS[kind]:16}{r['held_out'][-1][1]:10.4f}{len(r['loss']):8}{r['tokens_per_second']:12,.0f}"
            f"{sum(r['seconds']):9.0f} s{r['compile_seconds']:9.0f} s{peak:>13}"
        )
    try:
        import matplotlib
    except ImportError:
        return print("no picture: matplotlib is not installed")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_step, by_time, by_position) = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    for color, (kind, r) in zip(("C0", "C1"), results.items()):
        steps, bits = np.array(r["held_out"]).T
        n = max(1, len(r["loss"]) // 20)
        smooth = np.convolve(r["loss"], np.ones(n) / n, "valid")
        by_step.plot(n + np.arange(len(smooth)), smooth, color, alpha=0.4)
        by_step.plot(steps, bits, color + "o-", label=f"{KINDS[kind]}: {bits[-1]:.3f}")
        by_time.plot(np.cumsum(r["seconds"])[steps.astype(int) - 1], bits, color + "o-", label=KINDS[kind])
        position = (np.arange(16) + 0.5) * r["config"]["context"] / 16
        by_position.plot(position, r["held_out_by_position"], color + "o-", label=KINDS[kind])
    by_step.set(xlabel=f"step (faint: training, mean of {n} steps)", ylim=(None, 1.2 * bits.max()))
    by_time.set(xlabel="seconds in training steps")
    by_position.set(xlabel="bytes of context before the byte, after training")
    for axes in (by_step, by_time, by_position):
        axes.set_ylabel("held-out bits per byte")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(Path(folder, "train_lm.png"), dpi=110)
    print(f"curves: {Path(folder, 'train_lm.png')}, all numbers: {Path(folder, 'train_lm.json')}")


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, help="sizes (default: cpu on a CPU, else gpu)")
    sizes = ("steps", "context", "window", "batch", "seed")
    for name in sizes:
        default = "{} or {}".format(*(getattr(preset, name) for preset in PRESETS.values()))
        parser.add_argument(f"--{name}", type=int, help=f"default: the preset's, {default}")
    parser.add_argument("--output", type=Path, default=Path("train_lm_output"), help="folder (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in the output folder")
    parser.add_argument("--until", type=int, help="stop each model after this step, with a checkpoint")
    parser.add_argument("--only", choices=KINDS, help="train one of the models, in this process")
    parser.add_argument("--commit", help="recorded in the results where git cannot tell")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    result_of = lambda kind: options.output / f"{kind}.json"

    if options.only is None:
        # A process for each model, so that the peak of its memory is the model's. This one uses no device.
        for kind in KINDS:
            if code := subprocess.run([sys.executable, __file__, *arguments, "--only", kind]).returncode:
                sys.exit(code)
        if all(result_of(kind).exists() for kind in KINDS):
            report({kind: json.loads(result_of(kind).read_text()) for kind in KINDS}, options.output)
        return

    preset = options.preset or ("cpu" if jax.default_backend() == "cpu" else "gpu")
    given = {name: getattr(options, name) for name in sizes if getattr(options, name) is not None}
    config, kind, about = dataclasses.replace(PRESETS[preset], **given), options.only, environment(options.commit)
    if options.resume and result_of(kind).exists():
        return print(f"{KINDS[kind]}: done before, {result_of(kind)}")
    print(
        f"{KINDS[kind]}: preset {preset}, {config.steps} steps of {config.batch} x {config.context:,} bytes, on "
        f"{about['device']} with implementation {about['implementation']}",
        flush=True,
    )
    result = train(config, kind, load_text(), options.output, options.resume, options.until)
    if len(result["loss"]) == config.steps:
        result_of(kind).write_text(json.dumps(result | {"environment": about}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
