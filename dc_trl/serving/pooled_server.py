"""One of several vLLM servers that sample one policy."""

from collections.abc import Callable
from concurrent.futures import Future

from .client import ServerClient, Weights
from .connection import Deadline
from .errors import ServerUnavailableError


_HEALTH_SECONDS = 5.0  # time limit of the question whether the server is up

Fits = Callable[[ServerClient], None]  # raises a ServerError if a server does not fit the run


class PooledServer:
    """One of several servers and its state.

    Attributes:
        client: client that sends its requests.
        sequences: number of sequences that it runs at a time.
        lost: why it gets no prompts; None if it gets them.
        answered: number of prompts that it has answered.
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
        self.has_loaded = False  # whether it has loaded a checkpoint of this run
        self.task: Future[None] | None = None  # the last `prepare`, in a thread

    def prepare(self, weights: Weights | None, deadline: Deadline) -> None:
        """Make the server hold the weights, in one try; a lost server must be up again, and fit.

        Raises:
            ServerError: the server is not up, does not fit, or does not hold the weights.
        """
        with self.client.connection.task(deadline):
            if (reason := self.client.connection.why_down(_HEALTH_SECONDS)) is not None:
                raise ServerUnavailableError(f"vLLM at {self.url} is not up ({reason})")
            if self.lost is not None:  # it may have been restarted with other options
                answer = self.client.connection.get("/v1/models")
                with self.client.connection.reading("/v1/models"):
                    self.client.model = answer["data"][0]["id"]
                self._fits(self.client)
            if weights is not None:
                # A lost server may have loaded weights without an answer.
                self.client.hold(weights, reload=self.lost is not None)
                self.has_loaded |= weights.checkpoint is not None
