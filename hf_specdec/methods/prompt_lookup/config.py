"""Prompt lookup's parameters."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from hf_specdec.methods.common.config import (
    MAX_NGRAM_SIZE,
    MAX_STEP_TOKENS,
    Pool,
    SpecConfig,
    check_choice,
    check_devices,
    check_positive,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookupConfig(SpecConfig):
    """Prompt lookup: draft what followed the last tokens when they stood in the text before.

    Source: https://github.com/apoorvumang/prompt-lookup-decoding; parameters and list form of TensorRT-LLM's NGram.

    Args:
        max_draft_len (`int`, *optional*, defaults to `10`):
            Most tokens drafted a step. Aliases: `prompt_lookup_num_tokens`, `num_draft_tokens`.
        max_matching_ngram_size (`int`, *optional*, defaults to `2`):
            Longest suffix of the text, in tokens, that is looked up; shorter ones are tried where it is not found.
        draft_len_per_match (`int | str`, *optional*, defaults to `"auto"`):
            A chain is at most this many times as long as the matching text: short matches rarely hold for long.
            `"auto"` follows a match as long as a token's chance exceeds what it adds to a forward: on a CPU up to 4
            drafted tokens for each matching token, more on accelerators and for one row in half precision, fewer in
            batches and where few of the text's drafts were accepted. `None` always drafts `max_draft_len`.
        pool (`str`, *optional*, defaults to `"request"`):
            `"request"` searches this call's own text; `"shared"` also the texts of earlier calls on this model, the
            newest 1,000,000 tokens.
        device_list (`list[int | str]`, *optional*):
            Devices of the target model, as in TensorRT-LLM's list form `[10, 2, [0]]`: numbers of GPUs, or names such
            as `"cpu"`. `generate` moves the model there if it is elsewhere; a device that is not there is an error.
            `None` leaves the model where it is.
    """

    max_draft_len: int = 10
    max_matching_ngram_size: int = 2
    draft_len_per_match: int | Literal["auto"] | None = "auto"
    pool: Pool = "request"
    device_list: Sequence[int | str] | None = None

    aliases: ClassVar[Mapping[str, str]] = {
        "prompt_lookup_num_tokens": "max_draft_len",
        "num_draft_tokens": "max_draft_len",
    }
    list_form: ClassVar[tuple[str, ...]] = ("max_draft_len", "max_matching_ngram_size", "device_list")
    device_fields: ClassVar[Mapping[str, str]] = {"target": "device_list"}

    def __post_init__(self) -> None:
        SpecConfig.__post_init__(self)
        check_positive("max_draft_len", self.max_draft_len, "Usual values are 4 to 10.", most=MAX_STEP_TOKENS)
        size = self.max_matching_ngram_size
        check_positive("max_matching_ngram_size", size, "Usual values are 2 to 4.", most=MAX_NGRAM_SIZE)
        if isinstance(self.draft_len_per_match, str):
            check_choice("draft_len_per_match", self.draft_len_per_match, ("auto",))
        elif self.draft_len_per_match is not None:
            check_positive("draft_len_per_match", self.draft_len_per_match, "Use `None` for no such limit.")
        check_choice("pool", self.pool, get_args(Pool))
        check_devices("device_list", self.device_list)

    @property
    def node_budget(self) -> int:
        """Most drafted tokens a step, the root not counted."""
        return self.max_draft_len

    def to_vllm(self, *, draft_model: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """`method="ngram"`; vLLM drafts chains from the longest match and keeps no pool."""
        self.check_carried("vLLM", "max_draft_len", "max_matching_ngram_size", "device_list", "draft_len_per_match")
        return {
            "method": "ngram",
            "num_speculative_tokens": self.max_draft_len,
            "prompt_lookup_max": self.max_matching_ngram_size,
            "prompt_lookup_min": 1,
        }

    def to_tensorrt_llm(self, *, draft_model: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """`NGramDecodingConfig`, its pool private or common as here."""
        carried = ("max_draft_len", "max_matching_ngram_size", "device_list", "draft_len_per_match", "pool")
        self.check_carried("TensorRT-LLM", *carried)
        return {
            "decoding_type": "NGram",
            "max_draft_len": self.max_draft_len,
            "max_matching_ngram_size": self.max_matching_ngram_size,
            "is_public_pool": self.pool == "shared",
        }
