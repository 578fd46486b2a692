"""`hf-specdec diff`: the first token that differs from plain `generate`'s, and the part of the engine behind it."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch.overrides import BaseTorchFunctionMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.compat import attention_implementation, input_device
from hf_specdec.engine.model_state import state_of
from hf_specdec.errors import ConfigError, counted
from hf_specdec.kernels.quantization.report import precision_of
from hf_specdec.tools.bench.speeds import EXACT_DTYPES
from hf_specdec.tools.bench.table import Table
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.inputs import check_chat, check_seed, encode
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions, SamplingOptions
from hf_specdec.tools.cli.prompts import PROMPTS, QUESTION
from hf_specdec.tools.cli.report import near_tie_note, print_json, print_table
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import note

EQUAL = "equal"


@dataclass(frozen=True, slots=True)
class Difference:
    """First token of a text that is not plain `generate`'s.

    Attributes:
        prompt (`int`): number of the prompt, from 0.
        place (`int`): number of the new token, from 0.
        plain, found (`str | None`): the two tokens; `None` after the end of a text.
        gap (`float | None`): logit of plain `generate`'s token less the other's, close to 0 in a near tie; `None` where
            tokens are drawn.
    """

    prompt: int
    place: int
    plain: str | None
    found: str | None
    gap: float | None

    def __str__(self) -> str:
        gap = "" if self.gap is None else f" (their logits in plain generate are {self.gap:.2g} apart)"
        return f"prompt {self.prompt}, token {self.place}: {self.plain!r} became {self.found!r}{gap}"


@spread
def diff(
    *,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to continue, as one batch. Default: built-in Python code, or a question."),
    ] = None,
    model: options.ModelPath = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message: it goes through the chat template.")
    ] = False,
    choice: MethodOptions,
    max_new_tokens: options.MaxNewTokens = 128,
    sampling: SamplingOptions,
    seed: options.Seed = 0,
    cache_implementation: Annotated[
        str | None, typer.Option(help="Cache of both calls, such as static, whose forwards may be compiled.")
    ] = None,
    dtype: options.Dtype = "auto",
    loading: LoadOptions,
    json: options.Json = False,
) -> None:
    """Find the first token that differs from plain generate's, and the part of the engine behind it.

    Where a text differs, the parts of the engine are turned off, one after the other, until the texts are equal: the
    last one is at fault. The exit code is 1 where a text differs.
    """
    method, config = choice.read(model)
    if method is None:
        raise ConfigError("--spec-method", "must name a method", "none", "It is compared with plain generate.")
    texts = prompts or ([QUESTION] if chat else [PROMPTS[0]])
    drawn = sampling.read()
    check_seed(seed)
    if drawn["do_sample"] and len(texts) > 1:
        raise ConfigError("--do-sample", "must come with one prompt", len(texts), "Rows of a batch have own seeds.")
    target = loading.load(model, dtype, config)
    if chat:
        check_chat(target.tokenizer)
    common = {"max_new_tokens": max_new_tokens, **drawn, "cache_implementation": cache_implementation}
    how = choice.arguments(method, config, dtype, target)
    search = Search(target.model, target.tokenizer, seed or 0, common, how)
    with target.where.together():
        rows = search.run([_encoded(target.tokenizer, text, target.model, is_chat=chat) for text in texts])
    precision, is_equal = precision_of(target.model), rows[0][1] is None
    if json:
        found = [{"off": name, "difference": one and dataclasses.asdict(one)} for name, one in rows]
        print_json({"model": target.model.name_or_path, "dtype": precision, "spec_method": method, "rows": found})
    else:
        cells = [{"off": name, "found": EQUAL if one is None else str(one)} for name, one in rows]
        setting = (
            f"{method}, {precision}, {counted(len(texts), 'prompt')}, {attention_implementation(target.model.config)}"
        )
        print_table(Table.of("", {"turned off": "{off}", "against plain generate": "{found}"}, cells), setting)
        if not is_equal:
            note(_verdict(rows), "yellow")
            if precision not in EXACT_DTYPES:
                near_tie_note(precision)
    if not is_equal:
        raise typer.Exit(1)


def _verdict(rows: Sequence[tuple[str, Difference | None]]) -> str:
    """Name the part after which the texts were equal."""
    name, last = rows[-1]
    return f"the texts are equal without {name}" if last is None else "no part that can be turned off is at fault"


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str, model: PreTrainedModel, *, is_chat: bool) -> list[int]:
    ids: list[int] = encode(tokenizer, text, input_device(model), is_chat=is_chat)["input_ids"][0].tolist()
    return ids


@dataclass(slots=True)
class Search:
    """Compares one method with plain `generate`, with fewer and fewer parts of the engine.

    Attributes:
        options: arguments of `generate` that both calls have.
        how: those that choose the method.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    seed: int
    options: Mapping[str, Any]
    how: Mapping[str, Any]

    def run(self, prompts: Sequence[list[int]]) -> list[tuple[str, Difference | None]]:
        """Compare with parts turned off, one more a row; rows after the first only where that differs."""
        rows = [("nothing", self._difference(prompts, self.how))]
        block, how = contextlib.ExitStack(), dict(self.how)
        with block:
            for name, arguments, without in self._parts():
                if rows[-1][1] is None:
                    break
                how |= arguments
                block.enter_context(without)
                rows.append((name, self._difference(prompts, how)))
        if rows[-1][1] is not None and len(prompts) > 1:
            alone = [self._difference([prompt], self.how) for prompt in prompts]
            rows.append(("the batch", next(filter(None, alone), None)))
        if rows[-1][1] is not None:
            rows.append(("drafts", self._difference(prompts, {"spec_method": "plain"})))
        return rows

    def _parts(self) -> Iterator[tuple[str, dict[str, Any], contextlib.AbstractContextManager[Any]]]:
        """Each part of the engine: its name, and the arguments and the block that turn it off."""
        nothing = contextlib.nullcontext()
        yield "compiled steps", {"disable_compile": True}, nothing
        yield "CPU kernels", {}, BaseTorchFunctionMode()  # torch computes everything while such a mode is on
        yield "processors of all nodes at once", {"output_scores": True}, nothing
        yield "trees", {}, self._chains()

    @contextlib.contextmanager
    def _chains(self) -> Iterator[None]:
        """Let the model verify chains only."""
        found = state_of(self.model).findings.of(self.model)
        before = found.capability
        if before.tier == "tree":
            found.capability = dataclasses.replace(before, tier="chain", reason="trees are turned off")
        try:
            yield
        finally:
            found.capability = before

    def _difference(self, prompts: Sequence[list[int]], how: Mapping[str, Any]) -> Difference | None:
        plain = self._call(prompts, {"output_logits": True})
        found = self._call(prompts, how)
        length = plain.sequences.shape[1] - len(plain.logits)
        differences = []
        for row in range(len(prompts)):
            own, other = plain.sequences[row, length:].tolist(), found.sequences[row, length:].tolist()
            if own != other:
                place = next((at for at, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), -1)
                place = min(len(own), len(other)) if place < 0 else place
                differences.append(self._described(plain.logits, row, place, own[place:], other[place:]))
        return min(differences, key=lambda one: one.place, default=None)

    def _described(
        self, logits: Sequence[torch.Tensor], row: int, place: int, own: list[int], other: list[int]
    ) -> Difference:
        """The difference at `place`, from which on the texts are `own` and `other`."""
        names = [self.tokenizer.decode(rest[:1]) if rest else None for rest in (own, other)]
        is_drawn = self.options["do_sample"]  # then the random number decides, not which is likelier
        gap = (
            (logits[place][row, own[0]] - logits[place][row, other[0]]).item()
            if own and other and not is_drawn
            else None
        )
        return Difference(row, place, names[0], names[1], gap)

    def _call(self, prompts: Sequence[list[int]], how: Mapping[str, Any]) -> Any:
        torch.manual_seed(self.seed)
        longest, device = max(map(len, prompts)), input_device(self.model)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        options = {"pad_token_id": pad, **self.options, "return_dict_in_generate": True, "spec_method": None}
        return self.model.generate(input_ids=ids, attention_mask=mask, **{**options, **how})
