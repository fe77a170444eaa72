"""Shows the metrics of a run while it trains."""

from transformers import ProgressCallback


class ConstraintProgressCallback(ProgressCallback):
    """Transformers' progress bar, with reward, δ̄ and λ on it in place of a printed line for every log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or self.training_bar is None or not logs:
            return
        shown = {"reward": "reward", "δ̄": "discrepancy/mean", "λ": "lagrangian/lambda"}
        values = {label: f"{logs[name]:.4g}" for label, name in shown.items() if logs.get(name) is not None}
        if values:
            self.training_bar.set_postfix(values)
