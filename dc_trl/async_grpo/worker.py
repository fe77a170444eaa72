"""AsyncGRPO's rollout worker, which samples in a separate process, with checks of the server's answers."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

from ..serving.answers import require_rollout
from ..serving.errors import ServerAnswerError, ServerError, ServerUnavailableError


_KINDS = {kind.__name__ for kind in (ServerAnswerError, ServerUnavailableError)}


_REASON_DELAY_SECONDS = 1.0
_END_SECONDS = 15.0  # the time that a failed worker has to end by itself


class CheckedRolloutLoop(_AsyncRolloutLoop):
    """The loop in the worker's process. Token ids of the model are below `vocabulary`."""

    def __init__(self, *, vocabulary: int, **kwargs: Any):
        super().__init__(**kwargs)
        self._vocabulary = vocabulary

    async def _post(self, path: str, payload: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            answer = await super()._post(path, payload, *args, **kwargs)
        except ValueError as error:
            raise ServerAnswerError(
                f"the server at {self.vllm_server_url} answered {path} without JSON: {error}"
            ) from error
        if not isinstance(answer, dict):
            raise ServerAnswerError(f"the server at {self.vllm_server_url} answered {path} without a JSON object")
        if path == "/v1/completions":
            answer["choices"] = require_rollout(payload, answer, self.vllm_server_url, self._vocabulary)
        return answer


class CheckedRolloutWorker(AsyncRolloutWorker):
    """TRL's worker with `CheckedRolloutLoop` as its loop.

    Raises:
        ServerError: raised by `check_health` once an answer was refused.
    """

    _loop_cls: ClassVar = CheckedRolloutLoop
    _process: Any  # TRL's own process of the loop, while it runs

    @classmethod
    def like(cls, worker: AsyncRolloutWorker, vocabulary: int) -> CheckedRolloutWorker:
        """Return a worker with the settings of another one that has not started."""
        return cls(vocabulary=vocabulary, **worker._loop_kwargs)

    def stop(self) -> None:
        process = self._process
        if process is not None and (self._failed_event.is_set() or not process.is_alive()):
            # TRL tells the process to stop, and would wait for ever for a dead one to hear it.
            process.join(_END_SECONDS)
            process.kill()
            self._process = None
        super().stop()

    def check_health(self, stale_after_s: float) -> None:
        try:
            try:
                super().check_health(stale_after_s)
            except RuntimeError as error:
                if error.__cause__ is not None:
                    raise
                time.sleep(_REASON_DELAY_SECONDS)  # the failure of the worker arrives before its reason
                super().check_health(stale_after_s)
        except RuntimeError as error:
            # TRL passes on the name of the error, its message and its traceback.
            kind, _, said = str(error.__cause__ or "").partition(": ")
            if kind in _KINDS:
                raise ServerError(said.partition("\nTraceback (most")[0]) from error
            raise
