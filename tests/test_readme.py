"""What the README and the packaged files say is there."""

import re
from pathlib import Path

import pytest

from localtrain.config import load_run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(marker: str) -> str:
    return re.search(rf"<!-- ci: {marker} -->\n```sh\n(.*?)```", README, re.DOTALL)[1]


def test_the_commands_that_ci_runs_are_there():
    assert "pip install -e ." in blocks("install")
    assert blocks("quickstart").strip() == "localtrain train quickstart"
    assert "make check" in blocks("tests")


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_every_link_leads_to_a_file(link):
    assert link.startswith("https://") or (ROOT / link).is_file()


def test_every_file_of_the_tree_exists_and_every_module_is_in_it():
    tree = README.split("## The code")[1].split("```")[1]
    named = set(re.findall(r"([a-z_]+\.py)", tree))
    there = {path.name for path in (ROOT / "localtrain").glob("*.py")}
    assert named <= there
    assert there - named <= {"__init__.py", "__main__.py"}
    inside = tree.split("\nbackends/")[0].split("localtrain/", 1)[1]
    for folder in re.findall(r"\s([a-z_]+)/", inside):
        assert (ROOT / "localtrain" / folder).is_dir(), folder


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "configs").glob("*.yaml")))
def test_every_run_file_starts_with_what_it_does_and_loads(name):
    text = (ROOT / "configs" / name).read_text()
    assert text.startswith("# ") and "loss" in text.split("\n\n")[0]
    load_run(str(ROOT / "configs" / name), ["model.preset=qwen3-tiny"])
