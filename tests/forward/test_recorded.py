"""Forwards that are recorded and replayed: the same texts, and no record outlives what it was made of."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

import hf_specdec
from hf_specdec.forward.recorded import forwards
from hf_specdec.kernels import cpu
from hf_specdec.kernels.cpu import use_huge_pages
from tests.helpers.recorded import MODELS, PROMPT, SIZES, generated, model_of, unrecorded
from tests.helpers.zoo_wide import varied

pytestmark = pytest.mark.skipif(cpu.why_unused() is not None, reason="forwards are recorded where the core computes")


@pytest.fixture(autouse=True)
def recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards are recorded when they are first seen."""
    monkeypatch.setattr(forwards, "LEAST_FORWARDS", 1)
    monkeypatch.setattr(forwards, "LEAST_OF_KIND", 1)


@pytest.mark.parametrize("method", ["plain", "prompt_lookup", "lookahead", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.each_value
def test_replayed_forwards_write_the_models_text(name: str, dtype: torch.dtype, method: str) -> None:
    model = model_of(name, dtype)
    for options in ({}, {"do_sample": True, "temperature": 0.7}):
        expected = unrecorded(model_of(name, dtype), method, max_new_tokens=40, **options)
        output = generated(model, method, max_new_tokens=40, **options)
        assert output.sequences.tolist() == expected.sequences.tolist()
        again = generated(model, method, max_new_tokens=40, **options)
        assert again.sequences.tolist() == expected.sequences.tolist()
    if method in ("plain", "prompt_lookup"):
        assert again.spec_stats.num_replayed > 0, again.spec_stats.record_reason


def test_logits_of_replayed_forwards_have_the_models_bits() -> None:
    expected = unrecorded(model_of(), output_logits=True)
    output = generated(model_of(), output_logits=True)
    assert output.spec_stats.num_replayed > 16
    assert torch.equal(torch.stack(output.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("method", ["plain", "prompt_lookup"])
def test_padded_batches_and_rows_of_different_widths_are_replayed(method: str) -> None:
    ids = torch.tensor([[0, 0, 0, 5, 6, 7, 8, 5, 6], [9, 9, 9, 9, 9, 9, 9, 9, 9], [0, 7, 8, 1, 7, 8, 1, 7, 8]])
    expected, model = unrecorded(model_of(), method, ids), model_of()
    for _ in range(3):
        output = generated(model, method, ids)
        assert output.sequences.tolist() == expected.sequences.tolist()
    assert output.spec_stats.num_replayed > 0, output.spec_stats.record_reason


def test_outputs_keep_their_numbers_when_later_forwards_are_replayed() -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((scores, scores.clone()))
        return scores

    generated(model_of(), logits_processor=[look])
    assert len(seen) == 24 and all(torch.equal(kept, copied) for kept, copied in seen)


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)


def _replaced(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(-model.model.layers[0].mlp.up_proj.weight.detach())


def _moved(model: Any) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data * -1


def _hooked(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: -output)


def _other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def _other_scale(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 0.5


def _other_layer(model: Any) -> None:
    model.model.layers[0] = copy.deepcopy(model.model.layers[1])
    model.model.layers[0].self_attn.layer_idx = 0


def _other_forward(model: Any) -> None:
    kept = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda states: -kept(states)


def _transposed(model: Any) -> None:
    model.model.layers[0].self_attn.o_proj.weight.data = model.model.layers[0].self_attn.o_proj.weight.data.t()


def _configured(model: Any) -> None:
    model.config.num_hidden_layers = 1


CHANGES = [
    _in_place,
    _replaced,
    _moved,
    _hooked,
    _other_activation,
    _other_scale,
    _other_layer,
    _other_forward,
    _transposed,
    _configured,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_writes_its_new_text(change: Any) -> None:
    model = model_of()
    before = generated(model)
    assert before.spec_stats.num_replayed > 0
    change(model)
    other = model_of()
    change(other)
    expected = unrecorded(other)
    assert expected.sequences.tolist() != before.sequences.tolist(), "the change is seen in the text"
    for _ in range(2):
        assert generated(model).sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_the_middle_of_a_call_is_seen(change: Any) -> None:
    def at_ten(model: Any) -> Any:
        def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            if ids.shape[1] == PROMPT.shape[1] + 10:
                change(model)
            return torch.zeros(len(ids), dtype=torch.bool)

        return criterion

    model, other = model_of(), model_of()
    generated(model)
    expected = unrecorded(other, stopping_criteria=[at_ten(other)])
    assert generated(model, stopping_criteria=[at_ten(model)]).sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_records_of_the_same_tokens_serve_others(name: str) -> None:
    model = model_of(name)
    for _ in range(4):
        generated(model, max_new_tokens=2)
    output = generated(model, output_logits=True)
    expected = unrecorded(model, output_logits=True)
    assert output.spec_stats.num_replayed > 16, output.spec_stats.record_reason
    assert torch.equal(torch.stack(output.logits), torch.stack(expected.logits))


def test_positions_beyond_a_table_are_an_error() -> None:
    model = model_of("gpt2")
    generated(model)
    with pytest.raises(IndexError, match="out of range"):
        generated(model, ids=PROMPT.repeat(1, 50), max_new_tokens=20)


def test_copies_and_pickles_of_a_model_have_records_of_their_own() -> None:
    model = model_of()
    expected = generated(model).sequences.tolist()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        _in_place(other)
        assert generated(other).sequences.tolist() != expected
        assert generated(model).sequences.tolist() == expected


def test_threads_that_share_a_model_write_the_same_text() -> None:
    model = model_of()
    expected = generated(model).sequences.tolist()
    texts: list[Any] = []
    threads = [threading.Thread(target=lambda: texts.append(generated(model).sequences.tolist())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 4


def test_two_threads_of_the_core_share_a_forward() -> None:
    before = torch.get_num_threads()
    expected = generated(model_of()).sequences.tolist()
    torch.set_num_threads(2)
    try:
        output = generated(model_of())
    finally:
        torch.set_num_threads(before)
    assert output.sequences.tolist() == expected and output.spec_stats.num_replayed > 0


def test_programs_between_two_that_were_compared_give_the_models_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    compare = forwards.RecordedForwards._compare

    def noted(self: Any, kind: Any, compute: Any, arguments: Any, masks: Any, tokens: int, *rest: Any) -> Any:
        compared.append(tokens)
        return compare(self, kind, compute, arguments, masks, tokens, *rest)

    monkeypatch.setattr(forwards.RecordedForwards, "_compare", noted)
    expected, model = unrecorded(model_of(), output_logits=True), model_of()
    for draft_len in (2, 3, 15, 15, *range(4, 15)):
        config = hf_specdec.PromptLookupConfig(max_draft_len=draft_len, draft_len_per_match=None)
        output = generated(model, "prompt_lookup", spec_config=config, output_logits=True)
        assert torch.equal(torch.stack(output.logits), torch.stack(expected.logits)), draft_len
    assert output.spec_stats.num_replayed == output.spec_stats.num_forwards
    assert len(set(compared)) < 8, compared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "function", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu2", "sigmoid", "quick_gelu"]
)
def test_functions_of_halves_are_looked_up_with_the_models_bits(function: str, dtype: torch.dtype) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        made = LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act=function, initializer_range=0.5)).to(dtype).eval()
        return hf_specdec.enable(made)

    options = {"max_new_tokens": 24, "output_logits": True}
    expected, output = unrecorded(model(), **options), generated(model(), **options)
    assert output.spec_stats.num_replayed > 12
    assert torch.equal(torch.stack(output.logits), torch.stack(expected.logits))


def test_short_calls_record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = model_of()
    generated(model, max_new_tokens=forwards.LEAST_FORWARDS)
    assert generated(model, max_new_tokens=1).spec_stats.num_replayed == 0


def test_weights_in_huge_pages_stay_where_they_are() -> None:
    weight = torch.randn(4 << 20)
    address, expected = weight.data_ptr(), weight.clone()
    assert use_huge_pages([weight]) in range(weight.nbytes + (4 << 20))
    assert weight.data_ptr() == address and torch.equal(weight, expected)
    weight.zero_()
    assert not weight.any()


def test_weights_of_a_file_are_copied_out_of_it(tmp_path: Any) -> None:
    expected = torch.randn(4 << 20)
    torch.save(expected, tmp_path / "weights.pt")
    weight = torch.load(tmp_path / "weights.pt", mmap=True)
    use_huge_pages([weight])
    assert torch.equal(weight, expected)
    weight.zero_()
    assert torch.equal(torch.load(tmp_path / "weights.pt"), expected), "the file is as it was"


def test_a_class_that_prepares_its_inputs_itself_is_replayed() -> None:
    ids = torch.tensor([[5, 6, 7, 8] * 4])
    model = hf_specdec.enable(varied("gemma4", "causal"))
    expected = unrecorded(model, "prompt_lookup", ids)
    for _ in range(3):
        output = generated(model, "prompt_lookup", ids)
        assert output.sequences.tolist() == expected.sequences.tolist()
    assert output.spec_stats.num_replayed > 0, output.spec_stats.record_reason


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_go_on_from_their_states_between_replayed_parts(name: str, dtype: torch.dtype) -> None:
    ids = torch.tensor([[5, 6, 7, 8] * 4])
    for options in ({}, {"do_sample": True, "temperature": 0.8}):
        model = hf_specdec.enable(copy.deepcopy(varied(name, "causal")).to(dtype))
        expected = unrecorded(model, "prompt_lookup", ids, **options)
        for _ in range(3):
            output = generated(model, "prompt_lookup", ids, **options)
            assert output.sequences.tolist() == expected.sequences.tolist()
        assert output.spec_stats.num_replayed > 0, output.spec_stats.record_reason
