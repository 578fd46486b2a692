"""Linear layers that FP8 leaves alone, by the names that a model's author gives."""

from typing import Any

import pytest
from torch import nn

from hf_specdec.kernels.quantization.fp8 import reasons_to_leave
from tests.helpers.zoo import FAMILIES, build


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        (["o_proj"], "self_attn.o_proj"),
        (["self_attn.o_proj"], "self_attn.o_proj"),
        (["mlp"], "mlp."),
        (["o_proj.weight"], "self_attn.o_proj"),
        (["proj"], None),
    ],
    ids=str,
)
def test_a_part_of_a_name_is_kept_where_all_of_it_stands_between_dots(
    monkeypatch: pytest.MonkeyPatch, kept: list[str], left: str | None
) -> None:
    model: Any = build(FAMILIES["llama"])
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    before = set(reasons_to_leave(model, layers))
    monkeypatch.setattr(model, "_keep_in_fp32_modules", kept)
    found = set(reasons_to_leave(model, layers)) - before
    assert found == {name for name in layers if left is not None and left in name}
