"""The first batch of many prompts tries its model in its own steps; what it cannot show is probed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec.capabilities.trial import NUM_REFERENCES, SHORTEST_CALL
from tests.helpers.batches import MASK, PADDED
from tests.helpers.hooks import see_all, steer
from tests.helpers.support import plain, results_of
from tests.helpers.zoo import FAMILIES, build

MANY: dict[str, Any] = {"max_new_tokens": SHORTEST_CALL, "do_sample": False, "eos_token_id": None}


def prompts_of(count: int) -> list[list[int]]:
    """Prompts of different lengths."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 90, (4 + 3 * row % 7,), generator=generator).tolist() for row in range(count)]


def many(model: Any, prompts: list[list[int]], method: str = "prompt_lookup", **options: Any) -> list[list[int]]:
    results = hf_specdec.generate_many(model, prompts, spec_method=method, **MANY, **options)
    return [result.token_ids for result in sorted(results, key=lambda result: result.index)]


def alone(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [plain(model, torch.tensor([prompt]), **MANY)[0, len(prompt) :].tolist() for prompt in prompts]


@pytest.mark.at_most(2)
@pytest.mark.parametrize("method", ["plain", "auto", "prompt_lookup"])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_many_prompts_try_their_model_in_the_first_steps(
    fresh: Any, probes: list[str], method: str, count: int
) -> None:
    """A batch of three, others waiting; one alone is tried as well, and batches by those that follow."""
    prompts = prompts_of(count)
    assert many(fresh, prompts, method, max_batch_size=3) == alone(fresh, prompts)
    batch = {"input_ids": PADDED, "attention_mask": MASK, **MANY}
    assert fresh.generate(**batch, spec_method="prompt_lookup").tolist() == plain(fresh, **batch).tolist()
    assert hf_specdec.capability(fresh).tier == "tree"
    assert not probes


def test_one_prompt_is_tried_as_soon_as_one_sequence_would_be(fresh: Any) -> None:
    """No other can join it: it waits for none, and nothing is computed but its own tokens and its trial."""
    shapes: list[tuple[int, ...]] = []
    fresh.register_forward_pre_hook(lambda *a: shapes.append(tuple(a[2]["input_ids"].shape)), with_kwargs=True)
    many(fresh, prompts_of(1), "plain", max_batch_size=8)
    trial = [(1, 1)] * NUM_REFERENCES + [(1, 1), (1, NUM_REFERENCES + 4), (1, NUM_REFERENCES)]
    assert shapes[1:] == trial + [(1, 1)] * (SHORTEST_CALL - 1 - NUM_REFERENCES - 2)


@pytest.mark.parametrize("others", [1, 4])
def test_many_prompts_after_a_first_call_try_rows_in_their_steps(fresh: Any, probes: list[str], others: int) -> None:
    """What is known of one sequence says nothing of rows; one prompt alone needs nothing more."""
    prompts = prompts_of(others)
    shapes: list[tuple[int, ...]] = []
    fresh.register_forward_pre_hook(lambda *a: shapes.append(tuple(a[2]["input_ids"].shape)), with_kwargs=True)
    fresh.generate(torch.tensor([prompts[0]]), spec_method="prompt_lookup", **MANY)
    shapes.clear()
    assert many(fresh, prompts, "plain") == alone(fresh, prompts)
    assert ((others, NUM_REFERENCES + 4) in shapes) is (others > 1)
    assert not probes


def test_the_trial_of_many_prompts_is_two_plain_forwards_and_two_wider_steps(fresh: Any) -> None:
    shapes: list[tuple[int, ...]] = []
    fresh.register_forward_pre_hook(lambda *a: shapes.append(tuple(a[2]["input_ids"].shape)), with_kwargs=True)
    many(fresh, prompts_of(3), "plain")
    assert [shape for shape in shapes[:3] if shape[0] == 1] == shapes[:3]  # the prompts
    steps = [(3, 1)] * NUM_REFERENCES + [(1, 1)] * 2 + [(3, NUM_REFERENCES + 4), (3, NUM_REFERENCES)]
    assert shapes[3 : 3 + len(steps)] == steps
    assert set(shapes[3 + len(steps) :]) == {(3, 1)}


@pytest.mark.at_most(2)
@pytest.mark.parametrize("change", [steer, see_all])
@pytest.mark.parametrize("count", [1, 4])
def test_many_prompts_of_a_model_that_fails_are_probed_and_get_plains_texts(
    fresh: Any, probes: list[str], change: Callable[[Any], None], count: int
) -> None:
    change(fresh)
    prompts = prompts_of(count)
    assert many(fresh, prompts, max_batch_size=2) == alone(fresh, prompts)
    assert probes == ["probe"]


def test_texts_that_end_before_the_trial_are_held_back_and_decoded_again(fresh: Any, probes: list[str]) -> None:
    """All end with their third token: nothing was tried, and the probe says how they are decoded."""
    prompts = prompts_of(3)
    ends = [text[2] for text in alone(fresh, prompts)]
    results = list(hf_specdec.generate_many(fresh, prompts, spec_method="auto", **MANY | {"eos_token_id": ends}))
    assert [len(result.token_ids) <= 3 for result in results] == [True] * 3
    assert sorted(result.index for result in results) == [0, 1, 2]
    assert probes == ["probe", "probe_rows"]


def test_a_prompt_whose_processor_would_see_its_text_twice_is_probed(fresh: Any, probes: list[str]) -> None:
    seen: list[int] = []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids.shape[1])
        return scores

    (prompt,) = prompts_of(1)
    many(fresh, [prompt], logits_processor=[watch])
    assert seen == list(range(len(prompt), len(prompt) + SHORTEST_CALL))
    assert probes == ["probe", "probe_rows"]


def test_a_prompt_whose_allowed_tokens_depend_on_a_function_is_probed(fresh: Any, probes: list[str]) -> None:
    """All end with their third token: the function is not asked about any of them once more."""
    prompts = prompts_of(3)
    ends, asked = [text[2] for text in alone(fresh, prompts)], 0

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        nonlocal asked
        asked += 1
        return list(range(128))

    options = MANY | {"eos_token_id": ends, "prefix_allowed_tokens_fn": allowed}
    results = list(hf_specdec.generate_many(fresh, prompts, spec_method="plain", **options))
    assert asked == sum(len(result.token_ids) for result in results)
    assert probes == ["probe", "probe_rows"]


def test_many_prompts_in_half_precision(probes: list[str]) -> None:
    right, wrong = (hf_specdec.enable(build(FAMILIES["llama"]).to(torch.bfloat16)) for _ in range(2))
    see_all(wrong)
    many(right, prompts_of(3))
    assert not probes
    many(wrong, prompts_of(3))
    assert probes == ["probe"]


def test_samples_of_many_prompts_follow_their_seeds(fresh: Any) -> None:
    """Also where the trial fails after some tokens were drawn."""
    see_all(fresh)
    prompts = prompts_of(2)
    options = MANY | {"do_sample": True, "seed": 3}
    for result in results_of(fresh, prompts, spec_method="prompt_lookup", **options):
        torch.manual_seed(result.seed)
        expected = plain(fresh, torch.tensor([prompts[result.index]]), **MANY | {"do_sample": True})
        assert result.token_ids == expected[0, len(prompts[result.index]) :].tolist()
