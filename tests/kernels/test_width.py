"""In bf16 and fp16 a token's numbers are the same bits, whatever else its forward computes."""

import contextlib
import itertools
from typing import Any

import bitsandbytes
import pytest
import torch
from transformers import DynamicCache

import hf_specdec
from hf_specdec.compat.caches import CACHE
from hf_specdec.kernels import cpu, cpu_kernels
from hf_specdec.kernels.core_attention import CausalAttention, CoreAttention
from hf_specdec.kernels.cpu_kernels import CpuKernels, reason_for_width
from tests.helpers.cover import wide_but
from tests.helpers.drafts import RandomTreeDrafter
from tests.helpers.support import PROMPT
from tests.helpers.zoo_wide import build, shrunk
from tests.kernels.families import family_model, implementation, padded
from tests.kernels.layer_cases import draw, has_core, inside, layer, sizes, tokens, transposed

pytestmark = has_core
HALVES = [torch.bfloat16, torch.float16]
EXACT = ["llama_mha", "llama_mqa", "qwen2", "mistral_wide", "gemma3_wide"]
NARROW = ["llama", "qwen3", "gpt2", "bart"]  # heads of 8 and 12 numbers
EXPERTS = ["mixtral_wide", "qwen3_moe", "deepseek_v3"]
PLAIN_FUNCTIONS = ["gemma2", "gpt_oss"]  # loaded with "eager" attention
OWN_PRODUCTS = ["falcon"]
OTHERS = {
    "bloom": "torch computes baddbmm, bmm",
}
RECURRENT = ["falcon_h1", "kimi_linear", "mamba2", "qwen3_5"]  # and rules of each kind
# Model types with attention or products of another kind.
WIDE = ["deepseek_v2", "granite_swa", "jetmoe", "minicpm3", "vaultgemma"]


@pytest.mark.usefixtures("shared_threads")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_linear_layer_computes_a_token_alike(dtype: torch.dtype, seed: int) -> None:
    at = sizes(seed)
    num_in, num_out, count = 8 * draw(at, 1, 90), draw(at, 1, 300), draw(at, 130, 300)
    for module in (layer(num_in, num_out, dtype), transposed(num_in, 16 * draw(at, 1, 40), dtype)):
        inputs = tokens(count, num_in, dtype=dtype)
        whole = inside(module, inputs)
        for first, last in [(0, 1), (7, 10), (3, 131), (count - 1, count)]:
            assert torch.equal(inside(module, inputs[first:last]), whole[first:last])


@pytest.mark.usefixtures("shared_threads")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_attention_depends_on_what_a_query_sees(dtype: torch.dtype, seed: int) -> None:
    """Not on hidden keys before, between and after, not on the other queries or rows."""
    at = sizes(seed)
    groups, heads, head_dim = draw(at, 1, 5), draw(at, 1, 4), 16 * draw(at, 1, 9)
    num_seen, num_queries, num_hidden = draw(at, 1, 400), draw(at, 1, 140), draw(at, 0, 200)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=at) * scale).to(dtype)

    seen_keys, seen_values = random(1, heads, num_seen, head_dim), random(1, heads, num_seen, head_dim)
    query = random(1, groups * heads, 1, head_dim, scale=3.0)
    options: dict[str, Any] = {"cap": 8.0} if seed % 2 else {}
    options |= {"sinks": random(groups * heads, scale=3.0)} if seed % 4 > 1 else {}
    alone = CoreAttention(query, seen_keys, seen_values, None, None, **options)
    columns = torch.randperm(num_seen + num_hidden, generator=at)[:num_seen].sort().values
    keys, values = (random(2, heads, num_seen + num_hidden, head_dim, scale=9.0) for _ in range(2))
    keys[1, :, columns], values[1, :, columns] = seen_keys[0], seen_values[0]
    queries, place = random(2, groups * heads, num_queries, head_dim), draw(at, 0, num_queries)
    queries[1, :, place] = query[0, :, 0]
    mask = torch.rand(2, 1, num_queries, num_seen + num_hidden, generator=at) > 0.5
    mask[1, 0, place] = False
    mask[1, 0, place, columns] = True
    together = CoreAttention(queries, keys, values, mask, None, **options)
    assert alone.fits and together.fits
    assert torch.equal(together()[1, place], alone()[0, 0])


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("family", [*EXACT, *NARROW, *EXPERTS, *PLAIN_FUNCTIONS, *OWN_PRODUCTS, "lfm2", "t5"])
@pytest.mark.parametrize("rows", [1, 3])
def test_logits_of_trees_are_those_of_single_tokens(family: str, dtype: torch.dtype, rows: int) -> None:
    check_trees(family_model(family, dtype), rows)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "bart", "qwen3_moe", "t5"])
def test_so_are_they_with_the_models_own_attention_functions(family: str, rows: int) -> None:
    with implementation(family_model(family, torch.bfloat16), "eager") as model:
        check_trees(model, rows)


@pytest.mark.at_most(6)
@pytest.mark.parametrize("model_type", [*WIDE, *RECURRENT])
def test_so_are_they_in_models_of_other_kinds(model_type: str) -> None:
    model = build(shrunk(model_type), "causal", 0.15).to(torch.bfloat16)
    for rows in (1, 3):
        check_trees(hf_specdec.enable(model), rows)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("family", [*EXACT, "llama", "qwen3", "gemma2"])
def test_tokens_of_a_prompt_have_the_same_bits_in_pieces_of_it(
    monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(cpu_kernels, "has_tiles", lambda: False)
    model = family_model(family, dtype)
    kernels, ids = CpuKernels(model), torch.randint(5, 90, (1, 300), generator=sizes(3))
    least = kernels.least_piece
    assert least == (1 if cpu.is_emulated(dtype) else 2)
    with torch.no_grad(), kernels.of_prompts:
        whole = model(ids).logits
        for cuts in ([0, 150, 300], [0, 129, 131, 300], [0, 298, 300], [0, 150, 150 + least, 300]):
            cache = DynamicCache(config=model.config)
            pieces = [model(ids[:, start:end], **{CACHE: cache}).logits for start, end in itertools.pairwise(cuts)]
            assert torch.equal(torch.cat(pieces, dim=1), whole)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("heads", "count"), [((4, 4), 2), ((4, 2), 128), ((6, 1), 129), ((4, 2), 300)])
def test_attention_of_a_prompt_is_torchs_but_for_rounding(
    heads: tuple[int, int], count: int, dtype: torch.dtype
) -> None:
    at = sizes(count)
    query, key, value = (torch.randn((2, heads[part > 0], count, 32), generator=at).to(dtype) for part in range(3))
    ours = CausalAttention(query, key, value, None)
    assert ours.fits
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(item.float() for item in (query, key, value)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(ours().transpose(1, 2).float(), expected, rtol=0.02, atol=0.02)


def check_trees(model: Any, rows: int) -> None:
    """Random trees over whole models, alone and in batches padded on the left, of which the texts are compared."""
    if rows > 1 and hf_specdec.capability(model).tier != "tree":
        return  # such batches decode plainly
    inputs = padded(PROMPT, rows=rows)
    settings: dict[str, Any] = {
        "max_new_tokens": 20,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": rows == 1,
    }
    plain = model.generate(**inputs, spec_method="plain", **settings)
    drafter = RandomTreeDrafter(plain.sequences[0].tolist(), seed=rows) if rows == 1 else "prompt_lookup"
    drafted = model.generate(**inputs, spec_method=drafter, **settings)
    assert drafted.spec_stats.num_draft_tokens > 0
    assert torch.equal(drafted.sequences, plain.sequences)
    if rows == 1:
        assert torch.equal(torch.stack(drafted.logits), torch.stack(plain.logits))
    assert drafted.spec_stats.plan.rounding_reason is None


@pytest.mark.at_most(2)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", [*PLAIN_FUNCTIONS, *OWN_PRODUCTS, "deepseek_v3"])
def test_every_method_writes_one_text(family: str, do_sample: bool, rows: int) -> None:
    check_texts(family_model(family, torch.bfloat16), rows, do_sample=do_sample)


@pytest.mark.at_most(1)
@pytest.mark.parametrize("model_type", wide_but(["mamba", "mamba2", "qwen3_5"], RECURRENT))
def test_so_it_does_with_recurrent_layers(model_type: str) -> None:
    model = hf_specdec.enable(build(shrunk(model_type), "causal", 0.15).to(torch.bfloat16))
    for rows, do_sample in itertools.product((1, 3), (False, True)):
        check_texts(model, rows, do_sample=do_sample)


def check_texts(model: Any, rows: int, *, do_sample: bool) -> None:
    """Texts of methods that draft without a network, from three seeds."""
    for seed in range(3):
        texts = set()
        for method, nodes in (("plain", None), ("prompt_lookup", None), ("lookahead", None), ("auto", 4), ("auto", 32)):
            torch.manual_seed(seed)
            values: dict[str, Any] = {} if nodes is None else {"spec_config": {"num_nodes": nodes}}
            inputs = padded(PROMPT.roll(seed, dims=1), rows=rows)
            text = model.generate(**inputs, **values, spec_method=method, do_sample=do_sample, max_new_tokens=16)
            texts.add(str(text.tolist()))
        assert len(texts) == 1


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("mask", ["none", "bool", "added"])
def test_attention_adds_biases_of_each_head(mask: str, heads: tuple[int, int]) -> None:
    """In every row of the batch, also where several heads share keys."""
    query, key, value = (tokens(3, count, 9, 24, dtype=torch.bfloat16) for count in (heads[0], heads[1], heads[1]))
    bias = tokens(1, heads[0], 9, 9, dtype=torch.bfloat16)
    seen = torch.ones(9, 9, dtype=torch.bool).tril().expand(3, 1, 9, 9)
    hidden = torch.where(seen, 0.0, torch.finfo(torch.bfloat16).min).bfloat16()
    inputs = {"none": None, "bool": seen, "added": hidden}[mask]
    ours = CoreAttention(query, key, value, inputs, 0.3, is_causal=False, bias=bias)
    exact = [item.double().repeat_interleave(heads[0] // item.shape[1], dim=1) for item in (query, key, value)]
    added = bias.double().expand(3, -1, -1, -1)
    added = added if inputs is None else added.masked_fill(~seen, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, attn_mask=added, scale=0.3).transpose(1, 2)
    assert ours.fits
    assert torch.allclose(ours().double(), expected, atol=0.02)


@pytest.mark.usefixtures("shared_threads")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("size", [(64, 96), (320, 128)])
def test_a_four_bit_layer_computes_a_token_alike(size: tuple[int, int], is_packed: bool, dtype: torch.dtype) -> None:
    """Packed for the CPU, where it has instructions for that, or not."""
    module = bitsandbytes.nn.Linear4bit(*size, compute_dtype=dtype, quant_type="nf4")
    module.load_state_dict(layer(*size).state_dict())
    module = module.to("cpu").eval()
    module.support_avx512bf16_for_cpu &= is_packed
    inputs = tokens(64, size[0], dtype=dtype)
    with torch.no_grad():
        expected = module(inputs)
    whole = inside(module, inputs)
    assert torch.allclose(whole.float(), expected.float(), atol=0.02, rtol=0.01)
    for count in range(1, 65):
        assert torch.equal(inside(module, inputs[:count]), whole[:count])


@pytest.mark.parametrize("precision", ["fp8", "int8", "nf4"])
def test_quantised_weights_round_alike_too(precision: Any) -> None:
    path = hf_specdec.embedded.path("target")
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(path, precision=precision)
    settings: dict[str, Any] = {"max_new_tokens": 20, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(PROMPT, do_sample=False, spec_method="plain", **settings)
    drafter = RandomTreeDrafter(plain.sequences[0].tolist())
    drafted = model.generate(PROMPT, do_sample=False, spec_method=drafter, **settings)
    assert drafted.spec_stats.plan.rounding_reason is None
    assert torch.equal(torch.stack(drafted.logits), torch.stack(plain.logits))


@pytest.mark.parametrize("family", OTHERS)
def test_a_plan_says_why_roundings_may_differ(family: str) -> None:
    model = family_model(family, torch.float16)
    output = model.generate(
        PROMPT, max_new_tokens=4, do_sample=False, spec_method="prompt_lookup", return_dict_in_generate=True
    )
    assert output.spec_stats.plan.rounding_reason.startswith(OTHERS[family])


@pytest.mark.parametrize("what", ["autocast", "deterministic"])
def test_a_call_that_leaves_all_to_torch_says_so(what: str) -> None:
    """Whatever an earlier call found."""
    model = family_model("qwen2", torch.bfloat16)
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    usual = model.generate(PROMPT, spec_method="prompt_lookup", **settings).spec_stats.plan
    with contextlib.ExitStack() as stack:
        if what == "autocast":
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        else:
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        plan = model.generate(PROMPT, spec_method="prompt_lookup", **settings).spec_stats.plan
    assert usual.rounding_reason is None
    assert plan.rounding_reason is not None


def test_fp32_and_other_devices_have_their_reasons() -> None:
    assert "fp32" in str(reason_for_width(family_model("qwen2")))
    with torch.device("meta"):
        model = type(family_model("qwen2", torch.bfloat16))(family_model("qwen2").config).to(torch.bfloat16)
    assert "on meta" in str(reason_for_width(model))
