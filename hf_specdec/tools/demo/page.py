"""The page: Gradio components around the racer and the drawings. Holds no logic of its own."""

import json
import logging
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from hf_specdec.errors import SpecError
from hf_specdec.tools.demo.draw.charts import draw_charts
from hf_specdec.tools.demo.draw.lanes import draw_race
from hf_specdec.tools.demo.draw.notices import draw_error, draw_idea, draw_link, draw_notice
from hf_specdec.tools.demo.draw.steps import draw_step
from hf_specdec.tools.demo.gallery import CHAT_GALLERY, GALLERY, Example
from hf_specdec.tools.demo.record import Lane, Race
from hf_specdec.tools.demo.recorder import Stop
from hf_specdec.tools.demo.runner import Memories, Racer, Running
from hf_specdec.tools.demo.settings import KNOBS, Settings

logger = logging.getLogger("hf_specdec")

POLL_SECONDS = 0.2
MAX_FILES = 32  # records kept for download
KEPT_SECONDS = 3600  # a session's race and memory
Update = dict[Any, Any]


class Page:
    """One page for all visitors of one model.

    Args:
        racer: runs the races.

    Attributes:
        blocks (`gr.Blocks`): the page.
    """

    def __init__(self, racer: Racer) -> None:
        self.racer = racer
        self._stops: dict[str, Stop] = {}  # of each session's race, also one that waits
        self._folder = tempfile.TemporaryDirectory(prefix="hf-specdec-")
        self._files: deque[Path] = deque()
        self.blocks = gr.Blocks(title="Speculative decoding", analytics_enabled=False, delete_cache=(600, KEPT_SECONDS))
        with self.blocks:
            gr.HTML(draw_idea(racer.facts))
            self._add_settings()
            self._add_results()
            self._connect()

    def close(self) -> None:
        """Stop the race and serving, and remove the page's files."""
        for stop in list(self._stops.values()):
            stop.stop()
        self.blocks.close(verbose=False)
        self._folder.cleanup()

    def _add_settings(self) -> None:
        """Prompt, gallery, method and parameters."""
        limits = self.racer.limits
        text: dict[str, Any] = {"lines": 6, "max_lines": 12, "max_length": limits.max_prompt_chars}
        gallery = CHAT_GALLERY if self.racer.is_chat else GALLERY
        label = "Message to the chat model" if self.racer.is_chat else "Prompt"
        self.prompt = gr.Textbox(gallery[0].prompt, label=label, elem_id="prompt", **text)
        with gr.Row(elem_id="gallery"):
            self.examples = [(example, gr.Button(example.name, size="sm")) for example in gallery]
        self.shows = gr.HTML(draw_notice(gallery[0].shows))
        choices = [(label, name) for name, label in self.racer.methods.items()]
        self.methods = gr.CheckboxGroup(
            choices, value=["auto"], label="Against plain generate", info="One to three methods.", elem_id="methods"
        )
        with gr.Accordion("Parameters", open=False, elem_id="parameters"):
            with gr.Row():
                ends = (min(8, limits.max_new_tokens), limits.max_new_tokens)
                self.tokens = gr.Slider(
                    *ends, limits.usual_tokens, step=1, label="New tokens", info="Of each lane.", elem_id="tokens"
                )
                self.temperature = gr.Slider(
                    0.0, 2.0, 0.0, step=0.1, label="Temperature", info="0 takes the likeliest token each time."
                )
                self.seed = gr.Number(0, precision=0, minimum=0, label="Seed", info="The same seed, the same text.")
            self.knobs = {}
            for method in dict.fromkeys(knob.method for knob in KNOBS):
                if method not in self.racer.methods:
                    continue
                gr.HTML(draw_notice(self.racer.methods[method], is_heading=True))
                with gr.Row():
                    for knob in KNOBS:
                        if knob.method == method:
                            self.knobs[knob.name] = gr.Slider(
                                knob.least, knob.most, knob.default, step=1, label=knob.label, info=knob.info
                            )
            self.remembers = gr.Checkbox(
                False,
                label="Draft from my earlier races too",
                info="Kept for this page alone, until you leave. The same prompt again is then copied whole.",
            )
        with gr.Row():
            self.start = gr.Button("Race", variant="primary", elem_id="race", scale=2)
            self.stop = gr.Button("Stop", variant="stop", elem_id="stop", scale=1)
        with gr.Row():
            self.status = gr.HTML(draw_notice("Press Race."), elem_id="status", scale=3)
            self.link = gr.HTML("", elem_id="link", scale=1)

    def _add_results(self) -> None:
        """The race, the steps, the charts."""
        self.race = gr.State(None, time_to_live=KEPT_SECONDS)
        self.memories = gr.State({}, time_to_live=KEPT_SECONDS)
        with gr.Tabs():
            with gr.Tab("Race"):
                self.lanes = gr.HTML("", elem_id="lanes")
            with gr.Tab("Inside a step"), gr.Column(elem_id="step-panel"):
                self.lane = gr.Radio([], label="Method", visible=False, elem_id="step-lane")
                with gr.Row():
                    self.previous = gr.Button("\u2190 Previous", size="sm", elem_id="step-previous")
                    self.next = gr.Button("Next \u2192", size="sm", elem_id="step-next")
                self.number = gr.Slider(
                    1, 2, 1, step=1, label="Step", info="Arrow keys step, too.", elem_id="step-number"
                )
                self.step = gr.HTML(draw_notice("Run a race first."), elem_id="step")
            with gr.Tab("Charts"):
                self.charts = gr.HTML(draw_notice("Run a race first."), elem_id="charts")
                self.download = gr.DownloadButton("Download the run as JSON", interactive=False, elem_id="download")

    def _connect(self) -> None:
        """Connect components and handlers."""
        given = [self.prompt, self.methods, self.tokens, self.temperature, self.seed, self.remembers]
        asked = [*given, *self.knobs.values()]
        shown = [self.status, self.link, self.lanes, self.race, self.memories, self.lane, self.number]
        shown += [self.step, self.charts, self.download]
        quiet: dict[str, Any] = {"show_progress": "hidden"}
        waits = self.start.click(self._wait, None, self.status, queue=False, api_visibility="private", **quiet)
        races = waits.then(
            self._race,
            [self.memories, *asked],
            shown,
            api_name="race",
            concurrency_limit=1,
            concurrency_id="race",
            **quiet,
        )
        races.failure(self._refuse, None, self.status, queue=False, api_visibility="private", **quiet)
        self.stop.click(self._stop, None, self.status, queue=False, api_name="stop", **quiet)
        for example, button in self.examples:
            button.click(None, None, [self.prompt, self.shows], js=_choice(example), api_visibility="private")
        quiet |= {"queue": False}
        place: list[Any] = [self.race, self.lane, self.number]
        self.number.change(self._step, place, self.step, api_name="step", trigger_mode="always_last", **quiet)
        self.lane.input(self._first_step, place[:2], [self.number, self.step], api_visibility="private", **quiet)
        for button, offset in ((self.previous, -1), (self.next, 1)):
            moved = partial(_moved, offset)
            button.click(moved, place, self.number, api_visibility="private", trigger_mode="multiple", **quiet)
        self.blocks.load(self._open, None, [self.status, *asked], api_visibility="private", **quiet)
        self.blocks.unload(self._leave)

    def _open(self, request: gr.Request) -> Any:
        """A link's settings, into the page; the page as it is without any."""
        names = [*self.knobs]
        nothing = (gr.skip(),) * (6 + len(names))
        query = {name: value for name, value in request.query_params.items() if not name.startswith("_")}
        if "prompt" not in query:
            return gr.skip(), *nothing
        try:
            settings = Settings.from_query(query, self.racer.limits)
            settings.check_within(self.racer.limits, self.racer.methods)
        except SpecError as error:
            return draw_error(error), *nothing
        own = (settings.prompt, list(settings.methods), settings.max_new_tokens, settings.temperature, settings.seed)
        values = [settings.values[name] for name in names]
        return draw_notice("These are the link's settings. Press Race."), *own, settings.remembers, *values

    def _wait(self, request: gr.Request) -> str:
        self._leave(request)  # one race of a session at a time
        self._stops[str(request.session_hash)] = Stop()
        return draw_notice("Waiting for the model.")

    def _refuse(self, request: gr.Request) -> str:
        """Gradio let the race not begin."""
        self._leave(request)
        if len(self._stops) > (most := self.racer.limits.queue_size):  # one of them is racing
            return draw_notice(f"Not possible: the queue is full ({most}). Press Race again in a while.")
        return draw_notice("Not possible with these settings. Load the page anew, and press Race again.")

    def _stop(self, request: gr.Request) -> Any:
        stop = self._stops.get(str(request.session_hash))
        if stop is None:
            return gr.skip()
        stop.stop()
        return draw_notice("Stopping.")

    def _leave(self, request: gr.Request) -> None:
        """Stop the session's race."""
        if (stop := self._stops.pop(str(request.session_hash), None)) is not None:
            stop.stop()

    def _race(
        self,
        request: gr.Request,
        memories: Memories,
        prompt: str,
        methods: list[str],
        tokens: float,
        temperature: float,
        seed: float,
        remembers: bool,
        *values: float,
    ) -> Iterator[Update]:
        """Run a race, saying how far it is, and show it."""
        stop = self._stops.setdefault(str(request.session_hash), Stop())
        stop.begin(self.racer.limits.max_seconds)
        try:
            knobs = {name: _whole(value) for name, value in zip(self.knobs, values, strict=True)}
            settings = Settings(
                prompt=prompt,
                methods=tuple(methods),
                values=knobs,
                temperature=temperature,
                seed=_whole(seed),
                max_new_tokens=_whole(tokens),
                remembers=bool(remembers),
            )
            running = self.racer.start(settings, memories, stop)
            while wait([running.future], POLL_SECONDS).not_done:
                yield {self.status: _progress(running, settings)}
            race = running.future.result()
        except SpecError as error:
            yield {self.status: draw_error(error)}
            return
        except Exception as error:
            logger.exception("A race failed")
            yield {self.status: draw_error(f"The race failed with {type(error).__name__}; the log has more.")}
            return
        finally:
            stop.stop()
            if self._stops.get(str(request.session_hash)) is stop:
                del self._stops[str(request.session_hash)]
        yield self._shown(race, settings, memories)

    def _shown(self, race: Race, settings: Settings, memories: Memories) -> Update:
        """Everything a finished race changes on the page."""
        lanes = [lane.label for lane in race.lanes if lane.steps]
        first = _lane(race, lanes[0]) if lanes else None
        best = _richest_step(first) if first is not None else 0
        stopped = any(lane.is_stopped for lane in race.lanes) or len(race.lanes) <= len(settings.methods)
        return {
            self.status: draw_notice("Stopped; this is what was there by then." if stopped else "Done."),
            self.link: draw_link(settings),
            self.lanes: draw_race(race),
            self.race: race,
            self.memories: memories,
            self.lane: gr.update(choices=lanes, value=lanes[0] if lanes else None, visible=bool(lanes)),
            self.number: gr.update(maximum=_last_number(first), value=best + 1),
            self.step: draw_step(race, first or race.plain, best),
            self.charts: draw_charts(race),
            self.download: gr.update(value=str(self._write(race)), interactive=True),
        }

    def _step(self, race: Race | None, label: str | None, number: float) -> Any:
        lane = _lane(race, label)
        return gr.skip() if race is None or lane is None else draw_step(race, lane, int(number) - 1)

    def _first_step(self, race: Race | None, label: str | None) -> Any:
        lane = _lane(race, label)
        if race is None or lane is None:
            return gr.skip(), gr.skip()
        best = _richest_step(lane)
        return gr.update(maximum=_last_number(lane), value=best + 1), draw_step(race, lane, best)

    def _write(self, race: Race) -> Path:
        """The record as a file of the page's own; the oldest ones go."""
        with tempfile.NamedTemporaryFile("w", suffix=".json", dir=self._folder.name, delete=False) as file:
            json.dump(race.to_dict(), file)
        self._files.append(Path(file.name))
        while len(self._files) > MAX_FILES:
            self._files.popleft().unlink(missing_ok=True)
        return Path(file.name)


def _lane(race: Race | None, label: str | None) -> Lane | None:
    return None if race is None else next((lane for lane in race.lanes if lane.label == label), None)


def _last_number(lane: Lane | None) -> int:
    """The slider's end; a slider has at least two places."""
    return max(2, len(lane.steps)) if lane is not None else 2


def _moved(offset: int, race: Race | None, label: str | None, number: float) -> float:
    """The number of the step next to this one; the first and the last have no further neighbour."""
    lane = _lane(race, label)
    return min(max(1, int(number) + offset), len(lane.steps)) if lane is not None and lane.steps else 1


def _richest_step(lane: Lane) -> int:
    """The first step worth a look: the one that gained most."""
    return max(range(len(lane.steps)), key=lambda number: (len(lane.steps[number].tokens), -number), default=0)


def _progress(running: Running, settings: Settings) -> str:
    done = f"{running.num_tokens} of {settings.max_new_tokens} tokens"
    return draw_notice(f"{running.label}: {done}. Each lane runs alone.")


def _choice(example: Example) -> str:
    """Script of an example's button, in the browser alone: prompt and explanation."""
    return f"() => {json.dumps([example.prompt, draw_notice(example.shows)])}"


def _whole(value: Any) -> Any:
    """A slider's number as a whole one where it is; the settings refuse anything else."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
