"""The process that probes run in. The doctor starts it, gives it one check at a time, and ends it where a check hangs.

    python -m dc_trl.doctor.worker EVENTS

Standard input: a line with the setup, then a line for each check, all JSON. EVENTS gets a line for each part of what
was found, and one for the end of each check. An exception ends the process: the next check gets a fresh one, since an
accelerator may be of no use after an error. The end of the standard input, that is, of the doctor, ends it too.
"""

import json
import os
import pkgutil
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from ..settings.command_line import leave_on_sigterm
from .checks import LeftOut, Setup
from .probes import release_memory


def _read_lines(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    events = Path(sys.argv[1]).open("a", buffering=1)  # noqa: SIM115

    def tell(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")

    def tell_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
        traceback.print_exception(kind, error, trace)
        tell(error=f"{kind.__name__}: {error}")

    leave_on_sigterm()
    sys.excepthook = tell_error
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(lines,), daemon=True).start()
    setup = Setup(**json.loads(lines.get()))
    while True:
        check = json.loads(lines.get())
        try:
            for found in pkgutil.resolve_name(check["probe"])(setup, check["scheme"]):
                tell(found=found)
            tell(passed=True)
        except LeftOut as why:
            tell(left_out=str(why))
        release_memory()


if __name__ == "__main__":
    main()
