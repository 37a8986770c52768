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
     + beta KL(policy, frozen reference)              `grpo_loss`
The group's mean is the baseline: no value network is needed.

Shapes: B prompts, G samples of each, N = B*G completions (b*G … b*G+G-1 belong to
prompt b), P prompt length (left-padded), C completion length (right-padded),
V vocabulary, H hidden size, M all completion tokens without padding.

The rooms of this file, in order. All of GRPO, in its plain form: GRPO in numbers,
samples and log-probs, one step. The same made better, and tested to be equal: the same,
faster; the same, in less memory. The program around it: training, data and prompts,
rewards, rewards of reasoning steps, models, several processes, checkpoints, built-in
task and model, command line.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import sys
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
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_utils import get_last_checkpoint

RANK = int(os.environ.get("RANK", 0))  # number of this process; torchrun sets it
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # number of processes, or ranks
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = "bfloat16" if ON_GPU else "float32"


# --------------------------------------------------------------------- GRPO in numbers
def completion_mask(completion_ids, eos_token_ids):
    """True up to and including each row's first EOS: ids (N, C) -> bool (N, C).
    eos_token_ids: one id or a list. Do not mask by the pad token instead: it is often
    EOS, and the model would never learn to stop.
    >>> completion_mask(torch.tensor([[5, 2, 2], [5, 6, 7]]), 2).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    eos = torch.tensor(eos_token_ids, device=completion_ids.device)
    is_eos = torch.isin(completion_ids, eos).long()
    num_before = is_eos.cumsum(1) - is_eos  # EOS tokens before each position
    return num_before == 0


def group_advantages(rewards, num_generations, scale_rewards="group", eps=1e-8):
    """(r - mean of its group) / (std of its group + eps): rewards (N,) -> (N,).
    DeepSeekMath 4.1.2, with the unbiased std; `scale_rewards` "none" does not divide
    (Dr. GRPO, arXiv:2503.20783). Raises ValueError unless G >= 2 divides N.
    >>> group_advantages(torch.tensor([1.0, 0, 0, 1, 0.1, 0.1, 0.1, 0.1]), 4)
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660,  0.0000,  0.0000,  0.0000,  0.0000])
    """
    if num_generations < 2 or len(rewards) % num_generations:
        raise ValueError(f"{len(rewards)} rewards are no groups of {num_generations}")
    groups = 1.0 * rewards.reshape(-1, num_generations)  # (B, G); also of integers
    # Equal rewards must have advantages of exactly 0; by rounding of their mean, eight
    # of 0.1 would have -0.4. Less the group's first reward, they are exact zeros.
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
    Level "sequence" has one ratio for a completion: exp of the mean of logp - old_logp
    over its tokens, those in `mask` (None: all). GSPO, arXiv:2507.18071, eq. 7."""
    log_ratio = logp - old_logp
    if importance_sampling_level == "sequence":
        mask = torch.ones_like(log_ratio) if mask is None else mask
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
    Over tokens sampled from the policy its mean is KL(policy, reference); logp -
    ref_logp has the same mean but varies more. DeepSeekMath eq. 4; Schulman's k3 in
    joschu.net/blog/kl-approx.html. Give it float32: bfloat16 rounds small d away.
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
    """DeepSeekMath eq. 3 -> (scalar to minimise, metrics: means over tokens).
    logp, old_logp, ref_logp: (N, C) float32 in nats; mask: (N, C); advantages: (N,) or
    (N, C). old_logp None: the policy has not moved since it sampled. ref_logp None: no
    KL. The loss of a token is beta k3 - surrogate; `loss_type` says how to average:
        grpo     mean over sequences of the mean over their tokens
        dapo     sum over tokens / num_tokens
        dr_grpo  sum over tokens / (num_sequences * max_completion_length)
    num_sequences and num_tokens (None: of this call) are those of the whole optimizer
    batch, if this call has a part of it: so losses add up. max_completion_length is C
    if None. Masked places may hold anything, even NaN."""
    mask = mask.bool()
    logp = logp.masked_fill(~mask, 0)
    # exp(logp - logp.detach()) is exactly 1, and its gradient is that of logp.
    old_logp = (logp if old_logp is None else old_logp).detach().masked_fill(~mask, 0)
    advantages = advantages.reshape(len(mask), -1)  # (N, 1) or (N, C)
    advantages = advantages.where(mask, 0)  # (N, C)
    ratio = importance_ratio(logp, old_logp, mask, importance_sampling_level)
    surrogate = clipped_surrogate(ratio, advantages, epsilon, epsilon_high)
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        kl = kl_k3(logp, ref_logp.detach().masked_fill(~mask, 0))
    per_token_loss = beta * kl - surrogate  # (N, C), 0 where masked: A is 0, k3 is 0
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
        clip_fraction=surrogate < ratio * advantages,  # the min is the clipped term
    )
    return loss, {name: masked_mean(x.detach(), mask) for name, x in values.items()}


# --------------------------------------------------------------- samples and log-probs
def forward(model, ids, attention_mask, cache=None, **options):
    """Run ids (N, L) after the K tokens that `cache` holds, and add them to it.
    attention_mask: (N, K + L). Positions do not count padding on the left."""
    if cache is not None and model.training:
        raise ValueError("call model.eval(): gradient checkpointing drops the cache")
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
    """One token of each row from softmax(logits / temperature): (N, V) -> (N,).
    At temperature 0 the most probable one. Inverse transform sampling takes one random
    number a row; `torch.multinomial` draws V of them, which is slow."""
    if temperature == 0:
        return logits.argmax(1)
    probs = (logits.float() / temperature).softmax(1)  # (N, V)
    cdf = probs.cumsum(1, dtype=torch.float64)  # float32: none below 1e-7 is ever drawn
    draws = torch.rand_like(cdf[:, :1]) * cdf[:, -1:]
    ids = torch.searchsorted(cdf, draws, right=True)[:, 0]  # the first cdf > draw
    return ids.clamp(max=logits.shape[1] - 1)  # NaN would give V, which is no token


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
    prompt_ids, prompt_mask: (B, P), left-padded. C is `max_completion_length`. A row
    ends with one of `eos_token_ids`, an id or a list, and is filled up with the first
    of them. Temperature 0 is greedy. The model, in eval mode, samples from its whole
    distribution: its generation config (top-k, …) is not read."""
    if not prompt_mask[:, -1].all():
        raise ValueError("prompts must be padded on the left")
    eos = torch.tensor(eos_token_ids, device=prompt_ids.device).view(-1)
    num_completions = len(prompt_ids) * num_generations
    completion_ids = eos[0].repeat(num_completions, max_completion_length)  # (N, C)
    # Each prompt runs once. Its cache and its logits are copied for its G completions.
    cache = DynamicCache(config=model.config)
    logits = forward(model, prompt_ids, prompt_mask, cache, logits_to_keep=1).logits
    prompt_of = torch.arange(num_completions, device=eos.device) // num_generations
    cache.reorder_cache(prompt_of)  # takes these rows: B become N
    logits = logits[prompt_of]  # (N, 1, V)
    # The completions that go on; logits and cache have a row for each of these.
    live = torch.arange(num_completions, device=eos.device)
    for i in range(max_completion_length):
        tokens = sample(logits[:, -1], temperature)
        completion_ids[live, i] = tokens
        going_on = ~torch.isin(tokens, eos)  # (num live,)
        if not going_on.any() or i == max_completion_length - 1:
            break
        if not going_on.all():  # the finished ones leave the batch
            live = live[going_on]
            cache.reorder_cache(going_on.nonzero()[:, 0])
        mask = prompt_mask[prompt_of[live]]
        mask = F.pad(mask, (0, i + 1), value=True)  # (num live, P + i + 1)
        ids = completion_ids[live, i : i + 1]
        logits = forward(model, ids, mask, cache, logits_to_keep=1).logits
    return completion_ids


def token_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, mask, temperature=1.0
):
    """log-prob of each completion token given all before it: (N, C) float32, 0 where
    masked. prompt_ids, prompt_mask: (B, P), left-padded; completion_ids, mask: (N, C),
    the mask as by `completion_mask`; masked ids, too, must be tokens. The logits are
    divided by `temperature`, as in sampling. model: a causal LM of transformers in eval
    mode (no dropout). Each prompt runs G times, and all logits, (N, C, V), are held in
    memory, also in float32. `shared_logprobs` does better."""
    if not prompt_mask[:, -1].all():
        raise ValueError("prompts must be padded on the left")
    mask = mask.bool()
    num_generations = len(mask) // len(prompt_ids)
    prompt_ids = prompt_ids.repeat_interleave(num_generations, dim=0)  # (N, P)
    prompt_mask = prompt_mask.repeat_interleave(num_generations, dim=0)
    ids = torch.cat([prompt_ids, completion_ids], 1)  # (N, P + C)
    attention_mask = torch.cat([prompt_mask, mask], 1)
    # The output at each token predicts the next one:
    #     at         p2   c0   c1   c2     of a prompt p0 p1 p2, with C = 3
    #     predicts   c0   c1   c2   -      so the last of C + 1 outputs is left out
    keep = mask.shape[1] + 1
    logits = forward(model, ids, attention_mask, logits_to_keep=keep).logits[:, :-1]
    logits = (logits.float() / temperature).transpose(1, 2)  # (N, V, C)
    logp = -F.cross_entropy(logits, completion_ids, reduction="none")  # (N, C)
    return logp.masked_fill(~mask, 0)


# ---------------------------------------------------------------------------- one step
@dataclasses.dataclass
class Batch:
    """Completions and their prompts: a rollout, or a part of one."""

    prompt_ids: torch.Tensor  # (B, P), left-padded
    prompt_mask: torch.Tensor  # (B, P), bool
    completion_ids: torch.Tensor  # (N, C), right-padded
    mask: torch.Tensor  # (N, C), bool: up to and including the first EOS
    advantages: torch.Tensor | None = None  # (N, C); None: not scored yet
    ref_logp: torch.Tensor | None = None  # (N, C), log-probs of the reference
    old_logp: torch.Tensor | None = None  # (N, C), of the policy before any update


def train_step(run, train_rows, step):
    """One step of GRPO on B of the rows of data -> its metrics, and `Scores` to log.
    Of `run` it uses `config` (the options), `num_prompts` (B), `policy`, `reference`
    (models), `tokenizer`, `eos_token_ids`, `rewards` (functions and their weights),
    `logprobs` (`token_logprobs`, or a faster one), `without_adapters` (a context, for
    LoRA) and `optimizer` (`MasterAdamW`, which is AdamW)."""
    config = run.config
    num_generations = config.num_generations
    set_seed(config.seed, step)
    start = time.perf_counter()

    # 1. take B prompts
    rows = prompt_batch(train_rows, step, run.num_prompts, config.seed)

    # 2. sample G completions of each from the current policy: a `Batch`
    batch = rollout(run, rows, num_generations, config.temperature)

    # 3. score them
    scores = score_completions(run, rows, batch)
    # (N,) weighted sums, made in float64. As float32, 0.1 + 0.2 is equal to 0.3.
    rewards = scores.outcome.float()

    # 4. normalise them within each group
    advantages = group_advantages(rewards, num_generations, config.scale_rewards)
    # A completion's advantage becomes that of each of its tokens: (N, C).
    batch.advantages = scores.for_each_token(advantages).to(DEVICE)
    rollout_end = time.perf_counter()

    # 5. minimise -min(ratio A, clip(ratio) A) + beta KL
    learning_rate = config.learning_rate * min(1, step / (config.warmup_steps or 1))
    metrics = update(run, batch, learning_rate)
    end = time.perf_counter()

    # 6. measure it
    measured = dict(  # name: (N,) or (B,), of which the mean is logged
        scores.logged,  # "reward", and the rewards by each function
        reward_std=scores.logged["reward"].view(-1, num_generations).std(1),
        zero_std_fraction=~batch.advantages.view(run.num_prompts, -1).any(1),
        completion_length=batch.mask.sum(1),
        truncated_fraction=~torch.tensor(scores.columns["finished"]),  # by an EOS
    )
    for name, values in measured.items():
        metrics[name] = values.double().mean().item()
    metrics["learning_rate"] = learning_rate
    metrics["rollout_seconds"] = rollout_end - start
    metrics["update_seconds"] = end - rollout_end
    metrics["step_seconds"] = end - start
    metrics["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30  # 0 on a CPU
    return metrics, scores


def prompt_batch(rows, step, size, seed):
    """The `size` rows of a step. An epoch is shuffled, and drops what is left over."""
    if len(rows) < size:
        raise Error(f"--prompts-per-step: only {len(rows)} rows fit, not {size}")
    epoch, i = divmod(step - 1, len(rows) // size)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(rows), generator=generator)
    return [rows[j] for j in order.split(size)[i]]


def rollout(run, rows, num_generations, temperature):
    """Completions of B rows of data, sampled from the policy: a `Batch`."""
    prompt_ids, mask = pad([row["prompt_ids"] for row in rows], "left")
    length, eos = run.config.max_completion_length, run.eos_token_ids
    ids = generate(
        run.policy, prompt_ids, mask, num_generations, length, eos, temperature
    )
    return Batch(prompt_ids, mask, ids, completion_mask(ids, eos))


def score_completions(run, rows, batch):
    """Let each reward function judge a batch -> `Scores` (in the room "rewards"):
    `columns` (what functions get: prompts, completions and what the data has),
    `outcome` (N,) (weighted sums of rewards) and `logged` (rewards for the log)."""
    scores = Scores(run, rows, batch)
    for name, (function, weight) in run.rewards.items():
        scores.add(name, function, weight)
    return scores


def update(run, batch, learning_rate):
    """num_iterations (mu) AdamW steps, each on the whole rollout -> metrics, most as
    means over tokens. Unlike PPO's minibatches, micro-batches only add up the gradient
    of one step. With one iteration the ratio is exactly 1."""
    config = run.config
    # Parts that fit into memory, without groups that have no gradient.
    parts = micro_batches(run, batch)
    reference_logprobs(run, parts)
    metrics = defaultdict(float)
    metrics["num_tokens"] = sum(all_gather(batch.mask.sum().item()))  # of all ranks
    # Gradients will be averaged over ranks (processes). Their sums over tokens are to
    # be divided by the tokens of all: so each rank divides by (tokens of all) / ranks.
    # Ranks have equally many sequences: each divides by its own number of them.
    num_tokens = metrics["num_tokens"] / WORLD_SIZE
    sizes = [part.mask.sum().item() for part in parts]  # in tokens
    for _ in range(config.num_iterations):
        for part, size in zip(parts, sizes):
            logp = batch_logprobs(run, run.policy, part)
            loss, means = grpo_loss(
                logp,
                part.old_logp,  # None in the first iteration
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
            if part.old_logp is None:  # no update has been made yet
                part.old_logp = logp.detach()
            metrics["loss"] += loss.item() / config.num_iterations  # these add up
            for name, mean in means.items():
                weight = size / sum(sizes) / config.num_iterations
                metrics[name] += weight * mean.item()
        # This clips and frees the gradient, and skips one that is not finite.
        metrics["grad_norm"] = run.optimizer.step(learning_rate, config.max_grad_norm)
        metrics["skipped"] += not math.isfinite(metrics["grad_norm"])
    return metrics


def reference_logprobs(run, parts):
    """Give each part the log-probs of the frozen reference, if there is a KL term. With
    LoRA the reference is the policy without its adapters."""
    if run.reference is not None:
        with torch.no_grad(), run.without_adapters():
            for part in parts:
                part.ref_logp = batch_logprobs(run, run.reference, part)


def batch_logprobs(run, model, batch):
    """log-probs of a batch's completions by one of the run's models: (N, C)."""
    return run.logprobs(
        model,
        batch.prompt_ids,
        batch.prompt_mask,
        batch.completion_ids,
        batch.mask,
        run.config.temperature,
    )


# Here ends what one reads to learn GRPO. What follows makes it fast, and a program.


# -------------------------------------------------------------------- the same, faster
def shared_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, mask, temperature=1.0
):
    """`token_logprobs`, the same numbers and gradients, in less time and memory. Each
    prompt runs once. Its G completions go on from copies of its keys and values,
    through which gradients flow. The logits are never all in memory at once."""
    if not prompt_mask[:, -1].all():
        raise ValueError("prompts must be padded on the left")
    mask = mask.bool()
    length = mask.shape[1]
    num_generations = len(mask) // len(prompt_ids)
    prompt_of = torch.arange(len(mask), device=mask.device) // num_generations  # (N,)
    cache = PromptCache(config=model.config)
    first = hidden_states(model, prompt_ids, prompt_mask, cache, keep=1)  # (B, 1, H)
    cache.is_complete = True  # it stores no more states of recurrent layers
    cache.reorder_cache(prompt_of)  # takes these rows: B become N
    # A completion's last token predicts nothing, and is left out. But at least two run:
    # recurrent layers (Mamba) run a single token by a kernel that has no backward.
    num_inputs = max(2, length - 1)
    inputs = F.pad(completion_ids, (0, 1))[:, :num_inputs]  # padded for a length of 1
    # Padding on the right needs no mask: no earlier token sees it.
    attention_mask = F.pad(prompt_mask[prompt_of], (0, num_inputs), value=True)
    later = hidden_states(model, inputs, attention_mask, cache, keep=num_inputs)
    hidden = torch.cat([first[prompt_of], later], 1)  # (N, 1 + num_inputs, H)
    hidden = hidden[:, :length][mask]  # (M, H): what predicts an unmasked token
    weight = model.get_output_embeddings().weight  # (V, H); see `shard`
    logp = ChunkedLogprobs.apply(hidden, weight, completion_ids[mask], temperature)
    return logp.new_zeros(mask.shape).masked_scatter(mask, logp)


class PromptCache(DynamicCache):
    """A cache in which recurrent layers (Mamba) store their states after the prompts,
    but no later ones: these would overwrite what backward still needs."""

    is_complete = False  # True once the prompts have run

    def update_recurrent_state(self, states, *args, **options):
        """transformers stores a layer's states by this, and goes on with its result."""
        if self.is_complete:
            return states
        return super().update_recurrent_state(states, *args, **options)


def hidden_states(model, ids, attention_mask, cache, keep):
    """The last `keep` hidden states of each row, without logits: (N, keep, H). A hook
    takes them as the input of the output layer, which then gets an empty one. (To call
    the model's body alone would not gather the weights of FSDP.)"""
    hidden = []

    def take(layer, inputs):
        hidden.append(inputs[0])
        return inputs[0][:, :0]  # no tokens

    with model.get_output_embeddings().register_forward_pre_hook(take):
        forward(model, ids, attention_mask, cache, logits_to_keep=keep)
    return hidden[0]


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature) at the targets -> (M,) float32.
    hidden: (M, H); weight: (V, H); targets: (M,). The logits of v words of the V are in
    memory at a time, and are computed again in backward."""

    logits_at_once = 2**25 if ON_GPU else 2**19  # M*v; 2**19 fit into a CPU's cache

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        num_words = ChunkedLogprobs.logits_at_once // max(1, len(hidden))
        ctx.num_words = max(64, num_words // 64 * 64)  # v: GPUs like multiples of 64
        ctx.temperature = temperature
        log_z = hidden.new_full((len(hidden),), -math.inf, dtype=torch.float32)
        for words in weight.split(ctx.num_words):  # (v, H)
            logits = (hidden @ words.t()).float().div_(temperature)  # (M, v)
            log_z = log_z.logaddexp(logits.logsumexp(1))  # of all words so far
        # The targets' logits. Like those above they are rounded once, after the sum
        # over H. (hidden * weight).sum() would round its terms, and logp exceed 0.
        logit = torch.einsum("mh,mh->m", hidden, weight[targets]).float() / temperature
        ctx.save_for_backward(hidden, weight, targets, log_z)
        return logit - log_z

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, targets, log_z = ctx.saved_tensors
        grad = grad[:, None] / ctx.temperature  # (M, 1)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        needs_weight = ctx.needs_input_grad[1]  # not if the layer is frozen (LoRA)
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        for start in range(0, len(weight), ctx.num_words):
            words = weight[start : start + ctx.num_words]  # (v, H)
            logits = (hidden @ words.t()).float().div_(ctx.temperature)  # (M, v)
            softmax = logits.sub_(log_z[:, None]).exp_()
            ids = torch.arange(start, start + len(words), device=weight.device)
            one_hot = (targets[:, None] == ids).float()
            # Subtracted in float32: in bfloat16 a softmax of 0.999 is 1, which gives 0.
            grad_logits = (grad * (one_hot - softmax)).to(words.dtype)
            grad_hidden += grad_logits @ words
            if needs_weight:
                words_grad = grad_weight[start : start + ctx.num_words]  # a view
                words_grad.addmm_(grad_logits.t(), hidden)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


def choose_logprobs(model):
    """`shared_logprobs` if it is right for this model, else `token_logprobs`; says
    which. Log-probs and gradients of two completions are compared with those of plain
    forward passes in float32. ValueError if neither agrees, or if sampling does not."""
    prompts = [2, 3, 4, 2, 3], [5, 6]  # only the second is padded
    prompt_ids, prompt_mask = pad(prompts, "left")
    length, no_eos = 8, -1  # both completions have 8 tokens
    ids, error = attempt(
        generate, model, prompt_ids, prompt_mask, 1, length, no_eos, temperature=0
    )
    if error:
        raise ValueError(f"it cannot be sampled: {error}")
    logits = []
    for prompt, completion in zip(prompts, ids):
        tokens = torch.tensor([[*prompt, *completion]], device=DEVICE)
        logits.append(model(tokens).logits[0, -length - 1 : -1])
    logits = torch.stack(logits)  # (2, C, V), which predict the completions
    check_sampling(ids, logits)
    weight = model.get_input_embeddings().weight  # its gradient depends on all layers
    logp = -F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    expected = [logp, *torch.autograd.grad(logp.sum(), weight)]

    def results(logprobs):
        logp = logprobs(model, prompt_ids, prompt_mask, ids, torch.ones_like(ids))
        return [logp, *torch.autograd.grad(logp.sum(), weight)]

    candidates = [shared_logprobs, token_logprobs]
    # A cap on logits shows only where these are large. So an option of such a name
    # (final_logit_softcapping) rules `shared_logprobs` out, unless None, 0 or 1.
    for option, value in vars(model.config).items():
        if re.search("logit|lm_head", option) and value not in (None, 0, 1):
            candidates = [token_logprobs]
    for logprobs in candidates:
        found, error = attempt(results, logprobs)
        if error:
            print0(f"not by {logprobs.__name__}: {error}")
        elif all((x - y).norm() <= 1e-3 * y.norm() for x, y in zip(found, expected)):
            print0(f"log-probs by {logprobs.__name__}")
            return logprobs
    raise ValueError("its log-probs differ from those without padding")


def check_sampling(ids, logits):
    """Raise ValueError unless two greedy completions, (2, C), are the best tokens by
    plain logits, (2, C, V). Only the second prompt is padded."""
    for tokens, best, cause in zip(ids, logits.argmax(2), ("its cache", "padding")):
        if not torch.equal(tokens, best):
            raise ValueError(f"{cause} changes what it samples")


def attempt(function, *args, **options):
    """(result, None), or (None, error) where the model lacks such a cache or layer."""
    try:
        return function(*args, **options), None
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # these RuntimeErrors say nothing of the model
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        return None, error


# ------------------------------------------------------------ the same, in less memory
def micro_batches(run, batch):
    """The groups of a batch that have a gradient, in parts that fit. To save padding,
    the completions of a prompt are sorted by length, and prompts by their longest."""
    lengths = batch.mask.sum(1).tolist()
    groups = groups_with_gradient(run, batch)
    for group in groups:
        group.sort(key=lambda i: lengths[i])
    groups.sort(key=lambda group: lengths[group[-1]])
    parts = split_to_fit(run, batch, groups)
    return parts + fillers(parts)


def groups_with_gradient(run, batch):
    """The indices of each prompt's completions: a list of lists. Without a KL term only
    of groups whose advantages are not all 0, but of one at least, to run backward."""
    groups = torch.arange(len(batch.mask)).view(len(batch.prompt_ids), -1).tolist()
    if run.reference is None:
        moving = [group for group in groups if batch.advantages[group].any()]
        groups = moving or groups[:1]
    return groups


def split_to_fit(run, batch, groups):
    """These groups in parts of at most `micro_batch_tokens`, padding included, or of a
    single completion. groups: lists of indices of the batch's completions; those of a
    list have one prompt, and all lists are equally long."""
    indices = [i for group in groups for i in group]
    num_generations = len(batch.mask) // len(batch.prompt_ids)
    prompts = [group[0] // num_generations for group in groups]
    prompt_length = int(batch.prompt_mask[prompts].sum(1).max())  # of the longest
    length = int(batch.mask[indices].sum(1).max())
    num_tokens = len(prompts) * prompt_length + len(indices) * length
    if run.logprobs is token_logprobs:  # it repeats prompts and holds all logits
        # A rough estimate: 65,536 logits take as much memory as a token in the layers.
        tokens_each = 1 + run.policy.config.vocab_size / 2**16
        num_tokens = len(indices) * (prompt_length + tokens_each * length)
    if num_tokens <= run.config.micro_batch_tokens or len(indices) == 1:
        part = Batch(  # without padding that none of these needs
            batch.prompt_ids[prompts, -prompt_length:],
            batch.prompt_mask[prompts, -prompt_length:],
            batch.completion_ids[indices, :length],
            batch.mask[indices, :length],
            batch.advantages[indices, :length],
        )
        return [part]
    if len(groups) == 1:  # completions of one prompt become two groups, for two parts
        middle = len(indices) // 2
        groups = [indices[:middle], indices[middle:]]
    middle = len(groups) // 2
    first = split_to_fit(run, batch, groups[:middle])
    return first + split_to_fit(run, batch, groups[middle:])


def fillers(parts):
    """Parts without effect for a rank that has fewer than others, as all must take part
    in each pass (FSDP): its first part, with all tokens masked."""
    filler = dataclasses.replace(parts[0], mask=torch.zeros_like(parts[0].mask))
    return [filler] * (max(all_gather(len(parts))) - len(parts))


class MasterAdamW:
    """torch's AdamW (arXiv:1711.05101; weight decay 0) on float32 masters: a bfloat16
    weight does not change when less than 1/512 of it is added.

        weights     their masters                  weights are rounded masters
        float32     the weights themselves         at any time
        bfloat16    float32 copies                 after each update
        of FSDP     this rank's float32 shards     when the model is called
    """

    def __init__(self, model, dtype):
        """model: in float32 still. dtype: of the weights when the model runs."""
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.masters = []
        for param in self.params:
            if isinstance(param, DTensor):
                master = param.detach().to_local()  # shares the shard's memory
                if dtype == torch.bfloat16:
                    master.copy_(within_cell(master))
            elif dtype == torch.bfloat16:
                master = within_cell(param.detach())
            else:
                master = param.detach()  # shares the weight's memory
            self.masters.append(master)
            # Gradients of bfloat16 weights too add up in float32, which loses none.
            param.grad_dtype = torch.float32
        self.adamw = torch.optim.AdamW(self.masters, weight_decay=0.0, fused=True)
        # Have weights moved since the last finished training step? Then none is saved.
        self.has_moved = False

    def step(self, learning_rate, max_grad_norm):
        """Clip the gradient to the norm `max_grad_norm` (0: do not), move the masters
        and round the weights to them. If the norm is not finite nothing moves. Frees
        the gradient. Returns its norm before clipping, over all ranks."""
        for param, master in zip(self.params, self.masters):
            master.grad = local_shard(param.grad)
            param.grad = None
        grads = [master.grad for master in self.masters if master.grad is not None]
        # The norm over all ranks: the root of the sum of the squares of theirs.
        norm = math.hypot(*all_gather(get_total_norm(grads).item()))
        if math.isfinite(norm):
            self.has_moved = True
            limit = max_grad_norm or math.inf
            clip_grads_with_norm_(self.masters, limit, torch.tensor(norm))
            self.adamw.param_groups[0]["lr"] = learning_rate
            self.adamw.step()
            self.round_weights()
        self.adamw.zero_grad()
        return norm

    def round_weights(self):
        """Give each weight the value of its master."""
        for param, master in zip(self.params, self.masters):
            local_shard(param.detach()).copy_(master)  # a float32 weight: onto itself


def within_cell(weight):
    """Float32 masters of bfloat16 weights, each at a random place in its weight's cell:
    the numbers that bfloat16 rounds to the weight.
    Near 0.02, bfloat16 numbers are 1.2e-4 apart. A master that begins at one of them
    needs 60 updates of 1e-6 before it rounds to the next, and its weight moves. When
    masters begin anywhere in their cells, each update takes some into the next."""
    # bfloat16 has 8 significant bits. So from 2**(exponent - 1) to 2**exponent its
    # numbers are 2**(exponent - 8) apart, and a cell is half of that to either side.
    exponent = torch.frexp(weight).exponent
    near = weight + torch.ldexp(torch.rand_like(weight) - 0.5, exponent - 8)
    # Where that is not in the cell (the weight is 0, or a power of 2, whose cell is
    # smaller on one side, or has more than 8 bits) the master begins at the weight.
    return torch.where(near.bfloat16() == weight, near, weight)


def cast(model, dtype):
    """Round a model's weights to `dtype`, but neither its buffers, as `model.to` would,
    nor shards (FSDP), which are rounded as the model is called."""
    for param in model.parameters():
        if not isinstance(param, DTensor):
            param.data = param.data.to(dtype)


# ---------------------------------------------------------------------------- training
class Error(Exception):
    """A mistake of the user, or the end of a run: `main` prints it in one line."""


class Stop(Error):
    """An `Error` that all ranks raise together, so that they can save."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Every option of a run: the command line is made from it, --help from comments."""

    # model and data
    model: str = "tiny"  # Hub name or folder of a causal language model
    data: str = ""  # JSONL file or Hub data set NAME[:CONFIG[:SPLIT]]; else sums
    eval_data: str = ""  # held-out prompts; else a tenth of the data, at most 64
    reward: tuple = ("accuracy",)  # accuracy, math, format, FILE.py:FUNCTION; =WEIGHT
    chat_template: Literal["auto", "on", "off"] = "auto"  # auto: if the model knows it
    prompt_template: str = ""  # around {question}; else accuracy, math ask for \boxed{}
    system_prompt: str = ""  # system message of prompts that have none
    dtype: Literal["bfloat16", "float32"] = DTYPE  # of weights; optimised in float32
    # sampling
    num_generations: int = 8  # G, completions sampled for each prompt
    prompts_per_step: int = 8  # of a step, over all ranks
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
    eval_every: int = 50  # steps between evaluations, with samples logged; 0: none
    save_every: int = 100  # steps between checkpoints, one is kept; 0: only the last
    report_to: Literal["", "wandb", "trackio"] = ""  # a tracker that gets the metrics

    def __post_init__(self):
        at_least = dict(prompts_per_step=1, num_generations=2, num_iterations=1)
        at_least.update(max_completion_length=1, temperature=1e-9)
        for name, value in vars(self).items():
            least = at_least.get(name, 0)
            if isinstance(value, (int, float)) and not least <= value < math.inf:
                name = name.replace("_", "-")
                raise Error(f"--{name} must be finite and at least {least}")
        if self.prompt_template and "{question}" not in self.prompt_template:
            raise Error("--prompt-template must contain {question}")
        if WORLD_SIZE > 1 and (self.lora_rank or self.prompts_per_step % WORLD_SIZE):
            raise Error("processes must divide --prompts-per-step; LoRA takes only one")


class Run:
    """The state of a run, and after `load` its models, ready to be trained."""

    def __init__(self, config):
        self.config = config
        self.num_prompts = config.prompts_per_step // WORLD_SIZE  # B, of this rank
        self.rewards = {}  # name: (reward function, weight)
        # Its folder; a new run has none until `claim` makes it.
        self.output_dir = Path(config.resume) if config.resume else None
        self.tracker = None  # wandb or trackio
        self.step = 0  # the last one that is finished
        self.saved_step = 0  # the last one with a checkpoint
        self.signal = ""  # SIGINT or SIGTERM, once this rank has got one

    def load(self, name):
        """Load the policy and its reference. name: of the model, or its folder."""
        config = self.config
        dtype = getattr(torch, config.dtype)
        try:
            model, self.tokenizer, self.eos_token_ids = load_model(name, config.seed)
            self.logprobs = choose_logprobs(model)
        except ValueError as error:  # the model is unknown, or cannot be trained here
            raise Error(f"--model {name}: {error}") from error
        set_seed(config.seed, 0)  # adapters and masters (`within_cell`) begin at random
        self.adapters = None  # peft's wrapper of the policy; None: no LoRA
        self.without_adapters = contextlib.nullcontext  # does nothing
        if config.lora_rank:
            import peft

            r = config.lora_rank  # the name of arXiv:2106.09685
            lora = peft.LoraConfig(r=r, lora_alpha=2 * r, target_modules="all-linear")
            self.adapters = peft.get_peft_model(model, lora)  # changes `model` itself
            self.without_adapters = self.adapters.disable_adapter
        # First shards, then their masters, both in float32, and then `cast`.
        shard(model, dtype, stay_whole=True)
        self.optimizer = MasterAdamW(model, dtype)
        cast(model, dtype)
        self.policy = model
        self.reference = None  # no KL
        if config.beta and config.lora_rank:
            self.reference = model  # without its adapters
        elif config.beta:
            self.reference = load_model(name, config.seed)[0]
            shard(self.reference, dtype, stay_whole=False)
            cast(self.reference, dtype)
        print0(f"{name}: {model.num_parameters():,} weights, {dtype}, {DEVICE}")


def train(config):
    """GRPO from the first prompt to the last checkpoint."""
    join_ranks()
    run = Run(config)
    with save_at_the_end(run):
        train_rows, eval_rows = set_up(run)
        restore(run)
        steps = range(run.step + 1, config.max_steps + 1)
        bar = tqdm(steps, initial=run.step, total=config.max_steps, disable=RANK > 0)
        if config.eval_every and run.step == 0:
            evaluate(run, eval_rows)
        for step in bar:
            stop_at_a_signal(run)
            metrics, scores = train_step(run, train_rows, step)
            is_last = step == config.max_steps
            is_due = config.eval_every and (is_last or step % config.eval_every == 0)
            samples = scores if is_due or step == 1 else None
            metrics = log_metrics(run, step, metrics, samples)
            run.step = step
            run.optimizer.has_moved = False  # this step may be saved
            bar.set_postfix(reward=metrics["reward"], kl=metrics["kl"])
            if metrics["skipped"]:
                print0(f"step {step}: a gradient is not finite, its update is skipped")
            if is_due:
                evaluate(run, eval_rows)
            if is_last or config.save_every and step % config.save_every == 0:
                save(run)
    if run.tracker:
        run.tracker.finish()


def stop_at_a_signal(run):
    """Raise `Stop` on all ranks if one has got a signal."""
    signals = [name for name in all_gather(run.signal) if name]
    if signals:
        raise Stop(f"{signals[0]} after step {run.step}.")


@contextlib.contextmanager
def save_at_the_end(run):
    """Save the last finished step of a run that ends early, and say how to go on.
    SIGINT and SIGTERM let a step finish."""

    def note(number, frame):
        run.signal = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"stopping after this step; again to stop at once\n")

    handlers = {x: signal.signal(x, note) for x in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except BaseException as error:
        # Saving takes all ranks; any other error may be that of a single one.
        if WORLD_SIZE == 1 or isinstance(error, Stop):
            save(run)
        if isinstance(error, torch.OutOfMemoryError):
            error.add_note("A smaller --micro-batch-tokens takes less memory.")
        if run.output_dir:
            error.add_note(f"Go on with --resume {run.output_dir}")
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def set_up(run):
    """Load the run's models -> this rank's rows to train on and to evaluate."""
    config = run.config
    if config.output_dir and not config.resume:
        check_empty(Path(config.output_dir))
    if config.report_to and RANK == 0:
        run.tracker = importlib.import_module(config.report_to)
    run.rewards = load_rewards(config.reward)
    if config.data:
        rows = read_rows(config.data, needs_answers(config))
    else:
        rows = arithmetic(config.model, config.seed)
    if config.eval_data:
        eval_rows = read_rows(config.eval_data, needs_answers(config))
    else:
        random.Random(config.seed).shuffle(rows)
        num_held_out = min(64, len(rows) // 10)
        eval_rows, rows = rows[:num_held_out], rows[num_held_out:]
    # GRPO and its reference start from what the supervised steps leave.
    run.load(sft(run, rows) if config.sft_steps else config.model)
    rows, eval_rows = encode_prompts(rows, run), encode_prompts(eval_rows, run)
    return share_of_rank(rows), share_of_rank(eval_rows)


def sft(run, rows):
    """Supervised steps on the rows' solutions -> the model's folder, OUTPUT_DIR/sft.
    With advantage 1, ratio 1 and no KL, the loss of GRPO has the gradient of -logp."""
    if run.output_dir and (run.output_dir / "sft").exists():  # made before resuming
        return f"{run.output_dir}/sft"
    config = dataclasses.replace(run.config, beta=0, num_iterations=1, temperature=1.0)
    pupil = Run(config)  # for its models and optimizer alone
    pupil.load(config.model)
    examples = []  # token ids of prompt and solution
    for row in encode_prompts(rows, pupil):
        solution = row.get("solution") or row["answer"]
        text = "" if solution is None else str(solution)
        ids = pupil.tokenizer.encode(text, add_special_tokens=False)
        if 0 < len(ids) < config.max_completion_length:
            examples.append((row["prompt_ids"], ids + pupil.eos_token_ids[:1]))
    examples = share_of_rank(examples)
    for step in tqdm(range(1, config.sft_steps + 1), "supervised", disable=RANK > 0):
        stop_at_a_signal(run)
        chosen = prompt_batch(examples, step, run.num_prompts, config.seed)
        claim(run)  # in the first step; a mistake before it leaves no folder
        prompt_ids, prompt_mask = pad([prompt for prompt, _ in chosen], "left")
        ids, mask = pad([solution for _, solution in chosen], "right")
        advantages = torch.ones(mask.shape, device=DEVICE)
        batch = Batch(prompt_ids, prompt_mask, ids, mask, advantages)
        if update(pupil, batch, config.sft_learning_rate)["skipped"]:
            raise Error("a gradient of the supervised steps is not finite")
    return write_folder(pupil, run.output_dir / "sft")


def evaluate(run, rows):
    """Log and print mean rewards of greedy completions of the held-out rows."""
    size = run.num_prompts * run.config.num_generations  # as many as in training
    sums = defaultdict(float)
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        batch = rollout(run, some, num_generations=1, temperature=0)
        for name, values in score_completions(run, some, batch).logged.items():
            sums[f"eval/{name}"] += values.sum().item() / len(rows)
    if rows:
        means = log_metrics(run, run.step, sums)
        print0(f"step {run.step}: greedy held-out reward {means['eval/reward']:.2f}")


def log_metrics(run, step, metrics, scores=None):
    """Log metrics in metrics.jsonl and by the tracker, and `Scores`, if any, in
    completions.jsonl. Returns the metrics' means over ranks, which are logged."""
    claim(run)  # makes the run's folder, the first time
    ranks = all_gather(metrics)
    means = {name: sum(x[name] for x in ranks) / WORLD_SIZE for name in metrics}
    if RANK > 0:
        return means
    # JSON has no NaN.
    row = {name: x if math.isfinite(x) else None for name, x in means.items()}
    with open(run.output_dir / "metrics.jsonl", "a") as file:
        print(json.dumps(dict(row, step=step)), file=file)
    if run.tracker:
        run.tracker.log(row, step=step)
    if scores:
        columns = dict(scores.columns, step=[step] * len(scores.outcome))
        for name, values in scores.logged.items():
            columns[name] = values.tolist()
        with open(run.output_dir / "completions.jsonl", "a") as file:
            for values in zip(*columns.values()):
                print(json.dumps(dict(zip(columns, values)), default=str), file=file)
        print0(f"{columns['completions'][0]!r} has the reward {columns['reward'][0]}")
    return means


def set_seed(seed, step):
    """Seed a step on this rank. So a resumed run draws the same numbers again."""
    transformers.set_seed((seed * 1_000_003 + step * WORLD_SIZE + RANK) % 2**32)


# -------------------------------------------------------------------- data and prompts
def read_rows(source, need_answers):
    """Rows (dicts) of a JSONL file, or of the Hub data set NAME[:CONFIG[:SPLIT]], with
    "prompt" (text or chat; also `question`, `problem`), "answer" (also `solution`) and
    other columns for the reward functions. `Error` names the first wrong line."""
    if ".json" in source or Path(source).is_file():  # a file, or one that is missing
        records = Path(source).read_bytes().splitlines()
    else:
        import datasets

        name, _, rest = source.partition(":")
        config, _, split = rest.partition(":")
        records = datasets.load_dataset(name, config or None, split=split or "train")
    rows = []
    for number, record in enumerate(records, 1):
        if isinstance(record, bytes) and not record.strip():
            continue
        try:
            row = json.loads(record) if isinstance(record, bytes) else record
            prompt = row.get("prompt") or row.get("question") or row.get("problem")
            as_messages(prompt)  # raises if it is neither text nor messages
            answer = row.get("answer")
            answer = row.get("solution") if answer is None else answer
            if need_answers:
                gold_answer(answer)  # raises if there is none
        except Exception as error:  # whatever a line can hold
            where = f"{source}:{number} (JSONL has one object a line)"
            raise Error(f"{where}: {error!r:.200}") from error
        rows.append({**row, "prompt": prompt, "answer": answer})
    if not rows:
        raise Error(f"{source} has no rows")
    every_column = dict.fromkeys(name for row in rows for name in row)  # {name: None}
    return [{**every_column, **row} for row in rows]  # None where a row has no such


def as_messages(prompt):
    """A text as a chat of one message, a chat as it is; else this raises."""
    if not prompt:
        raise ValueError("nothing in prompt, question or problem")
    if isinstance(prompt, str):
        prompt = [dict(role="user", content=prompt)]
    roles = [message["role"] for message in prompt]
    if "user" not in roles or not {*roles} <= {"system", "user", "assistant"}:
        raise ValueError(f"the roles of its messages are {roles}")
    for message in prompt:
        str.encode(message["content"])  # raises unless it is text that can be written
    return prompt


def chat_template_fits(tokenizer, eos_token_ids):
    """Whether the chat template ends turns with an EOS. That of many base models does
    not: it is another model's."""
    if not tokenizer.chat_template:
        return False
    question = dict(role="user", content="?")
    answer = dict(role="assistant", content="42")
    text = tokenizer.apply_chat_template([question, answer], tokenize=False)
    ending = text.rpartition("42")[2].strip()  # what stands behind the answer
    return ending.startswith(tuple(tokenizer.convert_ids_to_tokens(eos_token_ids)))


BOXED = "{question}\nReason step by step, and put your final answer within \\boxed{}.\n"


def needs_answers(config):
    """Whether a reward compares with the data's answers; then prompts ask for a box."""
    return any(x.split("=")[0] in ("accuracy", "math") for x in config.reward)


def encode_prompts(rows, run):
    """The rows that fit, with "prompts" (texts), "prompt_ids", "messages". The prompt
    template goes around the user's last message; then system prompt, chat template."""
    config = run.config
    positions = getattr(run.policy.config, "max_position_embeddings", None) or math.inf
    longest = min(config.max_prompt_length, positions - config.max_completion_length)
    chat = config.chat_template == "on"
    if config.chat_template == "auto":
        chat = chat_template_fits(run.tokenizer, run.eos_token_ids)
    asking = BOXED if needs_answers(config) else "{question}"
    template = config.prompt_template or asking
    encoded = []
    for row in rows:
        messages = [dict(message) for message in as_messages(row["prompt"])]
        question = [message for message in messages if message["role"] == "user"][-1]
        question["content"] = template.replace("{question}", question["content"])
        if config.system_prompt and messages[0]["role"] != "system":
            messages = [dict(role="system", content=config.system_prompt), *messages]
        text = "\n".join(message["content"] for message in messages)
        if chat:
            text = run.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        # A chat template writes the BOS itself, if there is one.
        ids = run.tokenizer.encode(text, add_special_tokens=not chat)
        if ids and ids[-1] in run.eos_token_ids:  # some tokenizers add it to every text
            ids.pop()
        if 0 < len(ids) <= longest:
            encoded.append(dict(row, prompts=text, prompt_ids=ids, messages=messages))
    first = [row["prompts"] for row in encoded[:1]]
    print0(f"{len(encoded)} of {len(rows)} prompts fit, the first: {first}")
    return encoded


def pad(sequences, side):
    """Lists of token ids -> ids and mask: (len(sequences), longest), int64 and bool.
    Padding is a token like others, the first of the first row. A pad token may have an
    embedding of zeros, and normalising that gives NaN gradients."""
    tensors = [torch.tensor(sequence, device=DEVICE) for sequence in sequences]
    ids = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side=side)
    mask = ids >= 0  # no token's id is -1
    return ids.masked_fill(~mask, sequences[0][0]), mask


# ----------------------------------------------------------------------------- rewards
NUMBER = (
    r"(?:(?<![\w)])[-+])?[$€£]?"  # a sign (not the minus of 7-5), a currency sign, then
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+/\d+|\d*\.?\d+)"  # 1,250.50 or 1/2 or 12, .5
)


def plain(text):
    r"""A text without LaTeX's signs: of `\(-\frac{1}{2}\)` it is ` -1/2 `."""
    text = text.replace("−", "-").replace("{,}", ",")
    text = re.sub(r"([-+]?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r" \1\2/\3 ", text)
    text = re.sub(r"\\(?:text\w*|mathrm|mbox)\{([^{}]*)\}", r"\1", text)  # \text{(B)}
    text = re.sub(r"\\[,;:! ]", "", text)  # spaces
    text = re.sub(r"\\[()\[\]]", "", text)  # \( \) \[ \]
    return re.sub(r"\\(?=[$%])", "", text)  # \$ is $, and \% is %


def extract_answer(text, finished=True):
    r"""The answer in a text: the last \boxed{…}, else what follows the last ####, else,
    if the text is finished, its last number. None: no answer, or no end of the box.
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
    found = re.findall(r"####\s*+([^#\n]*[^#\s])", text)  # up to # or the line's end
    if finished and not found:
        found = re.findall(NUMBER, plain(text))
    return found[-1] if found else None


def gold_answer(answer):
    """The data's answer: in a box, after ####, or else all the text, of at most 200
    characters. Raises ValueError if there is none."""
    text = str(answer).strip() if type(answer) in (str, int, float) else ""
    if "\\boxed" in text or "####" in text:
        text = extract_answer(text, finished=False)
    elif len(text) > 200:
        raise ValueError("an answer of over 200 characters needs \\boxed{} or ####")
    if not text or text == "nan":  # JSON's NaN is read as a float
        raise ValueError(f"{answer!r} is no answer to compare with")
    return text


def as_number(text):
    """The exact number that a text is, without its currency or percent sign, else None.
    >>> as_number("x = $1,250.50."), as_number("50%"), as_number("7, or maybe 8")
    (Fraction(2501, 2), Fraction(50, 1), None)
    """
    text = plain(text).lstrip(" $(").rstrip(" $.,;:)")
    match = re.fullmatch(rf"(?:[a-zA-Z] *= *)?({NUMBER}) ?[%€£]?", text)
    try:
        return Fraction(re.sub("[$€£,]", "", match[1])) if match else None
    except (ValueError, ZeroDivisionError):  # over 4,300 digits, or 1/0
        return None


def answers_match(answer, gold):
    r"""Whether two answers are the same exact number, or else the same words. Case and
    punctuation at the ends do not matter. Units and formulas are for the math reward.
    >>> answers_match("$80,000.00", "80000"), answers_match(r"\text{(B)}.", "b")
    (True, True)
    """
    number, gold_number = as_number(answer), as_number(gold)
    if number is not None or gold_number is not None:
        return number == gold_number
    texts = plain(answer), plain(gold)
    words = [" ".join(x.casefold().split()).strip(" .,;:()$") for x in texts]
    return words[0] != "" and words[0] == words[1]


def accuracy_reward(prompts, completions, answer, finished=None, **columns):
    """1.0 where the extracted answer is equal to the data's, else 0.0. answer: N texts
    or numbers; ValueError if one is empty. finished: N bools, False where a completion
    was cut off: there only a closed box or a #### counts."""
    scores = []
    for i, completion in enumerate(completions):
        found = extract_answer(completion, finished is None or finished[i])
        gold = gold_answer(answer[i])
        scores.append(float(found is not None and answers_match(found, gold)))
    return scores


def math_reward(prompts, completions, answer, finished=None, **columns):
    """1.0 where the answer in a box or after #### is right as for `accuracy_reward`, or
    equal as LaTeX by the package math-verify, else 0.0. If neither a box nor #### is
    there, and the text was not cut off, it is what math-verify finds in its end."""
    from math_verify import parse, verify

    # As if all were cut off, as then only a box or #### counts: the last number of "so
    # it is $3\sqrt{7}$" is not 7.
    none_finished = [False] * len(completions)
    scores = accuracy_reward(prompts, completions, answer, finished=none_finished)
    for i, text in enumerate(completions):
        cut_off = finished is not None and not finished[i]
        found = extract_answer(text, finished=False)
        if found is not None:
            text = as_latex(found)
        elif cut_off or "\\boxed{" in text:  # with a box that is not closed
            continue
        if not scores[i]:
            parsed = parse(text[-1000:])
            gold = parse(as_latex(gold_answer(answer[i])))
            scores[i] = float(verify(gold, parsed))
    return scores


def as_latex(text):
    r"""A text between dollar signs, without its own \( \) \[ \] (but with \\[2pt])."""
    return "$" + re.sub(r"(?<!\\)\\[()\[\]]", "", text) + "$"


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


def load_rewards(specs):
    """{name: (function, weight)} of `NAME[=WEIGHT]` and `FILE.py:FUNCTION[=WEIGHT]`."""
    rewards = {}
    for spec in specs:
        target, weight = re.fullmatch(r"(.*?)(?:=(-?\d*\.?\d+))?", spec).groups()
        path, _, name = target.rpartition(":")
        functions = {} if path else REWARDS  # by name
        if os.path.isfile(path):
            functions = run_file(path)
        if not callable(functions.get(name)) or name in rewards:
            known = f"{', '.join(REWARDS)} or FILE.py:FUNCTION, each once"
            raise Error(f"--reward {spec}: a reward is {known}, and =WEIGHT")
        rewards[name] = functions[name], float(weight or 1)
        if target == "math":  # before training, if it is missing
            importlib.import_module("math_verify")
    return rewards


@functools.cache
def run_file(path):
    """{name: value} of a Python file, run once. It may import its neighbours."""
    sys.path.insert(0, os.path.dirname(path))
    return runpy.run_path(path)


class Scores:
    """What reward functions get for N completions of B prompts, `columns`, and what
    they gave: `outcome`, `step_rewards` and `logged`."""

    def __init__(self, run, rows, batch):
        ids = [x[mask].tolist() for x, mask in zip(batch.completion_ids, batch.mask)]
        steps = [split_steps(run.tokenizer, x) for x in ids]
        self.step_ends = [ends for _, ends in steps]
        self.num_generations = len(ids) // len(rows)
        repeated = [row for row in rows for _ in range(self.num_generations)]
        self.columns = {name: [row[name] for row in repeated] for name in rows[0]}
        self.columns.update(
            completions=run.tokenizer.batch_decode(ids, skip_special_tokens=True),
            completion_ids=ids,
            finished=[x[-1] in run.eos_token_ids for x in ids],
            steps=[texts for texts, _ in steps],
        )
        self.length = batch.mask.shape[1]  # C
        self.scale_rewards = run.config.scale_rewards
        # (N,): the weighted sum over functions that judge whole completions.
        self.outcome = torch.zeros(len(ids), dtype=torch.float64)
        # The same of those that judge steps: a sum for each step of all completions.
        num_steps = sum(map(len, self.step_ends))
        self.step_rewards = torch.zeros(num_steps, dtype=torch.float64)
        # name: (N,). Rewards of steps are logged as their mean.
        self.logged = {"reward": torch.zeros_like(self.outcome)}

    def add(self, name, function, weight):
        """Call a reward function and add what it gives."""
        rewards, by_step = call_reward(name, function, self.columns)
        # How many of these rewards a completion has; a group has G completions.
        counts = [len(ends) if by_step else 1 for ends in self.step_ends]
        fill_unjudged(rewards, counts, self.num_generations)
        if by_step:
            self.step_rewards += weight * rewards
            # nan_to_num: a completion without steps has 0.
            means = torch.stack([x.mean() for x in rewards.split(counts)]).nan_to_num()
        else:
            self.outcome += weight * rewards
            means = rewards
        self.logged[f"rewards/{name}"] = means
        self.logged["reward"] += weight * means

    def for_each_token(self, advantages):
        """Advantages of completions -> of tokens, (N,) -> (N, C): the same for all of a
        completion, plus those of its steps (0 without rewards of steps)."""
        steps = self.step_rewards.split([len(ends) for ends in self.step_ends])
        return advantages[:, None] + process_advantages(
            [rewards.tolist() for rewards in steps],
            self.step_ends,
            num_generations=self.num_generations,
            length=self.length,
            scale_rewards=self.scale_rewards,
        )


def fill_unjudged(rewards, counts, num_generations):
    """Replace NaN, what was not judged, by the mean of its group, or else of all, or 0:
    so it has no advantage. counts: how many of the rewards each completion has."""
    starts = range(0, len(counts), num_generations)
    group_counts = [sum(counts[i : i + num_generations]) for i in starts]
    for group in rewards.split(group_counts):  # views: `rewards` itself changes
        group.nan_to_num_(nan=group.nanmean().item())  # still NaN if all of it is
    rewards.nan_to_num_(nan=rewards.nanmean().nan_to_num().item())


def call_reward(name, function, columns):
    """What a reward function makes of N completions, see `read_rewards`. If it fails on
    one rank all of them stop, so that they can save the last finished step."""
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
        raise Stop(f"the reward {name} {messages[0]}.")
    return rewards


def read_rewards(returned, num_steps):
    """What a reward function returned -> (rewards in a row, float64, and whether they
    are of steps). For each completion it may return a finite number (of Python, numpy
    or torch), or None (not judged: NaN), or a list of numbers, one for each of its
    steps. Raises `Error` with what is none of these."""
    values = as_list(returned)
    if not isinstance(values, list) or len(values) != len(num_steps):
        raise Error(f"{returned!r:.200}, and not a list of {len(num_steps)} values")
    values = [as_list(value) for value in values]
    by_step = any(isinstance(value, list) for value in values)
    rewards = []
    for value, count in zip(values, num_steps if by_step else [1] * len(values)):
        numbers = value if by_step else [value]
        try:
            right = isinstance(numbers, list) and all(map(math.isfinite, numbers))
        except (TypeError, OverflowError):  # None, a text, a list in a list, 10**400
            right = False
        if value is None:
            numbers = [math.nan] * count
        elif not right or len(numbers) != count:
            raise Error(f"{value!r:.200}, and not {count} finite numbers")
        rewards += map(float, numbers)
    return torch.tensor(rewards, dtype=torch.float64), by_step


def as_list(value):
    """A list of what numpy, torch or a tuple holds; anything else as it is."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, tuple) else value


# ---------------------------------------------------------- rewards of reasoning steps
def process_advantages(
    step_rewards, step_ends, num_generations, length, scale_rewards="group", eps=1e-8
):
    """Process supervision (DeepSeekMath 4.1.3): advantages (N, C = length).
    step_rewards: N lists, a number for each step of a completion; step_ends: N lists,
    the index of each step's last token; ValueError if their lengths differ. The step
    rewards of a group are normalised together. A token's advantage is the sum of those
    of the steps that end at or after it. Two completions of two steps:
    >>> process_advantages([[1, 0], [0, 1]], [[0, 2], [1, 2]], 2, 4)
    tensor([[ 0.0000, -0.8660, -0.8660,  0.0000],
            [ 0.0000,  0.0000,  0.8660,  0.0000]])
    """
    advantages = torch.zeros(len(step_rewards), length)
    for start in range(0, len(step_rewards), num_generations):
        group = step_rewards[start : start + num_generations]
        rewards = torch.tensor([float(x) for steps in group for x in steps])
        if len(rewards) > 1:  # a single one is its own mean
            pool = group_advantages(rewards, len(rewards), scale_rewards, eps)
            normalised = pool.split([len(steps) for steps in group])
            for i, steps in enumerate(normalised, start):
                for advantage, end in zip(steps, step_ends[i], strict=True):
                    advantages[i, : end + 1] += advantage
    return advantages


def split_steps(tokenizer, ids):
    """The steps of a completion, its non-blank lines -> texts, index of the last token
    of each. A blank line belongs to the step after it, at the end to the last step."""
    texts, ends = [], []
    start = 0
    for i, token in enumerate(ids):
        if ends_line(tokenizer, token) or i == len(ids) - 1:
            text = tokenizer.decode(ids[start : i + 1], skip_special_tokens=True)
            if text.strip():
                texts.append(text.strip())
                ends.append(i)
                start = i + 1
    if ends:
        ends[-1] = len(ids) - 1
    return texts, ends


@functools.cache
def ends_line(tokenizer, token):
    """Whether there is a line break in a token."""
    return "\n" in tokenizer.decode([token])


# ------------------------------------------------------------------------------ models
def load_model(name, seed):
    """(model in float32, tokenizer, EOS ids) of a causal language model, of the text
    model of a vision-language model, or of "tiny". ValueError if it is none."""
    if name == "tiny":
        model, tokenizer = tiny_model(seed)
    else:
        # transformers would load in threads, each of which keeps memory for itself.
        os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
        tokenizer = AutoTokenizer.from_pretrained(name)
        config = AutoConfig.from_pretrained(name)
        text_config = config.get_text_config()
        if hasattr(config, "tie_word_embeddings"):  # the whole model's value counts
            text_config.tie_word_embeddings = config.tie_word_embeddings
        model, info = AutoModelForCausalLM.from_pretrained(
            name,
            config=text_config,
            key_mapping={r"language_model\.": ""},  # a vision-language model's prefix
            dtype=torch.float32,
            output_loading_info=True,
        )
        if info["missing_keys"]:
            raise ValueError(f"it lacks {min(info['missing_keys'])}")
        if text_config is not config:
            model._weight_conversions = None  # else saving would put the prefix back
    model.to(DEVICE).eval()  # no dropout: sampling, old, new and reference agree
    eos = model.generation_config.eos_token_id  # it may disagree with the tokenizer's
    eos = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
    eos_token_ids = [token for token in eos if token is not None]
    if not eos_token_ids:
        raise ValueError("it has no EOS token")
    return model, tokenizer, eos_token_ids


# ------------------------------------------------------------------- several processes
def join_ranks():
    """Prepare this rank's device; under torchrun meet the other ranks."""
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


def share_of_rank(rows):
    """This rank's part of rows. All ranks have as many."""
    return rows[RANK::WORLD_SIZE][: len(rows) // WORLD_SIZE]


def print0(text):
    """Print above the progress bar, on the first rank alone."""
    if RANK == 0:
        tqdm.write(text)


def local_shard(tensor):
    """This rank's part of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard(model, dtype, stay_whole):
    """With several ranks, give each its part of a model's weights (FSDP2). A call of
    the model, by all ranks, gathers them in `dtype`. If `stay_whole`, they are kept
    until the next backward pass, so that each rank can sample on its own. Else each
    decoder layer is gathered only while it runs."""
    if WORLD_SIZE == 1:
        return
    precision = fsdp.MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):  # a decoder layer
            fsdp.fully_shard(
                layer, mp_policy=precision, reshard_after_forward=not stay_whole
            )
    # The output layer stays gathered: `shared_logprobs` needs it after the call.
    fsdp.fully_shard(model, mp_policy=precision, reshard_after_forward=False)


# ------------------------------------------------------------------------- checkpoints
def check_empty(folder):
    """Raise `Error` if there is anything in the folder that a new run would take."""
    if folder.exists() and any(folder.iterdir()):
        raise Error(f"{folder} is not empty: --resume it, or take another --output-dir")


def claim(run):
    """Make the run's folder, or take an empty one, when there is something to write."""
    if run.output_dir:
        return
    name = f"{Path(run.config.model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(run.config.output_dir or f"runs/{name}-{os.getpid()}")
    if RANK == 0:
        folder.mkdir(parents=True, exist_ok=True)
        check_empty(folder)
        with open(folder / "options.json", "x") as file:  # only one run can create it
            file.write(json.dumps(vars(run.config)))
    run.output_dir = all_gather(folder)[0]  # that of the first rank
    start_tracker(run)


def start_tracker(run):
    """Start wandb or trackio, which share an interface. The folder's name and the time
    when options.json was written are an id that is unique, and kept for resuming."""
    if run.tracker:
        time_ns = (run.output_dir / "options.json").stat().st_mtime_ns
        name = f"{run.output_dir.name}-{time_ns:x}"  # by which trackio knows a run
        os.environ["WANDB_RUN_ID"] = name
        options = vars(run.config)
        run.tracker.init(project="grpo", name=name, config=options, resume="allow")


def save(run):
    """Make the last finished step a checkpoint, in place of the one before, unless the
    weights have moved since."""
    if run.step == run.saved_step or run.optimizer.has_moved:
        return
    run.saved_step = run.step  # if this fails it is not tried again at the end
    folder = run.output_dir / f"checkpoint-{run.step}"
    try:
        write_folder(run, folder)
    except Exception as error:  # such as a full disk
        raise Error(f"step {run.step} is not saved: {error!r:.200}") from error
    if RANK == 0:
        for old in run.output_dir.glob("checkpoint-*"):
            if re.fullmatch(r"checkpoint-\d+", old.name) and old != folder:
                shutil.rmtree(old)


def write_folder(run, folder):
    """Write a folder that `from_pretrained` and vLLM load, with what resuming needs. It
    gets its name when it is whole. With LoRA the model is merged, beside `adapter/`."""
    partial = folder.with_name("partial")
    partial.mkdir(exist_ok=True)
    model = run.policy
    dtype = getattr(torch, run.config.dtype)
    weights = None  # those of the model
    if WORLD_SIZE > 1:  # whole, in the run's dtype, on the CPU of the first rank
        weights = {}
        for key, tensor in model.state_dict().items():
            if isinstance(tensor, DTensor):  # a weight; buffers keep their dtype
                tensor = tensor.full_tensor().to(dtype)  # takes all ranks
            if RANK == 0:
                weights[key] = tensor.cpu()
    if run.step:  # 0 for the model of `sft`, which is not resumed
        adamw = run.optimizer.adamw.state_dict()
        state = dict(masters=run.optimizer.masters, adamw=adamw)
        torch.save(state, partial / f"optimizer-{RANK}-of-{WORLD_SIZE}.pt")
    if run.adapters:
        run.adapters.save_pretrained(partial / "adapter")
        # A copy is merged, on the CPU: a GPU may not have room for two models.
        model = copy.deepcopy(run.adapters.cpu()).float().merge_and_unload()
        run.adapters.to(DEVICE)
    if RANK == 0:
        model.save_pretrained(partial, state_dict=weights)
        if weights:
            model.config.dtype = dtype  # of `weights`; the shards are float32
            model.config.save_pretrained(partial)
        run.tokenizer.save_pretrained(partial)
    all_gather(None)  # until all ranks have written
    if RANK == 0:
        partial.rename(folder)
    all_gather(None)  # until it has its name
    print0(f"saved {folder}")
    return str(folder)


def restore(run):
    """Take the newest checkpoint of a run that is resumed, and cut its logs there."""
    if not run.config.resume:
        return
    folder = get_last_checkpoint(run.output_dir)
    if folder is None:
        print0(f"{run.output_dir} has no checkpoint: the run begins anew")
    else:
        print0(f"going on from {folder}")
        file = Path(folder, f"optimizer-{RANK}-of-{WORLD_SIZE}.pt")
        state = torch.load(file, map_location="cpu", weights_only=True)
        run.optimizer.adamw.load_state_dict(state["adamw"])
        for master, saved in zip(run.optimizer.masters, state["masters"]):
            master.copy_(saved)
        run.optimizer.round_weights()  # the policy's weights from their masters
        run.step = run.saved_step = int(folder.rpartition("-")[2])
    if RANK == 0:
        cut_log(run, run.output_dir / "metrics.jsonl")
        cut_log(run, run.output_dir / "completions.jsonl")
    start_tracker(run)


def cut_log(run, path):
    """Keep a log's rows up to the step that is resumed; the last may be cut off."""
    path.touch()
    last = run.step or -1  # of a run that begins anew not even step 0 stays
    size = 0
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n") or json.loads(line)["step"] > last:
            break
        size += len(line)
    os.truncate(path, size)


# ------------------------------------------------------------- built-in task and model
def arithmetic(model, seed):
    """Built-in sums. 5 in 8 of tiny's `solution`s are wrong, to leave work for GRPO."""
    rng = random.Random(seed)
    rows = []
    for a, b in itertools.product(range(50), range(10)):
        if model == "tiny":
            noisy = a + b + rng.choice([0, 0, 0, 1, 2, 5, 10, 20])
            row = dict(prompt=f"{a}+{b}=", answer=a + b, solution=noisy)
        else:
            c, d = rng.choices(range(10, 100), k=2)
            prompt = f"Calculate {a} - {b} * ({c} - {d})."
            row = dict(prompt=prompt, answer=a - b * (c - d))
        rows.append(row)
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
    # Lines of Config such as `    seed: int = 0  # of everything random`.
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
    typed = vars(parser.parse_args(argv))  # no defaults: they are suppressed
    options = TINY if typed.get("model", "tiny") == "tiny" else {}
    if "resume" in typed:
        fixed = typed.keys() - {"resume", *RESUMABLE.split()}
        if fixed:
            raise Error(f"the run has its own {min(fixed)}; may be new: {RESUMABLE}")
        options = json.loads(Path(typed["resume"], "options.json").read_text())
    return Config(**{**options, **typed})  # what is typed wins


def main():
    """Train as the command line says; a mistake of the user ends in one line."""
    try:
        train(parse_args())
    except (Error, OSError, ImportError, torch.OutOfMemoryError) as error:
        lines = [str(error), *getattr(error, "__notes__", [])]
        if isinstance(error, ModuleNotFoundError):
            lines.append(f"pip install {error.name}")
        sys.exit(f"grpo.py: {' '.join(' '.join(lines).split())}")
    if WORLD_SIZE > 1:  # gloo's threads may crash while Python ends
        all_gather(None)
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
