"""What can be held of the Dockerfile without an engine; .ci/container.py builds and runs it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def needs(extras: str) -> subprocess.CompletedProcess:
    """Run the program in the Dockerfile that reads pyproject.toml."""
    code = re.search(r'RUN python -c "(.*?)" \\\n    "\$EXTRAS"', DOCKERFILE, re.DOTALL)[1]
    code = code.replace("\\\n", "")  # as a Dockerfile continues lines
    return subprocess.run(
        [sys.executable, "-c", code, extras], cwd=ROOT, capture_output=True, text=True
    )


def test_the_image_installs_the_dependencies_and_the_extras_asked_for():
    offered = PROJECT["project"]["optional-dependencies"]
    base = PROJECT["build-system"]["requires"] + PROJECT["project"]["dependencies"]
    assert needs("").stdout.split("\n")[:-1] == base
    assert needs("s3,tpu").stdout.split("\n")[:-1] == base + offered["s3"] + offered["tpu"]


def test_an_unknown_extra_stops_the_build_and_names_the_known_ones():
    for extras in ("nonsense", "gcs,nonsense", "dev"):
        done = needs(extras)
        assert done.returncode != 0 and not done.stdout
        assert f"EXTRAS={extras}" in done.stderr and "'cuda12'" in done.stderr


def test_the_build_context_has_every_package_and_nothing_else():
    """A folder that pyproject.toml packages and .dockerignore withholds would fail the build."""
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in lines, "everything is excluded unless named"
    named = {line[1:] for line in lines if line.startswith("!")}
    folders = {path.split("/")[0] for path in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    project = PROJECT["project"]
    assert named == folders | {"pyproject.toml", project["readme"], *project["license-files"]}
