"""The short texts of the page: what it is about, how far it is, what is wrong, and a link to the settings."""

from typing import Any

from hf_specdec.errors import counted
from hf_specdec.tools.demo.draw.markup import escaped
from hf_specdec.tools.demo.settings import Settings


def draw_idea(facts: dict[str, Any]) -> str:
    """Speculative decoding in half a minute, and the model at hand."""
    model = f"{facts['model']}, {facts['parameters'] / 1e6:.3g} million parameters, {facts['dtype']}"
    return f"""<div class="hs"><h1>Speculative decoding: the same text, sooner</h1>
<ol class="hs-idea">
<li><strong>1. Draft</strong> The next tokens are guessed: from the text itself, from what the model found likely
before, or by a smaller model.</li>
<li><strong>2. Verify</strong> One forward of the model computes all guesses, as a tree.</li>
<li><strong>3. Keep</strong> What the model would have written anyway is kept, plus one token of its own. The text is
the same; there are fewer forwards.</li>
</ol>
<p class="hs-word">Model: {escaped(model)}, on {draw_machine(facts)}.</p></div>"""


def draw_machine(facts: dict[str, Any]) -> str:
    """Device and threads of the model."""
    threads = facts.get("threads", 1)
    return escaped(f"{facts.get('device', 'this machine')}, {counted(threads, 'thread')}")


def draw_notice(text: str, *, is_heading: bool = False) -> str:
    """A line of status, which screen readers read out; or a heading."""
    if is_heading:
        return f'<div class="hs"><strong>{escaped(text)}</strong></div>'
    return f'<div class="hs hs-status" role="status">{escaped(text)}</div>'


def draw_error(error: Exception | str) -> str:
    """An error and its remedy, without a traceback."""
    return f'<div class="hs hs-error" role="alert"><strong>Not possible:</strong> {escaped(str(error))}</div>'


def draw_link(settings: Settings) -> str:
    """A link that opens the page with these settings."""
    return f'<div class="hs"><a href="?{escaped(settings.to_query())}">Link to these settings</a></div>'
