"""The private hooks of libraries that dc_trl leans on: all of them are watched here, and as they were.

When a release of TRL, transformers, PEFT, compressed-tensors or vLLM moves one, a test names it; its row in
tests/hooks.md says what breaks. A new hook needs an entry in HOOKS; `shape` says what to write there.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from functools import cache

import pytest

import dc_trl
from dc_trl.async_grpo import AsyncDCGRPOTrainer

from .helpers import ROOT
from .vllm_server import requires_vllm


LIBRARIES = {"accelerate", "compressed_tensors", "peft", "transformers", "trl", "vllm"}
STANDARD_LIBRARY = {
    *("_ActionsContainer", "_negative_number_matcher", "_option_string_actions"),
    *("_asdict", "_exit", "_fields", "_make", "_replace"),
}
VLLM = pytest.param("vllm", marks=requires_vllm)
NEEDS_VLLM_ITSELF = {"dc_trl.serving.cpu_reload"}


def table(text: str) -> dict[str, str]:
    """Names and what follows them; lines that are indented go on."""
    rows = (" ".join(row.split()) for row in re.split(r"\n(?! )", text.strip()))
    return dict(row.split(" ", 1) for row in rows)


# What each hook looked like when the code that leans on it was written; see `shape`.
HOOKS: dict[str, str] = table("""
trl.GRPOTrainer._generate_and_score_completions (self, inputs)
trl.GRPOTrainer._compute_loss (self, model, inputs)
trl.GRPOTrainer._get_per_token_logps_and_entropies (self, model, input_ids, attention_mask, logits_to_keep,
    batch_size, compute_entropy, compute_aux_loss, pixel_values, image_grid_thw, num_images, pixel_attention_mask,
    spatial_shapes, num_tiles, image_sizes, token_type_ids, mm_token_type_ids, image_position_ids)
trl.GRPOTrainer._get_train_sampler (self, dataset)
trl.GRPOTrainer._calculate_rewards (self, inputs, prompts, completions, completion_ids_list)
trl.GRPOTrainer._prepare_inputs (self, generation_batch)
trl.GRPOTrainer._step = 0
trl.GRPOTrainer._buffered_inputs = None
trl.GRPOTrainer._metrics = {'train': defaultdict(list), 'eval': defaultdict(list)}
trl.GRPOTrainer._pending_extra_logs = defaultdict(list)
trl.GRPOTrainer._pending_metrics = defaultdict(list)
trl.GRPOTrainer._tag_names list
trl.GRPOTrainer._generate_single_turn (self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images)
trl.GRPOTrainer._generate (self, prompts)
trl.GRPOTrainer._tokenize_prompts (self, prompts)
trl.GRPOTrainer._tokenizer = processing_class.tokenizer or = processing_class
trl.GRPOTrainer._last_loaded_step = -1
trl.experimental.async_grpo.AsyncGRPOTrainer class
trl.experimental.async_grpo.AsyncGRPOConfig class
trl.experimental.async_grpo.AsyncGRPOTrainer.compute_loss (self, model, inputs, return_outputs, num_items_in_batch)
trl.experimental.async_grpo.AsyncGRPOTrainer._sync_weight (self)
trl.experimental.async_grpo.AsyncGRPOTrainer._metrics = {'train': defaultdict(list), 'eval': defaultdict(list)}
trl.experimental.async_grpo.AsyncGRPOTrainer._tag_names list
trl.experimental.async_grpo.AsyncGRPOTrainer._save_checkpoint (self, model, trial)
trl.generation.vllm_generation.VLLMGeneration class
trl.generation.vllm_generation.VLLMGeneration.__init__ (self, model, accelerator, processing_class, mode,
    structured_outputs_regex, server_base_url, server_host, server_port, server_timeout, group_port,
    tensor_parallel_size, gpu_memory_utilization, max_model_length, max_num_seqs, enable_sleep_mode, model_impl,
    trust_remote_code, repetition_penalty, temperature, top_p, top_k, min_p, max_completion_length, logprobs,
    generation_kwargs)
trl.generation.vllm_generation.VLLMGeneration._init_vllm (self)
trl.generation.vllm_generation.VLLMGeneration.sync_weights (self)
trl.generation.vllm_generation.VLLMGeneration.generate (self, prompts, images, num_generations, profiler)
trl.generation.vllm_generation.VLLMGeneration._iter_named_params (self)
trl.generation.vllm_generation.VLLMGeneration._llm_weights_sleeping = False or = self.enable_sleep_mode or = True
trl.generation.vllm_client.VLLMClient class
trl.generation.vllm_client.VLLMClient.check_server (self, total_timeout, retry_interval)
trl.generation.vllm_client.VLLMClient.get_server_info (self)
trl.generation.vllm_client.VLLMClient.reset_prefix_cache (self)
trl.generation.vllm_client.VLLMClient._get (self, url, **kwargs)
trl.generation.vllm_client.VLLMClient._post (self, url, **kwargs)
trl.generation.vllm_client.VLLMClient.generate (self, prompts, features, n, repetition_penalty, temperature, top_p,
    top_k, min_p, max_tokens, logprobs, structured_outputs_regex, generation_kwargs)
trl.trainer.utils.get_config_model_id (config)
trl.trainer.utils.split_pixel_values_by_grid (batch)
trl.trainer.utils.unsplit_pixel_values_by_grid (batch)
trl.trainer.utils.pad (tensors, padding_value, padding_side, pad_to_multiple_of)
trl.trainer.utils.add_fused_lm_head (model, temperature, cast_lm_head_to_fp32, outputs)
transformers.Trainer._save_checkpoint (self, model, trial)
transformers.Trainer._init_training_state (self, max_steps, num_update_steps_per_epoch, num_train_epochs,
    resume_from_checkpoint, trial)
transformers.Trainer._load_from_checkpoint (self, resume_from_checkpoint, model)
transformers.Trainer._load_best_model (self)
transformers.PreTrainedModel._keep_in_fp32_modules_strict NoneType
transformers.Trainer._load_optimizer_and_scheduler (self, checkpoint)
transformers.Trainer._get_output_dir (self, trial)
transformers.Trainer._get_train_sampler (self, train_dataset)
transformers.Trainer._maybe_log_save_evaluate (self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval,
    start_time, learning_rate)
transformers.Trainer._get_grad_norm (self, model, grad_norm)
transformers.Trainer._save (self, output_dir, state_dict)
transformers.Trainer._push_from_checkpoint (self, checkpoint_folder)
transformers.trainer module
transformers.trainer.hf_api ()
transformers.trainer.TRAINING_ARGS_NAME str
transformers.trainer_utils.PREFIX_CHECKPOINT_DIR str
transformers.PreTrainedConfig._attn_implementation property
transformers.PreTrainedConfig._experts_implementation property
transformers.core_model_loading.revert_weight_conversion (model, state_dict)
transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts._apply_gate (self, gate_up_out)
peft.tuners.tuners_utils.BaseTunerLayer class
peft.tuners.lora.LoraLayer class
peft.tuners.lora.LoraLayer.kwargs = kwargs
peft.tuners.lora.Linear class
peft.tuners.lora.Embedding class
peft.tuners.lora.ParamWrapper class
torch.Tensor._version getset_descriptor
torch.cpu._init_amx ()
torch.ops.aten._scaled_mm (*args, **kwargs)
peft.utils.integrations.dequantize_module_weight (module)
peft.utils.other.ModulesToSaveWrapper class
peft.utils.other.ModulesToSaveWrapper.active_adapters property
peft.utils.other.AuxiliaryTrainingWrapper class
compressed_tensors.quantization.utils.calculate_qparams (min_vals, max_vals, quantization_args, global_scale)
compressed_tensors.quantization.utils.calculate_range (quantization_args, device)
compressed_tensors.quantization.utils.maybe_pad_tensor_for_block_quant (tensor, block_structure)
compressed_tensors.compressors.format.infer_module_format (module_type, scheme)
vllm._custom_ops module
vllm._custom_ops.create_onednn_scaled_mm (weight, weight_scales, output_type, dynamic_quant, use_azp,
    primitive_cache_size)
vllm.model_executor.layers.fused_moe.RoutedExperts class
vllm.model_executor.layers.fused_moe.RoutedExperts.quant_method = self._get_quant_method(self.layer_name,
    self.quant_config, self.moe_config)
vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase.moe_kernel = None
vllm.model_executor.layers.vocab_parallel_embedding.ParallelLMHead class
vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding class
vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding.quant_method = quant_method
vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod class
vllm.model_executor.layers.vocab_parallel_embedding.UnquantizedEmbeddingMethod.process_weights_after_loading (self,
    layer)
vllm.v1.attention.backends.cpu_attn._get_attn_isa (dtype, block_size, head_size, kv_cache_dtype)
vllm.v1.engine.core_client.InprocClient.shutdown (self, timeout)
vllm.v1.engine.core_client.InprocClient._finalizer = weakref.finalize(self, self.engine_core.shutdown)
vllm.v1.worker.cpu_worker.CPUWorker.reload_weights (self, *args, **kwargs)
vllm.v1.worker.cpu_worker.CPUWorker.get_model (self)
""")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


# --- what a hook looks like -----------------------------------------------------------------------------------------


def shape(name: str) -> str:
    """A hook in the installed libraries: a function's parameters, what a class sets an attribute to, or what it is."""
    try:
        hook = pkgutil.resolve_name(name)
    except ImportError:
        return "gone"
    except AttributeError:
        return " or ".join(f"= {value}" for value in values_set(name)) or "gone"
    if inspect.isclass(hook):
        return "class"
    if not callable(hook):
        return type(hook).__name__
    parameters = inspect.signature(hook).parameters.values()
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return f"({', '.join(stars.get(parameter.kind, '') + parameter.name for parameter in parameters)})"


def values_set(name: str) -> list[str]:
    """What a class sets an attribute of its objects to, as code: its constructor, or else its other methods."""
    owner, _, attribute = name.rpartition(".")
    try:
        cls = pkgutil.resolve_name(owner)
    except (ImportError, AttributeError):
        return []
    for source in (cls.__init__, cls):
        values = [
            ast.unparse(node.value)
            for node in ast.walk(source_tree(source))
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and f"self.{attribute}" in map(ast.unparse, getattr(node, "targets", None) or [node.target])
        ]
        if values:
            return list(dict.fromkeys(values))
    return []


@cache
def source_tree(thing) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(thing)))


@pytest.mark.parametrize("library", ["trl", "transformers", "peft", "compressed_tensors", "torch", VLLM])
def test_the_hooks_are_as_they_were(library):
    moved = {name: shape(name) for name in HOOKS if name.startswith(f"{library}.") and shape(name) != HOOKS[name]}
    assert not moved, "tests/hooks.md says what leans on each of these."


def test_a_hook_that_moves_is_noticed():
    assert shape("trl.GRPOTrainer._no_such_hook") == "gone"
    assert shape("trl.no_such_module.hook") == "gone"


# --- where the code leans on one ------------------------------------------------------------------------------------


def overridden() -> set[str]:
    """Return the private methods of libraries that classes of dc_trl define anew."""
    found = set()
    for module in pkgutil.walk_packages(dc_trl.__path__, "dc_trl."):
        if module.name in NEEDS_VLLM_ITSELF:
            continue
        for cls in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(cls) and cls.__module__ == module.name:
                bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in LIBRARIES]
                found |= {name for name in vars(cls) if is_private(name) and any(name in vars(b) for b in bases)}
    return found


def borrowed() -> set[str]:
    """Return the private names that the code uses or imports, and nowhere defines."""
    files = [file for folder in ("dc_trl", "scripts") for file in (ROOT / folder).rglob("*.py")]
    used, defined = set(), set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Attribute):
            (defined if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    return {name for name in used - defined - STANDARD_LIBRARY if is_private(name)}


def test_every_private_name_that_the_code_borrows_or_overrides_is_watched():
    found = overridden() | borrowed()
    assert {"_compute_loss", "_custom_ops"} <= found
    assert found - {hook.rpartition(".")[2] for hook in HOOKS} == set()


@pytest.mark.parametrize("trainer", [dc_trl.DCGRPOTrainer, AsyncDCGRPOTrainer])
def test_what_a_trainer_overrides_takes_what_its_base_does(trainer):
    for name, method in vars(trainer).items():
        base = getattr(super(trainer, trainer), name, None)
        if inspect.isfunction(method) and inspect.isfunction(base) and name != "__init__":
            ours, theirs = (inspect.signature(function).parameters for function in (method, base))
            takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in ours.values())
            assert takes_any or theirs.keys() <= ours.keys(), name


@pytest.mark.parametrize(
    ("change", "where", "words"),
    [
        ("6007", "trl.generation.vllm_generation.VLLMGeneration", ["lora_request", "load_lora_adapter"]),
        ("7085", "trl.generation.vllm_generation.VLLMGeneration", ["fp8"]),
        ("7120", "trl.experimental.async_grpo.AsyncGRPOConfig", ["importance_sampling"]),
    ],
)
def test_trl_has_not_brought_what_ours_goes_for(change, where, words):
    """hooks.md says what of ours goes with each; for 7179, `test_gradients_are_trls` compares the tokens read."""
    module, _, name = where.rpartition(".")
    source = inspect.getsource(getattr(importlib.import_module(module), name)).lower()
    brought = [word for word in words if word in source]
    assert not brought, f"TRL has {', '.join(brought)} of its change {change}: read its paragraph in tests/hooks.md"
