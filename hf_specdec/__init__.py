"""Speculative decoding for any transformers model: faster generation, the same result.

import hf_specdec
hf_specdec.enable(model)
model.generate(**inputs, spec_method="auto")

A name is imported from its module when it is first used, so that importing the package costs little.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hf_specdec.errors import (
    CheckpointError,
    ConfigError,
    MissingExtraError,
    RankError,
    SpecError,
    UnsupportedModelError,
)
from hf_specdec.loading import embedded

__version__ = "0.1.0"

__all__ = [
    "AutoDraftHead",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoSpecConfig",
    "CallPlan",
    "Capability",
    "CheckpointError",
    "ConfigError",
    "DFlashConfig",
    "DraftModelConfig",
    "DraftTree",
    "DraftedNode",
    "Drafter",
    "Eagle3Config",
    "LookaheadConfig",
    "ManyResult",
    "MissingExtraError",
    "MtpConfig",
    "PerRow",
    "PlainConfig",
    "PrefixCache",
    "PromptLookupConfig",
    "RankError",
    "SourceVote",
    "SpecConfig",
    "SpecError",
    "SpecGenerationMixin",
    "SpecMemory",
    "SpecOutput",
    "SpecStats",
    "SpecStep",
    "TreeBuilder",
    "UnsupportedModelError",
    "__version__",
    "capability",
    "decode",
    "disable",
    "embedded",
    "enable",
    "fetch",
    "generate_many",
    "grammar",
    "max_draft_len",
    "spec_memory",
]

_NAMES = {  # by module
    "api.enable": ("SpecGenerationMixin", "capability", "decode", "disable", "enable", "spec_memory"),
    "api.many_prompts.generate_many": ("generate_many",),
    "api.many_prompts.job": ("ManyResult",),
    "cache.prefix_cache": ("PrefixCache",),
    "common.stats": ("CallPlan", "DraftedNode", "SourceVote", "SpecOutput", "SpecStats", "SpecStep"),
    "common.tree": ("DraftTree", "TreeBuilder"),
    "engine.sampling.grammar": ("grammar",),
    "engine.sampling.per_row": ("PerRow",),
    "forward.capabilities.probe": ("Capability",),
    "loading.auto": ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM"),
    "loading.drafts": ("AutoDraftHead",),
    "loading.published": ("fetch",),
    "methods.auto.drafter": ("AutoSpecConfig",),
    "methods.auto.spec_memory": ("SpecMemory",),
    "methods.common.drafter": ("Drafter",),
    "methods.common.config": ("SpecConfig",),
    "methods.dflash.method": ("DFlashConfig",),
    "methods.draft_model.config": ("DraftModelConfig",),
    "methods.eagle3.method": ("Eagle3Config",),
    "methods.lookahead.config": ("LookaheadConfig", "max_draft_len"),
    "methods.mtp.method": ("MtpConfig",),
    "methods.plain.method": ("PlainConfig",),
    "methods.prompt_lookup.config": ("PromptLookupConfig",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

if TYPE_CHECKING:
    from hf_specdec.api.enable import SpecGenerationMixin, capability, decode, disable, enable, spec_memory
    from hf_specdec.api.many_prompts.generate_many import generate_many
    from hf_specdec.api.many_prompts.job import ManyResult
    from hf_specdec.cache.prefix_cache import PrefixCache
    from hf_specdec.common.stats import CallPlan, DraftedNode, SourceVote, SpecOutput, SpecStats, SpecStep
    from hf_specdec.common.tree import DraftTree, TreeBuilder
    from hf_specdec.engine.sampling.grammar import grammar
    from hf_specdec.engine.sampling.per_row import PerRow
    from hf_specdec.forward.capabilities.probe import Capability
    from hf_specdec.loading.auto import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from hf_specdec.loading.drafts import AutoDraftHead
    from hf_specdec.loading.published import fetch
    from hf_specdec.methods.auto.drafter import AutoSpecConfig
    from hf_specdec.methods.auto.spec_memory import SpecMemory
    from hf_specdec.methods.common.config import SpecConfig
    from hf_specdec.methods.common.drafter import Drafter
    from hf_specdec.methods.dflash.method import DFlashConfig
    from hf_specdec.methods.draft_model.config import DraftModelConfig
    from hf_specdec.methods.eagle3.method import Eagle3Config
    from hf_specdec.methods.lookahead.config import LookaheadConfig, max_draft_len
    from hf_specdec.methods.mtp.method import MtpConfig
    from hf_specdec.methods.plain.method import PlainConfig
    from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
else:

    def __getattr__(name: str) -> Any:
        """Import a public name from its module; Python looks here once, when the name is not there yet (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        return found

    def __dir__() -> list[str]:
        return sorted(__all__)
