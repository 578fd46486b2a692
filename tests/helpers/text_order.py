"""Attention in the order of the text, and forwards of one width, on any device: nodes of trees against their tokens."""

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["SHAPES", "TREES", "attend", "check_model", "check_nodes"]

TREES: dict[str, Any] = {"spec_method": "prompt_lookup", "spec_config": {"max_draft_len": 3, "num_branches": 2}}
SHAPES = [(1, 300, 1), (7, 250, 3), (20, 60, 4), (64, 110, 1), (9, 0, 1)]  # nodes, text before them, heads of a group


def attend(kernels: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> Any:
    """Attention of any mask, by `hf_specdec.kernels.text_order`."""
    return kernels.attend_in_order(query, key, value, kernels.key_order(mask), query.shape[-1] ** -0.5)


def check_nodes(
    kernels: Any, dtype: torch.dtype, shape: tuple[int, int, int], *, device: torch.device | str = "cpu", dim: int = 12
) -> None:
    """A node of a random tree has the bits that it has alone, its keys being neighbours in a buffer of another size."""
    num_rows, text, groups = shape
    at = torch.Generator().manual_seed(num_rows)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=at).to(device, dtype)

    num_columns = text + num_rows + 30
    query, key, value = 3 * random(1, 2 * groups, num_rows, dim), *(random(1, 2, num_columns, dim) for _ in range(2))
    mask = _tree_mask(at, num_rows, text, num_columns).to(device)
    whole = attend(kernels, query, key, value, mask)
    for node in {0, num_rows - 1}:
        seen = mask[0, 0, node].nonzero()[:, 0]
        own = slice(2, len(seen) + 2)
        own_key, own_value = random(2, 2, len(seen) + 5, dim), random(2, 2, len(seen) + 5, dim)
        own_key[1, :, own], own_value[1, :, own] = key[0, :, seen], value[0, :, seen]
        own_query, own_mask = random(2, 2 * groups, 3, dim), random(2, 1, 3, len(seen) + 5).zero_()
        own_query[1, :, 2] = query[0, :, node]
        own_mask[1, :, 2] = -torch.inf
        own_mask[1, :, 2, own] = 0
        assert torch.equal(attend(kernels, own_query, own_key, own_value, own_mask)[1, 2], whole[0, node])


def _tree_mask(generator: torch.Generator, num_rows: int, text: int, num_columns: int) -> torch.Tensor:
    """`(1, 1, M, K)` of a random tree after a text: each node sees the text and its ancestors."""
    mask = torch.zeros(num_rows, num_columns, dtype=torch.bool)
    mask[:, :text] = True
    for node in range(num_rows):
        if node:
            mask[node] = mask[int(torch.randint(max(node - 3, 0), node, (), generator=generator))]
        mask[node, text + node] = True
    return mask[None, None]


def check_model(model: Any, prompt: torch.Tensor, options: Mapping[str, Any], drafting: Mapping[str, Any]) -> None:
    """A call that drafts has the logits of one that does not, bit by bit."""
    found = []
    for method in ({"spec_method": "plain"}, drafting):
        torch.manual_seed(0)
        output = model.generate(prompt, return_dict_in_generate=True, output_logits=True, **{**options, **method})
        assert output.spec_stats.plan.rounding_reason is None
        assert output.spec_stats.plan.is_compiled and output.spec_stats.num_graphs > 0
        found.append(output)
    plain, drafted = found
    assert drafted.spec_stats.num_accepted_tokens > 0
    assert torch.equal(drafted.sequences, plain.sequences)
    assert torch.equal(torch.stack(drafted.logits), torch.stack(plain.logits))
