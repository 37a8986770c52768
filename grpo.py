# SPDX-License-Identifier: MIT
r"""GRPO, Group Relative Policy Optimization, in one readable file: torch, transformers, tqdm.

    python grpo.py                                  # a tiny built-in model learns sums
    python grpo.py --model Qwen/Qwen2-Math-1.5B --data train.jsonl
    python grpo.py --help                           # every option

One training step (DeepSeekMath, arXiv:2402.03300, algorithm 1, with one outer iteration: neither
reference nor reward is ever renewed) is the loop in `train`:
  1. take B prompts                                                     `prompt_batch`
  2. sample G completions of each from the current policy               `rollout`, `generate`
  3. score every completion                                             `score_completions`
  4. normalise the scores within each group into advantages             `group_advantages`
  5. ascend the clipped surrogate, held to a frozen reference by the    `token_logprobs`, `update`,
     k3 estimate of the KL divergence, with AdamW                       `grpo_loss`, `MasterAdamW`
  6. log, look at samples, evaluate, save                               `show_samples`, `evaluate`

Shapes, in every docstring and comment: B prompts, G samples of each, N = B*G completions (rows
b*G … b*G+G-1 belong to prompt b), P prompt length (left-padded), C completion length
(right-padded), M unmasked completion tokens, V vocabulary, H hidden size. `mask` alone is the mask
of completions, (N, C), True through the first EOS.

Where this file departs from the papers and from common tutorials (each has a test):
  - A group of equal rewards has advantage exactly 0. The formula as printed gives as much as ±0.8:
    rounding can put the float32 mean one bit off, and the standard deviation is then that bit too.
  - The standard deviation is the unbiased one (n - 1); eps = 1e-8.
  - A completion's mask runs through its first EOS, found by position. The mask `ids != pad` would
    never teach the model to stop where pad and EOS are one token (Qwen2).
  - With one update per rollout the old log-probs are the new ones, detached: the ratio is 1.
  - Every normaliser counts the whole optimizer batch: micro-batches do not change the gradient.
  - AdamW moves float32 weights: at a learning rate of 1e-6 bfloat16 weights would not move.
  - A group's shared prompt runs through the model once, in sampling, scoring and training.

The main line goes from `sample` to `train`. After it: how a run begins and ends, several processes,
checkpoints, how answers are read, more rewards, the built-in task, the command line. In a single
process `gather(x)` is `[x]` and `exchange_gradients` does nothing: pass over them at first.
"""

import argparse
import ast
import collections
import contextlib
import copy
import dataclasses
import datetime
import functools
import hashlib
import importlib
import inspect
import json
import math
import os
import random
import re
import runpy
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unicodedata
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy
import torch
import torch.distributed as dist
import transformers
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import find_adapter_config_file


class Error(Exception):
    """A mistake that the user can mend: `main` prints it in one line, without a traceback."""


# ------------------------------------------------------------------------------------------- config


def option(default, help, low=-math.inf, high=math.inf):
    """A field of `Config`: its default, its help text, the values that it allows."""
    return dataclasses.field(default=default, metadata=dict(help=help, low=low, high=high))


@dataclass(frozen=True)
class Config:
    """Every option of a run; the command line is made from it. Raises `Error` if out of range."""

    # model and data
    model: str = option("tiny", "Hub name or folder of a causal language model; tiny is built in")
    data: str | None = option(None, "JSONL file, or Hub data set NAME[:CONFIG[:SPLIT]]")
    eval_data: str | None = option(None, "held-out prompts (else the first tenth, at most 64)")
    reward: tuple[str, ...] = option(("accuracy",), "NAME or FILE.py:FUNCTION, each [=WEIGHT]")
    step_separator: str = option("\n", "what ends a step, for rewards of single steps")
    chat_template: Literal["auto", "on", "off"] = option("auto", "auto: if the model knows it")
    prompt_template: str | None = option(None, "text around {question} (else asks for \\boxed{})")
    system_prompt: str | None = option(None, "system message of every prompt")
    dtype: Literal["auto", "bfloat16", "float32"] = option("auto", "auto: bfloat16 on a GPU")
    # sampling
    num_generations: int = option(8, "G, completions sampled for each prompt", low=2)
    prompts_per_step: int = option(8, "B, prompts of each step", low=1)
    max_prompt_length: int = option(512, "in tokens; longer prompts are left out", low=1)
    max_completion_length: int = option(512, "in tokens; longer completions are cut off", low=1)
    temperature: float = option(1.0, "of sampling and of every log-prob", low=0.01)
    top_p: float = option(1.0, "below 1 samples are no longer the policy's: leave it", 0.01, 1)
    top_k: int = option(0, "above 0 samples are no longer the policy's: leave it", low=0)
    continuous_batching: bool = option(False, "transformers' sampler in place of this file's")
    # loss
    beta: float = option(0.04, "weight of the KL term; 0 needs no reference", low=0)
    epsilon: float = option(0.2, "clip range of the ratio", 0, 1)
    epsilon_high: float | None = option(None, "clip range above 1, if another (DAPO: 0.28)", low=0)
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = option("grpo", "how token losses are averaged")
    scale_rewards: Literal["group", "batch", "none"] = option("group", "the std's scope")
    importance_sampling_level: Literal["token", "sequence"] = option("token", "sequence: GSPO")
    num_iterations: int = option(1, "mu, updates per rollout", low=1)
    mask_truncated: bool = option(False, "no loss on completions without EOS (DAPO)")
    # optimisation
    learning_rate: float = option(1e-6, "of AdamW, constant after the warm-up", low=0)
    warmup_steps: int = option(10, "steps of linear warm-up", low=0)
    max_grad_norm: float = option(1.0, "a longer gradient is scaled to this norm", low=1e-12)
    weight_decay: float = option(0.0, "of AdamW", low=0)
    max_steps: int = option(200, "training steps; 0: evaluate, after --sft-steps", low=0)
    micro_batch_tokens: int = option(2048, "padded tokens in one forward and backward", low=1)
    gradient_checkpointing: bool = option(False, "less memory for activations, a slower update")
    lora_rank: int = option(0, "above 0 only adapters of this rank are trained (peft)", low=0)
    sft_steps: int = option(0, "supervised steps on the data's solutions before GRPO", low=0)
    sft_learning_rate: float = option(1e-5, "of the supervised steps", low=0)
    seed: int = option(0, "of everything random", 0, 2**31)
    # output
    output_dir: str | None = option(None, "folder of the run (else runs/MODEL-TIME)")
    resume: str | None = option(None, "go on with the run in this folder, with its options")
    eval_every: int = option(50, "steps between evaluations; 0: none, not even the first", low=0)
    eval_samples: int = option(4, "samples of each held-out prompt, for pass@k; 0: greedy only", 0)
    samples_every: int = option(50, "steps between looks at sampled completions; 0: none", low=0)
    save_every: int = option(0, "steps between checkpoints; 0: only the last", low=0)
    keep_checkpoints: int = option(2, "the newest so many, and the best evaluated one", low=1)
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = option("none", "a tracker")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name, value = "--" + field.name.replace("_", "-"), getattr(self, field.name)
            low, high = field.metadata["low"], field.metadata["high"]
            if get_origin(field.type) is Literal and value not in get_args(field.type):
                raise Error(f"{name} must be one of {', '.join(get_args(field.type))}, not {value}")
            if type(value) in (int, float) and not (low <= value <= high and abs(value) < math.inf):
                raise Error(f"{name} must be a number from {low} to {high}, not {value}")
        if "{question}" not in (self.prompt_template or "{question}") or not self.step_separator:
            raise Error("--prompt-template needs {question} in it, --step-separator some text")


# What `--model tiny` changes; whatever the user types wins.
TINY = dict(prompt_template="{question}", prompts_per_step=64, max_completion_length=8)
TINY |= dict(dtype="float32", micro_batch_tokens=16384, learning_rate=1e-3, max_steps=240)
TINY |= dict(sft_steps=70, sft_learning_rate=3e-3, eval_every=120, samples_every=120)


def parse_args(argv=None) -> Config:
    """`Config` from a list of command-line words (default: the process's)."""
    layout = dict(max_help_position=34, width=110)
    parser = argparse.ArgumentParser(
        usage="python grpo.py [--option value ...]", allow_abbrev=False,
        description="Train a language model with GRPO, Group Relative Policy Optimization.",
        formatter_class=functools.partial(argparse.ArgumentDefaultsHelpFormatter, **layout),
    )  # fmt: skip
    for field in dataclasses.fields(Config):
        kind = (get_args(field.type) or (field.type,))[0]  # `float | None` -> float
        # SUPPRESS keeps a default of None out of the help, where words say what happens instead.
        default = argparse.SUPPRESS if field.default is None else field.default
        if kind is bool:
            how = dict(action=argparse.BooleanOptionalAction)
        elif get_origin(field.type) is Literal:
            how = dict(choices=get_args(field.type))
        else:
            how = dict(type=kind, metavar=kind.__name__.upper())
            how |= dict(nargs="+") if field.name == "reward" else {}
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, help=field.metadata["help"], default=default, **how)
    first = vars(parser.parse_args(argv))
    if "resume" in first and "output_dir" in first:
        raise Error("--resume goes on in its own folder: leave --output-dir out")
    if "resume" in first:
        try:
            options = json.loads(Path(first["resume"], "config.json").read_text())
            parser.set_defaults(**vars(Config(**options)) | dict(output_dir=first["resume"]))
        except (OSError, ValueError, TypeError) as error:
            raise Error(f"--resume {first['resume']}: {error}") from None
    elif first["model"] == "tiny":
        parser.set_defaults(**TINY)
    args = vars(parser.parse_args(argv))
    return Config(**args | dict(reward=tuple(args["reward"])))


# ------------------------------------------------------------------------------------------ prompts


def read_rows(source, needs_answer):
    """Rows (dicts) of a JSONL file, or of the Hub data set NAME[:CONFIG[:SPLIT]].

    The question, under `prompt`, `question` or `problem`, is text or a list of chat messages and
    becomes "prompt"; the answer, under `answer` or `solution`, becomes "answer"; other columns stay
    for the reward functions. Raises `Error` with the file and line of whatever is wrong.
    """
    if Path(source).suffix in (".jsonl", ".json") or Path(source).exists():
        try:
            lines = enumerate(Path(source).read_text(encoding="utf-8").split("\n"), 1)
        except (OSError, UnicodeDecodeError) as error:
            raise Error(f"cannot read {source}: {error}") from None
        rows = [(f"{source}, line {i}", line) for i, line in lines if line.strip()]
    else:
        name, config, split = (source.split(":") + [None, None])[:3]
        datasets = import_optional("datasets", f"{source} is no file; as a Hub data set it")
        try:
            data = datasets.load_dataset(name, config, split=split or "train")
        except Exception as error:
            raise Error(f"cannot load {source}: {first_line(error)}") from None
        rows = [(f"{source}, row {i}", row) for i, row in enumerate(data)]
    if not rows:
        raise Error(f"{source} is empty")
    return [check_row(row, where, needs_answer) for where, row in rows]


def check_row(row, where, needs_answer):
    """A line of JSON or a dict -> the dict with "prompt" and "answer"; raises `Error`."""
    try:
        row = json.loads(row) if isinstance(row, str) else row
        prompt = next((row[key] for key in ("prompt", "question", "problem") if row.get(key)), None)
        given = [row[key] for key in ("answer", "solution") if row.get(key) not in (None, "")]
        messages = [{"role": "", "content": prompt}] if isinstance(prompt, str) else prompt
        readable = messages and all(isinstance(m["role"] + m["content"], str) for m in messages)
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise Error(f"{where}: not a JSON object with a question ({error!r:.200})") from None
    if not readable:
        raise Error(f"{where}: no `prompt`, `question` or `problem` (text, or chat messages)")
    if needs_answer and not any(map(gold_answer, given[:1])):
        raise Error(f"{where}: no answer in `answer` or `solution` for the accuracy reward")
    return {**row, "prompt": prompt, "answer": given[0] if given else None}


def load_data(config, needs_answer):
    """(rows to train on, rows held out)."""
    rows = read_rows(config.data, needs_answer) if config.data else arithmetic(config)
    if config.eval_data:
        return rows, read_rows(config.eval_data, needs_answer)
    held_out = min(64, len(rows) // 10) if config.eval_every else 0
    return rows[held_out:], rows[:held_out]


def chat_template_fits(tokenizer, eos_token_ids):
    """Whether the model was trained on its tokenizer's chat template: does the token that ends an
    assistant's turn stop the model? Base models carry templates that they never saw."""
    if not tokenizer.chat_template:
        return False
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    ending = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("answer")[2].strip()
    return any(i in eos_token_ids for i in tokenizer.encode(ending, add_special_tokens=False)[:1])


def encode_prompts(rows, run):
    """Data as the model will see it, without over-long prompts -> dicts of the prompt's "text" and
    "ids" and of all "columns", the same ones in every row, with None where a row has none."""
    config, tokenizer, kept = run.config, run.tokenizer, []
    fits = config.chat_template == "auto" and chat_template_fits(tokenizer, run.eos_token_ids)
    chat = config.chat_template == "on" or fits
    if chat and not tokenizer.chat_template:
        raise Error(f"--chat-template on: the tokenizer of {config.model} has none")
    boxed = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}.\n"
    plain = boxed if judges_answers(run.reward_functions) else "{question}"
    names = dict.fromkeys(name for row in rows for name in row)
    for row in rows:
        turns = row["prompt"]
        if isinstance(turns, str):
            content = (config.prompt_template or plain).replace("{question}", turns)
            turns = [{"role": "user", "content": content}]
        if config.system_prompt:
            turns = [{"role": "system", "content": config.system_prompt}, *turns]
        text = "\n".join(turn["content"] for turn in turns)
        if chat:
            try:
                how = dict(tokenize=False, add_generation_prompt=True)
                text = tokenizer.apply_chat_template(turns, **how)
            except Exception as error:  # some refuse a system message
                raise Error(f"the chat template of {config.model}: {first_line(error)}") from None
        ids = tokenizer.encode(text, add_special_tokens=not chat)  # a template writes its own BOS
        if 0 < len(ids) <= config.max_prompt_length:
            kept.append(dict(text=text, ids=ids, columns=names | row | dict(messages=turns)))
    if len(kept) < len(rows):
        dropped = f"{len(rows) - len(kept)} of {len(rows)} prompts"
        say(f"left out {dropped}: empty, or over {config.max_prompt_length} tokens")
    return kept


def prompt_batch(rows, step, size, seed):
    """The `size` rows of step 1, 2, …: rows in epochs, each shuffled by seed + epoch. It depends on
    nothing else, so that a resumed run finds its place."""
    first, shuffle = (step - 1) * size, torch.Generator()
    epochs = range(first // len(rows), (first + size - 1) // len(rows) + 1)
    orders = [torch.randperm(len(rows), generator=shuffle.manual_seed(seed + i)) for i in epochs]
    places = torch.cat(orders)[first % len(rows) :][:size]
    return [rows[i] for i in places.tolist()]


def pad(sequences, pad_token_id, side, device):
    """Lists of token ids -> ids and mask, both (len(sequences), longest), int64 and bool.

    >>> pad([[5], [6, 7]], 0, "left", "cpu")[0].tolist()
    [[0, 5], [6, 7]]
    """
    stack = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
    ids = stack([torch.tensor(ids) for ids in sequences], padding_value=pad_token_id)
    mask = stack([torch.ones(len(ids), dtype=torch.bool) for ids in sequences])
    return ids.to(device), mask.to(device)


# -------------------------------------------------------------------------------------------- model


def load_model(config, device):
    """(model, tokenizer, EOS ids) of any causal language model of transformers, or the tiny one. A
    trained adapter that comes with the model is merged: the reference is the model with it."""
    dtype, name, safe = compute_dtype(config, device), config.model, dict(trust_remote_code=False)
    try:
        if name == "tiny":
            model, tokenizer = tiny_model(config.seed, dtype)
        else:
            tokenizer = AutoTokenizer.from_pretrained(name, **safe)
            if find_adapter_config_file(name):
                peft = import_optional("peft", f"the adapter {name}")
                adapted = peft.AutoPeftModelForCausalLM.from_pretrained(name, dtype=dtype)
                model = adapted.merge_and_unload()
            else:
                safe |= dict(use_safetensors=True, dtype=dtype)
                model = AutoModelForCausalLM.from_pretrained(name, **safe)
    except Exception as error:
        raise Error(f"cannot load {name}: {first_line(error)}") from None
    model.to(device).eval()  # no dropout, ever: sampling, old, new and reference log-probs agree
    for param in model.parameters():
        param.data = param.data.clone()  # the mapped file's unaligned tensors slow a CPU down
    owners = (model.generation_config, model.config, tokenizer)
    given = [getattr(owner, "eos_token_id", None) for owner in owners]
    eos_token_ids = next(([i] if isinstance(i, int) else [*i] for i in given if i is not None), [])
    if not eos_token_ids:
        raise Error(f"{name} names no EOS token: it would never stop")
    eos_token_ids.sort(key=lambda i: i != tokenizer.eos_token_id)  # first the one that ends a turn
    return model, tokenizer, eos_token_ids


def compute_dtype(config, device):
    """What `--dtype` means on a device."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, auto if config.dtype == "auto" else config.dtype)


def add_lora(run):
    """Freeze the policy and train low-rank adapters of its linear layers (arXiv:2106.09685). They
    start as zero, so that with them off the policy is the reference and needs no second copy."""
    peft, rank = import_optional("peft", "--lora-rank"), run.config.lora_rank
    lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    run.lora = peft.get_peft_model(run.policy, lora)  # puts the adapters into the policy itself


def checkpoint_layers(model):
    """Recompute each layer's activations in backward. transformers' own switch drops the cache."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            how = dict(use_reentrant=False, preserve_rng_state=False)  # nothing in it is random
            layer.forward = functools.partial(checkpoint, layer.forward, **how)


# ------------------------------------------------------------------------------------------ rollout


def _float(x: torch.Tensor) -> torch.Tensor:
    """At least float32: exponentials and long sums lose too much in half precision."""
    return x if x.dtype == torch.float64 else x.float()


def sample(logits, temperature=1.0, top_p=1.0, top_k=0):
    """One token of each row from softmax(logits / temperature): (N, V) -> (N,). At temperature 0
    the most probable one.

    Inverse transform sampling, one uniform number a row: `torch.multinomial` draws one for each
    word of the vocabulary, which for 151,936 of them took a third of a decoding step on a CPU.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = _float(logits) / temperature
    if top_k:
        logits = transformers.TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1:
        logits = transformers.TopPLogitsWarper(top_p)(None, logits)
    cdf = logits.softmax(1).cumsum(1, dtype=torch.float64)  # (N, V); float32 would lose the tail
    draws = torch.rand(len(cdf), 1, dtype=cdf.dtype, device=cdf.device) * cdf[:, -1:]
    return torch.searchsorted(cdf, draws, right=True)[:, 0]  # the first one beyond the draw


@torch.no_grad()
def generate(
    model, prompt_ids, prompt_mask, num_generations, max_completion_length, eos_token_ids,
    pad_token_id=0, temperature=1.0, top_p=1.0, top_k=0,
):  # fmt: skip
    """G completions of each prompt, sampled from exactly the policy -> ids (N, C).

    prompt_ids, prompt_mask: (B, P), left-padded. C is at most `max_completion_length`; after a
    row's EOS stands `pad_token_id`. Ignores the model's generation config. Each prompt runs once
    and a finished row is dropped, for which the model must have a plain key-value cache:
    `has_plain_cache`. Needs `sample` and `_float` where it is pasted.
    """

    def forward(ids, attention_mask):
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)  # padding is not counted
        inputs = dict(attention_mask=attention_mask, position_ids=positions[:, -ids.shape[1] :])
        return model(ids, **inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1]

    cache, attention_mask = DynamicCache(config=model.config), prompt_mask.long()
    logits = forward(prompt_ids, attention_mask)  # (B, V)
    cache.batch_repeat_interleave(num_generations)  # each of a prompt's G completions is a row
    repeated = (x.repeat_interleave(num_generations, 0) for x in (logits, attention_mask))
    logits, attention_mask = repeated
    completion_ids = prompt_ids.new_full((len(logits), max_completion_length), pad_token_id)
    rows = torch.arange(len(logits), device=logits.device)  # those that are still being sampled
    eos = torch.tensor(eos_token_ids, device=logits.device)
    for length in range(1, max_completion_length + 1):
        next_ids = sample(logits, temperature, top_p, top_k)
        completion_ids[rows, length - 1] = next_ids
        unfinished = ~torch.isin(next_ids, eos)
        if length == max_completion_length or not unfinished.any():
            break
        if not unfinished.all():
            cache.batch_select_indices(unfinished)
            kept = (x[unfinished] for x in (rows, next_ids, attention_mask))
            rows, next_ids, attention_mask = kept
        attention_mask = torch.nn.functional.pad(attention_mask, (0, 1), value=1)
        logits = forward(next_ids[:, None], attention_mask)
    return completion_ids[:, :length]


@torch.no_grad()
def generate_with_transformers(
    model, prompt_ids, prompt_mask, num_generations, max_completion_length, eos_token_ids,
    pad_token_id=0, temperature=1.0, top_p=1.0, top_k=0, continuous=False,
):  # fmt: skip
    """What `generate` does, by transformers, for any causal model: with `continuous` batching (a
    paged cache, on CUDA graphs) or by its plain `generate`, which runs a prompt for each sample."""
    how = dict(do_sample=bool(temperature), eos_token_id=eos_token_ids, pad_token_id=pad_token_id)
    how |= dict(temperature=temperature, top_p=top_p, top_k=top_k) if temperature else {}
    how = transformers.GenerationConfig(**how, max_new_tokens=max_completion_length)
    # What is unset would come from the model's own config, such as a penalty of repetition.
    own, model.generation_config = model.generation_config, how
    ids, mask = (x.repeat_interleave(num_generations, 0) for x in (prompt_ids, prompt_mask))
    try:
        if not continuous:
            return model.generate(ids, how, attention_mask=mask.long())[:, ids.shape[1] :]
        prompts = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
        pages = math.ceil((prompt_ids.shape[1] + max_completion_length) / 256)  # of 256 tokens
        cache = transformers.ContinuousBatchingConfig(num_blocks=pages * len(prompts))
        outputs = list(model.generate_batch(prompts, how, cache, progress_bar=False).values())
    finally:
        model.generation_config = own
    failed = [output.error for output in outputs if output.error]
    if failed or len(outputs) < len(prompts):
        raise Error(f"continuous batching: {[*failed, 'completions are missing'][0]}")
    return pad([o.generated_tokens for o in outputs], pad_token_id, "right", prompt_ids.device)[0]


def completion_mask(completion_ids, eos_token_ids):
    """True through the first EOS of each row, it included: ids (N, C) -> bool (N, C).

    The position decides, never `ids == pad`, so a model whose pad is its EOS still learns to stop.

    >>> completion_mask(torch.tensor([[5, 2, 2], [5, 6, 7]]), [2]).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    is_eos = torch.isin(completion_ids, torch.as_tensor(eos_token_ids).to(completion_ids)).long()
    return is_eos.cumsum(1) - is_eos == 0  # no EOS before this position


# ------------------------------------------------------------------------------------------ rewards


def accuracy_reward(prompts, completions, answer, **columns):
    """1.0 where the completion's one extracted answer is the data's `answer`, else 0.0.

    >>> accuracy_reward([""] * 3, ["2 + 12 = 14", "so 16", "10"], ["#### 14"] * 3)
    [1.0, 0.0, 0.0]
    """
    pairs = zip(completions, answer, strict=True)
    return [float(answers_match(extract_answer(text), gold_answer(gold))) for text, gold in pairs]


def judges_answers(reward_functions):
    """Whether the accuracy reward is among them, which needs an answer in every row of data."""
    return any(function is accuracy_reward for function, _ in reward_functions.values())


def score(functions, /, **columns):
    """Ask every reward function -> {name: N values}: a number, a list of numbers (one for each step
    of the completion), or None (not its to judge).

    functions: {name: (function, weight)}. columns: `prompts`, `completions`, `completion_ids` and
    the data's other columns, each a list of N, which a function gets by name as it would from TRL.
    Raises `Error` for anything else.
    """
    scores, size = {}, len(columns["completions"])
    for name, (function, _) in functions.items():
        try:
            values = list(function(**columns))
        except Exception as error:
            traceback.print_exc()
            raise Error(f"the reward {name} failed: {error!r}") from None
        values = [value.tolist() if hasattr(value, "tolist") else value for value in values]
        numbers = [n for v in values if v is not None for n in (v if isinstance(v, list) else [v])]
        most = torch.finfo(torch.float32).max  # no number that is not finite is below it
        good = all(isinstance(n, (int, float)) and abs(n) <= most for n in numbers)
        if len(values) != size or not good:
            kinds = f"{size} finite numbers (or lists of numbers, one a step; or None: not judged)"
            raise Error(f"the reward {name} returned {str(values)[:200]}, not {kinds}")
        scores[name] = values
    return scores


# --------------------------------------------------------------------------------------- advantages


def group_advantages(rewards, num_generations, scale_rewards="group", eps=1e-8):
    """(r - mean of its group) / (std + eps): rewards (N,) -> (N,). DeepSeekMath 4.1.2.

    std is the unbiased one, of the "group", of the whole "batch", or "none" at all (Dr. GRPO,
    arXiv:2503.20783). Equal rewards give exactly 0; so does NaN, not judged, which counts nowhere.
    Raises ValueError unless G >= 2 divides N. Needs `_float` where it is pasted.

    >>> group_advantages(torch.tensor([1.0, 0, 0, 1, 0.1, 0.1, 0.1, 0.1]), 4)
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660,  0.0000,  0.0000,  0.0000,  0.0000])
    """
    if num_generations < 2 or len(rewards) % num_generations:
        raise ValueError(f"{len(rewards)} rewards make no groups of {num_generations} (at least 2)")
    groups = _float(rewards).view(-1, num_generations)  # (B, G)
    judged = ~groups.isnan()
    largest = groups.masked_fill(~judged, -torch.inf).amax(1, keepdim=True)
    equal = largest <= groups.masked_fill(~judged, torch.inf).amin(1, keepdim=True)
    # Rounding can leave equal rewards one bit off their mean, and the std is then that bit too.
    centred = (groups - groups.nanmean(1, keepdim=True)).masked_fill(equal | ~judged, 0)
    degrees = (judged.sum(1, keepdim=True) - 1).clamp(min=1)
    std = (centred.square().sum(1, keepdim=True) / degrees).sqrt()
    spread = groups[judged] - groups.nanmean()  # of the whole batch
    of_batch = (spread.square().sum() / max(1, len(spread) - 1)).sqrt()
    scales = {"group": std + eps, "batch": of_batch + eps, "none": 1}
    return (centred / scales[scale_rewards]).view(-1)


def process_advantages(
    step_rewards, step_ends, num_generations, num_tokens, eps=1e-8, scale_rewards="group"
):
    """Process supervision (DeepSeekMath 4.1.3): the advantage of each token -> (N, num_tokens).

    step_rewards, step_ends: N lists, a number for each step of a completion and the index of its
    last token. The step rewards of a group are normalised together; a token's advantage is the sum
    of those of the steps that end at or after it. `scale_rewards`: "group" or "none". Raises
    ValueError where there are not as many ends as rewards. Needs `group_advantages` and `_float`.

    >>> process_advantages([[1, 0], [0, 1]], [[0, 2], [1, 2]], 2, 4)
    tensor([[ 0.0000, -0.8660, -0.8660,  0.0000],
            [ 0.0000,  0.0000,  0.8660,  0.0000]])
    """
    advantages = torch.zeros(len(step_rewards), num_tokens)
    for start in range(0, len(step_rewards), num_generations):
        group = range(start, start + num_generations)
        rewards = torch.tensor([float(reward) for i in group for reward in step_rewards[i]])
        if len(rewards) > 1:  # a single step is its own mean
            normalised = iter(group_advantages(rewards, len(rewards), scale_rewards, eps))
            for i in group:  # a step's normalised reward goes to every token up to its end
                for end, _ in zip(step_ends[i], step_rewards[i], strict=True):
                    advantages[i, : end + 1] += next(normalised)
    return advantages


# ---------------------------------------------------------------------------------------- log-probs


def token_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, completion_mask, temperature=1.0, fast=True
):
    """log-prob of each completion token given all before it -> (N, C) float32, 0 where masked.

    prompt_ids, prompt_mask: (B, P), left-padded; completion_ids, completion_mask: (N, C), rows
    b*G … b*G+G-1 continue prompt b. Logits are divided by `temperature`, as in sampling. `fast`
    runs each prompt once and its completions on G copies of its key-value cache, through which
    gradients flow, and never holds the (N, C, V) logits; else this is the model's plain forward.
    `fast_path_holds` tells whether a model may. Needs `PromptCache`, `LogProbs` and `_float` where
    it is pasted, transformers' `DynamicCache` and the module `copy`.
    """
    num_generations, length = len(completion_ids) // len(prompt_ids), completion_ids.shape[1]
    rows = torch.arange(len(completion_ids), device=prompt_ids.device) // num_generations  # (N,)
    # A completion's last token predicts nothing: it runs through neither path. Attending to padding
    # on the right does no harm: no token that counts comes after it.
    attention_mask = torch.cat([prompt_mask[rows], torch.ones_like(completion_mask[:, 1:])], 1)
    attention_mask, tokens = attention_mask.long(), completion_ids[:, :-1]  # (N, P + C - 1)
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    ids = completion_ids[completion_mask]  # (M,): padding costs nothing in the output layer

    if not fast:
        tokens = torch.cat([prompt_ids[rows], tokens], 1)
        inputs = dict(attention_mask=attention_mask, position_ids=positions, use_cache=False)
        # `forward`, not a call: where FSDP shards the model, this function is the call (`shard`).
        logits = model.forward(tokens, **inputs, logits_to_keep=length).logits[:, -length:]
        logits = _float(logits[completion_mask]) / temperature  # (M, V)
        logp = logits.log_softmax(1).gather(1, ids[:, None])[:, 0]
    else:
        cache, backbone = PromptCache(config=model.config), model.base_model
        inputs = dict(attention_mask=prompt_mask.long(), past_key_values=cache, use_cache=True)
        inputs["position_ids"] = (prompt_mask.cumsum(1) - 1).clamp(min=0)
        # A prompt's last hidden state predicts the first token of each of its completions …
        hidden = backbone(prompt_ids, **inputs)[0][rows, -1:]  # (B, P, H) -> (N, 1, H)
        if length > 1:  # … and the completions without their last token predict the others.
            inputs = dict(past_key_values=cache.repeat(num_generations), use_cache=True)
            inputs |= dict(attention_mask=attention_mask, position_ids=positions[:, 1 - length :])
            hidden = torch.cat([hidden, backbone(tokens, **inputs)[0]], 1)  # (N, C, H)
        weight = model.get_output_embeddings().weight
        logp = LogProbs.apply(hidden[completion_mask], weight, ids, temperature)
    return logp.new_zeros(completion_mask.shape).masked_scatter(completion_mask, logp)


class PromptCache(DynamicCache):
    """A key-value cache that a forward pass reads but never changes: what it adds goes to `after`.

    So a layer that gradient checkpointing runs a second time sees what it saw the first time. (The
    copy of a layer is shallow: `update` replaces its tensors and writes into none.)
    """

    def update(self, keys, values, layer_idx, *args, **kwargs):
        layer = copy.copy(self.layers[layer_idx])
        self.after = {**getattr(self, "after", {}), layer_idx: layer}
        return layer.update(keys, values, *args, **kwargs)

    def repeat(self, num_generations):
        """What the pass left, as a new cache, each prompt `num_generations` times."""
        repeated = PromptCache()
        repeated.layers = [self.after[i] for i in range(len(self.layers))]
        repeated.batch_repeat_interleave(num_generations)
        return repeated


class LogProbs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature) at `ids`: (M, H), (V, H), (M,) -> (M,).

    Goes through the vocabulary a chunk at a time: the (M, V) logits never stand in memory, and each
    row of the weight's gradient is computed at once, over all tokens. Backward computes the logits
    again: d logp / d logits = (onehot(id) - softmax(logits / temperature)) / temperature.
    """

    CHUNK = 2**22  # logits at once: 16 MiB in float32

    @staticmethod
    def chunks(hidden, weight, ids, temperature):
        """Of each chunk of V: its slice, logits (M, chunk), which of the ids it holds (M,), and
        their columns in it (M, 1)."""
        chunk = LogProbs.CHUNK * (16 if hidden.is_cuda else 1)
        size = max(1, chunk // max(1, len(ids)))
        for start in range(0, len(weight), size):
            logits = _float(hidden @ weight[start : start + size].t()).div_(temperature)
            where = (ids - start).clamp(0, logits.shape[1] - 1)
            yield slice(start, start + size), logits, where == ids - start, where[:, None]

    @staticmethod
    def forward(ctx, hidden, weight, ids, temperature):
        log_z = _float(hidden.new_full((len(ids),), -torch.inf))
        chosen = torch.zeros_like(log_z)
        for _, logits, held, where in LogProbs.chunks(hidden, weight, ids, temperature):
            log_z = torch.logaddexp(log_z, logits.logsumexp(1))
            chosen = torch.where(held, logits.gather(1, where)[:, 0], chosen)
        ctx.save_for_backward(hidden, weight, ids, log_z)
        ctx.temperature = temperature
        return chosen - log_z

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, ids, log_z = ctx.saved_tensors
        grad = grad / ctx.temperature
        grad_hidden = torch.zeros_like(hidden, dtype=grad.dtype)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for part, logits, held, where in LogProbs.chunks(hidden, weight, ids, ctx.temperature):
            grad_logits = logits.sub_(log_z[:, None]).exp_().mul_(-grad[:, None])  # -softmax
            grad_logits.scatter_add_(1, where, (grad * held)[:, None])  # + onehot
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden += grad_logits @ weight[part]
            if grad_weight is not None:
                grad_weight[part] = grad_logits.t() @ hidden
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


# --------------------------------------------------------------------------------------------- loss


def masked_mean(x, mask, dim=None):
    """Mean of x where mask is true, over all of it or along `dim`, kept with size 1; 0 if none."""
    dims = {} if dim is None else dict(dim=dim, keepdim=True)
    return (x * mask).sum(**dims) / mask.sum(**dims).clamp(min=1)


def kl_k3(logp, ref_logp):
    """exp(d) - d - 1 with d = ref_logp - logp, never negative, unbiased for KL(policy, reference).

    (N, C) -> (N, C) in nats: DeepSeekMath eq. 4, Schulman's k3 (joschu.net/blog/kl-approx.html).
    Needs `_float` where it is pasted.

    >>> kl_k3(torch.tensor([0.7]).log(), torch.tensor([0.5]).log())
    tensor([0.0508])
    """
    d = _float(ref_logp) - _float(logp)
    return torch.expm1(d) - d


def importance_ratio(logp, old_logp, mask, importance_sampling_level="token"):
    """New over old probability of each token, (N, C). `old_logp` None: the policy has not moved.

    "sequence" gives all tokens of a completion one ratio, exp of the mean of logp - old_logp over
    its tokens (GSPO, arXiv:2507.18071, eq. 7).
    """
    log_ratio = _float(logp) - _float(logp.detach() if old_logp is None else old_logp)
    if importance_sampling_level == "sequence":
        log_ratio = masked_mean(log_ratio, mask, dim=1).expand_as(logp)
    elif importance_sampling_level != "token":
        raise ValueError(f"importance_sampling_level {importance_sampling_level!r} is unknown")
    return log_ratio.exp()


def clipped_surrogate(
    logp, old_logp, advantages, epsilon=0.2, epsilon_high=None, mask=None,
    importance_sampling_level="token",
):  # fmt: skip
    """min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A), (N, C): what is to be maximised.

    logp, old_logp: (N, C); advantages: (N,) or (N, C); `mask` matters to the "sequence" ratio
    alone. PPO (arXiv:1707.06347) eq. 7 as in DeepSeekMath eq. 3; `epsilon_high` is DAPO's
    clip-higher (arXiv:2503.14476). Needs `importance_ratio`, `masked_mean` and `_float`.

    >>> logp, old_logp = torch.tensor([[0.7], [0.7]]).log(), torch.tensor([[0.5], [0.5]]).log()
    >>> clipped_surrogate(logp, old_logp, torch.tensor([0.9354, -0.9354])).flatten()
    tensor([ 1.1225, -1.3096])
    """
    mask = torch.ones_like(logp) if mask is None else mask
    ratio = importance_ratio(logp, old_logp, mask, importance_sampling_level)
    advantages = advantages.reshape(len(logp), -1)  # (N, 1) or (N, C)
    clipped = ratio.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    return torch.minimum(ratio * advantages, clipped * advantages)


def grpo_loss(
    logp, old_logp, ref_logp, advantages, mask, *, epsilon=0.2, epsilon_high=None, beta=0.04,
    loss_type="grpo", importance_sampling_level="token", max_completion_length=None,
    num_sequences=None, num_tokens=None,
):  # fmt: skip
    """(scalar to minimise, metrics): DeepSeekMath eq. 3. The metrics `kl`, `entropy` (its estimate
    -logp), `ratio_mean` and `clip_fraction` are means over unmasked tokens, detached.

    logp, old_logp, ref_logp: (N, C) in nats, mask: (N, C) bool, advantages: (N,) or (N, C).
    `old_logp` None: the policy has not moved, the ratio is 1. `ref_logp` None: no KL term. What
    stands where `mask` is False reaches neither loss nor gradient. -surrogate + beta k3 of each
    token is averaged by `loss_type`:
        grpo     mean over sequences of the mean over their tokens
        dapo     sum over tokens / num_tokens
        dr_grpo  sum over tokens / (num_sequences * max_completion_length); C if that is None
    `num_sequences` and `num_tokens` are totals of the optimizer batch (None: this call is all of
    it), so that the losses of its micro-batches add up to its loss. Raises ValueError for an
    unknown type. Needs `clipped_surrogate`, `importance_ratio`, `kl_k3`, `masked_mean`, `_float`.
    """
    mask, level = mask.bool(), importance_sampling_level
    advantages = advantages.reshape(len(mask), -1).expand(mask.shape)  # (N, C)
    tensors = (logp, old_logp, ref_logp, advantages)
    filled = [x if x is None else x.masked_fill(~mask, 0) for x in tensors]
    logp, old_logp, ref_logp, advantages = filled
    surrogate = clipped_surrogate(logp, old_logp, advantages, epsilon, epsilon_high, mask, level)
    kl = torch.zeros_like(surrogate) if ref_logp is None else kl_k3(logp, ref_logp)
    token_loss = beta * kl - surrogate  # (N, C), 0 where masked

    num_sequences = len(mask) if num_sequences is None else num_sequences
    num_tokens = mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    if loss_type == "grpo":
        loss = masked_mean(token_loss, mask, dim=1).sum() / num_sequences
    elif loss_type == "dapo":
        loss = token_loss.sum() / num_tokens
    elif loss_type == "dr_grpo":
        loss = token_loss.sum() / (num_sequences * (max_completion_length or mask.shape[1]))
    else:
        raise ValueError(f"loss_type {loss_type!r} is unknown")

    with torch.no_grad():
        ratio = importance_ratio(logp, old_logp, mask, level)
        clipped = (surrogate < ratio * advantages).float()  # the minimum is the clipped side
        metrics = dict(kl=kl, entropy=-logp, ratio_mean=ratio, clip_fraction=clipped)
        metrics = {name: masked_mean(value, mask) for name, value in metrics.items()}
    return loss, metrics


# ------------------------------------------------------------------------------------------- update


class MasterAdamW:
    """AdamW on float32 master weights, whatever dtype the model computes in.

    bfloat16 keeps 8 bits of a weight: a change by less than about 1/512 of it is rounded away, and
    at a learning rate of 1e-6 nearly all are. A float32 weight is its own master; a bfloat16 one is
    the upper half of its master, rounded, and the lower 16 bits stand beside it. A parameter thus
    costs 2 + 2 bytes, its moments 8 and its gradient 2 or 4.
    """

    SLICE = 2**20  # weights updated at once: they fit in a cache, and no tensor is copied whole

    def __init__(self, model, weight_decay=0.0):
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.sharded = [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]
        self.num_steps, self.state = 0, []  # [two moments, and the lower halves if there are any]
        for param in self.params:
            dtypes = [torch.float32] * 2 + [torch.int16] * (param.dtype == torch.bfloat16)
            self.state.append([torch.zeros_like(param, dtype=dtype) for dtype in dtypes])
        self.options = dict(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=weight_decay)
        self.options |= dict(amsgrad=False, maximize=False, fused=True)

    @torch.no_grad()
    def step(self, learning_rate, max_grad_norm=math.inf):
        """Clip the gradient to `max_grad_norm`, update, free it -> its norm before clipping.

        If that is not finite, as after a loss that is not, raises `Error` and moves no weight.
        """
        for module in self.sharded:  # FSDP shows whole weights until then; a step is for the shards
            module.reshard()
        gradients = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float32)
        norm = whole(norm(torch.stack([norm(g) for g in gradients if g is not None]))).item()
        if not math.isfinite(norm):
            raise Error(f"the gradient's norm is {norm}; the weights are as they were before")
        scale = min(1.0, max_grad_norm / (norm + 1e-6))
        for param, state in zip(self.params, self.state, strict=True):
            gradient = gradients.pop(0)  # freed as soon as it has been used
            if gradient is None:
                continue
            tensors = (param, gradient, *state)
            own = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
            slices = zip(*(tensor.view(-1).split(self.SLICE) for tensor in own), strict=True)
            for weights, slope, first, second, *lower in slices:
                master = join_halves(weights, *lower) if lower else weights
                count = torch.full((), float(self.num_steps), device=master.device)  # adamw adds 1
                lists = [master], [slope.float() * scale], [first], [second], [], [count]
                adamw(*lists, lr=learning_rate, **self.options)
                if lower:
                    split_halves(master, weights, *lower)
        self.num_steps += 1
        return norm


def join_halves(upper, lower):
    """float32 numbers from their upper 16 bits, as bfloat16, and their lower 16, as int16."""
    return ((upper.view(torch.int16).int() << 16) + lower).view(torch.float32)


def split_halves(master, upper, lower):
    """Write float32 `master` into its halves: `upper`, the nearest bfloat16, and what is left."""
    bits = master.view(torch.int32)
    lower.copy_(bits.to(torch.int16))  # the lower 16 bits, as a number with a sign
    upper.view(torch.int16).copy_((bits - lower) >> 16)


def cut_micro_batches(prompt_lengths, completion_lengths, num_generations, max_tokens):
    """Cut B groups into micro-batches of at most `max_tokens` padded tokens.

    prompt_lengths: (B,), completion_lengths: (N,), on the CPU -> [(prompts, rows), …], indices of
    both. Each prompt of a micro-batch stands before equally many rows: its whole group or, where
    that would be too long, an equal part of it. Sorted by length, so that little is padding. One
    completion alone may exceed the budget.
    """
    room = (max_tokens - prompt_lengths.max()) // completion_lengths.max().clamp(min=1)
    divisors = [n for n in range(1, num_generations + 1) if num_generations % n == 0]
    size = max(n for n in divisors if n <= max(1, room))  # rows of a group that run together
    order = completion_lengths.argsort(descending=True, stable=True)  # (N,)
    rows = order[(order // num_generations).argsort(stable=True)]  # by group, the longest first
    parts = rows.view(-1, size)  # each of one group
    parts = parts[completion_lengths[parts[:, 0]].argsort(descending=True, stable=True)]
    batches = [parts[:1]]
    for part in parts[1:]:
        longer = torch.cat([batches[-1], part[None]])
        prompt = prompt_lengths[longer[:, 0] // num_generations].max()
        if len(longer) * (prompt + size * completion_lengths[longer[0, 0]]) <= max_tokens:
            batches[-1] = longer
        else:
            batches.append(part[None])
    return [(batch[:, 0] // num_generations, batch.flatten()) for batch in batches]


def crop(prompt_ids, prompt_mask, completion_ids, mask):
    """The same four without the columns that are padding in every row."""
    left, right = prompt_mask.any(0), mask.any(0)
    right[0] = True  # one column at least, where every row is masked
    return prompt_ids[:, left], prompt_mask[:, left], completion_ids[:, right], mask[:, right]


def update(policy, reference, optimizer, config, learning_rate, batch, advantages, fast):
    """num_iterations (mu) AdamW steps on one rollout -> metrics, means over its tokens and steps
    (without a reference, over tokens of groups with an advantage; `grad_norm`: of the last step).

    batch: prompt_ids and prompt_mask (B, P), completion_ids and mask (N, C); advantages: (N,) or
    (N, C). reference: a function of such a batch that gives its log-probs (N, C); None: no KL term.
    """
    prompt_ids, prompt_mask, completion_ids, mask = batch
    num_generations = len(mask) // len(prompt_ids)
    advantages = advantages.to(mask.device).reshape(len(mask), -1).expand(mask.shape)  # (N, C)
    names = "loss_type epsilon epsilon_high beta importance_sampling_level max_completion_length"
    options = {name: getattr(config, name) for name in names.split()}
    # Gradients are averaged over ranks, so the normalisers are means over ranks as well; of
    # sequences each rank has equally many.
    options |= dict(num_sequences=len(mask), num_tokens=mean_tokens(mask))
    if reference is None:  # then a group without advantages has no gradient at all: leave it out
        live = advantages.reshape(len(prompt_ids), -1).any(1)  # (B,)
        live[0] |= ~live.any()  # but one for backward to have something
        rows = live.repeat_interleave(num_generations)  # (N,)
        prompt_ids, prompt_mask = prompt_ids[live], prompt_mask[live]
        completion_ids, mask, advantages = completion_ids[rows], mask[rows], advantages[rows]
    num_live, lengths = mean_tokens(mask), (prompt_mask.sum(1).cpu(), mask.sum(1).cpu())
    if not fast:  # then each completion runs with a prompt of its own
        lengths = 0 * lengths[0], lengths[0].max() + lengths[1]
    cut = cut_micro_batches(*lengths, num_generations, config.micro_batch_tokens)
    parts = [crop(prompt_ids[p], prompt_mask[p], completion_ids[r], mask[r]) for p, r in cut]
    for param in optimizer.params:  # a sum of gradients in bfloat16 would lose small ones
        param.grad_dtype = torch.float32 if len(parts) > 1 else param.dtype

    # A sharded policy has an entry of its own, see `shard`.
    logprobs = getattr(policy, "token_logprobs", functools.partial(token_logprobs, policy))
    old_logps, ref_logps, totals = {}, {}, collections.defaultdict(float)
    for iteration in range(config.num_iterations):
        for i, (part, (_, rows)) in enumerate(zip(parts, cut, strict=True)):
            if iteration == 0 and reference is not None:
                ref_logps[i] = reference(*part)
            logp = logprobs(*part, config.temperature, fast)
            old_logp = old_logps.setdefault(i, logp.detach())  # before any weight has moved
            terms = logp, old_logp, ref_logps.get(i), advantages[rows, : logp.shape[1]]
            loss, metrics = grpo_loss(*terms, part[-1], **options)
            loss.backward()
            share = part[-1].sum() / num_live  # of the tokens that metrics are means over
            for name, value in metrics.items():
                totals[name] += share * value / config.num_iterations
            totals["loss"] += loss.detach() / config.num_iterations
        exchange_gradients(policy, fast)
        totals["grad_norm"] = optimizer.step(learning_rate, config.max_grad_norm)
    records = gather({name: float(total) for name, total in totals.items()})
    return {name: sum(record[name] for record in records) / len(records) for name in totals}


# ----------------------------------------------------------------------------------------- training


@dataclass
class Run:
    """What the functions below share; `set_up` makes it."""

    config: Config
    device: torch.device
    reward_functions: dict  # {name: (function, weight)}
    policy: torch.nn.Module
    tokenizer: transformers.PreTrainedTokenizerBase
    eos_token_ids: list[int]
    fast: bool = True  # whether `token_logprobs` may share prompts
    sampler: Callable = generate  # or `generate_with_transformers`
    resumed: Path | None = None  # the checkpoint to go on from
    lora: torch.nn.Module | None = None  # peft's wrapper of the policy
    train_rows: list[dict] = dataclasses.field(default_factory=list)  # of `encode_prompts`
    eval_rows: list[dict] = dataclasses.field(default_factory=list)
    output_dir: Path | None = None
    track: Callable = lambda record: None  # what --report-to wants done with each row of metrics
    finish: Callable = lambda: None  # and at the end
    stop: str = ""  # the signal that asked for an end

    def log(self, name, *records):
        """Append records to a JSONL file of the run's folder; NaN, which is no JSON, as null."""
        if ranks()[0] == 0:
            records = [{k: None if v != v else v for k, v in row.items()} for row in records]
            with open(self.output_dir / name, "a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in records)
            for row in records if name == "metrics.jsonl" else ():
                self.track(row)


def rollout(run, rows, num_generations, temperature):
    """Completions of B rows -> prompt_ids, prompt_mask (B, P), completion_ids, mask (N, C)."""
    # Masks tell padding from text, so that any token will do as padding.
    config, eos, pad_token_id = run.config, run.eos_token_ids, run.eos_token_ids[0]
    prompts = pad([row["ids"] for row in rows], pad_token_id, "left", run.device)
    how = config.max_completion_length, eos, pad_token_id, temperature, config.top_p, config.top_k
    completion_ids = run.sampler(run.policy, *prompts, num_generations, *how)
    return *prompts, completion_ids, completion_mask(completion_ids, eos)


def score_completions(run, rows, completion_ids, mask):
    """What the completions of B rows are worth -> texts, scores, steps.

    scores: {reward, rewards/<name>: (N,)}, NaN where not judged. steps: None or, if a reward
    function gave a list, one number a step, the (step_rewards, step_ends) of `process_advantages`;
    a single number of another function then belongs to the last step.
    """
    rows = [row for row in rows for _ in range(len(mask) // len(rows))]
    ids = [i[m].tolist() for i, m in zip(completion_ids.cpu(), mask.cpu(), strict=True)]
    spoken = [i[:-1] if i[-1] in run.eos_token_ids else i for i in ids]
    texts = run.tokenizer.batch_decode(spoken, skip_special_tokens=True)
    separator = run.config.step_separator
    parts = [[part for part in text.split(separator) if part.strip()] for text in texts]
    columns = {name: [row["columns"][name] for row in rows] for name in rows[0]["columns"]}
    columns |= dict(prompts=[row["text"] for row in rows], completions=texts)
    del columns["prompt"]  # which is in `messages`, and in `prompts` as the model sees it
    values = score(run.reward_functions, **columns | dict(completion_ids=ids, steps=parts))
    scores, reward = {}, 0
    for name, (_, weight) in run.reward_functions.items():
        lists = [v if isinstance(v, list) else [math.nan if v is None else v] for v in values[name]]
        scores[f"rewards/{name}"] = torch.tensor([sum(v) / max(1, len(v)) for v in lists])
        reward += weight * scores[f"rewards/{name}"].nan_to_num()
    unjudged = torch.stack([*scores.values()]).isnan().all(0)
    scores = dict(reward=reward.masked_fill(unjudged, math.nan), **scores)
    if not any(isinstance(value, list) for column in values.values() for value in column):
        return texts, scores, None

    if run.config.scale_rewards == "batch":
        raise Error("--scale-rewards batch: rewards of single steps are scaled in their group")
    ends = [step_ends(run.tokenizer, row_ids, separator) for row_ids in ids]
    step_rewards = [[0.0] * len(row_ends) for row_ends in ends]
    for name, (_, weight) in run.reward_functions.items():
        for i, value in enumerate(values[name]):
            if not isinstance(value, list):
                value = [0.0] * (len(ends[i]) - 1) + [value or 0.0]
            if len(value) not in (len(ends[i]), len(parts[i])):
                counts = f"{len(value)} numbers for {len(ends[i])} steps"
                raise Error(f"the reward {name} returned {counts}: {texts[i]!r:.200}")
            for j, number in enumerate(value):
                step_rewards[i][j] += weight * number
    for i in unjudged.nonzero()[:, 0].tolist():  # then there is nothing to normalise
        step_rewards[i], ends[i] = [], []
    return texts, scores, (step_rewards, ends)


def step_ends(tokenizer, ids, separator="\n"):
    """Index of each step's last token in a completion's sampled ids. Steps are its non-blank parts.

    The last step runs through the last token, be it EOS or where the completion was cut off.
    """
    ends, pieces = [], tokenizer.batch_decode([[token] for token in ids])
    for i in [i for i, piece in enumerate(pieces) if separator[-1] in piece] + [len(ids) - 1]:
        parts = tokenizer.decode(ids[: i + 1], skip_special_tokens=True).split(separator)
        done = sum(part.strip() != "" for part in parts[: None if i == len(ids) - 1 else -1])
        ends += [i] * (done - len(ends))
    return ends[:-1] + [len(ids) - 1]


def train(config):
    """GRPO from the first prompt to the last checkpoint -> the last row of evaluation."""
    run = set_up(config)
    optimizer, reference, done = prepare(run)
    heed_signals(run)
    (rank, world_size), group, scale = ranks(), config.num_generations, config.scale_rewards
    if config.eval_every and not done:
        evaluate(run, 0)
    bar = tqdm(total=config.max_steps, desc="training", initial=done, disable=rank > 0)
    for step in range(done + 1, config.max_steps + 1):
        start = time.perf_counter()
        # 1. take B prompts
        rows = prompt_batch(run.train_rows, step, config.prompts_per_step, config.seed)
        rows = rows[rank::world_size]
        # 2. sample G completions of each from the current policy
        *prompts, completion_ids, mask = rollout(run, rows, group, config.temperature)
        # 3. score them
        texts, scores, steps = score_completions(run, rows, completion_ids, mask)
        # 4. normalise the scores within each group
        eos = torch.tensor(run.eos_token_ids, device=run.device)
        finished = torch.isin(completion_ids, eos).any(1, keepdim=True)  # (N, 1)
        columns = scores | dict(length=mask.sum(1).cpu(), finished=finished[:, 0].cpu())
        columns = concatenate(gather(columns))  # of all ranks: --scale-rewards batch wants them
        if columns["reward"].isnan().all():
            names = ", ".join(run.reward_functions)
            raise Error(f"no completion was judged by {names}: all returned None")
        outcome = group_advantages(columns["reward"], group, scale)
        if steps:
            advantages = process_advantages(*steps, group, mask.shape[1], scale_rewards=scale)
        else:
            advantages = outcome.chunk(world_size)[rank]
        # 5. ascend the clipped surrogate, held to the reference
        middle = time.perf_counter()
        batch = *prompts, completion_ids, (mask & finished if config.mask_truncated else mask)
        rate = config.learning_rate * min(1.0, step / max(1, config.warmup_steps))
        means = update(run.policy, reference, optimizer, config, rate, batch, advantages, run.fast)
        # 6. log, look, evaluate, save
        end = time.perf_counter()
        record = dict(step=step, **rollout_metrics(columns, outcome, group), **means)
        record |= dict(learning_rate=rate, rollout_seconds=middle - start)
        record |= dict(update_seconds=end - middle, step_seconds=end - start)
        run.log("metrics.jsonl", record | dict(peak_memory_gb=max(gather(peak_memory_gb()))))
        shown = dict(reward=record["reward"], kl=record["kl"], length=record["completion_length"])
        bar.set_postfix(shown)
        bar.update()
        last = step == config.max_steps
        stop = max(gather(run.stop))  # a signal to any rank stops them all
        if config.samples_every and (step % config.samples_every == 0 or step == 1):
            show_samples(run, step, rows, texts, scores, advantages)
        if config.eval_every and (step % config.eval_every == 0 or last):
            evaluate(run, step)
        if last or stop or config.save_every and step % config.save_every == 0:
            save_checkpoint(run, optimizer, step)
        if stop and not last:
            run.finish()
            raise Error(f"{stop} after step {step}; go on with --resume {run.output_dir}")
    bar.close()
    run.finish()
    return conclude(run) if rank == 0 else {}


def set_up(config):
    """The `Run` that a config asks for. Raises `Error` for whatever the config gets wrong."""
    device = join_ranks()
    rank, world_size = ranks()
    alone = config.lora_rank or config.continuous_batching
    if config.prompts_per_step % world_size or world_size > 1 and alone:
        single = "--lora-rank and --continuous-batching are for one"
        raise Error(f"{world_size} ranks: --prompts-per-step must be a multiple; {single}")
    functions = load_rewards(config.reward, device)
    train_rows, eval_rows = load_data(config, needs_answer=judges_answers(functions))
    resumed = newest_checkpoint(Path(config.resume)) if config.resume and rank == 0 else None
    resumed = gather(resumed)[0]
    reference = Path(config.resume or "") / "reference"
    start = str(reference) if resumed and reference.exists() else config.model
    changed = config.sft_steps and (config.beta or config.lora_rank)  # what GRPO began with
    if resumed and changed and not reference.exists():
        raise Error(f"--resume: with these options it needs {reference}, the model as GRPO began")
    dtype = "float32" if world_size > 1 else config.dtype  # FSDP's shards are the masters
    loaded = load_model(dataclasses.replace(config, model=start, dtype=dtype), device)
    sampler = generate if has_plain_cache(loaded[0]) else generate_with_transformers
    if config.continuous_batching:
        sampler = functools.partial(generate_with_transformers, continuous=True)
    run = Run(config, device, functions, *loaded, fast_path_holds(loaded[0]), sampler, resumed)
    transformers.set_seed(config.seed + rank)
    run.train_rows, run.eval_rows = encode_prompts(train_rows, run), encode_prompts(eval_rows, run)
    if (count := len(run.train_rows)) < config.prompts_per_step:
        raise Error(f"{count} prompts are fewer than --prompts-per-step {config.prompts_per_step}")
    longest = max(len(row["ids"]) for row in run.train_rows + run.eval_rows)
    positions = getattr(run.policy.config.get_text_config(), "max_position_embeddings", None)
    if longest + config.max_completion_length > (positions or math.inf):
        need = f"a prompt of {longest} and --max-completion-length {config.max_completion_length}"
        raise Error(f"{need} exceed the {positions} positions of {config.model}")
    name = f"{Path(config.model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run.output_dir = Path(gather(config.output_dir or f"runs/{name}")[0])
    if rank == 0:
        try:
            run.output_dir.mkdir(parents=True, exist_ok=True)
            with open(run.output_dir / "config.json", "w" if config.resume else "x") as file:
                json.dump(dataclasses.asdict(config) | dict(resume=None), file, indent=2)
        except OSError as error:
            can = "cannot be written to, or holds a run: name another, or --resume it"
            raise Error(f"--output-dir {can} ({error})") from None
        if config.report_to != "none":
            run.track, run.finish = tracker(run)
    size = f"{sum(p.numel() for p in run.policy.parameters()):,} parameters, {run.policy.dtype}"
    say(f"{config.model} ({size}) on {run.device}, {count} prompts")
    if not run.fast:
        say(f"note: {type(run.policy).__name__} needs the plain path, slower, with more memory")
    say(f"the first prompt, as the model sees it: {run.train_rows[0]['text']!r}")
    return run


def fast_path_holds(model):
    """Whether `token_logprobs` gives with `fast` what it gives without, in values and gradients.

    Wrong log-probs are never an option, so every model is asked, on a few tokens: not all logits
    are head(hidden) (Gemma 2 caps them, Cohere scales them), not every layer bears a shared cache.
    """
    vocabulary = min(1000, model.config.get_text_config().vocab_size)
    ids = torch.randint(vocabulary, (6, 5), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    batch = [ids[:2], torch.ones_like(ids[:2]).bool(), ids[2:], torch.ones_like(ids[2:]).bool()]
    batch[1][0, :2] = False
    head, results, products = model.get_output_embeddings(), [], []
    try:
        for fast in (False, True):
            logp = token_logprobs(model, *batch, fast=fast)
            gradient = torch.autograd.grad(logp.sum(), model.get_input_embeddings().weight)
            results.append((logp, *gradient))
        # On inputs so large that a cap shows even in a model whose logits are small.
        enlarge = head.register_forward_pre_hook(lambda module, inputs: (1000 * inputs[0],))
        record = head.register_forward_hook(lambda module, inputs, out: products.append(out))
        with enlarge, record, torch.no_grad():
            logits = model(ids).logits
    except Exception:  # whatever a model raises that has no such cache or no such head
        return False
    tolerance = 0.05 if model.dtype in (torch.bfloat16, torch.float16) else 1e-4
    same = [(f - p).norm() <= tolerance * p.norm() for p, f in zip(*results, strict=True)]
    capped = not torch.equal(logits.float(), products[0].float())
    return all(same) and not capped and getattr(head, "bias", 0) is None  # LogProbs adds no bias


def has_plain_cache(model):
    """Whether the model's cache is keys and values alone, which can be repeated and cut by rows. A
    state such as Mamba's cannot, and some forward methods ignore `past_key_values`."""
    layers = DynamicCache(config=model.config).layers
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    return plain and "past_key_values" in inspect.signature(model.forward).parameters


def prepare(run):
    """The supervised steps, the adapters, the optimizer, the reference, and what an interrupted run
    left -> (optimizer, reference, number of steps done)."""
    config, path = run.config, run.resumed
    if config.gradient_checkpointing:
        checkpoint_layers(run.policy)
    if config.lora_rank:
        add_lora(run)
    if ranks()[1] > 1:
        shard(run.policy, compute_dtype(config, run.device))
    if config.sft_steps and not path:
        sft(run)
        if run.lora:  # GRPO starts from the model with what these adapters learnt
            run.policy = run.lora.merge_and_unload()
            add_lora(run)
    if not path and config.max_steps and (config.beta or run.lora):
        try:
            save_model(run, run.output_dir / "reference")
        except Exception as error:  # a full disk, for one
            raise Error(f"cannot save the reference: {first_line(error)}") from None
    optimizer = MasterAdamW(run.policy, config.weight_decay)
    reference = freeze_reference(run) if config.beta and config.max_steps else None
    if path:
        return optimizer, reference, restore(run, optimizer, path)
    for name in ("metrics.jsonl", "samples.jsonl") if ranks()[0] == 0 else ():
        (run.output_dir / name).write_text("")  # a run that left no checkpoint starts over
    return optimizer, reference, 0


def freeze_reference(run):
    """The policy as it stands, as a function: a batch -> its log-probs (N, C)."""
    if run.lora:
        model = run.policy
    elif ranks()[1] > 1:  # a copy for each rank, of what the first one saved
        saved = dataclasses.replace(run.config, model=str(run.output_dir / "reference"))
        model = load_model(saved, run.device)[0]
    else:
        model = copy.deepcopy(run.policy)

    @torch.no_grad()
    def reference(*batch):
        with run.lora.disable_adapter() if run.lora else contextlib.nullcontext():
            return token_logprobs(model, *batch, run.config.temperature, run.fast)

    return reference


def sft(run):
    """Supervised steps on the rows' solutions, before GRPO: the loss is on solution and EOS.

    With one solution a prompt and an advantage of 1 for every token, the gradient of a GRPO update
    without a reference is that of the mean log-prob, so this is `update` on given completions.
    """
    config, optimizer, rows = run.config, MasterAdamW(run.policy), []
    for row in run.train_rows:
        text = row["columns"].get("solution") or row["columns"]["answer"]
        ids = run.tokenizer.encode(str(text), add_special_tokens=False) + run.eos_token_ids[:1]
        if text is not None and len(ids) <= config.max_completion_length:
            rows.append(dict(prompt=row["ids"], solution=ids))
    if len(rows) < len(run.train_rows):
        left_out = f"{len(run.train_rows) - len(rows)} of {len(run.train_rows)} solutions"
        say(f"left out {left_out}: none, or over {config.max_completion_length} tokens")
    if not rows:
        raise Error("--sft-steps: no row has a `solution` or `answer` to learn from")
    (rank, world_size), batch_size = ranks(), config.prompts_per_step * config.num_generations
    likelihood = dataclasses.replace(config, loss_type="dapo", num_iterations=1, temperature=1.0)
    bar = tqdm(range(1, config.sft_steps + 1), "supervised", disable=rank > 0)
    for step in bar:
        mine = prompt_batch(rows, step, batch_size, config.seed)[rank::world_size]
        prompts = pad([row["prompt"] for row in mine], 0, "left", run.device)
        solutions, mask = pad([row["solution"] for row in mine], 0, "right", run.device)
        optimize = run.policy, None, optimizer, likelihood, config.sft_learning_rate
        metrics = update(*optimize, (*prompts, solutions, mask), mask.float(), run.fast)
        bar.set_postfix(loss=metrics["entropy"])  # mean of -logp: the cross-entropy


def pass_at_k(num_samples, num_right, k):
    """Unbiased estimate of the chance that one of k samples is right (arXiv:2107.03374, eq. 1).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def evaluate(run, step):
    """Means over the held-out rows, logged: reward and scores of greedy completions and, with the
    accuracy reward, pass@1, 2, 4, … of sampled ones. Leaves the random state as it was."""
    config, (rank, world_size), count, parts = run.config, ranks(), run.config.eval_samples, []
    if not run.eval_rows:  # fewer than ten rows of data leave none to hold out
        return
    # As many completions at once as in a step of training, on every rank.
    at_once = config.prompts_per_step * config.num_generations // (max(1, count) * world_size)
    mine = run.eval_rows[rank::world_size] or run.eval_rows[:1]  # FSDP wants every rank to run
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        torch.manual_seed(config.seed + rank)
        starts = range(0, len(mine), max(1, at_once))
        for start in tqdm(starts, "evaluating", leave=False, disable=rank > 0):
            rows = mine[start : start + max(1, at_once)]
            part = score_completions(run, rows, *rollout(run, rows, 1, temperature=0)[2:])[1]
            if count and run.reward_functions.get("accuracy", [None])[0] is accuracy_reward:
                samples = rollout(run, rows, count, config.temperature)
                right = score_completions(run, rows, *samples[2:])[1]["rewards/accuracy"]
                right = right.view(len(rows), count).sum(1).int().tolist()
                for k in (2**i for i in range(count.bit_length())):
                    part[f"pass@{k}"] = torch.tensor([pass_at_k(count, n, k) for n in right])
            parts.append(part)
    parts = gather(parts if rank < len(run.eval_rows) else [])
    columns = concatenate(sum(parts, [])).items()
    means = {f"eval/{name}": column.nanmean().item() for name, column in columns}
    run.log("metrics.jsonl", dict(step=step, **means))


def concatenate(parts):
    """Dicts of columns -> the dict of whole columns."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def rollout_metrics(columns, advantages, num_generations):
    """What a row of metrics tells of the completions of all ranks: their lengths, which of them are
    finished, their scores (NaN: not judged) and, as outcomes, advantages, each of shape (N,)."""
    scores = {name: column for name, column in columns.items() if name.startswith("reward")}
    unjudged = {name[8:]: int(c.isnan().sum()) for name, c in scores.items() if name != "reward"}
    groups = columns["reward"].view(-1, num_generations)
    return dict(
        **{name: column.nanmean().item() for name, column in scores.items()},
        **{f"unjudged/{name}": number for name, number in unjudged.items() if number},
        reward_std=groups.std(1).nanmean().item(),
        zero_std_fraction=(advantages.view(groups.shape) == 0).all(1).float().mean().item(),
        completion_length=columns["length"].float().mean().item(),
        num_tokens=int(columns["length"].sum()),
        truncated_fraction=1 - columns["finished"].float().mean().item(),
    )


def peak_memory_gb():
    """The most memory in use so far, in GiB: of the GPU's allocator, else resident on the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource  # not on Windows

    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def show_samples(run, step, rows, texts, scores, advantages):
    """Print the first completion of each of the first three prompts; all go to samples.jsonl."""
    group, records = run.config.num_generations, []
    for i, text in enumerate(texts):
        record = dict(step=step, prompt=rows[i // group]["text"], completion=text)
        record |= {name: column[i].item() for name, column in scores.items()}
        records.append(record | dict(advantage=advantages[i].tolist()))
    for i in range(0, len(texts), group)[:3]:
        prompt, completion = records[i]["prompt"][-80:], texts[i][:300]
        say(f"step {step}  reward {scores['reward'][i]:g}  {prompt!r} -> {completion!r}")
    run.log("samples.jsonl", *records)


def conclude(run):
    """Say what happened, in two lines -> the last row of evaluation."""
    rows = read_log(run.output_dir, "metrics.jsonl")
    evaluations = [row for row in rows if row.get("eval/reward") is not None]
    rewards = [row["reward"] for row in rows if "reward" in row]
    if evaluations:
        accuracy = evaluations[0].get("eval/rewards/accuracy") is not None
        name, form = ("eval/rewards/accuracy", ".0%") if accuracy else ("eval/reward", ".2f")
        before, after = (format(evaluations[i][name], form) for i in (0, -1))
        greedy = f"greedy {name.split('/')[-1]} on {len(run.eval_rows)} held-out prompts"
        print(f"{greedy}: {before} before, {after} after, best at step {best_evaluated(rows)}")
    if rewards:
        means = [part.mean() for part in numpy.array_split(rewards, min(60, len(rewards)))]
        low, high = min(means), max(means)
        bars = "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / (high - low or 1))] for mean in means)
        print(f"mean sampled reward, step by step: {means[0]:.2f} {bars} {means[-1]:.2f}")
    return evaluations[-1] if evaluations else {}


# ------------------------------------------------------------------------------ several processes


def ranks():
    """(number of this process, number of processes)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def join_ranks():
    """This process's device; under torchrun it first meets the others."""
    cuda = torch.cuda.is_available()
    if "LOCAL_RANK" in os.environ and not dist.is_initialized():
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        patience = datetime.timedelta(hours=2)  # others wait while one saves, or asks a judge
        dist.init_process_group("nccl" if cuda else "gloo", timeout=patience)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def gather(value):
    """A list of what each rank gives."""
    values = [value] * ranks()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def say(text):
    """Print above the progress bar, on the first rank alone."""
    if ranks()[0] == 0:
        tqdm.write(text)


def shard(policy, compute_dtype):
    """FSDP2: each rank keeps its share of each float32 weight, gradient and moment. Whole weights,
    in `compute_dtype`, are gathered once for a rollout and once for each update."""
    precision = fsdp.MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    layers = [m for m in policy.modules() if isinstance(m, GradientCheckpointingLayer)]
    for module in [*layers, policy]:
        fsdp.fully_shard(module, mp_policy=precision, reshard_after_forward=False)
    policy.set_reshard_after_backward(False)  # layers stay whole until the optimizer's step
    policy.set_requires_gradient_sync(False)  # and gradients until `exchange_gradients`
    policy.token_logprobs = functools.partial(token_logprobs, policy)
    fsdp.register_fsdp_forward_method(policy, "token_logprobs")  # an entry beside `forward`


def exchange_gradients(policy, fast):
    """Average the ranks' gradients. FSDP does it in a backward, once for each layer; so all ranks
    run one more, of one token and times zero. In those before it nothing is exchanged, so that
    ranks may cut different numbers of micro-batches."""
    if ranks()[1] > 1:
        token = torch.zeros(1, 1, dtype=torch.long, device=policy.device)
        batch = token, token == 0, token, token == 0
        policy.set_requires_gradient_sync(True)
        (0 * policy.token_logprobs(*batch, fast=fast)).sum().backward()
        policy.set_requires_gradient_sync(False)


def mean_tokens(mask):
    """Unmasked tokens of a rank, the mean over ranks, at least 1."""
    return torch.tensor(gather(mask.sum().item())).float().mean().clamp(min=1)


def whole(tensor):
    """All of a sharded tensor, on every rank; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ---------------------------------------------------------------- checkpoints, trackers, signals


def save_model(run, path):
    """A folder that `from_pretrained` and vLLM load; with LoRA the merged model, and `adapter/`."""
    model, state = run.policy, None
    if run.lora:
        run.lora.save_pretrained(path / "adapter")
        model = copy.deepcopy(run.lora.cpu()).merge_and_unload()  # a GPU may hold no second copy
        run.lora.to(run.device)
    if ranks()[1] > 1:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)  # from all ranks, for the first one
        dtype = compute_dtype(run.config, run.device)
        state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}
    if ranks()[0] == 0:
        model.save_pretrained(path, state_dict=state)
        run.tokenizer.save_pretrained(path)
    gather(None)  # no rank reads before it is written


def save_checkpoint(run, optimizer, step):
    """OUTPUT_DIR/checkpoint-<step>: the model and all that going on needs, whole or not at all.

    It is written under another name, flushed and then renamed; `manifest.json` holds a digest of
    each file. Older checkpoints than the newest `keep_checkpoints` go, except the best evaluated.
    """
    path = run.output_dir / f"checkpoint-{step}"
    temporary = run.output_dir / f".checkpoint-{step}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        save_model(run, temporary)
        state = dict(step=step, optimizer=optimizer_state(optimizer))
        state["random"] = gather(random_state())  # of every rank
        if ranks()[0] == 0:
            torch.save(state, temporary / "trainer_state.pt")
            files = [file for file in temporary.rglob("*") if file.is_file()]
            digests = {str(file.relative_to(temporary)): digest(file) for file in files}
            (temporary / "manifest.json").write_text(json.dumps(digests, indent=2))
            for file in [*files, temporary / "manifest.json"]:
                with open(file, "rb") as handle:
                    os.fsync(handle.fileno())
            shutil.rmtree(path, ignore_errors=True)
            os.rename(temporary, path)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        text = f"cannot save {path}: {first_line(error)}; earlier checkpoints are as they were"
        raise Error(text) from None
    gather(None)
    say(f"saved {path}")
    best = best_evaluated(read_log(run.output_dir, "metrics.jsonl"))
    for old in checkpoints(run.output_dir)[run.config.keep_checkpoints :]:
        if ranks()[0] == 0 and old.name != f"checkpoint-{best}":
            shutil.rmtree(old, ignore_errors=True)


def optimizer_state(optimizer):
    """Everything that a step depends on, whole, on the first rank's CPU."""

    def save(tensor):
        tensor = whole(tensor)  # from all ranks
        return None if ranks()[0] else tensor.cpu()

    rows = zip(optimizer.params, optimizer.state, strict=True)
    tensors = [[save(x) for x in (param.data, *state)] for param, state in rows]
    return dict(tensors=tensors, num_steps=optimizer.num_steps)


@torch.no_grad()
def restore_optimizer(optimizer, saved):
    """What `optimizer_state` gave, on any number of ranks: masters and moments."""
    optimizer.num_steps = saved["num_steps"]
    rows = zip(optimizer.params, optimizer.state, saved["tensors"], strict=True)
    for param, state, (weights, first, second, *lower) in rows:
        master = join_halves(weights, *lower) if lower else weights
        for tensor, value in zip((param, *state), (master, first, second), strict=False):
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements)
            tensor.copy_(value)
        if len(state) > 2:
            split_halves(master.to(param.device), param, state[2])


def digest(file):
    """SHA-256 of a file, in hexadecimal digits."""
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def best_evaluated(rows):
    """The step of the best evaluation in rows of metrics, or None."""
    evaluations = [row for row in rows if row.get("eval/reward") is not None]
    return max(evaluations, key=lambda row: row["eval/reward"], default={}).get("step")


def checkpoints(output_dir):
    """The checkpoint folders of a run, newest first."""
    paths = [path for path in output_dir.glob("checkpoint-*") if path.name[11:].isdigit()]
    return sorted(paths, key=lambda path: int(path.name[11:]), reverse=True)


def newest_checkpoint(output_dir):
    """The newest checkpoint folder that is whole, or None if there never was one. Damaged ones that
    are newer get another name. Raises `Error` if all are damaged."""
    damaged = []
    for path in checkpoints(output_dir):
        with contextlib.suppress(OSError, ValueError):
            digests = json.loads((path / "manifest.json").read_text())
            if all(digest(path / name) == value for name, value in digests.items()):
                for newer in damaged:
                    shutil.rmtree(f"{newer}.damaged", ignore_errors=True)
                    newer.rename(f"{newer}.damaged")
                return path
        say(f"{path} is damaged and left aside")
        damaged.append(path)
    if damaged:
        raise Error(f"--resume {output_dir}: all of its checkpoints are damaged")


def restore(run, optimizer, path):
    """Weights, optimizer, random states and logs as they were when `path` was saved -> its step."""
    state = torch.load(path / "trainer_state.pt", map_location="cpu", weights_only=True, mmap=True)
    rank, world_size = ranks()
    try:
        restore_optimizer(optimizer, state["optimizer"])
    except (RuntimeError, ValueError) as error:
        other = "was saved with other options: " + first_line(error)
        raise Error(f"--resume: {path} {other}") from None
    for name in ("metrics.jsonl", "samples.jsonl") if rank == 0 else ():
        rows = [row for row in read_log(run.output_dir, name) if row["step"] <= state["step"]]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (run.output_dir / name).write_text(text, encoding="utf-8")
    if world_size == len(state["random"]):  # else the ranks draw anew
        random_state(state["random"][rank])
    say(f"going on after step {state['step']}")
    return state["step"]


def read_log(output_dir, name):
    """Rows of a log, without the half-written last one that a crash can leave."""
    rows = []
    with contextlib.suppress(OSError, ValueError), open(output_dir / name, encoding="utf-8") as log:
        rows.extend(map(json.loads, log))
    return rows


def random_state(state=None):
    """The states of all random generators; with `state`, sets them to it."""
    if state:
        torch.set_rng_state(state["torch"])
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
        random.setstate(state["python"])
        numpy.random.set_state(tuple(state["numpy"]))
    name, numbers, *rest = numpy.random.get_state()
    states = dict(python=random.getstate(), numpy=[name, numbers.tolist(), *rest])
    return states | dict(torch=torch.get_rng_state(), cuda=torch.cuda.get_rng_state_all())


def tracker(run):
    """What --report-to does with each row of metrics, and at the end."""
    name = run.config.report_to
    module = import_optional(name, f"--report-to {name}")
    if name != "tensorboard":
        module.init(project="grpo", name=run.output_dir.name, config=dataclasses.asdict(run.config))
        return lambda row: module.log(row, step=row["step"]), module.finish
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(run.output_dir)

    def log(row):
        for name, value in row.items():
            if value is not None:
                writer.add_scalar(name, value, row["step"])

    return log, writer.close


def heed_signals(run):
    """SIGINT and SIGTERM finish the step, save and exit; a second one ends the process at once."""

    def ask(number, frame):
        for other in both:
            signal.signal(other, signal.SIG_DFL)
        run.stop = signal.Signals(number).name
        tqdm.write(f"{run.stop}: finishing the step and saving; once more to stop at once")

    for number in (both := (signal.SIGINT, signal.SIGTERM)):
        signal.signal(number, ask)


# -------------------------------------------------------------------------- reading of answers

_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_NUMBER_IN_TEXT = re.compile(  # -$1,234.50, \\frac{1}{2}, 3 1/2, 1e5, 50%; in 5-3 the 3 has no sign
    rf"(?:(?<![\w)\]}}.%])[-−–])?\\?[$€£]?"
    rf"(?:\\[dt]?frac{{-?{_DECIMAL}}}{{{_DECIMAL}}}|\d+ \d+/\d+|{_DECIMAL}(?:/{_DECIMAL}|e\d+)?)"
    r"(?: ?\\?%)?"
)
_NUMBER = re.compile(  # sign, whole, top, bottom, percent, unit: -3 1/2, 1.5e3, 50 %, 5 cm^2, 5cm
    rf"([-+]?)\s*(?:(\d+)\s+)?({_DECIMAL}(?:[eE][-+]?\d{{1,3}})?)(?:\s*/\s*({_DECIMAL}))?\s*(%)?"
    r"(?:(?:\s+|(?=(?:[cmk]m|kg|ml|ft|lbs?|oz|mph|hrs?|[ap]m)\b))"  # a space, or one of these
    r"([A-Za-z]{2,}(?:[\s./-]+[A-Za-z]+)*\.?(?:\^{?[23]}?)?))?"
)
_NOT_UNITS = {*"pi dozen hundred thousand million billion trillion and or no not half".split()}
_SPELLINGS = {  # what the others become
    "-": "− –", "*": "× · \\times \\cdot", "/": "÷", "%": "\\%", ",": "{,}",
    "\\frac": "\\dfrac \\tfrac",
    "": "\\left \\right \\! \\, \\; \\: ^\\circ ^{\\circ} ° \\$ $ € £ \\( \\)",
}  # fmt: skip


def extract_answer(text):
    r"""The one answer of a text: the last \boxed{…}, else what follows the last ####, else the last
    number. None if there is none, or if the last box is not closed.

    >>> extract_answer(r"First \boxed{3}, so \boxed{\frac{1}{2}}."), extract_answer("#### 1,234")
    ('\\frac{1}{2}', '1,234')
    """
    before, box, after = text.rpartition("\\boxed")
    if box:
        after = after.lstrip()
        if not after.startswith("{"):
            return after.split()[0].rstrip("$.,") if after else None
        depth = 0
        for match in re.finditer(r"(?<!\\)[{}]", after):
            depth += 1 if match[0] == "{" else -1
            if depth == 0:
                return after[1 : match.start()].strip() or None
        return None
    before, mark, after = text.rpartition("####")
    line = after.strip().partition("\n")[0].strip() if mark else ""
    if line and (_number(line) or not re.search(r"[A-Za-z]{2,} ", line)):
        return line  # what follows #### is the answer, unless it is prose
    return (_NUMBER_IN_TEXT.findall(line if mark else text) or [None])[-1]


def _clean(text):
    """LaTeX in one of its many spellings."""
    for spelling, others in _SPELLINGS.items():
        for other in others.split():
            text = text.replace(other, spelling)
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*{([^{}]*)}", r" \1", text.replace("\\ ", " "))
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text).strip().rstrip(".,;: ")
    return re.sub(r"^[A-Za-z]\w{0,9}(?:\([A-Za-z]\))?\s*=([^=]*)$", r"\1", text).strip()  # x = 5


def _number(text):
    """(exact value, whether in percent, words of its unit) of a text that is one number."""
    if len(text) > 400:  # no answer is that long, and thousands of digits cost time
        return None
    text = re.sub(r"\\frac{(-?[\d.,]+)}{([\d.,]+)}", r" \1/\2", _clean(text)).strip()
    text = re.sub(r"\s*\*\s*10\^{?([-+]?\d{1,3})}?", r"e\1", re.sub(r"^-\s+", "-", text))
    match = _NUMBER.fullmatch(text)
    sign, whole, top, bottom, percent, unit = match.groups("") if match else [""] * 6
    words = re.findall("[a-z]+", unit.lower())
    if not top or whole and not bottom or _NOT_UNITS & {*words}:
        return None
    top, bottom = (Fraction(digits.replace(",", "")) for digits in (top, bottom or "1"))
    if bottom == 0:
        return None
    value = (int(whole or 0) + top / bottom) * (-1 if sign == "-" else 1)
    return (value, True, []) if words == ["percent"] else (value, bool(percent), words)


def answers_match(answer, gold):
    r"""Whether two answers are the same: as exact rationals if both are numbers, else as LaTeX in
    one spelling. A percent sign that only one has may mean the number or a hundredth of it.

    >>> answers_match("$80,000.00", "80000"), answers_match(r"\frac{1}{2}", "0.5")
    (True, True)
    """
    if not answer or not gold:
        return False
    if (a := _number(answer)) and (g := _number(gold)):
        (value, percent, unit), (gold_value, gold_percent, gold_unit) = a, g
        scale = Fraction(100) ** (int(percent) - int(gold_percent))
        same_unit = unit == gold_unit or not unit or not gold_unit
        return same_unit and value in (gold_value, gold_value * scale)
    texts = [re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", _clean(text)) for text in (answer, gold)]
    texts = [re.sub(r"^\((\w)\)$", r"\1", text) for text in texts]
    a, g = (text.casefold() if text.isalpha() else text for text in texts)
    return a == g != ""


def gold_answer(answer):
    """The data's answer: in a box, after ####, else the whole text. None if it is empty."""
    text = "" if answer is None else str(answer).strip()
    return extract_answer(text) if "\\boxed" in text or "####" in text else text or None


# --------------------------------------------------------------------------------- more rewards


def format_reward(prompts, completions, **columns):
    """1.0 for one `<think>…</think>` and then an answer, else 0.0 (DeepSeek-R1, arXiv:2501.12948,
    2.2.2). A prompt that ends in `<think>` has opened the block already.

    >>> format_reward(["", ""], ["<think>2 + 2</think>4", "4"])
    [1.0, 0.0]
    """
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        opened = prompt.rstrip().endswith("<think>")
        text = ("<think>" if opened else "") + completion.strip()
        once = text.startswith("<think>") and text.count("<think>") == text.count("</think>") == 1
        scores.append(float(once and text.partition("</think>")[2].strip() != ""))
    return scores


def step_reward(prompts, completions, steps=None, **columns):
    """A list of scores for each completion, one for each non-blank line (process supervision): 1.0
    if all equations in it hold, 0.0 if one does not, 0.5 if there is none.

    >>> step_reward([""], ["16 - 3 - 4 = 9 eggs\\n9 * 2 = $<<9*2=18>>19\\nso 18"])
    [[1.0, 0.0, 0.5]]
    """
    if steps is None:
        steps = [[s for s in text.split("\n") if s.strip()] for text in completions]
    kinds = {True: 1.0, False: 0.0, None: 0.5}
    return [[kinds[equations_hold(step)] for step in parts] for parts in steps]


_TERM = r"[-(\s]*\d[\d.]*%?[)\s]*"
_SIDE = rf"{_TERM}(?:[-+*/^]{_TERM})*"
_EQUATION = re.compile(rf"(?<![\w.]){_SIDE}(?:={_SIDE})+")


def equations_hold(text):
    """Whether all equations between numbers in a line are true; None if there is none.

    Exact, but a side with decimals may be rounded and 40% may be 40. What stands beside an unknown
    (2x + 1 = 5) is no such equation. The <<…>> of GSM8K are read apart from the text around them.
    """
    text = text.translate(str.maketrans("−–×·÷", "--**/", "$€£\\"))
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    text = re.sub(r"(?<=[\d)%])\s*x(?=\s*[\d(])", "*", text)
    truths = []
    for part in [re.sub(r"<<.*?>>", "", text), *re.findall(r"<<(.*?)>>", text)]:
        for match in _EQUATION.finditer(part[:1000]):
            before, after = part[: match.start()].rstrip()[-1:], part[match.end() :][:1]
            if before in (*"+-*/^",) or before.isalnum() and match[0].strip()[0] == "-":
                continue
            if after in (*"+-*/^(",) or after.isalpha() and not match[0][-1].isspace():
                continue
            sides = [(side.strip(), evaluate_arithmetic(side)) for side in match[0].split("=")]
            for (_, left), (written, right) in zip(sides, sides[1:], strict=False):
                if None not in (left, right):
                    decimals = re.fullmatch(r"-?\d*\.(\d+)%?", written)
                    slack = Fraction(1, 2 * 10 ** len(decimals[1])) if decimals else 0
                    scales = (1, 100) if written.endswith("%") else (1,)
                    truths.append(any(abs(left - right * scale) <= slack for scale in scales))
    return all(truths) if truths else None


def evaluate_arithmetic(text):
    """The exact value of + - * / ^ % and brackets over decimal numbers; None if there is none.
    Python's parser reads it, nothing is executed."""
    signs = {ast.Add: Fraction.__add__, ast.Sub: Fraction.__sub__, ast.Mult: Fraction.__mul__}
    signs |= {ast.Div: Fraction.__truediv__, ast.Pow: Fraction.__pow__}

    def value(node):
        if isinstance(node, ast.Constant):
            return Fraction(ast.get_source_segment(code, node))
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand)
        left, right = value(node.left), value(node.right)
        digits = max(left.numerator.bit_length(), left.denominator.bit_length())
        if isinstance(node.op, ast.Pow) and (right.denominator > 1 or abs(right) * digits > 4096):
            raise ValueError("a root, or a power that could be huge")
        return Fraction(signs[type(node.op)](left, right))

    code = re.sub(r"(?<![\d.])0+(?=\d)", "", "".join(text.split()).replace("^", "**"))
    code = re.sub(r"([\d.]+)%", r"(\1/100)", code)
    try:
        return value(ast.parse(code, mode="eval").body)
    except (SyntaxError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError):
        return None


def language_reward(prompts, completions, script="LATIN", **columns):
    """Share of a text's letters that are of a script, by Unicode's names: LATIN, CJK, CYRILLIC, …;
    1.0 for a text without letters. The language consistency of DeepSeek-R1 (2.3.2).

    >>> language_reward([""] * 2, ["so x = 5", "因此 x"])
    [1.0, 0.3333333333333333]
    """
    shares = []
    for text in completions:
        hits = [script.upper() in unicodedata.name(char, "") for char in text if char.isalpha()]
        shares.append(sum(hits) / len(hits) if hits else 1.0)
    return shares


def code_reward(prompts, completions, tests, **columns):
    """1.0 where the last fenced block of Python (else of no named language) passes the data's
    `tests`, Python text or a list of such lines, else 0.0; None without tests. Needs what follows,
    through `run_tests`.

    **No sandbox against malice.** The code runs in a process of its own, with limits on time,
    memory, processes and files and, on Linux where the kernel allows it, without network, in a
    file system and a process tree of its own. Where namespaces are refused (many containers), it
    can read and write what your user can, reach the network, signal your processes, and leave
    some of its own behind. And whatever shares a process with its tests can fool them. Train in a
    throw-away container or virtual machine without secrets or network.
    """

    def passes(completion, test):
        if test is None:
            return None
        fence = r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```"
        blocks = re.findall(fence, completion, re.DOTALL | re.MULTILINE)
        named = [code for name, code in blocks if name.lower() in ("python", "python3", "py")]
        code = (named or [code for name, code in blocks if not name] or [None])[-1]
        test = test if isinstance(test, str) else "\n".join(test)
        return float(code is not None and run_tests(code, test, words))

    words, processes = namespaces(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    with ThreadPoolExecutor(max(1, os.cpu_count() // processes)) as pool:
        return list(pool.map(passes, completions, tests))


# A shell script, run inside the new namespaces, with the command as "$@". It mounts an empty file
# system on the current folder, binds each path of $VISIBLE into it, read-only, and stays there.
SANDBOX = """
mount -t tmpfs -o nosuid,nodev,size=64m,mode=777 tmpfs . && cd "$PWD" && IFS=:
for path in $VISIBLE; do
    if [ ! -e "$path" ] || [ -e ".$path" ]; then continue; fi
    if [ -d "$path" ]; then mkdir -p ".$path"; else mkdir -p ".${path%/*}" && : > ".$path"; fi
    mount --bind "$path" ".$path" && mount -o remount,bind,ro ".$path" || exit
done
mkdir proc && mount -t proc proc proc && exec chroot . "$@"
"""

# Runs a job's code, then its tests, and only then repeats the secret that stands behind the job: a
# program that ends early cannot.
PROGRAM = """
import json, os, resource
source, out, null = os.dup(0), os.dup(1), os.open("/dev/null", os.O_RDWR)
job = json.loads(open(0, "rb", 0, closefd=False).readline())
for name, limit in job["limits"].items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
for standard in (0, 1, 2):
    os.dup2(null, standard)
scope = {"__name__": "__main__"}
for name in ("code", "tests"):
    exec(compile(job[name], name, "exec"), scope)
os.write(out, os.read(source, 32))
os._exit(0)
"""


@functools.cache
def namespaces():
    """The words before a command that give it mount, IPC, PID and network namespaces and hide all
    files but Python's and the system's libraries; where the kernel refuses, only a shell as its
    parent, so that code which kills its parent does not kill the trainer."""
    root = os.getuid() == 0  # needs no user namespace, in which it would have no process limit
    words = ["unshare", "--mount", "--ipc", "--net", "--pid", "--fork", "--kill-child"]
    words += [*([] if root else ["--user", "--map-root-user"]), "sh", "-c", SANDBOX, "sh"]
    words += ["setpriv", "--no-new-privs", "--bounding-set=-all"]
    words += ["--reuid=65534", "--regid=65534", "--clear-groups"] if root else []
    with contextlib.suppress(OSError):  # no such command
        if run_tests("", "", words):
            return words
    say("note: the code reward runs without namespaces, which this system refuses: see the README")
    return ["sh", "-c", '"$@"; exit', "sh"]


def run_tests(code, tests, words=(), seconds=5, megabytes=512):
    """Whether `code` and then `tests` run to their end in a process of their own, started by the
    command `words`, within so much CPU time and three times as much in all (other programs run
    beside it). Read what `code_reward` says of safety."""
    secret = secrets.token_hex(16)  # what only a run that reaches the end of tests repeats
    limits = dict(CPU=seconds, AS=megabytes * 2**20, NPROC=256, FSIZE=2**20, NOFILE=64, CORE=0)
    job = json.dumps(dict(code=code, tests=tests, limits=limits)) + "\n" + secret
    visible = f"/usr:/lib:/lib64:/bin:/dev/null:{sys.prefix}:{sys.base_prefix}"
    command = [*words, os.path.abspath(sys.executable), "-I", "-c", PROGRAM]
    folder = tempfile.mkdtemp()
    with tempfile.TemporaryFile() as output:
        own = dict(cwd=folder, env=dict(PATH="/usr/sbin:/usr/bin:/sbin:/bin", VISIBLE=visible))
        own |= dict(stdin=subprocess.PIPE, stdout=output, stderr=subprocess.DEVNULL)
        process = subprocess.Popen(command, start_new_session=True, **own)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(job.encode(), timeout=3 * seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with contextlib.suppress(RecursionError):  # of folders within folders
            shutil.rmtree(folder, ignore_errors=True)
        output.seek(0)
        return output.read(64) == secret.encode()


def reward_model(path, device):
    """The reward function of a learned reward model: any sequence classifier of transformers with a
    single output, on the question (`messages`) and the completion, in its own chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        load = transformers.AutoModelForSequenceClassification.from_pretrained
        model = load(path, dtype="auto", use_safetensors=True, trust_remote_code=False)
    except Exception as error:
        raise Error(f"cannot load the reward model {path}: {first_line(error)}") from None
    if model.config.num_labels != 1:
        raise Error(f"the reward model {path} has {model.config.num_labels} outputs, not one")
    model.to(device).eval()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id

    @torch.no_grad()
    def score_with_model(prompts, completions, messages=None, **columns):
        texts = [p + c for p, c in zip(prompts, completions, strict=True)]
        if templated := bool(tokenizer.chat_template and messages):
            answers = [[dict(role="assistant", content=text)] for text in completions]
            turns = [m + a for m, a in zip(messages, answers, strict=True)]
            texts = tokenizer.apply_chat_template(turns, tokenize=False)
        scores, how = [], dict(padding=True, return_tensors="pt", add_special_tokens=not templated)
        for start in range(0, len(texts), 16):
            inputs = tokenizer(texts[start : start + 16], **how).to(device)
            scores += model(**inputs).logits[:, 0].float().tolist()
        return scores

    return score_with_model


JUDGE_PROMPT = """Rate how good an answer is.

Question:
{}

Reference answer (may be empty):
{}

Answer to rate:
{}

Reply with one line and nothing else: "Score: N", where N is a whole number from 0 (useless) to 10
(perfect)."""


def judge_reward(target, device=None, timeout=60, attempts=3):
    """The reward function of an LLM as judge, MODEL@URL: any server with OpenAI's protocol, its URL
    without /chat/completions; the key is the environment's OPENAI_API_KEY. 0 to 10 becomes 0 to 1.

    A completion whose call fails `attempts` times, or gets no "Score: N", is None, not 0: it is
    left out, counted, and the last failure is printed.
    """
    model, _, url = target.partition("@")
    if not model or not url.startswith(("http://", "https://")):
        raise ValueError("it takes judge:MODEL@http://HOST:PORT/v1")
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"

    def ask(row):
        """The score, or in words why there is none."""
        body = dict(role="user", content=JUDGE_PROMPT.format(*row))
        body = json.dumps(dict(model=model, temperature=0, messages=[body])).encode()
        request = urllib.request.Request(url.rstrip("/") + "/chat/completions", body, headers)
        for attempt in range(attempts):
            time.sleep(attempt and 0.25 * 2**attempt)
            try:
                with urllib.request.urlopen(request, timeout=timeout) as reply:
                    text = json.load(reply)["choices"][0]["message"]["content"]
                if match := re.fullmatch(r"\s*Score:\s*(10|\d)\s*", text):
                    return int(match[1]) / 10
                failure = f"no score in {text!r:.80}"
            except Exception as error:  # of the network, of HTTP, or a reply of another shape
                failure = first_line(error)
        return failure

    def score_with_judge(prompts, completions, messages=None, answer=None, **columns):
        questions = prompts if messages is None else [m[-1]["content"] for m in messages]
        references = ["" if a is None else a for a in answer or [None] * len(prompts)]
        with ThreadPoolExecutor(16) as pool:
            replies = list(pool.map(ask, zip(questions, references, completions, strict=True)))
        if failures := [reply for reply in replies if isinstance(reply, str)]:
            count = f"{len(failures)} of {len(replies)} calls of the judge failed"
            tqdm.write(f"{count}, the last with: {failures[-1]}")
        return [None if isinstance(reply, str) else reply for reply in replies]

    return score_with_judge


REWARDS = dict(accuracy=accuracy_reward, format=format_reward, step=step_reward, code=code_reward)
REWARDS_WITH_ARGUMENT = dict(  # text after the colon, device -> function
    language=lambda script, device: (
        lambda prompts, completions, **_: language_reward(prompts, completions, script or "LATIN")
    ),
    reward_model=reward_model,
    judge=judge_reward,
)


def load_rewards(specs, device="cpu"):
    """{name: (function, weight)} of `NAME[:ARGUMENT][=WEIGHT]` and `FILE.py:FUNCTION[=WEIGHT]`."""
    functions = {}
    for spec in specs:
        target, weight = re.fullmatch(r"(.*?)(?:=([^=]*))?", spec, re.DOTALL).groups()
        name, _, argument = target.partition(":")
        try:
            if ".py:" in target:
                path, _, name = target.rpartition(":")
                function = run_file(path)[name]
            elif name in REWARDS and not argument:
                function = REWARDS[name]
            else:
                function = REWARDS_WITH_ARGUMENT[name](argument, device)
            functions[name] = (function, 1.0 if weight is None else float(weight))
        except (KeyError, ValueError, OSError) as error:
            known = ", ".join([*REWARDS, *(f"{name}:…" for name in REWARDS_WITH_ARGUMENT)])
            known += " or FILE.py:FUNCTION, with =WEIGHT if not 1"
            raise Error(f"--reward {spec}: {first_line(error)}; it takes {known}") from None
    good = all(callable(function) and math.isfinite(w) for function, w in functions.values())
    if len(functions) < len(specs) or not good:
        what = "a name twice, a weight that is not finite or what is no function"
        raise Error(f"--reward {' '.join(specs)}: {what}")
    return functions


def run_file(path):
    """{name: value} of what a Python file defines."""
    try:
        return runpy.run_path(path)
    except FileNotFoundError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise Error(f"{path} failed: {error!r}") from None


# -------------------------------------------------------------------------- built-in task and model


def arithmetic(config):
    """Rows of built-in arithmetic. For the tiny model: a number below 50 plus a digit, with
    solutions of which most are wrong, so that the supervised steps leave it something to learn."""
    rng = random.Random(config.seed)
    if config.model == "tiny":
        rows = []
        for a, b in rng.sample([(a, b) for a in range(50) for b in range(10)], 500):
            wrong = max(0, a + b + rng.choice([-10, -2, -1, 1, 2, 10]))
            solution = a + b if rng.random() < 0.4 else wrong
            rows.append(dict(prompt=f"{a}+{b}=", answer=str(a + b), solution=str(solution)))
        return rows

    def problem():
        a, b, c, d = (rng.choice([1, 1, -1]) * rng.randint(2, 99) for _ in range(4))
        return rng.choice([
            (f"Calculate {a} + {b} * ({c} - {d}).", a + b * (c - d)),
            (f"Calculate ({a} - {b}) * ({c} + {d}).", (a - b) * (c + d)),
            (f"Calculate {a * 37} - {b * 11} + {c} * {d}.", a * 37 - b * 11 + c * d),
            (f"Solve for x: {a} * x + {b} = {a * c + b}.", c),
        ])  # fmt: skip

    return [dict(zip(("prompt", "answer"), map(str, problem()), strict=True)) for _ in range(5000)]


def tiny_model(seed, dtype):
    """A 2-layer Qwen2 with 135,168 random weights, and a tokenizer with a token a character."""
    # Qwen2's byte-level tokenizer without merges; Ġ and Ċ are its names for space and newline.
    tokens = ["<eos>", "<unk>", *"0123456789+-*/=()<>#.,:ĠĊabcdefghijklmnopqrstuvwxyz"]
    special = dict(eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocab, merges=[], **special)
    shape = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(num_key_value_heads=4, vocab_size=len(tokens), max_position_embeddings=256)
    shape |= dict(tie_word_embeddings=True, initializer_range=0.06, eos_token_id=0, pad_token_id=0)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(transformers.Qwen2Config(**shape), dtype=dtype)
    return model, tokenizer


# --------------------------------------------------------------------------------------------- main


def import_optional(package, purpose):
    """An optional package, or an `Error` that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise Error(f"{purpose} needs the package {package}: pip install {package}") from None


def first_line(error):
    """An exception in one line."""
    return next(iter(str(error).strip().splitlines()), repr(error))


def main():
    """The command line."""
    transformers.utils.logging.disable_progress_bar()
    try:
        train(parse_args())
        if dist.is_initialized():  # gloo's threads can abort in an ordinary end of the interpreter
            dist.barrier()
            sys.stdout.flush()
            os._exit(0)
    except Error as error:
        sys.exit(f"grpo.py: {error}")
    except KeyboardInterrupt:
        sys.exit("grpo.py: interrupted")
    except (MemoryError, RuntimeError) as error:
        if not re.search("(?i)out ?of ?memory|allocate memory|MemoryError", repr(error)):
            raise
        hint = "lower --micro-batch-tokens (update) or --prompts-per-step (sampling)"
        sys.exit(f"grpo.py: out of memory: {hint}; {first_line(error)}")


if __name__ == "__main__":
    main()
