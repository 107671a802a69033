"""Draws the loss curve of a run as an SVG picture: python docs/plot_loss.py RUN_DIR OUT.svg"""

import json
import math
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 320, 56, 16, 16, 44


def draw(rows: list[dict], title: str) -> str:
    """One line for the training loss, dots for evaluations."""
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    held = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    last = train[-1][0]
    low = math.floor(min(y for _, y in train + held))
    high = math.ceil(max(y for _, y in train + held))

    def place(step: float, loss: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        y = TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#57606a">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for loss in range(low, high + 1):
        x1, y = place(0, loss).split(",")
        x2, _ = place(last, loss).split(",")
        parts.append(f'<line x1="{x1}" y1="{y}" x2="{x2}" y2="{y}" stroke="#d8dee4"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{float(y) + 4}" text-anchor="end">{loss}</text>')
    for step in range(0, last + 1, max(1, last // 6)):
        x, y = place(step, low).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 18}" text-anchor="middle">{step}</text>')
    line = " ".join(place(*point) for point in train)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#0969da" stroke-width="2"/>')
    for point in held:
        x, y = place(*point).split(",")
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="#bc4c00"/>')
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{title}: loss by step; '
        "line: training, dots: held-out files</text></svg>"
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    out.write_text(draw(logged, f"localtrain train {run.name}"))
