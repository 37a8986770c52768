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

Shapes: B prompts, G samples of each, N = B*G completions (rows b*G … b*G+G-1 belong to
prompt b), P prompt length (left-padded), C completion length (right-padded), V
vocabulary, H hidden size, M completion tokens without padding.

Where this departs from the papers and from common tutorials:
  - Equal rewards have advantage exactly 0; rounding could make it ±0.8.
  - A completion's mask includes its first EOS; `ids != pad` loses it if pad is EOS.
  - With one update per rollout the ratio is exactly 1 and nothing is clipped.
  - Normalisers count the whole optimizer batch: micro-batches change no gradient.
  - AdamW moves float32 weights: at a learning rate of 1e-6 bfloat16 would stand still.
  - A prompt runs once for its group, not once for each completion.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import json
import math
import os
import random
import re
import resource
import runpy
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import find_adapter_config_file

RANK = int(os.environ.get("RANK", 0))  # of this process; torchrun sets it
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # number of processes
# Number of logits that `LogNormaliser` computes at once; on a CPU they fit its cache.
AT_ONCE = 2**25 if torch.cuda.is_available() else 2**19


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
    reward: tuple = ("accuracy",)  # accuracy, format, code, FILE.py:FUNCTION [=WEIGHT]
    unsafe_code: bool = False  # the code reward without bubblewrap: it can do anything
    chat_template: Literal["auto", "on", "off"] = "auto"  # auto: if the model knows it
    prompt_template: str = ""  # text around {question}; else a \boxed{} for accuracy
    system_prompt: str = ""  # system message of every prompt
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 on a GPU
    # sampling
    num_generations: int = 8  # G, completions sampled for each prompt
    prompts_per_step: int = 8  # B, prompts of each step, over all processes
    max_prompt_length: int = 512  # in tokens; longer prompts are left out
    max_completion_length: int = 512  # in tokens; longer completions are cut off
    temperature: float = 1.0  # of sampling and of every log-prob
    static_cache: bool = False  # sample by transformers, on a GPU with CUDA graphs
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

    def __post_init__(self):
        for name, value in vars(self).items():
            least = LEAST.get(name, 0)
            if isinstance(value, (int, float)) and not value >= least:
                raise Error(f"--{name.replace('_', '-')} must be at least {least}")
        if "{question}" not in (self.prompt_template or "{question}"):
            raise Error("--prompt-template must contain {question}")


LEAST = dict(prompts_per_step=1, num_generations=2, max_completion_length=1)  # else 0
LEAST.update(num_iterations=1, temperature=1e-9)


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
    advantages = groups - groups.mean(1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + eps)
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards {scale_rewards!r} is unknown")
    # Rounding can put the mean of equal rewards one bit off; their std is that bit.
    equal = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    return advantages.masked_fill(equal, 0).view(-1)


def process_advantages(
    step_rewards,
    step_ends,
    num_generations,
    num_tokens,
    eps=1e-8,
    scale_rewards="group",
):
    """Process supervision (DeepSeekMath 4.1.3): (N, C) advantages, C = `num_tokens`.
    step_rewards, step_ends: N lists, a number for each step of a completion and the
    index of its last token. The step rewards of a group are normalised together; a
    token's advantage sums those of the steps that end at or after it. Raises ValueError
    if ends and rewards differ in number. Needs `group_advantages`.
    >>> process_advantages([[1, 0], [0, 1]], [[0, 2], [1, 2]], 2, 4)
    tensor([[ 0.0000, -0.8660, -0.8660,  0.0000],
            [ 0.0000,  0.0000,  0.8660,  0.0000]])
    """
    advantages = torch.zeros(len(step_rewards), num_tokens)
    for start in range(0, len(step_rewards), num_generations):
        numbers = []
        ends = []
        for i in range(start, start + num_generations):
            for reward, end in zip(step_rewards[i], step_ends[i], strict=True):
                numbers.append(float(reward))
                ends.append((i, end))
        if len(numbers) > 1:  # all steps are one group; a single one is its own mean
            rewards = torch.tensor(numbers)
            normalised = group_advantages(rewards, len(rewards), scale_rewards, eps)
            for (i, end), advantage in zip(ends, normalised):
                advantages[i, : end + 1] += advantage
    return advantages


def masked_mean(x, mask, dim=None):
    """Mean of x where mask is true, of all or along `dim`; 0 where there is nothing."""
    return (x * mask).sum(dim) / mask.sum(dim).clamp(min=1)


def kl_k3(logp, ref_logp):
    """exp(d) - d - 1 with d = ref_logp - logp: (N, C) in nats, never negative.
    Over tokens sampled from the policy exp(d) - 1 averages 0 and -d KL(policy,
    reference), and so does this: DeepSeekMath eq. 4, Schulman's k3
    (joschu.net/blog/kl-approx.html). bfloat16 would round it away.
    >>> kl_k3(torch.tensor([0.7]).log(), torch.tensor([0.5]).log())
    tensor([0.0508])
    """
    d = ref_logp - logp
    return torch.expm1(d) - d


def importance_ratio(logp, old_logp, mask=None, importance_sampling_level="token"):
    """New over old probability of each token, (N, C); 1 without `old_logp`.
    At level "sequence" all tokens of a completion have exp of the mean of their
    logp - old_logp (GSPO, arXiv:2507.18071, eq. 7). Needs `masked_mean`."""
    log_ratio = logp - (logp if old_logp is None else old_logp).detach()
    if importance_sampling_level == "sequence":
        log_ratio = masked_mean(log_ratio, mask, dim=1)[:, None].expand_as(logp)
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
    or (N, C). The "sequence" ratio takes `mask`. PPO (arXiv:1707.06347) eq. 7; DAPO's
    `epsilon_high` (arXiv:2503.14476) is `epsilon` if None or 0.
    Needs `importance_ratio` and `masked_mean`.
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
    the whole optimizer batch (None: of this call).
    Needs `clipped_surrogate`, `importance_ratio`, `kl_k3` and `masked_mean`."""
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


# ---------------------------------------------------------------- sampling, log-probs
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


def positions(attention_mask):
    """Position of each token, padding on the left not counted."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


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
    """G completions of each prompt, sampled from the policy as it is -> ids (N, C).
    prompt_ids, prompt_mask: (B, P), left-padded. C is `max_completion_length`; after a
    row's EOS stands the first of `eos_token_ids` (a list). Temperature 0 is greedy. The
    model is in eval mode and without `sharing_obstacle`; its generation config has no
    part in it. Needs `sample`, `positions`, `cached_forward`, `F`, `DynamicCache`."""
    eos = torch.tensor(eos_token_ids, device=prompt_ids.device)
    shape = len(prompt_ids) * num_generations, max_completion_length
    completion_ids = prompt_ids.new_full(shape, eos_token_ids[0])
    live = torch.arange(shape[0], device=prompt_ids.device)  # rows not yet finished
    finished = torch.zeros_like(live, dtype=torch.bool)
    look_every = 16 if prompt_ids.is_cuda else 1  # to look is to wait for the GPU
    cache = DynamicCache(config=model.config)
    attention_mask = prompt_mask
    ids = prompt_ids  # what the model reads next
    for i in range(max_completion_length):
        output = cached_forward(model, ids, attention_mask, cache, logits_to_keep=1)
        logits = output.logits[:, -1]
        if i == 0:  # the prompts have run once; their groups go on from there
            logits = logits.repeat_interleave(num_generations, 0)  # (N, V)
            attention_mask = attention_mask.repeat_interleave(num_generations, 0)
            cache.batch_repeat_interleave(num_generations)
        sampled = sample(logits, temperature).masked_fill(finished, eos_token_ids[0])
        completion_ids[live, i] = sampled
        finished = torch.isin(sampled, eos)  # rows that have finished are given EOS
        if i % look_every == 0:
            unfinished = (~finished).nonzero()[:, 0]
            if len(unfinished) == 0:
                break
            if len(unfinished) < len(live):
                cache.batch_select_indices(unfinished)
                live = live[unfinished]
                sampled = sampled[unfinished]
                finished = finished[unfinished]
                attention_mask = attention_mask[unfinished]
        attention_mask = F.pad(attention_mask, (0, 1), value=True)
        ids = sampled[:, None]
    return completion_ids


def generate_with_transformers(
    model,
    prompt_ids,
    prompt_mask,
    num_generations,
    max_completion_length,
    eos_token_ids,
    temperature=1.0,
    static=False,
):
    """`generate` for any model. Each prompt runs alone, as some recurrent models sample
    wrongly after padding; with a `static` cache (GPU: CUDA graphs) all at once."""
    own_config = model.generation_config
    # Not as an argument: what is unset there would come from the model's own config.
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=max_completion_length,
        do_sample=temperature > 0,
        temperature=temperature or None,
        top_k=0,
        num_return_sequences=num_generations,
        eos_token_id=eos_token_ids,
        pad_token_id=eos_token_ids[0],
        cache_implementation="static" if static else None,
    )
    completions = []
    size = len(prompt_ids) if static else 1
    try:
        for ids, mask in zip(prompt_ids.split(size), prompt_mask.split(size)):
            ids = ids[:, mask.any(0)]
            mask = mask[:, mask.any(0)].long()
            output = model.generate(ids, attention_mask=mask)[:, ids.shape[1] :]
            missing = max_completion_length - output.shape[1]
            completions.append(F.pad(output, (0, missing), value=eos_token_ids[0]))
    finally:
        model.generation_config = own_config
    return torch.cat(completions)  # (N, C)


def token_logprobs(
    model,
    prompt_ids,
    prompt_mask,
    completion_ids,
    completion_mask,
    temperature=1.0,
    share_prompts=True,
):
    """log-prob of each completion token given all before it: (N, C) float32.
    0 where masked. prompt_ids, prompt_mask: (B, P), left-padded; completion_ids,
    completion_mask: (N, C), right-padded, bool, rows b*G … b*G+G-1 continue prompt b.
    The model must be in eval mode: dropout and gradient checkpointing change values.
    Its logits are divided by `temperature`, as in sampling.
    `share_prompts` runs each prompt once and its completions on G copies of its
    key-value cache, through which gradients flow: only for models without
    `sharing_obstacle`. Else this is the model's plain forward. Needs `positions`,
    `cached_forward`, `LogNormaliser`, `AT_ONCE`, `DynamicCache`, `F`, `math`."""
    num_generations = len(completion_ids) // len(prompt_ids)
    length = completion_ids.shape[1]
    ids = completion_ids[completion_mask]  # (M,): padding needs no output layer
    inputs = completion_ids[:, :-1]  # the last token predicts nothing
    repeated_mask = prompt_mask.repeat_interleave(num_generations, 0)
    ones = torch.ones_like(inputs, dtype=torch.bool)  # padding behind is never seen
    attention_mask = torch.cat([repeated_mask, ones], 1)  # (N, P + C - 1)
    if not share_prompts:
        repeated_ids = prompt_ids.repeat_interleave(num_generations, 0)
        logits = model.forward(
            torch.cat([repeated_ids, inputs], 1),
            attention_mask=attention_mask.long(),
            position_ids=positions(attention_mask),
            use_cache=False,
            logits_to_keep=length,
        ).logits[:, -length:]
        logits = logits[completion_mask].float() / temperature  # (M, V)
        logp = -F.cross_entropy(logits, ids, reduction="none")
    else:
        cache = DynamicCache(config=model.config)
        body = model.base_model  # all but the output layer
        output = cached_forward(body, prompt_ids, prompt_mask, cache)
        # A prompt's last hidden state predicts the first tokens of its completions.
        hidden = output.last_hidden_state[:, -1:].repeat_interleave(num_generations, 0)
        if length > 1:  # The hidden states of all but the last predict the others.
            cache.batch_repeat_interleave(num_generations)
            output = cached_forward(body, inputs, attention_mask, cache)
            hidden = torch.cat([hidden, output.last_hidden_state], 1)  # (N, C, H)
        hidden = hidden[completion_mask] / temperature  # (M, H): divides the logits
        weight = model.get_output_embeddings().weight  # (V, H): a row for each token
        logits = torch.einsum("mh,mh->m", hidden, F.embedding(ids, weight))  # (M,)
        logp = logits.float() - LogNormaliser.apply(hidden, weight)
    return logp.new_zeros(completion_mask.shape).masked_scatter(completion_mask, logp)


def cached_forward(module, ids, mask, cache, **options):
    """Run ids (N, L) after what `cache` holds and add them to it; mask is of both."""
    return module(
        ids,
        attention_mask=mask.long(),
        position_ids=positions(mask)[:, -ids.shape[1] :],
        past_key_values=cache,
        use_cache=True,
        **options,
    )


class LogNormaliser(torch.autograd.Function):
    """log of the sum of exp(hidden @ weight.T): (M, H), (V, H) -> (M,) float32.
    It takes v words of the vocabulary at a time (a GPU wants multiples of 64), computes
    their logits (M, v) again in backward and never holds all. Needs `AT_ONCE`."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.size = max(64, AT_ONCE // max(1, len(hidden)) // 64 * 64)
        log_z = torch.tensor(-math.inf, device=hidden.device)
        for words in weight.split(ctx.size):  # (v, H)
            logits = (hidden @ words.t()).float()  # (M, v)
            log_z = torch.logaddexp(log_z, logits.logsumexp(1))
        ctx.save_for_backward(hidden, weight, log_z)
        return log_z

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, log_z = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(weight), ctx.size):
            part = slice(start, start + ctx.size)
            words = weight[part]
            logits = (hidden @ words.t()).float()
            softmax = logits.sub_(log_z[:, None]).exp_()  # d log_z / d logits
            grad_logits = softmax.mul_(grad[:, None]).to(words.dtype)
            grad_hidden += grad_logits @ words
            if grad_weight is not None:  # as with LoRA
                torch.mm(grad_logits.t(), hidden, out=grad_weight[part])
        return grad_hidden.to(hidden.dtype), grad_weight


def sharing_obstacle(model):
    """What keeps `token_logprobs` and `generate` from sharing prompts; "" if nothing.
    Values and gradients must be those of the plain forward: Gemma 2 caps its logits,
    Cohere scales them, some layers cannot go on from a shared cache. For a float32
    model. Raises `Error` where padding or later tokens change a log-prob. Needs
    `token_logprobs`, `pad`, `one_line` and `Error`."""
    embeddings = model.get_input_embeddings().weight
    device = embeddings.device

    def compute(prompts, completions, share_prompts):
        """Log-probs of the last completion, gradients of the embeddings."""
        batch = *pad(prompts, "left", device), *pad(completions, "right", device)
        logp = token_logprobs(model, *batch, share_prompts=share_prompts)
        (grad,) = torch.autograd.grad(logp.sum(), embeddings)
        return logp[-1, :2].detach(), grad

    def close(found, expected):
        return (found - expected).norm() <= 1e-4 * expected.norm()

    padded = [[2, 3, 4, 2, 3], [5, 6]], [[2, 3, 4, 5], [7, 8]] * 2  # B = 2, G = 2
    logp, grad = compute(*padded, share_prompts=False)
    alone, _ = compute([[5, 6]], [[7, 8]], share_prompts=False)
    if not close(logp, alone):
        raise Error(f"{type(model).__name__}: padding or later tokens change log-probs")
    try:
        shared_logp, shared_grad = compute(*padded, share_prompts=True)
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # RuntimeErrors as well
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        return one_line(error)
    same = close(shared_logp, logp) and close(shared_grad, grad)
    return "" if same else "log-probs or gradients differ"


# ------------------------------------------------------------------------------ update
class MasterAdamW:
    """AdamW (arXiv:1711.05101; weight decay 0) on float32 masters of bfloat16 weights,
    or on float32 weights. bfloat16 rounds away what is less than 1/512 of a weight: so
    the weight is its master rounded to the upper 16 bits; `lower` keeps the other 16.
    Bytes each: 2 + 2, moments 8, gradient 2 or 4. Needs `local`, `whole`, `Error`."""

    def __init__(self, model):
        self.num_steps = 0
        self.moments = {}
        self.lower = {}  # halves of the masters of bfloat16 weights
        for param in model.parameters():
            if param.requires_grad:
                weight = local(param.detach())
                zeros = torch.zeros_like(weight, dtype=torch.float32)
                self.moments[param] = zeros, zeros.clone()
                if weight.dtype == torch.bfloat16:
                    self.lower[param] = torch.zeros_like(weight, dtype=torch.int16)

    def tensors(self):
        """This rank's part of all weights, moments and lower halves."""
        tensors = [local(param.detach()) for param in self.moments]
        for moments in self.moments.values():
            tensors += moments
        return tensors + list(self.lower.values())

    @torch.no_grad()
    def step(self, learning_rate, max_grad_norm):
        """Scale the gradient down to `max_grad_norm` (0: as it is), update, free it ->
        its norm before. Raises `Error` if that is not finite."""
        params = [param for param in self.moments if param.grad is not None]
        norms = [torch.linalg.vector_norm(x.grad, dtype=torch.float32) for x in params]
        norm = whole(torch.stack(norms).norm()).item()
        if not math.isfinite(norm):
            raise Error(f"the gradient's norm is {norm}: it has moved no weight")
        scale = min(1.0, (max_grad_norm or math.inf) / (norm + 1e-6))
        self.num_steps += 1  # first, so that `train` never saves half a step
        for param in params:
            master = local(param).float()  # the weight itself where that is float32
            if param in self.lower:
                bits = master.view(torch.int32)  # the same memory
                bits += self.lower[param]
            grad = local(param.grad).float()
            grad *= scale
            param.grad = None
            exp_avg, exp_avg_sq = self.moments[param]
            steps = torch.full((), float(self.num_steps), device=grad.device)
            torch._fused_adamw_(  # what torch.optim.AdamW calls
                [master],
                grads=[grad],
                exp_avgs=[exp_avg],
                exp_avg_sqs=[exp_avg_sq],
                max_exp_avg_sqs=[],
                state_steps=[steps],
                lr=learning_rate,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                weight_decay=0.0,
                amsgrad=False,
                maximize=False,
            )
            if param in self.lower:
                self.lower[param].copy_(bits)  # the lower 16, as a signed number
                bits -= self.lower[param]  # leaves the nearest bfloat16
                local(param).copy_(master)
        return norm


def cut_micro_batches(rows, prompt_lengths, lengths, max_tokens):
    """Cut row numbers (B, G) into micro-batches of at most `max_tokens` tokens.
    prompt_lengths: (B,), lengths of completions: (N,). Groups, and completions in each,
    are sorted, longest first, to save padding. A single completion may exceed it."""
    num_generations = len(lengths) // len(prompt_lengths)
    rows = rows.gather(1, lengths[rows].argsort(1, descending=True))
    rows = rows[lengths[rows[:, 0]].argsort(descending=True)]

    def cut(rows):
        longest_prompt = prompt_lengths[rows[:, 0] // num_generations].max()
        num_tokens = len(rows) * longest_prompt + rows.numel() * lengths[rows].max()
        if num_tokens <= max_tokens or rows.numel() == 1:
            return [rows]
        first, second = rows.tensor_split(2, dim=0 if len(rows) > 1 else 1)
        return cut(first) + cut(second)

    return cut(rows)


def take_rows(batch, rows):
    """The part of a batch with these row numbers, without columns of padding."""
    prompt_ids, prompt_mask, completion_ids, mask = batch
    prompts = rows[:, 0] // (len(mask) // len(prompt_ids))
    completions = rows.flatten()
    prompt_columns = prompt_mask[prompts].any(0)  # (P,)
    columns = mask[completions].any(0)  # (C,)
    columns[:2] = True  # with one, `token_logprobs` skips a pass that other ranks make
    return (
        prompt_ids[prompts][:, prompt_columns],
        prompt_mask[prompts][:, prompt_columns],
        completion_ids[completions][:, columns],
        mask[completions][:, columns],
    )


def update(run, learning_rate, batch, advantages):
    """num_iterations (mu) AdamW steps on one rollout -> metrics.
    batch: prompt_ids, prompt_mask, completion_ids, mask; advantages: (N,) or (N, C)."""
    config = run.config
    _, prompt_mask, _, mask = batch
    # FSDP averages gradients over ranks: divide by the mean number of tokens of a rank.
    tokens_per_rank = average(mask.sum().item())
    advantages = advantages.to(mask.device).reshape(len(mask), -1)
    rows = torch.arange(len(mask)).view(len(prompt_mask), -1)  # (B, G)
    if run.reference is None:  # a group whose advantages are all 0 has no gradient
        live = advantages[rows].flatten(1).any(1).cpu()  # (B,)
        rows = rows[live] if live.any() else rows[:1]  # one, for a gradient of 0
    prompt_lengths = prompt_mask.sum(1).cpu()
    lengths = mask.sum(1).cpu()
    sizes = lengths  # in tokens
    if not run.share_prompts:  # then each completion runs with a prompt of its own
        sizes = lengths + prompt_lengths.max()
    part_rows = cut_micro_batches(rows, prompt_lengths, sizes, run.micro_batch_tokens)
    parts = [take_rows(batch, numbers) for numbers in part_rows]
    # Ranks wait for each other at every pass: some repeat a part with an empty mask.
    for _ in range(max(all_gather(len(part_rows))) - len(part_rows)):
        part_rows.append(part_rows[0])
        parts.append((*parts[0][:3], torch.zeros_like(parts[0][3])))
    for param in run.optimizer.moments:  # a sum of bfloat16 gradients loses small ones
        param.grad_dtype = torch.float32 if len(parts) > 1 else param.dtype
    ref_logps = [run.reference(*part) if run.reference else None for part in parts]
    old_logps = []
    num_live_tokens = average(lengths[rows].sum().item())  # of a rank, in one pass
    totals = defaultdict(float, num_tokens=tokens_per_rank * WORLD_SIZE)
    for iteration in range(config.num_iterations):
        for i, part in enumerate(parts):
            *_, part_mask = part
            logp = run.policy.token_logprobs(*part)  # bound in `make_ready`
            if iteration == 0:  # before any weight has moved
                old_logps.append(logp.detach())
            loss, metrics = grpo_loss(
                logp,
                old_logps[i],
                ref_logps[i],
                advantages[part_rows[i].flatten(), : logp.shape[1]],
                part_mask,
                epsilon=config.epsilon,
                epsilon_high=config.epsilon_high,
                beta=config.beta,
                loss_type=config.loss_type,
                importance_sampling_level=config.importance_sampling_level,
                max_completion_length=config.max_completion_length,
                num_sequences=len(mask),
                num_tokens=tokens_per_rank,
            )
            loss.backward()
            share = part_mask.sum() / num_live_tokens / config.num_iterations  # of all
            for name, value in metrics.items():
                totals[name] += (share * value).item()
            totals["loss"] += loss.item() / config.num_iterations
        for module in run.policy.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()  # the step moves the shards, not the whole weights
        totals["grad_norm"] = run.optimizer.step(learning_rate, config.max_grad_norm)
    return totals


# ---------------------------------------------------------------------------- training
def train(config):
    """GRPO from the first prompt to the last checkpoint."""
    run, train_rows, eval_rows = set_up(config)
    stop = ""  # the signal that asked for an end
    step = restore(run)
    num_updates = run.optimizer.num_steps
    heed_signals(run)
    pbar = tqdm(total=config.max_steps, initial=step, disable=RANK > 0)
    try:
        while step < config.max_steps and not stop:
            if config.eval_every and step % config.eval_every == 0:
                evaluate(run, eval_rows, step)
            record = train_step(run, train_rows, step + 1)
            step += 1
            num_updates = run.optimizer.num_steps
            log(run, record)
            pbar.set_postfix(reward=record["reward"], kl=record["kl"], refresh=False)
            pbar.update()
            stop = max(all_gather(run.stop))  # a signal to any rank stops them all
            is_last = step == config.max_steps
            if is_last or (config.save_every and step % config.save_every == 0):
                save(run, f"checkpoint-{step}")
        if step < config.max_steps:  # stopped by a signal: saved below
            raise Error(f"{stop} after step {step}: --resume {run.output_dir}")
        if config.eval_every:
            evaluate(run, eval_rows, step)
    except BaseException as error:
        # Save the last finished step, unless weights have moved since, or one of
        # several processes has failed alone: an `Error` is raised by all of them.
        unmoved = run.optimizer.num_steps == num_updates
        together = WORLD_SIZE == 1 or type(error) is Error
        name = f"checkpoint-{step}"
        if step and unmoved and together and not (run.output_dir / name).exists():
            save(run, name)
        raise
    finally:
        pbar.close()
    conclude(run)


def train_step(run, train_rows, step):
    """One step of GRPO -> its row of metrics."""
    config = run.config
    num_generations = config.num_generations
    set_seed(config, step)
    start = time.perf_counter()
    # 1. take B prompts, of which each process has its share
    rows = prompt_batch(train_rows, step, config.prompts_per_step, config.seed)
    # 2. sample G completions of each from the current policy
    batch = rollout(run, rows, num_generations, config.temperature)
    *_, completion_ids, mask = batch
    # 3. score them
    texts, scores, step_scores = score_completions(run, rows, batch)
    rewards = scores["reward"].float()  # sums such as 0.1 + 0.2 and 0.3 are equal
    # 4. normalise the scores within each group
    scale = config.scale_rewards
    if step_scores:
        advantages = process_advantages(
            *step_scores, num_generations, mask.shape[1], scale_rewards=scale
        )
    else:
        advantages = group_advantages(rewards, num_generations, scale)
    # 5. minimise -min(ratio A, clip(ratio) A) + beta KL
    middle = time.perf_counter()
    learning_rate = config.learning_rate * min(1, step / max(1, config.warmup_steps))
    metrics = update(run, learning_rate, batch, advantages)
    end = time.perf_counter()
    # 6. measure it
    eos = torch.tensor(run.eos_token_ids, device=run.device)
    groups = rewards.view(-1, num_generations)
    columns = dict(
        scores,
        reward_std=groups.std(1),
        zero_std_fraction=groups.amax(1) == groups.amin(1),
        completion_length=mask.sum(1),
        truncated_fraction=~torch.isin(completion_ids, eos).any(1),
    )
    for name, column in columns.items():
        metrics[name] = column.double().mean().item()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux: in KiB
    if torch.cuda.is_available():
        memory = torch.cuda.max_memory_allocated() / 2**30
    metrics.update(
        learning_rate=learning_rate,
        rollout_seconds=middle - start,
        update_seconds=end - middle,
        step_seconds=end - start,
        peak_memory_gb=memory,
    )
    if config.eval_every and (step == 1 or step % config.eval_every == 0):
        for row, text, reward in zip(rows[:3], texts[::num_generations], groups[:, 0]):
            print0(f"reward {reward:.3g}: {row['prompts'][-80:]!r} -> {text[:300]!r}")
    return dict(step=step, **{name: average(x) for name, x in metrics.items()})


def rollout(run, rows, num_generations, temperature):
    """Completions of B rows -> prompt_ids, prompt_mask (B, P), completion_ids, mask."""
    prompts = pad([row["prompt_ids"] for row in rows], "left", run.device)
    completion_ids = run.generate(
        run.policy,
        *prompts,
        num_generations,
        run.config.max_completion_length,
        run.eos_token_ids,
        temperature=temperature,
    )
    return *prompts, completion_ids, completion_mask(completion_ids, run.eos_token_ids)


def score_completions(run, rows, batch):
    """What the completions of B rows are worth -> texts, scores, step_scores.
    A reward function gives each completion a number; or None, not judged, which becomes
    the mean of its group; or a list of numbers, one for each step. scores: {reward,
    rewards/<name>: (N,)}; a list counts as its mean. step_scores: None or, with lists,
    step_rewards and step_ends of `process_advantages`; a number is a last step."""
    *_, completion_ids, mask = batch
    num_generations = len(mask) // len(rows)
    ids = [x[:n] for x, n in zip(completion_ids.tolist(), mask.sum(1).tolist())]
    texts = run.tokenizer.batch_decode(ids, skip_special_tokens=True)
    steps = [split_steps(run.tokenizer, x) for x in ids]  # of each completion
    columns = dict(completions=texts, completion_ids=ids)
    columns["steps"] = [[text for text, _ in x] for x in steps]
    for column in rows[0].keys() - columns.keys():
        columns[column] = [row[column] for row in rows for _ in range(num_generations)]
    scores = dict(reward=torch.zeros(len(texts)).double())
    step_rewards = [[] for _ in texts]
    step_ends = [[] for _ in texts]
    step_scores = None
    failure = ""
    try:
        for name, (function, weight) in run.rewards.items():
            values = function(**copy.deepcopy(columns))
            if not isinstance(values, list) or len(values) != len(texts):
                raise ValueError(f"it must return a list of {len(texts)} values")
            means = [math.nan] * len(texts)
            for i, value in enumerate(values):
                if value is None:
                    continue
                numbers, ends = [value], [len(ids[i]) - 1]
                if isinstance(value, list):
                    step_scores = step_rewards, step_ends  # still being filled
                    numbers = value
                    ends = [end for _, end in steps[i]]
                if len(numbers) != len(ends) or not all(map(math.isfinite, numbers)):
                    raise ValueError(f"{value!r} for {len(ends)} steps")
                if weight:  # else it is only logged
                    step_rewards[i] += [weight * number for number in numbers]
                    step_ends[i] += ends
                means[i] = sum(numbers) / max(1, len(numbers))
            groups = torch.tensor(means, dtype=torch.float64).view(-1, num_generations)
            for judged_mean in (groups.nanmean(1, keepdim=True), groups.nanmean()):
                groups = torch.where(groups.isnan(), judged_mean, groups)
            filled = groups.flatten().nan_to_num()
            scores[f"rewards/{name}"] = filled
            scores["reward"] += weight * filled
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        failure = f"the reward {name} failed: {error!r}"
    failure = max(all_gather(failure))  # any rank's
    if failure:
        raise Error(failure)
    return texts, scores, step_scores


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


def evaluate(run, rows, step):
    """Mean rewards of greedy completions of the held-out rows, logged."""
    # Every process has the same number of rows, and decodes no more than in training.
    mine = rows[RANK : len(rows) // WORLD_SIZE * WORLD_SIZE : WORLD_SIZE]
    size = run.config.prompts_per_step * run.config.num_generations // WORLD_SIZE
    columns = defaultdict(list)
    for start in range(0, len(mine), size):
        part = mine[start : start + size]
        batch = rollout(run, part, num_generations=1, temperature=0)
        for name, column in score_completions(run, part, batch)[1].items():
            columns[f"eval/{name}"] += column.tolist()
    means = {name: average(sum(x) / len(x)) for name, x in columns.items()}
    log(run, dict(step=step, **means))


def set_up(config):
    """(run, rows to train on, rows held out), after the supervised steps. `run` is what
    all share: config, device, rewards, output_dir, `stop` and what `load` adds."""
    if config.prompts_per_step % WORLD_SIZE or (config.lora_rank and WORLD_SIZE > 1):
        raise Error("several processes share --prompts-per-step evenly, without LoRA")
    run = SimpleNamespace(config=config, device=join_ranks(), stop="")
    run.rewards = load_rewards(config.reward, config.unsafe_code)
    run.needs_answer = "accuracy" in run.rewards
    if config.data:
        train_rows = read_rows(config.data, run.needs_answer)
    else:
        train_rows = arithmetic(config.model, config.seed)
    if config.eval_data:
        eval_rows = read_rows(config.eval_data, run.needs_answer)
    else:
        random.Random(config.seed).shuffle(train_rows)
        held_out = min(64, len(train_rows) // 10)
        eval_rows, train_rows = train_rows[:held_out], train_rows[held_out:]
    run.output_dir = open_output_dir(config)
    start = config.model
    if config.sft_steps:  # GRPO starts from what this leaves, and so does its reference
        start = str(run.output_dir / "sft")
        if not Path(start).exists():
            sft(run, train_rows)
    load(run, start)
    train_rows = encode_prompts(train_rows, run)
    eval_rows = encode_prompts(eval_rows, run)
    print0(f"the first prompt: {[row['prompts'] for row in train_rows[:1]]}")
    return run, train_rows, eval_rows


def sft(run, rows):
    """Supervised steps on the rows' solutions; the model is left in OUTPUT_DIR/sft.
    An update with advantage 1 and no reference follows the cross-entropy's gradient."""
    run = copy.copy(run)
    run.config = config = dataclasses.replace(
        run.config, loss_type="dapo", beta=0, num_iterations=1, temperature=1.0
    )
    load(run, config.model)
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
        batch = *pad(prompts, "left", run.device), *pad(solutions, "right", run.device)
        metrics = update(run, config.sft_learning_rate, batch, torch.ones(len(prompts)))
        progress.set_postfix(loss=metrics["entropy"])  # mean of -logp: cross-entropy
    save(run, "sft", with_optimizer=False)


def log(run, record):
    """Append a row to metrics.jsonl."""
    if RANK == 0:
        with open(run.output_dir / "metrics.jsonl", "a") as lines:
            print(json.dumps(record), file=lines)


def conclude(run):
    """Say in two lines what happened."""
    with open(run.output_dir / "metrics.jsonl") as lines:
        rows = [json.loads(line) for line in lines]
    held = [row["eval/reward"] for row in rows if "eval/reward" in row]
    if held:
        print0(f"greedy held-out reward: {held[0]:.2f} before, {held[-1]:.2f} after")
    rewards = [row["reward"] for row in rows if "reward" in row]
    if rewards:
        means = torch.stack([part.mean() for part in torch.tensor(rewards).chunk(40)])
        heights = (means - means.min()) / (means.max() - means.min()).clamp(min=1e-9)
        bars = "".join("▁▂▃▄▅▆▇█"[i] for i in (7 * heights).round().int())
        print0(f"reward by step: {means[0]:.2f} {bars} {means[-1]:.2f}")


def set_seed(config, step):
    """Each step has a seed of its own, so that a resumed run draws the same numbers."""
    seed = config.seed * 1_000_003 + step * WORLD_SIZE + RANK
    random.seed(seed)
    torch.manual_seed(seed)


def heed_signals(run):
    """On SIGINT or SIGTERM finish the step, save, end; the same again ends at once."""

    def ask(number, frame):
        run.stop = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        os.write(2, f"{run.stop}: finishing the step; again to stop at once\n".encode())

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)


def one_line(error):
    """The message of an exception without its line breaks."""
    return " ".join(str(error).split()) or repr(error)


# -------------------------------------------------------------------- data and prompts
def read_rows(source, needs_answer):
    """Rows (dicts) of a JSONL file, or of the Hub data set NAME[:CONFIG[:SPLIT]].
    `prompt`, `question` or `problem` (text or chat messages) becomes "prompt"; `answer`
    or `solution` becomes "answer"; other columns stay for the reward functions."""
    if source.endswith((".jsonl", ".json")):
        lines = Path(source).read_text(encoding="utf-8-sig").split("\n")
    else:
        name, _, options = source.partition(":")
        config, _, split = options.partition(":")
        import datasets

        lines = datasets.load_dataset(name, config or None, split=split or "train")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line) if isinstance(line, str) else line
            prompt = row.get("prompt") or row.get("question") or row["problem"]
            messages = [dict(role="user", content=prompt)]
            for message in messages if isinstance(prompt, str) else prompt:
                (message["role"] + message["content"]).encode()  # no lone surrogates
            answer = row.get("answer", row.get("solution"))
            if needs_answer:
                gold_answers(answer)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Error(f"{source}:{number}: not a row of data: {error!r}") from None
        rows.append({**row, "prompt": prompt, "answer": answer})
    return rows


def chat_template_fits(tokenizer, eos_token_ids):
    """Whether the template ends turns with an EOS; else the model never saw it."""
    if not tokenizer.chat_template:
        return False
    messages = [dict(role=role, content=role) for role in ("user", "assistant")]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ending = text.rpartition("assistant")[2].strip()
    return ending.startswith(tuple(tokenizer.convert_ids_to_tokens(eos_token_ids)))


BOXED = "{question}\nReason step by step, and put your final answer within \\boxed{}.\n"


def encode_prompts(rows, run):
    """Rows with "prompts" (rendered), "prompt_ids" and "messages", if not too long."""
    config, tokenizer = run.config, run.tokenizer
    template = config.prompt_template or (BOXED if run.needs_answer else "{question}")

    def encode(row, chat):
        messages = row["prompt"]
        if isinstance(messages, str):
            content = template.replace("{question}", messages)
            messages = [dict(role="user", content=content)]
        if config.system_prompt and messages[0]["role"] != "system":
            messages = [dict(role="system", content=config.system_prompt), *messages]
        text = "\n".join(message["content"] for message in messages)
        if chat:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer.encode(text, add_special_tokens=not chat)  # it has its own BOS
        if ids and ids[-1] in run.eos_token_ids:  # some tokenizers end every text
            ids.pop()
        return {**row, "prompts": text, "prompt_ids": ids, "messages": messages}

    try:
        chat = config.chat_template == "on"
        if config.chat_template == "auto":
            chat = chat_template_fits(tokenizer, run.eos_token_ids)
        encoded = [encode(row, chat) for row in rows]
    except Exception as error:  # whatever a template raises
        raise Error(f"{one_line(error)}: see --chat-template") from error
    blank = dict.fromkeys(name for row in encoded for name in row)  # of every column
    kept = []
    for row in encoded:
        if 0 < len(row["prompt_ids"]) <= config.max_prompt_length:
            kept.append({**blank, **row})
    print0(f"{len(kept)} of {len(rows)} prompts are neither empty nor too long")
    return kept


def prompt_batch(rows, step, size, seed):
    """This process's share of the `size` rows of a step; every epoch is shuffled."""
    if len(rows) < size:
        raise Error(f"--prompts-per-step {size}: there are only {len(rows)} rows")
    epoch, i = divmod(step - 1, len(rows) // size)
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(len(rows), generator=generator)
    return [rows[j] for j in order[i * size : (i + 1) * size][RANK::WORLD_SIZE]]


def pad(sequences, side, device):
    """Lists of token ids -> ids and mask: (len(sequences), longest), int64 and bool."""
    rows = [torch.tensor(sequence, device=device) for sequence in sequences]
    ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side=side)
    return ids.clamp(min=0), ids >= 0  # no token's id is -1


# ----------------------------------------------------------------------------- rewards
def accuracy_reward(prompts, completions, answer, **columns):
    """1.0 where the extracted answer is the data's `answer`, or one of a list; else 0.
    >>> accuracy_reward([""] * 3, ["2 + 12 = 14", "so 16", "10"], ["#### 14"] * 3)
    [1.0, 0.0, 0.0]
    """
    scores = []
    for completion, gold in zip(completions, answer, strict=True):
        found = extract_answer(completion)
        scores.append(float(any(answers_match(found, x) for x in gold_answers(gold))))
    return scores


_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+|\d{1,99})(?:\.\d{1,99})?|\.\d{1,99})(?!\d)"
_NUMBER = rf"{_DIGITS}(?:/{_DIGITS})?(?: ?\\?%)?"
_LAST = re.compile(  # what follows the last = in $…\…$, \frac{1}{2} or -$1,234.50
    r"\$(?:[^$]*=)?([^$=]*\\[^$=]*)\$|(-?\\[dt]?frac{[^{}]*}{[^{}]*})"
    rf"|(?<![\w.])((?:(?<![)\]}}])[-−–])?\\?[$€£]?{_NUMBER})(?!\w)"
)


def extract_answer(text):
    r"""The one answer of a text: the last \boxed{…}, else what follows the last ####,
    else the last number or formula. None if there is none, or if a box is not closed.
    >>> extract_answer(r"First \boxed{3}, so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    _, box, rest = text.rpartition("\\boxed{")
    if box:
        depth = 1
        for i, character in enumerate(rest):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return rest[:i].strip() or None
        return None
    _, mark, rest = text.rpartition("####")
    if mark and rest.strip():
        return rest.strip().split("\n")[0]
    text = text[-1000:].replace("\\(", "$").replace("\\)", "$").replace("{,}", ",")
    found = _LAST.findall(text)
    return "".join(found[-1]).strip() if found else None


def gold_answers(answer):
    """The data's answer or alternatives: in a box, after ####, else all the text."""
    golds = []
    for gold in answer if isinstance(answer, list) else [answer]:
        text = str(gold).strip() if isinstance(gold, (str, int, float)) else ""
        marked = "\\boxed" in text or "####" in text
        golds.append(extract_answer(text) if marked else text)
    if not golds or not all(golds):
        raise ValueError(f"{answer!r} is no answer")
    return golds


_SPELLINGS = (  # pattern, what it becomes
    (r"[−–]", "-"),
    (r"\{,\}|(?<=\d)(?:,?\\!|\\,)(?=\d{3})", ","),  # 10{,}080 and 10\,080
    (r"\\(?:left|right)(?![a-z])|(?<!\\)\\[,;:! ]|\^{?\\circ}?|\\?[$°€£]|\\[()]", " "),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\%", "%"),
    (r"\\(ge|le|ne)q(?![a-z])", r"\\\1"),
    (r"\\(?:text|textbf|mathrm|mbox)\s*{([^{}]*)}", r" \1"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    (r"(?<!\d)\\frac{(-?[\w.,\\]+)}{([\w.,]+)}(?![\w\\({])", r"\1/\2"),
    (r"([\^_]){(\w|\d+)}(?!\d)", r"\1\2"),
    (r"\s+", " "),
    (r"^ |[.,;: ]+$", ""),
    (r"^[A-Za-z]\w*(?:\([A-Za-z]\))? ?= ?([^=]*)$", r"\1"),  # x = 5
    (r"^\((\w)\)$", r"\1"),  # the choice (A)
    (rf"^([-+]?{_NUMBER}), [A-Za-z]{{2}}.*", r"\1"),  # 18, because
)
_VALUE = re.compile(  # sign, top, bottom, percent, unit: -1,234.5, 3/4, 50%, 5 cm^2
    rf"([-+]?) ?({_DIGITS})(?:/({_DIGITS}))? ?(%?)(?: ([A-Za-z]{{2,}}(?:\^[23])?))?"
)
_NO_UNITS = "pi dozen hundred thousand million billion trillion".split()


@functools.lru_cache
def read_answer(text):
    """(its number or None, percent sign, unit, its one spelling)."""
    for pattern, spelling in _SPELLINGS:
        text = re.sub(pattern, spelling, text[:1000])
    number = None
    percent = unit = ""
    match = _VALUE.fullmatch(text)
    if match and match[5] not in _NO_UNITS and re.search("[1-9]", match[3] or "1"):
        sign, top, bottom, percent, unit = match.groups("")
        number = Fraction(sign + top.replace(",", ""))
        number /= Fraction(bottom.replace(",", "") or 1)
    text = re.sub(r"(?<!\d) | (?!\d)", "", text)  # only between digits do spaces matter
    return number, percent, unit, text.lower() if text.isalpha() else text


def answers_match(answer, gold):
    r"""Whether two answers are the same: as exact rationals if both are numbers, else
    as LaTeX in one spelling. A unit may be left out, and so may a percent sign.
    >>> answers_match("$80,000.00", "80000"), answers_match(r"\frac{1}{2}", "0.5")
    (True, True)
    """
    number, percent, unit, text = read_answer(answer or "")
    gold_number, gold_percent, gold_unit, gold_text = read_answer(gold or "")
    if number is None or gold_number is None:
        return text != "" and text == gold_text
    scale = 1
    if percent != gold_percent:  # 50% is 50 or 0.5
        scale = 100 if percent else Fraction(1, 100)
    same_unit = unit == gold_unit or "" in (unit, gold_unit)
    return same_unit and number in (gold_number, scale * gold_number)


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
    can. It can always cheat its tests, with which it shares the process."""

    def passes(completion, test):
        if not test:
            return None
        if not isinstance(test, str):  # a list of them
            test = "\n".join(test)
        blocks = re.findall(r"```(\w*)[^\n]*\n(.*?)```", completion, re.DOTALL)
        languages = "python", "python3", "py"
        python = [code for name, code in blocks if name.lower() in languages]
        python = python or [code for name, code in blocks if not name]
        return float(bool(python) and run_tests(python[-1], test, unsafe_code))

    with ThreadPoolExecutor() as pool:
        return list(pool.map(passes, completions, tests))


SANDBOX = "bwrap --unshare-all --die-with-parent --new-session --proc /proc --dev /dev"
SANDBOX += " --tmpfs /tmp --chdir /tmp"


def run_tests(code, tests, unsafe_code=False, seconds=5):
    """Whether `code`, then `tests` end well: `seconds` of CPU, 3 times that in all."""
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
    if not unsafe_code:
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


REWARDS = dict(accuracy=accuracy_reward, format=format_reward, code=code_reward)


def load_rewards(specs, unsafe_code=False):
    """{name: (function, weight)} of `NAME[=WEIGHT]` and `FILE.py:FUNCTION[=WEIGHT]`."""
    rewards = {}

    def code(**columns):  # the data cannot open the sandbox
        return code_reward(**{**columns, "unsafe_code": unsafe_code})

    for spec in specs:
        target, _, weight = spec.partition("=")
        path, _, name = target.rpartition(":")
        try:
            scope = dict(REWARDS, code=code)
            if path:
                sys.path.insert(0, str(Path(path).parent))  # it may import neighbours
                scope = runpy.run_path(path)
            rewards[name] = scope[name], float(weight or 1)
        except (Exception, SystemExit) as error:
            known = f"it takes {', '.join(REWARDS)} or FILE.py:FUNCTION, each [=WEIGHT]"
            raise Error(f"--reward {spec}: {error!r}; {known}") from error
        if target == "code" and not unsafe_code:
            if not (shutil.which("bwrap", path=os.defpath) and run_tests("", "")):
                raise Error("install the package bubblewrap, or give --unsafe-code")
    if len(rewards) < len(specs):
        raise Error("--reward: a name twice")
    return rewards


# ------------------------------------------------------------------------------ models
def load_model(name, device, seed):
    """(model in float32, tokenizer, EOS ids) of any causal language model, or the tiny.
    A trained adapter is merged into its base: it belongs to the reference as well."""
    if name == "tiny":
        model, tokenizer = tiny_model(seed)
    else:
        os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # threads keep memory
        tokenizer = AutoTokenizer.from_pretrained(name)
        loader = AutoModelForCausalLM
        is_adapter = find_adapter_config_file(name)
        if is_adapter:
            from peft import AutoPeftModelForCausalLM as loader
        model = loader.from_pretrained(name, dtype=torch.float32, use_safetensors=True)
        if is_adapter:
            model = model.merge_and_unload().requires_grad_(True)
    model.to(device).eval()  # no dropout: sampling, old, new and reference agree
    eos = model.generation_config.eos_token_id  # it may disagree with the tokenizer's
    eos_token_ids = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
    eos_token_ids = [token for token in eos_token_ids if token is not None]
    if not eos_token_ids:
        raise Error(f"{name} has no EOS token")
    return model, tokenizer, eos_token_ids


def load(run, name):
    """Load a model into the run, ready to be trained, and a frozen reference."""
    config = run.config
    gc.collect()  # frees the supervised model
    set_seed(config, 0)
    auto = "bfloat16" if run.device.type == "cuda" else "float32"
    run.dtype = getattr(torch, auto if config.dtype == "auto" else config.dtype)
    model, run.tokenizer, run.eos_token_ids = load_model(name, run.device, config.seed)
    text_config = model.config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        longest = config.max_prompt_length + config.max_completion_length
        original = rope.get("original_max_position_embeddings", math.inf)
        if longest > min(original, text_config.max_position_embeddings):
            raise Error(f"{name}: all log-probs change with the length beyond {rope}")
    obstacle = sharing_obstacle(model)
    if obstacle:
        print0(f"note: slower, as {type(model).__name__} shares no prompts: {obstacle}")
    run.share_prompts = not obstacle
    run.generate = generate_with_transformers if obstacle else generate
    if config.static_cache:
        run.generate = functools.partial(generate_with_transformers, static=True)
    run.lora = None
    if config.lora_rank:
        import peft

        rank = config.lora_rank
        lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        run.lora = peft.get_peft_model(model, lora)  # puts the adapters into the model
    run.policy = model
    make_ready(run, model, torch.float32 if WORLD_SIZE > 1 else run.dtype)
    run.optimizer = MasterAdamW(model)
    run.reference = None
    if config.beta:
        frozen = model  # with LoRA it is the policy without its adapters
        without_adapter = contextlib.nullcontext
        if run.lora:
            without_adapter = run.lora.disable_adapter
        else:
            frozen, _, _ = load_model(name, run.device, config.seed)
            make_ready(run, frozen, run.dtype)

        def reference(*batch):
            with torch.no_grad(), without_adapter():
                return frozen.token_logprobs(*batch)

        run.reference = reference
    run.micro_batch_tokens = config.micro_batch_tokens or fit_micro_batch(run)
    print0(f"{name}: {model.num_parameters():,} weights, {run.dtype}, {run.device}")


def fit_micro_batch(run):
    """Tokens of a micro-batch that fit the free memory, at 50 activations for each unit
    of each layer. Gradients from completions wait for those from prompts. CPU: 2048."""
    if run.device.type == "cpu":
        return 2048
    text_config = run.policy.config.get_text_config()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    free -= sum(4 * local(param).numel() for param in run.optimizer.moments)
    free -= 4 * run.policy.num_parameters(only_trainable=True)
    units = text_config.hidden_size * text_config.num_hidden_layers
    tokens = 0.8 * free / (50 * run.dtype.itemsize * units)
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
        # What torch 2.11 and later prefer on an H100: with a mask its backward is NaN
        # at some lengths (pytorch issue 196678), and it plans anew for every length.
        torch.backends.cuda.enable_cudnn_sdp(False)
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


def average(number):
    """The mean of a number over the ranks."""
    return sum(all_gather(number)) / WORLD_SIZE


def print0(text):
    """Print above the progress bar, on the first rank alone."""
    if RANK == 0:
        tqdm.write(text)


def local(tensor):
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor):
    """All of a tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_ready(run, model, dtype):
    """Give a model its dtype, `token_logprobs` as a method, and each rank its part.
    With FSDP2 a rank gathers all weights of the policy, in `run.dtype`, for a rollout
    and an update, those of the reference layer by layer."""
    for param in model.parameters():  # a mapped file's memory would be slow: copy
        param.data = param.data.to(dtype, copy=True).contiguous()
    model.token_logprobs = functools.partial(
        token_logprobs,
        model,
        temperature=run.config.temperature,
        share_prompts=run.share_prompts,
    )
    if WORLD_SIZE == 1:
        return
    precision = fsdp.MixedPrecisionPolicy(run.dtype, reduce_dtype=torch.float32)
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for module in [*layers, model]:
        fsdp.fully_shard(
            module, mp_policy=precision, reshard_after_forward=model is not run.policy
        )
    model.set_reshard_after_backward(False)  # whole until the optimizer's step
    fsdp.register_fsdp_forward_method(model, "token_logprobs")


# ------------------------------------------------------------------------- checkpoints
def open_output_dir(config):
    """The run's folder and, in a new one, its options."""
    name = f"{Path(config.model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    output_dir = Path(all_gather(config.output_dir or f"runs/{name}")[0]).absolute()
    if RANK == 0 and not config.resume:
        output_dir.mkdir(parents=True, exist_ok=True)
        with open(output_dir / "config.json", "x") as file:  # never over another run
            json.dump(vars(config), file, indent=2)
    return output_dir


def save(run, name, with_optimizer=True):
    """A folder that `from_pretrained` and vLLM load (with LoRA merged, in float32, and
    `adapter/`) and what each rank needs to go on. It gets its name once it is whole."""
    partial = run.output_dir / f"partial-{name}"
    partial.mkdir(exist_ok=True)
    model, state = run.policy, None
    if run.lora:
        run.lora.save_pretrained(partial / "adapter")
        run.tokenizer.save_pretrained(partial / "adapter")
        model = copy.deepcopy(run.lora.cpu()).float().merge_and_unload()
        run.lora.to(run.device)  # which may have no room for two
    if WORLD_SIZE > 1:
        state = {}
        for key, tensor in model.state_dict().items():
            tensor = whole(tensor)
            if RANK == 0:
                state[key] = tensor.to(run.dtype).cpu()
    if RANK == 0:
        model.save_pretrained(partial, state_dict=state)
        if state:
            model.config.dtype = run.dtype  # not that of the shards
            model.config.save_pretrained(partial)
        run.tokenizer.save_pretrained(partial)
    if with_optimizer:
        saved = dict(num_steps=run.optimizer.num_steps, tensors=run.optimizer.tensors())
        torch.save(saved, partial / f"optimizer-{RANK}-of-{WORLD_SIZE}.pt")
    all_gather(None)  # until all have written
    if RANK == 0:
        if with_optimizer:
            shutil.copy(run.output_dir / "metrics.jsonl", partial)
            with open(partial / "options.json", "w") as file:
                json.dump(vars(run.config), file, indent=2)
        for file in partial.rglob("*.*"):  # on the disk before it has its name
            with open(file) as opened:
                os.fsync(opened)
        if with_optimizer:  # the options may be new ones, of this resumption
            (partial / "options.json").rename(run.output_dir / "config.json")
        partial.rename(run.output_dir / name)
        for old in checkpoints(run.output_dir)[:-1]:
            shutil.rmtree(old)
    all_gather(None)  # until it is there
    print0(f"saved {run.output_dir / name}")


def checkpoints(output_dir):
    """The checkpoint folders of a run, oldest first."""
    return sorted(output_dir.glob("checkpoint-[0-9]*"), key=lambda x: int(x.name[11:]))


def restore(run):
    """Weights, optimizer and logs of the newest checkpoint; returns its step, or 0."""
    found = checkpoints(run.output_dir)
    if not found:
        (run.output_dir / "metrics.jsonl").write_text("")
        return 0
    path = found[-1]
    file = path / f"optimizer-{RANK}-of-{WORLD_SIZE}.pt"
    if not file.exists():
        raise Error(f"no {file}: not of this run, or of another number of processes")
    saved = torch.load(file, map_location="cpu", weights_only=True)
    run.optimizer.num_steps = saved["num_steps"]
    for target, tensor in zip(run.optimizer.tensors(), saved["tensors"], strict=True):
        target.copy_(tensor)
    if RANK == 0:  # an evaluation of this step is made again
        rows = (path / "metrics.jsonl").read_text()
        rows = rows.partition(f'{{"step": {path.name[11:]}, "eval/')[0]
        (run.output_dir / "metrics.jsonl").write_text(rows)
    print0(f"going on from {path}")
    return int(path.name[11:])


# ------------------------------------------------------------- built-in task and model
def arithmetic(model, seed):
    """Built-in sums. 5 in 8 of tiny's `solution`s are wrong, to leave work for GRPO."""
    rng = random.Random(seed)
    rows = []
    if model == "tiny":
        for i in range(500):
            gold = i // 10 + i % 10
            noisy = gold + rng.choice([0, 0, 0, 1, 2, 5, 10, 20])
            prompt = f"{i // 10}+{i % 10}="
            rows.append(dict(prompt=prompt, answer=gold, solution=noisy))
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


def parse_args(argv=None):
    """`Config` of a list of command-line words (default: the process's)."""
    comments = dict(re.findall(r"(\w+): .*?  # (.*)", inspect.getsource(Config)))
    usage = "python grpo.py [--option value ...]"
    parser = argparse.ArgumentParser(usage=usage, argument_default=argparse.SUPPRESS)
    for field in dataclasses.fields(Config):
        name, kind = "--" + field.name.replace("_", "-"), field.type
        default = " ".join(field.default) if kind is tuple else field.default
        text = f"{comments[field.name]} (default: {default})"
        add = functools.partial(parser.add_argument, name, help=text)
        if kind is bool:
            add(action="store_true")
        elif kind is tuple:
            add(nargs="+", action="extend", metavar="NAME")
        elif get_args(kind):
            add(choices=get_args(kind))
        else:
            add(type=kind, metavar="X")
    typed = vars(parser.parse_args(argv))  # no defaults: they are suppressed
    options = {}
    if "resume" in typed:
        folder = re.sub(r"/checkpoint-\d+/*$", "", typed["resume"])
        options = json.loads(Path(folder, "config.json").read_text())
        typed["output_dir"] = folder
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
    except (Error, OSError, UnicodeError) as error:  # a mistake of the user
        sys.exit(f"grpo.py: {one_line(error)}")
    if dist.is_initialized():  # gloo's threads can abort an ordinary end
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
