"""Exchanges between devices that no training test on few devices takes."""

import json
import os
import subprocess
import sys

from localtrain.nn.parallel import _rows

SCRIPT = """
import json
import jax
from jax.sharding import AxisType, PartitionSpec as P
from functools import partial
from localtrain.nn.parallel import gather, in_pieces, scatter

mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
g = jax.random.normal(jax.random.key(0), (4, 8, 12))
differences = []
for dim, place in ((0, P("fsdp")), (1, P(None, "fsdp"))):
    for rows, by_rows in ((1, 0), (2, 0), (4, 0), (2, dim), (4, dim)):
        steps = [partial(exchange, dim, rows) for exchange in (scatter, gather)]
        down, up = [partial(in_pieces, step) if by_rows else step for step in steps]
        local = lambda g: (down(g[0]), up(down(g[0])))
        out = (place, P())
        run = jax.shard_map(local, mesh=mesh, in_specs=P("fsdp"), out_specs=out, check_vma=False)
        for sum_ in jax.jit(run)(g):
            differences.append(float(abs(sum_ - g.sum(0)).max()))
print(json.dumps(differences))
"""


def test_a_sum_scattered_and_gathered_in_two_steps_is_the_sum():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert len(differences) == 20 and max(differences) < 1e-6


def test_grids_of_slices_are_as_square_as_they_can_be():
    assert [_rows(n, 8) for n in (1, 2, 4, 8, 16, 32, 64, 256)] == [1, 1, 1, 2, 4, 4, 8, 16]
    assert _rows(13, 8) == 1 and _rows(32, 64) == 1
