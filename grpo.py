# SPDX-License-Identifier: MIT
# Copyright (c) 2026 the grpo.py authors
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

The core, up to the line "That is all of GRPO", stands alone. To train a model `name` on
a list of `texts` with it:

    import copy
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from grpo import DEVICE, Config, Run, train_step

    def brief(completions, **columns):
        return [-len(text) for text in completions]

    tokenizer = AutoTokenizer.from_pretrained(name)
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

Shapes: B prompts; G completions of each; N = B*G completions, of which rows b*G to
b*G+G-1 belong to prompt b; P prompt length (padded on the left); C completion length
(padded on the right); V vocabulary size.

Departures from the paper and from other code:
  1) Equal rewards in a group have an advantage of exactly 0. Without this, rounding
     error would turn eight equal rewards of 0.1 into advantages of -0.4.
  2) A reward function may leave a completion unjudged (None). The completion then gets
     the mean of its group, or 0 if no completion of the group was judged. This value
     also enters the group's std.
  3) The KL term is k3 and is not multiplied by the ratio. That is the paper; TRL and
     DeepSeek-V3.2 multiply it, and so does `use_bias_correction_kl`.
  4) The reference model stays fixed (the paper's outer iterations, I, are 1).
  5) Mini-batches are whole groups in the order of the rollout; they are not shuffled.
  6) An update whose gradient is not finite is skipped.
"""

import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal, get_args, get_origin

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

__version__ = "1.0.0"

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # number of processes (ranks)


def option(default, help):
    """A dataclass field with its help text for the command line."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Config:
    """The options of the algorithm. An invalid value raises a ValueError."""

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
    num_mini_batches: int = option(
        1, "parts a rollout is split into, each with its update"
    )
    num_iterations: int = option(1, "mu, passes over a rollout")
    micro_batch_size: int = option(16, "completions in one forward and backward pass")
    learning_rate: float = option(1e-6, "AdamW learning rate after warm-up")
    lr_scheduler_type: Literal["constant", "linear"] = option(
        "constant", "linear: decays to 0 at max_steps"
    )
    warmup_steps: int = option(10, "training steps of linear warm-up")
    max_steps: int = option(200, "training steps (rollouts); 0: only evaluate")
    max_grad_norm: float = option(1.0, "gradient clipping; 0: no clipping")
    # The core only shuffles prompts by the seed. Sampling uses PyTorch's generator,
    # which the program seeds at every step. With the core alone, seed it yourself.
    seed: int = option(0, "random seed")

    def __post_init__(self):
        at_least = {
            "num_generations": 2,
            "prompts_per_step": 1,
            "max_completion_length": 1,
            "temperature": 1e-9,
            "num_mini_batches": 1,
            "num_iterations": 1,
            "micro_batch_size": 1,
        }
        for name, value in vars(self).items():
            least = at_least.get(name, 0)
            if isinstance(value, (int, float)) and not least <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least {least}")
        for item in fields(self):
            choices = get_args(item.type) if get_origin(item.type) is Literal else None
            if choices and getattr(self, item.name) not in choices:
                raise ValueError(f"{item.name} must be one of {', '.join(choices)}")
        if self.prompts_per_step % WORLD_SIZE:
            raise ValueError(
                f"prompts_per_step must be divisible by the {WORLD_SIZE} ranks"
            )
        if self.num_prompts % self.num_mini_batches:
            raise ValueError(
                f"num_mini_batches must divide the {self.num_prompts} prompts per rank"
            )

    @property
    def num_prompts(self):
        """B, the prompts of a training step on this rank."""
        return self.prompts_per_step // WORLD_SIZE


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
    # Equal rewards must have an advantage of exactly 0. In float32, both r - mean and
    # std of eight rewards of 0.1 are about 1e-8 instead of 0, and their ratio is -0.4.
    # `float` merges rewards that differ only by float64 rounding. Their sum in `double`
    # is exact. Not `mean`: it may multiply by 1 / G, which is already rounded.
    groups = rewards.float().double().reshape(-1, num_generations)  # (B, G)
    advantages = groups - groups.sum(1, keepdim=True) / num_generations
    if scale_rewards == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + eps)
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards {scale_rewards!r} is unknown")
    return advantages.float().view(-1)


def masked_mean(x, mask, dim=None):
    """Mean of x where the mask is true, over all elements or along `dim`; 0 if the mask
    is all false. Masked elements of x may be anything, even NaN."""
    mask = mask.bool()
    return x.where(mask, 0).sum(dim) / mask.sum(dim).clamp(min=1)


def importance_ratio(logp, old_logp, mask=None, importance_sampling_level="token"):
    """New over old probability of each token, exp(logp - old_logp): (N, C). With level
    "sequence" a completion has one ratio, exp of the mean of logp - old_logp over its
    tokens, which are where `mask` is true (GSPO, arXiv:2507.18071, eq. 7)."""
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
    DeepSeekMath eq. 4; "k3" in joschu.net/blog/kl-approx.html. For tokens sampled from
    the policy its mean is KL(policy, reference), like that of the simpler -d, but with
    less variance. Its gradient is that of KL(reference, policy); multiplied by the
    ratio (`use_bias_correction_kl`) it is that of KL(policy, reference).
    Pass float32: bfloat16 rounds small d away.
    >>> kl_k3(torch.tensor([0.7]).log(), torch.tensor([0.5]).log())
    tensor([0.0508])
    """
    d = ref_logp - logp
    return torch.expm1(d) - d


def token_weights(mask, loss_type="grpo", max_completion_length=None, num_tokens=None):
    """The weight of each token in the loss: mask (N, C) -> (N, C) float64.
        grpo     1 / (number of tokens in its row) / N: a mean over sequences of means
        dapo     1 / num_tokens (default: all tokens of the mask)
        dr_grpo  1 / (N * max_completion_length) (default: C)
    >>> token_weights(torch.tensor([[1, 1, 0], [1, 0, 0]])).tolist()
    [[0.25, 0.25, 0.0], [0.5, 0.0, 0.0]]
    """
    num_sequences, length = mask.shape
    weights = mask.double()
    if loss_type == "grpo":
        return weights / weights.sum(1, keepdim=True).clamp(min=1) / num_sequences
    if loss_type == "dapo":
        num_tokens = mask.sum().item() if num_tokens is None else num_tokens
        return weights / max(num_tokens, 1)
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
    ref_logp=None for no KL term. Masked positions are ignored and may be NaN.
    weights: (N, C), by default `token_weights(mask)`. With micro-batches, compute them
    once for the whole batch and pass each its rows: the losses then add up.
    `use_bias_correction_kl` multiplies k3 by the ratio (DeepSeek-V3.2,
    arXiv:2512.02556), which is unbiased only with token-level ratios."""
    mask = mask.bool()
    weights = token_weights(mask) if weights is None else weights
    if old_logp is None:
        # The ratio is then exactly 1, and its gradient is that of logp.
        old_logp = logp
    logp = logp.masked_fill(~mask, 0)
    old_logp = old_logp.detach().masked_fill(~mask, 0)
    advantages = advantages.reshape(len(mask), -1)  # (N, 1) or (N, C)
    advantages = advantages.where(mask, 0)  # (N, C)
    ratio = importance_ratio(logp, old_logp, mask, importance_sampling_level)
    surrogate = clipped_surrogate(ratio, advantages, epsilon, epsilon_high)
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        kl = kl_k3(logp, ref_logp.detach().masked_fill(~mask, 0))
    penalty = ratio * kl if use_bias_correction_kl else kl
    loss = ((beta * penalty - surrogate) * weights.to(logp)).sum()
    is_clipped = surrogate < ratio * advantages  # the clipped term is the smaller one
    with torch.no_grad():
        metrics = {
            "kl": masked_mean(kl, mask),
            "kl_max": kl.max(),  # a single token can dominate a batch
            "entropy": masked_mean(-logp, mask),  # estimated from the sampled tokens
            "ratio_mean": masked_mean(ratio, mask),
            "clip_fraction": masked_mean(is_clipped.float(), mask),
        }
    return loss, metrics


# --------------------------------------------------------------- sampling and log-probs
def call_model(model, ids, attention_mask, cache=None, **options):
    """Runs ids (N, L) after the K tokens that `cache` holds, and adds them to it.
    attention_mask: (N, K + L). Positions skip padding on the left."""
    if cache is not None and model.training:
        raise ValueError(
            "call model.eval(): in training, checkpointing drops the cache"
        )
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return model(
        ids,
        attention_mask=attention_mask.long(),
        position_ids=positions[:, -ids.shape[1] :],
        past_key_values=cache,
        use_cache=cache is not None,
        **options,
    )


def select_rows(cache, indices):
    """Keeps these rows of a key-value cache, in place. A row may be taken several times
    (a prompt, for each of its completions) or not at all (a finished completion). The
    method is called `reorder_cache` because transformers uses it for beam search."""
    cache.reorder_cache(indices)


def sample(logits, temperature=1.0):
    """One token for each row from softmax(logits / temperature): (N, V) -> (N,).
    Temperature 0 takes the most probable token. Raises ValueError for NaN logits.
    Inverse transform sampling needs one random number per row; `torch.multinomial`
    draws V of them and takes five times as long."""
    if not logits.amax(1).isfinite().all():  # the largest is NaN if any is
        raise ValueError("the model's logits are not finite")
    if temperature == 0:
        return logits.argmax(1)
    probs = (logits.float() / temperature).softmax(1)  # (N, V)
    cdf = probs.cumsum(1, dtype=torch.float64)  # float32 would drop tokens below 1e-7
    total = cdf[:, -1:]
    draws = torch.rand_like(total) * total
    ids = torch.searchsorted(cdf, draws, right=True)[:, 0]  # the first cdf > draw
    return ids.clamp(max=logits.shape[1] - 1)  # a draw may round up to the total


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
    """Samples G completions of each prompt from the policy. Returns ids (N, C).
    prompt_ids, prompt_mask: (B, P), padded on the left. C is `max_completion_length`.
    Rows stop at any of `eos_token_ids`, an id or a list, and are padded with the first.
    Temperature 0 is greedy. model: a causal LM of transformers in eval mode. The
    settings in its generation config (top-k, ...) are ignored."""
    if not prompt_mask[:, -1].all():
        raise ValueError("prompts must be padded on the left")
    eos = torch.tensor(eos_token_ids, device=prompt_ids.device).view(-1)
    num_completions = len(prompt_ids) * num_generations
    completion_ids = eos[0].repeat(num_completions, max_completion_length)  # (N, C)

    # Each prompt runs once. Its cache and its logits are copied for its G completions.
    cache = DynamicCache(config=model.config)
    logits = call_model(model, prompt_ids, prompt_mask, cache, logits_to_keep=1).logits
    prompt_of = torch.arange(num_completions, device=eos.device) // num_generations
    select_rows(cache, prompt_of)  # B rows become N
    logits = logits[prompt_of]  # (N, 1, V)

    # Indices of unfinished completions; logits and cache have one row for each. In step
    # i of the loop the cache holds the P tokens of the prompt and tokens 0 to i - 1 of
    # the completion. Token i is sampled, and then run to get the logits of token i + 1.
    live = torch.arange(num_completions, device=eos.device)
    for i in range(max_completion_length):
        tokens = sample(logits[:, -1], temperature)
        completion_ids[live, i] = tokens
        unfinished = ~torch.isin(tokens, eos)  # (num live,)
        if not unfinished.any() or i == max_completion_length - 1:
            break
        if not unfinished.all():  # finished completions leave the batch
            live = live[unfinished]
            select_rows(cache, unfinished.nonzero()[:, 0])
        mask = prompt_mask[prompt_of[live]]
        mask = F.pad(mask, (0, i + 1), value=True)  # (num live, P + i + 1)
        ids = completion_ids[live, i : i + 1]
        logits = call_model(model, ids, mask, cache, logits_to_keep=1).logits
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
    logits = call_model(model, ids, attention_mask, logits_to_keep=keep).logits[:, :-1]
    logps = (logits.float() / temperature).log_softmax(2)  # (N, C, V)
    logp = logps.gather(2, completion_ids[:, :, None])[:, :, 0]  # (N, C)
    return logp.masked_fill(~mask, 0)


# ----------------------------------------------------------------------------- one step
# Several ranks (WORLD_SIZE = W > 1): each takes an equal number of prompts of its own.
# FSDP2 averages gradients over ranks, so a loss that every rank divides by `total / W`
# (the mean per rank, from `mean_over_ranks`) is divided by `total` overall. Metrics are
# averaged likewise.
@dataclass
class Batch:
    """N completions, each with its prompt: a rollout, a mini-batch or a micro-batch."""

    prompt_ids: torch.Tensor  # (N, P), padded on the left
    prompt_mask: torch.Tensor  # (N, P), bool
    completion_ids: torch.Tensor  # (N, C), padded on the right
    mask: torch.Tensor  # (N, C), bool: up to and including the first EOS
    advantages: torch.Tensor | None = None  # (N, C)
    weights: torch.Tensor | None = None  # (N, C), see `token_weights`
    old_logp: torch.Tensor | None = None  # (N, C), under the policy that sampled
    ref_logp: torch.Tensor | None = None  # (N, C), under the reference

    @property
    def inputs(self):
        """Arguments of `token_logprobs`, without the model and the temperature."""
        return self.prompt_ids, self.prompt_mask, self.completion_ids, self.mask

    def select(self, indices):
        """A batch of these rows, cut to their longest prompt and completion."""
        longest_prompt = int(self.prompt_mask[indices].sum(1).max())
        longest_completion = int(self.mask[indices].sum(1).max())
        prompt_columns = slice(-longest_prompt, None)  # padded on the left
        columns = slice(longest_completion)  # padded on the right

        def part(x):
            return None if x is None else x[indices, columns]

        return Batch(
            prompt_ids=self.prompt_ids[indices, prompt_columns],
            prompt_mask=self.prompt_mask[indices, prompt_columns],
            completion_ids=part(self.completion_ids),
            mask=part(self.mask),
            advantages=part(self.advantages),
            weights=part(self.weights),
            old_logp=part(self.old_logp),
            ref_logp=part(self.ref_logp),
        )


@dataclass
class Run:
    """Everything that a training step works with. Models are on DEVICE and in eval
    mode, so that there is no dropout. With several ranks the policy is sharded by FSDP2
    with `reshard_after_forward=False`: it stays gathered while it samples. Otherwise
    ranks that sample different numbers of tokens would deadlock. Each rank needs its
    own rows and random seed.

    A reward function gets keyword arguments, lists with one element per completion:
    `completions` (texts), `completion_ids`, `finished` (False where it was cut off at
    the length limit) and the columns of the rows. It must not change them. It returns a
    list with one finite number per completion, or None for one that it does not
    judge."""

    config: Config
    policy: torch.nn.Module  # the causal LM of transformers that is trained
    tokenizer: transformers.PreTrainedTokenizerBase
    eos_token_ids: list[int]  # a completion ends with any of these
    optimizer: torch.optim.Optimizer  # of the weights of the policy, in float32
    reward_functions: dict[str, tuple[Callable, float]]  # name: (function, weight)
    reference: torch.nn.Module | None = None  # a copy of the policy; None if beta is 0
    logprobs: Callable = token_logprobs  # or a faster one, such as `shared_logprobs`
    # (columns, C) -> (N, C), added to the advantages, such as process supervision. It
    # may add columns.
    extra_advantages: Callable | None = None

    def __post_init__(self):
        if self.config.beta and self.reference is None:
            raise ValueError("a KL term (beta) needs a reference")
        trained = [x for x in self.policy.parameters() if x.requires_grad]
        if WORLD_SIZE > 1 and not all(isinstance(x, DTensor) for x in trained):
            raise ValueError("with several ranks the policy must be sharded by FSDP2")


def train_step(run, train_rows, step):
    """Takes one GRPO step on B rows of the data. Returns metrics, to be averaged over
    ranks, and columns, lists with one element per completion. A row is a dict with
    "prompt_ids" and the columns that reward functions take; `step` starts at 1."""
    config = run.config

    # 1. Take B prompts.
    rows = prompt_batch(train_rows, step, config.num_prompts, config.seed)

    # 2. Sample G completions of each from the current policy.
    batch = rollout(run, rows, config.num_generations, config.temperature)

    # 3. Score them.
    columns, scores = score(run, rows, batch)

    # 4. Normalise within each group. All tokens of a completion share its advantage.
    advantages = group_advantages(
        scores["reward"], config.num_generations, config.scale_rewards
    )
    batch.advantages = advantages.to(DEVICE)[:, None].expand(batch.mask.shape)
    if run.extra_advantages:
        extra = run.extra_advantages(columns, batch.mask.shape[1])
        batch.advantages = batch.advantages + extra.to(DEVICE)

    # 5. Minimise -min(ratio A, clip(ratio) A) + beta KL.
    start = time.perf_counter()
    metrics = update(run, batch, scheduled_learning_rate(config, step))
    metrics["update_seconds"] = time.perf_counter() - start

    metrics.update(rollout_metrics(batch, scores, columns["finished"], len(rows)))
    return metrics, columns | {name: x.tolist() for name, x in scores.items()}


def update(run, batch, learning_rate):
    """Trains the policy on a rollout, in `num_iterations` (mu) passes with an optimizer
    step for each mini-batch. Returns metrics averaged over the optimizer steps, except
    grad_norm (of the last step), kl_max (the largest) and skipped (a count)."""
    config = run.config
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate
    mini_batches = split_rollout(config, batch)
    add_fixed_logprobs(run, mini_batches)
    updates = []
    for _ in range(config.num_iterations):
        for micro_batches in mini_batches:
            updates.append(optimizer_step(run, micro_batches))
    metrics = {
        name: sum(x[name] for x in updates) / len(updates) for name in updates[0]
    }
    metrics["kl_max"] = max(x["kl_max"] for x in updates)
    metrics["grad_norm"] = updates[-1]["grad_norm"]
    metrics["skipped"] = sum(not math.isfinite(x["grad_norm"]) for x in updates)
    metrics["learning_rate"] = learning_rate
    return metrics


def optimizer_step(run, micro_batches):
    """Takes an optimizer step on a mini-batch, a list of micro-batches. Micro-batches
    only reduce memory: their losses and gradients add up to those of the mini-batch.
    Returns metrics, see `combine_metrics`."""
    config = run.config
    metrics = []
    for micro_batch in micro_batches:
        logp = run.logprobs(run.policy, *micro_batch.inputs, config.temperature)
        if micro_batch.old_logp is None:
            # The first pass over the first mini-batch. The policy is still the one that
            # sampled, so these are the old log-probs, also for later passes.
            micro_batch.old_logp = logp.detach()
        loss, means = grpo_loss(
            logp,
            micro_batch.old_logp,
            micro_batch.ref_logp,
            micro_batch.advantages,
            micro_batch.mask,
            weights=micro_batch.weights,
            epsilon=config.epsilon,
            epsilon_high=config.epsilon_high,
            beta=config.beta,
            importance_sampling_level=config.importance_sampling_level,
            use_bias_correction_kl=config.use_bias_correction_kl,
        )
        loss.backward()
        metrics.append((loss.detach(), means, micro_batch.mask.sum()))

    max_norm = config.max_grad_norm or math.inf
    grad_norm = clip_grad_norm_(run.policy.parameters(), max_norm)
    if WORLD_SIZE > 1:
        grad_norm = grad_norm.full_tensor()  # over the shards of all ranks
    if grad_norm.isfinite():
        run.optimizer.step()
    run.policy.zero_grad()
    return dict(combine_metrics(metrics), grad_norm=grad_norm.item())


def combine_metrics(metrics):
    """The metrics of a mini-batch from those of its micro-batches, a list of (loss,
    means over tokens, number of tokens): the sum of the losses, means over all tokens
    and the largest k3. Averaged over ranks (kl_max: the maximum) they are those of the
    whole mini-batch."""
    losses, means, num_tokens = zip(*metrics)
    num_tokens = torch.stack(num_tokens)
    tokens_per_rank = mean_over_ranks(num_tokens.sum().item())
    combined = {"loss": sum(losses).item()}
    for name in means[0]:
        values = torch.stack([x[name] for x in means])
        if name == "kl_max":
            combined[name] = values.max().item()
        else:
            combined[name] = (values * num_tokens).sum().item() / tokens_per_rank
    return combined


def split_rollout(config, batch):
    """Splits a rollout into mini-batches of whole groups, with the weights of their
    tokens. Returns for each mini-batch the list of its micro-batches."""
    prompts_per_mini_batch = config.num_prompts // config.num_mini_batches
    num_sequences = len(batch.mask) // config.num_mini_batches
    mini_batches = []
    for indices in torch.arange(len(batch.mask)).split(num_sequences):
        mini_batch = batch.select(indices)
        tokens_per_rank = mean_over_ranks(mini_batch.mask.sum().item())
        mini_batch.weights = token_weights(
            mini_batch.mask,
            config.loss_type,
            config.max_completion_length,
            num_tokens=tokens_per_rank,
        )
        mini_batches.append(
            split_mini_batch(
                mini_batch, config.micro_batch_size, prompts_per_mini_batch
            )
        )
    return mini_batches


def split_mini_batch(batch, size, num_prompts):
    """Splits a mini-batch into micro-batches of `size` rows. Groups are first sorted by
    their longest completion, which saves padding. A micro-batch may cut a group, but
    its rows stay neighbours, so that they can share their prompt."""
    lengths = batch.mask.sum(1).view(num_prompts, -1)  # (B, G)
    order = lengths.amax(1).argsort().cpu()
    indices = torch.arange(len(batch.mask)).view(num_prompts, -1)[order].flatten()
    return [batch.select(some) for some in indices.split(size)]


@torch.no_grad()
def add_fixed_logprobs(run, mini_batches):
    """Adds the log-probs that stay fixed during the updates: under the reference, and
    under the policy that sampled. The first mini-batch needs no extra forward pass for
    the latter: they are the log-probs of its own first forward pass."""
    config = run.config
    for i, micro_batches in enumerate(mini_batches):
        for micro_batch in micro_batches:
            inputs = *micro_batch.inputs, config.temperature
            if config.beta:
                micro_batch.ref_logp = run.logprobs(run.reference, *inputs)
            if i > 0:
                micro_batch.old_logp = run.logprobs(run.policy, *inputs)


def scheduled_learning_rate(config, step):
    """The learning rate of a training step (from 1): a linear warm-up, then constant,
    or linear decay to 0 after step `max_steps`."""
    factor = min(1.0, step / max(1, config.warmup_steps))
    if config.lr_scheduler_type == "linear":
        steps_of_decay = max(1, config.max_steps - config.warmup_steps)
        steps_left = max(0, config.max_steps - step + 1)
        factor *= min(1.0, steps_left / steps_of_decay)
    elif config.lr_scheduler_type != "constant":
        raise ValueError(f"lr_scheduler_type {config.lr_scheduler_type!r} is unknown")
    return config.learning_rate * factor


def prompt_batch(rows, step, size, seed):
    """The `size` rows of a step. Epochs are shuffled and drop an incomplete batch."""
    if size > len(rows):
        raise ValueError(f"a step takes {size} prompts, but there are only {len(rows)}")
    epoch, i = divmod(step - 1, len(rows) // size)
    shuffled = random.Random(seed * 1_000_003 + epoch).sample(rows, len(rows))
    return shuffled[i * size : (i + 1) * size]


def rollout(run, rows, num_generations, temperature):
    """Samples completions of rows of the data from the policy. Returns a `Batch`."""
    prompt_ids, prompt_mask = pad([row["prompt_ids"] for row in rows], "left")
    completion_ids = generate(
        run.policy,
        prompt_ids,
        prompt_mask,
        num_generations,
        run.config.max_completion_length,
        run.eos_token_ids,
        temperature,
    )
    return Batch(
        prompt_ids.repeat_interleave(num_generations, dim=0),
        prompt_mask.repeat_interleave(num_generations, dim=0),
        completion_ids,
        completion_mask(completion_ids, run.eos_token_ids),
    )


def pad(sequences, side):
    """Lists of token ids as one tensor: ids and mask, (len(sequences), longest).
    Pads with the first sequence's first token: the embedding of a pad token may be all
    zeros, and normalising zeros gives NaN gradients."""
    tensors = [torch.tensor(sequence, device=DEVICE) for sequence in sequences]
    ids = pad_sequence(tensors, batch_first=True, padding_value=-1, padding_side=side)
    mask = ids >= 0
    return ids.masked_fill(~mask, sequences[0][0]), mask


def score(run, rows, batch):
    """Calls every reward function on N completions of B rows of the data. Returns the
    columns passed to them, and the scores, {name: (N,) float64}. "reward" is the
    weighted sum, in which an unjudged completion has the mean of its group, or 0 if
    none was judged."""
    ids = [x[mask].tolist() for x, mask in zip(batch.completion_ids, batch.mask)]
    finished = [x[-1] in run.eos_token_ids for x in ids]  # not cut off
    texts = [x[:-1] if ended else x for x, ended in zip(ids, finished)]
    repeated = [row for row in rows for _ in range(len(ids) // len(rows))]
    columns = {name: [row[name] for row in repeated] for name in rows[0]}
    columns["completion_ids"] = ids
    columns["finished"] = finished
    # Special tokens other than the final EOS are kept: in some models <think> is one.
    columns["completions"] = run.tokenizer.batch_decode(
        texts, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    scores = {"reward": torch.zeros(len(ids), dtype=torch.float64)}
    for name, (function, weight) in run.reward_functions.items():
        rewards = reward_tensor(function(**columns), len(ids), name)
        groups = rewards.view(len(rows), -1)
        means = groups.nanmean(1, keepdim=True).nan_to_num()
        filled = torch.where(groups.isnan(), means, groups)
        scores["reward"] += weight * filled.view(-1)
        scores[f"rewards/{name}"] = rewards
    return columns, scores


def reward_tensor(values, size, name):
    """Converts what a reward function returned to (N,) float64, with NaN for None."""
    judged = [float(x) for x in values if x is not None]
    if len(values) != size or not all(map(math.isfinite, judged)):
        raise ValueError(
            f"reward {name} returned {values!r:.200}, not {size} finite numbers"
        )
    numbers = [math.nan if x is None else float(x) for x in values]
    return torch.tensor(numbers, dtype=torch.float64)


def rollout_metrics(batch, scores, finished, num_prompts):
    """Means over a rollout: of scores (NaN is left out), lengths and so on. The mean
    over ranks of what each rank returns is that of the whole rollout."""
    values = {
        **scores,
        "reward_std": scores["reward"].view(num_prompts, -1).std(1),
        "zero_std_fraction": ~batch.advantages.reshape(num_prompts, -1).any(1),
        "completion_length": batch.mask.sum(1),
        "truncated_fraction": ~torch.tensor(finished),
    }
    metrics = {name: x.double().nanmean().item() for name, x in values.items()}
    # The mean over ranks is then the number of tokens on all ranks.
    num_tokens = batch.mask.sum().item() * WORLD_SIZE
    return dict(metrics, num_tokens=num_tokens)


def mean_over_ranks(x):
    """The mean of a number over all ranks."""
    if WORLD_SIZE == 1:
        return x
    total = torch.tensor(x, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(total)
    return total.item() / WORLD_SIZE


# That is all of GRPO. The rest is optional: it turns the core into a program.
# Sections, in order: options, rewards, process supervision, data and prompts, models,
# bfloat16 and LoRA, faster log-probs, several ranks, logs and checkpoints, supervised
# steps and built-in task, the run, command line. Further departures from the paper:
#   7) In bfloat16, AdamW updates float32 masters of the weights. Each starts at a
#      random place in the rounding cell of its weight, so that small updates take
#      effect at once (`within_cell`).
#   8) Process supervision adds to the outcome rewards. In the paper it replaces them.
import atexit
import contextlib
import copy
import functools
import gc
import importlib.util
import json
import multiprocessing
import re
import shutil
import signal
import stat
import sys
import threading
import unicodedata
import warnings
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as dsd
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

ON_GPU = DEVICE == "cuda"
RANK = int(os.environ.get("RANK", 0))  # index of this process
# A T4 emulates bfloat16, slowly.
HAS_BFLOAT16 = ON_GPU and torch.cuda.is_bf16_supported(including_emulation=False)


class Error(ValueError):
    """A user error. `main` prints it as one line, without a traceback."""

    def __init__(self, message):
        super().__init__(" ".join(message.split()))


# ------------------------------------------------------------------------------ options
@dataclass(frozen=True)
class Options(Config):
    """All options of the program. The command line is made from them, see --help."""

    # Data
    data: str = option("", "JSONL file; default: built-in arithmetic")
    eval_data: str = option(
        "", "JSONL file to evaluate; default: a tenth of the data, at most 64 rows"
    )
    reward: list[str] = field(
        default_factory=lambda: ["accuracy"],
        metadata={
            "help": "one or more of accuracy, format, FILE.py:FUNCTION, "
            "each with an optional =WEIGHT"
        },
    )
    step_reward: str = option("", "FILE.py:FUNCTION that scores the reasoning steps")
    prompt_template: str = option(
        "", r"wraps {question}; by default, accuracy adds a request for \boxed{}"
    )
    system_prompt: str = option("", "system message for prompts that have none")
    chat_template_kwargs: str = option(
        "{}", "JSON for the chat template, such as '{\"enable_thinking\": false}'"
    )
    max_prompt_length: int = option(512, "in tokens; longer prompts are left out")

    # Model
    model: str = option("tiny", "Hub name or folder; tiny has its own defaults, TINY")
    dtype: Literal["bfloat16", "float32"] = option(
        "bfloat16" if HAS_BFLOAT16 else "float32",
        "compute dtype; the optimizer works in float32",
    )
    lora_rank: int = option(0, "above 0: train only adapters of this rank (peft)")
    sft_steps: int = option(0, "supervised steps on the data's solutions before GRPO")
    sft_learning_rate: float = option(1e-5, "learning rate of the supervised steps")

    # Output
    output_dir: str = option("", "new or empty directory; default: runs/RUN_NAME")
    run_name: str = option("", "name in trackers; default: TIME-PID")
    resume: str = option("", "resume the run in this directory, with its options")
    eval_every: int = option(50, "steps between evaluations and samples; 0: none")
    save_every: int = option(50, "steps between checkpoints; 0: only the last")
    save_total_limit: int = option(1, "checkpoints to keep, the newest; 0: all")
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = option(
        "none", "experiment tracker, besides metrics.jsonl"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.prompt_template and "{question}" not in self.prompt_template:
            raise ValueError("prompt_template must contain {question}")
        try:
            is_object = isinstance(json.loads(self.chat_template_kwargs), dict)
        except json.JSONDecodeError:
            is_object = False
        if not is_object:
            raise ValueError("chat_template_kwargs must be a JSON object")


# ------------------------------------------------------------------------------ rewards
def accuracy_reward(prompts, completions, answer, finished=None, **columns):
    r"""Returns 1.0 for each completion whose answer equals that of the data, else 0.0.
    answer: N strings or numbers. finished: N bools, False if a completion was cut off.
    >>> accuracy_reward(["1+1=", "1+1="], [r"So \boxed{2}.", "2 or 3"], ["2", "2"])
    [1.0, 0.0]
    """
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


def split_weight(spec):
    """Splits an argument of --reward into its name and its weight.
    >>> split_weight("own.py:brief=0.5"), split_weight("accuracy")
    (('own.py:brief', 0.5), ('accuracy', 1.0))
    """
    match = re.fullmatch(r"(.*)=(-?\d*\.?\d+)", spec)
    if match:
        return match[1], float(match[2])
    return spec, 1.0


def load_function(spec):
    """A built-in reward by its name, or a function of a file by FILE.py:FUNCTION."""
    path, _, name = spec.rpartition(":")
    functions = vars(import_file(path, os.path.getmtime(path))) if path else REWARDS
    if not callable(functions.get(name)):
        raise Error(f"no function {name!r} in {path or ', '.join(REWARDS)}")
    return functions[name]


@functools.cache
def import_file(path, modified):
    """Imports a Python file once for each time of modification. It may import modules
    of its own directory, and its functions can be pickled (for process pools)."""
    path = os.path.abspath(path)
    sys.path.insert(0, os.path.dirname(path))
    name = Path(path).stem
    while name in sys.modules and getattr(sys.modules[name], "__file__", "") != path:
        name += "_"  # the name of another module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise Error(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    call(spec.loader.exec_module, path, module)
    return module


def call(function, source, *args, **kwargs):
    """Calls a function of a reward file. If it switches gradients off, they are on
    again afterwards. If it calls `exit()`, as a completion that it executes may, this
    raises an `Error` that names `source`: the run would end as if it were finished."""
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # restored at the end
            return function(*args, **kwargs)
    except SystemExit as error:
        raise Error(f"{source} called exit()") from error


def load_rewards(specs):
    """Returns {name: (checked function, weight)} for the arguments of --reward."""
    rewards = {}
    for spec in specs:
        name, weight = split_weight(spec)
        if name in rewards:
            raise Error(f"--reward: {name} is given twice")
        rewards[name] = checked(load_function(name), f"reward {name}"), weight
    return rewards


def checked(function, source):
    """The reward function with what it returns checked. It gets copies of its columns,
    because it may change them. `source` names it in errors."""

    @functools.wraps(function)
    def wrapper(**columns):
        returned = call(function, source, **copy.deepcopy(columns))
        return to_floats(returned, len(columns["completions"]), source)

    return wrapper


def to_floats(values, count, source):
    """Converts `count` finite numbers of Python, numpy or torch to floats; None (not
    judged) stays None. Raises `Error` for anything else, which `source` returned."""
    try:
        items = [values[i] for i in range(len(values))]  # fails for sets, generators
        valid = all(x is None or math.isfinite(x) for x in items)
    except (TypeError, LookupError, ValueError, OverflowError):
        valid = False
    if not valid or len(items) != count:
        raise Error(f"{source} returned {values!r:.200}, not {count} finite numbers")
    return [None if x is None else float(x) for x in items]


# How a number is found in a text: everything that is joined to its first digit, so that
# "12,5", "1.2.3" and "10:30" are each read as one thing. `VALUE` decides what it is.
DIGITS = r"(?:(?<![\w.])\.)?\d++(?:[.,:/]++\d++|\^[-+]?\d++|[eE][-+]?\d++)*+"
NUMBER = (
    r"(?:(?<![A-Za-z\d_)])[-+±])?"  # a sign, but not the minus of 7-5
    rf"[$€£¥₹]?{DIGITS}(?: ++(?=\d++/\d){DIGITS})?+"  # $1,250.50 or 2 1/2
    r"(?:[nxyz](?!\w)|[π√]|\\pi|(?<=:\d\d) ?(?i:[ap]\.?m\b))?+"  # 5x, 5π, 10:30 am
)
TUPLE = r"[(\[] *+[-+]?[\d.][-+\d./ ]*+,[-+\d.,/ ]*+[)\]]"  # (1, 200) is not 1200

# What counts as a number: 1,250.50 or 1/2 or .5 or 3e-5. The groups are the sign, the
# whole part of 2 1/2, the number or numerator, and the denominator.
DECIMAL = (
    r"(?:(?:[1-9]\d{0,2}(?:,\d{3})++|\d++)(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d{1,3})?"
)
VALUE = (
    r"([-+]?) ?[$€£¥₹]? ?(?:(\d++) ++(?=\d++/))?"
    rf"({DECIMAL})(?:/(\d++(?:\.\d++)?))? ?[%€£]?"
)

# The content of a box that holds no answer: {}, { }, {...} or {\text{}}.
EMPTY = r"(?:[\s.…$~{}]|\\(?:[,;:! ]|l?dots|q?quad|(?:text|math)[a-z]*+))*+"


def extract_answer(text, finished=True):
    r"""Returns the answer that a text gives: the content of the last \boxed{...} that
    is not empty, else what follows the last #### (see `marked_answer`), else the last
    number if the text is `finished` (not cut off). Returns None if there is none.
    >>> extract_answer(r"First \boxed{3}, so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract_answer("#### 72 clips"), extract_answer("so 7, no, 8", finished=False)
    ('72', None)
    """
    boxes = list(re.finditer(r"\\boxed\s*+", text))
    for box in reversed(boxes):
        content, closed = box_content(text, box.end())
        if not re.fullmatch(EMPTY, content):
            return content.strip() if closed else None
    text = plain(text)
    answer = marked_answer(text)
    if answer is None and finished:
        # The 2 of cm^2 and the 1 of x_1, but not the 5 of the_answer_is_5.
        exponent_or_index = r"\^[-+]?\w++|(?<![A-Za-z]{2})(?<=[A-Za-z})])_\w++"
        found = re.findall(f"{exponent_or_index}|({TUPLE}|{NUMBER})", text)
        numbers = [number for number in found if number]
        answer = numbers[-1] if numbers else None
    return answer


def box_content(text, start):
    r"""Returns the content of the \boxed before `start`, and whether it is closed."""
    if not text.startswith("{", start):  # \boxed 2 or \boxed\pi, but not "use \boxed."
        token = re.compile(rf"{NUMBER}|\\?[A-Za-z]\b|\\[a-z]+").match(text, start)
        return (token[0] if token else ""), True
    depth = 0
    for token in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += (token[0] == "{") - (token[0] == "}")  # \{ and \} do not count
        if depth == 0:
            return text[start + 1 : token.start()], True
    return text[start + 1 :], False


def marked_answer(text):
    r"""Returns what follows the last ####: a number, or else words if they end the
    text. A #### before anything else is a heading. Returns None if there is no other.
    >>> marked_answer("#### Step 1: add\n#### Answer: 72 clips\n#### Notes\nEasy.")
    '72'
    """
    text = text.rstrip()
    prefix = r"(?i:(?:the )?(?:final )?answer\b(?: is\b)?:?[\s*]*+)?"
    marks = re.finditer(rf"####[\s*]*+{prefix}([^#\n]*)", text)
    for mark in reversed(list(marks)):
        line, ends_text = mark[1], mark.end() == len(text)
        number = re.match(f"{TUPLE}|{NUMBER}", line)
        heading = re.match(r"\d+[.):] +\S|.*:[\s*]*$", line)  # "1. Add", "2 cases:"
        if number and (ends_text or not heading):
            # Not the 5 of 5-3=2 or of 5\pi, and not one of 5 or 6.
            part = r" *(?:[-+*/×÷x:] *[\d$(.\\]|\\[a-z]|[π√])|[\^_{]|.*="
            several = r"[$%]*(?:,| *(?:or|and|to)\b| *[;&|~—]) *[-$\\(]*\d"
            more = re.match(f"{part}|{several}", line[number.end() :])
            return line if more else number[0]
        is_sentence = "\n" in mark[0] and re.search(r"\d", line)
        if ends_text and re.search(r"\w", line) and not is_sentence:
            return line
    return None


def gold_answer(answer):
    r"""Returns the answer in a row of the data: in a box, after ####, or else the whole
    text, of at most 200 characters. Raises ValueError if there is none.
    >>> gold_answer("48 / 2 = 24\n#### 24"), gold_answer(0.5)
    ('24', '0.5')
    """
    text = str(answer) if type(answer) in (str, int, float) else ""
    # Not strip(), which would remove the form feed that JSON makes of "\frac".
    text = text.replace("\r\n", "\n").rstrip().lstrip(" \n")
    line = text.replace("\n", " ").replace("\t", " ") if "\n" in text else text
    if re.search(r"[\x00-\x1f\x7f-\x9f]", line):
        raise ValueError(
            f"control characters in {answer!r:.100}: double the backslashes of LaTeX "
            r'("\\frac", not "\frac")'
        )
    if "\\boxed" in text or "####" in text:
        text = extract_answer(text, finished=False) or ""
    elif len(text) > 200:
        raise ValueError("an answer of over 200 characters needs \\boxed{} or ####")
    if normalise(text) == "" or text in ("nan", "inf", "-inf"):  # floats in JSON
        raise ValueError(f"`answer` or `solution` is needed, not {answer!r:.200}")
    return text


def answers_match(answer, gold):
    r"""Returns True if two answers are the same number, or else the same words. If gold
    is one of the letters A to J, its option may follow: `B) 12` or `(B) 12`.
    >>> answers_match("$80,000.00", "80000"), answers_match(r"\text{(B)} 12", "b")
    (True, True)
    """
    found, expected = normalise(answer), normalise(gold)
    if expected in tuple("abcdefghij"):
        text = trim(plain(answer))
        # The dot of a.m. makes no label. A second label makes no answer: "A) or B",
        # "(A), (B)", "A. 1 B. 2" or "A. 1 or B". But "D. Both A and B" has one.
        label = r"\(?([a-j])(?:[):]|\.(?![a-z](?:\.|$)))"
        next_letter = r"\s*(?:and|or|[,;&/|])\s*\(?[a-j]\b"
        second = r"[\s,;&/|]\(?(?:[a-j][):]|(?-i:[A-J])\.\s)"
        option = rf"{label}(?!{next_letter})(?!.*{second})"
        match = re.match(option, text, re.IGNORECASE | re.DOTALL)
        both = re.search(r"\b(?:both|either|neither)\b", text, re.IGNORECASE)
        or_letter = re.search(r"\b(?:and|or) \(?[A-J]\)?$", text)
        if match and (both or not or_letter):
            found = match[1].casefold()
    return found == expected != ""


def normalise(text):
    r"""Returns an answer as a Fraction if it is a number, else as lower-case words.
    Of an equation, only the right side counts.
    >>> normalise(r"$x = 2\frac{1}{2}$."), normalise("New York"), normalise("12,5")
    (Fraction(5, 2), 'newyork', '12,5')
    """
    text = right_side(trim(plain(text)))
    inner = re.fullmatch(r'\(([^(),]+)\)|{([^{},]+)}|"([^"]+)"|“([^”]+)”', text)
    if inner:
        text = trim(inner[inner.lastindex])
    number = to_fraction(text)
    return "".join(text.casefold().split()) if number is None else number


def right_side(text):
    """Returns the right side of an equation, or the whole text if there are several or
    if it has a condition.
    >>> right_side("P = 2l+2w = 14"), right_side("x=1 or x=2"), right_side("5 if x=2")
    ('14', 'x=1 or x=2', '5 if x=2')
    """
    # The comma of 1,000 separates nothing. In x>=1 and x\not=1 nothing equals 1.
    several = (
        r",(?!\d{3}(?!\d))|;|\b(?:and|or)\b|\\(?:q?quad|land|lor|wedge|vee|\\)"
        r"|(?:[<>!]|\\not *)="
    )
    condition = re.search(r"\b(?:if|when|at|for)\b", text)
    has_condition = condition and re.search(r"\d", text[: condition.start()])
    if has_condition or re.search(several, text):
        return text
    return trim(text.rpartition("=")[2])


def to_fraction(text):
    """Returns `-2 1/2`, `1,250.50` or `3e-5` as a Fraction, or None if the text is not
    a number."""
    match = re.fullmatch(VALUE, text)
    if match is None:
        return None
    sign, whole, number, denominator = match.groups()
    try:
        value = Fraction(number.replace(",", "")) / Fraction(denominator or 1)
        if whole and value >= 1:  # 2 5/3
            return None
        value += int(whole or 0)
    except (ValueError, ZeroDivisionError):  # over 4,300 digits, or 1/0
        return None
    return -value if sign == "-" else value


def trim(text):
    """Returns the text without the punctuation and Markdown around it."""
    return text.strip(" \t\n$*:").rstrip(" \t\n$*:.,;。")


def plain(text):
    r"""Returns the text without LaTeX and Markdown.
    >>> plain(r"**\(-2\frac{1}{2}\)** or \text{3} \times 10^{8} of 12\,500")
    '-2 1/2  or 3e8 of 12500'
    """
    return join_numbers(plain_latex(plain_unicode(text)))


def plain_unicode(text):
    """Returns the text in ordinary characters, and without Markdown.
    >>> plain_unicode("**2½** × 10⁻² (３ – 1)")
    '2 1/2 × 10^-2 (3 - 1)'
    """
    text = re.sub(r"(?<=\d)\*\*(?=-?\d)", "^", text)  # 2**5 is 2^5
    text = re.sub(r"\*\*|__|`", "", text)  # **bold**, __bold__ and `code`
    text = re.sub(r"(?<![\s⁺⁻⁰¹²³⁴-⁹])(?=[⁺⁻⁰¹²³⁴-⁹])", "^", text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])|(?<=[¼-¾⅐-⅞])(?=\d)", " ", text)
    # Digits, spaces and fractions. One by one, as marks in a row cost quadratic time.
    # Not the full-width comma and colon, which join no digits, and not ㎡, which is m2.
    other = r"[^\x00-\x9f\u0300-\u036f，：㌀-㏿]"
    text = re.sub(other, lambda match: unicodedata.normalize("NFKC", match[0]), text)
    return re.sub("[−–‐‑‒]", "-", text).replace("\u2044", "/")


def plain_latex(text):
    r"""Returns the text without LaTeX, with fractions as 1/2 and powers of 10 as 3e8.
    >>> plain_latex(r"\text{about } \left( 3\frac12 \right)^{2} or 3 \cdot 10^{-2}")
    'about  ( 3 1/2  )^2 or 3e-2'
    """
    text = re.sub(r"(?<!\\)\\[,;: ]|(?<!\d)~|~(?!\d)", " ", text)
    text = text.replace("{,}", ",")
    font = r"\\(?:text|math|mbox|boldsymbol|bm)[a-z]*+"
    for _ in range(2):  # \textbf{\text{B}}
        text = re.sub(rf"{font} *+{{([^{{}}]*)}}", r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"(?<=\d) *+(?=\\frac)", " ", text)  # 2\frac{1}{2} is not 21/2
    part = r" *+(?:{ *+([-+]?[\d.,]++) *+}|(\d))"
    text = re.sub(rf"\\frac{part}{part}", r"\1\2/\3\4 ", text)
    power = r"10 *+\^ *+{?([-+]?\d++)}?"
    text = re.sub(rf"(?<=\d) *+(?:\\times|\\cdot|[×x*·⋅]) *+{power}", r"e\1", text)
    text = re.sub(rf"(?<![\w.,]){power}", r"1e\1", text)
    text = re.sub(r"([\^_]){([-+]?\d+|\w|\\[a-z]+)}", r"\1\2", text)  # x^{2}
    text = re.sub(r"\\pm(?![a-z])", "±", text).replace("^\\circ", "°")
    style = r"(?:left|right|displaystyle)(?![a-z])"
    return re.sub(rf"(?<!\\)\\(?:{style}|[! ()\[\]]|(?=[$%]))", "", text)


def join_numbers(text):
    """Returns the text without the spaces inside numbers.
    >>> join_numbers("x = - 12 500, not 1 / 2 or 100 2")
    'x = -12500, not 1/2 or 100 2'
    """
    groups = r"(?<![\d.,])(?<!\d )[1-9]\d{0,2}(?: \d{3})++(?![\d/])"
    text = re.sub(groups, lambda match: match[0].replace(" ", ""), text)
    text = re.sub(r"(?<=\d) */ *(?=\d)", "/", text)
    text = re.sub(r"([=(≈] *+\$?+ *+)- ++(?=[\d.$])", r"\1-", text)
    return re.sub("± *", "±", text)


# ------------------------------------------------------------------ process supervision
def process_supervision(step_reward, config, tokenizer, columns, length):
    """Advantages (N, C = length) from the function of --step-reward, which also gets
    `steps`, N lists of texts. Adds the columns `steps` and `step_rewards`. With the
    first three arguments filled in it is the `extra_advantages` of a `Run`."""
    columns["steps"], step_ends = [], []
    for ids, finished in zip(columns["completion_ids"], columns["finished"]):
        texts, ends = reasoning_steps(tokenizer, ids, finished)
        columns["steps"].append(texts)
        step_ends.append(ends)
    returned = call(step_reward, "--step-reward", **copy.deepcopy(columns))
    if not hasattr(returned, "__len__") or len(returned) != len(step_ends):
        expected = f"{len(step_ends)} lists of numbers"
        raise Error(f"--step-reward returned {returned!r:.200}, not {expected}")
    rewards = []
    for numbers, ends in zip(returned, step_ends):
        rewards.append(to_floats(numbers, len(ends), "--step-reward"))
        if None in rewards[-1]:
            raise Error("--step-reward returned None for a reasoning step")
    columns["step_rewards"] = rewards
    return process_advantages(
        rewards,
        step_ends,
        config.num_generations,
        length,
        config.scale_rewards,
    )


def process_advantages(
    step_rewards, step_ends, num_generations, length, scale_rewards="group", eps=1e-8
):
    """Advantages (N, C = length) by process supervision (DeepSeekMath 4.1.3).
    step_rewards: N lists with one number per reasoning step. step_ends: N lists with
    the index of the last token of each. The step rewards of a group are normalised
    together; a token gets the sum over the reasoning steps that end at or after it:
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


def reasoning_steps(tokenizer, ids, finished):
    """Splits a completion into reasoning steps, its non-blank lines. Returns their
    texts and the index of the last token of each. Blank lines belong to the following
    step; trailing ones, and the EOS of a finished completion, to the last."""
    texts, ends = [], []
    start = 0
    num_tokens = len(ids) - 1 if finished else len(ids)  # without EOS
    for i in range(num_tokens):
        if "\n" in tokenizer.decode([ids[i]]) or i == num_tokens - 1:
            text = tokenizer.decode(ids[start : i + 1]).strip()
            if text:
                texts.append(text)
                ends.append(i)
                start = i + 1
    if ends:
        ends[-1] = len(ids) - 1
    return texts, ends


# --------------------------------------------------------------------- data and prompts
def load_rows(config):
    """Returns the rows to train on, shuffled, and the rows to evaluate."""
    names = [split_weight(spec)[0] for spec in config.reward]
    needs_answers = "accuracy" in names
    if config.data:
        rows = read_rows(config.data, needs_answers)
    elif config.eval_data and not config.max_steps and not config.sft_steps:
        rows = []  # only evaluate
    else:
        rows = arithmetic(config.model, config.seed)
    random.Random(config.seed).shuffle(rows)
    if config.eval_data:
        return rows, read_rows(config.eval_data, needs_answers)
    num_held_out = min(64, len(rows) // 10)
    return rows[num_held_out:], rows[:num_held_out]


def read_rows(path, needs_answers):
    """Rows (dicts) of a JSONL file with "prompt" (or `question`, `problem`), "answer"
    and "solution" (each defaults to the other). `Error` names the first bad line."""
    rows = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("one JSON object a line is needed")
            prompt = row.get("prompt") or row.get("question") or row.get("problem")
            as_messages(prompt)
            answer, solution = row.get("answer"), row.get("solution")
            answer = solution if answer is None else answer
            solution = answer if solution is None else solution
            if needs_answers:
                gold_answer(answer)
        except Exception as error:  # a line may contain anything
            message = f"{type(error).__name__}: {error}"
            raise Error(f"{path}:{number}: {message:.200}") from error
        rows.append(dict(row, prompt=prompt, answer=answer, solution=solution))
    if not rows:
        raise Error(f"{path} has no rows")
    every_column = dict.fromkeys(name for row in rows for name in row)
    return [{**every_column, **row} for row in rows]  # None where a column is missing


def as_messages(prompt):
    """A text as a chat of one message; a chat as a copy. Raises for anything else."""
    if not prompt:
        raise ValueError("`prompt`, `question` or `problem` is needed")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = []
    for message in prompt:
        is_message = isinstance(message, dict) and "role" in message
        if not is_message or not isinstance(message.get("content"), str):
            raise ValueError(f"not a message with `role` and a text: {message!r}")
        message["content"].encode()  # raises unless it is valid text
        if re.search("\f(?:rac|orall)|\b(?:eta|inom|egin|oxed)", message["content"]):
            raise ValueError("control characters: double the backslashes of LaTeX")
        messages.append(dict(message))
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("a chat needs a user message")
    return messages


def render_chat(tokenizer, messages, template_kwargs):
    """The text of a chat, by the chat template. It ends with the header of a new turn,
    or with a last message of the assistant, left open for the model to continue."""
    continues = messages[-1]["role"] == "assistant"
    try:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **template_kwargs,
        )
    except Exception as error:  # a template is a program: it may raise anything
        raise Error(f"chat template: {error} in {messages!r:.200}") from error


def end_of_answer(tokenizer, template_kwargs):
    """Returns what the chat template puts between an answer and the next question."""
    question = {"role": "user", "content": "5151"}
    answer = {"role": "assistant", "content": "4242"}
    text = render_chat(tokenizer, [question, answer, question], template_kwargs)
    return text.rpartition("4242")[2].partition("5151")[0]


def chat_template_kwargs(run):
    """Returns the arguments of the chat template, or None if the template is not used.
    It is used if it puts an EOS token of the model after an answer, since many base
    models carry the template of another model, which they were not trained on. The EOS
    may also open the next turn (GLM)."""
    tokenizer, kwargs = run.tokenizer, json.loads(run.config.chat_template_kwargs)
    for name in kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise Error(f"--chat-template-kwargs: the chat template has no {name!r}")
    if not tokenizer.chat_template:
        return None
    ending = end_of_answer(tokenizer, kwargs)
    eos_tokens = tokenizer.convert_ids_to_tokens(run.eos_token_ids)
    if any(token and token in ending for token in eos_tokens):
        return kwargs
    if kwargs:
        raise Error(
            "--chat-template-kwargs: the chat template is not used, because it ends an "
            f"answer with {ending!r}, not with {eos_tokens}"
        )
    return None


BOXED = "{question}\nReason step by step, and put your final answer within \\boxed{}.\n"


def encode_prompts(run, rows):
    """Adds the columns of `encode_prompt` to the rows whose prompts fit into
    `max_prompt_length`, and leaves out the others."""
    config = run.config
    template = BOXED if "accuracy" in run.reward_functions else "{question}"
    template = config.prompt_template or template
    template_kwargs = chat_template_kwargs(run)
    encoded = [encode_prompt(run, row, template, template_kwargs) for row in rows]
    return [x for x in encoded if 0 < len(x["prompt_ids"]) <= config.max_prompt_length]


def encode_prompt(run, row, template, template_kwargs):
    """A row with the columns "prompts" (a text), "prompt_ids" and "messages". The
    template wraps the last user message. Then the system prompt is added, and then the
    chat template, unless `template_kwargs` is None."""
    tokenizer, system_prompt = run.tokenizer, run.config.system_prompt
    messages = as_messages(row["prompt"])
    question = [message for message in messages if message["role"] == "user"][-1]
    question["content"] = template.replace("{question}", question["content"])
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if template_kwargs is None:
        text = "\n".join(message["content"] for message in messages)
        ids = tokenizer.encode(text)
        if ids and ids[-1] in run.eos_token_ids:
            ids.pop()  # some tokenizers append EOS to every text
    else:
        text = render_chat(tokenizer, messages, template_kwargs)
        for i, message in enumerate(messages):
            longer = list(messages)
            longer[i] = dict(message, content=message["content"] + "4242")
            if render_chat(tokenizer, longer, template_kwargs) == text:
                raise Error(f"chat template: it leaves out {message!r:.200}")
        ids = tokenizer.encode(text, add_special_tokens=False)  # the template has them
    return dict(row, prompts=text, prompt_ids=ids, messages=messages)


def check_limits(run, rows):
    """Raises `Error` if the model cannot run one of the prompts and its completion."""
    prompts = [row["prompt_ids"] for row in rows]
    largest_id = max(max(ids) for ids in [*prompts, run.eos_token_ids])
    num_embeddings = run.policy.get_input_embeddings().weight.shape[0]
    if largest_id >= num_embeddings:
        raise Error(
            f"--model: token id {largest_id} of the tokenizer, but {num_embeddings} "
            "rows in the embedding"
        )
    longest = max(len(ids) for ids in prompts)
    length = run.config.max_completion_length
    config = run.policy.config.get_text_config()
    num_positions = getattr(config, "max_position_embeddings", None) or math.inf
    if longest + length > num_positions:
        raise Error(
            f"--model: {longest} tokens of a prompt and {length} of a completion "
            f"exceed its {num_positions} positions; lower --max-prompt-length or "
            "--max-completion-length"
        )


# ------------------------------------------------------------------------------- models
def load_model(name, seed):
    """Returns a float32 model on the CPU, its tokenizer and its EOS ids. Raises
    ValueError for a model that cannot be trained here."""
    if name == "tiny":
        model, tokenizer = tiny_model(seed)
    else:
        if os.path.exists(os.path.join(name, "adapter_config.json")):
            raise ValueError(
                "is an adapter. Merge it first: peft.PeftModel.from_pretrained(base, "
                f"{name!r}).merge_and_unload().save_pretrained(...)"
            )
        # transformers loads in threads by default, and each thread holds on to memory.
        os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
        tokenizer = AutoTokenizer.from_pretrained(name)
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise ValueError("has a tokenizer without tokens: are its files there?")
        model, info = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True
        )
        if info["missing_keys"]:  # they would be random
            raise ValueError(f"lacks the weights {sorted(info['missing_keys'])!s:.200}")
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        # Mixtures of experts need these logits for a loss that GRPO does not have.
        config.output_router_logits = False
    model.eval()  # no dropout: sampling, old, new and reference agree
    eos = model.generation_config.eos_token_id  # may differ from the tokenizer's
    eos = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
    eos = [token for token in dict.fromkeys(eos) if token is not None]
    if not eos:
        raise ValueError("neither tokenizer nor generation config has an EOS token")
    return model, tokenizer, eos


def copy_reference(policy, config):
    """A copy of the float32 policy in --dtype that stays fixed. With several ranks it
    is sharded."""
    reference = copy.deepcopy(policy).requires_grad_(False)
    dtype = getattr(torch, config.dtype)
    for weight in reference.parameters():  # `.to(dtype)` would round buffers, too
        weight.data = weight.data.to(dtype)
    shard(reference, dtype, frozen=set(), keep_gathered=False)
    return reference.to(DEVICE)


def build_run(config, name):
    """The `Run` of a config. name: the model that policy and reference start from, as a
    Hub name or a folder. The model is loaded and checked on the CPU, in float32, and
    moved to the GPU after its conversion: a GPU never holds more than that."""
    reward_functions = load_rewards(config.reward)
    step_reward = load_function(config.step_reward) if config.step_reward else None
    policy, tokenizer, eos_token_ids, logprobs = load_checked_model(config, name)
    reference = None
    if config.lora_rank:
        reference = WithoutAdapters(policy)
    elif config.beta:
        reference = copy_reference(policy, config)
    set_seed(config.seed, 0)  # adapters and masters start at random
    prepare_policy(policy, config)
    optimizer = make_optimizer(policy, config)
    if ON_GPU:
        check_on_gpu(policy, logprobs, name)
    extra_advantages = None
    if step_reward:
        extra_advantages = functools.partial(
            process_supervision, step_reward, config, tokenizer
        )
    print0(f"{name}: {config.dtype} on {DEVICE}, by {logprobs.__name__}")
    print0(f"rewards: {', '.join(config.reward)} {config.step_reward}")
    return Run(
        config=config,
        policy=policy,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        optimizer=optimizer,
        reward_functions=reward_functions,
        reference=reference,
        logprobs=logprobs,
        extra_advantages=extra_advantages,
    )


def load_checked_model(config, name):
    """What `load_model` returns, and the function of the log-probs for this model.
    Raises `Error` for a model that cannot be trained here."""
    try:
        model, tokenizer, eos_token_ids = load_model(name, config.seed)
        check_sampling(model)
        return model, tokenizer, eos_token_ids, choose_logprobs(model)
    except (OSError, ImportError, torch.OutOfMemoryError):
        raise  # `main` names the file, the package or the memory
    except Exception as error:  # a folder may contain anything
        reason = error if isinstance(error, ValueError) else repr(error)
        raise Error(f"--model {name}: {reason!s:.300}") from error


# -------------------------------------------------------------------- bfloat16 and LoRA
# The optimizer always updates float32 tensors:
#     float32, one rank     the weights
#     bfloat16, one rank    masters, to which the weights are rounded (`MasterAdamW`)
#     several ranks         the weights: shards, which FSDP2 gathers in --dtype
#     LoRA                  the adapters; the frozen base is in --dtype
def prepare_policy(model, config):
    """Prepares a float32 model on the CPU for training, and moves it to DEVICE. Adds
    adapters, or else moves the weights within their rounding cells if they will be
    bfloat16. Then shards."""
    dtype = getattr(torch, config.dtype)
    frozen = set()
    if config.lora_rank:
        frozen = add_adapters(model, config.lora_rank, dtype)
    elif dtype == torch.bfloat16:
        for weight in model.parameters():
            weight.data = within_cell(weight.data)
    shard(model, dtype, frozen, keep_gathered=True)
    model.to(DEVICE)


def make_optimizer(model, config):
    """AdamW for the weights that are trained. On one rank, in bfloat16 and without
    adapters it is `MasterAdamW`, and the weights become bfloat16."""
    needs_masters = (
        config.dtype == "bfloat16" and WORLD_SIZE == 1 and not config.lora_rank
    )
    optimizer_class = MasterAdamW if needs_masters else torch.optim.AdamW
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return optimizer_class(
        weights, lr=config.learning_rate, weight_decay=0.0, fused=True
    )


class MasterAdamW(torch.optim.AdamW):
    """AdamW for bfloat16 weights. It updates float32 masters and rounds the weights to
    them, because updates below 1/512 of a bfloat16 weight would be rounded away.
    Before: the weights of a model are float32. After: their tensors are the masters,
    and the model has new bfloat16 weights, whose gradients are float32."""

    def __init__(self, weights, **options):
        self.weights = list(weights)
        self.masters = [weight.detach() for weight in self.weights]
        for weight in self.weights:
            weight.data = weight.data.bfloat16()  # in new memory
            weight.grad_dtype = torch.float32  # micro-batches add up in float32
        super().__init__(self.masters, **options)

    @torch.no_grad()
    def step(self):
        for weight, master in zip(self.weights, self.masters):
            master.grad = weight.grad
        super().step()
        for master in self.masters:
            master.grad = None
        self.round_weights()

    @torch.no_grad()
    def round_weights(self):
        for weight, master in zip(self.weights, self.masters):
            weight.copy_(master)


def within_cell(weight):
    """Random float32 numbers that bfloat16 rounds to the given weights.
    Published models are bfloat16. Near 0.02, bfloat16 numbers are 1.2e-4 apart: a
    master that starts at one of them needs 60 updates of 1e-6 before it rounds to the
    next. Starting anywhere in its cell leaves the model as it is and lets it move."""
    # bfloat16 has 8 significant bits: between 2**(exponent - 1) and 2**exponent its
    # numbers are 2**(exponent - 8) apart, and a cell extends half of that either way.
    exponent = torch.frexp(weight).exponent
    offset = torch.zeros_like(weight)
    offset.uniform_(-0.5, 0.5)  # without this line, masters start at the weights
    near = weight + torch.ldexp(offset, exponent - 8)
    # Outside the cell (it is smaller below a power of 2; 0 has none) keep the weight.
    return torch.where(near.bfloat16() == weight, near, weight)


def add_adapters(model, rank, dtype):
    """LoRA (arXiv:2106.09685): only adapters are trained, in float32. Returns the set
    of all other weights, which are frozen, in `dtype`."""
    import peft

    lora = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
    )
    model.add_adapter(lora)  # freezes all other weights
    frozen = {weight for weight in model.parameters() if not weight.requires_grad}
    for weight in frozen:
        weight.data = weight.data.to(dtype)
    return frozen


class WithoutAdapters:
    """A model that runs without its adapters: the reference of a policy with LoRA. It
    is the same model otherwise and needs no memory of its own."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, *args, **options):
        self.model.disable_adapters()
        try:
            return self.model(*args, **options)
        finally:
            self.model.enable_adapters()


# --------------------------------------------------------------------- faster log-probs
def shared_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, mask, temperature=1.0
):
    """`token_logprobs`, with the same numbers and gradients, in less time and memory. A
    prompt that neighbouring rows share runs once. Their completions continue from
    copies of its key-value cache, and gradients flow through it. The logits are never
    all in memory. Shapes: H hidden size; M completion tokens without padding."""
    if not prompt_mask[:, -1].all():
        raise ValueError("prompts must be padded on the left")
    mask = mask.bool()
    repeats = len(mask) // len(prompt_ids)  # G for prompts (B, P), 1 for (N, P)
    prompt_ids = prompt_ids.repeat_interleave(repeats, dim=0)
    prompt_mask = prompt_mask.bool().repeat_interleave(repeats, dim=0)

    # 1. Run each prompt once. Its last hidden state predicts the first token of each of
    # its completions.
    unpadded = prompt_ids.masked_fill(~prompt_mask, -1)  # the same for the same prompt
    differs = (unpadded[1:] != unpadded[:-1]).any(1)  # from the row before, (N - 1,)
    is_first = F.pad(differs, (1, 0), value=True)  # (N,): a prompt's first row
    prompt_of = is_first.cumsum(0) - 1  # (N,): index of each row's prompt
    cache = DynamicCache(config=model.config)
    hidden = hidden_states(model, prompt_ids[is_first], prompt_mask[is_first], cache)
    first = hidden[prompt_of, -1:]  # (N, 1, H)

    # 2. Run the completions, each from a copy of its prompt's cache. The output at each
    # token predicts the next one, so that the last token of a completion need not run.
    # But at least two tokens run, because recurrent layers (Mamba) run a single one by
    # a kernel without a backward pass. For a prompt p0 p1 p2, where outputs in brackets
    # are dropped:
    #     C = 3      at         p2   c0   c1
    #                predicts   c0   c1   c2
    #     C = 2      at         p2   c0  (c1)
    #                predicts   c0   c1
    #     C = 1      at         p2  (c0) (padding)
    #                predicts   c0
    # Padding on the right needs no mask: no earlier token sees it.
    select_rows(cache, prompt_of)
    length = mask.shape[1]
    num_inputs = max(2, length - 1)
    inputs = F.pad(completion_ids, (0, 1))[:, :num_inputs]
    attention_mask = F.pad(prompt_mask, (0, num_inputs), value=True)
    later = hidden_states(model, inputs, attention_mask, cache)  # (N, num_inputs, H)
    hidden = torch.cat([first, later], 1)[:, :length]  # (N, C, H)

    # 3. Of the M tokens that are not padding, take the log-probs.
    weight = model.get_output_embeddings().weight
    targets = completion_ids[mask]
    logp = ChunkedLogprobs.apply(hidden[mask], weight, targets, temperature)  # (M,)
    return logp.new_zeros(mask.shape).masked_scatter(mask, logp)


def hidden_states(model, ids, attention_mask, cache):
    """The last hidden states (N, L, H), without computing any logits."""
    return call_model(
        model,
        ids,
        attention_mask,
        cache,
        logits_to_keep=ids.new_empty(0),  # int64
        output_hidden_states=True,
    ).hidden_states[-1]


class ChunkedLogprobs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature) at the targets -> (M,) float32.
    hidden: (M, H); weight: (V, H); targets: (M,). The logits of a slice of v of the V
    tokens of the vocabulary are in memory at a time. The backward pass computes them
    again: d logp / d logits = (one_hot(target) - softmax(logits)) / temperature."""

    logits_at_once = 2**25 if ON_GPU else 2**19  # M*v; 2**19 fit into a CPU's cache

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        size = ChunkedLogprobs.logits_at_once // max(1, len(hidden))
        ctx.slice_size = max(64, size // 64 * 64)  # v: GPUs like multiples of 64
        ctx.temperature = temperature
        log_z = hidden.new_full((len(hidden),), -math.inf, dtype=torch.float32)
        for vocab_slice in weight.split(ctx.slice_size):  # (v, H)
            logits = (hidden @ vocab_slice.t()).float().div_(temperature)  # (M, v)
            log_z = log_z.logaddexp(logits.logsumexp(1))  # of all slices so far
        # The targets' logits. Like those above they are rounded once, after the sum
        # over H. (hidden * weight).sum() rounds its terms, and logp could exceed 0.
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
        for start in range(0, len(weight), ctx.slice_size):
            vocab_slice = weight[start : start + ctx.slice_size]  # (v, H)
            logits = (hidden @ vocab_slice.t()).float().div_(ctx.temperature)  # (M, v)
            softmax = logits.sub_(log_z[:, None]).exp_()
            ids = torch.arange(start, start + len(vocab_slice), device=weight.device)
            one_hot = (targets[:, None] == ids).float()
            # Subtracted in float32: in bfloat16 a softmax of 0.999 is 1, which gives 0.
            grad_logits = (grad * (one_hot - softmax)).to(vocab_slice.dtype)
            grad_hidden += grad_logits @ vocab_slice
            if needs_weight:
                grad_slice = grad_weight[start : start + ctx.slice_size]  # a view
                grad_slice.addmm_(grad_logits.t(), hidden)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


PROBE = [[2, 3, 4, 2, 3], [5, 6]]  # token ids of two prompts of different lengths


def probe(model):
    """The prompts of PROBE on the model's device, as the inputs of `generate`."""
    prompt_ids, prompt_mask = pad(PROBE, "left")
    return prompt_ids.to(model.device), prompt_mask.to(model.device)


@torch.no_grad()
def check_sampling(model):
    """Raises ValueError unless each token of greedy completions of PROBE is a most
    probable one of plain forward passes, without padding, mask or cache. With 13 tokens
    at most this cannot detect what begins later, such as a sliding window of 4096."""
    ids = greedy_completions(model)
    logits = plain_logits(model, PROBE, ids)
    chosen = logits.gather(2, ids[:, :, None])[:, :, 0]
    if (logits.amax(2) - chosen).max() > 1e-3:
        raise ValueError("its output depends on padding or caching")


def choose_logprobs(model):
    """`shared_logprobs` if its log-probs and their gradient match those of plain
    forward passes, else `token_logprobs` if it does. Raises ValueError otherwise."""
    ids = greedy_completions(model)
    ids[1::2] = ids[::2].flip(1)  # the second completion of each prompt is another one
    expected = with_gradient(model, plain_logprobs(model, PROBE, ids))
    for logprobs in (shared_logprobs, token_logprobs):
        try:
            logp = logprobs(model, *probe(model), ids, torch.ones_like(ids))
            found = with_gradient(model, logp)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # these RuntimeErrors say nothing about the model
        except (AttributeError, TypeError, ValueError, RuntimeError):
            continue  # the model has no such cache, or a layer changes it in place
        if all((x - y).norm() <= 1e-3 * y.norm() for x, y in zip(found, expected)):
            return logprobs
    raise ValueError("its log-probs depend on padding")


@torch.no_grad()
def check_on_gpu(model, logprobs, name):
    """Checks the model on the GPU, in --dtype, since its kernels differ from the CPU's.
    Raises `Error` if log-probs are off by 0.1 nats on average. Rounding to bfloat16
    explains about 0.01; a wrong mask or cache gives 0.1 to 8."""
    ids = greedy_completions(model)
    expected = plain_logprobs(model, PROBE, ids)
    logp = logprobs(model, *probe(model), ids, torch.ones_like(ids))
    difference = (logp - expected).abs().mean().item()
    if not difference < 0.1:  # or NaN
        raise Error(f"--model {name}: log-probs on the GPU are off by {difference:.2g}")


def greedy_completions(model):
    """Two greedy completions of 8 tokens for each prompt in PROBE: (4, 8)."""
    no_eos = -1  # no token has this id
    return generate(model, *probe(model), 2, 8, no_eos, temperature=0)


def plain_logits(model, prompts, completion_ids):
    """The logits from which completions (N, C) of B prompts, lists of ids, are sampled:
    (N, C, V). One forward pass for each completion, without padding, mask or cache."""
    num_generations = len(completion_ids) // len(prompts)
    length = completion_ids.shape[1]
    logits = []
    for i, completion in enumerate(completion_ids.tolist()):
        ids = prompts[i // num_generations] + completion
        ids = torch.tensor([ids], device=model.device)
        logits.append(model(ids).logits[0, -length - 1 : -1])  # (C, V)
    return torch.stack(logits)


def plain_logprobs(model, prompts, completion_ids):
    """The log-probs of these completions by `plain_logits`: (N, C) float32."""
    logps = plain_logits(model, prompts, completion_ids).float().log_softmax(2)
    return logps.gather(2, completion_ids[:, :, None])[:, :, 0]


def with_gradient(model, logp):
    """Log-probs and the gradient of their sum with respect to the input embeddings,
    which depends on all layers."""
    weight = model.get_input_embeddings().weight
    return logp, *torch.autograd.grad(logp.sum(), weight)


# ------------------------------------------------------------------------ several ranks
def join_ranks():
    """Sets up the device of this rank and, under torchrun, joins the process group."""
    transformers.utils.logging.disable_progress_bar()
    # Harmless: one rank saves without a process group, and outputs are never modified.
    warnings.filterwarnings("ignore", "torch.distributed is disabled|FSDP2-wrapped")
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        # cuDNN attention, the default on an H100, gives NaN gradients with a mask at
        # some lengths (pytorch issue 196678), and re-plans for every length.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.matmul.allow_tf32 = False  # some containers set it
        torch.backends.cudnn.allow_tf32 = False
    if WORLD_SIZE > 1:
        # On a GPU tensors use NCCL; objects, as in `all_gather`, use gloo.
        dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")


def set_seed(seed, step):
    """Seeds a step on this rank, so that a resumed run draws the same numbers again."""
    transformers.set_seed((seed * 1_000_003 + step * WORLD_SIZE + RANK) % 2**32)


def print0(text):
    """Prints above the progress bar, on the first rank only."""
    if RANK == 0:
        tqdm.write(text)


def all_gather(value):
    """Gathers one object from every rank into a list, in order of rank."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values


def average_over_ranks(metrics):
    """{name: mean of the numbers of all ranks}; for kl_max the largest. A rank on which
    a reward function judged no completion has NaN for it, which does not count."""
    ranks = all_gather(metrics)
    means = {}
    for name in metrics:
        numbers = torch.tensor([x[name] for x in ranks], dtype=torch.float64)
        is_reward = name.startswith("rewards/")
        means[name] = (numbers.nanmean() if is_reward else numbers.mean()).item()
    return dict(means, kl_max=max(x["kl_max"] for x in ranks))


def shard(model, dtype, frozen, keep_gathered):
    """With several ranks, keeps a part of the weights on each and gathers them in
    `dtype` whenever the model runs (FSDP2). With `keep_gathered` they stay until the
    next backward pass, so that each rank can sample on its own; otherwise each layer is
    gathered only while it runs. `frozen`, a set of weights, is not sharded. A model on
    the CPU is moved to the GPU layer by layer."""
    if WORLD_SIZE == 1:
        return
    policy = fsdp.MixedPrecisionPolicy(dtype, torch.float32)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):  # a decoder layer
            fsdp.fully_shard(
                layer,
                reshard_after_forward=not keep_gathered,
                mp_policy=policy,
                ignored_params=frozen,
            )
    # The output layer stays gathered: `shared_logprobs` uses it after the forward pass.
    fsdp.fully_shard(
        model, reshard_after_forward=False, mp_policy=policy, ignored_params=frozen
    )


# ----------------------------------------------------------------- logs and checkpoints
def claim_output_dir(config):
    """Claims the output directory and locks it until this process ends. The directory
    of a new run is created, or must be empty; it belongs to whoever creates
    options.json."""
    import filelock

    output_dir = Path(config.output_dir)
    if RANK == 0:
        if not config.resume:
            output_dir.mkdir(parents=True, exist_ok=True)
            if any(output_dir.iterdir()):
                raise Error(f"{output_dir} is not empty: --resume it or choose another")
            (output_dir / "options.json").open("x").close()
        # A notebook may resume a run in the process that started it (`is_singleton`).
        lock = filelock.FileLock(output_dir / "lock", timeout=0, is_singleton=True)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise Error(f"another process is writing to {output_dir}") from error
        atexit.register(lock.release)  # also keeps a reference: the lock stays alive
    if not config.resume:
        save_options(config)
    all_gather(None)  # wait until the directory is there


def save_options(config):
    """Writes options.json, whole or not at all, on the first rank."""
    if RANK > 0:
        return
    saved = {"version": __version__, **vars(config)}
    del saved["output_dir"], saved["resume"]  # the directory may be moved
    partial = Path(config.output_dir, "options.partial")
    partial.write_text(json.dumps(saved, indent=1))
    partial.replace(partial.with_name("options.json"))


def saved_options(folder):
    """The options that the run in this folder was started with."""
    path = Path(folder, "options.json")
    try:
        saved = json.loads(path.read_text())
        version = saved.pop("version")
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise Error(f"{path} does not hold the options of a run") from error
    if version != __version__ or set(saved) - {field.name for field in fields(Options)}:
        raise Error(f"{path} is of version {version}, this is {__version__}")
    return saved


def append_rows(run, name, rows):
    """Appends rows (dicts) to a JSONL file in the output directory, on the first rank.
    JSON has no NaN: it becomes null."""
    if RANK > 0:
        return
    with open(Path(run.config.output_dir, name), "a") as file:
        for row in rows:
            text = json.dumps(row, default=str)
            row = json.loads(text, parse_constant=lambda constant: None)
            print(json.dumps(row), file=file)


def log_completions(run, step, columns):
    """Adds the completions of the first rank to completions.jsonl and prints one."""
    rows = [dict(zip(columns, x), step=step) for x in zip(*columns.values())]
    append_rows(run, "completions.jsonl", rows)
    sample = f"{rows[-1]['prompts']!r} -> {rows[-1]['completions']!r}"
    print0(f"step {step}: reward {rows[-1]['reward']:.2f} for {sample}")


def repair_logs(run):
    """Cuts off an incomplete last line, which a kill may have left."""
    if RANK == 0:
        for name in ("metrics.jsonl", "completions.jsonl"):
            path = Path(run.config.output_dir, name)
            path.touch()
            text = path.read_bytes()
            os.truncate(path, text.rfind(b"\n") + 1)


def logged_evaluations(run):
    """{step: eval/reward} of the evaluations in metrics.jsonl, on every rank."""
    evaluations = {}
    if RANK == 0:
        text = Path(run.config.output_dir, "metrics.jsonl").read_text()
        for line in text.splitlines():
            row = json.loads(line)
            if "eval/reward" in row:
                evaluations[row["step"]] = row["eval/reward"]
    return all_gather(evaluations)[0]


@contextlib.contextmanager
def tracker(config):
    """Yields a function that reports (metrics, step) to the tracker of --report-to, on
    the first rank. A resumed run has the same name and goes on in the same log."""
    if config.report_to == "none" or RANK > 0:
        yield lambda metrics, step: None
    elif config.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        def log(metrics, step):
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        with SummaryWriter(config.output_dir) as writer:
            yield log
    else:  # wandb and trackio have the same interface
        package = importlib.import_module(config.report_to)
        os.environ["WANDB_RUN_ID"] = config.run_name  # by which wandb resumes
        package.init(
            project="grpo", name=config.run_name, config=vars(config), resume="allow"
        )
        try:
            yield package.log
        finally:
            package.finish()


def checkpoints(run):
    """The folders of the checkpoints of a run, the oldest first."""
    output_dir = Path(run.config.output_dir)
    found = [x for x in output_dir.iterdir() if re.fullmatch(r"checkpoint-\d+", x.name)]
    return sorted(found, key=step_of)


def step_of(checkpoint):
    """The step of a checkpoint: 50 for the folder checkpoint-50."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def save(run, step):
    """Saves a checkpoint, and deletes the oldest beyond --save-total-limit."""
    folder = Path(run.config.output_dir, f"checkpoint-{step}")
    write_folder(run, folder, state_of(run))
    limit = run.config.save_total_limit
    if RANK == 0 and limit:
        for old in checkpoints(run)[:-limit]:
            shutil.rmtree(old)


def write_folder(run, folder, state=None):
    """Writes the model (with LoRA, the adapter) and `state` to a folder that
    `from_pretrained` and vLLM load. The folder appears whole or not at all."""
    partial = folder.with_name("partial")
    policy = run.policy
    dtype, is_lora = getattr(torch, run.config.dtype), run.config.lora_rank > 0
    options = dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dsd.get_model_state_dict(policy, options=options)  # on rank 0
    if RANK == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        for name in policy.all_tied_weights_keys:  # would be written twice
            weights.pop(name, None)
        for name, weight in weights.items():
            if weight.dtype == torch.float32 and not is_lora:  # FSDP keeps float32
                weights[name] = weight.to(dtype)
        policy.save_pretrained(partial, state_dict=weights)
        if not is_lora:  # an adapter's folder must not have a model's config.json
            policy.config.dtype = dtype
            policy.config.save_pretrained(partial)
        run.tokenizer.save_pretrained(partial)
    if state:
        dcp.save(state, checkpoint_id=partial / "state")
    if RANK == 0:  # all ranks have written: `dcp.save` waits for them
        partial.rename(folder)
    all_gather(None)  # wait for the rename
    print0(f"saved {folder}")


def state_of(run):
    """{name of a weight: AdamW's state and "master", the float32 tensor that it
    updates}, for any number of ranks."""
    optimizer = run.optimizer
    create_missing_state(optimizer)
    names = [name for name, x in run.policy.named_parameters() if x.requires_grad]
    masters = optimizer.param_groups[0]["params"]
    return {
        name: dict(optimizer.state[master], master=master)
        for name, master in zip(names, masters, strict=True)
    }


def create_missing_state(optimizer):
    """Creates AdamW's state for weights that had no gradient yet. AdamW creates it at
    the first gradient only; before that a checkpoint could not be loaded into it."""
    for master in optimizer.param_groups[0]["params"]:
        if not optimizer.state[master]:
            optimizer.state[master] = {
                "step": torch.zeros((), device=DEVICE),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }


def restore(run):
    """Loads the newest checkpoint, if there is one. Returns its step, or 0."""
    found = checkpoints(run)
    if not found:
        return 0
    newest = found[-1]
    if not (newest / "state" / ".metadata").exists():
        raise Error(f"{newest} has no complete state: delete it to resume without it")
    try:
        dcp.load(state_of(run), checkpoint_id=newest / "state")  # in place
    except (RuntimeError, ValueError, dcp.CheckpointException) as error:
        raise Error(f"{newest} does not fit the model: {error!r:.300}") from error
    for module in run.policy.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()  # drops weights that were gathered before
    if isinstance(run.optimizer, MasterAdamW):
        run.optimizer.round_weights()
    step = step_of(newest)
    print0(f"resuming from {newest}")
    if step >= run.config.max_steps:
        print0(f"all {step} steps are done; raise --max-steps to continue")
    return step


# --------------------------------------------------- supervised steps and built-in task
def sft(config, rows, folder, signals):
    """Trains all weights on the solutions in the data and saves the model in `folder`.
    With advantage 1, ratio 1 and no KL, GRPO's loss has the gradient of -logp."""
    supervised = replace(
        config,
        beta=0.0,
        lora_rank=0,
        num_iterations=1,
        num_mini_batches=1,
        temperature=1.0,
    )
    run = build_run(supervised, config.model)
    encoded = encode_prompts(run, rows)
    examples = []  # token ids of prompt and solution
    for row in share_of_rank(encoded):
        text = "" if row["solution"] is None else str(row["solution"])
        ids = run.tokenizer.encode(text, add_special_tokens=False)
        if 0 < len(ids) < config.max_completion_length:
            examples.append((row["prompt_ids"], ids + run.eos_token_ids[:1]))
    num_examples = min(all_gather(len(examples)))
    if num_examples < config.num_prompts:
        fitting = num_examples * WORLD_SIZE
        raise Error(f"--sft-steps: only {fitting} rows have a solution that fits")
    check_limits(run, encoded)
    claim_output_dir(config)
    save_options(config)  # with what was typed beside --resume
    for step in tqdm(range(1, config.sft_steps + 1), "supervised", disable=RANK > 0):
        if stop_requested(signals):
            raise Error(f"stopped before GRPO began; {resume_hint(config)}")
        chosen = prompt_batch(examples, step, config.num_prompts, config.seed)
        prompts, solutions = zip(*chosen)
        ids, mask = pad(solutions, "right")
        advantages = torch.ones_like(ids, dtype=torch.float32)
        batch = Batch(*pad(prompts, "left"), ids, mask, advantages)
        if update(run, batch, config.sft_learning_rate)["skipped"]:
            raise Error(f"supervised step {step}: the gradient is not finite")
    write_folder(run, folder)


def arithmetic(model, seed):
    """Built-in sums. For tiny, 5 in 8 solutions are wrong: GRPO can improve on them."""
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


TINY = dict(  # the defaults of `--model tiny`
    prompt_template="{question}",
    prompts_per_step=64,
    micro_batch_size=512,
    max_completion_length=8,
    learning_rate=1e-3,
    sft_steps=250,
    sft_learning_rate=3e-3,
)


# ------------------------------------------------------------------------------ the run
@contextlib.contextmanager
def heed_signals():
    """Lets the signals that end jobs (Ctrl-C, SIGTERM, a closed terminal, SLURM's
    warning) stop the run after its current step, and a second one at once. Yields the
    list of signals received, which is empty at first."""
    received, handlers = [], {}
    main_process = os.getpid()

    def stop(number, frame):
        if os.getpid() != main_process:  # a worker that a reward function has forked
            if number != signal.SIGINT:  # Ctrl-C reaches it, too, but it has to go on
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        received.append(number)
        for other in handlers:
            signal.signal(other, signal.SIG_DFL)
        if number == signal.SIGHUP:  # the terminal is gone: writing to it would fail
            for stream in (1, 2):
                if stat.S_ISCHR(os.fstat(stream).st_mode):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os.write(2, b"stopping after this step; again to stop at once\n")

    if threading.current_thread() is threading.main_thread():  # else Python forbids it
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
            number = getattr(signal, name)
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup ignores SIGHUP
                handlers[number] = signal.signal(number, stop)
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def stop_requested(signals):
    """True on all ranks if one of them has received a signal."""
    return any(all_gather(len(signals) > 0))


def resume_hint(config):
    """How to go on with a run that was stopped."""
    return f"resume with: python grpo.py --resume {config.output_dir}"


def share_of_rank(rows):
    """Every WORLD_SIZE-th row."""
    return rows[RANK::WORLD_SIZE]


def set_up(config, signals=()):
    """Loads data and models and claims the output directory. Returns the `Run`, the
    rows to train on (of this rank) and the rows to evaluate (all of them). A user error
    in options, rewards, data or model leaves no directory."""
    join_ranks()
    config = all_gather(config)[0]  # all ranks use the output directory of rank 0
    import_optional_packages(config)
    rows, eval_rows = load_rows(config)
    name = config.model
    needs_sft = False
    if config.sft_steps:
        name = Path(config.output_dir, "sft")
        needs_sft = not (config.resume and name.exists())
    if needs_sft:
        sft(config, rows, name, signals)
        gc.collect()  # FSDP keeps cycles of references to its weights
    run = build_run(config, name)
    fitting = encode_prompts(run, rows)
    eval_fitting = encode_prompts(run, eval_rows)
    print0(
        f"{len(fitting)} of {len(rows)} prompts fit, {len(eval_fitting)} to evaluate"
    )
    if config.eval_data and len(eval_fitting) < len(eval_rows):
        num_longer = len(eval_rows) - len(eval_fitting)
        raise Error(f"--eval-data: {num_longer} prompts exceed --max-prompt-length")
    needed = config.prompts_per_step if config.max_steps else 0
    if len(fitting) < needed or not fitting + eval_fitting:
        raise Error(
            f"--prompts-per-step: only {len(fitting)} of {len(rows)} prompts fit into "
            "--max-prompt-length"
        )
    check_limits(run, fitting + eval_fitting)
    if run.tokenizer.chat_template and chat_template_kwargs(run) is None:
        ending = end_of_answer(run.tokenizer, {})
        eos_tokens = run.tokenizer.convert_ids_to_tokens(run.eos_token_ids)
        print0(
            f"the chat template is not used: it ends an answer with {ending!r}, "
            f"not with {eos_tokens}"
        )
    first = (fitting + eval_fitting)[0]
    print0(f"the first prompt: {run.tokenizer.decode(first['prompt_ids'])!r}")
    if not needs_sft:  # otherwise `sft` has already claimed it
        claim_output_dir(config)
    return run, share_of_rank(fitting), eval_fitting


def import_optional_packages(config):
    """Imports the packages that some options need, so that a missing one ends the
    program at once, and not after the supervised steps."""
    if config.lora_rank:
        importlib.import_module("peft")
    if config.report_to == "tensorboard":
        importlib.import_module("torch.utils.tensorboard")
    elif config.report_to != "none":
        importlib.import_module(config.report_to)


def train(run, rows, eval_rows, signals=()):
    """Takes the training steps that are left, and evaluates and saves in between. The
    first three arguments are what `set_up` returns. Raises `Error` if a signal stops
    it before the last step."""
    config = run.config
    repair_logs(run)
    step = saved_step = restore(run)
    save_options(config)  # with what was typed beside --resume
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()  # leave out the supervised steps
    bar = tqdm(initial=step, total=config.max_steps, disable=RANK > 0)
    eval_every = config.eval_every if eval_rows else 0
    num_idle = 0  # steps in a row without any advantage
    with bar, tracker(config) as report:
        # The first evaluation, or one that a signal or a kill has left out.
        if is_due(config, eval_every, step):
            if step not in logged_evaluations(run):
                log_evaluation(run, step, evaluate(run, eval_rows), report)
        while step < config.max_steps and not stop_requested(signals):
            step += 1
            metrics, columns = measured_step(run, rows, step)
            append_rows(run, "metrics.jsonl", [dict(metrics, step=step)])
            report(metrics, step)
            bar.update()
            bar.set_postfix(reward=metrics["reward"], kl=metrics["kl"])
            if metrics["skipped"]:
                print0(f"step {step}: skipped an update whose gradient is not finite")
            num_idle = num_idle + 1 if metrics["zero_std_fraction"] == 1 else 0
            if num_idle == 10:
                print0("no learning signal for 10 steps: each group has equal rewards")
            if step == 1 or is_due(config, config.eval_every, step):
                log_completions(run, step, columns)
            if step == config.max_steps or is_due(config, config.save_every, step):
                save(run, step)
                saved_step = step
            if is_due(config, eval_every, step):
                if step == config.max_steps or not stop_requested(signals):
                    log_evaluation(run, step, evaluate(run, eval_rows), report)
    if step > saved_step:
        save(run, step)
    if step < config.max_steps:
        raise Error(f"stopped; {resume_hint(config)}")
    print_evaluations(run)


def is_due(config, every, step):
    """True if something that happens every so many steps (0: never) is due."""
    return every > 0 and (step % every == 0 or step == config.max_steps)


def measured_step(run, rows, step):
    """A `train_step` with a seed of its own. Returns metrics, averaged over ranks, with
    times and memory, and the columns of this rank."""
    set_seed(run.config.seed, step)
    start = time.perf_counter()
    metrics, columns = train_step(run, rows, step)
    seconds = time.perf_counter() - start
    if run.config.step_reward:
        rewards = [x for numbers in columns["step_rewards"] for x in numbers]
        metrics["step_reward"] = sum(rewards) / max(1, len(rewards))
    metrics.update(
        rollout_seconds=seconds - metrics["update_seconds"],  # with reward functions
        step_seconds=seconds,
        peak_memory_gb=torch.cuda.max_memory_allocated() / 2**30,  # 0 on a CPU
    )
    return average_over_ranks(metrics), columns


def evaluate(run, rows):
    """Returns the mean rewards of greedy completions of all rows, over all ranks. A
    mean leaves out the completions that the reward function did not judge."""
    # All ranks must make the same number of forward passes, so the first rows are
    # repeated to fill up the last ranks; duplicates are dropped below.
    num_rows = math.ceil(len(rows) / WORLD_SIZE)
    indices = range(RANK, num_rows * WORLD_SIZE, WORLD_SIZE)
    mine = [rows[i % len(rows)] for i in indices]
    size = run.config.num_prompts * run.config.num_generations  # as many as in training
    rewards = {name: [] for name in run.reward_functions}
    for start in range(0, num_rows, size):
        some = mine[start : start + size]
        batch = rollout(run, some, num_generations=1, temperature=0)
        _, scores = score(run, some, batch)
        for name in rewards:
            rewards[name].extend(scores[f"rewards/{name}"].tolist())
    ranks = all_gather(rewards)
    means, total = {}, 0.0
    for name, (_, weight) in run.reward_functions.items():
        numbers = [
            ranks[i % WORLD_SIZE][name][i // WORLD_SIZE] for i in range(len(rows))
        ]
        mean = torch.tensor(numbers, dtype=torch.float64).nanmean()
        means[f"eval/rewards/{name}"] = mean.item()
        total += weight * mean.nan_to_num().item()
    return {"eval/reward": total, **means}


def log_evaluation(run, step, means, report):
    """Logs and prints what `evaluate` returns."""
    append_rows(run, "metrics.jsonl", [dict(means, step=step)])
    report(means, step)
    print0(f"step {step}: greedy held-out reward {means['eval/reward']:.2f}")


def print_evaluations(run):
    """Prints the first and the last evaluation of a run."""
    evaluations = logged_evaluations(run)
    if evaluations:
        first, last = min(evaluations), max(evaluations)
        change = f"{evaluations[first]:.2f} at step {first}"
        if last > first:
            change += f", {evaluations[last]:.2f} at step {last}"
        print0(
            f"greedy held-out reward: {change}; all of it is in {run.config.output_dir}"
        )


# ------------------------------------------------------------------------- command line
def parse_args(argv=None):
    """`Options` from command-line arguments (default: those of the process)."""
    parser = transformers.HfArgumentParser(Options, allow_abbrev=False)
    typed = parser.parse_args(argv)
    if typed.resume:
        if typed.output_dir:
            raise Error("--output-dir: a resumed run stays in its directory")
        saved = saved_options(typed.resume)
        parser.set_defaults(**saved)
    elif typed.model == "tiny":
        parser.set_defaults(**TINY)
    options = vars(parser.parse_args(argv))  # what is typed wins
    if typed.resume:
        # These decide which rows are held out and which weights a checkpoint has.
        for name in ("seed", "lora_rank", "sft_steps"):
            if options[name] != saved[name]:
                flag = f"--{name.replace('_', '-')}"
                raise Error(f"{flag}: a resumed run keeps {saved[name]}")
    default_name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    options["run_name"] = options["run_name"] or default_name
    default_dir = typed.resume or f"runs/{options['run_name']}"
    options["output_dir"] = typed.output_dir or default_dir
    try:
        return Options(**options)
    except ValueError as error:  # its message begins with the name of a field
        name, _, rest = str(error).partition(" ")
        raise Error(f"--{name.replace('_', '-')} {rest}") from error


def main(argv=None):
    """The command line; in a notebook, call main(["--max-steps", "20"]). A user error
    ends in one line, without a traceback."""
    message = None
    try:
        with heed_signals() as signals:
            try:
                run, rows, eval_rows = set_up(parse_args(argv), signals)
            except (OSError, ImportError) as error:  # of a file, a model or a package
                package = (getattr(error, "name", None) or "").partition(".")[0]
                hint = f" (pip install {package})" if package else ""
                raise Error(f"{error}{hint}") from error
            train(run, rows, eval_rows, signals)
    except torch.OutOfMemoryError as error:
        hint = "lower --micro-batch-size or --max-completion-length"
        message = str(Error(f"{hint}: {error}"))
    except Error as error:
        message = str(error)
    if WORLD_SIZE == 1:
        if message:
            sys.exit(message)
        return
    if message and RANK > 0:
        time.sleep(5)  # if the first rank has failed too, torchrun ends this one first
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    for process in multiprocessing.active_children():  # of reward functions
        process.terminate()
    os._exit(1 if message else 0)  # gloo threads can crash at interpreter shutdown


if __name__ == "__main__" and "__file__" in globals():  # not pasted into a notebook
    main()
