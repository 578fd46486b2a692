"""transformers' multi-token prediction layers: their module, and how a checkpoint's are read.

Names                              Why
`modeling_layers.MtpModel`         the layers, whose loader maps every checkpoint's names
`_project_to_logits`               the shared head as the main model applies it
`config.name_or_path`              the loader reads the folder that the main model names, and no other
`num_mtp_layers`                   of configurations: how many there are
`get_mtp_config`                   raises where a configuration does not tell the layers' types
`mtp_layer_types`                  these types, and `mtp_mlp_layer_types`

Tried with transformers 5.23.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from hf_specdec.compat.masks import attention_implementation, set_attention_implementation
from hf_specdec.compat.models import text_config
from hf_specdec.errors import CheckpointError, UnsupportedModelError, first_line

__all__ = ["MtpModel", "load_mtp", "mtp_logits", "num_mtp_layers", "use_mask_attention"]

REMEDY = "Name the original checkpoint: hf_specdec.AutoDraftHead.from_pretrained(path, target=model)."
# of configurations: the type of MTP layers, and the one whose weights have other names
MTP_TYPES = {"layer_types": ("full_attention", "linear_attention"), "mlp_layer_types": ("sparse", "dense")}
MASKED = ("sdpa", "eager")  # attention that takes any mask


def num_mtp_layers(config: Any) -> int:
    """MTP layers that a configuration announces."""
    return int(getattr(text_config(config), "num_mtp_layers", None) or 0)


def load_mtp(target: PreTrainedModel, path: str | None = None) -> MtpModel:
    """The MTP layers in a checkpoint of `target`.

    Args:
        path: folder or hub name; by default that which the target was loaded from.

    Raises:
        UnsupportedModelError: transformers knows no MTP layers of such a model.
        CheckpointError: they are not there.
    """
    name, own, dtype = type(target).__name__, target.config.name_or_path, target.config.dtype
    if not num_mtp_layers(target.config) or not target._keys_to_ignore_on_load_unexpected:
        raise UnsupportedModelError(
            f"{name} must be a model whose MTP layers transformers knows, and its configuration must announce some "
            f'(num_mtp_layers is {num_mtp_layers(target.config)}). Use another spec_method, such as "auto".'
        )
    with _told_types(text_config(target.config)):
        try:
            target.config.get_mtp_config()
        except ValueError as error:  # some configurations do not say of which type the layers are
            raise UnsupportedModelError(
                f"{name} must be a model whose MTP layers transformers can build, but it cannot: {error}. "
                'Use another spec_method, such as "auto".'
            ) from error
        if not (path or own):
            raise CheckpointError(
                f"{name} must come from a checkpoint with the MTP layers of {name}, but it was loaded from none. "
                f"{REMEDY}"
            )
        try:
            target.config.name_or_path = own if path is None else path
            target.config.dtype = target.dtype  # the loader wants one; a saved configuration names it by a string
            loaded: MtpModel = MtpModel.from_pretrained(target, device_map={"": target.device})
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{path or own!r} must be a checkpoint with the MTP layers of {name}, but it cannot be read as one: "
                f"{first_line(error)} {REMEDY}"
            ) from error
        finally:
            target.config.name_or_path, target.config.dtype = own, dtype
    return loaded.eval().requires_grad_(False)


@contextlib.contextmanager
def _told_types(config: Any) -> Iterator[None]:
    """A configuration that tells the types of the model's layers and not those of its MTP layers tells both meanwhile.

    They are of full attention and have experts, where the model's other layers have weights of other names: then a
    checkpoint of other MTP layers lacks weights, and the loader raises.
    """
    told: dict[str, list[str]] = {}
    for name, (wanted, other) in MTP_TYPES.items():
        types = getattr(config, name, None)
        if types and {*types} <= {wanted, other} and getattr(config, f"mtp_{name}", None) is None:
            told[f"mtp_{name}"] = [wanted] * num_mtp_layers(config)
    before = {name: getattr(config, name) for name in told if hasattr(config, name)}
    try:
        for name, types in told.items():
            setattr(config, name, types)
        yield
    finally:
        for name in told:
            if name in before:
                setattr(config, name, before[name])
            else:
                delattr(config, name)


def mtp_logits(mtp: MtpModel, states: torch.Tensor) -> torch.Tensor:
    """`(..., vocab_size)` of the main model's head, scaled and cut as the main model does."""
    weight = getattr(mtp.shared_head, "weight", None)
    if weight is not None and weight.device.type != "meta":
        states = states.to(weight.device)
    logits: torch.Tensor = mtp._project_to_logits(states)
    return logits


def use_mask_attention(mtp: MtpModel) -> None:
    """Let the layers use an attention that takes any mask, torch's instead of a kernel.

    Their configuration is a copy of the target's.
    """
    if attention_implementation(mtp.config) not in MASKED:
        set_attention_implementation(mtp.config, "sdpa")
