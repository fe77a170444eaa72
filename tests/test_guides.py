"""The guides' examples: what they show is run as it stands, and what they say of it is worked out another way."""

import re

import pytest
import torch

from .helpers import ROOT, logged


DOCS = ROOT / "docs"
END, ASSISTANT = 1, 4  # ids of <|end|> and <|assistant|> in the tiny model's tokenizer


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / name).read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A directory that looks like the project's root."""
    for name in ("configs", "dc_trl", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- tools


def run_tools(**edits):
    """The example of docs/tools.md, with settings replaced; its trainer."""
    code = blocks("tools.md", "python")[0]
    for name, value in ({"max_steps": "1", "per_device_train_batch_size": "8"} | edits).items():
        code, found = re.subn(rf"\b{name}=[^,]+,", f"{name}={value},", code)
        assert found == 1, name
    names = {}
    exec(compile(code, "docs/tools.md", "exec"), names)
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
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1]
        train_logps = logits.log_softmax(-1).gather(1, torch.tensor(row).unsqueeze(1)).squeeze(1)
        infer_logps = inputs["sampling_per_token_logps"][index][mask[index]]
        delta = (train_logps.exp() - infer_logps.exp()).abs()
        scored = ~torch.tensor(ofs)
        # Their log-probability is TRL's 0, which no policy has: counted, they would be most of δ̄.
        assert (infer_logps[~scored] == 0).all()
        means.append(delta[scored].mean())
        advantages = inputs["trajectory_advantages"][index] - 0.1 * delta  # λ_0
        losses.append(-advantages[scored].mean())
        assert torch.allclose(inputs["advantages"][index][mask[index]][scored], advantages[scored], atol=1e-5)
        # The tool's tokens pay nothing.
        theirs = inputs["advantages"][index][mask[index]][~scored]
        assert (theirs == inputs["trajectory_advantages"][index]).all()
    assert logged(trainer, "discrepancy/mean")[0] == pytest.approx(torch.stack(means).mean().item(), rel=1e-3)
    assert logged(trainer, "loss")[0] == pytest.approx(torch.stack(losses).mean().item(), abs=1e-5)

    # What the page says of the metrics.
    lengths = [ofs.count(False) for ofs in of_tool]
    assert logged(trainer, "completions/mean_length")[0] == pytest.approx(sum(lengths) / len(lengths))
    calls = sum(len(re.findall(r"\\boxed\{[^}]*\}", trainer.processing_class.decode(row))) for row in rows)
    assert 0 < logged(trainer, "tools/call_frequency")[0] <= calls / len(rows)
    assert logged(trainer, "rewards/Examiner/mean") == logged(trainer, "reward")
    with pytest.raises(ValueError, match=r"sample one turn, and this trainer has tools"):
        trainer.deployed_rewards(list(trainer.train_dataset)[:2])
    assert "submit" in capsys.readouterr().out  # the table of completions has the calls


def test_tools_under_truncated_sampling(workplace, seen_by_the_loss):
    trainer = run_tools(learning_rate="1e-4, top_p=0.9")
    (inputs,) = seen_by_the_loss
    of_tool = inputs["completion_mask"].bool() & ~inputs["tool_mask"].bool()
    assert of_tool.any()
    assert (inputs["kept_counts"][of_tool] == 0).all()
    assert 0 < logged(trainer, "discrepancy/mean")[0] < 0.05


def test_a_function_as_a_tool_and_a_template_that_trl_knows(workplace, tokenizer):
    import trl
    from transformers import AutoTokenizer

    from dc_trl import DCGRPOTrainer

    from .helpers import distinct_characters, make_config, make_model, make_prompts

    names = {}
    exec(blocks("tools.md", "python")[1], names)
    assert names["calculate"]("23+45") == "68"
    tokenizer = AutoTokenizer.from_pretrained("dc_trl/assets/tiny_qwen3")
    templates = ROOT.joinpath(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text()
    prompts = make_prompts(8).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = DCGRPOTrainer(
        make_model(max_position_embeddings=2048),
        lambda completions, **kwargs: distinct_characters([turns[-1]["content"] for turns in completions]),
        make_config(workplace / "run", deployment_scheme="bf16", max_steps=1),
        train_dataset=prompts,
        processing_class=tokenizer,
        tools=[names["calculate"]],
    )
    trainer.train()
    (prompt, *_) = trainer._tokenize_prompts([prompts[0]["prompt"]])[0]
    shown = tokenizer.decode(prompt)
    assert '"name": "calculate"' in shown
    assert "Computes a sum of whole numbers." in shown
    assert logged(trainer, "tools/call_frequency") == [0.0]
