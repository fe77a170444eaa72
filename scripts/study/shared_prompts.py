"""Makes a step of a large model cheaper on a CPU: a prompt is read once, and the head is applied to completions alone.

The completions of a group share their prompt, and TRL reads it again with each of them. Here a row holds a prompt but
for its last token, and behind it a branch for each completion: that token and the completion but for its last one. A
token sees the prompt and what is before it in its own branch, so the numbers are those of TRL's rows, up to rounding.
"""

from __future__ import annotations

import torch
import trl.trainer.utils
from torch import Tensor

from dc_trl.parts.part import Part


class SharedPrompts(Part):
    """Computes the forwards of a trainer of texts; the first part, within all others."""

    def __init__(self, trainer):
        super().__init__(trainer)
        # Where Triton is missing, TRL 1.16 applies the head to every position, to keep shapes constant for compilers:
        # a third of a step with SmolLM2's 49,152 tokens. The fused head reads this function for that choice alone.
        trl.trainer.utils._use_triton = lambda device: True

    def forward(self, score, model, inputs, input_ids, attention_mask, logits_to_keep, **options):
        packed = Packed(input_ids, attention_mask, logits_to_keep)
        with self.trainer.accelerator.autocast():
            output = model(
                input_ids=packed.ids,
                attention_mask=packed.visible.unsqueeze(1),
                position_ids=packed.positions,
                shift_labels=packed.labels,
                fused_lm_head=True,
            )
        entropies = packed.unpacked(output.entropy) if options.get("compute_entropy") else None
        return packed.unpacked(output.log_probs), entropies, None


class Packed:
    """Rows of completions, packed by their prompts.

    Args:
        input_ids, attention_mask: prompts, padded on the left, and completions, padded on the right, shape (rows,
            P + T).
        length: number T of columns of the completions.

    Attributes:
        ids, positions: tokens of each group and their places, shape (groups, S) with S = P − 1 + branches · T.
        labels: the token that follows each; −100 where none is scored, shape (groups, S).
        visible: which tokens (the last dimension) a token sees, shape (groups, S, S).
    """

    def __init__(self, input_ids: Tensor, attention_mask: Tensor, length: int):
        prompt = input_ids.shape[1] - length
        masked = input_ids.masked_fill(attention_mask == 0, -1)
        prompts, self._group = masked[:, :prompt].unique(dim=0, return_inverse=True)
        of_group = torch.nn.functional.one_hot(self._group, len(prompts))
        self._branch = (of_group.cumsum(0) * of_group).sum(1) - 1  # of each row within its group
        branches = int(self._branch.max()) + 1
        tokens = masked.new_full((len(prompts), branches, length + 1), -1)
        tokens[self._group, self._branch] = masked[:, prompt - 1 :]
        ids = torch.cat([prompts[:, :-1], tokens[..., :-1].flatten(1)], dim=1)
        self.labels = torch.cat([torch.full_like(prompts[:, :-1], -1), tokens[..., 1:].flatten(1)], dim=1)
        self.labels = self.labels.masked_fill(self.labels < 0, -100)
        self.ids = ids.clamp(min=0)  # what is masked is seen by none
        # Which branch a token is in, −1 for the prompt, and its place in its own sequence.
        of_branch = torch.arange(branches, device=ids.device).repeat_interleave(length)
        branch = torch.cat([of_branch.new_full((prompt - 1,), -1), of_branch])
        in_branch = torch.arange(prompt - 1, prompt - 1 + length, device=ids.device)
        place = torch.cat([torch.arange(prompt - 1, device=ids.device), in_branch.repeat(branches)])
        self.positions = place.expand_as(ids)
        before = place.unsqueeze(1) >= place
        same = (branch.unsqueeze(1) == branch) | (branch == -1)
        itself = torch.eye(len(place), dtype=torch.bool, device=ids.device)  # attention to nothing would be NaN
        self.visible = (before & same & (ids >= 0).unsqueeze(1)) | itself
        self._shape = len(prompts), branches, length

    def unpacked(self, values: Tensor) -> Tensor:
        """Return values of the labels, shape (groups, S), by completions, shape (rows, T)."""
        groups, branches, length = self._shape
        return values[:, -branches * length :].view(groups, branches, length)[self._group, self._branch]
