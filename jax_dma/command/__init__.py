"""What ``python -m jax_dma`` runs: one module for each of its commands."""
