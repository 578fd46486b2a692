"""Everything that waits for a GPU, by one command: tests, what a step costs, and the 1B and 7B shapes.

    python -m hf_specdec.tools.bench.gpu --output gpu.json --tests tests/gpu
    python -m hf_specdec.tools.bench.gpu --output part.json --shape 7B --batch 1 --context-length 512 --row "auto*"
    python -m hf_specdec.tools.bench.gpu --output tiny.json --shape tiny       # tries the same on a CPU

The embedded target is widened to each shape, so text and acceptance are real and the cost is that of the shape. Writes
one JSON document, and its tables as Markdown next to it, after each row.
"""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CompileConfig

from hf_specdec.compat import assists_static_caches
from hf_specdec.errors import ConfigError, first_line, unknown_name
from hf_specdec.loading import embedded
from hf_specdec.tools.bench.document import Document, add_table, check_document_file, write_document
from hf_specdec.tools.bench.gpu_rows import measure_row, profile_call, same_length_texts
from hf_specdec.tools.bench.gpu_shapes import SHAPES, Selection, Shape
from hf_specdec.tools.bench.header import model_facts, new_document
from hf_specdec.tools.bench.loaded_model import LoadedModel, load_model, pick_device
from hf_specdec.tools.bench.measure import synchronize
from hf_specdec.tools.bench.prompts import default_prompts, spread
from hf_specdec.tools.bench.steps import fill_steps
from hf_specdec.tools.bench.tables import markdown
from hf_specdec.tools.command_errors import run_program

CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
Backend = Literal["math", "flash_attention", "efficient_attention", "cudnn_attention"]
COPIED_BYTES, NUM_COPIES = 1 << 30, 20
STATIC = {"cache_implementation": "static"}
ONE_TOKEN = "spec_method=plain"  # this package's way to write one token a step
NUM_LOOKED_UP, MAX_ASSISTED = 10, 64  # tokens that transformers' prompt lookup drafts, and the most of its methods
SAMPLED = {"do_sample": True, "temperature": 0.7}


COLUMNS = {
    "row": "{name}",
    "batch": "{batch}",
    "context": "{context}",
    "tokens/s": "{tokens_per_second:.1f}",
    "over plain": "{over_plain:.2f}",
    "over theirs": "{over_theirs:.2f}",
    "tokens a step": "{mean_acceptance_length:.2f}",
    "a later token": "{later_token_ms:.2f} ms",
    "first call": "{first_call_seconds:.1f} s",
    "graphs": "{num_graphs:d}",
    "equal": "{equal}",
}
LEFT_OUT = {"left out": "{name}", "batch": "{batch:d}", "context": "{context:d}", "reason": "{reason}"}
KERNELS = {"kernel": "{name}", "runs": "{count}", "ms": "{ms:.2f}", "share": "{share:.0%}"}

Keep = Callable[[Document], None]


def measure_gpu(
    names: Sequence[str],
    *,
    device: str | None = None,
    tests: Path | None = None,
    selection: Selection | None = None,
    keep: Keep = lambda document: None,
) -> Document:
    """Run the tests, and measure tables of each shape.

    Args:
        names: of `SHAPES`.
        tests: a folder whose tests marked `gpu` are run first; they are left out by default.
        selection: part of the shapes that is measured.
        keep (*optional*): gets the document so far after each row and each shape.
    """
    for name in names:
        if name not in SHAPES:
            raise unknown_name("shape", name, SHAPES)
    where, chosen = pick_device(device), selection or Selection()
    _check_compile_options(chosen)
    if device is None and where.type == "cpu" and (large := [name for name in names if SHAPES[name].size is not None]):
        remedy = "Try it with the shape tiny (make gpu SHAPES=tiny), or name the device cpu to measure on the CPU."
        raise ConfigError("shape", "must be tiny where there is no accelerator", ", ".join(large), remedy)
    outcome = None if tests is None else run_tests(tests)
    settings: dict[str, Any] = {"shapes": list(names), "compile_mode": chosen.compile_mode}
    settings |= {"compile_options": dict(chosen.compile_options), "sdpa_backend": chosen.sdpa_backend}
    bandwidth = _copy_bandwidth(where)
    document = new_document("gpu", where, settings=settings) | {"tests": outcome, "copy_bandwidth": bandwidth}
    document["notes"].append(f"Copy bandwidth of the device: {bandwidth / 1e9:.0f} GB/s.")
    if outcome is not None:
        document["notes"].append(f"Tests: {outcome['summary']}")
    for name in names:
        _measure_shape(name, document, where, chosen, keep)
        _free_memory(where)
        document["is_complete"] = name == names[-1]
        keep(document)
    return document


def _check_compile_options(chosen: Selection) -> None:
    if not chosen.compile_options:
        return
    options = dict(chosen.compile_options)
    if chosen.compile_mode:
        raise ConfigError("compile_option", "must be left out next to a mode", options, "A mode is a set of options.")
    try:
        torch.compile(run_tests, options=options)  # compiles nothing before it is called
    except (RuntimeError, AttributeError) as error:
        rule = "must be an option of inductor with a value of its type"
        raise ConfigError("compile_option", rule, options, f"{first_line(error).split(', known')[0]}.") from error


def _measure_shape(name: str, document: Document, where: torch.device, chosen: Selection, keep: Keep) -> None:
    """Add the tables of one shape and its model; what has no room in memory is in a table of its own."""
    shape, stage = SHAPES[name], "loading the model"
    contexts = chosen.contexts or shape.contexts
    rows, left_out = add_table(document, name, COLUMNS), add_table(document, f"{name}, left out", LEFT_OUT)
    try:
        loaded = load_model(dtype=shape.dtype, head=embedded.path("head"), widen_to=shape.size, device=where)
        longest = max(contexts) + shape.max_new_tokens + 256
        for model in (loaded.model, loaded.assistant):
            if model is not None:  # the text beyond is worse, its cost the same
                model.config.max_position_embeddings = max(model.config.max_position_embeddings, longest)
        document["models"].append(model_facts(loaded))
        for batch in chosen.batches or shape.batches:
            for context in contexts:
                for row in _measured_cell(shape, loaded, chosen, batch, context):
                    if "profile" in row:
                        _add_profile(document, name, row, row.pop("profile"))
                    (left_out if "reason" in row else rows).append(row)
                    keep(document)
        share = _bandwidth_share(loaded, rows, document["copy_bandwidth"])
        if share is not None:
            note = f"{name}: plain decoding at one token reads its weights at {share:.0%} of it."
            document["notes"].append(note)
        stage = "what a step costs"
        if chosen.steps:
            prompts = spread(default_prompts(), chosen.num_prompts)
            fill_steps(document, loaded, prompts, max_new_tokens=min(shape.max_new_tokens, 64))
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        left_out.append({"name": stage, "reason": first_line(error)})


def _add_profile(document: Document, shape: str, row: Mapping[str, Any], call: Mapping[str, Any]) -> None:
    """Add a table of where the device's time of one call goes."""
    busy = call["device_seconds"]
    where = f"{shape}, {row['name']}, {row['batch']} x {row['context']}"
    table = add_table(document, f"{where}: the device works {busy / call['seconds']:.0%}", KERNELS)
    table += [{**one, "ms": 1000 * one["seconds"], "share": one["seconds"] / busy} for one in call["kernels"]]


def _is_out_of_memory(error: Exception) -> bool:
    """Tell errors of a device without room, or of the host, whose allocator has no error of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _methods(loaded: LoadedModel, batch: int, length: int, chosen: Selection) -> dict[str, dict[str, Any]]:
    """Arguments of `generate` by the row's name, for texts that end with `length` tokens.

    transformers' assisted generation takes one sequence, and writes drafts after a static cache's usual end.
    """
    static = dict(STATIC)
    if chosen.compile_mode or chosen.compile_options:
        compile_config = CompileConfig(mode=chosen.compile_mode, options=dict(chosen.compile_options) or None)
        static["compile_config"] = compile_config
    anew = {"spec_config": {"pool": "request"}}  # the call is made twice: it must not be remembered
    rows: dict[str, dict[str, Any]] = {
        "plain, eager": {"spec_method": None},
        "plain, static cache": {"spec_method": None} | static,
    }
    if batch == 1:
        theirs: dict[str, dict[str, Any]] = {"transformers' prompt lookup": {"prompt_lookup_num_tokens": NUM_LOOKED_UP}}
        if loaded.assistant is not None:
            theirs["transformers' assistant"] = dict(loaded.assisted)
        rows |= {name: {"spec_method": None} | arguments for name, arguments in theirs.items()}
        if assists_static_caches():
            longer = static | {"max_cache_len": length + MAX_ASSISTED}
            rows |= {f"{name}, static cache": rows[name] | longer for name in theirs}
    ours: dict[str, dict[str, Any]] = {ONE_TOKEN: {"spec_method": "plain"}}
    ours |= {name: {"spec_method": name} for name in ("prompt_lookup", "lookahead")}
    ours["auto"] = {"spec_method": "auto"} | anew
    if loaded.assistant is not None:
        ours["draft_model"] = {"spec_method": "draft_model"} | loaded.assisted
    if loaded.head is not None:
        ours["eagle3"] = {"spec_method": "eagle3", "assistant_model": loaded.head}
        ours["auto+head"] = {"spec_method": "auto", "assistant_model": loaded.head} | anew
    return rows | ours | {f"{name}, static cache": arguments | static for name, arguments in ours.items()}


def _measured_cell(
    shape: Shape, loaded: LoadedModel, chosen: Selection, batch: int, context: int
) -> Iterator[dict[str, Any]]:
    """Measure tokens a second of each way to generate at one batch size and context; some have no room in memory.

    Sampled too where there is one sequence, which then has plain generate's tokens, of the shortest context.
    """
    texts = same_length_texts(loaded, batch, context, 1 + chosen.num_texts)
    methods = _methods(loaded, batch, context + shape.max_new_tokens, chosen)
    ways = [methods]
    if batch == 1 and context == min(chosen.contexts or shape.contexts):
        ways.append({f"{name}, sampled": arguments | SAMPLED for name, arguments in methods.items()})
    for way in ways:
        plain: tuple[float, list[list[int]]] | None = None
        theirs = 0.0  # tokens a second of transformers' fastest way
        for name, arguments in chosen.of(way).items():
            cell: dict[str, Any] = {"batch": batch, "context": context, "name": name}
            try:
                with _attention(chosen.sdpa_backend):
                    row, tokens = measure_row(loaded, texts, shape.max_new_tokens, arguments)
                    if chosen.profiles:
                        row["profile"] = profile_call(loaded, texts[-1], shape.max_new_tokens, arguments)
            except (MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                yield cell | {"reason": first_line(error)}
                _free_memory(loaded.model.device)
                continue
            if plain is None and not name.startswith("plain"):
                yield cell | {"reason": "no room for plain generate, which it is compared with"}
                continue
            speed = row["tokens_per_second"]
            plain = plain or (speed, tokens)
            theirs = max(theirs, speed) if name.startswith(("plain", "transformers")) else theirs
            compared = {"over_plain": speed / plain[0], "over_theirs": speed / theirs}
            yield cell | row | compared | {"equal": "yes" if tokens == plain[1] else "no"}


def _attention(backend: str | None) -> AbstractContextManager[None]:
    """One kind of attention kernel for all calls; graphs compiled in it keep that kind."""
    return nullcontext() if backend is None else sdpa_kernel(SDPBackend.__members__[backend.upper()])


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _bandwidth_share(loaded: LoadedModel, rows: Sequence[Mapping[str, Any]], bandwidth: float) -> float | None:
    """Share of the copy bandwidth that reading the weights once a token takes: the fastest row of one token a step.

    Tokens after the first: without the prompt's forward.
    """
    size: int = sum(parameter.numel() * parameter.element_size() for parameter in loaded.model.parameters())
    plain = [row for row in rows if row["batch"] == 1 and row["name"].startswith(("plain", ONE_TOKEN))]
    seconds = [row["later_token_ms"] / 1000 for row in plain if row["later_token_ms"]]
    return size / min(seconds) / bandwidth if seconds else None


def _copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    size = COPIED_BYTES if device.type == "cuda" else COPIED_BYTES >> 5
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize(device)
    start = time.perf_counter()
    for _ in range(NUM_COPIES):
        target.copy_(source)
    synchronize(device)
    return 2 * size * NUM_COPIES / (time.perf_counter() - start)


def run_tests(folder: Path) -> dict[str, Any]:
    """The outcome of the folder's tests marked `gpu`, in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"exit_code": done.returncode, "summary": lines[-1] if lines else done.stderr[-500:], "failed": failed}


def _read_option(text: str) -> tuple[str, Any]:
    """Name and value; a value that is no JSON is a text."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError("compile_option", "must be NAME=VALUE", text, "For example max_autotune=true.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main(
    output: Annotated[Path, typer.Option(help="The JSON document; its tables go next to it, as .md.")],
    shape: Annotated[list[str] | None, typer.Option(help="Of 1B, 7B and tiny. Default: 1B and 7B.")] = None,
    tests: Annotated[Path | None, typer.Option(help="Also run this folder's tests marked gpu.")] = None,
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, or the CPU.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows of a batch. Default: the shape's.")] = None,
    context_length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a prompt. Default: the shape's.")
    ] = None,
    row: Annotated[list[str] | None, typer.Option(help='Shell pattern of rows, such as "auto*". Default: all.')] = None,
    steps: Annotated[bool, typer.Option(help="Measure what a step costs, too.")] = True,
    num_texts: Annotated[int, typer.Option(min=1, help="That each row writes.")] = 4,
    num_prompts: Annotated[int, typer.Option(min=1, help="By which steps are measured.")] = 12,
    compile_mode: Annotated[
        CompileMode | None, typer.Option(help="Of torch.compile, over static caches. Default: transformers'.")
    ] = None,
    compile_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of torch.compile's options, in the place of a mode.")
    ] = None,
    sdpa_backend: Annotated[
        Backend | None, typer.Option(help="Kernels of PyTorch's attention, for all rows. Default: torch's choice.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Also list each row's kernels, by one more call.")] = False,
) -> None:
    """Measure, and write one document."""
    check_document_file("output", output)

    def keep(document: Document) -> None:
        write_document(document, output)
        output.with_suffix(".md").write_text(markdown(document))

    selection = Selection(
        tuple(batch or ()),
        tuple(context_length or ()),
        tuple(row or ()),
        steps,
        num_texts,
        num_prompts,
        compile_mode,
        dict(map(_read_option, compile_option or ())),
        sdpa_backend,
        profile,
    )
    document = measure_gpu(shape or ["1B", "7B"], device=device, tests=tests, selection=selection, keep=keep)
    if document["tests"] is not None and document["tests"]["exit_code"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_program(main)
