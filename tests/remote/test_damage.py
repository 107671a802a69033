"""Random flipped bits in everything that is read again: each is named, and nothing wrong is used.

Of a checkpoint: the file is named and the checkpoint before is used, or refused with `strict`.
Of token shards, of their index or of a local copy: an error that names the file or the URL. Ten
flips for each of five: checkpoint and shards, here and behind a URL, and copies.
"""

import logging
import random
import re
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from localtrain import storage
from localtrain.checkpoint import Checkpoints
from localtrain.data.build import build_dataset
from localtrain.data.dataset import Dataset
from localtrain.data.tokenizer import load_tokenizer
from localtrain.errors import DataError

FLIPS = 10


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=["here", "there"])
def top(request, tmp_path):
    """A folder on the disk, and one behind a URL."""
    return str(tmp_path / "top") if request.param == "here" else f"memory://{uuid.uuid4().hex}"


def state(step):
    w = jnp.asarray(np.random.default_rng(step).standard_normal((64, 33)), jnp.float32)
    return {"params": {"w": w, "b": jnp.full((3,), step, jnp.bfloat16)}, "step": jnp.int32(step)}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def flip(data, rng):
    at = rng.randrange(len(data) * 8)
    return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]


def one_of_every_kind(names, count, rng):
    """`count` names: as many different kinds of files as there are, then any."""
    kinds = {}
    for name in names:
        kinds.setdefault(re.sub(r"[0-9a-f]{16,}", "#", name), []).append(name)
    chosen = [rng.choice(kinds[kind]) for kind in rng.sample(sorted(kinds), len(kinds))]
    return [*chosen, *rng.choices(sorted(names), k=max(0, count - len(chosen)))][:count]


def test_a_flipped_bit_of_a_checkpoint_is_named_and_the_one_before_is_used(top, caplog):
    caplog.set_level(logging.WARNING, "localtrain")
    saved, rng = Checkpoints(top), random.Random(0)
    for step in (1, 2):
        saved.save(step, state(step), {"n": step})
    saved.close()
    template = jax.eval_shape(lambda: state(0))
    newest = storage.join(top, "2")
    names = [name for name in storage.find_below(newest) if storage.info(f"{newest}/{name}").size]
    for name in one_of_every_kind(names, FLIPS, rng):
        path = storage.join(newest, *name.split("/"))
        intact = storage.read_bytes(path)
        storage.write_atomic(path, flip(intact, rng))
        caplog.clear()
        restored, meta = Checkpoints(top).restore(None, template)
        assert meta["step"] == 1 and bits(restored) == bits(state(1)), name
        assert path in caplog.text and "Falling back to step 1" in caplog.text
        with pytest.raises(DataError, match=re.escape(path)):
            Checkpoints(top).restore(None, template, strict=True)
        storage.write_atomic(path, intact)
    assert bits(Checkpoints(top).restore(None, template)[0]) == bits(state(2))


@pytest.fixture
def built(top):
    """Token shards of some rows of text."""
    rows = b"".join(b'{"text": "row %d of some words"}\n' % n for n in range(300))
    source = storage.join(storage.parent_of(top) if "://" not in top else top, "rows.jsonl")
    storage.write_atomic(source, rows)
    out = storage.join(top, "built")
    build_dataset(source, load_tokenizer("byte"), out)
    return out


def test_a_flipped_bit_of_token_shards_or_their_index_is_named(built):
    rng = random.Random(0)
    for name in ("index.json", "shard-00000.tokens") * (FLIPS // 2):
        path = storage.join(built, name)
        intact = storage.read_bytes(path)
        storage.write_atomic(path, flip(intact, rng))
        with pytest.raises(DataError, match=re.escape(path)):
            Dataset(built)
        storage.write_atomic(path, intact)
    assert len(Dataset(built).lengths) == 300


def test_a_copy_that_was_damaged_on_its_way_is_fetched_again_or_named(
    monkeypatch, caplog, tmp_path
):
    top, rng = f"memory://{uuid.uuid4().hex}", random.Random(0)
    out, source = storage.join(top, "built"), tmp_path / "text.txt"
    source.write_text("some words " * 500)
    build_dataset(str(source), load_tokenizer("byte"), out)
    whole = Dataset(out).read(np.array([0]), np.array([500]))
    download, bad = storage.download_all, [0]

    def damage(files):
        download(files)
        for local, _ in files.values():
            if bad[0]:
                bad[0] -= 1
                with open(local, "rb") as file:
                    data = file.read()
                with open(local, "wb") as file:
                    file.write(flip(data, rng))

    monkeypatch.setattr(storage, "download_all", damage)
    for _ in range(FLIPS):
        bad[0] = 1
        caplog.clear()
        again = Dataset(out).read(np.array([0]), np.array([500]))
        assert again.tolist() == whole.tolist() and "copying it again" in caplog.text
        bad[0] = 2
        with pytest.raises(DataError, match=re.escape(f"{out}/shard-00000.tokens: damaged")):
            Dataset(out)
