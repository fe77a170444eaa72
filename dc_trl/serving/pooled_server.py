"""One of several vLLM servers that sample together."""

from collections.abc import Callable
from concurrent.futures import Future

from .client import ServerClient, Weights
from .connection import Deadline
from .errors import ServerUnavailableError


_LOOK_SECONDS = 5.0  # that a server has to say that it is up

Fits = Callable[[ServerClient], None]  # raises a ServerError where a server does not serve us


class PooledServer:
    """One of several servers, and what is known of it.

    Attributes:
        client: what asks it.
        sequences: how many it runs at a time.
        lost: why it is given no prompts; None where it is.
        answered: prompts that it has answered since it was met.
    """

    def __init__(self, client: ServerClient, fits: Fits):
        self.client = client
        self.url = client.connection.url
        self._fits = fits
        fits(client)
        info = client.get_server_info()
        with client.connection.reading("/server_info"):
            scheduler, parallel = info["scheduler_config"], info["parallel_config"]
            self.sequences = int(scheduler["max_num_seqs"]) * int(parallel["data_parallel_size"])
        self.lost: str | None = None
        self.answered = 0
        self.has_loaded = False  # a checkpoint of this run
        self.task: Future[None] | None = None  # the last `prepare`, in a thread

    def prepare(self, weights: Weights | None, deadline: Deadline) -> None:
        """Has the server hold the weights, by one try; one that was lost has to be up again, and to fit.

        Raises:
            ServerError: it does not.
        """
        with self.client.connection.task(deadline):
            if (reason := self.client.connection.why_down(_LOOK_SECONDS)) is not None:
                raise ServerUnavailableError(f"vLLM at {self.url} is not up ({reason})")
            if self.lost is not None:  # it may have been started anew, with other options
                answer = self.client.connection.get("/v1/models")
                with self.client.connection.reading("/v1/models"):
                    self.client.model = answer["data"][0]["id"]
                self._fits(self.client)
            if weights is not None:
                # Whoever was lost may have loaded weights, and not have said so.
                self.client.hold(weights, reload=self.lost is not None)
                self.has_loaded |= weights.checkpoint is not None
