"""The implementations behind :func:`jax_dma.attention`: pure JAX (``xla``) and compiled kernels (``ffi``)."""
