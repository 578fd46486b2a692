"""`hf-specdec generate`: continue a prompt, or compare ways to continue it."""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel, TextStreamer
from transformers.generation import BaseStreamer

from hf_specdec.compat import attention_implementation, input_device, max_positions
from hf_specdec.errors import ConfigError, counted
from hf_specdec.kernels.quantization.weights import precision_of
from hf_specdec.methods.common.config import SpecConfig
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.tools.bench.speeds import EXACT_DTYPES
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.compare import compare_methods, comparison_table
from hf_specdec.tools.cli.inputs import check_chat, check_seed, encode, read_prompt
from hf_specdec.tools.cli.job import Job, Result
from hf_specdec.tools.cli.memory import open_memory, remembering
from hf_specdec.tools.cli.options import LoadOptions, MethodOptions, SamplingOptions
from hf_specdec.tools.cli.prompts import PROMPTS, QUESTION
from hf_specdec.tools.cli.prompts_file import BATCH_SIZE, ManyOptions, own_device, run_many
from hf_specdec.tools.cli.report import drafts_line, near_tie_note, note_interrupt, print_json, print_table
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import INTERRUPTED, note

ROUNDS = 3
SHOWN_FAILURES = 10


@dataclasses.dataclass(frozen=True, slots=True)
class CompareOptions:
    """A method next to plain generate and transformers' own."""

    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Set the method next to plain generate and transformers' own: its prompt lookup, or its assisted "
            "generation for a draft model.",
        ),
    ] = False
    rounds: Annotated[
        int | None, typer.Option(min=1, help=f"With --compare: timed rounds after the warm-up. Default: {ROUNDS}.")
    ] = None

    def __post_init__(self) -> None:
        if self.rounds is not None and not self.compare:
            raise ConfigError("--rounds", "must come with --compare", self.rounds, "Add --compare.")


@spread
def generate(
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to continue; `-` reads stdin. Default: piped stdin, else built-in Python code, or a question."
        ),
    ] = None,
    model: options.ModelPath = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message: it goes through the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: what the model is told first.")] = None,
    choice: MethodOptions,
    engine: options.EngineName = None,
    spec_memory: options.SpecMemoryFile = None,
    max_new_tokens: options.MaxNewTokens = 128,
    sampling: SamplingOptions,
    seed: options.Seed = None,
    dtype: options.Dtype = "auto",
    loading: LoadOptions,
    tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--tensor-parallel",
            help="Share the target between the processes of this launch: "
            "torchrun --nproc-per-node 2 -m hf_specdec ... --tensor-parallel.",
        ),
    ] = False,
    many: ManyOptions,
    comparison: CompareOptions,
    json: options.Json = False,
) -> None:
    """Continue a prompt with speculative decoding.

    The exit code is 1 if, with --compare, the method's text differs from plain generate's in fp32, or if a prompt of
    --prompts-file failed, and 130 if it is interrupted, which leaves --compare the complete rounds. A file's job
    goes on if it is started again; `accelerate launch` and torchrun share it out.
    """
    many.check(prompt=prompt, compare=comparison.compare, chat=chat)
    if system is not None and not chat:
        raise ConfigError("--system", "must come with --chat", system, "Add --chat.")
    method, config = choice.read(model, engine=engine, memory=spec_memory)
    drawn = sampling.read()
    check_seed(seed)
    text = None if many.is_asked else read_prompt(prompt)
    kept = open_memory(spec_memory)
    device = own_device() if many.is_asked and not tensor_parallel else None
    target = loading.load(model, dtype, config, tensor_parallel=tensor_parallel, device=device)
    if chat:
        check_chat(target.tokenizer)
    how = choice.arguments(method, config, dtype, target)
    job = Job(target.model, target.tokenizer, {"max_new_tokens": max_new_tokens, **drawn}, seed, chat, system)
    with target.where.together(), remembering(target.model, kept):
        if many.is_asked:
            _many(job, how, many, tensor_parallel, json)
        elif comparison.compare:
            _compare(job, text, how, comparison.rounds or ROUNDS, json)
        else:
            _continue(job, text, how, json)


def _continue(job: Job, text: str | None, how: Mapping[str, Any], as_json: bool) -> None:
    prompt = _built_in(job)[0] if text is None else text
    inputs = encode(job.tokenizer, prompt, input_device(job.model), job.system, is_chat=job.is_chat)
    streams = sys.stdout.isatty() and not as_json
    written, is_complete = _TokensSoFar(), True
    if streams:
        note(prompt, "dim")
        streamer: BaseStreamer = TextStreamer(job.tokenizer, skip_prompt=True, skip_special_tokens=True)
    else:
        streamer = written
    _note_positions(job, inputs["input_ids"].shape[1])
    started = time.perf_counter()
    try:
        result = job.run(inputs, **how, streamer=streamer)
    except KeyboardInterrupt:
        if not written.token_ids:
            sys.stdout.write("\n" if streams else "")
            raise
        result, is_complete = Result(written.token_ids, time.perf_counter() - started, None), False
    text = job.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    if as_json:
        found = {"prompt": prompt, "text": text, **_measures(result), "is_complete": is_complete}
        print_json({**_setting(job, how), **found})
    elif not streams:
        sys.stdout.write(text + "\n")
    if not is_complete:
        note(f"interrupted after {counted(len(result.token_ids), 'token')}", "yellow")
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        note(_summary(result), "dim")


class _TokensSoFar(BaseStreamer):
    """Keeps the tokens of a text while it is written."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt, `(1, length)`, then the new tokens."""
        if self._has_prompt:
            self.token_ids += value.flatten().tolist()
        self._has_prompt = True

    def end(self) -> None:
        """The text has ended."""


def _note_positions(job: Job, length: int) -> None:
    """Say so where the text may get longer than the model has positions for; generate goes on all the same."""
    positions, most = max_positions(job.model.config), job.options["max_new_tokens"]
    if positions is not None and not job.model.config.is_encoder_decoder and length + most > positions:
        asked = f"{counted(length, 'token')} in the prompt and --max-new-tokens {most} may go beyond them"
        note(f"note: the model has {positions} positions; {asked}", "yellow")


def _many(job: Job, how: Mapping[str, Any], asked: ManyOptions, is_one_model: bool, as_json: bool) -> None:
    own = {name: value for name, value in how.items() if name != "tokenizer"}  # the job's
    options = {**job.options, **(own or {"spec_method": "plain"}), "max_batch_size": asked.batch_size or BATCH_SIZE}
    many = dataclasses.replace(job, options=options)
    settings = {name: value for name, value in _setting(job, how).items() if name != "threads"}
    summary = run_many(many, asked, settings, is_one_model=is_one_model)
    if summary is None:  # another process of the same job sums up
        return
    if as_json:
        print_json({**_setting(job, how), "out": str(asked.out), **summary})
    else:
        note(f"{counted(summary['num_prompts'], 'prompt')} in {asked.out}, {summary['num_failed']} failed", "dim")
    failures = summary["failures"]
    for index, reason in list(failures.items())[:SHOWN_FAILURES]:
        note(f"prompt {index}: {reason}", "red")
    if len(failures) > SHOWN_FAILURES:
        note(f"and {len(failures) - SHOWN_FAILURES} more, each with its error in {asked.out}", "red")
    if failures:
        note("hint: --retry-failed tries them again", "cyan")
        raise typer.Exit(1)


def _compare(job: Job, text: str | None, how: Mapping[str, Any], rounds: int, as_json: bool) -> None:
    prompts = _built_in(job) if text is None else (text,)
    if not how:
        raise ConfigError("--compare", "must come with a method", "none", "Use --spec-method prompt_lookup.")
    if job.options["do_sample"] and job.seed is None:
        job = dataclasses.replace(job, seed=0)
    for prompt in prompts:  # an error here names the prompt
        encode(job.tokenizer, prompt, input_device(job.model), job.system, is_chat=job.is_chat)
    found = compare_methods(job, prompts, how, rounds)
    for name, reason in found.left_out.items():
        note(f"note: {name} is left out: {reason}")
    if not found.is_complete:
        note_interrupt()
    setting = {**_setting(job, how), "num_prompts": len(prompts), "rounds": found.rounds}
    if as_json:
        print_json({**setting, "rows": found.rows, "is_complete": found.is_complete})
    else:
        names = ("dtype", "device", "threads", "num_prompts", "rounds")
        print_table(comparison_table(found.rows, len(prompts)), ", ".join(f"{name} {setting[name]}" for name in names))
    is_comparable = how["spec_config"].is_seed_exact or not job.options["do_sample"]
    if is_comparable and not found.rows[-1]["equal_to_plain"] and setting["dtype"] not in EXACT_DTYPES:
        near_tie_note(setting["dtype"])
    if not found.keeps_promise:
        note(f"error: the tokens of {how['spec_method']} differ from those of plain generate", "red")
        raise typer.Exit(1)
    if not found.is_complete:
        raise typer.Exit(INTERRUPTED)


def _built_in(job: Job) -> Sequence[str]:
    """Prompts of a call without any."""
    return (QUESTION,) if job.is_chat else PROMPTS


def _setting(job: Job, how: Mapping[str, Any]) -> dict[str, Any]:
    config: SpecConfig | None = how.get("spec_config")
    return {
        **_model_facts(job.model),
        "draft": _model_facts(how["assistant_model"]) if "assistant_model" in how else None,
        "threads": torch.get_num_threads(),
        "spec_method": how.get("spec_method"),
        "spec_config": None if config is None else dataclasses.asdict(config),
        "options": {**job.options, "seed": job.seed},
        **({"chat": True, "system": job.system} if job.is_chat else {}),
    }


def _model_facts(model: PreTrainedModel | DraftHead) -> dict[str, str]:
    if isinstance(model, DraftHead):
        return {"model": model.name_or_path, "dtype": precision_of(model), "device": str(model.device)}
    return {
        "model": model.name_or_path,
        "dtype": precision_of(model),
        "device": str(input_device(model)),
        "attention": attention_implementation(model.config),
    }


def _measures(result: Result) -> dict[str, Any]:
    return {
        "token_ids": result.token_ids,
        "seconds": result.seconds,
        "tokens_per_second": len(result.token_ids) / result.seconds,
        "spec_stats": None if result.stats is None else result.stats.to_dict(),
    }


def _summary(result: Result) -> str:
    num_tokens = len(result.token_ids)
    speed = f"{counted(num_tokens, 'token')} in {result.seconds:.2f} s ({num_tokens / result.seconds:.1f} tokens/s)"
    return speed if result.stats is None else f"{speed}; {drafts_line(result.stats)}"
