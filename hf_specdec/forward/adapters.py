"""Trees for models that count positions by themselves: from the cache's length, or by the distance between columns.

Siblings of a tree stand in different columns and have the same position. What such a model computes from columns is
replaced in the submodules that do it, by hooks that are there for the length of one forward and act in it alone:
what they need is in a context variable, so another thread on the same model never sees it. The submodules are
recognised by their structure. Whether that is enough is for the probe to say.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.common.temporary_hooks import temporary_hooks
from hf_specdec.compat.state_layers import has_states_alone
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.tree_rows import TreeRows

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class TreePositions:
    """Positions of one forward's columns in their texts.

    Attributes:
        first, end (`int`): bounds of the positions of the columns that are computed.
        mask: the tree's 4-D mask, for models that cannot be handed one.
    """

    rows: TreeRows
    first: int
    end: int
    mask: Any = None

    @property
    def queries(self) -> torch.Tensor:
        """`(batch, Q)`: of the columns that are computed."""
        return self.rows.starts[:, None] + self.rows.depths[:, -self.rows.shape[1] :]

    def keys(self, length: int) -> torch.Tensor:
        """`(batch, length)`: of the cache's columns; any position where a row has none."""
        starts, depths = self.rows.starts[:, None], self.rows.depths
        columns = torch.arange(length, device=starts.device).expand(len(depths), -1)
        new = (columns - starts).clamp(0, depths.shape[1] - 1)
        return torch.where(columns < starts, columns, starts + depths.gather(1, new))


@dataclass(slots=True)
class _Forward:
    """One forward: what the hooks find, and which of them have acted."""

    positions: TreePositions
    served: set[int] = field(default_factory=set)
    memo: tuple[Any, Any] = (None, None)


_current: ContextVar[_Forward | None] = ContextVar("hf_specdec_forward", default=None)
Replace = Callable[..., Any]


class TreeAdapter:
    """The submodules of one model that count positions, and what replaces their work.

    Attributes:
        places_mask (`bool`): whether the tree's mask is put in by a hook, because the model's forward takes only 2-D.
        skips_padding (`bool`): whether tokens that look like padding count differently next to others than alone.
    """

    def __init__(self, before: list[tuple[torch.nn.Module, Replace]], after: list[tuple[torch.nn.Module, Replace]]):
        self.before, self.after = before, after
        self.places_mask = any(replace is _replace_alibi for _, replace in before)
        self.skips_padding = any(_skips_padding(module) for module, _ in after)

    @contextlib.contextmanager
    def applied(self, positions: TreePositions | None) -> Iterator[None]:
        """Inside, a forward of this thread computes the columns at `positions`; `None` changes nothing.

        Raises:
            UnsupportedModelError: the forward did not use the submodules that were recognised.
        """
        if positions is None:
            yield
            return
        forward = _Forward(positions)
        before, after = (
            [(module, _hook(forward, replace)) for module, replace in own] for own in (self.before, self.after)
        )
        token = _current.set(forward)
        try:
            with temporary_hooks(before=before, after=after):
                yield
        finally:
            _current.reset(token)
        if len(forward.served) != len({id(module) for module, _ in self.before + self.after}):
            raise UnsupportedModelError(
                "Its positions are counted elsewhere than where they seemed to be. Use spec_method=None."
            )


def takes_positions(model: PreTrainedModel) -> bool:
    """Returns whether the forward has an argument for the positions of the tokens it decodes, and goes by it."""
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    return f"{prefix}position_ids" in _parameters_of(type(model).forward) and not compat.ignores_positions(model.config)


def places_trees(model: PreTrainedModel) -> bool:
    """Returns whether trees need no adapter: the forward takes positions, or the model has none."""
    return takes_positions(model) or has_states_alone(model)


def works_by_hooks(model: PreTrainedModel) -> bool:
    """Returns whether trees of this model need an adapter, and hooks on its submodules are sure to be called."""
    return not places_trees(model) and not compat.is_compiled(model)


def adapter_of(model: PreTrainedModel) -> TreeAdapter | None:
    """Adapter for trees of a model that takes no positions, or `None` where none is known."""
    return _recognised(model) if works_by_hooks(model) else None


def lacks_hooks(model: PreTrainedModel) -> bool:
    """Returns whether the model has an adapter but for being compiled."""
    return not takes_positions(model) and compat.is_compiled(model) and _recognised(model) is not None


def _recognised(model: PreTrainedModel) -> TreeAdapter | None:
    """The submodules that count positions, and what replaces their work; `None` where there are none."""
    decoder: Any = model
    if model.config.is_encoder_decoder:
        decoder = compat.innermost_decoder(model)
    before: list[tuple[torch.nn.Module, Replace]] = []
    after: list[tuple[torch.nn.Module, Replace]] = []
    outer = "-"
    for name, module in decoder.named_modules():
        parameters = _parameters_of(type(module).forward)
        if parameters.keys() & compat.CACHE_LENGTHS and "token_type_ids" not in parameters:
            before.append((module, _look_up_first))
            after.append((module, _embed_positions))
        elif {"alibi", "attention_mask"} <= parameters.keys() and not name.startswith(f"{outer}."):
            before.append((module, _replace_alibi))
            outer = name
        elif _takes_bias(parameters) and not name.startswith(f"{outer}."):
            before.append((module, _replace_bias))
            outer = name
        elif _has_relative_bias(module):
            if "position_bias" in parameters:
                before.append((module, _set_bias))
            elif "attention_mask" in parameters:
                before.append((module, _add_bias_to_mask))
                after.append((module.relative_attention_bias, _no_bias))
    return TreeAdapter(before, after) if before or after else None


@functools.cache
def _parameters_of(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The arguments of a module class's forward, by name."""
    return inspect.signature(forward).parameters


def _named_arguments(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a module's forward, by name."""
    names = [name for name in _parameters_of(type(module).forward) if name != "self"]
    return dict(zip(names, args, strict=False)) | kwargs


def _takes_bias(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """True if a module always gets a bias of all distances, of which it takes the last ones: as many as columns."""
    bias = parameters.get("position_bias")
    return bias is not None and bias.default is bias.empty and "attention_mask" in parameters


def _has_relative_bias(module: Any) -> bool:
    """Returns whether a module is attention of a decoder that makes T5's bias from the distance between columns."""
    if not (getattr(module, "has_relative_attention_bias", False) and getattr(module, "is_decoder", True)):
        return False
    wanted = {"query_length", "key_length", "device", "past_seen_tokens"}
    compute = getattr(module, "compute_bias", None)
    return compute is not None and wanted <= inspect.signature(compute).parameters.keys()


def _hook(forward: _Forward, replace: Replace) -> Callable[..., Any]:
    """A hook that acts in `forward` and in no other. Elsewhere torch may even call it without keyword arguments."""

    def hook(module: torch.nn.Module, *arguments: Any) -> Any:
        if _current.get() is not forward:
            return None
        forward.served.add(id(module))
        return replace(forward, module, *arguments)

    return hook


def _look_up_first(forward: _Forward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The first positions, for an output that `_embed_positions` replaces: a tree's columns may go beyond the table."""
    named = _named_arguments(module, args, kwargs)
    for name in named.keys() & {*compat.CACHE_LENGTHS, "position_ids"}:
        if (value := named[name]) is not None:
            named[name] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
    return (), named


def _embed_positions(
    forward: _Forward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
) -> torch.Tensor:
    """Position embeddings: the module's own of all positions from the first to the last, gathered for the columns."""
    positions = forward.positions
    queries = positions.queries
    named = _named_arguments(module, args, kwargs)
    wide = {name: _widened(name, value, module, positions, queries) for name, value in named.items()}
    table = module.forward(**wide)
    table = table.reshape(-1, table.shape[-1])
    if len(table) != positions.end - positions.first:
        raise UnsupportedModelError("its position embeddings have another shape")
    found = table[(queries - positions.first).to(table.device)]
    if _skips_padding(module) and named.get("input_ids") is not None:
        found = torch.where((named["input_ids"] == module.padding_idx)[..., None], output, found)
    embedded: torch.Tensor = found[0] if output.ndim == 2 and len(found) == 1 else found
    return embedded


def _widened(name: str, value: Any, module: Any, positions: TreePositions, queries: torch.Tensor) -> Any:
    """An argument of a position module, as if the forward were of all positions from the first to the last."""
    span = positions.end - positions.first
    if name in compat.CACHE_LENGTHS:
        return positions.first
    if name == "position_ids":
        one = isinstance(value, torch.Tensor) and value.ndim == 1
        return torch.arange(positions.first, positions.end, device=value.device) if one else None  # or counts itself
    if isinstance(value, tuple):
        return torch.Size((1, span, *value[2:]))
    if isinstance(value, torch.Tensor):
        if value.shape[:2] != queries.shape:
            raise UnsupportedModelError("its position embeddings take other arguments")
        token = (getattr(module, "padding_idx", None) or 0) + 1
        return value.new_full((1, span, *value.shape[2:]), token)
    return value


def _skips_padding(module: Any) -> bool:
    """Returns whether a position module counts the tokens that are not padding."""
    return compat.counts_unpadded(module)


def _replace_alibi(forward: _Forward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """A bias that grows with the key's position: the columns' own; and the tree's mask next to it.

    It is `(batch * heads, 1, columns)`; where it is `(batch, heads, 1, columns)`, the mask holds a multiple of it too.
    """
    alibi, given = kwargs["alibi"], kwargs["attention_mask"]
    if forward.memo[0] is not alibi:
        mask = forward.positions.mask.to(alibi.device)
        keys = forward.positions.keys(alibi.shape[-1]).to(alibi.device)
        if alibi.ndim == given.ndim:
            of_last = _at_keys(given[:, :, -1:], keys)  # which sees every column but padding
            hidden = ~mask if mask.dtype == torch.bool else mask < 0
            mask = of_last.masked_fill(hidden, torch.finfo(given.dtype).min)
        forward.memo = (alibi, (_at_keys(alibi, keys), mask))
    found, mask = forward.memo[1]
    return args, {**kwargs, "alibi": found, "attention_mask": mask}


def _at_keys(bias: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A bias by position, rows first and `columns` last, gathered at each row's `keys`, `(batch, columns)`."""
    by_row = bias.reshape(len(keys), -1, bias.shape[-1])
    return by_row.gather(2, keys[:, None].expand(by_row.shape)).view(bias.shape)


class _BiasByRow:
    """A bias of `(batch, heads, 1, columns)` in the place of one that all rows share, `(heads, 1, columns)`.

    Modules look at the shape, take the last columns, of which there are no more, and add it to their scores.
    """

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias

    @property
    def shape(self) -> torch.Size:
        return self.bias.shape[1:]

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def __getitem__(self, index: Any) -> "_BiasByRow":
        if any(part.start or part.stop is not None or part.step is not None for part in index):
            raise UnsupportedModelError("its bias is cut otherwise than expected")
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return function(*[arg.bias if isinstance(arg, cls) else arg for arg in args], **(kwargs or {}))


def _replace_bias(forward: _Forward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """A bias of `(heads, 1, distances)`, the last one's distance being 0: those of the columns from each row's end."""
    bias = kwargs["position_bias"]
    if forward.memo[0] is not bias:
        keys = forward.positions.keys(kwargs["attention_mask"].shape[-1])
        if forward.positions.end > bias.shape[-1]:
            raise IndexError(f"the text has more tokens than the {bias.shape[-1]} that the model's bias reaches")
        distance = forward.positions.queries.max(dim=1, keepdim=True).values - keys  # (batch, columns)
        index = (bias.shape[-1] - 1 - distance).clamp(0, bias.shape[-1] - 1).to(bias.device)
        found = bias[:, :, index].permute(2, 0, 1, 3)
        forward.memo = (bias, found[0] if len(found) == 1 else _BiasByRow(found))
    return args, {**kwargs, "position_bias": forward.memo[1]}


def _relative_bias(forward: _Forward, module: Any) -> torch.Tensor:
    """`(batch, heads, Q, columns)`: the module's bias of each distance, gathered for each column and each it sees."""
    positions = forward.positions
    length = positions.rows.length
    device = module.relative_attention_bias.weight.device
    token = _current.set(None)  # what follows is the module's own computation
    try:
        by_distance = module.compute_bias(1, length, device=device, past_seen_tokens=length - 1)[0, :, 0].flip(-1)
    finally:
        _current.reset(token)
    distance = positions.queries[:, :, None] - positions.keys(length)[:, None, :]
    bias: torch.Tensor = by_distance[:, distance.clamp(min=0).to(by_distance.device)].transpose(0, 1)
    return bias


def _set_bias(forward: _Forward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """A relative bias that the attention takes as an argument, and computes where it gets none."""
    if kwargs.get("position_bias") is not None:
        return args, kwargs
    return args, {**kwargs, "position_bias": _relative_bias(forward, module)}


def _add_bias_to_mask(forward: _Forward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """A relative bias that the attention always computes: in the mask instead, and nothing where it was."""
    mask, bias = kwargs["attention_mask"], _relative_bias(forward, module)
    if mask.dtype == torch.bool:
        mask = torch.where(mask, bias, torch.finfo(bias.dtype).min)
    else:
        mask = (bias + mask).clamp(min=torch.finfo(bias.dtype).min)
    return args, {**kwargs, "attention_mask": mask}


def _no_bias(forward: _Forward, module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
    """Nothing, in the shape of the bias."""
    return torch.zeros_like(output)
