"""What a user may set: one frozen, checked dataclass per method, a file each.

A configuration is given as an object, as a dict, or in the list form of TensorRT-LLM's examples. Knows nothing
about drafters; `methods.py` joins the two.
"""

from hf_specdec.config.auto import AutoSpecConfig
from hf_specdec.config.base import PlainConfig, SpecConfig
from hf_specdec.config.draft_model import DraftModelConfig
from hf_specdec.config.lookahead import LookaheadConfig, max_draft_len
from hf_specdec.config.prompt_lookup import PromptLookupConfig

__all__ = [
    "AutoSpecConfig",
    "DraftModelConfig",
    "LookaheadConfig",
    "PlainConfig",
    "PromptLookupConfig",
    "SpecConfig",
    "max_draft_len",
]
