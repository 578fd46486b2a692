"""The faults that `python -m tests.mutants` makes in the engine, and the tests nearest to each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in a file of the package, `old` (found once) becomes `new`."""

    name: str
    file: str
    old: str
    new: str


VERIFY, STOPPING, SEQUENCE = "engine/verify.py", "engine/stopping.py", "engine/sequence.py"
SAMPLER, REJECTIONS = "engine/sampling/sampler.py", "engine/sampling/rejections.py"
STEP, DECODING = "engine/step.py", "engine/decode.py"
BATCH = "engine/batch.py"
CACHE, LAYER = "cache/spec_cache.py", "cache/spec_layer.py"
MASK, LAYOUT = "forward/tree_mask.py", "forward/text_rows.py"
LOOKUP = "methods/prompt_lookup/method.py"
LAYERS, REPLACED = "kernels/layers.py", "common/replaced.py"
NORMS = "compat/modules.py"
ATTENTION = "kernels/core_attention.py"
FINGERPRINT = "compat/fingerprint.py"
MODULES, MASKS = "compat/modules.py", "compat/attention.py"
LENGTHS = "call/rules.py"
CHECKED = "forward/compiled_forward.py"
GROUPED, DECODE = "kernels/core_attention.py", "call/request.py"
COMPILED, COMPILING, STATIC, CALL = (
    "forward/compiled_forward.py",
    "compat/compiling.py",
    "cache/static_cache.py",
    "engine/call.py",
)
DFLASH = "methods/dflash/network.py"
BLOCKS, HEADS = "forward/networks/block_runner.py", "methods/common/draft_head.py"
# The tests of a file, quick ones first. A later part runs only where the parts before it see nothing.
NEAREST: dict[str, tuple[str, ...]] = {
    VERIFY: ("engine/test_verify.py", "engine/sampling/test_rejection_texts.py"),
    STOPPING: ("engine/test_verify.py", "promise/outputs/test_stopping.py"),
    SAMPLER: (
        "engine/sampling/test_sampler.py engine/sampling/test_draws_ahead.py",
        "promise/outputs/test_outputs.py",
        "promise/outputs/test_processors.py",
    ),
    REJECTIONS: ("engine/sampling/test_rejection.py", "engine/sampling/test_rejection_texts.py"),
    STEP: (
        "promise/outputs/test_observer_and_stats.py promise/outputs/test_interrupts.py",
        "promise/batches/test_stopping.py",
    ),
    BATCH: ("promise/batches/test_processors.py promise/outputs/test_outputs.py",),
    CACHE: ("cache", "promise/caches/test_caches.py promise/batches/test_caches.py promise/outputs/test_interrupts.py"),
    LAYER: ("cache", "promise/batches/test_caches.py promise/batches/test_stopping.py"),
    MASK: ("forward", "promise/batches/test_stopping.py"),
    LAYOUT: ("forward",),
    LOOKUP: ("methods/prompt_lookup", "test_observer.py"),
    DECODING: ("promise/outputs/test_streamer.py promise/batches/test_processors.py",),
    **dict.fromkeys((DFLASH, BLOCKS, HEADS), ("methods/dflash",)),
    LAYERS: (
        "kernels/test_linear.py kernels/test_few_token.py kernels/test_rms_norm.py kernels/test_replaced_functions.py",
    ),
    MODULES: ("kernels/test_replaced_functions.py",),
    MASKS: ("capabilities/test_architectures.py", "promise/models/test_long_texts.py"),
    LENGTHS: ("promise/models/test_length_rules.py promise/models/test_phi4_multimodal.py",),
    REPLACED: ("forward/test_replaced.py",),
    NORMS: ("kernels/test_rms_norm.py",),
    ATTENTION: ("kernels/test_few_query.py",),
    **dict.fromkeys(
        (COMPILED, CHECKED, COMPILING, STATIC, CALL, FINGERPRINT),
        (
            "forward/test_compiled_forward.py promise/models/test_model_switches.py kernels/test_grouped.py",
            "promise/compiled/test_guards.py promise/compiled/test_steps.py",
        ),
    ),
    GROUPED: ("kernels/test_grouped.py",),
    DECODE: ("promise/compiled/test_guards.py",),
}
OTHERS = ("matrix", "promise engine forward cache methods kernels", "bench cli")
MUTANTS = (
    Mutant(
        "a wrong child is accepted",
        VERIFY,
        "child = tree.child(node, token)",
        "child = tree.child(node, token) or next(iter(tree.children(node)), None)",
    ),
    Mutant("the token after a full path is lost", VERIFY, "        path.append(child)\n", ""),
    Mutant("a stop is obeyed at the end of the draft", VERIFY, "if stop or child is None", "if child is None"),
    Mutant("a rejected token leaves p as it was", REJECTIONS, "rest.div_(total), p)", "p, p)"),
    Mutant(
        "a token is drawn from the parent's row",
        SAMPLER,
        "self._rows.logits[node : node + 1]",
        "self._rows.logits[:1]",
    ),
    Mutant(
        "processors are called twice a token",
        SAMPLER,
        "self.processors(text.ids(), row)",
        "self.processors(text.ids(), self.processors(text.ids(), row))",
    ),
    Mutant(
        "one more draw a token",
        SAMPLER,
        "        if self.do_sample:\n",
        "        if self.do_sample:\n            torch.rand(())\n",
    ),
    Mutant(
        "scores are recorded before the processors",
        SAMPLER,
        "self.scores.append(scores)",
        "self.scores.append(self._rows.logits[node : node + 1].float())",
    ),
    Mutant("a node's draft is judged by the target's share", REJECTIONS, "share < p.gather", "1.0 < p.gather"),
    Mutant(
        "a level draws the numbers of the root's", SAMPLER, "rows[depth] for depth in tree", "rows[0] for depth in tree"
    ),
    Mutant("texts are one token too long", STOPPING, "len(text) >= self.max_length", "len(text) > self.max_length"),
    Mutant("a criterion's answer is forgotten", STOPPING, ".all()) or stop", ".all()) and stop"),
    Mutant(
        "sequences get one another's logits",
        BATCH,
        "self.sequences, logits, strict=True):\n            sequence.sampler",
        "self.sequences, logits[::-1], strict=True):\n            sequence.sampler",
    ),
    Mutant(
        "the token after a draft counts as accepted",
        STEP,
        "num_draft_tokens, result.num_accepted)",
        "num_draft_tokens, len(result.tokens))",
    ),
    Mutant("a linear layer loses its bias", LAYERS, "0 if bias is None else bias.data_ptr()", "0"),
    Mutant("sparse weights go to the core", LAYERS, "weight.layout == torch.strided and ", ""),
    Mutant("all rows of a batch have the first one's mask", ATTENTION, "numbers.stride(0) * (len(numbers) > 1)", "0"),
    Mutant("a missing mask hides nothing", ATTENTION, "mask is None and is_causal and query.shape[2] > 1", "False"),
    Mutant("torch computes halves", LAYERS, "self.dtype != torch.float32 or this_thread.recorder is not None", "False"),
    Mutant("a norm keeps its class's epsilon", LAYERS, "            self.epsilon,\n", "            1e-6,\n"),
    Mutant("any norm is Llama's", NORMS, "getattr(forward.__code__, name) == getattr(LLAMAS.__code__, name)", "True"),
    Mutant("a forward of before is lost", REPLACED, 'attributes["forward"] = installed.before', "pass"),
    Mutant("values outlive their block", REPLACED, "vars(this_thread).update(self._before)", "pass"),
    Mutant("other threads get the kernels too", LAYERS, "this_thread.depth > 0\n            and type(", "type("),
    Mutant("a forward counts twice", STEP, "num_forwards += 1\n        for", "num_forwards += 2\n        for"),
    Mutant(
        "the streamer gets the first token of a step only",
        DECODING,
        "        self.streamer.put(torch.tensor([token], device=HOST))",
        "        node or self.streamer.put(torch.tensor([token], device=HOST))",
    ),
    Mutant(
        "after an error nothing is committed", STEP, "            batch.target.commit(paths + ", "            (paths + "
    ),
    Mutant(
        "rejected tokens stay in the cache",
        CACHE,
        "        for layer in written:\n",
        "        for layer in ():\n",
    ),
    Mutant(
        "accepted columns stay where they are",
        CACHE,
        "= block[:, rows, :, source]",
        "= block[:, rows, :, target]",
    ),
    Mutant(
        "all rows write where the longest ends",
        LAYER,
        "if packed is None and (batch == 1 or min(self.lengths) == self.length):",
        "if packed is None:",
    ),
    Mutant(
        "the values of other rows are kept",
        LAYER,
        "for buffer in (self.keys[:, :, :end], self.values[:, :, :end]):",
        "for buffer in (self.keys[:, :, :end],):",
    ),
    Mutant(
        "a failed forward is not rolled back",
        CACHE,
        "layer.set_lengths(self.lengths or (0,) * len(layer.lengths))",
        "pass",
    ),
    Mutant("siblings see one another in an open mask", MASK, "num_columns] = new[row]", "num_columns] = True"),
    Mutant("a window is one position too wide", MASK, "asking[row] - window", "asking[row] - window - 1"),
    Mutant("siblings see one another in a model's mask", MASK, " & (related | ~is_new)", ""),
    Mutant(
        "siblings see one another in a padded batch", MASK, "(related | ~is_new)", "(related | (column < num_columns))"
    ),
    Mutant(
        "positions are off by one",
        LAYOUT,
        "[num_pending + depth for depth",
        "[num_pending + depth + (depth > 1) for depth",
    ),
    Mutant(
        "tokens to catch up have the root's position",
        LAYOUT,
        "list(range(len(self.pending)))",
        "[0] * len(self.pending)",
    ),
    Mutant(
        "a call's pool serves the next call",
        LOOKUP,
        ' if config.pool == "shared" else None\n',
        "\n",
    ),
    Mutant("rows share their seed", DECODING, "manual_seed(seed) for seed", "manual_seed(first) for _"),
    Mutant(
        "the drafter sees rejected tokens",
        STEP,
        "computed, result.tokens)",
        "computed, [*result.tokens[:-1], tree.tokens[-1]])",
    ),
    Mutant(
        "guards are left out next to code of the caller's",
        CALL,
        'or not type(item).__module__.startswith(("transformers.", "hf_specdec."))',
        "or False",
    ),
    Mutant("guards are left out in any class", FINGERPRINT, "return all(cls.forward", "return True or all(cls.forward"),
    Mutant("guards are checked in each step", CHECKED, "if form in self._steps:", "if False:"),
    Mutant("arguments of other types are alike", CHECKED, "value.stride(), value.dtype", "value.stride()"),
    Mutant(
        "functions share their compiled code",
        COMPILING,
        "function.__code__.replace(co_name=OWN_NAME),",
        "function.__code__,",
    ),
    Mutant(
        "any compiled code is taken",
        COMPILING,
        "for entry in entries if entry.guard_manager.check(seen)",
        "for entry in entries",
    ),
    Mutant("a streamer is no one's code", DECODE, 'drafter, self.arguments.get("streamer"))', "drafter)"),
    Mutant("a processor of a row is no one's code", CALL, "PerRow | PrefixConstrainedLogitsProcessor", "str"),
    Mutant(
        "a compiled step copies grouped keys",
        GROUPED,
        "    if torch.compiler.is_compiling():\n        return True\n",
        "",
    ),
    Mutant("a caller's graph folds its heads", COMPILING, "f_code.co_name == OWN_NAME", "f_code.co_name != ''"),
    Mutant("code that breaks goes without guards", COMPILING, 'any("__resume" in name', 'any("__other" in name'),
    Mutant("each width is compiled", COMPILED, "if not num_runs and shape[1] > 1 and self._takes_widths", "if False"),
    Mutant("buffers stay views of a block", STATIC, "untyped_storage().nbytes() == buffer.nbytes", "numel() > 0"),
    Mutant(
        "graphs outlive their forwards", COMPILING, "torch._C._dynamo.eval_frame.reset_code, copy.__code__", "id, copy"
    ),
    Mutant("switches of callers' code are not seen", FINGERPRINT, "if type(value) is str else value != 0", "and 0"),
    Mutant("registered attention is not seen", FINGERPRINT, "if function is not None]", "if function is None]"),
    Mutant("a forward replaced on its class is passed by", LAYERS, "type(module).forward is not forward", "False"),
    Mutant(
        "replaced functions of torch are passed by", MODULES, "is not getattr(torch._C._nn", "is getattr(torch._C._nn"
    ),
    Mutant("frequencies grow unseen", MASKS, "isinstance(kind, str) and GROWING in kind:", "False:"),
    Mutant("columns scale a tree's attention", LENGTHS, "request.call.reaches(length - MOST_COLUMNS)", "False"),
    Mutant(
        "a text that the model forgets is read again",
        LENGTHS,
        "request.call.reaches(length + 1)",
        "False",
    ),
    Mutant("windows of another class count", MASKS, "__mro__} - {GenerationMixin}", "__mro__}"),
    Mutant("states of the target have no positions", DFLASH, "rotated(keys, cosine, sine)", "keys"),
    Mutant("layers with a window see as others", DFLASH, "if kind == SLIDING", "if False"),
    Mutant("layers of the authors' form count from 1", DFLASH, "tuple(layer_id + 1 for", "tuple(layer_id for"),
    Mutant("windows of speculators slide", DFLASH, "0 if is_causal else None, from_root=True", "0"),
    Mutant(
        "a block's tokens see those after them", HEADS, "(of_text <= back) & (distances >= -ahead)", "of_text <= back"
    ),
)
