"""The errors of a vLLM server."""

from ..secrets import printable


class ServerError(RuntimeError):
    """The vLLM server cannot do what training needs; the message says why, with the remedy."""

    def __init__(self, message: str):
        super().__init__(printable(message).replace("\n", " "))  # it may quote a server


class ServerUnavailableError(ServerError):
    """The server could not be reached, did not answer in time, or failed; another try may help."""


class ServerRefusedError(ServerError):
    """The server refused the request (HTTP 4xx); the same request would get the same answer."""


class ServerAnswerError(ServerError):
    """The server's answer does not fit the request, so none of it is used."""


class RequestAbandonedError(ServerError):
    """The answer is no longer needed: a signal ends the run, or the caller has stopped waiting."""

    def __init__(self) -> None:
        super().__init__("The request to the server was abandoned before its answer.")
