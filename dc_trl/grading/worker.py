"""A worker process that grades: `python -m dc_trl.grading.worker MEMORY_LIMIT SECONDS`.

One JSON line in ([answer, fields of the gold]), one JSON line out ([correct, answer], or a string: the exception
that grading raised); first a line that says it is ready. It ends when its input is closed. It dies of what an answer
does to it: out of memory, or SIGALRM after SECONDS.
"""

import json
import os
import resource
import signal
import sys

from .answers import Gold, grade_answer
from .pool import OUT_OF_MEMORY


def main() -> None:
    memory_limit, seconds = int(sys.argv[1]), float(sys.argv[2])
    # What libraries print must not be read as verdicts, and what a hostile answer makes them print helps nobody.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stdout.fileno())
    # Whoever started us may have had the alarm ignored or blocked, and nothing else ends a late answer.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    if sys.platform == "linux":  # elsewhere the address space cannot be limited
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    grade_answer("\\sqrt{3}", Gold("\\frac{3}{\\sqrt{3}}"))  # the parser builds its tables once
    os.dup2(silence, sys.stderr.fileno())
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        answer, fields = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            reply = json.dumps(grade_answer(answer, Gold(*fields)))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except Exception as error:  # what SymPy raises on mathematics without meaning is no closed list
            reply = json.dumps(f"{type(error).__name__}: {' '.join(str(error).split())}")
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(reply, file=replies, flush=True)


if __name__ == "__main__":
    main()
