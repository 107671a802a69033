"""The run: every key, its type, its default and its meaning, in one place.

A run says what to train, never where: backend and output URL are command-line arguments. Sections
are frozen pydantic models that refuse unknown keys. Numbers may be written as YAML or text
("1e-5"); a boolean is never taken for a number, nor text for a boolean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    StrictBool,
    StrictStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from localtrain.config.secret import mask
from localtrain.errors import ConfigError

_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?")


def _number(value: Any) -> Any:
    """Numbers written as text become numbers; anything else stays for pydantic to judge."""
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        text = value.strip().replace("_", "")
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    if isinstance(value, str):
        raise ValueError("text is not a number")
    return value


def _unicode(text: str) -> str:
    """A shell argument that is not UTF-8 arrives with surrogates, which no file can hold."""
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise PydanticCustomError("string_unicode", "not valid Unicode")  # as pydantic's own
    return text


def _all_unicode(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_unicode(text) for text in texts)


def _listed(value: Any) -> Any:
    """One source or a list of them; always kept as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, (str, dict, Source)) else value


Integer = Annotated[int, BeforeValidator(_number), Field(le=2**31 - 1)]  # fits int32 on devices
Number = Annotated[float, BeforeValidator(_number), Field(le=1e15)]  # far from what float32 holds
Text = Annotated[StrictStr, AfterValidator(_unicode)]
Texts = Annotated[tuple[StrictStr, ...], BeforeValidator(_listed), AfterValidator(_all_unicode)]


class Section(BaseModel):
    """A group of keys: frozen, without unknown keys, without NaN, never printing a password."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for key, value in super().__repr_args__():
            yield key, mask(value) if isinstance(value, str) else value


class Source(Section):
    """Where documents come from, and how often compared with the other sources."""

    path: Text = Field(
        description="file, glob, folder or URL; python:stdlib = the source files of this Python's "
        "standard library; synthetic: = random tokens",
        min_length=1,
    )
    weight: Number = Field(
        1.0, gt=0, description="share of this source in a mixture; all 1 = by size"
    )
    field: Text = Field("text", min_length=1, description="key of the text in jsonl or parquet")
    format: Literal["text", "jsonl", "parquet", "shards", "synthetic"] | None = Field(
        None, description="what the files hold; null = judged by the name"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


Sources = Annotated[tuple[Source, ...], BeforeValidator(_listed)]


class ModelConfig(Section):
    """The model: exactly one of preset, path and init_from."""

    preset: Text | None = Field(
        None, description="a packaged architecture, trained from scratch; see `localtrain models`"
    )
    path: Text | None = Field(
        None, description="a Hugging Face folder; only its config.json is used (from scratch)"
    )
    init_from: Text | None = Field(
        None,
        description="weights to start from: a Hugging Face folder or Hub id, an imported folder, "
        "a run or one of its checkpoints",
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="type of the arithmetic (parameters: train.param_dtype); null = the backend's "
        "choice",
    )

    @field_validator("preset")
    @classmethod
    def _without_owner(cls, preset: str | None) -> str | None:
        """Hub names are accepted: Qwen/Qwen3-0.6B is qwen3-0.6b."""
        return preset and preset.rpartition("/")[2].lower()


class DataConfig(Section):
    """Documents, tokens and rows."""

    sources: Sources = Field(
        (),
        description="what to train on: a path, glob, folder, URL, {path, weight, field, "
        "format}, or a list of these",
    )
    eval_sources: Sources = Field(
        (), description="what to evaluate on; without it a part of `sources` is held out"
    )
    eval_fraction: Number = Field(
        0.01, ge=0, le=0.5, description="held-out share of the documents, chosen by their text"
    )
    tokenizer: Text | None = Field(
        None,
        min_length=1,
        description="byte, or a tokenizer.json or the folder that holds one; null = the model's "
        "own with model.init_from, else byte",
    )
    seq_len: Integer = Field(1024, ge=2, description="tokens per row")
    packing: Literal["best_fit", "none"] = Field(
        "best_fit", description="put several documents into a row (they never see each other)"
    )
    cache: Text | None = Field(None, description="where token shards are kept; null = OUT/data")
    bad_rows: Literal["skip", "error"] = Field(
        "skip", description="unusable rows: skip = count and report, error = stop with file:line"
    )
    shuffle: StrictBool = Field(True, description="new keyed row order every epoch; false = as is")
    prefetch: Integer = Field(2, ge=0, description="batches prepared ahead")


class TrainConfig(Section):
    """Steps and how each is computed."""

    steps: Integer = Field(1000, ge=1, description="optimizer updates")
    batch_size: Integer = Field(32, ge=1, description="rows per update, over all devices")
    micro_batch: Integer | None = Field(
        None, ge=1, description="rows per gradient-accumulation piece, over all devices; null = all"
    )
    remat: Literal["none", "matmuls", "full"] = Field(
        "none", description="what the backward pass recomputes instead of keeping in memory"
    )
    param_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="how parameters are stored; bfloat16 = half the memory, updates are rounded "
        "stochastically",
    )
    log_every: Integer = Field(10, ge=1, description="steps between log lines")
    deterministic: StrictBool = Field(
        False, description="bitwise repeatable on GPUs as well, at some cost in speed"
    )
    profile: tuple[Integer, Integer] | None = Field(
        None, description="[first, last] step to record with the profiler"
    )
    z_loss: Number = Field(0.0, ge=0, description="weight of log(Z)^2 in the loss")

    @field_validator("profile", mode="before")
    @classmethod
    def _pair(cls, value: Any) -> Any:
        if value is not None and (not isinstance(value, (list, tuple)) or len(value) != 2):
            raise ValueError("not a pair")
        return value

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if self.micro_batch and self.batch_size % self.micro_batch:
            raise ValueError(
                f"train.micro_batch = {self.micro_batch} does not divide train.batch_size = "
                f"{self.batch_size}; pick a divisor"
            )
        if self.profile and not 1 <= self.profile[0] <= self.profile[1]:
            raise ValueError(
                f"train.profile = {list(self.profile)} is not [first, last] with 1 <= first <= last"
            )
        return self


class OptimConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "sgd"] = Field("adamw", description="the optimizer")
    lr: Number = Field(3e-4, gt=0, description="peak learning rate")
    warmup: Integer = Field(100, ge=0, description="steps until the peak, linearly")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="shape after the warm-up"
    )
    min_lr_ratio: Number = Field(0.1, ge=0, le=1, description="last learning rate / peak")
    decay_fraction: Number = Field(
        0.2, gt=0, le=1, description="wsd: share of the steps in which the rate goes down"
    )
    weight_decay: Number = Field(
        0.1, ge=0, description="decoupled, on matrices only (not embeddings, norms, biases)"
    )
    clip: Number = Field(1.0, ge=0, description="largest global gradient norm; 0 = no clipping")
    b1: Number = Field(0.9, ge=0, lt=1, description="AdamW: decay of the first moment")
    b2: Number = Field(0.95, ge=0, lt=1, description="AdamW: decay of the second moment")
    eps: Number = Field(1e-8, gt=0, description="AdamW: added to the denominator")
    state_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="how the moments are stored (bfloat16: rounded stochastically)"
    )


class EvalConfig(Section):
    """Evaluation on held-out rows while training."""

    every: Integer = Field(250, ge=0, description="steps between evaluations; 0 = only at the end")
    batches: Integer | None = Field(
        20, ge=1, description="batches per evaluation; null = every held-out row"
    )
    prompt: Texts = Field(
        (),
        description="how the sample texts of each evaluation start: a text or a list of these; "
        "[] = as some held-out documents do",
    )
    sample_length: Integer = Field(100, ge=0, description="tokens of a sample text; 0 = no samples")


class CheckpointConfig(Section):
    """Saving; the last step is always saved."""

    every: Integer = Field(250, ge=1, description="steps between checkpoints")
    every_minutes: Number | None = Field(
        None, gt=0, description="minutes between checkpoints, as well; null = off"
    )
    keep: Integer = Field(3, ge=1, description="newest checkpoints that stay on disk")


class MeshConfig(Section):
    """Devices per axis; one axis may be -1 = all that are left."""

    replica: Integer = Field(1, description="data parallel copies, across slices")
    fsdp: Integer = Field(-1, description="data parallel with parameters split")
    expert: Integer = Field(1, description="experts split")
    context: Integer = Field(1, description="sequences split")
    tensor: Integer = Field(1, description="heads, hidden and vocabulary split")

    @model_validator(mode="after")
    def _sizes(self) -> MeshConfig:
        sizes = self.model_dump()
        for axis, size in sizes.items():
            if size != -1 and size < 1:
                raise ValueError(f"mesh.{axis} = {size} must be at least 1, or -1 for all left")
        if list(sizes.values()).count(-1) > 1:
            both = " and ".join(f"mesh.{axis}" for axis, size in sizes.items() if size == -1)
            raise ValueError(f"{both} are both -1 (all devices left); only one axis can be")
        return self


class RunConfig(Section):
    """One training run, complete and frozen."""

    task: Literal["pretrain", "sft", "dpo", "distill", "rl"] = Field(
        "pretrain", description="what kind of training this is"
    )
    name: Text = Field(
        "run", description="names runs/NAME when no --out is given; default = the run file's name"
    )
    seed: Integer = Field(0, ge=0, lt=2**32, description="of weights, row order and sampling")
    model: ModelConfig = Field(ModelConfig(), validate_default=True)
    data: DataConfig = Field(DataConfig(), validate_default=True)
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()

    @model_validator(mode="wrap")
    @classmethod
    def _explained(
        cls, value: Any, handler: ModelWrapValidatorHandler[RunConfig], info: ValidationInfo
    ) -> RunConfig:
        """Every mistake leaves here as one ConfigError paragraph, for files and Python alike."""
        try:
            return handler(value)
        except ValidationError as error:
            from localtrain.config.message import explain_errors

            raise ConfigError(explain_errors(error, info.context)) from None

    @field_validator("name")
    @classmethod
    def _portable(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name) or name.endswith("."):
            raise ValueError("a name is letters, digits, '.', '_', '-' and does not start with '.'")
        return name

    @field_validator("model")
    @classmethod
    def _one_model(cls, model: ModelConfig) -> ModelConfig:
        given = [key for key in ("preset", "path", "init_from") if getattr(model, key)]
        if not given:
            raise ValueError(
                "no model is named: give one of model.preset (see `localtrain models`), "
                "model.path (a folder with config.json) or model.init_from (weights to start from)"
            )
        if len(given) > 1:
            keys = " and ".join(f"model.{key}" for key in given)
            raise ValueError(f"{keys} are both given; the model is exactly one of them")
        return model

    @field_validator("data")
    @classmethod
    def _some_data(cls, data: DataConfig) -> DataConfig:
        if not data.sources:
            raise ValueError(
                "data.sources is empty, there is nothing to train on: give a path, glob or URL "
                "(data.sources=python:stdlib always works)"
            )
        return data

    def to_dict(self) -> dict[str, Any]:
        """Plain data with every key, passwords masked; reads back to an equal run."""
        plain = mask(self.model_dump(mode="json"))
        for key in ("sources", "eval_sources"):
            plain["data"][key] = [_short(source) for source in plain["data"][key]]
        return plain

    def to_yaml(self) -> str:
        """The resolved run as a run file."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=100)


def _short(source: dict[str, Any]) -> str | dict[str, Any]:
    """A source that is only a path is written as one."""
    defaults = {key: field.default for key, field in Source.model_fields.items()}
    extra = {key: value for key, value in source.items() if value != defaults[key]}
    return source["path"] if extra.keys() == {"path"} else extra
