"""Attention on NVIDIA GPUs: cuDNN's flash kernels, through `jax.nn.dot_product_attention`.

They know order and window, but no documents: those come as a matrix of all queries and keys that is
added to the scores, [B, 1, T, S] in 2 bytes, made once for all layers. For rows of a few thousand
tokens that is less than a layer's activations; longer rows get the blockwise kernel. In XLA,
`xla_gpu_deterministic_ops` makes the backward kernel deterministic too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from localtrain.nn.blockwise import Kernel

if TYPE_CHECKING:
    from localtrain.nn.attend import Case

LONGEST = 8192  # tokens: 134 MB of mask a row, 16 kB a token
HEAD_DIM = 128  # before Hopper; Hopper's 256 is not used
CAPABILITY = 8.0  # Ampere: cuDNN has no flash kernels for a T4, an RTX 20xx or a V100


def unfit(case: Case) -> str | None:
    """Why these kernels cannot do a case of `attend`."""
    found = capability()
    if found is not None and found < CAPABILITY:
        return f"cuDNN's needs compute capability {CAPABILITY}; this GPU has {found}"
    if case.ways > 1:
        return "rows are split over devices (mesh.context)"
    if case.softcap is not None:
        return "cuDNN has no soft cap"
    if case.sinks:
        return "cuDNN has no sinks"
    if case.head_dim != case.value_dim:
        return f"values are {case.value_dim} wide, keys {case.head_dim}"
    if case.head_dim > HEAD_DIM or case.head_dim % 8:
        return f"head_dim {case.head_dim} is no multiple of 8 up to {HEAD_DIM}"
    if case.length > LONGEST or case.length % 2:
        return f"rows of {case.length} tokens are odd or longer than {LONGEST}"
    if case.dtype not in ("bfloat16", "float16"):
        return f"cuDNN has no {case.dtype}"
    return None


def capability() -> float | None:
    """Of this process's GPU. None: no GPU is here, as when a program is compiled for a card."""
    found = getattr(jax.local_devices()[0], "compute_capability", None)
    return None if found is None else float(found)


def flash(
    fixed: Kernel,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segments_BT: jax.Array | None,
    implementation: str = "cudnn",
) -> jax.Array:
    """Attention [B, T, N, H], arguments as those of `blockwise`; "xla" runs on any platform."""
    options = {"scale": fixed.scale, "is_causal": True, "implementation": implementation}
    if fixed.window is not None:
        options["local_window_size"] = (fixed.window - 1, 0)
    if segments_BT is None:
        return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, **options)
    # to the kernel padding is a document: a row without any key would be undefined
    mask_B1TS = (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
    out_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, mask=mask_B1TS, **options)
    return jnp.where(segments_BT[:, :, None, None] > 0, out_BTNH, 0)
