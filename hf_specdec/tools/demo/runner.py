"""Runs races: one at a time, each lane alone, so that the times are those of the methods."""

import copy
import logging
from collections.abc import Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_specdec
from hf_specdec.api.many_prompts.prompt_inputs import chat_text
from hf_specdec.compat import input_device, max_positions
from hf_specdec.engine.model_state import using_method_state
from hf_specdec.errors import ConfigError, SpecError
from hf_specdec.kernels.quantization.weights import num_parameters, precision_of
from hf_specdec.loading import embedded
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.common.entry import MethodState
from hf_specdec.tools.demo.record import PLAIN, Lane, Race
from hf_specdec.tools.demo.recorder import Recorder, Stop
from hf_specdec.tools.demo.settings import METHOD_LABELS, WITH_DRAFT, Limits, Settings

logger = logging.getLogger("hf_specdec")

Memories = MutableMapping[str, MethodState]  # what one visitor's races left, by method
WARM_UP_PROMPT = "def main():\n"
WARM_UP_TOKENS = 12
PLAIN_LABEL = "Plain generate"


@dataclass(slots=True)
class Running:
    """A race under way.

    Attributes:
        future: the race, when it is over; its `result` raises a `SpecError` where the model cannot do what was asked.
        label (`str`): the lane that runs now.
        recorder: of that lane.
    """

    future: "Future[Race]"
    label: str = PLAIN_LABEL
    recorder: Recorder | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens of the lane so far."""
        return len(self.recorder.token_ids) if self.recorder is not None else 0


class Racer:
    """One model and its races, which run one after the other in a thread of their own.

    Args:
        model: an enabled model.
        tokenizer: its tokenizer; a prompt is a message where it has a chat template.
        draft: a draft model or head, for the methods that take one.
        draft_tokenizer: the draft model's, where it is not the target's.
        limits: what one race may use.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        draft: PreTrainedModel | DraftHead | None = None,
        *,
        draft_tokenizer: PreTrainedTokenizerBase | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.model, self.tokenizer, self.draft, self.draft_tokenizer = model, tokenizer, draft, draft_tokenizer
        self.limits = limits or Limits()
        threads = torch.get_num_threads()
        self._worker = ThreadPoolExecutor(1, "race", initializer=lambda: torch.set_num_threads(threads))
        self._refused: set[str] = set()  # methods that the model cannot do

    @property
    def facts(self) -> dict[str, Any]:
        """Model and machine, for the page and the record."""
        facts = {
            "model": _name(self.model),
            "architecture": type(self.model).__name__,
            "parameters": num_parameters(self.model),
            "dtype": precision_of(self.model),
            "device": str(input_device(self.model)),
            "threads": torch.get_num_threads(),
            "tier": hf_specdec.capability(self.model).tier,
        }
        if self.draft is not None:
            facts["draft_parameters"] = num_parameters(self.draft)
        return facts

    @property
    def is_chat(self) -> bool:
        """True where prompts are messages to a chat model, and go through its template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def methods(self) -> dict[str, str]:
        """Methods that can race here, and what they are called."""
        left_out = {*self._refused, *(WITH_DRAFT if self.draft is None else ())}
        kind = "raft head" if isinstance(self.draft, DraftHead) else "raft model"
        return {
            name: label.replace("raft model", kind) for name, label in METHOD_LABELS.items() if name not in left_out
        }

    def warm_up(self) -> None:
        """Let every method try the model once, so that no visitor waits for a probe or for measuring costs.

        Those that the model cannot do race no more.
        """

        def run() -> None:
            inputs = self._encode(WARM_UP_PROMPT)
            for method in (PLAIN, *self.methods):
                settings = Settings(prompt=WARM_UP_PROMPT, max_new_tokens=WARM_UP_TOKENS)
                try:
                    self._lane(inputs, settings, method, MethodState(), Stop().begin(self.limits.max_seconds), None)
                except SpecError as error:
                    logger.warning("%s: %s", method, error)
                    self._refused.add(method)

        self._worker.submit(run).result()

    def start(self, settings: Settings, memories: Memories, stop: Stop) -> Running:
        """Begin a race, or wait for its turn.

        Args:
            memories: of this visitor: read and written where the settings allow it, else neither.

        Raises:
            ConfigError: the settings go beyond the limits.
        """
        settings.check_within(self.limits, self.methods)
        inputs = self._encode(settings.prompt)
        length, most = inputs["input_ids"].shape[1], self.limits.max_prompt_tokens
        if not 0 < length <= most:
            raise ConfigError("prompt", f"must have 1 to {most} tokens", f"{length} tokens", "Shorten it.")
        positions, new = max_positions(self.model.config), settings.max_new_tokens
        if positions is not None and not self.model.config.is_encoder_decoder and length + new > positions:
            rule = f"must leave {new} of the model's {positions} positions for new tokens"
            raise ConfigError("prompt", rule, f"{length} tokens", "Shorten it, or ask for fewer new tokens.")
        running = Running(Future())
        running.future = self._worker.submit(self._race, settings, inputs, memories, stop, running)
        return running

    def _race(
        self,
        settings: Settings,
        inputs: Mapping[str, torch.Tensor],
        memories: Memories,
        stop: Stop,
        running: Running,
    ) -> Race:
        lanes: list[Lane] = []
        known = dict(memories) if settings.remembers else {}
        for method in (PLAIN, *settings.methods):
            if stop.is_over and lanes:
                break
            method_state = copy.deepcopy(known.get(method, MethodState()))
            lane = self._lane(inputs, settings, method, method_state, stop, running)
            if lanes:
                lane = replace(lane, num_equal=_num_equal(lanes[0].token_ids, lane.token_ids))
            lanes.append(lane)
            known[method] = method_state
        if settings.remembers:
            memories.update(known)
        is_exact = precision_of(self.model) == "float32"
        return Race(settings.prompt, tuple(lanes), self.facts, asdict(settings), is_exact)

    def _lane(
        self,
        inputs: Mapping[str, torch.Tensor],
        settings: Settings,
        method: str,
        method_state: MethodState,
        stop: Stop,
        running: Running | None,
    ) -> Lane:
        """One call of `generate`, watched."""
        label = self.methods.get(method, PLAIN_LABEL)
        recorder = Recorder(self.tokenizer, inputs["input_ids"][0].tolist(), stop)
        if running is not None:
            running.label, running.recorder = label, recorder
        options: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "do_sample": settings.temperature > 0}
        if settings.temperature > 0:
            options["temperature"] = float(settings.temperature)  # a browser's 2.0 arrives as the integer 2
            torch.manual_seed(settings.seed)
        if method != PLAIN:
            name = method.partition("+")[0]
            if name in WITH_DRAFT and isinstance(self.draft, DraftHead):
                name = self.draft.methods[0]
            options |= {"spec_method": name, "spec_config": settings.config_of(method)}
        if method in WITH_DRAFT:
            options["assistant_model"] = self.draft
            if self.draft_tokenizer is not None:
                options |= {"tokenizer": self.tokenizer, "assistant_tokenizer": self.draft_tokenizer}
        with using_method_state(self.model, method_state), torch.inference_mode():
            self.model.generate(**inputs, **options, **recorder.arguments(observes=method != PLAIN))
        is_cut = stop.is_over and len(recorder.token_ids) < settings.max_new_tokens
        lane = recorder.lane(method, label, is_cut=is_cut)
        if method != PLAIN and not lane.steps and len(lane.tokens) > 1:
            lane = replace(lane, note=f"Decoded plainly: {hf_specdec.capability(self.model).reason}")
        return lane

    def _encode(self, prompt: str) -> dict[str, torch.Tensor]:
        """Ids and mask, `(1, length)` each."""
        if self.is_chat:
            prompt = chat_text(self.tokenizer, [{"role": "user", "content": prompt}])
        encoded = self.tokenizer(prompt, add_special_tokens=not self.is_chat, return_tensors="pt", verbose=False)
        return {name: encoded[name].to(input_device(self.model)) for name in ("input_ids", "attention_mask")}


def _name(model: PreTrainedModel) -> str:
    """Name for people: the last part of its path."""
    path = model.config.name_or_path.rstrip("/")
    return "the embedded model" if path == embedded.path("target") else path.rpartition("/")[2]


def _num_equal(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Tokens that both begin with."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))
