"""Draws the pictures of the documentation, docs/pictures/*.svg, from the masks that the library makes.

    python docs/pictures.py            draw them all
    python docs/pictures.py --check    draw nothing; fail if a picture is not what would be drawn

The files are written by hand rather than by a plotting library: they take 1 to 3 KB, and are the same bytes whatever is
installed, so that a picture changes in git only when a mask does.
"""

import argparse
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jax_dma import masks

FOLDER = Path(__file__).resolve().parent / "pictures"
SIZE = 24  # queries and keys of a picture
HIDDEN, SEEN, MARKED, TEXT = "#909090", "#4a72c4", "#e08030", "#808080"  # on a light page and on a dark one


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    options = parser.parse_args()
    drawn = {f"{name}.svg": picture(f"{name}: {text}", mask) for name, (text, mask) in mask_pictures().items()}
    drawn["kept_keys.svg"] = kept_keys()
    if options.check:
        here = {path.name: path.read_text() for path in FOLDER.glob("*.svg")}
        stale = sorted(name for name in here.keys() | drawn.keys() if here.get(name) != drawn.get(name))
        sys.exit(f"not as python docs/pictures.py draws them: {', '.join(stale)}" if stale else 0)
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.svg"):
        if path.name not in drawn:
            path.unlink()
    for name, text in drawn.items():
        (FOLDER / name).write_text(text)


def mask_pictures():
    """From the name of a picture to (what it shows, a bool array [queries, keys])."""
    T = S = SIZE
    random = np.random.default_rng(0)
    scores = jnp.asarray(random.random((1, 1, S)), jnp.float32)
    pairs = jnp.asarray(random.standard_normal((1, 1, T, S)), jnp.float32)
    ids = jnp.asarray([[0] * 9 + [1] * 6 + [2] * 6 + [-1] * 3])
    query_ids = jnp.asarray([[0] * 6 + [1] * 8 + [2] * 6])
    key_ids = jnp.asarray([[0] * 10 + [1] * 4 + [2] * 10])
    causal = masks.causal(T, S)
    window = masks.sliding_window(T, S, left=5)
    first = causal.dense(T) & (jnp.arange(S) < 3)
    blocks = jnp.asarray(np.kron(random.random((T // 4, S // 4)) < 0.4, np.ones((4, 4), bool)))
    shown = {
        "causal": ("16 queries, 24 keys", masks.causal(16, S).dense(16)),
        "sliding_window": ("the query's own key and 5 before it", window),
        "segments": ("three packed sequences and padding, causal", masks.segments(ids) & causal),
        "segments_pair": ("runs of queries see runs of keys", masks.segments(query_ids, key_ids).dense(20)),
        "lengths": ("the last 8 keys are padding", masks.lengths(jnp.asarray([S - 8]), T, S)),
        "prefix": ("the first 8 keys are open to all", masks.prefix(jnp.asarray([8]), T, S)),
        "block_causal": ("blocks of 6", masks.block_causal(6, T, S)),
        "top_k": ("the 6 highest-scored keys of each query's past", masks.top_k(scores, 6)),
        "top_k_segments": (
            "the 3 highest-scored keys of each query's past in its sequence",
            masks.top_k(scores, 3, segment_ids=ids),
        ),
        "combined": (
            "the 6 highest-scored keys, those of them in a window of 12",
            masks.top_k(scores, 6) & masks.sliding_window(T, S, 11),
        ),
        "dense_top_k": ("6 keys, chosen by each query for itself", masks.dense_top_k(pairs, 6, is_causal=True)),
        "dense_relu": ("a positive bias, causal", masks.dense_relu(pairs) & causal.dense(T)),
        "window_and_sinks": ("a window, and the first 3 keys", window.dense(T) | first),
        "dense": ("any bool array; here blocks", blocks & causal.dense(T)),
    }
    return {name: (text, dense(mask)) for name, (text, mask) in shown.items()}


def dense(mask):
    """The first batch entry and head of a mask, a NumPy array [queries, keys]; with as many queries as keys."""
    mask = np.asarray(mask.dense(mask.end.shape[-1]) if isinstance(mask, masks.KeyIntervals) else mask)
    return mask.reshape(-1, *mask.shape[-2:])[0]


def picture(title, mask):
    """A mask as SVG: a row per query, a column per key."""
    T, S = mask.shape
    body = panel(mask, 0, 0) + label("keys", S / 2, -0.6) + label("queries", -0.6, T / 2, turned=True)
    return svg(title, (-1.8, -1.8, S + 2, T + 2), body, scale=8)


def kept_keys():
    """How the keys that a run of queries sees are gathered, as SVG."""
    T, window, run, begin = 48, 8, 6, 30
    scores = jnp.asarray(np.random.default_rng(3).random((1, 1, T)), jnp.float32)
    mask = dense(masks.top_k(scores, window))
    rows = mask[begin : begin + run]
    whole, some = rows.all(0), rows.any(0) & ~rows.all(0)
    listed = np.concatenate([np.flatnonzero(whole), np.flatnonzero(some)])
    empty = np.zeros((run, window + run - 1 - len(listed)), bool)
    gathered = np.concatenate([rows[:, listed], empty], 1)

    of_run = np.zeros_like(mask)
    of_run[begin : begin + run] = rows
    x, y, n, m = T + 5, begin, int(whole.sum()), int(some.sum())
    body = panel(mask, 0, 0) + cells(of_run, 0, 0, MARKED)
    body += label("keys", T / 2, -0.8) + label("queries", -0.8, T / 2, turned=True)
    body += f'<rect x="0" y="{y}" width="{T}" height="{run}" fill="none" stroke="{MARKED}" stroke-width=".3"/>\n'
    body += f'<path d="M{T + 1} {y + run / 2:g}h3m-1 -.8l1 .8l-1 .8" fill="none" stroke="{TEXT}" stroke-width=".3"/>\n'
    body += panel(gathered, x, y, MARKED)
    body += label("the keys that it sees, gathered", x + gathered.shape[1] / 2, y - 1)
    body += label("seen by all", x + n / 2, y + run + 1.6) + label("by some", x + n + m / 2, y + run + 3.2)
    return svg(
        f"kept_keys: {T} queries that see {window} keys each; a run of {run} sees {len(listed)} in all",
        (-2.2, -2.4, T + 5 + gathered.shape[1] + 8, T + 3), body, scale=10,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- pieces of SVG


def svg(title, box, body, scale):
    x, y, width, height = box
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{x:g} {y:g} {width:g} {height:g}" '
        f'width="{width * scale:.0f}" height="{height * scale:.0f}" font-family="sans-serif" font-size="1.4">'
        f"\n<title>{title}</title>\n{body}</svg>\n"
    )


def panel(mask, x, y, colour=SEEN):
    """A mask with its background and grid; its upper left corner is (x, y)."""
    rows, columns = mask.shape
    grid = "".join(f"M{x + i:g} {y:g}v{rows}" for i in range(1, columns))
    grid += "".join(f"M{x:g} {y + i:g}h{columns}" for i in range(1, rows))
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{columns}" height="{rows}" fill="{HIDDEN}" fill-opacity=".22"/>\n'
        + cells(mask, x, y, colour)
        + f'<path d="{grid}" stroke="#fff" stroke-opacity=".45" stroke-width=".07"/>\n'
    )


def cells(mask, x, y, colour):
    """What is visible; neighbours in a row are one rectangle."""
    parts = []
    for i, row in enumerate(mask):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
        parts += [f"M{x + a:g} {y + i:g}h{b - a}v1h{a - b}z" for a, b in zip(edges[::2].tolist(), edges[1::2].tolist())]
    return f'<path d="{"".join(parts)}" fill="{colour}"/>\n'


def label(text, x, y, turned=False, anchor="middle"):
    turn = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{TEXT}"{turn}>{text}</text>\n'


if __name__ == "__main__":
    main()
