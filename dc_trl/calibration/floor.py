"""The floor of a discrepancy: what any other order of summation gives, with the same weights in the same formats.

Two engines add up the products of a linear layer in different orders, and their float32 sums differ by some 1e-7 of
themselves. Few of the sums are rounded to another bfloat16 number because of that. But where the next layer rounds its
input to FP8 or INT8 once more, and where many layers follow, these few move the probabilities by as much as the format
does. No alignment of formats goes below that floor, only equal kernels do.
"""

import torch
from torch import Tensor, nn

from ..quantization.policy import base_model
from ..quantization.schemes import quantized_linears
from .rollouts import Policy


# Standard deviation of the relative difference between two orders of a float32 sum.
_DISORDER = 1e-7
_BITS = 8  # of a bfloat16 number's significand


def disturb(policy: Policy, seed: int) -> None:
    """Make the linear layers of a policy, without its output head, add up in another order from now on.

    Layers whose output is not bfloat16 keep it, and so do the experts of a mixture.
    """
    generator = torch.Generator(policy.device).manual_seed(seed)

    def add_otherwise(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return in_another_order(output, generator) if output.dtype == torch.bfloat16 else output

    for linear in quantized_linears(base_model(policy)).values():
        linear.register_forward_hook(add_otherwise)


def in_another_order(output: Tensor, generator: torch.Generator) -> Tensor:
    """Return rounded sums as another order of summation might have given them.

    The sums themselves are gone. So where each lay between the bounds of its rounding is drawn uniformly, it is moved
    by a relative 1e-7·N(0, 1), and it is rounded again.

    Args:
        output: any shape, bfloat16.
        generator: of the draws, on the same device.
    """
    significand, exponent = torch.frexp(output.float())  # the former within [0.5, 1)
    place = torch.rand(output.shape, generator=generator, device=output.device) - 0.5  # in units of the last bit
    noise = torch.randn(output.shape, generator=generator, device=output.device)
    steps = (place + _DISORDER * noise * significand * 2**_BITS).round()
    return output + torch.ldexp(steps, exponent - _BITS).to(output.dtype)
