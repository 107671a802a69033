"""The loss head: cross-entropy of a long sequence without ever holding its logits.

Float32 logits of 8 x 2048 tokens over a vocabulary of 152k are 10 GB, more than the model. So the
tokens are taken in chunks: logits of one chunk, what is needed from them, gone. Two entries share
the chunk body:

- `weighted_nll_sum`: the token weights are known beforehand (pre-training, SFT), so the gradients
  towards the hidden states and the head are computed inside the forward pass while the chunk's
  logits are still there. Nothing is computed twice. (The idea of "Cut Your Losses in
  Large-Vocabulary Language Models", arXiv 2411.09009, and of Liger Kernel, arXiv 2410.10989, in
  plain JAX.)
- `token_logprobs`: for losses that need every token's log-probability first (DPO, GRPO, KL);
  the backward pass recomputes the chunk.

On many devices the step runs under shard_map: each device calls this with its own tokens and a head
that was gathered once before the loop, so that the loop talks to nobody. Only where the vocabulary
itself is split (`Head.axis`, as in Megatron-LM, arXiv 1909.08053) the hidden states of the tokens,
of which each device has a part, are gathered once before the loop, their gradients summed and
scattered once after it, and a chunk exchanges three numbers a token: the largest logit, the sum of
exponentials and the label's logit.

Both return sums or per-token values, never means: the caller divides once by the global count of
trained tokens, so micro-batches, padding and device counts cannot change the loss.
Must match transformers' `ForCausalLMLoss` (sum over labels that are not -100).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from localtrain.nn.parallel import enter, join, leave


class Head(NamedTuple):
    """How a chunk of hidden states becomes logits. Static: part of the compiled program.

    layout: "vd" when the head is stored like an embedding [V, D], "dv" for [D, V].
    softcap: logits become c * tanh(logits / c) (Gemma). z_loss: weight of logsumexp squared (PaLM,
    arXiv 2204.02311, section 5). vocab: ids from here on are padding and get no probability.
    axis: "tensor" when the vocabulary is split over it; each device then has its part of the head,
    and its part of the tokens of h.
    """

    layout: str = "vd"
    softcap: float | None = None
    z_loss: float = 0.0
    vocab: int | None = None
    axis: str | None = None

    def ids(self, columns: int) -> jax.Array:
        """The token ids of this device's columns."""
        first = 0 if self.axis is None else lax.axis_index(self.axis) * columns
        return first + jnp.arange(columns)


def chunk_size(vocab: int) -> int:
    """Tokens per chunk: 2**23 logits (32 MB), between 256 and 4096 tokens.

    Below 256 tokens the read and write of the head's gradient costs more than its matmul.
    """
    size = 256
    while size < 4096 and 2 * size * vocab <= 2**23:
        size *= 2
    return size


def _chunk_logits(head: Head, w: jax.Array, h_CD: jax.Array) -> jax.Array:
    equation = "cd,vd->cv" if head.layout == "vd" else "cd,dv->cv"
    w = w.astype(h_CD.dtype)
    logits_CV = jnp.einsum(equation, h_CD, w, preferred_element_type=jnp.float32)
    if head.softcap is not None:
        logits_CV = head.softcap * jnp.tanh(logits_CV / head.softcap)
    columns = logits_CV.shape[-1]
    if head.vocab is not None and (head.axis is not None or head.vocab < columns):
        logits_CV = jnp.where(head.ids(columns) < head.vocab, logits_CV, -jnp.inf)
    return logits_CV


def _logsumexp_and_picked(head: Head, logits_CV, labels_C):
    """logsumexp over the whole vocabulary and the label's logit, [C] each."""
    if head.axis is None:
        picked_C = jnp.take_along_axis(logits_CV, labels_C[:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(logits_CV, axis=-1), picked_C
    columns = logits_CV.shape[-1]
    top_C = lax.pmax(lax.stop_gradient(logits_CV).max(-1), head.axis)
    mine_C = labels_C - lax.axis_index(head.axis) * columns
    safe_C = jnp.clip(mine_C, 0, columns - 1)
    picked_C = jnp.take_along_axis(logits_CV, safe_C[:, None], axis=-1)[:, 0]
    picked_C = jnp.where(mine_C == safe_C, picked_C, 0)
    sum_C = jnp.exp(logits_CV - top_C[:, None]).sum(-1)
    sum_C, picked_C = join(jnp.stack([sum_C, picked_C]), head.axis)
    return jnp.log(sum_C) + top_C, picked_C


def _split(x: jax.Array, size: int, chunks: int) -> jax.Array:
    """[N, ...] to [chunks, size, ...], zeros at the end: their weight is zero, they add nothing."""
    missing = chunks * size - x.shape[0]
    x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(chunks, size, *x.shape[1:])


def _flatten(h_BTD, labels_BT, weights_BT, vocab: int):
    tokens = labels_BT.size
    size = min(chunk_size(vocab), tokens)
    split = partial(_split, size=size, chunks=-(-tokens // size))
    h_ND = h_BTD.reshape(tokens, h_BTD.shape[-1])
    return split(h_ND), split(labels_BT.reshape(-1)), split(weights_BT.reshape(-1))


def _sums(head: Head, logits_CV, labels_C, weights_C):
    """(objective, nll) of one chunk, and logsumexp; the objective includes the z-loss."""
    lse_C, picked_C = _logsumexp_and_picked(head, logits_CV, labels_C)
    nll = jnp.sum(weights_C * (lse_C - picked_C))
    return nll + head.z_loss * jnp.sum(weights_C * lse_C**2), nll, lse_C


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_nll_sum(
    head: Head, w: jax.Array, h_BTD: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sum over tokens of weight * (-log p(label) + z_loss * logsumexp^2), in float32.

    w [V, D] or [D, V] as `head.layout` says (its gradient is summed in float32), h_BTD [B, T, D]
    in the compute type, labels_BT int [B, T] (any valid id where the weight is 0), weights_BT float
    [B, T]. Returns (objective, nll): scalars. Only the objective is differentiable, towards w and
    h; nll is for logging and has no z-loss in it.
    """
    h_BTD = h_BTD if head.axis is None else enter(h_BTD)

    def body(total, chunk):
        h_CD, labels_C, weights_C = chunk
        objective, nll, _ = _sums(head, _chunk_logits(head, w, h_CD), labels_C, weights_C)
        return (total[0] + objective, total[1] + nll), None

    vocab = w.shape[0 if head.layout == "vd" else 1]
    zero = jnp.zeros((), jnp.float32)
    total, _ = lax.scan(body, (zero, zero), _flatten(h_BTD, labels_BT, weights_BT, vocab))
    return total


def _forward(head: Head, w, h_BTD, labels_BT, weights_BT):
    vocab = w.shape[0 if head.layout == "vd" else 1]
    h_BTD = h_BTD if head.axis is None else enter(h_BTD)
    to_h, to_w = ("cv,vd->cd", "cv,cd->vd") if head.layout == "vd" else ("cv,dv->cd", "cv,cd->dv")

    def body(carry, chunk):
        objective, nll, dw = carry
        h_CD, labels_C, weights_C = chunk
        logits_CV = _chunk_logits(head, w, h_CD)
        add, add_nll, lse_C = _sums(head, logits_CV, labels_C, weights_C)
        # d objective / d logits = weight * (softmax * (1 + 2 z logsumexp) - onehot(label))
        scale_C = weights_C * (1 + 2 * head.z_loss * lse_C)
        g_CV = jnp.exp(logits_CV - lse_C[:, None]) * scale_C[:, None]
        hit_CV = labels_C[:, None] == head.ids(vocab)
        g_CV = g_CV - jnp.where(hit_CV, weights_C[:, None], 0)
        if head.softcap is not None:
            g_CV = g_CV * (1 - jnp.square(jnp.where(g_CV == 0, 0, logits_CV) / head.softcap))
        g_CV = g_CV.astype(h_CD.dtype)
        dh_CD = jnp.einsum(to_h, g_CV, w.astype(g_CV.dtype), preferred_element_type=jnp.float32)
        dw = dw + jnp.einsum(to_w, g_CV, h_CD, preferred_element_type=jnp.float32)
        return (objective + add, nll + add_nll, dw), dh_CD.astype(h_CD.dtype)

    zero = jnp.zeros((), jnp.float32)
    chunks = _flatten(h_BTD, labels_BT, weights_BT, vocab)
    start = (zero, zero, jnp.zeros(w.shape, jnp.float32))
    if chunks[1].shape[0] == 1:  # one chunk: no loop, so that XLA sees one plain matmul
        (objective, nll, dw), dh = body(start, jax.tree.map(lambda x: x[0], chunks))
    else:
        (objective, nll, dw), dh = lax.scan(body, start, chunks)
    dh_BTD = dh.reshape(-1, h_BTD.shape[-1])[: labels_BT.size].reshape(h_BTD.shape)
    dh_BTD = dh_BTD if head.axis is None else leave(dh_BTD)
    return (objective, nll), (dh_BTD, dw.astype(w.dtype))


def _backward(head: Head, saved, cotangent):
    dh_BTD, dw = saved
    g, _ = cotangent  # nll is for logging: no gradient flows through it
    return (dw * g).astype(dw.dtype), (dh_BTD * g).astype(dh_BTD.dtype), None, None


weighted_nll_sum.defvjp(_forward, _backward)


def token_logprobs(head: Head, w: jax.Array, h_BTD: jax.Array, labels_BT: jax.Array) -> jax.Array:
    """log p(label) of every token, float32 [B, T]; the backward pass recomputes each chunk.

    Shapes as in `weighted_nll_sum`. The z-loss is not part of it.
    """

    @jax.checkpoint
    def body(w, chunk):
        h_CD, labels_C = chunk
        logits_CV = _chunk_logits(head, w, h_CD)
        lse_C, picked_C = _logsumexp_and_picked(head, logits_CV, labels_C)
        return picked_C - lse_C

    vocab = w.shape[0 if head.layout == "vd" else 1]
    h_BTD = h_BTD if head.axis is None else enter(h_BTD)
    h, labels, _ = _flatten(h_BTD, labels_BT, labels_BT, vocab)
    _, out = lax.scan(lambda w, chunk: (w, body(w, chunk)), w, (h, labels))
    return out.reshape(-1)[: labels_BT.size].reshape(labels_BT.shape)
