"""Against transformers itself: what it saves we train, what we export it loads, to the same logits.

pip install torch transformers && pytest -m torch tests/torch
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from localtrain import api, convert
from localtrain.config import RunConfig
from localtrain.data.byte_files import byte_tokenizer_files
from localtrain.data.tokenizer import ByteTokenizer
from localtrain.train import train

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
FULL, SMALL = ROOT.parent / "shared" / "golden", ROOT / "tests" / "golden_small"
FAMILIES = ["llama2", "llama3_1", "mistral", "qwen2_5", "qwen3", "gemma3_text", "gemma3_mm"]
IDS = (np.arange(2 * 40).reshape(2, 40) * 37 + 5) % 264


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers").utils.logging.disable_progress_bar()
    torch.set_num_threads(2)
    return torch


def golden(family: str) -> Path:
    folder = FULL / family if (FULL / family).is_dir() else SMALL / family
    if not folder.is_dir():
        pytest.skip(f"no golden checkpoint of {family} in this checkout")
    return folder


def reference_logits(torch, folder, ids=IDS) -> np.ndarray:
    """transformers' logits in float32; every tensor of the folder must be used and none missing."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(input_ids=torch.from_numpy(ids.astype(np.int64))).logits.numpy()


def make_tiny(torch, kind: str, folder: Path) -> Path:
    """A random model that transformers saved, with a tokenizer."""
    import transformers

    torch.manual_seed(0)
    shape = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "pad_token_id": None,
    }
    if kind == "tied":
        config = transformers.Qwen3Config(**shape, tie_word_embeddings=True)
    else:
        config = transformers.LlamaConfig(**shape, tie_word_embeddings=False)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name, data in byte_tokenizer_files().items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("imports_first", [True, False], ids=["from an import", "from the folder"])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_trained_20_steps_and_exported_transformers_gives_the_same_logits(
    kind, imports_first, torch, tmp_path
):
    folder = make_tiny(torch, kind, tmp_path / "hub")
    before = reference_logits(torch, folder)
    start = folder
    if imports_first:
        start = tmp_path / "ours"
        convert.import_hub(str(folder), str(start))
    run = RunConfig(
        model={"init_from": str(start)},
        data={"sources": str(ROOT / "tests" / "*.py"), "seq_len": 64},
        train={"steps": 20, "batch_size": 4},
        optim={"lr": 3e-3, "warmup": 2},
    )
    train(run, backend="cpu", out=str(tmp_path / "run"))
    report = convert.export_hub(str(tmp_path / "run"), str(tmp_path / "back"), check=True)
    assert report.max_difference == 0 and report.transformers["max_difference"] < 1e-4
    theirs = reference_logits(torch, tmp_path / "back")
    ours = np.asarray(api.load(str(tmp_path / "run")).logits(IDS))
    assert np.abs(theirs - ours).max() <= 1e-4
    assert np.abs(theirs - before).max() > 0.1  # it did train
    hf = json.loads((tmp_path / "back" / "config.json").read_text())
    assert hf["tie_word_embeddings"] is (kind == "tied")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_golden_family_loads_in_transformers_after_import_and_export(
    family, dtype, torch, tmp_path
):
    convert.import_hub(str(golden(family)), str(tmp_path / "ours"))
    out = tmp_path / "back"
    report = convert.export_hub(str(tmp_path / "ours"), str(out), dtype=dtype, check=True)
    bound = json.loads((golden(family) / "golden.json").read_text())["suggested_atol"]
    assert report.transformers["max_difference"] <= bound
    if dtype is None and family != "gemma3_mm":
        ids = IDS % 256
        same = reference_logits(torch, out, ids) - reference_logits(torch, golden(family), ids)
        assert np.abs(same).max() == 0


def test_what_transformers_saves_in_shards_and_half_precision_is_read(torch, tmp_path):
    import transformers

    folder = make_tiny(torch, "tied", tmp_path / "hub")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half", max_shard_size="100KB")
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 2
    report = convert.import_hub(str(tmp_path / "half"), str(tmp_path / "ours"))
    assert report.source.dtypes.keys() == {"BF16"}
    ours = np.asarray(api.load(str(tmp_path / "ours")).logits(IDS))
    assert np.abs(ours - reference_logits(torch, tmp_path / "half")).max() <= 1e-4


def test_the_exported_byte_tokenizer_gives_the_same_ids_in_transformers(torch, tmp_path):
    from transformers import AutoTokenizer

    for name, data in byte_tokenizer_files().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), ByteTokenizer()
    text = "def f(x):\r\n\treturn 'caf\u00e9 \u4f60\u597d \U0001f600'  <|im_end|>\x00\x7f"
    assert theirs(text)["input_ids"] == [ours.bos_id, *ours.encode(text).tolist()]
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eos_id and len(theirs) == ours.size


def test_check_notices_a_model_that_computes_something_else(torch, tmp_path):
    from localtrain.errors import DataError
    from localtrain.parity import compare_with_transformers, prover
    from localtrain.source import open_source

    folder = make_tiny(torch, "untied", tmp_path / "hub")
    source = open_source(str(folder))
    logits = prover(source.network.spec).logits(source)
    compare_with_transformers(str(folder), logits)
    config = json.loads((folder / "config.json").read_text())
    parameters = {**config["rope_parameters"], "rope_theta": 77.0}
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": parameters}))
    with pytest.raises(DataError, match="other logits"):
        compare_with_transformers(str(folder), logits)
