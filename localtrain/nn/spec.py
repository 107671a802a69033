"""Frozen dataclasses that say what a model is: one Layer per layer, nothing about arrays.

Everything else is derived from them: the stacks that are scanned (from equality of layers),
parameter counts and FLOPs (the methods here), the cache (from the mixer), the Hub's layer numbers
(from the stacks). A feature is a field of the one spec that owns it; its default means "absent".
No jax here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Norm:
    """RMS norm over the last axis; with `plus_one` the stored weight is an offset from one."""

    eps: float = 1e-6
    plus_one: bool = False


@dataclass(frozen=True)
class LinearScaling:
    """Frequencies divided by `factor` ("Extending Context Window ...", arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, a linear blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071); `attention_factor` multiplies cos and sin."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Rope:
    """Rotary positions on the first `dim` channels of a head, channel i paired with i + dim/2."""

    theta: float
    dim: int
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention. `window` w: key k is seen by query q if q - w < k <= q."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    scale: float
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None
    softcap: float | None = None
    sinks: bool = False
    supports_context: ClassVar[bool] = True  # works on rows split over devices (mesh.context)

    def parameters(self, dim: int) -> int:
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        extras = (q_size + 2 * kv_size) * self.qkv_bias + dim * self.out_bias
        extras += 2 * self.head_dim * (self.qk_norm is not None) + self.heads * self.sinks
        return self.matrix_parameters(dim) + extras

    def matrix_parameters(self, dim: int) -> int:
        return 2 * dim * self.head_dim * (self.heads + self.kv_heads)

    def keys_per_query(self, seq_len: int) -> float:
        """Mean number of visible keys: T/2, with a window w < T: w - w^2 / 2T."""
        window = min(self.window or seq_len, seq_len)
        return window - window**2 / (2 * seq_len)

    def score_flops(self, seq_len: int) -> float:
        """FLOPs per token of the two attention products, forward only."""
        return 4 * self.heads * self.head_dim * self.keys_per_query(seq_len)

    def cache_bytes_per_token(self, bytes_per_value: int) -> int:
        """What one more token adds to a long cache: with a window nothing."""
        if self.window is not None:
            return 0
        return 2 * self.kv_heads * self.head_dim * bytes_per_value

    @property
    def kind(self) -> str:
        reach = "full" if self.window is None else f"window {self.window}"
        return f"{reach} attention, {self.heads} heads, {self.kv_heads} kv, dim {self.head_dim}"


@dataclass(frozen=True)
class Glu:
    """Gated feed-forward: down(act(gate(x)) * up(x)). `act`: "silu" | "gelu" | "gelu_tanh"."""

    hidden: int
    act: str = "silu"
    bias: bool = False

    def parameters(self, dim: int) -> int:
        return self.matrix_parameters(dim) + (2 * self.hidden + dim) * self.bias

    def matrix_parameters(self, dim: int) -> int:
        return 3 * dim * self.hidden

    active_parameters = parameters

    @property
    def kind(self) -> str:
        return f"gated {self.act} {self.hidden}"


@dataclass(frozen=True)
class Layer:
    """x + mixer(norm(x)), then x + ffn(norm(x)); "sandwich" also norms what is added."""

    mixer: Gqa
    ffn: Glu
    norm: Norm
    residual: str = "plain"  # plain | sandwich

    def parameters(self, dim: int) -> int:
        norms = 4 if self.residual == "sandwich" else 2
        return self.mixer.parameters(dim) + self.ffn.parameters(dim) + norms * dim

    def active_parameters(self, dim: int) -> int:
        return self.parameters(dim) - self.ffn.parameters(dim) + self.ffn.active_parameters(dim)


@dataclass(frozen=True)
class Stack:
    """`repeat` times the layers of `period`: scanned over `repeat`, traced once per period."""

    period: tuple[Layer, ...]
    repeat: int


@dataclass(frozen=True)
class Model:
    """A decoder-only language model."""

    vocab: int
    dim: int
    layers: tuple[Layer, ...]
    final_norm: Norm
    tied: bool
    max_length: int
    embed_scale: float | None = None
    softcap: float | None = None

    @property
    def stacks(self) -> tuple[Stack, ...]:
        return find_stacks(self.layers)

    def embedding_parameters(self) -> int:
        """Embedding and output head; a tied table counts once."""
        return self.vocab * self.dim * (1 if self.tied else 2)

    def parameters(self) -> int:
        layers = sum(layer.parameters(self.dim) for layer in self.layers)
        return self.embedding_parameters() + layers + self.dim

    def active_parameters(self) -> int:
        """Parameters that one token uses: all of a dense model, the chosen experts otherwise."""
        layers = sum(layer.active_parameters(self.dim) for layer in self.layers)
        return self.embedding_parameters() + layers + self.dim

    def model_flops_per_token(self, seq_len: int) -> float:
        """Forward and backward FLOPs of one trained token in a sequence of `seq_len`.

        Convention: 2 FLOPs a multiply-add; backward is twice forward, so 6 per matrix parameter
        (output head included, embedding look-up, norms and biases not), plus three times the two
        attention products with causal attention at half: 12 * heads * head_dim * T/2 a layer
        (windows exactly). Recomputation is not counted. Same as nanochat and PaLM (arXiv
        2204.02311, appendix B) but for the half.
        """
        flops = 6.0 * self.vocab * self.dim
        for layer in self.layers:
            matrices = layer.mixer.matrix_parameters(self.dim)
            matrices += layer.ffn.matrix_parameters(self.dim)
            flops += 6.0 * matrices + 3.0 * layer.mixer.score_flops(seq_len)
        return flops

    def cache_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """What each further token of a row adds once all windows are full."""
        return sum(layer.mixer.cache_bytes_per_token(bytes_per_value) for layer in self.layers)


def find_stacks(layers: tuple[Layer, ...]) -> tuple[Stack, ...]:
    """Greedy: at each position the period x repeat that covers most layers, smaller on ties."""
    stacks = []
    start = 0
    while start < len(layers):
        rest = layers[start:]
        best = Stack(rest[:1], 1)
        for size in range(1, len(rest) // 2 + 1):
            period = rest[:size]
            repeat = 1
            while rest[repeat * size : (repeat + 1) * size] == period:
                repeat += 1
            covers_more = size * repeat > len(best.period) * best.repeat
            if repeat > 1 and covers_more:
                best = Stack(period, repeat)
        stacks.append(best)
        start += len(best.period) * best.repeat
    return tuple(stacks)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention factor (arXiv 2309.00071, eq. 22): 0.1 m ln(s) + 1."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
