"""Runs races: each lane alone and in its turn, so that the times are those of the methods."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

import hf_specdec
from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.call.generate import class_generate
from hf_specdec.compat.devices import input_device
from hf_specdec.compat.models import max_positions
from hf_specdec.engine.model_state import using_method_state
from hf_specdec.errors import ConfigError, SpecError
from hf_specdec.methods.common.entry import MethodState
from hf_specdec.tools.bench.header import make_header
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.rows import Row, base_rows, make_row
from hf_specdec.tools.demo.record import Lane, Race, Recorder, Stop, Token, Words
from hf_specdec.tools.demo.settings import CHAT_GALLERY, GALLERY, METHOD_LABELS, Limits, Settings

logger = logging.getLogger("hf_specdec")

WARM_UP_TOKENS = 64  # of each example
WARM_UP_SECONDS = 20.0  # after which no further example begins
Inputs = Mapping[str, torch.Tensor]


class Racer:
    """One model and its races, which run one after the other in a thread; chat models get prompts as messages."""

    def __init__(self, loaded: LoadedModel, limits: Limits | None = None) -> None:
        self.loaded, self.limits = loaded, limits or Limits()
        self.facts = make_header(loaded, self.limits)
        self.is_chat = bool(getattr(loaded.tokenizer, "chat_template", None))
        self.gallery = CHAT_GALLERY if self.is_chat else GALLERY
        missing = ["draft_model"] * (loaded.draft_model is None) + ["head"] * (loaded.head is None)
        self.methods = [name for name in METHOD_LABELS if name.rpartition("+")[2] not in missing]
        threads = torch.get_num_threads()
        self._worker = ThreadPoolExecutor(1, "race", initializer=lambda: torch.set_num_threads(threads))

    def warm_up(self) -> None:
        """Try every way to generate, so that no visitor waits for it; leave out those that the model cannot do."""
        first, *others = [Settings(prompt=x["prompt"], max_new_tokens=WARM_UP_TOKENS) for x in self.gallery]
        started, (theirs, plain) = time.monotonic(), base_rows()
        for method in tuple(self.methods):
            try:
                self._try(first, *self._rows(replace(first, methods=(method,))))
            except SpecError as error:
                logger.warning("%s: %s", METHOD_LABELS[method], error)
                self.methods.remove(method)
        self._try(replace(first, max_new_tokens=8), theirs)
        for settings in others:  # until forwards are as quick as later ones
            if time.monotonic() - started > WARM_UP_SECONDS:
                return
            self._try(settings, plain, *self._rows(replace(settings, methods=tuple(self.methods[:1]))))

    def _try(self, settings: Settings, *rows: Row) -> None:
        self._begin(settings, self._encode(settings.prompt), Stop(), rows).future.result()

    def start(self, settings: Settings, stop: Stop) -> Race:
        """Begin a race, or let it wait for its turn.

        Raises:
            ConfigError: the settings go beyond the limits.
        """
        settings.check_within(self.limits, self.methods)
        inputs = self._encode(settings.prompt)
        length, positions = inputs["input_ids"].shape[1], max_positions(self.loaded.model.config) or math.inf
        most = min(self.limits.max_prompt_tokens, positions - settings.max_new_tokens)
        if not 0 < length <= most:
            remedy = "Shorten it, or take fewer new tokens."
            raise ConfigError("prompt", f"must have 1 to {most} tokens", f"{length} tokens", remedy)
        return self._begin(settings, inputs, stop, [*base_rows(), *self._rows(settings)])

    def _begin(self, settings: Settings, inputs: Inputs, stop: Stop, rows: Sequence[Row]) -> Race:
        words = Words(self.loaded.tokenizer, inputs["input_ids"][0].tolist())
        race = Race(settings.prompt, self.is_chat, tuple(row.name for row in rows), self.facts, words)
        race.future = self._worker.submit(self._race, race, rows, settings, inputs, stop)
        return race

    def _rows(self, settings: Settings) -> list[Row]:
        """Rows of the methods, as those of `bench`, under their labels."""
        rows = []
        for method in settings.methods:
            head = self.loaded.head
            row = make_row(head.methods[0] if method == "head" and head is not None else method, self.loaded)
            config = settings.config_of(method)
            rows.append(replace(row, name=METHOD_LABELS[method], kwargs={**row.kwargs, "spec_config": config or None}))
        return rows

    def _race(self, race: Race, rows: Sequence[Row], settings: Settings, inputs: Inputs, stop: Stop) -> None:
        for row in rows:
            if stop.is_set() and race.lanes:
                return
            race.recorder = Recorder(stop)
            race.lanes.append(self._lane(row, settings, inputs, race.recorder, race.words))

    def _lane(self, row: Row, settings: Settings, inputs: Inputs, recorder: Recorder, words: Words) -> Lane:
        """One call of `generate`, watched."""
        model: Any = self.loaded.model
        kwargs: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "do_sample": settings.temperature > 0}
        if settings.temperature > 0:
            kwargs["temperature"] = float(settings.temperature)  # a browser's 2.0 arrives as the integer 2
            torch.manual_seed(settings.seed)
        generate = class_generate(model) if row.is_transformers else model.generate
        drafts = row.kwargs.get("spec_method", "plain") != "plain"
        with using_method_state(model, MethodState()), torch.inference_mode():
            generate(**inputs, **kwargs, **row.kwargs, **recorder.kwargs(observes=drafts))
        is_stopped = recorder.stop.is_set() and len(recorder.token_ids) < settings.max_new_tokens
        note = ""
        if drafts and not recorder.steps and len(recorder.token_ids) > 1:
            note = f"Decoded plainly: {hf_specdec.capability(model).reason}"
        ids = tuple(recorder.token_ids)
        return Lane(row.name, _tokens(recorder, words), ids, tuple(recorder.steps), is_stopped, note)

    def _encode(self, prompt: str) -> dict[str, torch.Tensor]:
        """Ids and mask, `(1, length)` each."""
        tokenizer, device = self.loaded.tokenizer, input_device(self.loaded.model)
        if self.is_chat:
            prompt = chat_text(tokenizer, [{"role": "user", "content": prompt}])
        encoded = tokenizer(prompt, add_special_tokens=not self.is_chat, return_tensors="pt", verbose=False)
        return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _tokens(recorder: Recorder, words: Words) -> tuple[Token, ...]:
    """Tokens with their times, and the source and the step of each; without steps, each is a forward's."""
    sources, places = ["target"], [0]
    for number, step in enumerate(recorder.steps, 1):
        sources += [step.nodes[node - 1].source if step.nodes else "draft" for node in step.path[1:]] + ["target"]
        places += [number] * len(step.accepted)
    if not recorder.steps:
        sources, places = ["target"] * len(recorder.token_ids), list(range(len(recorder.token_ids)))
    pieces = words.pieces(recorder.token_ids)
    ends = set(words.tokenizer.all_special_ids)
    shown = ["" if token in ends else piece for token, piece in zip(recorder.token_ids, pieces, strict=True)]
    return tuple([Token(*token) for token in zip(shown, recorder.times, sources, places, strict=True)])
