# SPDX-License-Identifier: MIT
# Copyright (c) 2026 the grpo.py authors
r"""GRPO, Group Relative Policy Optimization (arXiv:2402.03300), in one file.

    python grpo.py                                      # a tiny model learns to add
    python grpo.py --model Qwen/Qwen2-Math-1.5B --data train.jsonl
    torchrun --nproc-per-node 8 grpo.py ...             # several GPUs (FSDP2)

It needs Python 3.11, torch 2.11 and transformers 5.17, or later.

One training step is `train_step`:
  1. take B prompts                                     `prompt_batch`
  2. sample G completions of each from the policy       `rollout`, `generate`
  3. score every completion                             `score`
  4. advantage A = (score - group mean) / group std     `group_advantages`
  5. minimise -min(ratio A, clip(ratio) A)              `update`, `token_logprobs`,
     + beta KL(policy, frozen reference)                `grpo_loss`
The group mean is the baseline, so no value network is needed.

Shapes: B prompts; G completions of each; N = B*G completions, of which rows b*G to
b*G+G-1 belong to prompt b; P prompt length (padded on the left); C completion length
(padded on the right); V vocabulary size; H hidden size.

Departures from the paper:
  1) Equal rewards in a group have an advantage of exactly 0, not what rounding gives.
  2) The reference model stays fixed: the paper's outer iterations, I, are 1.
  3) A mini-batch is a number of whole groups, in the order in which they were sampled.
  4) In the paper, process supervision (rewards of reasoning steps) replaces outcome
     supervision (rewards of completions). Here the two advantages are added.
  5) An update is skipped if its gradient is not finite.
As in the paper, the KL term is k3 alone. TRL 1.16 and DeepSeek-V3.2 multiply k3 by the
importance ratio, and so does `use_bias_correction_kl`.

The core, up to the line "That is all of GRPO", uses nothing that is defined below it.
In a program of yours, with a model `name` and a list of `texts`, in one process:

    import copy
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from grpo import DEVICE, Config, Run, train_step

    def brief(completions, **columns):
        return [-len(text) for text in completions]

    tokenizer = AutoTokenizer.from_pretrained(name)
    # In bfloat16, small steps of AdamW would be rounded away.
    policy = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    policy.to(DEVICE).eval()  # no dropout
    run = Run(
        Config(max_completion_length=64, max_steps=200),
        policy,
        tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        optimizer=torch.optim.AdamW(policy.parameters(), weight_decay=0.0),
        reward_functions={"brief": (brief, 1.0)},  # name: (function, weight)
        reference=copy.deepcopy(policy),
    )
    rows = [{"prompt_ids": tokenizer.encode(text)} for text in texts]
    for step in range(1, run.config.max_steps + 1):
        metrics, columns = train_step(run, rows, step)
"""

import contextlib
import copy
import functools
import gc
import importlib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Literal

import filelock
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HAS_BFLOAT16 = ON_GPU and torch.cuda.is_bf16_supported(including_emulation=False)
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # number of processes (ranks)
RANK = int(os.environ.get("RANK", 0))  # index of this process

# cuDNN attention, the default on an H100, gives NaN gradients with a mask at some
# lengths (pytorch issue 196678).
torch.backends.cuda.enable_cudnn_sdp(False)


class Error(ValueError):
    """A mistake of the user. `main` prints it as one line, without a traceback."""


# ------------------------------------------------------------------------------ options
def option(default, help):
    """A field of `Config` with its help text, as `HfArgumentParser` reads it."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Config:
    """All options. The command line is made from them, see --help."""

    # GRPO (the core uses only these)
    num_generations: int = option(8, "G, completions sampled for each prompt")
    prompts_per_step: int = option(8, "prompts per training step, over all ranks")
    max_completion_length: int = option(512, "in tokens; longer ones are cut off")
    temperature: float = option(1.0, "used for sampling and for all log-probs")
    scale_rewards: Literal["group", "none"] = option(
        "group", "none: do not divide by the std of the group"
    )
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = option(
        "grpo", "how the losses of tokens are averaged, see token_weights"
    )
    importance_sampling_level: Literal["token", "sequence"] = option(
        "token", "one ratio for each token, or for each sequence (GSPO)"
    )
    epsilon: float = option(0.2, "clip range of the ratio")
    epsilon_high: float | None = option(None, "clip range above 1; default: epsilon")
    beta: float = option(0.04, "weight of the KL term; 0 needs no reference model")
    use_bias_correction_kl: bool = option(False, "multiply the KL term by the ratio")
    num_mini_batches: int = option(1, "parts of a rollout, each with its own update")
    num_iterations: int = option(1, "mu, passes over a rollout")
    micro_batch_size: int = option(16, "completions in one forward and backward pass")
    learning_rate: float = option(1e-6, "AdamW learning rate after warm-up")
    lr_scheduler_type: Literal["constant", "linear"] = option(
        "constant", "linear: decays to 0 over max_steps"
    )
    warmup_steps: int = option(10, "training steps of linear warm-up")
    max_steps: int = option(200, "training steps (rollouts); 0: only evaluate")
    max_grad_norm: float = option(1.0, "gradient clipping; 0: no clipping")
    seed: int = option(0, "random seed")

    # Data
    data: str = option("", "JSONL file; default: built-in sums")
    eval_data: str = option("", "JSONL file; default: up to 64 rows of the data")
    reward: list[str] = field(
        default_factory=lambda: ["accuracy"],
        metadata={
            "help": "one or more of accuracy, math, format, reward_model:NAME, "
            "judge:NAME, FILE.py:FUNCTION, each with an optional =WEIGHT"
        },
    )
    step_reward: str = option("", "FILE.py:FUNCTION that scores the reasoning steps")
    prompt_template: str = option("", "wraps {question}; accuracy and math have one")
    system_prompt: str = option("", "system message for prompts that have none")
    chat_template_kwargs: str = option("{}", "JSON: '{\"enable_thinking\": false}'")
    max_prompt_length: int = option(512, "in tokens; longer prompts are left out")

    # Model
    model: str = option("tiny", "Hub name or folder; tiny has its own defaults, TINY")
    dtype: Literal["bfloat16", "float32"] = option(
        "bfloat16" if HAS_BFLOAT16 else "float32",
        "dtype of the model; AdamW always updates float32 weights",
    )
    gradient_checkpointing: bool = option(False, "run layers twice, to save memory")
    lora_rank: int = option(0, "above 0: train only adapters of this rank (peft)")
    sft_steps: int = option(0, "supervised steps on the data's solutions before GRPO")
    sft_learning_rate: float = option(1e-5, "learning rate of the supervised steps")

    # Output
    output_dir: str = option("", "folder of the run; default: runs/TIME")
    resume: str = option("", "resume the run in this folder, with its options")
    eval_every: int = option(50, "steps between evaluations and samples; 0: none")
    save_every: int = option(50, "steps between checkpoints; 0: only the last")
    save_total_limit: int = option(1, "checkpoints to keep, the newest; 0: all")
    report_to: Literal["none", "wandb", "trackio"] = option("none", "tracker")
    run_id: str = option("", "by which a tracker resumes; default: a random one")

    def __post_init__(self):
        smallest = {
            "num_generations": 2,
            "prompts_per_step": 1,
            "max_completion_length": 1,
            "temperature": 1e-6,
            "num_mini_batches": 1,
            "num_iterations": 1,
            "micro_batch_size": 1,
        }
        for name, value in vars(self).items():
            minimum = smallest.get(name, 0)
            if isinstance(value, (int, float)) and not minimum <= value < math.inf:
                flag = "--" + name.replace("_", "-")
                raise Error(f"{flag} must be finite and at least {minimum}")
        if self.prompts_per_step % (WORLD_SIZE * self.num_mini_batches):
            raise Error(
                "--prompts-per-step must be divisible by --num-mini-batches times "
                f"{WORLD_SIZE} ranks"
            )


# ---------------------------------------------------------------------- GRPO in numbers
def completion_mask(completion_ids, eos_token_ids):
    """True up to and including the first EOS of each row: ids (N, C) -> bool (N, C).
    eos_token_ids: one id or a list. Comparing with the pad token instead would be
    wrong: it is often the EOS token, and the model would never learn to stop.
    >>> completion_mask(torch.tensor([[5, 2, 2], [5, 6, 7]]), 2).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    eos = torch.tensor(eos_token_ids, device=completion_ids.device)
    is_eos = torch.isin(completion_ids, eos).long()
    num_before = is_eos.cumsum(1) - is_eos  # EOS tokens before each position
    return num_before == 0


def group_advantages(rewards, num_generations, scale_rewards="group", eps=1e-8):
    """(r - mean of its group) / (std of its group + eps): rewards (N,) -> (N,) float32.
    DeepSeekMath 4.1.2, with the unbiased std. With `scale_rewards` "none" there is no
    division (Dr. GRPO, arXiv:2503.20783).
    >>> group_advantages(torch.tensor([1.0, 0, 0, 1, 0.1, 0.1, 0.1, 0.1]), 4)
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660,  0.0000,  0.0000,  0.0000,  0.0000])
    """
    if num_generations < 2 or len(rewards) % num_generations:
        raise ValueError(
            f"cannot split {len(rewards)} rewards into groups of {num_generations}"
        )
    rewards = rewards.float()  # float64 would tell 0.1 + 0.2 from 0.3
    if not rewards.isfinite().all():
        raise ValueError(f"rewards must be finite: {rewards}")
    groups = rewards.view(-1, num_generations)  # (B, G)
    advantages = groups - groups.mean(1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + eps)
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards {scale_rewards!r} is unknown")
    # Equal rewards may differ from their mean by rounding, and the std is as small:
    # eight rewards of 0.1 would get -0.41.
    is_equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return advantages.masked_fill(is_equal, 0).view(-1)


def process_advantages(
    step_rewards, step_ends, num_generations, length, scale_rewards="group", eps=1e-8
):
    """Advantages (N, C = length) by process supervision (DeepSeekMath 4.1.3).
    step_rewards: N lists (or tensors) with one number per reasoning step. step_ends: N
    lists with the index of the last token of each. The step rewards of a group are
    normalised together; a token gets the sum over the steps that end at or after it:
    >>> process_advantages([[1, 0], [0, 1]], [[0, 2], [1, 2]], 2, 4)
    tensor([[ 0.0000, -0.8660, -0.8660,  0.0000],
            [ 0.0000,  0.0000,  0.8660,  0.0000]])
    """
    advantages = torch.zeros(len(step_rewards), length)
    for start in range(0, len(step_rewards), num_generations):
        rewards, places = [], []  # of all reasoning steps of the G completions
        for row in range(start, start + num_generations):
            for reward, end in zip(step_rewards[row], step_ends[row], strict=True):
                rewards.append(float(reward))
                places.append((row, end))
        if len(rewards) < 2:  # there is nothing to compare it with
            continue
        normalised = group_advantages(  # as one group
            torch.tensor(rewards), len(rewards), scale_rewards, eps
        )
        for (row, end), advantage in zip(places, normalised):
            advantages[row, : end + 1] += advantage
    return advantages


def masked_mean(x, mask, dim=None):
    """Mean of x where the mask is true, over all elements or along `dim`; 0 if it is
    true nowhere."""
    mask = mask.bool()
    return x.where(mask, 0).sum(dim) / mask.sum(dim).clamp(min=1)


def importance_ratio(logp, old_logp, mask=None, importance_sampling_level="token"):
    """New over old probability of each token, exp(logp - old_logp): (N, C). With level
    "sequence" a completion has one ratio, exp of the mean of logp - old_logp over its
    tokens (GSPO, arXiv:2507.18071, eq. 7). By default the mask is true everywhere."""
    log_ratio = logp - old_logp
    if importance_sampling_level == "sequence":
        mask = torch.ones_like(log_ratio) if mask is None else mask
        means = masked_mean(log_ratio, mask, dim=1)  # (N,)
        log_ratio = means[:, None].expand_as(log_ratio)
    elif importance_sampling_level != "token":
        raise ValueError(f"level {importance_sampling_level!r} is unknown")
    return log_ratio.exp()


def clipped_surrogate(ratio, advantages, epsilon=0.2, epsilon_high=None):
    """min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A), to be maximised.
    ratio: (N, C); advantages: (N,) or (N, C). PPO (arXiv:1707.06347) eq. 7. The upper
    bound of DAPO, `epsilon_high` (arXiv:2503.14476), is `epsilon` by default.
    >>> ratio = torch.tensor([[1.4], [1.4]])
    >>> clipped_surrogate(ratio, torch.tensor([0.9354, -0.9354])).flatten()
    tensor([ 1.1225, -1.3096])
    """
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    advantages = advantages.reshape(len(ratio), -1)  # (N, 1) or (N, C)
    return torch.minimum(ratio * advantages, clipped_ratio * advantages)


def kl_k3(logp, ref_logp):
    """exp(d) - d - 1 with d = ref_logp - logp: (N, C) in nats, never negative.
    DeepSeekMath eq. 4; "k3" in joschu.net/blog/kl-approx.html. Its mean over tokens of
    the policy is KL(policy, reference). The mean of its gradient is not the gradient of
    that, because the choice of the tokens is not differentiated:
        mean of grad k3             grad KL(reference, policy)
        mean of grad (ratio * k3)   grad KL(policy, reference)
    >>> kl_k3(torch.tensor([0.7]).log(), torch.tensor([0.5]).log())
    tensor([0.0508])
    """
    d = ref_logp - logp
    return torch.expm1(d) - d


def token_weights(mask, loss_type="grpo", max_completion_length=None, num_tokens=None):
    """The weight of each token in the loss: mask (N, C) -> (N, C) float64.
        grpo     1 / (number of tokens in its row) / N: a mean over sequences of means
        dapo     1 / num_tokens: a mean over all tokens
        dr_grpo  1 / (N * max_completion_length)
    num_tokens: by default those of the mask. max_completion_length: by default C.
    >>> token_weights(torch.tensor([[1, 1, 0], [1, 0, 0]])).tolist()
    [[0.25, 0.25, 0.0], [0.5, 0.0, 0.0]]
    """
    num_sequences, length = mask.shape
    weights = mask.double()
    if loss_type == "grpo":
        return weights / weights.sum(1, keepdim=True).clamp(min=1) / num_sequences
    if loss_type == "dapo":
        return weights / (num_tokens or weights.sum().clamp(min=1))
    if loss_type == "dr_grpo":
        return weights / (num_sequences * (max_completion_length or length))
    raise ValueError(f"loss_type {loss_type!r} is unknown")


def grpo_loss(
    logp,
    old_logp,
    ref_logp,
    advantages,
    mask,
    *,
    weights=None,
    epsilon=0.2,
    epsilon_high=None,
    beta=0.04,
    importance_sampling_level="token",
    use_bias_correction_kl=False,
):
    """DeepSeekMath eq. 3: the sum over tokens of weight * (beta k3 - surrogate), to be
    minimised. Returns this scalar and a dict of metrics, means over the tokens.
    logp, old_logp, ref_logp: (N, C) float32 in nats; mask: (N, C); advantages: (N,) or
    (N, C). Pass old_logp=None if the policy has not changed since it sampled, and
    ref_logp=None for no KL term. What is masked is ignored.
    weights: (N, C), by default `token_weights(mask)`. With micro-batches, compute them
    once for the whole batch and pass each its rows: the losses then add up.
    `use_bias_correction_kl` multiplies k3 by the ratio (DeepSeek-V3.2,
    arXiv:2512.02556), which is unbiased only with token-level ratios."""
    mask = mask.bool()
    weights = token_weights(mask) if weights is None else weights
    # Weights of 0 are not enough: masked log-probs may be NaN, and 0 * NaN is NaN.
    logp = logp.where(mask, 0)
    # None: the policy is still the one that sampled. The ratio is then 1, but it has a
    # gradient, since only old_logp is detached.
    old_logp = (logp if old_logp is None else old_logp.where(mask, 0)).detach()
    advantages = advantages.reshape(len(mask), -1).where(mask, 0)  # (N, C)
    ratio = importance_ratio(logp, old_logp, mask, importance_sampling_level)
    surrogate = clipped_surrogate(ratio, advantages, epsilon, epsilon_high)
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        kl = kl_k3(logp, ref_logp.detach().where(mask, 0))
    penalty = ratio * kl if use_bias_correction_kl else kl
    loss = ((beta * penalty - surrogate) * weights.to(logp)).sum()
    with torch.no_grad():
        is_clipped = surrogate < ratio * advantages
        metrics = {
            "kl": masked_mean(kl, mask),
            "entropy": masked_mean(-logp, mask),  # estimated from the sampled tokens
            "ratio_mean": masked_mean(ratio, mask),
            "clip_fraction": masked_mean(is_clipped.float(), mask),
        }
    return loss, metrics


# --------------------------------------------------------------- sampling and log-probs
def call_model(model, ids, attention_mask, cache=None, **options):
    """Runs L tokens for each row, ids (N, L), after the K tokens that are in `cache`,
    and adds them to it. attention_mask: (N, K + L). A token's position is the number of
    tokens before it, without padding on the left."""
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return model(
        ids,
        attention_mask=attention_mask.long(),
        position_ids=positions[:, -ids.shape[1] :],
        past_key_values=cache,
        use_cache=cache is not None,
        **options,
    )


def sample(logits, temperature=1.0):
    """One token for each row from softmax(logits / temperature), and its log-prob:
    (N, V) -> (N,), (N,). Temperature 0 takes the most probable token.
    Inverse transform sampling needs one random number per row; `torch.multinomial`
    draws V of them and takes five times as long."""
    if temperature == 0:
        logps, ids = logits.float().log_softmax(1).max(1)
        return ids, logps
    probs = (logits.float() / temperature).softmax(1)  # (N, V)
    cdf = probs.cumsum(1, dtype=torch.float64)  # float32 would drop tokens below 1e-7
    total = cdf[:, -1:]  # 1, but for rounding
    draws = torch.rand_like(total) * total
    ids = torch.searchsorted(cdf, draws, right=True)  # (N, 1), the first cdf > draw
    ids = ids.clamp(max=logits.shape[1] - 1)  # NaN logits give V, which is no token
    return ids[:, 0], probs.gather(1, ids)[:, 0].log()


@torch.no_grad()
def generate(
    model,
    prompt_ids,
    prompt_mask,
    num_generations,
    max_completion_length,
    eos_token_ids,
    temperature=1.0,
):
    """Samples G completions of each prompt. Returns ids and log-probs, both (N, C).
    prompt_ids, prompt_mask: (B, P), padded on the left. C is `max_completion_length`.
    Rows stop at any of `eos_token_ids`, an id or a list, and are padded with the first.
    Temperature 0 is greedy. model: a causal LM of transformers in eval mode. The
    settings in its generation config (top-k, ...) are ignored: they would sample from
    another distribution than the one that is trained."""
    if not prompt_mask[:, -1].all():
        raise ValueError("prompts must be padded on the left")
    eos = torch.tensor(eos_token_ids, device=prompt_ids.device).view(-1)
    num_completions = len(prompt_ids) * num_generations
    completion_ids = eos[0].repeat(num_completions, max_completion_length)  # (N, C)
    completion_logp = torch.zeros(completion_ids.shape, device=eos.device)

    # Each prompt runs once. Its cache and its logits are copied for its G completions.
    cache = DynamicCache(config=model.config)
    logits = call_model(model, prompt_ids, prompt_mask, cache, logits_to_keep=1).logits
    # `live` lists the completions that are unfinished: at first, all. Logits, attention
    # mask and cache have a row for each of these only, in this order.
    live = torch.arange(num_completions, device=eos.device)
    prompt_of = live // num_generations  # for G = 3: 0 0 0 1 1 1 ...
    logits, attention_mask = logits[prompt_of], prompt_mask[prompt_of]  # B rows -> N
    cache.reorder_cache(prompt_of)  # cache[prompt_of]: repeats rows here, drops below

    # In step i the cache holds the P tokens of the prompt and tokens 0 to i - 1 of the
    # completion. Token i is sampled, and then run to get the logits of token i + 1.
    for i in range(max_completion_length):
        ids, logp = sample(logits[:, -1], temperature)
        completion_ids[live, i] = ids
        completion_logp[live, i] = logp
        kept = (~torch.isin(ids, eos)).nonzero()[:, 0]  # rows of the batch
        if len(kept) == 0 or i == max_completion_length - 1:
            break
        if len(kept) < len(live):  # finished completions leave the batch
            live = live[kept]
            ids = ids[kept]
            attention_mask = attention_mask[kept]
            cache.reorder_cache(kept)
        attention_mask = F.pad(attention_mask, (0, 1), value=True)  # the token sampled
        logits = call_model(
            model, ids[:, None], attention_mask, cache, logits_to_keep=1
        ).logits
    return completion_ids, completion_logp


def model_inputs(prompt_ids, prompt_mask, completion_ids, mask):
    """Ids and attention mask of prompts and completions. The output at each token
    predicts the next one, so the last token is not run. For a prompt p0 p1 p2:
        at         p2   c0   c1
        predicts   c0   c1   c2
    """
    if not prompt_mask[:, -1].all():
        raise ValueError("prompts must be padded on the left")
    ids = torch.cat([prompt_ids, completion_ids], 1)[:, :-1]
    return ids, torch.cat([prompt_mask, mask], 1)[:, :-1]


def token_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, mask, temperature=1.0
):
    """Log-probability of each completion token given everything before it: (N, C)
    float32, 0 where masked.
    prompt_ids, prompt_mask: (N, P), padded on the left. completion_ids, mask: (N, C),
    see `completion_mask`; masked ids must be valid tokens too. Logits are divided by
    `temperature`, as in sampling. model: as in `generate`. All logits, (N, C, V), are
    in memory; `sliced_logprobs` avoids that."""
    ids, attention_mask = model_inputs(prompt_ids, prompt_mask, completion_ids, mask)
    length = completion_ids.shape[1]
    logits = call_model(model, ids, attention_mask, logits_to_keep=length).logits
    logps = (logits.float() / temperature).log_softmax(2)  # (N, C, V)
    logp = logps.gather(2, completion_ids[:, :, None])[:, :, 0]  # (N, C)
    return logp.where(mask.bool(), 0)


# ----------------------------------------------------------------------------- one step
@dataclass
class Batch:
    """N completions, each with its prompt: a rollout, a mini-batch or a micro-batch."""

    prompt_ids: torch.Tensor  # (N, P), padded on the left
    prompt_mask: torch.Tensor  # (N, P), bool
    completion_ids: torch.Tensor  # (N, C), padded on the right
    mask: torch.Tensor  # (N, C), bool: up to and including the first EOS
    # All (N, C), and None until they are set
    sampled_logp: torch.Tensor | None = None  # by `rollout`
    advantages: torch.Tensor | None = None  # by `train_step`
    ref_logp: torch.Tensor | None = None  # by `update`, if there is a KL term
    old_logp: torch.Tensor | None = None  # by `update`, if it takes several steps
    weights: torch.Tensor | None = None  # by `optimizer_step`, see `token_weights`

    @property
    def inputs(self):
        """Arguments of `token_logprobs`, without the model and the temperature."""
        return self.prompt_ids, self.prompt_mask, self.completion_ids, self.mask

    def select(self, indices):
        """A batch of these rows, cut to their longest prompt and completion."""
        prompt_length = int(self.prompt_mask[indices].sum(1).max())
        length = int(self.mask[indices].sum(1).max())
        selected = {}
        for name, x in vars(self).items():
            if name in ("prompt_ids", "prompt_mask"):  # padded on the left
                selected[name] = x[indices, -prompt_length:]
            elif x is not None:  # all others are (N, C)
                selected[name] = x[indices, :length]
        return Batch(**selected)

    def micro_batch_indices(self, size):
        """For each micro-batch, the indices of its `size` rows. They have similar
        lengths, to save padding. Their order does not change the results."""
        return self.mask.sum(1).argsort(stable=True).split(size)


@dataclass
class Run:
    """What a training step works with. Models are on DEVICE and in eval mode, so that
    there is no dropout."""

    config: Config
    policy: torch.nn.Module  # the causal LM of transformers that is trained
    tokenizer: transformers.PreTrainedTokenizerBase
    eos_token_ids: list[int]  # a completion ends with any of these
    optimizer: torch.optim.Optimizer | None  # None: this run only evaluates
    # {name: (function, weight)}, see `score`
    reward_functions: dict[str, tuple[Callable, float]]
    reference: torch.nn.Module | None = None  # needed unless beta is 0
    step_reward: Callable | None = None  # see `score_steps`
    generate: Callable = generate  # or `graphed_generate`
    logprobs: Callable = token_logprobs  # or `sliced_logprobs`


def train_step(run, train_rows, step):
    """Takes one GRPO step on some of the rows. All ranks are given the same rows, and
    share the prompts of the step equally. Returns metrics, means over all ranks, and
    columns, lists with one element per completion of this rank. A row is a dict with
    "prompt_ids" and the columns that reward functions take. `step` starts at 1."""
    config = run.config
    start = time.perf_counter()

    # 1. Take B prompts.
    rows = prompt_batch(train_rows, step, config.prompts_per_step, config.seed)

    # 2. Sample G completions of each from the current policy.
    batch, columns = rollout(run, rows, config.num_generations, config.temperature)

    # 3. Score them.
    scores = score(run, columns, config.num_generations)
    metrics = rollout_metrics(batch, columns, scores, config.num_generations)
    if run.step_reward:
        columns |= score_steps(run, columns)
        step_rewards = [float(x) for xs in columns["step_rewards"] for x in xs]
        metrics["step_reward"] = torch.tensor(step_rewards).mean().item()
    columns |= {name: x.tolist() for name, x in scores.items()}

    # 4. Normalise within each group.
    batch.advantages = token_advantages(run, batch, columns, scores["reward"])
    metrics["rollout_seconds"] = time.perf_counter() - start  # with reward functions

    # 5. Minimise -min(ratio A, clip(ratio) A) + beta KL.
    start = time.perf_counter()
    metrics |= update(run, batch, scheduled_learning_rate(config, step))
    metrics["update_seconds"] = time.perf_counter() - start
    return mean_over_ranks(metrics), columns


def prompt_batch(rows, step, size, seed):
    """This rank's share of the `size` rows of a step. Epochs are shuffled and drop an
    incomplete batch."""
    if size > len(rows):
        raise Error(f"{len(rows)} rows are too few for a step of {size}")
    epoch, i = divmod(step - 1, len(rows) // size)
    shuffled = random.Random(seed * 1_000_003 + epoch).sample(rows, len(rows))
    return shuffled[i * size : (i + 1) * size][RANK::WORLD_SIZE]


def rollout(run, rows, num_generations, temperature):
    """Samples completions of rows of the data. (An evaluation samples one of each, at
    temperature 0.) Returns a `Batch` and the columns for reward functions, lists with
    one element per completion: the columns of the data, `completions` (texts without
    EOS), `completion_ids`, and `finished`, False if cut off at the length limit."""
    prompt_ids, prompt_mask = pad([row["prompt_ids"] for row in rows], "left")
    completion_ids, logp = run.generate(
        run.policy,
        prompt_ids,
        prompt_mask,
        num_generations,
        run.config.max_completion_length,
        run.eos_token_ids,
        temperature,
    )
    mask = completion_mask(completion_ids, run.eos_token_ids)
    batch = Batch(
        prompt_ids=prompt_ids.repeat_interleave(num_generations, dim=0),
        prompt_mask=prompt_mask.repeat_interleave(num_generations, dim=0),
        completion_ids=completion_ids,
        mask=mask,
        sampled_logp=logp,
    )
    repeated = [row for row in rows for _ in range(num_generations)]
    columns = {name: [row[name] for row in repeated] for name in rows[0]}
    ids = [x[m].tolist() for x, m in zip(completion_ids, mask)]
    finished = [x[-1] in run.eos_token_ids for x in ids]
    columns["completion_ids"] = ids
    columns["finished"] = finished
    # Special tokens other than the final EOS are kept: in some models <think> is one.
    without_eos = [x[:-1] if ended else x for x, ended in zip(ids, finished)]
    columns["completions"] = run.tokenizer.batch_decode(without_eos)
    return batch, columns


def pad(sequences, side):
    """Lists of token ids as one tensor: ids and mask, (len(sequences), longest).
    Padding is run like other tokens, so it is one of them. (Some pad tokens have an
    embedding of zeros. The gradient of normalising zeros can be NaN.)"""
    tensors = [torch.tensor(sequence, device=DEVICE) for sequence in sequences]
    ids = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side=side)
    mask = ids >= 0  # no token is -1
    return ids.masked_fill(~mask, sequences[0][0]), mask


def score(run, columns, num_generations):
    """Calls every reward function with the columns as keyword arguments. It returns a
    finite number for each completion, or None (or NaN) if it does not judge it.
    Returns {name: (N,) float64}, with NaN for None. "reward" is the weighted sum, in
    which an unjudged completion has the mean of its group, or 0 if none was judged."""
    size = len(columns["completions"])
    scores = {"reward": torch.zeros(size, dtype=torch.float64)}
    for name, (function, weight) in run.reward_functions.items():
        returned = function(**columns)
        try:
            rewards = [math.nan if x is None else float(x) for x in returned]
        except (TypeError, ValueError):
            rewards = []  # not numbers
        if len(rewards) != size or any(map(math.isinf, rewards)):
            raise Error(f"reward {name} returned {returned!r:.200}, not {size} numbers")
        rewards = torch.tensor(rewards, dtype=torch.float64)
        groups = rewards.view(-1, num_generations)  # (B, G)
        means = groups.nanmean(1, keepdim=True).nan_to_num()  # 0 if none was judged
        scores["reward"] += weight * groups.where(~groups.isnan(), means).view(-1)
        scores[f"rewards/{name}"] = rewards
    return scores


def score_steps(run, columns):
    """Calls the step reward with the columns and two more: `steps`, the texts of the
    reasoning steps of each completion, and `step_ends`, the indices of their last
    tokens. It returns a list of numbers for each completion. Returns these two columns
    and `step_rewards`."""
    found = [reasoning_steps(run.tokenizer, ids) for ids in columns["completion_ids"]]
    step_columns = {
        "steps": [texts for texts, _ in found],
        "step_ends": [ends for _, ends in found],
    }
    step_columns["step_rewards"] = run.step_reward(**(columns | step_columns))
    return step_columns


def reasoning_steps(tokenizer, ids):
    """The reasoning steps of a completion, its non-blank lines: a list of their texts
    and a list of the indices of their last tokens. What follows the last line, such as
    EOS, belongs to it."""
    texts, ends = [], []
    start = 0
    for i, token in enumerate(ids):
        if "\n" in tokenizer.decode([token]) or i == len(ids) - 1:
            text = tokenizer.decode(ids[start : i + 1], skip_special_tokens=True)
            if text.strip():
                texts.append(text.strip())
                ends.append(i)
            start = i + 1
    if ends:
        ends[-1] = len(ids) - 1
    return texts, ends


def token_advantages(run, batch, columns, rewards):
    """Advantages (N, C). All tokens of a completion share that of its reward. Process
    supervision adds those of its reasoning steps."""
    config = run.config
    advantages = group_advantages(rewards, config.num_generations, config.scale_rewards)
    advantages = advantages[:, None].expand(batch.mask.shape)
    if run.step_reward:
        advantages = advantages + process_advantages(
            columns["step_rewards"],
            columns["step_ends"],
            config.num_generations,
            batch.mask.shape[1],
            config.scale_rewards,
        )
    return advantages.to(DEVICE)


def rollout_metrics(batch, columns, scores, num_generations):
    """What a rollout and its scores come to: means over completions."""
    metrics = {name: x.nanmean().item() for name, x in scores.items()}
    groups = scores["reward"].float().view(-1, num_generations)  # (B, G)
    metrics["reward_std"] = groups.std(1).mean().item()
    equal = (groups == groups[:, :1]).all(1)
    metrics["zero_std_fraction"] = equal.float().mean().item()
    metrics["completion_length"] = batch.mask.sum(1).double().mean().item()
    metrics["truncated_fraction"] = columns["finished"].count(False) / len(batch.mask)
    return metrics


def scheduled_learning_rate(config, step):
    """The learning rate of a step: a linear warm-up, then constant or linear decay."""
    factor = min(1.0, step / max(1, config.warmup_steps))
    if config.lr_scheduler_type == "linear":
        steps_of_decay = max(1, config.max_steps - config.warmup_steps)
        steps_left = config.max_steps - step + 1  # with this one
        factor = min(factor, steps_left / steps_of_decay)
    return config.learning_rate * factor


def update(run, batch, learning_rate):
    """Trains the policy on a rollout, in `num_iterations` (mu) passes with an optimizer
    step for each mini-batch. Returns metrics, means over the optimizer steps."""
    config = run.config
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate
    if config.beta:
        batch.ref_logp = fixed_logprobs(run, run.reference, batch)
    num_updates = config.num_iterations * config.num_mini_batches
    if num_updates > 1:
        # Not `sampled_logp`, which differs by rounding: ratios would not start at 1.
        batch.old_logp = fixed_logprobs(run, run.policy, batch)
    # Equal parts of whole groups: `num_mini_batches` divides the number of prompts.
    mini_batches = torch.arange(len(batch.mask)).chunk(config.num_mini_batches)
    updates = []
    for _ in range(config.num_iterations):
        for indices in mini_batches:
            updates.append(optimizer_step(run, batch.select(indices)))
    means = {name: sum(x[name] for x in updates) / num_updates for name in updates[0]}
    return means | {"learning_rate": learning_rate}


@torch.no_grad()
def fixed_logprobs(run, model, batch):
    """Log-probs (N, C) that stay fixed during the updates."""
    logp = torch.zeros(batch.mask.shape, device=DEVICE)
    for indices in batch.micro_batch_indices(run.config.micro_batch_size):
        micro = batch.select(indices)
        micro_logp = run.logprobs(model, *micro.inputs, run.config.temperature)
        logp[indices, : micro_logp.shape[1]] = micro_logp
    return logp


def optimizer_step(run, batch):
    """Takes an optimizer step on a mini-batch, unless its gradient is not finite.
    Micro-batches only reduce memory: their losses and gradients add up to those of the
    mini-batch. Returns metrics, means over its tokens."""
    config = run.config
    # The metrics, and the loss of dapo, are means over the T tokens of all R ranks. A
    # rank divides its own sum by T/R. FSDP2 (gradients) and `mean_over_ranks` (metrics)
    # then average over the ranks, which divides by R.
    tokens_per_rank = sum(all_gather(batch.mask.sum().item())) / WORLD_SIZE
    batch.weights = token_weights(
        batch.mask, config.loss_type, config.max_completion_length, tokens_per_rank
    )
    metrics = defaultdict(float)
    for indices in batch.micro_batch_indices(config.micro_batch_size):
        micro = batch.select(indices)
        logp = run.logprobs(run.policy, *micro.inputs, config.temperature)
        # `update` sets none for the only update: the policy is the one that sampled.
        old_logp = logp.detach() if micro.old_logp is None else micro.old_logp
        loss, means = grpo_loss(
            logp,
            old_logp,
            micro.ref_logp,
            micro.advantages,
            micro.mask,
            weights=micro.weights,
            epsilon=config.epsilon,
            epsilon_high=config.epsilon_high,
            beta=config.beta,
            importance_sampling_level=config.importance_sampling_level,
            use_bias_correction_kl=config.use_bias_correction_kl,
        )
        loss.backward()
        if micro.sampled_logp is not None:  # supervised steps have none
            # Sampling runs the policy token by token with a cache, training all tokens
            # at once. The log-probs differ by rounding, or one of the two is wrong.
            gap = (old_logp - micro.sampled_logp).abs()
            means["sampling_gap"] = masked_mean(gap, micro.mask)
        metrics["loss"] += loss.item()  # weighted already
        share = micro.mask.sum().item() / tokens_per_rank
        for name, mean in means.items():
            metrics[name] += mean.item() * share

    parameters = [x for part in run.optimizer.param_groups for x in part["params"]]
    grad_norm = clip_grad_norm_(parameters, config.max_grad_norm or math.inf)
    if isinstance(grad_norm, DTensor):
        grad_norm = grad_norm.full_tensor()  # over the shards of all ranks
    metrics["grad_norm"] = grad_norm.item()
    is_finite = math.isfinite(metrics["grad_norm"])  # the same on all ranks
    if is_finite:
        run.optimizer.step()
    run.optimizer.zero_grad()
    metrics["skipped"] = float(not is_finite)
    return metrics


def all_gather(value):
    """One object from every rank as a list, in order of rank."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values


def mean_over_ranks(metrics):
    """Means of a dict of metrics over all ranks. A rank with NaN, on which a reward
    function judged no completion, does not count."""
    ranks = [list(x.values()) for x in all_gather(metrics)]
    means = torch.tensor(ranks, dtype=torch.float64).nanmean(0)
    return dict(zip(metrics, means.tolist()))


# That is all of GRPO. The rest is optional: it turns the core into a program. Sections:
# rewards, data and prompts, models, logs and checkpoints, supervised steps and built-in
# task, the run, command line.


# ------------------------------------------------------------------------------ rewards
def accuracy_reward(completions, answer, finished=None, **columns):
    r"""1.0 for each completion whose answer equals that of the data, else 0.0.
    answer: N strings or numbers. finished: N bools, False if a completion was cut off.
    >>> texts = [r"So \boxed{2}.", "$1,200.00", "2 or 3"]
    >>> accuracy_reward(texts, ["2", 1200, "2"])
    [1.0, 1.0, 0.0]
    """
    scores = []
    for i, completion in enumerate(completions):
        found = extract_answer(completion, finished is None or finished[i])
        gold = normalise(gold_answer(answer[i]))
        if re.fullmatch(r"\(?[a-j]\)?", str(gold)):  # a choice: B or (B)
            gold = gold.strip("()")
            # B. Paris, (b) 12, \textbf{(B)} and \mathbf{B} are B.
            choice = re.match(r"(?i)[\\(a-z{]*\b([a-j])[):.}]", found)
            found = choice[1] if choice else found
        scores.append(float(normalise(found) == gold))
    return scores


def math_reward(completions, answer, finished=None, **columns):
    """1.0 where `accuracy` is, or where math-verify finds the answers equal as LaTeX,
    such as x+1 and 1+x (pip install math-verify)."""
    from math_verify import parse, verify

    scores = accuracy_reward(completions, answer, finished)
    for i, completion in enumerate(completions):
        found = extract_answer(completion, finished is None or finished[i])
        if not scores[i] and found:
            gold = parse(f"${gold_answer(answer[i])}$")
            scores[i] = float(verify(gold, parse(f"${found}$")))
    return scores


def format_reward(prompts, completions, **columns):
    """1.0 for one `<think>...</think>` followed by an answer, else 0.0 (DeepSeek-R1,
    arXiv:2501.12948, 2.2.2). The prompt may end in `<think>`."""
    scores = []
    for prompt, text in zip(prompts, completions):
        if prompt.rstrip().endswith("<think>"):
            text = "<think>" + text
        match = re.fullmatch(r"\s*<think>.*</think>.*\S.*", text, re.DOTALL)
        scores.append(float(match is not None and text.count("think>") == 2))
    return scores


# A number is read to its end: 12,5 and 1.2.3 are no numbers, and not 5 or 3.
NUMBER = (
    r"(?:(?<!\d)[-+])?[$€£]?"  # the minus of 3-5 is no sign
    r"(?:\d+ (?=\d+/\d))?"  # the whole part of 2 1/2
    r"\.?\d(?:[\d.,/:]*\d)?"  # 5 or .5 or 1,200 or 1/2 or 3:30, without a full stop
    r"(?:[eE][-+]?\d+)?"  # 7.0e-05
)
# The number of "72 clips", but none that begins something else.
NUMBER_ALONE = (
    rf"(?>{NUMBER})"  # (?>...) never takes a part of a number
    r"(?![\w\\^(){]"  # 3x and 3^2
    r"| ?[-+*/=×\\^]"  # 3 + 4
    r"|[,;] ?\d| or\b| and\b)"  # "2, 3" and "2 or 3"
)
ANSWER_IS = r"(?i)^\W*(?:the )?(?:final )?answer(?: is)?\b:?[\s*]*"


def extract_answer(text, finished=True):
    r"""The answer that a text gives: the content of its last \boxed{...} that is not
    empty, else what follows its last ####, else its last number if it is `finished`
    (not cut off), else "".
    >>> extract_answer(r"First \boxed{3}, so \boxed{\frac{1}{2}}. \boxed{}")
    '\\frac{1}{2}'
    >>> extract_answer("#### 72 clips"), extract_answer("7, so 8", finished=False)
    ('72', '')
    """
    text = re.sub("[−–]", "-", text)
    for after_brace in reversed(text.split(r"\boxed{")[1:]):
        content = until_closing_brace(after_brace)
        if content is None:
            return ""  # cut off
        if content.strip(" ."):
            return content.strip()
    _, mark, rest = text.rpartition("####")
    rest = re.sub(ANSWER_IS, "", rest).strip(" *\n")
    number = re.match(NUMBER_ALONE, rest)
    # At the end of a text that was cut off, 12 may be the beginning of 123.
    if mark and number and (finished or number.end() < len(rest)):
        return number[0]
    if not finished:
        return ""
    if mark and rest and "\n" not in rest:  # else #### began a heading
        return rest
    numbers = re.findall(NUMBER, text)
    return numbers[-1] if numbers else ""


def until_closing_brace(text):
    """What stands before the } that closes a { just before the text, or None."""
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text):  # \{ is no brace
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[: brace.start()]
    return None


def gold_answer(answer):
    r"""The answer in a row of the data: in a box, after ####, or else the whole text.
    Raises ValueError if there is none.
    >>> gold_answer("48 / 2 = 24\n#### 24"), gold_answer(0.5)
    ('24', '0.5')
    """
    text = str(answer) if isinstance(answer, (str, int, float)) else ""
    if "\\boxed{" in text or "####" in text:
        text = extract_answer(text)
    if normalise(text) == "":
        raise ValueError(f"`answer` or `solution` is needed, not {answer!r:.200}")
    return text


SPELLINGS = [  # what `normalise` replaces, in this order
    (r"[−–]", "-"),  # other minus signs
    (r"\\[!,;: ()\[\]]|\\left|\\right|\*\*|\\?[$€£%]", ""),  # marks of LaTeX, money, %
    (r"\s+", " "),
    (r"\\(?:text|math)[a-z]*{([^{}]*)}", r"\1"),  # \text{blue} -> blue
    (r"\\[dt]frac", r"\\frac"),
    (r"\\frac ?(\d)", r"\\frac{\1}"),  # \frac12 -> \frac{1}2
    (r"\\frac ?({[^{}]*}) ?(\d)", r"\\frac\1{\2}"),  # \frac{1}2 -> \frac{1}{2}
    (r" ?\\frac ?{(-?\d+)} ?{(-?\d+)}", r" \1/\2"),  # 2\frac{1}{2} -> 2 1/2
    (r" ?(?:\\times|×|\\cdot) ?10\^{?(-?\d+)}?", r"e\1"),  # 3 \times 10^8 -> 3e8
    (r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))", ""),  # 1,000 and 1{,}000 -> 1000
    (r" ?(,|[<>!]=|[()\[\]]) ?", r"\1"),  # ( 1, 2 ) -> (1,2) and x >= 1 -> x>=1
]


def normalise(text):
    r"""An answer as a Fraction if it is a number, else as lower-case words. Of an
    equation, only the right side counts.
    >>> normalise("$1,250.50"), normalise(r"x = 2\frac12"), normalise(" New  York.")
    (Fraction(2501, 2), Fraction(5, 2), 'new york')
    """
    for pattern, replacement in SPELLINGS:
        text = re.sub(pattern, replacement, text)
    if not re.search(r"[,;]|\bor\b|\band\b", text):  # not of x = 1 or x = 2
        text = re.split("(?<![<>!])=", text)[-1]
    text = " ".join(text.split()).rstrip(".").lower().replace("- ", "-")
    number = r"([-+]?)(\d+ (?=\d+/))?([\d./]+(?:e[-+]?\d{1,3})?)"  # -2 1/2
    match = re.fullmatch(number, text)
    if match:
        sign, whole, rest = match.groups()
        with contextlib.suppress(ValueError, ZeroDivisionError):  # 1.2.3 and 1/0
            return int(sign + (whole or "0")) + Fraction(sign + rest)
    return text


def reward_model(name):
    """The reward function of --reward reward_model:NAME: the logit that a sequence
    classification model with one label gives to the chat with the completion."""
    classify = transformers.pipeline(
        "text-classification", name, device=DEVICE, function_to_apply="none"
    )

    def score_chats(messages, completions, **columns):
        texts = []
        for chat, completion in zip(messages, completions):
            chat = [*chat, {"role": "assistant", "content": completion}]
            texts.append(classify.tokenizer.apply_chat_template(chat, tokenize=False))
        found = classify(texts, add_special_tokens=False, batch_size=16)
        return [x["score"] for x in found]

    return score_chats


def judge(name):
    """The reward function of --reward judge:NAME: the mark that a chat model gives to a
    completion, divided by 10. The mark is the first number in its reply. None if there
    is none, or if it is over 10."""
    reply = transformers.pipeline(
        "text-generation", name, device=DEVICE, batch_size=16, return_full_text=False
    )
    # Batches need a pad token, which the tokenizers of Llama 3 and Mistral lack.
    reply.tokenizer.pad_token = reply.tokenizer.pad_token or reply.tokenizer.eos_token

    def mark_completions(messages, completions, **columns):
        requests = []
        for chat, completion in zip(messages, completions):
            question = [x["content"] for x in chat if x["role"] == "user"][-1]
            request = "Mark this answer from 0 to 10, by a number alone:"
            text = f"{question}\n\n{request}\n\n{completion}"
            requests.append([{"role": "user", "content": text}])
        marks = []
        for found in reply(requests, max_new_tokens=8, do_sample=False):
            number = re.search(r"\d+(\.\d+)?", found[0]["generated_text"])
            mark = float(number[0]) if number else math.inf
            marks.append(mark / 10 if mark <= 10 else None)
        return marks

    return mark_completions


REWARDS = {"accuracy": accuracy_reward, "math": math_reward, "format": format_reward}
REWARDS_BY_MODEL = {"reward_model": reward_model, "judge": judge}


def load_rewards(specs):
    """{name: (function, weight)} for the arguments of --reward, NAME or NAME=WEIGHT."""
    rewards = {}
    for spec in specs:
        name, weight = re.fullmatch(
            r"(.*?)(?:=([-+]?[\d.]+(?:[eE][-+]?\d+)?))?", spec
        ).groups()
        rewards[name] = load_function(name), float(weight or 1)
    return rewards


def load_function(name):
    """The reward function of a name: a built-in one, or FILE.py:FUNCTION."""
    if name in REWARDS:
        return REWARDS[name]
    kind, _, model = name.partition(":")
    if kind in REWARDS_BY_MODEL:
        return REWARDS_BY_MODEL[kind](model)
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise Error(f"reward {name} is neither built in nor FILE.py:FUNCTION")
    sys.path.insert(0, str(Path(path).resolve().parent))
    module = importlib.import_module(Path(path).stem)
    if not os.path.samefile(getattr(module, "__file__", os.devnull), path):
        raise Error(f"{path}: rename it, another module has this name")
    if not hasattr(module, function):
        raise Error(f"no function {function!r} in {path}")
    return getattr(module, function)


def needs_answer(config):
    """True if a reward compares answers: rows need one, and prompts ask for a box."""
    names = {spec.partition("=")[0] for spec in config.reward}
    return bool(names & {"accuracy", "math"})


# --------------------------------------------------------------------- data and prompts
BOXED = "{question}\nReason step by step, and put your final answer within \\boxed{}.\n"


def load_rows(config):
    """The rows to train on, shuffled, and the rows to evaluate."""
    if config.data:
        rows = read_rows(config.data, config)
    else:
        rows = sums(config.model, config.seed)
    random.Random(config.seed).shuffle(rows)
    if config.eval_data:
        return rows, read_rows(config.eval_data, config)
    num_held_out = min(64, len(rows) // 10)
    return rows[num_held_out:], rows[:num_held_out]


def read_rows(path, config):
    """Rows (dicts) of a JSONL file, with a chat made of "prompt", "question" or
    "problem" as "messages". "answer" and "solution" each default to the other. The
    first bad line is an `Error` with its number."""
    rows = []
    for number, line in enumerate(Path(path).read_bytes().rstrip().split(b"\n"), 1):
        try:
            row = json.loads(line)
            prompt = row.get("prompt") or row.get("question") or row["problem"]
            if isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            is_text = [isinstance(x["content"], str) for x in prompt]
            if not all(is_text) or "user" not in [x["role"] for x in prompt]:
                raise ValueError("a prompt needs texts, and a message of the user")
            answer, solution = row.get("answer"), row.get("solution")
            answer = solution if answer is None else answer
            solution = answer if solution is None else solution
            if needs_answer(config):
                gold_answer(answer)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Error(f"{path}:{number}: {error!r:.200}") from error
        rows.append({**row, "messages": prompt, "answer": answer, "solution": solution})
    every_column = dict.fromkeys(name for row in rows for name in row)
    return [{**every_column, **row} for row in rows]  # None where a column is missing


def encode_prompts(run, rows):
    """Adds the columns "prompts" (a text) and "prompt_ids" to the rows, and leaves out
    those whose prompts are longer than `max_prompt_length`."""
    config = run.config
    template = BOXED if needs_answer(config) else "{question}"
    template = config.prompt_template or template
    use_chat = uses_chat_template(run)
    encoded = []
    for row in rows:
        messages = [dict(message) for message in row["messages"]]
        last = [x for x in messages if x["role"] == "user"][-1]
        last["content"] = template.replace("{question}", last["content"])
        if config.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        if use_chat:
            text = render_chat(run, messages)
            ids = run.tokenizer.encode(text, add_special_tokens=False)  # it has them
        else:
            text = "\n".join(message["content"] for message in messages)
            ids = run.tokenizer.encode(text)
            if ids and ids[-1] in run.eos_token_ids:
                ids.pop()  # some tokenizers append EOS to every text
        if 0 < len(ids) <= config.max_prompt_length:
            prompt = {"messages": messages, "prompts": text, "prompt_ids": ids}
            encoded.append({**row, **prompt})
    return encoded


def render_chat(run, messages):
    """The text of a chat. A last message of the assistant is left open to go on."""
    is_open = messages[-1]["role"] == "assistant"
    return run.tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=not is_open,
        continue_final_message=is_open,
        **json.loads(run.config.chat_template_kwargs),
    )


def uses_chat_template(run):
    """True if the chat template ends an answer with an EOS token of the model. Many
    base models carry the template of another model, which they were not trained on."""
    if not run.tokenizer.chat_template:
        return False
    question = {"role": "user", "content": "5151"}
    answer = {"role": "assistant", "content": "4242"}
    text = render_chat(run, [question, answer, question])
    # What stands between the two, such as "<|im_end|>\n<|im_start|>user\n".
    ending = text.rpartition("4242")[2].partition("5151")[0]
    eos_tokens = run.tokenizer.convert_ids_to_tokens(run.eos_token_ids)
    return any(token and token in ending for token in eos_tokens)


# ------------------------------------------------------------------------------- models
def load_model(name, dtype, seed):
    """A causal language model on the CPU, in eval mode: without dropout."""
    if name == "tiny":
        return tiny_model(seed, dtype).eval()
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval()


def load_tokenizer(name, model):
    """The tokenizer of a model, and the ids of the tokens that end a completion."""
    tokenizer = (
        tiny_tokenizer() if name == "tiny" else AutoTokenizer.from_pretrained(name)
    )
    of_model = model.generation_config.eos_token_id  # an id, a list or None
    ids = [tokenizer.eos_token_id]
    ids += of_model if isinstance(of_model, list) else [of_model]
    eos_token_ids = [x for x in dict.fromkeys(ids) if x is not None]
    if not eos_token_ids:
        raise Error(f"--model {name}: neither model nor tokenizer has an EOS token")
    return tokenizer, eos_token_ids


def build_run(config, name, reward_functions, step_reward=None):
    """The `Run` of a config. name: the model that policy and reference start from, as a
    Hub name or a folder. Weights that are trained are float32, to which AdamW can add
    small updates. All others are in --dtype."""
    dtype = getattr(torch, config.dtype)
    reference, optimizer = None, None
    if config.max_steps == 0:
        policy = load_model(name, dtype, config.seed)
    elif config.lora_rank:
        policy = load_model(name, dtype, config.seed)
        # Modules of its own, without adapters, but with the weights of the policy: what
        # is in the memo is taken as copied already.
        memo = {id(weight): weight for weight in policy.parameters()}
        reference = copy.deepcopy(policy, memo)
        transformers.set_seed(config.seed)  # adapters start at random
        add_adapters(policy, config.lora_rank)
    else:
        policy = load_model(name, torch.float32, config.seed)
        if config.beta:
            reference = load_model(name, dtype, config.seed).requires_grad_(False)
    tokenizer, eos_token_ids = load_tokenizer(name, policy)
    logprobs = choose_logprobs(policy)  # by a trial, before layers are wrapped
    if config.gradient_checkpointing:
        checkpoint_layers(policy)
    # On one rank, too, FSDP2 makes the bfloat16 weights that run from float32 ones.
    uses_fsdp = config.max_steps > 0 and (WORLD_SIZE > 1 or dtype == torch.bfloat16)
    models = [policy] if reference is None else [policy, reference]
    for model in models:
        if uses_fsdp:
            shard(model, dtype)
        model.to(DEVICE)
    if config.max_steps:
        trained = [weight for weight in policy.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, weight_decay=0.0, fused=True)
        optimizer.register_step_pre_hook(fill_gradients)
    return Run(
        config=config,
        policy=policy,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        optimizer=optimizer,
        reward_functions=reward_functions,
        reference=reference,
        step_reward=step_reward,
        generate=choose_generate(policy),  # by a trial, on the finished model
        logprobs=logprobs,
    )


def add_adapters(model, rank):
    """LoRA (arXiv:2106.09685): only adapters are trained, in float32."""
    import peft

    lora = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model.add_adapter(lora)  # freezes all other weights
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()


def decoder_layers(model):
    """The layers that transformers repeats (and can checkpoint)."""
    return [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]


def checkpoint_layers(model):
    """Gradient checkpointing. transformers' own acts in training mode only, and that
    mode has dropout."""
    for layer in decoder_layers(model):
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def shard(model, dtype):
    """FSDP2. A trained weight has two forms: float32 shards, one on each rank, which
    AdamW updates, and the whole weight in `dtype`, gathered from them, with which the
    model runs. The reference is wrapped as well, although all its weights are frozen:
    FSDP2 casts the inputs of layers, which must be alike in both models."""
    for module in [*decoder_layers(model), model]:
        fsdp.fully_shard(
            module,
            # Gradients are reduced in float32.
            mp_policy=fsdp.MixedPrecisionPolicy(dtype, torch.float32),
            # Frozen weights (the base of LoRA, the reference) are whole on every rank.
            ignored_params={x for x in model.parameters() if not x.requires_grad},
            # A gather needs all ranks at once, but one may sample 90 tokens while
            # another samples 200. So the first forward pass gathers the weights, and
            # they stay until a backward pass. `sliced_logprobs` also needs that.
            reshard_after_forward=False,
        )


def fill_gradients(optimizer, args, kwargs):
    """Sets missing gradients to 0. AdamW makes no state for a weight without one (which
    the model does not use), and loading a checkpoint expects it."""
    for weight in optimizer.param_groups[0]["params"]:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)


def sliced_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, mask, temperature=1.0
):
    """`token_logprobs`, with the same numbers and gradients, in less time and memory:
    only the M tokens that are not padding get logits, and only those of a slice of the
    vocabulary are in memory at a time."""
    mask = mask.bool()
    ids, attention_mask = model_inputs(prompt_ids, prompt_mask, completion_ids, mask)
    output = call_model(
        model,
        ids,
        attention_mask,
        logits_to_keep=ids.new_empty(0),  # no positions; the number 0 means all
        output_hidden_states=True,
    )
    hidden = output.hidden_states[-1][:, -mask.shape[1] :][mask]  # (M, H)
    weight = model.get_output_embeddings().weight  # (V, H)
    logp = SlicedLogSoftmax.apply(hidden, weight, completion_ids[mask], temperature)
    return logp.new_zeros(mask.shape).masked_scatter(mask, logp)


class SlicedLogSoftmax(torch.autograd.Function):
    """log_softmax(hidden @ weight.T / temperature) at the targets: hidden (M, H),
    weight (V, H), targets (M,) -> (M,) float32. Both passes make the logits of v of the
    V tokens at a time."""

    logits_at_once = 2**26 if ON_GPU else 2**20  # M*v; 2**20 fit into a CPU's cache

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        ctx.slice_size = max(64, SlicedLogSoftmax.logits_at_once // max(1, len(hidden)))
        ctx.temperature = temperature
        logsumexps = []
        for vocab_slice in weight.split(ctx.slice_size):  # (v, H)
            logits = (hidden @ vocab_slice.t()).float().div_(temperature)  # (M, v)
            logsumexps.append(logits.logsumexp(1))
        log_z = torch.stack(logsumexps).logsumexp(0)  # (M,)
        ctx.save_for_backward(hidden, weight, targets, log_z)
        target_logits = torch.einsum("mh,mh->m", hidden, weight[targets])
        return target_logits.float() / temperature - log_z

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, targets, log_z = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(weight), ctx.slice_size):
            vocab_slice = weight[start : start + ctx.slice_size]  # (v, H)
            logits = (hidden @ vocab_slice.t()).float().div_(ctx.temperature)
            softmax = logits.sub_(log_z[:, None]).exp_()  # (M, v)
            # d logp / d logits = one_hot(target) - softmax. Only the difference is
            # rounded to bfloat16, in which the softmax of a nearly certain token is 1.
            vocab_ids = start + torch.arange(len(vocab_slice), device=targets.device)
            one_hot = (targets[:, None] == vocab_ids).float()
            grad_logits = one_hot.sub_(softmax).mul_(grad[:, None] / ctx.temperature)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden += grad_logits @ vocab_slice
            if grad_weight is not None:  # the weight is not frozen (LoRA)
                grad_weight[start : start + ctx.slice_size] = grad_logits.t() @ hidden
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


@torch.no_grad()
def choose_logprobs(model):
    """`sliced_logprobs`, unless the model changes its logits after the output layer
    (a soft cap, a factor)."""
    ids = torch.tensor([[2, 3, 4, 5]], device=model.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    inputs = ids, mask, ids, mask
    plain = token_logprobs(model, *inputs)
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.05
    if (sliced_logprobs(model, *inputs) - plain).abs().mean() < tolerance:
        return sliced_logprobs
    print0("this model needs all its logits at once, which takes more memory")
    return token_logprobs


@torch.no_grad()
def graphed_generate(
    model,
    prompt_ids,
    prompt_mask,
    num_generations,
    max_completion_length,
    eos_token_ids,
    temperature=1.0,
):
    """`generate` for a GPU, some six times as fast: a decoding step is recorded as a
    CUDA graph and then repeated for each token. (To start its thousand short kernels
    one by one takes Python longer than they run.) No shape may change, so that the
    cache has room for all P + C tokens from the beginning, and finished completions
    stay in the batch. See `choose_generate` for the models that it is right for."""
    if not prompt_mask[:, -1].all():
        raise ValueError("prompts must be padded on the left")
    eos = torch.tensor(eos_token_ids, device=prompt_ids.device).view(-1)
    prompt_length = prompt_ids.shape[1]
    prompt_cache = DynamicCache()  # also layers with a window keep all tokens in it
    logits = call_model(
        model, prompt_ids, prompt_mask, prompt_cache, logits_to_keep=1
    ).logits
    prompt_of = torch.arange(len(prompt_ids), device=eos.device)
    prompt_of = prompt_of.repeat_interleave(num_generations)  # (N,)
    logits = logits[prompt_of]
    attention_mask = F.pad(prompt_mask[prompt_of], (0, max_completion_length))
    cache = Cache([StaticLayer(attention_mask.shape[1]) for _ in prompt_cache.layers])
    for i, layer in enumerate(prompt_cache.layers):
        cache.update(layer.keys[prompt_of], layer.values[prompt_of], i)

    completion_ids = eos[0].repeat(len(prompt_of), max_completion_length)  # (N, C)
    completion_logp = torch.zeros(completion_ids.shape, device=eos.device)
    unfinished = torch.ones(len(prompt_of), dtype=torch.bool, device=eos.device)
    last_ids = completion_ids[:, :1].clone()  # (N, 1)

    def decode():
        # attention_mask is False for the tokens still to come, which `call_model` does
        # not count, so the position of the last token is right.
        output = call_model(model, last_ids, attention_mask, cache, logits_to_keep=1)
        return output.logits

    run_token = decode
    for i in range(max_completion_length):
        ids, logp = sample(logits[:, -1], temperature)
        completion_ids[:, i] = ids.where(unfinished, eos[0])
        completion_logp[:, i] = logp.where(unfinished, 0)
        unfinished &= ~torch.isin(ids, eos)
        if not unfinished.any() or i == max_completion_length - 1:
            break
        # In place, because a graph knows its tensors by their addresses.
        last_ids[:, 0] = ids
        attention_mask[:, prompt_length + i] = True
        # Call 0 runs as usual, and loads the kernels. From then on, they are replayed.
        if i == 1:
            run_token = recorded(decode)
        logits = run_token()
    return completion_ids, completion_logp


def recorded(function):
    """Records the kernels that a function starts on a GPU, without running them.
    Returns a function that runs them on the same tensors, without Python."""
    graph = torch.cuda.CUDAGraph()
    # Other threads (NCCL, trackers) may use the GPU meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = function()

    def replay():
        graph.replay()
        return result

    return replay


def choose_generate(model):
    """`graphed_generate` on a GPU, unless transformers marks the model as not fit for
    fixed shapes, it has layers other than attention, or a trial fails, because the
    model waits for the GPU (as experts in float32 do)."""
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    has_attention_alone = kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
    if not (ON_GPU and model._can_compile_fullgraph and has_attention_alone):
        return generate
    ids = torch.tensor([[2]], device=DEVICE)
    stream = torch.cuda.current_stream()
    try:
        graphed_generate(model, ids, ids > 0, 2, 4, eos_token_ids=-1)
    except RuntimeError as error:
        torch.cuda.set_stream(stream)  # a recording that fails leaves its own
        print0(f"sampling without CUDA graphs: {error}")
        return generate
    return graphed_generate


def join_ranks(config, stack):
    """Sets up the device of this rank, and the group of ranks that FSDP2 needs: of one
    rank, too, in bfloat16."""
    backend = "gloo"
    if ON_GPU:
        backend = "cpu:gloo,cuda:nccl"  # NCCL for tensors, gloo for objects
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if WORLD_SIZE > 1:
        # Ranks wait for the slowest reward function. The default is ten minutes.
        dist.init_process_group(backend, timeout=timedelta(hours=2))
    elif config.dtype == "bfloat16":
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if dist.is_initialized():
        stack.callback(dist.destroy_process_group)


def set_seed(seed, step):
    """Seeds a step on this rank, so that a resumed run draws the same numbers again."""
    transformers.set_seed((seed * 1_000_003 + step * WORLD_SIZE + RANK) % 2**32)


# ----------------------------------------------------------------- logs and checkpoints
def print0(text):
    """Prints above the progress bar, on the first rank only."""
    if RANK == 0:
        tqdm.write(text)


def claim_output_dir(config, stack):
    """Makes the folder of the run, locks it, so that no other process writes to it, and
    saves the options there."""
    folder = Path(config.output_dir)
    if RANK == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if not config.resume and set(os.listdir(folder)) - {"lock", "options.json"}:
            raise Error(f"{folder} is not empty: --resume it or choose another folder")
        stack.enter_context(filelock.FileLock(folder / "lock", timeout=0))
        partial = folder / "options.partial"  # so that options.json is always whole
        partial.write_text(json.dumps(vars(config), indent=1))
        partial.replace(folder / "options.json")
    all_gather(None)  # wait until it is there


def append_row(config, name, row):
    """Appends a row to a JSONL file of the run. JSON has no NaN: it becomes null."""
    if RANK == 0:
        text = json.dumps(row, default=str)
        row = json.loads(text, parse_constant=lambda constant: None)
        with open(Path(config.output_dir, name), "a") as file:
            print(json.dumps(row), file=file)


def tracker(config, stack):
    """A function that reports (metrics, step) to the tracker of --report-to."""
    if config.report_to == "none" or RANK > 0:
        return lambda metrics, step: None
    package = importlib.import_module(config.report_to)  # wandb, trackio: one interface
    name = f"{Path(config.output_dir).name}-{config.run_id}"
    os.environ["WANDB_RUN_ID"] = name  # wandb resumes by this, trackio by the name
    package.init(project="grpo", name=name, config=vars(config), resume="allow")
    stack.callback(package.finish)
    return package.log


LOGS = ("metrics.jsonl", "completions.jsonl")

# The state for resuming: the float32 weights that are trained, and AdamW's moments.
# Frozen weights are not in it, so loading must not be strict. There is no random state:
# every step has a seed of its own.
STATE = dsd.StateDictOptions(ignore_frozen_params=True, strict=False)


def training_state(run):
    """The state by the names that `set_state_dict` takes. Each rank has its shards."""
    model, optimizer = dsd.get_state_dict(run.policy, run.optimizer, options=STATE)
    for name in run.policy.all_tied_weights_keys:  # the same weight by another name
        model.pop(name, None)
    return {"model_state_dict": model, "optim_state_dict": optimizer}


def save(run, folder, state=None):
    """Writes the model (with LoRA, the adapter) for `from_pretrained` and vLLM, and the
    state for resuming. The folder appears whole or not at all."""
    partial = folder.with_name("partial")
    policy = run.policy
    options = replace(STATE, full_state_dict=True, cpu_offload=True)
    weights = dsd.get_model_state_dict(policy, options=options)  # on the first rank
    if RANK == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        for name in policy.all_tied_weights_keys:
            weights.pop(name, None)
        dtype = getattr(torch, run.config.dtype)
        if not run.config.lora_rank:
            for name, x in weights.items():
                weights[name] = x.to(dtype) if x.is_floating_point() else x
        policy.save_pretrained(partial, state_dict=weights)
        if not run.config.lora_rank:
            policy.config.dtype = dtype  # it wrote that of the float32 weights
            policy.config.save_pretrained(partial)
        run.tokenizer.save_pretrained(partial)
    if state:
        dcp.save(state, checkpoint_id=partial / "state")  # waits for all ranks
    if RANK == 0:
        if state:
            for log in LOGS:
                shutil.copy(folder.parent / log, partial / "state")
        partial.rename(folder)
        rotate_checkpoints(folder.parent, run.config.save_total_limit)
    all_gather(None)  # wait for the rename
    print0(f"saved {folder}")


def restore(run):
    """Loads the newest checkpoint, if there is one. Returns its step, or 0. The logs
    become those of the checkpoint: what a killed run has logged after it is dropped."""
    folder = get_last_checkpoint(run.config.output_dir)
    logs = LOGS if RANK == 0 else ()  # the first rank writes them
    if folder is None:
        for log in logs:
            Path(run.config.output_dir, log).unlink(missing_ok=True)
        return 0
    state = training_state(run)
    dcp.load(state, checkpoint_id=Path(folder, "state"))
    dsd.set_state_dict(run.policy, run.optimizer, options=STATE, **state)
    for log in logs:
        shutil.copy(Path(folder, "state", log), run.config.output_dir)
    print0(f"resuming from {folder}")
    return int(folder.rpartition("-")[2])


# --------------------------------------------------- supervised steps and built-in task
def supervised_model(config, rows):
    """Trains all weights on the solutions in the data, unless a resumed run has done it
    before. Returns the folder of the model. With advantage 1, ratio 1 and no KL term,
    GRPO's loss has the gradient of -logp."""
    folder = Path(config.output_dir, "sft")
    if folder.exists():
        return folder
    supervised = replace(
        config, beta=0.0, lora_rank=0, max_steps=config.sft_steps, temperature=1.0
    )
    run = build_run(supervised, config.model, reward_functions={})
    run.optimizer.param_groups[0]["lr"] = config.sft_learning_rate
    examples = []  # token ids of prompt and solution
    rows = [row for row in rows if row["solution"] is not None]
    for row in encode_prompts(run, rows):
        ids = run.tokenizer.encode(str(row["solution"]), add_special_tokens=False)
        if len(ids) < config.max_completion_length:
            examples.append((row["prompt_ids"], ids + run.eos_token_ids[:1]))
    for step in tqdm(range(1, config.sft_steps + 1), "supervised", disable=RANK > 0):
        chosen = prompt_batch(examples, step, config.prompts_per_step, config.seed)
        prompts, solutions = zip(*chosen)
        prompt_ids, prompt_mask = pad(prompts, "left")
        completion_ids, mask = pad(solutions, "right")
        batch = Batch(prompt_ids, prompt_mask, completion_ids, mask)
        batch.advantages = torch.ones(mask.shape, device=DEVICE)
        optimizer_step(run, batch)
    save(run, folder)
    return folder


def sums(model, seed):
    """Built-in data. For tiny, 5 in 8 solutions are wrong: GRPO can improve on them."""
    rng = random.Random(seed)
    rows = []
    for a in range(50):
        for b in range(10):
            if model == "tiny":
                question, answer = f"{a}+{b}=", a + b
                solution = answer + rng.choice([0, 0, 0, 1, 2, 5, 10, 20])
            else:
                c, d = rng.choices(range(10, 100), k=2)
                question = f"Calculate {a} - {b} * ({c} - {d})."
                answer = solution = a - b * (c - d)
            messages = [{"role": "user", "content": question}]
            rows.append({"messages": messages, "answer": answer, "solution": solution})
    return rows


# Ġ and Ċ are how this kind of tokenizer writes a space and a newline.
TOKENS = ["<eos>", "<unk>", *"0123456789+-*/=()<>#.,:ĠĊabcdefghijklmnopqrstuvwxyz"]


def tiny_tokenizer():
    """A tokenizer whose tokens are characters."""
    vocab = {token: i for i, token in enumerate(TOKENS)}
    return transformers.Qwen2Tokenizer(
        vocab=vocab, merges=[], eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
    )


def tiny_model(seed, dtype=torch.float32):
    """A 2-layer Qwen2 with 135,168 random weights."""
    config = transformers.Qwen2Config(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=len(TOKENS),
        tie_word_embeddings=True,
        initializer_range=0.06,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


TINY = {  # the defaults of `--model tiny`
    "prompt_template": "{question}",
    "prompts_per_step": 64,
    "micro_batch_size": 512,
    "max_completion_length": 8,
    "learning_rate": 1e-3,
    "sft_steps": 250,
    "sft_learning_rate": 3e-3,
}


# ------------------------------------------------------------------------------ the run
def set_up(config):
    """Loads data and models. Returns the `Run`, the rows to train on and the rows to
    evaluate."""
    rows, eval_rows = load_rows(config)
    rewards = load_rewards(config.reward)
    step_reward = load_function(config.step_reward) if config.step_reward else None
    name = supervised_model(config, rows) if config.sft_steps else config.model
    gc.collect()  # the supervised model's modules refer to each other
    run = build_run(config, name, rewards, step_reward)
    rows, eval_rows = encode_prompts(run, rows), encode_prompts(run, eval_rows)
    all_rows = eval_rows + rows
    print0(
        f"{len(rows)} prompts to train on and {len(eval_rows)} to evaluate fit into "
        "--max-prompt-length"
    )
    if config.max_steps and len(rows) < config.prompts_per_step:
        raise Error(f"--prompts-per-step: there are only {len(rows)} prompts")
    if not config.max_steps and not eval_rows:
        raise Error("--eval-data: there are no prompts to evaluate")
    longest = max(len(row["prompt_ids"]) for row in all_rows)
    text_config = run.policy.config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or math.inf
    if longest + config.max_completion_length > positions:
        raise Error(f"--max-completion-length: the model has {positions} positions")
    first_ids = all_rows[0]["prompt_ids"]
    print0(f"the first prompt: {run.tokenizer.decode(first_ids)!r}")
    return run, rows, eval_rows


def train(run, rows, eval_rows, report, signals=()):
    """Takes the steps that are left, and evaluates and saves in between. A signal stops
    it after a step, with a checkpoint. report: see `tracker`."""
    config = run.config
    last_step = restore(run)
    if last_step == 0 and eval_rows and (config.eval_every or not config.max_steps):
        metrics = evaluate(run, eval_rows, step=0)
        append_row(config, "metrics.jsonl", {"step": 0, **metrics})
        report(metrics, step=0)
    no_bar = RANK > 0 or config.max_steps == 0
    bar = tqdm(initial=last_step, total=config.max_steps, disable=no_bar)
    for step in range(last_step + 1, config.max_steps + 1):
        set_seed(config.seed, step)
        metrics, columns = train_step(run, rows, step)
        metrics["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
        # At temperature 1, rounding makes 1e-7 nats in float32, and 0.04 in bfloat16.
        gap = metrics["sampling_gap"] * config.temperature
        if step == 1 and not gap < 0.1:  # or NaN
            raise Error(
                f"--model: log-probs of sampling and of training differ by {gap:.2g} "
                "nats per token (at temperature 1): it cannot be trained"
            )
        if metrics["skipped"]:
            print0(f"step {step}: an update was skipped, its gradient was not finite")
        is_last = step == config.max_steps
        stopped = any(all_gather(len(signals) > 0)) and not is_last
        eval_is_due = config.eval_every and (step % config.eval_every == 0 or is_last)
        save_is_due = config.save_every and step % config.save_every == 0
        if eval_rows and eval_is_due and not stopped:  # to stop soon
            metrics |= evaluate(run, eval_rows, step)
        if step == 1 or eval_is_due:  # at step 1 always: `save` copies the file
            log_completions(config, step, columns)
        append_row(config, "metrics.jsonl", {"step": step, **metrics})
        report(metrics, step=step)
        bar.update()
        bar.set_postfix(reward=metrics["reward"], kl=metrics["kl"])
        if stopped or is_last or save_is_due:
            folder = Path(config.output_dir, f"checkpoint-{step}")
            save(run, folder, training_state(run))
        if stopped:
            bar.close()
            sys.exit(f"stopped; go on: python grpo.py --resume {config.output_dir}")
    bar.close()


def log_completions(config, step, columns):
    """Adds the completions of the first rank to completions.jsonl, prints the last."""
    for values in zip(*columns.values()):
        row = dict(zip(columns, values)) | {"step": step}
        append_row(config, "completions.jsonl", row)
    text = f"{row['prompts']!r} -> {row['completions']!r}"
    print0(f"step {step}: reward {row['reward']:.2f} for {text}")


def evaluate(run, rows, step):
    """Scores greedy completions of all rows, over all ranks. Returns metrics."""
    mine = rows[RANK::WORLD_SIZE] or rows[:1]  # FSDP: every rank has to run the model
    # As many at a time as in training:
    size = run.config.prompts_per_step // WORLD_SIZE * run.config.num_generations
    scores = defaultdict(list)
    for start in range(0, len(mine), size):
        some = mine[start : start + size]
        _, columns = rollout(run, some, num_generations=1, temperature=0)
        for name, values in score(run, columns, num_generations=1).items():
            scores[name].extend(values.tolist())
    # With fewer rows than ranks, the last ranks only took part: leave them out.
    ranks = all_gather(scores)[: len(rows)]
    means = {"eval/reward": 0.0}
    for name, (_, weight) in run.reward_functions.items():
        # Without unjudged completions. (In the "reward" of `score` they count as 0.)
        values = torch.tensor([x for rank in ranks for x in rank[f"rewards/{name}"]])
        mean = values.nanmean().nan_to_num().item()
        means[f"eval/rewards/{name}"] = mean
        means["eval/reward"] += weight * mean
    print0(f"step {step}: greedy held-out reward {means['eval/reward']:.2f}")
    return means


def heed_signals(stack):
    """Lets Ctrl-C and SIGTERM stop a run after its step, and a second one at once.
    Returns the list of signals received, which is empty at first."""
    received = []
    put_back = stack.enter_context(contextlib.ExitStack())  # the usual handlers

    def stop(number, frame):
        put_back.close()
        received.append(number)
        print0("stopping after this step; again to stop at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        usual = signal.signal(number, stop)
        put_back.callback(signal.signal, number, usual)
    return received


# ------------------------------------------------------------------------- command line
def parse_args(argv=None):
    """`Config` from command-line arguments (default: those of the process)."""
    parser = transformers.HfArgumentParser(Config, allow_abbrev=False)
    typed = parser.parse_args(argv)
    # The first pass finds --resume and --model, which change the defaults. The second
    # applies what was typed over these.
    if typed.resume:
        saved = Path(typed.resume, "options.json")
        parser.set_defaults(**json.loads(saved.read_text()))
    elif typed.model == "tiny":
        parser.set_defaults(**TINY)
    options = vars(parser.parse_args(argv))
    default_dir = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    options["resume"] = typed.resume
    options["output_dir"] = typed.resume or typed.output_dir or default_dir
    options["run_id"] = options["run_id"] or uuid.uuid4().hex[:8]
    config = Config(**options)
    if config.resume and config.max_steps == 0:
        raise Error("--max-steps 0 evaluates a --model, not a run to --resume")
    if config.prompt_template and "{question}" not in config.prompt_template:
        raise Error("--prompt-template must contain {question}")
    return config


def main(argv=None):
    """The command line; in a notebook, call main(["--max-steps", "20"]). A mistake of
    the user ends in one line, without a traceback."""
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one rank
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # logits are a view
    try:
        with contextlib.ExitStack() as stack:  # undoes at its end what was set up
            try:
                config = parse_args(argv)
                join_ranks(config, stack)
                config = all_gather(config)[0]  # all ranks use the folder of the first
                claim_output_dir(config, stack)
                run, rows, eval_rows = set_up(config)
            except OSError as error:  # of a file or a model
                raise Error(str(error)) from error
            report = tracker(config, stack)
            train(run, rows, eval_rows, report, heed_signals(stack))
    except Error as error:
        sys.exit(" ".join(f"error: {error}".split()))
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: pip install {error.name}")
    except torch.OutOfMemoryError as error:
        sys.exit(
            "error: out of memory: lower --micro-batch-size, --prompts-per-step, "
            f"--num-generations or --max-completion-length: {error}"
        )


if __name__ == "__main__":
    main()
