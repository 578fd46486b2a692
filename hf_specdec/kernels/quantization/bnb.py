"""int8 and nf4 weights through bitsandbytes: its import, its configurations, and what it gets wrong on CPUs."""

import builtins
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from hf_specdec.compat import weights as compat
from hf_specdec.errors import MissingExtraError, UnsupportedModelError

BLOCK = 64  # numbers that share a scale in nf4
CPU_BLOCK = 32  # rows that its packed layout for AVX-512 puts together
CPU_OPS = "bitsandbytes.backends.cpu.ops"
INT8_CASTS = "MatMul8bitLt: inputs will be cast"


def is_installed() -> bool:
    """Returns whether bitsandbytes can be imported; nothing is imported yet."""
    return importlib.util.find_spec("bitsandbytes") is not None


def load_bitsandbytes(purpose: str) -> Any:
    """Import bitsandbytes without its look-up at the hub, which it makes where the package `kernels` is installed.

    Raises:
        MissingExtraError: it is not installed.
    """
    if not is_installed():
        raise MissingExtraError("bitsandbytes", "bnb", purpose)
    if "bitsandbytes" not in sys.modules:
        logger = logging.getLogger(CPU_OPS)
        before, logger.disabled = logger.disabled, True  # it warns that it could not look there
        finder = _FindsCpuOps()
        sys.meta_path.insert(0, finder)
        try:
            importlib.import_module("bitsandbytes")
        finally:
            logger.disabled = before
            sys.meta_path.remove(finder)
    _warn_of_casts_once()
    return sys.modules["bitsandbytes"]


def _warn_of_casts_once() -> None:
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    if not any(isinstance(known, _Int8CastsOnce) for known in logger.filters):
        logger.addFilter(_Int8CastsOnce())


def bnb_config(precision: str, skeleton: Callable[[], PreTrainedModel] | None = None) -> BitsAndBytesConfig:
    """transformers' configuration for `"int8"` or `"nf4"`.

    Args:
        skeleton: builds the model without weights, where it is for a CPU. There nf4 leaves layers in full precision
            whose rows do not end with a block, if bitsandbytes reads them wrongly.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
    """
    load_bitsandbytes(f"precision={precision!r}")
    if precision == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    if skeleton is not None and not reads_split_blocks():
        model = skeleton()
        split = [name for name, module in model.named_modules() if _splits_blocks(module)]
        if split:
            config.llm_int8_skip_modules = [*compat.get_keys_to_not_convert(model), *split]
    return config


def reads_split_blocks() -> bool:
    """Returns whether bitsandbytes gives back, on this CPU, a 4-bit weight whose blocks of 64 go on from row to row.

    bitsandbytes 0.50.2 does not where it has AVX-512 code: the blocks' scales go to the wrong numbers.
    """
    functional = load_bitsandbytes("nf4").functional
    weight = torch.arange(1, 2 * 96 + 1, dtype=torch.float32).view(2, 96)
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=BLOCK)
    found = functional.dequantize_4bit(codes, state)
    # As rows of one block each the same codes are read rightly everywhere.
    state.shape = torch.Size((3, BLOCK))
    return bool(torch.equal(found.view(-1), functional.dequantize_4bit(codes, state).view(-1)))


def _splits_blocks(module: nn.Module) -> bool:
    if type(module) is compat.Conv1D:
        weight: torch.Tensor = module.weight  # type: ignore[assignment]
        return weight.shape[0] % BLOCK != 0
    return type(module) is nn.Linear and module.in_features % BLOCK != 0


def prepare(model: PreTrainedModel) -> None:
    """Make a model with 4-bit layers safe on CPUs, and let int8 layers warn of their casts once; others are left alone.

    On CPUs with AVX-512-BF16, bitsandbytes packs a weight in place at its first forward. It raises for shapes that do
    not fill the packed blocks, so those layers take its general way; and a state dict made afterwards is wrong, and
    makes the model wrong too, so it is refused.

    Raises:
        UnsupportedModelError: the checkpoint has 4-bit layers that bitsandbytes reads wrongly on this CPU.
    """
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is None:
        return
    _warn_of_casts_once()
    layers = [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    for layer in layers:
        split = int(layer.in_features) % getattr(layer.weight.quant_state, "blocksize", BLOCK) != 0
        if split and layer.weight.device.type == "cpu" and not reads_split_blocks():
            raise UnsupportedModelError(
                f"bitsandbytes {bitsandbytes.__version__} reads 4-bit rows of {layer.in_features} numbers wrongly on "
                "this CPU. Load the checkpoint on a GPU, or take one in full precision and load it with "
                'precision="nf4", which leaves such layers as they are.'
            )
        if layer.out_features % CPU_BLOCK or split:
            layer.support_avx512bf16_for_cpu = False
        layer.register_state_dict_pre_hook(refuse_packed)


def refuse_packed(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Hook before a 4-bit layer's state dict.

    Raises:
        UnsupportedModelError: the layer's weight was packed for the CPU.
    """
    state = getattr(module.weight, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        name = prefix.removesuffix(".") or type(module).__name__
        raise UnsupportedModelError(
            f"The nf4 weight of {name} was packed for this CPU by its first forward, and "
            "bitsandbytes does not unpack it rightly. Save the model right after loading it, before it "
            "generates: load it again and call save_pretrained first."
        )


class _WithoutKernels(importlib.machinery.SourceFileLoader):
    """Runs one module whose own `import kernels` fails; imports elsewhere, in other threads too, go on as ever."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module with an import statement of its own."""

        def imported(name: str, *args: Any, **kwargs: Any) -> Any:
            if name.partition(".")[0] == "kernels":
                raise ImportError("hf_specdec looks nothing up at the hub")
            return builtins.__import__(name, *args, **kwargs)

        vars(module)["__builtins__"] = {**vars(builtins), "__import__": imported}
        super().exec_module(module)


class _FindsCpuOps(importlib.abc.MetaPathFinder):
    """Finds the module of bitsandbytes that asks the hub for a kernel, and no other."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Spec of that module, to be loaded without `kernels`."""
        if fullname != CPU_OPS:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is None or found.origin is None:
            return found
        loader = _WithoutKernels(fullname, found.origin)
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)


class _Int8CastsOnce(logging.Filter):
    """Lets bitsandbytes say once, and not at every layer of every forward, that int8 rounds by way of fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.has_warned = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether to let a record through."""
        if not str(record.msg).startswith(INT8_CASTS):
            return True
        first, self.has_warned = not self.has_warned, True
        return first
