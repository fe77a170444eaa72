"""`train_through_quantization`: the policy computes as it is deployed."""

from accelerate import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..quantization.deployed_forward import DeployedForward
from .part import Part


# In what is known of the rows of a forward: the policy computes as it is trained, and not as it is deployed.
PLAIN = "plain_forward"


class AlignedForward(Part):
    """Makes the policy's layers compute with the weights, and perhaps activations, of `deployment_scheme`.

    Attributes:
        deployed (`DeployedForward`): hooks of the policy, which follow the optimizer's steps.
    """

    def __init__(self, trainer):
        super().__init__(trainer)
        args = trainer.args
        if trainer.accelerator.distributed_type == DistributedType.FSDP:
            # The forward quantizes gathered parameters, which must arrive unrounded; it sets its own precision.
            trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
        self.deployed = DeployedForward(
            trainer.model,
            args.deployment_scheme,
            activations=args.train_through_quantization != "weights",
            lora_deployment=args.lora_deployment,
        )
        self.deployed.enabled = True

    def forward(self, score, model, inputs, *tokens, **options):
        with self.deployed.active(PLAIN not in inputs):
            return score(*tokens, **options)
