"""The reader of compiled programs: memory traffic and kernels, against counts by hand.

Exchanges and FLOPs are in test_sharding.py. The texts are cut out of what the compilers print;
programs are compiled for a TPU where libtpu is installed.
"""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from localtrain import hlo
from localtrain.plan import cost

LOOP = """HloModule jit_f

%slice_of_layer (p0: f32[7,8,16], p1: s32[]) -> f32[8,16] {
  %p0 = f32[7,8,16]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %s = f32[1,8,16]{2,1,0} dynamic-slice(%p0, %p1), dynamic_slice_sizes={1,8,16}
  ROOT %b = f32[8,16]{1,0} bitcast(%s)
}

%store (p0: f32[7,4,16], p1: f32[4,16], p2: s32[]) -> f32[7,4,16] {
  %p0 = f32[7,4,16]{2,1,0} parameter(0)
  %p1 = f32[4,16]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %r = f32[1,4,16]{2,1,0} bitcast(%p1)
  ROOT %u = f32[7,4,16]{2,1,0} dynamic-update-slice(%p0, %r, %p2)
}

%body (p: (s32[], f32[4,8], f32[7,8,16], f32[7,4,16])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}, f32[7,8,16]{2,1,0}, f32[7,4,16]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %all = f32[7,8,16]{2,1,0} get-tuple-element(%p), index=2
  %kept = f32[7,4,16]{2,1,0} get-tuple-element(%p), index=3
  %w = f32[8,16]{1,0} fusion(%all, %i), kind=kLoop, calls=%slice_of_layer
  %y = f32[4,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %stored = f32[7,4,16]{2,1,0} fusion(%kept, %y, %i), kind=kLoop, calls=%store
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %x, %all, %stored)
}

ENTRY %main (x: f32[4,8]) -> f32[] {
  %x = f32[4,8]{1,0} parameter(0)
  %loop = (s32[], f32[4,8]) while(%x), body=%body, backend_config={"known_trip_count":{"n":"7"}}
}
"""


def test_a_loop_over_layers_reads_one_layer_each_time_and_updates_in_place():
    program = hlo.read(LOOP)
    slice_ = 8 * 16 * 4  # read from the stack, written
    product = (4 * 8 + 8 * 16 + 4 * 16) * 4
    store = 4 * 16 * 4  # y is read, its place in the stack written
    index = 4  # of s32, read by both fusions
    assert hlo.memory_bytes(program) == 7 * (2 * slice_ + product + 2 * store + 2 * index)
    assert program.flops() == 7 * 2 * 4 * 8 * 16


def test_a_loop_of_unknown_length_counts_once_and_is_told():
    known, unknown = hlo.read(LOOP), hlo.read(LOOP.replace('"known_trip_count"', '"other"'))
    assert (known.unknown_loops(), unknown.unknown_loops()) == (0, 1)
    assert known.flops() == 7 * unknown.flops() > 0


STARTED = """HloModule jit_f, num_partitions=4

ENTRY %main (x: f32[8,4]) -> f32[32,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %g = (f32[8,4], f32[32,4], u32[], u32[]) all-gather-start(%x), replica_groups={{0,1,2,3}}
  %d = f32[32,4]{1,0} all-gather-done(%g)
}
"""


def test_of_a_gather_that_is_only_started_the_result_counts_and_its_input_once():
    program = hlo.read(STARTED)
    assert hlo.by_kind(program.collectives()) == {"all-gather": {"count": 1, "bytes": 32 * 4 * 4}}
    assert hlo.memory_bytes(program) == (8 * 4 + 32 * 4) * 4


TPU = """HloModule jit_f, num_partitions=2

ENTRY %main (x: f32[64,128]) -> f32[] {
  %x = f32[64,128]{1,0:T(8,128)} parameter(0)
  %s = (f32[64,128]{1,0:T(8,128)S(1)}, f32[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %c = f32[64,128]{1,0:T(8,128)S(1)} copy-done(%s)
  %y = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} convert(%c)
  %new = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} custom-call(), custom_call_target="AllocateBuffer"
  %splash_mha_fwd.5 = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} custom-call(%y, %new), PALLAS
  ROOT %r = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} negate(%splash_mha_fwd.5)
}
"""


def test_what_a_tpu_keeps_on_the_chip_is_no_memory_traffic():
    program = hlo.read(TPU.replace("PALLAS", 'custom_call_target="tpu_custom_call"'))
    buffer = 4 * 64 * 128 * 2
    # x is fetched; the kernel reads the buffer and writes its result, which is read and negated
    assert hlo.memory_bytes(program) == 64 * 128 * 4 + 2 * buffer + 2 * buffer
    assert hlo.kernels(program) == {"splash_mha_fwd": 1}


TILED = """HloModule jit_f

%other_tiles (a: bf16[9,64,128]) -> bf16[9,64,128] {
  %a = bf16[9,64,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  ROOT %c = bf16[9,64,128]{2,1,0:T(8,128)(2,1)} copy(%a)
}

%square_of_layer (p0: bf16[9,64,128], p1: s32[]) -> f32[64,128] {
  %p0 = bf16[9,64,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  %p1 = s32[] parameter(1)
  %t = bf16[9,64,128]{2,1,0:T(8,128)(2,1)} fusion(%p0), kind=kLoop, calls=%other_tiles
  %s = bf16[1,64,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%t, %p1), dynamic_slice_sizes={1,64,128}
  %b = bf16[64,128]{1,0:T(8,128)(2,1)} bitcast(%s)
  ROOT %m = f32[64,128]{1,0:T(8,128)} multiply(%b, %b)
}

ENTRY %main (x: bf16[9,64,128], i: s32[]) -> f32[64,128] {
  %x = bf16[9,64,128]{2,1,0:T(16,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  %s = ((bf16[9,64,128]), bf16[2,64,128]{2,1,0:T(16,128)S(1)}, s32[]) slice-start(%x), slice={}
  %d = bf16[2,64,128]{2,1,0:T(16,128)S(1)} slice-done(%s)
  ROOT %f = f32[64,128]{1,0:T(8,128)} fusion(%x, %i), kind=kLoop, calls=%square_of_layer
}
"""


def test_of_a_stack_that_a_tpu_tiles_anew_or_fetches_in_part_only_the_part_is_read():
    layer = 64 * 128 * 2
    # two layers fetched onto the chip; one read, its square written in float32
    assert hlo.memory_bytes(hlo.read(TILED)) == 2 * layer + layer + 2 * layer


GPU = """HloModule jit_f

ENTRY %main (x: bf16[2,256,4,64]) -> f32[] {
  %q = bf16[2,256,4,64]{3,2,1,0} parameter(0)
  %f = (bf16[2,4,256,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), CUDNN"
  %o = bf16[2,4,256,64]{3,1,2,0} get-tuple-element(%f), index=0
  %b = (bf16[2,4,256,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q, %o), CUDNNBackward"
}
"""


def test_attention_kernels_are_named_and_their_hidden_products_counted():
    program = hlo.read(GPU.replace("CUDNN", 'custom_call_target="__cudnn$fmhaSoftmax'))
    assert hlo.kernels(program) == {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 1}
    product = 2 * 2 * 4 * (256 * 256 // 2) * 64  # rows, heads, pairs of a causal row, head_dim
    assert cost.kernel_flops(program, 256 / 2) == 2 * product + 5 * product


def test_the_mask_of_packed_documents_is_not_taken_for_the_queries():
    mask = (
        "  %m = bf16[2,1,4096,4096]{3,2,1,0} parameter(1)\n  %i = s32[9,9,9]{2,1,0} parameter(2)\n"
    )
    text = GPU.replace("256", "4096").replace("  %f =", mask + "  %f =")
    text = text.replace("(%q, %q, %q)", "(%i, %q, %q, %q, %m)")
    text = text.replace("(%q, %q, %q, %o)", "(%q, %q, %q, %m, %o)")
    text = text.replace("CUDNN", 'custom_call_target="__cudnn$fmhaScaleBiasSoftmax')
    queries = 2 * 4 * 4096 * 64
    assert cost.kernel_flops(hlo.read(text), 4096 / 2) == (2 + 5) * 2 * queries * 4096 / 2


def test_on_gpus_scratch_is_no_traffic_and_the_memory_of_collectives_is_memory():
    text = """HloModule jit_f

ENTRY %main (x: bf16[64,32]) -> bf16[64,16] {
  %x = bf16[64,32]{1,0:S(1)} parameter(0)
  %w = bf16[32,16]{1,0} parameter(1)
  ROOT %y = (bf16[64,16]{1,0}, s8[4194304]{0}) custom-call(%x, %w), TARGET, DIMS
}
"""
    text = text.replace("TARGET", 'custom_call_target="__cublas$gemm"')
    dims = 'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
    program = hlo.read(text.replace("DIMS", dims))
    assert hlo.memory_bytes(program) == 2 * (64 * 32 + 32 * 16 + 64 * 16)
    assert program.flops() == 2 * 64 * 32 * 16


def test_the_traffic_of_a_compiled_loop_is_one_layer_a_turn():
    """XLA may fuse as it likes: at least each layer's matrix once, far less than all of them."""
    layers, dim = 16, 128

    def f(x, w):
        return jax.lax.scan(lambda c, layer: (jnp.tanh(c @ layer), None), x, w)[0]

    shapes = jnp.zeros((8, dim)), jnp.zeros((layers, dim, dim))
    program = hlo.read(jax.jit(f).lower(*shapes).compile().as_text())
    matrix = dim * dim * 4
    assert program.flops() == layers * 2 * 8 * dim * dim
    assert layers * matrix <= hlo.memory_bytes(program) <= 3.5 * layers * matrix


SLICES = """HloModule jit_f, num_partitions=4

ENTRY %main (x: f32[32,8,128]) -> f32[32,8,128] {
  %x = f32[32,8,128]{2,1,0:T(8,128)} parameter(0)
  %t = token[] after-all()
  %g = f32[128,8,128]{2,1,0:T(8,128)} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %send = (f32[32,8,128]{2,1,0:T(8,128)}, u32[], token[]) send(%x, %t), channel_id=3, MEGASCALE
  %recv = (f32[32,8,128]{2,1,0:T(8,128)}, u32[], token[]) recv(%t), channel_id=2, MEGASCALE
  %send-done = token[] send-done(%send), channel_id=3, MEGASCALE
}
"""


def test_an_exchange_between_slices_is_a_send_through_the_host():
    written = 'frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}'
    program = hlo.read(SLICES.replace("MEGASCALE", written))
    size = 32 * 8 * 128 * 4
    assert hlo.by_kind(program.collectives()) == {
        "all-gather": {"count": 1, "bytes": 4 * size},
        "all-reduce between slices": {"count": 1, "bytes": size},
    }
    # a ring: each of n sends (n-1)/n of the whole, for a sum twice that
    assert cost.wire_bytes(program.collectives(), slices=2) == (4 * size * 3 / 4, 2 * size / 2)
    assert cost.wire_bytes(program.collectives(), slices=4)[1] == 2 * size * 3 / 4


FUSED = """HloModule jit_f, num_partitions=4

%all-reduce-scatter.clone.1 (g: f32[512,128]) -> f32[264,128] {
  %g = f32[512,128]{1,0:T(8,128)} parameter(0)
  %zero = f32[] constant(0)
  %pad.2 = f32[528,128]{1,0:T(8,128)} pad(%g, %zero), padding=0_16x0_0
  %all-reduce.3 = f32[528,128]{1,0:T(8,128)} all-reduce(%pad.2), replica_groups={{0,2},{1,3}}
  %start = u32[] constant(264)
  ROOT %part = f32[264,128]{1,0:T(8,128)} dynamic-slice(%all-reduce.3, %start, %start)
}

%offloaded (p: f32[264,128]) -> f32[1056,128] {
  %p = f32[264,128]{1,0:T(8,128)} parameter(0)
  ROOT %w = f32[1056,128]{1,0:T(8,128)} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}

%body (p: (s32[], f32[512,128])) -> (s32[], f32[512,128]) {
  %p = (s32[], f32[512,128]{1,0:T(8,128)}) parameter(0)
  %g = f32[512,128]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %f = f32[264,128]{1,0:T(8,128)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.clone.1
  %prepare = s32[]{:S(2)} custom-call(), PREPARE"
  %go = ((f32[264,128], token[]), f32[1056,128]) call-start(%f, %prepare), to_apply=%offloaded
  %done = f32[1056,128]{1,0:T(8,128)} call-done(%go)
  ROOT %t = (s32[], f32[512,128]) tuple(%p, %g)
}

ENTRY %main (x: f32[512,128]) -> f32[] {
  %x = f32[512,128]{1,0:T(8,128)} parameter(0)
  %loop = (s32[], f32[512,128]) while(%x), body=%body, LOOP={"known_trip_count":{"n":"3"}}
}
"""


def test_scatters_that_a_tpu_fuses_and_gathers_that_its_other_cores_do_are_what_they_are():
    text = FUSED.replace("LOOP", "backend_config")
    program = hlo.read(text.replace("PREPARE", 'custom_call_target="PrepareAsyncCallStart'))
    padded, part, whole = (rows * 128 * 4 for rows in (528, 264, 1056))
    assert hlo.by_kind(program.collectives()) == {
        "reduce-scatter": {"count": 3, "bytes": 3 * padded},
        "all-gather": {"count": 3, "bytes": 3 * whole},
    }
    sent = 3 * (padded / 2 + whole * 3 / 4)  # a sum would be twice the first
    assert cost.wire_bytes(program.collectives(), slices=1) == (sent, 0)
    # the gradient read, its part written; the part read, the whole written: each once a turn
    assert hlo.memory_bytes(program) == 3 * (512 * 128 * 4 + part + part + whole)
    assert hlo.kernels(program) == {}


ON_TPU = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from localtrain import backend, hlo
backend.set_jax(jax_platforms="cpu")
devices = backend.find("tpu-vm").topology("v5e:2x2")
mesh = jax.make_mesh((4,), ("x",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
def f(x, w):
    def layer(c, part):
        whole = jax.lax.all_gather(part, "x", axis=0, tiled=True)
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ whole), None), c, None, length=3)[0], None
    return jax.lax.scan(layer, x, w)[0]
g = jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P(None, "x")), out_specs=P("x"), check_vma=False)
def shape(*dims, spec):
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
x, w = shape(1024, 512, spec=P("x")), shape(7, 512, 512, spec=P(None, "x"))
program = hlo.read(jax.jit(g).lower(x, w).compile().as_text())
print(json.dumps([program.flops(), hlo.by_kind(program.collectives()), hlo.memory_bytes(program)]))
"""


@pytest.mark.tpu
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs localtrain[tpu]")
def test_nested_loops_of_a_tpu_program_are_counted_as_by_hand():
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    line = [sys.executable, "-c", ON_TPU]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    flops, exchanged, traffic = json.loads(done.stdout.splitlines()[-1])
    assert flops == 7 * 3 * 2 * 256 * 512 * 512
    assert exchanged == {"all-gather": {"count": 7, "bytes": 7 * 512 * 512 * 2}}
    part = 7 * 128 * 512 * 2  # the layers' parts have to be read at least
    assert part <= traffic <= 60 * part
