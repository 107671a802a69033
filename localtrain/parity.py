"""The proof that weights are the same after a conversion: logits on fixed tokens, before and after.

The logits are computed from what lies on disk, in float32 on the CPU, whatever the type of the
weights. Weights stay in their stored type and are widened layer by layer, so the memory needed is
that of the stored model. The reference is transformers, where it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from localtrain.errors import ConfigError, DataError
from localtrain.nn.cached import Slots
from localtrain.nn.core import Policy
from localtrain.nn.decoder import Params, build
from localtrain.nn.spec import Model
from localtrain.source import Source

LENGTH = 16  # tokens of the fingerprint
HEAD_ROWS = 8192  # of the vocabulary, at a time
TOLERANCE = 1e-3  # of the largest logit: float32 in another order of summation stays far below


@dataclass(frozen=True)
class Fingerprint:
    """Logits at 16 fixed tokens in five numbers; `best` is the likeliest token after the last."""

    mean: float
    std: float
    largest: float
    best: int
    best_logit: float


def fixed_tokens(vocab: int) -> np.ndarray:
    """int32 [16]: spread over the vocabulary, the same for every model of that size."""
    return ((7919 * np.arange(LENGTH, dtype=np.int64) + 11) % vocab).astype(np.int32)


@lru_cache(maxsize=2)
def prover(spec: Model) -> Prover:
    """The Prover of a spec."""
    return Prover(spec)


class Prover:
    """Computes logits of models of one spec; compiled once for all of them.

    Layer by layer: a program for the whole model would widen all weights at once on a CPU.
    """

    def __init__(self, spec: Model):
        self.tokens = fixed_tokens(spec.vocab)
        self.network = build(spec, Policy(compute_dtype=jnp.float32))
        self._start = jax.jit(self.network.decode_start)
        self._periods = [jax.jit(partial(self._period, i)) for i in range(len(spec.stacks))]
        self._end = jax.jit(self.network.decode_end)
        self._head = jax.jit(self.network.logits)

    def logits(self, source: Source) -> np.ndarray:
        """float32 [16, vocab]; reads the source once."""
        cpu = jax.local_devices(backend="cpu")[0]
        with jax.default_device(cpu), jax.default_matmul_precision("highest"):
            ends, periods = source.ends(), source.periods()
            h_TD = self._hidden(ends, periods)
            del periods
            return np.concatenate(list(self._logits(ends, h_TD)), axis=-1)

    def _hidden(self, ends: Params, periods: Callable[[int, int], Params]) -> jax.Array:
        """The final norm's output, [16, D]."""
        small = {**ends, "embed_VD": ends["embed_VD"][self.tokens]}  # 16 rows, in their order
        if "head_DV" in ends:
            small["head_DV"] = ends["head_DV"][:, :1]  # part of the tree, not used here
        x_BTD = self._start(small, np.arange(LENGTH)[None])
        for i, stack in enumerate(self.network.stacks):
            for r in range(stack.repeat):
                x_BTD = self._periods[i](periods(i, r), x_BTD, self.tokens[None])
                x_BTD.block_until_ready()  # else the weights of many layers wait side by side
        return self._end(small, x_BTD)[0]

    def _period(self, i: int, weights: Params, x_BTD: jax.Array, tokens_BT: jax.Array):
        cache = self.network.init_period_cache(i, 1, LENGTH)
        slots = Slots(jnp.zeros((), jnp.int32), jnp.zeros(1, jnp.int32))
        return self.network.decode_period(i, weights, x_BTD, tokens_BT, slots, LENGTH, cache)[0]

    def _logits(self, ends: Params, h_TD: jax.Array) -> Iterator[np.ndarray]:
        """A part of the vocabulary at a time, [16, <= 8192]."""
        vocab, tied = self.network.spec.vocab, self.network.spec.tied
        for start in range(0, vocab, HEAD_ROWS):
            part = slice(start, min(start + HEAD_ROWS, vocab))
            table = {"embed_VD": ends["embed_VD"][part]} if tied else {}
            head = {} if tied else {"head_DV": ends["head_DV"][:, part]}
            yield np.asarray(self._head(table | head, h_TD))


def fingerprint(logits_TV: np.ndarray) -> dict[str, Any]:
    """The numbers of a Fingerprint, as JSON values."""
    last_V = logits_TV[-1]
    best = int(np.argmax(last_V))
    return asdict(
        Fingerprint(
            mean=float(logits_TV.mean(dtype=np.float64)),
            std=float(logits_TV.std(dtype=np.float64)),
            largest=float(np.abs(logits_TV).max()),
            best=best,
            best_logit=float(last_V[best]),
        )
    )


# the reference --------------------------------------------------------------------------------


def require_transformers() -> None:
    """ConfigError that says what to install, when the reference is not there."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--check compares with transformers, but {' and '.join(missing)} cannot be imported; "
            "nothing was written. Install what is missing (pip install torch transformers), or "
            "export without --check: the table compares what was written with the source anyway."
        )


def compare_with_transformers(folder: str, logits_TV: np.ndarray) -> dict[str, Any]:
    """Version and largest difference of transformers' logits, in float32, for a local folder.

    DataError when transformers cannot load the folder, misses or ignores a tensor, or computes
    other logits. No code of the folder is run.
    """
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model.eval()
        with torch.no_grad():
            tokens = torch.from_numpy(fixed_tokens(logits_TV.shape[1]).astype(np.int64))[None]
            theirs_TV = model(input_ids=tokens).logits[0].float().numpy()
    except Exception as error:  # any of them means that the folder does not load there
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        raise DataError(
            f"{folder}: transformers {transformers.__version__} cannot use what was written: "
            f"{type(error).__name__}: {reason}."
        ) from error
    unused = {key: sorted(map(str, names))[:5] for key, names in info.items() if names}
    unused.pop("error_msgs", None)
    if unused:
        raise DataError(f"{folder}: transformers reports {unused}, so the tensors do not all fit.")
    difference = float(np.abs(theirs_TV - logits_TV).max())
    bound = TOLERANCE * float(np.abs(theirs_TV).max())
    if not difference <= bound:
        raise DataError(
            f"{folder}: transformers {transformers.__version__} computes other logits than "
            f"localtrain: the largest difference is {difference:.3g}, above {bound:.3g}."
        )
    return {"version": transformers.__version__, "max_difference": difference}
