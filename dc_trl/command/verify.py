"""Asks a vLLM server whether it serves exactly the weights of a deployed checkpoint.

    dc-trl verify http://127.0.0.1:8000 runs/quickstart/deployment

The checkpoint is compared with its own contract, dc_trl.json, and then the server with the checkpoint: by hashes where
it has /weight_checker (vLLM 0.32 with VLLM_SERVER_DEV_MODE=1), otherwise by log-probabilities of completions, which is
evidence and no proof. A server's key is read from VLLM_API_KEY.

The exit code is 0 if it serves these weights, 1 if not, and 2 if it could not be asked.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from ..serving.errors import ServerError, ServerRefusedError
from ..settings.command_line import OptionParser, say, saying_if_slow
from . import subcommand


# Up to this multiple of the floor, kernels may explain a difference: SmolLM2-135M in FP8 is 1.3 floors from vLLM.
_FLOORS = 2.0
_PROMPTS = [f"Write down the number {number} in words, and the sum of its digits." for number in range(17, 800, 49)]
_PASSES = 4  # each with another order of sums
_SECONDS = 600.0  # that a request may take


def make_parser() -> OptionParser:
    parser = OptionParser(__doc__, "verify")
    parser.add_argument("url", metavar="URL", help="address of the server, http://HOST:PORT")
    parser.add_argument("checkpoint", metavar="DIR", type=Path, help="deployed checkpoint: deployment/ of a run")
    return parser


@subcommand(make_parser, SafetensorError, code=2)
def main(args: Namespace) -> int:
    return 0 if verify(args.url, args.checkpoint) else 1


def verify(url: str, directory: Path) -> bool:
    """Return whether a server serves the weights of a checkpoint, as far as can be seen, and print what was found.

    Raises:
        ServerError: the server could not be asked.
        ValueError, OSError, SafetensorError: the checkpoint has no contract, or cannot be read.
    """
    # They take seconds, which --help does not need.
    from ..calibration import CalibrationSettings
    from ..calibration.live_server import compare_hashes, look
    from ..quantization.contract import broken_terms, read_contract, read_tensors
    from ..sampling.replica import Replica
    from ..sampling.seeded import Disclosed
    from ..serving.connection import Connection, Patience
    from ..settings.pretrained import load_config_and_tokenizer

    connection, contract = Connection(url, Patience(request_timeout=_SECONDS)), read_contract(directory)
    asking = f"{url} is asked, and may take {_SECONDS:g} s to answer"
    if (reason := connection.why_down()) is not None:
        raise ServerError(f"no vLLM server answers at {url} ({reason}): start one with vllm serve, or fix the URL.")
    _, tokenizer = load_config_and_tokenizer(str(directory), "checkpoint")
    tensors = read_tensors(directory)
    if broken := broken_terms(contract, tensors):
        return _say_no(f"{directory} differs from its contract", broken)
    say(f"{directory} holds {len(tensors)} tensors in {contract['scheme']}, as its contract says.")
    try:
        with saying_if_slow(asking):
            answer = connection.request("POST", "/weight_checker", json={"action": "checksum"})
    except ServerRefusedError:
        say(f"{url} has no /weight_checker, so log-probabilities are compared.")
    else:
        with connection.reading("/weight_checker"):
            other, unknown = compare_hashes(answer["checksums"], tensors)
        if other:
            return _say_no(f"{url} serves other weights, by its own hashes", other)
        if not unknown:
            say(f"{url} serves these weights: it has the hashes of all tensors.")
            return True
        say(f"{url} has no comparable hash of {len(unknown)} tensors, {unknown[0]} among them.")
    replica = Replica.of_checkpoint(directory, contract["scheme"])
    prompts = [tokenizer(text)["input_ids"] for text in _PROMPTS]
    settings = CalibrationSettings(max_tokens=32, reduction="token", bf16=False)
    with saying_if_slow(asking):
        found = look(connection, Disclosed.of(connection).name, replica.model, prompts, 1, settings, _PASSES)
    difference, floor, tokens = found["discrepancy"], found["floor"], found["tokens"]
    same = difference <= _FLOORS * floor
    say(
        f"{url} {'shows no difference' if same else 'serves other weights'}: mean |Δp| {difference:.2g} in {tokens} "
        f"tokens, where another order of sums gives {floor:.2g} (up to {_FLOORS:g} times that is no difference). "
        "This is evidence and no proof: a smaller change is not seen."
    )
    return same


def _say_no(what: str, names: Sequence[str]) -> bool:
    say(f"{what}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}.")
    return False
