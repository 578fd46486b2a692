"""The race as HTML: a lane for each method, whose tokens carry the time at which they appear.

Everything is shown at once; the page's script plays it by the times.
"""

from hf_specdec.errors import counted
from hf_specdec.tools.demo.draw.markup import escaped
from hf_specdec.tools.demo.draw.notices import draw_machine
from hf_specdec.tools.demo.draw.sources import draw_legend, source_class
from hf_specdec.tools.demo.record import PLAIN, Lane, Race

PROMPT_CHARS = 120  # of the prompt's end that each lane shows
SHORTEST_REPLAY = 6.0  # seconds; quicker races are slowed down
SLOWER = (1, 2, 5, 10, 20, 50)


def draw_race(race: Race) -> str:
    """All lanes side by side, plain generate's first."""
    longest = max(lane.seconds for lane in race.lanes)
    slower = next((factor for factor in SLOWER if longest * factor >= SHORTEST_REPLAY), SLOWER[-1])
    pace = "the measured pace" if slower == 1 else f"the measured pace, slowed down {slower} times, all lanes alike"
    sources = {token.source for lane in race.lanes for token in lane.tokens}
    lanes = "".join([_lane(race, lane) for lane in race.lanes])
    return f"""<div class="hs hs-race" data-slower="{slower}" data-seconds="{longest:.4f}">
<div class="hs-replay"><button type="button" class="hs-play">Replay</button>
<button type="button" class="hs-skip">Show all</button>
<output class="hs-clock">{longest:.2f} s</output><span>Each lane ran alone; shown at {pace}.</span></div>
{draw_legend(sources)}
<div class="hs-lanes">{lanes}</div>
<p class="hs-word">{_what_ratios_depend_on(race)}</p>
</div>"""


def _lane(race: Race, lane: Lane) -> str:
    before = race.prompt[-PROMPT_CHARS:]
    lead = "\u2026" if len(race.prompt) > PROMPT_CHARS else ""
    prompt = f'<span class="hs-prompt">{lead}{escaped(before)}</span>'
    tokens = "".join(
        [
            f'<span class="hs-t {source_class(token.source)}" data-t="{token.seconds:.4f}" data-s="{token.step + 2}">'
            f"{escaped(token.text)}</span>"
            for token in lane.tokens
        ]
    )
    ratio = race.ratio(lane)
    badge = (
        "" if lane.method == PLAIN or ratio is None else f'<strong class="hs-ratio">{ratio:.2f}\u00d7 plain</strong>'
    )
    label = escaped(lane.label)
    return f"""<section class="hs-lane" aria-label="{label}" data-method="{escaped(lane.method)}">
<h3>{label} {badge}</h3>
<dl class="hs-counters">
<div><dt>tokens/s</dt><dd class="hs-rate">{lane.tokens_per_second:.1f}</dd></div>
<div><dt>tokens a step</dt><dd class="hs-per-step">{lane.tokens_per_step:.2f}</dd></div>
<div><dt>forwards saved</dt><dd class="hs-saved">{len(lane.tokens) - lane.num_forwards}</dd></div>
</dl>
<div class="hs-bar" aria-hidden="true"><i></i></div>
<pre class="hs-text" tabindex="0" aria-label="Text of {label}">{prompt}{tokens}</pre>
<p class="hs-verdict">{_verdict(race, lane)}</p>
</section>"""


def _verdict(race: Race, lane: Lane) -> str:
    """Equal or not, and what the ratio is made of."""
    count = len(lane.tokens)
    if lane.method == PLAIN:
        ended = "Stopped after" if lane.is_stopped else "The baseline:"
        return f"{ended} {counted(count, 'token')}, one forward for each, {lane.seconds:.2f} s."
    words = [escaped(lane.note)] if lane.note else []
    words.append(_equality(race, lane))
    if race.ratio(lane) is not None and lane.num_forwards:
        plain = race.plain
        cost = (lane.seconds / lane.num_forwards) / (plain.seconds / plain.num_forwards)
        words.append(
            f"{lane.tokens_per_step:.2f} tokens a step, and a step takes {cost:.2f} times as long as plain's: "
            f"{lane.tokens_per_second / plain.tokens_per_second:.2f} times the speed."
        )
    return " ".join(words)


def _equality(race: Race, lane: Lane) -> str:
    compared = min(len(lane.tokens), len(race.plain.tokens))
    tokens = counted(compared, "token")
    if lane.num_equal == compared and (lane.is_stopped or race.plain.is_stopped):
        return f'<span class="hs-same">\u2713 Stopped. Equal to plain as far as both went: {tokens}.</span>'
    if lane.num_equal == compared and len(lane.tokens) == len(race.plain.tokens):
        return f'<span class="hs-same">\u2713 Equal to plain: the same {tokens}.</span>'
    rounding = (
        ""
        if race.is_exact
        else " In this precision a forward of several tokens rounds differently from a forward of one."
    )
    return (
        f'<span class="hs-other">\u2717 Differs from plain from token {(lane.num_equal or 0) + 1} on.{rounding}</span>'
    )


def _what_ratios_depend_on(race: Race) -> str:
    facts = race.model
    size = f"{facts['parameters'] / 1e6:.3g} million parameters" if "parameters" in facts else "this size"
    where = draw_machine(facts)
    return (
        "What the ratio depends on: the text (drafts are right where it repeats itself or is easy to foresee), the "
        "temperature, and what a forward of several tokens costs next to a forward of one. On a GPU, or with billions "
        f"of parameters, the two cost nearly the same; here it is a model of {size} on {where}. The times are of one "
        "run each: other work on the machine shows in them."
    )
