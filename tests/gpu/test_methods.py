"""Every method, batches, static caches and many prompts on a CUDA device, in fp32. Run with -m gpu."""

import copy
from typing import Any

import pytest
import torch

import hf_specdec
from tests.helpers.support import noisy_copy, plain
from tests.helpers.zoo import FAMILIES
from tests.matrix.test_batches import METHODS, Batch, skip_refused
from tests.matrix.test_many import PROMPTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TREES = [name for name, family in FAMILIES.items() if family.tier == "tree"]
STATIC = [name for name in TREES if name != "falcon"]  # transformers' own fails there


def on_cuda(zoo: Any, family: str) -> Any:
    return hf_specdec.enable(hf_specdec.disable(copy.deepcopy(zoo(family))).to("cuda"))


class CudaBatch(Batch):
    """The matrix's batch with the model, its draft and the inputs on the GPU."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, noisy_copy(model), "greedy")
        self.ids = self.ids.cuda()
        self.options["attention_mask"] = self.options["attention_mask"].cuda()
        self.model, self.draft = on_cuda(lambda _: model, ""), self.draft.to("cuda")
        self.expected = plain(self.model, self.ids, **self.options, return_dict_in_generate=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_is_plain_generates(zoo: Any, family: str, method: str) -> None:
    """Left-padded rows that accept different numbers of tokens and end at different places."""
    if skip_refused(family, method):
        return
    batch = CudaBatch(zoo(family))
    output = batch.run(METHODS[method], return_dict_in_generate=True)
    assert output.sequences.tolist() == batch.expected.sequences.tolist()
    assert batch.run(METHODS[method]).tolist() == batch.expected.sequences.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_a_sampled_row_is_its_prompt_alone(zoo: Any, method: str) -> None:
    """The row's generator lives on the device, and so does plain `generate`'s."""
    batch = CudaBatch(zoo("llama"))
    output = batch.run(METHODS[method], return_dict_in_generate=True, do_sample=True, top_k=20)
    options = {**batch.options, "do_sample": True, "top_k": 20, "attention_mask": batch.mask[:1].cuda()}
    torch.manual_seed(output.spec_stats.seeds[0])
    alone = plain(batch.model, batch.ids[:1], **options)[0]
    assert output.sequences[0, : len(alone)].tolist() == alone.tolist()


@pytest.mark.parametrize("family", TREES)
def test_many_prompts_are_each_alone(zoo: Any, family: str) -> None:
    model = on_cuda(zoo, family)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": [17, 33, 60]}
    results = list(hf_specdec.generate_many(model, PROMPTS, max_batch_size=4, **options))
    for result in results:
        expected = plain(model, torch.tensor([result.prompt], device="cuda"), **options)
        start = 1 if model.config.is_encoder_decoder else len(result.prompt)
        assert result.token_ids == expected[0, start:].tolist()


@pytest.mark.parametrize("family", STATIC)
def test_a_static_cache_gives_the_same_tokens(zoo: Any, family: str) -> None:
    model = on_cuda(zoo, family)
    prompt = torch.tensor(PROMPTS[:1], device="cuda")
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = plain(model, prompt, **options)
    for method in ("prompt_lookup", "lookahead"):
        output = model.generate(prompt, cache_implementation="static", spec_method=method, **options)
        assert output.tolist() == expected.tolist()
