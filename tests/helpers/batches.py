"""What the tests of batches share: three padded rows, the methods, and the comparison with plain `generate`."""

from typing import Any

import torch

from hf_specdec.compat import CACHE
from tests.helpers.support import PROMPT, assert_same_cache, plain

__all__ = ["IDS", "MASK", "METHODS", "PADDED", "assert_same_batch", "method_of"]

IDS = torch.stack([PROMPT[0].roll(3 * row) for row in range(3)])
MASK = (torch.arange(IDS.shape[1])[None] >= torch.tensor([0, 4, 9])[:, None]).long()
PADDED = IDS * MASK
METHODS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"spec_method": "prompt_lookup"},
    "lookahead": {"spec_method": "lookahead", "lookahead_config": [4, 3, 5]},
    "auto": {"spec_method": "auto", "spec_config": {"num_nodes": 9}},
    "draft_model": {"spec_method": "draft_model", "spec_config": {"confidence_threshold": 0.0}},
}


def method_of(name: str, draft: Any) -> dict[str, Any]:
    """The arguments that ask for a method; those of the draft model with it."""
    return METHODS[name] | ({"assistant_model": draft} if name == "draft_model" else {})


def assert_same_batch(model: Any, method: dict[str, Any], ids: torch.Tensor, **kwargs: Any) -> None:
    """Tokens, padding and cache, once as a bare tensor and once with the dictionary."""
    expected = plain(model, ids, **kwargs, return_dict_in_generate=True)
    assert model.generate(ids, **kwargs, **method).tolist() == expected.sequences.tolist()
    ours = model.generate(ids, **kwargs, **method, return_dict_in_generate=True)
    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert_same_cache(ours[CACHE], expected[CACHE])
