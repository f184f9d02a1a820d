"""What becomes of a call, without running it."""

import jax

from jax_dma import choice
from jax_dma.attention import check


def explain(
    q,
    k,
    v,
    mask=None,
    bias=None,
    *,
    sinks=None,
    is_causal=False,
    scale=None,
    logits_soft_cap=None,
    return_lse=False,
    deterministic=False,
    implementation=None,
    platform=None,
):
    """Says how :func:`jax_dma.attention` would compute a call, and why each implementation does or does not serve it::

        print(jax_dma.explain(q, k, v, mask, bias, is_causal=True))

    The same, in one line and without the reasons, is logged by ``attention`` itself for each new combination of shapes,
    dtypes and options: logger "jax_dma", level DEBUG.

    Args:
      q, k, v, mask, bias, sinks: as for ``attention``. Only shapes and dtypes are read, so ``jax.ShapeDtypeStruct``
        will do, also in the fields of a KeyIntervals.
      is_causal, scale, logits_soft_cap, return_lse, deterministic, implementation: as for ``attention``.
      platform: "cpu", "cuda" or another platform of JAX; default, that of the default backend. It need not be present.

    Returns:
      A :class:`~jax_dma.choice.Explanation`.

    Raises:
      TypeError, ValueError: for arguments that ``attention`` rejects. That no implementation asked for serves the call
        is not an error here.
    """
    options = dict(is_causal=is_causal, scale=scale, logits_soft_cap=logits_soft_cap, deterministic=deterministic)
    return checked(q, k, v, mask, bias, sinks, return_lse, implementation, platform, **options)[0]


_PLATFORMS = (None, "cpu", "cuda", "gpu", "rocm", "tpu")


def checked(q, k, v, mask, bias, sinks, return_lse, implementation, platform, **options):
    """(the Explanation, the op.Call, the checked mask as types) of a call."""
    if platform not in _PLATFORMS:
        raise ValueError(f"platform must be one of {_PLATFORMS[1:]}, or None for the default, got {platform!r}")
    platform = choice.default_platform() if platform is None else {"gpu": "cuda"}.get(platform, platform)
    names = choice.names_of(implementation)
    results = []

    def run(q, k, v, mask, bias, sinks):
        call, mask = check(q, k, v, mask, bias, sinks=sinks, return_lse=return_lse, **options)
        results[:] = choice.explanation(platform, names, call, mask, q, k, v, bias), call
        return mask

    mask = jax.eval_shape(run, q, k, v, mask, bias, sinks)
    return *results, mask
