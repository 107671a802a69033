"""One training step on many devices: equal to one device, and what the devices exchange.

Devices are forced in processes of their own (sharding_cases.py): jax opens them once per process.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from localtrain import hlo
from localtrain.metrics import read_metrics

CASES = {  # devices at hand -> name -> model, mesh, micro-batch, remat
    4: {
        "fsdp 4": ("options", {"fsdp": 4}, 4),
        "replica 2 x fsdp 2": ("plain", {"replica": 2, "fsdp": 2}),
        "tensor 2 x fsdp 2": ("plain", {"tensor": 2, "fsdp": 2}, None, "matmuls"),
        "tensor 4, more than kv heads": ("options", {"tensor": 4}, 2, "full"),
        "context 2 x fsdp 2": ("options", {"context": 2, "fsdp": 2}, 4),
        "context 4": ("plain", {"context": 4}),
        "context 2 x tensor 2": ("options", {"context": 2, "tensor": 2}, None, "matmuls"),
    },
    8: {
        "fsdp 4, tied": ("plain", {"fsdp": 4}),
        "tensor 4, tied": ("plain", {"tensor": 4}, 2),
        "tensor 2 x fsdp 2, options": ("options", {"tensor": 2, "fsdp": 2}),
        "fsdp 8": ("options", {"fsdp": 8}),
        "replica 2 x fsdp 2 x tensor 2": ("options", {"replica": 2, "fsdp": 2, "tensor": 2}, 4),
        "fsdp 2 x context 2 x tensor 2": ("plain", {"fsdp": 2, "context": 2, "tensor": 2}),
        "context 4 x tensor 2": ("options", {"context": 4, "tensor": 2}, 2, "full"),
        "context 8": ("options", {"context": 8}, None, "matmuls"),
    },
}


def run_cases(job: str, devices: int, *more: str) -> dict:
    script = Path(__file__).parent / "sharding_cases.py"
    done = subprocess.run(
        [sys.executable, str(script), job, str(devices), *more],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


# ---- equal to one device


@pytest.fixture(scope="module")
def differences():
    return run_cases("equal", 4, json.dumps(CASES[4]))


@pytest.mark.parametrize("case", CASES[4])
def test_a_mesh_gives_the_loss_gradients_and_sgd_update_of_one_device(differences, case):
    worst = differences[case]
    assert set(worst) == {"loss", "grad_norm", "eval", "gradients", "parameters"}
    assert all(value < 1e-5 for value in worst.values()), worst


def test_log_probabilities_of_a_split_padded_vocabulary_are_those_of_the_whole():
    """The other entry of the loss head, for losses for all tokens; 41 of 48 ids exist."""
    worst = run_cases("logprobs", 4)
    assert set(worst) == {"values", "towards w", "towards h"}
    assert all(value < 1e-5 for value in worst.values()), worst


@pytest.mark.slow
def test_meshes_of_eight_devices_give_the_same():
    for case, worst in run_cases("equal", 8, json.dumps(CASES[8])).items():
        assert all(value < 1e-5 for value in worst.values()), (case, worst)


# ---- what the compiled programs exchange


@pytest.fixture(scope="module")
def compiled():
    return run_cases("programs", 4)


FSDP_OF = {"fsdp": [[0, 1, 2, 3]], "both": [[0, 2], [1, 3]]}
TENSOR_OF = {"tensor": [[0, 1, 2, 3]], "both": [[0, 1], [2, 3]]}
PROGRAMS = ("fsdp matmuls", "both none")


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_loss_loop_talks_to_nobody_over_fsdp(compiled, program):
    """Left to the partitioner it would gather and sum the whole head in every chunk."""
    found = compiled[program]
    over_fsdp = [c for c in found["collectives"] if c["groups"] == FSDP_OF[program.split()[0]]]
    assert found["loss_loops"] and over_fsdp
    assert not [c for c in over_fsdp if set(c["loops"]) & set(found["loss_loops"])]
    if program.startswith("both"):  # a vocabulary over two devices: largest logit, sum and label
        inside = [c for c in found["collectives"] if set(c["loops"]) & set(found["loss_loops"])]
        assert {(c["kind"], c["times"]) for c in inside} == {("all-reduce", 4)}
        assert max(c["bytes"] for c in inside) == 2 * 512 * 4  # two numbers for each of 512 tokens


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_matrix_is_gathered_once_a_direction_and_its_gradient_scattered_once(
    compiled, program
):
    found = compiled[program]
    over_fsdp = [c for c in found["collectives"] if c["groups"] == FSDP_OF[program.split()[0]]]
    layers, matrices = found["layers"], found["layer_matrices"]
    in_layers = [c for c in over_fsdp if c["loops"]]
    assert {c["times"] for c in in_layers} == {layers}
    gathers = [c for c in in_layers if c["kind"] == "all-gather"]
    scatters = [c for c in in_layers if c["kind"] == "reduce-scatter"]
    assert len(gathers) == 2 * matrices and len(scatters) == matrices
    assert len(in_layers) == len(gathers) + len(scatters)
    bodies = [tuple(c["loops"]) for c in gathers]
    assert sorted(map(bodies.count, set(bodies))) == [matrices, matrices]  # forward, backward
    outside = [c["kind"] for c in over_fsdp if not c["loops"]]
    assert outside.count("reduce-scatter") == 1  # the head's; the embedding's gradient needs none
    assert outside.count("all-gather") == 2  # the head, and token ids


def test_matrices_travel_in_the_type_of_the_arithmetic(compiled):
    """In the program as it is given to the compiler: XLA's CPU compiler widens bfloat16 itself."""
    assert all(compiled[program]["gathered"] == ["bf16", "i32"] for program in PROGRAMS)
    assert compiled["fsdp matmuls"]["scattered"] == ["f32"]  # their gradients are summed in float32
    assert compiled["tensor none"]["scattered"] == ["bf16"]  # activations


@pytest.mark.parametrize(
    ("program", "gathers"),
    [("tensor none", 4), ("tensor matmuls", 6), ("tensor full", 6), ("both none", 4)],
)
def test_tensor_gathers_and_scatters_tokens_and_repeats_no_sum(compiled, program, gathers):
    """An all-reduce is worth one of each. Whole activations took 4 of these a layer with remat
    none, 5 with matmuls and full: the same bytes, for a part of the memory."""
    found, (mesh, remat) = compiled[program], program.split()
    inside = [c for c in found["collectives"] if set(c["loops"]) - set(found["loss_loops"])]
    over_tensor = [c for c in inside if c["groups"] == TENSOR_OF[mesh]]
    kinds = [c["kind"] for c in over_tensor]
    assert kinds.count("all-gather") == gathers and kinds.count("reduce-scatter") == 4
    assert len(kinds) == gathers + 4
    assert {c["times"] for c in over_tensor} == {found["layers"]}
    if mesh == "tensor":
        assert len(inside) == len(over_tensor)
        # what lies between the layers, [B, T, D] of the whole batch, is kept in parts
        assert [8, 64 // 4, 32] in found["kept"]
        assert remat == "none" or [8, 64, 32] not in found["kept"]


def test_the_causal_work_of_a_row_is_shared_out_evenly(compiled):
    """Stretches of equal length would leave the last of 4 devices with 7/16 of the pairs.

    Counted as the compiler's loops say: nothing is skipped in addition while running. With a window
    the first device has less to do than its part, so that the others have more than theirs.
    """
    one, four = (compiled["attention"][str(n)] for n in (1, 4))
    assert 0.98 < 4 * four["full"] / one["full"] < 1.03
    assert 0.98 < 4 * four["window"] / one["window"] < 1.15


def test_no_device_ever_holds_a_whole_big_parameter_at_the_start(compiled):
    for mesh in FSDP_OF:
        assert compiled[mesh]["largest"] * 4 <= compiled[mesh]["largest_parameter"]


# ---- the program itself, from mesh to mesh


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    text = folder / "text"
    text.mkdir()
    for file in sorted(Path(__file__).parent.glob("test_c*.py"))[:4]:
        shutil.copy(file, text)
    model = {
        "model_type": "qwen3",
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(model))
    (folder / "tiny.yaml").write_text(
        f"""
name: tiny
model: {{path: {folder / "model"}}}
data: {{sources: "{text}/*.py", seq_len: 32, eval_fraction: 0.2, cache: {folder / "cache"}}}
train: {{steps: 6, batch_size: 8, log_every: 1}}
optim: {{lr: 3e-3, warmup: 2, schedule: constant}}
eval: {{every: 0, batches: 2, sample_length: 0}}
checkpoint: {{every: 2, keep: 10}}
"""
    )
    return folder


def train(folder, out, devices, *more, code=0):
    command = [sys.executable, "-m", "localtrain", "train", str(folder / "tiny.yaml")]
    command += ["--backend", "cpu", "--devices", str(devices), "--out", str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def travelled(folder):
    """Steps 1-2 on one device, 3-4 on fsdp x tensor, 5-6 on context x tensor; also one device."""
    out = folder / "travelled"
    train(folder, out, 1, "train.steps=2")
    train(folder, out, 4, "train.steps=4", "mesh.fsdp=2", "mesh.tensor=2")
    train(folder, out, 4, "train.steps=6", "mesh.context=2", "mesh.tensor=2")
    train(folder, folder / "stayed", 1)
    return out


def test_a_run_goes_on_on_other_meshes_with_the_same_data(folder, travelled):
    """AdamW turns rounding into moves of the size of lr, so losses are close, rows are the same."""
    ours, one = (
        [row for row in read_metrics(path) if "loss" in row]
        for path in (travelled, folder / "stayed")
    )
    assert [row["step"] for row in ours] == [row["step"] for row in one] == [1, 2, 3, 4, 5, 6]
    for key in ("tokens", "trained_tokens", "lr"):
        assert [row[key] for row in ours] == [row[key] for row in one]
    np.testing.assert_allclose(
        [row["loss"] for row in ours], [row["loss"] for row in one], rtol=2e-6
    )
    events = [row["step"] for row in read_metrics(travelled) if row.get("event") == "resume"]
    assert events == [2, 4]


OPEN = """
import sys, json, hashlib
import jax, jax.numpy as jnp, numpy as np
from localtrain import models, sharding, steps
from localtrain.config import load_run
from localtrain.checkpoint import Checkpoints
from localtrain.models import read_hub_config, spec_from
from localtrain.nn.core import Policy
from localtrain.nn.decoder import build
out, meshes = sys.argv[1], json.loads(sys.argv[2])
jax.config.update("jax_num_cpu_devices", 4)
network = build(models.spec_from(json.load(open(out + "/model.json"))), Policy())
found = []
for sizes in meshes:
    whole = dict.fromkeys(sharding.AXES, 1) | sizes
    run = load_run(out + "/run.yaml", ["mesh." + a + "=" + str(n) for a, n in whole.items()])
    mesh = sharding.make_mesh(run.mesh, jax.devices()[: int(np.prod(list(sizes.values())))])
    shapes = jax.eval_shape(lambda: steps.init_state(network, run, np.uint32(0)))
    params = sharding.param_shardings(mesh, network.shapes, network.axes)
    places = sharding.state_shardings(mesh, shapes, params)
    like = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, places
    )
    state, _ = Checkpoints(out + "/checkpoints").restore(int(sys.argv[3]), like)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, at: x.sharding == at, state, places)))
    whole = sum(x.nbytes for _, x in leaves)
    mine = sum(x.addressable_shards[0].data.nbytes for _, x in leaves)
    bits = {jax.tree_util.keystr(p): hashlib.sha256(np.asarray(x)).hexdigest() for p, x in leaves}
    found.append([bits, mine / whole])
print(json.dumps(found))
"""


def test_a_checkpoint_opens_on_any_mesh_bit_for_bit_and_split(travelled):
    meshes = [
        {"fsdp": 1},
        {"fsdp": 4},
        {"fsdp": 1, "tensor": 4},
        {"fsdp": 2, "replica": 2},
        {"fsdp": 2, "context": 2},
    ]
    for step in (2, 4):  # saved on one device, and on four
        command = [sys.executable, "-c", OPEN, str(travelled), json.dumps(meshes), str(step)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        (bits, whole), *others = json.loads(done.stdout)
        assert whole == 1
        assert all(other == bits for other, _ in others)
        shares = [share for _, share in others]
        assert shares[0] < 0.3 and shares[1] < 0.4 and max(shares) < 0.55, shares


def test_mesh_mistakes_exit_2_before_anything_is_written(folder):
    for more, words in (
        (["mesh.tensor=3"], "mesh (fsdp: -1, tensor: 3) does not fit 4 devices"),
        (["mesh.context=4", "mesh.fsdp=1", "data.seq_len=30"], "data.seq_len = 30"),
    ):
        done = train(folder, folder / "never", 4, *more, code=2)
        assert words in done.stderr and "Traceback" not in done.stderr
    assert not (folder / "never").exists()


# ---- the reader of compiled programs

TEXT = """HloModule jit_f, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %w = f32[8,8]{1,0} all-gather(%x), channel_id=1, replica_groups=[4,2]<=[2,2,2]T(0,2,1)
  %d = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[4,8]) tuple(%i, %d)
}

ENTRY %main (x: f32[4,8]) -> f32[] {
  %x = f32[4,8]{1,0} parameter(0)
  %loop = (s32[], f32[4,8]) while(%x), body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %b = bf16[16]{0} all-reduce(%y), replica_groups={{0,1},{2,3}}, to_apply=%add
  %g = (bf16[2,4], bf16[16,4]) all-gather-start(%z), replica_groups=mesh['a'=2,'b'=4] {'a','b'}
  %h = bf16[16,4]{1,0} all-gather-done(%g)
  %k = ((f32[8,4], f32[4]), f32[2,4], f32[1]) reduce-scatter-start(%h), replica_groups=[2,4]<=[8]
  ROOT %r = f32[2]{0} reduce-scatter(%v), replica_groups={}, to_apply=%add
}
"""


def test_the_reader_multiplies_loops_and_understands_every_way_to_write_groups():
    program = hlo.read(TEXT)
    inner, summed, started, combined, scattered = program.collectives()
    assert (inner.kind, inner.times, inner.bytes) == ("all-gather", 5, 256)
    assert inner.groups == ((0, 2), (1, 3), (4, 6), (5, 7)) and inner.loops == ("body",)
    assert (summed.bytes, summed.groups) == (32, ((0, 1), (2, 3)))
    assert (started.bytes, started.groups) == (128, (tuple(range(8)),))
    assert (combined.kind, combined.bytes, combined.group_size) == ("reduce-scatter", 144, 4)
    assert (scattered.bytes, scattered.group_size) == (2 * 4 * 8, 8)
    assert program.flops() == 5 * 2 * 4 * 8 * 8
    assert hlo.by_kind(program.collectives())["all-gather"] == {"count": 6, "bytes": 5 * 256 + 128}


def test_groups_over_some_axes_of_a_mesh():
    groups = hlo.replica_groups("replica_groups=mesh['a'=2,'b'=3,'c'=2] {'b'}, dimensions={0}")
    assert groups == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))


TPU_TEXT = """HloModule jit_f, num_partitions=4

%count (p: (s32[], f32[4,8])) -> pred[] {
  %most = s32[]{:T(128)} constant(6), metadata={op_name="x"}
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %most), direction=LT
}

%begin (x: bf16[4,8]) -> bf16[16,8] {
  ROOT %g = bf16[16,8] all-gather(%x), channel_id=3, async_collective_fusion_config={}
}

%end (x: bf16[4,8]) -> bf16[16,8] {
  ROOT %g = bf16[16,8] all-gather(%x), channel_id=3, async_collective_fusion_config={}
}

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %x = bf16[5,32,16]{2,1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %w = bf16[16,5,7]{1,0} parameter(1)
  %start = bf16[16,8]{1,0} fusion(%x), kind=kCustom, calls=%begin
  %done = bf16[16,8]{1,0} fusion(%start), kind=kCustom, calls=%end
  %y = f32[5,32,7] convolution(%x,%w),dim_labels=0bf_i0o->0bf, window={size=5 stride=4 lhs_dilate=5}
  %z = f32[32,3]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
  %a = bf16[32,16]{1,0} parameter(2)
  %b = bf16[16,3]{1,0} parameter(3)
}

ENTRY %main (x: f32[4,8]) -> f32[] {
  %loop = (s32[], f32[4,8]) while(%x), condition=%count, body=%body
}
"""


def test_the_reader_understands_what_the_tpu_compiler_makes_of_loops_products_and_exchanges():
    """A batch of 5 products [32, 16] x [16, 7] is one convolution over a dilated axis there."""
    program = hlo.read(TPU_TEXT)
    (gather,) = program.collectives()
    assert (gather.times, gather.bytes) == (6, 16 * 8 * 2)
    assert program.flops() == 6 * 2 * (5 * 32 * 16 * 7 + 32 * 16 * 3)
