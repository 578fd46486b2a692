"""One step of one lane as HTML: the text, the tree, what the sources said, and lookahead's window."""

from hf_specdec.errors import counted
from hf_specdec.tools.demo.draw.markup import escaped, one_line, percent
from hf_specdec.tools.demo.draw.sources import source_class, source_of
from hf_specdec.tools.demo.draw.tree import draw_tree
from hf_specdec.tools.demo.record import Lane, Node, Race, Step

TEXT_CHARS = 160
MAX_VOTED = 12  # nodes of the table


def draw_step(race: Race, lane: Lane, number: int) -> str:
    """Step `number` of the lane, from 0; a sentence where the lane has no steps."""
    if not lane.steps:
        return '<div class="hs"><p class="hs-word">Plain generate drafts nothing: one forward, one token.</p></div>'
    step = lane.steps[min(max(number, 0), len(lane.steps) - 1)]
    parts = [_headline(lane, step, number), _text(race, lane, step), draw_tree(step), f"<p>{_what_happened(step)}</p>"]
    if any(node.votes for node in step.nodes):
        parts.append(_votes(step))
    if step.window:
        parts.append(_window(step))
    return f'<div class="hs hs-step">{"".join(parts)}</div>'


def _headline(lane: Lane, step: Step, number: int) -> str:
    times = (
        f"{step.seconds * 1e3:.1f} ms: draft {step.draft_seconds * 1e3:.1f}, verify {step.verify_seconds * 1e3:.1f}, "
        f"commit {step.commit_seconds * 1e3:.1f}"
    )
    added, drafted = len(step.tokens), len(step.nodes) - 1
    window = step.num_columns - len(step.nodes)
    suffix = f" and {window} of the window" if window else ""
    return (
        f'<p class="hs-headline"><strong>Step {number + 1} of {len(lane.steps)}</strong>: '
        f"{counted(drafted, 'token')} drafted, {len(step.nodes)} verified{suffix} in one forward, "
        f"<strong>{counted(added, 'token')}</strong> gained. <small>{times}</small></p>"
    )


def _text(race: Race, lane: Lane, step: Step) -> str:
    """The end of the text before the step, and what the step added."""
    before = race.prompt + "".join([token.text for token in lane.tokens[: step.num_before]])
    added = lane.tokens[step.num_before : step.num_before + len(step.tokens)]
    marked = "".join([f'<span class="hs-t {source_class(t.source)}">{escaped(t.text)}</span>' for t in added])
    lead = "\u2026" if len(before) > TEXT_CHARS else ""
    shown = escaped(before[-TEXT_CHARS:])
    return f'<pre class="hs-text hs-short" tabindex="0"><span class="hs-prompt">{lead}{shown}</span>{marked}</pre>'


def _what_happened(step: Step) -> str:
    """Place where the target left the draft, and the drafted tokens there."""
    accepted = [number for number, node in enumerate(step.nodes) if node.is_accepted]
    last = accepted[-1]
    offered = [node.text for node in step.nodes if node.parent == last]
    choice = f"<code>{one_line(step.tokens[-1], 30)}</code>"
    after = f"<code>{one_line(step.nodes[last].text, 30)}</code>"
    if len(step.nodes) == 1:
        return f"Nothing was drafted: after {after} the target chose {choice}, as plain generate would."
    if not offered:
        return f"The whole branch was accepted; after {after} the target chose {choice} in the same forward."
    others = ", ".join([f"<code>{one_line(text, 20)}</code>" for text in offered[:4]])
    more = f" and {len(offered) - 4} more" if len(offered) > 4 else ""
    return f"After {after} the draft had {others}{more}; the target chose {choice}."


def _votes(step: Step) -> str:
    """Votes of each source of a blend for the nodes, accepted ones first."""
    order = sorted(range(1, len(step.nodes)), key=lambda number: (not step.nodes[number].is_accepted, number))
    rows = [_voted(step, step.nodes[number]) for number in order[:MAX_VOTED]]
    rest = len(order) - MAX_VOTED
    more = f'<tr><td colspan="4">and {rest} more</td></tr>' if rest > 0 else ""
    return (
        '<div class="hs-scroll" tabindex="0" role="group" aria-label="What each source said, scrolls sideways">'
        '<table class="hs-votes"><caption>What each source said: its own probability of the token, and in brackets the '
        "log odds it added to the blend</caption><thead><tr><th>after</th><th>token</th><th>accepted with</th>"
        f"<th>sources</th></tr></thead><tbody>{''.join(rows)}{more}</tbody></table></div>"
    )


def _voted(step: Step, node: Node) -> str:
    weights: dict[str, float] = {}
    for vote in node.votes:
        weights[vote.source] = weights.get(vote.source, 0.0) + vote.weight
    best = {vote.source: vote.probability for vote in reversed(node.votes)}  # the vote that weighs most
    votes = " ".join(
        [
            f'<span class="hs-t {source_class(source)}">{source_of(source).label} '
            f"{percent(best[source])} <small>({weight:+.1f})</small></span>"
            for source, weight in weights.items()
        ]
    )
    chance = "" if node.probability is None else percent(node.probability)
    sign = "\u2713 " if node.is_accepted else ""
    return (
        f"<tr><td><code>{one_line(step.nodes[node.parent].text)}</code></td><td>{sign}<code>{one_line(node.text)}"
        f"</code></td><td>{chance}</td><td>{votes}</td></tr>"
    )


def _window(step: Step) -> str:
    """Lookahead's window for the next step, level by level, and the pool's n-grams of its first level."""
    rows = "".join(
        [
            f"<tr><th>level {level}</th>"
            + "".join([f"<td><code>{one_line(text, 10)}</code></td>" for text in tokens])
            + "</tr>"
            for level, tokens in enumerate(step.window)
        ]
    )
    pool = "".join(
        [
            f"<li><code>{one_line(key)}</code> \u2192 "
            + " \u00a0 ".join(
                ["<code>" + " ".join([one_line(text, 10) for text in tail]) + "</code>" for tail in tails]
            )
            + "</li>"
            for key, tails in step.pool
        ]
    )
    return (
        '<div class="hs-scroll" tabindex="0" role="group" aria-label="Window, scrolls sideways">'
        '<table class="hs-window"><caption>The window for the next step: read downwards, a column is a piece of text '
        f"to come; level 0 begins with the text's last token</caption><tbody>{rows}</tbody></table></div>"
        f'<details class="hs-pool" open><summary>The pool: n-grams that begin with a token of level 0</summary>'
        f"<ul>{pool or '<li>none yet</li>'}</ul></details>"
    )
