# SPDX-License-Identifier: MIT
# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "tqdm==4.70.1"]
# ///
r"""GRPO, Group Relative Policy Optimization (arXiv:2402.03300), in one readable file.

    python grpo.py                                     # a tiny model learns sums
    python grpo.py --model Qwen/Qwen2-Math-1.5B --data train.jsonl
    torchrun --nproc-per-node 8 grpo.py …              # several GPUs (FSDP2)

One step of training is `train_step`:
  1. take B prompts                                   `prompt_batch`
  2. sample G completions of each from the policy     `rollout`, `generate`
  3. score every completion                           `score_completions`
  4. advantage A = (score - group mean) / group std   `group_advantages`
  5. minimise -min(ratio A, clip(ratio) A)            `update`, `token_logprobs`,
     + beta KL(policy, frozen reference)              `grpo_loss`, `MasterAdamW`
The group's mean is the baseline: no value network is needed.

Shapes: B prompts of this process, G samples of each, N = B*G completions (rows b*G …
b*G+G-1 belong to prompt b), P prompt length (left-padded), C completion length
(right-padded), V vocabulary, H hidden size, M completion tokens without padding.

Where this departs from the papers and from common tutorials:
  - Equal rewards have advantage exactly 0; rounding alone could make it ±0.8.
  - A completion's mask includes its first EOS; `ids != pad` loses it if pad is EOS.
  - With one update per rollout the ratio is exactly 1 and nothing is clipped.
  - Losses are divided by counts of the whole batch: micro-batches change no gradient.
  - AdamW moves float32 masters, as a step of 1e-6 would change no bfloat16 weight. Each
    master begins at a random number that rounds to its weight (`within_cell`).
  - A prompt runs once for its group, not once for each completion (`token_logprobs`).

Order: options, the mathematics, `train_step`, what it calls (sampling, log-probs,
scores, update); then `train` and what any trainer has. "Needs …" in a docstring names
what to copy with the function into another project, beside `torch`.
"""

import argparse
import contextlib
import copy
import dataclasses
import fcntl
import functools
import gc
import importlib.util
import inspect
import json
import math
import os
import random
import re
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import find_adapter_config_file

RANK = int(os.environ.get("RANK", 0))  # of this process; torchrun sets it
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # number of processes
# How many logits `LogNormaliser` computes at once; on a CPU they fit its cache.
LOGITS_AT_ONCE = 2**25 if torch.cuda.is_available() else 2**19
# Decoding steps between looks at which rows have finished: a look waits for the GPU.
LOOK_EVERY = 16 if torch.cuda.is_available() else 1


class Error(Exception):
    """A mistake that the user can mend: `main` prints it in one line."""


# ------------------------------------------------------------------------------ config
@dataclasses.dataclass(frozen=True)
class Config:
    """Every option of a run: the command line is made from it, --help from comments."""

    # model and data
    model: str = "tiny"  # Hub name or folder of a causal language model
    data: str = ""  # JSONL file or Hub data set NAME[:CONFIG[:SPLIT]]; else sums
    eval_data: str = ""  # held-out prompts; else a tenth of the data, at most 64
    reward: tuple = ("accuracy",)  # accuracy, math, format, code, FILE.py:X [=WEIGHT]
    unsafe_code: bool = False  # the code reward without bubblewrap: it can do anything
    chat_template: Literal["auto", "on", "off"] = "auto"  # auto: if the model knows it
    prompt_template: str = ""  # around a {question} of text; else asks for a \boxed{}
    system_prompt: str = ""  # system message of every prompt
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 on a GPU
    # sampling
    num_generations: int = 8  # G, completions sampled for each prompt
    prompts_per_step: int = 8  # prompts of a step; each of W processes has B = 1/W
    max_prompt_length: int = 512  # in tokens; longer prompts are left out
    max_completion_length: int = 512  # in tokens; longer completions are cut off
    temperature: float = 1.0  # of sampling and of every log-prob
    # loss
    beta: float = 0.04  # weight of the KL term; 0 needs no reference model
    epsilon: float = 0.2  # clip range of the ratio
    epsilon_high: float = 0.0  # clip range above 1 (DAPO: 0.28); 0: epsilon
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = "grpo"  # how losses are averaged
    scale_rewards: Literal["group", "none"] = "group"  # none: no division by the std
    importance_sampling_level: Literal["token", "sequence"] = "token"  # sequence: GSPO
    num_iterations: int = 1  # mu, updates per rollout
    # optimisation
    learning_rate: float = 1e-6  # of AdamW, constant after the warm-up
    warmup_steps: int = 10  # steps of linear warm-up
    max_grad_norm: float = 1.0  # a longer gradient is scaled to this norm; 0: none
    max_steps: int = 200  # training steps; 0: only evaluate
    micro_batch_tokens: int = 0  # in one forward and backward; 0: what fits (CPU: 2048)
    lora_rank: int = 0  # above 0 only adapters of this rank are trained (needs peft)
    sft_steps: int = 0  # supervised steps on the data's solutions before GRPO
    sft_learning_rate: float = 1e-5  # of the supervised steps
    seed: int = 0  # of everything random
    # output
    output_dir: str = ""  # folder of the run; else runs/MODEL-TIME
    resume: str = ""  # go on with the run in this folder, with its options
    eval_every: int = 50  # steps between evaluations and looks at samples; 0: none
    save_every: int = 100  # steps between checkpoints, one is kept; 0: only the last
    report_to: Literal["", "wandb", "trackio"] = ""  # a tracker that gets the metrics

    def __post_init__(self):
        limits = dict(  # the least that an option may be, if that is not 0
            prompts_per_step=1,
            num_generations=2,
            num_iterations=1,
            max_completion_length=1,
            temperature=1e-9,
        )
        for name, value in vars(self).items():
            least = limits.get(name, 0)
            if isinstance(value, (int, float)) and not least <= value < math.inf:
                option = name.replace("_", "-")
                raise Error(f"--{option} must be finite and at least {least}")
        if "{question}" not in (self.prompt_template or "{question}"):
            raise Error("--prompt-template must contain {question}")

    @property
    def reward_names(self):
        """The options of --reward without their weights."""
        return {spec.partition("=")[0] for spec in self.reward}


# ------------------------------------------------------ GRPO: from rewards to the loss
def completion_mask(completion_ids, eos_token_ids):
    """True up to and including each row's first EOS: ids (N, C) -> bool (N, C).
    >>> completion_mask(torch.tensor([[5, 2, 2], [5, 6, 7]]), [2]).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    eos = torch.tensor(eos_token_ids, device=completion_ids.device)
    is_eos = torch.isin(completion_ids, eos).long()
    return is_eos.cumsum(1) - is_eos == 0  # no EOS before this position


def group_advantages(rewards, num_generations, scale_rewards="group", eps=1e-8):
    """(r - mean of its group) / (std + eps): float rewards (N,) -> (N,).
    DeepSeekMath 4.1.2, with the unbiased std; `scale_rewards` "none" does not divide
    (Dr. GRPO, arXiv:2503.20783). Raises ValueError unless G >= 2 divides N.
    >>> group_advantages(torch.tensor([1.0, 0, 0, 1, 0.1, 0.1, 0.1, 0.1]), 4)
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660,  0.0000,  0.0000,  0.0000,  0.0000])
    """
    if num_generations < 2 or len(rewards) % num_generations:
        raise ValueError(f"{len(rewards)} rewards are no groups of {num_generations}")
    groups = rewards.view(-1, num_generations)  # (B, G)
    # Subtracting the first changes no advantage, but makes equal rewards exact zeros.
    # Else eight of 0.1 have a mean off by 1e-8, a std as small, and advantages of -0.4.
    groups = groups - groups[:, :1]
    advantages = groups - groups.mean(1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + eps)
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards {scale_rewards!r} is unknown")
    return advantages.view(-1)


def masked_mean(x, mask, dim=None):
    """Mean of x where mask is true, of all or along `dim`; 0 where there is nothing."""
    return (x * mask).sum(dim) / mask.sum(dim).clamp(min=1)


def kl_k3(logp, ref_logp):
    """exp(d) - d - 1 with d = ref_logp - logp: (N, C) in nats, never negative.
    For tokens sampled from the policy E[-d] = KL(policy, reference), E[exp(d) - 1] = 0,
    and the sum of these two varies less than -d. DeepSeekMath eq. 4, Schulman's k3
    (joschu.net/blog/kl-approx.html). Give it float32: bfloat16 rounds it away.
    >>> kl_k3(torch.tensor([0.7]).log(), torch.tensor([0.5]).log())
    tensor([0.0508])
    """
    d = ref_logp - logp
    return torch.expm1(d) - d


def importance_ratio(logp, old_logp, mask=None, importance_sampling_level="token"):
    """New over old probability of each token, (N, C); exactly 1 without `old_logp`.
    Level "sequence" is GSPO, by `mask`. Needs `mean_log_ratio` and `masked_mean`."""
    if old_logp is None:
        old_logp = logp
    # Without old_logp its value is 0, but its gradient is that of logp.
    log_ratio = logp - old_logp.detach()
    if importance_sampling_level == "sequence":
        log_ratio = mean_log_ratio(log_ratio, mask)
    elif importance_sampling_level != "token":
        raise ValueError(f"level {importance_sampling_level!r} is unknown")
    return log_ratio.exp()


def clipped_surrogate(
    logp,
    old_logp,
    advantages,
    epsilon=0.2,
    epsilon_high=None,
    mask=None,
    importance_sampling_level="token",
):
    """min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A): to be maximised.
    logp, old_logp: (N, C), `old_logp` None: the policy has not moved. advantages: (N,)
    or (N, C). PPO (arXiv:1707.06347) eq. 7; DAPO's `epsilon_high` (arXiv:2503.14476) is
    `epsilon` if None or 0. Needs `importance_ratio`, `mean_log_ratio`, `masked_mean`.
    >>> logp, old_logp = torch.full((2, 1), 0.7).log(), torch.full((2, 1), 0.5).log()
    >>> clipped_surrogate(logp, old_logp, torch.tensor([0.9354, -0.9354])).flatten()
    tensor([ 1.1225, -1.3096])
    """
    ratio = importance_ratio(logp, old_logp, mask, importance_sampling_level)
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + (epsilon_high or epsilon))
    advantages = advantages.reshape(len(logp), -1)  # (N, 1) or (N, C)
    return torch.minimum(ratio * advantages, clipped_ratio * advantages)


def grpo_loss(
    logp,
    old_logp,
    ref_logp,
    advantages,
    mask,
    *,
    epsilon=0.2,
    epsilon_high=None,
    beta=0.04,
    loss_type="grpo",
    importance_sampling_level="token",
    max_completion_length=None,
    num_sequences=None,
    num_tokens=None,
):
    """(scalar to minimise, metrics: means over tokens): DeepSeekMath eq. 3.
    logp, old_logp, ref_logp: (N, C) float32 in nats; mask: (N, C); advantages: (N,) or
    (N, C). No `old_logp`: ratio 1; no `ref_logp`: no KL. What `mask` hides is not read.
    -surrogate + beta k3 of each token is averaged by `loss_type`:
        grpo     mean over sequences of the mean over their tokens
        dapo     sum over tokens / num_tokens
        dr_grpo  sum over tokens / (num_sequences * max_completion_length)
    The losses of micro-batches add up if the last three arguments are given, those of
    the whole optimizer batch (None: of this call). Needs `clipped_surrogate`,
    `importance_ratio`, `mean_log_ratio`, `kl_k3` and `masked_mean`."""
    mask = mask.bool()
    logp = logp.masked_fill(~mask, 0)
    if old_logp is not None:
        old_logp = old_logp.masked_fill(~mask, 0)
    advantages = advantages.reshape(len(mask), -1).masked_fill(~mask, 0)  # (N, C)
    level = importance_sampling_level
    surrogate = clipped_surrogate(
        logp, old_logp, advantages, epsilon, epsilon_high, mask, level
    )
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        kl = kl_k3(logp, ref_logp.detach().masked_fill(~mask, 0))
    per_token_loss = beta * kl - surrogate  # (N, C), 0 where masked
    num_sequences = num_sequences or len(mask)
    num_tokens = num_tokens or mask.sum()
    if loss_type == "grpo":
        loss = masked_mean(per_token_loss, mask, dim=1).sum() / num_sequences
    elif loss_type == "dapo":
        loss = per_token_loss.sum() / max(num_tokens, 1)
    elif loss_type == "dr_grpo":
        max_completion_length = max_completion_length or mask.shape[1]
        loss = per_token_loss.sum() / (num_sequences * max_completion_length)
    else:
        raise ValueError(f"loss_type {loss_type!r} is unknown")
    with torch.no_grad():
        ratio = importance_ratio(logp, old_logp, mask, level)
        clipped = surrogate < ratio * advantages  # where clipping counts
        metrics = dict(
            kl=masked_mean(kl, mask),
            entropy=masked_mean(-logp, mask),  # estimated from the sampled tokens
            ratio_mean=masked_mean(ratio, mask),
            clip_fraction=masked_mean(clipped, mask),
        )
    return loss, metrics


# Two variants of the above: one ratio for a whole completion; rewards of its steps.
def mean_log_ratio(log_ratio, mask):
    """The mean of each completion's logp - old_logp, at all its tokens: (N, C).
    GSPO, arXiv:2507.18071, eq. 7. Needs `masked_mean`."""
    return masked_mean(log_ratio, mask, dim=1)[:, None].expand_as(log_ratio)


def process_advantages(
    step_rewards,
    step_ends,
    num_generations,
    num_tokens,
    scale_rewards="group",
    eps=1e-8,
):
    """Process supervision (DeepSeekMath 4.1.3): (N, C) advantages, C = `num_tokens`.
    step_rewards, step_ends: N lists, a number for each step of a completion and the
    index of its last token. The step rewards of a group are normalised together; a
    token's advantage sums those of the steps that end at or after it. Raises ValueError
    if ends and rewards differ in number. Needs `group_advantages`. Returns a CPU
    tensor. Here the steps of the completions end at tokens 0 and 2, and at 1 and 2:
    >>> process_advantages([[1, 0], [0, 1]], [[0, 2], [1, 2]], 2, 4)
    tensor([[ 0.0000, -0.8660, -0.8660,  0.0000],
            [ 0.0000,  0.0000,  0.8660,  0.0000]])
    """
    advantages = torch.zeros(len(step_rewards), num_tokens)
    for start in range(0, len(step_rewards), num_generations):
        rewards = []
        ends = []
        for i in range(start, start + num_generations):
            for reward, end in zip(step_rewards[i], step_ends[i], strict=True):
                rewards.append(float(reward))
                ends.append((i, end))
        if len(rewards) < 2:  # none, or a single one, which is its own mean
            continue
        normalised = group_advantages(  # all steps of the group's completions
            torch.tensor(rewards), len(rewards), scale_rewards, eps
        )
        for (i, end), advantage in zip(ends, normalised):
            advantages[i, : end + 1] += advantage
    return advantages


# ------------------------------------------------------------- one step, and its state
class Batch(NamedTuple):
    """Completions and their prompts: a rollout, or a micro-batch of one."""

    prompt_ids: torch.Tensor  # (B, P), left-padded
    prompt_mask: torch.Tensor  # (B, P), bool
    completion_ids: torch.Tensor  # (N, C), right-padded
    mask: torch.Tensor  # (N, C), bool: up to and including the first EOS


@dataclasses.dataclass
class Run:
    """What a run has: `load` makes it, the functions below read it."""

    config: Config
    device: torch.device  # of this process
    output_dir: Path
    rewards: dict  # name: (reward function, weight)
    tokenizer: Any
    eos_token_ids: list
    policy: Any  # the model that samples and learns
    reference: Any  # the model that it is held to; None: no KL
    adapters: Any  # peft's wrapper of the policy; None: no LoRA
    optimizer: Any  # `MasterAdamW` of the policy
    logprobs: Callable  # `token_logprobs` or `plain_logprobs`: see `choose_paths`
    share_prompts: bool  # whether `logprobs` runs a prompt once for its group
    use_cache: bool  # whether `generate` may use a key-value cache
    micro_batch_tokens: int
    # What follows changes while it trains; `train_step` reads none of it.
    tracker: Any = None  # wandb or trackio
    step: int = 0  # the last one that is finished
    saved_step: int = 0  # the last one with a checkpoint
    num_skipped: int = 0  # steps in a row whose gradients were not finite
    signal: str = ""  # SIGINT or SIGTERM, where this process got one
    stop: str = ""  # a signal that any process got: end after this step


def train_step(run, train_rows, step):
    """One step of GRPO on B rows of data -> its metrics."""
    config = run.config
    num_generations = config.num_generations
    set_seed(config.seed, step)
    start = time.perf_counter()

    # 1. take B prompts
    rows = prompt_batch(train_rows, step, config.prompts_per_step, config.seed)

    # 2. sample G completions of each from the current policy: a `Batch`
    batch = rollout(run, rows, num_generations, config.temperature)

    # 3. score them
    scores = score_completions(run, rows, batch)

    # 4. normalise within each group: scores of whole completions, and, where rewards
    #    are lists, scores of their lines (else `process` is 0)
    outcome = group_advantages(scores.outcome, num_generations, config.scale_rewards)
    process = process_advantages(
        scores.step_rewards,
        scores.step_ends,
        num_generations,
        num_tokens=batch.mask.shape[1],
        scale_rewards=config.scale_rewards,
    )
    advantages = outcome[:, None] + process  # (N, C)
    rollout_end = time.perf_counter()

    # 5. minimise -min(ratio A, clip(ratio) A) + beta KL
    learning_rate = config.learning_rate * min(1, step / max(1, config.warmup_steps))
    metrics = update(run, batch, advantages, learning_rate)
    end = time.perf_counter()

    # 6. measure it
    rewards = scores.columns["reward"].view(-1, num_generations)  # (B, G)
    columns = dict(  # each (N,) or (B,): the mean is logged
        scores.columns,
        reward_std=rewards.std(1),
        zero_std_fraction=~advantages.view(len(rewards), -1).any(1),
        completion_length=batch.mask.sum(1),
        truncated_fraction=~torch.tensor(scores.finished),
    )
    for name, column in columns.items():
        metrics[name] = column.double().mean().item()
    metrics.update(
        learning_rate=learning_rate,
        rollout_seconds=rollout_end - start,
        update_seconds=end - rollout_end,
        step_seconds=end - start,
        peak_memory_gb=peak_memory_gb(),
    )
    if config.eval_every and (step == 1 or step % config.eval_every == 0):
        log_completions(run, step, rows, scores, advantages)
    return dict(step=step, **average(metrics))


# ---------------------------------------------------------------- sampling, log-probs
def rollout(run, rows, num_generations, temperature):
    """Completions of B rows of data, sampled from the policy: a `Batch`."""
    prompt_ids, prompt_mask = pad(
        [row["prompt_ids"] for row in rows], "left", run.device
    )
    completion_ids = generate(
        run.policy,
        prompt_ids,
        prompt_mask,
        num_generations,
        run.config.max_completion_length,
        run.eos_token_ids,
        temperature=temperature,
        use_cache=run.use_cache,
    )
    mask = completion_mask(completion_ids, run.eos_token_ids)
    return Batch(prompt_ids, prompt_mask, completion_ids, mask)


@torch.no_grad()
def generate(
    model,
    prompt_ids,
    prompt_mask,
    num_generations,
    max_completion_length,
    eos_token_ids,
    temperature=1.0,
    use_cache=True,
):
    """G completions of each prompt, sampled from the policy -> ids (N, C).
    prompt_ids, prompt_mask: (B, P), left-padded. C is `max_completion_length`; after a
    row's EOS stands the first of `eos_token_ids` (a list). Temperature 0 is greedy. The
    model must be in eval mode, as in `token_logprobs`; its generation config is not
    read. Without `use_cache` all tokens run again for each new one: slow, but right.
    Needs `sample`, `forward`, `LOOK_EVERY`, `F`, `DynamicCache` and `inspect`."""
    eos = torch.tensor(eos_token_ids, device=prompt_ids.device)
    num_rows = len(prompt_ids) * num_generations
    live = torch.arange(num_rows, device=eos.device)  # rows that still run
    prompt_of = live // num_generations  # of each of them
    finished = torch.zeros_like(live, dtype=torch.bool)  # which of them have had an EOS
    completion_ids = eos[0].repeat(num_rows, max_completion_length)  # (N, C)
    cache = DynamicCache(config=model.config) if use_cache else None
    ids = prompt_ids  # what the model reads next
    attention_mask = prompt_mask
    for i in range(max_completion_length):
        output = forward(model, ids, attention_mask, cache, logits_to_keep=1)
        logits = output.logits[:, -1]
        if i == 0:  # the prompts have run once; their groups go on from there
            logits = logits[prompt_of]  # (N, V)
            if use_cache:
                cache.reorder_cache(prompt_of)  # selects rows: B become N
        tokens = sample(logits, temperature).masked_fill(finished, eos[0])
        completion_ids[live, i] = tokens
        finished = torch.isin(tokens, eos)  # after its EOS a row has eos[0]
        if i % LOOK_EVERY == 0:
            unfinished = (~finished).nonzero()[:, 0]
            if len(unfinished) == 0:
                break
            # From here on only these rows run: `live` holds their numbers, and
            # `prompt_of`, `finished` and the cache have an entry for each.
            if len(unfinished) < len(live):
                live = live[unfinished]
                prompt_of = prompt_of[unfinished]
                finished = finished[unfinished]
                if use_cache:
                    cache.reorder_cache(unfinished)
        ids = completion_ids[live, i : i + 1]
        if not use_cache:
            ids = torch.cat([prompt_ids[prompt_of], completion_ids[live, : i + 1]], 1)
        attention_mask = F.pad(prompt_mask[prompt_of], (0, i + 1), value=True)
    return completion_ids


def sample(logits, temperature=1.0):
    """One token of each row from softmax(logits / temperature): (N, V) -> (N,).
    At temperature 0 the most probable one. By inverting the distribution function, with
    one random number a row: `torch.multinomial` draws V of them, which is slow."""
    if temperature == 0:
        return logits.argmax(1)
    probs = (logits.float() / temperature).softmax(1)  # (N, V)
    cdf = probs.cumsum(1, dtype=torch.float64)  # float32 would lose the tail
    draws = torch.rand_like(cdf[:, :1]) * cdf[:, -1:]
    ids = torch.searchsorted(cdf, draws, right=True)[:, 0]  # the first above the draw
    return ids.clamp(max=logits.shape[1] - 1)  # NaN would give V; `update` reports it


def forward(module, ids, attention_mask, cache=None, **options):
    """Run ids (N, L) after the K tokens that `cache` holds, and add them to it.
    attention_mask: (N, K + L). Positions do not count padding on the left. `module` is
    a model, or its `forward` where FSDP has gathered the weights already (see `shard`).
    Needs `inspect`."""
    parameters = inspect.signature(getattr(module, "forward", module)).parameters
    # Mamba 2 has a name of its own for its cache.
    name = "cache_params" if "cache_params" in parameters else "past_key_values"
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return module(
        ids,
        attention_mask=attention_mask.long(),
        position_ids=positions[:, -ids.shape[1] :],
        use_cache=cache is not None,
        **{name: cache},
        **options,
    )


def plain_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, mask, temperature=1.0
):
    """What `token_logprobs` computes, by the model's own forward pass, in which each
    completion runs with a prompt of its own. Needs `forward`, `logprobs_of_logits`, `F`
    and `inspect`."""
    num_rows, length = completion_ids.shape
    num_generations = num_rows // len(prompt_ids)
    prompt_of = torch.arange(num_rows, device=mask.device) // num_generations
    # The last token predicts nothing.
    ids = torch.cat([prompt_ids[prompt_of], completion_ids[:, :-1]], 1)
    # Padding behind a token is never seen: its mask may be True.
    attention_mask = F.pad(prompt_mask[prompt_of], (0, length - 1), value=True)
    output = forward(model.forward, ids, attention_mask, logits_to_keep=length)
    logits = output.logits[:, -length:]  # (N, C, V): from the prompt's last token on
    return logprobs_of_logits(logits, completion_ids, mask, temperature)


def token_logprobs(
    model,
    prompt_ids,
    prompt_mask,
    completion_ids,
    mask,
    temperature=1.0,
    own_logits=False,
):
    """log-prob of each completion token given all before it: (N, C) float32.
    0 where masked. prompt_ids, prompt_mask: (B, P), left-padded; completion_ids, mask:
    (N, C), right-padded, the mask of `completion_mask`; rows b*G … b*G+G-1 continue
    prompt b. The logits are divided by `temperature`, as in sampling.
    Each prompt runs once. Its completions go on from G copies of its key-value cache;
    the copies are ordinary tensors that depend on the weights, so gradients flow
    through them into the prompt. `model` is a causal LM of transformers (of a model
    that peft has wrapped, `get_base_model()`) in eval mode: in training mode gradient
    checkpointing drops the cache. If it caps or scales its logits, give `own_logits`:
    its own output layer then computes them all. `choose_paths` compares models so.
    Needs `forward`, `logprobs_of_hidden`, `logprobs_of_logits`, `LogNormaliser`,
    `LOGITS_AT_ONCE`, `DynamicCache`, `F` and `inspect`."""
    num_rows, length = completion_ids.shape
    num_generations = num_rows // len(prompt_ids)
    prompt_of = torch.arange(num_rows, device=mask.device) // num_generations
    # All but the last token are run, and at least two, by padding: for a single one
    # recurrent layers write over the prompt's states, which backward needs.
    inputs = F.pad(completion_ids[:, :-1], (0, max(0, 3 - length)))
    attention_mask = F.pad(prompt_mask[prompt_of], (0, inputs.shape[1]), value=True)
    cache = DynamicCache(config=model.config)
    if own_logits:
        module = model.forward
        output = forward(module, prompt_ids, prompt_mask, cache, logits_to_keep=1)
    else:
        module = model.base_model  # all but the output layer
        output = forward(module, prompt_ids, prompt_mask, cache)
    prompt_outputs = output[0][:, -1:]  # (B, 1, H or V)
    cache.reorder_cache(prompt_of)  # selects rows: B become N
    # Nothing reads the cache later, so recurrent layers need not write to it.
    cache.update_recurrent_state = lambda state, *args, **options: state
    later_outputs = forward(module, inputs, attention_mask, cache)[0]
    # A prompt's last output predicts the first token of each of its completions.
    outputs = torch.cat([prompt_outputs[prompt_of], later_outputs], 1)[:, :length]
    if own_logits:
        return logprobs_of_logits(outputs, completion_ids, mask, temperature)
    weight = model.get_output_embeddings().weight  # (V, H): a row for each token
    return logprobs_of_hidden(outputs, weight, completion_ids, mask, temperature)


def logprobs_of_logits(logits, completion_ids, mask, temperature):
    """log softmax(logits / temperature) of each token: (N, C, V) -> (N, C) float32."""
    targets = completion_ids.masked_fill(~mask, -100)  # which cross_entropy ignores
    logits = logits.float()
    if temperature != 1:  # else a copy of all of them
        logits = logits / temperature
    logp = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return logp.view(mask.shape)


def logprobs_of_hidden(hidden, weight, completion_ids, mask, temperature):
    """`logprobs_of_logits` of logits = hidden @ weight.T, which are never in memory."""
    hidden = hidden[mask] / temperature  # (M, H): divides the logits
    chosen = F.embedding(completion_ids[mask], weight)  # (M, H)
    # Rounded to bfloat16 if the others are, as in sampling: else logp could exceed 0.
    logit = torch.einsum("mh,mh->m", hidden, chosen).float()
    logp = logit - LogNormaliser.apply(hidden, weight)
    return logp.new_zeros(mask.shape).masked_scatter(mask, logp)


class LogNormaliser(torch.autograd.Function):
    """log of the sum of exp(hidden @ weight.T): (M, H), (V, H) -> (M,) float32.
    It takes v words of the vocabulary at a time (a GPU wants multiples of 64), computes
    their logits (M, v) again in backward and never holds all.
    Needs `LOGITS_AT_ONCE`."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.size = max(64, LOGITS_AT_ONCE // max(1, len(hidden)) // 64 * 64)
        partial = []  # log_z of v words each: (M,)
        for words in weight.split(ctx.size):  # (v, H)
            partial.append((hidden @ words.t()).float().logsumexp(1))
        log_z = torch.stack(partial).logsumexp(0)
        ctx.save_for_backward(hidden, weight, log_z)
        return log_z

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, log_z = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(weight), ctx.size):
            part = slice(start, start + ctx.size)
            logits = (hidden @ weight[part].t()).float()  # and in the same memory:
            softmax = logits.sub_(log_z[:, None]).exp_()  # d log_z / d logits
            grad_logits = softmax.mul_(grad[:, None]).to(weight.dtype)  # chain rule
            grad_hidden += grad_logits @ weight[part]
            if grad_weight is not None:  # LoRA freezes it
                torch.mm(grad_logits.t(), hidden, out=grad_weight[part])
        return grad_hidden.to(hidden.dtype), grad_weight


# ------------------------------------------------------------------------------ scores
@dataclasses.dataclass
class Scores:
    """What N completions are worth."""

    texts: list
    finished: list  # whether each has ended by EOS
    columns: dict  # "reward", the weighted sum, and each "rewards/<name>": (N,)
    outcome: torch.Tensor  # (N,) float32, weighted sum of what is one number
    step_rewards: list  # N lists of weighted rewards of steps
    step_ends: list  # N lists: the index of each step's last token


def score_completions(run, rows, batch):
    """`Scores` of the completions of B rows of data by all reward functions."""
    num_generations = len(batch.mask) // len(rows)
    ids = [x[:n] for x, n in zip(batch.completion_ids.tolist(), batch.mask.sum(1))]
    steps = [split_steps(run.tokenizer, x) for x in ids]
    repeated = [row for row in rows for _ in range(num_generations)]
    columns = {name: [row[name] for row in repeated] for name in rows[0]}
    columns.update(
        completions=run.tokenizer.batch_decode(ids, skip_special_tokens=True),
        completion_ids=ids,
        finished=[x[-1] in run.eos_token_ids for x in ids],
        steps=[[text for text, _ in x] for x in steps],
    )
    reward = torch.zeros(len(ids), dtype=torch.float64)
    outcome = torch.zeros_like(reward)
    by_name = {}
    step_rewards = [[] for _ in ids]
    step_ends = [[] for _ in ids]
    for name, (function, weight) in run.rewards.items():
        with failing_together(f"the reward {name} failed"):
            values = function(**copy.deepcopy(columns))
            judgements, by_step = check_values(values, steps)
        means = [sum(x) / len(x) if x else math.nan for x in judgements]
        groups = torch.tensor(means, dtype=reward.dtype).view(-1, num_generations)
        # What is not judged gets the mean of its group, and so no advantage; in a group
        # of which nothing is judged, the mean of all; 0 if there is none.
        mean_of_all = groups.nanmean().nan_to_num().item()
        groups = groups.where(~groups.isnan(), groups.nanmean(1, keepdim=True))
        column = groups.flatten().nan_to_num(mean_of_all)
        by_name[f"rewards/{name}"] = column
        reward += weight * column
        if not by_step:
            outcome += weight * column
        elif weight:  # else it is only logged
            for i, numbers in enumerate(judgements):
                if numbers:
                    step_rewards[i] += [weight * number for number in numbers]
                    step_ends[i] += [end for _, end in steps[i]]
    return Scores(
        texts=columns["completions"],
        finished=columns["finished"],
        # As float32: in float64 0.1 + 0.2 and 0.3 would differ.
        columns=dict(reward=reward.float(), **by_name),
        outcome=outcome.float(),
        step_rewards=step_rewards,
        step_ends=step_ends,
    )


def check_values(values, steps):
    """What a reward function returned, for each completion a number, None (not judged)
    or a list of numbers for its steps -> (a list of numbers for each, whether these are
    of steps)."""
    if not isinstance(values, (list, torch.Tensor)) or len(values) != len(steps):
        got = f"{type(values).__name__} {str(values)[:80]}"
        raise ValueError(f"it must return a list of {len(steps)} values, not {got}")
    by_step = any(isinstance(value, list) for value in values)
    judgements = []
    for value, expected in zip(values, steps):
        numbers = []
        if value is not None:
            numbers = [float(x) for x in (value if by_step else [value])]
        if by_step and numbers and len(numbers) != len(expected):
            raise ValueError(f"{value!r} for {len(expected)} steps")
        if not math.isfinite(sum(numbers)):
            raise ValueError(f"{value!r} is not finite")
        judgements.append(numbers)
    return judgements, by_step


def split_steps(tokenizer, ids):
    """The non-blank lines of a completion -> [(text, index of its last token), …]."""
    steps = []
    start = 0
    for i, token in enumerate(ids):
        if ends_line(tokenizer, token) or i == len(ids) - 1:
            text = tokenizer.decode(ids[start : i + 1], skip_special_tokens=True)
            if text.strip():
                steps.append((text.strip(), i))
                start = i + 1
    if steps:  # what follows the last step, such as the EOS, belongs to it
        steps[-1] = (steps[-1][0], len(ids) - 1)
    return steps


@functools.cache
def ends_line(tokenizer, token):
    """Whether there is a line break in a token."""
    return "\n" in tokenizer.decode([token])


# ------------------------------------------------------------------------------ update
@dataclasses.dataclass
class Part:
    """A micro-batch: b prompts, n completions, their advantages and log-probs."""

    batch: Batch
    advantages: torch.Tensor  # (n, c)
    ref_logp: torch.Tensor | None = None  # (n, c) of the reference
    old_logp: torch.Tensor | None = None  # (n, c) before the first update


def update(run, batch, advantages, learning_rate):
    """num_iterations (mu) AdamW steps on one rollout, whose advantages are (N, C) ->
    metrics. `prepare_parts` may leave groups out: the loss is still a mean over all
    completions or tokens; what is measured is a mean over the tokens that are kept."""
    config = run.config
    parts = prepare_parts(run, batch, advantages.to(run.device))
    # `kept`: without the groups that are left out.
    kept = sum(part.batch.mask.sum().item() for part in parts)
    # Gradients (by FSDP) and metrics are averaged over ranks: so are their divisors.
    num_tokens = average(dict(all=batch.mask.sum().item(), kept=kept))
    metrics = defaultdict(float, num_tokens=num_tokens["all"] * WORLD_SIZE, skipped=0)
    for _ in range(config.num_iterations):
        for part in parts:
            loss, means = part_loss(run, part, len(batch.mask), num_tokens["all"])
            loss.backward()
            metrics["loss"] += loss.item() / config.num_iterations
            share = part.batch.mask.sum().item() / num_tokens["kept"]
            for name, mean in means.items():
                metrics[name] += share * mean.item() / config.num_iterations
        reshard(run.policy)
        norm = run.optimizer.step(learning_rate, config.max_grad_norm)
        metrics["grad_norm"] = norm
        metrics["skipped"] += not math.isfinite(norm)
    return metrics


def prepare_parts(run, batch, advantages):
    """The micro-batches of an update, with the log-probs of the frozen reference."""
    row_numbers = torch.arange(len(batch.mask), device=run.device)
    row_numbers = row_numbers.view(len(batch.prompt_ids), -1)  # (B, G)
    # To save padding, sort each group and then the groups by length, shortest first.
    lengths = batch.mask.sum(1)[row_numbers]
    row_numbers = row_numbers.gather(1, lengths.argsort(1))
    row_numbers = row_numbers[lengths.amax(1).argsort()]
    if run.reference is None:  # a group whose advantages are all 0 has no gradient
        moves = advantages[row_numbers].flatten(1).any(1)  # (B,)
        row_numbers = row_numbers[moves] if moves.any() else row_numbers[:1]
    parts = cut_micro_batches(run, batch, advantages, row_numbers)
    add_empty_parts(parts)  # as many as on every other rank
    if run.reference is not None:
        without_adapters = contextlib.nullcontext()
        if run.adapters:  # then it is the policy without them
            without_adapters = run.adapters.disable_adapter()
        with torch.no_grad(), without_adapters:
            for part in parts:
                part.ref_logp = run.logprobs(
                    run.reference, *part.batch, run.config.temperature
                )
    return parts


def part_loss(run, part, num_sequences, num_tokens):
    """`grpo_loss` of a micro-batch; the numbers are those of the optimizer batch."""
    config = run.config
    logp = run.logprobs(run.policy, *part.batch, config.temperature)
    if part.old_logp is None:  # the first pass: the policy is the one that has sampled
        part.old_logp = logp.detach()
    return grpo_loss(
        logp,
        part.old_logp,
        part.ref_logp,
        part.advantages,
        part.batch.mask,
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        beta=config.beta,
        loss_type=config.loss_type,
        importance_sampling_level=config.importance_sampling_level,
        max_completion_length=config.max_completion_length,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
    )


def cut_micro_batches(run, batch, advantages, row_numbers):
    """The rows (B, G) of a batch as `Part`s of at most `micro_batch_tokens` tokens,
    padding included, longest first. Groups are halved until they fit, and a group too
    large for that as well; one completion may exceed it."""
    parts = []
    pending = [row_numbers]
    while pending:
        numbers = pending.pop()
        part = take_part(batch, advantages, numbers)
        num_prompts, prompt_length = part.batch.prompt_ids.shape
        if not run.share_prompts:  # each completion runs with a prompt of its own
            num_prompts = numbers.numel()
        num_tokens = num_prompts * prompt_length + part.batch.mask.numel()
        if num_tokens <= run.micro_batch_tokens or numbers.numel() == 1:
            parts.append(part)
        else:
            pending += numbers.tensor_split(2, dim=0 if len(numbers) > 1 else 1)
    return parts


def take_part(batch, advantages, row_numbers):
    """The `Part` with these rows (b, g), without columns of padding."""
    rows = row_numbers.flatten()
    prompts = row_numbers[:, 0] // (len(batch.mask) // len(batch.prompt_ids))
    prompt_columns = batch.prompt_mask[prompts].any(0)
    columns = batch.mask[rows].any(0)
    part = Batch(
        batch.prompt_ids[prompts][:, prompt_columns],
        batch.prompt_mask[prompts][:, prompt_columns],
        batch.completion_ids[rows][:, columns],
        batch.mask[rows][:, columns],
    )
    return Part(part, advantages[rows][:, columns])


class MasterAdamW:
    """torch's AdamW (arXiv:1711.05101; weight decay 0) on float32 masters.
    Adding less than 1/512 of a bfloat16 weight changes nothing: so its float32 master
    moves, and the weight is the master, rounded. A float32 weight (FSDP's shards are)
    is its own master. Takes a float32 model and casts it to `dtype`. After the last
    backward of a batch: `norm = optimizer.step(learning_rate, max_grad_norm)`.
    Needs `local`, `within_cell`, `all_gather`, `WORLD_SIZE`, `dist`, `DTensor`, `math`,
    `get_total_norm` and `clip_grads_with_norm_`."""

    def __init__(self, model, dtype):
        self.dtype = dtype
        self.moved = False  # whether weights moved since the last finished step
        self.params = [param for param in model.parameters() if param.requires_grad]
        # The masters are the float32 weights, or this rank's parts of them. `to` below
        # gives bfloat16 weights memory of their own; float32 ones stay their masters.
        self.masters = [local(param.detach()) for param in self.params]
        if dtype == torch.bfloat16:
            for master in self.masters:
                master.copy_(within_cell(master))
        for param in model.parameters():
            if not isinstance(param, DTensor):  # FSDP casts its own
                param.data = param.data.to(dtype)
        for param in self.params:  # bfloat16 would lose the small gradients of a sum
            param.grad_dtype = torch.float32
        self.adamw = torch.optim.AdamW(self.masters, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def gradient_norm(self):
        """Move each gradient from its weight to the master, in place of what was there
        -> the norm of the whole gradient, of all ranks."""
        grads = []
        for param, master in zip(self.params, self.masters):
            if param.grad is not None:
                master.grad = local(param.grad).float()
                grads.append(master.grad)
                param.grad = None
        return math.hypot(*all_gather(get_total_norm(grads).item()))

    @torch.no_grad()
    def step(self, learning_rate, max_grad_norm):
        """Scale the gradient down to the norm `max_grad_norm` (0: as it is), move the
        masters against it and round the weights to them -> the norm before. Where that
        is not finite nothing moves. The gradient is freed."""
        norm = self.gradient_norm()
        if math.isfinite(norm):
            longest = max_grad_norm or math.inf
            clip_grads_with_norm_(self.masters, longest, torch.tensor(norm))
            self.adamw.param_groups[0]["lr"] = learning_rate
            self.moved = True  # first, so that `save` never takes half a step
            self.adamw.step()
            self.round()
        self.adamw.zero_grad()
        return norm

    def state(self):
        """What resuming needs of this rank's part."""
        return dict(masters=self.masters, adamw=self.adamw.state_dict())

    def load(self, state):
        """Go on from what `state` gave."""
        self.adamw.load_state_dict(state["adamw"])  # raises if they are not as many
        for master, saved in zip(self.masters, state["masters"]):
            master.copy_(saved)
        self.round()

    def round(self):
        """Give each weight the value of its master."""
        for param, master in zip(self.params, self.masters):
            local(param.detach()).copy_(master)  # of a float32 weight: onto itself


def within_cell(weight):
    """Random float32 numbers that bfloat16 rounds to the weights given: (…) -> (…).
    Near 0.02 bfloat16 numbers are 1.2e-4 apart: a master that begins at such a number
    needs 60 steps of 1e-6 before it rounds to another. From a random place it does so
    with a chance of step / 1.2e-4: on average the weight moves as its master does.
    Zeros, float32 weights with lower bits of their own and some powers of 2 stay."""
    exponent = torch.frexp(weight).exponent  # bfloat16: 2**(exponent - 8) apart
    near = weight + torch.ldexp(torch.rand_like(weight) - 0.5, exponent - 8)
    return torch.where(near.bfloat16() == weight, near, weight)


# ---------------------------------------------------------------------------- training
def train(config):
    """GRPO from the first prompt to the last checkpoint."""
    device = join_ranks()
    with open_output_dir(config) as output_dir:
        run, train_rows, eval_rows = set_up(config, device, output_dir)
        restore(run)
        steps = range(run.step + 1, config.max_steps + 1)
        progress = tqdm(steps, disable=RANK > 0, dynamic_ncols=True)
        with note_signals(run), save_at_the_end(run):
            for step in progress:
                if config.eval_every and (step - 1) % config.eval_every == 0:
                    evaluate(run, eval_rows, step - 1)
                record = train_step(run, train_rows, step)
                finish_step(run, record)
                progress.set_postfix(
                    reward=record["reward"], kl=record["kl"], refresh=False
                )
                if run.stop:
                    break
        if run.stop:  # so that the exit status is not 0
            raise Error(f"{run.stop} after step {run.step}: --resume {output_dir}")
        if config.eval_every:
            evaluate(run, eval_rows, run.step)
        conclude(run)


def finish_step(run, record):
    """Log a step, save it if that is due, and see whether the run should go on."""
    run.step = record["step"]
    run.optimizer.moved = False
    run.num_skipped = run.num_skipped + 1 if record["skipped"] else 0
    log(run, record)
    if run.num_skipped == 5:
        raise Error("the gradients of five steps in a row were not finite")
    if run.step == 10:
        rows = read_log(run.output_dir / "metrics.jsonl")
        if all(row.get("zero_std_fraction", 1) == 1 for row in rows):
            print0(NOTHING_TO_LEARN)
    if run.config.save_every and run.step % run.config.save_every == 0:
        save(run)
    run.stop = max(all_gather(run.signal))  # a signal to any rank stops them all


NOTHING_TO_LEARN = """note: in ten steps no group had two different rewards: nothing is
learnt. See completions.jsonl; try easier data, another --prompt-template, more
--num-generations, or --sft-steps."""


def set_up(config, device, output_dir):
    """(run, rows to train on, rows held out), after the supervised steps."""
    if config.prompts_per_step % WORLD_SIZE:
        raise Error("several processes must share --prompts-per-step evenly")
    if config.lora_rank and WORLD_SIZE > 1:
        raise Error("--lora-rank takes a single process")
    rewards = load_rewards(config.reward, config.unsafe_code)
    if config.data:
        train_rows = read_rows(config.data, config.reward_names)
    else:
        train_rows = arithmetic(config.model, config.seed)
    if config.eval_data:
        eval_rows = read_rows(config.eval_data, config.reward_names)
    else:
        random.Random(config.seed).shuffle(train_rows)
        held_out = min(64, len(train_rows) // 10)
        eval_rows, train_rows = train_rows[:held_out], train_rows[held_out:]
    start = config.model
    if config.sft_steps:  # GRPO starts from what this leaves, and so does its reference
        start = str(output_dir / "sft")
        if not Path(start).exists():
            sft(config, device, output_dir, train_rows)
    run = load(config, start, device, output_dir, rewards)
    train_rows = encode_prompts(train_rows, run)
    eval_rows = encode_prompts(eval_rows, run)
    if not eval_rows:
        print0("note: no rows are held out, so nothing is evaluated: see --eval-data")
    print0(f"the first prompt: {[row['prompts'] for row in train_rows[:1]]}")
    if config.report_to and RANK == 0:  # wandb and trackio share an interface
        os.environ["WANDB_RUN_ID"] = output_dir.name  # trackio knows a run by its name
        run.tracker = importlib.import_module(config.report_to)
        run.tracker.init(
            project="grpo",
            name=output_dir.name,
            config=vars(config),
            resume="allow" if config.resume else "never",
        )
    return run, train_rows, eval_rows


def sft(config, device, output_dir, rows):
    """Supervised steps on the rows' solutions; the model is left in OUTPUT_DIR/sft.
    With advantage 1, ratio 1 and no reference the loss has the gradient of -logp: it is
    that of cross-entropy."""
    config = dataclasses.replace(
        config, loss_type="dapo", beta=0, num_iterations=1, temperature=1.0
    )
    run = load(config, config.model, device, output_dir, rewards={})
    examples = []
    for row in encode_prompts(rows, run):
        solution = row.get("solution") or row["answer"]
        if isinstance(solution, (str, int, float)):
            ids = run.tokenizer.encode(str(solution), add_special_tokens=False)
            if 0 < len(ids) < config.max_completion_length:
                examples.append((row["prompt_ids"], ids + run.eos_token_ids[:1]))
    print0(f"{len(examples)} of {len(rows)} rows have a solution that fits")
    progress = tqdm(range(config.sft_steps), "supervised", disable=RANK > 0)
    for i in progress:
        chosen = prompt_batch(examples, i + 1, config.prompts_per_step, config.seed)
        prompts, solutions = zip(*chosen)
        batch = make_batch(prompts, solutions, device)
        advantages = torch.ones(batch.mask.shape)
        metrics = update(run, batch, advantages, config.sft_learning_rate)
        progress.set_postfix(loss=metrics["entropy"])  # mean of -logp: cross-entropy
        if metrics["skipped"]:
            raise Error("a gradient of the supervised steps is not finite")
    write_folder(run, "sft")


def evaluate(run, rows, step):
    """Mean rewards of greedy completions of the held-out rows, logged."""
    # Every process has the same number of rows, and decodes no more than in training.
    mine = rows[RANK::WORLD_SIZE][: len(rows) // WORLD_SIZE]
    size = run.config.prompts_per_step * run.config.num_generations // WORLD_SIZE
    columns = defaultdict(list)
    starts = range(0, len(mine), size)
    for start in tqdm(starts, "evaluation", leave=False, disable=RANK > 0):
        part = mine[start : start + size]
        batch = rollout(run, part, num_generations=1, temperature=0)
        for name, column in score_completions(run, part, batch).columns.items():
            columns[f"eval/{name}"] += column.tolist()
    if mine:
        means = {name: sum(column) / len(mine) for name, column in columns.items()}
        log(run, dict(step=step, **average(means)))


def log_completions(run, step, rows, scores, advantages):
    """Append a step's completions to completions.jsonl; print the first completion of
    each of the first three prompts."""
    if RANK > 0:
        return
    num_generations = len(advantages) // len(rows)
    with open(run.output_dir / "completions.jsonl", "a") as lines:
        for i, text in enumerate(scores.texts):
            row = rows[i // num_generations]
            rewards = {x: round(y[i].item(), 6) for x, y in scores.columns.items()}
            record = dict(
                row,
                step=step,
                prompt=row["prompts"],
                completion=text,
                advantage=advantages[i, 0].item(),  # the first token's: of all steps
                finished=scores.finished[i],
                **rewards,
            )
            for name in ("prompts", "prompt_ids", "messages"):  # they say the same
                del record[name]
            print(json.dumps(record, default=str), file=lines)
            if i in (0, num_generations, 2 * num_generations):
                question, answer = str(row["prompt"])[-200:], str(row["answer"])[-30:]
                print0(f"{question!r} ({answer!r}) -> {text[-200:]!r} {rewards}")


def log(run, record):
    """Append a row to metrics.jsonl, and give it to the tracker."""
    if RANK > 0:
        return
    finite = {x: y if math.isfinite(y) else None for x, y in record.items()}
    with open(run.output_dir / "metrics.jsonl", "a") as lines:
        print(json.dumps(finite), file=lines)
    if run.tracker:
        del finite["step"]
        run.tracker.log(finite, step=record["step"])


def read_log(file):
    """The rows of a metrics.jsonl or completions.jsonl."""
    return [json.loads(line) for line in file.open()] if file.exists() else []


def conclude(run):
    """Say in two lines what happened."""
    rows = read_log(run.output_dir / "metrics.jsonl")
    held = [row["eval/reward"] for row in rows if "eval/reward" in row]
    if len(held) == 1:
        print0(f"greedy held-out reward: {held[0]:.2f}")
    elif held:
        print0(f"greedy held-out reward: {held[0]:.2f} before, {held[-1]:.2f} after")
    rewards = [row["reward"] for row in rows if "reward" in row]
    if rewards:
        means = torch.stack([part.mean() for part in torch.tensor(rewards).chunk(40)])
        levels = torch.linspace(means.min(), means.max(), 8)
        bars = "".join("▁▂▃▄▅▆▇█"[i] for i in torch.bucketize(means, levels))
        print0(f"reward by step: {means[0]:.2f} {bars} {means[-1]:.2f}")
    if run.tracker:
        run.tracker.finish()


def set_seed(seed, step):
    """Each step has a seed of its own, so that a resumed run draws the same numbers."""
    seed = seed * 1_000_003 + step * WORLD_SIZE + RANK
    random.seed(seed)
    torch.manual_seed(seed)


def peak_memory_gb():
    """The most memory that this process has held, in GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


@contextlib.contextmanager
def note_signals(run):
    """On SIGINT or SIGTERM finish the step, save, end; the same again ends at once."""

    def note(number, frame):
        run.signal = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        os.write(
            2, f"{run.signal}: finishing the step; again to stop at once\n".encode()
        )

    handlers = {x: signal.signal(x, note) for x in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def one_line(error):
    """The message of an exception without its line breaks."""
    return " ".join(str(error).split()) or repr(error)


# -------------------------------------------------------------------- data and prompts
def read_rows(source, reward_names):
    """Rows (dicts) of a JSONL file, or of the Hub data set NAME[:CONFIG[:SPLIT]].
    `prompt`, `question` or `problem` (text or chat messages) becomes "prompt"; `answer`
    or `solution` becomes "answer"; other columns stay for the reward functions. What
    is no such row, or lacks an answer that a reward needs, is left out and counted."""
    if source.endswith((".jsonl", ".json")) or Path(source).is_file():
        content = Path(source).read_bytes()
        if content.lstrip().startswith(b"["):
            raise Error(f"{source}:1: an array; it must have one object a line")
        lines = content.split(b"\n")
    else:
        import datasets

        name, config, split, *_ = f"{source}::".split(":")
        lines = datasets.load_dataset(name, config or None, split=split or "train")
    rows = []
    faults = []
    for number, line in enumerate(lines, 1):
        try:
            if isinstance(line, dict):
                rows.append(check_row(line, reward_names))
            elif line.strip():
                rows.append(check_row(json.loads(line), reward_names))
        except Error as error:
            raise Error(f"{source}:{number}: {error}") from None
        except Exception as error:  # whatever a line can hold
            faults.append(f"{source}:{number}: {type(error).__name__}: {error}")
    if not rows:
        raise Error(faults[0] if faults else f"{source}: no rows of data")
    if faults:
        print0(f"note: {len(faults)} lines are left out: {faults[0]}")
    return rows


def check_row(row, reward_names):
    """The row with "prompt" and "answer". Raises an exception if it is not one."""
    prompt = row.get("prompt") or row.get("question") or row.get("problem")
    if not prompt:
        raise ValueError(f"nothing in prompt, question or problem of {list(row)}")
    for message in as_messages(prompt):
        (message["role"] + message["content"]).encode()  # no lone surrogates
    answer = row.get("answer")
    if answer is None:
        answer = row.get("solution")
    if NEED_ANSWERS & reward_names:
        check_answer(answer, "accuracy" in reward_names)
    return {**row, "prompt": prompt, "answer": answer}


def as_messages(prompt):
    """Chat messages of a prompt, which is such a list or a text of the user."""
    return [dict(role="user", content=prompt)] if isinstance(prompt, str) else prompt


def chat_template_fits(tokenizer, eos_token_ids):
    """Whether the chat template ends turns with an EOS. Base models come with templates
    that they were not trained on, and whose end of a turn they do not know."""
    if not tokenizer.chat_template:
        return False
    messages = [dict(role=role, content=role) for role in ("user", "assistant")]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ending = text.rpartition("assistant")[2].strip()
    return ending.startswith(tuple(tokenizer.convert_ids_to_tokens(eos_token_ids)))


def encode_prompts(rows, run):
    """Rows with "prompts" (rendered), "prompt_ids" and "messages", if not too long."""
    config = run.config
    try:
        chat = config.chat_template == "on"
        if config.chat_template == "auto":
            chat = chat_template_fits(run.tokenizer, run.eos_token_ids)
        encoded = [encode_prompt(row, run, chat) for row in rows]
    except Exception as error:  # whatever a template raises
        raise Error(f"{one_line(error)}: see --chat-template") from error
    blank = dict.fromkeys(name for row in encoded for name in row)  # of every column
    room = max_positions(run.policy.config) - config.max_completion_length
    if room < 1:
        raise Error("--max-completion-length leaves no positions for a prompt")
    longest = min(room, config.max_prompt_length)
    kept = [{**blank, **x} for x in encoded if 0 < len(x["prompt_ids"]) <= longest]
    print0(f"{len(kept)} of {len(rows)} prompts have 1 to {longest} tokens")
    return kept


def encode_prompt(row, run, chat):
    """A row with its prompt rendered, by the chat template or as plain text."""
    config = run.config
    template = config.prompt_template
    if not template:
        template = BOXED if config.reward_names & NEED_ANSWERS else "{question}"
    prompt = row["prompt"]
    if isinstance(prompt, str):
        prompt = template.replace("{question}", prompt)
    messages = as_messages(prompt)
    if config.system_prompt and messages[0]["role"] != "system":
        messages = [dict(role="system", content=config.system_prompt), *messages]
    text = "\n".join(message["content"] for message in messages)
    if chat:
        text = run.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    ids = run.tokenizer.encode(text, add_special_tokens=not chat)  # it has its own BOS
    if ids and ids[-1] in run.eos_token_ids:  # some tokenizers end every text
        ids.pop()
    return {**row, "prompts": text, "prompt_ids": ids, "messages": messages}


def prompt_batch(rows, step, size, seed):
    """This process's share of the `size` rows of a step; every epoch is shuffled."""
    if len(rows) < size:
        raise Error(f"--prompts-per-step {size}: there are only {len(rows)} rows")
    epoch, i = divmod(step - 1, len(rows) // size)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(rows), generator=generator)
    return [rows[j] for j in order[i * size : (i + 1) * size][RANK::WORLD_SIZE]]


def pad(sequences, side, device):
    """Lists of token ids -> ids and mask: (len(sequences), longest), int64 and bool.
    Padding is masked, but must be a token that the model can compute with: the one
    made for it may have an embedding of zeros, whose norm gives NaN gradients."""
    rows = [torch.tensor(sequence, device=device) for sequence in sequences]
    ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side=side)
    mask = ids >= 0  # no token's id is -1
    return ids.masked_fill(~mask, sequences[0][0]), mask


def make_batch(prompts, completions, device):
    """The `Batch` of lists of token ids."""
    return Batch(*pad(prompts, "left", device), *pad(completions, "right", device))


# ----------------------------------------------------------------------------- rewards
def accuracy_reward(prompts, completions, answer, finished=None, **columns):
    """1.0 where the extracted answer is the data's; else 0. answer: N of them, for each
    completion a text, a number, or a list of alternatives. finished: N bools; one that
    is False counts only by a closed box or a ####. The prompts are not read.
    Raises ValueError for an empty answer. Needs `score_answers`, `extract_answer`,
    `gold_answers`, `answers_match`, `read_answer`, `_WORD_WITH_DIGIT`, `_NUMBER`,
    `_NUMBER_WORD`, `_DECORATION`, `re` and `Fraction`.
    >>> accuracy_reward([""] * 3, ["2 + 12 = 14", "so 16", "10"], ["#### 14"] * 3)
    [1.0, 0.0, 0.0]
    """
    return score_answers(completions, answer, finished, answers_match)


def math_reward(prompts, completions, answer, finished=None, **columns):
    r"""Like the accuracy reward, but an answer is also right if the package math-verify
    finds it equal to the data's as LaTeX. Raises ModuleNotFoundError without it.
    >>> math_reward([""], [r"so \boxed{\sqrt{8}}"], [r"2\sqrt{2}"])
    [1.0]
    """
    from math_verify import parse, verify

    # Its time limit is an alarm, which Python allows in the main thread only.
    seconds = 2 if threading.current_thread() is threading.main_thread() else None

    def equal(found, gold):
        if answers_match(found, gold):
            return True
        parsed_gold = parse(f"${gold}$", parsing_timeout=seconds)
        parsed_answer = parse(f"${found[:1000]}$", parsing_timeout=seconds)
        return verify(parsed_gold, parsed_answer, timeout_seconds=seconds)

    return score_answers(completions, answer, finished, equal)


def score_answers(completions, answer, finished, equal):
    """1.0 for each completion whose answer is `equal` to one of the data's, else 0.0.
    >>> score_answers(["so 16"], [["15", "16"]], None, str.__eq__)
    [1.0]
    """
    scores = []
    for i, completion in enumerate(completions):
        found = extract_answer(completion, finished is None or finished[i])
        golds = gold_answers(answer[i])
        scores.append(float(any(found and equal(found, gold) for gold in golds)))
    return scores


# A word with a digit is taken whole: 2024-01-07, 10:30, 3x and ±7 hide no number. Of
# "It costs **$5.0** or so." it is $5.0, and of "(3-5)." it is 5.
_WORD_WITH_DIGIT = r"""(?x)
    (?<! [^\s=>])                              # it starts after a space, = or <answer>
    (?: [*_'"(\[] | \\[(\[] )*+                # skipped: what opens **5**, (5) or \(5\)
    (?: \d+ [-–] (?= \d+ [^\w\s]* (?!\S) ) )?  # skipped: 3- of a range 3-5
    ( [^\s=<>]* \d                             # it goes to a digit, and to the last
      (?: [^\s=<>]* [\w%$€£}] )? )             # letter or sign: 5.0km. without the stop
"""


def extract_answer(text, finished=True):
    r"""The one answer of a text: the last \boxed{…}, else what follows the last ####,
    else, unless the text was cut off, its last word with a digit. None if there is none
    or if the box is not closed.
    >>> extract_answer(r"First \boxed{3}, so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    _, box, rest = text.rpartition("\\boxed{")
    if box:
        depth = 1
        for i, character in enumerate(rest):
            depth += (character == "{") - (character == "}")
            if not depth:
                return rest[:i].strip()
        return None
    found = re.findall(r"####\s*+([^#\n]*[^#\s])", text)
    if finished and not found:
        found = re.findall(_WORD_WITH_DIGIT, text)
    return found[-1] if found else None


def gold_answers(answer):
    """The data's answer or alternatives: in a box, after ####, else all the text.
    >>> gold_answers("9 + 9 = 18 #### 18"), gold_answers(["1/2", 0.5])
    (['18'], ['1/2', '0.5'])
    """
    golds = []
    for gold in answer if isinstance(answer, list) else [answer]:
        text = str(gold).strip() if type(gold) in (str, int, float) else ""
        marked = "\\boxed" in text or "####" in text
        golds.append(extract_answer(text) if marked else text)
    if not golds or not all(golds) or "nan" in golds:
        raise ValueError(f"{answer!r} is no answer to compare with")
    return golds


def check_answer(answer, by_number):
    r"""Raise ValueError if rewards cannot judge by this answer, and `Error` if it is
    LaTeX but not a number and should be compared `by_number`.
    >>> check_answer(r"so \boxed{\frac{1}{2}}", by_number=True)
    """
    for gold in gold_answers(answer):
        values, _ = read_answer(gold)
        words = "".join(value for value in values if isinstance(value, str))
        if by_number and re.search(r"[\\^_]", words):
            raise Error(f"{gold!r} is LaTeX and no number: take --reward math")


_NUMBER = r"""(?x)
    (?: [a-z]\ ?=\ ? )?                           # x = 5
    ( [-+]?\ ?
      (?: (?: \d{1,3} (?: ,\d{3} ){1,9}           # 80,000
            | \d{1,3} (?: \ ,\ \d{3} ){1,9}       # 80 , 000, which was 80{,}000
            | \d{1,99} )
          (?: \.\d{1,99}                          # 80000.00
            | / 0{0,9}[1-9]\d{0,99} )?            # 1/2
      | \.\d{1,99} ) )                            # .5
    \ ?
    ( % | (?<= \ ) [a-z]{2,} | )                  # 50%, 5 and a unit
"""
# What stands behind a number and is no unit: 7 tenths, 3 million.
_NUMBER_WORD = r"""(?x) (?:
    half | halve | quarter | third | fourth | fifth | sixth | seventh | eighth | ninth
    | tenth | eleventh | twelfth | \w+teenth | \w+tieth | \w*hundredth | \w*thousandth
    | \w*illionth | one | two | three | four | five | six | seven | eight | nine | ten
    | eleven | twelve | \w+teen | twenty | thirty | forty | fifty | sixty | seventy
    | eighty | ninety | hundred | thousand | \w*illion | lakh | crore | bn | mn | mil
    | dozen | pair | couple | score | gross | squared | cubed | pi ) s?
"""


_DECORATION = r"""(?x)                             # it becomes a space
    \\(?: text | textbf | mathrm | mbox )\b         # \text{ miles}
    | \\[dt]?frac (?= \{ -?\d+/\d+ \} (?! \w ) )  # \frac{1/2}, but not \frac{1/2}x
    | \\?[$€£{}()]                                 # \$5 and (A)
    | \\[,!;\ ] | \\(?=%)                          # 80\,000 and 50\%
"""


def read_answer(text):
    r"""The values that an answer may stand for, and its unit: a word, "%" or "". They
    are exact numbers, or the answer in small letters if it is no number.
    >>> read_answer(r"$\dfrac{1}{2}\text{ Miles}$."), read_answer(r"\text{(A)}")
    (({Fraction(1, 2)}, 'miles'), ({'a'}, ''))
    """
    # \frac{1}{2} becomes \frac{1/2}, and that " 1/2 ": 2\frac{1}{2} is not 21/2.
    words = text.replace("−", "-").replace("}{", "/")
    words = re.sub(_DECORATION, " ", words)
    words = " ".join(words.casefold().split()).rstrip(" .,;:")
    match = re.fullmatch(_NUMBER, words)
    if not match or re.fullmatch(_NUMBER_WORD, match[2]):
        return {words}, ""
    number = Fraction(re.sub("[, ]", "", match[1]))
    unit = match[2]
    return {number, number / 100 if unit == "%" else number}, unit


def answers_match(answer, gold):
    r"""Whether two answers are the same exact number, or else the same words or choice.
    A unit may be left out, and so may a percent sign: 50% is 50 or 0.5.
    >>> answers_match("$80,000.00", "80000"), answers_match("5 cm", "5 km")
    (True, False)
    """
    values, unit = read_answer(answer)
    gold_values, gold_unit = read_answer(gold)
    if unit and gold_unit:
        return values == gold_values and unit == gold_unit
    return bool(values & gold_values)


def format_reward(prompts, completions, **columns):
    """1.0 for one `<think>…</think>` and then an answer, else 0.0.
    DeepSeek-R1 (arXiv:2501.12948) 2.2.2. The prompt may end in `<think>`.
    >>> format_reward(["", ""], ["<think>2 + 2</think>4", "4"])
    [1.0, 0.0]
    """
    scores = []
    for prompt, completion in zip(prompts, completions):
        text = completion.strip()
        if prompt.rstrip().endswith("<think>"):
            text = "<think>" + text
        match = re.fullmatch(r"<think>.*</think>.*\S.*", text, re.DOTALL)
        scores.append(float(match is not None and text.count("think>") == 2))
    return scores


def code_reward(prompts, completions, tests, unsafe_code=False, **columns):
    """1.0 where the last fenced block of Python passes the data's `tests`, else 0.0;
    None without tests. It runs with limits, under bubblewrap: no network, no other
    processes, none of the user's files. With `unsafe_code` it can do whatever your user
    can. A program shares the process with its tests, so it can always cheat. tests: N
    texts or lists of lines. Call `check_sandbox` first: where bubblewrap fails all are
    0. Needs `run_tests`, `SANDBOX`, `ThreadPoolExecutor`, `contextlib`, `os`, `re`,
    `secrets`, `signal`, `subprocess`, `sys` and `tempfile`."""

    def passes(completion, test):
        if not test:
            return None
        text = test if isinstance(test, str) else "\n".join(test)
        blocks = re.findall(r"```(\w*)[^\n]*\n(.*?)```", completion, re.DOTALL)
        python = [x for name, x in blocks if re.fullmatch("(?i)py(thon3?)?", name)]
        programs = python or [x for name, x in blocks if not name]
        return float(bool(programs) and run_tests(programs[-1], text, unsafe_code))

    with ThreadPoolExecutor() as pool:
        return list(pool.map(passes, completions, tests))


SANDBOX = (
    "bwrap --unshare-all --die-with-parent --new-session --proc /proc --dev /dev"
    " --tmpfs /tmp --chdir /tmp"
)


def run_tests(code, tests, unsafe_code=False, seconds=5):
    """Whether `code`, then `tests` run to their end, in `seconds` of CPU time and three
    times that of the clock."""
    text = f"{code}\n{tests}"
    secret = secrets.token_hex()  # a program that ends early does not print it
    program = f"""
import resource
limits = dict(CPU={seconds}, AS=512 << 20, FSIZE=1 << 20, NPROC=256)
for name, limit in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
exec({text!r})
print("{secret}")
"""
    command = [sys.executable, "-I", "-"]
    if unsafe_code is not True:  # a column of the data, a list, opens no sandbox
        for path in ("/usr", "/lib", "/lib64", "/bin", sys.base_prefix, sys.prefix):
            command = ["--ro-bind-try", path, path, *command]
        command = [*SANDBOX.split(), *command]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={"OMP_NUM_THREADS": "1"},  # each thread of numpy takes memory
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(program.encode(), timeout=3 * seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.wait()
        output.seek(0)
        return output.read().strip().endswith(secret.encode())


REWARDS = dict(
    accuracy=accuracy_reward, math=math_reward, format=format_reward, code=code_reward
)
NEED_ANSWERS = {"accuracy", "math"}  # of the data; their prompts ask for a box:
BOXED = "{question}\nReason step by step, and put your final answer within \\boxed{}.\n"


def load_rewards(specs, unsafe_code=False):
    """{name: (function, weight)} of `NAME[=WEIGHT]` and `FILE.py:FUNCTION[=WEIGHT]`."""
    code = functools.partial(code_reward, unsafe_code=unsafe_code)
    rewards = {}
    for spec in specs:
        target, _, weight = spec.partition("=")
        path, _, name = target.rpartition(":")
        try:
            built_in = {**REWARDS, "code": code}
            function = getattr(import_file(path), name) if path else built_in[name]
            rewards[name] = function, float(weight or 1)
        except (Exception, SystemExit) as error:
            known = f"it takes {', '.join(REWARDS)} or FILE.py:FUNCTION, each [=WEIGHT]"
            raise Error(f"--reward {spec}: {error!r}; {known}") from error
        if target == "math":
            importlib.import_module("math_verify")
        if target == "code" and not unsafe_code:
            check_sandbox()
    if len(rewards) < len(specs):
        raise Error("--reward: a name twice")
    return rewards


@functools.cache
def import_file(path):
    """The module in a file, run once. It may import its neighbours."""
    name = Path(path).stem
    sys.path.insert(0, str(Path(path).absolute().parent))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickle looks for it
    spec.loader.exec_module(module)
    return module


def check_sandbox():
    """Raise `Error`, with bubblewrap's own words, where it does not work.
    Needs `Error`, `run_tests`, `SANDBOX`, `one_line` and `subprocess`."""
    command = f"{SANDBOX} --ro-bind / / true"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    if result.returncode or not run_tests("", ""):
        words = one_line(result.stderr or "Python does not run in it")
        raise Error(f"{words}: install the package bubblewrap, or give --unsafe-code")


# ------------------------------------------------------------------------------ models
def load_model(name, device, seed):
    """(model in float32, tokenizer, EOS ids) of any causal language model, or the tiny.
    A trained adapter is merged into its base: it belongs to the reference as well."""
    if name == "tiny":
        model, tokenizer = tiny_model(seed)
    else:
        # No loading in threads: each of them keeps memory.
        os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            if find_adapter_config_file(name):
                import peft

                adapted = peft.AutoPeftModelForCausalLM.from_pretrained(
                    name, dtype=torch.float32, use_safetensors=True
                )
                model = adapted.merge_and_unload().requires_grad_(True)
            else:
                model = load_text_model(name)
        except ValueError as error:  # transformers knows no such model
            raise Error(f"--model {name}: {one_line(error)}") from error
    model.to(device).eval()  # no dropout: sampling, old, new and reference agree
    for param in model.parameters():  # copied, as memory mapped from a file is slow
        param.data = param.data.clone(memory_format=torch.contiguous_format)
    eos = model.generation_config.eos_token_id  # it may disagree with the tokenizer's
    eos = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
    eos_token_ids = [token for token in eos if token is not None]
    if not eos_token_ids:
        raise Error(f"{name} has no EOS token")
    return model, tokenizer, eos_token_ids


def load_text_model(name):
    """A causal language model in float32; of one that also sees, the text model."""
    config = AutoConfig.from_pretrained(name)
    text_config = config.get_text_config()
    if hasattr(config, "tie_word_embeddings"):  # the text model's may disagree
        text_config.tie_word_embeddings = config.tie_word_embeddings
    model, info = AutoModelForCausalLM.from_pretrained(
        name,
        config=text_config,
        key_mapping={r"^language_model\.": "", r"^model\.language_model\.": "model."},
        dtype=torch.float32,
        use_safetensors=True,
        output_loading_info=True,
    )
    if info["missing_keys"]:
        raise ValueError(f"it lacks {sorted(info['missing_keys'])[0]}")
    if text_config is not config:
        print0(f"note: only the text model of {name} is trained and saved")
    return model


def max_positions(config):
    """The most tokens for which a model has positions, and the same in any batch."""
    config = config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        longest = rope.get("original_max_position_embeddings", longest)
    if getattr(config, "attn_temperature_tuning", False):  # Llama 4: counts padding
        longest = config.floor_scale
    return longest


def choose_paths(model):
    """The fastest functions that agree with the model's own forward pass -> (log-probs,
    whether they share prompts, whether sampling may use the cache), for a float32
    model. Raises `Error` where padding or later tokens change a log-prob."""
    model_name = type(model).__name__
    prompts = [[2, 3, 4, 2, 3], [5, 6]]
    batch = make_batch(prompts, [[2, 3, 4, 5], [7, 8]] * 2, model.device)
    last_alone = make_batch([[5, 6]], [[7, 8]], model.device)  # without padding

    def compute(logprobs):
        """Log-probs of the last completion, gradients of the embeddings."""
        logp = logprobs(model, *batch)
        (grad,) = torch.autograd.grad(logp.sum(), model.get_input_embeddings().weight)
        return logp[-1, :2].detach(), grad

    def shares(logprobs):
        return all(map(close, compute(logprobs), expected))

    def draw(use_cache):
        torch.manual_seed(0)
        return generate(model, *batch[:2], 8, 8, [1], use_cache=use_cache)

    def caches():
        same = draw(use_cache=True) == draw(use_cache=False)
        return same.float().mean() > 0.9  # rounding may change a draw

    expected = compute(plain_logprobs)
    tolerance = 2e-5 if model.device.type == "cpu" else 1e-3  # GPU kernels differ more
    if not close(plain_logprobs(model, *last_alone), expected[0], tolerance):
        raise Error(f"{model_name}: padding or later tokens change log-probs")
    # A cap hardly changes the small logits of untrained weights: comparing would not
    # show it. See whether the configuration names one.
    changes_logits = any(
        re.search("logit|lm_head", name) and value not in (None, False, 1)
        for name, value in vars(model.config.get_text_config()).items()
    )
    logprobs = token_logprobs
    no_sharing = changes_logits or obstacle(shares, logprobs)
    if no_sharing:
        logprobs = functools.partial(token_logprobs, own_logits=True)
        no_sharing = obstacle(shares, logprobs)
    if no_sharing:
        logprobs = plain_logprobs
        print0(f"note: slower, as {model_name} shares no prompts: {no_sharing}")
    no_cache = obstacle(caches)
    if no_cache:
        print0(
            f"note: samples slowly, as {model_name}'s cache is of no use: {no_cache}"
        )
    return logprobs, not no_sharing, not no_cache


def close(found, expected, tolerance=2e-3):
    """Whether tensors differ by at most `tolerance` times the norm of `expected`."""
    return (found - expected).norm() <= tolerance * expected.norm()


def obstacle(agrees, *arguments):
    """What keeps a model from a faster path; "" where that `agrees`."""
    try:
        return "" if agrees(*arguments) else "its values differ"
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # RuntimeErrors as well
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        return one_line(error)


def load(config, name, device, output_dir, rewards):
    """A `Run` with this model, ready to be trained, and a frozen reference."""
    gc.collect()  # frees the supervised model
    dtype = torch.float32
    if config.dtype == "bfloat16" or (config.dtype == "auto" and device.type == "cuda"):
        dtype = torch.bfloat16
    model, tokenizer, eos_token_ids = load_model(name, device, config.seed)
    logprobs, share_prompts, use_cache = choose_paths(model)
    set_seed(config.seed, 0)
    adapters = add_adapters(model, config.lora_rank) if config.lora_rank else None
    shard(model, logprobs, dtype, is_policy=True)
    optimizer = MasterAdamW(model, dtype)
    reference = None
    if config.beta and adapters:
        reference = model  # without its adapters
    elif config.beta:
        reference, _, _ = load_model(name, device, config.seed)
        for param in reference.parameters():
            param.data = param.data.to(dtype)
        shard(reference, logprobs, dtype, is_policy=False)
    print0(f"{name}: {model.num_parameters():,} weights, {dtype}, {device}")
    return Run(
        config=config,
        device=device,
        output_dir=output_dir,
        rewards=rewards,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        policy=model,
        reference=reference,
        adapters=adapters,
        optimizer=optimizer,
        logprobs=sharded_logprobs if WORLD_SIZE > 1 else logprobs,
        share_prompts=share_prompts,
        use_cache=use_cache,
        micro_batch_tokens=config.micro_batch_tokens or fit_micro_batch(model, dtype),
    )


def add_adapters(model, rank):
    """LoRA adapters (arXiv:2106.09685) in all linear layers -> peft's wrapper."""
    import peft

    states = "falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"
    lora = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        # The one layer of state-space models that peft refuses to adapt.
        exclude_modules=["out_proj"] if model.config.model_type in states else None,
    )
    return peft.get_peft_model(model, lora)  # puts the adapters into the model


def fit_micro_batch(model, dtype):
    """Tokens of a micro-batch that fit the free memory, at 50 activations for each unit
    of each layer; 2048 on a CPU. A weight's gradient and Adam's moments take 12 bytes;
    4 more a second gradient: one comes from its use on prompts, one on completions."""
    if model.device.type == "cpu":
        return 2048
    text_config = model.config.get_text_config()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    free -= (12 / WORLD_SIZE + 4) * model.num_parameters(only_trainable=True)
    units = text_config.hidden_size * text_config.num_hidden_layers
    tokens = 0.8 * free / (50 * dtype.itemsize * units)
    tokens = 2 ** int(math.log2(max(tokens, 256)))  # coarse: as many after resuming
    print0(f"--micro-batch-tokens {tokens}: {free / 2**30:.1f} GiB are free for them")
    return tokens


# ------------------------------------------------------------------- several processes
def join_ranks():
    """This process's device; under torchrun it first meets the others."""
    device = torch.device("cpu")
    backend, device_id = "gloo", None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        # Attention by cuDNN, which torch 2.11 and later prefer on an H100, has NaN
        # gradients at some lengths with a mask (pytorch issue 196678), and it plans
        # anew for every length.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.matmul.allow_tf32 = False  # some containers set it
        torch.backends.cudnn.allow_tf32 = False
        backend, device_id = "cpu:gloo,cuda:nccl", device  # objects go by gloo
    if WORLD_SIZE > 1 and not dist.is_initialized():
        dist.init_process_group(backend, device_id=device_id)
    return device


def all_gather(value):
    """A list of what each rank gives."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values


def average(numbers):
    """The means over the ranks of a dict of numbers."""
    ranks = all_gather(numbers)
    return {name: sum(rank[name] for rank in ranks) / WORLD_SIZE for name in numbers}


@contextlib.contextmanager
def failing_together(what):
    """Any rank's failure is an `Error` of all of them, so that none waits for ever."""
    failure = ""
    try:
        yield
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        failure = f"{what}: {one_line(error)}"
    failure = max(all_gather(failure))  # any that is not empty
    if failure:
        raise Error(failure)


def print0(text):
    """Print above the progress bar, on the first rank alone."""
    if RANK == 0:
        tqdm.write(text)


def local(tensor):
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def add_empty_parts(parts):
    """Ranks wait for each other at every pass: those with fewer parts repeat one, with
    nothing in its mask."""
    first = parts[0]
    batch = first.batch._replace(mask=torch.zeros_like(first.batch.mask))
    for _ in range(max(all_gather(len(parts))) - len(parts)):
        parts.append(dataclasses.replace(first, batch=batch))


def shard(model, logprobs, dtype, is_policy):
    """With several ranks, give each its part of a model's weights (FSDP2). The
    policy's weights are gathered, in `dtype`, for a rollout and an update, until
    `reshard`; a layer of the reference only while it runs. FSDP gathers when `forward`
    or a registered method is called. `logprobs` calls parts of the model, so it is
    registered."""
    if WORLD_SIZE == 1:
        return
    precision = fsdp.MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for module in [*layers, model]:
        fsdp.fully_shard(
            module, mp_policy=precision, reshard_after_forward=not is_policy
        )
    model.set_reshard_after_backward(False)
    model.logprobs = functools.partial(logprobs, model)
    fsdp.register_fsdp_forward_method(model, "logprobs")


def reshard(model):
    """Forget the gathered weights: the optimizer is to move the shards."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def sharded_logprobs(model, *arguments):
    """The method that `shard` has made."""
    return model.logprobs(*arguments)


def gather_weights(model, dtype):
    """The state dict of a sharded model in `dtype`, on the CPU of the first rank."""
    weights = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor().to(dtype)  # takes all ranks
        if RANK == 0:
            weights[name] = tensor.cpu()
    return weights


# ------------------------------------------------------------------------- checkpoints
LOGS = "metrics.jsonl", "completions.jsonl"  # of a run; each checkpoint has copies


@contextlib.contextmanager
def open_output_dir(config):
    """The run's folder, with its options in it, and for one process alone."""
    name = f"{Path(config.model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    output_dir = Path(all_gather(config.output_dir or f"runs/{name}")[0]).absolute()
    output_dir.mkdir(parents=True, exist_ok=True)
    with open(output_dir / ".lock", "w") as file:
        if RANK == 0:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Error(f"another process works in {output_dir}") from None
            for folder in output_dir.glob("partial-*"):  # of one that was killed
                shutil.rmtree(folder)
            if not config.resume:
                metrics = output_dir / "metrics.jsonl"
                begun = metrics.exists() and '"loss"' in metrics.read_text()
                if begun or checkpoints(output_dir):
                    raise Error(f"{output_dir} has a run: --resume it, or take another")
                shutil.rmtree(output_dir / "sft", ignore_errors=True)
                write_options(config, output_dir)
        all_gather(None)  # until they are there
        yield output_dir


def write_options(config, folder):
    """What `--resume` reads."""
    (folder / "options.json").write_text(json.dumps(vars(config), indent=2))


@contextlib.contextmanager
def save_at_the_end(run):
    """Save the last finished step however the run ends."""
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold activations
        # Saving takes all processes, and an `Error` alone is raised by all of them.
        if WORLD_SIZE == 1 or type(error) is Error:
            save(run)
        raise
    save(run)


def save(run):
    """Make the last finished step a checkpoint, in place of the one before, unless an
    update has moved the weights since. Broken weights never replace good ones: they
    must give a finite gradient on two tokens."""
    if run.step == run.saved_step or run.optimizer.moved:
        return
    run.optimizer.gradient_norm()  # empties `grad`, if an update has failed midway
    ids = torch.full((1, 2), run.eos_token_ids[0], device=run.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    run.logprobs(run.policy, ids, mask, ids, mask, 1.0).sum().backward()
    if not math.isfinite(run.optimizer.gradient_norm()):
        raise Error(
            f"the weights of step {run.step} give no finite gradient and are not saved;"
            f" the last good ones (0: none) are those of step {run.saved_step}"
        )
    run.optimizer.adamw.zero_grad()
    write_folder(run, f"checkpoint-{run.step}", with_optimizer=True)
    run.saved_step = run.step


def write_folder(run, name, with_optimizer=False):
    """A folder that `from_pretrained` and vLLM load (with LoRA merged, in float32, and
    `adapter/`) and what each rank needs to go on. It gets its name once it is whole."""
    folder = run.output_dir / f"partial-{name}"
    model = run.policy
    dtype = run.optimizer.dtype
    weights = gather_weights(model, dtype) if WORLD_SIZE > 1 else None
    with failing_together(f"{folder} cannot be written"):
        folder.mkdir(exist_ok=True)
        if run.adapters:
            run.adapters.save_pretrained(folder / "adapter")
            run.tokenizer.save_pretrained(folder / "adapter")
            try:
                model = copy.deepcopy(run.adapters.cpu()).float().merge_and_unload()
            finally:
                run.adapters.to(run.device)  # a GPU may not have room for two models
        if with_optimizer:
            file = folder / f"optimizer-{RANK}-of-{WORLD_SIZE}.pt"
            torch.save(run.optimizer.state(), file)
        if RANK == 0:
            model.save_pretrained(folder, state_dict=weights)
            if weights:
                model.config.dtype = dtype  # it was written as float32, that of shards
                model.config.save_pretrained(folder)
            run.tokenizer.save_pretrained(folder)
            write_options(run.config, folder)
            if with_optimizer:
                for log_name in LOGS:
                    shutil.copy(run.output_dir / log_name, folder)
    with failing_together(f"{folder} cannot be finished"):
        if RANK == 0:
            for file in folder.rglob("*.*"):  # on the disk before it has its name
                with open(file) as opened:
                    os.fsync(opened)
            folder.rename(run.output_dir / name)
            for old in checkpoints(run.output_dir)[:-1]:
                shutil.rmtree(old)
    print0(f"saved {run.output_dir / name}")


def checkpoints(output_dir):
    """The checkpoint folders of a run, oldest first."""
    return sorted(output_dir.glob("checkpoint-[0-9]*"), key=lambda x: int(x.name[11:]))


def restore(run):
    """Take the newest checkpoint's weights, optimizer and logs, if there is one."""
    folders = checkpoints(run.output_dir)
    if folders:
        folder = folders[-1]
        file = folder / f"optimizer-{RANK}-of-{WORLD_SIZE}.pt"
        if not file.exists():
            raise Error(f"no {file}: another number of processes, or no run")
        run.optimizer.load(torch.load(file, map_location="cpu", weights_only=True))
        run.step = run.saved_step = int(folder.name[11:])
        print0(f"going on from {folder}")
    if RANK == 0:
        for log_name in LOGS:
            text = (folder / log_name).read_text() if folders else ""
            (run.output_dir / log_name).write_text(text)


# ------------------------------------------------------------- built-in task and model
def arithmetic(model, seed):
    """Built-in sums. 5 in 8 of tiny's `solution`s are wrong, to leave work for GRPO."""
    rng = random.Random(seed)
    rows = []
    if model == "tiny":
        for a in range(50):
            for b in range(10):
                noisy = a + b + rng.choice([0, 0, 0, 1, 2, 5, 10, 20])
                rows.append(dict(prompt=f"{a}+{b}=", answer=a + b, solution=noisy))
        return rows
    for _ in range(2500):
        a, b, c, d = rng.choices(range(2, 100), k=4)
        prompt = f"Calculate {a} - {b} * ({c} - {d})."
        rows.append(dict(prompt=prompt, answer=a - b * (c - d)))
        prompt = f"Solve for x: {a} * x + {b} = {b - a * c}."
        rows.append(dict(prompt=prompt, answer=-c))
    return rows


def tiny_model(seed):
    """A 2-layer Qwen2, 135,168 random weights; its tokens are characters (Ġ: space)."""
    tokens = ["<eos>", "<unk>", *"0123456789+-*/=()<>#.,:ĠĊabcdefghijklmnopqrstuvwxyz"]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        eos_token="<eos>",
        pad_token="<eos>",
        unk_token="<unk>",
    )
    config = transformers.Qwen2Config(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=len(tokens),
        tie_word_embeddings=True,
        initializer_range=0.06,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config), tokenizer


# ------------------------------------------------------------------------ command line
TINY = dict(  # what `--model tiny` changes; whatever the user types wins
    prompt_template="{question}",
    prompts_per_step=64,
    max_completion_length=8,
    micro_batch_tokens=16384,
    learning_rate=1e-3,
    sft_steps=250,
    sft_learning_rate=3e-3,
    eval_every=100,
)


# What may be typed beside --resume; all else is the run's own.
RESUMABLE = """max_steps learning_rate eval_every save_every micro_batch_tokens
unsafe_code report_to"""


def parse_args(argv=None):
    """`Config` of a list of command-line words (default: the process's)."""
    usage = "python grpo.py [--option value ...]"
    parser = argparse.ArgumentParser(
        usage=usage, argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    comments = {}
    for line in inspect.getsource(Config).splitlines():
        field, _, comment = line.partition("  # ")
        comments[field.partition(":")[0].strip()] = comment
    for field in dataclasses.fields(Config):
        name, kind = "--" + field.name.replace("_", "-"), field.type
        default = " ".join(field.default) if kind is tuple else field.default
        text = f"{comments[field.name]} (default: {default})"
        if kind is bool:
            parser.add_argument(name, help=text, action="store_true")
        elif kind is tuple:
            parser.add_argument(
                name, help=text, nargs="+", action="extend", metavar="NAME"
            )
        elif get_args(kind):
            parser.add_argument(name, help=text, choices=get_args(kind))
        else:
            parser.add_argument(name, help=text, type=kind, metavar="X")
    typed = vars(parser.parse_args(argv))  # no defaults: they are suppressed
    options = {}
    if "resume" in typed:
        folder = Path(re.sub(r"/checkpoint-\d+/*$", "", typed["resume"]))
        fixed = typed.keys() - {"resume", *RESUMABLE.split()}
        if fixed:
            option = min(fixed).replace("_", "-")
            raise Error(f"the run has its own --{option}; may be new: {RESUMABLE}")
        newest = [folder, *checkpoints(folder)][-1]
        options = json.loads((newest / "options.json").read_text())
        typed["output_dir"] = str(folder)
    elif typed.get("model", "tiny") == "tiny":
        options = TINY
    return Config(**{**options, **typed})


def main():
    """Train as the command line says; a mistake of the user ends in one line."""
    sys.stdout.reconfigure(errors="backslashreplace")  # for terminals without UTF-8
    transformers.utils.logging.disable_progress_bar()
    try:
        train(parse_args())
    except ModuleNotFoundError as error:
        sys.exit(f"grpo.py: {error}: pip install {error.name}")
    except KeyboardInterrupt:
        sys.exit("grpo.py: interrupted")
    except (Error, OSError) as error:  # a mistake of the user
        sys.exit(f"grpo.py: {one_line(error)}")
    if dist.is_initialized():  # gloo's threads can abort an ordinary end
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
