"""Prompts that begin like texts of earlier ones: their beginning is not computed again, and the texts stay the same."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_specdec
from hf_specdec import PrefixCache
from hf_specdec.kernels import cpu, cpu_kernels
from hf_specdec.kernels.cpu import HALVES
from tests.helpers.cover import wide_but
from tests.helpers.support import PROMPT, plain
from tests.helpers.zoo import FAMILIES, build

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": [17]}
HYBRIDS = ["qwen3_next", "lfm2"]


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(18, 120) for _ in range(count)]


SYSTEM = tokens(90, 0)
PROMPTS = [SYSTEM + tokens(5 + number, 10 + number) for number in range(6)]


def answers(model: Any, prompts: list[Any], cache: PrefixCache | None, **options: Any) -> list[hf_specdec.ManyResult]:
    """The prompts in one call, in order; each text is plain `generate`'s."""
    output = hf_specdec.generate_many(model, prompts, prefix_cache=cache, **{**OPTIONS, **options})
    results = sorted(output, key=lambda result: result.index)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.error is None
        ids = prompt["input_ids"] if isinstance(prompt, dict) else prompt
        assert result.token_ids == plain(model, torch.tensor([ids]), **OPTIONS)[0, len(ids) :].tolist()
    return results


def cached(results: list[hf_specdec.ManyResult]) -> list[int]:
    return [result.stats.num_cached_tokens for result in results]


@pytest.mark.parametrize("family", wide_but(["llama", "qwen3_next"], ["llama", "gemma3", *HYBRIDS]))
def test_a_turn_of_a_conversation_reads_its_new_tokens(zoo: Callable[[str], Any], family: str) -> None:
    model, cache, talk, seen = zoo(family), PrefixCache(), tokens(40, 1), 0
    for turn in range(4):
        (result,) = answers(model, [talk], cache)
        assert result.stats.num_cached_tokens >= seen
        seen = len(talk) + len(result.token_ids) - 1  # the last token's columns are not computed
        talk = talk + result.token_ids + tokens(9, 2 + turn)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", wide_but(["llama", "qwen3_next"], ["llama", "gemma3", *HYBRIDS]))
def test_a_system_prompt_is_read_once(zoo: Callable[[str], Any], family: str, rows: int) -> None:
    """By hybrids twice: states after it are noticed where a second prompt parts from the first."""
    results = answers(zoo(family), PROMPTS, None, max_batch_size=rows)
    first = 2 if family in HYBRIDS else 1
    assert cached(results) == [0] * first + [len(SYSTEM)] * (len(PROMPTS) - first)


def test_texts_of_one_salt_serve_no_other(model: Any) -> None:
    cache = PrefixCache()
    salted = [{"input_ids": PROMPTS[0], "cache_salt": salt} for salt in ("a", "b", "a")]
    assert cached(answers(model, [*salted, PROMPTS[0]], cache, max_batch_size=1)) == [0, 0, len(PROMPTS[0]) - 1, 0]
    assert cached(answers(model, salted[1:2], cache)) == [len(PROMPTS[0]) - 1]


def test_the_bound_holds_and_the_texts_used_last_stay(model: Any) -> None:
    measured = PrefixCache()
    answers(model, [tokens(60, 0)], measured)
    cache = PrefixCache(5 * measured.num_bytes // 2)  # two texts and a half
    for seed in (1, 2, 1, 3):
        answers(model, [tokens(60, seed)], cache)
        assert cache.num_bytes <= cache.max_bytes
    assert [cached(answers(model, [tokens(60, seed)], cache))[0] for seed in (3, 1, 2)] == [59, 59, 0]


def test_a_cache_serves_one_model_in_one_state(zoo: Callable[[str], Any]) -> None:
    cache, models = PrefixCache(), [zoo("llama"), hf_specdec.enable(build(FAMILIES["llama"]))]
    for model in models:
        assert cached(answers(model, PROMPTS[:1], cache)) == [0]
    models[1].config.rms_norm_eps = models[1].config.rms_norm_eps * 2
    assert cached(answers(models[1], PROMPTS[:1], cache)) == [0]
    cache.clear()
    assert cached(answers(models[0], PROMPTS[:1], cache)) == [0]


def train(model: Any) -> None:
    """A step of an optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()


def new_parameter(model: Any) -> None:
    """Another matrix in the place of one."""
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().flip(0))


def adapt(model: Any) -> None:
    """Other numbers for the adapter that acts."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.linspace(-0.3, 0.3, weight.numel()).view_as(weight))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an optimizer's step": train,
    "load_state_dict": lambda model: model.load_state_dict({k: w.flip(0) for k, w in model.state_dict().items()}),
    "a new parameter": new_parameter,
    "weights of an adapter": adapt,
}


@pytest.mark.at_most(2)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
@pytest.mark.parametrize("change", CHANGES)
def test_texts_of_other_weights_serve_no_prompt(change: str) -> None:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    if change == "weights of an adapter":
        peft = pytest.importorskip("peft")
        model = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj", "up_proj"]), model).eval()
    cache, first = PrefixCache(), PROMPTS[:1]
    answers(model, first, cache)
    assert cached(answers(model, first, cache)) == [len(first[0]) - 1], "nothing has changed"
    CHANGES[change](model)
    assert cached(answers(model, first, cache)) == [0]
    assert cached(answers(model, first, cache)) == [len(first[0]) - 1]


@pytest.mark.at_most(2)
@pytest.mark.skipif(cpu.why_unused() is not None, reason="torch computes everything here")
@pytest.mark.parametrize(
    ("chunk", "has_tiles", "expected"), [(32, False, 64), (32, True, 64), (0, False, 90), (0, True, 0)]
)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_on_a_cpu_start_where_they_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int, has_tiles: bool, expected: int
) -> None:
    """With chunks where one begins; without, at any token, unless torch attends to prompts."""
    monkeypatch.setattr(cpu_kernels, "has_tiles", lambda: has_tiles)
    model = hf_specdec.enable(build(FAMILIES["llama"]).to(dtype))

    def logits(cache: PrefixCache) -> tuple[list[torch.Tensor], list[int]]:
        seen: list[torch.Tensor] = []

        def see(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(scores.clone())
            return scores

        see.row_safe = True
        options = OPTIONS | {"prefill_chunk_size": chunk or None, "spec_method": "plain"}
        result = hf_specdec.generate_many(
            model, PROMPTS, prefix_cache=cache, max_batch_size=1, logits_processor=[see], **options
        )
        return seen, cached(list(result))

    (read, nothing), (result, counts) = logits(PrefixCache(0)), logits(PrefixCache())
    assert (nothing, counts) == ([0] * 6, [0] + [expected] * 5)
    assert all(torch.equal(item, other) for item, other in zip(read, result, strict=True))


@pytest.mark.parametrize("salt", [3, b"x"])
def test_a_salt_that_is_no_text_is_that_prompts_error(model: Any, salt: Any) -> None:
    prompt = {"input_ids": PROMPTS[0], "cache_salt": salt}
    first, second = hf_specdec.generate_many(model, [prompt, PROMPTS[0]], **OPTIONS)
    assert "`cache_salt` must be a string" in str(first.error)
    assert second.error is None


@pytest.mark.parametrize("size", [-1, 1.5, True, "1"])
def test_a_size_that_is_no_number_of_bytes_is_an_error(size: Any) -> None:
    with pytest.raises(hf_specdec.ConfigError, match="`max_bytes` must be a whole number of at least 0"):
        PrefixCache(size)
