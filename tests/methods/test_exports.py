"""Configurations of vLLM and TensorRT-LLM: their field names, and an error for what they cannot be told."""

from pathlib import Path
from typing import Any

import pytest

from hf_specdec import (
    AutoSpecConfig,
    ConfigError,
    DraftModelConfig,
    LookaheadConfig,
    PlainConfig,
    PromptLookupConfig,
    SpecConfig,
)
from hf_specdec.methods.dflash.method import DFlashConfig
from hf_specdec.methods.eagle3.method import Eagle3Config
from hf_specdec.methods.mtp.method import MtpConfig

# By the fields of `vllm.config.SpeculativeConfig` and of the classes in `tensorrt_llm.llmapi`, whose name is a type.
Export = dict[str, Any]
EXPORTS: dict[str, tuple[SpecConfig, Any, Export | None, Export]] = {
    "prompt lookup": (
        PromptLookupConfig.parse([6, 3, [0]]),
        None,
        {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        {"decoding_type": "NGram", "max_draft_len": 6, "max_matching_ngram_size": 3, "is_public_pool": False},
    ),
    "lookahead": (
        LookaheadConfig.parse([7, 5, 6]),
        None,
        None,
        {
            "decoding_type": "Lookahead",
            "max_window_size": 7,
            "max_ngram_size": 5,
            "max_verification_set_size": 6,
        },
    ),
    "draft model, with its number of devices": (
        DraftModelConfig.parse([4, [1, 2], [0], False]),
        Path("d"),
        {"method": "draft_model", "model": "d", "num_speculative_tokens": 4, "draft_tensor_parallel_size": 2},
        {"decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model": "d"},
    ),
    "EAGLE-3": (
        Eagle3Config(num_branches=1, draft_len=3),
        "head",
        {"method": "eagle3", "model": "head", "num_speculative_tokens": 3},
        {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "head"},
    ),
    "DFlash": (
        DFlashConfig(draft_len=3),
        Path("head"),
        {"method": "dflash", "model": "head", "num_speculative_tokens": 3},
        {"decoding_type": "DFlash", "max_draft_len": 3, "speculative_model": "head"},
    ),
    "MTP layers, which need no folder": (
        MtpConfig(draft_len=1),
        None,
        {"method": "mtp", "num_speculative_tokens": 1},
        {"decoding_type": "MTP", "max_draft_len": 1},
    ),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_a_configuration_is_exported_under_the_projects_own_names(name: str) -> None:
    config, draft, vllm, tensorrt_llm = EXPORTS[name]
    if vllm is not None:
        assert config.to_vllm(draft_model=draft) == vllm
    assert config.to_tensorrt_llm(draft_model=draft) == tensorrt_llm


def test_a_shared_pool_is_a_public_one() -> None:
    assert PromptLookupConfig(pool="shared").to_tensorrt_llm()["is_public_pool"] is True


@pytest.mark.parametrize(
    ("config", "project", "arguments", "field"),
    [
        (PromptLookupConfig(pool="shared"), "to_vllm", {}, "pool"),
        (DraftModelConfig(num_branches=2), "to_vllm", {"draft_model": "d"}, "num_branches"),
        (DraftModelConfig(confidence_threshold=0.4), "to_vllm", {"draft_model": "d"}, "confidence_threshold"),
        (DraftModelConfig(), "to_vllm", {}, "draft_model"),
        (DraftModelConfig(), "to_tensorrt_llm", {}, "draft_model"),
        (DraftModelConfig(), "to_vllm", {"draft_model": 3}, "draft_model"),
        (MtpConfig(), "to_tensorrt_llm", {"draft_model": b"d"}, "draft_model"),
        (LookaheadConfig(), "to_vllm", {}, "spec_config"),
        (AutoSpecConfig(), "to_vllm", {}, "spec_config"),
        (AutoSpecConfig(), "to_tensorrt_llm", {}, "spec_config"),
        (PlainConfig(), "to_vllm", {}, "spec_config"),
        (Eagle3Config(), "to_vllm", {"draft_model": "h"}, "num_branches"),
        (Eagle3Config(num_branches=1), "to_vllm", {}, "draft_model"),
        (Eagle3Config(num_branches=1, max_nodes=3), "to_vllm", {"draft_model": "h"}, "max_nodes"),
        (MtpConfig(num_branches=2), "to_vllm", {}, "num_branches"),
        (Eagle3Config(), "to_tensorrt_llm", {"draft_model": "h"}, "num_branches"),
        (DFlashConfig(), "to_tensorrt_llm", {}, "draft_model"),
        (DFlashConfig(confidence_threshold=0.5), "to_vllm", {"draft_model": "h"}, "confidence_threshold"),
    ],
)
def test_what_has_no_equivalent_is_named(
    config: SpecConfig, project: str, arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        getattr(config, project)(**arguments)
    assert raised.value.field == field
