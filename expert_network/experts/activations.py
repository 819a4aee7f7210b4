"""Which of the native kernels' activations is the one that a family's experts use."""

from __future__ import annotations

from typing import Any

# A name and parameters, as kernels.ffn takes them.
Activation = tuple[str, tuple[float, ...]]

_GELU = {"none": "gelu_erf", "precise": "gelu_tanh", "tanh": "gelu_tanh", "fast": "gelu_fast"}


def activation_of(switch: Any) -> Activation | None:
    """What `switch` does between its projections, None if the kernels do not know it.

    Told by the very type, never by a subclass: that may compute in another way.
    """
    module = switch.activation
    match f"{type(module).__module__}.{type(module).__name__}".removeprefix("mlx_lm.models."):
        case "switch_layers.SwiGLU" | "muse_spark.PreciseSwiGLU":
            return "swiglu", ()
        case "gemma4_text.GeGLU":
            return "geglu_tanh", ()
        case "activations.SwigluOAI":
            return "gpt_oss", (float(module._alpha), float(module._limit))
        case "step3p5.ClampedSwiGLU":
            return "swiglu_clipped_after", (float(module.limit),)
        case "deepseek_v41.DeepseekV41SwiGLU":
            return (
                ("swiglu_clipped", (float(module.limit),)) if module.limit > 0 else ("swiglu", ())
            )
        case "mlx.nn.layers.activations.ReLU2":
            return "relu2", ()
        case "mlx.nn.layers.activations.SiLU":
            return "silu", ()
        case "mlx.nn.layers.activations.GELU":
            return _GELU[module._approx], ()
    return None
