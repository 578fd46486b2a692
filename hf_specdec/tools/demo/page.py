"""The page: Gradio components around the racer and the drawings, and how they are served."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import gradio as gr

from hf_specdec.errors import SpecError
from hf_specdec.tools.bench.header import describe
from hf_specdec.tools.demo import figures
from hf_specdec.tools.demo.draw.lanes import draw_race, draw_running
from hf_specdec.tools.demo.draw.markup import draw_error, draw_link, draw_notice
from hf_specdec.tools.demo.draw.steps import draw_step
from hf_specdec.tools.demo.record import Lane, Race, Stop
from hf_specdec.tools.demo.runner import Racer
from hf_specdec.tools.demo.settings import KNOBS, LABELS, METHOD_LABELS, Settings

ASSETS = Path(__file__).parent / "assets"
FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif")
MONO_FONTS = ("ui-monospace", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")
POLL_SECONDS = 0.4
KEPT_SECONDS = 3600  # of a session's race
MAX_SESSIONS = 200  # whose last race is kept
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
AT_ONCE = QUIET | {"queue": False}
Update = dict[Any, Any]


class Page:
    """One page for all visitors of one model."""

    def __init__(self, racer: Racer) -> None:
        self.racer = racer
        self._stops: dict[str, Stop] = {}  # of each session's race, also of those that wait
        self.blocks = gr.Blocks(title="Speculative decoding", analytics_enabled=False)
        with self.blocks:
            gr.HTML((ASSETS / "idea.html").read_text(encoding="utf-8"))
            gr.HTML(draw_notice(describe(racer.facts)[0]))
            self._add_settings()
            self._add_results()
            self._connect()

    def launch(self, **kwargs: Any) -> tuple[Any, str, str]:
        """Serve the page; see `gr.Blocks.launch` for arguments and results."""
        self.blocks.queue(max_size=self.racer.limits.queue_size, default_concurrency_limit=4)
        launched: tuple[Any, str, str] = self.blocks.launch(
            footer_links=[],
            ssr_mode=False,
            state_session_capacity=MAX_SESSIONS,
            theme=gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=FONTS, font_mono=MONO_FONTS),
            css=(ASSETS / "style.css").read_text(encoding="utf-8"),
            js=(ASSETS / "player.js").read_text(encoding="utf-8"),
            **kwargs,
        )
        return launched

    def close(self) -> None:
        """Stop the races and serving."""
        for stop in list(self._stops.values()):
            stop.set()
        self.blocks.close(verbose=False)

    def _add_settings(self) -> None:
        """Prompt, gallery, method and parameters."""
        limits, gallery = self.racer.limits, self.racer.gallery
        label = "Message to the chat model" if self.racer.is_chat else "Prompt"
        text: dict[str, Any] = {"lines": 5, "max_lines": 10, "max_length": limits.max_prompt_chars}
        self.prompt = gr.Textbox(gallery[0]["prompt"], label=label, elem_id="prompt", **text)
        with gr.Row(elem_id="gallery"):
            self.examples = [(example, gr.Button(example["name"], size="sm")) for example in gallery]
        self.shows = gr.HTML(draw_notice(gallery[0]["shows"]))
        choices = [(METHOD_LABELS[method], method) for method in self.racer.methods]
        info = "One to three methods."
        self.methods = gr.CheckboxGroup(choices, value=["auto"], label="Methods", info=info, elem_id="methods")
        with gr.Accordion("Parameters", open=False, elem_id="parameters"):
            with gr.Row():
                ends = (min(8, limits.max_new_tokens), limits.max_new_tokens)
                self.tokens = gr.Slider(*ends, limits.usual_tokens, step=1, label="New tokens", elem_id="tokens")
                self.temperature = gr.Slider(0.0, 2.0, 0.0, step=0.1, label="Temperature", info="0 is greedy.")
                self.seed = gr.Number(0, precision=0, minimum=0, label="Seed", info="The same seed, the same text.")
            with gr.Row():
                self.knobs = {
                    knob.name: gr.Slider(
                        knob.least, knob.most, knob.default, step=1, label=LABELS[knob.name], info=knob.info
                    )
                    for knob in KNOBS
                    if knob.method in self.racer.methods
                }

    def _add_results(self) -> None:
        """The race, the steps, the figures."""
        self.race = gr.State(None, time_to_live=KEPT_SECONDS)
        with gr.Row(elem_id="controls"):
            self.start = gr.Button("Race", variant="primary", elem_id="race", scale=2)
            self.stop = gr.Button("Stop", interactive=False, elem_id="stop", scale=1)
        with gr.Row():
            self.status = gr.HTML(draw_notice("Press Race."), elem_id="status", scale=3)
            self.link = gr.HTML("", elem_id="link", scale=1)
        with gr.Tabs():
            with gr.Tab("Race"):
                empty = "The lanes come here: transformers' generate, plain decoding by this package, and each method."
                self.lanes = gr.HTML(draw_notice(empty), elem_id="lanes")
                label = "As hf-specdec bench counts, of this one run"
                self.table = gr.Dataframe(visible=False, interactive=False, elem_id="table", label=label, buttons=[])
            with gr.Tab("Inside a step"), gr.Column(elem_id="step-panel"):
                self.lane = gr.Radio([], label="Method", visible=False, elem_id="step-lane")
                self.number = gr.Slider(1, 2, 1, step=1, label="Step", elem_id="step-number")
                self.step = gr.HTML(draw_notice("Run a race first."), elem_id="step")
            with gr.Tab("Figures"), gr.Row():
                look: dict[str, Any] = {"height": 240, "min_width": 300, "buttons": []}
                self.times = gr.BarPlot(
                    x="lane", y="ms", color="part", title="Milliseconds of a step", x_label_angle=-15, **look
                )
                title = "Accepted, by place in a draft"
                self.acceptance = gr.LinePlot(x="place", y="accepted", color="lane", title=title, **look)

    def _connect(self) -> None:
        """Connect components and handlers."""
        fields = (self.prompt, self.methods, self.tokens, self.temperature, self.seed)
        names = ("prompt", "methods", "max_new_tokens", "temperature", "seed")
        self.inputs: dict[str, Any] = {**dict(zip(names, fields, strict=True)), **self.knobs}
        values = list(self.inputs.values())
        results = [self.status, self.link, self.lanes, self.table, self.race, self.lane, self.number, self.step]
        results += [self.times, self.acceptance]
        begins = self.start.click(self._begin, None, [self.status, self.start, self.stop], **AT_ONCE)
        races = begins.then(
            self._race,
            values,
            results,
            api_name="race",
            concurrency_limit=1,
            show_progress="hidden",
            scroll_to_output=False,
        )
        races.then(self._end, None, [self.start, self.stop], **AT_ONCE)
        self.stop.click(self._stop, None, self.status, **AT_ONCE)
        for example, button in self.examples:
            button.click(None, None, [self.prompt, self.shows], js=_choice(example), api_visibility="private")
        place: list[Any] = [self.race, self.lane, self.number]
        self.number.change(self._step, place, self.step, trigger_mode="always_last", **AT_ONCE)
        self.lane.input(self._first_step, place[:2], [self.number, self.step], **AT_ONCE)
        self.blocks.load(self._open, None, [self.status, *values], **AT_ONCE)
        self.blocks.unload(self._leave)

    def _open(self, request: gr.Request) -> Any:
        """Settings of a link, into the page; the page as it is without any."""
        unchanged = [gr.skip() for _ in self.inputs]
        query = {name: value for name, value in request.query_params.items() if not name.startswith("_")}
        if "prompt" not in query:
            return gr.skip(), *unchanged
        try:
            settings = Settings.from_query(query, self.racer.limits)
            settings.check_within(self.racer.limits, self.racer.methods)
        except SpecError as error:
            return draw_error(error), *unchanged
        fields = settings.fields() | {"methods": list(settings.methods)}
        return draw_notice("These are the link's settings. Press Race."), *[fields[name] for name in self.inputs]

    def _begin(self, request: gr.Request) -> Any:
        self._leave(request)  # one race of a session at a time
        self._stops[str(request.session_hash)] = Stop()
        stop = gr.update(interactive=True, variant="stop")
        return draw_notice("Waiting for the model."), gr.update(interactive=False), stop

    def _end(self, request: gr.Request) -> Any:
        self._leave(request)
        return gr.update(interactive=True), gr.update(interactive=False, variant="secondary")

    def _stop(self, request: gr.Request) -> Any:
        stop = self._stops.get(str(request.session_hash))
        if stop is None:
            return gr.skip()
        stop.set()
        return draw_notice("Stopping.")

    def _leave(self, request: gr.Request) -> None:
        """Stop the session's race."""
        if (stop := self._stops.pop(str(request.session_hash), None)) is not None:
            stop.set()

    def _race(self, request: gr.Request, *values: Any) -> Iterator[Update]:
        """Run a race, showing how far it is, and show it."""
        stop = self._stops.setdefault(str(request.session_hash), Stop())
        timer = threading.Timer(self.racer.limits.max_seconds, stop.set)
        timer.start()
        try:
            fields = dict(zip(self.inputs, values, strict=True))
            settings = Settings.from_fields(fields | {"methods": tuple(fields["methods"])})
            race = self.racer.start(settings, stop)
            while wait([race.future], POLL_SECONDS).not_done:
                running = draw_notice("Each lane runs alone, one after the other; then all are replayed together.")
                yield {self.status: running, self.lanes: draw_running(race)}
            race.future.result()
            yield self._results(race, settings)
        except SpecError as error:
            yield {self.status: draw_error(error)}
        finally:
            timer.cancel()
            stop.set()

    def _results(self, race: Race, settings: Settings) -> Update:
        """Everything that a race changes on the page at its end."""
        drafting = [lane for lane in race.lanes if lane.steps]
        labels = [lane.label for lane in drafting]
        first = drafting[0] if drafting else race.lanes[0]
        best, table = _richest_step(first), race.table()
        return {
            self.status: draw_notice("Stopped; this is what was there by then." if race.is_cut else "Done."),
            self.link: draw_link(settings),
            self.lanes: draw_race(race),
            self.table: gr.update(value=table, visible=table is not None),
            self.race: race,
            self.lane: gr.update(choices=labels, value=labels[0] if labels else None, visible=len(labels) > 1),
            self.number: gr.update(maximum=max(2, len(first.steps)), value=best + 1),
            self.step: draw_step(race, first, best),
            self.times: figures.times(race.lanes),
            self.acceptance: figures.acceptance(drafting),
        }

    def _step(self, race: Race | None, label: str | None, number: float) -> Any:
        lane = race.lane(label) if race is not None else None
        return gr.skip() if race is None or lane is None else draw_step(race, lane, int(number) - 1)

    def _first_step(self, race: Race | None, label: str | None) -> Any:
        lane = race.lane(label) if race is not None else None
        if race is None or lane is None:
            return gr.skip(), gr.skip()
        best = _richest_step(lane)
        return gr.update(maximum=max(2, len(lane.steps)), value=best + 1), draw_step(race, lane, best)


def _richest_step(lane: Lane) -> int:
    """The first step worth a look: the one that gained most."""
    return max(range(len(lane.steps)), key=lambda number: (len(lane.steps[number].accepted), -number), default=0)


def _choice(example: dict[str, str]) -> str:
    """Script of an example's button, in the browser alone: prompt and explanation."""
    return f"() => {json.dumps([example['prompt'], draw_notice(example['shows'])])}"
