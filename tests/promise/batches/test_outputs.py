"""What `return_dict_in_generate` shows of a batch: plain generate's tensors for every row, after its end too."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from hf_specdec.compat.caches import CACHE
from tests.helpers.support import (
    MASK,
    METHODS,
    PADDED,
    assert_same_cache,
    assert_same_tensors,
    method_of,
    noisy_copy,
    plain,
)
from tests.helpers.zoo import FALLBACK, FAMILIES

OPTIONS: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 12, "do_sample": False}
WANTED = ["scores", "logits", "hidden_states"]
ASKED: dict[str, Any] = {"return_dict_in_generate": True} | {f"output_{name}": True for name in WANTED}
FIELDS = [*WANTED, "decoder_hidden_states", "encoder_hidden_states"]


@pytest.fixture(scope="module")
def families(zoo: Callable[[str], Any]) -> Callable[[str], tuple[Any, Any, list[list[int]]]]:
    @cache
    def family(name: str) -> tuple[Any, Any, list[list[int]]]:
        model = zoo(name)
        start = 1 if model.config.is_encoder_decoder else PADDED.shape[1]
        new: list[list[int]] = plain(model, PADDED, **OPTIONS)[:, start:].tolist()
        return model, noisy_copy(model), new

    return family


def assert_same_outputs(model: Any, method: dict[str, Any], ids: torch.Tensor = PADDED, **kwargs: Any) -> Any:
    """Tokens, everything shown of them and the cache; returns our output."""
    expected = plain(model, ids, **ASKED | OPTIONS | kwargs)
    ours = model.generate(ids, **ASKED | OPTIONS | kwargs, **method)
    assert ours.spec_stats.plain_reason is None
    assert ours.sequences.tolist() == expected.sequences.tolist()
    for name in FIELDS:
        assert_same_tensors(getattr(ours, name, None), getattr(expected, name, None), atol=1e-3)
    assert_same_cache(ours[CACHE], expected[CACHE])
    return ours


@pytest.mark.at_most(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in FALLBACK])
def test_every_row_shows_what_plain_generate_shows(families: Callable[[str], Any], family: str, method: str) -> None:
    """Rows end at different places; what is shown after a row's end is of the padding that plain generation feeds."""
    if method == "lookahead" and FAMILIES[family].tier == "chain":
        return
    model, draft, new = families(family)
    assert_same_outputs(model, method_of(method, draft), eos_token_id=[new[0][2], new[1][6]])


SETTINGS: dict[str, Callable[[list[list[int]]], dict[str, Any]]] = {
    "one row ends at once": lambda new: {"eos_token_id": new[0][0]},
    "all rows end at once": lambda new: {"eos_token_id": sorted({row[0] for row in new})},
    "no row ends early": lambda _: {},
    "one new token": lambda _: {"max_new_tokens": 1},
    "padding is the end": lambda new: {"eos_token_id": new[0][4], "pad_token_id": new[0][4]},
    "a processor sees the padding": lambda new: {
        "eos_token_id": new[0][4],
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
    },
    "states alone": lambda new: {"eos_token_id": new[0][4], "output_scores": False, "output_logits": False},
    "scores alone": lambda new: {"eos_token_id": new[0][4], "output_hidden_states": False, "output_logits": False},
    "prompts read in chunks": lambda new: {"prefill_chunk_size": 7, "eos_token_id": new[0][4]},
    "a long rest": lambda new: {"eos_token_id": new[0][2], "max_new_tokens": 40},
}


@pytest.mark.at_most(3)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gpt_neo", "qwen3_next"])
def test_every_setting_shows_the_same(families: Callable[[str], Any], family: str, method: str, setting: str) -> None:
    if method == "lookahead" and FAMILIES[family].tier == "chain":
        return
    model, draft, new = families(family)
    assert_same_outputs(model, method_of(method, draft), **SETTINGS[setting](new))


@pytest.mark.parametrize("method", METHODS)
def test_a_sampled_row_shows_what_its_prompt_alone_shows(families: Callable[[str], Any], method: str) -> None:
    """Scores up to its end are those of plain `generate` from the row's seed; logits to the end are the text's."""
    model, draft, _ = families("llama")
    sampling = OPTIONS | {"do_sample": True, "top_k": 30, "eos_token_id": list(range(0, 60, 3)), "max_new_tokens": 20}
    torch.manual_seed(4)
    ours = model.generate(PADDED, **ASKED, **sampling, **method_of(method, draft))
    lengths = []
    for row, seed in enumerate(ours.spec_stats.seeds):
        torch.manual_seed(seed)
        alone = plain(model, PADDED[row : row + 1], **ASKED | sampling | {"attention_mask": MASK[row : row + 1]})
        lengths.append(len(alone.scores))
        assert_same_tensors(tuple(step[row : row + 1] for step in ours.scores[: len(alone.scores)]), alone.scores)
    assert len(set(lengths)) > 1
    assert len(ours.scores) == len(ours.logits) == max(lengths)
    mask = torch.cat([MASK, MASK.new_ones(3, max(lengths))], dim=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(ours.sequences, attention_mask=mask, position_ids=positions).logits
    assert_same_tensors(torch.stack(ours.logits, dim=1), whole[:, PADDED.shape[1] - 1 : -1], atol=1e-3)


@pytest.mark.parametrize("ids", [PADDED[:1], PADDED], ids=["one", "batch"])
def test_what_is_shown_keeps_no_whole_steps_in_memory(families: Callable[[str], Any], ids: torch.Tensor) -> None:
    model, _, _ = families("llama")
    options = ASKED | OPTIONS | {"attention_mask": MASK[: len(ids)]}
    ours = model.generate(ids, **options, spec_method="prompt_lookup")
    shown = [*ours.scores, *ours.logits, *(layer for step in ours.hidden_states for layer in step)]
    assert all(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() for tensor in shown)
