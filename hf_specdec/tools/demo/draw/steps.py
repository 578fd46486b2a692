"""One step of one lane as HTML: the text, the tree, and what the sources said."""

from collections.abc import Sequence

from hf_specdec.common.stats import SourceVote, SpecStep
from hf_specdec.errors import counted
from hf_specdec.tools.demo.draw.markup import escaped, one_line, source_class, source_of
from hf_specdec.tools.demo.draw.tree import draw_tree
from hf_specdec.tools.demo.record import Lane, Race, Words

TEXT_CHARS = 160
MAX_VOTED = 12  # nodes of the table


def draw_step(race: Race, lane: Lane, number: int) -> str:
    """Step `number` of the lane, from 0; a sentence where the lane has no steps."""
    if not lane.steps:
        return '<div class="hs"><p class="hs-word">Plain generate drafts nothing: one forward, one token.</p></div>'
    number = min(max(number, 0), len(lane.steps) - 1)
    step, words = lane.steps[number], race.words
    parts = [_headline(lane, number), _text(race, lane, number), draw_tree(step, words)]
    parts.append(f"<p>{_what_happened(step, words)}</p>")
    if any(node.votes for node in step.nodes):
        parts.append(_votes(step, words))
    return f'<div class="hs hs-step">{"".join(parts)}</div>'


def _headline(lane: Lane, number: int) -> str:
    step = lane.steps[number]
    parts = {"draft": step.draft_seconds, "verify": step.verify_seconds, "commit": step.commit_seconds}
    times = ", ".join([f"{name} {seconds * 1e3:.1f}" for name, seconds in parts.items()])
    window = step.tree.num_columns - len(step.tree)
    suffix = f" and {window} of the window" if window else ""
    return (
        f'<p class="hs-headline"><strong>Step {number + 1} of {len(lane.steps)}</strong>: '
        f"{counted(len(step.tree) - 1, 'token')} drafted, {len(step.tree)} verified{suffix} in one forward, "
        f"<strong>{counted(len(step.accepted), 'token')}</strong> gained. "
        f"<small>{sum(parts.values()) * 1e3:.1f} ms: {times}</small></p>"
    )


def _text(race: Race, lane: Lane, number: int) -> str:
    """The end of the text before a step, and what the step added."""
    start = lane.num_before(number)
    before = "".join([token.text for token in lane.tokens[:start]])
    if not race.is_chat:
        before = race.prompt + before
    added = lane.tokens[start : start + len(lane.steps[number].accepted)]
    marked = "".join([f'<span class="hs-t {source_class(t.source)}">{escaped(t.text)}</span>' for t in added])
    lead = "\u2026" if len(before) > TEXT_CHARS else ""
    shown = escaped(before[-TEXT_CHARS:])
    return f'<pre class="hs-text hs-short" tabindex="0"><span class="hs-prompt">{lead}{shown}</span>{marked}</pre>'


def _what_happened(step: SpecStep, words: Words) -> str:
    """Place where the target left the draft, and the drafted tokens there."""
    last = step.path[-1]
    offered = [token for token, parent in zip(step.tree.tokens, step.tree.parents, strict=True) if parent == last]
    choice, after = _code(words, step.accepted[-1], 30), _code(words, step.tree.tokens[last], 30)
    if len(step.tree) == 1:
        return f"Nothing was drafted: after {after} the target chose {choice}, as plain generate would."
    if not offered:
        return f"The whole branch was accepted; after {after} the target chose {choice} in the same forward."
    others = ", ".join([_code(words, token, 20) for token in offered[:4]])
    more = f" and {len(offered) - 4} more" if len(offered) > 4 else ""
    return f"After {after} the draft had {others}{more}; the target chose {choice}."


def _code(words: Words, token: int, longest: int) -> str:
    return f"<code>{one_line(words.word(token), longest)}</code>"


def _votes(step: SpecStep, words: Words) -> str:
    """Votes of each source of a blend for the nodes, accepted ones first."""
    order = sorted(range(1, len(step.tree)), key=lambda number: (number not in step.path, number))
    rows = [_voted(step, words, number) for number in order[:MAX_VOTED]]
    rest = len(order) - MAX_VOTED
    more = f'<tr><td colspan="4">and {rest} more</td></tr>' if rest > 0 else ""
    return (
        '<div class="hs-scroll" tabindex="0" role="group" aria-label="What each source said">'
        '<table class="hs-votes"><caption>What each source said: its probability of the token, and in brackets the '
        "log odds it added to the blend</caption><thead><tr><th>after</th><th>token</th><th>accepted with</th>"
        f"<th>sources</th></tr></thead><tbody>{''.join(rows)}{more}</tbody></table></div>"
    )


def _voted(step: SpecStep, words: Words, number: int) -> str:
    node, parent = step.nodes[number - 1], step.tree.parents[number]
    chance = "" if node.probability is None else f"{node.probability:.0%}"
    sign = "\u2713 " if number in step.path else ""
    after, token = _code(words, step.tree.tokens[parent], 14), _code(words, step.tree.tokens[number], 14)
    return f"<tr><td>{after}</td><td>{sign}{token}</td><td>{chance}</td><td>{_said(node.votes)}</td></tr>"


def _said(votes: Sequence[SourceVote]) -> str:
    """Probability and weight of each source, whose votes are added up."""
    weights: dict[str, float] = {}
    for vote in votes:
        weights[vote.source] = weights.get(vote.source, 0.0) + vote.weight
    best = {vote.source: vote.probability for vote in reversed(votes)}  # the vote that weighs most
    return " ".join(
        [
            f'<span class="hs-t {source_class(source)}">{source_of(source).label} '
            f"{best[source]:.0%} <small>({weight:+.1f})</small></span>"
            for source, weight in weights.items()
        ]
    )
