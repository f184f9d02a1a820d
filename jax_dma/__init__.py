"""Dynamic-mask attention for JAX: masks, trainable biases and block skipping, forward and backward."""

from importlib.metadata import PackageNotFoundError, version

from jax_dma import context, masks
from jax_dma.attention import attention
from jax_dma.choice import available_implementations, status
from jax_dma.cost import cost
from jax_dma.dot_product import dot_product_attention
from jax_dma.explain import explain
from jax_dma.masks import KeyIntervals
from jax_dma.plan import MaskPlan, plan, plan_top_k

try:
    __version__ = version("jax_dma")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "KeyIntervals", "MaskPlan", "attention", "available_implementations", "context", "cost", "dot_product_attention",
    "explain", "masks", "plan", "plan_top_k", "status",
]  # fmt: skip
