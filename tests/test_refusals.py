"""Every refusal of a setting, in one table: what is set, and what the refusal names, before anything expensive.

A row has settings in YAML, and behind the bar what has to be in the message: fields with their values, and the fields,
values and names of the remedy. The wording is free. `tests/test_gate.py` has what is refused of models, data sets and
rewards.
"""

import json
import re
from types import SimpleNamespace
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig
from trl import ModelConfig

from dc_trl import DCGRPOConfig, DCGRPOTrainer
from dc_trl.async_grpo import AsyncDCGRPOConfig
from dc_trl.command import call
from dc_trl.command.arguments import ARGUMENTS
from dc_trl.settings.contradictions import CONTRADICTIONS, NO_EFFECT
from dc_trl.settings.fields import TRL_ALLOWED, own_fields, require_fields

from .helpers import TINY_MODEL, distinct_characters, make_model, refuses


# So that the machine of the tests has no part in what is refused.
MACHINE = {"use_cpu": True, "bf16": False, "report_to": "none"}

# Of a `DCGRPOConfig`, in a file of the command too.
OF_A_RUN = """
# --- a value that its field does not take
recipe: gae | recipe='gae' 'trl' 'paper' 'lag' 'format'
constraint: dual | constraint='dual' 'none' 'static' 'lagrangian'
constraint_target: engine | constraint_target='engine' 'all' 'lag'
discrepancy_measure: kl | discrepancy_measure='kl' 'prob_diff' 'prob_ratio' 'log_prob'
discrepancy_level: word | discrepancy_level='word' 'token' 'sequence'
batch_reduction: batch | batch_reduction='batch' 'sequence' 'token'
rollout_correction_target: some | rollout_correction_target='some' 'all' 'lag' 'engine'
lora_deployment: both | lora_deployment='both' 'merged' 'adapter'
weight_sync: ssh | weight_sync='ssh' 'auto' 'nccl' 'checkpoint'
loss_type: ppo | loss_type='ppo' 'grpo' 'dapo' 'vespo'
importance_sampling_level: word | importance_sampling_level='word' 'token' 'sequence'
scale_rewards: some | scale_rewards='some' 'group' 'batch' 'none'
multi_objective_aggregation: max | multi_objective_aggregation='max' 'sum_then_normalize'
vllm_importance_sampling_mode: x | vllm_importance_sampling_mode='x' 'token_truncate' 'sequence_mask'
train_through_quantization: activations | train_through_quantization='activations' 'all' 'weights'
max_completion_length: 0 | max_completion_length=0 whole 1
per_device_train_batch_size: 0 | per_device_train_batch_size=0 whole 1
gradient_accumulation_steps: 0 | gradient_accumulation_steps=0 whole 1
num_iterations: 0 | num_iterations=0 whole 1
vllm_max_model_length: 0 | vllm_max_model_length=0 whole 1
save_total_limit: 0 | save_total_limit=0 whole 1
learning_rate: -1.0 | learning_rate=-1.0 finite 0
learning_rate: .nan | learning_rate=nan finite 0
learning_rate: null | learning_rate=None finite 0
weight_sync: null | weight_sync=None 'auto' 'nccl'
weight_decay: -1.0 | weight_decay=-1.0 finite 0
beta: -1.0 | beta=-1.0 finite 0
top_p: 1.5 | top_p=1.5 0 1
vllm_gpu_memory_utilization: 0.0 | vllm_gpu_memory_utilization=0.0 0 1
temperature: 0.0 | temperature=0.0 above
num_generations: 1 | num_generations=1 whole 2
epsilon: -0.1 | epsilon=-0.1 0
discrepancy_margin: -0.1 | discrepancy_margin=-0.1 0
dual_window: 0 | dual_window=0 whole 1
lambda_init: -1.0 | lambda_init=-1.0 0
lambda_lr: -1.0 | lambda_lr=-1.0 0
lambda_lr: .inf | lambda_lr=inf finite
lambda_min: -1.0 | lambda_min=-1.0 0
lambda_max: -1.0 | lambda_max=-1.0 0
rollout_correction_max: 0.0 | rollout_correction_max=0.0 above
rollout_correction_min: 1.5 | rollout_correction_min=1.5 0 1
score_centering_top_k: 0 | score_centering_top_k=0 whole 1
weight_sync_steps: 0 | weight_sync_steps=0 whole 1
vllm_request_timeout: 0.0 | vllm_request_timeout=0.0 above
vllm_max_retries: -1 | vllm_max_retries=-1 whole 0
reward_weights: [.nan] | reward_weights=nan finite
discrepancy_tolerance: high | discrepancy_tolerance='high' number
discrepancy_tolerance: [1] | discrepancy_tolerance=[1] number
discrepancy_tolerance: '-1' | discrepancy_tolerance=-1 0
deployment_scheme: fp16 | deployment_scheme='fp16' 'fp8_block' 'int3' '+fp8_kv'
deployment_scheme: int3, use_vllm: true | deployment_scheme='int3' 'fp8' use_vllm=False
deployment_scheme: int2, push_to_hub: true | deployment_scheme='int2' 'fp8' push_to_hub=False
save_strategy: sometimes | save_strategy='sometimes' 'steps' 'epoch'
optim: adamm | optim='adamm' 'adamw_torch'
max_steps: [1] | max_steps=[1] list whole
report_to: nonesuch | report_to='nonesuch' 'wandb' 'trackio'
report_to: azure_ml | report_to='azure_ml' pip 'none'
vllm_server_port: 70000 | vllm_server_port=70000 whole 65535
vllm_group_port: 0 | vllm_group_port=0 whole 1
fp16: true, bf16: true | fp16=True bf16=True
seed: -1 | seed=-1 whole 0
data_seed: -1 | data_seed=-1 whole 0
steps_per_generation: 0 | steps_per_generation=0 whole 1
vllm_tensor_parallel_size: 0 | vllm_tensor_parallel_size=0 whole 1
vllm_server_timeout: -1.0 | vllm_server_timeout=-1.0 finite 0
accelerator_config: '{a' | accelerator_config='{a' dictionary JSON
max_grad_norm: -1.0 | max_grad_norm=-1.0 number 0
epsilon_high: -1.0 | epsilon_high=-1.0 number 0
delta: -1.0 | delta=-1.0 number 0
adam_epsilon: -1.0 | adam_epsilon=-1.0 finite 0
num_train_epochs: .nan | num_train_epochs=nan finite 0
adam_beta1: 2.0 | adam_beta1=2.0 0 1
adam_beta2: 2.0 | adam_beta2=2.0 0 1
min_p: 2.0 | min_p=2.0 0 1
top_entropy_quantile: 2.0 | top_entropy_quantile=2.0 0 1
repetition_penalty: 0.0 | repetition_penalty=0.0 above
top_k: -7 | top_k=-7 whole -1
dataloader_num_workers: -1 | dataloader_num_workers=-1 whole 0
neftune_noise_alpha: -5.0 | neftune_noise_alpha=-5.0 finite 0
lr_scheduler_type: cosine_with_min_lr | lr_scheduler_type='cosine_with_min_lr' lr_scheduler_kwargs=None min_lr
lr_scheduler_kwargs: {min_lr: 0.1} | lr_scheduler_type='linear' lr_scheduler_kwargs={'min_lr': argument
generation_kwargs: '[1]' | generation_kwargs='[1]' dictionary JSON
model_init_kwargs: '{a' | model_init_kwargs='{a' dictionary JSON
# --- functions of a user's own, and corrections
constraint_form: cubic | constraint_form='cubic' 'injected' 'quadratic' 'log_ratio' module:function
constraint_form: 'none_such:form' | constraint_form='none_such:form' module 'none_such' install
constraint_form: 'math:none_such' | constraint_form='math:none_such' 'none_such'
constraint_form: 'math:sqrt' | constraint_form='math:sqrt' sqrt(tokens, measure)
rollout_correction: 'math:sqrt', rollout_correction_max: 3.0 | rollout_correction='math:sqrt' sqrt(tokens, upper)
rollout_correction: tis | rollout_correction='tis' 'token_truncate' 'ppo_clip' module:function
rollout_correction: 'icepop, geometric_mask(a)' | 'icepop, geometric_mask(a)' two bounds
rollout_correction: 'icepop(1, 2' | rollout_correction='icepop(1, bounds parentheses
rollout_correction: 'tv_mask(0, 1)' | rollout_correction='tv_mask' lower upper
rollout_correction: tv_mask, rollout_correction_min: 0.1 | rollout_correction='tv_mask' lower
rollout_correction: [icepop, tv_mask], rollout_correction_max: 2.0 | rollout_correction_max 'icepop, bounds
rollout_correction: [icepop, token_truncate] | 'icepop, token_truncate first
rollout_correction: 'icepop(2, 1)' | rollout_correction='icepop(2, lower
# --- no effect
rollout_correction_max: 2.0 | rollout_correction_max=2.0 rollout_correction='none'
rollout_correction_target: lag, deployment_scheme: fp8 | rollout_correction_target='lag' rollout_correction='none'
rollout_correction_min: 0.5 | rollout_correction_min=0.5 rollout_correction='none'
discrepancy_margin: 0.1 | discrepancy_margin=0.1 constraint='none'
constraint_form: quadratic | constraint_form='quadratic' constraint='none'
constraint_target: lag, deployment_scheme: fp8 | constraint_target='lag' constraint='none'
dual_window: 4 | dual_window=4 constraint='none' constraint='lagrangian'
dual_window: 4, constraint: static, deployment_scheme: fp8 | dual_window=4 constraint='static' constraint='lagrangian'
train_through_quantization: true | train_through_quantization=True deployment_scheme=None 'fp8'
vllm_importance_sampling_correction: true | vllm_importance_sampling_correction=True use_vllm=False use_vllm=True
weight_sync: checkpoint | weight_sync='checkpoint' use_vllm=False use_vllm=True
weight_sync_steps: 8 | weight_sync_steps=8 use_vllm=False deployment_scheme=None 'fp8'
lora_deployment: adapter | lora_deployment='adapter' use_vllm=False deployment_scheme=None 'fp8'
use_transformers_continuous_batching: true, deployment_scheme: fp8 | batching=True deployment_scheme='fp8'
vllm_server_base_urls: ['http://a:1'] | vllm_server_base_urls=['http://a:1'] use_vllm=False use_vllm=True 'server'
vllm_server_base_url: "http://me:hunter2@h:1" | vllm_server_base_url= VLLM_API_KEY .netrc
vllm_server_base_url: "me:p/w#hunter2@h:1" | vllm_server_base_url= VLLM_API_KEY .netrc
vllm_server_base_urls: ["http://h:1?token=hunter2"] | vllm_server_base_urls= VLLM_API_KEY .netrc
vllm_server_base_urls: [x], COLOCATED | vllm_server_base_urls=['x'] 'colocate' 'server'
rollout_overlap: true | rollout_overlap=True use_vllm=False use_vllm=True 'server'
rollout_overlap: true, COLOCATED | rollout_overlap=True vllm_mode='colocate' 'server'
score_centering_top_k: 8 | score_centering_top_k=8 score_centering=False score_centering=True
recipe: format, deployment_scheme: fp8, constraint: none, constraint_form: quadratic | constraint_form= 'none'
recipe: lag, deployment_scheme: fp8, constraint: none, constraint_form: quadratic | constraint_form= constraint='none'
recipe: paper, deployment_scheme: fp8, constraint: none, constraint_form: quadratic | constraint_form= 'none'
# --- contradictions
lambda_init: 2.0 | lambda_init=2.0 lambda_min=0.0 lambda_max=1.0
lambda_max: 0.05, lambda_min: 0.5 | lambda_max=0.05 lambda_min=0.5 below
lambda_min: 0.5 | lambda_init=0.1 lambda_min=0.5
discrepancy_split: true | discrepancy_split=True use_vllm=False deployment_scheme=None 'fp8' use_vllm=True
recipe: format | recipe='format' deployment_scheme=None 'fp8'
recipe: format, train_through_quantization: true | recipe='format' deployment_scheme=None 'fp8'
ALIGNED, fp16: true | fp16=True train_through_quantization=True bf16=True
ALIGNED, cast_lm_head_to_fp32: true | cast_lm_head_to_fp32=True train_through_quantization=True
ALIGNED, gradient_checkpointing_kwargs: {use_reentrant: true} | gradient_checkpointing_kwargs= use_reentrant False
ALIGNED, gradient_checkpointing_kwargs: {offload: true} | gradient_checkpointing_kwargs= offload False
ALIGNED, use_liger_kernel: true | use_liger_kernel=True train_through_quantization=True
ALIGNED, model_init_kwargs: {use_kernels: true} | model_init_kwargs= use_kernels train_through_quantization=True
ALIGNED, torch_compile: true | torch_compile=True train_through_quantization=True
train_through_quantization: weights, deployment_scheme: fp8, fp16: true | fp16=True quantization='weights'
score_centering: true | score_centering=True deployment_scheme=None use_vllm=False 'fp8' use_vllm=True
CENTRED, importance_sampling_level: sequence | score_centering=True importance_sampling_level='sequence' 'token'
CENTRED, beta: 0.04 | score_centering=True beta=0.04 beta=0
CENTRED, num_iterations: 2 | score_centering=True num_iterations=2 num_iterations=1 gradient_accumulation_steps
CENTRED, steps_per_generation: 16 | score_centering=True steps_per_generation=16 gradient_accumulation_steps
CENTRED, rollout_correction: geometric_mask | score_centering=True rollout_correction='geometric_mask' 'icepop'
CENTRED, rollout_correction: [icepop, geometric_mask] | score_centering=True 'icepop, 'tv_mask'
score_centering: true, VLLM, vllm_importance_sampling_correction: true | score_centering=True sampling_correction=True
CENTRED, rollout_correction: icepop, rollout_correction_target: lag | score_centering=True target='lag'
rollout_correction: icepop, loss_type: vespo | loss_type='vespo' rollout_correction='icepop' 'none'
recipe: paper, loss_type: vespo | loss_type='vespo' constraint='lagrangian' 'none'
loss_type: vespo, use_vllm: true | vllm_importance_sampling_mode= loss_type='vespo' 'token_truncate' correction=False
rollout_correction: icepop, TIS | rollout_correction='icepop' vllm_importance_sampling_correction=True
recipe: trl, ICEPOP, importance_sampling_level: sequence | rollout_correction='icepop' 'sequence' 'geometric_mask'
SEVERAL, weight_sync: nccl | weight_sync='nccl' vllm_server_base_urls= weight_sync='auto'
lora_deployment: adapter, COLOCATED | lora_deployment='adapter' vllm_mode='colocate' 'server'
lora_deployment: adapter, VLLM, weight_sync: nccl | lora_deployment='adapter' weight_sync='nccl' weight_sync='auto'
weight_sync_steps: 8, VLLM, weight_sync: nccl | weight_sync_steps=8 weight_sync='nccl' weight_sync='auto'
weight_sync_steps: 8, COLOCATED, SLEEP | weight_sync_steps=8 vllm_enable_sleep_mode=True
routing_replay: true | routing_replay=True use_vllm=False deployment_scheme=None 'fp8' 'server'
routing_replay: true, COLOCATED | routing_replay=True vllm_mode='colocate' 'server'
recipe: paper, importance_sampling_level: sequence | sampling_level='sequence' constraint='lagrangian' 'token'
recipe: paper, off_policy_mask_threshold: 0.01 | off_policy_mask_threshold=0.01 constraint='lagrangian' 'none'
recipe: paper, TIS, MASKED | vllm_importance_sampling_mode='sequence_mask' constraint='lagrangian' rollout_correction
recipe: paper, generation_kwargs: {temperature: 0.7} | temperature=0.7 generation_kwargs temperature constraint='none'
recipe: paper, VLLM, vllm_structured_outputs_regex: x | vllm_structured_outputs_regex='x' constraint='lagrangian'
# --- what the engine samples from
recipe: paper, repetition_penalty: 1.1 | repetition_penalty=1.1 constraint='lagrangian' =1.0 constraint='none'
ICEPOP, repetition_penalty: 1.1 | repetition_penalty=1.1 rollout_correction='icepop' rollout_correction='none'
CENTRED, repetition_penalty: 1.1 | repetition_penalty=1.1 score_centering=True score_centering=False
recipe: paper, generation_kwargs: {top_k: null} | top_k=None generation_kwargs top_k=0 constraint='none'
recipe: paper, generation_kwargs: '{"no_repeat_ngram_size": 7}' | no_repeat_ngram_size=7 generation_kwargs
recipe: paper, generation_kwargs: {logprobs: 5} | logprobs=5 generation_kwargs logprobs=0
recipe: paper, generation_kwargs: {bad_words: [a]} | bad_words=['a'] generation_kwargs bad_words
deployment_scheme: fp8, generation_kwargs: {stop: [x]} | generation_kwargs={'stop': transformers use_vllm=True
deployment_scheme: fp8, generation_kwargs: {stop_token_ids: [1]} | generation_kwargs={'stop_token_ids': use_vllm=True
deployment_scheme: fp8, generation_kwargs: {max_new_token: 1} | generation_kwargs={'max_new_token': max_new_tokens
VLLM, generation_kwargs: {suppress_tokens: [1]} | generation_kwargs={'suppress_tokens': vLLM use_vllm=False
VLLM, generation_kwargs: {min_token: 1} | generation_kwargs={'min_token': min_tokens
recipe: paper, top_p: 0.9, VLLM | top_k=0 top_p=0.9 min_p=None 20 use_vllm=False constraint='none'
recipe: paper, generation_kwargs: {top_p: 0.5}, VLLM | top_p=0.5 top_k=0 constraint='none'
recipe: paper, min_p: 0.1, VLLM | top_k=0 min_p=0.1 20 use_vllm=False constraint='none'
recipe: paper, top_k: 21, COLOCATED | top_k=21 vllm_mode='colocate' 20 vllm_mode='server'
score_centering: true, COLOCATED, score_centering_top_k: 64 | score_centering_top_k=64 20 'server'
"""

# Of a trainer, with no model yet: what else is set there (`with`), and how its processes divide the model.
OF_A_TRAINER = """
constraint: static, recipe: trl | constraint='static' deployment_scheme 'fp8' use_vllm=True constraint='none'
rollout_correction: icepop | rollout_correction='icepop' deployment_scheme use_vllm=True rollout_correction='none'
with: rollout_func, deployment_scheme: fp8 | deployment_scheme='fp8' use_vllm rollout_func
with: rollout_func, deployment_scheme: fp8, routing_replay: true | routing_replay=True rollout_func
with: rollout_func, deployment_scheme: fp8, discrepancy_split: true | deployment_scheme='fp8' rollout_func
with: rollout_func, VLLM, routing_replay: true | routing_replay=True rollout_func
with: rollout_func, LAG | constraint_target='lag' rollout_func use_vllm=True
with: tools, VLLM, rollout_overlap: true | rollout_overlap=True tools rollout_overlap=False
with: environment_factory, VLLM, rollout_overlap: true | rollout_overlap=True environment_factory rollout_overlap=False
with: rollout_func, VLLM, rollout_overlap: true | rollout_overlap=True rollout_func rollout_overlap=False
lora_deployment: adapter, deployment_scheme: fp8 | lora_deployment='adapter' peft_config use_peft=true 'merged'
with: images, SEVERAL | train_dataset 'image' vllm_server_base_url vllm_server_base_urls=
divided: fsdp1, deployment_scheme: fp8 | deployment_scheme='fp8' use_vllm FSDP1 DDP fsdp_version
divided: zero3, deployment_scheme: fp8 | deployment_scheme='fp8' use_vllm ZeRO-3 DDP fsdp_version
divided: fsdp1, ALIGNED, VLLM | train_through_quantization=True FSDP1 fsdp_version
divided: zero2, ALIGNED, VLLM | train_through_quantization=True ZeRO-2 fsdp_version
divided: fsdp1, COLOCATED, deployment_scheme: fp8 | vllm_mode='colocate' scheme='fp8' FSDP1 fsdp_version
divided: fsdp1, COLOCATED, weight_sync: checkpoint | vllm_mode='colocate' FSDP1 fsdp_version
divided: fsdp1, VLLM, discrepancy_split: true | discrepancy_split=True FSDP1 fsdp_version
divided: zero3, VLLM, deployment_scheme: fp8, LAG | constraint_target='lag' ZeRO-3 fsdp_version
divided: zero3, VLLM, top_k: 5 | top_p top_k min_p ZeRO-3 fsdp_version
divided: fsdp2, CENTRED | score_centering=True FSDP2 DDP
divided: zero1, CENTRED | score_centering=True ZeRO-1 DDP
divided: fsdp2, deployment_scheme: fp8, lora_deployment: adapter | lora_deployment='adapter' FSDP2 DDP
divided: fsdp2, with: peft_config, deployment_scheme: fp8 | deployment_scheme='fp8' use_vllm FSDP2 use_vllm=True DDP
divided: fsdp1, loads: one, with: reward_model | fsdp_cpu_ram_efficient_loading reward false
divided: fsdp2, loads: one, beta: 0.1 | fsdp_cpu_ram_efficient_loading reference beta false
"""

# Of `dc-trl train` alone.
OF_THE_COMMAND = """
serve: yes_please | serve='yes_please' 'auto'
serve_devices: '3' | serve_devices='3' serve=None serve='auto'
serve_options: [--enforce-eager] | serve_options=['--enforce-eager'] serve=None serve='auto'
serve: auto | serve='auto' use_vllm=False vllm_mode= use_vllm=true vllm_mode=server
serve: auto, COLOCATED | serve='auto' vllm_mode='colocate' vllm_mode=server
serve: auto, VLLM, vllm_server_base_url: 'http://a:1' | serve='auto' 'http://a:1' address
serve: auto, SEVERAL | serve='auto' ['http://a:1', 'http://b:1'] address
length_decay_period: 0 | length_decay_period=0 whole 1
length_decay_period: 5 | length_decay_period=5 length_decay=False length_decay=True
length_decay: maybe | length_decay Truthy
collapse_alarm: loud | collapse_alarm='loud' 'off' 'warn' 'stop'
max_prompt_length: 0 | max_prompt_length=0 whole 1
eval_size: -1 | eval_size=-1 whole 0
eval_greedy: true | eval_greedy=True eval_size=0 eval_size
use_peft: true, lora_r: 0 | lora_r=0 whole 1
use_peft: true, lora_dropout: 5.0 | lora_dropout=5.0 0 1
output_dir: '' | output_dir='' directory
dataset_split: test, dataset_name: a.csv | dataset_split='test' dataset_name='a.csv' Hub
remove_unused_columns: true | remove_unused_columns=True 'answer'
prompt_column: prompt.x, dataset_name: ROWS | prompt_column='prompt.x' 'prompt' 'answer'
dataset_name: null | dataset_name Hub 'arithmetic'
dataset_name: none.csv | dataset_name='none.csv' .json .parquet
eval_size: 999, dataset_name: ROWS | eval_size=999 eval_size
rewards: [applause] | applause
model_name_or_path: null | model_name_or_path directory
model_name_or_path: runs/real_model | model_name_or_path='runs/real_model' real-model directory
rewards: null | rewards=None list
dataset_name: EMPTY | dataset_name='rows.jsonl' empty
model_name_or_path: ./none | model_name_or_path='./none' directory
lora_deployment: adapter, deployment_scheme: fp8 | lora_deployment='adapter' use_peft=true 'merged'
learning_rat: 1 | learning_rat learning_rate
"""

OF_ASYNC = """
deployment_scheme: fp8 | deployment_scheme='fp8' AsyncGRPO
vllm_server_base_url: "http://me:hunter2@h:1" | vllm_server_base_url= VLLM_API_KEY .netrc
rollout_correction: token_truncate | rollout_correction='token_truncate' 'token_mask' 'none'
rollout_correction: [token_truncate, icepop] | 'token_truncate, 'token_mask' 'none'
dual_window: 0 | dual_window=0 whole 1
constraint: dual | constraint='dual' 'lagrangian'
constraint_form: cubic | constraint_form='cubic' 'log_ratio'
discrepancy_tolerance: high | discrepancy_tolerance='high' number
rollout_correction_max: 2.0 | rollout_correction_max=2.0 rollout_correction='none'
discrepancy_margin: 0.1 | discrepancy_margin=0.1 constraint='none'
constraint_form: quadratic | constraint_form='quadratic' constraint='none'
constraint_target: lag | constraint_target='lag' constraint='none'
lambda_init: 9.0 | lambda_init=9.0 lambda_max=2.0
constraint: static, top_p: 0.9 | top_p=0.9 constraint='static' top_p=1.0 constraint='none'
constraint: static, repetition_penalty: 1.1 | repetition_penalty=1.1 constraint='static' constraint='none'
"""

ABBREVIATIONS = {
    "ALIGNED": "train_through_quantization: true, deployment_scheme: fp8",
    "CENTRED": "score_centering: true, deployment_scheme: fp8",
    "COLOCATED": "use_vllm: true, vllm_mode: colocate",
    "ICEPOP": "rollout_correction: icepop",
    "LAG": "constraint: static, constraint_form: log_ratio, constraint_target: lag",
    "MASKED": "vllm_importance_sampling_mode: sequence_mask",
    "SEVERAL": "use_vllm: true, vllm_mode: server, vllm_server_base_urls: ['http://a:1', 'http://b:1']",
    "SLEEP": "vllm_enable_sleep_mode: true",
    "TIS": "use_vllm: true, vllm_importance_sampling_correction: true",
    "VLLM": "use_vllm: true, vllm_mode: server",
}


def rows(table):
    """Rows of a table: their settings, and the words of the refusal."""
    for line in table.strip().splitlines():
        if not line.startswith("#"):
            settings, _, words = line.rpartition(" | ")
            written = re.sub(r"\b[A-Z]+\b", lambda match: ABBREVIATIONS.get(match[0], match[0]), settings)
            yield pytest.param(yaml.safe_load(f"{{{written}}}"), words.split(), id=settings)


def assert_names(error, words):
    for word in words:
        assert word in str(error), f"{word!r} is not in: {error}"
    assert "\n" not in str(error)
    assert "hunter2" not in str(error)


def by_python(tmp_path, settings):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refused:
        DCGRPOConfig(str(tmp_path / "run"), **MACHINE | settings)
    return str(refused.value)


def by_command(tmp_path, settings, *words):
    """What `dc-trl train` says, which ends with exit code 1 and leaves nothing."""
    file = tmp_path / "config.yaml"
    usual = {"output_dir": str(tmp_path / "run"), "model_name_or_path": str(TINY_MODEL), "dataset_name": "arithmetic"}
    file.write_text(yaml.safe_dump(usual | {"max_steps": 1} | MACHINE | settings))
    with pytest.raises(SystemExit) as ended:
        call("train", ["--config", str(file), *words])
    assert not list((tmp_path / "run").glob("*"))
    assert str(ended.value.code).startswith("error: ")
    return ended.value.code.removeprefix("error: ").removeprefix(f"{file}: ")


@pytest.mark.parametrize(("settings", "words"), rows(OF_A_RUN))
def test_of_a_run_by_python_and_by_the_command(tmp_path, settings, words):
    python = by_python(tmp_path, settings)
    assert_names(python, words)
    assert by_command(tmp_path, settings) == python
    if all(isinstance(value, str | int | float) for value in settings.values()):
        assert by_command(tmp_path, {}, *(f"--{name}={value}" for name, value in settings.items())) == python


@pytest.mark.parametrize(("settings", "words"), rows(OF_THE_COMMAND))
def test_of_the_command(tmp_path, monkeypatch, settings, words):
    monkeypatch.chdir(tmp_path)
    if (kind := settings.get("dataset_name")) in ("ROWS", "EMPTY"):
        lines = [json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) for number in range(8)]
        lines *= kind == "ROWS"
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        settings = settings | {"dataset_name": "rows.jsonl"}
    assert_names(by_command(tmp_path, settings), words)


@pytest.mark.parametrize(("settings", "words"), rows(OF_ASYNC))
def test_of_the_asynchronous_trainer(tmp_path, settings, words):
    with pytest.raises(ValueError, match="=") as refused:
        AsyncDCGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **settings)
    assert_names(refused.value, words)


@pytest.mark.parametrize(("settings", "words"), rows(OF_A_TRAINER))
def test_of_a_trainer(tmp_path, monkeypatch, settings, words):
    settings = dict(settings)
    divided, given, loads = (settings.pop(name, None) for name in ("divided", "with", "loads"))
    config = DCGRPOConfig(str(tmp_path), **MACHINE | settings)
    if divided is not None and divided.startswith("fsdp"):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", divided[-1])
    elif divided is not None:
        config.deepspeed_plugin = SimpleNamespace(zero_stage=int(divided[-1]))
    if loads is not None:
        monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    data = Dataset.from_list([{"prompt": "1+1=", **({"image": "a.png"} if given == "images" else {})}] * 8)
    reward = str(TINY_MODEL) if given == "reward_model" else distinct_characters
    others = {
        "rollout_func": {"rollout_func": lambda prompts, trainer: {}},
        "tools": {"tools": [distinct_characters]},
        "environment_factory": {"environment_factory": object},
        "peft_config": {"peft_config": LoraConfig()},
    }
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refused:
        DCGRPOTrainer(make_model(), reward, config, data, **others.get(given, {}))
    assert_names(refused.value, words)


def test_a_refusal_names_the_file_whose_field_it_is_and_no_other(tmp_path):
    file = tmp_path / "run.yaml"
    for line in ("lambda_lr: fast", "lambda_lr: -1", "lamda_lr: 1", "save_strategy: sometimes", "learning_rate: [1]"):
        file.write_text(f"{line}\n")
        with pytest.raises(SystemExit, match=f"^error: {file}: {line.partition(':')[0]}"):
            call("train", ["--config", str(file)])
    file.write_text("lambda_lr: 1\n")
    for words in (["--lambda_lr", "-1e-4"], ["--lambda_lr=fast"], ["--lambda_max", "-.5"]):
        with pytest.raises(SystemExit, match=r"^error: lambda_(lr|max)\b"):
            call("train", ["--config", str(file), *words])


def test_one_name_of_modules_is_taken():
    """TRL's own dataclass makes a text of it."""
    require_fields(ModelConfig(lora_target_modules=["all-linear"]))


@pytest.mark.parametrize("name", ["output_dir", "weight_sync_dir"])
def test_a_file_in_the_place_of_a_directory(tmp_path, name):
    (tmp_path / "file").touch()
    for below in ("file", "file/run"):
        settings = {name: str(tmp_path / below)}
        with refuses(ValueError, f"{name}='{tmp_path / below}'", "directory") as refused:
            DCGRPOConfig(**{"output_dir": str(tmp_path)} | MACHINE | settings)
        assert by_command(tmp_path, settings) == str(refused.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"deployment_scheme": torch.float8_e4m3fn}, ["deployment_scheme=torch.float8_e4m3fn", "'fp8'"]),
        ({"constraint_form": 3}, ["constraint_form=3", "int", "text"]),
        ({"rollout_correction": 3}, ["rollout_correction=3", "int", "text"]),
        ({"vllm_server_base_urls": "http://a:1", "use_vllm": True}, ["vllm_server_base_urls='http://a:1'", "list"]),
        ({"reward_weights": "1"}, ["reward_weights='1'", "list"]),
        ({"run_name": 7}, ["run_name=7", "text"]),
        ({"max_steps": True}, ["max_steps=True", "whole"]),
        ({"logging_steps": True}, ["logging_steps=True", "number"]),
    ],
)
def test_a_value_of_another_type_in_python(tmp_path, settings, words):
    with refuses(ValueError, *words):
        DCGRPOConfig(str(tmp_path), **MACHINE | settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_precision_that_the_machine_lacks(tmp_path):
    settings = {"use_cpu": False, "bf16": True}
    assert_names(by_python(tmp_path, settings), ["bf16=True", "use_cpu=False"])
    assert_names(by_command(tmp_path, settings), ["bf16=True", "use_cpu=False"])


def test_words_are_no_truth_values(tmp_path):
    """A word is true in Python; a command line reads it."""
    for name in ("routing_replay", "score_centering", "export_run", "use_vllm"):
        with pytest.raises(ValueError, match=f"{name}='no'.*True.*False"):
            DCGRPOConfig(str(tmp_path), **MACHINE, **{name: "no"})
    with pytest.raises(ValueError, match="discrepancy_tolerance=True"):
        DCGRPOConfig(str(tmp_path), **MACHINE, discrepancy_tolerance=True)


@pytest.mark.parametrize("settings", [DCGRPOConfig, AsyncDCGRPOConfig])
def test_a_misspelt_field_gets_the_nearest_name(tmp_path, settings):
    with pytest.raises(TypeError, match=r"^rollout_corection .*rollout_correction\?$"):
        settings(str(tmp_path), rollout_corection="icepop")


def test_the_table_has_every_rule_range_and_choice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no runs/real_model
    found = {by_python(tmp_path, row.values[0]) for row in rows(OF_A_RUN)}
    found |= {
        by_command(tmp_path, row.values[0]) for row in rows(OF_THE_COMMAND) if not re.search("ROWS|EMPTY", row.id)
    }
    for rule in (*NO_EFFECT, *CONTRADICTIONS):
        of_rule = [message for message in found if rule.remedy in message]
        for name in rule.named.split():
            words = [f"{other}=" for other in (name, *rule.beside)]
            assert any(all(word in message for word in words) for message in of_rule), words
    own = {name for config in ARGUMENTS for name in own_fields(config)}
    for config in ARGUMENTS:
        for name, hint in get_type_hints(config, include_extras=True).items():
            if name in TRL_ALLOWED or (name in own and {Annotated, Literal} & origins(hint)):
                assert any(message.startswith(f"{name}=") for message in found), name


def origins(hint):
    """Origins of a type and of those that it is a union of."""
    return {get_origin(each) for each in (hint, *get_args(hint))}


def test_what_is_off_needs_no_effect(tmp_path):
    """A value that changes nothing is refused where it is given, and not where it is what would be there anyway."""
    DCGRPOConfig(str(tmp_path), **MACHINE, vllm_importance_sampling_correction=False, constraint_form="injected")
