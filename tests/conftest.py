"""CPU only, and programs that compile fast rather than run fast; set before jax is imported.

The XLA flags cut the compile time of a small train step from 8 s to 2 s. Processes that tests start
inherit them; the end-to-end runs of .ci/run do without.
"""

import atexit
import os
import shutil
import tempfile
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):  # later ones do not know it, and abort
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(flags))

# One cache of compiled programs for all processes of this session, and none of the user's.
cache = tempfile.mkdtemp(prefix="localtrain-cache-")
atexit.register(shutil.rmtree, cache, ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = cache
