"""Three charts of a lane as SVG: acceptance by position, time by step, tokens a step over the text."""

from hf_specdec.tools.demo.draw.markup import escaped
from hf_specdec.tools.demo.record import PLAIN, Lane, Race

WIDTH, HEIGHT = 380, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 14, 34
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
PARTS = (("draft", "draft_seconds"), ("verify", "verify_seconds"), ("commit", "commit_seconds"))


def draw_charts(race: Race) -> str:
    """The charts of every method that drafted."""
    lanes = [lane for lane in race.lanes if lane.steps]
    if not lanes:
        return '<div class="hs"><p class="hs-word">Nothing was drafted, so there is nothing to chart.</p></div>'
    plain = race.plain
    of_plain = plain.seconds / len(plain.tokens) if plain.tokens else 0.0
    rows = [
        f'<h3>{escaped(lane.label)}</h3><div class="hs-charts">'
        f"{_acceptance(lane)}{_times(lane, of_plain)}{_gains(lane)}</div>"
        for lane in lanes
        if lane.method != PLAIN
    ]
    return f'<div class="hs">{"".join(rows)}</div>'


def _acceptance(lane: Lane) -> str:
    """Share of the steps that accepted a token at a depth, of those that drafted so deep."""
    counts = lane.accepted_by_position()
    shares = [accepted / drafted for drafted, accepted in counts]
    slot, every = PLOT_WIDTH / max(1, len(shares)), 1 + len(shares) // 12
    bars = []
    for place, (share, (drafted, accepted)) in enumerate(zip(shares, counts, strict=True)):
        x, height = LEFT + place * slot, share * PLOT_HEIGHT
        bars.append(
            f'<g><title>position {place + 1}: {accepted} of {drafted} steps</title><rect class="hs-bar-drafted" '
            f'x="{x + slot * 0.15:.1f}" y="{TOP}" width="{slot * 0.7:.1f}" height="{PLOT_HEIGHT}"/>'
            f'<rect class="hs-bar-accepted" x="{x + slot * 0.15:.1f}" y="{TOP + PLOT_HEIGHT - height:.1f}" '
            f'width="{slot * 0.7:.1f}" height="{height:.1f}"/></g>'
            f"{_tick(x + slot / 2, str(place + 1)) if place % every == 0 else ''}"
        )
    said = ", ".join([f"{share:.0%}" for share in shares[:6]]) or "nothing drafted"
    more = ", \u2026" if len(shares) > 6 else ""
    return _chart(
        "Acceptance by position", "place in the draft", f"accepted: {said}{more}", "".join(bars), 1.0, "{:.0%}"
    )


def _times(lane: Lane, of_plain: float) -> str:
    """Milliseconds of each step, stacked by part; a line shows plain's milliseconds a token."""
    most = max([*[step.seconds for step in lane.steps], of_plain]) * 1e3 or 1.0
    slot = PLOT_WIDTH / len(lane.steps)
    bars = []
    for place, step in enumerate(lane.steps):
        base = 0.0
        for name, field in PARTS:
            height = getattr(step, field) * 1e3 / most * PLOT_HEIGHT
            x, y, width = LEFT + place * slot, TOP + PLOT_HEIGHT - base - height, max(slot * 0.86, 0.6)
            size = f'width="{width:.1f}" height="{height:.1f}"'
            bars.append(f'<rect class="hs-part-{name}" x="{x:.1f}" y="{y:.1f}" {size}/>')
            base += height
    line = TOP + PLOT_HEIGHT * (1 - of_plain * 1e3 / most)
    bars.append(f'<path class="hs-yardstick" d="M{LEFT} {line:.1f}H{LEFT + PLOT_WIDTH}"/>')
    where = f'x="{LEFT + PLOT_WIDTH}" y="{line - 4:.1f}" text-anchor="end"'
    bars.append(f'<text class="hs-tick hs-over" {where}>plain, a token</text>')
    mean = sum([step.seconds for step in lane.steps]) / len(lane.steps) * 1e3
    said = f"mean {mean:.1f} ms a step, plain {of_plain * 1e3:.1f} ms a token"
    return _chart("Time of each step", "step (draft, verify, commit)", said, "".join(bars), most, "{:.0f} ms")


def _gains(lane: Lane) -> str:
    """Tokens that each step added, by where in the text."""
    gains = [len(step.tokens) for step in lane.steps]
    most, total = max(gains), lane.steps[-1].num_before + gains[-1]
    stairs = f"M{LEFT + lane.steps[0].num_before / total * PLOT_WIDTH:.1f} {TOP + PLOT_HEIGHT}"
    for step, gain in zip(lane.steps, gains, strict=True):
        end = LEFT + (step.num_before + gain) / total * PLOT_WIDTH
        stairs += f"V{TOP + PLOT_HEIGHT * (1 - gain / most):.1f}H{end:.1f}"
    path = f'<path class="hs-gain" d="{stairs}"/>'
    ticks = "".join([_tick(LEFT + share * PLOT_WIDTH, f"{share * total:.0f}") for share in (0.0, 0.5, 1.0)])
    said = f"mean {sum(gains) / len(gains):.2f}, most {most}"
    return _chart("Tokens a step over the text", "new tokens so far", said, path + ticks, float(most), "{:.0f}")


def _tick(x: float, text: str) -> str:
    return f'<text class="hs-tick" x="{x:.1f}" y="{HEIGHT - 20}" text-anchor="middle">{text}</text>'


def _chart(title: str, axis: str, said: str, inside: str, most: float, form: str) -> str:
    grid = "".join(
        [
            f'<path class="hs-grid" d="M{LEFT} {y:.1f}H{LEFT + PLOT_WIDTH}"/>'
            f'<text class="hs-tick" x="{LEFT - 5}" y="{y + 3:.1f}" text-anchor="end">{form.format(level)}</text>'
            for level in (0.0, most / 2, most)
            for y in [TOP + PLOT_HEIGHT * (1 - level / most)]
        ]
    )
    return (
        f"<figure><figcaption><strong>{title}</strong><small>{said}</small></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}: {said}">{grid}{inside}'
        f'<text class="hs-axis" x="{LEFT + PLOT_WIDTH / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{axis}</text>'
        "</svg></figure>"
    )
