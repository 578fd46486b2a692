"""What a model's weights are is counted rightly: kinds, bytes, what was left, and the distance of the logits."""

import math
from typing import Any

import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec import embedded
from hf_specdec.kernels.quantization.bnb import reads_split_blocks
from hf_specdec.kernels.quantization.report import loaded_weights, logit_error, num_parameters, precision_of
from hf_specdec.loading.auto import describe_weights
from tests.helpers.support import plain
from tests.helpers.zoo import FAMILIES, build

load = hf_specdec.AutoModelForCausalLM.from_pretrained
DRAFT = embedded.path("draft")  # 2 layers of 128, 344 between; the output layer is the embedding
LINEAR = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 344)
DOWN = 2 * 128 * 344
EMBEDDING = 4096 * 128
NORMS = 5 * 128
ROWS = 2 * (128 + 64 + 64 + 128 + 344 + 344 + 128)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: load(DRAFT, precision=name) for name in ("fp32", "bf16", "fp8", "int8", "nf4")}


def test_bytes_are_those_of_the_format(models: dict[str, Any]) -> None:
    """The embedding counts once though the output layer has it too; scales count."""
    rest = (EMBEDDING + NORMS) * 2
    assert loaded_weights(models["fp32"]).parameter_bytes == (LINEAR + EMBEDDING + NORMS) * 4
    assert loaded_weights(models["bf16"]).parameter_bytes == LINEAR * 2 + rest
    assert loaded_weights(models["fp8"]).parameter_bytes == LINEAR + ROWS * 4 + rest
    assert loaded_weights(models["int8"]).parameter_bytes == LINEAR + ROWS * 4 + rest
    packed = LINEAR if reads_split_blocks() else LINEAR - DOWN
    tables = 14 if reads_split_blocks() else 12  # bitsandbytes keeps a table of 16 numbers for each layer
    left = (LINEAR - packed) * 2
    assert loaded_weights(models["nf4"]).parameter_bytes == packed // 2 + packed // 64 * 4 + tables * 64 + left + rest


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8", "int8", "nf4"])
def test_numbers_are_counted_however_they_are_packed(models: dict[str, Any], name: str) -> None:
    assert num_parameters(models[name]) == LINEAR + EMBEDDING + NORMS
    found = loaded_weights(models[name])
    assert sum(group.parameters for group in found.layers) == LINEAR + EMBEDDING + NORMS
    assert found.precision == precision_of(models[name]) == {"fp32": "float32", "bf16": "bfloat16"}.get(name, name)


@pytest.mark.parametrize("name", ["int8", "nf4"])
def test_a_forward_changes_no_count(models: dict[str, Any], name: str) -> None:
    """bitsandbytes moves scales about and packs weights at the first one; nf4's scales become bf16."""
    model = load(DRAFT, precision=name)
    before = loaded_weights(model)
    plain(model, torch.arange(8)[None], max_new_tokens=2)
    after = loaded_weights(model)
    assert [(group.kind, group.parameters) for group in after.layers] == [
        (group.kind, group.parameters) for group in before.layers
    ]
    assert before.parameter_bytes * 0.97 <= after.parameter_bytes <= before.parameter_bytes


def test_what_was_left_is_said_with_its_reason(models: dict[str, Any]) -> None:
    assert loaded_weights(models["bf16"]).left == {}
    assert loaded_weights(models["fp8"]).left == {"lm_head": "its weight is another layer's too"}
    assert "output layers" in loaded_weights(models["int8"]).left["lm_head"]
    left = loaded_weights(models["nf4"]).left
    assert ("model.layers.0.mlp.down_proj" in left) != reads_split_blocks()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_in_one_tensor_are_said_to_be_left(tmp_path: Any, family: str) -> None:
    build(FAMILIES[family]).save_pretrained(tmp_path)
    model = load(tmp_path, precision="fp8")
    left = loaded_weights(model).left
    experts = [name for name, reason in left.items() if "experts in one tensor" in reason]
    assert len(experts) == 3, "one for each layer"
    for name in experts:
        assert {p.dtype for p in model.get_submodule(name).parameters() if p.ndim > 2} == {torch.bfloat16}


def test_fp8_names_its_backend_and_others_have_none(models: dict[str, Any]) -> None:
    assert "widened to bf16" in str(loaded_weights(models["fp8"]).fp8_backend)
    assert loaded_weights(models["int8"]).fp8_backend is None


def test_logits_of_the_same_model_have_no_distance(models: dict[str, Any]) -> None:
    error = logit_error(models["fp32"], models["fp32"], torch.arange(10, 40)[None])
    assert (error.max_abs, error.mean_kl, error.same_argmax, error.num_tokens) == (0, 0, 1, 30)


def test_the_divergence_is_that_of_the_formula() -> None:
    """Two models that always say the same: p = (1/2, 1/2) and q = (1/4, 3/4)."""

    class Says:
        config = tf.LlamaConfig()
        device = torch.device("cpu")

        def __init__(self, *odds: float) -> None:
            self.logits = torch.tensor(odds).log()

        def modules(self) -> list[Any]:
            return []

        def get_input_embeddings(self) -> None:
            return None

        def __call__(self, input_ids: torch.Tensor) -> Any:
            return tf.utils.ModelOutput(logits=self.logits.expand(*input_ids.shape, -1))

    error = logit_error(Says(0.25, 0.75), Says(0.5, 0.5), torch.zeros(1, 4, dtype=torch.long))  # type: ignore[arg-type]
    assert error.mean_kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-5)
    assert error.max_abs == pytest.approx(math.log(2), rel=1e-5)


def test_the_price_grows_with_what_is_left_out() -> None:
    """Against the checkpoint's own precision, on real text: bf16 has none, fp8 less than nf4."""
    found = {name: describe_weights(load(DRAFT, precision=name), compare=True).error for name in ("bf16", "fp8", "nf4")}
    assert found["bf16"] is None, "the checkpoint is in bf16"
    assert 0 < found["fp8"].mean_kl < found["nf4"].mean_kl < 0.2  # type: ignore[union-attr]
    assert 0 < found["fp8"].max_abs < found["nf4"].max_abs  # type: ignore[union-attr]


def test_a_checkpoint_that_is_quantised_itself_has_nothing_to_be_compared_with(tmp_path: Any) -> None:
    load(DRAFT, precision="fp8").save_pretrained(tmp_path)
    assert describe_weights(load(tmp_path), compare=True).error is None


def test_a_model_of_no_checkpoint_has_nothing_to_be_compared_with() -> None:
    model = hf_specdec.enable(build(FAMILIES["llama"]))
    assert describe_weights(model).error is None
    with pytest.raises(hf_specdec.CheckpointError, match="no checkpoint"):
        describe_weights(model, compare=True)


def test_a_configuration_may_be_given_by_its_folder(models: dict[str, Any], tmp_path: Any) -> None:
    models["fp8"].save_pretrained(tmp_path)
    again = load(tmp_path, config=str(tmp_path))
    assert precision_of(again) == precision_of(models["fp8"])
    ids = torch.tensor([[5, 6, 7]])
    assert again(ids).logits.equal(models["fp8"](ids).logits)
    assert precision_of(load(DRAFT, config=str(DRAFT), precision="fp8")) == precision_of(models["fp8"])


def test_an_encoder_decoder_is_compared_on_both_sides(tmp_path: Any) -> None:
    build(FAMILIES["bart"]).save_pretrained(tmp_path)
    model = hf_specdec.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, precision="fp8")
    error = describe_weights(model, compare=True).error
    assert error is not None
    assert (error.num_tokens, error.mean_kl > 0) == (128, True), "no tokenizer: ids from all over the vocabulary"
