"""Imports point one way, and what must stay light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "localtrain"

# What each part of the core may import, beside `errors` and itself. A part is a file or a folder.
BASE = {"config", "storage", "backend", "processes", "launcher", "heartbeat"}
BELOW = BASE | {"sharding", "runtime"}
ALLOWED = {
    "errors": set(),
    "config": {"storage", "configs"},
    "storage": set(),
    "backend": {"config", "launcher"},
    "heartbeat": set(),
    "launcher": set(),
    "rendezvous": {"heartbeat", "launcher"},
    "processes": {"heartbeat", "launcher", "rendezvous"},
    "sharding": BASE,
    "runtime": BASE,
    "oom": BELOW,
    "hlo": set(),
    "compile_cache": BASE,
    "nn": BELOW,
    "models": BELOW | {"nn", "configs"},
    "data": BELOW | {"stage"},
    "optim": BELOW,
    "losses": BELOW | {"nn"},
    "sampling": BELOW | {"nn"},
    "goodput": set(),
    "metrics": BELOW | {"eventfile", "goodput", "progress"},
    "eventfile": BASE,
    "progress": BASE,
    "report": BASE | {"goodput", "lock", "metrics", "models", "progress"},
    "steps": BELOW | {"nn", "losses", "optim"},
    "parts": BELOW,
    "together": BELOW,
    "arrays": BELOW | {"parts"},
    "commit": BELOW,
    "lock": BASE,
    "stage": BASE | {"lock"},
    "shelf": BELOW | {"commit", "remote_shelf"},
    "remote_shelf": BELOW | {"commit", "shelf", "stage"},
    "restore": BELOW | {"arrays", "commit", "shelf"},
    "checkpoint": BELOW | {"arrays", "commit", "parts", "restore", "together"},
    "lease": BASE | {"lock"},
    "mirror": BASE,
    "rundiff": set(),
    "shared_rundir": BELOW | {"lock", "lease", "stage", "rundir"},
    "rundir": BELOW
    | {"lock", "lease", "mirror", "stage", "rundiff", "checkpoint", "commit", "metrics"},
}
TOP = {
    "hubdir",
    "source",
    "parity",
    "warmstart",
    "train",
    "outcome",
    "job",
    "steplog",
    "samples",
    "decode",
    "generate",
    "complete",
    "chat",
    "evaluate",
    "api",
    "convert",
    "plan",
    "doctor",
}
WITHOUT_JAX = (
    "errors",
    "config",
    "storage",
    "backend",
    "models",
    "data",
    "lock",
    "report",
    "doctor",
)
LIGHT = ("errors", "config", "storage", "backend", "hlo", "launcher")


def parts() -> dict[str, list[Path]]:
    """Part -> its files: localtrain/train.py is `train`, localtrain/nn/*.py are `nn`."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name not in ("__init__", "__main__"):
            found.setdefault(name, []).append(path)
    return found


def imports(path: Path, at_import_only: bool = False) -> set[str]:
    """Dotted names that a file imports; TYPE_CHECKING blocks do not run and do not count."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if at_import_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def internal(path: Path) -> set[str]:
    """Parts of localtrain that a file imports."""
    names = {name.split(".")[1] for name in imports(path) if name.startswith("localtrain.")}
    return names - {"errors", "__version__"}


def test_the_core_never_imports_a_backend_or_its_command_line():
    for part, files in parts().items():
        for path in files:
            assert "backends" not in internal(path), path
            if part != "cli":
                assert "cli" not in internal(path), path


@pytest.mark.parametrize("part", sorted(parts()))
def test_imports_point_one_way(part):
    if part in TOP | {"cli"}:
        return
    assert part in ALLOWED, f"say in tests/test_layering.py where {part} belongs"
    for path in parts()[part]:
        wrong = internal(path) - ALLOWED[part] - {part}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_backends_use_only_backend_config_storage_and_processes():
    allowed = {"backend", "backends", "config", "storage", "processes", "launcher"}
    for path in (ROOT / "backends").glob("*.py"):
        assert internal(path) <= allowed, path


@pytest.mark.parametrize("part", WITHOUT_JAX)
def test_no_jax_at_import(part):
    for path in parts().get(part, []):
        names = imports(path, at_import_only=True)
        assert not {n for n in names if n.split(".")[0] in ("jax", "jaxlib")}, path


@pytest.mark.parametrize("part", LIGHT)
def test_no_jax_at_all(part):
    for path in parts()[part]:
        assert not {n for n in imports(path) if n.split(".")[0] in ("jax", "jaxlib")}, path


def test_only_storage_and_checkpoints_know_fsspec_and_nobody_a_cloud():
    clouds = ("gcsfs", "s3fs", "google", "boto3", "botocore", "azure", "adlfs")
    for part, files in parts().items():
        for path in files:
            tops = {name.split(".")[0] for name in imports(path)}
            assert not tops & set(clouds), path
            assert part == "storage" or "fsspec" not in tops, path


def test_nn_names_no_model_family():
    for path in parts()["nn"]:
        code = path.read_text().lower()
        names = {
            node.id.lower() for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)
        }
        # "llama3" is also the Hub's name of a way to scale rotary frequencies.
        for family in ("qwen", "llama_", "gemma", "mixtral", "deepseek", "mistral", "kimi"):
            assert not {name for name in names if family in name}, f"{path}: {family}"


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"jax", "jaxlib", "numpy", "fsspec", "tensorboard", "orbax", "pydantic", "yaml", "rich"}


def test_import_localtrain_loads_nothing_heavy():
    loaded = modules_after("import localtrain; localtrain.__version__; dir(localtrain)")
    assert not loaded & (HEAVY | {"click"})


def test_help_loads_nothing_heavy():
    loaded = modules_after("from localtrain.cli import run; assert run(['--help']) == 0")
    assert not loaded & HEAVY


def test_a_config_mistake_loads_no_jax_and_no_fsspec():
    loaded = modules_after("from localtrain.cli import run; assert run(['train', 'nope']) == 2")
    assert not loaded & {"jax", "jaxlib", "fsspec", "orbax", "tensorboard"}


def test_a_run_with_local_paths_loads_no_fsspec():
    code = "from localtrain.config import load_run; from localtrain import storage, backend\n"
    code += "load_run('quickstart'); storage.exists('x'); backend.survey()"
    assert not modules_after(code) & {"jax", "jaxlib", "fsspec"}


def test_the_module_train_is_the_function_train_whoever_imports_it_first():
    for first in ("from localtrain.train import train", "pass"):
        modules_after(
            f"{first}\nimport localtrain\nfrom localtrain.train import train\n"
            "assert callable(localtrain.train) and localtrain.train.train is train\n"
            "try: localtrain.train('no-such-run')\n"
            "except localtrain.errors.ConfigError as error: assert 'no-such-run' in str(error)\n"
            "else: raise AssertionError"
        )


def test_public_names():
    import localtrain

    assert {"RunConfig", "__version__", "load", "train"} <= set(dir(localtrain))
    assert localtrain.RunConfig.__module__ == "localtrain.config.schema"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = localtrain.nothing
