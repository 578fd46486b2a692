"""Base of all configurations: the fields of each, the ways to write one down, and the checks they share.

PromptLookupConfig(max_draft_len=10)
PromptLookupConfig.parse({"max_draft_len": 10})
PromptLookupConfig.parse([10, 2, [0]])
"""

import ast
import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

from hf_specdec.errors import ConfigError, unknown_name

MAX_STEP_TOKENS = 4096  # drafted in one step: its mask has as many columns squared
LEAST_TEMPERATURE = 1e-6  # logits divided by much less are infinite
MAX_KEPT = 1 << 31  # tokens or entries of a memory
MAX_NGRAM_SIZE = 128  # tokens: an index has an entry for each size at each place of a text

Engine = Literal["loop", "assisted"]
Pool = Literal["request", "shared"]  # texts that a method drafts from: of this call alone, or of earlier ones too


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """Fields that every method understands.

    Args:
        engine (`str`, *optional*, defaults to `"loop"`):
            `"loop"` is this package's own decoding loop. `"assisted"` runs the same drafter, as a chain, inside
            transformers' assisted decoding, with that loop's limits (batch 1, stopping criteria once per block,
            sampling not seed-exact). It takes no `assistant_model`.
    """

    engine: Engine = "loop"

    aliases: ClassVar[Mapping[str, str]] = {}
    list_form: ClassVar[tuple[str, ...]] = ()
    min_list_entries: ClassVar[int] = 1
    device_fields: ClassVar[Mapping[str, str]] = {}  # "target" or "draft" -> the field that lists its devices

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, get_args(Engine))

    @property
    def is_seed_exact(self) -> bool:
        """True if sampling gives the text that the seed gives without speculation."""
        return self.engine == "loop" and not self.draws_drafts

    @property
    def node_budget(self) -> int:
        """Most drafted tokens a step, the root not counted."""
        return 0

    @property
    def step_budget(self) -> int:
        """Most tokens a step computes besides the current one."""
        return self.node_budget

    @property
    def translated_budget(self) -> int:
        """The same where a draft model has a tokenizer of its own, in the target's tokens."""
        return self.node_budget

    @property
    def draws_drafts(self) -> bool:
        """True if drafts are drawn, and accepted by the ratio of two models' probabilities, when sampling."""
        return False

    @property
    def fits_costs(self) -> bool:
        """True if each step drafts as many tokens as save time, by what the target's forwards cost."""
        return False

    @property
    def is_deterministic(self) -> bool:
        """True if what is drafted follows from the call alone, not from the clock or from earlier calls."""
        return False

    @property
    def device_lists(self) -> dict[str, Sequence[int | str]]:
        """The device lists that are given, by `"target"` and `"draft"`."""
        lists = {role: getattr(self, field) for role, field in self.device_fields.items()}
        return {role: devices for role, devices in lists.items() if devices is not None}

    def to_dict(self) -> dict[str, Any]:
        """The fields that are not at their defaults, as JSON values; `parse` reads them.

        transformers saves a generation configuration that holds this one with them.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: _json_value(value) for name, value in values.items() if value != defaults[name]}

    def check_within(self, reserved: Self, field: str) -> None:
        """Raise where this configuration, a call's, exceeds the one `reserved` for the model; most have no such limit.

        Raises:
            ConfigError: a limit is exceeded; the error names it under `field`.
        """

    def to_vllm(self, *, draft_model: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """The equivalent `speculative_config` of vLLM: `vllm.LLM(model, speculative_config=config.to_vllm())`.

        Args:
            draft_model (`str`, *optional*): folder or name of the draft model, for methods that need one.

        Raises:
            ConfigError: the method, or a field that is not at its default, has no equivalent there.
        """
        rule = "must be of a method that vLLM has"
        raise ConfigError("spec_config", rule, type(self).__name__, "It has ngram, draft_model and heads.")

    def to_tensorrt_llm(self, *, draft_model: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """The equivalent `speculative_config` of TensorRT-LLM's LLM API, as its YAML files have it.

        `decoding_type` names the class, `NGram` for `NGramDecodingConfig`; the rest are that class's arguments.

        Args:
            draft_model (`str`, *optional*): folder or name of the draft model, for methods that need one.

        Raises:
            ConfigError: the method, or a field that is not at its default, has no equivalent there.
        """
        rule = "must be of a method that TensorRT-LLM has"
        raise ConfigError("spec_config", rule, type(self).__name__, "It has lookahead, ngram, draft_target and heads.")

    def check_carried(self, project: str, *carried: str) -> None:
        """Raise where a field that `project` cannot be told is not at its default.

        Args:
            carried: names of fields that the export holds, or that only place models.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in carried and value != field.default:
                rule = f"must be {field.default!r} for {project}, which has no equivalent"
                raise ConfigError(field.name, rule, value, "Leave it out, or keep decoding here.")

    @classmethod
    def parse(cls, value: Any, field: str = "spec_config", base: Self | None = None) -> Self:
        """Build a configuration from an object, a dict, the list form, that list as a string, or `None` (defaults).

        Args:
            base (`SpecConfig`, *optional*): has the fields that a dict or a list leaves out; by default they are at
                their defaults.

        Raises:
            ConfigError: unknown key, wrong type, wrong length of the list form, or a value out of its range.
        """
        if value is None:
            return cls() if base is None else base
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.parse(cls._literal(value, field), field, base)
        base = cls() if base is None else base
        if isinstance(value, Mapping):
            return cls._changed(base, *cls._canonical(value, field))
        if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
            return dataclasses.replace(base, **cls._from_list(value, field))
        raise ConfigError(
            field,
            f"must be a list, a dict or {cls.__name__}(...)"
            if cls.list_form
            else f"must be a dict or {cls.__name__}(...)",
            value,
            "Pass one of them, or leave it out.",
        )

    @classmethod
    def _literal(cls, text: str, field: str) -> Any:
        """Reads a text in the notation of Python or JSON."""
        value = None
        for read in (ast.literal_eval, json.loads):
            with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                value = read(text)
                break
        if not isinstance(value, (list, tuple, dict)):
            rule = f"must be a {'list or ' if cls.list_form else ''}dict in the notation of Python or JSON"
            fields = dataclasses.fields(cls)[len(dataclasses.fields(SpecConfig)) :] or dataclasses.fields(cls)
            form = f"[{', '.join(cls.list_form)}]" if cls.list_form else f'{{"{fields[0].name}": ...}}'
            raise ConfigError(field, rule, text, f"Its form is {form}.")
        return value

    @classmethod
    def _changed(cls, base: Self, fields: dict[str, Any], keys: Mapping[str, str]) -> Self:
        """`base` with other fields; an error names the key that was given for a field."""
        try:
            return dataclasses.replace(base, **fields)
        except ConfigError as error:
            if (key := keys.get(error.field, error.field)) == error.field:
                raise
            raise ConfigError(key, error.rule, error.value, error.remedy) from error

    @classmethod
    def _canonical(cls, value: Mapping[str, Any], field: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Fields by their own names, and the key that set each; an alias that differs from its field is an error."""
        names = {f.name for f in dataclasses.fields(cls)}
        fields: dict[str, Any] = {}
        keys: dict[str, str] = {}  # the key that set each field
        for key, item in value.items():
            name = cls.aliases.get(key, key)
            if not isinstance(key, str) or name not in names:
                unknown = unknown_name(f"{field} key", key, names | set(cls.aliases))
                remedy = f"{unknown.remedy} These are the fields of {cls.__name__}."
                raise ConfigError(unknown.field, unknown.rule, key, remedy)
            if name in fields and not _same(fields[name], item):
                raise ConfigError(
                    key,
                    f"must agree with `{keys[name]}`, which is the same setting",
                    item,
                    "Give only one of the two.",
                )
            fields[name], keys[name] = item, key
        return fields, keys

    @classmethod
    def _from_list(cls, value: Sequence[Any], field: str) -> dict[str, Any]:
        """The fields that the entries are."""
        form = f"[{', '.join(cls.list_form)}]"
        if not cls.list_form:
            rule = f"must be a dict or {cls.__name__}(...)"
            raise ConfigError(field, rule, value, "This method has no list form.")
        least, most = cls.min_list_entries, len(cls.list_form)
        if not least <= len(value) <= most:
            counts = str(most) if least == most else f"{least} to {most}"
            raise ConfigError(field, f"must have {counts} entries, {form}", list(value), "Drop or add entries.")
        return dict(zip(cls.list_form, value, strict=False))


def check_positive(field: str, value: object, remedy: str, *, most: int | None = None) -> None:
    """Raise unless `value` is a whole number of at least 1, and at most `most` where that is given."""
    check_at_least(field, value, 1, remedy, most=most)


def check_at_least(field: str, value: object, least: int, remedy: str, *, most: int | None = None) -> None:
    """Raise unless `value` is a whole number of at least `least`, and at most `most` where that is given."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):  # type: ignore[operator]
        bounds = f"at least {least}" if most is None else f"at least {least} and at most {most}"
        raise ConfigError(field, f"must be a whole number of {bounds}", value, remedy)


def check_temperature(field: str, value: float | None, remedy: str) -> None:
    """Raise unless logits can be divided by `value`, if it is given."""
    if value is not None and not LEAST_TEMPERATURE <= value < math.inf:
        raise ConfigError(field, f"must be a number of at least {LEAST_TEMPERATURE:f}", value, remedy)


def check_flag(field: str, value: object, remedy: str = "Write True or False.") -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(field, "must be True or False", value, remedy)


def check_choice(field: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise unknown_name(field, value, choices)


def check_devices(field: str, value: object) -> None:
    """Raise unless `value` is `None` or a list of device indices (`0`) and names (`"cpu"`)."""
    rule, remedy = "must be a non-empty list of device indices or names", 'Write [0], [4, 5] or ["cpu"].'
    if value is None:
        return
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        raise ConfigError(field, rule, value, remedy)
    for item in value:
        is_index = isinstance(item, int) and not isinstance(item, bool) and item >= 0
        if not is_index and not (isinstance(item, str) and item):
            raise ConfigError(field, rule, value, remedy)


def _json_value(value: object) -> Any:
    """The same for JSON: a path as text, a tuple as a list."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_json_value(item) for item in value]
    return value


def _same(value: object, other: object) -> bool:
    """True if two values of one setting are equal; values that no setting takes are not."""
    try:
        return bool(value == other)
    except Exception:  # noqa: BLE001 - whatever a value's own comparison raises
        return False
