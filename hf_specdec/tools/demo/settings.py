"""Settings of a race, checked, their short form in a link, and prompts that show where speculation shines."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.methods.common.config import check_at_least, check_positive, check_temperature

METHOD_LABELS = {  # of the rows of `bench` that can race
    "auto": "Auto",
    "prompt_lookup": "Prompt lookup",
    "lookahead": "Lookahead",
    "draft_model": "Draft model",
    "auto+draft_model": "Auto + draft model",
    "head": "Draft head",
    "auto+head": "Auto + draft head",
}
MAX_METHODS = 3
NUM_TOKENS = 96
MAX_TEMPERATURE, MAX_SEED = 2.0, 2**31 - 1
IN_RANGE = "Choose a value in this range."


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one visitor.

    Attributes:
        max_new_tokens (`int`): most tokens of one lane.
        max_prompt_tokens (`int`): longest prompt.
        max_prompt_chars (`int`): longest prompt in characters.
        max_seconds (`float`): longest race, all lanes together; what was written by then is shown.
        queue_size (`int`): most visitors that wait.
    """

    max_new_tokens: int = 256
    max_prompt_tokens: int = 1024
    max_prompt_chars: int = 8192
    max_seconds: float = 120.0
    queue_size: int = 16

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_prompt_tokens", "max_prompt_chars", "queue_size"):
            check_positive(name, getattr(self, name), "Leave it out for the default.")
        if not self.max_seconds > 0:
            raise ConfigError("max_seconds", "must be above 0", self.max_seconds, "Leave it out for the default.")

    @property
    def usual_tokens(self) -> int:
        """Tokens of a lane by default."""
        return min(NUM_TOKENS, self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class Knob:
    """A slider for one field of a method's configuration, with its range."""

    method: str
    field: str
    least: int
    most: int
    label: str
    info: str

    @property
    def name(self) -> str:
        """Name in a link and in `Settings.values`."""
        return f"{self.method}.{self.field}"

    @property
    def default(self) -> int:
        """Value of the method's configuration; 0 where it leaves the choice to the method."""
        from hf_specdec.methods.registry import resolve  # torch, which the command's limits do not need

        return getattr(resolve(self.method).config_class(), self.field) or 0


KNOBS = (
    Knob("auto", "num_nodes", 0, 64, "Tokens a step", "0 drafts as many as save time on this machine, or none."),
    Knob("prompt_lookup", "max_draft_len", 1, 20, "Copied tokens", "Most tokens copied in one go."),
    Knob("prompt_lookup", "max_matching_ngram_size", 1, 5, "Matching tokens", "Most last tokens that are looked up."),
    Knob("lookahead", "window_size", 2, 15, "Window W", "Columns of the window of guesses."),
    Knob("lookahead", "ngram_size", 2, 7, "N-gram N", "Tokens of an n-gram. A step adds at most this many."),
    Knob("lookahead", "verification_set_size", 1, 15, "Candidates G", "Most n-grams verified a step."),
    Knob("draft_model", "draft_len", 0, 16, "Draft length", "0 drafts as many as save time, or none."),
)
LABELS = {  # of fields, for errors
    "prompt": "Prompt",
    "methods": "Methods",
    "temperature": "Temperature",
    "seed": "Seed",
    "max_new_tokens": "New tokens",
} | {knob.name: f"{METHOD_LABELS[knob.method]}: {knob.label}" for knob in KNOBS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one race.

    Attributes:
        prompt (`str`): the text to continue.
        methods (`tuple[str, ...]`): what races, one to three of `METHOD_LABELS`.
        max_new_tokens (`int`): tokens of each lane.
        temperature (`float`): 0 is greedy.
        seed (`int`): of sampling.
        values (`Mapping[str, int]`): the methods' parameters by `Knob.name`; what is missing has its default.

    Raises:
        ConfigError: a value out of its range, or an unknown name.
    """

    prompt: str
    methods: tuple[str, ...] = ("auto",)
    max_new_tokens: int = NUM_TOKENS
    temperature: float = 0.0
    seed: int = 0
    values: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) or not self.prompt:
            raise ConfigError("prompt", "must hold some text", self.prompt, "Type a prompt, or choose an example.")
        if not 0 < len(set(self.methods)) == len(self.methods) <= MAX_METHODS:
            labels = [METHOD_LABELS.get(method, method) for method in self.methods]
            raise ConfigError("methods", f"must be 1 to {MAX_METHODS} different ones", labels, "Choose what races.")
        for method in self.methods:
            if method not in METHOD_LABELS:
                raise unknown_name("methods", method, METHOD_LABELS)
        knobs = {knob.name: knob for knob in KNOBS}
        for name, value in self.values.items():
            if name not in knobs:
                raise unknown_name("parameter", name, knobs)
            check_at_least(name, value, knobs[name].least, IN_RANGE, most=knobs[name].most)
        if self.temperature != 0:
            check_temperature("temperature", self.temperature, "0 takes the likeliest token each time.")
        if self.temperature > MAX_TEMPERATURE:
            raise ConfigError("temperature", f"must be at most {MAX_TEMPERATURE:g}", self.temperature, IN_RANGE)
        check_at_least("seed", self.seed, 0, IN_RANGE, most=MAX_SEED)
        check_positive("max_new_tokens", self.max_new_tokens, IN_RANGE)

    def check_within(self, limits: Limits, methods: Collection[str]) -> None:
        """Raise unless a page allows the race.

        Args:
            methods: those that can race on its model.

        Raises:
            ConfigError: too many tokens, too long a prompt, or another method.
        """
        if len(self.prompt) > limits.max_prompt_chars:
            rule = f"must have at most {limits.max_prompt_chars} characters"
            raise ConfigError("prompt", rule, f"{len(self.prompt)} characters", "Shorten it.")
        check_positive("max_new_tokens", self.max_new_tokens, IN_RANGE, most=limits.max_new_tokens)
        if missing := [METHOD_LABELS[method] for method in self.methods if method not in methods]:
            rule = f"must be among {', '.join([METHOD_LABELS[name] for name in methods])} on this page"
            raise ConfigError("methods", rule, missing[0], "Drafts need the option --assistant-model.")

    def config_of(self, method: str) -> dict[str, Any]:
        """Configuration of a method, as `spec_config` takes it; no call drafts from the text of another."""
        name = method.partition("+")[0]
        knobs = [knob for knob in KNOBS if knob.method == name]
        config: dict[str, Any] = {knob.field: self.values.get(knob.name, knob.default) or None for knob in knobs}
        return config | ({"pool": "request"} if name in ("auto", "prompt_lookup") else {})

    def fields(self) -> dict[str, Any]:
        """All values by their names: fields first, then knobs, defaults among them."""
        values = {knob.name: self.values.get(knob.name, knob.default) for knob in KNOBS}
        names = ("prompt", "methods", "max_new_tokens", "temperature", "seed")
        return {name: getattr(self, name) for name in names} | values

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Settings of such values; what is missing has its default."""
        named = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__ and name != "values"}
        return cls(**named, values={name: value for name, value in fields.items() if name not in named})

    def to_query(self) -> str:
        """Query of a link that opens the page with these settings; what has its default is left out."""
        defaults = Settings(prompt=" ").fields() | {"methods": None}
        fields = {name: value for name, value in self.fields().items() if value != defaults[name]}
        return urlencode(fields | {"methods": ",".join(self.methods)})

    @classmethod
    def from_query(cls, query: Mapping[str, str], limits: Limits) -> Self:
        """Settings of a link; what it leaves out has its default, within the limits.

        Raises:
            ConfigError: no prompt, an unknown name, or a value out of its range.
        """
        fields: dict[str, Any] = {"prompt": "", "max_new_tokens": limits.usual_tokens}
        for name, text in query.items():
            try:
                number = {"prompt": str, "methods": str, "temperature": float}.get(name, int)
                fields[name] = tuple(text.split(",")) if name == "methods" else number(text)
            except ValueError:
                raise ConfigError(name, "must be a number", text, "Correct the link.") from None
        return cls.from_fields(fields)


EXAMPLES = json.loads((Path(__file__).parent / "assets" / "gallery.json").read_text("utf-8"))
GALLERY, CHAT_GALLERY = EXAMPLES["code"], EXAMPLES["chat"]  # each with name, prompt, and what it shows
