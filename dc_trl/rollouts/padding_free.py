"""A padding-free forward: the real tokens of a micro-batch are in one row, and no padding is computed.

TRL scores a micro-batch of B sequences as B padded rows. Here their real tokens are in one row, one sequence after the
other, with positions that begin again at each. Every token still attends to its own sequence alone, for which each
attention implementation has its own means:

| `attn_implementation` | what separates the sequences |
|---|---|
| `flash_attention_2`, `_3`, `_4` | kernels for sequences of different lengths (`cu_seq_lens`) |
| `flex_attention` | a block mask of the sequences |
| `sdpa`, `eager` | a mask of all pairs of the row, which costs more than padding: for comparisons |

The masks are those of transformers, which finds the sequences by their positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from ..quantization import attention as deployed_attention
from ..quantization.policy import base_model


# Implementations that use transformers' mask of the row; flash attention gets the lengths.
_BY_MASK = ("sdpa", "eager", "flex_attention", deployed_attention.NAME)
_IGNORED = -100  # label of a token that is not scored
# Largest difference of hidden states by rounding, relative to their norm: in float32, also computed as TF32; and in
# half precision, where the routers of a mixture may choose other experts.
_ROUNDING, _ROUNDING_OF_HALF = 1e-3, 0.2


def _is_flash(implementation: str) -> bool:
    return "flash" in implementation and "paged" not in implementation  # as transformers tests it


class Packing:
    """Conversion between padded rows, shape (B, L), and one row of their real tokens, shape (1, N).

    Args:
        attention_mask: shape (B, L), 1 at real tokens, of which every row has at least one.

    Attributes:
        lengths: number of real tokens of each row.
        position_ids: positions in the packed row, int64, shape (1, N); they begin at 0 in each sequence.
    """

    def __init__(self, attention_mask: Tensor):
        mask = attention_mask.bool()
        self._shape = mask.shape
        self._places = mask.flatten().nonzero().squeeze(1)
        self.lengths = tuple(mask.sum(1).tolist())
        self.position_ids = self.pack(mask.cumsum(1) - 1)

    def pack(self, rows: Tensor) -> Tensor:
        """Convert shape (B, L, …) to (1, N, …)."""
        return rows.flatten(0, 1)[self._places].unsqueeze(0)

    def unpack(self, row: Tensor) -> Tensor:
        """Convert shape (1, N, …) to (B, L, …), with zeros at padding."""
        rows = row.new_zeros(self._shape.numel(), *row.shape[2:])
        return rows.index_copy(0, self._places.to(row.device), row.squeeze(0)).unflatten(0, self._shape)

    def options(self, implementation: str) -> dict[str, Any]:
        """Return the arguments that an attention implementation needs besides the positions."""
        if not _is_flash(implementation):
            return {}
        # Without them, transformers would compute them from the positions in each layer.
        ends = torch.tensor((0, *self.lengths), device=self._places.device).cumsum(0, dtype=torch.int32)
        longest = max(self.lengths)
        return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


class PaddingFree:
    """A padding-free forward for TRL's `_get_per_token_logps_and_entropies`, with padded rows as input and output.

    Args:
        config: configuration of the transformers model, which `prepared` has prepared.
    """

    def __init__(self, config: PreTrainedConfig):
        self._config = config
        self._packing: Packing | None = None  # packing of the forward that is running

    def around(self, model: nn.Module) -> Callable[..., Any]:
        """Return a stand-in for a model with TRL's fused head, which calls the model, wrappers included."""
        return partial(self._forward, model)

    def _forward(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **options: Any
    ) -> Any:
        """Return TRL's output for shape (B, L), with `log_probs` and `entropy` of shape (B, L − 1)."""
        self._packing = packing = Packing(attention_mask)
        # The label of a token is the one that follows it in its own row.
        shifted = functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        try:
            outputs = model(
                input_ids=packing.pack(input_ids),
                position_ids=packing.position_ids,
                shift_labels=packing.pack(shifted),
                **packing.options(self._config._attn_implementation),
                **options,
            )
        finally:
            self._packing = None
        entropy = None if outputs.entropy is None else packing.unpack(outputs.entropy)[:, :-1]
        return replace(outputs, log_probs=packing.unpack(outputs.log_probs)[:, :-1], entropy=entropy)

    def padded(self, hidden: Tensor) -> Tensor:
        """Return hidden states as hooks expect them, (B, L, channels), from (1, N, channels) of a packed forward."""
        return hidden if self._packing is None else self._packing.unpack(hidden)


def prepared(models: Sequence[PreTrainedModel | PeftModel], accelerator: Accelerator) -> PaddingFree:
    """Prepare models for padding-free forwards.

    Args:
        models: the policy, and a reference model if there is one, without accelerate's wrappers.
        accelerator: accelerator of the trainer. Each model is tested, unless it is sharded.

    Returns:
        The padding-free forward of all models.

    Raises:
        ValueError: a model cannot keep the sequences of one row apart.
    """
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    for model in models:
        base, remedy = base_model(model), "set padding_free=False"
        implementation = base.config._attn_implementation
        reason = _hindrance(model)
        if reason is None:
            known = _is_flash(implementation) or implementation in _BY_MASK
            with accelerator.autocast():
                if not known or not (sharded or _keeps_apart(base, implementation)):
                    reason = (
                        f"with attn_implementation={implementation!r} does not keep the sequences of one row apart"
                    )
                    remedy = f"load the model with 'flash_attention_2' or 'flash_attention_3', or {remedy}"
        if reason is not None:
            raise ValueError(f"padding_free=True: {type(base).__name__} {reason}: {remedy}.")
    return PaddingFree(base_model(models[0]).config)


def _hindrance(model: PreTrainedModel | PeftModel) -> str | None:
    """Return why a model cannot run padding-free, as a clause that follows its name; None if it can."""
    base = base_model(model)
    kinds = set(base.config.to_dict().get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if base.config.get_text_config() is not base.config:
        return "is multimodal, and computes the positions of images and text itself"
    if base._is_stateful or kinds:
        what = ", ".join(sorted(kinds)) or "a recurrent state"
        return f"has layers with {what}, through which one sequence of a row would reach the next"
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        return f"has an adapter of type {model.active_peft_config.peft_type.value}, which puts tokens before each row"
    return None


@torch.no_grad()
def _keeps_apart(base: PreTrainedModel, implementation: str) -> bool:
    """Return whether two short sequences in one row have the hidden states of each sequence alone, up to rounding."""
    training = base.training
    base.eval()
    embedding = base.get_input_embeddings().weight
    mask = torch.ones(2, 5, dtype=torch.long, device=embedding.device)
    mask[1, 3:] = 0
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(len(embedding), mask.shape, generator=generator).to(mask.device)

    def hidden_states(ids: Tensor, mask: Tensor) -> Tensor:
        packing = Packing(mask)
        tokens = {"input_ids": packing.pack(ids), "position_ids": packing.position_ids, "use_cache": False}
        return base.base_model(**tokens, **packing.options(implementation)).last_hidden_state.squeeze(0)

    try:
        together = hidden_states(input_ids, mask)
        alone = [hidden_states(input_ids[row : row + 1], mask[row : row + 1]) for row in range(2)]
    finally:
        base.train(training)
    # Under autocast, hidden states are float32 if the last norm's weight is.
    half = together.dtype != torch.float32 or torch.is_autocast_enabled(together.device.type)
    bound = _ROUNDING_OF_HALF if half else _ROUNDING
    # Not "any is greater": a NaN is a difference too.
    return all(
        (found - expected).norm() <= bound * expected.norm()
        for found, expected in zip(together.float().split([5, 3]), (each.float() for each in alone), strict=True)
    )
