"""Where the time of a train step goes on the CPU: one step under jax's profiler.

    python benchmarks/profile_step.py [--shape small|qwen3-0.6b] [--json]

The profiler says when each thread ran which instruction of the compiled program. Every moment goes
to what runs then: to a matrix product where there is one, else in equal shares to what the threads
do. The products of weight gradients run on threads that the profiler does not see; they are the
gaps after such an instruction was handed over, and count as products. Real programs differ from
jax to jax: what no rule below knows is "other".
"""

from __future__ import annotations

import argparse
import collections
import glob
import json
import re
import sys
import tempfile

import train_step

PRODUCTS = ("products of the head", "products of the layers", "products of attention")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=train_step.SHAPES, default="small")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    program, events = trace(options.shape)
    vocab = train_step.config_of(options.shape)["vocab_size"]
    spent = shares(events, Program(program, vocab))
    if options.json:
        print(json.dumps(spent, indent=2))
        return
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"{1000 * seconds:9.0f} ms  {name}")
    print(f"{1000 * sum(spent.values()):9.0f} ms  the step")


def trace(shape: str) -> tuple[str, list[tuple[int, int, str]]]:
    """(text of the compiled step, (start, end, instruction) in ns of its third run)."""
    import jax

    step, program = train_step.prepare(shape)
    step()
    step()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = jax.profiler.ProfileData.from_file(path).planes
        lines = [line for plane in planes for line in plane.lines]
        events = [
            (int(event.start_ns), int(event.start_ns + event.duration_ns), event.name)
            for line in lines
            if line.name.startswith("tf_XLA")
            for event in line.events
        ]
    return program, events


class Program:
    """Instructions of a compiled program, and what part of a step each belongs to."""

    def __init__(self, text: str, vocab: int):
        self.vocab, self.known = str(vocab), {}
        products, self.lines = set(), {}
        computation = ""
        for line in text.splitlines():
            if start := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
                computation = start[1]
            elif one := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)$", line):
                self.lines[one[1]] = one[2]
                if " dot(" in one[2]:
                    products.add(computation)
        self.products = products

    def part(self, name: str) -> str | None:
        """None for what only holds other instructions."""
        if name not in self.known:
            self.known[name] = self._part(name)
        return self.known[name]

    def _part(self, name: str) -> str | None:
        line = self.lines.get(name)
        if line is None or name.startswith(("while", "cond", "call")):
            return None
        found = re.search(r'op_name="([^"]*)"', line)
        origin = found[1] if found else ""
        calls = re.search(r"calls=%?([\w.-]+)", line)
        product = " dot(" in line or (calls and calls[1] in self.products)
        head = self.vocab in line.partition("metadata")[0] or "cv" in origin  # a chunk's logits
        attention = not origin or origin.endswith("/cond") or "branch_0_fun/while" in origin
        if product:
            return PRODUCTS[0 if head else 2 if attention else 1]
        if "jit(_where)/select_n" in origin and "branch_" not in origin:
            return "AdamW"
        if head:
            return "softmax and sums of the head"
        if "dynamic_slice" in origin or name.startswith("dynamic-slice"):
            return "slices of stacked weights"
        if "dynamic_update" in origin or "dynamic-update" in name:
            return "writes to stacked arrays"
        if "broadcast" in name or name.startswith("copy"):
            return "zeros and copies"
        if attention or "branch_" in origin:
            return "attention but its products"
        if "reduce_" in origin:
            return "norms and other sums"
        return "elementwise" if "jvp" in origin else "other"


def shares(events: list[tuple[int, int, str]], program: Program) -> dict[str, float]:
    """Seconds of each part; together the time from the first instruction to the last."""
    known = [(*span, part) for *span, name in events if (part := program.part(name))]
    marks = sorted((at, sign, part) for a, b, part in known for at, sign in ((a, 1), (b, -1)))
    running: collections.Counter[str] = collections.Counter()
    spent: collections.Counter[str] = collections.Counter()
    before, latest = marks[0][0], ""
    for at, sign, part in marks:
        now = {name: count for name, count in running.items() if count}
        product = next((name for name in PRODUCTS if name in now), None)
        if product or not now:
            spent[product or (latest if latest in PRODUCTS else "nothing seen")] += at - before
        else:
            for name, count in now.items():
                spent[name] += (at - before) * count / sum(now.values())
        running[part] += sign
        if sign < 0:
            latest = part
        before = at
    return {name: ns / 1e9 for name, ns in spent.items()}


if __name__ == "__main__":
    sys.exit(main())
