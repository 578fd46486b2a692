"""Linear layers of a few tokens: torch's products by the compiled core, in the package's own forwards alone."""

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import hf_specdec
from hf_specdec.compat.fingerprint import fingerprint
from hf_specdec.kernels import linear
from hf_specdec.kernels.linear import FewTokenLinear
from tests.helpers.support import PROMPT, plain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}

pytestmark = pytest.mark.skipif(
    linear.core is None or not linear.core.has_linear(), reason="no compiled core, or a processor that it does not know"
)


def layer(num_in: int = 256, num_out: int = 131, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(num_in, num_out, dtype=dtype, **kwargs).requires_grad_(False)


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of tokens of every product that the core computes; it computes all that it can."""
    seen: list[int] = []
    original = linear.core.linear

    class Noting(ModuleType):
        @staticmethod
        def has_linear() -> bool:
            return True

        @staticmethod
        def linear(*args: Any) -> None:
            seen.append(args[4])
            original(*args)

    monkeypatch.setattr(linear, "core", Noting("core"))
    monkeypatch.setattr(linear, "_trial", lambda size: decided(is_ours=True))
    yield seen


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def decided(*, is_ours: bool) -> linear._Trial:
    trial = linear._Trial()
    trial.is_over, trial.is_ours = True, is_ours
    return trial


@torch.no_grad()
def inside(module: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
    with FewTokenLinear(module):
        result: torch.Tensor = module(given)
    return result


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_is_torchs_but_for_its_rounding(
    dtype: torch.dtype, has_bias: bool, threads: int, products: list[int]
) -> None:
    """Of all remainders of tokens, outputs and lanes, against fp64; torch's own product is no nearer to it."""
    for (num_in, num_out), count in itertools.product(((256, 131), (1288, 97), (40, 1000)), (1, 2, 3, 4, 5, 8, 31, 64)):
        module, given = layer(num_in, num_out, dtype, bias=has_bias), tokens(count, num_in, dtype=dtype)
        exact = F.linear(given.double(), module.weight.double(), module.bias.double() if has_bias else None)
        result = inside(module, given)
        assert result.dtype == dtype and result.shape == (count, num_out)
        torch.testing.assert_close(result.double(), exact, atol=ROUNDING[dtype] * 2, rtol=ROUNDING[dtype])
        assert products.pop() == count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_is_computed_alike_whatever_stands_beside_it(dtype: torch.dtype, products: list[int]) -> None:
    module, given = layer(dtype=dtype), tokens(9, 256, dtype=dtype)
    together = inside(module, given)
    for place, alone in enumerate(given):
        assert torch.equal(inside(module, alone[None])[0], together[place])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_and_what_is_no_number_stay_so(dtype: torch.dtype, products: list[int]) -> None:
    module, given = layer(dtype=dtype, bias=False), tokens(3, 256, dtype=dtype)
    given[0, 5], given[1, 7] = float("nan"), float("inf")
    result, expected = inside(module, given), F.linear(given.float(), module.weight.float())
    assert result[0].isnan().all()
    assert torch.equal(result[1].float(), expected[1])
    assert result[2].isfinite().all()


def test_any_shape_and_layout_of_tokens(products: list[int]) -> None:
    module = layer()
    for given in (tokens(2, 3, 256), tokens(256), tokens(2, 9, 256)[:, ::3], tokens(256, 5).T, tokens(0, 256)):
        torch.testing.assert_close(inside(module, given), module(given))
    assert products == [6, 1, 6, 5]


@pytest.mark.parametrize("count", [1, 2, linear.MOST_TOKENS, linear.MOST_TOKENS + 1, 300])
def test_torch_computes_many_tokens_unless_it_converts_them_one_by_one(
    count: int, products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_emulated in (False, True):
        monkeypatch.setattr(linear, "_is_emulated", lambda dtype, found=is_emulated: found)
        assert FewTokenLinear(layer()).reads_prompts is is_emulated
        inside(layer(), tokens(count, 256))
    assert products == [count] * (2 if count <= linear.MOST_TOKENS else 1)


def test_outside_of_a_block_and_in_other_threads_torch_computes(products: list[int]) -> None:
    module, given = layer(), tokens(3, 256)
    with torch.no_grad(), FewTokenLinear(module):
        thread = threading.Thread(target=lambda: torch.no_grad()(module)(given))
        thread.start()
        thread.join()
        assert products == []
        module(given)
    assert products == [3]
    module(given)
    assert products == [3]


def test_a_block_leaves_nothing_behind_also_after_an_error(products: list[int]) -> None:
    module, given = torch.nn.Sequential(layer(256, 256), layer()), tokens(3, 256)
    before = [dict(vars(part)) for part in module]
    with pytest.raises(RuntimeError, match="shapes"):
        inside(module, tokens(3, 128))
    inside(module, given)
    assert [vars(part) for part in module] == before


def test_blocks_of_two_threads_do_not_end_each_other(products: list[int]) -> None:
    module, given = layer(), tokens(3, 256)
    entered, may_leave = threading.Event(), threading.Event()

    def other() -> None:
        with torch.no_grad(), FewTokenLinear(module):
            entered.set()
            may_leave.wait(60)
            module(given)

    thread = threading.Thread(target=other)
    with torch.no_grad(), FewTokenLinear(module):
        thread.start()
        assert entered.wait(60)
    assert "forward" in vars(module)
    may_leave.set()
    thread.join()
    assert products == [3] and "forward" not in vars(module)


def test_a_model_is_no_other_one_while_a_block_is_open() -> None:
    """Another thread's call on it finds what is known of it."""
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"))
    before = fingerprint(model)
    with torch.no_grad(), FewTokenLinear(model) as _:
        assert "forward" in vars(model.lm_head)
        assert fingerprint(model) == before


def own_forward(module: torch.nn.Linear) -> None:
    module.forward = lambda input: F.linear(input, module.weight, module.bias)  # type: ignore[method-assign]


def compile_it(module: torch.nn.Linear) -> None:
    module.compile(backend="eager")


def transpose(module: torch.nn.Linear) -> None:
    module.weight.data = module.weight.data.T.contiguous().T


class Traced(torch.Tensor):
    """A tensor that is not torch's own."""


def wrap(module: torch.nn.Linear) -> None:
    module.weight = torch.nn.Parameter(module.weight.data.as_subclass(Traced), requires_grad=False)


@pytest.mark.parametrize("change", [own_forward, compile_it, transpose, wrap])
def test_layers_that_are_not_torchs_own_keep_their_forward(
    change: Callable[[torch.nn.Linear], None], products: list[int]
) -> None:
    module, given = layer(), tokens(3, 256)
    expected = copy.deepcopy(module)(given)
    change(module)
    torch.testing.assert_close(inside(module, given).as_subclass(torch.Tensor), expected)
    assert products == []


class Doubling(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_classes_derived_from_linear_keep_their_forward(products: list[int]) -> None:
    module, given = Doubling(256, 131), tokens(3, 256)
    torch.testing.assert_close(inside(module, given), module(given))
    assert products == []


@pytest.mark.parametrize("mode", ["gradients", "autocast", "deterministic", "dispatch"])
def test_nothing_is_changed_where_torch_is_watched_or_told_how_to_compute(mode: str, products: list[int]) -> None:
    module, given = layer(), tokens(3, 256)
    if mode == "gradients":
        with FewTokenLinear(module.requires_grad_(True)):
            assert module(given).requires_grad
    elif mode == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            assert inside(module, given).dtype == torch.bfloat16
    elif mode == "deterministic":
        torch.use_deterministic_algorithms(True)
        try:
            inside(module, given)
        finally:
            torch.use_deterministic_algorithms(False)
    else:
        with FlopCounterMode(display=False) as counter:
            inside(module, given)
        assert counter.get_total_flops() == 2 * 3 * 256 * 131
    assert products == []


def test_tokens_and_weights_of_two_precisions_are_torchs_error(products: list[int]) -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        inside(layer(), tokens(3, 256, dtype=torch.bfloat16))
    assert products == []


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_faster_way_is_found_by_timing_both(is_faster: bool) -> None:
    """One outlier and a slow beginning decide nothing."""
    trial, ways = linear._Trial(), []
    while not trial.is_over:
        is_ours = trial.turn()
        ways.append(is_ours)
        seconds = 1.0 if is_ours == is_faster else 1.2
        trial.add(is_ours, 50.0 if len(ways) in (1, 2, 9, 10) else seconds)
    assert trial.is_ours == is_faster
    assert ways.count(True) == ways.count(False) == linear.SAMPLES


def test_a_size_is_tried_once_and_then_computed_by_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    linear._trial.cache_clear()
    module, ways = layer(264, 300), []
    for way in ("_product", "F"):
        original = getattr(linear, way) if way == "_product" else F.linear
        target = linear if way == "_product" else F

        def noting(*args: Any, name: str = way, original: Any = original) -> torch.Tensor:
            ways.append(name)
            result: torch.Tensor = original(*args)
            return result

        monkeypatch.setattr(target, "_product" if way == "_product" else "linear", noting)
    clock = itertools.count()
    monkeypatch.setattr(linear.time, "perf_counter", lambda: next(clock))
    for _ in range(2 * linear.SAMPLES):
        inside(module, tokens(3, 264))
    assert ways == ["_product", "F"] * linear.SAMPLES
    ways.clear()
    for _ in range(3):
        inside(module, tokens(4, 264))
    assert ways == ["F"] * 3
    linear._trial.cache_clear()


class Without(ModuleType):
    """A core on another processor."""

    @staticmethod
    def has_linear() -> bool:
        return False


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("core", None, "no compiled core is installed"),
        ("core", Without("core"), "the processor has no AVX2"),
        ("_team", lambda: 0, "torch's threads are not libgomp's"),
    ],
)
def test_where_the_core_cannot_compute_torch_does_and_the_reason_is_told(
    name: str, value: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert linear.why_unused() is None
        monkeypatch.setattr(linear, name, value)
        assert linear.why_unused() == reason
        assert FewTokenLinear(layer()).layers == []
        torch.testing.assert_close(inside(layer(), tokens(3, 256)), layer()(tokens(3, 256)))
    finally:
        torch.set_num_threads(before)


def test_threads_that_come_later_and_are_unknown_are_torchs(
    products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_team", lambda: 0)
    module = layer(1024, 1024)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    block = FewTokenLinear(module)
    torch.set_num_threads(2)
    try:
        with torch.no_grad(), block:
            module(tokens(3, 1024))
    finally:
        torch.set_num_threads(before)
    assert block.layers and products == []


def test_the_threads_are_those_of_torchs_openmp_library() -> None:
    own, other = f"{Path(torch.__file__).parent}/lib/libgomp.so.1", "/usr/lib/libgomp.so.1"
    assert linear._openmp({"[heap]", "/usr/lib/libc.so.6", own, other}) == own
    assert linear._openmp({"/usr/lib/libc.so.6", "/env/lib/libiomp5.so"}) == "/env/lib/libiomp5.so"
    assert linear._openmp({other, "/env/lib/libiomp5.so"}) is None
    assert linear._openmp({"[stack]"}) is None


def test_the_core_refuses_what_it_cannot_multiply() -> None:
    given, weight = tokens(2, 256), layer().weight
    place = given.data_ptr(), weight.data_ptr(), 0, torch.empty(2, 131).data_ptr()
    for sizes in ((2, 131, 255, 0, 1, 0), (2, 131, 256, 3, 1, 0), (2, 131, 256, 0, 0, 0), (2, 131, 256, 0, 2, 0)):
        with pytest.raises(ValueError, match="no product"):
            linear.core.linear(*place, *sizes)


@pytest.mark.parametrize("method", ["auto", "prompt_lookup", "lookahead", "draft_model", "eagle3", "plain"])
def test_every_method_writes_plains_text_with_the_cores_products(method: str, products: list[int]) -> None:
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), dtype=torch.float32)
    drafts = {
        "draft_model": lambda: hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("draft")),
        "eagle3": lambda: hf_specdec.AutoDraftHead.from_pretrained(hf_specdec.embedded.path("head")),
    }
    how = {"assistant_model": drafts[method]().float()} if method in drafts else {}
    for settings in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
        torch.manual_seed(3)
        expected = plain(model, PROMPT, max_new_tokens=24, **settings)
        torch.manual_seed(3)
        found = model.generate(PROMPT, max_new_tokens=24, spec_method=method, **how, **settings)
        assert found.tolist() == expected.tolist()
    assert products
