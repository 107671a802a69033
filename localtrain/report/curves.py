"""Curves as inline SVG, without a library: axes with round numbers, and no spike is ever dropped.

Many points share one pixel column, so each column keeps its first, lowest, highest and last point:
the picture is that of all points, the file stays small. Values that are not finite break the line
and are marked at the top edge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from localtrain.progress import quantity

Points = Sequence[tuple[float, float | None]]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 230, 52, 12, 10, 26
FRAME = {  # the rectangle of the curves, in the units of the picture
    "left": LEFT,
    "bottom": HEIGHT - BOTTOM,
    "width": WIDTH - LEFT - RIGHT,
    "height": HEIGHT - BOTTOM - TOP,
}
COLUMNS = (WIDTH - LEFT - RIGHT) * 2  # half a unit is about a pixel at full width


@dataclass(frozen=True)
class Curve:
    """One line of a chart. kind: a class of the style sheet (raw, smooth, held)."""

    name: str
    points: Points
    kind: str = "smooth"


def chart(
    title: str, curves: Sequence[Curve], marks: Sequence[int] = (), reach: float | None = None
) -> str:
    """One <svg> of curves over steps; '' without a value.

    marks: steps with a dashed line. reach: the vertical axis goes from 0 to this value or beyond
    (None: from the lowest to the highest value, logarithmic when they are far apart).
    """
    values = [y for curve in curves for _, y in curve.points if y is not None]
    steps = [x for curve in curves for x, _ in curve.points]
    if not values:
        return ""
    across = _Axis(min(steps), max(steps), LEFT, WIDTH - RIGHT, exact=True)
    log = reach is None and _wide(values)
    if reach is not None:
        values += [0.0, reach]
    down = _Axis(min(values), max(values), HEIGHT - BOTTOM, TOP, log=log)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'data-x="{across.low:.17g} {across.high:.17g}" '
        f'data-y="{down.low:.17g} {down.high:.17g}" data-log="{int(down.log)}">'
    ]
    for tick in down.ticks(6):
        y = down.place(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" class="y">{label(tick)}</text>')
    parts.append(f'<text x="{LEFT - 6}" y="{HEIGHT - 8}" class="y">step</text>')
    for tick in across.ticks(6):
        x = across.place(tick)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" class="x">{label(tick)}</text>')
    for step in marks:
        if across.low <= step <= across.high:
            x = across.place(step)
            where = f"<title>resumed at step {step}</title>"
            parts.append(f'<path class="mark" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}">{where}</path>')
    for curve in curves:
        parts += _lines(curve, across, down)
    return "".join([*parts, "</svg>"])


def smooth(points: Points) -> tuple[list[tuple[float, float | None]], int]:
    """(a running mean with exponential weights, over how many rows about); it has no start-up bias:
    the weights of what was seen sum to one (Adam, 1412.6980)."""
    span = max(1, len(points) // 30)
    keep, mean, weight = 1 - 1 / span, 0.0, 0.0
    found: list[tuple[float, float | None]] = []
    for x, y in points:
        if y is not None:
            mean, weight = keep * mean + (1 - keep) * y, keep * weight + (1 - keep)
        found.append((x, None if y is None else mean / weight))
    return found, span


def label(value: float) -> str:
    """A number on an axis: 0.003, 2.5, 40k."""
    if abs(value) >= 10000:
        return quantity(value).replace(".0", "") if abs(value) < 1e18 else f"{value:.0e}"
    return f"{value:.3g}" if 1e-4 <= abs(value) < 1000 or value == 0 else f"{value:g}"


def decimate(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of placed points, sorted by x, the first, lowest, highest and last of every column."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int((point[0] - LEFT) * COLUMNS / (WIDTH - LEFT - RIGHT)), []).append(
            point
        )
    kept = []
    for column in columns.values():
        heights = [y for _, y in column]
        few = {0, heights.index(min(heights)), heights.index(max(heights)), len(column) - 1}
        kept += [column[i] for i in sorted(few)]
    return kept


@dataclass
class _Axis:
    """Values onto a side of the picture."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    exact: bool = False  # no margin

    def __post_init__(self) -> None:
        if self.low == self.high:
            pad = abs(self.low) / 2 or 1.0
            self.high += pad
            self.low -= 0 if self.log or self.exact else pad
        elif not self.exact and not self.log:
            pad = (self.high - self.low) / 20
            self.high += pad
            self.low -= 0 if 0 <= self.low <= pad else pad  # zero stays the edge

    def place(self, value: float) -> float:
        low, high = self._scale(self.low), self._scale(self.high)
        return self.start + (self.end - self.start) * (self._scale(value) - low) / (high - low)

    def _scale(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def ticks(self, most: int) -> list[float]:
        """Round numbers inside."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = max(1, math.ceil((last - first) / most))
            steps = (1, 2, 5) if last - first <= 2 else (1,)
            found = [m * 10.0**e for e in range(first, last + 1, every) for m in steps]
            return [tick for tick in found if self.low <= tick <= self.high]
        size = 10.0 ** math.floor(math.log10((self.high - self.low) / most))
        size *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (m * size) <= most)
        if self.exact:
            size = max(1.0, size)  # steps are whole
        first, last = math.ceil(self.low / size), math.floor(self.high / size)
        return [n * size for n in range(first, last + 1)]


def _wide(values: Sequence[float]) -> bool:
    """Whether only a logarithmic scale shows both the small and the large ones."""
    return min(values) > 0 and max(values) / min(values) > 100


def _lines(curve: Curve, across: _Axis, down: _Axis) -> list[str]:
    """The line in pieces between values that are not finite, and the marks of those."""
    pieces: list[list[tuple[float, float]]] = [[]]
    lost = []
    for step, value in curve.points:
        if value is None:
            lost.append(across.place(step))
            pieces.append([])
        else:
            pieces[-1].append((across.place(step), down.place(value)))
    d = "".join(_path(decimate(piece)) for piece in pieces if piece)
    parts = [f'<path class="{curve.kind}" data-name="{escape(curve.name)}" d="{d}"/>']
    if curve.kind == "held":
        parts += [
            f'<circle class="held" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
            for piece in pieces
            for x, y in (piece if len(piece) <= 60 else [])
        ]
    if lost:
        at = sorted({round(x, 1) for x in lost})
        marks = "".join(f"M{x:g} {TOP - 8}v8" for x in at)
        title = f"<title>{escape(curve.name)}: not finite</title>"
        parts.append(f'<path class="lost" d="{marks}">{title}</path>')
    return parts


def _path(points: Sequence[tuple[float, float]]) -> str:
    if len(points) == 1:  # a line of no length has round ends: a dot
        return f"M{points[0][0]:.1f} {points[0][1]:.1f}h0"
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
