"""Parts: what a run does beside the steps of TRL where a setting asks for it, one file each, on one protocol.

They may import what samples, the constraint and what is below these; the trainer alone imports them.
"""

from typing import Any

from .part import Part, Parts


def parts_of(trainer: Any) -> Parts:
    """Return the parts that the settings of a trainer ask for. Of the others nothing is imported."""
    args, parts = trainer.args, list[type[Part]]()
    if args.use_vllm or args.deployment_scheme is not None or trainer.rollout_func is not None:
        from .two_engines import TwoEngines

        parts.append(TwoEngines)
    if args.train_through_quantization and args.deployment_scheme is not None:
        from .aligned_forward import AlignedForward

        parts.append(AlignedForward)
    if args.routing_replay:
        from .routing_replay import Replay

        parts.append(Replay)
    if trainer.sampler.truncates:
        from .kept_tokens import KeptTokens

        parts.append(KeptTokens)
    if args.score_centering:
        from .score_centering import CentredScore

        parts.append(CentredScore)
    if args.length_aware_batches:
        from .length_aware_batches import LengthAwareBatches

        parts.append(LengthAwareBatches)
    if trainer.sampler.lagged is not None:
        from .lag import Lag

        parts.append(Lag)
    if args.drop_zero_std_groups:  # once the lag has read the rows that TRL has scored
        from .dropped_groups import DroppedGroups

        parts.append(DroppedGroups)
    return Parts(part(trainer) for part in parts)
