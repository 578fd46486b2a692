"""The race as HTML: a lane for each way to generate, whose tokens carry the time at which they appear.

While a race runs, its lanes show the text so far. At its end everything is there, and the page's script plays it.
"""

from hf_specdec.errors import counted
from hf_specdec.tools.bench.rows import PLAIN, TRANSFORMERS
from hf_specdec.tools.demo.draw.markup import draw_legend, escaped, source_class
from hf_specdec.tools.demo.record import Lane, Race

PROMPT_CHARS = 160  # of the prompt's end that each lane shows
SHORTEST_REPLAY = 6.0  # seconds; quicker races are slowed down
SLOWER = (1, 2, 5, 10, 20, 50)
WHAT_SPEED_DEPENDS_ON = (
    "What the speed depends on: the text (drafts are right where it repeats itself or is easy to foresee), the "
    "temperature, and what a forward of several tokens costs next to a forward of one. On a GPU, or with billions of "
    "parameters, the two cost nearly the same. The times are of one run each: other work on the machine shows in them."
)
NO_COUNTERS = {"tokens/s": "\u2013", "tokens a step": "\u2013", "forwards saved": "\u2013"}


def draw_running(race: Race) -> str:
    """The lanes of a race that still runs: those that ended, the text so far of the next, and those that wait."""
    sections = []
    for number, label in enumerate(race.labels):
        lane, recorder = race.lane(label), race.recorder
        if lane is not None:
            sections.append(_lane(race, lane))
        elif number == len(race.lanes) and recorder is not None:
            count, seconds = len(recorder.token_ids), recorder.times[-1] if recorder.times else 0.0
            counters = NO_COUNTERS | {"tokens/s": f"{count / seconds:.1f}" if seconds else "\u2013"}
            text = race.words.decode(recorder.token_ids)
            sections.append(_section(race, label, "", counters, escaped(text), f"{counted(count, 'token')} so far."))
        else:
            sections.append(_section(race, label, "", NO_COUNTERS, "", "Waits for its turn."))
    return f'<div class="hs hs-race hs-running"><div class="hs-lanes">{"".join(sections)}</div></div>'


def draw_race(race: Race) -> str:
    """All lanes side by side, transformers' first."""
    longest = max(lane.seconds for lane in race.lanes)
    slower = next((factor for factor in SLOWER if longest * factor >= SHORTEST_REPLAY), SLOWER[-1])
    pace = "the measured pace" if slower == 1 else f"the measured pace, slowed down {slower} times, all lanes alike"
    sources = {token.source for lane in race.lanes for token in lane.tokens}
    lanes = "".join([_lane(race, lane) for lane in race.lanes])
    return f"""<div class="hs hs-race" data-slower="{slower}" data-seconds="{longest:.4f}">
<div class="hs-replay"><button type="button" class="hs-play">Replay</button>
<button type="button" class="hs-skip">Show all</button>
<output class="hs-clock">{longest:.2f} s</output><span>Each lane ran alone; shown at {pace}.</span></div>
<div class="hs-lanes">{lanes}</div>
{draw_legend(sources)}
<p class="hs-word">{WHAT_SPEED_DEPENDS_ON}</p>
</div>"""


def _lane(race: Race, lane: Lane) -> str:
    """A lane that ended."""
    tokens = [
        f'<span class="hs-t {source_class(token.source)}" data-t="{token.seconds:.4f}" data-s="{token.step}">'
        f"{escaped(token.text)}</span>"
        for token in lane.tokens
    ]
    ratio = race.ratio(lane)
    badge = (
        "" if lane.label == TRANSFORMERS or ratio is None else f'<strong class="hs-ratio">{ratio:.2f}\u00d7</strong>'
    )
    counters = {
        "tokens/s": f"{lane.tokens_per_second:.1f}",
        "tokens a step": f"{lane.tokens_per_step:.2f}",
        "forwards saved": str(len(lane.tokens) - 1 - lane.num_steps),
    }
    return _section(race, lane.label, badge, counters, "".join(tokens), _verdict(race, lane))


def _section(race: Race, label: str, badge: str, counters: dict[str, str], text: str, verdict: str) -> str:
    name, prompt = escaped(label), race.prompt
    if len(prompt) > PROMPT_CHARS:
        prompt = "\u2026 " + prompt[-PROMPT_CHARS:].partition(" ")[2]
    question = escaped(prompt)
    if race.is_chat:
        question = f'<span class="hs-question">{question}</span>'
    else:
        question = f'<span class="hs-prompt">{question}</span>'
    figures = "".join([f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in counters.items()])
    return f"""<section class="hs-lane" aria-label="{name}">
<h3>{name} {badge}</h3>
<dl class="hs-counters">{figures}</dl>
<div class="hs-bar" aria-hidden="true"><i></i></div>
<pre class="hs-text" tabindex="0" aria-label="Text of {name}">{question}{text}</pre>
<p class="hs-verdict">{verdict}</p>
</section>"""


def _verdict(race: Race, lane: Lane) -> str:
    """Equal or not, and what the speed is made of."""
    words = [escaped(lane.note)] if lane.note else []
    if lane.label == PLAIN:
        words.append("One forward a token, by the kernels of this package: its text is the one to compare with.")
    elif lane.label == TRANSFORMERS:
        words.append(f"The baseline of all speeds: {counted(len(lane.tokens), 'token')} in {lane.seconds:.2f} s.")
    if lane.is_stopped:
        words.append("Stopped.")
    words.append(_equality(race, lane))
    baseline = race.lane(TRANSFORMERS)
    if baseline is not None and race.ratio(lane) is not None and baseline.seconds_per_step and lane is not baseline:
        cost = lane.seconds_per_step / baseline.seconds_per_step
        words.append(f"A step takes {cost:.2f} times as long as one of transformers.")
    return " ".join(filter(None, words))


def _equality(race: Race, lane: Lane) -> str:
    plain, num_equal = race.lane(PLAIN), race.num_equal(lane)
    if plain is None or num_equal is None or lane is plain:
        return ""
    if num_equal < min(len(lane.tokens), len(plain.tokens)):
        if lane.label == TRANSFORMERS:
            return f"Its kernels round differently: other words from token {num_equal + 1} on."
        return f'<span class="hs-other">\u2717 Differs from plain from token {num_equal + 1} on.</span>'
    if lane.is_stopped or plain.is_stopped:
        return f'<span class="hs-same">\u2713 Equal to plain as far as both went: {counted(num_equal, "token")}.</span>'
    return f'<span class="hs-same">\u2713 Equal to plain: the same {counted(num_equal, "token")}.</span>'
