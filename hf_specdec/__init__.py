"""Speculative decoding for any transformers model: faster generation, the same result.

import hf_specdec
hf_specdec.enable(model)
model.generate(**inputs, spec_method="prompt_lookup")
"""

from hf_specdec import embedded
from hf_specdec.api import SpecGenerationMixin, capability, decode, disable, enable, spec_memory
from hf_specdec.capabilities.probe import Capability
from hf_specdec.errors import (
    CheckpointError,
    ConfigError,
    MissingExtraError,
    RankError,
    SpecError,
    UnsupportedModelError,
)
from hf_specdec.loading import AutoDraftHead, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from hf_specdec.many_prompts import ManyResult, generate_many
from hf_specdec.methods.auto.config import AutoSpecConfig
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.base import Drafter
from hf_specdec.methods.config import SpecConfig
from hf_specdec.methods.draft_model.config import DraftModelConfig
from hf_specdec.methods.lookahead.config import LookaheadConfig, max_draft_len
from hf_specdec.methods.plain.config import PlainConfig
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.observer import SpecStep
from hf_specdec.self_draft import self_draft
from hf_specdec.stats import SpecStats
from hf_specdec.tree import DraftTree, TreeBuilder

__version__ = "0.1.0"

__all__ = [
    "AutoDraftHead",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoSpecConfig",
    "Capability",
    "CheckpointError",
    "ConfigError",
    "DraftModelConfig",
    "DraftTree",
    "Drafter",
    "LookaheadConfig",
    "ManyResult",
    "MissingExtraError",
    "PlainConfig",
    "PromptLookupConfig",
    "RankError",
    "SpecConfig",
    "SpecError",
    "SpecGenerationMixin",
    "SpecMemory",
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
    "generate_many",
    "max_draft_len",
    "self_draft",
    "spec_memory",
]
