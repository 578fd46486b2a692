"""Which attention gives which model class its own text, and the page that lists it.

finding = examine("gemma2", "causal")
python -m tests.kernels.findings            # examine everything, rewrite docs/reference/attention.md
"""

import contextlib
import dataclasses
import itertools
import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.utils import logging as transformers_logging

import hf_specdec
from hf_specdec import UnsupportedModelError
from hf_specdec.compat.attention import can_set_attention
from hf_specdec.kernels.attention import KernelAttention, register
from tests.helpers.attention import StrictKernel, flash_attention
from tests.helpers.drafts import OracleDrafter, RandomTreeDrafter
from tests.helpers.zoo_wide import NEW_TOKENS, inputs, kinds_of, varied

__all__ = ["MODELS", "PAGE", "Finding", "examine", "listed", "page"]

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "attention.md"
SETTINGS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
SECONDS = 240  # for one model
# The families that people use most, and one for each kind of attention there is.
MODELS = (
    "apertus arcee axk2 bamba bart bigbird_pegasus biogpt bloom codegen cohere cohere2 deepseek_v2 deepseek_v3 "
    "deepseek_v32 deepseek_v4 diffllama doge ernie4_5 exaone4 falcon falcon_h1 gemma gemma2 gemma3 gemma3_text "
    "gemma3n_text gemma4 gemma4_text git glm glm4 glm4_moe glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss "
    "gptj granite granite_swa granitemoe helium hunyuan_v1_dense hy_v4 inkling_text internvl lfm2 llama "
    "llama4_text llava m2m_100 mamba2 marian minimax minimax_m3_vl ministral mistral mixtral mllama "
    "modernbert-decoder mpt mt5 nemotron nemotron_h olmo olmo2 olmo3 olmoe opt paligemma pegasus phi phi3 phimoe qwen2 "
    "qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_next qwen3_vl rwkv seed_oss smollm3 stablelm starcoder2 "
    "t5 whisper xglm zamba2"
).split()
HEAD = """# Attention

<!-- Written by `python -m tests.kernels.findings`; a test compares it with what the models do. -->

What values of `attn_implementation` do with the model classes that people use most and one for each kind of attention
([guide](../guides/shapes-and-kernels.md#attention)). Each was tried on tiny random models in fp32,
with greedy text of one prompt and of three prompts padded on the left.
Drafts are random trees, and trees that hold the right tokens among wrong ones. The
text is compared with plain `generate`, and that with plain `generate` under the attention that the class is loaded
with.

- **xformers**: on a CPU, with a kernel in plain torch in the place of xformers', which has none there; it refuses what
  xformers' operators refuse. *kernel*: layers computed by it. *own*: everything by the model's own function, because of
  soft-capping or sinks. *torch*: everything by torch's attention, because each layer has a position bias.
  *refused*: an error, because the class has attention code of its own, or hides keys that it has chosen from `"sdpa"`
  and `"eager"` only.
- **FlashAttention**: transformers' own code for it, on a stand-in for its library in plain torch. It takes no mask of a
  tree, so chains are verified. *not offered*: by transformers, for this class.
- **eager**: the model's own attention function; on CPUs [the kernels](../guides/precision.md#kernels-for-cpus) take its
  place, soft caps and sinks included. *own code*: where xformers is refused.
- **equal**: whether every text was plain generation's under the same attention, and xformers' that of the class's own.
  *another text*: transformers' plain generation under this attention differs from the one it loads the class with.

"""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One model class: what each attention did with it."""

    name: str
    xformers: str
    flash: str
    eager: str
    equal: bool

    @property
    def key(self) -> tuple[str, ...]:
        """Its cells."""
        return self.name, self.xformers, self.flash, self.eager, "yes" if self.equal else "NO"


def examine(model_type: str, kind: str) -> Finding:
    """Build the model and compare every attention with its own."""
    model = varied(model_type, kind)
    hf_specdec.enable(model)
    own = model.config._attn_implementation
    texts = _texts(model)
    cells, equal = [], True
    for name in ("xformers", "flash", "eager"):
        with contextlib.ExitStack() as stack:
            try:
                use = _enter(stack, model, name)
                if use is not None:
                    cells.append(use)
                    continue
                tier = hf_specdec.capability(model).tier
                plain = _texts(model)
                same = all(_drafted(model, rows, text) for rows, text in plain.items())
            except UnsupportedModelError:
                cells.append("refused")
                continue
            except Exception as error:
                cells.append(f"fails ({type(error).__name__})")
                equal = False
                continue
            other = "" if plain == texts else ", another text"
            cells.append(f"{tier}, {WATCHED.who()}{other}" if name == "xformers" else f"{tier}{other}")
            equal = equal and same and (name != "xformers" or not other)
        model.set_attn_implementation(own) if can_set_attention(model) else None
    return Finding(type(model).__name__, *cells, equal)


def _enter(stack: contextlib.ExitStack, model: Any, name: str) -> str | None:
    """Give the model the attention; why not, where it is not to be had."""
    if name == "flash":
        if not model._supports_flash_attn or not can_set_attention(model):
            return "not offered"
        stack.enter_context(flash_attention(model))
        return None
    if not can_set_attention(model):
        return "refused" if name == "xformers" else "own code"
    WATCHED.forget()
    model.set_attn_implementation(WATCHED.name if name == "xformers" else name)
    return None


class Watched(KernelAttention):
    """The strict kernel's attention, and who computed the layers under it."""

    def __init__(self) -> None:
        super().__init__("strict_findings", StrictKernel())
        self.num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return super().__call__(*args, **kwargs)

    def forget(self) -> None:
        """Start with another model."""
        self.num_calls = 0
        self.kernel.calls.clear()  # type: ignore[attr-defined]
        self._said.clear()
        register(self)

    def who(self) -> str:
        """The kernel, if it computed any."""
        if self.kernel.calls:  # type: ignore[attr-defined]
            return "kernel"
        return "none" if not self.num_calls else "torch" if self._said else "own"


WATCHED = Watched()


def _texts(model: Any) -> dict[int, list[list[int]]]:
    """Plain texts of one row and of three, as far as transformers generates them."""
    texts = {}
    for rows in (1, 3):
        with contextlib.suppress(Exception if rows > 1 else ()):
            texts[rows] = model.__class__.generate(model, **inputs(model, rows=rows), **SETTINGS).tolist()
    return texts


def _drafted(model: Any, rows: int, expected: list[list[int]]) -> bool:
    """Whether drafted texts are those of plain generation."""
    given = inputs(model, rows=rows)
    is_own = model.__class__.generate is not GenerationMixin.generate
    methods = (
        ["prompt_lookup"] if is_own else [_drafter(OracleDrafter, expected), _drafter(RandomTreeDrafter, expected)]
    )
    return all(model.generate(**given, **SETTINGS, spec_method=method).tolist() == expected for method in methods)


def _drafter(kind: Callable[..., Any], expected: list[list[int]]) -> Callable[[], Any]:
    texts = itertools.cycle(expected)
    more = {"vocab_size": 96} if kind is RandomTreeDrafter else {}
    return lambda: kind(next(texts), **more)


def listed() -> dict[str, tuple[str, ...]]:
    """The table's lines as the page has them: a model's name to its cells."""
    cells = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {row[0]: tuple(row) for row in cells if row[0] not in ("class", "---")}


def page(findings: list[Finding]) -> str:
    """The whole page."""
    rows = sorted({finding.name: finding for finding in findings}.values(), key=lambda finding: finding.name.lower())
    kernel = sum("kernel" in finding.xformers for finding in rows)
    trees = sum(finding.xformers.startswith("tree") for finding in rows)
    lines = [f"{HEAD}{len(rows)} classes; xformers: {kernel} by the kernel, {trees} verify trees.", ""]
    lines += ["| class | xformers | FlashAttention | eager | equal |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(finding.key)} |" for finding in rows]
    return "\n".join(lines) + "\n"


def examine_all(models: list[tuple[str, str]]) -> Iterator[Finding]:
    """Every model of the wide zoo that can be built."""
    signal.signal(signal.SIGALRM, _too_long)
    for model_type, kind in models:
        signal.alarm(SECONDS)
        try:
            varied(model_type, kind)
        except Exception as error:
            sys.stderr.write(f"{model_type} ({kind}) is left out of the page: {type(error).__name__}: {error}\n")
            continue
        finally:
            signal.alarm(0)
        yield examine(model_type, kind)


def _too_long(*_: Any) -> None:
    raise TimeoutError("too slow for a test")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    PAGE.write_text(page(list(examine_all([(name, kind) for name in MODELS for kind in kinds_of(name)]))))
