"""The trainer's methods that push to the Hub and write the model card."""

from functools import cached_property
from pathlib import Path

from transformers import Trainer

from ..files import write_bytes
from ..records.runs import DEPLOYMENT_FOLDER
from .card import CARD_FILE, write_run_card
from .push import HubClient, without_token


class HubMixin(Trainer):
    """Has a [`DeployedPolicyTrainer`] push the run's files by name, with our own model card."""

    @cached_property
    def _hub(self) -> HubClient:
        return HubClient.of(self.args)

    def init_hf_repo(self, token=None):
        with self._hub.pushing(self.args):
            super().init_hf_repo(token)

    def push_to_hub(self, *args, export=True, **kwargs):
        """Pushes the run: model, deployment checkpoint, history of λ, figure and model card; see docs/hub.md.

        Takes and returns what [`~transformers.Trainer.push_to_hub`] does; `dataset_name` and `tags` go to the card.
        Every process has to call it.

        Args:
            export (`bool`, defaults to `True`): writes the deployment checkpoint from the present weights first.
                `False` pushes the one that `train` has just left in the output directory.

        Raises:
            HubError: the Hub refused or could not be reached. The run's files are whole, and calling this again, or
                `dc_trl.hub.push.push_run` later, sends what is missing.
        """
        if export and self.args.deployment_scheme is not None and self.args.hub_deployment != "none":
            self.save_deployment(Path(self.args.output_dir, DEPLOYMENT_FOLDER))
        with self._hub.pushing(self.args):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder):
        with self._hub.pushing(self.args, deployment=False):
            super()._push_from_checkpoint(checkpoint_folder)

    def _save(self, output_dir=None, state_dict=None):
        card = Path(self.args.output_dir, CARD_FILE)
        content = card.read_bytes() if card.is_file() else None
        try:
            with without_token(self.args):  # transformers pickles the arguments there
                super()._save(output_dir, state_dict)
        finally:  # PEFT writes into the card, or begins one, whenever it saves an adapter
            if content is None:
                card.unlink(missing_ok=True)
            else:
                write_bytes(card, content)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """Writes README.md into the output directory, from our own template and not TRL's."""
        if self.is_world_process_zero():
            tags = [tags] if isinstance(tags, str) else tags or ()
            write_run_card(self, self._hub.second_repository(self.hub_model_id), model_name, dataset_name, tags)
