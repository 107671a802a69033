"""Every compiler option of a backend is one that the installed compiler knows."""

import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from localtrain.backends.local_gpu import LocalGpu
from localtrain.backends.multi_gpu import MultiGpu
from localtrain.backends.tpu_vm import TpuVm
from localtrain.config import load_run

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'localtrain[tpu]'"
)
needs_cuda_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the CUDA compiler: pip install 'localtrain[plan-gpu]'",
)
MACHINES = [
    pytest.param(TpuVm, "v5e:2x2", marks=[pytest.mark.tpu, needs_libtpu]),
    pytest.param(TpuVm, "v6e:2x2", marks=[pytest.mark.tpu, needs_libtpu]),
    pytest.param(LocalGpu, "rtx-4090-24gb", marks=[pytest.mark.slow, needs_cuda_compiler]),
    pytest.param(MultiGpu, "h100-80gb", marks=[pytest.mark.slow, needs_cuda_compiler]),
]


def a_layer(place, machine, product=True):
    """A product of a gathered matrix and the scatter of its gradient, lowered for a machine."""
    count = {LocalGpu: 1, MultiGpu: 2}.get(type(place))
    devices = place.topology(machine, count)
    mesh = Mesh(np.array(devices), ("fsdp",))

    def local(w, x):
        def loss(w):
            whole = jax.lax.all_gather(w.astype(jnp.bfloat16), "fsdp", axis=0, tiled=True)
            y = x @ whole if product else jnp.sum(x) * whole
            return jnp.sum(jnp.tanh(y).astype(jnp.float32))

        return jax.grad(loss)(w)

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp"), check_vma=False
    )
    here = NamedSharding(mesh, P("fsdp"))
    w = jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=here)
    x = jax.ShapeDtypeStruct((256 * len(devices), 512), jnp.bfloat16, sharding=here)
    return jax.jit(run).lower(w, x)


@pytest.mark.parametrize(("kind", "machine"), MACHINES)
def test_the_compiler_takes_every_option(kind, machine):
    place = kind()
    for deterministic in (False, True):
        # jax 0.12's CUDA compiler finds no deterministic kernel of a product where there is no GPU
        lowered = a_layer(place, machine, product=not deterministic)
        run = load_run("quickstart", [f"train.deterministic={str(deterministic).lower()}"])
        lowered.compile(compiler_options=place.compiler_options(run))


@pytest.mark.parametrize(("kind", "machine"), MACHINES)
def test_an_option_that_no_compiler_knows_is_refused(kind, machine):
    """Else the test above could not fail."""
    with pytest.raises(Exception, match="xla_no_such_option"):
        a_layer(kind(), machine).compile(compiler_options={"xla_no_such_option": True})


def test_options_are_known_without_jax():
    code = """
import sys
from localtrain import backend
from localtrain.config import load_run
run = load_run("quickstart", ["train.deterministic=true"])
for name in backend.names():
    for key, value in backend.find(name).compiler_options(run).items():
        assert key.startswith("xla_") and isinstance(value, bool | int | str), (name, key, value)
assert backend.find("local-gpu").compiler_options(run) == {"xla_gpu_deterministic_ops": True}
assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
