"""What it costs the main process to read a server's answers to a rollout, and every process to take its share.

python scripts/benchmarks/answers.py --prompts 16

The server is standin_server.py beside this file. The seconds are processor time of this process, of which the server's
is none. The answers of prompts that have ended are read while the others are sampled; the rest comes after the last
one. The collector is Python's garbage collector, which rests during the rollouts of a run.
"""

import gc
import pickle
import time

from overlap import server
from steps import peak, reset_peak, resident

from dc_trl.records.tables import print_table
from dc_trl.serving.client import ServerClient
from dc_trl.serving.several import meet_servers
from dc_trl.settings.command_line import OptionParser


class Client(ServerClient):
    """Knows how long it took to read and check the answers."""

    def _complete(self, requests):
        begin = time.process_time()
        choices = super()._complete(requests)
        self.seconds = time.process_time() - begin
        return choices


def measured(client: Client, prompts: list[list[int]], options: dict) -> list[str]:
    reset_peak()
    before, begin = resident(), time.process_time()
    answer = client.generate(prompts, **options)
    generated = time.process_time() - begin
    sent = pickle.dumps(tuple(answer.values()))
    pickled = time.process_time() - begin - generated
    memory = peak() - before
    del answer
    begin = time.process_time()
    taken = pickle.loads(sent)
    seconds = [client.seconds, generated - client.seconds, pickled, time.process_time() - begin]
    assert len(taken[1]) == len(prompts) * options["n"]
    return [*(f"{value:.1f}" for value in seconds), f"{len(sent) / 1e6:.0f}", f"{memory / 1e9:.2f}"]


def main() -> None:
    parser = OptionParser(__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--completion_length", type=int, default=8192)
    args = parser.parse_args()
    prompts = [[20 + number % 100] * 200 for number in range(args.prompts)]
    options = {"n": args.samples, "max_tokens": args.completion_length, "logprobs": 0}
    rows = []
    with server() as url:
        (client,) = meet_servers([url])
        client.__class__ = Client
        for collector, switch in {"rests": gc.disable, "runs": gc.enable}.items():
            switch()
            rows.append([collector, *measured(client, prompts, options)])
            gc.collect()
    head = ["collector", "read and check, s", "TRL's lists, s", "pickle, s", "unpickle, s", "sent, MB", "peak, GB"]
    print_table(head, rows, f"{args.prompts} × {args.samples} × {args.completion_length} tokens")


if __name__ == "__main__":
    main()
