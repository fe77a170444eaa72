"""README, tour and task pages: a reader runs their blocks in order, as they stand, with a tiny model and few steps."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec

import httpx
import psutil
import pytest
import yaml

from dc_trl.files import read_yaml

from .helpers import ROOT, look_like_root, read_json, succeed, takes_minutes
from .vllm_server import requires_vllm, wait_until_gone


README = (ROOT / "README.md").read_text()
PAGES = {
    name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("tour", "serve_quantized", "collapsed", "which_one")
}
OUTPUTS = {"model.safetensors", "run.png", "history.jsonl", "summary.json", "deployment"}
SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
TINY = {"MODEL": "dc_trl/assets/tiny_qwen3", "DATA": "problems.jsonl"}
# Appended to commands, so that they end soon.
SHORT = {
    "train": "--per_device_train_batch_size 8 --eval_size 8 --per_device_eval_batch_size 8 --save_steps 1",
    "calibrate": "--prompts 8 --samples 2 --max_tokens 16",
    "evaluate": "--limit 8 --samples 2 --max_tokens 32",
    "doctor": "--no_servers --schemes fp8",
    "dc-trl serve": "--max_model_len 512 --port PORT",
    "vllm serve": "--max-model-len 512 --port PORT --enforce-eager",
}
# The same for a run of configs/own_model.yaml, which is meant for a GPU.
OWN = "--use_cpu true --bf16 false --gradient_accumulation_steps 1 --max_completion_length 32"


class Reader:
    """Runs what stands as bash, Python or YAML on a page, in a folder that looks like the project's root.

    `text` needs a GPU or the Hub, as the page says. A server is left running for the block that follows.

    Args:
        folder: where it works.
        train: further options of each training.
        values: what the reader puts in for words of the pages.
    """

    def __init__(self, folder, train="", **values):
        look_like_root(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        self.folder, self.values = folder, {"8000": self.port, **values}
        self.short = SHORT | {"train": f"{SHORT['train']} {train}"}
        self.output, self.trainings = "", 0
        binaries = os.path.dirname(sys.executable)
        self.environment = os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}", "VLLM_CPU_KVCACHE_SPACE": "1"}

    def read(self, page):
        serving = []
        for language, text in re.findall(r"^```(bash|python|yaml)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
            for word, value in self.values.items():
                text = re.sub(rf"\b{word}\b", value, text)
            if language == "yaml":
                settings = read_yaml(ROOT / "configs" / "own_model.yaml") | yaml.safe_load(text)
                (self.folder / "with.yaml").write_text(yaml.safe_dump(settings))
                text = "dc-trl train --config with.yaml --output_dir runs/with\n"
            if language != "python":
                text = self.shortened(text)
            if re.match("dc-trl serve|vllm serve", text):
                serving = self.serve(text)
                continue
            if not text.startswith("make "):
                self.run([sys.executable, "-c", text] if language == "python" else ["bash", "-ec", text])
            for process in serving:
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
            wait_until_gone(serving)
            serving = []

    def shortened(self, text):
        lines = []
        for line in text.replace("\\\n", " ").splitlines():
            line = re.sub(r" +# .*", "", line)
            if command := re.match(r"(?:accelerate.* -m dc_trl|dc-trl) (train|calibrate|evaluate|doctor)", line):
                line += f" {self.short[command[1]]}"
            elif command := re.match(r"dc-trl serve|vllm serve", line):
                line += f" {self.short[command[0]].replace('PORT', self.port)}"
            if re.search(r"(dc-trl|dc_trl) train", line):
                self.trainings += 1
                line += f" --max_steps {self.trainings}"  # one that goes on trains further
            lines.append(line)
        return "\n".join(lines)

    def run(self, command):
        done = succeed(command, cwd=self.folder, env=self.environment, timeout=900)
        self.output += done.stdout + done.stderr

    def serve(self, line):
        """Starts a server, and returns its processes once it is up."""
        with open(self.folder / "serve.out", "w") as output:
            process = psutil.Popen(
                shlex.split(line), cwd=self.folder, env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )
        end = time.monotonic() + 300
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{self.port}/health").status_code == 200:
                    return [process, *process.children(recursive=True)]
            said = (self.folder / "serve.out").read_text()[-3000:]
            assert process.poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.5)


@pytest.mark.long
@pytest.mark.timeout(1800)
@requires_vllm
def test_the_tour(tmp_path):
    reader = Reader(tmp_path)
    reader.read(PAGES["tour"])
    for name in ("quickstart", "problems", "brevity", "two-processes", "quickstart-vllm"):
        assert {*os.listdir(tmp_path / "runs" / name)} >= OUTPUTS
    page = (tmp_path / "runs" / "report.html").read_text()
    assert "quickstart" in page
    assert page.count("<figure") > 3
    assert "quantization_config" in read_json(tmp_path / "runs" / "quickstart-vllm" / "deployment" / "config.json")
    assert {*os.listdir(tmp_path / "runs" / "evaluation")} == {"bf16", "fp8"}
    assert (tmp_path / "runs" / "calibration" / "calibration.json").is_file()
    for words in (
        "vLLM is up at http://127.0.0.1:",
        "arithmetic avg@2",
        "second is",
        "proposed ε",
        "bottom line: trains",
    ):
        assert words in reader.output
    # Their processes begin in its directory, and others may serve beside this test.
    wait_until_gone([one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(tmp_path)], timeout=20)


@takes_minutes
@pytest.mark.skipif(find_spec("vllm") is None, reason="its servers, beside those of the tests marked vllm, are vLLM's")
def test_who_serves_a_quantized_model(tmp_path):
    rows = [f'{{"prompt": "{n}+{n}=?", "question": "{n}+{n}=?", "answer": "#### {2 * n}"}}\n' for n in range(10, 50)]
    (tmp_path / "problems.jsonl").write_text("".join(rows))
    reader = Reader(tmp_path, OWN, **TINY, gsm8k="gsm8k=problems.jsonl")
    reader.short["train"] += f" --vllm_server_base_url http://127.0.0.1:{reader.port}"
    reader.read(PAGES["serve_quantized"])
    assert {*os.listdir(tmp_path / "runs" / "own-model")} >= OUTPUTS
    for words in ("floor", "gsm8k avg@2", "evidence and no proof"):
        assert words in reader.output


@takes_minutes
def test_whose_run_has_collapsed(tmp_path):
    reader = Reader(
        tmp_path, **{"CONFIG.yaml": "configs/quickstart.yaml", "checkpoint-120": "checkpoint-1", "RUN": "run"}
    )
    reader.run(
        ["bash", "-ec", reader.shortened("dc-trl train --config quickstart --weight_sync_steps 2 --output_dir run")]
    )
    reader.read(PAGES["collapsed"])
    assert (tmp_path / "run" / "report.html").is_file()
    assert read_json(tmp_path / "runs" / "second" / "summary.json")["steps"] == 2


@takes_minutes
def test_what_to_set_for_a_lag(tmp_path):
    (tmp_path / "problems.jsonl").write_text(
        "".join(f'{{"question": "{n}+{n}=?", "answer": "{2 * n}"}}\n' for n in range(40))
    )
    given = {"model_name_or_path": TINY["MODEL"], "dataset_name": "problems.jsonl", "dataset_config": "default"}
    reader = Reader(tmp_path, f"{OWN} {' '.join(f'--{name} {value}' for name, value in given.items())}")
    reader.read(PAGES["which_one"])
    settings = read_json(tmp_path / "runs" / "with" / "settings.json")
    assert (settings["recipe"], settings["weight_sync_steps"]) == ("lag", 8)


@pytest.mark.long
@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.skipif(not (ROOT / "runs" / "real_model").exists(), reason="make real-model makes the model")
def test_the_readme(tmp_path):
    reader = Reader(tmp_path, **{SMOL: str(ROOT / "runs" / "real_model")})
    reader.read(README)
    assert "discrepancy/mean" in reader.output
    assert (tmp_path / "runs" / "example" / "deployment" / "model.safetensors").is_file()


def test_make_targets():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make (?:[A-Z]+=\S* )*([a-z-]+)", README + PAGES["tour"], re.MULTILINE))
    assert {"quickstart", "quickstart-vllm", "test", "install"} <= targets
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]


def test_a_block_that_no_test_runs_says_why():
    for name, page in PAGES.items():
        before, *blocks = page.split("\n```text\n")
        for block in blocks:
            assert re.search("GPU|Hub", before.rpartition("\n\n")[2] + block.partition("\n```")[0]), (name, block)
            before = block
