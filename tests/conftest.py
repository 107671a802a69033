"""CPU only, and programs that compile fast rather than run fast; set before jax is imported.

The XLA flags cut the compile time of a small train step from 8 s to 2 s. Processes that tests start
inherit them; the end-to-end runs of .ci/run do without.
"""

import atexit
import os
import shutil
import tempfile
from importlib.metadata import version

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):  # later ones do not know it, and abort
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(flags))

# One cache of compiled programs for all processes of this session, and none of the user's.
cache = tempfile.mkdtemp(prefix="localtrain-cache-")
atexit.register(shutil.rmtree, cache, ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = cache


@pytest.fixture(scope="session")
def tiny_config():
    """config.json of a Qwen3 of two small layers, for runs with bytes as tokens."""
    return {
        "model_type": "qwen3",
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
