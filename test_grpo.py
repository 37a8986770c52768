# SPDX-License-Identifier: MIT
"""The tests of grpo.py. They run on a CPU and offline:

    python -m pytest -ra                 # everything; -ra says why a test was skipped
    python -m pytest -m "not slow"       # without whole runs and processes

The first section is a course: GRPO worked out with numbers that fit on paper. Read it
beside the first half of grpo.py. The other sections, as they come in this file:

    Worked course; shared helpers; the options; completion_mask; advantages; masked
    means, weights, ratio; the loss; TRL's loss; sampling; log-probs; batches and
    micro-batches; the update; the rest of a step; pasting, the core by itself;
    options and command line; rewards: the answers; rewards; process supervision;
    data; prompts; models; logs are JSON; the whole file, in a notebook; rewards of
    the README; masters for bfloat16; faster log-probs; whole runs; logs and
    evaluations; process supervision, supervised steps; resuming and checkpoints;
    signals; trackers; one-line errors; several ranks.
"""

import ast
import builtins
import contextlib
import copy
import dataclasses
import dis
import importlib.util
import inspect
import json
import math
import os
import pickle
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import textwrap
import threading
import time
import types
import unicodedata
import warnings
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import peft
import pytest
import scipy.stats
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    DynamicCache,
    GenerationConfig,
    get_linear_schedule_with_warmup,
)

import grpo

# One thread is fastest for models as small as these. The processes that tests start
# read the variable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# pytest knows the marker `slow` only from a configuration file, which this project does
# not have. `-m "not slow"` works without one, but each use of the marker would warn.
warnings.filterwarnings("ignore", "Unknown pytest.mark.slow")


# ------------------------------------------------------------------------ worked course
# GRPO samples a group of completions of each prompt, and makes those with more reward
# than the mean of their group more probable.
# 1. Rewards become advantages.
@pytest.mark.parametrize(
    "prompt, completions, answer, rewards",
    [
        ("Calculate 2 + 2 × 6 = ", ["14", "16", "10"], "14", [1, 0, 0]),
        ("Solve y = 2x + 1 for x = 2, y = ", ["5", "6", "7", "5.0"], "5", [1, 0, 0, 1]),
        ("Solve y = 2x + 1 for x = 4, y = ", ["10", "2", "9", "9"], "9", [0, 0, 1, 1]),
    ],
)
def test_course_a_reward_is_1_for_the_right_answer(
    prompt, completions, answer, rewards
):
    size = len(completions)
    found = grpo.accuracy_reward([prompt] * size, completions, answer=[answer] * size)
    assert found == rewards


@pytest.mark.parametrize(
    "rewards, num_generations, size",
    [
        # Two groups of four, each with mean 0.5. Deviations are 0.5 or -0.5, so that
        # std = sqrt(4 * 0.25 / (4 - 1)) = 0.5774 and advantage = 0.5 / 0.5774 = 0.8660.
        ([1, 0, 0, 1, 0, 0, 1, 1], 4, 0.8660),
        # One group: std = sqrt(8 * 0.25 / (8 - 1)) = 0.5345, and 0.5 / 0.5345 = 0.9354.
        ([1, 0, 0, 1, 1, 0, 0, 1], 8, 0.9354),
    ],
)
def test_course_an_advantage_is_the_reward_normalised_within_its_group(
    rewards, num_generations, size
):
    """(reward - mean) / std, DeepSeekMath (arXiv:2402.03300), section 4.1.2."""
    advantages = grpo.group_advantages(torch.tensor(rewards), num_generations)
    expected = [size if reward == 1 else -size for reward in rewards]
    assert advantages.tolist() == pytest.approx(expected, abs=5e-5)  # 4 decimals


def test_course_equal_rewards_have_an_advantage_of_exactly_0():
    """Nobody was better than the others: there is nothing to learn."""
    assert grpo.group_advantages(torch.full([8], 0.1), 8).tolist() == [0.0] * 8


def test_course_dr_grpo_does_not_divide_by_the_std():
    """Dr. GRPO (arXiv:2503.20783): only the mean of the group is subtracted."""
    rewards = torch.tensor([1.0, 0, 0, 0, 2, 4, 6, 0])  # means 0.25 and 3
    advantages = grpo.group_advantages(rewards, 4, scale_rewards="none")
    assert advantages.tolist() == [0.75, -0.25, -0.25, -0.25, -1, 1, 3, -3]


def test_course_process_supervision_adds_up_the_reasoning_steps_still_to_end():
    """DeepSeekMath, section 4.1.3: a reward for each reasoning step."""
    # The four rewards of the group have mean 1.5 and
    # std = sqrt((1.5**2 + 3 * 0.5**2) / (4 - 1)) = 1.
    step_rewards = [[0.0, 2.0], [2.0, 2.0]]  # normalised: [-1.5, 0.5], [0.5, 0.5]
    step_ends = [[1, 3], [0, 2]]  # index of the last token of each reasoning step
    expected = [
        [-1.0, -1.0, 0.5, 0.5],  # tokens 0 and 1: -1.5 + 0.5; tokens 2 and 3: 0.5
        [1.0, 0.5, 0.5, 0.0],  # token 0: 0.5 + 0.5; tokens 1 and 2: 0.5; then padding
    ]
    advantages = grpo.process_advantages(step_rewards, step_ends, 2, length=4)
    assert advantages.flatten().tolist() == pytest.approx(sum(expected, []))


# 2. Which tokens count.
def test_course_a_completion_ends_with_its_first_eos():
    completion_ids = torch.tensor(
        [
            [5, 8, 6, 9],  # ends with the EOS 8; what follows is padding
            [9, 9, 9, 9],  # ends at once with the EOS 9, which also serves as padding
            [5, 6, 7, 9],  # the EOS is its last token
            [5, 6, 7, 5],  # no EOS: cut off at the length limit
        ]
    )
    mask = grpo.completion_mask(completion_ids, eos_token_ids=[8, 9])
    expected = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert mask.int().tolist() == expected


# 3. The ratio, the clip and the KL estimate of one token. new and old are its
# probabilities under the policy now, and under the one that sampled it; ratio = new /
# old. The reference is a fixed model.
@pytest.mark.parametrize(
    "new, old, advantage, ratio, surrogate",
    [
        (0.9, 0.5, 0.9354, 1.8, 1.1225),  # 1.2 * 0.9354: no gain above 1.2
        (0.9, 0.5, -0.9354, 1.8, -1.6837),  # 1.8 * -0.9354: the full loss counts
        (0.2, 0.5, 0.9354, 0.4, 0.3742),  # 0.4 * 0.9354
        (0.2, 0.5, -0.9354, 0.4, -0.7483),  # 0.8 * -0.9354: no gain below 0.8
        (0.7, 0.5, 0.9354, 1.4, 1.1225),  # 1.2 * 0.9354
        (0.7, 0.5, -0.9354, 1.4, -1.3096),  # 1.4 * -0.9354
        (0.55, 0.5, 0.9354, 1.1, 1.0289),  # 1.1 * 0.9354: within the clip range
        (0.55, 0.5, -0.9354, 1.1, -1.0289),  # 1.1 * -0.9354
    ],
)
def test_course_the_surrogate_is_the_smaller_of_two(
    new, old, advantage, ratio, surrogate
):
    """min(ratio A, clip(ratio, 0.8, 1.2) A), PPO (arXiv:1707.06347), eq. 7."""
    logp, old_logp = torch.tensor([[new]]).log(), torch.tensor([[old]]).log()
    found = grpo.importance_ratio(logp, old_logp)
    assert found.item() == pytest.approx(ratio)
    found = grpo.clipped_surrogate(found, torch.tensor([advantage]), epsilon=0.2)
    assert found.item() == pytest.approx(surrogate, abs=5e-5)  # 4 decimals


def test_course_dapo_clips_later_above_1():
    """epsilon_high of DAPO (arXiv:2503.14476), section 3.1."""
    ratio = torch.tensor([[1.4, 0.4]])
    surrogate = grpo.clipped_surrogate(ratio, torch.tensor([[1.0, -1.0]]), 0.2, 0.28)
    assert surrogate[0].tolist() == pytest.approx([1.28, -0.8])


def test_course_k3_of_one_token():
    """DeepSeekMath, eq. 4: pi_ref / pi - log(pi_ref / pi) - 1."""
    k3 = grpo.kl_k3(torch.tensor([0.7]).log(), torch.tensor([0.5]).log())
    # 0.5 / 0.7 = 0.714286, its log is -0.336472: 0.714286 + 0.336472 - 1 = 0.050758
    assert k3.item() == pytest.approx(0.050758, abs=1e-6)


# A vocabulary of four tokens, to take expectations by enumeration.
POLICY = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.1, 0.25, 0.25], dtype=torch.float64)


def exact_kl(logp, other_logp):
    """KL(p, q) = sum over the vocabulary of p (log p - log q)."""
    return (logp.exp() * (logp - other_logp)).sum()


def test_course_the_mean_of_k3_is_the_kl():
    """joschu.net/blog/kl-approx.html: E[q / p - 1] = 0 for tokens sampled from p."""
    mean = (POLICY * grpo.kl_k3(POLICY.log(), REFERENCE.log())).sum()
    kl = exact_kl(POLICY.log(), REFERENCE.log())
    # 0.1 log(1/4) + 0.2 log(2) + 0.3 log(1.2) + 0.4 log(1.6)
    expected = -0.138629 + 0.138629 + 0.054696 + 0.188001
    assert kl.item() == pytest.approx(expected, abs=2e-6)  # 6 decimals
    assert mean.item() == pytest.approx(kl.item(), abs=1e-15)


@pytest.mark.parametrize("use_bias_correction_kl", [False, True])
def test_course_the_gradient_of_k3_needs_the_ratio_to_be_that_of_the_kl(
    use_bias_correction_kl,
):
    """Without the ratio it is the gradient of the other direction, KL(reference,
    policy). With the ratio it is that of KL(policy, reference): DeepSeek-V3.2
    (arXiv:2512.02556)."""
    logits = POLICY.log().requires_grad_()
    logp, ref_logp = logits.log_softmax(0), REFERENCE.log()
    # Each token of the vocabulary is a completion, weighted by its probability, with
    # advantage 0: the loss is the mean of the KL term.
    loss, _ = grpo.grpo_loss(
        logp[:, None],
        None,
        ref_logp[:, None],
        torch.zeros(4),
        torch.ones(4, 1),
        weights=POLICY[:, None],
        beta=1.0,
        use_bias_correction_kl=use_bias_correction_kl,
    )
    if use_bias_correction_kl:
        kl = exact_kl(logp, ref_logp)
    else:
        kl = exact_kl(ref_logp, logp)  # its gradient is POLICY - REFERENCE
    [found] = torch.autograd.grad(loss, logits, retain_graph=True)
    [expected] = torch.autograd.grad(kl, logits)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-15)


# 4. The loss of two completions, of two and of three tokens. Their advantages, 2 and
# -1, are invented, for round numbers; those of a group would add up to 0. The last
# token of the first row is padding, whose numbers must not matter.
#                  completion 0             completion 1
NEW_PROBS = [[0.50, 0.45, 0.99], [0.20, 0.80, 0.50]]
OLD_PROBS = [[0.20, 0.50, 0.01], [0.40, 0.50, 0.40]]
REF_PROBS = [[0.25, 0.90, 0.50], [0.40, 0.80, 0.25]]
LOSS_MASK = [[1, 1, 0], [1, 1, 1]]
# new / old:  2.5   0.9                 0.5   1.6   1.25


def loss_of_the_table(loss_type, beta=0.0, **options):
    mask = torch.tensor(LOSS_MASK)
    return grpo.grpo_loss(
        torch.tensor(NEW_PROBS).log(),
        torch.tensor(OLD_PROBS).log(),
        torch.tensor(REF_PROBS).log(),
        torch.tensor([2.0, -1.0]),
        mask,
        weights=grpo.token_weights(mask, loss_type, max_completion_length=10),
        epsilon=0.2,
        beta=beta,
        **options,
    )


# grpo: the mean over completions of the mean over their tokens (DeepSeekMath, eq. 3)
# dapo: the mean over all 5 tokens (DAPO, section 3.3)
# dr_grpo: the sum over tokens / (2 completions * the length limit, 10) (Dr. GRPO)
#
# Surrogates of tokens, min(ratio A, clip(ratio) A):
#     completion 0: 1.2 * 2 = 2.4 (2.5 is clipped), 0.9 * 2 = 1.8           sum  4.2
#     completion 1: 0.8 * -1 = -0.8 (0.5 is clipped), -1.6, -1.25           sum -3.65
# With one ratio for each sequence, a geometric mean (GSPO, arXiv:2507.18071, eq. 7):
#     completion 0: sqrt(2.5 * 0.9) = 1.5, clipped: 1.2 * 2 = 2.4, twice    sum  4.8
#     completion 1: (0.5 * 1.6 * 1.25) ** (1 / 3) = 1: -1, three times      sum -3
@pytest.mark.parametrize(
    "level, loss_type, expected",
    [
        ("token", "grpo", -(4.2 / 2 - 3.65 / 3) / 2),  # -0.441667
        ("token", "dapo", -(4.2 - 3.65) / 5),  # -0.11
        ("token", "dr_grpo", -(4.2 - 3.65) / 20),  # -0.0275
        ("sequence", "grpo", -(4.8 / 2 - 3 / 3) / 2),  # -0.7
        ("sequence", "dapo", -(4.8 - 3) / 5),  # -0.36
        ("sequence", "dr_grpo", -(4.8 - 3) / 20),  # -0.09
    ],
)
def test_course_the_loss_is_minus_the_averaged_surrogate(level, loss_type, expected):
    loss, _ = loss_of_the_table(loss_type, importance_sampling_level=level)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_course_the_mean_ratio_of_a_sequence_leaves_out_padding():
    _, metrics = loss_of_the_table("grpo", importance_sampling_level="sequence")
    # two tokens with the ratio 1.5 and three with 1
    assert metrics["ratio_mean"].item() == pytest.approx((2 * 1.5 + 3 * 1) / 5)


# k3 of tokens, with ref / new = 0.5, 2, then 2, 1, 0.5:
HALF = 0.5 - math.log(0.5) - 1  # 0.193147
TWICE = 2 - math.log(2) - 1  # 0.306853; HALF + TWICE = 0.5, and k3 is 0 for ref = new


def test_course_the_kl_term_is_averaged_as_the_surrogate_is_and_added():
    """DeepSeekMath, eq. 3, with its beta of 0.04."""
    without, _ = loss_of_the_table("grpo")
    loss, metrics = loss_of_the_table("grpo", beta=0.04)
    kl = (0.5 / 2 + 0.5 / 3) / 2  # both completions: HALF + TWICE = 0.5
    assert (loss - without).item() == pytest.approx(0.04 * kl, abs=1e-7)
    assert metrics["kl"].item() == pytest.approx(1 / 5)  # of all 5 tokens


def test_course_bias_correction_multiplies_k3_by_the_ratio():
    """DeepSeek-V3.2. The ratio is not clipped here."""
    without, _ = loss_of_the_table("dapo")
    loss, _ = loss_of_the_table("dapo", beta=0.04, use_bias_correction_kl=True)
    # completion 0: 2.5 HALF + 0.9 TWICE = 0.759035
    # completion 1: 0.5 TWICE + 0 + 1.25 HALF = 0.394861
    kl = (0.759035 + 0.394861) / 5
    assert (loss - without).item() == pytest.approx(0.04 * kl, abs=1e-7)


def test_course_at_ratio_1_the_gradient_is_that_of_reinforce():
    """REINFORCE with the mean of the group as baseline: d loss / d logp = -A / (N |o|),
    DeepSeekMath eq. 3 with pi = pi_old. The loss itself is -mean(A), which is 0 for the
    advantages of a real group: only its gradient matters."""
    logp = torch.tensor(NEW_PROBS).log().requires_grad_()
    advantages, mask = torch.tensor([2.0, -1.0]), torch.tensor(LOSS_MASK)
    loss, _ = grpo.grpo_loss(logp, None, None, advantages, mask)
    loss.backward()
    assert loss.item() == pytest.approx(-(2 - 1) / 2)
    expected = [-2 / (2 * 2), -2 / (2 * 2), 0, 1 / (2 * 3), 1 / (2 * 3), 1 / (2 * 3)]
    assert logp.grad.flatten().tolist() == pytest.approx(expected)


# 5. A language model that fits on paper.
class TableModel(torch.nn.Module):
    """A causal LM whose next token depends on the current one only. Row t of its one
    weight holds the logits after token t: a linear layer on one-hot vectors."""

    config = transformers.LlamaConfig()  # read by the cache, which stays empty

    def __init__(self, odds):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(odds).log())  # (V, V)

    def forward(self, ids, attention_mask, logits_to_keep, **options):
        return SimpleNamespace(logits=self.logits[ids[:, -logits_to_keep:]])


# Unnormalised probabilities of the next token. They are squares, because temperature 2
# takes the square root: exp(log(p) / 2) = sqrt(p). Token 1 is the EOS.
ODDS = [
    [1.0, 4.0, 9.0],  # after token 0: 1/14, 4/14, 9/14; at temperature 2: 1/6, 2/6, 3/6
    [4.0, 1.0, 16.0],  # after token 1: 4/21, 1/21, 16/21
    [4.0, 9.0, 1.0],  # after token 2: 4/14, 9/14, 1/14; at temperature 2: 2/6, 3/6, 1/6
]


@pytest.mark.parametrize(
    "temperature, probs",
    [(1.0, [9 / 14, 4 / 14, 1 / 14, 4 / 14]), (2.0, [3 / 6, 2 / 6, 1 / 6, 2 / 6])],
)
def test_course_log_probs_are_read_from_the_table(temperature, probs):
    prompt_ids, prompt_mask = torch.tensor([[1, 0]]), torch.tensor([[True, True]])
    completion_ids = torch.tensor([[2, 0, 0], [1, 1, 1]])
    mask = grpo.completion_mask(completion_ids, eos_token_ids=1)
    # 0 -> 2, 2 -> 0, 0 -> 0 and, for the other completion, 0 -> 1; then padding
    logp = grpo.token_logprobs(
        TableModel(ODDS), prompt_ids, prompt_mask, completion_ids, mask, temperature
    )
    assert logp[mask].exp().tolist() == pytest.approx(probs)
    assert logp[~mask].tolist() == [0, 0]


def test_course_greedy_completions_follow_the_largest_probabilities():
    prompt_ids = torch.tensor([[0], [1], [2]])
    prompt_mask = torch.ones(3, 1, dtype=torch.bool)
    model = TableModel(ODDS).eval()
    ids = grpo.generate(model, prompt_ids, prompt_mask, 1, 4, 1, temperature=0)
    # 0 -> 2 -> 1, 1 -> 2 -> 1 and 2 -> 1; rows are padded with the EOS
    assert ids.tolist() == [[2, 1, 1, 1], [2, 1, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    "temperature, probs",
    [(1.0, [1 / 14, 4 / 14, 9 / 14]), (2.0, [1 / 6, 2 / 6, 3 / 6])],
)
def test_course_tokens_are_sampled_with_their_probabilities(temperature, probs):
    torch.manual_seed(0)
    logits = torch.tensor(ODDS[0]).log().expand(14_000, 3)
    counts = grpo.sample(logits, temperature).bincount(minlength=3)
    expected = [14_000 * p for p in probs]
    # A correct sampler would fail on one seed in 1000; this seed is fixed, and passes.
    assert scipy.stats.chisquare(counts.tolist(), expected).pvalue > 1e-3


# 6. Optimizer steps.
def test_course_the_first_step_of_adamw_moves_each_weight_by_the_learning_rate():
    """AdamW (arXiv:1711.05101), algorithm 2, without weight decay."""
    weights = torch.tensor([1.0, -2.0, 0.5], requires_grad=True)
    weights.grad = torch.tensor([3.0, -0.001, 0.0])
    torch.optim.AdamW([weights], lr=0.1, weight_decay=0.0).step()
    # First moment: 0.1 g / (1 - 0.9) = g. Second moment: 0.001 g^2 / (1 - 0.999) = g^2.
    # The step is lr g / (sqrt(g^2) + 1e-8) = lr sign(g), whatever the size of g.
    assert weights.tolist() == pytest.approx([0.9, -1.9, 0.5], abs=1e-5)  # eps / 0.001


def two_groups(optimizer_class, **options):
    """A run with a vocabulary of two, a fair coin after each token, and a rollout: the
    prompt is token 1 and in both groups token 0 was right and token 1 wrong."""
    policy = TableModel([[1.0, 1.0], [1.0, 1.0]])
    config = grpo.Config(
        num_generations=2, prompts_per_step=2, beta=0.0, max_grad_norm=0.0, **options
    )
    run = grpo.Run(
        config,
        policy,
        tokenizer=None,
        eos_token_ids=[0],
        optimizer=optimizer_class(policy.parameters(), weight_decay=0.0),
        reward_functions={},
    )
    batch = grpo.Batch(
        prompt_ids=torch.tensor([[1], [1], [1], [1]]),
        prompt_mask=torch.ones(4, 1, dtype=torch.bool),
        completion_ids=torch.tensor([[0], [1], [0], [1]]),
        mask=torch.ones(4, 1, dtype=torch.bool),
        advantages=torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]),  # round numbers
    )
    return run, batch


def test_course_one_update_by_adamw():
    run, batch = two_groups(torch.optim.AdamW)
    metrics = grpo.update(run, batch, learning_rate=0.1)
    # The logits after token 1 move by 0.1 towards the right token and away from the
    # wrong one. Token 0 was never followed by anything: its logits have no gradient.
    expected = [0, 0, 0.1, -0.1]
    assert run.policy.logits.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    assert metrics["loss"] == pytest.approx(0)  # -mean(A), although it has a gradient
    # With probabilities of 1/2, d logp(0) / d logits = (1/2, -1/2) and
    # d logp(1) / d logits = (-1/2, 1/2). Two completions of each out of four:
    # gradient = -((1/2, -1/2) - (-1/2, 1/2)) / 2 = (-1/2, 1/2), of length sqrt(1/2).
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(1 / 2))


def test_course_the_second_of_two_mini_batches_sees_different_ratios():
    run, batch = two_groups(torch.optim.SGD, num_mini_batches=2, epsilon=0.2)
    learning_rate = math.log(11 / 9)
    metrics = grpo.update(run, batch, learning_rate)
    # First mini-batch: the gradient is (-1/2, 1/2) as above. The logits (0, 0) become
    # (lr/2, -lr/2). They differ by log(11/9): the probabilities are 0.55 and 0.45.
    # Second: the ratios are 0.55 / 0.5 = 1.1 and 0.45 / 0.5 = 0.9, within the clip.
    #   loss = -(1.1 - 0.9) / 2 = -0.1
    #   d logp(0) / d logits = (0.45, -0.45), d logp(1) / d logits = (-0.55, 0.55)
    #   gradient = -(1.1 * 0.45 + 0.9 * 0.55) / 2 = -0.495 for the first logit
    moved = learning_rate * (0.5 + 0.495)
    logits = run.policy.logits[1].tolist()
    assert logits == pytest.approx([moved, -moved], abs=1e-6)
    assert metrics["loss"] == pytest.approx((0 - 0.1) / 2)
    assert metrics["grad_norm"] == pytest.approx(0.495 * math.sqrt(2))  # of the last


def test_course_a_clipped_mini_batch_does_not_move_the_policy():
    run, batch = two_groups(torch.optim.SGD, num_mini_batches=2, epsilon=0.2)
    metrics = grpo.update(run, batch, learning_rate=math.log(9))
    # After the first mini-batch the probabilities are 0.9 and 0.1. The ratios of the
    # second are 1.8 and 0.2, and both tokens are clipped: their surrogates, 1.2 and
    # -0.8, are constants.
    probs = run.policy.logits[1].softmax(0).tolist()
    assert probs == pytest.approx([0.9, 0.1])
    assert metrics["grad_norm"] == 0
    assert metrics["clip_fraction"] == pytest.approx((0 + 1) / 2)


def test_course_a_whole_step_samples_scores_normalises_and_updates():
    """The reward is 1 for token 0. Rewards 1 and 0 have advantages of 0.7071 and
    -0.7071; two equal ones have 0. Gradient: see `test_course_one_update_by_adamw`."""
    run, _ = two_groups(
        torch.optim.SGD, max_completion_length=1, learning_rate=0.1, warmup_steps=0
    )
    run.policy.eval()
    run = dataclasses.replace(
        run,
        tokenizer=SimpleNamespace(batch_decode=lambda ids, **options: [""] * len(ids)),
        reward_functions={
            "is_0": (
                lambda completion_ids, **_: [x == [0] for x in completion_ids],
                1.0,
            )
        },
    )
    torch.manual_seed(0)
    rows = [{"prompt_ids": [1]}, {"prompt_ids": [1]}]
    metrics, columns = grpo.train_step(run, rows, step=1)
    rewards = columns["reward"]
    moved = 0.0
    for first, second in (rewards[:2], rewards[2:]):
        if first != second:  # A (1/2, -1/2) of token 0, and -A (-1/2, 1/2) of token 1
            moved += metrics["learning_rate"] * (0.7071 / 2 + 0.7071 / 2) / 4
    assert 0 < sum(rewards) < 4 and moved > 0
    logits = run.policy.logits[1].tolist()
    assert logits == pytest.approx([moved, -moved], rel=1e-4)  # 4 decimals of 0.7071


def test_course_the_defaults_are_those_of_deepseekmath():
    """Section 4.2, except for G, which is 64 there, and epsilon, which is PPO's."""
    config = grpo.Config()
    assert (config.beta, config.learning_rate, config.num_iterations) == (0.04, 1e-6, 1)
    assert (config.epsilon, config.num_generations) == (0.2, 8)
    assert (config.loss_type, config.scale_rewards) == ("grpo", "group")


# ----------------------------------------------------------------------- shared helpers
# Sizes of `tiny_model`. The names are those of many model types; each takes its own.
TINY_SIZES = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "pad_token_id": 39,
    "tie_word_embeddings": True,
    "attention_hidden_size": 32,
    "lru_width": 32,
    "num_local_experts": 2,
    "query_pre_attn_scalar": 8,
    "state_size": 4,
}
TINY_OPTIONS = {
    "qwen2-untied": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 3},
    "gemma2": {"sliding_window": 4},
    "cohere": {"logit_scale": 0.25},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 4,
        "n_groups": 1,
        "moe_shared_expert_intermediate_size": 48,
    },
    "jamba": {"mamba_dt_rank": 4, "attn_layer_offset": 1},
    "qwen3_5_text": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_hidden_layers": 4,
        "initializer_range": 0.1,
    },
}


def tiny_model(kind="qwen2", seed=0, **options):
    """A causal LM with random weights, in float32 and eval mode. kind: a model type of
    transformers, or "qwen2-untied". options: of its config."""
    torch.manual_seed(seed)
    options = {**TINY_SIZES, **TINY_OPTIONS.get(kind, {}), **options}
    config = AutoConfig.for_model(kind.removesuffix("-untied"), **options)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def ragged_batch(num_generations=3, length=6):
    """Prompts of 5 and 3 tokens, each with `num_generations` completions of 0 to 6
    tokens. Returns prompt_ids and prompt_mask (2, 7), and completion_ids and mask
    (N, length). Both have more padding than they need."""
    generator = torch.Generator().manual_seed(0)
    prompt_ids = torch.randint(2, 40, (2, 7), generator=generator)
    prompt_mask = torch.arange(7) >= torch.tensor([[2], [4]])
    num_completions = 2 * num_generations
    completion_ids = torch.randint(2, 40, (num_completions, 8), generator=generator)
    lengths = (13 - torch.arange(num_completions)) % 7  # 6, 5, ..., 0, 6, 5, ...
    mask = torch.arange(8) < lengths[:, None]
    return prompt_ids, prompt_mask, completion_ids[:, :length], mask[:, :length]


def slow_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, mask, temperature=1.0
):
    """`grpo.token_logprobs` by one forward pass for each completion, without padding
    and without a cache."""
    logp = torch.zeros(mask.shape)
    for i in range(len(mask)):
        b = i * len(prompt_ids) // len(mask)
        prompt = prompt_ids[b, prompt_mask[b]]
        completion = completion_ids[i, mask[i]]
        ids = torch.cat([prompt, completion])
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].float() / temperature
        for t, token in enumerate(completion.tolist()):
            logp[i, t] = logits[t].log_softmax(0)[token]
    return logp


def random_logprobs():
    """Log-probs of 6 completions of up to 5 tokens, in float64: logp, old_logp,
    ref_logp, advantages and mask, (6, 5) each. Some ratios leave the clip range. The
    last completion is all masked."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4, 6, 5, generator=generator, dtype=torch.float64)
    logp = noise[0] - 3
    old_logp = logp + 0.3 * noise[1]
    ref_logp = logp + 0.5 * noise[2]
    lengths = torch.tensor([1, 2, 3, 4, 5, 0])
    mask = torch.arange(5) < lengths[:, None]
    return logp, old_logp, ref_logp, noise[3], mask


LOSS_VARIANTS = [
    ("grpo", "token"),
    ("grpo", "sequence"),
    ("dapo", "token"),
    ("dapo", "sequence"),
    ("dr_grpo", "token"),
    ("dr_grpo", "sequence"),
]
each_loss_variant = pytest.mark.parametrize("loss_type, level", LOSS_VARIANTS)


# -------------------------------------------------------------------------- the options
@pytest.mark.parametrize(
    "options",
    [
        {"num_generations": 1},
        {"prompts_per_step": 0},
        {"max_completion_length": 0},
        {"temperature": 0.0},
        {"num_iterations": 0},
        {"num_mini_batches": 0},
        {"micro_batch_size": 0},
        {"epsilon": -0.1},
        {"epsilon_high": -0.1},
        {"beta": math.nan},
        {"learning_rate": math.inf},
        {"max_steps": -1},
        {"max_grad_norm": -1.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_out_of_range_is_an_error_that_names_it(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be finite and at least"):
        grpo.Config(**options)


def test_mini_batches_that_do_not_divide_the_prompts_are_an_error():
    with pytest.raises(ValueError, match="num_mini_batches must divide the 8 prompts"):
        grpo.Config(prompts_per_step=8, num_mini_batches=3)


def test_prompts_that_the_ranks_cannot_share_are_an_error(monkeypatch):
    monkeypatch.setattr(grpo, "WORLD_SIZE", 3)
    with pytest.raises(ValueError, match="divisible by the 3 ranks"):
        grpo.Config(prompts_per_step=8)
    assert grpo.Config(prompts_per_step=9).num_prompts == 3


# ---------------------------------------------------------------------- completion_mask
@pytest.mark.parametrize(
    "ids, eos_token_ids, expected",
    [
        ([5, 6, 7], 2, [True, True, True]),
        ([2, 6, 7], 2, [True, False, False]),
        ([5, 6, 2], 2, [True, True, True]),
        ([5, 2, 2], 2, [True, True, False]),
        ([5, 2, 6], 2, [True, True, False]),
        ([5, 3, 2], [2, 3], [True, True, False]),
    ],
    ids=["no-eos", "at-once", "at-the-end", "then-eos", "then-junk", "second-eos"],
)
def test_completion_mask_ends_with_the_first_eos(ids, eos_token_ids, expected):
    mask = grpo.completion_mask(torch.tensor([ids]), eos_token_ids)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [expected]


def test_completion_mask_treats_each_row_alone():
    ids = torch.tensor([[2, 5, 5], [5, 5, 5], [5, 2, 5]])
    assert grpo.completion_mask(ids, 2).sum(1).tolist() == [1, 3, 2]


# --------------------------------------------------------------------------- advantages
@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_advantages_are_normalised_within_each_group(scale_rewards):
    groups = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.5], [-3.0, 7.0, 2.0, 2.5]]
    expected = []
    for group in groups:
        mean = statistics.mean(group)
        std = statistics.stdev(group) if scale_rewards == "group" else 1.0
        expected += [(reward - mean) / std for reward in group]
    found = grpo.group_advantages(torch.tensor(groups).flatten(), 4, scale_rewards)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("scale_rewards", ["group", "none"])
@pytest.mark.parametrize("num_generations", range(2, 101))
def test_equal_rewards_have_an_advantage_of_exactly_zero(
    num_generations, scale_rewards
):
    torch.manual_seed(num_generations)
    odd = torch.tensor([0.1, 0.3, 0.7, 1.0, -2.3, 1e-8, 12345.678])
    rewards = torch.cat([torch.randn(50), odd]).repeat_interleave(num_generations)
    found = grpo.group_advantages(rewards, num_generations, scale_rewards)
    assert not found.any()


def test_sums_of_rewards_that_differ_by_rounding_have_an_advantage_of_zero():
    """0.1 + 0.2 + 0.4 and 0.7 differ in float64, and are rounded to float32 first."""
    rewards = torch.tensor([0.1 + 0.2 + 0.4, 0.7] * 2, dtype=torch.float64)
    assert rewards[0] != rewards[1]
    assert not grpo.group_advantages(rewards, 4).any()


@pytest.mark.parametrize("size, num_generations", [(4, 1), (5, 2)])
def test_rewards_that_do_not_form_groups_are_an_error(size, num_generations):
    with pytest.raises(ValueError, match=f"into groups of {num_generations}"):
        grpo.group_advantages(torch.zeros(size), num_generations)


def test_an_unknown_scale_of_rewards_is_an_error():
    with pytest.raises(ValueError, match="scale_rewards 'batch' is unknown"):
        grpo.group_advantages(torch.zeros(4), 2, "batch")


# --------------------------------------------------------- masked means, weights, ratio
def test_masked_mean_ignores_masked_elements():
    x = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, math.nan]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert grpo.masked_mean(x, mask) == 3
    assert grpo.masked_mean(x, mask, dim=1).tolist() == [1.5, 6]


def test_masked_mean_of_nothing_is_zero():
    x = torch.full((2, 3), math.nan)
    assert grpo.masked_mean(x, torch.zeros(2, 3)) == 0
    assert grpo.masked_mean(x, torch.zeros(2, 3), dim=1).tolist() == [0, 0]


def test_an_unknown_loss_type_is_an_error():
    with pytest.raises(ValueError, match="loss_type 'bnpo' is unknown"):
        grpo.token_weights(torch.ones(2, 3), "bnpo")


def test_an_unknown_importance_sampling_level_is_an_error():
    logp, old_logp, _, _, mask = random_logprobs()
    with pytest.raises(ValueError, match="level 'word' is unknown"):
        grpo.importance_ratio(logp, old_logp, mask, "word")


def test_the_ratio_of_a_sequence_without_a_mask_counts_all_tokens():
    logp, old_logp, *_ = random_logprobs()
    everything = torch.ones(6, 5)
    found = grpo.importance_ratio(logp, old_logp, None, "sequence")
    assert_close(found, grpo.importance_ratio(logp, old_logp, everything, "sequence"))


def test_an_upper_clip_range_of_0_is_not_the_default():
    """0 is a number: with it, no ratio above 1 counts for a good completion."""
    ratio, advantage = torch.tensor([[1.1]]), torch.tensor([1.0])
    found = grpo.clipped_surrogate(ratio, advantage, epsilon=0.2, epsilon_high=0.0)
    assert found.item() == 1


# ----------------------------------------------------------------------------- the loss
def slow_loss(
    logp,
    old_logp,
    ref_logp,
    advantages,
    mask,
    loss_type,
    level,
    epsilon_high,
    use_bias_correction_kl=False,
):
    """The loss and its metrics token by token. The other options are epsilon 0.2, beta
    0.1 and max_completion_length 9. advantages: (N, C)."""
    low, high = 1 - 0.2, 1 + epsilon_high
    loss = 0.0
    kls, entropies, ratios, clips = [], [], [], []
    for i in range(len(mask)):
        tokens = mask[i].nonzero()[:, 0].tolist()
        denominator = {
            "grpo": len(tokens) * len(mask),
            "dapo": mask.sum().item(),
            "dr_grpo": 9 * len(mask),
        }[loss_type]
        for t in tokens:
            log_ratio = logp[i, t] - old_logp[i, t]
            if level == "sequence":
                log_ratio = (logp[i, tokens] - old_logp[i, tokens]).mean()
            ratio = log_ratio.exp()
            advantage = advantages[i, t]
            is_clipped = False
            surrogate = ratio * advantage
            if advantage > 0 and ratio > high:
                is_clipped, surrogate = True, high * advantage
            if advantage < 0 and ratio < low:
                is_clipped, surrogate = True, low * advantage
            d = ref_logp[i, t] - logp[i, t]
            kl = d.exp() - d - 1
            penalty = ratio * kl if use_bias_correction_kl else kl
            loss = loss + (0.1 * penalty - surrogate) / denominator
            kls.append(kl.item())
            entropies.append(-logp[i, t].item())
            ratios.append(ratio.item())
            clips.append(is_clipped)
    metrics = {
        "kl": statistics.fmean(kls),
        "kl_max": max(kls),
        "entropy": statistics.fmean(entropies),
        "ratio_mean": statistics.fmean(ratios),
        "clip_fraction": statistics.fmean(clips),
    }
    return loss, metrics


@each_loss_variant
@pytest.mark.parametrize("epsilon_high", [None, 0.1, 0.4])
@pytest.mark.parametrize(
    "use_bias_correction_kl", [False, True], ids=["k3", "ratio*k3"]
)
def test_loss_gradient_and_metrics_are_those_of_plain_loops(
    loss_type, level, epsilon_high, use_bias_correction_kl
):
    logp, old_logp, ref_logp, advantages, mask = random_logprobs()
    logp.requires_grad_()
    loss, metrics = grpo.grpo_loss(
        logp,
        old_logp,
        ref_logp,
        advantages,
        mask,
        weights=grpo.token_weights(mask, loss_type, max_completion_length=9),
        epsilon_high=epsilon_high,
        beta=0.1,
        importance_sampling_level=level,
        use_bias_correction_kl=use_bias_correction_kl,
    )
    expected_loss, expected_metrics = slow_loss(
        logp,
        old_logp,
        ref_logp,
        advantages,
        mask,
        loss_type,
        level,
        epsilon_high=0.2 if epsilon_high is None else epsilon_high,
        use_bias_correction_kl=use_bias_correction_kl,
    )
    (grad,) = torch.autograd.grad(loss, logp)
    (expected_grad,) = torch.autograd.grad(expected_loss, logp)
    # All of it is float64.
    assert_close(loss, expected_loss, atol=1e-12, rtol=0)
    assert_close(grad, expected_grad, atol=1e-12, rtol=0)
    assert 0 < expected_metrics["clip_fraction"] < 1
    assert metrics.keys() == expected_metrics.keys()
    for name, value in expected_metrics.items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-6), name


def test_one_advantage_for_each_completion_is_that_of_all_its_tokens():
    *logprobs, advantages, mask = random_logprobs()
    found, _ = grpo.grpo_loss(*logprobs, advantages[:, 0], mask)
    expected, _ = grpo.grpo_loss(*logprobs, advantages[:, :1].expand(6, 5), mask)
    assert found == expected != 0


@each_loss_variant
@pytest.mark.parametrize("given", ["nothing", "logp-itself"])
def test_without_old_log_probs_the_ratio_is_1_and_its_gradient_stays(
    loss_type, level, given
):
    logp, _, ref_logp, advantages, mask = random_logprobs()
    logp.requires_grad_()
    results = []
    for old_logp in (logp.detach(), None if given == "nothing" else logp):
        loss, metrics = grpo.grpo_loss(
            logp,
            old_logp,
            ref_logp,
            advantages,
            mask,
            weights=grpo.token_weights(mask, loss_type),
            importance_sampling_level=level,
        )
        results.append((loss, *torch.autograd.grad(loss, logp), metrics))
    assert_close(results[1], results[0])
    _, grad, metrics = results[1]
    assert grad[mask].abs().min() > 1e-4  # two gradients of zero would be equal, too
    assert metrics["ratio_mean"] == 1
    assert metrics["clip_fraction"] == 0


def test_no_gradient_flows_through_the_reference_or_the_metrics():
    logp, old_logp, _, advantages, mask = random_logprobs()
    logp.requires_grad_()
    grads = []
    for ref_logp in (2 * logp.detach(), 2 * logp):
        loss, metrics = grpo.grpo_loss(logp, old_logp, ref_logp, advantages, mask)
        grads.append(torch.autograd.grad(loss, logp)[0])
    assert_close(grads[1], grads[0])
    assert not any(value.requires_grad for value in metrics.values())


def test_without_a_reference_there_is_no_kl_term():
    logp, old_logp, ref_logp, advantages, mask = random_logprobs()
    found, metrics = grpo.grpo_loss(logp, old_logp, None, advantages, mask, beta=0.5)
    expected, _ = grpo.grpo_loss(logp, old_logp, ref_logp, advantages, mask, beta=0.0)
    assert found == expected
    assert metrics["kl"] == metrics["kl_max"] == 0


@each_loss_variant
@pytest.mark.parametrize("junk", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("masked", ["some", "all"])
def test_masked_positions_do_not_reach_loss_gradient_or_metrics(
    loss_type, level, junk, masked
):
    *inputs, mask = random_logprobs()
    if masked == "all":
        mask = torch.zeros_like(mask)
    results = []
    for fill in (0.0, junk):
        filled = [x.masked_fill(~mask, fill).requires_grad_() for x in inputs]
        loss, metrics = grpo.grpo_loss(
            *filled,
            mask,
            weights=grpo.token_weights(mask, loss_type),
            importance_sampling_level=level,
        )
        results.append((loss, *torch.autograd.grad(loss, filled[0]), metrics))
    assert_close(results[1], results[0])
    loss, grad, metrics = results[1]
    assert (loss != 0) == grad.any() == any(metrics.values()) == (masked == "some")


@each_loss_variant
def test_losses_of_micro_batches_add_up_to_the_loss_of_the_batch(loss_type, level):
    *inputs, mask = random_logprobs()
    weights = grpo.token_weights(mask, loss_type, max_completion_length=9)
    total = 0.0
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        loss, _ = grpo.grpo_loss(
            *(x[rows] for x in inputs),
            mask[rows],
            weights=weights[rows],
            importance_sampling_level=level,
        )
        total += loss.item()
    loss, _ = grpo.grpo_loss(
        *inputs, mask, weights=weights, importance_sampling_level=level
    )
    assert total == pytest.approx(loss.item(), rel=1e-12)


def test_kl_max_shows_a_single_token_far_from_the_reference():
    logp, old_logp, _, advantages, mask = random_logprobs()
    ref_logp = logp.clone()
    ref_logp[1, 0] += 30
    _, metrics = grpo.grpo_loss(logp, old_logp, ref_logp, advantages, mask)
    assert metrics["kl_max"].item() == pytest.approx(math.exp(30) - 31)
    num_tokens = 15
    assert metrics["kl"].item() == pytest.approx((math.exp(30) - 31) / num_tokens)


def test_the_formulas_leave_their_inputs_unchanged():
    inputs = random_logprobs()
    logp, old_logp, ref_logp, advantages, mask = inputs
    grpo.grpo_loss(*inputs)
    grpo.group_advantages(logp.flatten(), 5)
    grpo.masked_mean(logp, mask)
    grpo.importance_ratio(logp, old_logp, mask, "sequence")
    grpo.clipped_surrogate(logp.exp(), advantages)
    grpo.kl_k3(logp, ref_logp)
    grpo.token_weights(mask, "dr_grpo")
    grpo.sample(logp)
    assert_close(inputs, random_logprobs(), atol=0, rtol=0)


# --------------------------------------------------------------------------- TRL's loss
def trl_loss(
    logp,
    old_logp,
    ref_logp,
    advantages,
    mask,
    loss_type,
    level,
    beta,
    epsilon_high,
    use_bias_correction_kl,
):
    """The loss of TRL's GRPOTrainer: its own method, called on a stand-in that has the
    attributes that the method reads."""
    import trl

    trainer = SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=epsilon_high,
        max_completion_length=9,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(
            delta=None,
            steps_per_generation=1,
            use_bias_correction_kl=use_bias_correction_kl,
        ),
        accelerator=SimpleNamespace(
            num_processes=1,
            reduce=lambda x, reduction: x,
            gather=lambda x: x,
        ),
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, -logp, None),
    )
    inputs = {
        "prompt_ids": mask.long(),  # only concatenated
        "prompt_mask": mask.long(),
        "completion_ids": mask.long(),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old_logp,
        "ref_per_token_logps": ref_logp,
        "num_items_in_batch": mask.sum(),
    }
    return trl.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def trl_advantages(rewards, num_generations):
    """As in TRL, which adds 1e-4 to the standard deviation."""
    groups = rewards.view(-1, num_generations)
    deviations = groups - groups.mean(1, keepdim=True)
    return (deviations / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def assert_loss_is_that_of_trl(
    loss_type, level, beta, moved, epsilon_high, seed, use_bias_correction_kl
):
    """Compares loss and gradient for 8 random completions in 2 groups. moved: how far
    the policy is from the one that sampled."""
    torch.manual_seed(seed)
    logp, noise, ref_logp = torch.randn(3, 8, 7) - 3
    logp.requires_grad_()
    old_logp = logp.detach() + moved * (noise + 3)
    mask = torch.arange(7) < torch.randint(1, 8, (8, 1))
    rewards = torch.rand(8).round(decimals=1)
    expected = trl_loss(
        logp,
        old_logp,
        ref_logp,
        trl_advantages(rewards, 4),
        mask,
        loss_type,
        level,
        beta,
        epsilon_high,
        use_bias_correction_kl,
    )
    found, _ = grpo.grpo_loss(
        logp,
        old_logp,
        ref_logp,
        grpo.group_advantages(rewards, 4, eps=1e-4),
        mask,
        weights=grpo.token_weights(mask, loss_type, max_completion_length=9),
        epsilon_high=epsilon_high,
        beta=beta,
        importance_sampling_level=level,
        use_bias_correction_kl=use_bias_correction_kl,
    )
    (grad,) = torch.autograd.grad(found, logp)
    (expected_grad,) = torch.autograd.grad(expected, logp)
    assert grad.any()
    # Float32, and TRL subtracts means in float32, too.
    assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)


@each_loss_variant
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("moved", [0.0, 0.3])
@pytest.mark.parametrize("epsilon_high", [0.2, 0.28])
@pytest.mark.parametrize("seed", range(8))
def test_loss_and_gradient_are_those_of_trl(
    loss_type, level, beta, moved, epsilon_high, seed
):
    """384 cases, with TRL's `use_bias_correction_kl` off."""
    assert_loss_is_that_of_trl(
        loss_type,
        level,
        beta,
        moved,
        epsilon_high,
        seed,
        use_bias_correction_kl=False,
    )


@each_loss_variant
@pytest.mark.parametrize("moved", [0.0, 0.3])
@pytest.mark.parametrize("epsilon_high", [0.2, 0.28])
@pytest.mark.parametrize("seed", range(8))
def test_loss_and_gradient_with_bias_correction_are_those_of_trl(
    loss_type, level, moved, epsilon_high, seed
):
    """192 cases, with TRL's `use_bias_correction_kl` on, which is TRL's default."""
    assert_loss_is_that_of_trl(
        loss_type,
        level,
        0.04,
        moved,
        epsilon_high,
        seed,
        use_bias_correction_kl=True,
    )


# ----------------------------------------------------------------------------- sampling
# What a model's folder may say about sampling. All of it is to be ignored.
HOSTILE_GENERATION_CONFIG = {
    "do_sample": True,
    "temperature": 0.01,
    "top_p": 0.1,
    "top_k": 1,
    "repetition_penalty": 50.0,
    "min_new_tokens": 5,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": [2, 3],
    "max_new_tokens": 1,
    "num_beams": 4,
    "eos_token_id": [0, 7],
}
SAMPLED_KINDS = ["qwen2", "gpt2", "mistral", "gemma2", "lfm2", "jamba"]


def assert_drawn_from(probs, draws):
    """Pearson's chi-square test. It rejects a correct sampler once in a million times
    (of other seeds; with a fixed seed the result is fixed)."""
    probs = probs.double()
    assert probs.sum().item() == pytest.approx(1, abs=1e-5)
    counts = draws.bincount(minlength=len(probs)).double()
    assert not counts[probs == 0].any()
    expected = probs / probs.sum() * len(draws)
    common = expected >= 5  # the others are too rare for the test: one cell for all
    counts = torch.cat([counts[common], counts[~common].sum(0, keepdim=True)])
    expected = torch.cat([expected[common], expected[~common].sum(0, keepdim=True)])
    possible = expected > 0
    test = scipy.stats.chisquare(counts[possible].numpy(), expected[possible].numpy())
    assert test.pvalue > 1e-6


def right_padded_batch():
    prompt_ids, prompt_mask, completion_ids, mask = ragged_batch()
    return prompt_ids.flip(1), prompt_mask.flip(1), completion_ids, mask


def test_sample_draws_from_the_softmax_at_the_temperature():
    torch.manual_seed(0)
    logits = 1.5 * torch.randn(300)
    logits[::50] = -math.inf
    draws = grpo.sample(logits.expand(50_000, 300), temperature=1.3)
    assert_drawn_from((logits / 1.3).softmax(0), draws)


def test_sample_draws_for_each_row_from_its_own_distribution():
    torch.manual_seed(0)
    logits = torch.randn(3, 20)
    draws = grpo.sample(logits.repeat_interleave(20_000, dim=0))
    for row, drawn in zip(logits, draws.view(3, -1)):
        assert_drawn_from(row.softmax(0), drawn)


def test_sample_at_temperature_0_takes_the_most_probable_token():
    torch.manual_seed(0)
    logits = torch.randn(10, 300)
    assert torch.equal(grpo.sample(logits, temperature=0), logits.argmax(1))


def test_sample_reaches_each_of_150_000_improbable_tokens(monkeypatch):
    """A sum in float32 would round most of them away."""
    logits = torch.zeros(1, 150_001)
    logits[0, 0] = 18.8  # the other tokens have 1 in 1000 together
    probs = logits.softmax(1).double()
    cdf = probs.cumsum(1) / probs.sum()
    draw = cdf[:, 99_998:100_000].mean(1, keepdim=True)
    monkeypatch.setattr(torch, "rand_like", lambda x: draw.to(x))
    assert grpo.sample(logits) == 99_999


def test_sample_never_leaves_the_vocabulary(monkeypatch):
    """Not even with a draw that is rounded up to 1."""
    monkeypatch.setattr(torch, "rand_like", torch.ones_like)
    assert grpo.sample(torch.zeros(3, 5)).tolist() == [4, 4, 4]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_sample_raises_an_error_if_logits_are_not_finite(bad):
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    with pytest.raises(ValueError, match="logits are not finite"):
        grpo.sample(logits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLED_KINDS)
def test_completions_are_samples_from_the_policy(kind):
    """The first two tokens, whatever the model's generation config says."""
    model = tiny_model(kind, vocab_size=8, pad_token_id=0)
    model.generation_config = GenerationConfig(**HOSTILE_GENERATION_CONFIG)
    prompt_ids, prompt_mask, *_ = ragged_batch()
    prompt_ids = prompt_ids % 8
    ids = grpo.generate(
        model, prompt_ids, prompt_mask, 10_000, 2, [1, 5], temperature=1.2
    )
    pairs = torch.cartesian_prod(torch.arange(8), torch.arange(8)).repeat(2, 1)
    mask = grpo.completion_mask(pairs, [1, 5])
    with torch.no_grad():
        logp = slow_logprobs(model, prompt_ids, prompt_mask, pairs, mask, 1.2)
    # A pair that starts with an EOS token is padded with the first EOS token, 1.
    is_possible = mask[:, 1] | (pairs[:, 1] == 1)
    probs = (logp.sum(1).exp() * is_possible).view(2, 64)
    draws = (8 * ids[:, 0] + ids[:, 1]).view(2, 10_000)
    for b in range(2):
        assert_drawn_from(probs[b], draws[b])


@pytest.mark.parametrize("kind", SAMPLED_KINDS)
def test_greedy_completions_are_those_of_transformers(kind):
    model, eos = tiny_model(kind, use_cache=False), list(range(1, 31))
    prompt_ids, prompt_mask, *_ = ragged_batch()
    expected = torch.ones(2, 12).long()
    for b in range(2):
        prompt = prompt_ids[b, prompt_mask[b]]
        ids = model.generate(
            prompt[None],
            do_sample=False,
            max_new_tokens=12,
            pad_token_id=1,
            eos_token_id=eos,
        )
        completion = ids[0, len(prompt) :]
        expected[b, : len(completion)] = completion
    found = grpo.generate(model, prompt_ids, prompt_mask, 1, 12, eos, temperature=0)
    assert torch.equal(found, expected)


def test_finished_completions_are_not_run_any_more():
    model, eos = tiny_model(), list(range(1, 31))
    prompt_ids, prompt_mask, *_ = ragged_batch()
    torch.manual_seed(0)
    with mock.patch.object(grpo, "call_model", wraps=grpo.call_model) as call_model:
        ids = grpo.generate(model, prompt_ids, prompt_mask, 4, 12, eos)
    lengths = grpo.completion_mask(ids, eos).sum(1)
    assert lengths.min() < lengths.max()
    num_tokens = sum(call.args[1].numel() for call in call_model.call_args_list)
    # The last token of a completion is not run; nothing follows it.
    assert num_tokens == prompt_ids.numel() + (lengths - 1).sum()
    assert call_model.call_count == lengths.max()


def test_prompts_padded_on_the_right_are_not_sampled_from():
    prompt_ids, prompt_mask, *_ = right_padded_batch()
    with pytest.raises(ValueError, match="padded on the left"):
        grpo.generate(tiny_model(), prompt_ids, prompt_mask, 1, 1, 1)


def test_a_model_in_train_mode_is_not_sampled_from():
    """Gradient checkpointing would silently drop the cache."""
    prompt_ids, prompt_mask, *_ = ragged_batch()
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        grpo.generate(tiny_model().train(), prompt_ids, prompt_mask, 1, 1, 1)


def test_a_loaded_model_is_float32_without_dropout_and_knows_all_its_eos(tmp_path):
    model, tokenizer = grpo.tiny_model(0)
    model.config.attention_dropout = 0.5
    model.bfloat16().save_pretrained(tmp_path)
    tokenizer.eos_token = "z"
    tokenizer.save_pretrained(tmp_path)
    hostile = json.dumps(HOSTILE_GENERATION_CONFIG)
    (tmp_path / "generation_config.json").write_text(hostile)
    model, tokenizer, eos_token_ids = grpo.load_model(str(tmp_path), 0)
    assert eos_token_ids == [tokenizer.convert_tokens_to_ids("z"), 0, 7]
    assert model.dtype == torch.float32
    first = grpo.token_logprobs(model, *ragged_batch())
    assert torch.equal(grpo.token_logprobs(model, *ragged_batch()), first)


# ---------------------------------------------------------------------------- log-probs
# Models that `shared_logprobs` is right for, and models that it is not: their logits
# are not hidden @ weight.T, or they have recurrent layers that do not continue from a
# cache with several tokens or change it in place.
SHARED_KINDS = [
    "qwen2",
    "qwen2-untied",
    "llama",
    "gpt2",
    "mistral",
    "lfm2",
    "nemotron_h",
]
PLAIN_KINDS = ["gemma2", "cohere", "phi", "jamba", "qwen3_5_text"]


def assert_logprobs_are_those_of_one_pass_a_row(logprobs, kind, temperature, length):
    """Compares values, and the gradients of all weights."""
    model, batch = tiny_model(kind), ragged_batch(length=length)
    before = copy.deepcopy(batch)
    factors = torch.randn(6, length)
    results = []
    for function in (slow_logprobs, logprobs):
        logp = function(model, *batch, temperature)
        grads = torch.autograd.grad(
            (logp * factors).sum(), list(model.parameters()), materialize_grads=True
        )
        results.append((logp, *grads))
    # Float32 through three layers, in another order of additions.
    assert_close(results[1], results[0], atol=5e-4, rtol=1e-3)
    assert results[1][0].dtype == torch.float32
    assert_close(batch, before, atol=0, rtol=0)


@pytest.mark.parametrize("kind", [*SHARED_KINDS, *PLAIN_KINDS])
@pytest.mark.parametrize(
    "temperature, length", [(1.0, 6), (0.7, 6), (0.7, 2), (0.7, 1)]
)
def test_token_logprobs_are_those_of_one_pass_a_row(kind, temperature, length):
    assert_logprobs_are_those_of_one_pass_a_row(
        grpo.token_logprobs, kind, temperature, length
    )


def with_prompt_for_each_completion(batch):
    """A `ragged_batch` whose prompts are repeated: (N, P) instead of (B, P)."""
    prompt_ids, prompt_mask, completion_ids, mask = batch
    num_generations = len(mask) // len(prompt_ids)
    return (
        prompt_ids.repeat_interleave(num_generations, dim=0),
        prompt_mask.repeat_interleave(num_generations, dim=0),
        completion_ids,
        mask,
    )


def test_token_logprobs_take_a_prompt_for_each_completion_as_well():
    model, batch = tiny_model(), ragged_batch()
    expected = grpo.token_logprobs(model, *batch)
    found = grpo.token_logprobs(model, *with_prompt_for_each_completion(batch))
    assert_close(found, expected)


def test_prompts_padded_on_the_right_are_rejected_by_token_logprobs():
    with pytest.raises(ValueError, match="padded on the left"):
        grpo.token_logprobs(tiny_model(), *right_padded_batch())


# ------------------------------------------------------------ batches and micro-batches
@pytest.mark.parametrize(
    "prompt_lengths, completion_lengths, size, expected_shapes",
    [
        ([1, 2, 1, 3], [9, 9, 1, 1, 9, 9, 1, 1], 4, [(4, 3, 1), (4, 1, 9)]),
        (
            [1, 2, 1, 3],
            [9, 2, 1, 1, 1, 3, 1, 1],
            2,
            [(2, 2, 1), (2, 3, 1), (2, 1, 3), (2, 1, 9)],
        ),
        ([2, 1], [1, 9, 1, 1, 1, 1, 1, 1], 3, [(3, 1, 1), (3, 2, 9), (2, 2, 1)]),
        ([3], [2, 2], 16, [(2, 3, 2)]),
    ],
    ids=["two-groups", "one-group", "across-groups", "all"],
)
def test_micro_batches_start_with_groups_of_short_completions(
    prompt_lengths, completion_lengths, size, expected_shapes
):
    """expected_shapes: rows, columns of prompts and of completions, without padding."""
    num_prompts, num_rows = len(prompt_lengths), len(completion_lengths)
    prompt_lengths = torch.tensor(prompt_lengths).repeat_interleave(
        num_rows // num_prompts
    )
    completion_lengths = torch.tensor(completion_lengths)
    row = torch.arange(num_rows)[:, None].expand(num_rows, 9)
    batch = grpo.Batch(
        prompt_ids=row,
        prompt_mask=torch.arange(9) >= 9 - prompt_lengths[:, None],
        completion_ids=row,
        mask=torch.arange(9) < completion_lengths[:, None],
        advantages=row,
        weights=row,
        old_logp=row,
    )
    micro_batches = grpo.split_mini_batch(batch, size, num_prompts)
    shapes = [(*x.prompt_mask.shape, x.mask.shape[1]) for x in micro_batches]
    assert shapes == expected_shapes
    seen = []
    for micro_batch in micro_batches:
        rows = micro_batch.completion_ids[:, 0]
        seen += rows.tolist()
        assert torch.equal(micro_batch.mask.sum(1), completion_lengths[rows])
        assert torch.equal(micro_batch.prompt_mask.sum(1), prompt_lengths[rows])
        for name in ("prompt_ids", "advantages", "weights", "old_logp"):
            assert torch.equal(getattr(micro_batch, name)[:, 0], rows), name
        assert micro_batch.ref_logp is None
    assert sorted(seen) == list(range(num_rows))


def test_padding_is_an_ordinary_token():
    ids, mask = grpo.pad([[5, 6], [7]], "left")
    assert ids.tolist() == [[5, 6], [5, 7]]
    assert mask.tolist() == [[True, True], [False, True]]
    ids, mask = grpo.pad([[5, 6], [7]], "right")
    assert ids.tolist() == [[5, 6], [7, 5]]
    assert mask.tolist() == [[True, True], [True, False]]


# --------------------------------------------------------------------------- the update
def core_run(policy, reference=None, optimizer=None, **options):
    """A `Run` for `update`, by `token_logprobs`. The reference is a copy of the policy
    by default."""
    options = {"prompts_per_step": 2, "max_completion_length": 6, **options}
    if optimizer is None:
        # `update` sets the learning rate: at this one the weights would be lost.
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e9, weight_decay=0.0)
    return grpo.Run(
        config=grpo.Config(**options),
        policy=policy,
        tokenizer=None,
        eos_token_ids=[1],
        optimizer=optimizer,
        reward_functions={},
        reference=reference or copy.deepcopy(policy),
    )


def rollout_batch(advantages):
    """A `Batch` of two prompts with completions of at least one token."""
    num_generations = len(advantages) // 2
    batch = with_prompt_for_each_completion(ragged_batch(num_generations))
    batch[-1][:, 0] = True
    return grpo.Batch(*batch, advantages=advantages)


def first_moments(adamw):
    """AdamW's means of the gradients, of each weight."""
    return [adamw.state[x]["exp_avg"] for x in adamw.param_groups[0]["params"]]


def slow_update(policy, reference, batch, config):
    """`update` by the formulas, without padding and micro-batches. Returns the metrics
    and AdamW's first moments."""
    adamw = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    old_logp = slow_logprobs(policy, *batch.inputs, config.temperature).detach()
    ref_logp = slow_logprobs(reference, *batch.inputs, config.temperature).detach()
    size = len(batch.mask) // config.num_mini_batches
    updates = []
    for _ in range(config.num_iterations):
        for start in range(0, len(batch.mask), size):
            rows = slice(start, start + size)
            logp = slow_logprobs(policy, *batch.inputs, config.temperature)
            loss, means = grpo.grpo_loss(
                logp[rows],
                old_logp[rows],
                ref_logp[rows] if config.beta else None,
                batch.advantages[rows],
                batch.mask[rows],
                weights=grpo.token_weights(
                    batch.mask[rows], config.loss_type, config.max_completion_length
                ),
                epsilon=config.epsilon,
                epsilon_high=config.epsilon_high,
                beta=config.beta,
                importance_sampling_level=config.importance_sampling_level,
                use_bias_correction_kl=config.use_bias_correction_kl,
            )
            adamw.zero_grad()
            loss.backward()
            norm = clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            adamw.step()
            updates.append({"loss": loss.item(), "grad_norm": norm.item()})
            updates[-1] |= {name: x.item() for name, x in means.items()}
    names = ["loss", "kl", "entropy", "ratio_mean", "clip_fraction"]
    metrics = {name: statistics.fmean(x[name] for x in updates) for name in names}
    metrics["kl_max"] = max(x["kl_max"] for x in updates)
    metrics["grad_norm"] = updates[-1]["grad_norm"]
    return metrics, first_moments(adamw)


def check_update(logprobs, num_with_advantage, options):
    """Compares `update` with `slow_update`, for 8 completions of which the first
    `num_with_advantage` have an advantage."""
    policy, reference = tiny_model(), tiny_model(seed=1)
    torch.manual_seed(0)
    advantages = torch.randn(8, 1).expand(8, 6).clone()
    advantages[num_with_advantage:] = 0
    batch = rollout_batch(advantages)
    run = core_run(
        copy.deepcopy(policy),
        reference,
        temperature=0.7,
        max_grad_norm=0.01,
        **options,
    )
    run.logprobs = mock.Mock(side_effect=logprobs)
    metrics = grpo.update(run, batch, learning_rate=1e-3)
    expected, moments = slow_update(policy, reference, batch, run.config)

    for found, moment in zip(first_moments(run.optimizer), moments, strict=True):
        # A few optimizer steps multiply the rounding of the first.
        assert (found - moment).norm() <= 0.01 * moment.norm()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert metrics["skipped"] == 0
    assert metrics["learning_rate"] == 1e-3
    return run, metrics


@each_loss_variant
@pytest.mark.parametrize("num_iterations", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_mini_batches", [1, 2, 4])
def test_an_update_is_that_of_plain_loops(
    loss_type, level, num_iterations, num_mini_batches
):
    """In micro-batches of 3 completions, in a narrow clip range."""
    run, metrics = check_update(
        grpo.token_logprobs,
        num_with_advantage=8,
        options={
            "loss_type": loss_type,
            "importance_sampling_level": level,
            "num_iterations": num_iterations,
            "num_mini_batches": num_mini_batches,
            "prompts_per_step": 4,
            "micro_batch_size": 3,
            "beta": 0.1,
            "epsilon": 0.01,
            "epsilon_high": 0.03,
        },
    )
    # Once for the reference and for each pass. Only mini-batches after the first need
    # old log-probs that were computed before.
    num_micro_batches = {1: 3, 2: 4, 4: 4}[num_mini_batches]  # 3+3+2, 3+1, or 2 rows
    num_old = {1: 0, 2: 2, 4: 3}[num_mini_batches]
    num_calls = (1 + num_iterations) * num_micro_batches + num_old
    assert run.logprobs.call_count == num_calls
    several = num_iterations * num_mini_batches > 1
    assert (metrics["clip_fraction"] > 0.02) == several


@pytest.mark.slow
@each_loss_variant
@pytest.mark.parametrize("micro_batch_size", [1, 3, 8, 16])
@pytest.mark.parametrize("num_with_advantage", [0, 3, 8])
def test_micro_batches_do_not_change_an_update(
    loss_type, level, micro_batch_size, num_with_advantage
):
    """If only some completions have an advantage, there is a KL term, too."""
    run, _ = check_update(
        grpo.shared_logprobs,
        num_with_advantage,
        options={
            "loss_type": loss_type,
            "importance_sampling_level": level,
            "micro_batch_size": micro_batch_size,
            "beta": 0.1 if num_with_advantage == 3 else 0.0,
        },
    )
    num_passes = 2 if run.config.beta else 1
    assert run.logprobs.call_count == num_passes * math.ceil(8 / micro_batch_size)


def test_an_update_passes_on_the_correction_of_the_kl_term():
    options = {"beta": 0.1, "num_iterations": 3, "use_bias_correction_kl": True}
    check_update(grpo.token_logprobs, num_with_advantage=8, options=options)


def test_metrics_of_an_update_are_means_over_its_optimizer_steps():
    run = core_run(tiny_model(), num_mini_batches=2, num_iterations=2)
    steps = [
        {"loss": 1.0, "kl": 0.1, "kl_max": 5.0, "grad_norm": 1.0},
        {"loss": 2.0, "kl": 0.2, "kl_max": 9.0, "grad_norm": math.inf},
        {"loss": 3.0, "kl": 0.3, "kl_max": 7.0, "grad_norm": math.nan},
        {"loss": 6.0, "kl": 0.6, "kl_max": 6.0, "grad_norm": 3.0},
    ]
    with mock.patch.object(grpo, "optimizer_step", side_effect=steps):
        metrics = grpo.update(run, rollout_batch(torch.ones(6, 6)), learning_rate=0.5)
    assert metrics == pytest.approx(
        {
            "loss": 3.0,
            "kl": 0.3,
            "kl_max": 9.0,
            "grad_norm": 3.0,
            "skipped": 2,
            "learning_rate": 0.5,
        }
    )


def test_kl_max_of_an_update_is_that_of_its_worst_token():
    """Of all micro-batches, mini-batches and passes."""
    run = core_run(tiny_model(), num_mini_batches=2, micro_batch_size=1)
    reference = run.reference

    def logprobs(model, prompt_ids, prompt_mask, completion_ids, mask, temperature):
        logp = grpo.token_logprobs(
            run.policy, prompt_ids, prompt_mask, completion_ids, mask, temperature
        )
        if model is reference and mask.sum() == 5:  # the second completion
            logp[0, 0] += 30
        return logp

    run.logprobs = logprobs
    metrics = grpo.update(run, rollout_batch(torch.ones(6, 6)), learning_rate=0.0)
    # 1e-4: 30 is added in float32, and multiplies by its exponential.
    assert metrics["kl_max"] == pytest.approx(math.exp(30) - 31, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["AdamW", "MasterAdamW"])
@pytest.mark.parametrize("advantage", [math.inf, math.nan, 1e30])
def test_an_update_whose_gradient_is_not_finite_is_skipped(advantage, optimizer):
    policy = tiny_model()
    if optimizer == "MasterAdamW":
        run = core_run(policy, optimizer=grpo.MasterAdamW(policy.parameters()))
    else:
        run = core_run(policy)
    before = copy.deepcopy([policy.state_dict(), run.optimizer.state_dict()])
    advantages = torch.ones(6, 6)
    advantages[0, 0] = advantage
    metrics = grpo.update(run, rollout_batch(advantages), learning_rate=1e-2)
    after = [policy.state_dict(), run.optimizer.state_dict()]
    assert metrics["skipped"] == 1
    assert not math.isfinite(metrics["grad_norm"])
    before[1]["param_groups"][0]["lr"] = 1e-2
    assert_close(after, before, atol=0, rtol=0)

    # The next update does not see the bad gradient.
    metrics = grpo.update(run, rollout_batch(torch.ones(6, 6)), learning_rate=1e-2)
    assert metrics["skipped"] == 0
    assert not torch.equal(policy.lm_head.weight, before[0]["lm_head.weight"])


def test_a_weight_without_a_gradient_does_not_stop_an_update():
    """As in an idle vision tower. It has a state to resume from, too."""
    policy = tiny_model()
    policy.unused = torch.nn.Parameter(torch.ones(3))
    run = core_run(policy)
    metrics = grpo.update(run, rollout_batch(torch.ones(6, 6)), learning_rate=1e-3)
    assert metrics["skipped"] == 0
    assert policy.unused.tolist() == [1, 1, 1]
    names = [{*state} for state in grpo.state_of(run).values()]
    assert names == [{"step", "exp_avg", "exp_avg_sq", "master"}] * len(names)


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_gradients_are_clipped_unless_the_limit_is_0(max_grad_norm):
    run = core_run(tiny_model(), max_grad_norm=max_grad_norm, beta=0.0)
    # Of SGD with learning rate 1, the change of the weights is the clipped gradient.
    run.optimizer = torch.optim.SGD(run.policy.parameters())
    before = copy.deepcopy(run.policy)
    batch = rollout_batch(torch.full((6, 6), 10.0))
    metrics = grpo.update(run, batch, learning_rate=1.0)
    change = get_total_norm(
        [x - y for x, y in zip(run.policy.parameters(), before.parameters())]
    )
    assert metrics["grad_norm"] > 1
    expected = max_grad_norm or metrics["grad_norm"]
    assert change.item() == pytest.approx(expected, rel=1e-3)


def test_a_run_with_a_kl_term_needs_a_reference():
    policy = tiny_model()
    adamw = torch.optim.AdamW(policy.parameters())
    with pytest.raises(ValueError, match="needs a reference"):
        grpo.Run(grpo.Config(), policy, None, [1], adamw, {})
    grpo.Run(grpo.Config(beta=0.0), policy, None, [1], adamw, {})


def test_a_run_of_several_ranks_needs_a_sharded_policy(monkeypatch):
    """Nobody would average the gradients of a copied core under torchrun."""
    policy = tiny_model()
    adamw = torch.optim.AdamW(policy.parameters())
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    with pytest.raises(ValueError, match="must be sharded by FSDP2"):
        grpo.Run(grpo.Config(beta=0.0), policy, None, [1], adamw, {})


# ------------------------------------------------------------------- the rest of a step
def learning_rates(**options):
    """`scheduled_learning_rate` of the steps 1 to 12."""
    config = grpo.Config(learning_rate=0.5, **options)
    return [grpo.scheduled_learning_rate(config, step) for step in range(1, 13)]


def test_the_constant_schedule_warms_up_and_stays():
    found = learning_rates(warmup_steps=4, max_steps=6)
    assert found == pytest.approx([0.125, 0.25, 0.375] + 9 * [0.5])
    assert learning_rates(warmup_steps=0) == 12 * [0.5]


@pytest.mark.parametrize("warmup_steps, max_steps", [(0, 12), (4, 12), (3, 7), (0, 1)])
def test_the_linear_schedule_is_that_of_transformers_after_the_warm_up(
    warmup_steps, max_steps
):
    """During the warm-up transformers is a step behind: it starts at 0."""
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = get_linear_schedule_with_warmup(sgd, warmup_steps, max_steps)
    expected = []
    for _ in range(12):
        expected.append(schedule.get_last_lr()[0])
        sgd.step()
        schedule.step()
    found = learning_rates(
        lr_scheduler_type="linear", warmup_steps=warmup_steps, max_steps=max_steps
    )
    assert found[warmup_steps:] == pytest.approx(expected[warmup_steps:])
    warming_up = [0.5 * step / warmup_steps for step in range(1, warmup_steps + 1)]
    assert found[:warmup_steps] == pytest.approx(warming_up)
    assert found[max_steps:] == (12 - max_steps) * [0]


def test_prompts_come_in_shuffled_epochs_and_depend_on_the_step_alone():
    steps = [grpo.prompt_batch(range(9), step, 3, seed=5) for step in range(6, 0, -1)]
    steps.reverse()
    first, second = sum(steps[:3], []), sum(steps[3:], [])
    assert sorted(first) == sorted(second) == list(range(9))
    assert first != second and first != sorted(first)
    assert grpo.prompt_batch(range(9), 1, 3, seed=6) != steps[0]


def test_an_incomplete_batch_of_an_epoch_is_dropped():
    steps = [grpo.prompt_batch(range(8), step, 3, seed=5) for step in (1, 2)]
    assert len({*steps[0], *steps[1]}) == 6
    assert len(grpo.prompt_batch(range(8), 3, 3, seed=5)) == 3  # of the next epoch


def test_more_prompts_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="takes 2 prompts, but there are only 1"):
        grpo.prompt_batch([{}], 1, 2, seed=0)


def score_texts(texts, reward, weight=1.0, num_rows=1, eos_token_ids=(0,), **row):
    """`score` of texts, as completions of the built-in tiny model."""
    tokenizer = grpo.tiny_model(0)[1]
    ids, mask = grpo.pad([tokenizer.encode(text) for text in texts], "right")
    run = SimpleNamespace(
        tokenizer=tokenizer,
        reward_functions={"mine": (reward, weight)},
        eos_token_ids=eos_token_ids,
    )
    rows = [{"level": b, **row} for b in range(num_rows)]
    return grpo.score(run, rows, grpo.Batch(None, None, ids, mask))


def test_a_reward_gets_texts_ids_finished_and_the_columns_of_its_rows():
    seen = {}

    def reward(**columns):
        seen.update(columns)
        return [0.0] * 4

    columns, _ = score_texts(["2<eos>", "3", "<unk>4<eos>", "<eos>"], reward, 1.0, 2)
    assert seen == columns
    assert seen["level"] == [0, 0, 1, 1]
    # The EOS token that ends a completion is no text; other special tokens are.
    assert seen["completions"] == ["2", "3", "<unk>4", ""]
    assert seen["completion_ids"] == [[4, 0], [5], [1, 6, 0], [0]]
    assert seen["finished"] == [True, False, True, True]


def test_any_eos_token_finishes_a_completion():
    texts = ["2<eos>", "2<unk>", "2"]
    columns, _ = score_texts(texts, lambda **_: [0.0] * 3, eos_token_ids=(7, 0, 1))
    assert columns["finished"] == [True, True, False]
    assert columns["completions"] == ["2", "2", "2"]


@pytest.mark.parametrize(
    "num_rows, rewards, expected",
    [
        (2, [None, 1.0, 0.0, None], [-2.0, -2.0, 0.0, 0.0]),
        (1, [None, 1.0, 0.0, None], [-1.0, -2.0, 0.0, -1.0]),
        (4, [None, 1.0, 0.0, None], [0.0, -2.0, 0.0, 0.0]),
        (1, [None, None, None, None], [0.0, 0.0, 0.0, 0.0]),
    ],
    ids=["two-groups", "one-group", "no-group", "nobody"],
)
def test_an_unjudged_completion_gets_the_mean_of_its_group_or_0(
    num_rows, rewards, expected
):
    _, scores = score_texts(["2", "3", "4", "5"], lambda **_: rewards, -2.0, num_rows)
    assert scores["reward"].tolist() == expected
    own = [math.nan if x is None else x for x in rewards]
    assert scores["rewards/mine"].tolist() == pytest.approx(own, nan_ok=True)


@pytest.mark.parametrize(
    "returned",
    [[1.0], [1.0, 2.0, 3.0], [1.0, math.nan], [1.0, math.inf]],
    ids=["short", "long", "nan", "inf"],
)
def test_a_reward_that_returns_anything_but_finite_numbers_is_an_error(returned):
    with pytest.raises(ValueError, match="reward mine returned .*, not 2 finite"):
        score_texts(["2", "3"], lambda **_: returned)


def test_metrics_of_a_rollout_are_means():
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]]).bool()
    batch = grpo.Batch(None, None, None, mask)
    batch.advantages = torch.tensor([1.0, -1.0, 0.0, 0.0])[:, None].expand(4, 3)
    scores = {
        "reward": torch.tensor([1.0, 0.0, 0.5, 0.5]).double(),
        "rewards/mine": torch.tensor([1.0, math.nan, 3.0, math.nan]).double(),
    }
    metrics = grpo.rollout_metrics(batch, scores, [True, True, False, True], 2)
    assert metrics == pytest.approx(
        {
            "reward": 0.5,
            "rewards/mine": 2.0,
            "reward_std": math.sqrt(0.5) / 2,
            "zero_std_fraction": 0.5,
            "completion_length": 2.0,
            "truncated_fraction": 0.25,
            "num_tokens": 8,
        }
    )


def run_of_built_in_model(**options):
    """A `Run` of the built-in tiny model, whose reward is the ids' sum modulo 7."""
    policy, tokenizer = grpo.tiny_model(0)
    run = core_run(policy.eval(), num_generations=4, temperature=0.7, **options)
    run.tokenizer, run.eos_token_ids = tokenizer, [0]

    def reward(completion_ids, **columns):
        return [sum(ids) % 7 for ids in completion_ids]

    run.reward_functions = {"mine": (reward, 1.0)}
    return run


def test_a_step_trains_on_the_advantages_of_its_rewards():
    run = run_of_built_in_model(scale_rewards="none", warmup_steps=4)
    extra = torch.randn(8, 6)
    run.extra_advantages = lambda columns, length: extra[:, :length]
    rows = [{"prompt_ids": [3, 12, 4]}, {"prompt_ids": [5, 12]}]
    with (
        mock.patch.object(grpo, "update", wraps=grpo.update) as update,
        mock.patch.object(grpo, "generate", wraps=grpo.generate) as generate,
    ):
        metrics, columns = grpo.train_step(run, rows, step=2)
    batch = update.call_args.args[1]
    sums = [sum(x[m].tolist()) % 7 for x, m in zip(batch.completion_ids, batch.mask)]
    assert columns["reward"] == sums
    expected = grpo.group_advantages(torch.tensor(sums), 4, "none")[:, None] + extra
    assert_close(batch.advantages, expected)
    assert generate.call_args.args[-1] == 0.7
    assert metrics["learning_rate"] == pytest.approx(0.5 * run.config.learning_rate)
    assert metrics["reward"] == statistics.fmean(sums)


def test_a_step_leaves_the_random_state_of_the_host_alone():
    """Of `random` and numpy. PyTorch's generator samples, but is not seeded."""
    run = run_of_built_in_model()
    torch.manual_seed(123)
    states = random.getstate(), np.random.get_state()[1].tolist()
    grpo.train_step(run, [{"prompt_ids": [3]}, {"prompt_ids": [4]}], step=1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    assert torch.initial_seed() == 123


# ---------------------------------------------------------- pasting, the core by itself
def paste(name, scope):
    """Executes the source of a function of grpo.py, and of the functions and classes
    that it uses, in another namespace."""
    source = inspect.getsource(getattr(grpo, name))
    for node in ast.walk(ast.parse(source)):
        used = getattr(node, "id", None)
        if inspect.getmodule(vars(grpo).get(used)) is grpo and used not in scope:
            scope[used] = None
            paste(used, scope)
    exec(source, scope)


@pytest.mark.parametrize(
    "name, call",
    [
        ("completion_mask", lambda f: f(torch.tensor([[5, 2, 2]]), 2)),
        ("group_advantages", lambda f: f(torch.arange(4.0), 2)),
        ("process_advantages", lambda f: f([[1], [0]], [[0], [2]], 2, 4)),
        ("masked_mean", lambda f: f(*random_logprobs()[-2:])),
        ("importance_ratio", lambda f: f(*random_logprobs()[:2], None, "sequence")),
        ("clipped_surrogate", lambda f: f(torch.ones(2, 3), torch.ones(2))),
        ("kl_k3", lambda f: f(*random_logprobs()[:2])),
        ("token_weights", lambda f: f(random_logprobs()[-1], "dr_grpo", 9)),
        ("grpo_loss", lambda f: f(*random_logprobs())),
        ("sample", lambda f: f(random_logprobs()[0], 0)),
        ("generate", lambda f: f(tiny_model(), *ragged_batch()[:2], 2, 5, 1, 0)),
        ("token_logprobs", lambda f: f(tiny_model(), *ragged_batch())),
        ("shared_logprobs", lambda f: f(tiny_model(), *ragged_batch())),
        ("accuracy_reward", lambda f: torch.tensor(f([""], ["so 14"], ["14"]))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_function_works_when_it_is_pasted_into_another_file(name, call):
    scope = {"torch": torch, "F": F, "DynamicCache": DynamicCache}
    if name == "shared_logprobs":
        scope.update(math=math, ON_GPU=grpo.ON_GPU)
    if name == "accuracy_reward":
        scope.update(re=re, unicodedata=unicodedata, Fraction=Fraction)
        for constant, value in vars(grpo).items():
            if constant.isupper() and isinstance(value, str):  # patterns
                scope[constant] = value
    paste(name, scope)
    found = call(scope[name])
    assert_close(found, call(getattr(grpo, name)))
    if name.endswith("logprobs"):
        found.sum().backward()


def core_source():
    """grpo.py up to the marker."""
    source = Path(grpo.__file__).read_text()
    core, *rest = source.split("\n# That is all of GRPO. ")
    assert len(rest) == 1
    return core


def core_module():
    module = types.ModuleType("grpo")
    exec(core_source(), vars(module))
    return module


def readme_block(start):
    """The code block of README.md that begins in this way."""
    text = Path(grpo.__file__).with_name("README.md").read_text()
    (block,) = re.findall(rf"(?ms)^```py(?:thon)?\n({re.escape(start)}.*?)^```$", text)
    return block


def test_the_step_that_the_readme_shows_is_a_training_step():
    """Its lines move the weights as `train_step` does."""

    def tiny_policy():
        policy = grpo.tiny_model(0)[0].eval()
        return policy, torch.optim.SGD(policy.parameters(), lr=0.5)

    def sums(completion_ids, **columns):
        return [sum(ids) % 7 for ids in completion_ids]

    reference = grpo.tiny_model(1)[0].eval()
    policy, optimizer = tiny_policy()
    rows = [{"prompt_ids": [3, 12, 4]}, {"prompt_ids": [5, 12]}]
    run = core_run(policy, reference, optimizer, max_completion_length=64, beta=0.04)
    run.config = dataclasses.replace(run.config, learning_rate=0.5, warmup_steps=0)
    run.tokenizer, run.eos_token_ids = grpo.tiny_model(0)[1], [0]
    run.reward_functions = {"sums": (sums, 1.0)}
    torch.manual_seed(0)
    grpo.train_step(run, rows, step=1)
    policy, optimizer = tiny_policy()
    prompts = grpo.prompt_batch(rows, 1, 2, run.config.seed)
    prompt_ids, prompt_mask = grpo.pad([row["prompt_ids"] for row in prompts], "left")
    torch.manual_seed(0)
    scope = dict(
        torch=torch,
        policy=policy,
        reference=reference,
        optimizer=optimizer,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        eos_token_ids=[0],
        your_scores=lambda ids, mask: sums([x[m].tolist() for x, m in zip(ids, mask)]),
    )
    exec(readme_block("import torch\nfrom grpo import completion_mask"), scope)
    assert scope["metrics"]["kl"] > 1e-3
    assert_close(policy.state_dict(), run.policy.state_dict())
    moved = policy.lm_head.weight - grpo.tiny_model(0)[0].lm_head.weight
    assert moved.abs().max() > 1e-3


def global_names(code):
    """The global names that the functions in a code object read."""
    names = {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= global_names(constant)
    return names


def run_header_example(module, folder, monkeypatch):
    """Runs the lines in the header, with this module as `grpo`, on the built-in model.
    Returns the trained weights and the last metrics."""
    (code,) = re.findall(r"(?s)\n\n(    import copy\n.*?)\n\nShapes", grpo.__doc__)
    code = textwrap.dedent(code)
    shown = "max_completion_length=64, max_steps=200"
    tried = "max_completion_length=8, max_steps=3, learning_rate=1e-2"
    assert code.count(shown) == 1
    loading, loop, training = code.replace(shown, tried).partition("for step in ")
    assert loop
    scope = {"name": str(folder), "texts": [f"{a}+{b}=" for a in "012" for b in "345"]}
    monkeypatch.setitem(sys.modules, "grpo", module)
    torch.manual_seed(123)
    before = random.getstate(), torch.initial_seed()
    exec(loading, scope)
    assert (random.getstate(), torch.initial_seed()) == before  # nothing is seeded
    torch.manual_seed(0)
    exec(loop + training, scope)
    monkeypatch.undo()
    return scope["policy"].state_dict(), scope["metrics"]


def test_the_core_uses_no_name_from_below_the_marker():
    names = global_names(compile(core_source(), "core", "exec"))
    assert names <= {*vars(core_module()), *vars(builtins)}


def test_executing_the_core_seeds_nothing():
    torch.manual_seed(123)
    before = random.getstate(), torch.get_rng_state().tolist()
    core_module()
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


def test_the_core_stands_alone(tmp_path, monkeypatch):
    """What the header shows trains, to the bit, as with the whole file."""
    model, tokenizer = grpo.tiny_model(0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found, metrics = run_header_example(core_module(), tmp_path, monkeypatch)
    assert metrics["kl"] > 1e-5  # the weights have moved
    expected, expected_metrics = run_header_example(grpo, tmp_path, monkeypatch)
    assert_close(found, expected, atol=0, rtol=0)
    assert metrics["reward"] == expected_metrics["reward"]


# ------------------------------------------------------------- options and command line
@pytest.mark.parametrize(
    "arguments",
    [
        ["--num-generations", "1"],
        ["--prompts-per-step", "0"],
        ["--max-prompt-length", "five"],
        ["--max-prompt-length", "-1"],
        ["--max-completion-length", "0"],
        ["--micro-batch-size", "0"],
        ["--temperature", "0"],
        ["--temperature", "nan"],
        ["--beta", "-0.1"],
        ["--beta", "nan"],
        ["--epsilon", "-1"],
        ["--num-iterations", "0"],
        ["--num-mini-batches", "0"],
        ["--num-mini-batches", "3"],
        ["--max-steps", "-1"],
        ["--save-total-limit", "-1"],
        ["--max-grad-norm", "-1"],
        ["--learning-rate", "inf"],
        ["--sft-learning-rate", "nan"],
        ["--seed", "-1"],
        ["--loss-type", "ppo"],
        ["--lr-scheduler-type", "cosine"],
        ["--scale-rewards", "row"],
        ["--dtype", "int8"],
        ["--report-to", "paper"],
        ["--prompt-template", "Think!"],
        ["--chat-template-kwargs", "{"],
        ["--chat-template-kwargs", "[]"],
        ["--chat-template-kwargs", ""],
    ],
    ids=" ".join,
)
def test_a_wrong_value_of_an_option_is_an_error_that_names_it(arguments, capsys):
    with pytest.raises((grpo.Error, SystemExit)) as stop:
        grpo.parse_args(arguments)
    # argparse first prints its usage, which names every option.
    printed = capsys.readouterr().err.rpartition("error: ")[2]
    message = f"{stop.value} {printed}".replace("_", "-")
    assert arguments[0] in message


@pytest.mark.parametrize("arguments", [["--max-step", "5"], ["--epoch", "5"], ["5"]])
def test_an_unknown_or_abbreviated_option_is_rejected(arguments, capsys):
    with pytest.raises(SystemExit):
        grpo.parse_args(arguments)
    expected = f"unrecognized arguments: {' '.join(arguments)}"
    assert expected in capsys.readouterr().err


def test_help_shows_each_option_with_its_text(capsys):
    with pytest.raises(SystemExit) as stop:
        grpo.parse_args(["--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for field in grpo.fields(grpo.Options):
        assert f"--{field.name}" in shown
        assert " ".join(field.metadata["help"].split())[:20] in shown


def test_an_error_is_one_line():
    assert str(grpo.Error("a\n  long\tstory\n")) == "a long story"


def test_typed_options_win_over_defaults():
    config = grpo.parse_args(["--learning-rate", "0.5", "--num_generations=4"])
    assert config.learning_rate == 0.5
    assert config.num_generations == 4


def test_the_tiny_model_has_defaults_of_its_own():
    config = grpo.parse_args([])
    assert grpo.TINY["learning_rate"] != grpo.Options.learning_rate
    assert {name: getattr(config, name) for name in grpo.TINY} == grpo.TINY
    config = grpo.parse_args(["--model", "x", "--output-dir", "y", "--run-name", "z"])
    assert config == grpo.Options(model="x", output_dir="y", run_name="z")


def test_a_run_has_a_folder_and_a_name_even_if_none_is_typed():
    config = grpo.parse_args([])
    assert config.run_name.endswith(f"-{os.getpid()}")
    assert config.output_dir == f"runs/{config.run_name}"
    config = grpo.parse_args(["--run-name", "sums"])
    assert config.output_dir == "runs/sums"
    config = grpo.parse_args(["--output-dir", "here"])
    assert config.output_dir == "here"
    assert config.run_name.endswith(f"-{os.getpid()}")


@pytest.fixture
def moved_run(tmp_path):
    """The folder of a run that was moved after it had been started."""
    (tmp_path / "run").mkdir()
    config = grpo.Options(
        model="x",
        beta=0.5,
        reward=["format", "accuracy"],
        output_dir=f"{tmp_path}/run",
        run_name="sums",
    )
    grpo.save_options(config)
    saved = json.loads((tmp_path / "run" / "options.json").read_text())
    assert not saved.keys() & {"output_dir", "resume"}
    return (tmp_path / "run").rename(tmp_path / "moved")


def test_a_run_is_resumed_with_its_own_options_and_what_is_typed(moved_run):
    folder = str(moved_run)
    found = grpo.parse_args(["--resume", folder, "--max-steps", "2", "--beta", "0"])
    assert found == grpo.Options(
        model="x",
        reward=["format", "accuracy"],
        run_name="sums",
        output_dir=folder,
        resume=folder,
        max_steps=2,
        beta=0.0,
    )


def test_a_resumed_run_of_the_tiny_model_keeps_its_defaults(tmp_path):
    typed = ["--output-dir", str(tmp_path), "--learning-rate", "0.5"]
    config = grpo.parse_args(typed)
    grpo.save_options(config)
    found = grpo.parse_args(["--resume", str(tmp_path)])
    assert grpo.replace(found, resume="") == config


def test_typed_options_are_saved_again_and_hold_for_the_next_resume(moved_run):
    folder = str(moved_run)
    typed = ["--resume", folder, "--max-steps", "400", "--learning-rate", "0.5"]
    grpo.save_options(grpo.parse_args(typed))
    found = grpo.parse_args(["--resume", folder, "--beta", "0.1"])
    assert (found.max_steps, found.learning_rate, found.beta) == (400, 0.5, 0.1)


@pytest.mark.parametrize("name", ["seed", "lora-rank", "sft-steps"])
def test_a_resumed_run_keeps_its_rows_and_its_weights(moved_run, name):
    with pytest.raises(grpo.Error) as error:
        grpo.parse_args(["--resume", str(moved_run), f"--{name}", "7"])
    message = str(error.value).replace("_", "-")
    assert message == f"--{name}: a resumed run keeps 0"


def test_a_resumed_run_takes_no_other_output_dir(moved_run):
    with pytest.raises(grpo.Error, match="^--output-dir: a resumed run stays"):
        grpo.parse_args(["--resume", str(moved_run), "--output-dir", "elsewhere"])


def change_options(folder, **changes):
    path = Path(folder, "options.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "text", ["", '{"seed": ', "[]", "5", '"x"', "null", "{}", '{"seed": 0}', "\xff"]
)
def test_a_broken_options_file_is_named(moved_run, text):
    (moved_run / "options.json").write_text(text, encoding="latin-1")
    with pytest.raises(grpo.Error, match="options.json does not hold the options of"):
        grpo.parse_args(["--resume", str(moved_run)])


@pytest.mark.parametrize(
    "changes", [{"version": "0.0.1"}, {"version": None}, {"clip_epsilon": 0.2}], ids=str
)
def test_options_of_another_version_are_refused(moved_run, changes):
    change_options(moved_run, **changes)
    with pytest.raises(
        grpo.Error, match=f"is of version .*, this is {re.escape(grpo.__version__)}"
    ):
        grpo.parse_args(["--resume", str(moved_run)])


def test_a_folder_without_a_run_is_not_resumed(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        grpo.main(["--resume", str(tmp_path / "nothing")])
    assert "No such file" in stop.value.code and "nothing" in stop.value.code
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    "has_gpu, is_native, expected",
    [(False, True, "float32"), (True, False, "float32"), (True, True, "bfloat16")],
    ids=["cpu", "t4", "h100"],
)
def test_the_default_dtype_is_bfloat16_only_on_a_gpu_that_need_not_emulate_it(
    monkeypatch, has_gpu, is_native, expected
):
    def is_bf16_supported(including_emulation=True):
        return is_native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    spec = importlib.util.spec_from_file_location("grpo_elsewhere", grpo.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.Options().dtype == expected


# ---------------------------------------------------------------- rewards: the answers
HUGE = "9" * 5000  # over the 4,300 digits that int() reads

# (completion, answer, finished, score)
SCORES = [
    # Two equations in one box are no number.
    (r"\boxed{y=2\quad x=5}", "5", True, 0),
    (r"\boxed{x=1 \lor x=5}", "5", True, 0),
    (r"\boxed{x=1\\x=5}", "5", True, 0),
    # Two answers after the mark, or two letters, are none.
    ("#### 5 or 6", "5", True, 0),
    ("#### 5, 6", "5", True, 0),
    ("#### 2 dozen = 24", "2", True, 0),
    ("\\boxed{A) or B}", "A", True, 0),
    ("\\boxed{A) 12 or more}", "A", True, 1),
    (r"\boxed{x=3\,\text{or}\,x=5}", "5", True, 0),
    (r"\boxed{x=3~\text{or}~x=5}", "5", True, 0),
    (r"\boxed{x=1 \wedge y=5}", "5", True, 0),
    (r"\boxed{x_1=1 \vee x_2=5}", "5", True, 0),
    (r"\boxed{x=1\\ x=5}", "5", True, 0),
    (r"\boxed{P=2l+2w=14}", "14", True, 1),
    (r"\boxed{A = \frac{1}{2}bh = 6}", "6", True, 1),
    (r"\boxed{C = 2\pi r = 10}", "10", True, 1),
    (r"\boxed{A = 3 \times 4 \text{ cm} = 12}", "12", True, 1),
    (r"\boxed{\text{Cost for 3 hours} = 15}", "15", True, 1),
    (r"\boxed{x \not= 5}", "5", True, 0),
    (r"\boxed{\pm5}", "5", True, 0),
    (r"It is \pm 5.", "5", True, 0),
    (r"\boxed{\pm 5}", "±5", True, 1),
    ("\\boxed{A. 3, C. 4}", "A", True, 0),
    ("\\boxed{A. 3 & C. 4}", "A", True, 0),
    ("\\boxed{B. Washington, D.C.}", "B", True, 1),
    # A factor is no unit. "dozen" is one: in GSM8K, "8 dozen eggs" has the gold 8.
    ("#### 8 dozen eggs", "8", True, 1),
    ("It is 8 dozen.", "8", True, 1),
    ("#### 3π", "3", True, 0),
    ("#### 3√2", "3", True, 0),
    ("#### 3x", "3", True, 0),
    ("#### 5km", "5", True, 1),
    ("#### 10:30 AM", "#### 10:30 PM", True, 0),
    ("#### 10:30 AM", "10:30 am", True, 1),
    ("#### 5-3=2\nThat took 9 steps.", "2", True, 1),
    # Digits in groups of three are one number.
    ("it is 1 000.", "1000", True, 1),
    ("it is 1 000.", "0", True, 0),
    ("it is 12\u00a0500.", "12500", True, 1),
    ("it is 12\u202f500.", "500", True, 0),
    ("#### 1 250 000 clips", "1250000", True, 1),
    (r"it is $12\,500$", "12500", True, 1),
    ("it is 100~200.", "100200", True, 0),
    ("#### 100~200", "100", True, 0),
    ("in rows of 1 2345", "2345", True, 1),
    # Spaces around the slash of a fraction.
    (r"\boxed{1 / 2}", "0.5", True, 1),
    ("so it is 1 / 2.", "2", True, 0),
    # An exponent or an index is no answer, and belongs to its number.
    ("The area is 30 cm².", "30", True, 1),
    ("The area is 30 cm^2.", "2", True, 0),
    (r"It is $9.8 \text{ m/s}^{2}$", "9.8", True, 1),
    (r"It is $x^{10}$.", "0", True, 0),
    (r"It is $2^{10}$.", "10", True, 0),
    (r"It is 7 m s⁻¹.", "7", True, 1),
    (r"So $7 = x_{12}$.", "7", True, 1),
    ("It is _7_.", "7", True, 1),
    ("the_answer_is_42", "42", True, 1),
    ("面积是30㎡", "30", True, 1),
    ("方案2：30元", "30", True, 1),
    ("It is 7 × 10⁻².", "0.07", True, 1),
    (r"\boxed{10⁻²}", "0.01", True, 1),
    (r"\boxed{2·10⁵}", "200000", True, 1),
    (r"\boxed{2**5}", "25", True, 0),
    (r"It is $4\pi$.", "4", True, 0),
    # A sign may stand behind a space, or behind letters of other scripts.
    ("答案是-300。", "-300", True, 1),
    ("答案是-300。", "300", True, 0),
    ("So x = - 3.", "-3", True, 1),
    (r"So \( x = - \frac{1}{2} \).", "0.5", True, 0),
    ("It is ‑5.", "-5", True, 1),
    (r"\boxed{7。}", "7", True, 1),
    # Several answers after the mark are none.
    ("#### $3$ or $4$", "3", True, 0),
    ("#### 7, -8", "7", True, 0),
    ("#### 7% to 8%", "7", True, 0),
    ("#### 7; 8", "7", True, 0),
    ("#### 3 x 4", "3", True, 0),
    ("#### 5 : 3", "5", True, 0),
    ("#### 5 π", "5", True, 0),
    # The answer may follow the mark in a sentence, or on the last line.
    ("#### The answer is 72", "72", True, 1),
    ("#### The final answer is: 72 clips", "72", True, 1),
    ("#### Final Answer:\n\nShe has 8 apples.", "8", True, 1),
    ("#### Final Answer:\n\nB", "B", True, 1),
    ("#### 2 hours later:\nThe rest, so 52.", "52", True, 1),
    # A condition in a box is no equation.
    (r"\boxed{5 \text{ when } x = 2}", "2", True, 0),
    # A letter whose option names letters, and two options.
    (r"\boxed{D. Both A and B}", "D", True, 1),
    (r"\boxed{C. a solid and a liquid}", "C", True, 1),
    (r"\boxed{C. C, H, O}", "C", True, 1),
    (r"\boxed{A. 5 B. 6}", "A", True, 0),
    (r"\boxed{A. 5 or B}", "A", True, 0),
    (r"\boxed{A. Paris and B}", "A", True, 0),
    (r"\boxed{A: or B}", "A", True, 0),
    (r"\boxed{A), B}", "A", True, 0),
    (r"\boxed{a.m.}", "A", True, 0),
    (r"\boxed{B)12}", "B", True, 1),
    (r"\boxed{\boldsymbol{B}}", "B", True, 1),
    # Currencies.
    ("It costs Rs.500.", "500", True, 1),
    ("#### ₹7", "7", True, 1),
    (r"\boxed{¥5}", "5", True, 1),
    # Dots before a number are not its decimal point.
    ("so it is...5", "5", True, 1),
    ("so it is…5", "5", True, 1),
    # A power is not its base.
    ("It is 10⁸.", "10", True, 0),
    ("It is 3 × 10⁸.", "3e8", True, 1),
    # Markdown around a number is no part of it.
    ("#### `42`", "42", True, 1),
    ("#### __42__", "42", True, 1),
    ("The answer is `42`.", "42", True, 1),
    # An empty box after the answer, as in a repeated instruction, does not count.
    (r"So it is \boxed{7}. Put your final answer within \boxed{}.", "7", True, 1),
    (r"\boxed{7} \boxed{ }", "7", True, 1),
    (r"\boxed{7} \boxed{...}", "7", True, 1),
    (r"\boxed{7} \boxed{$$} \boxed{}", "7", True, 1),
    (r"\boxed{7} \boxed{\text{ }}", "7", True, 1),
    (r"\boxed{7} \boxed{\ }", "7", False, 1),
    (r"\boxed{7}. Put the answer in \boxed.", "7", True, 1),
    (r"\boxed{7}. Put the answer in \boxed format.", "7", True, 1),
    (r"\boxed{7} and then \boxed{", "7", False, 1),
    ("#### 7\nUse \\boxed{}.", "7", True, 1),
    (r"It is 7. Use \boxed{}.", "7", True, 1),
    (r"It is 7. Use \boxed{}.", "7", False, 0),
    (r"\boxed{7} \boxed{0}", "7", True, 0),
    (r"\boxed{7} \boxed{-}", "7", True, 0),
    # An unfinished box after the answer is the answer that is missing.
    (r"\boxed{5} no, it is \boxed{7", "5", True, 0),
    (r"\boxed{5} no, it is \boxed{7", "7", True, 0),
    (r"\boxed{5} no, it is \boxed{\frac{1}{2}", "5", False, 0),
    ("#### 5\nor \\boxed{7", "5", True, 0),
    (r"5, so \boxed{5", "5", True, 0),
    (r"\boxed{5} and \boxed{\text{", "5", False, 1),
    (r"\boxed{\{7", "7", True, 0),
    (r"\boxed{7 \boxed{}", "7", True, 0),
    # Nested braces and boxes.
    (r"\boxed{\frac{1}{2}}", "0.5", True, 1),
    (r"\boxed{\boxed{7}}", "7", True, 1),
    (r"\boxed{{7}}", "7", True, 1),
    (r"\boxed{\text{$7$}}", "7", True, 1),
    (r"\boxed{\left\{1\right.} 2", r"\{1.", True, 1),
    # A number directly after the mark, and then anything.
    ("#### 72 clips", "72", True, 1),
    ("#### **72**", "72", True, 1),
    ("#### $1,250.50 in total", "1250.5", True, 1),
    ("#### Answer: 72", "72", True, 1),
    ("#### 72 clips", "72", False, 1),
    ("#### **Answer:** 72 clips\nGood luck with 3 more!", "72", True, 1),
    ("#### Final answer: 72", "72", True, 1),
    ("####72", "72", True, 1),
    ("####\n72\n\n", "72", True, 1),
    ("#### 72.\nI used 3 steps.", "72", True, 1),
    ("#### \\(72\\) clips", "72", True, 1),
    ("#### \\$72", "72", True, 1),
    ("#### -72%", "-72", True, 1),
    ("#### 2 1/2 cups", "2.5", True, 1),
    ("#### 1 then #### 72 (in total)", "72", True, 1),
    ("#### 48 + 24 = 72", "72", True, 1),
    ("#### 48 + 24 = 72", "48", True, 0),
    ("#### 48+24=72", "72", True, 1),
    ("#### 2\\sqrt{3}", "2", True, 0),
    ("#### 2\\sqrt{3}", "2\\sqrt{3}", True, 1),
    ("#### 72 or 73\nHm.", "73", True, 0),
    # A mark that is cut off.
    ("#### 12", "1234", False, 0),
    ("#### 12", "12", False, 1),
    ("#### 1,2", "1200", False, 0),
    ("#### 1,2", "2", False, 0),
    ("#### 12.", "12.5", False, 0),
    ("so 12\n####", "12", False, 0),
    ("so 12\n####", "12", True, 1),
    ("#### -", "5", False, 0),
    ("5 is it\n#### Ans", "5", False, 0),
    # A heading is no mark.
    ("#### Step 3: add\nThe answer is 72.", "72", True, 1),
    ("#### Step 3: add\nThe answer is 72.", "3", True, 0),
    ("#### Step 3: add\nThe answer is 72.", "72", False, 0),
    ("#### Answer\nThe answer is 72.", "72", True, 1),
    ("#### 2. Add the rest\nThe answer is 72.", "72", True, 1),
    ("#### 2) Add the rest\nThe answer is 72.", "2", True, 0),
    ("#### 72\n#### Explanation\nIt took 3 steps.", "72", True, 1),
    ("#### Explanation\nIt took 3 steps.\n#### 72", "72", True, 1),
    ("#### **Step 1**\n7\n#### **Step 2**\nIt is 72", "72", True, 1),
    ("#### Step 3", "3", True, 0),
    ("##### 5. Sum\nIt is 72.", "72", True, 1),
    # Words after the mark on the last line.
    ("so\n#### yes", "Yes", True, 1),
    ("so\n#### **Yes**.\n", "yes", True, 1),
    ("5 of them\n#### New York", "new york", True, 1),
    ("#### Answer: no", "no", True, 1),
    ("#### yes\n#### no", "yes", True, 0),
    ("#### yes\nThat is it.", "yes", True, 0),
    ("#### (B) 12", "B", True, 1),
    ("#### x = 5", "5", True, 1),
    ("#### (1, 2)", "(1,2)", True, 1),
    # A letter with its option.
    (r"\boxed{B) 12}", "B", True, 1),
    (r"\boxed{B. Paris}", "B", True, 1),
    (r"\boxed{(B) 12}", "B", True, 1),
    (r"\boxed{\mathbf{B}}", "B", True, 1),
    (r"\boxed{Because}", "B", True, 0),
    (r"\boxed{A or B}", "B", True, 0),
    (r"\boxed{b}", "B", True, 1),
    (r"\boxed{B: the second}", "b", True, 1),
    (r"\boxed{\textbf{(B)}\ 12}", "B", True, 1),
    (r"\boxed{\textbf{\text{(B) }}12}", "(B)", True, 1),
    (r"\boxed{**B**. It is f(a)}", "B", True, 1),
    (r"\boxed{B) vitamin C}", "B", True, 1),
    (r"\boxed{B) vitamin C}", "C", True, 0),
    (r"\boxed{(A) or (B)}", "A", True, 0),
    (r"\boxed{A) 12 B) 13}", "A", True, 0),
    (r"\boxed{B 12}", "B", True, 0),
    (r"\boxed{K) 12}", "K", True, 0),
    # Mixed numbers.
    (r"\boxed{2\frac{1}{2}}", "2.5", True, 1),
    ("The answer is 2 1/2.", "2.5", True, 1),
    ("The answer is 2 1/2.", "1/2", True, 0),
    (r"It is $2\frac{1}{2}$.", "1/2", True, 0),
    (r"\boxed{-2\frac{1}{2}}", "-2.5", True, 1),
    (r"\boxed{-2 1/2}", "-3/2", True, 0),
    (r"\boxed{2 \dfrac{3}{4}}", "11/4", True, 1),
    (r"\boxed{2\tfrac12}", "2.5", True, 1),
    (r"\boxed{2\,\frac{1}{2}}", "21/2", True, 0),
    (r"\boxed{2 1/2}", r"2\frac{1}{2}", True, 1),
    (r"\boxed{2 5/3}", "11/3", True, 0),
    (r"\boxed{2-\frac{1}{2}}", "2.5", True, 0),
    ("It costs $2 1/4.", "2.25", True, 1),
    # A number is taken whole or not at all.
    ("12,5", "5", True, 0),
    ("it is 1,00,000", "0", True, 0),
    ("about 7.0e-05", "5", True, 0),
    ("version 1.2.3", "3", True, 0),
    ("12,5", "12,5", True, 1),
    ("it is 1,2345", "2345", True, 0),
    ("it is 1,000,00", "0", True, 0),
    ("at 10:30", "30", True, 0),
    ("on 3/04/2024", "2024", True, 0),
    ("it is 2^5", "5", True, 0),
    ("it is 1.000.000", "0", True, 0),
    ("it is ±7", "7", True, 0),
    ("it is 1,234,567.50.", "1234567.5", True, 1),
    ("6, 7, 8", "8", True, 1),
    ("it is 1e9999", "9999", True, 0),
    (HUGE, HUGE[:199], True, 0),
    # Scientific notation, also of floats in JSON.
    ("about 7.0e-05", "0.00007", True, 1),
    ("0.00001", 1e-05, True, 1),
    ("10000000000000000", 1e16, True, 1),
    (r"\boxed{3 \times 10^8}", "300000000", True, 1),
    (r"\boxed{3 \times 10^{-2}}", "0.03", True, 1),
    (r"it is $1.5\cdot10^{3}$ m", "1500", True, 1),
    ("it is 3 × 10^8.", "3e8", True, 1),
    ("it is 3 x 10^8.", "8", True, 0),
    ("2.5E+3", 2500, True, 1),
    ("-1e-2", "-0.01", True, 1),
    (r"\boxed{10^{-5}}", 1e-05, True, 1),
    (r"\boxed{10^{-5}}", "-5", True, 0),
    ("1e5", "15", True, 0),
    # Dashes: an en dash or a minus before a number is a sign, between two it is not.
    ("it is –5", "-5", True, 1),
    ("it is –5", "5", True, 0),
    ("pages 3–5", "5", True, 1),
    ("pages 3–5", "-5", True, 0),
    ("it is −5", "-5", True, 1),
    (r"\boxed{–5}", -5, True, 1),
    ("#### –5 degrees", "-5", True, 1),
    ("it is –$5", "-5", True, 1),
    (r"\boxed{- 5}", "-5", True, 1),
    (r"it is \(–\frac{1}{2}\)", "-0.5", True, 1),
    ("5", "–5", True, 0),
    # A tuple is no number.
    (r"\boxed{(0,100)}", "100", True, 0),
    ("it is 1200", "(1,200)", True, 0),
    (r"\boxed{(1,2)}", "(1, 2)", True, 1),
    ("it is (1,200)", "1200", True, 0),
    ("it is (1, 200)", "200", True, 0),
    ("it is (1, 2)", "(1,2)", True, 1),
    ("in [0, 1]", "1", True, 0),
    (r"\boxed{\left(1,200\right)}", "1200", True, 0),
    (r"\boxed{\left(1,200\right)}", "(1,200)", True, 1),
    (r"\boxed{(2,1)}", "(1,2)", True, 0),
    (r"\boxed{(x,y)=(1,200)}", "1200", True, 0),
    (r"\boxed{(1200)}", "1200", True, 1),
    ("(about 1,200 of them)", "1200", True, 1),
    # The right side of an equation, but no list of equations and no inequality.
    (r"\boxed{m+n=293}", "293", True, 1),
    (r"\boxed{256+37=293}", "293", True, 1),
    (r"\boxed{x=1, y=2}", "2", True, 0),
    (r"\boxed{x = y = -3}", "-3", True, 1),
    (r"\boxed{$f(2) = \frac{1}{2}$.}", "0.5", True, 1),
    (r"\boxed{n=1,200}", "1200", True, 1),
    (r"\boxed{\text{Area} = 5}", "5", True, 1),
    (r"\boxed{5}", "x = 5", True, 1),
    (r"\boxed{y=2x}", "2x", True, 1),
    (r"\boxed{x=1 \text{ or } x=2}", "2", True, 0),
    (r"\boxed{x=1; x=2}", "2", True, 0),
    (r"\boxed{x>=2}", "2", True, 0),
    (r"\boxed{2 = x}", "2", True, 0),
    # LaTeX without braces, and LaTeX that is no part of an answer.
    (r"\boxed{\frac12}", "0.5", True, 1),
    (r"\boxed{\frac{3}4}", "0.75", True, 1),
    (r"The area is $\boxed 2$.", "2", False, 1),
    (r"\boxed{\frac1{72}}", "1/72", True, 1),
    (r"\boxed{\dfrac 3 4}", "0.75", True, 1),
    (r"it is $\tfrac34$", "4", True, 0),
    (r"\boxed3", "3", True, 1),
    (r"\boxed 25", "25", True, 1),
    (r"\boxed 25", "2", True, 0),
    (r"\boxed x", "x", True, 1),
    (r"\boxed{\mathrm{7}}", "7", True, 1),
    (r"\boxed{\left(7\right)}", "7", True, 1),
    (r"\boxed{\[7\]}", "7", True, 1),
    (r"\boxed{\frac{x}{2}}", r"\dfrac{x}{2}", True, 1),
    (r"\boxed{\frac{x+1}{2}}", r"x+\frac{1}{2}", True, 0),
    # Units stay words.
    (r"\boxed{5 cm}", "5", True, 0),
    (r"\boxed{5\text{ cm}}", "5 cm", True, 1),
    (r"\boxed{5 \mathrm{cm}}", "5cm", True, 1),
    (r"\boxed{5 cm}", "5 m", True, 0),
    (r"\boxed{5 million}", "5", True, 0),
    (r"\boxed{5^\circ}", "5", True, 0),
    (r"\boxed{5\pi}", "5", True, 0),
    (r"\boxed{5x}", "5", True, 0),
    (r"\boxed{5}", "5 cm", True, 0),
    ("it is 5 cm", "5", True, 1),
    (r"\boxed{\$5}", "5", True, 1),
    # A percent sign is dropped: 50% is 50 and not a half.
    ("50%", "0.5", True, 0),
    ("50%", "50", True, 1),
    (r"\boxed{50\%}", "50", True, 1),
    (r"\boxed{50 \%}", "0.5", True, 0),
    (r"\boxed{$50\%$}", "50%", True, 1),
    ("50", "50%", True, 1),
    (r"\boxed{\frac{1}{2}\%}", "0.005", True, 0),
    ("#### 12.5% of them", "12.5", True, 1),
    ("0.5", "50%", True, 0),
    # The last number, only of a finished text.
    ("10", "14", True, 0),
    ("5.0", "5", True, 1),
    ("so 18", "18", False, 0),
    ("none", "none", True, 0),
    ("", "5", True, 0),
    ("####", "5", True, 0),
    (r"5 \boxed{ }", "5", True, 1),
]


@pytest.mark.parametrize("completion, answer, finished, score", SCORES)
def test_accuracy_reward(completion, answer, finished, score):
    assert grpo.accuracy_reward([""], [completion], [answer], [finished]) == [score]


def test_accuracy_reward_scores_each_completion_and_takes_other_columns():
    texts = ["so 18", r"so \boxed{18} or 1", "#### 18"]
    answers = ["18", 18, "6 * 3 = 18\n#### 18"]
    assert grpo.accuracy_reward([""] * 3, texts, answers, level=[1] * 3) == [1, 1, 1]
    finished = [False, False, True]
    assert grpo.accuracy_reward([""] * 3, texts, answers, finished) == [0, 1, 1]


@pytest.mark.parametrize(
    "text, expected",
    [
        # the last box
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{a}\{1\}} 7", r"\text{a}\{1\}"),
        (r"#### 5 but \boxed{6}", "6"),
        (r"broken off in 5 \boxed{4", None),
        # the last mark
        ("#### 3 and then #### 1,234", "1,234"),
        ("#### 18 dollars", "18"),
        ("so 5 ####", "5"),
        ("so 5\n#### 18\nThat is 2 more.", "18"),
        # the last number
        ("it costs $80,000.00.", "$80,000.00"),
        ("that is −5", "-5"),
        ("so $10{,}080$", "$10,080"),
        ("7-5", "5"),
        ("5-3=2", "2"),
        ("(pages 3–5).", "5"),
        (r"it is \(-\frac{3}{4}\).", "-3/4"),
        ("it is $.5$.", "$.5"),
        ("<answer>18</answer>", "18"),
        ("48+24 = <<48+24=72>>72 clips.", "72"),
        ("a 50% share", "50"),
        ("- 3", "3"),
        ("no number at all", None),
    ],
)
def test_extract_answer(text, expected):
    assert grpo.extract_answer(text) == expected


SAME = [
    # thousands, currency and punctuation
    ("$80,000", "80000"),
    ("80,000.00", "80000"),
    ("80{,}000", "80000"),
    ("12,345,678", "12345678"),
    ("1{,}234{,}567.5", "2469135/2"),
    (r"10,\!080", "10080"),
    (r"80\,000", "80000"),
    ("(18.),", "18"),
    (r"\$18", "18"),
    ("-$5", "-5"),
    ("€5", "5"),
    ("5 €", "5"),
    ("£1,234.50", "2469/2"),
    # fractions and decimals
    (r"\frac{1}{2}", "0.5"),
    ("1/2", "0.5"),
    (r"\dfrac{1}{2}", "1/2"),
    (r"\tfrac{2}{4}", "1/2"),
    (r"-\frac{1}{2}", "-0.5"),
    (r"\frac{-1}{2}", "-0.5"),
    (".5", "1/2"),
    ("$.5$", "0.5"),
    ("2/4", "1/2"),
    ("3/04", "0.75"),
    ("0.1", "1/10"),
    ("7.0", "7"),
    ("007", "7"),
    ("½", "0.5"),
    ("2½", "2.5"),
    ("１２", "12"),
    ("1 000", "1000"),
    (r"10,\!000", "10000"),
    # percent
    ("50%", "50"),
    (r"50\%", "50"),
    (r"50\,\%", "50"),
    (r"\frac{1}{2}\%", "0.5"),
    # signs
    ("-3", "−3"),
    ("+7", "7"),
    # equations
    ("x = 5", "5"),
    ("x=5", "5"),
    ("X = 5", "5"),
    ("$x = 5$", "5"),
    (r"x = \frac{1}{2}", "0.5"),
    # LaTeX around an answer
    (r"\(7\)", "7"),
    (r"\[7\]", "7"),
    (r"\text{Yes}", "yes"),
    (r"\text{18}", "18"),
    (r"\displaystyle 72", "72"),
    (r"\displaystyle\frac{1}{2}", "0.5"),
    (r"1 \\ 2", r"1\\2"),
    (r"70^{\circ}", r"70^\circ"),
    ("70°", r"70^\circ"),
    ("x^{2}", "x^2"),
    ('"Paris"', "Paris"),
    ("“Paris”", "Paris"),
    # letters
    (r"\text{(A)}", "A"),
    ("(B)", "B"),
    ("b", "B"),
    ("(C).", "c"),
    # words
    ("New  York", "new york"),
    ("yes.", "Yes"),
    ("5 cm", "5 CM"),
    ("7 tenths", "7 Tenths"),
    ("x^2", "X^2"),
    ("1/0", "1/0"),
]

DIFFERENT = [
    # other numbers
    ("1", "11"),
    ("5", "-5"),
    ("80", "80000"),
    ("0.5", "5"),
    ("1/2", "2"),
    ("1/3", "0.333"),
    ("1/0", "1"),
    ("1/0", "0"),
    ("-", "0"),
    # half a number
    ("1,2", "12"),
    ("1{,}2", "12"),
    ("1,23", "123"),
    ("1,2345", "12345"),
    ("1, 234", "1234"),
    ("1 2", "12"),
    ("1 00", "100"),
    ("1 0000", "10000"),
    ("0 500", "500"),
    ("½2", "1/22"),
    (r"70^\circ", "70"),
    ('5"', "5"),
    ("3 4", "3/4"),
    ("1.2.3", "1.2"),
    ("10:30", "10"),
    ("2024-01-07", "7"),
    ("5$3", "53"),
    (r"2\frac{1}{2}", "21/2"),
    (r"\frac{1}{2}3", "1/23"),
    # a number with something else
    ("5x", "5"),
    ("5 x", "5"),
    (r"5\pi", "5"),
    ("5 cm", "5"),
    (r"5\text{ cm}", "5"),
    ("5!", "5"),
    ("3 million", "3"),
    ("5 Million", "5"),
    ("2 dozen", "2"),
    ("7 tenths", "7"),
    ("3 AM", "3 PM"),
    (r"\frac{1}{2}x", "1/2"),
    ("2*500", "2500"),
    ("2^5", "2 5"),
    # signs
    ("±7", "7"),
    ("±7", "-7"),
    ("3-5", "5"),
    ("--5", "5"),
    # several answers
    ("7, or maybe 8", "7"),
    ("18 or 20", "18"),
    ("x=1, y=2", "2"),
    ("(1,2)", "(2,1)"),
    # percent
    ("50%", "0.5"),
    ("0.5%", "0.05"),
    ("1%", "100"),
    # words
    ("x", "y"),
    ("-x", "x"),
    ("A", "B"),
    ("yes", "no"),
    # nothing
    (r"\text{}", "0"),
    ("5)", "("),
    ("()", "$"),
    (".", ","),
]


@pytest.mark.parametrize("answer, gold", SAME)
def test_equal_answers_match(answer, gold):
    assert grpo.answers_match(answer, gold)
    assert grpo.answers_match(gold, answer)


@pytest.mark.parametrize("answer, gold", DIFFERENT)
def test_different_answers_do_not_match(answer, gold):
    assert not grpo.answers_match(answer, gold)
    assert not grpo.answers_match(gold, answer)


@pytest.mark.parametrize(
    "answer, expected",
    [
        (0, "0"),
        (0.5, "0.5"),
        (1e-05, "1e-05"),
        (" New York \n", "New York"),
        (r"\frac{3}{4}", r"\frac{3}{4}"),
        ("2 + 3 = 5\r\n#### 5\r\n", "5"),
        ("2\t3\n#### 5", "5"),
        (r"so \boxed{5}, put it in \boxed{}", "5"),
        (r"so 1 \boxed 5", "5"),
        ("#### 18 dollars", "18"),
    ],
)
def test_gold_answer(answer, expected):
    assert grpo.gold_answer(answer) == expected


@pytest.mark.parametrize(
    "answer",
    # no answer at all, not a string or number, or a box or mark that holds none
    [None, True, [], ["1"], {}, "", " \n", "$", float("nan"), float("inf")]
    + ["####", "#### Step 3\nIt is 5.", r"so \boxed{1", r"\boxed{}", "5 or so " * 30],
)
def test_gold_answer_without_an_answer(answer):
    with pytest.raises(ValueError, match="needed|needs"):
        grpo.gold_answer(answer)


@pytest.mark.parametrize(
    "answer",
    # \frac, \boxed, \text and \right as JSON reads them with one backslash
    ["\frac{3}{4}", " -\frac{3}{4}\n", "\boxed{5}", "\text{yes}", "5\text{ cm}"]
    + ["\right", "so\n#### \frac{3}{4}", "so\n\boxed{5}", "so\n(1\right)", "5\x00"],
)
def test_gold_answer_with_control_characters(answer):
    with pytest.raises(ValueError, match="double the backslashes"):
        grpo.gold_answer(answer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece, count",
    [
        # boxes
        (r"\boxed{", 10_000),
        (r"\boxed{}", 10_000),
        (r"\boxed{\ }", 10_000),
        (r"\boxed", 25_000),
        (r"\boxed{\text{ ", 10_000),
        # marks
        ("#### ", 25_000),
        ("####\n", 25_000),
        ("#### **", 15_000),
        ("#### 1. a\n", 10_000),
        ("#", 50_000),
        # LaTeX
        (r"\frac", 15_000),
        (r"\frac{", 15_000),
        (r"\frac{1", 15_000),
        (r"\frac{1}{", 15_000),
        (r"\text{", 15_000),
        (r"\times 10^", 10_000),
        ("10^{", 15_000),
        ("$\\", 25_000),
        ("{", 50_000),
        ("}", 50_000),
        # numbers
        ("9", 50_000),
        ("1,", 25_000),
        (",111", 15_000),
        ("1/", 25_000),
        ("2 1/", 15_000),
        ("1e", 25_000),
        ("1 ", 25_000),
        (".", 50_000),
        ("-", 50_000),
        ("(", 50_000),
        ("(1,", 15_000),
        # words, letters and space
        ("a=", 25_000),
        ("1=", 25_000),
        ("1a", 25_000),
        ("=", 50_000),
        ("=1a", 15_000),
        (r"\not", 15_000),
        ("1 000 ", 10_000),
        ("100 ", 12_500),
        ("= ", 25_000),
        ("x^", 25_000),
        ("²", 25_000),
        (r"1\,000", 10_000),
        ("½", 25_000),
        ("\u0300\u0327", 25_000),
        ("1 / ", 15_000),
        (r"^{\circ}", 10_000),
        ("A, ", 15_000),
        ("or ", 15_000),
        ("A) ", 15_000),
        ("<", 50_000),
        ("<think>", 10_000),
        ("<think></think>", 10_000),
        (" ", 50_000),
        ("\n", 50_000),
    ],
)
def test_hostile_texts_cost_milliseconds(piece, count):
    text = piece * count
    for completion in (text, "#### " + text, "\\boxed{" + text + "}" * count):
        for answer in ("7", "B"):
            start = time.process_time()
            assert grpo.accuracy_reward([""], [completion], [answer]) == [0.0]
            assert time.process_time() - start < 0.5  # a quadratic search takes minutes
        start = time.process_time()
        grpo.answers_match(completion, completion)
        assert time.process_time() - start < 0.5


def test_a_long_row_of_numbers_costs_milliseconds():
    """It looks like one number in groups of three digits, but ends in another way."""
    start = time.process_time()
    text = "100 " * 25_000 + "100/"
    assert grpo.accuracy_reward([""], [text], ["7"]) == [0.0]
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    "number",
    ["9" * 4300, "9" * 100_000, "0." + "9" * 100_000, "1e999", "1e-999999999"]
    + ["3 \\times 10^{999999999}", "9" * 4300 + "/" + "7" * 4300, "1/" + "9" * 5000],
)
def test_huge_numbers_match_themselves_in_milliseconds(number):
    start = time.process_time()
    assert grpo.answers_match(number, number)
    assert not grpo.answers_match(number, "7")
    assert time.process_time() - start < 0.5


# ------------------------------------------------------------------------------ rewards
@pytest.mark.parametrize(
    "prompt, completion, expected",
    [
        ("Q", "<think>a</think>b", 1.0),
        ("Q", "<think>\na\n</think>\n\nb ", 1.0),
        ("Q<think>", "a</think>b", 1.0),
        ("Q<think>\n", "a</think>b", 1.0),
        ("Q", "a</think>b", 0.0),
        ("Q", "<think>a</think>", 0.0),
        ("Q", "<think>a</think> \n", 0.0),
        ("Q", "<think>a", 0.0),
        ("Q", "x<think>a</think>b", 0.0),
        ("Q", "<think>a</think>b<think>c</think>d", 0.0),
        ("Q<think>", "<think>a</think>b", 0.0),
        ("Q", "", 0.0),
    ],
)
def test_format_reward_wants_one_thought_and_then_an_answer(
    prompt, completion, expected
):
    assert grpo.format_reward([prompt], [completion]) == [expected]


@pytest.mark.parametrize("piece", ["<think>", "<think></think>", "</think>", "\n"])
def test_format_reward_of_hostile_texts_costs_milliseconds(piece):
    start = time.process_time()
    assert grpo.format_reward([""], [piece * 20_000]) == [0.0]
    assert time.process_time() - start < 0.5  # a quadratic search takes minutes


@pytest.mark.parametrize(
    "argument, expected",
    [
        ("accuracy", ("accuracy", 1.0)),
        ("accuracy=2", ("accuracy", 2.0)),
        ("own.py:brief=-0.5", ("own.py:brief", -0.5)),
        ("own.py:brief=.5", ("own.py:brief", 0.5)),
        ("a=1/own.py:brief", ("a=1/own.py:brief", 1.0)),
        ("a=1/own.py:brief=3", ("a=1/own.py:brief", 3.0)),
        ("accuracy=x", ("accuracy=x", 1.0)),
    ],
)
def test_a_reward_may_have_a_weight_behind_it(argument, expected):
    assert grpo.split_weight(argument) == expected


@pytest.fixture
def fresh_imports(tmp_path):
    """The reward files that a test imports from its folder are forgotten after it."""
    names, search_path = set(sys.modules), list(sys.path)
    grpo.import_file.cache_clear()
    yield
    grpo.import_file.cache_clear()
    sys.path[:] = search_path
    for name in set(sys.modules) - names:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


OWN_REWARDS = """
from concurrent.futures import ProcessPoolExecutor

import neighbour


def half_length(text):
    return neighbour.half * len(text)


def brief(completions, **columns):
    return [half_length(text) for text in completions]


def in_processes(completions, **columns):
    with ProcessPoolExecutor(1) as pool:
        return list(pool.map(half_length, completions))


def clears(answer, completion_ids, level, **columns):
    answer.clear()
    for ids in completion_ids:
        ids.clear()
    level[0]["x"] = 9
    return [0.0] * 4


def first(completions, **columns):
    return [0.1, 0.0, 0.1, 0.0]


def second(completions, **columns):
    return [0.2, 0.0, 0.2, 0.0]


def third(completions, **columns):
    return [0.4, 0.7, 0.4, 0.7]


def tenths(completions, **columns):
    return [0.1, None, 0.1, 0.1]
"""


@pytest.fixture
def own_rewards(tmp_path, fresh_imports):
    (tmp_path / "own_rewards.py").write_text(OWN_REWARDS)
    (tmp_path / "neighbour.py").write_text("half = 0.5")
    return f"{tmp_path}/own_rewards.py"


def score_with(specs, **columns):
    """`score` of the texts 2, 3, 2 and 22 with the arguments of --reward."""
    tokenizer = grpo.tiny_model(0)[1]
    texts = ["2<eos>", "3<eos>", "2<eos>", "22<eos>"]
    ids, mask = grpo.pad([tokenizer.encode(text) for text in texts], "right")
    run = SimpleNamespace(
        tokenizer=tokenizer,
        reward_functions=grpo.load_rewards(specs),
        eos_token_ids=[0],
    )
    row = {"prompts": "1+1=", "answer": "2", **columns}
    return grpo.score(run, [row], grpo.Batch(None, None, ids, mask))


def test_rewards_of_a_file_are_weighted_and_added_to_built_in_ones(own_rewards):
    """The file imports its neighbour."""
    columns, scores = score_with([f"{own_rewards}:brief=-2", "accuracy"])
    assert scores[f"rewards/{own_rewards}:brief"].tolist() == [0.5, 0.5, 0.5, 1.0]
    assert scores["rewards/accuracy"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert scores["reward"].tolist() == [0.0, -1.0, 0.0, -2.0]


def test_a_reward_may_change_its_columns_because_they_are_copies(own_rewards):
    columns, scores = score_with([f"{own_rewards}:clears", "accuracy"], level={"x": 1})
    assert columns["answer"] == ["2"] * 4
    assert columns["completion_ids"][3] == [4, 4, 0]
    assert columns["level"] == [{"x": 1}] * 4
    assert scores["reward"].tolist() == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "code",
    ["exit(0)", "def f(completions, **columns):\n    exec('raise SystemExit')"],
    ids=["file", "function"],
)
def test_a_reward_that_calls_exit_does_not_end_the_run_as_finished(
    tmp_path, fresh_imports, code
):
    """Such as a reward that executes completions."""
    (tmp_path / "exits.py").write_text(code)
    with pytest.raises(grpo.Error, match="exits.py.* called exit"):
        score_with([f"{tmp_path}/exits.py:f"])


@pytest.mark.parametrize("place", ["file", "function"])
def test_a_reward_may_switch_gradients_off(tmp_path, fresh_imports, place):
    """For its own model. The policy still needs them."""
    switch = "torch.set_grad_enabled(False)"
    in_file, in_function = (switch, "") if place == "file" else ("", switch)
    code = f"""
import torch
{in_file}
def f(completions, **columns):
    {in_function}
    return [1.0] * len(completions)
"""
    (tmp_path / "gradients.py").write_text(code)
    score_with([f"{tmp_path}/gradients.py:f"])
    assert torch.is_grad_enabled()


def test_a_reward_may_train_a_model_of_its_own(tmp_path, fresh_imports):
    code = """
import torch
model = torch.nn.Linear(1, 1)
def f(completions, **columns):
    model(torch.ones(1)).backward()
    return [1.0] * len(completions)
"""
    (tmp_path / "trains.py").write_text(code)
    _, scores = score_with([f"{tmp_path}/trains.py:f"])
    assert scores["reward"].tolist() == [1.0] * 4


def test_a_reward_file_is_imported_again_only_if_it_was_edited(tmp_path, fresh_imports):
    """As in a notebook, which calls `main` again. Its functions can be pickled."""
    path = tmp_path / "edited.py"
    path.write_text(
        "def f(completions, **columns):\n    return [1.0] * len(completions)"
    )
    first = grpo.load_function(f"{path}:f")
    assert grpo.load_function(f"{path}:f") is first
    path.write_text(
        "def f(completions, **columns):\n    return [22.5] * len(completions)"
    )
    second = grpo.load_function(f"{path}:f")
    assert second([""]) == [22.5]
    assert second.__module__ == "edited"
    assert pickle.loads(pickle.dumps(second)) is second


def test_a_reward_may_use_a_pool_of_processes(own_rewards):
    """Its functions can be pickled, because its file is a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads
        _, scores = score_with([f"{own_rewards}:in_processes"])
    assert scores["reward"].tolist() == [0.5, 0.5, 0.5, 1.0]


@pytest.mark.parametrize("names", [["first", "second", "third"], ["tenths"]])
def test_equal_sums_of_rewards_have_no_advantage(own_rewards, names):
    """0.1 + 0.2 + 0.4 and 0.7, which in float32 give advantages of 0.9; or 0.1 and the
    mean of three, which is a bit more."""
    _, scores = score_with([f"{own_rewards}:{name}" for name in names])
    assert not grpo.group_advantages(scores["reward"], 4).any()


def test_reward_files_of_one_name_are_modules_of_their_own(tmp_path, fresh_imports):
    """Also one whose folder has an equals sign, and one that is called math.py."""
    specs = []
    for i, name in enumerate(["a=1/own.py", "b/own.py", "b/math.py", "b/json.py"]):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def own(**columns):\n    return [{i}]")
        specs.append(f"{path}:own")
    rewards = grpo.load_rewards([f"{spec}=0.5" for spec in specs])
    assert list(rewards) == specs
    for i, (function, weight) in enumerate(rewards.values()):
        assert (function(completions=[""]), weight) == ([i], 0.5)
        own = function.__wrapped__
        assert sys.modules[own.__module__].own is own
    assert sys.modules["math"] is math and sys.modules["json"] is json


def test_a_reward_file_is_imported_once(tmp_path, fresh_imports):
    """A model that it loads is in memory once."""
    path = tmp_path / "own.py"
    path.write_text(
        f"open({str(tmp_path / 'log')!r}, 'a').write('x')\n"
        "def one(**columns): pass\n"
        "def two(**columns): pass\n"
    )
    grpo.load_rewards([f"{path}:one", f"{path}:two"])
    grpo.load_rewards([f"{path}:one"])
    assert (tmp_path / "log").read_text() == "x"


def test_a_reward_that_is_given_twice_is_one_line():
    with pytest.raises(grpo.Error, match="^--reward.*accuracy"):
        grpo.load_rewards(["accuracy", "format", "accuracy=2"])


@pytest.mark.parametrize(
    "spec, message",
    [
        ("fluency", "^no function 'fluency' in accuracy, format$"),
        ("own.py:brief", r"^no function 'brief' in .*own.py$"),
        ("own.py:half", r"^no function 'half' in .*own.py$"),
        ("own.txt:half", r"own.txt is not a Python file$"),
    ],
)
def test_a_reward_that_is_not_there_is_one_line(tmp_path, fresh_imports, spec, message):
    (tmp_path / "own.py").write_text("half = 0.5")
    (tmp_path / "own.txt").write_text("half = 0.5")
    with pytest.raises(grpo.Error, match=message):
        grpo.load_rewards([spec.replace("own", f"{tmp_path}/own")])


@pytest.mark.parametrize(
    "returned, expected",
    [
        ([0.5, 1], [0.5, 1.0]),
        ((True, False), [1.0, 0.0]),
        (np.array([0.1, 1]), [0.1, 1.0]),
        ([np.float64(0.5), np.float32(1)], [0.5, 1.0]),
        ((np.bool_(True), np.int64(3)), [1.0, 3.0]),
        (torch.tensor([0.5, 1], requires_grad=True), [0.5, 1.0]),
        ([torch.tensor(0.5), True], [0.5, 1.0]),
        ([None, 1], [None, 1.0]),
        (np.array([None, True]), [None, 1.0]),
    ],
    ids=["list", "tuple", "array", "numpy-numbers", "numpy-bool", "tensor"]
    + ["list-of-tensors", "unjudged", "unjudged-in-array"],
)
def test_rewards_may_be_numbers_of_python_numpy_or_torch(returned, expected):
    found = grpo.to_floats(returned, 2, "mine")
    assert found == expected
    assert {type(x) for x in found} <= {float, type(None)}


@pytest.mark.parametrize(
    "returned",
    [
        None,
        1.0,
        np.float64(1),
        "10",
        {},
        {"a": 1, "b": 1},
        {0, 1},
        iter([1, 2]),
        (x for x in [0, 1]),
        [],
        [1],
        [1, 2, 3],
        ["1", 0],
        [b"1", 0],
        [np.str_("1"), 0],
        [1, {}],
        [1, print],
        [1, [0]],
        [[1, 2], 0],
        [[1], [1]],
        [1, 1j],
        [math.nan, 1],
        [1, np.inf],
        [10**400, 1],
        np.array([np.nan, 1]),
        np.ones((1, 2)),
        np.ones((2, 2)),
        torch.ones(2, 2),
    ],
    ids=lambda returned: type(returned).__name__,
)
def test_a_reward_that_returns_no_numbers_is_one_line_that_shows_it(returned):
    with pytest.raises(grpo.Error) as error:
        grpo.to_floats(returned, 2, "mine")
    message = str(error.value)
    assert re.fullmatch("mine returned .*, not 2 finite numbers", message)
    assert " ".join(repr(returned).split())[:20] in message
    assert len(message) < 300


def test_an_error_of_a_reward_names_it(own_rewards, tmp_path):
    (tmp_path / "bad.py").write_text("def bad(**columns): return [0]")
    with pytest.raises(grpo.Error, match=r"^reward .*bad.py:bad returned \[0\], not 4"):
        score_with([f"{tmp_path}/bad.py:bad"])


# ------------------------------------------------------------------ process supervision
@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_process_advantages_are_those_of_plain_loops(scale_rewards):
    """Groups of 3 completions with 0 to 3 reasoning steps: several, the same number,
    a single one in the group, and one in each of two."""
    step_rewards = [[0.2, 1.0], [], [0.5, 0.25, 1.0], [1.0, 0.0], [2.0], [0.1, 0.9]]
    step_ends = [[1, 4], [], [0, 2, 3], [0, 4], [2], [1, 2]]
    step_rewards += [[3.0], [], [], [1.0], [0.0], []]
    step_ends += [[2], [], [], [1], [2], []]
    expected = torch.zeros(12, 5)
    for i in range(12):
        start = i - i % 3
        group = [x for rewards in step_rewards[start : start + 3] for x in rewards]
        if len(group) < 2:
            continue  # a single reward equals its mean
        mean = statistics.fmean(group)
        std = statistics.stdev(group) if scale_rewards == "group" else 1.0
        for reward, end in zip(step_rewards[i], step_ends[i]):
            for t in range(end + 1):
                expected[i, t] += (reward - mean) / std
    found = grpo.process_advantages(step_rewards, step_ends, 3, 5, scale_rewards)
    assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_reward_too_many_for_the_reasoning_steps_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        grpo.process_advantages([[1.0, 2.0], [3.0]], [[0], [1, 2]], 2, 3)


# ------------------------------------------------------------------ process supervision
@pytest.mark.parametrize(
    "text, finished, texts, ends",
    [
        ("1+1\n2+2<eos>", True, ["1+1", "2+2"], [3, 7]),
        ("1+1\n2+2", False, ["1+1", "2+2"], [3, 6]),
        ("1+1\n\n2+2\n<eos>", True, ["1+1", "2+2"], [3, 9]),
        ("1+1\n \n", False, ["1+1"], [5]),
        ("\n\n1+1<eos>", True, ["1+1"], [5]),
        (" \n <eos>", True, [], []),
        ("<eos>", True, [], []),
        ("9.\n1+1<eos>", True, ["9.\n1", "+1"], [0, 3]),
        ("<unk>\n2<eos>", True, ["<unk>", "2"], [1, 3]),
    ],
    ids=["two", "cut-off", "blank-inside", "blank-at-the-end", "blank-at-the-start"]
    + ["only-blanks", "only-eos", "break-inside-a-token", "special-token"],
)
def test_reasoning_steps_are_the_lines_that_are_not_blank(text, finished, texts, ends):
    tokenizer = grpo.tiny_model(0)[1]
    tokenizer.add_tokens(["9.\n1"])
    ids = tokenizer.encode(text)
    assert grpo.reasoning_steps(tokenizer, ids, finished) == (texts, ends)


def supervise(step_reward, texts=("1+1\n2<eos>", "2", "3<eos>", "<eos>")):
    """`process_supervision` of two groups of two completions, and its columns."""
    tokenizer = grpo.tiny_model(0)[1]
    ids = [tokenizer.encode(text) for text in texts]
    columns = {
        "completion_ids": ids,
        "finished": [x[-1] == 0 for x in ids],
        "answer": ["2"] * 4,
    }
    config = grpo.Options(num_generations=2)
    found = grpo.process_supervision(step_reward, config, tokenizer, columns, 7)
    return found, columns


def test_a_step_reward_that_calls_exit_does_not_end_the_run_as_finished():
    def exits(**columns):
        raise SystemExit

    with pytest.raises(grpo.Error, match="^--step-reward called exit"):
        supervise(exits)


def test_step_rewards_see_the_reasoning_steps_and_the_columns():
    seen = {}

    def step_reward(**columns):
        seen.update(columns)
        return [np.array([0.0, 1.0]), [2], [1], ()]

    advantages, columns = supervise(step_reward)
    assert seen["steps"] == [["1+1", "2"], ["2"], ["3"], []]
    assert seen["answer"] == ["2"] * 4
    assert seen["finished"] == [True, False, True, True]
    assert columns["step_rewards"] == [[0.0, 1.0], [2.0], [1.0], []]
    # Rewards 0, 1 and 2 of the first group have mean 1 and std 1. The group of a single
    # reasoning step has no advantage. Steps end at tokens 3 and 5, and at 0.
    expected = torch.zeros(4, 7)
    expected[0, :4] = -1.0
    expected[1, :1] = 1.0
    assert_close(advantages, expected)


def test_step_rewards_may_change_their_columns_because_they_are_copies():
    def step_reward(steps, **columns):
        columns["answer"].clear()
        return [[0.0] * len(steps.pop(0)) for _ in range(4)]

    _, columns = supervise(step_reward)
    assert len(columns["steps"]) == len(columns["answer"]) == 4


@pytest.mark.parametrize(
    "returned, message",
    [
        ([[0, 1], [2], [1]], ".*, not 4 lists of numbers"),
        ([[0, 1], [2], [1], [], []], ".*, not 4 lists of numbers"),
        (None, "None, not 4 lists of numbers"),
        (1.0, "1.0, not 4 lists of numbers"),
        ([[0], [2], [1], []], r"\[0\], not 2 finite numbers"),
        ([[0, 1], [2], [1], [1]], r"\[1\], not 0 finite numbers"),
        ([0, 1, 2, 3], "0, not 2 finite numbers"),
        ([[0, math.nan], [2], [1], []], r"\[0, nan\], not 2 finite numbers"),
        ([[0, None], [2], [1], []], "None for a reasoning step"),
    ],
    ids=["fewer", "more", "none", "number", "short", "long", "flat", "nan", "unjudged"],
)
def test_wrong_step_rewards_are_one_line_that_shows_them(returned, message):
    with pytest.raises(grpo.Error, match=f"^--step-reward returned {message}$"):
        supervise(lambda **columns: returned)


# --------------------------------------------------------------------------------- data
ONE_MESSAGE = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    "line, prompt, answer",
    [
        ('{"prompt": "1+1?", "answer": null, "solution": "2"}', "1+1?", "2"),
        (r'{"prompt": "1+1?", "answer": "\\[2\\]"}', "1+1?", r"\[2\]"),
        ('{"question": "1+1?", "answer": "1 and 1\\n#### 1,002"}', "1+1?", "1,002"),
        (r'{"problem": "1+1?", "solution": "\\boxed{\\frac12}"}', "1+1?", r"\frac12"),
        ('{"prompt": "1+1?", "answer": 0}', "1+1?", "0"),
        ('{"prompt": "1+1?", "answer": 0.5}', "1+1?", "0.5"),
        ('{"prompt": "1\u2028?\x85", "answer": "2"}\n\n', "1\u2028?\x85", "2"),
        ('{"prompt": "1+1?", "answer": "2"}\r\n', "1+1?", "2"),
        (json.dumps({"prompt": ONE_MESSAGE, "answer": "2"}), ONE_MESSAGE, "2"),
    ],
    ids=["null", "latex", "gsm8k", "math", "zero", "float", "breaks", "crlf", "chat"],
)
@pytest.mark.parametrize("name", ["data.jsonl", "data"])
def test_data_may_have_the_usual_columns(tmp_path, name, line, prompt, answer):
    path = tmp_path / name
    path.write_bytes(line.encode())
    (row,) = grpo.read_rows(str(path), needs_answers=True)
    assert row["prompt"] == prompt
    assert grpo.gold_answer(row["answer"]) == answer
    assert row["solution"] is not None


def test_answer_and_solution_are_kept_apart_where_there_are_both(tmp_path):
    path = tmp_path / "data"
    path.write_text('{"prompt": "a", "answer": "2", "solution": "1+1=2"}')
    (row,) = grpo.read_rows(str(path), needs_answers=True)
    assert (row["answer"], row["solution"]) == ("2", "1+1=2")


def test_rows_that_lack_a_column_of_another_row_have_none(tmp_path):
    path = tmp_path / "data"
    path.write_text('{"prompt": "a", "level": 5}\n{"prompt": "b", "x": 0}')
    rows = grpo.read_rows(str(path), needs_answers=False)
    assert [(row["level"], row["x"]) for row in rows] == [(5, None), (None, 0)]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": ',
        "5",
        '{"answer": "1"}',
        '{"prompt": "", "answer": "1"}',
        '{"prompt": [], "answer": "1"}',
        '{"prompt": "\\ud83d", "answer": "1"}',
        '{"prompt": [{"role": "user", "content": ["a"]}], "answer": "1"}',
        '{"prompt": [{"role": "human", "content": "a"}], "answer": "1"}',
        '{"prompt": [{"role": "system", "content": "a"}], "answer": "1"}',
        '{"prompt": [{"content": "a"}], "answer": "1"}',
        '{"prompt": {"role": "user", "content": "a"}, "answer": "1"}',
        '{"prompt": "a"}',
        '{"prompt": "a", "answer": []}',
        '{"prompt": "a", "answer": ["1", null]}',
        '{"prompt": "a", "answer": true}',
        '{"prompt": "a", "answer": NaN}',
        '{"prompt": "a", "answer": "####"}',
        '{"prompt": "a", "solution": "so \\\\boxed{1"}',
        json.dumps({"prompt": "a", "answer": "So it is one. " * 20}),
    ],
)
def test_the_first_wrong_line_is_named_before_any_model_is_loaded(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n \t\n' + line)
    config = grpo.Options(data=str(path), model="no/such/model")
    with pytest.raises(grpo.Error, match=r"data.jsonl:3: \w+: .") as error:
        grpo.set_up(config)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'[{"prompt": "a"}]', "one JSON object a line is needed"),
        (b'{"prompt": "caf\xe9"}', "codec can't decode byte 0xe9 in position 15"),
        (b'{"prompt": [{"role": "user", "content": null}]}', "not a message with"),
        (b'{"prompt": {"role": "user", "content": "a"}}', "not a message with"),
    ],
)
def test_the_reason_why_a_line_is_wrong_is_told(tmp_path, line, reason):
    path = tmp_path / "data.jsonl"
    path.write_bytes(line)
    with pytest.raises(grpo.Error, match=f"data.jsonl:1: .*{reason}"):
        grpo.read_rows(str(path), needs_answers=False)


@pytest.mark.parametrize(
    "row",
    [
        r'{"prompt": "a", "answer": "\frac{3}{4}"}',
        r'{"prompt": "What is \frac{3}{4}?", "answer": "1"}',
        r'{"prompt": "What is \beta?", "answer": "1"}',
    ],
)
def test_the_line_with_a_single_backslash_before_latex_is_named(tmp_path, row):
    r"""JSON reads the \f of "\frac" as a form feed."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n' + row)
    with pytest.raises(grpo.Error, match="data.jsonl:2: .*double the backslashes"):
        grpo.read_rows(str(path), needs_answers=True)


def test_answers_are_needed_only_for_accuracy(tmp_path):
    path = tmp_path / "data"
    path.write_text('{"prompt": "a"}\n' * 10)
    config = grpo.Options(data=str(path), reward=["accuracy=2", "format"])
    with pytest.raises(grpo.Error, match="data:1: .*`answer` or `solution` is needed"):
        grpo.load_rows(config)
    rows, eval_rows = grpo.load_rows(grpo.replace(config, reward=["format"]))
    assert (len(rows), len(eval_rows)) == (9, 1)


@pytest.mark.parametrize("text", ["", "\n \n"])
@pytest.mark.parametrize("option", ["data", "eval_data"])
def test_an_empty_data_file_is_named(tmp_path, text, option):
    path = tmp_path / "nothing.jsonl"
    path.write_text(text)
    with pytest.raises(grpo.Error, match="nothing.jsonl has no rows$"):
        grpo.load_rows(grpo.Options(**{option: str(path)}))


def write_numbers(path, size):
    rows = [json.dumps({"prompt": str(i), "answer": i}) for i in range(size)]
    path.write_text("\n".join(rows))
    return str(path)


@pytest.mark.parametrize(
    "size, num_held_out", [(300, 30), (1000, 64), (10, 1), (9, 0), (1, 0)]
)
def test_held_out_rows_are_random_and_never_trained_on(tmp_path, size, num_held_out):
    data = write_numbers(tmp_path / "data", size)
    rows, held_out = grpo.load_rows(grpo.Options(data=data))
    answers = [row["answer"] for row in held_out + rows]
    assert sorted(answers) == list(range(size))
    assert len(held_out) == num_held_out
    if num_held_out > 1:  # all in the first half by chance: less than once in 10**9
        assert max(row["answer"] for row in held_out) >= size / 2
    again = grpo.load_rows(grpo.Options(data=data))
    assert again == (rows, held_out)
    other_rows, _ = grpo.load_rows(grpo.Options(data=data, seed=1))
    assert other_rows != rows or size == 1


def test_with_eval_data_no_row_is_held_out(tmp_path):
    data = write_numbers(tmp_path / "data", 100)
    eval_data = write_numbers(tmp_path / "eval", 70)
    rows, eval_rows = grpo.load_rows(grpo.Options(data=data, eval_data=eval_data))
    assert len(rows) == 100
    assert [row["answer"] for row in eval_rows] == list(range(70))


def test_built_in_sums_have_right_answers():
    for row in grpo.arithmetic("tiny", seed=0):
        a, b = map(int, re.fullmatch(r"(\d+)\+(\d+)=", row["prompt"]).groups())
        assert row["answer"] == a + b
    pattern = r"Calculate (\d+) - (\d+) \* \((\d+) - (\d+)\)\."
    for row in grpo.arithmetic("other", seed=0):
        a, b, c, d = map(int, re.fullmatch(pattern, row["prompt"]).groups())
        assert row["answer"] == row["solution"] == a - b * (c - d)


def test_for_the_tiny_model_5_in_8_solutions_are_wrong():
    rows = grpo.arithmetic("tiny", seed=0)
    wrong = [row for row in rows if row["solution"] != row["answer"]]
    # 500 draws have a standard deviation of 0.022.
    assert len(wrong) / len(rows) == pytest.approx(5 / 8, abs=0.1)


def test_the_tiny_model_has_as_many_weights_as_its_docstring_says():
    model, tokenizer = grpo.tiny_model(0)
    num_weights = sum(weight.numel() for weight in model.parameters())
    assert f"with {num_weights:,} random weights" in grpo.tiny_model.__doc__
    assert len(tokenizer) == model.config.vocab_size
    text = "1+1=2, so (a) is <#>.\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


# ------------------------------------------------------------------------------ prompts
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A turn has no end of its own: the marker of the next role is an EOS token.
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_SYSTEM_ROLE = (
    "{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
USER = {"role": "user", "content": "1+1="}
ASSISTANT = {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "be kind"}


def run_with_template(template, eos="<|im_end|>", post_process=None, **options):
    """What `encode_prompts` needs of a `Run`. post_process: what the tokenizer makes of
    each text $A, such as "<bos> $A"."""
    tokenizer = grpo.tiny_model(0)[1]
    markers = ["<|im_start|>", "<|im_end|>", "<bos>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    tokenizer.chat_template = template
    if post_process:
        tokenizer.backend_tokenizer.post_processor = (
            tokenizers.processors.TemplateProcessing(
                single=post_process, special_tokens=[*tokenizer.get_vocab().items()]
            )
        )
    return SimpleNamespace(
        config=grpo.Options(**options),
        reward_functions={},
        tokenizer=tokenizer,
        eos_token_ids=[tokenizer.convert_tokens_to_ids(eos)],
    )


def encoded(prompt, template, *args, **options):
    """The row that `encode_prompts` makes of a prompt, and its tokens."""
    run = run_with_template(template, *args, **options)
    (row,) = grpo.encode_prompts(run, [{"prompt": prompt, "level": 5}])
    assert row["level"] == 5
    return row, run.tokenizer.convert_ids_to_tokens(row["prompt_ids"])


@pytest.mark.parametrize(
    "prompt, before",
    [
        ("1+1=", "<|im_start|>system\nbe brief<|im_end|>\n"),
        ([USER], "<|im_start|>system\nbe brief<|im_end|>\n"),
        ([SYSTEM, USER], "<|im_start|>system\nbe kind<|im_end|>\n"),
        (
            [USER, ASSISTANT, USER],
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n1+1=<|im_end|>\n"
            "<|im_start|>assistant\n2<|im_end|>\n",
        ),
    ],
    ids=["text", "message", "own-system-prompt", "conversation"],
)
def test_texts_and_chats_become_prompts_by_the_chat_template(prompt, before):
    """The prompt template wraps the last question. The user's row stays as it is."""
    given = copy.deepcopy(prompt)
    options = {"system_prompt": "be brief", "prompt_template": "Add {question}!"}
    row, tokens = encoded(prompt, CHATML, **options)
    last = "<|im_start|>user\nAdd 1+1=!<|im_end|>\n<|im_start|>assistant\n"
    assert row["prompts"] == before + last
    assert tokens[0] == "<|im_start|>"
    assert row["messages"][-1] == {"role": "user", "content": "Add 1+1=!"}
    assert prompt == given and row["prompt"] == given


def test_a_chat_template_with_another_eos_than_the_model_is_not_used():
    """A base model often has the template of another model."""
    row, _ = encoded([USER], CHATML, eos="<eos>", system_prompt="be brief")
    assert row["prompts"] == "be brief\n1+1="
    row, _ = encoded("1+1=", None)
    assert row["prompts"] == "1+1="


def test_a_message_of_the_assistant_at_the_end_is_continued():
    thinking = {"role": "assistant", "content": "let me think.<think>"}
    row, _ = encoded([USER, thinking], CHATML)
    assert row["prompts"] == (
        "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\nlet me think.<think>"
    )
    run = run_with_template(CHATML)
    run.reward_functions = {"accuracy": None}
    (row,) = grpo.encode_prompts(run, [{"prompt": [USER, thinking]}])
    assert "\\boxed{}" in row["messages"][0]["content"]
    assert row["messages"][1] == thinking


def test_the_marker_of_the_next_role_may_end_a_turn():
    row, _ = encoded("1+1=", GLM, eos="<|user|>")
    assert row["prompts"] == "<|user|>\n1+1=<|assistant|>"
    row, _ = encoded("1+1=", GLM, eos="<eos>")
    assert row["prompts"] == "1+1="


def test_what_a_chat_template_raises_is_one_line_with_the_row():
    with pytest.raises(grpo.Error) as error:
        encoded([SYSTEM, USER], NO_SYSTEM_ROLE)
    message = str(error.value)
    assert message.startswith("chat template: System role not supported in [{'role'")
    assert "be kind" in message and "\n" not in message
    row, _ = encoded([USER], NO_SYSTEM_ROLE)
    assert row["prompts"].startswith("<|im_start|>user\n1+1=")


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("in messages", "in messages if m.role != 'system'"),
        CHATML.replace("in messages", "in messages[1:]"),
    ],
    ids=["system", "first"],
)
@pytest.mark.parametrize("content", ["be kind", "1+1"])
def test_a_chat_template_that_leaves_out_a_message_is_refused(template, content):
    """Training would go on without it, and nobody would know."""
    with pytest.raises(grpo.Error) as error:
        encoded("1+1=", template, system_prompt=content)
    message = {"role": "system", "content": content}
    assert str(error.value) == f"chat template: it leaves out {message}"


def test_a_chat_template_may_change_a_message():
    """Some strip it, and some take "/no_think" out of it."""
    changed = "m.content.replace('/no_think', '').strip()"
    template = CHATML.replace("m.content", changed)
    row, _ = encoded("1+1= ", template, system_prompt=" be kind /no_think\n")
    assert row["prompts"].startswith("<|im_start|>system\nbe kind<|im_end|>")
    row, _ = encoded("1+1= ", template, system_prompt="/no_think")
    assert row["prompts"].startswith("<|im_start|>system\n<|im_end|>")


def test_the_eos_may_follow_another_marker_of_the_chat_template():
    """As in Command R7B."""
    template = CHATML.replace("<|im_end|>", "<|assistant|><|im_end|>")
    row, _ = encoded("1+1=", template)
    assert row["prompts"].startswith("<|im_start|>user")


@pytest.mark.slow
def test_a_chat_template_that_is_not_used_is_told(tmp_path, capsys):
    model, tokenizer = grpo.tiny_model(0)
    tokenizer.chat_template = CHATML
    save_model(tmp_path / "model", model, tokenizer)
    new_run(tmp_path / "run", model=tmp_path / "model", max_steps=0, sft_steps=0)
    output = capsys.readouterr().out
    ending = r"'<|im_end|>\n<|im_start|>user\n'"
    message = "the chat template is not used: it ends an answer with"
    assert f"{message} {ending}, not with ['<eos>']" in output


@pytest.mark.parametrize(
    "template, eos, message",
    [
        (None, "<|im_end|>", "the chat template has no 'enable_thinking'"),
        (CHATML, "<|im_end|>", "the chat template has no 'enable_thinking'"),
        (CHATML + "{{ enable_thinking }}", "<eos>", "the chat template is not used"),
    ],
    ids=["none", "misspelt", "not-used"],
)
def test_chat_template_kwargs_that_do_nothing_are_refused(template, eos, message):
    kwargs = '{"enable_thinking": false}'
    with pytest.raises(grpo.Error, match=f"^--chat-template-kwargs: {message}"):
        encoded("1+1=", template, eos, chat_template_kwargs=kwargs)


def test_chat_template_kwargs_reach_the_template():
    template = CHATML + "{% if enable_thinking is false %}<think></think>{% endif %}"
    row, _ = encoded("1+1=", template)
    assert row["prompts"].endswith("assistant\n")
    kwargs = '{"enable_thinking": false}'
    row, _ = encoded("1+1=", template, chat_template_kwargs=kwargs)
    assert row["prompts"].endswith("assistant\n<think></think>")


@pytest.mark.parametrize("kwargs", ['{"x": ', "[1]", "5", "null", ""])
def test_chat_template_kwargs_that_are_no_json_object_are_refused(kwargs):
    with pytest.raises(grpo.Error, match="^--chat-template-kwargs must be a JSON obj"):
        grpo.parse_args(["--chat-template-kwargs", kwargs])


@pytest.mark.parametrize("template", [None, "<bos>" + CHATML], ids=["text", "chat"])
def test_a_prompt_has_one_bos_and_no_eos_at_its_end(template):
    """The tokenizer adds both to each text."""
    _, tokens = encoded("1+1=", template, post_process="<bos> $A <|im_end|>")
    assert tokens[0] == "<bos>"
    assert tokens.count("<bos>") == 1
    assert tokens[-1] != "<|im_end|>"


def test_the_first_prompt_is_shown_as_the_model_sees_it(tmp_path, capsys):
    """Without what its tokenizer lacks: the built-in one has no capital letters."""
    rows = [{"prompt": "Is 1+1=2?", "answer": 1}] * 80
    with mock.patch.object(grpo, "arithmetic", return_value=rows):
        with as_a_process():
            output_dir = str(tmp_path / "run")
            grpo.set_up(
                grpo.Options(prompt_template="{question}", output_dir=output_dir)
            )
    assert "the first prompt: 's 1+1=2'" in capsys.readouterr().out


def test_an_eos_at_the_end_of_a_chat_template_is_kept():
    _, tokens = encoded("1+1=", CHATML + "<|im_end|>")
    assert tokens[-1] == "<|im_end|>"


def test_with_accuracy_the_answer_is_asked_for_in_a_box():
    run = run_with_template(None)
    run.reward_functions = {"format": None, "accuracy": None}
    (row,) = grpo.encode_prompts(run, [{"prompt": "1+1?"}])
    assert row["prompts"].startswith("1+1?\nReason")
    assert "\\boxed{}" in row["prompts"]
    run.config = grpo.Options(prompt_template="Q: {question}")
    (row,) = grpo.encode_prompts(run, [{"prompt": "1+1?"}])
    assert row["prompts"] == "Q: 1+1?"
    run = run_with_template(None)
    run.reward_functions = {"format": None}
    (row,) = grpo.encode_prompts(run, [{"prompt": "1+1?"}])
    assert row["prompts"] == "1+1?"


def test_longer_prompts_and_empty_ones_are_left_out():
    run = run_with_template(None, max_prompt_length=3)
    rows = [{"prompt": "1" * length} for length in (2, 3, 4)]
    found = grpo.encode_prompts(run, rows)
    assert [len(row["prompt_ids"]) for row in found] == [2, 3]
    (eos,) = run.tokenizer.convert_ids_to_tokens(run.eos_token_ids)
    assert grpo.encode_prompts(run, [{"prompt": eos}]) == []


def test_thoughts_in_special_tokens_get_their_format_reward():
    """Some models have <think> and </think> as special tokens."""
    tokenizer = grpo.tiny_model(0)[1]
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<think>", "</think>", "<end>"]}
    )
    texts = ["<think>1+1</think>2<end>", "<think>1+1</think><end>"]
    ids, mask = grpo.pad([tokenizer.encode(text) for text in texts], "right")
    run = SimpleNamespace(
        tokenizer=tokenizer,
        reward_functions=grpo.load_rewards(["format"]),
        eos_token_ids=tokenizer.convert_tokens_to_ids(["<end>"]),
    )
    batch = grpo.Batch(None, None, ids, mask)
    columns, scores = grpo.score(run, [{"prompts": "1+1="}], batch)
    assert columns["completions"] == ["<think>1+1</think>2", "<think>1+1</think>"]
    assert scores["reward"].tolist() == [1.0, 0.0]


def check_limits(model, prompt_ids, eos_token_ids=(1,), **options):
    run = SimpleNamespace(
        config=grpo.Options(**options), policy=model, eos_token_ids=list(eos_token_ids)
    )
    grpo.check_limits(run, [{"prompt_ids": [2, 3]}, {"prompt_ids": prompt_ids}])


def test_prompt_and_completion_may_fill_the_positions_of_the_model_and_no_more():
    model = tiny_model("gpt2", max_position_embeddings=32)
    check_limits(model, [2] * 20, max_completion_length=12)
    with pytest.raises(grpo.Error) as error:
        check_limits(model, [2] * 20, max_completion_length=13)
    assert str(error.value) == (
        "--model: 20 tokens of a prompt and 13 of a completion exceed its 32 "
        "positions; lower --max-prompt-length or --max-completion-length"
    )


def test_a_model_that_states_no_positions_takes_prompts_of_any_length():
    config = BloomConfig(vocab_size=9, hidden_size=8, n_head=2, n_layer=1)
    check_limits(AutoModelForCausalLM.from_config(config), [2] * 10_000)


@pytest.mark.parametrize(
    "prompt_ids, eos_token_ids", [([2, 151, 3], [1]), ([2, 3], [1, 151])]
)
def test_a_token_beyond_the_embedding_is_one_line(prompt_ids, eos_token_ids):
    model = tiny_model(vocab_size=151)
    options = {"max_completion_length": 4}
    check_limits(model, [2, 150], [1, 150], **options)
    with pytest.raises(grpo.Error) as error:
        check_limits(model, prompt_ids, eos_token_ids, **options)
    assert str(error.value) == (
        "--model: token id 151 of the tokenizer, but 151 rows in the embedding"
    )


# ------------------------------------------------------------------------------- models
def save_model(folder, model, tokenizer=None):
    """Saves a model with the built-in tokenizer, whose EOS token has id 0."""
    model.save_pretrained(folder)
    (tokenizer or grpo.tiny_model(0)[1]).save_pretrained(folder)
    return str(folder)


def test_generation_defaults_of_a_folder_do_not_reach_sampling(tmp_path):
    model, _ = grpo.tiny_model(0)
    expected = grpo.greedy_completions(model.eval())
    name = save_model(tmp_path, model)
    hostile = json.dumps(HOSTILE_GENERATION_CONFIG)
    (tmp_path / "generation_config.json").write_text(hostile)
    config = grpo.Options(max_completion_length=8)
    found, _, eos_token_ids, logprobs = grpo.load_checked_model(config, name)
    assert torch.equal(grpo.greedy_completions(found), expected)
    assert logprobs == grpo.shared_logprobs
    assert eos_token_ids == [0, 7]


def test_a_model_whose_folder_lacks_the_tokenizer_is_refused(tmp_path):
    """transformers makes an empty tokenizer, to which every text is unknown."""
    tiny_model("gemma").save_pretrained(tmp_path)
    with pytest.raises(grpo.Error, match="has a tokenizer without tokens"):
        grpo.load_checked_model(grpo.Options(), str(tmp_path))


def test_a_model_without_an_eos_token_is_refused(tmp_path):
    model, tokenizer = grpo.tiny_model(0)
    tokenizer.eos_token = None
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    name = save_model(tmp_path, model, tokenizer)
    with pytest.raises(grpo.Error, match=f"^--model {name}: .* has an EOS token$"):
        grpo.load_checked_model(grpo.Options(), name)


def test_an_adapter_is_refused_with_how_to_merge_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(grpo.Error, match=r"is an adapter\. .*merge_and_unload\(\)"):
        grpo.load_checked_model(grpo.Options(), str(tmp_path))


@pytest.mark.parametrize(
    "error",
    [AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError],
    ids=lambda error: error.__name__,
)
def test_whatever_a_model_raises_in_its_checks_is_one_line(error):
    with mock.patch.object(grpo, "check_sampling", side_effect=error("no\nluck")):
        with pytest.raises(grpo.Error, match="^--model tiny: .*no.*luck") as stop:
            grpo.load_checked_model(grpo.Options(), "tiny")
    assert "\n" not in str(stop.value)


def test_out_of_memory_is_not_blamed_on_the_model():
    error = torch.OutOfMemoryError("CUDA out of memory")
    with mock.patch.object(grpo, "choose_logprobs", side_effect=error):
        with pytest.raises(torch.OutOfMemoryError):
            grpo.load_checked_model(grpo.Options(), "tiny")


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_a_mixture_of_experts_saved_with_router_logits_can_be_trained(tmp_path, kind):
    """With `output_router_logits` a model wants to compute a loss of its own."""
    model = tiny_model(
        kind,
        output_router_logits=True,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    name = save_model(tmp_path, model)
    assert json.loads((tmp_path / "config.json").read_text())["output_router_logits"]
    config = grpo.Options(num_generations=3, prompts_per_step=2, dtype="float32")
    run = grpo.build_run(config, name)
    before = copy.deepcopy(run.policy.state_dict())
    batch = rollout_batch(torch.arange(6.0)[:, None].expand(6, 6))
    metrics = grpo.update(run, batch, learning_rate=1e-3)
    assert metrics["skipped"] == 0
    moved = [x for x, y in run.policy.state_dict().items() if not y.equal(before[x])]
    assert any("experts" in x for x in moved) and any("embed" in x for x in moved)


def test_rewards_are_loaded_before_the_model():
    with mock.patch.object(grpo, "load_model") as load_model:
        for options in ({"reward": ["fluency"]}, {"step_reward": "fluency"}):
            with pytest.raises(grpo.Error, match="no function 'fluency'"):
                grpo.build_run(grpo.Options(**options), "tiny")
    assert not load_model.called


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_a_fixed_copy_of_the_policy_in_the_dtype_of_the_run(dtype):
    run = grpo.build_run(grpo.Options(dtype=dtype), "tiny")
    expected = grpo.tiny_model(0)[0].state_dict()
    dtype = getattr(torch, dtype)
    for model in (run.policy, run.reference):
        assert not model.training
        assert_close(model.state_dict(), {x: y.to(dtype) for x, y in expected.items()})
        # Positions need float32: bfloat16 would round 1 / 10000**(i / 16) by 0.4 %.
        assert {x.dtype for x in model.buffers()} == {torch.float32}
    assert all(x.requires_grad for x in run.policy.parameters())
    assert not any(x.requires_grad for x in run.reference.parameters())
    policy_memory = {x.data_ptr() for x in run.policy.parameters()}
    assert policy_memory.isdisjoint(x.data_ptr() for x in run.reference.parameters())


def test_without_a_kl_term_there_is_no_reference():
    assert grpo.build_run(grpo.Options(beta=0.0), "tiny").reference is None


def test_the_reference_of_lora_is_the_policy_without_its_adapters():
    run = grpo.build_run(grpo.Options(lora_rank=2, dtype="float32"), "tiny")
    batch = ragged_batch()
    expected = grpo.token_logprobs(grpo.tiny_model(0)[0].eval(), *batch)
    trained = [x for x in run.policy.parameters() if x.requires_grad]
    with torch.no_grad():
        for weight in trained:
            weight += 0.1
    assert_close(grpo.token_logprobs(run.reference, *batch), expected)
    moved = grpo.token_logprobs(run.policy, *batch)
    assert (moved - expected).abs().max() > 0.1  # the adapters are on again
    with pytest.raises(ValueError, match="input_ids"):
        run.reference()
    assert_close(grpo.token_logprobs(run.policy, *batch), moved)


class LargestSum(TorchDispatchMode):
    """Records the largest sum of bytes on a device at any time. Tensors that share
    their memory count once."""

    def __init__(self, device):
        super().__init__()
        self.device, self.storages, self.bytes = device, {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.device.type == self.device:
                storage = x.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        for reference in [x for x in self.storages if x.expired()]:
            del self.storages[reference]
        self.bytes = max(self.bytes, sum(self.storages.values()))
        return result


def bytes_to_build(monkeypatch, **options):
    """The largest sum of bytes on the device while `build_run` works, and the `Run`.
    The meta device stands for a GPU: its tensors have a size and no content. Weights
    are not tied, because moving them there, unlike to a GPU, would untie them."""
    model, tokenizer = tiny_model("qwen2-untied"), grpo.tiny_model(0)[1]
    monkeypatch.setattr(grpo, "tiny_model", lambda seed: (model, tokenizer))
    pad = grpo.pad

    def pad_on_cpu(*args):  # for the checks of the model, which is on the CPU
        with mock.patch.object(grpo, "DEVICE", "cpu"):
            return pad(*args)

    monkeypatch.setattr(grpo, "pad", pad_on_cpu)
    monkeypatch.setattr(grpo, "DEVICE", "meta")
    with LargestSum("meta") as largest:
        run = grpo.build_run(grpo.Options(**options), "tiny")
    assert {x.device.type for x in run.policy.parameters()} == {"meta"}
    return largest.bytes, run


def num_bytes(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("dtype, size", [("bfloat16", 2), ("float32", 4)])
def test_with_lora_the_gpu_never_holds_more_than_the_base_in_the_dtype_and_adapters(
    monkeypatch, dtype, size
):
    found, run = bytes_to_build(monkeypatch, dtype=dtype, lora_rank=2)
    adapters = [x for x in run.policy.parameters() if x.requires_grad]
    base = [x for x in run.policy.parameters() if not x.requires_grad]
    assert {x.dtype for x in adapters} == {torch.float32}
    base_bytes = size * sum(x.numel() for x in base)
    buffers = num_bytes(run.policy.buffers())
    assert found == base_bytes + num_bytes(adapters) + buffers


@pytest.mark.parametrize(
    "dtype, beta, bytes_per_weight",
    [
        ("bfloat16", 0.04, 4 + 2 + 2),  # masters, weights and reference
        ("bfloat16", 0.0, 4 + 2),
        ("float32", 0.04, 4 + 4),
        ("float32", 0.0, 4),
    ],
)
def test_the_gpu_never_holds_more_than_what_a_run_keeps(
    monkeypatch, dtype, beta, bytes_per_weight
):
    found, run = bytes_to_build(monkeypatch, dtype=dtype, beta=beta)
    num_weights = sum(x.numel() for x in run.policy.parameters())
    buffers = num_bytes(run.policy.buffers())
    if beta:
        buffers += num_bytes(run.reference.buffers())
    assert found == bytes_per_weight * num_weights + buffers


def test_models_are_sharded_on_the_cpu(monkeypatch):
    """FSDP2 then moves them layer by layer, so that no GPU holds a whole model."""
    devices = []

    def shard(model, dtype, frozen, keep_gathered):
        devices.append({x.device.type for x in model.parameters()})

    monkeypatch.setattr(grpo, "shard", shard)
    bytes_to_build(monkeypatch, beta=0.04)  # a policy and a reference
    assert devices == [{"cpu"}, {"cpu"}]


# ------------------------------------------------------------------------ logs are JSON
def strict_rows(path):
    """The rows of a JSONL file. NaN and Infinity, which are not JSON, are an error."""

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    lines = Path(path).read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_unjudged_completions_are_null_in_the_log(tmp_path, capsys):
    run = SimpleNamespace(config=grpo.Options(output_dir=str(tmp_path)))
    columns = {
        "prompts": ["1+1=", "1+1="],
        "completions": ["2", "3"],
        "reward": [0.5, 0.5],
        "rewards/mine": [0.5, math.nan],
        "tensor": [torch.tensor(1), None],
        "step_rewards": [[0.5], [math.nan, {"deep": math.inf}]],
    }
    grpo.log_completions(run, 7, columns)
    first, second = strict_rows(tmp_path / "completions.jsonl")
    assert first["rewards/mine"] == 0.5
    assert second == {
        "prompts": "1+1=",
        "completions": "3",
        "reward": 0.5,
        "rewards/mine": None,
        "tensor": None,
        "step_rewards": [None, {"deep": None}],
        "step": 7,
    }
    assert "step 7: reward 0.50 for '1+1=' -> '3'" in capsys.readouterr().out


def test_metrics_that_are_not_finite_are_null_in_the_log(tmp_path):
    run = SimpleNamespace(config=grpo.Options(output_dir=str(tmp_path)))
    row = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0, "e": 2}
    grpo.append_rows(run, "metrics.jsonl", [row, {"a": 1}])
    expected = [{"a": None, "b": None, "c": None, "d": 1.0, "e": 2}, {"a": 1}]
    assert strict_rows(tmp_path / "metrics.jsonl") == expected
    assert math.isnan(row["a"])  # the caller's row stays as it is


# -------------------------------------------------------- the whole file, in a notebook
def pasted_file():
    """grpo.py as in a cell of a notebook: its module is __main__ and has no file."""
    module = types.ModuleType("__main__")
    exec(Path(grpo.__file__).read_text(), vars(module))
    return module


def test_the_whole_file_pasted_into_a_notebook_defines_everything_and_runs_nothing(
    monkeypatch,
):
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "kernel.json"])
    module = pasted_file()
    names = {name for name in vars(grpo) if name.isidentifier() and name[0] != "_"}
    assert names <= set(vars(module))


# ---------------------------------------------------------------- rewards of the README
@pytest.fixture(scope="module")
def readme_rewards(tmp_path_factory):
    """The module of rewards that the README shows as rewards.py."""
    path = tmp_path_factory.mktemp("readme") / "rewards.py"
    path.write_text(readme_block("import functools"))
    search_path = list(sys.path)
    yield grpo.import_file(str(path), 0)
    sys.path[:] = search_path


MATH_SAME = [
    (r"\frac{3}{4}", "0.75"),
    (r"\frac12", "0.5"),
    (r"2\frac{1}{2}", "2.5"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\sqrt{8}", r"\[2\sqrt{2}\]"),
    (r"\(\sqrt{8}\)", r"2\sqrt{2}"),
    (r"\[90\]", "90"),
    (r"90^\circ", "90"),
    (r"50\%", "0.5"),
    (r"10,\!080", "10080"),
    (r"$18", "18"),
    ("x=5", "5"),
    (r"x^2+1", r"1+x^2"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("(1,2)", "(1, 2)"),
    ("[1,2)", "[1, 2)"),
    (
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    ),
    (r"5 \text{ cm}", "5"),
    (r"\text{(A)}", "A"),
    (r"\text{yes}", "Yes"),
    ("Evelyn", r"\text{evelyn}"),
]
MATH_DIFFERENT = [
    (r"\frac{3}{4}", "0.74"),
    (r"2\sqrt{2}", r"\sqrt{2}"),
    (r"\{1,2\}", r"\{1,3\}"),
    ("(1,2)", "(2,1)"),
    ("[1,2)", "(1,2)"),
    (
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        r"\begin{pmatrix}2\\1\end{pmatrix}",
    ),
    ("A", "B"),
    ("yes", "no"),
    ("5, 7", "5"),
    ("±7", "7"),
    ("5x", "5"),
    ("7 tenths", "7"),
    ("7, or maybe 8", "7"),
    (r"\foo", r"\bar"),
    (r"\frac", r"\sqrt"),
    # Until math-verify gives up, after 5 seconds.
    pytest.param("9^{9^{9}}", "7", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("answer, gold", SAME + MATH_SAME)
def test_math_takes_answers_that_are_equal_as_latex(readme_rewards, answer, gold):
    completion = "\\boxed{" + answer + "}"
    assert readme_rewards.math([""], [completion], [gold]) == [1.0]


@pytest.mark.parametrize("answer, gold", MATH_DIFFERENT)
def test_math_does_not_take_other_answers(readme_rewards, answer, gold):
    completion = "\\boxed{" + answer + "}"
    assert readme_rewards.math([""], [completion], [gold]) == [0.0]


@pytest.mark.parametrize(
    "completions, gold, finished, expected",
    [
        (["14", "16", "10"], "14", None, [1, 0, 0]),
        (["5", "6", "7", "5", "5.0"], "5", None, [1, 0, 0, 1, 1]),
        (["10", "2", "9", "9"], "9", None, [0, 0, 1, 1]),
        (["", "none", "####", r"5 \boxed{5", "None"], "none", None, [0] * 5),
        (["", "none", "####", r"5 \boxed{5", "None"], "5", None, [0] * 5),
        (["so 18", r"\boxed{18} or 1", "#### 18"], "18", [False] * 3, [0, 1, 1]),
        ([r"18 \boxed{18", "so 18"], "18", [False, True], [0, 1]),
        (["1/2", "7", r"\boxed{7} \boxed{.5}"], "0.5", None, [1, 0, 1]),
        (["So it is $3\\sqrt{7}$.", "So it is 7."], "7", None, [0, 1]),
        (["It is $3\\sqrt{7}$.", "$x$, so 2."], r"\sqrt{63}", [True, True], [1, 0]),
        (["So it is $3\\sqrt{7}$."], r"3\sqrt{7}", [False], [0]),
    ],
)
def test_math_finds_the_answer_where_accuracy_does_or_in_latex(
    readme_rewards, completions, gold, finished, expected
):
    """It takes other columns, too."""
    size = len(completions)
    columns = {"finished": finished, "level": [1] * size}
    found = readme_rewards.math([""] * size, completions, [gold] * size, **columns)
    assert found == expected


def test_the_reward_model_scores_whole_conversations(readme_rewards):
    def scorer(texts, add_special_tokens, batch_size):
        assert not add_special_tokens  # the chat template has them
        return [{"score": len(text)} for text in texts]

    scorer.tokenizer = mock.Mock()
    scorer.tokenizer.apply_chat_template = lambda chat, tokenize: str(chat)
    chats = [[{"role": "user", "content": "1+1="}]] * 2
    texts = ["2", "two"]
    with mock.patch.object(readme_rewards, "load", return_value=scorer) as load:
        found = readme_rewards.reward_model([""] * 2, texts, messages=chats)
    answers = [{"role": "assistant", "content": text} for text in texts]
    assert found == [len(str([*chats[0], answer])) for answer in answers]
    load.assert_called_once_with(
        "text-classification", readme_rewards.REWARD_MODEL, function_to_apply="none"
    )


def test_the_judge_sees_question_and_completion_and_may_not_judge(readme_rewards):
    """A completion for which the reply has no mark from 0 to 10 is not judged."""
    chats = [[{"role": "user", "content": f"{i}+1="}] for i in range(5)]
    replies = ["10", "Mark: 7/10", "100 or so", "0", "good"]
    asked = []

    def chat_model(chats, **options):
        asked.extend(chat[0]["content"] for chat in chats)
        return [[{"generated_text": reply}] for reply in replies]

    with mock.patch.object(readme_rewards, "load", return_value=chat_model):
        marks = readme_rewards.judge([""] * 5, ["<#>", "2", "3", "4", "5"], chats)
    assert marks == [1.0, 0.7, None, 0.0, None]
    assert asked[0].endswith("<#>")
    assert [text[:5] for text in asked] == [f"{i}+1=\n" for i in range(5)]


def test_one_language_is_the_share_of_letters_in_a_script(readme_rewards):
    texts = ["Füge 2 hinzu", "2 + 2", "ab ве"]
    assert readme_rewards.one_language(texts, texts) == [1.0, None, 0.5]
    texts = ["你好 ok"]
    assert readme_rewards.one_language(texts, texts, script="CJK") == [0.5]


bubblewrap = subprocess.run(
    "bwrap --unshare-all --ro-bind / / true", shell=True, capture_output=True
)
needs_bubblewrap = pytest.mark.skipif(
    bubblewrap.returncode != 0, reason="bubblewrap (bwrap) does not work here"
)
ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
ADD_BLOCK = f"Here it is:\n```python\n{ADD}```\nDone."


def test_without_bubblewrap_the_code_reward_ends_the_run(readme_rewards):
    with mock.patch.object(readme_rewards, "passes", return_value=False):
        with pytest.raises(OSError, match="bubblewrap does not work here"):
            readme_rewards.code([""], [ADD_BLOCK], [ADD_TESTS])


@pytest.mark.slow
@needs_bubblewrap
def test_code_is_right_if_its_last_block_passes_the_tests(readme_rewards):
    cases = [
        (ADD_BLOCK, ADD_TESTS, 1.0),
        (f"```python\nfrom __future__ import annotations\n{ADD}```", ADD_TESTS, 1.0),
        ("```python\nx = 1\n```\n" + ADD_BLOCK, ADD_TESTS, 1.0),
        (ADD_BLOCK + "\n```\n3\n```", ADD_TESTS, 1.0),
        (ADD_BLOCK + "\n```python\nx = 1\n```", ADD_TESTS, 0.0),
        (f"```python\n{ADD}", ADD_TESTS, 0.0),  # cut off
        (f"```python\nprint('hi')\n{ADD}```", ADD_TESTS, 1.0),
        ("no code", ADD_TESTS, 0.0),
        (ADD_BLOCK, "assert add(1, 2) == 4", 0.0),
    ]
    completions, tests, expected = map(list, zip(*cases))
    assert readme_rewards.code(completions, completions, tests) == expected


@pytest.mark.slow
@needs_bubblewrap
@pytest.mark.parametrize(
    "program",
    [
        ADD.replace("+", "-"),
        "def add(a, b:\n",
        "while True: pass",
        "import time; time.sleep(100)",
        ADD + "x = bytearray(10**9)",
        ADD + "import sys\nfor _ in range(10**6): sys.stdout.write('x' * 10**4)",
        "raise SystemExit(0)",
        "import os; print('passed', flush=True); os._exit(0)",
        "import os\nfor _ in range(7): os.fork()\nos.setsid()\nwhile True: pass",
        "import os; assert 'HOME' not in os.environ; os._exit(0)",
    ],
    ids=["wrong", "syntax", "endless", "sleep", "memory", "output", "exit", "_exit"]
    + ["forks", "environment"],
)
def test_code_that_does_not_pass_is_stopped(readme_rewards, program):
    start = time.perf_counter()
    assert readme_rewards.passes(ADD + ADD_TESTS)
    assert not readme_rewards.passes(program + "\n" + ADD_TESTS, seconds=1)
    assert time.perf_counter() - start < 10  # 1 second of CPU time, 3 in all


@pytest.mark.slow
@needs_bubblewrap
@pytest.mark.parametrize(
    "program",
    [
        "assert open({file!r}).read() == 'mine'",
        "open({file!r}, 'a').close()",
        "import os; os.kill({pid}, 0)",
        "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
        "import os; assert os.environ['MINE']",
    ],
    ids=["read", "write", "processes", "network", "environment"],
)
def test_code_does_not_reach_the_user(readme_rewards, tmp_path, monkeypatch, program):
    """Each program works outside of the sandbox."""
    monkeypatch.setenv("MINE", "secret")
    (tmp_path / "mine").write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = program.format(file=f"{tmp_path}/mine", pid=os.getpid(), port=port)
        subprocess.run([sys.executable, "-c", program], check=True)
        assert not readme_rewards.passes(program)


@pytest.mark.slow
def test_main_of_the_pasted_file_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "kernel.json"])
    module = pasted_file()
    monkeypatch.setitem(sys.modules, "__main__", module)
    folder = str(tmp_path / "run")
    module.main(["--max-steps", "1", "--sft-steps", "0", "--output-dir", folder])
    assert (tmp_path / "run" / "checkpoint-1").is_dir()
    module.main(["--resume", folder, "--max-steps", "2"])  # in the same process
    assert (tmp_path / "run" / "checkpoint-2").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("gpt2", {"max_position_embeddings": 16}, "exceed its 16 positions"),
        ("qwen2", {"vocab_size": 40}, "but 40 rows in the embedding"),
    ],
    ids=["positions", "embedding"],
)
def test_a_model_that_cannot_run_the_prompts_leaves_no_folder(
    tmp_path, kind, options, message
):
    name = save_model(tmp_path / "model", tiny_model(kind, **options))
    arguments = ["--model", name, "--output-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as stop:
        grpo.main([*arguments, "--max-completion-length", "15", "--max-steps", "1"])
    assert message in stop.value.code
    assert "\n" not in stop.value.code
    assert not (tmp_path / "run").exists()


def test_a_model_that_lacks_a_weight_is_refused(tmp_path):
    """transformers would fill it with random numbers."""
    model, tokenizer = grpo.tiny_model(0)
    weights = model.state_dict()
    del weights["model.norm.weight"], weights["lm_head.weight"]  # the latter is tied
    model.save_pretrained(tmp_path, state_dict=weights)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(grpo.Error, match=r"lacks the weights \['model.norm.weight'\]"):
        grpo.build_run(grpo.Options(), str(tmp_path))


def test_a_model_file_that_is_cut_off_is_one_line(tmp_path):
    model, tokenizer = grpo.tiny_model(0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(grpo.Error, match="^--model .*SafetensorError"):
        grpo.build_run(grpo.Options(), str(tmp_path))


# ----------------------------------------------------------------- masters for bfloat16
def test_masters_are_uniform_in_the_rounding_cells_of_their_weights():
    """Then a tenth of a cell moves a tenth of the weights."""
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(100_000)).bfloat16().float()
    masters = grpo.within_cell(weight)
    assert torch.equal(masters.bfloat16().float(), weight)
    spacing = 2 ** weight.abs().log2().floor() / 128  # to the next bfloat16 number
    for share in (0.1, -0.1):
        moved = (masters + share * spacing).bfloat16().double() - weight
        assert (moved * share).min() == 0
        total = (moved.sum() / spacing.double().sum()).item()
        assert total == pytest.approx(share, rel=0.05)  # 10,000 moves: 1 % of noise


def test_odd_weights_keep_their_bfloat16_value():
    weight = torch.tensor([0.0, -0.0, 1, -1, 0.5, 1.1754943508e-38, 3e38, -256, 1e-40])
    weight = weight.bfloat16().float()
    masters = grpo.within_cell(weight)
    assert torch.equal(masters.bfloat16().float(), weight)
    assert not masters[:2].any()


def test_weights_not_representable_in_bfloat16_are_unchanged():
    """A float32 checkpoint has lower bits of its own."""
    torch.manual_seed(0)
    weight = torch.randn(1000)
    assert torch.equal(grpo.within_cell(weight), weight)


def test_without_the_line_that_the_readme_names_masters_start_at_the_weights():
    readme = Path(grpo.__file__).with_name("README.md").read_text()
    (line,) = re.findall(r"delete the line\s+`(.*?)`", readme)
    source = Path(grpo.__file__).read_text()
    assert source.count(line) == 1
    module = types.ModuleType("exact")
    exec(re.sub(rf".*{re.escape(line)}.*\n", "", source), vars(module))
    weight = torch.randn(100).bfloat16().float()
    assert torch.equal(module.within_cell(weight), weight)
    assert not torch.equal(grpo.within_cell(weight), weight)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("scale", [1e-3, 10.0], ids=["small-grads", "large-grads"])
def test_masters_move_like_float32_weights(scale, max_grad_norm):
    """At a learning rate of 1e-6, where bfloat16 weights alone would stand still."""
    config = grpo.Options(dtype="bfloat16", learning_rate=1e-6)
    model = tiny_model().bfloat16().float()
    visible = copy.deepcopy(model).bfloat16()
    grpo.prepare_policy(model, config)
    adamw = grpo.make_optimizer(model, config)
    assert isinstance(adamw, grpo.MasterAdamW)
    weights = list(model.parameters())
    masters = adamw.param_groups[0]["params"]
    assert_close(model.state_dict(), visible.state_dict(), atol=0, rtol=0)
    assert (masters[0] == weights[0].float()).float().mean() < 0.5
    twins = [x.detach().clone().requires_grad_() for x in masters]
    expected = torch.optim.AdamW(twins, lr=1e-6, weight_decay=0.0)
    for step in range(1, 41):
        for weight, twin in zip(weights, twins):
            twin.grad = step * scale * torch.randn(weight.shape)
            weight.grad = twin.grad.clone()  # float32, the sum of micro-batches
        norm = clip_grad_norm_(twins, max_grad_norm or math.inf)
        assert_close(clip_grad_norm_(weights, max_grad_norm or math.inf), norm)
        expected.step()
        adamw.step()
        model.zero_grad()
    for weight, master, twin in zip(weights, masters, twins):
        # The fused AdamW rounds in another order; 40 updates are up to 4e-5.
        assert_close(master.detach(), twin.detach(), atol=1e-9, rtol=1e-6)
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, master.bfloat16())


# --------------------------------------------------------------------- faster log-probs
@pytest.mark.parametrize("kind", SHARED_KINDS)
@pytest.mark.parametrize(
    "temperature, length", [(1.0, 6), (0.7, 6), (0.7, 2), (0.7, 1)]
)
def test_shared_logprobs_are_those_of_one_pass_a_row(
    kind, temperature, length, monkeypatch
):
    """Also with the output layer in slices, here of 64 tokens of the vocabulary."""
    monkeypatch.setattr(grpo.ChunkedLogprobs, "logits_at_once", 1)
    assert_logprobs_are_those_of_one_pass_a_row(
        grpo.shared_logprobs, kind, temperature, length
    )


def test_shared_logprobs_run_a_repeated_prompt_once():
    model, batch = tiny_model(), with_prompt_for_each_completion(ragged_batch())
    expected = slow_logprobs(model, *batch)
    with mock.patch.object(grpo, "hidden_states", wraps=grpo.hidden_states) as run:
        found = grpo.shared_logprobs(model, *batch)
    assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert [len(call.args[1]) for call in run.call_args_list] == [2, 6]


def test_prompts_padded_on_the_right_have_no_shared_logprobs():
    with pytest.raises(ValueError, match="padded on the left"):
        grpo.shared_logprobs(tiny_model(), *right_padded_batch())


def test_a_model_in_train_mode_has_no_shared_logprobs():
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        grpo.shared_logprobs(tiny_model().train(), *ragged_batch())


def test_chunked_logprobs_are_those_of_the_whole_vocabulary(monkeypatch):
    """Logits are rounded to bfloat16, then divided by the temperature, as in sampling.
    Sums over 200 slices are not rounded."""
    monkeypatch.setattr(grpo.ChunkedLogprobs, "logits_at_once", 1)
    torch.manual_seed(0)
    weight = (1 + 0.1 * torch.randn(12_800, 64)).bfloat16()
    hidden = (0.1 * torch.randn(7, 64)).bfloat16().requires_grad_()
    targets = torch.arange(7)
    found = grpo.ChunkedLogprobs.apply(hidden, weight, targets, 0.7)
    logits = (hidden @ weight.t()).float() / 0.7
    expected = logits.log_softmax(1)[targets, targets]
    assert_close(found, expected, atol=2e-3, rtol=0)
    (grad,) = torch.autograd.grad(found.sum(), hidden)
    (expected_grad,) = torch.autograd.grad(expected.sum(), hidden)
    # bfloat16 has 8 bits; rounding in each slice would be off by far more.
    assert (grad - expected_grad).norm() < 0.04 * expected_grad.norm()


def test_a_certain_token_has_a_log_prob_of_0():
    """The sums that cancel are not rounded to bfloat16 one by one."""
    torch.manual_seed(0)
    weight = torch.randn(64, 32).bfloat16()
    hidden = 3 * weight[:50]
    logp = grpo.ChunkedLogprobs.apply(hidden, weight, torch.arange(50), 1.0)
    assert logp.abs().max() < 1e-3


def test_a_nearly_certain_token_still_has_a_gradient():
    """1 - softmax is computed in float32; in bfloat16 it would be 0."""
    weight = torch.eye(64).bfloat16()
    hidden = (8.5 * weight[:1]).requires_grad_()
    logp = grpo.ChunkedLogprobs.apply(hidden, weight, torch.tensor([0]), 1.0)
    (grad,) = torch.autograd.grad(logp.sum(), hidden)
    expected = 63 / (63 + math.exp(8.5))
    assert grad[0, 0].item() == pytest.approx(expected, rel=0.01)  # bfloat16


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            self.size = max(self.size, result.numel())
        return result


def test_the_logits_of_all_tokens_are_never_in_memory(monkeypatch):
    monkeypatch.setattr(grpo.ChunkedLogprobs, "logits_at_once", 1000)
    model, batch = tiny_model(vocab_size=500), ragged_batch(8)
    assert batch[-1].sum() > 32  # all logits are more than the weights of the layer
    with LargestTensor() as largest:
        grpo.shared_logprobs(model, *batch).sum().backward()
    assert largest.size == 500 * 32


@pytest.mark.parametrize("kind", [*SHARED_KINDS, *PLAIN_KINDS])
def test_choose_logprobs_takes_the_fast_ones_where_they_are_right(kind):
    model = tiny_model(kind)
    if kind == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    with mock.patch.object(grpo, "hidden_states", wraps=grpo.hidden_states) as run:
        chosen = grpo.choose_logprobs(model)
    shapes = [tuple(call.args[1].shape) for call in run.call_args_list]
    assert shapes[0] == (2, 5)
    if kind in SHARED_KINDS:
        assert chosen == grpo.shared_logprobs
        assert shapes[1] == (4, 7)  # each prompt's cache is copied
    else:
        assert chosen == grpo.token_logprobs


@pytest.mark.parametrize("kind", ["rwkv", "recurrent_gemma", "bert", "mamba"])
def test_models_whose_output_depends_on_padding_or_caching_are_refused(kind):
    model = tiny_model(kind)
    with pytest.raises(ValueError, match="padding|cach|train"):
        grpo.check_sampling(model)
        grpo.choose_logprobs(model)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
@pytest.mark.parametrize("name", ["shared_logprobs", "generate"])
def test_choose_logprobs_raises_errors_of_the_device(error, name):
    """They say nothing about the model."""
    with mock.patch.object(grpo, name, side_effect=error("CUDA error")):
        with pytest.raises(error):
            grpo.choose_logprobs(tiny_model())


# --------------------------------------------------------------------------- whole runs
# Options of a run of half a second. Evaluations take the 50 held-out sums.
QUICK = {
    "max_steps": 3,
    "sft_steps": 2,
    "prompts_per_step": 4,
    "num_generations": 4,
    "eval_every": 3,
    "warmup_steps": 2,
}
ALL_SIGNALS = ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"]


def arguments(**options):
    """Command-line arguments: max_steps=3 becomes --max-steps 3."""
    words = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


@contextlib.contextmanager
def as_a_process():
    """Releases locks and forgets reward files, as the end of a process does."""
    path = list(sys.path)
    with mock.patch.object(grpo.atexit, "register") as register:
        try:
            yield
        finally:
            for call in register.call_args_list:
                call.args[0]()
            sys.path[:] = path
            grpo.import_file.cache_clear()


def new_run(folder, **options):
    """Runs the program in this process, with the options of QUICK and these."""
    with as_a_process():
        grpo.main(arguments(**{**QUICK, **options, "output_dir": folder}))


def resume(folder, **options):
    with as_a_process():
        grpo.main(arguments(resume=folder, **options))


def start_process(**options):
    command = [sys.executable, grpo.__file__, *arguments(**options)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def logged(folder, name="metrics.jsonl"):
    """The rows of a log, without times and memory. Empty without a log."""
    path = Path(folder, name)
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        rows.append({x: row[x] for x in row if not x.endswith(("seconds", "gb"))})
    return rows


def training_rows(folder):
    return [row for row in logged(folder) if "loss" in row]


def evaluation_rows(folder):
    return [row for row in logged(folder) if "eval/reward" in row]


def saved_steps(folder):
    names = [x.name for x in folder.iterdir()]
    found = [re.fullmatch(r"checkpoint-(\d+)", name) for name in names]
    return sorted(int(match[1]) for match in found if match)


def outcome_of(folder):
    """What a run comes to: the rows of its metrics, some of which may have been logged
    twice, and the bytes of the weights and of the optimizer in its one checkpoint."""
    (checkpoint,) = Path(folder).glob("checkpoint-*")
    assert (checkpoint / "state" / ".metadata").exists()
    files = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("state/*.distcp")]
    contents = {x.relative_to(checkpoint): x.read_bytes() for x in files}
    return {json.dumps(row) for row in logged(folder)}, contents


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def hash_reward(completions, **columns):
    """A reward that a model without any skill gets some of."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def hash_reward_in(folder):
    """An argument of --reward: `hash_reward` in a file of its own."""
    path = Path(folder, "hash_reward.py")
    path.write_text(
        "def hash_reward(completions, **columns):\n"
        "    return [sum(map(ord, text)) % 7 / 7 for text in completions]\n"
    )
    return f"{path}:hash_reward"


@pytest.fixture(scope="module")
def hashed(tmp_path_factory):
    return hash_reward_in(tmp_path_factory.mktemp("reward"))


def do_at_call(name, number, action):
    """Patches a function of grpo.py: before call `number` it does `action`."""
    calls = iter(range(1, 1_000_000))
    function = getattr(grpo, name)

    def wrapper(*args, **options):
        if next(calls) == number:
            action()
        return function(*args, **options)

    return mock.patch.object(grpo, name, wrapper)


def fail():
    raise OSError("out of coffee")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def two_step_run(tmp_path_factory, hashed):
    """A finished run of two steps, to be copied."""
    folder = tmp_path_factory.mktemp("two-steps") / "run"
    new_run(
        folder,
        reward=hashed,
        sft_steps=0,
        eval_every=0,
        max_steps=2,
        max_completion_length=2,
    )
    return folder


# ----------------------------------------------------------------- logs and evaluations
@pytest.mark.slow
def test_the_main_command_learns_to_add(tmp_path):
    process = start_process(output_dir=tmp_path)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    rewards = [row["reward"] for row in training_rows(tmp_path)]
    assert sum(rewards[:5]) / 5 <= 0.45
    assert sum(rewards[-5:]) / 5 >= 0.90
    assert "450 of 450 prompts fit" in output
    assert re.search(r"the first prompt: '\d+\+\d='", output)
    assert re.search(r"step 1: reward [01].00 for '\d+\+\d=' -> '", output)
    before, *_, after = re.findall(r"step \d+: greedy held-out reward (\S+)", output)
    assert float(before) < 0.5 < 0.7 < float(after)
    closing_line = output.splitlines()[-1]
    assert closing_line == (
        f"greedy held-out reward: {before} at step 0, {after} at step 200; "
        f"all of it is in {tmp_path}"
    )


@pytest.mark.slow
def test_each_step_and_each_seed_draws_other_numbers(tmp_path, hashed, two_step_run):
    """The weights are those of a folder, because `tiny` depends on the seed."""
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": "1+1="}] * 2)
    texts = set()
    for seed in (1, 2):
        new_run(
            tmp_path / str(seed),
            model=two_step_run / "checkpoint-2",
            data=data,
            reward=hashed,
            max_completion_length=8,
            prompts_per_step=1,
            num_generations=8,
            sft_steps=0,
            learning_rate=0,
            max_steps=2,
            eval_every=1,
            seed=seed,
        )
        rows = logged(tmp_path / str(seed), "completions.jsonl")
        for step in (1, 2):
            texts.add(str([x["completions"] for x in rows if x["step"] == step]))
    assert len(rows) == 16 and len(texts) == 4


@pytest.fixture(scope="module")
def logged_run(tmp_path_factory, hashed):
    """A run whose completions have one token: its folder, the calls of `evaluate` and
    those of `sample`."""
    folder = tmp_path_factory.mktemp("logged") / "run"
    with (
        mock.patch.object(grpo, "evaluate", wraps=grpo.evaluate) as evaluate,
        mock.patch.object(grpo, "sample", wraps=grpo.sample) as sample,
    ):
        new_run(
            folder,
            reward=[hashed, "accuracy"],
            temperature=0.7,
            max_completion_length=1,
            sft_steps=0,
            eval_every=2,
        )
    return folder, evaluate.call_args_list, sample.call_args_list


@pytest.mark.slow
def test_logged_scores_are_those_of_the_logged_completions(logged_run, hashed):
    folder, _, _ = logged_run
    completions = logged(folder, "completions.jsonl")
    names = [f"rewards/{hashed}", "rewards/accuracy", "reward"]
    rows = training_rows(folder)
    assert len(rows) == 3
    for row in rows:  # the first, one that is evaluated, the last
        samples = [sample for sample in completions if sample["step"] == row["step"]]
        assert len(samples) == 16
        scores = []
        for sample in samples:
            text = sample["completions"]
            parts = [*hash_reward([text]), float(text == str(sample["answer"]))]
            scores.append([*parts, sum(parts)])
            assert [sample[name] for name in names] == pytest.approx(scores[-1])
        scores = torch.tensor(scores, dtype=torch.float64)
        assert [row[name] for name in names] == pytest.approx(scores.mean(0).tolist())
        stds = scores[:, 2].view(4, 4).std(1)
        assert row["reward_std"] == pytest.approx(stds.mean().item())
        assert row["zero_std_fraction"] == (stds < 1e-9).double().mean() < 1
        num_cut_off = sum(not sample["finished"] for sample in samples)
        assert row["truncated_fraction"] == num_cut_off / 16
        assert row["num_tokens"] == pytest.approx(16 * row["completion_length"])


@pytest.mark.slow
def test_metrics_of_a_run_have_kl_learning_rate_times_and_memory(logged_run):
    folder, _, _ = logged_run
    rows = training_rows(folder)
    rates = [row["learning_rate"] for row in rows]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3])  # warmed up in 2 steps
    for row in rows:
        assert row["loss"] == pytest.approx(0.04 * row["kl"], abs=1e-6)
        assert row["kl_max"] >= row["kl"]
    assert rows[2]["kl_max"] > rows[2]["kl"] > 1e-4
    line = (folder / "metrics.jsonl").read_text().splitlines()[1]
    expected = {"clip_fraction", "grad_norm", "skipped", "entropy", "peak_memory_gb"}
    expected |= {"rollout_seconds", "update_seconds", "step_seconds"}
    assert expected <= json.loads(line).keys()


@pytest.mark.slow
def test_an_evaluation_is_greedy_and_a_training_step_is_not(logged_run, hashed):
    folder, evaluate_calls, sample_calls = logged_run
    assert {call.args[1] for call in sample_calls} == {0, 0.7}  # the temperatures
    run, held_out = evaluate_calls[-1].args
    batch = grpo.rollout(run, held_out, num_generations=1, temperature=0)
    ids = [x[:1] for x in batch.completion_ids if x[0] != 0]  # 0 is EOS
    texts = run.tokenizer.batch_decode(ids)
    mean = sum(hash_reward(texts)) / len(held_out)  # the empty text has 0
    assert evaluation_rows(folder)[-1][f"eval/rewards/{hashed}"] == pytest.approx(mean)


@pytest.mark.slow
def test_evaluations_are_logged_at_the_start_when_due_and_at_the_end(logged_run):
    folder, _, _ = logged_run
    assert [row["step"] for row in evaluation_rows(folder)] == [0, 2, 3]


@pytest.mark.slow
def test_a_learning_rate_that_decays_is_in_the_metrics(tmp_path, hashed):
    new_run(
        tmp_path,
        reward=hashed,
        sft_steps=0,
        eval_every=0,
        max_steps=4,
        warmup_steps=1,
        learning_rate=0.003,
        lr_scheduler_type="linear",
    )
    rates = [row["learning_rate"] for row in training_rows(tmp_path)]
    assert rates == pytest.approx([0.003, 0.003, 0.002, 0.001])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_checkpoint_is_a_model_in_the_dtype_of_the_run(tmp_path, hashed, dtype):
    new_run(tmp_path, reward=hashed, dtype=dtype, eval_every=0)
    assert training_rows(tmp_path)[0]["kl"] == pytest.approx(0, abs=1e-6)
    checkpoint = tmp_path / "checkpoint-3"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.decode(tokenizer.encode("12 + 3\n=")) == "12 + 3\n="
    model, info = AutoModelForCausalLM.from_pretrained(
        checkpoint, output_loading_info=True
    )
    assert {str(x.dtype) for x in model.parameters()} == {f"torch.{dtype}"}
    assert not any(info.values()) and model.config.architectures


@pytest.mark.slow
def test_an_evaluation_leaves_out_unjudged_completions(tmp_path):
    (tmp_path / "own.py").write_text(
        "def rising(completions, **columns):\n"
        "    return [None, *range(1, len(completions))]\n"
        "def nothing(completions, **columns):\n"
        "    return [None] * len(completions)\n"
    )
    rising, nothing = f"{tmp_path}/own.py:rising", f"{tmp_path}/own.py:nothing"
    reward = [f"{rising}=2", nothing]
    new_run(tmp_path / "run", reward=reward, sft_steps=0, max_steps=0)
    (row,) = evaluation_rows(tmp_path / "run")
    # Of the 50 held-out rows 16 are scored at a time: 4 are unjudged, and of the last
    # two one has a reward of 1.
    expected = (3 * sum(range(1, 16)) + 1) / 46
    assert row[f"eval/rewards/{rising}"] == pytest.approx(expected)
    assert row["eval/reward"] == pytest.approx(2 * expected)
    assert row[f"eval/rewards/{nothing}"] is None


@pytest.mark.slow
def test_a_run_without_steps_evaluates_all_rows_of_eval_data(tmp_path, hashed, capsys):
    """And it only evaluates: it takes no step and saves nothing."""
    prompts = [f"{i}+{i}=" for i in range(23)]
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": x} for x in prompts])
    new_run(tmp_path / "run", eval_data=data, reward=hashed, sft_steps=0, max_steps=0)
    model, tokenizer = grpo.tiny_model(0)
    rewards = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        rewards += hash_reward([text])
    (row,) = logged(tmp_path / "run")
    assert row["step"] == 0 and len(set(rewards)) > 1
    assert row["eval/reward"] == pytest.approx(sum(rewards) / 23)
    assert saved_steps(tmp_path / "run") == []
    output = capsys.readouterr().out
    assert "0 of 0 prompts fit, 23 to evaluate" in output
    assert output.splitlines()[-1] == (
        f"greedy held-out reward: {sum(rewards) / 23:.2f} at step 0; "
        f"all of it is in {tmp_path}/run"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_steps, reported", [(9, False), (10, True)], ids=["nine", "ten"]
)
def test_ten_steps_without_learning_signal_are_reported(
    tmp_path, capsys, num_steps, reported
):
    (tmp_path / "own.py").write_text("def one(answer, **_): return [1] * len(answer)")
    new_run(
        tmp_path / "run",
        reward=f"{tmp_path}/own.py:one",
        sft_steps=0,
        eval_every=0,
        max_completion_length=1,
        max_steps=num_steps,
    )
    assert ("no learning signal for 10 steps" in capsys.readouterr().out) == reported


# ------------------------------------------------ process supervision, supervised steps
STEP_REWARDS = """
def lengths(steps, **columns):
    return [[len(step) for step in row] for row in steps]
def outcome(completion_ids, **columns):
    return [sum(ids) % 7 for ids in completion_ids]
def nan(steps, **columns):
    return [[float("nan") for step in row] for row in steps]
def none(steps, **columns):
    return [[None for step in row] for row in steps]
def text(steps, **columns):
    return [["1" for step in row] for row in steps]
def longer(steps, **columns):
    return [[1.0 for step in row] + [1.0] for row in steps]
def fewer_lists(steps, **columns):
    return [[1.0 for step in row] for row in steps[1:]]
def nothing(steps, **columns):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_step_rewards_add_advantages_that_are_normalised_apart(tmp_path, scale_rewards):
    path = tmp_path / "own.py"
    path.write_text(STEP_REWARDS)
    with mock.patch.object(grpo, "update", wraps=grpo.update) as update:
        new_run(
            tmp_path / "run",
            step_reward=f"{path}:lengths",
            reward=f"{path}:outcome",
            scale_rewards=scale_rewards,
            sft_steps=0,
            eval_every=0,
            max_steps=1,
            num_generations=64,
            max_completion_length=3,
        )
    run, batch, _ = update.call_args.args
    rewards, step_ends = [], []
    for ids, mask in zip(batch.completion_ids, batch.mask):
        ids = ids[mask].tolist()
        texts, ends = grpo.reasoning_steps(run.tokenizer, ids, ids[-1] == 0)
        rewards.append([len(text) for text in texts])
        step_ends.append(ends)
    assert max(map(len, step_ends)) > 1
    expected = grpo.process_advantages(rewards, step_ends, 64, 3, scale_rewards)
    outcomes = (batch.completion_ids * batch.mask).sum(1) % 7
    advantages = grpo.group_advantages(outcomes.float(), 64, scale_rewards)
    assert_close(batch.advantages, expected + advantages[:, None])
    (row,) = training_rows(tmp_path / "run")
    flat = [reward for numbers in rewards for reward in numbers]
    assert row["step_reward"] == pytest.approx(sum(flat) / len(flat))
    assert row["reward"] == pytest.approx(outcomes.double().mean().item())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, message",
    [
        ("nan", r"\[nan.*\], not . finite numbers"),
        ("text", r"\['1'.*\], not . finite numbers"),
        ("longer", r"\[1.0.*\], not . finite numbers"),
        ("none", "None for a reasoning step$"),
        ("fewer_lists", r"\[.*, not 16 lists of numbers$"),
        ("nothing", "None, not 16 lists of numbers$"),
    ],
)
def test_wrong_step_rewards_end_the_run_in_one_line(tmp_path, name, message):
    path = tmp_path / "own.py"
    path.write_text(STEP_REWARDS)
    with pytest.raises(SystemExit, match=f"^--step-reward returned {message}"):
        new_run(
            tmp_path / "run", step_reward=f"{path}:{name}", sft_steps=0, eval_every=0
        )


@pytest.mark.slow
def test_supervised_steps_fit_the_solution_and_its_eos(tmp_path):
    """The solutions differ from the answers, and held-out rows are not trained on."""
    rows = [
        {"prompt": f"{i}+1=", "answer": "0", "solution": f"{i}{i}"} for i in range(40)
    ]
    data = write_rows(tmp_path / "data.jsonl", rows)
    losses, trained_on = [], set()
    real_update = grpo.update

    def checked_update(run, batch, learning_rate):
        assert learning_rate == 3e-3
        assert (batch.advantages == 1).all()
        for prompt_ids, prompt_mask, ids, mask in zip(*batch.inputs):
            prompt = run.tokenizer.decode(prompt_ids[prompt_mask])
            trained_on.add(prompt)
            assert run.tokenizer.decode(ids[mask]) == 2 * prompt[:-3] + "<eos>"
        logp = slow_logprobs(run.policy, *batch.inputs)
        losses.append(-logp[batch.mask].mean().item())
        metrics = real_update(run, batch, learning_rate)
        assert metrics["entropy"] == pytest.approx(losses[-1], rel=1e-4)
        return metrics

    with (
        mock.patch.object(grpo, "update", checked_update),
        mock.patch.object(grpo, "evaluate", wraps=grpo.evaluate) as evaluate,
    ):
        # Not even the temperature of the run matters to the supervised steps.
        new_run(tmp_path / "run", data=data, sft_steps=18, max_steps=0, temperature=0.7)
    assert losses[-1] < losses[0] - 1
    held_out = {row["prompt"] for row in evaluate.call_args.args[1]}
    assert len(trained_on) == 36 and len(held_out) == 4
    assert not trained_on & held_out


@pytest.mark.slow
def test_a_supervised_step_that_diverges_ends_the_run_in_one_line(tmp_path):
    with pytest.raises(SystemExit, match="^supervised step 2: the gradient is not fin"):
        new_run(tmp_path, sft_learning_rate=1e30)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, learning_rate", [("float32", 1e-2), ("bfloat16", 1e-6)]
)
def test_lora_trains_nothing_but_the_adapters(tmp_path, hashed, dtype, learning_rate):
    with mock.patch.object(grpo, "save", wraps=grpo.save) as save:
        new_run(
            tmp_path,
            reward=hashed,
            dtype=dtype,
            learning_rate=learning_rate,
            lora_rank=2,
            eval_every=0,
        )
    run, _ = save.call_args.args
    base = weights_of(tmp_path / "sft")
    for name, weight in run.policy.named_parameters():
        assert weight.requires_grad == ("lora_" in name)
        if "lora_B" in name:  # starts at 0, and each step moves it by the rate or less
            assert 0 < weight.abs().median() <= weight.abs().max() < 10 * learning_rate
        elif "lora_" not in name:
            assert torch.equal(weight, base[name.replace(".base_layer", "")])
    rows = training_rows(tmp_path)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert (rows[2]["kl"] > 1e-6) == (learning_rate == 1e-2)


# ------------------------------------------------------------- resuming and checkpoints
SIX_STEPS = {"max_steps": 6, "eval_every": 0, "save_every": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fail_at, options",
    [
        (5, {"num_generations": 8}),
        (5, {"dtype": "bfloat16", "num_generations": 16}),
        (5, {"lora_rank": 2}),
        (4, {"num_iterations": 2, "beta": 0.0, "num_generations": 16}),
        (5, {"num_mini_batches": 2}),
        (2, {"lr_scheduler_type": "linear"}),
    ],
    ids=["float32", "bfloat16", "lora", "iterations", "mini-batches", "no-checkpoint"],
)
def test_a_failed_run_resumes_bit_for_bit(tmp_path, hashed, fail_at, options):
    options = {**SIX_STEPS, "reward": [hashed, "accuracy"], **options}
    new_run(tmp_path / "whole", **options)
    with (
        do_at_call("train_step", fail_at, fail),
        pytest.raises(OSError, match="out of coffee"),
    ):
        new_run(tmp_path / "cut", **options)
    assert saved_steps(tmp_path / "cut") == (
        [] if fail_at == 2 else [fail_at - 1 - (fail_at - 1) % 2]
    )
    resume(tmp_path / "cut")
    assert outcome_of(tmp_path / "cut") == outcome_of(tmp_path / "whole")


def read_whole_lines(path):
    return path.read_text().split("\n")[:-1] if path.exists() else []


@pytest.mark.slow
def test_a_stopped_and_killed_run_ends_as_if_it_had_not_been(tmp_path, hashed):
    options = {**QUICK, "reward": hashed, "max_steps": 32, "eval_every": 2}
    options["save_every"] = 1
    new_run(tmp_path / "whole", **options)
    killed = tmp_path / "killed"
    now = {**options, "output_dir": killed}
    for number, num_rows in ((signal.SIGTERM, 2), (signal.SIGKILL, 6)):
        process = start_process(**now)
        while len(read_whole_lines(killed / "metrics.jsonl")) < num_rows:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        time.sleep(random.SystemRandom().uniform(0, 0.1))
        process.send_signal(number)
        _, errors = process.communicate()
        if number == signal.SIGTERM:
            assert process.returncode == 1
            message = f"stopped; resume with: python grpo.py --resume {killed}"
            assert errors.splitlines()[-1] == message
        now = {"resume": killed}
    assert process.returncode == -signal.SIGKILL
    # What a kill at a worse moment would have left.
    for name in ("metrics.jsonl", "completions.jsonl"):
        with open(killed / name, "a") as log:
            log.write('{"cut off')
    resume(killed)
    assert outcome_of(killed) == outcome_of(tmp_path / "whole")


@pytest.fixture
def copied_run(two_step_run, tmp_path):
    return Path(grpo.shutil.copytree(two_step_run, tmp_path / "copied"))


@pytest.mark.slow
def test_resuming_says_where_it_starts(copied_run, capsys):
    resume(copied_run)
    assert "all 2 steps are done; raise --max-steps" in capsys.readouterr().out
    resume(copied_run, max_steps=4)
    output = capsys.readouterr()
    assert f"resuming from {copied_run}/checkpoint-2" in output.out
    assert " 50%" in output.err  # the bar
    assert saved_steps(copied_run) == [4]


@pytest.mark.slow
def test_resuming_leaves_files_alone_that_the_run_has_not_made(copied_run):
    (copied_run / "checkpoint-2-keep").mkdir()
    (copied_run / "mine.jsonl").write_text("no line break")
    resume(copied_run, max_steps=3)
    assert saved_steps(copied_run) == [3]
    assert (copied_run / "checkpoint-2-keep").exists()
    assert (copied_run / "mine.jsonl").read_text() == "no line break"


@pytest.mark.slow
def test_options_typed_beside_resume_hold_for_the_next_resume(copied_run):
    resume(copied_run, max_steps=3, learning_rate=5e-3, save_total_limit=2)
    resume(copied_run, max_steps=4)
    rates = [row["learning_rate"] for row in training_rows(copied_run)]
    assert rates == pytest.approx([5e-4, 1e-3, 5e-3, 5e-3])
    assert saved_steps(copied_run) == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("limit, kept", [(1, [4]), (2, [3, 4]), (0, [1, 2, 3, 4])])
def test_the_newest_checkpoints_are_kept(tmp_path, limit, kept):
    new_run(
        tmp_path,
        sft_steps=0,
        eval_every=0,
        max_completion_length=1,
        max_steps=4,
        save_every=1,
        save_total_limit=limit,
    )
    assert saved_steps(tmp_path) == kept


@pytest.mark.slow
def test_a_stale_checkpoint_is_deleted_at_the_next_save(copied_run):
    """A kill after a checkpoint was renamed and before the old one is deleted."""
    (copied_run / "checkpoint-1").mkdir()
    resume(copied_run, max_steps=3)
    assert saved_steps(copied_run) == [3]


@pytest.mark.slow
def test_checkpoints_are_ordered_by_number_and_not_by_name(copied_run):
    grpo.shutil.move(copied_run / "checkpoint-2", copied_run / "checkpoint-10")
    (copied_run / "checkpoint-9").mkdir()
    resume(copied_run, max_steps=11)
    assert saved_steps(copied_run) == [11]


@pytest.mark.slow
def test_what_a_kill_left_of_a_save_does_not_get_into_the_next(copied_run):
    (copied_run / "partial").mkdir()
    (copied_run / "partial" / "stale.safetensors").write_text("")
    resume(copied_run, max_steps=3)
    assert not (copied_run / "partial").exists()
    assert not (copied_run / "checkpoint-3" / "stale.safetensors").exists()


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_is_one_line_and_changes_no_option(copied_run):
    other, _ = grpo.tiny_model(0)
    tensors = {f"model.{x}": y[:1] for x, y in other.model.named_parameters()}
    state = {x: {"step": y, "master": y} for x, y in tensors.items()}
    grpo.shutil.rmtree(copied_run / "checkpoint-2" / "state")
    grpo.dcp.save(state, checkpoint_id=copied_run / "checkpoint-2" / "state")
    before = (copied_run / "options.json").read_bytes()
    with pytest.raises(
        SystemExit, match="checkpoint-2 does not fit the model: "
    ) as stop:
        resume(copied_run, max_steps=3, learning_rate=5e-3)
    assert "\n" not in stop.value.code
    assert (copied_run / "options.json").read_bytes() == before


@pytest.mark.slow
def test_a_checkpoint_without_its_state_is_one_line(copied_run):
    (copied_run / "checkpoint-2" / "state" / ".metadata").unlink()
    with pytest.raises(SystemExit, match="checkpoint-2 has no complete state: delete"):
        resume(copied_run, max_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["seed", "lora_rank", "sft_steps"])
def test_an_option_that_would_change_data_or_weights_is_kept(copied_run, name):
    before = (copied_run / "options.json").read_bytes()
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(SystemExit, match=f"^{flag}: a resumed run keeps 0$"):
        resume(copied_run, **{name: 3})
    assert (copied_run / "options.json").read_bytes() == before


@pytest.mark.slow
def test_a_notebook_resumes_a_run_in_the_process_that_started_it(copied_run):
    with as_a_process():  # both runs
        grpo.main(arguments(resume=copied_run, max_steps=3))
        grpo.main(arguments(resume=copied_run, max_steps=4))
    assert saved_steps(copied_run) == [4]


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint(copied_run):
    full = OSError("no space left")
    with (
        mock.patch.object(grpo.dcp, "save", side_effect=full),
        pytest.raises(OSError, match="no space left"),
    ):
        resume(copied_run, max_steps=3)
    assert saved_steps(copied_run) == [2]
    resume(copied_run)
    assert saved_steps(copied_run) == [3]


def files_in(folder):
    return {x: x.read_bytes() for x in folder.rglob("*") if x.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["sft/config.json", "partial/mine", "metrics.jsonl", "options.json"]
)
@pytest.mark.parametrize("options", [{"sft_steps": 0}, {}], ids=["grpo", "supervised"])
def test_a_new_run_changes_no_byte_of_a_folder_with_files(tmp_path, name, options):
    """`sft` may be somebody's model."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    message = f"^{re.escape(str(tmp_path))} is not empty: --resume it or choose another"
    with pytest.raises(SystemExit, match=message):
        new_run(tmp_path, **options)
    assert files_in(tmp_path) == {path: b"mine"}


@pytest.mark.slow
@pytest.mark.parametrize("sft_steps", [0, 2])
def test_a_new_run_changes_no_byte_of_another_run(
    tmp_path, monkeypatch, two_step_run, sft_steps
):
    before = files_in(two_step_run)
    monkeypatch.chdir(two_step_run)
    with pytest.raises(SystemExit, match="is not empty: --resume it or choose another"):
        new_run(".", sft_steps=sft_steps)
    assert files_in(two_step_run) == before


@pytest.mark.slow
def test_only_one_process_writes_to_a_folder_until_it_ends(tmp_path):
    """The second signal ends it, in the middle of a step."""
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "def slow(**columns):\n"
        "    print('called', flush=True)\n"
        "    time.sleep(60)\n"
    )
    folder = tmp_path / "run"
    options = {**QUICK, "eval_every": 0, "sft_steps": 0, "output_dir": folder}
    process = start_process(reward=f"{tmp_path}/slow.py:slow", **options)
    while "called" not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read()
    with pytest.raises(SystemExit, match=f"another process is writing to {folder}"):
        resume(folder, reward="accuracy")
    process.send_signal(signal.SIGTERM)
    while "stopping after this step" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == -signal.SIGTERM
    process.communicate()
    resume(folder, reward="accuracy")
    assert saved_steps(folder) == [3]


# ------------------------------------------------------------------------------ signals
@pytest.fixture
def harmless_signals():
    """Signals that the program does not handle are lost, and do not end the tests."""
    numbers = [getattr(signal, name) for name in ALL_SIGNALS]
    handlers = {x: signal.signal(x, lambda number, frame: None) for x in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_handlers_of_signals_are_restored(harmless_signals):
    numbers = [getattr(signal, name) for name in ALL_SIGNALS]
    before = [signal.getsignal(number) for number in numbers]
    with grpo.heed_signals() as received:
        assert received == []
        assert all(signal.getsignal(number) not in before for number in numbers)
        signal.raise_signal(signal.SIGUSR1)
        assert received == [signal.SIGUSR1]
        # A second one ends the process.
        assert {signal.getsignal(number) for number in numbers} == {signal.SIG_DFL}
    assert [signal.getsignal(number) for number in numbers] == before


def test_an_ignored_signal_stays_ignored(harmless_signals):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with grpo.heed_signals() as received:
        signal.raise_signal(signal.SIGHUP)
        assert received == []
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_signals_are_left_alone_in_a_thread():
    """Python allows handlers in the main thread only. A notebook may use another."""
    found = []

    def heed():
        with grpo.heed_signals() as received:
            found.append(received)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=heed)
    thread.start()
    thread.join()
    assert found == [[]]
    assert signal.getsignal(signal.SIGTERM) == before


def exit_status_of_a_fork(function):
    """Calls a function in a forked process. Returns its `os.waitstatus_to_exitcode`."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(function())
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_worker_that_a_reward_forks_outlives_ctrl_c_but_not_a_termination():
    def worker():
        signal.raise_signal(number)
        return 5

    with grpo.heed_signals() as received:
        number = signal.SIGINT  # a terminal sends it to workers as well
        assert exit_status_of_a_fork(worker) == 5
        number = signal.SIGTERM  # as a process pool does
        assert exit_status_of_a_fork(worker) == -signal.SIGTERM
    assert received == []


def test_a_closed_terminal_is_not_written_to(harmless_signals):
    def on_a_terminal():
        _, terminal = os.openpty()
        os.dup2(terminal, 1)
        with grpo.heed_signals():
            signal.raise_signal(signal.SIGHUP)
        return 3 if os.isatty(1) else 4

    assert exit_status_of_a_fork(on_a_terminal) == 4


STOPPED_RUN = {"max_steps": 4, "eval_every": 2, "max_completion_length": 4}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, hashed):
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    new_run(folder, reward=hashed, **STOPPED_RUN)
    assert [row["step"] for row in evaluation_rows(folder)] == [0, 2, 4]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("signal_name", ALL_SIGNALS)
@pytest.mark.parametrize(
    "function, call, saved, evaluated, message",
    [
        ("update", 1, [], [], "stopped before GRPO began; "),
        ("evaluate", 1, [], [0], "stopped; "),
        ("train_step", 2, [2], [0], "stopped; "),
        ("evaluate", 2, [2], [0, 2], "stopped; "),
    ],
    ids=["supervised-step", "first-evaluation", "training-step", "evaluation"],
)
def test_a_signal_stops_a_run_that_resumes_bit_for_bit(
    harmless_signals,
    tmp_path,
    hashed,
    uninterrupted,
    signal_name,
    function,
    call,
    saved,
    evaluated,
    message,
):
    folder = tmp_path / "stopped"
    number = getattr(signal, signal_name)
    with (
        do_at_call(function, call, lambda: signal.raise_signal(number)),
        pytest.raises(SystemExit) as stop,
    ):
        new_run(folder, reward=hashed, **STOPPED_RUN)
    # A text as the code of a SystemExit is printed, and the exit status is 1.
    hint = f"resume with: python grpo.py --resume {folder}"
    assert stop.value.code == message + hint
    assert saved_steps(folder) == saved
    assert [row["step"] for row in evaluation_rows(folder)] == evaluated
    resume(folder)
    assert outcome_of(folder) == outcome_of(uninterrupted)
    assert [row["step"] for row in evaluation_rows(folder)] == [0, 2, 4]


@pytest.mark.slow
def test_a_signal_in_the_last_step_lets_the_run_end(tmp_path, hashed, uninterrupted):
    with do_at_call("train_step", 4, lambda: signal.raise_signal(signal.SIGTERM)):
        new_run(tmp_path, reward=hashed, **STOPPED_RUN)
    assert outcome_of(tmp_path) == outcome_of(uninterrupted)


@pytest.mark.slow
def test_a_resumed_run_closes_with_its_very_first_evaluation(
    tmp_path, hashed, uninterrupted, capsys
):
    with (
        do_at_call("train_step", 2, lambda: signal.raise_signal(signal.SIGTERM)),
        pytest.raises(SystemExit),
    ):
        new_run(tmp_path, reward=hashed, **STOPPED_RUN)
    assert "held-out reward:" not in capsys.readouterr().out
    resume(tmp_path)
    first, _, last = [row["eval/reward"] for row in evaluation_rows(uninterrupted)]
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"greedy held-out reward: {first:.2f} at step 0, {last:.2f} at step 4; "
        f"all of it is in {tmp_path}"
    )


# ----------------------------------------------------------------------------- trackers
def fake_tracker(name):
    """A module with the interface of wandb and trackio that notes its calls."""
    module = mock.MagicMock(spec=types.ModuleType(name))
    module.attach_mock(mock.MagicMock(), "init")
    module.attach_mock(mock.MagicMock(), "log")
    module.attach_mock(mock.MagicMock(), "finish")
    return module


def reported(log):
    """{step: names of the metrics reported} of the calls of a function `log`."""
    steps = {}
    for call in log.call_args_list:
        metrics, step = call.args
        steps[step] = steps.get(step, set()) | set(metrics)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_has_the_same_name_in_a_tracker(tmp_path, monkeypatch, name):
    package = fake_tracker(name)
    monkeypatch.setitem(sys.modules, name, package)
    options = {"sft_steps": 0, "max_steps": 2, "eval_every": 2, "run_name": "sums"}
    with mock.patch.dict(os.environ):
        os.environ.pop("WANDB_RUN_ID", None)
        new_run(tmp_path, report_to=name, max_completion_length=1, **options)
        assert os.environ["WANDB_RUN_ID"] == "sums"
    steps = reported(package.log)
    assert sorted(steps) == [0, 1, 2]
    assert "eval/reward" in steps[0] and "loss" not in steps[0]
    assert "kl_max" in steps[1] and "eval/reward" not in steps[1]
    assert {"loss", "eval/reward"} <= steps[2]
    package.finish.assert_called_once_with()
    package.log.reset_mock()
    with mock.patch.dict(os.environ):
        os.environ.pop("WANDB_RUN_ID", None)
        resume(tmp_path, max_steps=3)
        assert os.environ["WANDB_RUN_ID"] == "sums"
    assert sorted(reported(package.log)) == [3]
    for call in package.init.call_args_list:
        assert call.kwargs["name"] == "sums"
        assert call.kwargs["resume"] == "allow"
        assert call.kwargs["config"]["num_generations"] == 4
    assert package.init.call_count == package.finish.call_count == 2


@pytest.mark.slow
def test_a_second_run_in_a_process_has_an_id_of_its_own(tmp_path, monkeypatch):
    """wandb continues a log by this id."""
    package = fake_tracker("wandb")
    monkeypatch.setitem(sys.modules, "wandb", package)
    ids = []
    package.init.side_effect = lambda **_: ids.append(os.environ["WANDB_RUN_ID"])
    options = {"sft_steps": 0, "max_steps": 0, "eval_every": 0, "report_to": "wandb"}
    with mock.patch.dict(os.environ):
        new_run(tmp_path / "first", run_name="first", **options)
        new_run(tmp_path / "second", run_name="second", **options)
    assert ids == ["first", "second"]


@pytest.mark.slow
def test_tensorboard_gets_each_metric_and_a_resumed_run_the_same_log(
    tmp_path, monkeypatch
):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = mock.MagicMock()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    add_scalar = module.SummaryWriter.return_value.__enter__.return_value.add_scalar
    options = {"sft_steps": 0, "max_steps": 1, "eval_every": 1}
    new_run(tmp_path, report_to="tensorboard", max_completion_length=1, **options)
    calls = {call.args for call in add_scalar.call_args_list}
    for row in logged(tmp_path):
        for name in {"eval/reward", "loss", "kl_max"} & row.keys():
            assert (name, row[name], row["step"]) in calls
    resume(tmp_path, max_steps=2)
    names = {call.args[0] for call in add_scalar.call_args_list if call.args[2] == 2}
    assert {"eval/reward", "loss"} <= names
    assert module.SummaryWriter.call_args_list == 2 * [mock.call(str(tmp_path))]


@pytest.mark.slow
def test_a_tracker_is_finished_when_a_run_fails(tmp_path, monkeypatch):
    package = fake_tracker("wandb")
    monkeypatch.setitem(sys.modules, "wandb", package)
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(grpo, "train_step", side_effect=OSError("out of coffee")),
        pytest.raises(OSError, match="out of coffee"),
    ):
        new_run(tmp_path, report_to="wandb", sft_steps=0, eval_every=0)
    package.finish.assert_called_once_with()


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_only_the_first_rank_reports_to_a_tracker(tmp_path, monkeypatch, name):
    package = fake_tracker(name)
    package.SummaryWriter = mock.MagicMock()
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", package)
    monkeypatch.setattr(grpo, "RANK", 1)
    config = grpo.Options(report_to=name, output_dir=str(tmp_path))
    with mock.patch.dict(os.environ), grpo.tracker(config) as report:
        report({"loss": 1.0}, 1)
    assert package.init.call_count == package.SummaryWriter.call_count == 0
    assert package.log.call_count == 0


# ---------------------------------------------------------------------- one-line errors
@pytest.mark.parametrize(
    "options, package",
    [
        ({"report_to": "wandb"}, "wandb"),
        ({"report_to": "trackio"}, "trackio"),
        ({"report_to": "tensorboard"}, "tensorboard"),
        ({"lora_rank": 2}, "peft"),
    ],
    ids=["wandb", "trackio", "tensorboard", "peft"],
)
def test_a_missing_package_is_one_line_before_the_supervised_steps(
    tmp_path, monkeypatch, options, package
):
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with (
        mock.patch.object(grpo, "load_model") as load_model,
        pytest.raises(SystemExit) as stop,
    ):
        new_run(tmp_path / "run", **options)
    assert stop.value.code.endswith(f"(pip install {package})")
    assert "\n" not in stop.value.code
    assert not load_model.called
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": "no/such/folder"}, "no/such/folder"),
        ({"data": "missing.jsonl"}, "missing.jsonl"),
        ({"eval_data": "missing.jsonl"}, "missing.jsonl"),
        ({"data": "empty.jsonl"}, "^empty.jsonl has no rows"),
        ({"data": "table.parquet"}, "^table.parquet:1: "),
        (
            {"data": "questions.jsonl"},
            "^questions.jsonl:1: .*`answer` or `solution` is",
        ),
        (
            {"data": "questions.jsonl", "reward": "format", "sft_steps": 1},
            "^--sft-steps: only 0 rows have a solution that fits",
        ),
        (
            {"eval_data": "long.jsonl"},
            "^--eval-data: 1 prompts exceed --max-prompt-len",
        ),
        ({"output_dir": "/proc/nowhere"}, "/proc/nowhere"),
        ({"output_dir": "theirs"}, "^theirs is not empty"),
        ({"resume": "none"}, "none/options.json"),
        ({"resume": "theirs"}, "^theirs/options.json does not hold the options of"),
        ({"resume": "theirs", "output_dir": "run"}, "^--output-dir: a resumed run"),
        ({"reward": ["accuracy", "=0.2"]}, "no function ''"),
        ({"reward": "acuracy"}, "no function 'acuracy' in accuracy, format"),
        (
            {"reward": "accuracy=much"},
            "no function 'accuracy=much' in accuracy, format",
        ),
        ({"reward": "missing.py:accuracy"}, "missing.py"),
        ({"reward": "own.py:f=nan"}, "no function 'f=nan' in own.py"),
        ({"reward": "needs.py:f"}, r"\(pip install no_such_package\)$"),
        ({"step_reward": "own.py:g"}, "no function 'g' in own.py"),
        ({"prompt_template": "1+1="}, "^--prompt-template must contain {question}"),
        (
            {"chat_template_kwargs": "{"},
            "^--chat-template-kwargs must be a JSON object",
        ),
        (
            {"max_prompt_length": 2},
            "^--prompts-per-step: only 0 of 450 prompts fit into",
        ),
        (
            {"prompts_per_step": 5000},
            "^--prompts-per-step: only 450 of 450 prompts fit",
        ),
        ({"num_mini_batches": 3}, "^--num-mini-batches must divide the 4 prompts"),
        ({"learning_rate": "nan"}, "^--learning-rate must be finite and at least 0"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_leaves_no_folder(
    tmp_path, monkeypatch, options, message
):
    monkeypatch.chdir(tmp_path)
    Path("theirs").mkdir()
    Path("theirs/options.json").write_text("{}")
    Path("own.py").write_text("f = print")
    Path("needs.py").write_text("import no_such_package.models")
    Path("empty.jsonl").write_text("\n")
    write_rows(Path("questions.jsonl"), [{"prompt": "1+1="}] * 100)
    write_rows(Path("long.jsonl"), [{"prompt": "1" * 600, "answer": 1}])
    Path("table.parquet").write_bytes(b"PAR1\x15\x04\xff" * 1000)
    if "resume" not in options:
        options = {**QUICK, "sft_steps": 0, "output_dir": "run", **options}
    with as_a_process(), pytest.raises(SystemExit) as stop:
        grpo.main(arguments(**options))
    assert re.search(message, stop.value.code)
    assert "\n" not in stop.value.code
    assert Path("theirs/options.json").read_text() == "{}"
    assert not Path("run").exists()


@pytest.mark.slow
def test_a_wrong_reward_ends_the_run_in_one_line(tmp_path):
    (tmp_path / "own.py").write_text("def f(**columns): pass")
    message = "own.py:f returned None, not 16 finite numbers$"
    with pytest.raises(SystemExit, match=message):
        new_run(tmp_path / "run", reward=f"{tmp_path}/own.py:f", sft_steps=0)


@pytest.mark.slow
@pytest.mark.parametrize("error", ["OSError", "ImportError", "ValueError"])
def test_an_exception_in_a_reward_keeps_its_traceback(tmp_path, error):
    path = tmp_path / "own.py"
    path.write_text(f"def f(**columns): raise {error}('out of coffee')")
    with pytest.raises(Exception, match="^out of coffee$") as raised:
        new_run(tmp_path / "run", reward=f"{path}:f", sft_steps=0)
    assert raised.typename == error
    assert raised.traceback[-1].path == path


@pytest.mark.slow
@pytest.mark.parametrize("function", ["train_step", "load_model"])
def test_out_of_memory_is_one_line_that_names_the_options_to_lower(tmp_path, function):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    with (
        mock.patch.object(grpo, function, side_effect=error),
        pytest.raises(SystemExit) as stop,
    ):
        new_run(tmp_path, sft_steps=0, eval_every=0)
    assert stop.value.code.endswith("out of memory. Tried to allocate 20 GiB")
    assert "--micro-batch-size" in stop.value.code
    assert "--max-completion-length" in stop.value.code
    assert "\n" not in stop.value.code


# ------------------------------------------------------------------------ several ranks
def test_each_rank_trains_on_rows_of_its_own(monkeypatch):
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    shares = []
    for rank in (0, 1):
        monkeypatch.setattr(grpo, "RANK", rank)
        shares.append(grpo.share_of_rank(list("abcde")))
    assert shares == [["a", "c", "e"], ["b", "d"]]


def test_metrics_are_averaged_over_ranks_except_kl_max_the_maximum(monkeypatch):
    ranks = [{"kl": 1.0, "kl_max": 5.0}, {"kl": 2.0, "kl_max": 3.0}]
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    monkeypatch.setattr(grpo, "all_gather", lambda metrics: ranks)
    assert grpo.average_over_ranks(ranks[0]) == {"kl": 1.5, "kl_max": 5.0}


def test_a_later_rank_prints_its_error_after_the_first_has_had_time_to(
    monkeypatch, capsys
):
    """torchrun ends it while it waits if the first rank has failed as well."""
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    monkeypatch.setattr(grpo, "RANK", 1)
    printed_early = []

    def sleep(seconds):
        printed_early.append(capsys.readouterr().err)
        assert seconds >= 1

    with (
        mock.patch.object(time, "sleep", sleep),
        mock.patch.object(os, "_exit", sys.exit),
        pytest.raises(SystemExit, match="^1$"),
    ):
        resume("no/such/folder")
    assert printed_early == [""]
    assert "no/such/folder/options.json" in capsys.readouterr().err


# Log-probs and options of the updates whose gradients are compared.
UPDATES = [
    (grpo.shared_logprobs, {}),
    (grpo.shared_logprobs, {"loss_type": "dapo"}),
    (
        grpo.shared_logprobs,
        {"loss_type": "dr_grpo", "importance_sampling_level": "sequence"},
    ),
    (grpo.shared_logprobs, {"beta": 0.0}),
    (grpo.token_logprobs, {}),
    (
        grpo.shared_logprobs,
        {"loss_type": "dapo", "num_mini_batches": 2, "num_iterations": 2},
    ),
]
# The lengths of the completions of four prompts. Of two ranks the first has the prompts
# 0 and 2, and the second the prompts 1 and 3.
LENGTHS = [[6, 5, 6, 3], [1, 1, 1, 1], [6, 6, 2, 4], [1, 1, 1, 1]]


def run_of_ranks(logprobs=grpo.shared_logprobs, **options):
    """A `Run` of the built-in model, sharded if there are several ranks."""
    config = grpo.Options(prompts_per_step=4, micro_batch_size=3, **options)
    policy, tokenizer = grpo.tiny_model(0)
    other, _ = grpo.tiny_model(1)
    reference = grpo.copy_reference(other.eval(), config)
    grpo.prepare_policy(policy.eval(), config)
    return grpo.Run(
        config=config,
        policy=policy,
        tokenizer=tokenizer,
        eos_token_ids=[0],
        optimizer=grpo.make_optimizer(policy, config),
        reward_functions={},
        reference=reference,
        logprobs=logprobs,
    )


def gradients_of_an_update(logprobs, options):
    """The gradients at each optimizer step of an update on 4 prompts, of which this
    rank has a share, and the metrics."""
    run = run_of_ranks(logprobs, dtype="float32", **options)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 47, (4, 4, 6), generator=generator)
    advantages = torch.randn(4, 4, 1, generator=generator).expand(4, 4, 6)
    mask = torch.arange(6) < torch.tensor(LENGTHS)[:, :, None]
    prompt_ids = ids[:, :1].expand(4, 4, 6)
    prompt_mask = torch.arange(6) > torch.arange(4)[:, None]  # 5 to 2 tokens
    prompt_mask = prompt_mask[:, None].expand(4, 4, 6)
    share = slice(grpo.RANK, None, grpo.WORLD_SIZE)
    columns = [prompt_ids, prompt_mask, ids, mask, advantages]
    batch = grpo.Batch(*[column[share].flatten(0, 1) for column in columns])
    gradients = []

    def clip(weights, max_norm):
        weights = list(weights)
        for weight in weights:
            whole = getattr(weight.grad, "full_tensor", weight.grad.clone)()
            gradients.append(whole)
        return clip_grad_norm_(weights, max_norm)

    with mock.patch.object(grpo, "clip_grad_norm_", clip):
        metrics = grpo.update(run, batch, learning_rate=1e-3)
    num_weights = len(list(run.policy.parameters()))
    total_norm = get_total_norm(gradients[-num_weights:]).item()
    assert metrics["grad_norm"] == pytest.approx(total_norm, rel=1e-5)
    return gradients, grpo.average_over_ranks(metrics)


def share_of_masters_off_the_grid():
    """How many of the float32 numbers that the optimizer updates are no bfloat16
    numbers, for a model whose weights are."""
    real_model = grpo.tiny_model

    def rounded_model(seed):
        model, tokenizer = real_model(seed)
        return model.bfloat16().float(), tokenizer

    with mock.patch.object(grpo, "tiny_model", rounded_model):
        run = run_of_ranks(dtype="bfloat16")
    masters = run.optimizer.param_groups[0]["params"]
    moved = [(x != x.bfloat16()).full_tensor().flatten() for x in masters]
    return torch.cat(moved).float().mean().item()


def exit_status(function, folder, **options):
    """The exit status of `new_run` or `resume`. With several ranks `grpo.main` ends
    the process; here it goes on."""
    with (
        mock.patch.object(os, "_exit", sys.exit),
        mock.patch.object(time, "sleep"),  # as that of a later rank with an error
    ):
        try:
            function(folder, **options)
        except SystemExit as stop:
            return stop.code


def restore_after_sampling(run, real_restore=grpo.restore):
    """On a GPU a check gathers the weights before a checkpoint replaces the shards."""
    grpo.greedy_completions(run.policy)
    return real_restore(run)


def options_of_ranks(folder):
    return {
        **SIX_STEPS,
        "dtype": "bfloat16",
        "data": f"{folder}/data.jsonl",
        "prompts_per_step": 2,
        "reward": [hash_reward_in(folder), "accuracy"],
    }


def options_of_an_evaluation(folder):
    return {
        "eval_data": f"{folder}/five.jsonl",
        "reward": hash_reward_in(folder),
        "sft_steps": 0,
        "max_steps": 0,
        "dtype": "float32",
    }


def program_of_each_rank(folder):
    """torchrun runs this on two ranks. The tests below look at what it leaves."""
    grpo.join_ranks()
    grpo.join_ranks = lambda: None
    gradients = [gradients_of_an_update(*update) for update in UPDATES]
    off_grid = share_of_masters_off_the_grid()
    options = options_of_ranks(folder)
    statuses = {}
    with mock.patch.object(grpo, "log_completions", wraps=grpo.log_completions) as log:
        statuses["whole"] = exit_status(new_run, folder / "whole", **options)
    completions = log.call_args_list[0].args[2]["completions"]
    stop = contextlib.nullcontext()
    if grpo.RANK == 1:
        stop = do_at_call("train_step", 3, lambda: signal.raise_signal(signal.SIGTERM))
    with stop:
        statuses["stopped"] = exit_status(new_run, folder / "stopped", **options)
    grpo.all_gather(None)  # wait until the first rank has deleted the older one
    steps_when_stopped = saved_steps(folder / "stopped")
    with mock.patch.object(grpo, "restore", restore_after_sampling):
        statuses["resumed"] = exit_status(resume, folder / "stopped")
    statuses["one"] = exit_status(resume, folder / "one", max_steps=4)
    options.update(lora_rank=2, max_steps=2)
    statuses["lora"] = exit_status(new_run, folder / "lora", **options)
    # Without --output-dir each rank has a default of its own.
    os.chdir(folder)
    words = {**QUICK, **options_of_an_evaluation(folder)}
    statuses["evaluated"] = exit_status(lambda _: grpo.main(arguments(**words)), None)
    found = {
        "gradients": gradients,
        "off_grid": off_grid,
        "statuses": statuses,
        "completions": completions,
        "steps_when_stopped": steps_when_stopped,
    }
    torch.save(found, folder / f"rank{grpo.RANK}.pt")
    grpo.all_gather(None)  # wait for the other rank
    resume(folder / "nothing")  # ends both with an error


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The folder in which two ranks ran `program_of_each_rank`, and their errors."""
    folder = tmp_path_factory.mktemp("ranks")
    row = {"prompt": "1+1=", "answer": 2, "solution": "1234"}
    write_rows(folder / "data.jsonl", [row] * 9)
    write_rows(folder / "five.jsonl", [{"prompt": f"{i}+1="} for i in range(5)])
    new_run(folder / "one", **{**options_of_ranks(folder), "max_steps": 2})
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    result = subprocess.run(
        [sys.executable, *torchrun, __file__, folder],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert (folder / "rank0.pt").exists(), result.stderr
    assert result.returncode == 1
    return folder, result.stdout, result.stderr


def found_by_rank(two_ranks, name):
    folder, _, _ = two_ranks
    return [torch.load(folder / f"rank{rank}.pt")[name] for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(UPDATES)))
def test_gradients_and_metrics_of_two_ranks_are_those_of_one(two_ranks, case):
    expected = gradients_of_an_update(*UPDATES[case])
    for found in found_by_rank(two_ranks, "gradients"):
        # Sums in another order, in float32; they add up to about 1.
        assert_close(found[case], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_masters_of_two_ranks_start_within_the_rounding_cells(two_ranks):
    assert min(found_by_rank(two_ranks, "off_grid")) > 0.5


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_with_exit_status_1(two_ranks):
    folder, output, _ = two_ranks
    for statuses in found_by_rank(two_ranks, "statuses"):
        assert statuses.pop("stopped") == 1
        assert set(statuses.values()) == {0}
    assert found_by_rank(two_ranks, "steps_when_stopped") == [[3], [3]]
    assert f"resuming from {folder}/stopped/checkpoint-3" in output
    assert outcome_of(folder / "stopped") == outcome_of(folder / "whole")


@pytest.mark.slow
def test_an_error_that_all_ranks_have_is_printed_once(two_ranks):
    folder, _, errors = two_ranks
    assert errors.count(f"{folder}/nothing/options.json") == 1
    assert "Traceback" not in errors.partition("nothing/options.json")[0]


@pytest.mark.slow
def test_ranks_sample_other_completions_of_the_same_prompt(two_ranks):
    first, second = found_by_rank(two_ranks, "completions")
    assert len(first) == len(second) == 4
    assert first != second
    folder, _, _ = two_ranks
    rows = training_rows(folder / "whole")
    assert len(rows) == 6
    for row in rows:
        assert row["num_tokens"] == 8 * row["completion_length"]


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_a_bfloat16_model_without_tied_weights(two_ranks):
    folder, _, _ = two_ranks
    checkpoint = folder / "whole" / "checkpoint-6"
    content = (checkpoint / "model.safetensors").read_bytes()
    assert b"F32" not in content and b"lm_head" not in content
    config = AutoConfig.from_pretrained(checkpoint)
    assert config.dtype == torch.bfloat16
    assert config.architectures == ["Qwen2ForCausalLM"]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(two_ranks):
    folder, output, _ = two_ranks
    assert f"resuming from {folder}/one/checkpoint-2" in output
    assert saved_steps(folder / "one") == [4]  # of two ranks
    with mock.patch.object(grpo, "restore", wraps=grpo.restore) as restore:
        resume(folder / "one", max_steps=5)
    (run,) = restore.call_args.args
    for state in run.optimizer.state.values():
        assert state["step"] == 5
    found = weights_of(folder / "one" / "checkpoint-5")
    assert_close(found, dict(run.policy.state_dict()), atol=0, rtol=0)


@pytest.mark.slow
def test_two_ranks_leave_one_adapter_that_one_rank_goes_on_with(two_ranks):
    folder, _, _ = two_ranks
    checkpoint = folder / "lora" / "checkpoint-2"
    assert b"BF16" not in (checkpoint / "adapter_model.safetensors").read_bytes()
    model = peft.AutoPeftModelForCausalLM.from_pretrained(checkpoint)
    adapters = [x for name, x in model.named_parameters() if "lora_B" in name]
    assert len(adapters) == 14
    assert all(x.any() and x.dtype == torch.float32 for x in adapters)
    resume(folder / "lora", max_steps=3)
    assert saved_steps(folder / "lora") == [3]


@pytest.mark.slow
def test_two_ranks_evaluate_five_rows_as_one_rank_does(two_ranks, tmp_path):
    """The second rank has two rows, and none counts twice. Both use the folder of the
    first."""
    folder, output, _ = two_ranks
    new_run(tmp_path, **options_of_an_evaluation(folder))
    (row,) = evaluation_rows(tmp_path)
    (folder_of_ranks,) = (folder / "runs").iterdir()
    (row_of_ranks,) = evaluation_rows(folder_of_ranks)
    assert row_of_ranks == pytest.approx(row)
    assert output.splitlines()[-1].startswith("greedy held-out reward: ")


if __name__ == "__main__":
    program_of_each_rank(Path(sys.argv[1]))
