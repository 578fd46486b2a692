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
from hf_specdec.methods.dflash.config import DFlashConfig
from hf_specdec.methods.eagle3.config import Eagle3Config
from hf_specdec.methods.mtp.config import MtpConfig

# Fields of `vllm.config.SpeculativeConfig`, and arguments of the classes in `tensorrt_llm.llmapi`, by decoding type.
VLLM_FIELDS = {
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "draft_tensor_parallel_size",
}
TENSORRT_FIELDS = {
    "Lookahead": {"max_window_size", "max_ngram_size", "max_verification_set_size"},
    "NGram": {"max_draft_len", "max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool"},
    "Draft_Target": {"max_draft_len", "speculative_model"},
    "Eagle3": {"max_draft_len", "speculative_model"},
    "MTP": {"max_draft_len", "speculative_model"},
    "DFlash": {"max_draft_len", "speculative_model"},
}
EXPORTABLE: dict[str, tuple[SpecConfig, str | None]] = {
    "prompt_lookup": (PromptLookupConfig.parse([10, 2, [0]]), None),
    "draft_model": (DraftModelConfig.parse([4, [1, 2], [0], False]), "draft/model"),
    "eagle3": (Eagle3Config(num_branches=1), "head"),
    "mtp": (MtpConfig(num_branches=1), None),
    "dflash": (DFlashConfig(), "head"),
}


@pytest.mark.parametrize("name", EXPORTABLE)
def test_exports_use_the_projects_own_field_names(name: str) -> None:
    config, draft = EXPORTABLE[name]
    assert set(config.to_vllm(draft_model=draft)) <= VLLM_FIELDS
    found = config.to_tensorrt_llm(draft_model=draft)
    assert set(found) - {"decoding_type"} <= TENSORRT_FIELDS[found["decoding_type"]]


def test_prompt_lookup_is_ngram() -> None:
    config = PromptLookupConfig(max_draft_len=6, max_matching_ngram_size=3)
    assert config.to_vllm() == {
        "method": "ngram",
        "num_speculative_tokens": 6,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    assert config.to_tensorrt_llm() == {
        "decoding_type": "NGram",
        "max_draft_len": 6,
        "max_matching_ngram_size": 3,
        "is_public_pool": False,
    }
    assert PromptLookupConfig(pool="shared").to_tensorrt_llm()["is_public_pool"] is True


def test_lookahead_keeps_its_three_sizes() -> None:
    assert LookaheadConfig.parse([7, 5, 6]).to_tensorrt_llm() == {
        "decoding_type": "Lookahead",
        "max_window_size": 7,
        "max_ngram_size": 5,
        "max_verification_set_size": 6,
    }


def test_a_draft_model_takes_its_devices_as_a_number() -> None:
    config = DraftModelConfig.parse([4, [1, 2], [0], False])
    assert config.to_vllm(draft_model="d") == {
        "method": "draft_model",
        "model": "d",
        "num_speculative_tokens": 4,
        "draft_tensor_parallel_size": 2,
    }
    assert config.to_tensorrt_llm(draft_model="d") == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 4,
        "speculative_model": "d",
    }


@pytest.mark.parametrize(
    ("config", "method", "decoding_type"),
    [
        (Eagle3Config(num_branches=1, draft_len=3), "eagle3", "Eagle3"),
        (DFlashConfig(draft_len=3), "dflash", "DFlash"),
    ],
)
def test_a_head_goes_by_its_folder(config: SpecConfig, method: str, decoding_type: str) -> None:
    assert config.to_vllm(draft_model="head") == {"method": method, "model": "head", "num_speculative_tokens": 3}
    assert config.to_tensorrt_llm(draft_model="head") == {
        "decoding_type": decoding_type,
        "max_draft_len": 3,
        "speculative_model": "head",
    }


@pytest.mark.parametrize("config", [Eagle3Config(num_branches=1), DraftModelConfig()])
def test_a_folder_may_be_a_path(config: SpecConfig) -> None:
    assert config.to_vllm(draft_model=Path("head"))["model"] == "head"
    assert config.to_tensorrt_llm(draft_model=Path("head"))["speculative_model"] == "head"


def test_mtp_layers_need_no_second_folder() -> None:
    assert MtpConfig(draft_len=1).to_vllm() == {"method": "mtp", "num_speculative_tokens": 1}
    assert MtpConfig(draft_len=1).to_tensorrt_llm() == {"decoding_type": "MTP", "max_draft_len": 1}


@pytest.mark.parametrize(
    ("config", "project", "arguments", "field"),
    [
        (PromptLookupConfig(num_branches=4), "to_vllm", {}, "num_branches"),
        (PromptLookupConfig(num_branches=4), "to_tensorrt_llm", {}, "num_branches"),
        (PromptLookupConfig(pool="shared"), "to_vllm", {}, "pool"),
        (DraftModelConfig(num_branches=2), "to_vllm", {"draft_model": "d"}, "num_branches"),
        (DraftModelConfig(confidence_threshold=0.4), "to_vllm", {"draft_model": "d"}, "confidence_threshold"),
        (DraftModelConfig(), "to_vllm", {}, "draft_model"),
        (DraftModelConfig(), "to_tensorrt_llm", {}, "draft_model"),
        (DraftModelConfig(), "to_vllm", {"draft_model": 3}, "draft_model"),
        (MtpConfig(), "to_tensorrt_llm", {"draft_model": b"d"}, "draft_model"),
        (LookaheadConfig(), "to_vllm", {}, "spec_config"),
        (LookaheadConfig(fill_from_prompt=False), "to_tensorrt_llm", {}, "fill_from_prompt"),
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
