# SPDX-License-Identifier: MIT
# Copyright (c) 2026 the grpo.py authors
"""The tests of grpo.py. They run on a CPU (hide GPUs by CUDA_VISIBLE_DEVICES=) and
offline:

    python -m pytest -ra                 # everything; -ra says why a test was skipped
    python -m pytest -m "not slow"       # without whole runs and processes

The first section is a course: GRPO worked out with numbers that fit on paper. Read it
beside the first half of grpo.py. The others follow the order of grpo.py.
"""

import contextlib
import copy
import dataclasses
import inspect
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import time
import types
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import peft
import pytest
import torch
import transformers
import trl
from tokenizers.processors import TemplateProcessing
from torch.nn.utils import clip_grad_norm_
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

import grpo

# One thread is fastest for models as small as these, in other processes, too.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)

# The marker `slow` works without a configuration file, but each use of it would warn.
warnings.filterwarnings("ignore", "Unknown pytest.mark.slow")


# ------------------------------------------------------------------------ worked course
# GRPO samples a group of completions of each prompt, and makes those with more reward
# than the mean of their group more probable.
# 1. Rewards become advantages.
def test_course_a_right_answer_has_reward_1():
    """Three answers to "2 + 2 × 6 = ", and four to "y = 2x + 1 for x = 2, y = "."""
    completions = ["14", "16", "10", "5", "6", "7", "5.0"]
    rewards = grpo.accuracy_reward(completions, ["14"] * 3 + ["5"] * 4)
    assert rewards == [1, 0, 0, 1, 0, 0, 1]


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
def test_course_rewards_are_normalised_within_groups(rewards, num_generations, size):
    """(reward - mean) / std, DeepSeekMath (arXiv:2402.03300), section 4.1.2."""
    advantages = grpo.group_advantages(torch.tensor(rewards), num_generations)
    expected = [size if reward == 1 else -size for reward in rewards]
    assert advantages.tolist() == pytest.approx(expected, abs=5e-5)  # 4 decimals


@pytest.mark.parametrize("equal_rewards", [[0.1, 0.1] * 4, [0.1 + 0.2, 0.3] * 4])
def test_course_equal_rewards_have_an_advantage_of_exactly_0(equal_rewards):
    """There is nothing to learn. 0.1 + 0.2 and 0.3 differ only by rounding."""
    rewards = torch.tensor(equal_rewards, dtype=torch.float64)
    assert grpo.group_advantages(rewards, 8).tolist() == [0.0] * 8


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
    assert mask.dtype == torch.bool
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
        (0.55, 0.5, 0.9354, 1.1, 1.0289),  # 1.1 * 0.9354: within the clip range
    ],
)
def test_course_the_smaller_surrogate_counts(new, old, advantage, ratio, surrogate):
    """min(ratio A, clip(ratio, 0.8, 1.2) A), PPO (arXiv:1707.06347), eq. 7."""
    logp, old_logp = torch.tensor([[new]]).log(), torch.tensor([[old]]).log()
    found = grpo.importance_ratio(logp, old_logp)
    assert found.item() == pytest.approx(ratio)
    found = grpo.clipped_surrogate(found, torch.tensor([advantage]), epsilon=0.2)
    assert found.item() == pytest.approx(surrogate, abs=5e-5)  # 4 decimals


def test_course_dapo_has_a_wider_clip_range_above_1():
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


def test_course_the_gradient_of_k3_is_that_of_the_kl_if_it_is_multiplied_by_the_ratio():
    """Else it is that of the other direction. DeepSeek-V3.2 (arXiv:2512.02556)."""
    logits = POLICY.log().requires_grad_()
    logp, ref_logp = logits.log_softmax(0), REFERENCE.log()
    k3 = grpo.kl_k3(logp, ref_logp)
    ratio = grpo.importance_ratio(logp, logp.detach())
    # The means of tokens that were sampled from the policy, so that the ratio is 1.
    for mean, kl in (
        ((POLICY * ratio * k3).sum(), exact_kl(logp, ref_logp)),
        ((POLICY * k3).sum(), exact_kl(ref_logp, logp)),
    ):
        [found] = torch.autograd.grad(mean, logits, retain_graph=True)
        [expected] = torch.autograd.grad(kl, logits, retain_graph=True)
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


# k3 of tokens is ref / new - log(ref / new) - 1 (DeepSeekMath, eq. 4), with ref / new =
# 0.5, 2, then 2, 1, 0.5:
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
    loss, metrics = loss_of_the_table("dapo", beta=0.04, use_bias_correction_kl=True)
    # completion 0: 2.5 HALF + 0.9 TWICE = 0.759035
    # completion 1: 0.5 TWICE + 0 + 1.25 HALF = 0.394861
    kl = (0.759035 + 0.394861) / 5
    assert (loss - without).item() == pytest.approx(0.04 * kl, abs=1e-7)
    assert metrics["kl"].item() == pytest.approx(1 / 5)  # of k3 itself


def test_course_at_ratio_1_the_gradient_is_that_of_reinforce():
    """d loss / d logp = -A / (N |o|), DeepSeekMath eq. 3 with pi = pi_old. The loss is
    -mean(A), which is 0 for the advantages of a real group: its gradient matters."""
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
    prompt_ids = torch.tensor([[1, 0], [1, 0]])
    prompt_mask = torch.ones(2, 2, dtype=torch.bool)
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
    ids, _ = grpo.generate(
        TableModel(ODDS),
        prompt_ids,
        prompt_mask,
        num_generations=1,
        max_completion_length=4,
        eos_token_ids=1,
        temperature=0,
    )
    # 0 -> 2 -> 1, 1 -> 2 -> 1 and 2 -> 1; rows are padded with the EOS
    assert ids.tolist() == [[2, 1, 1, 1], [2, 1, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    "temperature, probs",
    [(1.0, [1 / 14, 4 / 14, 9 / 14]), (2.0, [1 / 6, 2 / 6, 3 / 6])],
)
def test_course_tokens_are_sampled_with_their_probabilities(temperature, probs):
    torch.manual_seed(0)
    logits = torch.tensor(ODDS[0]).log().expand(14_000, 3)
    tokens, logp = grpo.sample(logits, temperature)
    counts, expected = tokens.bincount(minlength=3), 14_000 * torch.tensor(probs)
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    # Of three tokens, chi2 has two degrees of freedom: it is above x with probability
    # exp(-x / 2). A correct sampler would fail on one seed in 1000; this one passes.
    assert math.exp(-chi2 / 2) > 1e-3
    assert_close(logp.exp(), torch.tensor(probs)[tokens])


# 6. Optimizer steps.
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
    """AdamW (arXiv:1711.05101), algorithm 2, without weight decay."""
    run, batch = two_groups(torch.optim.AdamW)
    metrics = grpo.update(run, batch, learning_rate=0.1)
    # With probabilities of 1/2, d logp(0) / d logits = (1/2, -1/2) and
    # d logp(1) / d logits = (-1/2, 1/2). Two completions of each out of four:
    # gradient = -((1/2, -1/2) - (-1/2, 1/2)) / 2 = (-1/2, 1/2), of length sqrt(1/2).
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(1 / 2))
    assert metrics["loss"] == pytest.approx(0)  # -mean(A), although it has a gradient
    # First moment: 0.1 g / (1 - 0.9) = g. Second moment: 0.001 g^2 / (1 - 0.999) = g^2.
    # The first step is -lr g / sqrt(g^2) = -lr sign(g), whatever the size of g. Token 0
    # was never followed by anything: its logits have no gradient.
    expected = [0, 0, 0.1, -0.1]
    assert run.policy.logits.flatten().tolist() == pytest.approx(expected, abs=1e-6)


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
    grad_norms = [0.5 * math.sqrt(2), 0.495 * math.sqrt(2)]
    assert metrics["grad_norm"] == pytest.approx(sum(grad_norms) / 2)


def test_course_a_whole_step_samples_scores_normalises_and_updates(monkeypatch):
    def is_0(completion_ids, **columns):
        return [ids == [0] for ids in completion_ids]

    run, _ = two_groups(
        torch.optim.SGD, max_completion_length=1, learning_rate=0.1, warmup_steps=0
    )
    run.reward_functions = {"is_0": (is_0, 1.0)}
    run.tokenizer = mock.Mock()
    run.tokenizer.batch_decode.return_value = [""] * 4
    draws = torch.tensor([[0.3], [0.8], [0.2], [0.4]])  # below 1/2: token 0
    monkeypatch.setattr(torch, "rand_like", lambda total: draws.to(total))
    _, columns = grpo.train_step(run, 2 * [{"prompt_ids": [1]}], step=1)
    assert columns["reward"] == [1, 0, 1, 1]
    # The rewards 1 and 0 have advantages of 0.7071 and -0.7071, and two equal ones 0.
    # Gradient as above: -(0.7071 (1/2, -1/2) - 0.7071 (-1/2, 1/2)) / 4
    moved = 0.1 * 0.7071 / 4
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
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "pad_token_id": 39,
    "tie_word_embeddings": True,
}
TINY_OPTIONS = {
    "gpt2": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 3},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "gpt_neo": {"attention_types": [[["global"], 3]]},
}


def tiny_model(kind="qwen2", seed=0, **options):
    """A causal LM with random weights, in float32 and eval mode. kind: a model type of
    transformers. options: of its config."""
    torch.manual_seed(seed)
    options = {**TINY_SIZES, **TINY_OPTIONS.get(kind, {}), **options}
    config = AutoConfig.for_model(kind, **options)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def ragged_batch(num_generations=3):
    """Prompts of 5 and 3 tokens, each with `num_generations` completions of 0 to 6
    tokens. Returns prompt_ids and prompt_mask (N, 7), and completion_ids and mask
    (N, 6). Prompts have more padding than they need."""
    generator = torch.Generator().manual_seed(0)
    num_completions = 2 * num_generations
    prompt_ids = torch.randint(2, 40, (2, 7), generator=generator)
    prompt_mask = torch.arange(7) >= torch.tensor([[2], [4]])
    completion_ids = torch.randint(2, 40, (num_completions, 6), generator=generator)
    lengths = (13 - torch.arange(num_completions)) % 7  # 6, 5, ..., 0, 6, 5, ...
    return (
        prompt_ids.repeat_interleave(num_generations, dim=0),
        prompt_mask.repeat_interleave(num_generations, dim=0),
        completion_ids,
        torch.arange(6) < lengths[:, None],
    )


def slow_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, mask, temperature=1.0
):
    """`grpo.token_logprobs` by one forward pass for each completion, without padding
    and without a cache."""
    logp = torch.zeros(mask.shape)
    for i in range(len(mask)):
        prompt = prompt_ids[i, prompt_mask[i]]
        completion = completion_ids[i, mask[i]]
        ids = torch.cat([prompt, completion])
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].float() / temperature
        for t, token in enumerate(completion.tolist()):
            logp[i, t] = logits[t].log_softmax(0)[token]
    return logp


def random_logprobs(seed=0, moved=0.3):
    """Log-probs of 6 completions of up to 5 tokens, in float64: logp, old_logp,
    ref_logp, advantages and mask, (6, 5) each. moved: how far the policy is from the
    one that sampled; by 0.3, some ratios leave the clip range. The last completion is
    all masked. For autograd, all three log-probs depend on logp."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(4, 6, 5, generator=generator, dtype=torch.float64)
    logp = (noise[0] - 3).requires_grad_()
    old_logp = logp + moved * noise[1]
    ref_logp = logp + 0.5 * noise[2]
    lengths = torch.tensor([1, 2, 3, 4, 5, 0])
    mask = torch.arange(5) < lengths[:, None]
    return logp, old_logp, ref_logp, noise[3], mask


loss_types = pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
ratio_levels = pytest.mark.parametrize("level", ["token", "sequence"])


# -------------------------------------------------------- options, advantages and loss
@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_generations": 1}, "^--num-generations must be finite and at least 2"),
        ({"temperature": 0.0}, "^--temperature must be finite and at least 1e-06"),
        ({"beta": math.nan}, "^--beta must be finite and at least 0"),
        ({"learning_rate": math.inf}, "^--learning-rate must be finite and at least 0"),
        ({"num_mini_batches": 8}, "--prompts-per-step must be divisible .* 2 ranks"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_an_error(options, message, monkeypatch):
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    with pytest.raises(grpo.Error, match=message):
        grpo.Config(**options)


@pytest.mark.parametrize("size, num_generations", [(4, 1), (5, 2)])
def test_rewards_that_do_not_form_groups_are_an_error(size, num_generations):
    with pytest.raises(ValueError, match=f"into groups of {num_generations}"):
        grpo.group_advantages(torch.zeros(size), num_generations)


@pytest.mark.parametrize("scale_rewards, size", [("group", 0.7071), ("none", 1.0)])
def test_a_group_may_have_few_reasoning_steps(scale_rewards, size):
    """One in the first group, which equals its mean, and 1 and 3 in the second."""
    step_rewards, step_ends = [[], [9.0], [1.0], [3.0]], [[], [1], [0], [1]]
    found = grpo.process_advantages(step_rewards, step_ends, 2, 2, scale_rewards)
    expected = [0, 0, 0, 0, -size, 0, size, size]
    assert found.flatten().tolist() == pytest.approx(expected, abs=5e-5)  # 4 decimals


@pytest.mark.parametrize("second", [[2.0], [2.0, math.nan]], ids=["one", "nan"])
def test_each_reasoning_step_needs_a_finite_reward(second):
    with pytest.raises(ValueError):
        grpo.process_advantages([[1.0], second], [[3], [2, 3]], 2, length=4)


def test_k3_of_nearly_equal_log_probs_is_not_lost_to_rounding():
    """It is about d^2 / 2. In float32, exp(d) - d - 1 would be 0, or 5 % off."""
    d = torch.tensor([-1e-3, -1e-4, 1e-4, 1e-3])
    assert_close(grpo.kl_k3(torch.zeros(4), d), d**2 / 2, rtol=5e-3, atol=0)


def core_loss(inputs, loss_type, level, beta, epsilon_high, use_bias_correction_kl):
    """The loss and its metrics by `grpo_loss`, with an epsilon of 0.15 and a length
    limit of 9."""
    return grpo.grpo_loss(
        *inputs,
        weights=grpo.token_weights(inputs[-1], loss_type, max_completion_length=9),
        epsilon=0.15,
        epsilon_high=epsilon_high,
        beta=beta,
        importance_sampling_level=level,
        use_bias_correction_kl=use_bias_correction_kl,
    )


def slow_loss(inputs, loss_type, level, beta, epsilon_high, use_bias_correction_kl):
    """The same, token by token."""
    logp, old_logp, ref_logp, advantages, mask = inputs
    old_logp, ref_logp = old_logp.detach(), ref_logp.detach()
    loss = 0.0
    metrics = defaultdict(list)
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
            clipped_ratio = min(max(ratio, 1 - 0.15), 1 + epsilon_high)
            unclipped = ratio * advantages[i, t]
            surrogate = min(unclipped, clipped_ratio * advantages[i, t])
            d = ref_logp[i, t] - logp[i, t]
            kl = d.exp() - d - 1
            penalty = ratio * kl if use_bias_correction_kl else kl
            loss = loss + (beta * penalty - surrogate) / denominator
            metrics["kl"].append(kl.item())
            metrics["entropy"].append(-logp[i, t].item())
            metrics["ratio_mean"].append(ratio.item())
            metrics["clip_fraction"].append((surrogate < unclipped).item())
    return loss, {name: statistics.fmean(values) for name, values in metrics.items()}


@loss_types
@ratio_levels
@pytest.mark.parametrize("epsilon_high", [0.0, 0.4])  # 0 does not mean the default
@pytest.mark.parametrize("use_bias_correction_kl", [False, True])
def test_loss_gradient_and_metrics_are_those_of_plain_loops(
    loss_type, level, epsilon_high, use_bias_correction_kl
):
    """What is masked is ignored. No gradient flows through old_logp and ref_logp."""
    inputs = random_logprobs()
    mask = inputs[-1]
    with_junk = [x.masked_fill(~mask, math.nan) for x in inputs[:-1]]
    options = (loss_type, level, 0.1, epsilon_high, use_bias_correction_kl)
    loss, metrics = core_loss([*with_junk, mask], *options)
    expected_loss, expected_metrics = slow_loss(inputs, *options)
    [grad] = torch.autograd.grad(loss, inputs[0])
    [expected_grad] = torch.autograd.grad(expected_loss, inputs[0])
    # All of it is float64.
    assert_close(loss, expected_loss, atol=1e-12, rtol=0)
    assert_close(grad, expected_grad, atol=1e-12, rtol=0)
    assert 0 < expected_metrics["clip_fraction"] < 1
    found = {name: value.item() for name, value in metrics.items()}
    assert found == pytest.approx(expected_metrics, rel=1e-6)


def test_the_formulas_need_only_torch_when_pasted_into_another_file():
    source = Path(grpo.__file__).read_text()
    section = source.partition("- GRPO in numbers\n")[2].partition("\n# ----")[0]
    pasted = {"torch": torch}
    exec(section, pasted)
    loss, _ = pasted["grpo_loss"](*random_logprobs())
    assert_close(loss, grpo.grpo_loss(*random_logprobs())[0])
    advantages = pasted["process_advantages"]([[1.0], [0.0]], [[1], [2]], 2, 3)
    assert advantages.sign().tolist() == [[1, 1, 0], [-1, -1, -1]]


def trl_loss(inputs, loss_type, level, beta, epsilon_high, use_bias_correction_kl):
    """The loss of TRL's GRPOTrainer: its own method, called on a stand-in that has the
    attributes that the method reads."""
    logp, old_logp, ref_logp, advantages, mask = inputs
    trainer = SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=0.15,
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
            num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x
        ),
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, -logp, None),
    )
    columns = {
        "prompt_ids": mask.long(),  # only concatenated
        "prompt_mask": mask.long(),
        "completion_ids": mask.long(),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old_logp.detach(),
        "ref_per_token_logps": ref_logp.detach(),
        "num_items_in_batch": mask.sum(),
    }
    return trl.GRPOTrainer._compute_loss(trainer, trainer.model, columns)


@pytest.mark.slow
@loss_types
@ratio_levels
@pytest.mark.parametrize(
    "beta, use_bias_correction_kl",
    [(0.0, False), (0.04, False), (0.04, True)],  # True is TRL's default
)
@pytest.mark.parametrize("moved", [0.0, 0.3])
@pytest.mark.parametrize("epsilon_high", [0.0, 0.28])  # 0 is not the default
@pytest.mark.parametrize("seed", range(8))
def test_loss_and_gradient_are_those_of_trl(
    loss_type, level, beta, use_bias_correction_kl, moved, epsilon_high, seed
):
    """384 cases are without bias correction, and 192 are with it."""
    inputs = random_logprobs(seed, moved)
    options = (loss_type, level, beta, epsilon_high, use_bias_correction_kl)
    found, _ = core_loss(inputs, *options)
    expected = trl_loss(inputs, *options)
    [grad] = torch.autograd.grad(found, inputs[0])
    [expected_grad] = torch.autograd.grad(expected, inputs[0])
    assert grad.any()
    assert_close(found, expected, atol=1e-9, rtol=1e-9)
    assert_close(grad, expected_grad, atol=1e-9, rtol=1e-9)


# --------------------------------------------------------------- sampling and log-probs
PROMPTS = ragged_batch(1)[:2]  # ids and mask of two prompts, (2, 7)
MANY_EOS = list(range(1, 31))  # one token in five ends a completion


def test_sample_reaches_each_of_150_000_improbable_tokens(monkeypatch):
    """A sum in float32 would round most of them away."""
    logits = torch.zeros(1, 150_001)
    logits[0, 0] = 18.8  # the other tokens have 1 in 1000 together
    cdf = logits.double().softmax(1).cumsum(1)
    draw = (cdf[:, [99_998]] + cdf[:, [99_999]]) / 2  # selects token 99,999
    monkeypatch.setattr(torch, "rand_like", lambda total: draw)
    assert grpo.sample(logits)[0] == 99_999
    logits[0, 0] = -math.inf  # a draw of 0 takes no impossible token
    draw = 0 * draw
    assert grpo.sample(logits)[0] == 1


# Full attention, learned positions, a window, a window and a cap. Only in gpt2 the
# output layer has weights of its own. (lfm2 has convolutions, too.)
GRAPHED_KINDS = ["qwen2", "gpt2", "mistral", "gemma2"]


@pytest.mark.parametrize(
    "function, kind",
    [("generate", kind) for kind in [*GRAPHED_KINDS, "lfm2"]]
    + [("graphed_generate", kind) for kind in GRAPHED_KINDS],
)
@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_sampled_log_probs_are_those_of_training(
    function, kind, temperature, monkeypatch
):
    """Of 12 tokens, more than the windows hold. Greedy ones are at temperature 1. On a
    GPU, decoding steps are recorded as CUDA graphs."""
    model = tiny_model(kind, use_cache=False).to(grpo.DEVICE)
    # Such settings are ignored. They would sample from another distribution.
    model.generation_config.update(top_k=1, repetition_penalty=9.0, eos_token_id=35)
    if not grpo.ON_GPU:
        monkeypatch.setattr(grpo, "recorded", lambda decode: decode)
    torch.manual_seed(0)
    prompts = [x.to(grpo.DEVICE) for x in PROMPTS]
    generate = getattr(grpo, function)
    ids, logp = generate(model, *prompts, 4, 12, MANY_EOS, temperature)
    prompts = [x.repeat_interleave(4, dim=0) for x in prompts]
    mask = grpo.completion_mask(ids, MANY_EOS)
    with torch.no_grad():
        expected = grpo.token_logprobs(model, *prompts, ids, mask, temperature or 1.0)
    assert_close(logp, expected, atol=1e-4, rtol=1e-4)
    after_eos = ids[~mask]
    assert len(after_eos) > 0 and (after_eos == MANY_EOS[0]).all()


def test_each_graphed_step_reads_and_writes_the_same_tensors(monkeypatch):
    """A CUDA graph knows them by their addresses."""
    steps = []

    def recorded(decode):
        def step():
            variables = inspect.getclosurevars(decode).nonlocals
            layers = variables["cache"].layers
            states = [x for layer in layers for x in (layer.keys, layer.values)]
            steps.append([variables["last_ids"], variables["attention_mask"], *states])
            return decode()

        return step

    monkeypatch.setattr(grpo, "recorded", recorded)
    grpo.graphed_generate(tiny_model(), *PROMPTS, 4, 6, 149)
    first, *others = steps
    assert len(others) == 3  # the first of five is not recorded
    assert all(x is y for step in others for x, y in zip(step, first))


@pytest.mark.parametrize("kind", [*GRAPHED_KINDS, "lfm2", "gpt_neo"])
def test_a_gpu_repeats_a_recorded_step_if_the_model_allows_it(kind, monkeypatch):
    assert grpo.choose_generate(tiny_model(kind)) is grpo.generate  # on a CPU
    stream = mock.Mock(side_effect=["usual", "usual"])
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "set_stream", mock.Mock())
    monkeypatch.setattr(grpo, "ON_GPU", True)
    monkeypatch.setattr(grpo, "recorded", lambda decode: decode)
    chosen = grpo.choose_generate(tiny_model(kind))
    assert (chosen is grpo.graphed_generate) == (kind in GRAPHED_KINDS)
    monkeypatch.setattr(grpo, "recorded", mock.Mock(side_effect=RuntimeError))
    assert grpo.choose_generate(tiny_model(kind)) is grpo.generate
    if kind in GRAPHED_KINDS:
        torch.cuda.set_stream.assert_called_once_with("usual")


def test_prompts_padded_on_the_right_are_refused():
    prompt_ids, prompt_mask, *completions = ragged_batch()
    prompts = prompt_ids.flip(1), prompt_mask.flip(1)
    for generate in (grpo.generate, grpo.graphed_generate):
        with pytest.raises(ValueError, match="padded on the left"):
            generate(tiny_model(), *prompts, 1, 1, 1)
    with pytest.raises(ValueError, match="padded on the left"):
        grpo.token_logprobs(tiny_model(), *prompts, *completions)


# Of these, gemma2 changes its logits after the output layer.
@pytest.mark.parametrize("kind", [*GRAPHED_KINDS, "lfm2"])
def test_log_probs_and_gradients_ignore_padding(kind, monkeypatch):
    """Slices of the vocabulary have 64, 64 and 22 tokens."""
    monkeypatch.setattr(grpo.SlicedLogSoftmax, "logits_at_once", 1)
    model, factors = tiny_model(kind), torch.randn(6, 6)
    chosen = grpo.choose_logprobs(model)
    assert (chosen is grpo.sliced_logprobs) == (kind != "gemma2")
    results = []
    for function in (slow_logprobs, grpo.token_logprobs, chosen):
        logp = function(model, *ragged_batch(), temperature=0.7)
        model.zero_grad()
        (logp * factors).sum().backward()  # a random sum
        results.append([logp, *(x.grad for x in model.parameters())])
    for found in results[1:]:
        # Float32 through three layers, in another order of additions.
        assert_close(found, results[0], atol=5e-4, rtol=1e-3)


def test_a_nearly_certain_token_still_has_a_gradient_in_bfloat16():
    """1 - softmax is computed in float32; in bfloat16 it would be 0. As in sampling, it
    is the undivided logits that are rounded to bfloat16."""
    weight = torch.eye(64).bfloat16()
    hidden = (8.5 * weight[:1]).requires_grad_()
    logp = grpo.SlicedLogSoftmax.apply(hidden, weight, torch.tensor([0]), 0.7)
    (grad,) = torch.autograd.grad(logp.sum(), hidden)
    others = 63 / (63 + math.exp(8.5 / 0.7))  # the probability of all other tokens
    assert logp.item() == pytest.approx(math.log1p(-others), rel=0.01)
    assert grad[0, 0].item() == pytest.approx(others / 0.7, rel=0.01)


# --------------------------------------------------------------------------- the update
def tiny_run(policy=None, reference=None, **options):
    """A `Run` by `token_logprobs`, whose reward is the ids' sum modulo 7. By default
    the policy is the built-in tiny model, and the reference is a copy of the policy."""

    def sums(completion_ids, **columns):
        return [sum(ids) % 7 for ids in completion_ids]

    policy = policy or grpo.tiny_model(0).eval()
    sizes = {"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 6}
    return grpo.Run(
        config=grpo.Config(**{**sizes, **options}),
        policy=policy,
        tokenizer=grpo.tiny_tokenizer(),
        eos_token_ids=[0],
        optimizer=torch.optim.AdamW(policy.parameters(), weight_decay=0.0),
        reward_functions={"sums": (sums, 1.0)},
        reference=reference or copy.deepcopy(policy),
    )


def rollout_batch(advantages=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0)):
    """A `Batch` of two prompts with three completions each, of 6 to 1 tokens, and one
    advantage for each completion."""
    batch = ragged_batch()
    advantages = torch.tensor(advantages)[:, None].expand(6, 6)
    return grpo.Batch(*batch, advantages=advantages)


def test_gradient_checkpointing_saves_memory_and_changes_nothing_else():
    """No dropout either, which OPT has in its own `forward`."""
    results, saved_bytes = [], []
    for is_on in (False, True):
        policy = tiny_model("opt", dropout=0.1)
        config = grpo.Config(beta=0.0, dtype="float32", gradient_checkpointing=is_on)
        with mock.patch.object(grpo, "load_model", return_value=policy):
            run = grpo.build_run(config, "tiny", reward_functions={})
        torch.manual_seed(0)
        completions = grpo.generate(policy, *PROMPTS, 3, 6, 1)
        # What autograd saves, but for the inputs of checkpointed layers.
        save = mock.Mock(side_effect=lambda x: x)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            metrics = grpo.update(run, rollout_batch(), learning_rate=1e-3)
        saved_bytes.append(sum(call.args[0].nbytes for call in save.call_args_list))
        results.append([completions, metrics])
    assert_close(results[1], results[0])
    assert results[0][1]["grad_norm"] > 0.1
    assert saved_bytes[1] < 0.5 * saved_bytes[0]


def first_moments(run):
    """AdamW's sums of the gradients of all optimizer steps: 0.1 g after one step."""
    moments = []
    for state in run.optimizer.state.values():
        x = state["exp_avg"]
        moments.append(x.full_tensor() if isinstance(x, grpo.DTensor) else x)
    return moments


def slow_update(run, batch, loss_options):
    """The metrics of `update` by the formulas, with slow log-probs and without
    micro-batches. max_completion_length is 9 and max_grad_norm is 0.01."""
    config, policy, adamw = run.config, run.policy, run.optimizer
    adamw.param_groups[0]["lr"] = 1e-3
    old_logp = slow_logprobs(policy, *batch.inputs, config.temperature).detach()
    ref_logp = slow_logprobs(run.reference, *batch.inputs, config.temperature).detach()
    size = len(batch.mask) // config.num_mini_batches
    updates = []
    for _ in range(config.num_iterations):
        for start in range(0, len(batch.mask), size):
            rows = slice(start, start + size)
            inputs = [x[rows] for x in batch.inputs]
            mask = inputs[-1]
            loss, metrics = grpo.grpo_loss(
                slow_logprobs(policy, *inputs, config.temperature),
                old_logp[rows],
                ref_logp[rows],
                batch.advantages[rows],
                mask,
                weights=grpo.token_weights(mask, config.loss_type, 9),
                **loss_options,
            )
            adamw.zero_grad()
            loss.backward()
            metrics["loss"] = loss
            metrics["grad_norm"] = clip_grad_norm_(policy.parameters(), 0.01)
            adamw.step()
            gap = (old_logp[rows] - batch.sampled_logp[rows]).abs()
            metrics["sampling_gap"] = gap[mask].mean()
            updates.append({name: x.item() for name, x in metrics.items()})
    return {name: statistics.fmean(x[name] for x in updates) for name in updates[0]}


@loss_types
@pytest.mark.parametrize(
    "level, num_iterations, num_mini_batches, num_calls",
    # Of the model, by two rows. The only update of a rollout needs no old_logp.
    [
        ("sequence", 1, 1, 3 + 3),  # reference, update
        ("token", 2, 1, 3 + 3 + 2 * 3),  # reference, old_logp, two updates
        ("token", 1, 2, 3 + 3 + 2 * 2),
    ],
)
def test_an_update_is_that_of_plain_loops(
    loss_type, level, num_iterations, num_mini_batches, num_calls
):
    loss_options = {
        "importance_sampling_level": level,
        "epsilon": 0.01,
        "epsilon_high": 0.03,
        "beta": 0.1,
        "use_bias_correction_kl": True,
    }
    run = tiny_run(
        tiny_model(num_hidden_layers=1),
        tiny_model(seed=1, num_hidden_layers=1),
        temperature=0.7,
        max_completion_length=9,  # more than any completion has
        loss_type=loss_type,
        num_iterations=num_iterations,
        num_mini_batches=num_mini_batches,
        micro_batch_size=2,
        max_grad_norm=0.01,
        **loss_options,
    )
    slow_run = copy.deepcopy(run)
    torch.manual_seed(0)
    batch = rollout_batch([0.3, -1.0, 0.5, -0.7, 1.0, 2.0])
    batch.sampled_logp = torch.randn(6, 6)
    expected = slow_update(slow_run, batch, loss_options)
    run.logprobs = mock.Mock(side_effect=grpo.token_logprobs)
    metrics = grpo.update(run, batch, learning_rate=1e-3)
    assert run.logprobs.call_count == num_calls
    expected |= {"skipped": 0, "learning_rate": 1e-3}
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    num_updates = num_iterations * num_mini_batches
    assert (metrics["clip_fraction"] > 0.02) == (num_updates > 1)
    for moment, slow_moment in zip(first_moments(run), first_moments(slow_run)):
        # A few optimizer steps multiply the rounding of the first.
        assert (moment - slow_moment).norm() <= 0.01 * slow_moment.norm()


def test_an_update_whose_gradient_is_not_finite_is_skipped():
    run = tiny_run(tiny_model())
    before = copy.deepcopy(run.policy.state_dict())
    bad_batch = rollout_batch([1.0, 1.0, math.inf, 1.0, 1.0, 1.0])
    assert grpo.update(run, bad_batch, learning_rate=1e-2)["skipped"] == 1
    assert_close(run.policy.state_dict(), before, atol=0, rtol=0)
    # The next update does not see the bad gradient.
    assert grpo.update(run, rollout_batch(), learning_rate=1e-2)["skipped"] == 0


def test_an_unused_weight_gets_an_optimizer_state():
    """As in an idle vision tower. A checkpoint without it could not be loaded."""
    policy = tiny_model()
    policy.unused = torch.nn.Parameter(torch.ones(3))
    config = grpo.Config(beta=0.0, dtype="float32")
    with mock.patch.object(grpo, "load_model", return_value=policy):
        run = grpo.build_run(config, "tiny", reward_functions={})
    grpo.update(run, rollout_batch(), learning_rate=1e-3)
    assert policy.unused in run.optimizer.state
    assert (policy.unused == 1).all()  # no weight decay


def test_longrope_past_its_original_length_is_right_or_shown_by_the_sampling_gap():
    """Its rotations depend on the length of the whole sequence. The cache holds keys
    that were rotated as in a short one."""
    rope = {
        "rope_type": "longrope",
        "short_factor": 4 * [1.0],
        "long_factor": 4 * [8.0],
    }
    policy = tiny_model(
        "phi3", rope_parameters=rope, original_max_position_embeddings=16
    )
    run = tiny_run(policy, max_completion_length=24)
    batch, _ = grpo.rollout(run, 2 * [{"prompt_ids": [3, 12, 4]}], 4, temperature=1.0)
    batch.advantages = torch.ones(8, 24)
    gap = grpo.update(run, batch, learning_rate=1e-2)["sampling_gap"]  # 1.4 nats
    assert gap < 1e-4 or gap > 0.1


# ----------------------------------------------------------------------------- the step
def test_learning_rates_warm_up_and_then_stay_or_decay_to_0():
    config = grpo.Config(learning_rate=0.4, warmup_steps=4, max_steps=8)
    constant = [grpo.scheduled_learning_rate(config, step) for step in range(1, 9)]
    assert constant == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4])
    config = dataclasses.replace(config, lr_scheduler_type="linear")
    linear = [grpo.scheduled_learning_rate(config, step) for step in range(1, 9)]
    assert linear == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.3, 0.2, 0.1])


def test_each_epoch_and_seed_shuffles_anew_and_drops_an_incomplete_batch(monkeypatch):
    steps = [grpo.prompt_batch(range(10), step, 3, seed=5) for step in range(1, 7)]
    first, second = sum(steps[:3], []), sum(steps[3:], [])
    assert len(set(first)) == len(set(second)) == 9
    assert first != second and first != sorted(first)
    assert grpo.prompt_batch(range(10), 1, 3, seed=6) != steps[0]
    monkeypatch.setattr(grpo, "WORLD_SIZE", 3)
    shares = []
    for rank in range(3):
        monkeypatch.setattr(grpo, "RANK", rank)
        shares += grpo.prompt_batch(range(10), 1, 3, seed=5)
    assert shares == steps[0]


def test_a_rollout_has_texts_ids_finished_and_the_columns_of_its_rows():
    run = tiny_run()
    run.eos_token_ids = [0, 7]  # a completion ends with any of them; 7 is "5"
    texts = ["2<eos>", "3+4", "<unk>45", "<eos>"]
    ids, _ = grpo.pad([run.tokenizer.encode(text) for text in texts], "right")
    ids[0, 2] = ids[3, 1] = 4  # what follows the EOS token is ignored
    rows = [{"prompt_ids": [3], "level": 1}, {"prompt_ids": [4, 5], "level": 2}]
    run.generate = mock.Mock(return_value=(ids, ids.float()))
    batch, columns = grpo.rollout(run, rows, 2, temperature=1.0)
    # The EOS token at the end is no text. Other special tokens are, such as <think>.
    assert columns == {
        "prompt_ids": [[3], [3], [4, 5], [4, 5]],
        "level": [1, 1, 2, 2],
        "completion_ids": [[4, 0], [5, 12, 6], [1, 6, 7], [0]],
        "finished": [True, False, True, True],
        "completions": ["2", "3+4", "<unk>4", ""],
    }
    assert batch.prompt_ids.tolist() == 2 * [[3, 3]] + 2 * [[4, 5]]
    assert batch.prompt_mask.tolist() == 2 * [[False, True]] + 2 * [[True, True]]
    assert torch.equal(batch.completion_ids, ids)  # never decoded and encoded again
    assert torch.equal(batch.sampled_logp, ids.float())


def test_rewards_are_added_by_weight_and_none_counts_as_the_mean_of_its_group():
    """In float64: in float32, equal sums in another order would differ by a bit."""
    functions = {
        "first": (lambda **columns: [0.1, 0.3, None, None], 1.0),
        "second": (lambda **columns: [0.2, 0.1, None, 4.0], 3.0),
    }
    run = SimpleNamespace(reward_functions=functions)
    scores = grpo.score(run, {"completions": ["2", "3", "4", "5"]}, num_generations=2)
    # The first function judges nothing in the second group, which counts as 0.
    assert scores["reward"].tolist() == pytest.approx([0.7, 0.6, 12, 12], abs=1e-15)
    second = scores["rewards/second"].tolist()
    assert second == pytest.approx([0.2, 0.1, math.nan, 4.0], nan_ok=True)


@pytest.mark.parametrize(
    "returned", [[1.0], [1.0] * 5, [1, 2, 3, "x"], [math.inf] * 4, None]
)
def test_a_reward_must_return_a_number_or_none_for_each_completion(returned):
    run = SimpleNamespace(reward_functions={"mine": (lambda **_: returned, 1.0)})
    with pytest.raises(grpo.Error, match="^reward mine returned .*, not 4 numbers"):
        grpo.score(run, {"completions": ["a"] * 4}, num_generations=2)


def test_reasoning_steps_are_the_lines_that_are_not_blank():
    tokenizer = grpo.tiny_tokenizer()
    ids = tokenizer.encode("\n1+1\n\n2+2\n \n<eos>")
    assert grpo.reasoning_steps(tokenizer, ids) == (["1+1", "2+2"], [4, 12])
    ids = tokenizer.encode(" \n <eos>")
    assert grpo.reasoning_steps(tokenizer, ids) == ([], [])


def test_a_step_trains_on_the_advantages_of_its_rewards_and_reasoning_steps():
    run = tiny_run(
        max_completion_length=24, scale_rewards="none", warmup_steps=4, temperature=0.7
    )
    run.step_reward = lambda steps, **columns: [[len(x) for x in xs] for xs in steps]
    # Columns of the data may have any name, also that of a parameter or a variable.
    more = dict.fromkeys(["steps", "source", "function", "values", "size", "run"])
    rows = [{"prompt_ids": ids, **more} for ids in ([3, 12, 4], [5, 12])]
    with mock.patch.object(grpo, "update", wraps=grpo.update) as update:
        metrics, columns = grpo.train_step(run, rows, step=2)
    found = [grpo.reasoning_steps(run.tokenizer, x) for x in columns["completion_ids"]]
    assert columns["steps"] == [texts for texts, _ in found]
    step_rewards, step_ends = columns["step_rewards"], [ends for _, ends in found]
    process = grpo.process_advantages(step_rewards, step_ends, 4, 24, "none")
    outcome = grpo.group_advantages(torch.tensor(columns["reward"]), 4, "none")
    assert_close(update.call_args.args[1].advantages, outcome[:, None] + process)
    mean = statistics.fmean(sum(step_rewards, []))
    assert metrics["step_reward"] == pytest.approx(mean)
    assert metrics["learning_rate"] == pytest.approx(0.5 * run.config.learning_rate)
    assert metrics["sampling_gap"] < 1e-5  # so both are at temperature 0.7


def test_metrics_of_a_step_are_means_over_the_ranks_that_have_them(monkeypatch):
    ranks = [{"reward": 1.0}, {"reward": 3.0}, {"reward": math.nan}]

    def three_ranks(value):
        return ranks if isinstance(value, dict) else [value]

    monkeypatch.setattr(grpo, "all_gather", three_ranks)
    metrics, _ = grpo.train_step(tiny_run(), [{"prompt_ids": [3]}] * 2, step=1)
    assert metrics["reward"] == 2


def test_metrics_of_a_rollout_are_means():
    rewards = [3.0, 0.0, 0.0, 0.1 + 0.2, 0.3, 0.3]
    scores = {
        "reward": torch.tensor(rewards, dtype=torch.float64),
        "rewards/mine": torch.tensor([*rewards[:5], math.nan]),  # one is not judged
    }
    columns = {"finished": [True, True, False, True, True, True]}
    metrics = grpo.rollout_metrics(rollout_batch(), columns, scores, num_generations=3)
    expected = {
        "reward": 3.9 / 6,
        "rewards/mine": 3.6 / 5,
        "reward_std": math.sqrt(3) / 2,  # of 3, 0, 0; the other group has 0
        "zero_std_fraction": 1 / 2,
        "completion_length": (6 + 5 + 4 + 3 + 2 + 1) / 6,
        "truncated_fraction": 1 / 6,
    }
    assert metrics == pytest.approx(expected)


@pytest.mark.slow
def test_the_example_in_the_header_needs_only_the_core(tmp_path, monkeypatch):
    grpo.tiny_model(0).save_pretrained(tmp_path)
    grpo.tiny_tokenizer().save_pretrained(tmp_path)
    (code,) = re.findall(r"(?s)\n\n(    import copy\n.*)", grpo.__doc__)
    tried = "max_steps=3, learning_rate=1e-2"
    code = textwrap.dedent(code).replace("max_steps=200", tried)
    core, source = types.ModuleType("grpo"), Path(grpo.__file__).read_text()
    exec(source.partition("\n# That is all of GRPO. ")[0], vars(core))
    monkeypatch.setitem(sys.modules, "grpo", core)
    scope = {"name": str(tmp_path), "texts": [f"{a}+{a}=" for a in range(8)]}
    exec(code, scope)
    assert scope["metrics"]["kl"] > 1e-5  # the weights have moved


# ------------------------------------------------------------------------------ rewards
# (completion, answer in the data, finished, score)
ANSWERS = [
    # The last box that is not empty, before a mark and the last number.
    (r"so \boxed{42} or 1", "42", True, 1),
    (r"So it is \boxed{7}. Put your final answer within \boxed{}.", "7", True, 1),
    (r"\boxed{7}, in the form \boxed{...}", "7", True, 1),
    ("\\boxed{6}\n#### 5", "6", True, 1),
    (r"\boxed{\left\{x\right.}", r"\left\{x\right.", True, 1),
    (r"\boxed{5} no, it is \boxed{7", "5", True, 0),
    # What follows the last mark: a number and then anything, or words on one line.
    ("#### 72 clips", "72", True, 1),
    ("#### **72**", "72", True, 1),
    ("#### $1,250.50 in total", "1250.5", True, 1),
    ("#### The final answer is: 72 clips", "72", True, 1),
    ("#### 1 then #### 72\nThat took 3 steps.", "72", True, 1),
    ("#### 48 + 24 = 72", "72", True, 1),
    ("#### 12", "12", False, 0),  # it may have been about to say 1234
    ("#### yes", "yes", False, 0),
    ("#### 72 clips", "72", False, 1),
    (r"#### 3\sqrt{2}", "3", True, 0),
    ("#### (1, 2)", "2", True, 0),
    ("#### 2 and 3", "2", True, 0),
    ("5 of them\n#### New  York.", "new york", True, 1),
    ("#### Step 3: add\nThe answer is 72.", "72", True, 1),
    # The last number, unless the text was cut off. No other words are an answer.
    ("it costs $80,000.00.", "80000", True, 1),
    ("so 18", "18", False, 0),
    ("none", "none", True, 0),
    # A letter may have its option behind it.
    (r"\boxed{B) 12}", "B", True, 1),
    (r"\boxed{ \textbf{(J)} x = 5}", "J", True, 1),
    (r"\boxed{\mathbf{B}}", "(B)", True, 1),
    (r"\boxed{(b)}", "(b)", True, 1),
    ("So 8 ####", "8", True, 1),
    (r"\boxed{Because}", "B", True, 0),
    (r"\boxed{A or B}", "B", True, 0),
    # Fractions and mixed numbers.
    (r"\boxed{-\dfrac{3}4}", "-0.75", True, 1),
    (r"\boxed{-2\frac{1}{2}}", "-2.5", True, 1),
    (r"\boxed{\dfrac{\pi}2}", r"\frac{\pi}{2}", True, 1),
    ("The answer is 2 1/2.", "2.5", True, 1),
    ("The answer is 2 1/2.", "1/2", True, 0),
    (r"\boxed{1/0}", "0", True, 0),
    # A number is read whole or not at all.
    ("12,5", "5", True, 0),
    ("it is 1,00,000", "0", True, 0),
    # Scientific notation, also of floats in JSON.
    ("about 7.0e-05", "0.00007", True, 1),
    ("0.00001", 1e-05, True, 1),
    (r"\boxed{3 \times 10^8}", "300000000", True, 1),
    ("it is 1e999", "1e999", True, 1),
    ("it is 1e999999999", "1", True, 0),  # takes no time
    # An en dash and the minus of Unicode are signs.
    ("it is –5", "-5", True, 1),
    ("pages 3–5", "5", True, 1),
    ("it is −5", -5, True, 1),
    (r"\boxed{- 5}", "-5", True, 1),
    (r"\boxed{+5}", "5", True, 1),
    # A tuple is no number.
    (r"\boxed{(0,100)}", "100", True, 0),
    (r"\boxed{(1,2)}", "(1, 2)", True, 1),
    (r"\boxed{\left[ \, \frac{1}{2}, 3\right)}", "[1/2, 3)", True, 1),
    # Of an equation, the right side counts, but not of several or of an inequality.
    (r"\boxed{m+n=293}", "293", True, 1),
    (r"\boxed{x=1, y=2}", "2", True, 0),
    (r"\boxed{x >= 3}", "3", True, 0),
    (r"\boxed{x>=3}", "x >= 3", True, 1),
    # Units stay words in a box, and a percent sign is no division by 100.
    (r"\boxed{5 cm}", "5", True, 0),
    (r"\boxed{5\text{ cm}}", "5 cm", True, 1),
    (r"\boxed{10,\!080}", "10080", True, 1),
    (r"\boxed{1{,}000}", "1000", True, 1),
    (r"\boxed{50\%}", "50", True, 1),
    ("50%", "0.5", True, 0),
]


@pytest.mark.parametrize("completion, answer, finished, score", ANSWERS)
def test_accuracy_reward(completion, answer, finished, score):
    assert grpo.accuracy_reward([completion], [answer], [finished]) == [score]


HOSTILE = ["9", "1,", "1 ", "2 1/", "-", " ", "{", "\\boxed{", "\\boxed{ }", "#### "]


@pytest.mark.slow
@pytest.mark.parametrize("piece", [*HOSTILE, "\\text{", "\\frac{1", "\\frac1", "A) "])
def test_hostile_texts_take_linear_time(piece):
    """A quadratic search would take minutes."""
    text = piece * 20_000
    start = time.process_time()
    for completion in (text, "#### " + text, "\\boxed{" + text + "}" * 20_000):
        assert grpo.accuracy_reward([completion], ["B"]) == [0.0]
    assert time.process_time() - start < 5


def test_format_reward_wants_a_thought_and_an_answer():
    right = ["<think>a</think>b", "\n<think>\na\n</think>\n\nb "]
    wrong = ["<think>a</think> \n", "<think>a</think>b<think>c</think>d"]
    assert grpo.format_reward(["Q"] * 4, right + wrong) == [1, 1, 0, 0]
    completions = ["a</think>b", "<think>a</think>b"]
    assert grpo.format_reward(["Q<think>\n"] * 2, completions) == [1, 0]


def test_math_reward_takes_answers_that_are_equal_as_latex():
    completions = [r"\boxed{x+1}", r"\boxed{x+1}", "so 18"]
    scores = grpo.math_reward(completions, ["1+x", "x", "18"], [False] * 3)
    assert scores == [1, 0, 0]


@pytest.mark.slow
def test_math_reward_gives_up_on_a_tower_of_powers():
    start = time.perf_counter()
    assert grpo.math_reward([r"\boxed{9^{9^{9^9}}}"], ["7"]) == [0.0]
    assert time.perf_counter() - start < 20


# As in GLM, a turn has no end of its own: the marker of the next role is an EOS token.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ thoughts }}{% endif %}"
)
USER = {"role": "user", "content": "1+1="}
ASSISTANT = {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "be kind"}


def chat_tokenizer(template=CHAT_TEMPLATE, post_process=None):
    """The built-in tokenizer with a chat template. post_process: what it makes of each
    text $A, such as "<bos> $A"."""
    tokenizer = grpo.tiny_tokenizer()
    markers = ["<bos>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    tokenizer.chat_template = template
    if post_process:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=post_process, special_tokens=[*tokenizer.get_vocab().items()]
        )
    return tokenizer


def save_model(folder, model, tokenizer=None):
    """Saves a model with the built-in tokenizer, or another one. Returns the folder."""
    model.save_pretrained(folder)
    (tokenizer or grpo.tiny_tokenizer()).save_pretrained(folder)
    return str(folder)


def test_a_reward_model_gives_the_logit_of_each_whole_chat(tmp_path):
    """The pipeline's sigmoid, a second BOS or padding would change it."""
    tokenizer = chat_tokenizer("<bos>" + CHAT_TEMPLATE, post_process="<bos> $A")
    options = {**TINY_SIZES, "vocab_size": len(tokenizer), "pad_token_id": 0}
    config = transformers.Qwen2Config(num_labels=1, **options)
    torch.manual_seed(0)
    model = transformers.Qwen2ForSequenceClassification(config).eval()
    chats = [[USER], [SYSTEM, USER]]
    completions = ["2", "it is 3"]
    expected = []
    for chat, completion in zip(chats, completions):
        chat = [*chat, {"role": "assistant", "content": completion}]
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        expected.append(model(torch.tensor([ids])).logits.item())
    assert min(expected) < 0 or max(expected) > 1  # not probabilities
    score = grpo.load_function(f"reward_model:{save_model(tmp_path, model, tokenizer)}")
    found = score(messages=chats, completions=completions, answer=["2"] * 2)
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_judge_marks_a_batch_greedily_as_each_answer_alone(tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.pad_token = None  # as in Llama 3
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    model.generation_config.update(do_sample=True, temperature=9.0)
    judge = grpo.load_function(f"judge:{save_model(tmp_path, model, tokenizer)}")
    texts = ["2", "it is 3, is it not", "1+1+1", "a"]
    alone = [judge(messages=[[USER]], completions=[text])[0] for text in texts]
    assert judge(messages=[[USER]] * 4, completions=texts) == alone
    assert any(alone)


def test_a_judge_marks_an_answer_to_the_last_question_by_0_to_1_or_none():
    replies = ["8", "10", "I give 7.5/10", "none", "100"]
    pipeline = mock.Mock(return_value=[[{"generated_text": x}] for x in replies])
    with mock.patch.object(grpo.transformers, "pipeline", return_value=pipeline):
        judge = grpo.load_function("judge:some/model")
    chat = [USER, ASSISTANT, {"role": "user", "content": "why {x}?"}]
    marks = judge(messages=[chat] * 5, completions=["because"] * 5)
    assert marks == [0.8, 1.0, 0.75, None, None]
    [message] = pipeline.call_args.args[0][0]
    assert re.match(r"(?s)why {x}\?\n.*\nbecause$", message["content"])


def hash_reward(completions, **columns):
    """A reward that a model without any skill gets some of."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


HASHED = f"{__file__}:hash_reward"  # an argument of --reward


def test_rewards_are_loaded_with_their_weights():
    """A file is imported as a module, so that its functions can be pickled."""
    assert grpo.load_rewards(["accuracy", "format=2e-1", f"{HASHED}=-2"]) == {
        "accuracy": (grpo.accuracy_reward, 1.0),
        "format": (grpo.format_reward, 0.2),
        HASHED: (hash_reward, -2.0),
    }


# --------------------------------------------------------------------- data and prompts
def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "line, question, answer",
    [
        (r'{"prompt": "1+1?", "answer": "\\[2\\]"}', "1+1?", r"\[2\]"),
        ('{"question": "1+1?", "answer": "1 and 1\\n#### 1,002"}', "1+1?", "1,002"),
        (r'{"problem": "1+1?", "solution": "\\boxed{\\frac12}"}', "1+1?", r"\frac12"),
        ('{"prompt": "1+1?", "answer": null, "solution": "2"}', "1+1?", "2"),
        ('{"prompt": "1\u2028?\x85", "answer": "2"}\n\n', "1\u2028?\x85", "2"),
    ],
)
def test_data_may_have_the_usual_columns(tmp_path, line, question, answer):
    (tmp_path / "data").write_text(line, newline="")
    (row,) = grpo.read_rows(str(tmp_path / "data"), grpo.Config())
    assert row["messages"] == [{"role": "user", "content": question}]
    assert grpo.gold_answer(row["answer"]) == answer
    assert row["solution"] is not None


def test_rows_keep_their_columns_and_have_those_of_all_rows(tmp_path):
    first = {"prompt": [SYSTEM, USER], "answer": "2", "solution": "1+1=2"}
    second = {"prompt": "b", "answer": 1, "source": "x"}
    path = write_rows(tmp_path / "data", [first, second])
    rows = grpo.read_rows(path, grpo.Config())
    assert rows[0] == {**first, "messages": [SYSTEM, USER], "source": None}
    assert rows[1]["source"] == "x"


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"prompt": ', "JSONDecodeError"),
        (b'{"prompt": "caf\xe9", "answer": "1"}', "UnicodeDecodeError"),
        (b'{"answer": "1"}', "problem"),
        (b'{"prompt": "a", "answer": "$"}', "`answer` or `solution`"),
        (b'{"prompt": [{"role": "user", "content": null}], "answer": "1"}', "texts"),
        (b'{"prompt": [{"role": "system", "content": "a"}], "answer": "1"}', "user"),
    ],
)
def test_the_first_bad_line_is_named_before_a_model_is_loaded(tmp_path, line, reason):
    path = tmp_path / "train.jsonl"
    good = b'{"prompt": "a", "answer": "1"}\n'
    path.write_bytes(good + line + b"\n" + good + line)
    config = grpo.Config(data=str(path), model="no/model", reward=["format", "math=2"])
    with pytest.raises(grpo.Error, match=f"train.jsonl:2: .*{reason}"):
        grpo.set_up(config)


def test_held_out_rows_are_random_and_never_trained_on(tmp_path):
    rows = [{"prompt": str(i), "answer": i} for i in range(300)]
    config = grpo.Config(data=str(write_rows(tmp_path / "data", rows)))
    rows, held_out = grpo.load_rows(config)
    answers = [row["answer"] for row in held_out + rows]
    assert sorted(answers) == list(range(300)) != answers
    assert len(held_out) == 30
    assert grpo.load_rows(config) == (rows, held_out)


def encoded(messages, tokenizer=None, eos="<|user|>", **options):
    """The row that `encode_prompts` makes of a chat, and its tokens."""
    tokenizer = tokenizer or chat_tokenizer()
    run = SimpleNamespace(
        config=grpo.Config(**{"reward": ["format"], **options}),
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.convert_tokens_to_ids(["<unk>", eos]),
    )
    (row,) = grpo.encode_prompts(run, [{"messages": messages, "level": 5}])
    assert row["level"] == 5
    return row, tokenizer.convert_ids_to_tokens(row["prompt_ids"])


ASKED = "<|user|>\n1+1=<|assistant|>"


@pytest.mark.parametrize(
    "chat, options, prompt",
    [
        ([USER], {"system_prompt": "be brief"}, "<|system|>\nbe brief" + ASKED),
        ([SYSTEM, USER], {"system_prompt": "be brief"}, "<|system|>\nbe kind" + ASKED),
        (
            [USER, ASSISTANT, USER],
            {"prompt_template": "Add {question}!"},
            ASKED + "\n2<|user|>\nAdd 1+1=!<|assistant|>",
        ),
        ([USER], {"chat_template_kwargs": '{"thoughts": "no"}'}, ASKED + "no"),
        # Base models carry templates that they were not trained on.
        ([SYSTEM, USER], {"eos": "<eos>"}, "be kind\n1+1="),
        ([SYSTEM, USER], {"eos": "<|assistant|>"}, "be kind\n1+1="),
    ],
)
def test_a_chat_becomes_a_prompt_by_the_chat_template(chat, options, prompt):
    row, _ = encoded(chat, **options)
    assert row["prompts"] == prompt
    assert USER["content"] == "1+1="  # the given row stays as it is


def test_a_prompt_asks_for_a_box_and_an_open_answer_is_continued():
    row, _ = encoded([USER, ASSISTANT], reward=["format", "math=2"])
    assert "\\boxed{}" in row["prompts"]
    assert row["prompts"].endswith("<|assistant|>\n2")


@pytest.mark.parametrize(
    "template", [None, "<bos>" + CHAT_TEMPLATE], ids=["text", "chat"]
)
def test_a_prompt_has_one_bos_and_no_eos_at_its_end(template):
    """The tokenizer adds both to each text."""
    _, tokens = encoded([USER], chat_tokenizer(template, "<bos> $A <|user|>"))
    assert tokens[0] == "<bos>"
    assert tokens.count("<bos>") == 1
    assert tokens[-1] != "<|user|>"


def test_longer_prompts_and_empty_ones_are_left_out():
    run = tiny_run(reward=["format"], max_prompt_length=3)
    texts = ["", "<eos>", "123", "1234"]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    assert [row["prompts"] for row in grpo.encode_prompts(run, rows)] == ["123"]


# ------------------------------------------------------------- models, logs and options
def test_a_completion_ends_with_any_eos_of_tokenizer_and_model():
    model = grpo.tiny_model(0)
    model.generation_config.eos_token_id = [3, 7, 0]
    assert grpo.load_tokenizer("tiny", model)[1] == [0, 3, 7]


def test_a_model_without_an_eos_token_is_an_error(tmp_path):
    model, tokenizer = grpo.tiny_model(0), grpo.tiny_tokenizer()
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    name = save_model(tmp_path, model, tokenizer)
    with pytest.raises(grpo.Error, match=f"^--model {name}: .* has an EOS token$"):
        grpo.load_tokenizer(name, model)


def test_the_log_has_null_for_no_number_and_begins_anew_without_a_checkpoint(tmp_path):
    run, log = tiny_run(output_dir=str(tmp_path)), tmp_path / "metrics.jsonl"
    grpo.append_row(run.config, log.name, {"a": math.nan, "b": [-math.inf, 1.5]})
    assert log.read_text() == '{"a": null, "b": [null, 1.5]}\n'
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    with pytest.raises(grpo.dcp.api.CheckpointException):  # it has no state
        grpo.restore(run)
    assert log.exists()
    checkpoint.rmdir()
    assert grpo.restore(run) == 0
    assert not log.exists()


def test_help_shows_the_options(capsys):
    with pytest.raises(SystemExit):
        grpo.parse_args(["--help"])
    assert "--lora_rank" in capsys.readouterr().out


def test_the_tiny_model_has_defaults_of_its_own_and_what_is_typed_wins():
    config = grpo.parse_args(["--learning-rate", "0.5", "--num_generations=4"])
    own = {**grpo.TINY, "learning_rate": 0.5, "num_generations": 4}
    assert {name: getattr(config, name) for name in own} == own
    config = grpo.parse_args(["--model", "x", "--output-dir", "y", "--run-id", "z"])
    assert config == grpo.Config(model="x", output_dir="y", run_id="z")


def test_a_run_is_resumed_with_its_options_and_what_is_typed_is_saved(tmp_path):
    typed = ["--output-dir", str(tmp_path / "run"), "--learning-rate", "0.5"]
    first = grpo.parse_args([*typed, "--reward", "format", "accuracy=2"])
    assert first.run_id and first.run_id != grpo.parse_args([]).run_id
    with contextlib.ExitStack() as stack:
        grpo.claim_output_dir(first, stack)
    folder = str((tmp_path / "run").rename(tmp_path / "moved"))
    second = grpo.parse_args(["--resume", folder, "--max-steps", "400", "--beta", "0"])
    expected = {"resume": folder, "output_dir": folder, "max_steps": 400, "beta": 0.0}
    assert second == dataclasses.replace(first, **expected)
    with contextlib.ExitStack() as stack:
        grpo.claim_output_dir(second, stack)
    third = grpo.parse_args(["--resume", folder, "--beta", "0.1"])
    assert third == dataclasses.replace(second, beta=0.1)
    with pytest.raises(grpo.Error, match="evaluates a --model, not a run to --resume"):
        grpo.parse_args(["--resume", folder, "--max-steps", "0"])


# ---------------------------------------------------------------- rewards of the README
def readme_reward(name):
    """A function of the rewards.py that the README shows."""
    readme = Path(grpo.__file__).with_name("README.md").read_text()
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", readme)
    (code,) = [block for block in blocks if "def one_language(" in block]
    rewards = {}
    exec(code, rewards)
    return rewards[name]


def test_one_language_is_the_share_of_letters_in_a_script():
    one_language = readme_reward("one_language")
    texts = ["Füge 2 hinzu", "2 + 2", "ab ве"]
    assert one_language(texts, answer=["1"] * 3) == [1.0, None, 0.5]
    assert one_language(["你好 ok"], script="CJK") == [0.5]


bubblewrap = subprocess.run(
    "bwrap --unshare-all --ro-bind / / true", shell=True, capture_output=True
)
ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
ISOLATED = """
import os, socket
assert "HOME" not in os.environ
assert not os.path.exists("/etc/passwd")
assert len(socket.if_nameindex()) == 1
"""


@pytest.mark.slow
@pytest.mark.skipif(bubblewrap.returncode != 0, reason="bubblewrap does not work here")
def test_the_last_block_of_code_must_pass_the_tests_on_its_own():
    right = [
        f"```python\nx = 1\n```\n```python\nprint('hi')\n{ADD}```\nDone.",
        f"```python\n{ADD}{ISOLATED}```",
    ]
    wrong = [
        f"```python\n{ADD}",
        "```python\nimport os; os._exit(0)\n```",
        f"```python\n{ADD}x = bytearray(10**10)\n```",
    ]
    scores = readme_reward("code")(right + wrong, [ADD_TESTS] * 5)
    assert scores == [1, 1, 0, 0, 0]


# --------------------------------------------------------------------------- whole runs
# Options of a run of half a second.
QUICK = {
    "reward": HASHED,
    "dtype": "float32",
    "max_steps": 3,
    "sft_steps": 0,
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_completion_length": 4,
    "eval_every": 0,
    "warmup_steps": 2,
}


def arguments(**options):
    """Command-line arguments: max_steps=3 becomes --max-steps 3."""
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def run_program(**options):
    """Runs `main` in this process. Returns its `Run`, if it gets as far as training."""
    with mock.patch.object(grpo, "train", wraps=grpo.train) as train:
        grpo.main(arguments(**options))
    return train.call_args.args[0]


def new_run(folder, **options):
    return run_program(**{**QUICK, **options, "output_dir": folder})


def logged(folder, name="metrics.jsonl"):
    """The rows of a log, without times and memory."""
    rows = []
    for line in Path(folder, name).read_text().splitlines():
        row = json.loads(line)
        rows.append({x: row[x] for x in row if not x.endswith(("seconds", "gb"))})
    return rows


def saved_steps(folder):
    return sorted(int(x.name[11:]) for x in Path(folder).glob("checkpoint-*"))


def outcome_of(folder):
    """What a run comes to: its logs, and the bytes of weights and optimizer state in
    its one checkpoint."""
    (checkpoint,) = Path(folder).glob("checkpoint-*")
    files = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("state/*.distcp")]
    contents = {x.relative_to(checkpoint): x.read_bytes() for x in files}
    assert len(files) >= 2
    return logged(folder), logged(folder, "completions.jsonl"), contents


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def trained_weights(run):
    """{name: weight} of a policy. The float32 shard of a single rank is the whole."""
    found = {}
    for name, weight in run.policy.named_parameters():
        is_shard = isinstance(weight, grpo.DTensor)
        found[name] = (weight.to_local() if is_shard else weight).detach().cpu()
    return found


@pytest.mark.slow
def test_the_built_in_task_learns(tmp_path):
    """From 0.41 to 0.60 in 20 steps, with a standard error of 0.02 each."""
    new_run(tmp_path, **grpo.TINY, reward="accuracy", max_steps=20, warmup_steps=0)
    rows = logged(tmp_path)
    before = statistics.mean(row["reward"] for row in rows[:3])
    after = statistics.mean(row["reward"] for row in rows[-3:])
    assert before < 0.5 and after > before + 0.1
    # The reference is the model after the supervised steps, and stays as it is.
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["kl"] > 0.01


@pytest.mark.slow
def test_the_logs_have_evaluations_and_completions_of_every_second_step(tmp_path):
    new_run(tmp_path, eval_every=2)
    metrics = logged(tmp_path)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert ["eval/reward" in row for row in metrics] == [True, False, True, True]
    samples = logged(tmp_path, "completions.jsonl")
    assert [x["step"] for x in samples] == [1] * 16 + [2] * 16 + [3] * 16
    for sample in samples:
        assert [sample["reward"]] == hash_reward([sample["completions"]])


def test_each_seed_step_and_rank_draws_other_numbers(monkeypatch):
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    draws = set()
    for seed, step, rank in [(5, 1, 0), (5, 1, 1), (5, 2, 0), (6, 1, 0)]:
        monkeypatch.setattr(grpo, "RANK", rank)
        grpo.set_seed(seed, step)
        draws.add(torch.rand(1).item())
    assert len(draws) == 4


@pytest.mark.slow
def test_without_steps_a_run_only_evaluates_all_rows_greedily(tmp_path):
    prompts = [f"{i}+{i}=" for i in range(10)]  # of four tokens each
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": x} for x in prompts])
    run = new_run(tmp_path / "run", max_steps=0, eval_data=data)
    inputs = run.tokenizer(prompts, return_tensors="pt").to(grpo.DEVICE)
    ids = run.policy.generate(**inputs, do_sample=False, max_new_tokens=4)
    texts = run.tokenizer.batch_decode(ids[:, 4:], skip_special_tokens=True)
    (row,) = logged(tmp_path / "run")
    expected = statistics.mean(hash_reward(texts))
    assert row["eval/reward"] == pytest.approx(expected) and expected > 0
    assert saved_steps(tmp_path / "run") == []


def test_without_steps_there_are_no_reference_float32_weights_and_optimizer():
    config = grpo.Config(max_steps=0, dtype="bfloat16")
    run = grpo.build_run(config, "tiny", reward_functions={})
    assert run.reference is None and run.optimizer is None
    assert {weight.dtype for weight in run.policy.parameters()} == {torch.bfloat16}


def test_an_evaluation_leaves_out_unjudged_completions(monkeypatch):
    """And ranks without a row of their own: here the last of four."""
    more = {"rewards/most": [1.0]}, {"rewards/most": [1.0]}, {"rewards/most": [9.0]}
    monkeypatch.setattr(grpo, "all_gather", lambda scores: [scores, *more])
    run = tiny_run()
    run.reward_functions = {"most": (lambda **columns: [None, 1, 1], 2.0)}
    metrics = grpo.evaluate(run, 3 * [{"prompt_ids": [3]}], step=0)
    assert metrics == {"eval/reward": 2, "eval/rewards/most": 1}


@pytest.mark.slow
def test_a_supervised_step_descends_the_negative_log_likelihood(tmp_path):
    """That of the solution and its EOS, and of all weights in spite of LoRA."""
    rows = 4 * [{"prompt": "1+1=", "solution": "23"}]
    rows += 5 * [{"prompt": "1+1=", "solution": "2345"}]  # too long with its EOS
    steps = mock.patch.object(grpo, "optimizer_step", wraps=grpo.optimizer_step)
    with steps as optimizer_step:
        new_run(
            tmp_path / "run",
            data=write_rows(tmp_path / "data.jsonl", rows),
            lora_rank=2,
            sft_steps=1,
            max_grad_norm=0.0,
            temperature=2.0,
        )
    run = optimizer_step.call_args_list[0].args[0]
    assert run.reference is None
    assert run.optimizer.param_groups[0]["lr"] == run.config.sft_learning_rate
    ids = torch.tensor([run.tokenizer.encode("1+1=23<eos>")])
    policy = grpo.tiny_model(0)  # as it was before
    logps = policy(ids).logits[0].log_softmax(1)
    loss = -(logps[3, ids[0, 4]] + logps[4, ids[0, 5]] + logps[5, ids[0, 6]]) / 3
    grads = torch.autograd.grad(loss, list(policy.parameters()))
    for moment, grad in zip(first_moments(run), grads):
        assert_close(moment.cpu(), 0.1 * grad, atol=1e-6, rtol=1e-4)


# ------------------------------------------------------- checkpoints, LoRA and bfloat16
KILLER = """
import os
from torch.distributed import checkpoint

def killer(completions, **columns):
    if os.path.exists(os.environ.get("KILL_AFTER", "")):
        checkpoint.save = lambda *args, **kwargs: os.kill(os.getpid(), 9)
    return [sum(map(ord, text)) % 7 for text in completions]
"""


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    """kill -9 in the middle of the second checkpoint."""
    (tmp_path / "killer.py").write_text(KILLER)
    options = {
        **QUICK,
        "reward": f"{tmp_path}/killer.py:killer",
        "max_steps": 4,
        "save_every": 2,
        "eval_every": 3,
        "dtype": "bfloat16",
        "lora_rank": 2,
        "sft_steps": 2,
        "num_mini_batches": 2,
        "lr_scheduler_type": "linear",
    }
    folder = tmp_path / "killed"
    result = subprocess.run(
        [sys.executable, grpo.__file__, *arguments(**options, output_dir=folder)],
        env={**os.environ, "KILL_AFTER": str(folder / "checkpoint-2")},
    )
    assert result.returncode == -signal.SIGKILL
    assert saved_steps(folder) == [2] and logged(folder)[-1]["step"] == 4
    with open(folder / "metrics.jsonl", "a") as log:
        log.write('{"step": 1, "cut off')
    (folder / "partial" / "stale.safetensors").touch()
    run_program(resume=folder)
    run_program(**options, output_dir=tmp_path / "whole")
    assert outcome_of(folder) == outcome_of(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_a_model_of_transformers(tmp_path, dtype):
    """In the dtype of the run, with the tied weight once."""
    run = new_run(tmp_path, dtype=dtype, max_steps=1)
    checkpoint = tmp_path / "checkpoint-1"
    load = AutoModelForCausalLM.from_pretrained
    model, info = load(checkpoint, output_loading_info=True)
    assert not any(info.values()) and model.config.architectures
    assert model.dtype == getattr(torch, dtype)  # that of config.json
    for name, weight in trained_weights(run).items():
        expected = weight.to(getattr(torch, dtype))
        assert torch.equal(model.get_parameter(name), expected)
    size = (checkpoint / "model.safetensors").stat().st_size
    num_weights = model.num_parameters()  # of a tied weight, once
    assert size < num_weights * getattr(torch, dtype).itemsize + 4000  # the header


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_trains_nothing_but_adapters_that_peft_loads(tmp_path, dtype):
    """Its reference has the same weights, without them: the KL term starts at 0."""
    run = new_run(tmp_path, dtype=dtype, lora_rank=2, sft_steps=2, learning_rate=0.01)
    base = weights_of(tmp_path / "sft")
    checkpoint = tmp_path / "checkpoint-3"
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(checkpoint).base_model.model
    for name, weight in trained_weights(run).items():
        if "lora_" in name:
            assert weight.dtype == torch.float32
            assert torch.equal(loaded.get_parameter(name), weight)
        else:
            assert torch.equal(weight, base[name.replace(".base_layer", "")])
        if "lora_B" in name:  # starts at 0, and each step moves it by the rate or less
            assert 0 < weight.abs().median() <= weight.abs().max() < 0.03
    assert run.policy.peft_config["default"].lora_alpha == 4
    weights = {id(weight) for weight in run.policy.parameters()}
    assert {id(weight) for weight in run.reference.parameters()} <= weights
    kls = [row["kl"] for row in logged(tmp_path)]
    assert kls[0] == pytest.approx(0, abs=1e-6) and kls[2] > 1e-5
    assert not (checkpoint / "model.safetensors").exists()


def test_adapters_start_alike_in_every_run_and_rank(tmp_path):
    name = save_model(tmp_path, grpo.tiny_model(0))
    runs = [grpo.build_run(grpo.Config(lora_rank=2), name, {}) for _ in range(2)]
    first, second = map(trained_weights, runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_small_updates_of_a_bfloat16_run_are_kept_in_float32(tmp_path):
    """At a learning rate of 1e-6 the bfloat16 weights barely move."""
    model = tiny_model("olmo2", vocab_size=len(grpo.TOKENS)).bfloat16()
    folder = save_model(tmp_path / "model", model)
    run = new_run(
        tmp_path / "run",
        model=folder,
        dtype="bfloat16",
        learning_rate=1e-6,
        warmup_steps=0,
    )
    before, after = weights_of(folder), weights_of(tmp_path / "run" / "checkpoint-3")
    for name, weight in trained_weights(run).items():
        moves = (weight - before[name]).abs()
        if "proj.weight" in name:  # three updates of about 1e-6
            assert 3e-7 < moves.median() < moves.max() < 4e-6
            assert (after[name] == before[name]).float().mean() > 0.95
    rows = logged(tmp_path / "run")
    assert all(0 < row["sampling_gap"] < 0.05 for row in rows)
    # Layers of OLMo 2 get float32 inputs. FSDP2 casts them, in policy and reference.
    assert rows[0]["kl"] == 0
    # FSDP2 does not split what is frozen: it is whole on every rank.
    assert not any(weight.requires_grad for weight in run.reference.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("gap, temperature", [(0.5, 1), (math.nan, 1), (0.05, 4)])
def test_a_run_stops_if_sampling_and_training_differ(tmp_path, gap, temperature):
    """By 0.1 nats at temperature 1. Log-probs at temperature 4 are closer."""
    result = {"sampling_gap": gap}, {}
    step = mock.patch.object(grpo, "train_step", return_value=result)
    with step, pytest.raises(SystemExit, match="sampling and of training differ by"):
        new_run(tmp_path, temperature=temperature)


# --------------------------------------------------------- signals, trackers and errors
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_restores_the_usual_handlers(number):
    usual = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    with contextlib.ExitStack() as stack:
        received = grpo.heed_signals(stack)
        assert signal.getsignal(number) not in usual
        signal.raise_signal(number)
        assert received == [number]
        assert signal.getsignal(signal.SIGINT) is usual[0]
        assert signal.getsignal(signal.SIGTERM) is usual[1]
    with contextlib.ExitStack() as stack:  # a run that gets no signal
        grpo.heed_signals(stack)
    assert signal.getsignal(signal.SIGINT) is usual[0]


@pytest.mark.slow
def test_a_tracker_gets_all_rows_and_the_id_of_the_run(tmp_path, monkeypatch):
    wandb = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_RUN_ID", "")  # restored after the test
    new_run(tmp_path / "run", report_to="wandb", max_steps=1, eval_every=1)
    run = run_program(resume=tmp_path / "run", max_steps=2)
    first, second = [call.kwargs["name"] for call in wandb.init.call_args_list]
    assert first == second == os.environ["WANDB_RUN_ID"] == f"run-{run.config.run_id}"
    calls = wandb.log.call_args_list
    assert [call.kwargs["step"] for call in calls] == [0, 1, 2]
    assert "eval/reward" in calls[0].args[0] and "loss" in calls[1].args[0]
    monkeypatch.setattr(grpo, "RANK", 1)
    with contextlib.ExitStack() as stack:
        grpo.tracker(run.config, stack)({"loss": 1.0}, step=3)
    assert wandb.init.call_count == wandb.finish.call_count == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, message",
    [
        ({"reward": "fluency"}, "fluency is neither built in nor FILE.py:FUNCTION"),
        ({"reward": f"{__file__}:typo"}, "no function 'typo' in"),
        ({"reward": "math.py:f"}, "math.py: rename it, another module has this name"),
        ({"prompt_template": "1+1="}, "--prompt-template must contain {question}"),
        ({"output_dir": "theirs"}, "theirs is not empty: --resume it or choose"),
        ({"output_dir": "locked"}, "lock' could not be acquired"),
        ({"prompts_per_step": 5000}, "--prompts-per-step: there are only 450 prompts"),
        ({"max_steps": 0, "max_prompt_length": 1}, "--eval-data: there are no prompts"),
        ({"max_completion_length": 40_000}, "--max-completion-length: .* positions"),
        ({"resume": "missing"}, "No such file.*missing/options.json"),
        ({"report_to": "wandb"}, "wandb.*: pip install wandb$"),
        ({"model": "no/such/folder"}, "no/such/folder"),
    ],
    ids=str,
)
def test_a_mistake_is_reported_in_one_line(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    Path("math.py").touch()
    Path("theirs").mkdir()
    Path("theirs", "mine").touch()
    options = {**QUICK, "output_dir": "run", **options}
    stops = pytest.raises(SystemExit, match=f"^error: .*{message}")
    with grpo.filelock.FileLock("locked/lock"), stops as stop:
        grpo.main(arguments(**options))
    assert "\n" not in stop.value.code
    assert os.listdir("theirs") == ["mine"]
    assert not Path("locked", "options.json").exists()


@pytest.mark.slow
def test_out_of_memory_names_the_options_to_lower(tmp_path):
    no_memory = mock.patch("grpo.train_step", side_effect=torch.OutOfMemoryError)
    with no_memory, pytest.raises(SystemExit, match="^error: out of memory: lower --"):
        new_run(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name, error", [("generate", TypeError), ("score", OSError)])
def test_an_error_in_an_edited_function_keeps_its_traceback(tmp_path, name, error):
    edited = mock.patch.object(grpo, name, side_effect=error("a typo"))
    with edited, pytest.raises(error, match="^a typo$"):
        new_run(tmp_path)


# ------------------------------------------------------------------------ several ranks
def test_ranks_wait_two_hours_for_the_slowest_reward(monkeypatch):
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    with mock.patch.object(grpo.dist, "init_process_group") as init_process_group:
        grpo.join_ranks(grpo.Config(prompts_per_step=2), contextlib.ExitStack())
    assert init_process_group.call_args.kwargs["timeout"].total_seconds() == 7200


# Options of the updates whose gradients are compared.
UPDATES = [
    {"loss_type": "dapo", "num_mini_batches": 2, "num_iterations": 2},
    {"loss_type": "dr_grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "grpo", "beta": 0.0},
    {"lora_rank": 2, "beta": 0.0, "num_iterations": 2},
]
# The lengths of four completions of each of four prompts. Of two ranks the first has
# the prompts 0 and 2, and the second the prompts 1 and 3.
LENGTHS = [6, 5, 6, 3] + [1, 1, 1, 1] + [6, 6, 2, 4] + [1, 1, 1, 1]


def gradients_of_an_update(options):
    """The moments of the gradients of an update on 4 prompts, of which this rank has a
    share, and the metrics."""
    config = grpo.Config(
        prompts_per_step=4, micro_batch_size=3, dtype="float32", **options
    )
    run = grpo.build_run(config, "tiny", reward_functions={})
    torch.manual_seed(0)
    ids = torch.randint(2, 47, (16, 6))
    mask = torch.arange(6) < torch.tensor(LENGTHS)[:, None]
    batch = grpo.Batch(
        prompt_ids=ids.flip(1),
        prompt_mask=mask.flip(1),
        completion_ids=ids,
        mask=mask,
        advantages=torch.randn(16, 1).expand(16, 6),
    )
    share = torch.arange(16).view(4, 4)[grpo.RANK :: grpo.WORLD_SIZE].flatten()
    metrics = grpo.update(run, batch.select(share), learning_rate=1e-3)
    return first_moments(run), grpo.mean_over_ranks(metrics)


def sample_eos(logits, temperature=1.0):
    """Ends all completions at once, with the token 0."""
    logps = logits.float().log_softmax(1)[:, 0]
    return torch.zeros(len(logits), dtype=torch.long), logps


def program_of_each_rank(folder):
    """torchrun runs this on two ranks. The tests below look at what it leaves."""
    grpo.join_ranks(grpo.Config(), contextlib.ExitStack())
    gradients = [gradients_of_an_update(options) for options in UPDATES]
    torch.save(gradients, folder / f"rank{grpo.RANK}.pt")
    options = {
        "dtype": "bfloat16",
        "data": folder / "data.jsonl",
        "eval_data": folder / "five.jsonl",
        "eval_every": 2,
        "max_steps": 2,
        "prompts_per_step": 2,
        "save_total_limit": 0,
    }
    with (
        mock.patch.object(grpo, "join_ranks"),
        mock.patch.object(grpo.dist, "destroy_process_group"),
        # Ranks that sample different numbers of tokens must not wait for each other.
        mock.patch.object(grpo, "sample", sample_eos if grpo.RANK else grpo.sample),
    ):
        new_run(folder / ("other" if grpo.RANK else "whole"), **options)
        # Only the second rank gets a signal. Both must stop.
        received = [signal.SIGTERM] if grpo.RANK else []
        signals = mock.patch.object(grpo, "heed_signals", return_value=received)
        # A text as the code of a SystemExit is printed, and the exit status is 1.
        hint = f"^stopped; go on: python grpo.py --resume {folder}/stopped$"
        with signals:
            with pytest.raises(SystemExit, match=hint):
                new_run(folder / "stopped", **options)
            run_program(resume=folder / "stopped")  # in the last step, none stops it
        new_run(folder / "lora", **options, lora_rank=2, sft_steps=1)
    grpo.dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The folder in which two ranks ran `program_of_each_rank`."""
    folder = tmp_path_factory.mktemp("ranks")
    row = {"prompt": "1+1=", "answer": 2, "solution": "123"}
    write_rows(folder / "data.jsonl", [row] * 9)
    write_rows(folder / "five.jsonl", [{"prompt": f"{i}+1="} for i in range(5)])
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    result = subprocess.run(
        [sys.executable, *torchrun, __file__, folder],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(UPDATES)))
def test_gradients_and_metrics_of_two_ranks_are_those_of_one(two_ranks, case):
    expected = gradients_of_an_update(UPDATES[case])
    for rank in (0, 1):
        found = torch.load(two_ranks / f"rank{rank}.pt")[case]
        # Sums in another order, in float32.
        assert_close(found, expected, atol=1e-7, rtol=1e-4)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_and_they_resume_bit_for_bit(two_ranks):
    stopped, whole = two_ranks / "stopped", two_ranks / "whole"
    assert saved_steps(stopped) == [1, 2]
    assert logged(stopped) == logged(whole)
    found = weights_of(stopped / "checkpoint-2")
    assert_close(found, weights_of(whole / "checkpoint-2"), atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "lora"])
def test_a_checkpoint_of_two_ranks_resumes_on_one(two_ranks, tmp_path, name):
    folder = Path(grpo.shutil.copytree(two_ranks / name, tmp_path / name))
    run = run_program(resume=folder, max_steps=3)
    assert {int(x["step"]) for x in run.optimizer.state.values()} == {3}
    assert [row["step"] for row in logged(folder)] == [0, 1, 2, 3]


if __name__ == "__main__":
    program_of_each_rank(Path(sys.argv[1]))
