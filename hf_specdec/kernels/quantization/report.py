"""Report of a loaded model's weights: kinds of layers, dtypes, bytes, layers in full precision, logit error."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.compat import input_device
from hf_specdec.compat.weights import Conv1D
from hf_specdec.kernels.quantization.fp8_linear import Fp8Linear
from hf_specdec.kernels.quantization.precision import Support, fp8_backend, machine_support

# Read when logits are compared: words and code, so that neither kind of model sees only what it does not know.
FIXED_TEXT = """\
def read_table(path, separator=","):
    \"\"\"Return the rows of a text file as lists of strings, without the empty ones.\"\"\"
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            line = line.rstrip("\\n")
            if not line or line.startswith("#"):
                continue
            rows.append([field.strip() for field in line.split(separator)])
            if len(rows[-1]) != len(rows[0]):
                raise ValueError(f"line {number} has {len(rows[-1])} fields, not {len(rows[0])}")
    return rows

The harbour was quiet in the morning. Two boats had come in during the night, and the people who waited for them on the
quay counted the crates, wrote the numbers into a book, and went home before the rain began.
"""
OUTPUT_LAYER = "transformers leaves output layers and tied ones as they are"
SPLIT_BLOCKS = "its rows do not end with a block of 64, which bitsandbytes reads wrongly on this CPU"
INT8_KIND, FOUR_BIT_KIND = "Linear8bitLt", "Linear4bit"  # of bitsandbytes, which need not be installed
GGUF_ROWS = {  # transformers' modules whose weights stay packed, and the attribute that is the length of a row
    ("GgufLinear", "weight"): "in_features",
    ("GgufEmbedding", "weight"): "embedding_dim",
    ("GgufExperts", "gate_up_proj"): "hidden_dim",
    ("GgufExperts", "down_proj"): "intermediate_dim",
}


@dataclass(frozen=True, slots=True)
class Layers:
    """The modules of one class whose own weights have one dtype.

    Attributes:
        kind (`str`): the class.
        dtype (`str`): of the largest of a module's own parameters; `"nf4"` and `"fp4"` for packed ones.
        count (`int`): how many modules.
        parameters (`int`): numbers in their own parameters, each packed one counted.
        bytes (`int`): of their parameters and what belongs to them, such as scales. Shared weights count once, for
            the first layer that has them.
    """

    kind: str
    dtype: str
    count: int
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LogitError:
    """Distance of the logits from another model's on the same text.

    Attributes:
        max_abs (`float`): largest difference of a logit.
        mean_kl (`float`): mean over positions of the divergence of this model's next-token distribution from the
            other's, KL(other || this), in nats.
        same_argmax (`float`): share of positions with the same likeliest token.
        num_tokens (`int`): positions compared.
    """

    max_abs: float
    mean_kl: float
    same_argmax: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights of a loaded model.

    Attributes:
        precision (`str`): `"fp8"`, `"int8"`, `"nf4"`, or the dtype.
        layers (`tuple[Layers, ...]`): every class of layers with parameters, the heaviest first.
        parameter_bytes (`int`): of all parameters, scales included.
        buffer_bytes (`int`): of all buffers.
        left (`dict[str, str]`): of a quantised model, what stayed in full precision and why.
        fp8_backend (`str | None`): how FP8 weights are multiplied where the model lies.
        machine (`tuple[Support, ...]`): what this machine can load.
        error (`LogitError | None`): against the checkpoint's own precision, where it was measured.
    """

    precision: str
    layers: tuple[Layers, ...]
    parameter_bytes: int
    buffer_bytes: int
    left: dict[str, str]
    fp8_backend: str | None
    machine: tuple[Support, ...]
    error: LogitError | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def precision_of(model: nn.Module) -> str:
    """`"fp8"`, `"int8"` or `"nf4"` where linear layers are, else the dtype, such as `"bfloat16"`."""
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            return "fp8"
        if type(module).__name__ == INT8_KIND:
            return "int8"
        if type(module).__name__ == FOUR_BIT_KIND:
            return _four_bit_name(module)
    return _short(next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32))


def num_parameters(model: nn.Module) -> int:
    """Numbers in a model's parameters, those of packed ones counted, scales not."""
    return sum(_numel(owner, name, weight) for owner, name, weight in _own_parameters(model))


def loaded_weights(model: PreTrainedModel, error: LogitError | None = None) -> LoadedWeights:
    """Describes the weights of a loaded model.

    Args:
        error: of `logit_error`, to be shown next to it.
    """
    precision = precision_of(model)
    groups: dict[tuple[str, str], list[int]] = {}
    seen: set[Any] = set()
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        largest = max(own.values(), key=torch.Tensor.numel)
        dtype = _four_bit_name(module) if type(module).__name__ == FOUR_BIT_KIND else _short(largest.dtype)
        group = groups.setdefault((type(module).__name__, dtype), [0, 0, 0])
        group[0] += 1
        group[1] += sum(_numel(module, name, weight) for name, weight in own.items() if _key(weight) not in seen)
        sizes = {_key(tensor): _bytes(tensor) for tensor in (*own.values(), *_belongings(module))}
        group[2] += sum(size for key, size in sizes.items() if key not in seen)
        seen |= sizes.keys()
    layers = [Layers(kind, dtype, *counts) for (kind, dtype), counts in groups.items()]
    return LoadedWeights(
        precision=precision,
        layers=tuple(sorted(layers, key=lambda group: -group.bytes)),
        parameter_bytes=sum(group.bytes for group in layers),
        buffer_bytes=sum(map(_bytes, model.buffers())),
        left=_left(model) if precision in ("fp8", "int8", "nf4", "fp4") else {},
        fp8_backend=fp8_backend(next(model.parameters()).device) if precision == "fp8" else None,
        machine=tuple(machine_support()),
        error=error,
    )


@torch.no_grad()
def logit_error(model: PreTrainedModel, other: PreTrainedModel, token_ids: torch.Tensor) -> LogitError:
    """Distance of a model's logits from another's of the same vocabulary.

    Args:
        token_ids (`torch.Tensor`): (1, length), read in one forward; of an encoder-decoder both sides read them.
    """
    ours, theirs = (_logits(each, token_ids) for each in (model, other))  # (length, vocabulary)
    log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
    return LogitError(
        max_abs=float((ours - theirs).abs().max()),
        mean_kl=float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        same_argmax=float((ours.argmax(-1) == theirs.argmax(-1)).double().mean()),
        num_tokens=ours.shape[0],
    )


def _logits(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    ids = token_ids.to(input_device(model))
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}
    logits: torch.Tensor = model(**inputs).logits[0]
    return logits.to("cpu", torch.float32)


def _left(model: PreTrainedModel) -> dict[str, str]:
    """Linear layers and experts that stayed as they are."""
    quantizer = getattr(model, "hf_quantizer", None)
    reasons = dict(getattr(getattr(quantizer, "quantization_config", None), "left", {}))
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, Conv1D):
            tied = name.rpartition(".")[2] in ("lm_head", "output") or module is model.get_output_embeddings()
            reasons.setdefault(name, OUTPUT_LAYER if tied else SPLIT_BLOCKS)
        experts = [own for own, weight in module.named_parameters(recurse=False) if weight.ndim > 2]
        if experts:
            reasons[name] = f"experts in one tensor ({', '.join(experts)}) are not linear layers"
    return reasons


def _own_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    seen: set[int] = set()
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) not in seen:
                seen.add(id(weight))
                yield module, name, weight


def _numel(owner: nn.Module, name: str, weight: torch.Tensor) -> int:
    if isinstance(owner, Fp8Linear) and name == "weight_scale":
        return 0
    if (row := GGUF_ROWS.get((type(owner).__name__, name))) is not None:
        return weight.shape[:-1].numel() * int(getattr(owner, row))
    state = getattr(weight, "quant_state", None) if type(owner).__name__ == FOUR_BIT_KIND else None
    return int(torch.Size(state.shape).numel()) if state is not None else weight.numel()


def _belongings(module: nn.Module) -> list[torch.Tensor]:
    """Tensors that bitsandbytes keeps with a weight: int8's row scales, and the scales of 4-bit blocks."""
    weight = getattr(module, "weight", None)
    if type(module).__name__ == INT8_KIND:
        scales = getattr(module.state, "SCB", None)
        scales = getattr(weight, "SCB", None) if scales is None else scales
        return [] if scales is None else [scales]
    if type(module).__name__ != FOUR_BIT_KIND:
        return []
    state = getattr(weight, "quant_state", None)
    states = [state, getattr(state, "state2", None)]
    return [getattr(each, name) for each in states if each is not None for name in ("absmax", "code")]


def _four_bit_name(module: nn.Module) -> str:
    return str(getattr(getattr(module.weight, "quant_state", None), "quant_type", "nf4"))


def _key(tensor: torch.Tensor) -> Any:
    """The same for tensors of one storage, so that tied weights count once; meta tensors have none."""
    return tensor.data_ptr() if tensor.device.type != "meta" and tensor.data_ptr() else id(tensor)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
