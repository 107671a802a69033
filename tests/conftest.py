"""CPU only, unless a test asks for more; set before jax is imported."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
