# SPDX-License-Identifier: MIT
r"""GRPO, Group Relative Policy Optimization (arXiv:2402.03300), in one file.

    python grpo.py                                      # a tiny model learns to add
    python grpo.py --model Qwen/Qwen2-Math-1.5B --data train.jsonl
    torchrun --nproc-per-node 8 grpo.py ...             # several GPUs (FSDP2)

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
(padded on the right); V vocabulary; H hidden size; M completion tokens without padding.

Sections. All of GRPO: GRPO in numbers, sampling and log-probs, one step, all steps,
rewards, data and prompts, models. The rest makes it faster and turns it into a program:
faster log-probs, several ranks, logs and checkpoints, built-in task, options.
"""

import atexit
import copy
import functools
import gc
import inspect
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
import warnings
from collections import defaultdict
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as dsd
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

RANK = int(os.environ.get("RANK", 0))  # index of this process; torchrun sets it
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # number of processes, or ranks
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = "bfloat16" if ON_GPU else "float32"


class Error(SystemExit):
    """A mistake of the user. Python prints it in one line, without a traceback."""

    def __init__(self, message):
        super().__init__(" ".join(message.split()))


# ---------------------------------------------------------------------- GRPO in numbers
def completion_mask(completion_ids, eos_token_ids):
    """True up to and including the first EOS of each row: ids (N, C) -> bool (N, C).
    eos_token_ids: one id or a list. Do not compare with the pad token instead: it is
    often the EOS token, and the model would never learn to stop.
    >>> completion_mask(torch.tensor([[5, 2, 2], [5, 6, 7]]), 2).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    eos = torch.tensor(eos_token_ids, device=completion_ids.device)
    is_eos = torch.isin(completion_ids, eos).long()
    num_before = is_eos.cumsum(1) - is_eos  # EOS tokens before each position
    return num_before == 0


def group_advantages(rewards, num_generations, scale_rewards="group", eps=1e-8):
    """(r - mean of its group) / (std of its group + eps): rewards (N,) -> (N,).
    DeepSeekMath 4.1.2, with the unbiased std. With `scale_rewards` "none" there is no
    division (Dr. GRPO, arXiv:2503.20783). Raises ValueError unless G >= 2 divides N.
    >>> group_advantages(torch.tensor([1.0, 0, 0, 1, 0.1, 0.1, 0.1, 0.1]), 4)
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660,  0.0000,  0.0000,  0.0000,  0.0000])
    """
    if num_generations < 2 or len(rewards) % num_generations:
        sizes = f"{len(rewards)} rewards into groups of {num_generations}"
        raise ValueError(f"cannot split {sizes}")
    groups = 1.0 * rewards.reshape(-1, num_generations)  # (B, G); integers become float
    # Equal rewards must have an advantage of exactly 0. The mean of eight 0.1 is off by
    # 1e-8; divided by a std of about as much, that would be -0.4. Subtracting the first
    # reward of the group makes equal rewards exact zeros.
    groups = groups - groups[:, :1]
    advantages = groups - groups.mean(1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + eps)
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards {scale_rewards!r} is unknown")
    return advantages.view(-1)


def process_advantages(
    step_rewards, step_ends, num_generations, length, scale_rewards="group", eps=1e-8
):
    """Advantages (N, C = length) by process supervision (DeepSeekMath 4.1.3).
    step_rewards: N lists with one number per reasoning step. step_ends: N lists with
    the index of the last token of each step. All step rewards of a group are normalised
    together; a token gets the sum over the steps that end at or after it, such as:
    >>> process_advantages([[1, 0], [0, 1]], [[0, 2], [1, 2]], 2, 4)
    tensor([[ 0.0000, -0.8660, -0.8660,  0.0000],
            [ 0.0000,  0.0000,  0.8660,  0.0000]])
    """
    advantages = torch.zeros(len(step_rewards), length)
    for start in range(0, len(step_rewards), num_generations):
        group = step_rewards[start : start + num_generations]
        rewards = torch.tensor([float(x) for steps in group for x in steps])
        if len(rewards) > 1:  # a single one equals its mean
            pool = group_advantages(rewards, len(rewards), scale_rewards, eps)
            normalised = pool.split([len(steps) for steps in group])
            for i, steps in enumerate(normalised, start):
                for advantage, end in zip(steps, step_ends[i], strict=True):
                    advantages[i, : end + 1] += advantage
    return advantages


def masked_mean(x, mask, dim=None):
    """Mean of x where the mask is true, over everything or along `dim`; 0 if the mask
    is true nowhere. Masked elements of x may be anything, even NaN."""
    mask = mask.bool()
    return x.where(mask, 0).sum(dim) / mask.sum(dim).clamp(min=1)


def importance_ratio(logp, old_logp, mask=None, importance_sampling_level="token"):
    """New over old probability of each token, exp(logp - old_logp): (N, C). With level
    "sequence" a completion has one ratio, exp of the mean of logp - old_logp over its
    tokens, which are where `mask` is true (GSPO, arXiv:2507.18071, eq. 7)."""
    log_ratio = logp - old_logp
    if importance_sampling_level == "sequence":
        mask = torch.ones_like(log_ratio) if mask is None else mask
        log_ratio = masked_mean(log_ratio, mask, dim=1)[:, None].expand_as(log_ratio)
    elif importance_sampling_level != "token":
        raise ValueError(f"level {importance_sampling_level!r} is unknown")
    return log_ratio.exp()


def clipped_surrogate(ratio, advantages, epsilon=0.2, epsilon_high=None):
    """min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A), to be maximised.
    ratio: (N, C); advantages: (N,) or (N, C). PPO (arXiv:1707.06347) eq. 7. The upper
    bound of DAPO, `epsilon_high` (arXiv:2503.14476), is `epsilon` if None or 0.
    >>> ratio = torch.tensor([[1.4], [1.4]])
    >>> clipped_surrogate(ratio, torch.tensor([0.9354, -0.9354])).flatten()
    tensor([ 1.1225, -1.3096])
    """
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + (epsilon_high or epsilon))
    advantages = advantages.reshape(len(ratio), -1)  # (N, 1) or (N, C)
    return torch.minimum(ratio * advantages, clipped_ratio * advantages)


def kl_k3(logp, ref_logp):
    """exp(d) - d - 1 with d = ref_logp - logp: (N, C) in nats, never negative.
    Its mean over tokens sampled from the policy is KL(policy, reference). The simpler
    logp - ref_logp has the same mean but a larger variance. DeepSeekMath eq. 4; "k3" in
    joschu.net/blog/kl-approx.html. Pass float32: bfloat16 rounds small d away.
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
    (N, C). Pass old_logp=None if the policy has not changed since it sampled, and
    ref_logp=None for no KL term. The loss of a token is beta k3 - surrogate, and
    `loss_type` says how the losses are averaged:
        grpo     mean over sequences of the mean over their tokens
        dapo     sum over tokens / num_tokens
        dr_grpo  sum over tokens / (num_sequences * max_completion_length)
    For a micro-batch, pass num_sequences and num_tokens of the whole optimizer batch:
    the losses then add up to the loss of the batch. Default: the numbers of this call.
    max_completion_length defaults to C. Masked elements may be anything, even NaN."""
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
    per_token_loss = beta * kl - surrogate  # (N, C); 0 where masked, as A and k3 are
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
        entropy=-logp,  # an estimate from the sampled tokens
        ratio_mean=ratio,
        clip_fraction=surrogate < ratio * advantages,  # the min is the clipped term
    )
    return loss, {name: masked_mean(x.detach(), mask) for name, x in values.items()}


# --------------------------------------------------------------- sampling and log-probs
def forward(model, ids, attention_mask, cache=None, **options):
    """Run ids (N, L) after the K tokens that `cache` holds, and add them to the cache.
    attention_mask: (N, K + L). Padding on the left does not count as a position."""
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
    """One token for each row from softmax(logits / temperature): (N, V) -> (N,).
    Temperature 0 takes the most probable token. Inverse transform sampling needs one
    random number per row; `torch.multinomial` draws V of them and is slower."""
    if temperature == 0:
        return logits.argmax(1)
    probs = (logits.float() / temperature).softmax(1)  # (N, V)
    cdf = probs.cumsum(1, dtype=torch.float64)  # float32 would drop tokens below 1e-7
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
    prompt_ids, prompt_mask: (B, P), padded on the left. C is `max_completion_length`. A
    row ends with one of `eos_token_ids`, an id or a list, and is filled up with the
    first of them. Temperature 0 is greedy. model: a causal LM of transformers in eval
    mode. The settings in its generation config (top-k, ...) are ignored."""
    if not prompt_mask[:, -1].all():
        raise ValueError("prompts must be padded on the left")
    eos = torch.tensor(eos_token_ids, device=prompt_ids.device).view(-1)
    num_completions = len(prompt_ids) * num_generations
    completion_ids = eos[0].repeat(num_completions, max_completion_length)  # (N, C)
    # Each prompt runs once. Its cache and its logits are copied for its G completions.
    cache = DynamicCache(config=model.config)
    logits = forward(model, prompt_ids, prompt_mask, cache, logits_to_keep=1).logits
    prompt_of = torch.arange(num_completions, device=eos.device) // num_generations
    cache.reorder_cache(prompt_of)  # selects these rows: B become N
    logits = logits[prompt_of]  # (N, 1, V)
    # Indices of unfinished completions; logits and cache have one row for each.
    live = torch.arange(num_completions, device=eos.device)
    for i in range(max_completion_length):
        tokens = sample(logits[:, -1], temperature)
        completion_ids[live, i] = tokens
        unfinished = ~torch.isin(tokens, eos)  # (num live,)
        if not unfinished.any() or i == max_completion_length - 1:
            break
        if not unfinished.all():  # finished completions leave the batch
            live = live[unfinished]
            cache.reorder_cache(unfinished.nonzero()[:, 0])
        mask = prompt_mask[prompt_of[live]]
        mask = F.pad(mask, (0, i + 1), value=True)  # (num live, P + i + 1)
        ids = completion_ids[live, i : i + 1]
        logits = forward(model, ids, mask, cache, logits_to_keep=1).logits
    return completion_ids


def token_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, mask, temperature=1.0
):
    """Log-probability of each completion token given everything before it: (N, C)
    float32, 0 where masked.
    prompt_ids, prompt_mask: (N, P), padded on the left, or (B, P) for G completions of
    each. completion_ids, mask: (N, C), see `completion_mask`; masked ids must be valid
    tokens too. Logits are divided by `temperature`, as in sampling. model: as in
    `generate`. All logits, (N, C, V), are in memory; `shared_logprobs` avoids that."""
    if not prompt_mask[:, -1].all():
        raise ValueError("prompts must be padded on the left")
    mask = mask.bool()
    repeats = len(mask) // len(prompt_ids)  # G for prompts (B, P), 1 for (N, P)
    prompt_ids = prompt_ids.repeat_interleave(repeats, dim=0)
    prompt_mask = prompt_mask.bool().repeat_interleave(repeats, dim=0)
    ids = torch.cat([prompt_ids, completion_ids], 1)  # (N, P + C)
    attention_mask = torch.cat([prompt_mask, mask], 1)
    # The output at each token predicts the next one. For a prompt p0 p1 p2 and C = 3:
    #     at         p2   c0   c1   c2
    #     predicts   c0   c1   c2   -      so the last of the C + 1 outputs is dropped
    keep = mask.shape[1] + 1
    logits = forward(model, ids, attention_mask, logits_to_keep=keep).logits[:, :-1]
    logits = (logits.float() / temperature).transpose(1, 2)  # (N, V, C)
    logp = -F.cross_entropy(logits, completion_ids, reduction="none")  # (N, C)
    return logp.masked_fill(~mask, 0)


# ----------------------------------------------------------------------------- one step
@dataclass
class Batch:
    """N completions, each with its prompt: a rollout or some rows of one."""

    prompt_ids: torch.Tensor  # (N, P), padded on the left
    prompt_mask: torch.Tensor  # (N, P), bool
    completion_ids: torch.Tensor  # (N, C), padded on the right
    mask: torch.Tensor  # (N, C), bool: up to and including the first EOS
    advantages: torch.Tensor | None = None  # (N, C)
    ref_logp: torch.Tensor | None = None  # (N, C), under the reference
    old_logp: torch.Tensor | None = None  # (N, C), under the policy that sampled

    @property
    def tokens(self):
        """The arguments of `token_logprobs` between model and temperature."""
        return self.prompt_ids, self.prompt_mask, self.completion_ids, self.mask


def train_step(run, train_rows, step):
    """One GRPO step on B rows of the data -> metrics, columns for the log (completions
    with their prompts and rewards). `run` has the options (`config`), the number B of
    prompts of this rank (`num_prompts`), two models (`policy`, `reference`),
    `tokenizer`, `eos_token_ids`, reward functions with weights (`rewards`) and for
    reasoning steps (`step_reward`, or ""), `token_logprobs` or the faster version
    (`logprobs`), AdamW (`optimizer`) and the tensors that it moves (`masters`)."""
    config = run.config
    num_generations = config.num_generations
    set_seed(config.seed, step)
    start = time.perf_counter()

    # 1. Take B prompts.
    rows = prompt_batch(train_rows, step, run.num_prompts, config.seed)

    # 2. Sample G completions of each from the current policy.
    batch = rollout(run, rows, num_generations, config.temperature)

    # 3. Score them. Weighted sums are float64 and are rounded to float32, so that
    # 0.1 + 0.2 equals 0.3 and ties stay ties.
    columns, scores = score(run, rows, batch)
    rewards = scores["reward"].float()

    # 4. Normalise within each group. All tokens of a completion share its advantage.
    advantages = group_advantages(rewards, num_generations, config.scale_rewards)
    batch.advantages = advantages.to(DEVICE)[:, None].expand(batch.mask.shape)
    if run.step_reward:  # process supervision adds to the advantage of the outcome
        of_steps = step_advantages(run, columns, batch.mask.shape[1])
        batch.advantages = batch.advantages + of_steps.to(DEVICE)
    rollout_end = time.perf_counter()

    # 5. Minimise -min(ratio A, clip(ratio) A) + beta KL.
    learning_rate = config.learning_rate * min(1, step / (config.warmup_steps or 1))
    metrics = update(run, batch, learning_rate)
    end = time.perf_counter()

    measured = dict(  # the mean of each is logged
        scores,
        reward_std=rewards.view(-1, num_generations).std(1),
        zero_std_fraction=~batch.advantages.reshape(run.num_prompts, -1).any(1),
        completion_length=batch.mask.sum(1),
        truncated_fraction=~torch.tensor(columns["finished"]),
    )
    if run.step_reward:
        measured["step_reward"] = torch.tensor(sum(columns["step_rewards"], []))
    for name, values in measured.items():
        metrics[name] = values.double().nanmean().item()
    metrics.update(
        learning_rate=learning_rate,
        rollout_seconds=rollout_end - start,  # includes the reward functions
        update_seconds=end - rollout_end,
        step_seconds=end - start,
        peak_memory_gb=torch.cuda.max_memory_allocated() / 2**30,  # 0 on a CPU
    )
    columns.update({name: values.tolist() for name, values in scores.items()})
    return metrics, columns


def prompt_batch(rows, step, size, seed):
    """The `size` rows of a step. Epochs are shuffled and drop an incomplete batch."""
    epoch, i = divmod(step - 1, len(rows) // size)
    shuffled = random.Random(seed * 1_000_003 + epoch).sample(rows, len(rows))
    return shuffled[i * size : (i + 1) * size]


def rollout(run, rows, num_generations, temperature):
    """Sample completions of rows of the data from the policy -> `Batch`."""
    prompts = pad([row["prompt_ids"] for row in rows], "left")  # ids and mask
    length, eos = run.config.max_completion_length, run.eos_token_ids
    ids = generate(run.policy, *prompts, num_generations, length, eos, temperature)
    repeated = [x.repeat_interleave(num_generations, dim=0) for x in prompts]
    return Batch(*repeated, ids, completion_mask(ids, eos))


def pad(sequences, side):
    """Lists of token ids -> ids and mask: (len(sequences), longest), int64 and bool.
    Padding is the first token of all: the embedding of a real pad token may be zeros,
    and normalising zeros gives NaN gradients."""
    tensors = [torch.tensor(sequence, device=DEVICE) for sequence in sequences]
    ids = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side=side)
    mask = ids >= 0
    return ids.masked_fill(~mask, sequences[0][0]), mask


def update(run, batch, learning_rate):
    """num_iterations (mu) AdamW steps, each on the whole rollout -> metrics. Unlike the
    minibatches of PPO, micro-batches only accumulate the gradient of one step."""
    config = run.config
    # FSDP averages gradients over ranks. To divide the sum over all tokens by their
    # number, each rank divides its own sum by the mean number per rank.
    num_tokens = sum(all_gather(batch.mask.sum().item()))
    tokens_per_rank = num_tokens / WORLD_SIZE
    metrics = defaultdict(float, num_tokens=num_tokens)
    parts = micro_batches(batch, config.micro_batch_size, run.num_prompts)
    if config.beta:
        if config.lora_rank:  # the reference is the policy without its adapters
            run.policy.disable_adapters()
        with torch.no_grad():
            for part in parts:
                logp = run.logprobs(run.reference, *part.tokens, config.temperature)
                part.ref_logp = logp
        if config.lora_rank:
            run.policy.enable_adapters()
    for _ in range(config.num_iterations):
        for part in parts:
            logp = run.logprobs(run.policy, *part.tokens, config.temperature)
            loss, means = grpo_loss(
                logp,
                part.old_logp,  # None in the first iteration, where the ratio is 1
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
                num_tokens=tokens_per_rank,
            )
            loss.backward()
            if part.old_logp is None:  # the policy has not moved yet
                part.old_logp = logp.detach()
            metrics["loss"] += loss.item() / config.num_iterations
            share = part.mask.sum().item() / tokens_per_rank / config.num_iterations
            for name, mean in means.items():
                metrics[name] += share * mean.item()
        metrics["grad_norm"] = optimizer_step(run, learning_rate)
        metrics["skipped"] += not math.isfinite(metrics["grad_norm"])
    return metrics


def micro_batches(batch, size, num_prompts):
    """Split a batch into parts of `size` rows. Groups with short completions come
    first, so that parts have little padding. The rows of a group stay together."""
    lengths = batch.mask.sum(1).view(num_prompts, -1)  # (B, G)
    order = lengths.amax(1).argsort().cpu()
    rows = torch.arange(len(batch.mask)).view(num_prompts, -1)[order].flatten()
    parts = []
    for some in rows.split(size):
        prompt_length = batch.prompt_mask[some].sum(1).max()  # of the longest prompt
        length = batch.mask[some].sum(1).max()
        parts.append(
            Batch(
                batch.prompt_ids[some, -prompt_length:],
                batch.prompt_mask[some, -prompt_length:],
                batch.completion_ids[some, :length],
                batch.mask[some, :length],
                batch.advantages[some, :length],
            )
        )
    return parts


def optimizer_step(run, learning_rate):
    """Clip the gradient, step AdamW on the masters, round the weights to them and clear
    the gradient -> its norm. If the norm is not finite, nothing moves."""
    for weight, master in run.rounded:  # empty unless bfloat16 on one rank
        master.grad, weight.grad = weight.grad, None
    max_norm = run.config.max_grad_norm or math.inf
    norm = torch.nn.utils.clip_grad_norm_(run.masters, max_norm)
    if WORLD_SIZE > 1:
        norm = norm.full_tensor()  # over all ranks
    if norm.isfinite():
        run.optimizer.param_groups[0]["lr"] = learning_rate
        run.optimizer.step()
        for weight, master in run.rounded:
            weight.data.copy_(master)
    run.optimizer.zero_grad()
    return norm.item()


# ---------------------------------------------------------------------------- all steps
class Run:
    """The options, models, reward functions and optimizer of a run."""

    def __init__(self, config, start):
        """start: where policy and reference start from, a Hub name or a folder."""
        self.config = config
        self.output_dir = Path(config.output_dir)
        self.stopping = False  # True once this rank has received SIGINT or SIGTERM
        self.checkpoint = None  # the folder of the newest one
        self.dtype = getattr(torch, config.dtype)
        self.num_prompts = config.prompts_per_step // WORLD_SIZE  # B, of this rank
        self.rewards = {}  # name: (function, weight)
        for spec in config.reward:
            name, weight = re.fullmatch(r"(.*?)(?:=(-?\d*\.?\d+))?", spec).groups("1")
            self.rewards[name] = load_function(name), float(weight)
        self.step_reward = config.step_reward and load_function(config.step_reward)
        try:
            model, self.tokenizer, self.eos_token_ids = load_model(start, config.seed)
            self.logprobs = choose_logprobs(model)
        except ValueError as error:  # the model is unknown, or cannot be trained here
            raise Error(f"--model {start}: {error}") from error
        self.reference = model  # with LoRA; its adapters are then switched off
        if config.beta and not config.lora_rank:
            self.reference = load_model(start, config.seed)[0]
            for weight in self.reference.parameters():  # `.to` would round buffers too
                weight.data = weight.data.to(self.dtype)
            shard(self.reference, self.dtype, keep_gathered=False)
        set_seed(config.seed, 0)  # adapters and masters start at random
        self.policy = model
        # What AdamW moves, in float32, and (weight, master) for each bfloat16 weight.
        self.masters, self.rounded = prepare_weights(
            model, self.dtype, config.lora_rank
        )
        self.optimizer = torch.optim.AdamW(self.masters, weight_decay=0.0, fused=True)
        print0(f"{start}: {config.dtype} on {DEVICE}, by {self.logprobs.__name__}")
        print0(f"rewards: {', '.join(config.reward)} {config.step_reward}")


def train(run, rows, eval_rows):
    """The training loop, on what `set_up` returns."""
    config = run.config
    start = restore(run)
    if config.eval_every and start == 0:
        evaluate(run, eval_rows, step=0)
    stop_on_signals(run)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()  # leave out the supervised steps
    num_idle = 0  # steps in a row without any advantage
    steps = range(start + 1, config.max_steps + 1)
    bar = tqdm(steps, initial=start, total=config.max_steps, disable=RANK > 0)
    for step in bar:
        metrics, columns = train_step(run, rows, step)
        stopping = any(all_gather(run.stopping)) and step < config.max_steps
        is_last = stopping or step == config.max_steps
        is_due = is_last or (config.eval_every and step % config.eval_every == 0)
        metrics = log(run, step, metrics, columns if is_due or step == 1 else None)
        bar.set_postfix(reward=metrics["reward"], kl=metrics["kl"])
        if metrics["skipped"]:
            print0(f"step {step}: skipped an update whose gradient is not finite")
        num_idle = num_idle + 1 if metrics["zero_std_fraction"] == 1 else 0
        if num_idle == 10:
            print0("10 steps without an advantage: all rewards of each group are equal")
        if config.eval_every and is_due and not stopping:
            evaluate(run, eval_rows, step)
        if is_last or (config.save_every and step % config.save_every == 0):
            save(run, step)
        if stopping:
            print0(f"stopped; to go on: python grpo.py --resume {run.output_dir}")
            sys.exit(1)


def set_up(config):
    """Load data and models and take the run's folder -> `Run`, rows to train on, rows
    held out. A mistake in options, rewards, data or model leaves no folder behind."""
    join_ranks()
    config = all_gather(config)[0]  # all ranks use the folder of rank 0
    if config.data:
        needs_answers = any(x.split("=")[0] == "accuracy" for x in config.reward)
        rows = read_rows(config.data, needs_answers)
    else:
        rows = arithmetic(config.model, config.seed)
    random.Random(config.seed).shuffle(rows)
    num_held_out = min(64, len(rows) // 10)
    rows, eval_rows = rows[num_held_out:], rows[:num_held_out]
    folder = Path(config.output_dir, "sft")
    needs_sft = config.sft_steps and not (config.resume and folder.exists())
    if needs_sft:
        sft(config, rows, folder)
        gc.collect()  # FSDP keeps cycles of references to its weights
    run = Run(config, folder if config.sft_steps else config.model)
    rows, eval_rows = encode_prompts(run, rows), encode_prompts(run, eval_rows)
    if len(rows) < run.num_prompts:
        raise Error(f"--prompts-per-step: only {len(rows) * WORLD_SIZE} prompts fit")
    print0(f"the first prompt: {rows[0]['prompts']!r}")
    if not needs_sft:  # otherwise `sft` has already claimed it
        claim_folder(config)
    return run, rows, eval_rows


def sft(config, rows, folder):
    """Train all weights on the solutions in the data and save the model in `folder`.
    With advantage 1, ratio 1 and no KL, GRPO's loss has the gradient of -logp."""
    supervised = replace(
        config, beta=0.0, lora_rank=0, num_iterations=1, temperature=1.0
    )
    run = Run(supervised, config.model)
    examples = []  # token ids of prompt and solution
    for row in encode_prompts(run, rows):
        text = "" if row["solution"] is None else str(row["solution"])
        ids = run.tokenizer.encode(text, add_special_tokens=False)
        if 0 < len(ids) < config.max_completion_length:
            examples.append((row["prompt_ids"], ids + run.eos_token_ids[:1]))
    if len(examples) < run.num_prompts:
        raise Error(f"--sft-steps: only {len(examples)} rows have a solution that fits")
    claim_folder(config)
    for step in tqdm(range(1, config.sft_steps + 1), "supervised", disable=RANK > 0):
        chosen = prompt_batch(examples, step, run.num_prompts, config.seed)
        prompts, solutions = zip(*chosen)
        ids, mask = pad(solutions, "right")
        ones = torch.ones_like(ids, dtype=torch.float32)  # advantages
        batch = Batch(*pad(prompts, "left"), ids, mask, ones)
        if update(run, batch, config.sft_learning_rate)["skipped"]:
            raise Error(f"supervised step {step}: the gradient is not finite")
    write_folder(run, folder)


def evaluate(run, rows, step):
    """Log and print the mean rewards of greedy completions of held-out rows."""
    if not rows:
        return
    size = run.num_prompts * run.config.num_generations  # as many as in training
    scores = []
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        batch = rollout(run, some, num_generations=1, temperature=0)
        scores.append(score(run, some, batch)[1])
    means = {}
    for name in scores[0]:
        means[f"eval/{name}"] = torch.cat([x[name] for x in scores]).nanmean().item()
    means = log(run, step, means)
    print0(f"step {step}: greedy held-out reward {means['eval/reward']:.2f}")


def set_seed(seed, step):
    """Seed a step on this rank, so that a resumed run draws the same numbers again."""
    transformers.set_seed((seed * 1_000_003 + step * WORLD_SIZE + RANK) % 2**32)


# ------------------------------------------------------------------------------ rewards
def score(run, rows, batch):
    """Call every reward function on N completions of B rows of the data -> columns (its
    arguments, N values each), scores {name: (N,) float64}; "reward" is their sum."""
    ids = [x[mask].tolist() for x, mask in zip(batch.completion_ids, batch.mask)]
    repeated = [row for row in rows for _ in range(len(ids) // len(rows))]
    columns = {name: [row[name] for row in repeated] for name in rows[0]}
    columns.update(
        completions=run.tokenizer.batch_decode(ids, skip_special_tokens=True),
        completion_ids=ids,
        finished=[x[-1] in run.eos_token_ids for x in ids],  # not cut off
    )
    scores = {"reward": torch.zeros(len(ids), dtype=torch.float64)}
    for name, (function, weight) in run.rewards.items():
        returned = function(**copy.deepcopy(columns))  # it may change its arguments
        rewards = to_floats(returned, len(ids), f"reward {name}")
        rewards = torch.tensor(rewards, dtype=torch.float64)
        scores[f"rewards/{name}"] = rewards
        # An unjudged completion gets the mean of its group, or else of all, or else 0.
        groups = rewards.view(len(rows), -1)
        mean = groups.nanmean(1, keepdim=True).nan_to_num(rewards.nanmean().item())
        judged = groups.where(groups.isfinite(), mean).nan_to_num()
        scores["reward"] += weight * judged.view(-1)
    return columns, scores


def to_floats(values, count, source):
    """`count` finite numbers of Python, numpy or torch -> floats; NaN for None, which
    means not judged. Raises `Error` for anything else that `source` returned."""
    try:
        items = [values[i] for i in range(len(values))]  # fails for sets, generators
        valid = all(x is None or math.isfinite(x) for x in items)
    except (TypeError, LookupError, ValueError, OverflowError):
        valid = False
    if not valid or len(items) != count:
        raise Error(f"{source} returned {values!r:.200}, not {count} finite numbers")
    return [math.nan if x is None else float(x) for x in items]


NUMBER = (
    r"(?:(?<![\w)])[-+])?[$€£]?"  # a sign (not the minus of 7-5), a currency sign, then
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+/\d+|\d*\.?\d+)"  # 1,250.50 or 1/2 or 12, .5
)


def plain(text):
    r"""The text without LaTeX markup: `\(-\frac{1}{2}\)` becomes ` -1/2 `."""
    text = text.replace("−", "-").replace("{,}", ",")
    text = re.sub(r"([-+]?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r" \1\2/\3 ", text)
    text = re.sub(r"\\(?:text\w*|mathrm|mbox)\{([^{}]*)\}", r"\1", text)  # \text{(B)}
    # Spaces, \( \) \[ \], and the backslashes of \$ and \%.
    return re.sub(r"\\(?:[,;:! ()\[\]]|(?=[$%]))", "", text)


def extract_answer(text, finished=True):
    r"""The answer in a text: the last \boxed{...}, else what follows the last ####, or
    else, if the text is `finished` (not cut off), the last number; None without any.
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
    """The answer in a row of the data: in a box, after ####, or else the whole text, of
    at most 200 characters. Raises ValueError if there is none."""
    text = str(answer).strip() if type(answer) in (str, int, float) else ""
    if "\\boxed" in text or "####" in text:
        text = extract_answer(text, finished=False)
    elif len(text) > 200:
        raise ValueError("an answer of over 200 characters needs \\boxed{} or ####")
    if not text or text == "nan":  # JSON's NaN is a float
        raise ValueError(f"`answer` or `solution` is needed, not {answer!r}")
    return text


def normalise(text):
    """An answer as an exact number if it is one, else as lower-case words; without
    LaTeX, currency, percent sign and the punctuation around it."""
    text = plain(text)
    number = rf"[ $(]*+(?:[a-zA-Z] *= *)?({NUMBER}) ?[%€£]?[ $.,;:)]*+"
    try:
        return Fraction(re.sub("[$€£,]", "", re.fullmatch(number, text)[1]))
    except (TypeError, ValueError, ZeroDivisionError):  # no match, 4,301 digits, or 1/0
        return " ".join(text.casefold().split()).strip(" .,;:()$")


def answers_match(answer, gold):
    r"""True if two answers are the same number, or else the same words.
    >>> answers_match("$80,000.00", "80000"), answers_match(r"\text{(B)}.", "b")
    (True, True)
    """
    return normalise(answer) == normalise(gold) != ""


def accuracy_reward(prompts, completions, answer, finished=None, **columns):
    """1.0 where the extracted answer equals that of the data, else 0.0. answer: N texts
    or numbers. finished: N bools, False where a completion was cut off."""
    scores = []
    for i, completion in enumerate(completions):
        found = extract_answer(completion, finished is None or finished[i])
        gold = gold_answer(answer[i])
        scores.append(float(found is not None and answers_match(found, gold)))
    return scores


def format_reward(prompts, completions, **columns):
    """1.0 for one `<think>...</think>` followed by an answer, else 0.0 (DeepSeek-R1,
    arXiv:2501.12948, 2.2.2). The prompt may end in `<think>`."""
    scores = []
    for prompt, completion in zip(prompts, completions):
        text = completion.strip()
        if prompt.rstrip().endswith("<think>"):
            text = "<think>" + text
        match = re.fullmatch(r"<think>.*</think>.*\S.*", text, re.DOTALL)
        scores.append(float(match is not None and text.count("think>") == 2))
    return scores


REWARDS = dict(accuracy=accuracy_reward, format=format_reward)


def load_function(spec):
    """A built-in reward by its name, or a function of a file by FILE.py:FUNCTION."""
    path, _, name = spec.rpartition(":")
    functions = run_file(path) if path else REWARDS
    if not callable(functions.get(name)):
        raise Error(f"no function {name!r} in {path or ', '.join(REWARDS)}")
    return functions[name]


@functools.cache
def run_file(path):
    """{name: value} of a Python file, run once. It may import its neighbours."""
    sys.path.insert(0, os.path.dirname(path))
    return runpy.run_path(path)


def step_advantages(run, columns, length):
    """Advantages (N, C = length) from the function of --step-reward, which also gets
    `steps`, N lists of texts. Adds the columns `steps` and `step_rewards`."""
    pairs = [split_steps(run.tokenizer, ids) for ids in columns["completion_ids"]]
    columns["steps"], step_ends = map(list, zip(*pairs))
    returned = run.step_reward(**copy.deepcopy(columns))
    rewards = []
    for numbers, ends in zip(returned, step_ends, strict=True):
        rewards.append(to_floats(numbers, len(ends), "--step-reward"))
        if any(map(math.isnan, rewards[-1])):
            raise Error("--step-reward returned None for a step")
    columns["step_rewards"] = rewards
    return process_advantages(
        rewards,
        step_ends,
        run.config.num_generations,
        length,
        run.config.scale_rewards,
    )


def split_steps(tokenizer, ids):
    """The steps of a completion, which are its non-blank lines -> texts, index of the
    last token of each. Blank lines join the next step, those at the end the last."""
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


# --------------------------------------------------------------------- data and prompts
def read_rows(path, needs_answers):
    """Rows (dicts) of a JSONL file with "prompt" (or `question`, `problem`), "answer"
    and "solution" (or the other one of these). `Error` names the first bad line."""
    rows = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row.get("prompt") or row.get("question") or row.get("problem")
            as_messages(prompt)
            answer, solution = row.get("answer"), row.get("solution")
            answer = solution if answer is None else answer
            solution = answer if solution is None else solution
            if needs_answers:
                gold_answer(answer)
        except Exception as error:  # whatever a line can hold
            raise Error(f"{path}:{number}: {error!r:.200}") from error
        rows.append(dict(row, prompt=prompt, answer=answer, solution=solution))
    every_column = dict.fromkeys(name for row in rows for name in row)
    return [{**every_column, **row} for row in rows]  # None where a column is missing


def as_messages(prompt):
    """A text as a chat of one message; a chat as a copy. Raises for anything else."""
    if not prompt:
        raise ValueError("`prompt`, `question` or `problem` is needed")
    if isinstance(prompt, str):
        prompt = [dict(role="user", content=prompt)]
    if not any(message["role"] == "user" for message in prompt):
        raise ValueError("a chat needs a message of the user")
    for message in prompt:
        str.encode(message["content"])  # raises unless it is valid text
    return [dict(message) for message in prompt]


def chat_template_fits(tokenizer, eos_token_ids):
    """True if the chat template ends an answer with an EOS token of the model. Many
    base models carry the template of another model, which they were not trained on."""
    if not tokenizer.chat_template:
        return False
    chat = [dict(role="user", content="?"), dict(role="assistant", content="42")]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    ending = text.rpartition("42")[2].strip()  # what follows the answer
    return ending.startswith(tuple(tokenizer.convert_ids_to_tokens(eos_token_ids)))


BOXED = "{question}\nReason step by step, and put your final answer within \\boxed{}.\n"


def encode_prompts(run, rows):
    """This rank's share of the rows that fit, with the columns "prompts" (texts),
    "prompt_ids" and "messages". The prompt template goes around the last message of the
    user. Then the system prompt is added, and then the chat template."""
    config, tokenizer = run.config, run.tokenizer
    chat = chat_template_fits(tokenizer, run.eos_token_ids)
    template = BOXED if "accuracy" in run.rewards else "{question}"
    template = config.prompt_template or template
    encoded = []
    for row in rows:
        messages = as_messages(row["prompt"])
        question = [message for message in messages if message["role"] == "user"][-1]
        question["content"] = template.replace("{question}", question["content"])
        if config.system_prompt and messages[0]["role"] != "system":
            messages = [dict(role="system", content=config.system_prompt), *messages]
        text = "\n".join(message["content"] for message in messages)
        if chat:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        # A chat template writes special tokens such as BOS itself.
        ids = tokenizer.encode(text, add_special_tokens=not chat)
        if not chat and ids and ids[-1] in run.eos_token_ids:
            ids.pop()  # some tokenizers append EOS to every text
        if 0 < len(ids) <= config.max_prompt_length:
            encoded.append(dict(row, prompts=text, prompt_ids=ids, messages=messages))
    print0(f"{len(encoded)} of {len(rows)} prompts fit")
    return encoded[RANK::WORLD_SIZE][: len(encoded) // WORLD_SIZE]


# ------------------------------------------------------------------------------- models
def load_model(name, seed):
    """(float32 model, tokenizer, EOS ids). Raises ValueError if it is no causal LM."""
    if name == "tiny":
        model, tokenizer = tiny_model(seed)
    else:
        # transformers loads in threads by default, and each thread holds on to memory.
        os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    model.to(DEVICE).eval()  # no dropout: sampling, old, new and reference agree
    eos = model.generation_config.eos_token_id  # may differ from the tokenizer's
    eos = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
    return model, tokenizer, [token for token in eos if token is not None]


def prepare_weights(model, dtype, lora_rank):
    """Make a float32 model compute in --dtype -> (masters, rounded): the tensors that
    AdamW moves, in float32, and (weight, master) for each weight that is a rounded copy
    (updates below 1/512 of a bfloat16 weight are rounded away). The masters are
        float32, one rank     the weights themselves
        bfloat16, one rank    float32 copies, to which the weights are rounded
        several ranks         the weights: float32 shards, gathered in --dtype (FSDP2)
        LoRA                  the adapters, in float32; the frozen base is in --dtype"""
    if lora_rank:  # arXiv:2106.09685
        import peft

        lora = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=lora_rank,
            lora_alpha=2 * lora_rank,
            target_modules="all-linear",
        )
        model.add_adapter(lora)  # freezes all other weights
        for weight in model.parameters():
            if not weight.requires_grad:
                weight.data = weight.data.to(dtype)
    elif dtype == torch.bfloat16:
        for weight in model.parameters():
            weight.data = within_cell(weight.data)
    shard(model, dtype, keep_gathered=True)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if lora_rank or dtype == torch.float32 or WORLD_SIZE > 1:
        return weights, []
    masters = [weight.detach() for weight in weights]  # keep the float32 memory
    for weight in weights:
        weight.data = weight.data.to(dtype)  # the weight gets its own
        weight.grad_dtype = torch.float32  # micro-batches add up in float32
    return masters, list(zip(weights, masters))


def within_cell(weight):
    """Random float32 numbers that bfloat16 rounds to the given weights.
    Published models are bfloat16. Near 0.02, bfloat16 numbers are 1.2e-4 apart: a
    master that starts at one of them needs 60 updates of 1e-6 before it rounds to the
    next. Starting anywhere in its cell leaves the model as it is and lets it move."""
    # bfloat16 has 8 significant bits: between 2**(exponent - 1) and 2**exponent its
    # numbers are 2**(exponent - 8) apart, and a cell extends half of that either way.
    exponent = torch.frexp(weight).exponent
    near = weight + torch.ldexp(torch.rand_like(weight) - 0.5, exponent - 8)
    # Outside the cell (it is smaller below a power of 2; 0 has none) keep the weight.
    return torch.where(near.bfloat16() == weight, near, weight)


# That is all of GRPO. The rest makes it faster and turns it into a program.
# --------------------------------------------------------------------- faster log-probs
def shared_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, mask, temperature=1.0
):
    """`token_logprobs`, with the same numbers and gradients, in less time and memory. A
    prompt that neighbouring rows share runs once. Their completions continue from
    copies of its key-value cache, and gradients flow through it. The logits are never
    all in memory."""
    if not prompt_mask[:, -1].all():
        raise ValueError("prompts must be padded on the left")
    mask = mask.bool()
    repeats = len(mask) // len(prompt_ids)  # G for prompts (B, P), 1 for (N, P)
    prompt_ids = prompt_ids.repeat_interleave(repeats, dim=0)
    prompt_mask = prompt_mask.bool().repeat_interleave(repeats, dim=0)
    key = prompt_ids.masked_fill(~prompt_mask, -1)
    is_new = F.pad((key[1:] != key[:-1]).any(1), (1, 0), value=True)  # (N,)
    prompt_of = is_new.cumsum(0) - 1  # (N,): index of each row's prompt
    cache = DynamicCache(config=model.config)
    hidden = hidden_states(model, prompt_ids[is_new], prompt_mask[is_new], cache)
    hidden = hidden[prompt_of, -1:]  # (N, 1, H), predicts the first completion token
    cache.reorder_cache(prompt_of)  # one copy for each completion
    # The last token predicts nothing and is left out. But at least two tokens run, as
    # recurrent layers (Mamba) run a single one by a kernel without a backward pass.
    # Padding on the right needs no mask: no earlier token sees it.
    num_inputs = max(2, mask.shape[1] - 1)
    attention_mask = F.pad(prompt_mask, (0, num_inputs), value=True)
    inputs = F.pad(completion_ids, (0, 1))[:, :num_inputs]
    later = hidden_states(model, inputs, attention_mask, cache)
    hidden = torch.cat([hidden, later], 1)[:, : mask.shape[1]][mask]  # (M, H)
    weight = model.get_output_embeddings().weight
    logp = ChunkedLogprobs.apply(hidden, weight, completion_ids[mask], temperature)
    return logp.new_zeros(mask.shape).masked_scatter(mask, logp)


def hidden_states(model, ids, attention_mask, cache):
    """The last hidden states (N, L, H), without computing any logits."""
    return forward(
        model,
        ids,
        attention_mask,
        cache,
        logits_to_keep=ids.new_empty(0),  # int64
        output_hidden_states=True,
    ).hidden_states[-1]


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature) at the targets -> (M,) float32.
    hidden: (M, H); weight: (V, H); targets: (M,). The logits of v words of the V are in
    memory at a time. The backward pass computes them again:
    d logp / d logits = (one_hot(target) - softmax(logits)) / temperature."""

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
    """`shared_logprobs` if its log-probs and their gradient match plain forward passes
    without padding or cache, else `token_logprobs` if it does. Raises ValueError if
    neither matches, or if `generate` does not sample like these passes."""
    prompts, length = ([2, 3, 4, 2, 3], [5, 6]), 8
    batch = pad(prompts, "left")
    no_eos = -1  # no token has this id
    ids = generate(model, *batch, 2, length, no_eos, temperature=0)  # (4, 8)
    ids[1::2] = ids[::2].flip(1)  # the second completion of each prompt is another one
    rows = [torch.tensor(prompts[i // 2] + ids[i].tolist()) for i in range(4)]
    logits = [model(row[None].to(DEVICE)).logits[0, -length - 1 : -1] for row in rows]
    logits = torch.stack(logits)  # (4, 8, V), which predict the completions
    if not torch.equal(logits[::2].argmax(2), ids[::2]):
        raise ValueError("padding or its cache changes what it samples")
    weight = model.get_input_embeddings().weight  # its gradient depends on all layers
    logp = -F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    expected = [logp, *torch.autograd.grad(logp.sum(), weight)]
    for logprobs in (shared_logprobs, token_logprobs):
        try:
            logp = logprobs(model, *batch, ids, torch.ones_like(ids))
            found = [logp, *torch.autograd.grad(logp.sum(), weight)]
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # these RuntimeErrors say nothing about the model
        except (AttributeError, TypeError, ValueError, RuntimeError):
            continue  # the model has no such cache, or a layer changes it in place
        if all((x - y).norm() <= 1e-3 * y.norm() for x, y in zip(found, expected)):
            return logprobs
    raise ValueError("its log-probs depend on padding")


# ------------------------------------------------------------------------ several ranks
def join_ranks():
    """Prepare the device of this rank; under torchrun, meet the other ranks."""
    transformers.utils.logging.disable_progress_bar()
    # Harmless: one rank saves without a process group, and outputs are never modified.
    warnings.filterwarnings("ignore", "torch.distributed is disabled|FSDP2-wrapped")
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        # cuDNN attention, the default on an H100, gives NaN gradients with a mask at
        # some lengths (pytorch issue 196678), and plans anew for every length.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.matmul.allow_tf32 = False  # some containers set it
        torch.backends.cudnn.allow_tf32 = False
    if WORLD_SIZE > 1:
        # On a GPU tensors go by NCCL; objects, as in `all_gather`, by gloo.
        dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")


def all_gather(value):
    """Gather one object from every rank -> a list, in order of rank."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values


def print0(text):
    """Print above the progress bar, on the first rank only."""
    if RANK == 0:
        tqdm.write(text)


def shard(model, dtype, keep_gathered):
    """With several ranks, keep a part of the weights on each and gather them in `dtype`
    whenever the model runs (FSDP2). With `keep_gathered` they stay until the next
    backward pass, so that each rank can sample on its own; else each layer is gathered
    only while it runs. Frozen weights (LoRA) are not sharded."""
    if WORLD_SIZE == 1:
        return
    options = dict(
        mp_policy=fsdp.MixedPrecisionPolicy(dtype, torch.float32),
        ignored_params={x for x in model.parameters() if not x.requires_grad},
    )
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):  # a decoder layer
            fsdp.fully_shard(layer, reshard_after_forward=not keep_gathered, **options)
    # The output layer stays gathered: `shared_logprobs` uses it after the forward pass.
    fsdp.fully_shard(model, reshard_after_forward=False, **options)


# ----------------------------------------------------------------- logs and checkpoints
def claim_folder(config):
    """Take the folder of a run and lock it until this process ends. The folder of a new
    run is made, or must be empty, and belongs to whoever creates options.json in it."""
    import filelock

    folder = Path(config.output_dir)
    if RANK == 0:
        if not config.resume:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise Error(f"{folder} is not empty: --resume it or choose another")
            with open(folder / "options.json", "x") as file:
                file.write(json.dumps(vars(config)))
        lock = filelock.FileLock(folder / "lock", timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise Error(f"another process is writing to {folder}") from error
        atexit.register(lock.release)  # also keeps a reference: the lock stays alive
    all_gather(None)  # wait until the folder is there


def log(run, step, metrics, columns=None):
    """Log metrics, averaged over ranks, and samples of rank 0 -> the averages."""
    ranks = all_gather(metrics)
    means = {name: sum(x[name] for x in ranks) / WORLD_SIZE for name in metrics}
    if RANK > 0:
        return means
    # JSON has no NaN.
    row = {name: x if math.isfinite(x) else None for name, x in means.items()}
    with open(run.output_dir / "metrics.jsonl", "a") as file:
        print(json.dumps(dict(row, step=step)), file=file)
    if columns:
        with open(run.output_dir / "completions.jsonl", "a") as file:
            for values in zip(*columns.values()):
                row = dict(zip(columns, values), step=step)
                print(json.dumps(row, default=str), file=file)
        sample = f"{row['prompts']!r} -> {row['completions']!r}"
        print0(f"step {step}: reward {row['reward']:.2f} for {sample}")
    return means


def stop_on_signals(run):
    """Let Ctrl-C and SIGTERM end the run after the step; a second one, at once."""

    def stop(number, frame):
        run.stopping = True
        signal.signal(number, signal.SIG_DFL)
        os.write(2, b"stopping after this step; again to stop at once\n")

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def save(run, step):
    """Save a checkpoint in place of the one before."""
    folder = run.output_dir / f"checkpoint-{step}"
    write_folder(run, folder, state_of(run))
    if RANK == 0 and run.checkpoint:
        shutil.rmtree(run.checkpoint)
    run.checkpoint = folder


def write_folder(run, folder, state=None):
    """Write the model (with LoRA, the adapter) and `state` to a folder that
    `from_pretrained` and vLLM load. The folder appears whole or not at all."""
    partial = run.output_dir / "partial"
    policy, lora = run.policy, run.config.lora_rank > 0
    options = dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dsd.get_model_state_dict(policy, options=options)  # on rank 0
    if RANK == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        for name in policy.all_tied_weights_keys:  # would be written twice
            weights.pop(name, None)
        for name, weight in weights.items():
            if weight.dtype == torch.float32 and not lora:  # FSDP keeps float32
                weights[name] = weight.to(run.dtype)
        policy.save_pretrained(partial, state_dict=weights)
        if not lora:  # an adapter's folder must not have a model's config.json
            policy.config.dtype = run.dtype
            policy.config.save_pretrained(partial)
        run.tokenizer.save_pretrained(partial)
    if state:
        dcp.save(state, checkpoint_id=partial / "state")
    if RANK == 0:  # all ranks have written: `dcp.save` waits for them
        partial.rename(folder)
    all_gather(None)  # wait for the rename
    print0(f"saved {folder}")


def state_of(run):
    """{name of a weight: its master and AdamW's state}, for any number of ranks."""
    for master in run.masters:
        if not run.optimizer.state[master]:  # AdamW makes it at the first gradient
            run.optimizer.state[master] = dict(
                step=torch.zeros((), device=DEVICE),
                exp_avg=torch.zeros_like(master),
                exp_avg_sq=torch.zeros_like(master),
            )
    names = [name for name, x in run.policy.named_parameters() if x.requires_grad]
    named = zip(names, run.masters)
    return {name: dict(run.optimizer.state[x], master=x) for name, x in named}


def restore(run):
    """Load the newest checkpoint, if a run is resumed and has one -> its step, or 0."""
    if RANK == 0:
        for name in ("metrics.jsonl", "completions.jsonl"):
            path = run.output_dir / name
            path.touch()
            text = path.read_bytes()  # a kill may have cut off the last line
            os.truncate(path, text.rfind(b"\n") + 1)
    run.checkpoint = transformers.trainer_utils.get_last_checkpoint(run.output_dir)
    if run.checkpoint is None:
        return 0
    dcp.load(state_of(run), checkpoint_id=Path(run.checkpoint, "state"))
    for weight, master in run.rounded:
        weight.data.copy_(master)
    step = int(run.checkpoint.rpartition("-")[2])
    print0(f"going on from {run.checkpoint}")
    if step >= run.config.max_steps:
        print0(f"all {step} steps are done; --max-steps sets a higher number")
    return step


# ------------------------------------------------------------------------ built-in task
def arithmetic(model, seed):
    """Built-in sums. For tiny, 5 in 8 solutions are wrong, which leaves GRPO room."""
    rng = random.Random(seed)
    rows = []
    for a in range(50):
        for b in range(10):
            prompt, answer = f"{a}+{b}=", a + b
            solution = answer + rng.choice([0, 0, 0, 1, 2, 5, 10, 20])
            if model != "tiny":
                c, d = rng.choices(range(10, 100), k=2)
                prompt = f"Calculate {a} - {b} * ({c} - {d})."
                answer = solution = a - b * (c - d)
            rows.append(dict(prompt=prompt, answer=answer, solution=solution))
    return rows


def tiny_model(seed):
    """A 2-layer Qwen2 with 135,168 random weights; its tokens are characters."""
    tokens = ["<eos>", "<unk>", *"0123456789+-*/=()<>#.,:ĠĊabcdefghijklmnopqrstuvwxyz"]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocab, merges=[], eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
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


# ------------------------------------------------------------------------------ options
@dataclass(frozen=True)
class Config:
    """Every option of a run. The command line is made from it; comments are --help."""

    model: str = "tiny"  # Hub name or folder; tiny has its own defaults: see TINY
    data: str = ""  # JSONL file; else sums
    reward: list[str] = field(
        default_factory=["accuracy"].copy
    )  # one or more of accuracy, format, FILE.py:FUNCTION, each with =WEIGHT or without
    step_reward: str = ""  # FILE.py:FUNCTION that scores the steps of each completion
    prompt_template: str = ""  # around {question}; else accuracy asks for \boxed{}
    system_prompt: str = ""  # system message of prompts that have none
    dtype: Literal["bfloat16", "float32"] = DTYPE  # of computing; optimised in float32
    num_generations: int = 8  # G, completions sampled for each prompt
    prompts_per_step: int = 8  # of a step, over all ranks
    max_prompt_length: int = 512  # in tokens; longer prompts are left out
    max_completion_length: int = 512  # in tokens; longer completions are cut off
    temperature: float = 1.0  # of sampling and of every log-prob
    beta: float = 0.04  # weight of the KL term; 0 needs no reference model
    epsilon: float = 0.2  # clip range of the ratio
    epsilon_high: float = 0.0  # clip range above 1 (DAPO: 0.28); 0: epsilon
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = "grpo"  # how losses are averaged
    scale_rewards: Literal["group", "none"] = "group"  # none: no division by the std
    importance_sampling_level: Literal["token", "sequence"] = "token"  # sequence: GSPO
    num_iterations: int = 1  # mu, updates per rollout
    learning_rate: float = 1e-6  # of AdamW, constant after the warm-up
    warmup_steps: int = 10  # steps of linear warm-up
    max_grad_norm: float = 1.0  # gradient clipping; 0: no clipping
    max_steps: int = 200  # training steps; 0: only evaluate
    micro_batch_size: int = 16  # completions in one forward and backward pass
    lora_rank: int = 0  # above 0 only adapters of this rank are trained (needs peft)
    sft_steps: int = 0  # supervised steps on the data's solutions before GRPO
    sft_learning_rate: float = 1e-5  # of the supervised steps
    seed: int = 0  # of everything random
    output_dir: str = ""  # new or empty folder of the run; else runs/TIME-PID
    resume: str = ""  # go on with the run in this folder, with its options
    eval_every: int = 50  # steps between evaluations, with samples logged; 0: none
    save_every: int = 50  # steps between checkpoints, one is kept; 0: only the last

    def __post_init__(self):
        minimum = dict(num_generations=2, prompts_per_step=1, num_iterations=1)
        minimum.update(max_completion_length=1, micro_batch_size=1, temperature=1e-9)
        for name, value in vars(self).items():
            least = minimum.get(name, 0)
            if isinstance(value, (int, float)) and not least <= value < math.inf:
                name = name.replace("_", "-")
                raise Error(f"--{name} must be finite and at least {least}")
        if self.prompt_template and "{question}" not in self.prompt_template:
            raise Error("--prompt-template must contain {question}")
        if self.prompts_per_step % WORLD_SIZE:
            raise Error("--prompts-per-step must be divisible by the number of ranks")


TINY = dict(  # the defaults of `--model tiny`
    prompt_template="{question}",
    prompts_per_step=64,
    micro_batch_size=512,
    max_completion_length=8,
    learning_rate=1e-3,
    sft_steps=250,
    sft_learning_rate=3e-3,
)


def parse_args(argv=None):
    """`Config` from command-line words (default: those of the process)."""
    parser = transformers.HfArgumentParser(Config, allow_abbrev=False)
    # Lines of Config such as `    seed: int = 0  # of everything random`.
    comments = dict(re.findall(r"    (\w+): [^#]*  # (.*)", inspect.getsource(Config)))
    for action in parser._actions:
        action.help = comments.get(action.dest, action.help)
    typed = parser.parse_args(argv)
    if typed.resume:
        saved = json.loads(Path(typed.resume, "options.json").read_text())
        parser.set_defaults(**saved)
    elif typed.model == "tiny":
        parser.set_defaults(**TINY)
    options = vars(parser.parse_args(argv))  # what is typed wins
    default = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    options["output_dir"] = typed.resume or typed.output_dir or default
    return Config(**options)


def main():
    """The command line."""
    try:
        run, rows, eval_rows = set_up(parse_args())
    except (OSError, ImportError) as error:  # a file, a model or a package is missing
        hint = f" (pip install {error.name})" if getattr(error, "name", None) else ""
        raise Error(f"{error}{hint}") from error
    train(run, rows, eval_rows)
    if WORLD_SIZE > 1:  # threads of gloo may crash while Python ends
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
