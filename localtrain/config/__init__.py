"""Typed run configuration: the schema, run files, and errors that teach. No jax here.

run = load_run("quickstart", ["train.steps=50", "optim.lr=2e-3"])
run.train.steps, run.to_yaml()
"""

from localtrain.config.explain import explain, sections
from localtrain.config.runfile import load_run, packaged_presets, packaged_runs
from localtrain.config.schema import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    Source,
    TrainConfig,
)
from localtrain.config.secret import mask

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "Source",
    "TrainConfig",
    "explain",
    "load_run",
    "mask",
    "packaged_presets",
    "packaged_runs",
    "sections",
]
