"""Every method, batches, static caches and many prompts on a CUDA device, in fp32. Run with -m gpu."""

from typing import Any

import pytest
import torch

from tests.helpers.devices import SAMPLING, STATIC, moved
from tests.helpers.support import PROMPT, plain
from tests.matrix.test_devices import (  # noqa: F401 which run here too
    test_a_head_changes_nothing,
    test_a_sampled_row_is_its_prompt_alone,
    test_each_row_is_plain_generates,
    test_many_prompts_are_each_alone,
)
from tests.matrix.test_many import PROMPTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.fixture
def place() -> torch.device:
    """Where the imported tests have their models."""
    return CUDA


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


@pytest.mark.parametrize("family", STATIC)
def test_a_static_cache_gives_the_same_tokens(zoo: Any, family: str) -> None:
    model = moved(zoo(family), CUDA)
    prompt = torch.tensor(PROMPTS[:1], device=CUDA)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = plain(model, prompt, **options)
    for method in ("prompt_lookup", "lookahead"):
        output = model.generate(prompt, cache_implementation="static", spec_method=method, **options)
        assert output.tolist() == expected.tolist()
