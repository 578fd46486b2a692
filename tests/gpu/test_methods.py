"""Every method, batches, static caches and many prompts on a CUDA device, in fp32. Run with -m gpu."""

import copy
from typing import Any

import pytest
import torch

from tests.helpers.devices import SAMPLING, STATIC, TREES, DeviceBatch, moved
from tests.helpers.heads import CASES, SHAPES, always
from tests.helpers.support import PROMPT, plain, results_of
from tests.matrix.test_batches import METHODS
from tests.matrix.test_many import PROMPTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", TREES)
def test_each_row_is_plain_generates(zoo: Any, family: str, method: str) -> None:
    """Left-padded rows that accept different numbers of tokens and end at different places."""
    batch = DeviceBatch(zoo(family), CUDA)
    output = batch.run(METHODS[method], return_dict_in_generate=True)
    assert output.sequences.tolist() == batch.expected.sequences.tolist()
    assert batch.run(METHODS[method]).tolist() == batch.expected.sequences.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_a_sampled_row_is_its_prompt_alone(zoo: Any, method: str) -> None:
    """The row's generator lives on the device, and so does plain `generate`'s."""
    batch = DeviceBatch(zoo("llama"), CUDA)
    output = batch.run(METHODS[method], return_dict_in_generate=True, do_sample=True, top_k=20)
    options = {**batch.options, "do_sample": True, "top_k": 20, "attention_mask": batch.mask[:1]}
    torch.manual_seed(output.spec_stats.seeds[0])
    alone = plain(batch.model, batch.ids[:1], **options)[0]
    assert output.sequences[0, : len(alone)].tolist() == alone.tolist()


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("method", ["prompt_lookup", "auto"])
def test_what_the_nodes_lead_to_is_what_each_token_leads_to(zoo: Any, method: str, sampling: str) -> None:
    """All nodes' processors and draws at once; the device's generator ends where plain sampling leaves it."""
    model, prompt = moved(zoo("llama"), CUDA), PROMPT.to(CUDA)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "top_k": 0, **SAMPLING[sampling]}
    torch.manual_seed(4)
    expected, after = plain(model, prompt, **options), torch.cuda.get_rng_state()
    torch.manual_seed(4)
    output = model.generate(prompt, spec_method=method, return_dict_in_generate=True, **options)
    assert output.sequences.tolist() == expected.tolist()
    assert torch.equal(torch.cuda.get_rng_state(), after)
    assert output.spec_stats.num_draft_tokens > 0


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_head_changes_nothing(zoo: Any, name: str, do_sample: bool) -> None:
    target = CASES[name].target(zoo)
    head = copy.deepcopy(CASES[name].head(target)).to(CUDA)
    target, prompt = moved(target, CUDA), PROMPT.to(CUDA)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": do_sample, "top_k": 30}
    torch.manual_seed(5)
    expected = plain(target, prompt, **options)
    torch.manual_seed(5)
    how = always(CASES[name].method, SHAPES["tree"])
    ours = target.generate(prompt, assistant_model=head, return_dict_in_generate=True, **options, **how)
    assert ours.sequences.tolist() == expected.tolist()
    assert ours.spec_stats.num_draft_tokens > 0


@pytest.mark.parametrize("family", TREES)
def test_many_prompts_are_each_alone(zoo: Any, family: str) -> None:
    model = moved(zoo(family), CUDA)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": [17, 33, 60]}
    for result in results_of(model, PROMPTS, max_batch_size=4, **options):
        expected = plain(model, torch.tensor([result.prompt], device=CUDA), **options)
        start = 1 if model.config.is_encoder_decoder else len(result.prompt)
        assert result.token_ids == expected[0, start:].tolist()


@pytest.mark.parametrize("family", STATIC)
def test_a_static_cache_gives_the_same_tokens(zoo: Any, family: str) -> None:
    model = moved(zoo(family), CUDA)
    prompt = torch.tensor(PROMPTS[:1], device=CUDA)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = plain(model, prompt, **options)
    for method in ("prompt_lookup", "lookahead"):
        output = model.generate(prompt, cache_implementation="static", spec_method=method, **options)
        assert output.tolist() == expected.tolist()
