"""The trainer's methods that push to the Hub and write the model card."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from transformers import Trainer
from trl.trainer.utils import get_comet_experiment_url, get_config_model_id, get_trackio_space_url

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

    def push_to_hub(self, *args, **kwargs):
        """Pushes the run: model, deployment checkpoint, history of λ, figure and model card; see docs/hub.md.

        Takes and returns what [`~transformers.Trainer.push_to_hub`] does; `dataset_name` and `tags` go to the card.
        Every process has to call it.

        Raises:
            HubError: the Hub refused or could not be reached. The run's files are whole, and calling this again, or
                `dc_trl.hub.push.push_run` later, sends what is missing.
        """
        if self.args.deployment_scheme is not None and self.args.hub_deployment != "none":
            self.save_deployment(Path(self.args.output_dir, DEPLOYMENT_FOLDER))
        with self._hub.pushing(self.args):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder):
        with self._hub.pushing(self.args, deployment=False):
            super()._push_from_checkpoint(checkpoint_folder)

    def _save(self, output_dir=None, state_dict=None):
        # transformers pickles the arguments there.
        with without_token(self.args), _unchanged(Path(self.args.output_dir, CARD_FILE)):
            super()._save(output_dir, state_dict)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """Writes README.md into the output directory, from our own template and not TRL's."""
        if not self.is_world_process_zero():
            return
        trackers, repo_id = _trackers(), self.hub_model_id
        tags = {*self._tag_names, *([tags] if isinstance(tags, str) else tags or ())}
        if "Trackio" in trackers:
            tags.add(f"trackio:{trackers['Trackio']}")  # by which the Hub shows its dashboard
        write_run_card(
            self.args,
            model_name or Path(self.args.output_dir).absolute().name,
            tags=tags,
            repo_id=repo_id,
            deployment_id=None if repo_id is None else self._hub.second_repository(repo_id),
            base_model=get_config_model_id(self.model.config),
            dataset_name=dataset_name,
            trackers=trackers,
        )


@contextmanager
def _unchanged(card: Path) -> Iterator[None]:
    """Leaves a card as it is, or away, where PEFT writes into it or begins one whenever it saves an adapter."""
    content = card.read_bytes() if card.is_file() else None
    try:
        yield
    finally:
        if content is not None:
            card.write_bytes(content)
        else:
            card.unlink(missing_ok=True)


def _trackers() -> dict[str, str]:
    """Addresses of the run at experiment trackers, by the tracker's name."""
    wandb = sys.modules.get("wandb")  # a run that it tracks has imported it; the import takes seconds
    addresses = {
        "Weights & Biases": wandb.run.url if wandb is not None and wandb.run is not None else None,
        "Trackio": get_trackio_space_url(),
        "Comet": get_comet_experiment_url(),
    }
    return {name: address for name, address in addresses.items() if address is not None}
