"""MTP layers read from a checkpoint of the target, as its family holds them."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.common.files import said_of_hub
from hf_specdec.compat.models import text_config
from hf_specdec.compat.mtp import MtpModel, has_own_mtp, weight_names
from hf_specdec.errors import CheckpointError, UnsupportedModelError, first_line
from hf_specdec.methods.mtp.families import NUMBERED, SAME, FamilyMtp, announced_layers, family_of

QUANTISED = re.compile(r"\.(weight_scale(_2)?|weight_packed|qweight|scales|weight\.absmax)$")
OTHER_METHOD = 'Use another spec_method, such as "auto".'
REMEDY = "Name the original checkpoint: hf_specdec.AutoDraftHead.from_pretrained(path, target=model)."


def load_mtp(target: PreTrainedModel, path: str | None = None) -> MtpModel:
    """The MTP layers in a checkpoint of `target`.

    Args:
        path: folder or hub name; by default that which the target was loaded from.

    Raises:
        UnsupportedModelError: MTP layers of such a model are not known.
        CheckpointError: they are not there.
    """
    name, source, dtype = type(target).__name__, target.config.name_or_path, target.config.dtype
    mtp_class, announced = _class_for(target), announced_layers(target.config)
    if announced == 0:
        raise UnsupportedModelError(
            f"{name} must have a configuration that announces MTP layers, but this one announces 0. {OTHER_METHOD}"
        )
    if announced is not None:
        with _announcing(target, announced):  # what cannot be built is said before what cannot be read
            pass
    if not (path or source):
        raise CheckpointError(
            f"{name} must come from a checkpoint with the MTP layers of {name}, but it was loaded from none. {REMEDY}"
        )
    try:
        count = announced or _num_layers_in(path or source, target)
        with _announcing(target, count):
            _refuse_quantised(path or source, mtp_class.get_mtp_weights_regex(target))
            target.config.name_or_path = source if path is None else path
            target.config.dtype = target.dtype  # the loader wants one; a saved configuration names it by a string
            loaded: MtpModel = mtp_class.from_pretrained(target, device_map={"": target.device})
    except UnsupportedModelError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and path and not Path(path).exists():
            raise CheckpointError(f"{said_of_hub(path, first_line(error))} {REMEDY}") from error
        raise CheckpointError(
            f"{path or source!r} must be a checkpoint with the MTP layers of {name}, but it cannot be read as one: "
            f"{first_line(error)} {REMEDY}"
        ) from error
    finally:
        target.config.name_or_path, target.config.dtype = source, dtype
    return loaded.eval().requires_grad_(False)


def _class_for(target: PreTrainedModel) -> type[MtpModel]:
    """Finds the family's class, or transformers' own of a model that announces layers which it can find."""
    mtp_class: type[MtpModel] | None = None
    if family_of(target.config) is not None:
        mtp_class = FamilyMtp
    elif has_own_mtp(target):
        mtp_class = MtpModel
    if mtp_class is not None:
        return mtp_class
    text, reason = text_config(target.config), "has none"
    if hasattr(text, "hc_mult") or hasattr(text, "hc_count"):
        reason = "its own read the residual streams before they are joined, and transformers hands out the joined ones"
    elif hasattr(text, "index_topk"):
        reason = "its own choose keys by an index, whose keys no cache of drafts holds"
    raise UnsupportedModelError(
        f"{type(target).__name__} must be a model with MTP layers that can be read here, but {reason}. {OTHER_METHOD}"
    )


def _refuse_quantised(path: str, keys: re.Pattern[str]) -> None:
    """Raise a `ValueError` for MTP layers that are quantised otherwise than to FP8 with a `weight_scale_inv`."""
    names = [name for name in weight_names(path) if keys.search(name) and QUANTISED.search(name)]
    if names:
        raise ValueError(f"its MTP layers are quantised otherwise than to FP8 with weight_scale_inv ({names[0]}).")


def _num_layers_in(path: str, target: PreTrainedModel) -> int:
    """Counts the MTP layers of a checkpoint whose configuration does not say how many."""
    family = family_of(target.config)
    assert family is not None
    numbers = [int(match[1]) for name in weight_names(path) if (match := re.match(family.counted, name))]
    first = text_config(target.config).num_hidden_layers if family.counted == NUMBERED else 0
    count = max(numbers, default=-1) + 1 - first
    if count < 1:
        raise ValueError("it has no MTP layers.")
    return int(count)


@contextlib.contextmanager
def _announcing(target: PreTrainedModel, count: int) -> Iterator[None]:
    """Meanwhile the configuration tells how many MTP layers there are, and of which types."""
    config, family = text_config(target.config), family_of(target.config)
    fields: dict[str, Any] = {"num_mtp_layers": count}
    if family is not None:
        attention = _types(config, "layer_types", family.attention, count)
        mlp = _types(config, "mlp_layer_types", family.mlp, count)
        types = {"mtp_layer_types": attention, "mtp_mlp_layer_types": mlp}
        fields |= {name: value for name, value in types.items() if value}
    before = {name: getattr(config, name) for name in fields if hasattr(config, name)}
    try:
        for name, value in fields.items():
            setattr(config, name, value)
        try:
            target.config.get_mtp_config()
        except ValueError as error:  # some configurations do not say of which type the layers are
            raise UnsupportedModelError(
                f"{type(target).__name__} must be a model whose MTP layers transformers can build, but it cannot: "
                f"{error}. {OTHER_METHOD}"
            ) from error
        yield
    finally:
        for name in fields:
            if name in before:
                setattr(config, name, before[name])
            else:
                delattr(config, name)


def _types(config: Any, name: str, otherwise: str | None, count: int) -> list[str] | None:
    """The types of `count` MTP layers: those that the configuration tells, or the family's."""
    types, mtp_types = getattr(config, name, None), getattr(config, f"mtp_{name}", None)
    if mtp_types is not None or not types:
        return mtp_types
    if otherwise is None:
        return None
    return list(types[:count]) if otherwise == SAME else [otherwise] * count
