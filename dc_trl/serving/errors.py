"""What a vLLM server cannot do for us."""


class ServerError(RuntimeError):
    """The vLLM server cannot do what training needs of it; the message says why, and what to do."""

    when = "when the server is up again"  # a run that it has ended can go on


class ServerUnavailableError(ServerError):
    """The server cannot be reached, did not answer in time, or failed: trying again may help.

    Args:
        message: see `ServerError`.
        retry_after: seconds that the server asks us to wait before the next try.
    """

    def __init__(self, message: str, retry_after: float = 0.0):
        super().__init__(message)
        self.retry_after = retry_after


class ServerRefusedError(ServerError):
    """The server said no (HTTP 4xx): the same request gets the same answer."""


class ServerAnswerError(ServerError):
    """The server's answer is none to what it was asked, so that nothing of it is used."""

    when = "with a server that answers rightly"


class RequestAbandonedError(ServerError):
    """Nobody wants the answer any more: a signal ends the run, or whoever asked has left."""

    def __init__(self) -> None:
        super().__init__("The request to the server was given up before its answer.")


class WeightsNotWrittenError(ServerError):
    """The checkpoint that the server is to load cannot be written."""

    when = "when it can be"
