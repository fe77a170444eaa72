"""What it costs to check a server's answer before it is believed, beside what its tokens take to sample.

python scripts/benchmarks/answers.py [--completions 512] [--tokens 1024] [--named 0]

Prints the seconds of processor time that `require_rollout` takes for one generation batch, those that reading its JSON
takes, and the rate of sampling up to which the check is below 1 % of the time of the batch.
"""

import argparse
import json
import random
from time import process_time

from dc_trl.serving.answers import Bounds, require_rollout


VOCABULARY = 151_936


def batch(completions: int, tokens: int, named: int) -> tuple[dict, str]:
    """A request of 64 tokens for each prompt, eight completions each, and the answer to it as vLLM sends it."""
    draw = random.Random(0)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(64)] for _ in range(completions // 8)]
    choices = []
    for index in range(len(prompts) * 8):
        ids = [draw.randrange(VOCABULARY) for _ in range(tokens)]
        names = [f"token_id:{token}" for token in ids]
        values = [-draw.uniform(0.5, 6) for _ in ids]
        tops = []
        for name, value in zip(names, values, strict=True):
            others = {f"token_id:{draw.randrange(VOCABULARY)}": -draw.uniform(5, 9) for _ in range(named)}
            tops.append(others | {name: value})
        logprobs = {"text_offset": [0] * tokens, "token_logprobs": values, "tokens": names, "top_logprobs": tops}
        choice = {"index": index, "text": "", "token_ids": ids, "finish_reason": "length", "logprobs": logprobs}
        choices.append(choice | {"prompt_token_ids": prompts[index // 8]})
    sampling = {"n": 8, "max_tokens": tokens, "logprobs": named}
    request = {"prompt": prompts, "return_token_ids": True, "return_tokens_as_token_ids": True} | sampling
    return request, json.dumps({"choices": choices})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument(
        "--named", type=int, default=0, help="most probable tokens at each position, as top_k has them"
    )
    args = parser.parse_args()
    request, text = batch(args.completions, args.tokens, args.named)
    seconds = {"json": [], "check": []}
    for _ in range(5):
        begin = process_time()
        answer = json.loads(text)
        middle = process_time()
        require_rollout(request, answer, "here", Bounds(VOCABULARY, 32768))
        seconds["json"].append(middle - begin)
        seconds["check"].append(process_time() - middle)
    check, read = min(seconds["check"]), min(seconds["json"])
    tokens = args.completions * args.tokens
    print(f"{tokens:,} tokens: {check:.3f} s to check, {read:.3f} s to read the JSON")
    print(f"below 1 % of a batch up to {tokens / check / 100:,.0f} sampled tokens a second")


if __name__ == "__main__":
    main()
