"""Whisper's own `generate` sets what the call did not ask for; its outputs come out as without drafts."""

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import WhisperForCausalLM

import hf_specdec
from tests.helpers.zoo_wide import inputs, varied

SETTINGS: dict[str, Any] = {"return_dict_in_generate": True, "max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def whisper() -> Any:
    """A tiny Whisper with what timestamps need."""
    warnings.simplefilter("ignore")
    model = varied("whisper", "speech")
    model.generation_config.alignment_heads = [[0, 0], [1, 1]]
    model.generation_config.no_timestamps_token_id = 100
    model.generation_config.median_filter_width = 3
    model.generation_config.is_multilingual = False
    return hf_specdec.enable(model)


@pytest.mark.at_most(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["prompt_lookup", "auto"])
@pytest.mark.parametrize("custom", [False, True])
def test_token_timestamps_are_those_of_plain_generation(whisper: Any, method: str, custom: bool) -> None:
    """They are computed from the cross-attention of each token: the call decodes plainly."""
    whisper.set_attn_implementation("eager")
    wanted = inputs(whisper, rows=1) | SETTINGS | {"return_token_timestamps": True}
    expected = whisper.__class__.generate(whisper, **wanted)
    if custom:
        wanted["custom_generate"] = hf_specdec.decode
    ours = whisper.generate(**wanted, spec_method=method)
    assert torch.equal(ours["sequences"], expected["sequences"])
    assert torch.equal(ours["token_timestamps"], expected["token_timestamps"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [1, 2])
def test_a_draft_reads_the_piece_of_a_long_recording_that_is_transcribed(whisper: Any, rows: int) -> None:
    """Whisper's `generate` takes 30 seconds at a time, of the recordings that have not ended."""
    config, steps = whisper.config, []
    length = 2 * config.max_source_positions
    sound = torch.rand((rows, config.num_mel_bins, 3 * length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones((rows, 3 * length), dtype=torch.long)
    mask[1:, length:] = 0  # the second recording is one piece long
    wanted = {"input_features": sound, "attention_mask": mask, "return_timestamps": True, "max_new_tokens": 9}
    expected = whisper.__class__.generate(whisper, **wanted, do_sample=False)
    ours = whisper.generate(
        **wanted,
        do_sample=False,
        spec_method="draft_model",
        spec_config={"confidence_threshold": 0.0},
        assistant_model=decoder_of(whisper),
        spec_observer=steps.append,
    )
    assert ours.tolist() == expected.tolist()
    assert sum(len(step.accepted) for step in steps) > len(steps), "drafts of the same sound are accepted"


def without_encoder(model: Any, **sizes: int) -> Any:
    """A decoder of its configuration; it says there that it has no encoder."""
    config = copy.deepcopy(model.config)
    config.update(sizes)
    torch.manual_seed(1)
    return WhisperForCausalLM(config).eval()


def decoder_of(model: Any) -> Any:
    """A copy of its decoder alone."""
    draft = without_encoder(model)
    draft.model.decoder.load_state_dict(model.model.decoder.state_dict())
    draft.proj_out.load_state_dict(model.proj_out.state_dict())
    return draft


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("method", ["draft_model", "auto"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_decoder_drafts_by_what_the_targets_encoder_has_heard(
    whisper: Any, method: str, rows: int, do_sample: bool
) -> None:
    """Distil-Whisper, as it is loaded for transformers' assisted generation; here the target's own decoder."""
    draft, steps, texts = decoder_of(whisper), [], []
    wanted = inputs(whisper, rows=rows) | SETTINGS | {"do_sample": do_sample, "max_new_tokens": 20}
    ours = {"spec_config": {"confidence_threshold": 0.0}} if method == "draft_model" else {}
    for how in ({"spec_method": "plain"}, {"spec_method": method, "assistant_model": draft, **ours}):
        torch.manual_seed(3)
        output = whisper.generate(**wanted, **how, spec_observer=steps.append if "assistant_model" in how else None)
        texts.append(output["sequences"] if isinstance(output, dict) else output)
    assert texts[0].equal(texts[1])
    accepted = sum(len(step.accepted) for step in steps)
    least = 2 if method == "draft_model" and not do_sample else 1
    assert accepted > len(steps) * least, "the same decoder over the same states is believed"


@pytest.mark.filterwarnings("ignore")
def test_a_decoder_that_cannot_read_the_targets_encoder_is_refused(whisper: Any) -> None:
    draft = without_encoder(whisper, d_model=2 * whisper.config.d_model)
    with pytest.raises(hf_specdec.ConfigError, match="hidden_size of .* to read its encoder.*Load it with Whisper"):
        whisper.generate(**inputs(whisper, rows=1) | SETTINGS, spec_method="draft_model", assistant_model=draft)
