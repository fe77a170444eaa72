"""What a vLLM server cannot do for us."""


class ServerError(RuntimeError):
    """The vLLM server cannot do what training needs of it; the message says why, and what to do."""


class ServerUnavailableError(ServerError):
    """The server cannot be reached, did not answer in time, or failed: trying again may help."""


class ServerRefusedError(ServerError):
    """The server said no (HTTP 4xx): the same request gets the same answer."""
