"""Models made to compute what no tree can."""

from typing import Any

__all__ = ["see_all", "steer"]


def steer(model: Any) -> None:
    """Change hidden states at the last position of each forward: no tree is right then."""

    def change(module: Any, args: Any, output: Any) -> Any:
        states = (output[0] if isinstance(output, tuple) else output).clone()
        states[:, -1] = states[:, -1].flip(-1)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    model.model.layers[1].register_forward_hook(change)


def see_all(model: Any) -> None:
    """Let every token see those before it in a forward, whatever mask it is given."""

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"attention_mask": None}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(change, with_kwargs=True)
