"""Emulated devices: reads and uploads of an accelerator, tensors that cannot be combined with the CPU's."""

import copy
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyDeviceGuard

import hf_specdec
from hf_specdec.common import transfer
from hf_specdec.engine.sampling import noise_ahead, sampler
from hf_specdec.forward import compiled_forward
from hf_specdec.methods.common import node_logits
from tests.helpers.support import noisy_copy, plain
from tests.helpers.zoo import FAMILIES
from tests.matrix.test_batches import Batch


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no device be the host's own."""
    for module in (transfer, compiled_forward, node_logits, noise_ahead, sampler):
        monkeypatch.setattr(module, "is_host", lambda device: False)


TREES = [name for name, family in FAMILIES.items() if family.tier == "tree"]
STATIC = [name for name in TREES if name != "falcon"]  # transformers' own fails there


# What leads all nodes of a step to their tokens at once
SAMPLING: dict[str, dict[str, Any]] = {
    "top_k": {"temperature": 0.1, "top_k": 20},
    "top_p": {"temperature": 0.1, "top_p": 0.9},
    "min_p": {"temperature": 0.1, "min_p": 0.05},
    "repetition_penalty": {"temperature": 0.1, "repetition_penalty": 0.95},
    "all": {"temperature": 0.1, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.95},
    "greedy": {"do_sample": False, "top_k": None, "repetition_penalty": 0.95},
}


def moved(model: Any, device: torch.device) -> Any:
    """An enabled copy of a model on the device."""
    return hf_specdec.enable(hf_specdec.disable(copy.deepcopy(model)).to(device))


class DeviceBatch(Batch):
    """The matrix's batch with the model, its draft and the inputs on the device."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, noisy_copy(model), "greedy")
        self.ids, self.mask = self.ids.to(device), self.mask.to(device)
        self.options["attention_mask"] = self.mask
        self.model, self.draft = moved(self.model, device), self.draft.to(device)
        self.expected = plain(self.model, self.ids, **self.options, return_dict_in_generate=True)


NAME = "privateuseone"  # torch's name for devices that others add; without a name of its own it is no accelerator
DEVICE = torch.device(NAME, 0)
CROSSING = {"copy_", "_to_copy"}


# A device's tensor takes indices of the CPU, if not values.
INDEXED = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}


# The size of the result, or what the host does next, depends on values.
READERS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
CONSTRUCTORS = {torch.tensor, torch.as_tensor, torch.asarray}
_registered: list[bool] = []


class DeviceTensor(torch.Tensor):
    """A tensor of the emulated device around the CPU tensor `raw`."""

    raw: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "DeviceTensor":
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
            requires_grad=raw.requires_grad,
        )

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.raw!r})"

    def tolist(self) -> Any:
        """One read, as of any device's tensor: torch has none for subclasses."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {}, [], [])


class EmulatedDevice:
    """While entered, tensors can be made on `DEVICE` and moved there; they live no longer.

    Attributes:
        reads (`list[str]`): the package's line of each read by the host, as `file:line`.
        uploads (`list[str]`): likewise of each copy to the device that the host waits for.
    """

    def __init__(self) -> None:
        register()
        self.reads: list[str] = []
        self.uploads: list[str] = []
        self._modes: Any = (_Operations(self.reads, self.uploads), _Constructors())

    def __enter__(self) -> "EmulatedDevice":
        torch.Generator = DeviceGenerator  # type: ignore[misc]
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        torch.Generator = DeviceGenerator.__base__  # type: ignore[misc]


class DeviceGenerator(torch.Generator):
    """A generator of numbers on the emulated device; another device's tensors refuse it."""

    def __new__(cls, device: Any = "cpu") -> "DeviceGenerator":
        ours = super().__new__(cls, "cpu")
        ours.place = torch.device(device)
        return ours

    @property
    def device(self) -> torch.device:
        return self.place


class _Constructors(TorchFunctionMode):
    """`torch.tensor` copies to its device below the dispatcher, where only devices that are there are known."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__ and isinstance(args[0], DeviceTensor):
            return function(args[0], _index(args[1], args[0].device))
        if not kwargs and function is not torch.Tensor.new_tensor:
            return function(*args)
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and function in CONSTRUCTORS and torch.device(device).type == NAME:
            return function(*args, **kwargs | {"device": "cpu"}).to(device)
        if function is torch.Tensor.new_tensor and isinstance(args[0], DeviceTensor):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs).to(args[0].device)
        generator = kwargs.get("generator")  # the dispatcher hands on what it wraps, without its device
        if generator is not None:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if any(tensor.device.type != generator.device.type for tensor in tensors):
                raise RuntimeError(f"Expected the tensor's device for the generator of {function}: {generator.device}")
        return function(*args, **kwargs)


def _index(index: Any, device: torch.device) -> Any:
    """An index in which lists are tensors of the device, as CUDA makes them."""
    if isinstance(index, list):
        return torch.tensor(index, dtype=torch.long).to(device)
    if isinstance(index, tuple):
        return tuple(_index(part, device) for part in index)
    return index


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation, those that make tensors too."""

    def __init__(self, reads: list[str], uploads: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads, self.uploads = reads, uploads

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap each operation in a context that keeps its compiler out; nothing is compiled here."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {}, self.reads, self.uploads)


def run(function: Any, args: Any, kwargs: dict[str, Any], reads: list[str], uploads: list[str]) -> Any:
    """The operation on the wrapped tensors; its results are the device's where its operands or `device=` are."""
    name = function.overloadpacket.__name__
    if name == "_fused_sdp_choice":
        return 0  # attention by its definition: the fused functions are other devices' own
    tensors: list[torch.Tensor] = []
    raw_args, raw_kwargs = unwrapped(args, tensors), kwargs
    if kwargs:
        raw_kwargs = {key: unwrapped(value, tensors) for key, value in kwargs.items()}
    wrapped = {id(tensor.raw): tensor for tensor in tensors if type(tensor) is DeviceTensor}
    if len(tensors) > 1 and wrapped:
        refuse_mixed(name, args, tensors)
    there = bool(wrapped)
    if kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == NAME
        raw_kwargs["device"] = torch.device("cpu")
    elif name == "copy_":
        there = isinstance(args[0], DeviceTensor)
    if wrapped and (not there or name in READERS or (name in INDEXED and any(map(is_boolean, args[1])))):
        reads.extend(asking())
    crosses = (name == "copy_" and tensors[1:] and not isinstance(tensors[1], DeviceTensor)) or not wrapped
    if there and name in CROSSING and crosses and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
        uploads.extend(asking())
    if name == "histc" and not raw_args[0].is_floating_point():  # CUDA's counts integers
        raw_args = (raw_args[0].double(), *raw_args[1:])
        return wrap(function(*raw_args, **raw_kwargs).to(args[0].dtype), {})
    result = function(*raw_args, **raw_kwargs)
    if not there:
        return result
    if isinstance(result, torch.Tensor):
        return wrap(result, wrapped)
    if isinstance(result, tuple | list):
        return type(result)(wrap(part, wrapped) if isinstance(part, torch.Tensor) else part for part in result)
    return result


def unwrapped(argument: Any, tensors: list[torch.Tensor]) -> Any:
    """An argument with CPU tensors; `tensors` gets those that it had."""
    kind = type(argument)
    if kind is DeviceTensor:
        tensors.append(argument)
        return argument.raw
    if kind is tuple or kind is list:
        return kind([unwrapped(part, tensors) for part in argument])
    if isinstance(argument, torch.Tensor):
        tensors.append(argument)
    return argument


def refuse_mixed(name: str, args: Any, tensors: list[torch.Tensor]) -> None:
    """RuntimeError: tensors of two devices, where CUDA refuses them; it takes numbers, and a CPU's indices."""
    if name in CROSSING:
        return
    if name in INDEXED and isinstance(args[0], DeviceTensor):
        tensors = [*args[2:3]]
    for tensor in tensors:
        if type(tensor) is not DeviceTensor and tensor.dim():
            raise RuntimeError(f"Expected all tensors of {name} on the same device: {[t.device for t in tensors]}")


def wrap(raw: torch.Tensor, seen: dict[int, "DeviceTensor"]) -> DeviceTensor:
    """The wrapper of a result: an operand's own where the operation wrote into it."""
    ours = seen.get(id(raw))
    if ours is None:
        return DeviceTensor(raw)
    if ours.shape != raw.shape:
        raise NotImplementedError("an operation that changes its operand's shape")
    return ours


def is_boolean(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def asking() -> Iterator[str]:
    """The innermost line of the package that leads here, unless transformers asked on its own."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/hf_specdec/" in path:
            yield f"{path.split('/hf_specdec/')[-1]}:{frame.f_lineno}"
            return
        if "/transformers/" in path:
            return
        frame = frame.f_back


def register() -> None:
    """Tell torch that the device is there, once a process."""
    if _registered:
        return
    module = ModuleType(f"torch.{NAME}")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        manual_seed_all=lambda _: None,
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module(NAME, module)
    torch._C._acc.register_python_privateuseone_device_guard(_DummyDeviceGuard())
    _registered.append(True)
