"""Packed weights: the core multiplies what GGUF's own reader unpacks, and a token alike beside any others."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf

import hf_specdec
from hf_specdec import embedded
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.kernels import cpu, packed
from hf_specdec.kernels.cpu_kernels import reason_for_width
from hf_specdec.kernels.packed import FORMATS, Q8_0, Format, PackedEmbedding, PackedLinear, interleaved, quantized
from hf_specdec.kernels.packed_loading import packable
from tests.helpers.support import DRAFTS, PROMPT
from tests.helpers.zoo import FAMILIES, build
from tests.kernels.layer_cases import has_core

pytestmark = has_core
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = 0.01  # of a product's tokens to 8 bits, over its largest number
SHAPE = (50, 512)  # rows that do not fill the last group


def blocks(kind: Format, rows: int, columns: int) -> Any:
    """Random codes of a GGUF file, with scales of a usual size: `(rows, bytes of a row)`."""
    draws = np.random.default_rng(0)
    raw = draws.integers(0, 256, (rows, columns // kind.columns, kind.block_bytes), dtype=np.uint8)
    scales = draws.uniform(0.001, 0.01, (*raw.shape[:2], 2)).astype(np.float16).view(np.uint8)
    place = 208 if kind.name == "Q6_K" else 0
    raw[..., place : place + 4] = scales[..., : raw.shape[2] - place]
    return raw.reshape(rows, -1)


def matrix(kind: Format, rows: int = SHAPE[0], columns: int = SHAPE[1]) -> tuple[torch.Tensor, torch.Tensor]:
    """A packed matrix, and its numbers in fp32 by the package gguf."""
    gguf = pytest.importorskip("gguf")
    raw = blocks(kind, rows, columns)
    numbers = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind.type_id))
    return interleaved(torch.from_numpy(raw), kind), torch.from_numpy(numbers)


def linear(weight: torch.Tensor, kind: Format, num_in: int, bias: torch.Tensor | None = None) -> PackedLinear:
    layer = PackedLinear(num_in, SHAPE[0], kind, bias=bias is not None)
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return layer


@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
def test_an_embedding_has_the_numbers_that_ggufs_own_reader_unpacks(kind: Format) -> None:
    weight, numbers = matrix(kind)
    table = PackedEmbedding(*SHAPE, kind)
    table.load_state_dict({"weight": weight})
    ids = torch.tensor([[3, 49, 3], [0, 16, 31]])
    assert torch.equal(table(ids), numbers[ids])
    assert torch.equal(table.to(torch.bfloat16)(ids), numbers[ids].bfloat16())
    with pytest.raises(IndexError):
        table(torch.tensor([50]))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
def test_a_product_is_that_of_the_numbers_but_for_the_rounding_of_tokens(
    kind: Format, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bias, and with each number of tokens the same bits for each of them."""
    monkeypatch.setattr(cpu, "SHARED_WORK", 1)
    weight, numbers = matrix(kind)
    bias = torch.randn(SHAPE[0])
    layer, tokens = linear(weight, kind, SHAPE[1], bias), torch.randn(2, 20, SHAPE[1]).to(dtype)
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together, flat = layer(tokens), tokens.flatten(0, 1)
        exact = F.linear(tokens.float(), numbers, bias)
        assert together.dtype == dtype
        assert (together.float() - exact).abs().max() < ROUNDING * exact.abs().max()
        for count in (1, 2, 3, 5, 8, 9, 16, 40):
            assert torch.equal(layer(flat[-count:]), together.flatten(0, 1)[-count:])
        torch.set_num_threads(1)
        assert torch.equal(layer(tokens), together)
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize("columns", [512, 70, 8])
def test_any_matrix_is_quantised_to_within_half_a_step(columns: int) -> None:
    """Zeros, a row of one large number, and rows that do not end with a block too."""
    numbers = torch.randn(SHAPE[0], columns)
    numbers[3], numbers[4, 5] = 0.0, 300.0
    layer, ids = linear(quantized(numbers), Q8_0, columns), torch.arange(SHAPE[0])
    table = PackedEmbedding(SHAPE[0], columns, Q8_0)
    table.load_state_dict({"weight": layer.weight})
    step = F.pad(numbers, (0, -columns % 32)).view(SHAPE[0], -1, 32).abs().amax(-1).repeat_interleave(32, 1) / 127
    assert bool(((table(ids) - numbers).abs() <= 0.51 * step[:, :columns] + 1e-6).all())
    tokens = torch.randn(3, columns)
    exact = F.linear(tokens, table(ids))
    assert (layer(tokens) - exact).abs().max() < ROUNDING * exact.abs().max()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_seen_in_the_result(number: float) -> None:
    layer, tokens = linear(matrix(Q8_0)[0], Q8_0, SHAPE[1]), torch.randn(2, SHAPE[1])
    tokens[0, 7] = number
    assert layer(tokens)[0].isnan().all() and layer(tokens)[1].isfinite().all()


def test_a_layer_is_copied_and_pickled(tmp_path: Path) -> None:
    layer, tokens = linear(matrix(Q8_0)[0], Q8_0, SHAPE[1]), torch.randn(2, SHAPE[1])
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(tokens), layer(tokens))


def test_what_the_core_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = linear(matrix(Q8_0)[0], Q8_0, SHAPE[1])
    for tokens in (torch.randn(2, 8), torch.randn(2, 512).double(), torch.randn(2, 512, requires_grad=True)):
        with pytest.raises(UnsupportedModelError, match="without gradients"):
            layer(tokens)
    with pytest.raises(UnsupportedModelError, match="on meta"):
        layer(torch.empty(2, 512, device="meta"))
    monkeypatch.setattr(packed.cpu, "core", None)
    with pytest.raises(UnsupportedModelError, match="no compiled core is installed"):
        layer(torch.randn(2, 512))


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_specdec.AutoModelForCausalLM.from_pretrained(embedded.path("target"), precision="int8")


def test_int8_on_a_cpu_packs_layers_embedding_and_output(model: Any) -> None:
    """One byte and a 32nd of two a number, and a tied output layer shares the embedding's."""
    assert isinstance(model.get_input_embeddings(), PackedEmbedding)
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    assert not any(type(module) in (torch.nn.Linear, torch.nn.Embedding) for module in model.modules())
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert is_tied == model.config.tie_word_embeddings
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_method_writes_plains_text_in_int8(model: Any, draft: str) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    assert reason_for_width(model) is None
    expected = model.generate(PROMPT, **settings)
    output = model.generate(PROMPT, **settings, **DRAFTS[draft](expected[0].tolist()))
    assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "gemma3"])
def test_int8_logits_are_not_much_further_off_than_those_in_bf16(family: str, tmp_path: Path) -> None:
    """Transposed layers, shared and scaled embeddings too."""
    original = build(FAMILIES[family])
    original.save_pretrained(tmp_path)
    is_seq2seq = FAMILIES[family].is_seq2seq
    auto = hf_specdec.AutoModelForSeq2SeqLM if is_seq2seq else hf_specdec.AutoModelForCausalLM
    models = [auto.from_pretrained(tmp_path, precision=precision) for precision in ("int8", "bf16")]
    assert isinstance(models[0].get_input_embeddings(), PackedEmbedding)
    inputs = {"input_ids": PROMPT} | ({"decoder_input_ids": PROMPT} if is_seq2seq else {})
    with torch.no_grad():
        exact = original(**inputs).logits
        int8, bf16 = (float((model(**inputs).logits.float() - exact).norm() / exact.norm()) for model in models)
    assert int8 < min(5 * bf16, 0.2)


def test_a_packed_model_is_not_saved(model: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="has no format for the packed weights"):
        model.save_pretrained(tmp_path)


def test_weights_that_other_modules_share_stay() -> None:
    """An embedding of a class that does more than look up."""

    class Normed(torch.nn.Embedding):
        pass

    config = tf.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    tied = tf.LlamaForCausalLM(config)
    assert {"lm_head", "model.embed_tokens"} < set(packable(tied))
    tied.model.embed_tokens = Normed(64, 32)
    assert not {"lm_head", "model.embed_tokens"} & set(packable(tied))
