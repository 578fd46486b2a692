"""Settings of a race, checked, and their short form in a link."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

from hf_specdec.errors import ConfigError, unknown_name
from hf_specdec.methods.common.config import check_at_least, check_positive
from hf_specdec.methods.registry import resolve

METHOD_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "auto": "Auto",
        "prompt_lookup": "Prompt lookup",
        "lookahead": "Lookahead",
        "draft_model": "Draft model",
        "auto+draft_model": "Auto + draft model",
    }
)
WITH_DRAFT = ("draft_model", "auto+draft_model")
MAX_METHODS = 3
NUM_TOKENS = 96  # of a lane, where no one says how many
MAX_POOL_TOKENS, MAX_RECYCLED = 50_000, 16_384  # bounds of one visitor's memory
IN_RANGE = "Choose a value in this range."
LEAST_TEMPERATURE, MAX_TEMPERATURE, MAX_SEED = 0.01, 2.0, 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one visitor.

    Attributes:
        max_new_tokens (`int`): most tokens of one lane.
        max_prompt_tokens, max_prompt_chars (`int`): longest prompt.
        max_seconds (`float`): longest race, all lanes together; what was written by then is shown.
        queue_size (`int`): most visitors that wait.
    """

    max_new_tokens: int = 256
    max_prompt_tokens: int = 1024
    max_prompt_chars: int = 8192
    max_seconds: float = 120.0
    queue_size: int = 16

    @property
    def usual_tokens(self) -> int:
        """Tokens of a lane where no one says how many."""
        return min(NUM_TOKENS, self.max_new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One parameter of a method, as the page offers it.

    Attributes:
        method, field (`str`): the method and the field of its configuration.
        label, info (`str`): its name and a line of explanation.
        least, most (`int`): its range.
    """

    method: str
    field: str
    label: str
    info: str
    least: int
    most: int

    @property
    def name(self) -> str:
        """Its name in a link and in `Settings.values`."""
        return f"{self.method}.{self.field}"

    @property
    def default(self) -> int:
        """Value of the method's configuration; 0 where it leaves the choice to the method."""
        return getattr(resolve(self.method).config_class(), self.field) or 0


KNOBS: tuple[Knob, ...] = (
    Knob(
        method="auto",
        field="num_nodes",
        label="Tokens a step",
        info="0 drafts as many as save time on this machine, or none. Other values draft that many every step.",
        least=0,
        most=64,
    ),
    Knob(
        method="auto",
        field="draft_len",
        label="Draft model's forwards a step",
        info="With the draft model: most forwards of it before a verify step.",
        least=1,
        most=10,
    ),
    Knob(
        method="prompt_lookup",
        field="max_draft_len",
        label="Draft length",
        info="Most tokens copied in one go from where the last tokens stood before.",
        least=1,
        most=20,
    ),
    Knob(
        method="prompt_lookup",
        field="max_matching_ngram_size",
        label="Matching tokens",
        info="How many of the last tokens are looked up in the text, at most.",
        least=1,
        most=5,
    ),
    Knob(
        method="prompt_lookup",
        field="num_branches",
        label="Branches",
        info="Continuations followed side by side; 1 drafts a chain, more draft a tree.",
        least=1,
        most=8,
    ),
    Knob(
        method="lookahead",
        field="window_size",
        label="Window W",
        info="Columns of the window of guesses: n-grams collected a step.",
        least=2,
        most=15,
    ),
    Knob(
        method="lookahead",
        field="ngram_size",
        label="N-gram N",
        info="Tokens of an n-gram. A step emits at most this many.",
        least=2,
        most=7,
    ),
    Knob(
        method="lookahead",
        field="verification_set_size",
        label="Candidates G",
        info="Most n-grams verified a step. A step computes about (W + G) x (N - 1) tokens.",
        least=1,
        most=15,
    ),
    Knob(
        method="draft_model",
        field="draft_len",
        label="Draft length",
        info="Most tokens the draft model writes before the target verifies them.",
        least=1,
        most=10,
    ),
    Knob(
        method="draft_model",
        field="num_branches",
        label="Branches",
        info="Children of a node of the draft; 1 drafts a chain, more draft a tree.",
        least=1,
        most=8,
    ),
)


def default_values() -> dict[str, int]:
    """Every knob's default, by name."""
    return {knob.name: knob.default for knob in KNOBS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One race.

    Attributes:
        prompt (`str`): the text to continue.
        methods (`tuple[str, ...]`): what races against plain generate, one to three of `METHOD_LABELS`.
        values (`Mapping[str, int]`): the methods' parameters by `Knob.name`; what is missing has its default.
        temperature (`float`): 0 is greedy.
        seed (`int`): of sampling.
        max_new_tokens (`int`): tokens of each lane.
        remembers (`bool`): whether methods may draft from this visitor's earlier races.

    Raises:
        ConfigError: a value out of its range, or an unknown name.
    """

    prompt: str
    methods: tuple[str, ...] = ("auto",)
    values: Mapping[str, int] = field(default_factory=default_values)
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int = NUM_TOKENS
    remembers: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) or not self.prompt:
            raise ConfigError("prompt", "must hold some text", self.prompt, "Type a prompt, or choose an example.")
        if not self.methods or len(self.methods) > MAX_METHODS:
            rule, remedy = f"must be 1 to {MAX_METHODS} methods", "Choose what races against plain generate."
            raise ConfigError("methods", rule, list(self.methods), remedy)
        for method in self.methods:
            if method not in METHOD_LABELS:
                raise unknown_name("methods", method, METHOD_LABELS)
            if self.methods.count(method) > 1:
                raise ConfigError("methods", "must name each method once", list(self.methods), "Leave one out.")
        known = {knob.name: knob for knob in KNOBS}
        for name, value in self.values.items():
            if name not in known:
                raise unknown_name("parameter", name, known)
            knob = known[name]
            check_at_least(name, value, knob.least, IN_RANGE, most=knob.most)
        is_number = isinstance(self.temperature, int | float) and not isinstance(self.temperature, bool)
        if not is_number or not (self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE):
            rule = f"must be 0, or a number from {LEAST_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
            raise ConfigError("temperature", rule, self.temperature, "0 takes the likeliest token each time.")
        check_at_least("seed", self.seed, 0, IN_RANGE, most=MAX_SEED)
        check_positive("max_new_tokens", self.max_new_tokens, IN_RANGE)

    def check_within(self, limits: Limits, methods: Mapping[str, str]) -> None:
        """Raise unless this page's limits allow the race.

        Args:
            methods: those that can race on its model, and what they are called.

        Raises:
            ConfigError: too many tokens, too long a prompt, or another method.
        """
        if len(self.prompt) > limits.max_prompt_chars:
            rule = f"must have at most {limits.max_prompt_chars} characters"
            raise ConfigError("prompt", rule, f"{len(self.prompt)} characters", "Shorten it.")
        check_positive("max_new_tokens", self.max_new_tokens, IN_RANGE, most=limits.max_new_tokens)
        for method in self.methods:
            if method not in methods and method in WITH_DRAFT and not methods.keys() & WITH_DRAFT:
                remedy = "Start the demo with --draft-model, or choose another method."
                raise ConfigError("methods", "must do without a draft model here", METHOD_LABELS[method], remedy)
            if method not in methods:
                rule, remedy = "must be one that this model can do", f"Choose {' or '.join(methods.values())}."
                raise ConfigError("methods", rule, METHOD_LABELS[method], remedy)

    def config_of(self, method: str) -> dict[str, Any]:
        """The configuration of a method, as `spec_config` takes it."""
        name = method.partition("+")[0]
        values = default_values() | dict(self.values)
        config: dict[str, Any] = {knob.field: values[knob.name] for knob in KNOBS if knob.method == name}
        if name == "auto" and config["num_nodes"] == 0:
            config["num_nodes"] = None
        if name in ("auto", "prompt_lookup"):
            config |= {"pool": "shared" if self.remembers else "request", "max_pool_tokens": MAX_POOL_TOKENS}
        if name == "auto":
            config["max_recycled"] = MAX_RECYCLED
        return config

    def to_query(self) -> str:
        """The query of a link that opens the page with these settings; what has its default is left out."""
        fields: dict[str, Any] = {"prompt": self.prompt, "methods": ",".join(self.methods)}
        plain = {"temperature": 0.0, "seed": 0, "max_new_tokens": NUM_TOKENS}
        fields |= {name: getattr(self, name) for name, default in plain.items() if getattr(self, name) != default}
        defaults = default_values()
        fields |= {name: value for name, value in self.values.items() if value != defaults[name]}
        return urlencode(fields | ({"remembers": 1} if self.remembers else {}))

    @classmethod
    def from_query(cls, query: Mapping[str, str], limits: Limits) -> "Settings":
        """The settings of a link; what it does not say has its default, within the limits.

        Raises:
            ConfigError: no prompt, an unknown name, or a value out of its range.
        """
        own = {"prompt", "methods", "temperature", "seed", "max_new_tokens", "remembers"}
        given: dict[str, Any] = {"prompt": query.get("prompt", ""), "max_new_tokens": limits.usual_tokens}
        if "methods" in query:
            given["methods"] = tuple(query["methods"].split(","))
        if "temperature" in query:
            given["temperature"] = _number("temperature", query["temperature"], float)
        for name in ("seed", "max_new_tokens"):
            if name in query:
                given[name] = _number(name, query[name], int)
        values = {name: _number(name, text, int) for name, text in query.items() if name not in own}
        return cls(**given, values=default_values() | values, remembers=query.get("remembers") == "1")


def _number(name: str, text: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(text)
    except ValueError:
        rule = f"must be a {'whole ' if kind is int else ''}number"
        raise ConfigError(name, rule, text, "Correct the link.") from None
