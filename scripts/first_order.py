"""Where each form of the constraint pushes a policy: mismatch, entropy and reward for a unit of movement.

    python scripts/first_order.py          with a sampler that lags by 8 optimizer steps, and with one in step

Each seed trains the tiny model by GRPO for `--steps` optimizer steps, and asks then. docs/study.md has the table.
"""

import tempfile
from pathlib import Path

import torch
from transformers import PrinterCallback, set_seed

from dc_trl import DCGRPOConfig, DCGRPOTrainer
from dc_trl.ablation.results import mean_over_seeds
from dc_trl.data.arithmetic import arithmetic_dataset
from dc_trl.files import read_yaml
from dc_trl.grading.rewards import arithmetic_reward
from dc_trl.records.tables import markdown_table, print_table, with_error
from dc_trl.settings.command_line import OptionParser
from dc_trl.study.first_order import Change, first_order, sampled_batch


CONFIG = Path("configs/study/base.yaml")
OF_DATA = ("model_name_or_path", "dtype", "dataset_name", "eval_size", "eval_greedy", "rewards")


def changes(seed: int, steps: int, lag: int, learning_rate: float) -> dict[str, Change]:
    """The changes of one run, with a sampler that has the weights of `lag` steps ago, or the present ones (0)."""
    base = read_yaml(CONFIG)
    fields = {name: value for name, value in base.items() if name not in OF_DATA and not name.startswith("eval_")}
    fields |= {
        "export_run": False,
        "max_steps": steps,
        "seed": seed,
        "learning_rate": learning_rate,
        "weight_sync_steps": max(1, lag),
    }
    with tempfile.TemporaryDirectory(prefix="dc_trl-first-order-") as folder:
        trainer = DCGRPOTrainer(
            base["model_name_or_path"],
            arithmetic_reward,
            DCGRPOConfig(folder, model_init_kwargs={"dtype": base["dtype"]}, **fields),
            train_dataset=arithmetic_dataset(16 * steps, seed, "train"),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    trainer.model.eval()
    if lag == 0:
        trainer.replica.sync(trainer.model)
    set_seed(1000 + seed)
    train = list(arithmetic_dataset(64, 1000 + seed, "train"))
    held_out = list(arithmetic_dataset(128, seed, "held_out"))
    batch = sampled_batch(trainer, train, arithmetic_reward, by_policy=False, completions=8)
    contexts = sampled_batch(trainer, held_out, arithmetic_reward, by_policy=True, completions=4)
    return first_order(trainer, batch, contexts, follows=lag == 0)


def main() -> None:
    parser = OptionParser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps before the question; at most the lag")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    head = ["direction", "total variation", "KL(π ‖ q)", "E_π |π − q|", "entropy", "reward"]
    for lag, title in ((args.steps, f"a sampler that lags by {args.steps} steps"), (0, "a sampler in step")):
        found = [changes(seed, args.steps, lag, args.learning_rate) for seed in range(args.seeds)]
        rows = []
        for name in found[0]:
            means = [mean_over_seeds(values) for values in zip(*(each[name] for each in found), strict=True)]
            rows.append([name, *(with_error(mean.value, mean.standard_error, 1, 3, "+") for mean in means)])
        print_table(head, rows, f"Change for each unit of movement, {title}, {args.seeds} seeds")
        print(markdown_table(head, rows))


if __name__ == "__main__":
    main()
