"""What an installation consists of: the wheel's files, its dependencies, its entry points."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# module -> distribution, where the names differ
DISTRIBUTIONS = {
    "pydantic_core": "pydantic",
    "yaml": "pyyaml",
    "orbax": "orbax-checkpoint",
    "google_crc32c": "google-crc32c",
}
# imported, but only ever together with what brings it: jax, orbax-checkpoint, tokenizers, an extra
BROUGHT = {"ml_dtypes", "etils", "absl", "tensorstore", "pyarrow", "huggingface_hub"}
# loaded by name through fsspec or an entry point, never imported by us
CLOUDS = ("google-cloud", "gcsfs", "s3fs", "boto", "aws", "azure", "adlfs")
HEAVY = ("torch", "tensorflow", "datasets", "transformers", "grpcio", "pandas")


def distribution(requirement: str) -> str:
    for mark in "[<>=!~; ":
        requirement = requirement.split(mark)[0]
    return requirement.lower().replace("_", "-")


BASE = {distribution(requirement) for requirement in PROJECT["dependencies"]}


def imported() -> set[str]:
    """Top-level names of other packages that the core and the backends import, at any level."""
    found = set()
    for path in [*(ROOT / "localtrain").rglob("*.py"), *(ROOT / "backends").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"localtrain", "__future__", "msvcrt"}


def test_base_dependencies_name_no_cloud_and_no_other_framework():
    for name in BASE:
        assert not name.startswith(CLOUDS) and name not in HEAVY, name


def test_every_import_is_a_base_dependency_and_every_one_is_used():
    used = {DISTRIBUTIONS.get(name, name) for name in imported() - BROUGHT}
    assert used - BASE == set(), "imported but not a dependency"
    assert BASE - used == set(), "a dependency that nothing imports"


def test_python_and_jax_ranges():
    assert PROJECT["requires-python"] == ">=3.11"
    assert "jax>=0.10" in PROJECT["dependencies"]
    for extra, requirements in PROJECT["optional-dependencies"].items():
        for requirement in requirements:
            if distribution(requirement) == "jax":  # one jax range, whatever is installed
                assert requirement.endswith(">=0.10"), extra


def test_extras():
    expected = "cuda12 cuda13 rocm tpu plan-gpu gcs s3 data kernels pathways eval test dev"
    assert set(PROJECT["optional-dependencies"]) == set(expected.split())


def test_what_is_installed_agrees(capsys):
    """`pip check` on our own distribution, without the rest of the environment."""
    from importlib.metadata import requires, version

    for requirement in requires("localtrain"):
        if "extra ==" not in requirement:
            assert version(distribution(requirement))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources; needs setuptools or a package index."""
    work = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("localtrain", "backends", "configs"):
        shutil.copytree(ROOT / name, work / "source" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, work / "source" / name)
    import setuptools

    if int(setuptools.__version__.split(".")[0]) >= 77:
        code = f"import setuptools.build_meta as b; b.build_wheel({str(work)!r})"
        command = [sys.executable, "-c", code]
    else:
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(work), "."]
    done = subprocess.run(command, cwd=work / "source", capture_output=True, text=True)
    if done.returncode and "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("no setuptools >= 77 here and no index to get it from")
    assert done.returncode == 0, done.stderr
    return next(work.glob("localtrain-*.whl"))


def test_the_wheel_holds_every_module_preset_and_run_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, target in (
        ("localtrain", "localtrain"),
        ("backends", "localtrain/backends"),
        ("configs", "localtrain/configs"),
    ):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".json", ".txt"):
                assert f"{target}/{path.relative_to(ROOT / folder).as_posix()}" in names, path
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"localtrain"}


def test_the_wheel_registers_command_backends_and_licence(wheel):
    archive = zipfile.ZipFile(wheel)
    info = next(name for name in archive.namelist() if name.endswith("METADATA"))
    points = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert "localtrain = localtrain.cli:main" in points
    assert "cpu = localtrain.backends.cpu:Cpu" in points
    assert "local-gpu = localtrain.backends.local_gpu:LocalGpu" in points
    metadata = archive.read(info).decode()
    assert "License-Expression: Apache-2.0" in metadata
    base = [
        line
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist") and "extra ==" not in line
    ]
    assert len(base) == len(BASE)


def test_the_wheel_works_away_from_the_sources(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import localtrain.cli, localtrain.backends.cpu\n"
        "assert localtrain.__file__.startswith(r'{site}'), localtrain.__file__\n"
        "assert localtrain.backends.__file__.startswith(r'{site}')\n"
        "raise SystemExit(localtrain.cli.run(['models', 'show', 'qwen3-tiny']))"
    ).format(site=tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "821,632" in done.stdout
