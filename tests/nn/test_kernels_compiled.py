"""The kernels of TPUs and GPUs are in the programs that those machines' compilers make."""

import importlib.util
import os
import re

import jax
import jax.numpy as jnp
import pytest

from localtrain import backend
from localtrain.nn.attend import attend

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'localtrain[tpu]'"
)
needs_cuda_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the CUDA compiler: pip install 'localtrain[plan-gpu]'",
)


def compiled(machine, kernel, shape, options=None, **case):
    """Text of the program of values and gradients on one device of a machine that is not here."""
    owner = backend.find("tpu-vm" if ":" in machine else "local-gpu")
    device = owner.topology(machine)[0]
    place = jax.sharding.SingleDeviceSharding(device)
    batch, length, heads, kv_heads, head_dim = shape
    arrays = [
        jax.ShapeDtypeStruct((batch, length, n, head_dim), jnp.bfloat16, sharding=place)
        for n in (heads, kv_heads, kv_heads)
    ]
    segments_BT = jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=place)

    def loss(q, k, v, segments_BT):
        out = attend(q, k, v, segments_BT, scale=0.1, kernel=kernel, **case)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    with jax.default_matmul_precision("default"):  # as in a run; other test files raise it
        return step.lower(*arrays, segments_BT).compile(compiler_options=options).as_text()


@pytest.mark.tpu
@needs_libtpu
@pytest.mark.parametrize(
    ("machine", "shape", "case"),
    [
        ("v5e:2x2", (2, 2048, 4, 2, 128), {}),
        ("v5e:2x2", (1, 1024, 4, 1, 256), {"window": 512, "softcap": 50.0}),
        ("v6e:2x2", (1, 640, 4, 2, 64), {"window": 200}),
        ("v5p:2x2x1", (1, 1024, 4, 4, 96), {}),
    ],
)
def test_splash_is_in_the_program_of_a_tpu(machine, shape, case):
    text = compiled(machine, "splash", shape, **case)
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    for phase in ("fwd_segmented_residuals", "dq_segmented", "dkv_segmented"):
        assert re.search(f"splash_mha_{phase}", text), phase


@pytest.mark.slow
@needs_cuda_compiler
def test_cudnn_is_in_the_program_of_a_gpu():
    text = compiled("rtx-4090-24gb", "cudnn", (2, 1024, 4, 2, 128), window=300)
    targets = set(re.findall(r'custom_call_target="(__cudnn\$fmha\w+)"', text))
    assert targets == {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}
    assert re.findall(r'"sliding_window_length": (\d+)', text) == ["300", "300"]
    assert re.findall(r'"mask_type": "(\w+)"', text) == ["CAUSAL", "CAUSAL"]


def test_the_tests_above_name_the_modules_that_backends_look_for():
    """A module that is renamed would skip them in silence."""
    from localtrain.backends import local_gpu, tpu_vm

    assert "jax_cuda12_plugin" in local_gpu._COMPILER
    assert tpu_vm._installed() == (importlib.util.find_spec("libtpu") is not None)
    assert os.environ["JAX_PLATFORMS"] == "cpu"
