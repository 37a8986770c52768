# SPDX-License-Identifier: MIT
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
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib.util
import inspect
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Literal, get_args

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
from transformers.modeling_layers import GradientCheckpointingLayer as DecoderLayer

RANK = int(os.environ.get("RANK", 0))  # of this process; torchrun sets it
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # number of processes
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = "bfloat16" if ON_GPU else "float32"
LOGITS_AT_ONCE = 2**25 if ON_GPU else 2**19  # in `ChunkedLogprobs`; fits a CPU's cache


class Error(Exception):
    """A mistake that the user can mend: `main` prints it in one line."""


class Stop(Error):
    """The end of a run before its last step. All processes raise it together."""


# ------------------------------------------------------------------------------ config
@dataclasses.dataclass(frozen=True)
class Config:
    """Every option of a run: the command line is made from it, --help from comments."""

    # model and data
    model: str = "tiny"  # Hub name or folder of a causal language model
    data: str = ""  # JSONL file or Hub data set NAME[:CONFIG[:SPLIT]]; else sums
    eval_data: str = ""  # held-out prompts; else a tenth of the data, at most 64
    reward: tuple = ("accuracy",)  # accuracy, math, format, FILE.py:FUNCTION [=WEIGHT]
    chat_template: Literal["auto", "on", "off"] = "auto"  # auto: if the model knows it
    prompt_template: str = ""  # around a {question} of text; else asks for a \boxed{}
    system_prompt: str = ""  # system message of every prompt
    dtype: Literal["bfloat16", "float32"] = DTYPE  # of the weights that compute
    # sampling
    num_generations: int = 8  # G, completions sampled for each prompt
    prompts_per_step: int = 8  # of a step, over all processes
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
    micro_batch_tokens: int = 8192 if ON_GPU else 2048  # in one forward and backward
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
                option = "--" + name.replace("_", "-")
                raise Error(f"{option} must be finite and at least {least}")
        if self.prompt_template and "{question}" not in self.prompt_template:
            raise Error("--prompt-template must contain {question}")


# ------------------------------------------------------ GRPO: from rewards to the loss
def completion_mask(completion_ids, eos_token_ids):
    """True up to and including each row's first EOS: ids (N, C) -> bool (N, C).
    eos_token_ids: one id or a list. A mask `ids != pad` would hide the EOS where pad is
    EOS, and no model would learn to stop.
    >>> completion_mask(torch.tensor([[5, 2, 2], [5, 6, 7]]), [2]).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    eos = torch.tensor(eos_token_ids, device=completion_ids.device)
    is_eos = torch.isin(completion_ids, eos).long()
    return is_eos.cumsum(1) - is_eos == 0  # no EOS before this position


def group_advantages(rewards, num_generations, scale_rewards="group", eps=1e-8):
    """(r - mean of its group) / (std + eps): rewards (N,) -> (N,).
    DeepSeekMath 4.1.2, with the unbiased std; `scale_rewards` "none" does not divide
    (Dr. GRPO, arXiv:2503.20783). Raises ValueError unless G >= 2 divides N.
    >>> group_advantages(torch.tensor([1.0, 0, 0, 1, 0.1, 0.1, 0.1, 0.1]), 4)
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660,  0.0000,  0.0000,  0.0000,  0.0000])
    """
    if num_generations < 2 or len(rewards) % num_generations:
        raise ValueError(
            f"{len(rewards)} rewards cannot be groups of {num_generations}"
        )
    if not rewards.is_floating_point():
        rewards = rewards.float()
    groups = rewards.reshape(-1, num_generations)  # (B, G)
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
    """Mean of x where mask is true, of all or along `dim`; 0 where there is nothing.
    Where mask is false x may be anything, even NaN."""
    mask = mask.bool()
    return x.where(mask, 0).sum(dim) / mask.sum(dim).clamp(min=1)


def importance_ratio(logp, old_logp, mask=None, importance_sampling_level="token"):
    """New over old probability of each token, exp(logp - old_logp): (N, C).
    Level "sequence" has one ratio for a completion, by the mean of logp - old_logp over
    its tokens, those in `mask` (None: all): GSPO, arXiv:2507.18071, eq. 7."""
    log_ratio = logp - old_logp
    if importance_sampling_level == "sequence":
        if mask is None:
            mask = torch.ones_like(log_ratio)
        log_ratio = masked_mean(log_ratio, mask, dim=1)[:, None].expand_as(log_ratio)
    elif importance_sampling_level != "token":
        raise ValueError(f"level {importance_sampling_level!r} is unknown")
    return log_ratio.exp()


def clipped_surrogate(ratio, advantages, epsilon=0.2, epsilon_high=None):
    """min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A): to be maximised.
    ratio: (N, C); advantages: (N,) or (N, C). PPO (arXiv:1707.06347) eq. 7; DAPO's
    `epsilon_high` (arXiv:2503.14476) is `epsilon` if None or 0.
    >>> ratio = torch.tensor([[1.4], [1.4]])
    >>> clipped_surrogate(ratio, torch.tensor([0.9354, -0.9354])).flatten()
    tensor([ 1.1225, -1.3096])
    """
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + (epsilon_high or epsilon))
    advantages = advantages.reshape(len(ratio), -1)  # (N, 1) or (N, C)
    return torch.minimum(ratio * advantages, clipped_ratio * advantages)


def kl_k3(logp, ref_logp):
    """exp(d) - d - 1 with d = ref_logp - logp: (N, C) in nats, never negative.
    For tokens sampled from the policy E[-d] = KL(policy, reference), E[exp(d) - 1] = 0,
    and near the reference their sum varies less than -d. DeepSeekMath eq. 4; Schulman's
    k3 (joschu.net/blog/kl-approx.html). Give it float32: bfloat16 rounds it away.
    >>> kl_k3(torch.tensor([0.7]).log(), torch.tensor([0.5]).log())
    tensor([0.0508])
    """
    d = ref_logp - logp
    return torch.expm1(d) - d


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
    (N, C). old_logp None: the policy has not moved since it sampled. ref_logp None: no
    KL. -surrogate + beta k3 of each token is averaged by `loss_type`:
        grpo     mean over sequences of the mean over their tokens
        dapo     sum over tokens / num_tokens
        dr_grpo  sum over tokens / (num_sequences * max_completion_length)
    The losses of micro-batches add up if the last three arguments are given, those of
    the whole optimizer batch (None: of this call)."""
    mask = mask.bool()
    # What is masked may be anything, even NaN: it becomes 0 before it is used.
    logp = logp.masked_fill(~mask, 0)
    # Without old_logp the ratio is exactly 1, but its gradient is that of logp.
    old_logp = (logp if old_logp is None else old_logp).detach().masked_fill(~mask, 0)
    advantages = advantages.reshape(len(mask), -1).masked_fill(~mask, 0)  # (N, C)
    ratio = importance_ratio(logp, old_logp, mask, importance_sampling_level)
    surrogate = clipped_surrogate(ratio, advantages, epsilon, epsilon_high)
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
    values = dict(
        kl=kl,
        entropy=-logp,  # an estimate, from the sampled tokens
        ratio_mean=ratio,
        clip_fraction=surrogate < ratio * advantages,  # where clipping counts
    )
    return loss, {name: masked_mean(x.detach(), mask) for name, x in values.items()}


def process_advantages(
    step_rewards,
    step_ends,
    num_generations,
    length,
    scale_rewards="group",
    eps=1e-8,
):
    """Process supervision (DeepSeekMath 4.1.3): advantages (N, length).
    step_rewards, step_ends: N lists, a number for each step of a completion and the
    index of its last token; ValueError if there are not as many. The step rewards of a
    group are normalised together; a token's advantage sums those of the steps that end
    at or after it. Here steps end at tokens 0 and 2, and at 1 and 2:
    >>> process_advantages([[1, 0], [0, 1]], [[0, 2], [1, 2]], 2, 4)
    tensor([[ 0.0000, -0.8660, -0.8660,  0.0000],
            [ 0.0000,  0.0000,  0.8660,  0.0000]])
    """
    advantages = torch.zeros(len(step_rewards), length)
    for start in range(0, len(step_rewards), num_generations):
        group = step_rewards[start : start + num_generations]
        rewards = [float(reward) for steps in group for reward in steps]
        if len(rewards) < 2:  # none, or a single one, which is its own mean
            continue
        normalised = group_advantages(  # all these steps are one group
            torch.tensor(rewards), len(rewards), scale_rewards, eps
        )
        parts = normalised.split([len(steps) for steps in group])
        for i, part in enumerate(parts, start):
            for advantage, end in zip(part, step_ends[i], strict=True):
                advantages[i, : end + 1] += advantage
    return advantages


# ------------------------------------------------------------- one step, and its state
class Run:
    """What a run has: a model ready to be trained, its frozen reference, its state."""

    def __init__(self, config):
        self.config = config
        self.output_dir = None  # its folder; None: it has not begun
        if config.resume:
            self.output_dir = Path(config.resume)
        self.rewards = {}  # name: (reward function, weight)
        self.tracker = None  # wandb or trackio
        self.step = 0  # the last one that is finished
        self.saved_step = 0  # the last one with a checkpoint
        self.evaluated_step = -1  # the last one after which held-out rows were judged
        self.moved = False  # whether weights have moved since the last finished step
        self.signal = ""  # SIGINT or SIGTERM, where this process got one

    def load(self, name):
        """Load the model of this name or folder, twice if there is a KL term."""
        config = self.config
        try:
            model, self.tokenizer, self.eos_token_ids = load_model(name, config.seed)
            self.share_prompts, self.own_logits = choose_paths(model)
        except ValueError as error:  # the model is unknown, or cannot be trained here
            raise Error(f"--model {name}: {error}") from error
        set_seed(config.seed, 0)
        self.adapters = None  # peft's wrapper of the policy; None: no LoRA
        if config.lora_rank:
            import peft

            r = config.lora_rank  # the name of arXiv:2106.09685
            lora = peft.LoraConfig(r=r, lora_alpha=2 * r, target_modules="all-linear")
            self.adapters = peft.get_peft_model(model, lora)  # puts them into the model
        self.policy = model  # the model that samples and learns
        self.dtype = getattr(torch, config.dtype)
        shard(model, self.dtype, reshard=False)  # among several processes
        self.optimizer = MasterAdamW(model, self.dtype)
        self.reference = None  # the model that the policy is held to; None: no KL
        if config.beta and config.lora_rank:
            self.reference = model  # without its adapters
        elif config.beta:
            self.reference = load_model(name, config.seed)[0]
            for param in self.reference.parameters():  # `to` would round buffers too
                param.data = param.data.to(self.dtype)
            shard(self.reference, self.dtype, reshard=None)
        print0(f"{name}: {model.num_parameters():,} weights, {self.dtype}, {DEVICE}")


@dataclasses.dataclass
class Batch:
    """Completions and their prompts: a rollout, or a micro-batch of one."""

    prompt_ids: torch.Tensor  # (B, P), left-padded
    prompt_mask: torch.Tensor  # (B, P), bool
    completion_ids: torch.Tensor  # (N, C), right-padded
    mask: torch.Tensor  # (N, C), bool: up to and including the first EOS
    advantages: torch.Tensor | None = None  # (N, C); None: not scored yet
    ref_logp: torch.Tensor | None = None  # (N, C), log-probs of the reference
    old_logp: torch.Tensor | None = None  # (N, C), of the policy before any update


def train_step(run, train_rows, step, log_samples):
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

    # 4. normalise them within each group
    advantages = group_advantages(scores.outcome, num_generations, config.scale_rewards)
    batch.advantages = (advantages[:, None] + scores.token_advantages).to(DEVICE)
    rollout_end = time.perf_counter()

    # 5. minimise -min(ratio A, clip(ratio) A) + beta KL
    learning_rate = config.learning_rate * min(1, step / (config.warmup_steps or 1))
    metrics = update(run, batch, learning_rate)
    end = time.perf_counter()

    # 6. measure it
    rewards = scores.rewards["reward"].view(-1, num_generations)  # (B, G)
    measured = dict(  # each (N,) or (B,): the mean is logged
        scores.rewards,
        reward_std=rewards.std(1),
        zero_std_fraction=~batch.advantages.view(len(rewards), -1).any(1),
        completion_length=batch.mask.sum(1),
        truncated_fraction=~torch.tensor(scores.columns["finished"]),
    )
    for name, values in measured.items():
        metrics[name] = values.double().mean().item()
    metrics["learning_rate"] = learning_rate
    metrics["rollout_seconds"] = rollout_end - start
    metrics["update_seconds"] = end - rollout_end
    metrics["step_seconds"] = end - start
    metrics["peak_memory_gb"] = peak_memory_gb()
    if log_samples:
        log_completions(run, step, scores)
    return metrics


# ---------------------------------------------------------------- sampling, log-probs
def rollout(run, rows, num_generations, temperature):
    """Completions of B rows of data, sampled from the policy: a `Batch`."""
    prompts = pad([row["prompt_ids"] for row in rows], "left")  # ids and mask
    length, eos = run.config.max_completion_length, run.eos_token_ids
    ids = generate(run.policy, *prompts, num_generations, length, eos, temperature)
    return Batch(*prompts, ids, completion_mask(ids, eos))


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
    """G completions of each prompt, sampled from the policy -> ids (N, C).
    prompt_ids, prompt_mask: (B, P), left-padded. C is `max_completion_length`; after a
    row's EOS stands the first of `eos_token_ids`, one id or a list. Temperature 0 is
    greedy. The model is in eval mode. Its generation config (top-k, …) is not read, as
    it would change the distribution."""
    prompt_mask = left_padded(prompt_mask)
    eos = torch.tensor(eos_token_ids, device=prompt_ids.device).view(-1)
    num_rows = len(prompt_ids) * num_generations
    completion_ids = eos[0].repeat(num_rows, max_completion_length)  # (N, C)
    # Rows leave the batch once they have finished: `live` holds the numbers of those
    # that still run. The cache and the logits have a row for each of them.
    live = torch.arange(num_rows, device=eos.device)
    cache = DynamicCache(config=model.config)
    ids = prompt_ids  # what the model reads next
    attention_mask = prompt_mask
    for i in range(max_completion_length):
        logits = forward(model, ids, attention_mask, cache, logits_to_keep=1).logits
        logits = logits[:, -1]
        if i == 0:  # each prompt has run once; from here on each completion has a row
            logits = logits[live // num_generations]  # (N, V)
            cache.reorder_cache(live // num_generations)  # selects rows: B become N
        tokens = sample(logits, temperature)
        completion_ids[live, i] = tokens
        unfinished = (~torch.isin(tokens, eos)).nonzero()[:, 0]
        if len(unfinished) == 0:
            break
        if len(unfinished) < len(live):
            live = live[unfinished]
            cache.reorder_cache(unfinished)
        ids = completion_ids[live, i : i + 1]
        attention_mask = prompt_mask[live // num_generations]
        attention_mask = F.pad(attention_mask, (0, i + 1), value=True)
    return completion_ids


def left_padded(prompt_mask):
    """The mask as bool. Raises ValueError if a prompt does not end in the last column:
    its completion would continue padding, which many tokenizers put there."""
    if not prompt_mask[:, -1].all():
        raise ValueError("prompts must be padded on the left, not on the right")
    return prompt_mask.bool()


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


def forward(model, ids, attention_mask, cache=None, **options):
    """Run ids (N, L) after the K tokens that `cache` holds, and add them to it.
    attention_mask: (N, K + L). Positions do not count padding on the left."""
    if cache is not None and model.training:
        raise ValueError("not in eval mode: gradient checkpointing drops the cache")
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return model(
        ids,
        attention_mask=attention_mask.long(),
        position_ids=positions[:, -ids.shape[1] :],
        past_key_values=cache,
        use_cache=cache is not None,
        **options,
    )


def last_outputs(model, ids, attention_mask, cache, keep, own_logits):
    """Run ids as `forward` does -> the last `keep` hidden states of each row, as the
    output layer gets them: (N, keep, H); with `own_logits` what it makes of them, the
    logits: (N, keep, V). The whole model is called and never a part of it, as FSDP
    gathers the weights at that call."""
    if own_logits:
        return forward(model, ids, attention_mask, cache, logits_to_keep=keep).logits
    hidden = []

    def take(layer, inputs):
        hidden.append(inputs[0])
        return inputs[0][:, :0]  # no tokens: the output layer makes no logits

    with model.get_output_embeddings().register_forward_pre_hook(take):
        forward(model, ids, attention_mask, cache, logits_to_keep=keep)
    return hidden[0]


def token_logprobs(
    model,
    prompt_ids,
    prompt_mask,
    completion_ids,
    mask,
    temperature=1.0,
    share_prompts=True,
    own_logits=False,
):
    """log-prob of each completion token given all before it: (N, C) float32.
    0 where masked. prompt_ids, prompt_mask: (B, P), padded on the left; completion_ids,
    mask: (N, C), padded on the right, the mask as by `completion_mask`. Ids are int64,
    and known to the model also where they are masked. Rows b*G … b*G+G-1 continue
    prompt b. The logits are divided by `temperature`, as in sampling. `model`: a causal
    LM of transformers in eval mode. `choose_paths` finds the two flags for it.
    share_prompts: each prompt runs once, not once for each of its completions. They go
    on from G copies of its key-value cache; the copies are ordinary tensors that depend
    on the weights, so gradients flow through them into the prompt.
    own_logits: the model computes all logits, as it must where it caps or scales them.
    Else they are hidden @ weight.T and never all in memory."""
    prompt_mask = left_padded(prompt_mask)
    mask = mask.bool()
    num_rows, length = completion_ids.shape
    num_generations = num_rows // len(prompt_ids)
    prompt_of = torch.arange(num_rows, device=mask.device) // num_generations
    # The last token predicts nothing. Of the others two or more run, by padding: one
    # alone would be decoding, for which recurrent layers (Mamba) cannot do backward.
    inputs = F.pad(completion_ids[:, :-1], (0, max(0, 3 - length)))
    keep = inputs.shape[1]
    # No token sees padding behind it, so the mask may be True there.
    attention_mask = F.pad(prompt_mask[prompt_of], (0, keep), value=True)
    if share_prompts:
        cache = DynamicCache(config=model.config)
        first = last_outputs(model, prompt_ids, prompt_mask, cache, 1, own_logits)
        cache.reorder_cache(prompt_of)  # selects rows: B become N
        # Recurrent layers would write over the prompt's states, which backward needs.
        cache.update_recurrent_state = lambda state, *args, **options: state
        later = last_outputs(model, inputs, attention_mask, cache, keep, own_logits)
        # A prompt's last output predicts the first token of each of its completions.
        # One backward pass goes through both: only then is a weight's gradient whole.
        outputs = torch.cat([first[prompt_of], later], 1)
    else:
        ids = torch.cat([prompt_ids[prompt_of], inputs], 1)
        outputs = last_outputs(model, ids, attention_mask, None, keep + 1, own_logits)
    outputs = outputs[:, :length][mask]  # (M, H or V)
    targets = completion_ids[mask]  # (M,)
    if own_logits:
        logits = outputs.float().div_(temperature)  # in place: they are large
        logp = -F.cross_entropy(logits, targets, reduction="none")
    else:
        weight = model.get_output_embeddings().weight  # (V, H): a row for each token
        logp = ChunkedLogprobs.apply(outputs, weight, targets, temperature)
    return logp.new_zeros(mask.shape).masked_scatter(mask, logp)


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature) at the targets, without all logits
    in memory. hidden: (M, H); weight: (V, H); targets: (M,) -> (M,) float32.
    It takes v words of the vocabulary at a time (a GPU wants multiples of 64) and, in
    backward, computes their logits (M, v) again. Logits are rounded to the dtype of
    hidden, then divided in float32, as in sampling."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        ctx.size = max(64, LOGITS_AT_ONCE // max(1, len(hidden)) // 64 * 64)
        ctx.temperature = temperature
        log_z = torch.tensor(-math.inf, device=hidden.device)  # log sum exp(logits)
        for words in weight.split(ctx.size):  # (v, H)
            logits = (hidden @ words.t()).float() / temperature  # (M, v)
            log_z = log_z.logaddexp(logits.logsumexp(1))  # (M,)
        # `einsum` rounds the target's logit once, as `@` does in sampling; hidden *
        # weight would round each of its terms, and a log-prob could exceed 0.
        logit = torch.einsum("mh,mh->m", hidden, weight[targets]).float() / temperature
        ctx.save_for_backward(hidden, weight, targets, log_z)
        return logit - log_z

    @staticmethod
    def backward(ctx, grad):
        # d logp / d logits = one_hot(target) - softmax(logits). The difference is taken
        # in float32: of tokens that are nearly certain bfloat16 would leave only noise.
        hidden, weight, targets, log_z = ctx.saved_tensors
        grad = grad[:, None] / ctx.temperature
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = None  # of a frozen layer (LoRA)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
        for start in range(0, len(weight), ctx.size):
            words = weight[start : start + ctx.size]  # (v, H)
            logits = (hidden @ words.t()).float() / ctx.temperature  # (M, v)
            softmax = torch.exp(logits - log_z[:, None])
            ids = torch.arange(start, start + len(words), device=weight.device)
            one_hot = (targets[:, None] == ids).float()
            grad_logits = (grad * (one_hot - softmax)).to(words.dtype)
            grad_hidden += grad_logits @ words
            if grad_weight is not None:
                grad_weight[start : start + ctx.size].addmm_(grad_logits.t(), hidden)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


# ------------------------------------------------------------------------------ scores
@dataclasses.dataclass
class Scores:
    """What N completions are worth."""

    columns: dict  # what the reward functions get: N values by name
    rewards: dict  # "reward", the weighted sum, and each "rewards/<name>": (N,)
    outcome: torch.Tensor  # (N,) float32: the sum without what is judged in parts
    token_advantages: torch.Tensor  # (N, C): of what is judged in parts, else 0


def score_completions(run, rows, batch):
    """`Scores` of the completions of B rows of data by all reward functions."""
    num_generations = len(batch.mask) // len(rows)
    columns = reward_columns(run, rows, batch)
    rewards = {}
    total = torch.zeros(len(batch.mask), dtype=torch.float64)
    outcome = torch.zeros_like(total)
    parts = []  # of functions that give each part of a completion a number
    for name, (function, weight) in run.rewards.items():
        judged = call_reward(name, function, columns)  # (N,), or (N, parts)
        reward = judged.view(len(total), -1).nanmean(1)
        reward = fill_unjudged(reward, num_generations)
        rewards[f"rewards/{name}"] = reward
        total += weight * reward
        if judged.dim() == 1:
            outcome += weight * reward
        else:
            parts.append(weight * fill_unjudged(judged, num_generations))
    # Summed in float64, then rounded to float32: so 0.1 + 0.2 and 0.3 are equal.
    rewards["reward"] = total.float()
    token_advantages = step_advantages(run, parts, columns, batch)
    return Scores(columns, rewards, outcome.float(), token_advantages)


def reward_columns(run, rows, batch):
    """What the reward functions get: lists of N values by name."""
    ids = [row[mask].tolist() for row, mask in zip(batch.completion_ids, batch.mask)]
    repeated = [row for row in rows for _ in range(len(ids) // len(rows))]
    columns = {name: [row[name] for row in repeated] for name in rows[0]}
    columns["completions"] = run.tokenizer.batch_decode(ids, skip_special_tokens=True)
    columns["completion_ids"] = ids
    columns["finished"] = [x[-1] in run.eos_token_ids for x in ids]
    columns["steps"] = [
        [text for text, _ in split_steps(run.tokenizer, x)] for x in ids
    ]
    return columns


def call_reward(name, function, columns):
    """What a reward function makes of N completions, see `read_rewards`. If it fails in
    one process all of them end, and save the last finished step."""
    message = ""
    try:
        returned = function(**copy.deepcopy(columns))
        rewards = read_rewards(returned, [len(steps) for steps in columns["steps"]])
    except Error as error:
        message = f"returned {error}"
    except Exception as error:  # whatever it raises
        traceback.print_exc()
        message = f"raised {error!r}"
    messages = [x for x in all_gather(message) if x]
    if messages:
        raise Stop(f"the reward {name} {messages[0]}")
    return rewards


def read_rewards(returned, num_steps):
    """What a reward function returned, in float64: (N,), or, if it judged steps, (N, S)
    with NaN behind a completion's last step. For each completion it may give whatever
    `float` takes, None (not judged: NaN), or a list of such with one for each of its
    `num_steps`. Raises `Error` with a value that is none of these."""

    def as_list(value):  # arrays and tensors have it
        return value.tolist() if hasattr(value, "tolist") else value

    values = as_list(returned)
    if not isinstance(values, (list, tuple)) or len(values) != len(num_steps):
        raise Error(f"{returned!r:.200}, and not a list of {len(num_steps)} values")
    values = [as_list(value) for value in values]
    by_step = any(isinstance(value, (list, tuple)) for value in values)
    width = max(1, *num_steps) if by_step else 1
    rewards = torch.full((len(values), width), math.nan, dtype=torch.float64)
    for i, value in enumerate(values):
        if value is None:
            continue
        try:
            if isinstance(value, (list, tuple)) != by_step:
                raise TypeError("numbers and lists are mixed")
            numbers = value if by_step else [value]
            if by_step and len(numbers) != num_steps[i]:
                raise ValueError(f"the completion has {num_steps[i]} steps")
            for j, number in enumerate(numbers):
                if isinstance(number, (str, bytes)) or not math.isfinite(number):
                    raise ValueError("it is not a finite number")
                rewards[i, j] = float(number)
        except (TypeError, ValueError, OverflowError) as error:
            raise Error(f"{value!r:.200} for a completion: {error}") from error
    return rewards if by_step else rewards[:, 0]


def fill_unjudged(rewards, num_generations):
    """What is not judged, NaN, becomes the mean of its group, or of all where its group
    has none: (N,) or (N, S)."""
    groups = rewards.view(len(rewards) // num_generations, -1)
    groups = groups.where(~groups.isnan(), groups.nanmean(1, keepdim=True))
    return groups.where(~groups.isnan(), groups.nanmean()).nan_to_num().view_as(rewards)


def step_advantages(run, parts, columns, batch):
    """`process_advantages` (N, C) of rewards of steps, each (N, S), added by step; 0
    where there are none."""
    if not parts:
        return torch.zeros(batch.mask.shape)
    steps = [split_steps(run.tokenizer, ids) for ids in columns["completion_ids"]]
    return process_advantages(
        [row[: len(x)].tolist() for row, x in zip(sum(parts), steps)],
        [[end for _, end in x] for x in steps],
        len(batch.mask) // len(batch.prompt_ids),
        length=batch.mask.shape[1],
        scale_rewards=run.config.scale_rewards,
    )


def split_steps(tokenizer, ids):
    """The non-blank lines of a completion -> [[text, index of its last token], …]."""
    steps = []
    start = 0
    for i, token in enumerate(ids):
        if ends_line(tokenizer, token) or i == len(ids) - 1:
            text = tokenizer.decode(ids[start : i + 1], skip_special_tokens=True)
            if text.strip():
                steps.append([text.strip(), i])
                start = i + 1
    if steps:  # what follows the last step, such as the EOS, belongs to it
        steps[-1][1] = len(ids) - 1
    return steps


@functools.cache
def ends_line(tokenizer, token):
    """Whether there is a line break in a token."""
    return "\n" in tokenizer.decode([token])


# ------------------------------------------------------------------------------ update
def update(run, batch, learning_rate):
    """num_iterations (mu) AdamW steps on one rollout -> metrics. `micro_batches` may
    leave groups out: the loss is still a mean over all completions or tokens; what is
    measured is a mean over the tokens that are kept."""
    config = run.config
    parts = micro_batches(run, batch)
    # Gradients (by FSDP) and metrics are averaged over ranks. So each rank divides its
    # sums by the average count: sum / (total / ranks) averages to sum of all / total.
    num_tokens = sum(all_gather(batch.mask.sum().item())) / WORLD_SIZE
    sizes = [part.mask.sum().item() for part in parts]
    num_kept = sum(all_gather(sum(sizes))) / WORLD_SIZE
    metrics = defaultdict(float, num_tokens=num_tokens * WORLD_SIZE)  # of all ranks
    for _ in range(config.num_iterations):
        for part, size in zip(parts, sizes):
            logp = part_logprobs(run, run.policy, part)
            if part.old_logp is None:  # in the first iteration; the others keep it
                part.old_logp = logp.detach()
            loss, means = grpo_loss(
                logp,
                part.old_logp,
                part.ref_logp,
                part.advantages,
                part.mask,
                epsilon=config.epsilon,
                epsilon_high=config.epsilon_high,
                beta=config.beta,
                loss_type=config.loss_type,
                importance_sampling_level=config.importance_sampling_level,
                max_completion_length=config.max_completion_length,
                num_sequences=len(batch.mask),
                num_tokens=num_tokens,
            )
            loss.backward()
            metrics["loss"] += loss.item() / config.num_iterations
            for name, mean in means.items():
                share = size / num_kept / config.num_iterations
                metrics[name] += share * mean.item()
        run.moved = True  # before they do, so that `save` never takes half a step
        metrics["grad_norm"] = run.optimizer.step(learning_rate, config.max_grad_norm)
        metrics["skipped"] += not math.isfinite(metrics["grad_norm"])
    return metrics


def part_logprobs(run, model, part):
    """`token_logprobs` of a micro-batch, in the way that this model bears."""
    return token_logprobs(
        model,
        part.prompt_ids,
        part.prompt_mask,
        part.completion_ids,
        part.mask,
        run.config.temperature,
        run.share_prompts,
        run.own_logits,
    )


def micro_batches(run, batch):
    """The micro-batches of an update, with the log-probs of the frozen reference."""
    # rows[b, g] is the number of prompt b's g-th completion in the batch.
    rows = torch.arange(len(batch.mask), device=DEVICE).view(len(batch.prompt_ids), -1)
    # To save padding, sort each group by length, then the groups by their longest.
    lengths = batch.mask.sum(1)  # (N,)
    rows = rows.gather(1, lengths[rows].argsort(1))
    rows = rows[lengths[rows[:, -1]].argsort()]
    if run.reference is None:  # a group whose advantages are all 0 has no gradient
        moves = batch.advantages[rows].flatten(1).any(1)  # (B,)
        rows = rows[moves] if moves.any() else rows[:1]  # one: each rank has a pass
    parts = cut(run, batch, rows)
    # Each pass takes all ranks (FSDP). Those with fewer parts repeat one, all masked.
    nothing = torch.zeros_like(parts[0].mask)
    for _ in range(max(all_gather(len(parts))) - len(parts)):
        parts.append(dataclasses.replace(parts[0], mask=nothing))
    if run.reference is not None:
        without_adapters = contextlib.nullcontext()
        if run.adapters:  # then the reference is the policy without them
            without_adapters = run.adapters.disable_adapter()
        with torch.no_grad(), without_adapters:
            for part in parts:
                part.ref_logp = part_logprobs(run, run.reference, part)
    return parts


def cut(run, batch, rows):
    """Completions `rows` (b, g) of a batch as micro-batches of `micro_batch_tokens`,
    padding included: what is too large is halved, down to a single completion."""
    prompts = rows[:, 0] // (len(batch.mask) // len(batch.prompt_ids))  # (b,)
    flat = rows.flatten()
    prompt_length = batch.prompt_mask[prompts].sum(1).max()  # of the longest of these
    length = batch.mask[flat].sum(1).max()
    num_prompts = len(prompts) if run.share_prompts else len(flat)
    num_tokens = num_prompts * prompt_length + len(flat) * length
    if num_tokens > run.config.micro_batch_tokens and len(flat) > 1:
        half, other_half = rows.tensor_split(2, dim=0 if len(rows) > 1 else 1)
        return cut(run, batch, half) + cut(run, batch, other_half)
    part = Batch(
        batch.prompt_ids[prompts, -prompt_length:],
        batch.prompt_mask[prompts, -prompt_length:],
        batch.completion_ids[flat, :length],
        batch.mask[flat, :length],
        batch.advantages[flat, :length],
    )
    return [part]


class MasterAdamW:
    """torch's AdamW (arXiv:1711.05101; weight decay 0) on float32 masters of a float32
    model, which is cast to `dtype`. Adding less than 1/512 of a bfloat16 weight changes
    nothing: so its float32 master moves, and the weight is the master, rounded.

        weights that compute    their master
        bfloat16                a float32 copy; `round` gives the weight its value
        float32                 the same memory: the weight is its own master
        sharded (FSDP)          this rank's float32 shard; FSDP casts what it gathers
    """

    def __init__(self, model, dtype):
        self.params = [param for param in model.parameters() if param.requires_grad]
        # They have their weights' memory. Below, `to` gives a bfloat16 weight its own.
        self.masters = [local(param.detach()) for param in self.params]
        if dtype == torch.bfloat16:
            for master in self.masters:
                master.copy_(within_cell(master))
        for param in model.parameters():
            if not isinstance(param, DTensor):
                param.data = param.data.to(dtype)
            # In bfloat16 a sum of gradients loses small ones. FSDP has its own sums.
            param.grad_dtype = torch.float32
        self.adamw = torch.optim.AdamW(self.masters, weight_decay=0.0, fused=True)

    def step(self, learning_rate, max_grad_norm):
        """Scale the gradient down to the norm `max_grad_norm` (0: as it is), move the
        masters against it and round the weights to them -> the norm before, that of all
        ranks. Where that is not finite nothing moves. The gradient is freed."""
        for param, master in zip(self.params, self.masters):
            master.grad = local(param.grad)
            param.grad = None
        grads = [master.grad for master in self.masters if master.grad is not None]
        norm = math.hypot(*all_gather(get_total_norm(grads).item()))
        if math.isfinite(norm):
            norm_limit = max_grad_norm or math.inf
            clip_grads_with_norm_(self.masters, norm_limit, torch.tensor(norm))
            self.adamw.param_groups[0]["lr"] = learning_rate
            self.adamw.step()
            self.round()
        self.adamw.zero_grad()
        return norm

    def round(self):
        """Give each weight the value of its master."""
        for param, master in zip(self.params, self.masters):
            local(param.detach()).copy_(master)  # of a float32 weight: onto itself


def within_cell(weight):
    """Random float32 numbers that bfloat16 rounds to these float32 weights: (…) -> (…).
    Near 0.02 bfloat16 numbers are 1.2e-4 apart: a master that begins at such a number
    needs 60 updates of 1e-6 before its weight moves at all. From a random place the
    weight moves with a chance of 1e-6 / 1.2e-4 each time, on average as its master.
    Zeros, weights with lower bits of their own and some powers of 2 stay."""
    exponent = torch.frexp(weight).exponent  # bfloat16: 2**(exponent - 8) apart
    near = weight + torch.ldexp(torch.rand_like(weight) - 0.5, exponent - 8)
    return torch.where(near.bfloat16() == weight, near, weight)


# ---------------------------------------------------------------------------- training
def train(config):
    """GRPO from the first prompt to the last checkpoint."""
    join_ranks()
    run = Run(config)
    with save_at_the_end(run):
        train_rows, eval_rows = set_up(run)
        restore(run)
        num_skipped = 0  # steps in a row whose gradients were not finite
        progress = tqdm(
            total=config.max_steps, initial=run.step, disable=RANK > 0, smoothing=0
        )
        while run.step < config.max_steps:
            evaluation_is_due = config.eval_every and run.step % config.eval_every == 0
            if evaluation_is_due:
                evaluate(run, eval_rows)
            stop_at_a_signal(run)
            step = run.step + 1
            metrics = train_step(run, train_rows, step, evaluation_is_due)
            metrics = log(run, step, metrics)
            run.step = step
            run.moved = False
            progress.update()
            progress.set_postfix(reward=metrics["reward"], kl=metrics["kl"])
            if config.save_every and step % config.save_every == 0:
                save(run)
            num_skipped = num_skipped + 1 if metrics["skipped"] else 0
            if num_skipped == 5:
                raise Stop("the gradients of five steps in a row were not finite")
        progress.close()
        if config.eval_every:
            evaluate(run, eval_rows)
        save(run)
    if run.tracker:
        run.tracker.finish()


def stop_at_a_signal(run):
    """Raise `Stop` if any process has got a signal."""
    name = max(all_gather(run.signal))
    if name:
        raise Stop(f"{name} after step {run.step}")


@contextlib.contextmanager
def save_at_the_end(run):
    """Save the last finished step if the run ends early, and say how to go on with it.
    SIGINT and SIGTERM let a step finish (under torchrun it has 30 seconds, or as many
    as --shutdown-timeout says)."""

    def note(number, frame):
        run.signal = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"stopping after this step; again to stop at once\n")

    handlers = {x: signal.signal(x, note) for x in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except BaseException as error:
        # Saving takes all ranks, and this one may fail alone.
        if WORLD_SIZE == 1 or isinstance(error, Stop):
            save(run)
        if isinstance(error, torch.OutOfMemoryError):
            tokens = run.config.micro_batch_tokens
            error.add_note(f"--micro-batch-tokens {tokens // 2} takes less memory.")
        if run.output_dir:
            error.add_note(f"Go on with: python grpo.py --resume {run.output_dir}")
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def set_up(run):
    """(rows to train on, rows held out); loads the run's models, after the supervised
    steps."""
    config = run.config
    if config.prompts_per_step % WORLD_SIZE:
        raise Error("several processes must share --prompts-per-step evenly")
    if config.lora_rank and WORLD_SIZE > 1:
        raise Error("--lora-rank takes a single process")
    if not config.resume and config.output_dir:
        check_new(Path(config.output_dir))
    if config.report_to:  # it should be missed now
        run.tracker = importlib.import_module(config.report_to)
    run.rewards = load_rewards(config.reward)
    train_rows = arithmetic(config.model, config.seed)
    if config.data:
        train_rows = read_rows(config.data, needs_answers(config))
    if config.eval_data:
        eval_rows = read_rows(config.eval_data, needs_answers(config))
    else:
        random.Random(config.seed).shuffle(train_rows)
        held_out = min(64, len(train_rows) // 10)
        eval_rows = train_rows[:held_out]
        train_rows = train_rows[held_out:]
    name = config.model
    if config.sft_steps:  # GRPO starts from what they leave, and so does its reference
        name = sft(run, train_rows)
    run.load(name)
    return encode_prompts(train_rows, run), encode_prompts(eval_rows, run)


def sft(run, rows):
    """Supervised steps on the rows' solutions -> the model's folder, OUTPUT_DIR/sft. With advantage 1, ratio 1 and no KL the loss has the gradient of -logp."""
    if run.output_dir and (run.output_dir / "sft").exists():
        return f"{run.output_dir}/sft"
    config = dataclasses.replace(run.config, beta=0, num_iterations=1, temperature=1.0)
    pupil = Run(config)
    pupil.load(config.model)
    examples = []
    for row in encode_prompts(rows, pupil):
        solution = row.get("solution") or row["answer"]
        if isinstance(solution, (str, int, float)):
            ids = pupil.tokenizer.encode(str(solution), add_special_tokens=False)
            if 0 < len(ids) < config.max_completion_length:
                examples.append((row["prompt_ids"], ids + pupil.eos_token_ids[:1]))
    prompt_batch(examples, 1, config.prompts_per_step, config.seed)  # are there enough?
    claim(run)
    pupil.output_dir = run.output_dir
    for step in tqdm(range(1, config.sft_steps + 1), "supervised", disable=RANK > 0):
        stop_at_a_signal(run)
        chosen = prompt_batch(examples, step, config.prompts_per_step, config.seed)
        prompts, solutions = zip(*chosen)
        batch = Batch(*pad(prompts, "left"), *pad(solutions, "right"))
        batch.advantages = torch.ones(batch.mask.shape, device=DEVICE)
        if update(pupil, batch, config.sft_learning_rate)["skipped"]:
            raise Error("a gradient of the supervised steps is not finite")
    return write_folder(pupil, "sft")


def evaluate(run, rows):
    """Mean rewards of greedy completions of the held-out rows, logged and printed, once
    for a step."""
    if run.step == run.evaluated_step:
        return
    # Every process has the same number of rows, and decodes no more than in training.
    mine = rows[RANK::WORLD_SIZE][: len(rows) // WORLD_SIZE]
    size = run.config.prompts_per_step * run.config.num_generations // WORLD_SIZE
    sums = defaultdict(float)
    for start in range(0, len(mine), size):
        part = mine[start : start + size]
        batch = rollout(run, part, num_generations=1, temperature=0)
        for name, values in score_completions(run, part, batch).rewards.items():
            sums[f"eval/{name}"] += values.sum().item()
    if mine:
        own_means = {name: x / len(mine) for name, x in sums.items()}
        means = log(run, run.step, own_means)
        print0(f"step {run.step}: greedy held-out reward {means['eval/reward']:.2f}")
    run.evaluated_step = run.step


def log_completions(run, step, scores):
    """Log what reward functions got and gave in completions.jsonl; print the first."""
    claim(run)
    if RANK > 0:
        return
    columns = dict(scores.columns)
    for name, values in scores.rewards.items():
        columns[name] = values.tolist()
    with open(run.output_dir / "completions.jsonl", "a") as lines:
        for i in range(len(scores.outcome)):
            record = {name: values[i] for name, values in columns.items()}
            print(json.dumps(dict(record, step=step), default=str), file=lines)
    print0(f"{columns['completions'][0]!r} has the reward {columns['reward'][0]}")


def log(run, step, metrics):
    """The means of metrics over the ranks, logged in metrics.jsonl and the tracker."""
    claim(run)
    ranks = all_gather(metrics)
    means = {name: sum(x[name] for x in ranks) / WORLD_SIZE for name in metrics}
    if RANK == 0:
        # None for what is not finite, as JSON has no NaN.
        row = {name: x if math.isfinite(x) else None for name, x in means.items()}
        with open(run.output_dir / "metrics.jsonl", "a") as lines:
            print(json.dumps(dict(row, step=step)), file=lines)
        if run.tracker:
            run.tracker.log(row, step=step)
    return means


def peak_memory_gb():
    """The most memory so far: of the GPU, else of the process; NaN if it is unknown."""
    if ON_GPU:
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        import resource
    except ImportError:  # Windows has none
        return math.nan
    unit = 2**30 if sys.platform == "darwin" else 2**20  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def set_seed(seed, step):
    """Each step has a seed of its own, so that a resumed run draws the same numbers,
    and each rank, so that they draw different ones."""
    seed = seed * 1_000_003 + step * WORLD_SIZE + RANK
    random.seed(seed)
    torch.manual_seed(seed)


# -------------------------------------------------------------------- data and prompts
# Columns of the data with these names are replaced: reward functions get others.
GIVEN = "prompts prompt_ids messages completions completion_ids finished steps".split()


def read_rows(source, need_answers):
    """Rows (dicts) of a JSONL file, or of the Hub data set NAME[:CONFIG[:SPLIT]].
    `prompt`, `question` or `problem` (text or chat messages) becomes "prompt"; `answer`
    or `solution` becomes "answer"; other columns stay for the reward functions. Raises
    `Error` with the first line that is no such row, or lacks an answer."""
    if ".json" in source or Path(source).is_file():
        lines = Path(source).read_bytes().splitlines()
    else:
        import datasets

        name, config, split, *_ = [*source.split(":", 2), "", ""]
        try:
            lines = datasets.load_dataset(name, config or None, split=split or "train")
        except Exception as error:  # whatever it raises
            raise Error(f"data set {source}: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if isinstance(line, bytes) and not line.strip():
            continue
        try:
            row = json.loads(line) if isinstance(line, bytes) else line
            if not isinstance(row, dict):
                raise ValueError("no JSON object")
            prompt = row.get("prompt") or row.get("question") or row.get("problem")
            as_messages(prompt)  # raises if it is neither text nor messages
            answer = row.get("answer")
            if answer is None:
                answer = row.get("solution")
            if need_answers:
                gold_answers(answer)  # raises if there is none
        except Exception as error:  # whatever a line can hold
            hint = "" if rows else " (JSONL has one object a line)"
            raise Error(f"{source}:{number}: {error!r:.200}{hint}") from error
        rows.append({**row, "prompt": prompt, "answer": answer})
    if not rows:
        raise Error(f"{source} has no rows")
    every_column = dict.fromkeys(name for row in rows for name in row)
    replaced = [name for name in every_column if name in [*GIVEN, "reward", "step"]]
    if replaced:
        print0(f"{source}: rewards or logs have other columns {', '.join(replaced)}")
    return [{**every_column, **row} for row in rows]


def as_messages(prompt):
    """A text as a chat of one message; a chat as it is. Raises where it is neither."""
    if not prompt:
        raise ValueError("nothing in prompt, question or problem")
    if isinstance(prompt, str):
        prompt = [dict(role="user", content=prompt)]
    for message in prompt:
        str.encode(message["content"])  # raises unless it is text
        if message["role"] not in ("system", "user", "assistant"):
            raise ValueError(f"{message['role']!r} is not system, user or assistant")
    if all(message["role"] != "user" for message in prompt):
        raise ValueError("no message of the user")
    return prompt


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
    """Rows with "prompts" (as rendered), "prompt_ids" and "messages", if they fit."""
    config = run.config
    room = max_positions(run.policy.config) - config.max_completion_length
    if room < 1:
        raise Error("--max-completion-length exceeds the positions of the model")
    longest = min(config.max_prompt_length, room)
    chat = config.chat_template == "on"
    if config.chat_template == "auto":
        chat = chat_template_fits(run.tokenizer, run.eos_token_ids)
    asking = BOXED if needs_answers(config) else "{question}"
    template = config.prompt_template or asking
    encoded = []
    for row in rows:
        messages = list(as_messages(row["prompt"]))
        last = max(i for i, x in enumerate(messages) if x["role"] == "user")
        question = template.replace("{question}", messages[last]["content"])
        messages[last] = dict(messages[last], content=question)
        if config.system_prompt and messages[0]["role"] != "system":
            messages = [dict(role="system", content=config.system_prompt), *messages]
        text = "\n".join(message["content"] for message in messages)
        if chat:
            try:
                text = run.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # whatever a template raises
                raise Error(f"--chat-template: {error}") from error
        ids = run.tokenizer.encode(text, add_special_tokens=not chat)  # one BOS
        if ids and ids[-1] in run.eos_token_ids:  # some tokenizers end every text
            ids.pop()
        if 0 < len(ids) <= longest:
            encoded.append(dict(row, prompts=text, prompt_ids=ids, messages=messages))
    first = [row["prompts"] for row in encoded[:1]]
    print0(f"{len(encoded)} of {len(rows)} prompts fit, the first: {first}")
    return encoded


def prompt_batch(rows, step, size, seed):
    """This process's share of the `size` rows of a step; every epoch is shuffled."""
    if len(rows) < size:
        raise Error(f"--prompts-per-step {size}: only {len(rows)} rows fit")
    epoch, i = divmod(step - 1, len(rows) // size)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(rows), generator=generator)
    return [rows[j] for j in order.split(size)[i][RANK::WORLD_SIZE]]


def pad(sequences, side):
    """Lists of token ids -> ids and mask: (len(sequences), longest), int64 and bool.
    Padding is masked, but must be a token that the model can compute with: the one
    made for it may have an embedding of zeros, whose norm gives NaN gradients."""
    rows = [torch.tensor(sequence, device=DEVICE) for sequence in sequences]
    ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side=side)
    mask = ids >= 0  # no token's id is -1
    return ids.masked_fill(~mask, sequences[0][0]), mask


# ----------------------------------------------------------------------------- rewards
def extract_answer(text, finished=True):
    r"""The one answer of a text: the last \boxed{…}, else what follows the last ####,
    else, unless the text was cut off, its last number. None if there is none or if the
    box is not closed.
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
        found = re.findall(NUMBER, plain(text))
    return found[-1] if found else None


def gold_answers(answer):
    """The data's answer or alternatives: in a box, after ####, else all the text."""
    golds = []
    for gold in answer if isinstance(answer, list) else [answer]:
        text = str(gold).strip() if type(gold) in (str, int, float) else ""
        marked = "\\boxed" in text or "####" in text
        if len(text) > 200 and not marked:
            raise ValueError(
                "a text without \\boxed{} or #### is too long to be an answer"
            )
        golds.append(extract_answer(text) if marked else text)
    if not golds or not all(golds) or "nan" in golds:
        raise ValueError(f"{answer!r} is no answer to compare with")
    return golds


# A sign, but not the minus of 7-5, a currency sign, digits: -$1,250.50, 1/2, .5.
NUMBER = r"(?:(?<![\w)])[-+])?[$€£]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+/\d+|\d*\.?\d+)"


def plain(text):
    r"""A text without LaTeX's signs and spaces: `-1/2` of `\(-\frac{1}{2}\)`."""
    fraction = r"([-+]?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}"
    text = re.sub(fraction, r" \1\2/\3 ", text.replace("−", "-"))
    text = re.sub(r"\\(?:text\w*|mathrm|mbox)\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\\[],;:! ()[]|\\(?=[$%])", "", text.replace("{,}", ","))


def as_number(text):
    """The exact number that a text is, without its currency or percent sign, else None.
    >>> as_number("x = $1,250.50."), as_number("50%"), as_number("7, or maybe 8")
    (Fraction(2501, 2), Fraction(50, 1), None)
    """
    text = plain(text).lstrip(" $").rstrip(" $.")
    match = re.fullmatch(rf"(?:[a-zA-Z] ?= ?)?({NUMBER}) ?[%€£]?", text)
    try:
        return Fraction(re.sub("[$€£,]", "", match[1])) if match else None
    except (ValueError, ZeroDivisionError):  # over 4,300 digits, or 1/0
        return None


def answers_match(answer, gold):
    r"""Whether two answers are the same exact number, or else the same words, case and
    punctuation around them aside. Units and other LaTeX are for the math reward.
    >>> answers_match("$80,000.00", "80000"), answers_match(r"\text{(B)}.", "b")
    (True, True)
    """
    number, gold_number = as_number(answer), as_number(gold)
    if number is not None or gold_number is not None:
        return number == gold_number
    texts = plain(answer), plain(gold)
    words = [" ".join(x.casefold().split()).strip(" .,;:()$") for x in texts]
    return words[0] == words[1] != ""


def accuracy_reward(prompts, completions, answer, finished=None, **columns):
    """1.0 where the extracted answer is equal to the data's, else 0.0. answer: N of
    them, each a text, a number, or a list of alternatives. finished: N bools; of what
    was cut off only a closed box or a #### counts. The prompts are not read. Raises
    ValueError for an empty answer."""
    scores = []
    for i, completion in enumerate(completions):
        found = extract_answer(completion, finished is None or finished[i])
        golds = gold_answers(answer[i])
        right = [found is not None and answers_match(found, gold) for gold in golds]
        scores.append(float(any(right)))
    return scores


def math_reward(prompts, completions, answer, finished=None, **columns):
    """The same, or what the package math-verify finds equal to it as LaTeX. Where
    nothing is in a box or after a #### it looks for the answer as well."""
    from math_verify import parse, verify

    # Its time limit is an alarm, which Python allows in the main thread only.
    seconds = 2 if threading.current_thread() is threading.main_thread() else None

    def equal(completion, marked, gold):
        if marked and answers_match(marked, gold):
            return True
        text = latex(marked[:1000]) if marked else completion[-1000:]
        return verify(
            parse(latex(gold), parsing_timeout=seconds),
            parse(text, parsing_timeout=seconds),
            timeout_seconds=seconds,
        )

    scores = []
    for i, completion in enumerate(completions):
        marked = extract_answer(completion, finished=False)
        broken = "\\boxed{" in completion or finished is not None and not finished[i]
        golds = gold_answers(answer[i])
        right = [
            equal(completion, marked, gold) for gold in golds if marked or not broken
        ]
        scores.append(float(any(right)))
    return scores


def latex(text):
    r"""A text between dollar signs, without the \( \) or \[ \] of its own."""
    return "$" + re.sub(r"(?<!\\)\\[][()]", "", text) + "$"


def format_reward(prompts, completions, **columns):
    """1.0 for one `<think>…</think>` and then an answer, else 0.0.
    DeepSeek-R1 (arXiv:2501.12948) 2.2.2. The prompt may end in `<think>`."""
    scores = []
    for prompt, completion in zip(prompts, completions):
        text = completion.strip()
        if prompt.rstrip().endswith("<think>"):
            text = "<think>" + text
        match = re.fullmatch(r"<think>.*</think>.*\S.*", text, re.DOTALL)
        scores.append(float(match is not None and text.count("think>") == 2))
    return scores


REWARDS = dict(accuracy=accuracy_reward, math=math_reward, format=format_reward)
BOXED = "{question}\nReason step by step, and put your final answer within \\boxed{}.\n"


def needs_answers(config):
    """Whether a reward compares with the data's answers; then prompts ask for a box."""
    return any(x.split("=")[0] in ("accuracy", "math") for x in config.reward)


def load_rewards(specs):
    """{name: (function, weight)} of `NAME[=WEIGHT]` and `FILE.py:FUNCTION[=WEIGHT]`."""
    rewards = {}
    for spec in specs:
        target, weight = re.fullmatch(r"(.*?)(?:=(-?\d*\.?\d+))?", spec).groups()
        path, _, name = target.rpartition(":")
        functions = {} if path else REWARDS
        if path.endswith(".py") and os.path.isfile(path):
            try:
                functions = vars(import_file(path))
            except Exception as error:  # whatever the file raises
                traceback.print_exc()
                raise Error(f"--reward {spec}: {error!r}") from error
        if not callable(functions.get(name)):
            known = f"one of {', '.join(REWARDS)} or FILE.py:FUNCTION, and =WEIGHT"
            raise Error(f"--reward {spec}: not found; say {known}")
        rewards[name] = functions[name], float(weight or 1)
        if target == "math":  # it should be missed now, and not at the first scoring
            importlib.import_module("math_verify")
    if len(rewards) < len(specs):
        raise Error("--reward: a name twice")
    return rewards


@functools.cache
def import_file(path):
    """The module in a file, run once. It may import its neighbours."""
    sys.path.insert(0, os.path.dirname(path))
    # Its name is its path: a file math.py must not become everybody's module math.
    name = re.sub(r"\W", "_", path)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickle looks for it
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------ models
def load_model(name, seed):
    """(model in float32, tokenizer, EOS ids) of any causal language model, or the tiny
    one; of a vision-language model its text model. Raises ValueError if it is none."""
    if name == "tiny":
        model, tokenizer = tiny_model(seed)
    else:
        # No loading in threads: each of them keeps memory.
        os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
        tokenizer = AutoTokenizer.from_pretrained(name)
        config = AutoConfig.from_pretrained(name)
        text_config = config.get_text_config()
        if hasattr(config, "tie_word_embeddings"):  # the text model's may disagree
            text_config.tie_word_embeddings = config.tie_word_embeddings
        model, info = AutoModelForCausalLM.from_pretrained(
            name,
            config=text_config,
            key_mapping={r"language_model\.": ""},
            dtype=torch.float32,
            output_loading_info=True,
        )
        if info["missing_keys"]:
            raise ValueError(f"it lacks {min(info['missing_keys'])}")
        if text_config is not config:  # else it saves the names that are mapped here
            model._weight_conversions = None
    model.to(DEVICE).eval()  # no dropout: sampling, old, new and reference agree
    eos = model.generation_config.eos_token_id  # it may disagree with the tokenizer's
    eos = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
    eos_token_ids = [token for token in eos if token is not None]
    if not eos_token_ids:
        raise ValueError("it has no EOS token")
    return model, tokenizer, eos_token_ids


def max_positions(config):
    """The most tokens for which a model has positions, and the same in any batch."""
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        longest = rope.get("original_max_position_embeddings", longest)
    return longest


def choose_paths(model):
    """(share_prompts, own_logits): the fastest way of `token_logprobs` that agrees with
    forward passes without padding or cache, for this float32 model. Raises ValueError
    where none does, or where sampling, which goes by the cache, does not."""
    texts = [2, 3, 4, 2, 3], [5, 6]
    prompts, prompt_mask = pad(texts, "left")
    drawn = generate(model, prompts, prompt_mask, 1, 8, [-1], temperature=0)
    logits = []
    for text, completion in zip(texts, drawn):
        ids = torch.tensor([[*text, *completion]], device=DEVICE)
        logits.append(model(ids).logits[0, -9:-1])  # they predict the last 8
    logits = torch.stack(logits)  # (2, 8, V)
    same = (logits.argmax(2) == drawn).all(1)  # whether the greedy tokens are those
    if not same.all():
        cause = "padding" if same[0] else "its cache"  # the first prompt has no padding
        raise ValueError(f"{cause} changes what it samples")
    logp = -F.cross_entropy(logits.transpose(1, 2), drawn, reduction="none")
    weight = model.get_input_embeddings().weight
    expected = logp, *torch.autograd.grad(logp.sum(), weight)
    paths = [(True, False), (True, True), (False, True)]
    # A cap hardly changes the small logits of untrained weights: comparing would not
    # show it. See whether the configuration names one.
    for option, value in vars(model.config).items():
        if re.search("logit|lm_head", option) and value not in (None, False, 1):
            paths = [(True, True), (False, True)]
    mask = drawn >= 0  # nothing is padding
    for path in paths:
        try:
            logp = token_logprobs(model, prompts, prompt_mask, drawn, mask, 1, *path)
            found = logp, *torch.autograd.grad(logp.sum(), weight)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # they are RuntimeErrors as well
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            # What a model without such a cache or output layer raises.
            print0(f"share_prompts, own_logits = {path}: {error}")
            continue
        agree = [(x - y).norm() <= 1e-3 * y.norm() for x, y in zip(found, expected)]
        if all(agree):
            print0(f"share_prompts, own_logits = {path}")
            return path
    raise ValueError("padding or later tokens change log-probs")


# ------------------------------------------------------------------- several processes
def join_ranks():
    """Prepare this process's device; under torchrun meet the other processes."""
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        # cuDNN's attention, an H100's default, gives NaN gradients at some lengths with
        # a mask (pytorch issue 196678), and plans anew for every length.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.matmul.allow_tf32 = False  # some containers set it
        torch.backends.cudnn.allow_tf32 = False
    if WORLD_SIZE > 1 and not dist.is_initialized():
        # On a GPU tensors go by NCCL; objects, as `all_gather` sends them, by gloo.
        dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")


def all_gather(value):
    """A list of what each rank gives."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values


def print0(text):
    """Print above the progress bar, on the first rank alone."""
    if RANK == 0:
        tqdm.write(text)


def local(tensor):
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard(model, dtype, reshard):
    """With several ranks, give each its part of a model's weights (FSDP2), gathered in
    `dtype` when the model is called. reshard False: until a backward pass, as ranks
    take different numbers of steps in a rollout; None: a layer's only while it runs."""
    if WORLD_SIZE == 1:
        return
    precision = fsdp.MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    layers = [x for x in model.modules() if isinstance(x, DecoderLayer)]
    for module in [*layers, model]:
        fsdp.fully_shard(module, mp_policy=precision, reshard_after_forward=reshard)


# ------------------------------------------------------------------------- checkpoints
def check_new(folder):
    """Raise `Error` if there is anything in a folder that a new run would take."""
    if folder.exists() and any(folder.iterdir()):
        raise Error(f"{folder} is not empty: --resume it, or take another --output-dir")


def claim(run):
    """Make a folder the run's own before the first thing is made in it, by creating its
    options.json, which only one run can. A default name that is taken gets a suffix."""
    if run.output_dir:
        return
    given = run.config.output_dir
    name = f"runs/{Path(run.config.model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(given or name)
    if RANK == 0:
        for suffix in range(2, 1000):
            try:
                folder.mkdir(parents=True, exist_ok=bool(given))
                break
            except FileExistsError:
                folder = Path(f"{name}-{suffix}")
        check_new(folder)
        with open(folder / "options.json", "x") as file:
            file.write(json.dumps(vars(run.config)))
    run.output_dir = all_gather(folder)[0]
    start_tracker(run)


def start_tracker(run):
    """Report to wandb or trackio, which share an interface, as a run of its own."""
    if run.tracker is None or RANK > 0:
        return
    file = run.output_dir / "tracker-id"  # kept for resuming
    if not file.exists():
        file.write_text(f"{run.output_dir.name}-{time.time_ns():x}")
    name = file.read_text()
    os.environ["WANDB_RUN_ID"] = name  # trackio knows a run by its name
    config = vars(run.config)
    run.tracker.init(project="grpo", name=name, config=config, resume="allow")


def save(run):
    """Make the last finished step a checkpoint, in place of the one before, unless an
    update has moved the weights since. Broken weights never replace good ones."""
    if run.step == run.saved_step or run.moved:
        return
    last, run.saved_step = run.saved_step, run.step  # what fails is not tried again
    norm = math.hypot(*all_gather(get_total_norm(run.optimizer.masters).item()))
    if not math.isfinite(norm):
        good = f"the last good ones (0: none) are of step {last}"
        raise Error(f"weights of step {run.step} are not finite, not saved; {good}")
    try:
        write_folder(run, f"checkpoint-{run.step}")
    except Exception as error:  # whatever writing raises
        free = shutil.disk_usage(run.output_dir).free / 2**30
        what = f"checkpoint-{run.step} was not written, the last one is of step {last}"
        raise Error(f"{what}: {error!r:.200}, {free:.1f} GiB are free") from error


def write_folder(run, name):
    """A folder that `from_pretrained` and vLLM load (of LoRA merged, in float32, with
    `adapter/`), and what resuming needs of each rank -> its path. It gets its name once
    whole."""
    folder = run.output_dir / "partial"
    folder.mkdir(exist_ok=True)
    model = run.policy
    weights = None  # those of the model
    if WORLD_SIZE > 1:  # whole, in the run's dtype, on the CPU of the first rank
        weights = {}
        for key, tensor in model.state_dict().items():
            if isinstance(tensor, DTensor):  # a weight; buffers keep their dtype
                tensor = tensor.full_tensor().to(run.dtype)  # takes all ranks
            if RANK == 0:
                weights[key] = tensor.cpu()
    if run.step:
        adamw = run.optimizer.adamw.state_dict()
        state = dict(masters=run.optimizer.masters, adamw=adamw)
        torch.save(state, folder / f"optimizer-{RANK}-of-{WORLD_SIZE}.pt")
    if run.adapters:
        run.adapters.save_pretrained(folder / "adapter")
        model = copy.deepcopy(run.adapters.cpu()).float().merge_and_unload()
        run.adapters.to(DEVICE)  # a GPU may not have room for two models
    if RANK == 0:
        model.save_pretrained(folder, state_dict=weights)
        if weights:
            model.config.dtype = run.dtype  # it was written as float32, that of shards
            model.config.save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)
    all_gather(None)  # until all ranks have written
    if RANK == 0:
        folder.rename(run.output_dir / name)
        for old in checkpoints(run.output_dir)[:-1]:
            shutil.rmtree(old)
    all_gather(None)  # until it has its name
    print0(f"saved {run.output_dir / name}")
    return str(run.output_dir / name)


def checkpoints(output_dir):
    """The checkpoint folders of a run, oldest first. Folders of other names are not its
    own."""
    folders = [
        x for x in output_dir.iterdir() if re.fullmatch(r"checkpoint-\d+", x.name)
    ]
    return sorted(folders, key=lambda x: int(x.name[11:]))


def restore(run):
    """Take the newest checkpoint of a run that is resumed, and cut its logs there."""
    if not run.config.resume:
        return
    folders = checkpoints(run.output_dir)
    for folder in folders[-1:]:
        file = folder / f"optimizer-{RANK}-of-{WORLD_SIZE}.pt"
        state = torch.load(file, map_location="cpu", weights_only=True)
        run.optimizer.adamw.load_state_dict(state["adamw"])
        for master, saved in zip(run.optimizer.masters, state["masters"]):
            master.copy_(saved)
        run.optimizer.round()
        run.step = run.saved_step = int(folder.name[11:])
        print0(f"going on from {folder}")
    if not folders:
        print0(f"{run.output_dir} has no checkpoint: it begins anew")
    if RANK == 0:
        shutil.rmtree(run.output_dir / "partial", ignore_errors=True)  # of a kill
        replace_text(run.output_dir / "options.json", json.dumps(vars(run.config)))
        for name in ("metrics.jsonl", "completions.jsonl"):
            cut_log(run, run.output_dir / name)
    run.evaluated_step = all_gather(run.evaluated_step)[0]
    start_tracker(run)
    if run.step >= run.config.max_steps:
        print0(f"{run.output_dir} is finished, unless --max-steps gives it more steps")


def cut_log(run, path):
    """Leave in a log the rows up to the step that is resumed. A kill may have torn the
    last one."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["step"] <= run.step:
            lines.append(line + "\n")
            if "eval/reward" in row:
                run.evaluated_step = row["step"]
    replace_text(path, "".join(lines))


def replace_text(path, text):
    """Write a file anew, in one step."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


# ------------------------------------------------------------- built-in task and model
def arithmetic(model, seed):
    """Built-in sums. 5 in 8 of tiny's `solution`s are wrong, to leave work for GRPO."""
    rng = random.Random(seed)
    rows = []
    for a in range(50):
        for b in range(10):
            if model == "tiny":
                noisy = a + b + rng.choice([0, 0, 0, 1, 2, 5, 10, 20])
                rows.append(dict(prompt=f"{a}+{b}=", answer=a + b, solution=noisy))
            else:
                c, d = rng.choices(range(10, 100), k=2)
                prompt = f"Calculate {a} - {b} * ({c} - {d})."
                rows.append(dict(prompt=prompt, answer=a - b * (c - d)))
    return rows


def tiny_model(seed):
    """A 2-layer Qwen2, 135,168 random weights; its tokens are characters (Ġ: space)."""
    tokens = ["<eos>", "<unk>", *"0123456789+-*/=()<>#.,:ĠĊabcdefghijklmnopqrstuvwxyz"]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocab, merges=[], eos_token="<eos>", unk_token="<unk>"
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
    learning_rate=1e-3,
    sft_steps=250,
    sft_learning_rate=3e-3,
)
# What may be typed beside --resume; all else is the run's own.
RESUMABLE = "max_steps learning_rate eval_every save_every micro_batch_tokens report_to"


def parse_args(argv=None):
    """`Config` of a list of command-line words (default: the process's)."""
    usage = "python grpo.py [--option value ...]"
    parser = argparse.ArgumentParser(
        usage=usage, argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    comments = dict(re.findall(r"    (\w+): .*?  # (.*)", inspect.getsource(Config)))
    for field in dataclasses.fields(Config):
        choices = get_args(field.type)  # of a Literal
        several = field.type is tuple
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            help=f"{comments[field.name]} (default: {field.default})",
            type=str if choices or several else field.type,
            choices=choices or None,
            nargs="+" if several else None,
            action="extend" if several else "store",
        )
    words = []
    for word in sys.argv[1:] if argv is None else argv:  # --num_generations as well
        words.append(re.sub(r"^--\w+", lambda x: x[0].replace("_", "-"), word))
    typed = vars(parser.parse_args(words))  # no defaults: they are suppressed
    for name in ("model", "data", "eval_data"):  # also for resuming from elsewhere
        if os.path.exists(typed.get(name, "")):
            typed[name] = os.path.abspath(typed[name])
    if "reward" in typed:
        file = re.compile(r".*\.py(?=:)")
        for i, spec in enumerate(typed["reward"]):
            typed["reward"][i] = file.sub(lambda x: os.path.abspath(x[0]), spec)
    options = TINY if typed.get("model", "tiny") == "tiny" else {}
    if "resume" in typed:
        fixed = typed.keys() - {"resume", *RESUMABLE.split()}
        if fixed:
            message = f"the run has its own {min(fixed)}; may be new: {RESUMABLE}"
            raise Error(message.replace("_", "-"))
        options = json.loads(Path(typed["resume"], "options.json").read_text())
        typed["output_dir"] = typed["resume"]
    return Config(**{**options, **typed})


def main():
    """Train as the command line says; a mistake of the user ends in one line."""
    try:
        train(parse_args())
    except (Error, OSError, ImportError, torch.OutOfMemoryError) as error:
        lines = [str(error), *getattr(error, "__notes__", [])]
        if isinstance(error, ModuleNotFoundError):
            lines.append(f"pip install {error.name}")
        sys.exit(f"grpo.py: {' '.join(' '.join(lines).split())}")
    if WORLD_SIZE > 1:  # gloo's threads can abort an ordinary end
        all_gather(None)
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
