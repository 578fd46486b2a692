"""The budget of a batch whose prompts may have methods of their own."""

from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.engine.cost.budget import Budget
from hf_specdec.engine.decode import costs_of
from hf_specdec.engine.step import StepRunner
from hf_specdec.request.request import Request


def weigh_drafts_of(steps: StepRunner, model: PreTrainedModel, request: Request) -> None:
    """Give the steps a budget where the request's method drafts as many tokens as save time; all such share one."""
    if not request.config.fits_costs:
        return
    if steps.budget is not None:
        steps.budget.max_nodes = max(steps.budget.max_nodes, request.budget)
    elif (costs := costs_of(model, request, compat.input_device(model))) is not None:
        steps.budget = Budget(costs, max_nodes=request.budget)
