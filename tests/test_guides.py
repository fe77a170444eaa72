"""The guides' examples: what they show is run as it stands, and what they say of it is worked out another way."""

import copy
import re
import subprocess
import sys

import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

from dc_trl.command.arguments import RunArguments
from dc_trl.command.serve import make_parser
from dc_trl.files import read_yaml
from dc_trl.quantization.tensors import policy_tensors
from dc_trl.serving.fit import reloadable

from .helpers import (
    ROOT,
    code_blocks,
    commands_in,
    logged,
    look_like_root,
    plain_logps,
    refuses,
    tiny_model,
)


DOCS = ROOT / "docs"
END, ASSISTANT = 1, 4  # ids of <|end|> and <|assistant|> in the tiny model's tokenizer


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A directory that looks like the project's root."""
    look_like_root(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- the aligned forward in a loop of one's own


def test_the_example_has_the_same_gradient_with_gradient_checkpointing():
    (code,) = code_blocks((DOCS / "aligned.md").read_text(), "python")
    ids, gradients = torch.arange(20, 40).view(2, 10), []
    for checkpointing in (False, True):
        policy = tiny_model().train()
        if checkpointing:
            policy.gradient_checkpointing_enable()
        exec(code, {"policy": policy, "batch": {"input_ids": ids, "labels": ids}})
        gradients.append(policy.model.layers[0].mlp.down_proj.weight.grad)
    assert torch.equal(*gradients)


# --- tools


def run_tools(**edits):
    """The example of docs/rewards.md, with settings replaced; its trainer."""
    (code,) = (block for block in code_blocks((DOCS / "rewards.md").read_text(), "python") if "Examiner" in block)
    for name, value in ({"max_steps": "1", "per_device_train_batch_size": "8"} | edits).items():
        code, found = re.subn(rf"\b{name}=[^,]+,", f"{name}={value},", code)
        assert found == 1, name
    names = {}
    exec(compile(code, "docs/rewards.md", "exec"), names)
    return names["trainer"]


def written_by_the_tool(completion):
    """Which tokens of a completion are the tool's answer, read off the tokens alone.

    They stand between the end of a turn of the policy and the mark that begins its next one.
    """
    found, of_tool = [], False
    for token in completion:
        found.append(of_tool)
        of_tool = token == END if not of_tool else token != ASSISTANT
    return found


def test_what_is_scored_of_a_run_with_a_tool(workplace, seen_by_the_loss, capsys):
    trainer = run_tools(learning_rate="0.0")
    (inputs,) = seen_by_the_loss
    mask = inputs["completion_mask"].bool()
    rows = [row[keep].tolist() for row, keep in zip(inputs["completion_ids"], mask, strict=True)]
    of_tool = [written_by_the_tool(row) for row in rows]
    texts = {
        trainer.processing_class.decode([token for token, of in zip(row, ofs, strict=True) if of])
        for row, ofs in zip(rows, of_tool, strict=True)
    }
    answer = r"<\|tool\|>(right|wrong)<\|end\|><\|assistant\|>"
    assert all(re.fullmatch(rf"({answer})*", text) for text in texts)
    assert any(texts)

    # TRL's mask is this one.
    for row, keep, ofs in zip(inputs["tool_mask"], mask, of_tool, strict=True):
        assert row[keep].tolist() == [int(not of) for of in ofs]

    # δ̄ and the loss, by hand, from a forward pass over each conversation by itself.
    means, losses = [], []
    for index, (row, ofs) in enumerate(zip(rows, of_tool, strict=True)):
        prompt = inputs["prompt_ids"][index][inputs["prompt_mask"][index].bool()].tolist()
        train_logps = plain_logps(trainer.model, prompt, row)
        infer_logps = inputs["sampling_per_token_logps"][index][mask[index]]
        delta = (train_logps.exp() - infer_logps.exp()).abs()
        scored = ~torch.tensor(ofs)
        # Their log-probability is TRL's 0, which no policy has: counted, they would be most of δ̄.
        assert (infer_logps[~scored] == 0).all()
        means.append(delta[scored].mean())
        theirs = inputs["advantages"][index][mask[index]][~scored]
        advantages = theirs[0] - 0.1 * delta  # λ_0
        losses.append(-advantages[scored].mean())
        assert torch.allclose(inputs["advantages"][index][mask[index]][scored], advantages[scored], atol=1e-5)
        assert (theirs == theirs[0]).all()  # the tool's tokens pay nothing
    assert logged(trainer, "discrepancy/mean")[0] == pytest.approx(torch.stack(means).mean().item(), rel=1e-3)
    assert logged(trainer, "loss")[0] == pytest.approx(torch.stack(losses).mean().item(), abs=1e-5)

    # What the page says of the metrics.
    lengths = [ofs.count(False) for ofs in of_tool]
    assert logged(trainer, "completions/mean_length")[0] == pytest.approx(sum(lengths) / len(lengths))
    calls = sum(len(re.findall(r"\\boxed\{[^}]*\}", trainer.processing_class.decode(row))) for row in rows)
    assert 0 < logged(trainer, "tools/call_frequency")[0] <= calls / len(rows)
    assert logged(trainer, "rewards/Examiner/mean") == logged(trainer, "reward")
    with refuses(ValueError, "deployed_rewards", "tools", "evaluate()"):
        trainer.deployed_rewards(list(trainer.train_dataset)[:2])
    assert "submit" in capsys.readouterr().out  # the table of completions has the calls


def test_tools_under_truncated_sampling(workplace, seen_by_the_loss):
    trainer = run_tools(learning_rate="1e-4, top_p=0.9")
    (inputs,) = seen_by_the_loss
    of_tool = inputs["completion_mask"].bool() & ~inputs["tool_mask"].bool()
    assert of_tool.any()
    assert (inputs["kept_counts"][of_tool] == 0).all()
    assert 0 < logged(trainer, "discrepancy/mean")[0] < 0.05


# --- LoRA and QLoRA


@pytest.mark.parametrize("load", [{"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, {"load_in_8bit": True}])
def test_a_packed_base_is_deployed_as_it_computes(tmp_path, load):
    """Against bitsandbytes' own dequantization plus s·B·A, also after an evaluation, which lays them out anew."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from dc_trl.quantization.checkpoint import CheckpointWriter

    quantization = BitsAndBytesConfig(**load, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = tiny_model(quantization_config=quantization)
    adapter = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    policy = get_peft_model(base, adapter)
    expected = {}
    for name, module in base.named_modules():
        if not isinstance(module, bitsandbytes.nn.Linear4bit | bitsandbytes.nn.Linear8bitLt):
            continue
        weight, owner = module.weight, policy.get_base_model().get_submodule(name.removesuffix(".base_layer"))
        if "load_in_4bit" in load:
            unpacked = bitsandbytes.functional.dequantize_4bit(weight.data.clone(), copy.deepcopy(weight.quant_state))
        else:
            unpacked = weight.data * weight.SCB[:, None] / 127
        if name.endswith(".base_layer"):
            b, a = owner.lora_B["default"].weight, owner.lora_A["default"].weight
            unpacked = unpacked + 6 / 4 * b.detach() @ a.detach()
        expected[f"{name.removesuffix('.base_layer')}.weight"] = unpacked.float()
    assert len(expected) == 4 * 7
    deployed = dict(policy_tensors(policy))
    assert all(torch.allclose(deployed[name].float(), tensor, atol=1e-6) for name, tensor in expected.items())
    with torch.no_grad():
        policy.eval()(input_ids=torch.arange(10, 40)[None])
    again = dict(policy_tensors(policy))
    # Its layout for an evaluation on a CPU has the scale of each block in bfloat16.
    assert all(torch.allclose(again[name], deployed[name], rtol=2**-7, atol=1e-3) for name in expected)

    # What is written for a server is a plain checkpoint, and not bitsandbytes'.
    CheckpointWriter(policy, "bf16").write(again.items(), tmp_path / "deployment")
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "deployment", dtype=torch.float32)
    assert not hasattr(served.config, "quantization_config")
    for name, tensor in served.state_dict().items():
        if name in expected:
            assert torch.equal(tensor, again[name].bfloat16().float()), name


# --- SLURM


SBATCH_FILES = sorted((ROOT / "configs" / "slurm").glob("*.sbatch"))


def programs_in(text):
    """The commands of a shell script that run programs of the project, as lists of words from the program on."""
    for words in commands_in(text):
        for start in range(len(words)):
            if words[start : start + 2] in (["accelerate", "launch"], ["dc-trl", "serve"]):
                yield [word for word in words[start:] if word not in ("&", "$@")]
                break


def commands_of(file):
    text = file.read_text()
    inner = re.findall(r"bash -c '\n(.*?)'", text, re.DOTALL)
    return [
        command
        for part in (re.sub(r"bash -c '\n.*?'", "", text, flags=re.DOTALL), *inner)
        for command in programs_in(part)
    ]


@pytest.mark.parametrize("file", SBATCH_FILES, ids=lambda file: file.stem)
def test_the_commands_of_a_slurm_file_are_read_by_the_programs(file, monkeypatch, tmp_path):
    subprocess.run(["bash", "-n", file], check=True, timeout=60)
    lines = file.read_text().splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[: last + 1])  # sbatch stops reading at the first command
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(.+)$", file.read_text(), re.MULTILINE))
    nodes, gpus = int(directives["nodes"]), int(directives["gpus-per-node"])
    serving, training = sorted(commands_of(file), reverse=True)
    monkeypatch.setattr(sys, "argv", serving[1:])
    server = make_parser().parse_args(serving[2:])

    values = {"$SLURM_PROCID": "1", "$FIRST": "10.0.0.2", "$SERVER": "http://10.0.0.1:8000", "$WEIGHTS": str(tmp_path)}
    args = launch_command_parser().parse_args([values.get(word, word) for word in training[2:]])
    assert args.training_script == "scripts/train.py"
    assert (ROOT / args.config_file).is_file()
    _, config, *overrides = args.training_script_args
    settings = read_yaml(ROOT / config) | {"use_cpu": True, "bf16": False}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    run = RunArguments.parse(["--config", str(tmp_path / "config.yaml"), *overrides])

    # Both sides mean the same model, in the same scheme and length, and the GPUs are enough.
    assert server.model == run.model.model_name_or_path
    assert server.scheme == run.trainer.deployment_scheme
    assert server.max_model_len == run.trainer.vllm_max_model_length
    parallel = int(server.options[server.options.index("--tensor-parallel-size") + 1])
    launch = yaml.safe_load((ROOT / args.config_file).read_text())
    if nodes == 1:
        devices = re.findall(r"CUDA_VISIBLE_DEVICES=([\d,]+)", file.read_text())
        taken = [int(device) for group in devices for device in group.split(",")]
        assert sorted(taken) == list(range(gpus))
        assert [len(group.split(",")) for group in devices] == [
            parallel,
            args.num_processes or launch["num_processes"],
        ]
    else:
        assert (args.num_machines, args.num_processes) == (nodes - 1, (nodes - 1) * gpus)
        assert parallel <= gpus
        assert run.trainer.vllm_server_base_url == values["$SERVER"]
    # A mixture gets a kernel that survives new weights, without a word in the file.
    shape = AutoConfig.from_pretrained(
        ROOT / "configs" / "models" / f"{server.model[5:].replace('-', '_').lower()}.json"
    )
    assert reloadable(server.scheme, shape) == ({"moe_backend": "triton"} if "A3B" in server.model else {})
    # A step of the job has the CPUs that the job asks for.
    steps = re.findall(r"^srun (.*)", file.read_text().replace("\\\n", " "), re.MULTILINE)
    assert len(steps) == (1 if nodes == 1 else 2)
    assert all('--cpus-per-task="$SLURM_CPUS_PER_TASK" ' in step for step in steps)
    assert int(directives["cpus-per-task"]) >= 8 * gpus
    # The launcher lets the processes live until shortly before Slurm kills the job.
    grace = int(re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", file.read_text())[1])
    assert 300 < grace < int(directives["signal"].partition("@")[2])
