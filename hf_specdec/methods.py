"""The methods by name: for each its configuration class and how to make its drafter.

A new method is one drafter file, one configuration class and one entry here.

    method = resolve("ngram")                       # the entry of "prompt_lookup"
    drafter = method.make(method.config_class(), memory)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hf_specdec.config import PlainConfig, PromptLookupConfig, SpecConfig
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.ngram_pool import NgramPool
from hf_specdec.drafters.plain import PlainDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.errors import unknown_name

__all__ = ["METHODS", "Memory", "Method", "config_arguments", "resolve"]


@dataclass(slots=True)
class Memory:
    """What a model remembers between calls, by method; kept on the model, copied and pickled with it."""

    pools: dict[str, Any] = field(default_factory=dict)

    def ngram_pool(self, config: PromptLookupConfig) -> NgramPool:
        """The shared pool of prompt lookup; made at first use, made anew when its size changes."""
        pool = self.pools.get("prompt_lookup")
        if not isinstance(pool, NgramPool) or pool.max_tokens != config.max_pool_tokens:
            pool = self.pools["prompt_lookup"] = NgramPool(config.max_pool_tokens)
        return pool


@dataclass(frozen=True, slots=True)
class Method:
    """One entry of the registry.

    Attributes:
        name (`str`): what `spec_method` says.
        aliases (`tuple[str, ...]`): other names for it.
        config_class (`type[SpecConfig]`): its configuration.
        config_arguments (`tuple[str, ...]`): arguments of `generate` that carry its configuration.
        summary (`str`): one line for tables.
        make: makes the drafter of one row of one call.
        budget: most tokens drafted a step under a configuration.
    """

    name: str
    aliases: tuple[str, ...]
    config_class: type[SpecConfig]
    config_arguments: tuple[str, ...]
    summary: str
    make: Callable[[Any, Memory], Drafter]
    budget: Callable[[Any], int]


def _plain(config: PlainConfig, memory: Memory) -> Drafter:
    return PlainDrafter()


def _prompt_lookup(config: PromptLookupConfig, memory: Memory) -> Drafter:
    return PromptLookupDrafter(config, memory.ngram_pool(config) if config.pool == "shared" else None)


_ENTRIES = (
    Method(
        name="plain",
        aliases=(),
        config_class=PlainConfig,
        config_arguments=(),
        summary="this package's loop with nothing drafted",
        make=_plain,
        budget=lambda config: 0,
    ),
    Method(
        name="prompt_lookup",
        aliases=("ngram",),
        config_class=PromptLookupConfig,
        config_arguments=("prompt_lookup_config", "ngram_config"),
        summary="drafts what followed the last tokens earlier in the text",
        make=_prompt_lookup,
        budget=lambda config: config.node_budget,
    ),
)
METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _ENTRIES})


def resolve(name: str) -> Method:
    """The method called `name`, by its name or an alias.

    Raises:
        ConfigError: there is none; the error names the nearest match.
    """
    for method in METHODS.values():
        if name == method.name or name in method.aliases:
            return method
    raise unknown_name("spec_method", name, [n for m in METHODS.values() for n in (m.name, *m.aliases)])


def config_arguments() -> dict[str, Method]:
    """Arguments of `generate` that carry a configuration, and the method each belongs to."""
    return {argument: method for method in METHODS.values() for argument in method.config_arguments}
