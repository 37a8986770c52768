# SPDX-License-Identifier: MIT
"""grpo.py by numbers: worked examples first, then each function against a plain loop in float64, then
whole runs. `python -m pytest` runs on a CPU, offline."""

import copy
import dataclasses
import functools
import http.server
import inspect
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import grpo
from grpo import (
    Config,
    Error,
    MasterAdamW,
    accuracy_reward,
    answers_match,
    clipped_surrogate,
    completion_mask,
    cut_micro_batches,
    extract_answer,
    fast_path_holds,
    format_reward,
    generate,
    group_advantages,
    grpo_loss,
    importance_ratio,
    kl_k3,
    parse_args,
    sample,
    token_logprobs,
)

torch.set_num_threads(2)


@pytest.fixture
def spy(monkeypatch):
    """spy(name): a list that fills with the arguments of all calls of a function of grpo.py."""

    def watch(name):
        calls, original = [], getattr(grpo, name)
        monkeypatch.setattr(grpo, name, lambda *a, **k: (calls.append(a), original(*a, **k))[1])
        return calls

    return watch


# ------------------------------------------------------------------------------- worked examples


HIGH, MORE = 0.8660, 0.9354  # 0.5 / 0.5774 and 0.5 / 0.5345
ADVANTAGES = [  # rewards, G, advantages
    ([1, 0, 0, 1, 0, 0, 1, 1], 4, [HIGH, -HIGH, -HIGH, HIGH, -HIGH, -HIGH, HIGH, HIGH]),
    ([1, 0, 0, 1, 1, 0, 0, 1], 8, [MORE, -MORE, -MORE, MORE, MORE, -MORE, -MORE, MORE]),
    ([1, 1, 1, 1, 0, 0, 0, 1], 4, [0, 0, 0, 0, -0.5, -0.5, -0.5, 1.5]),  # by group, not by batch
    ([3, 5], 2, [-0.7071, 0.7071]),
]
RATIOS = [
    (0.9, 0.5, 1.8, 1.2),
    (0.2, 0.5, 0.4, 0.8),
    (0.7, 0.5, 1.4, 1.2),
]  # new, old, ratio, clipped
REWARDS = [  # question, answer, completions, rewards
    ("Calculate 2 + 2 × 6", "14", ["14", "16", "10"], [1, 0, 0]),
    ("Solve y = 2x + 1 for x = 2, y = ", "5", ["5", "6", "7", "5", "5.0"], [1, 0, 0, 1, 1]),
    ("Solve y = 2x + 1 for x = 4, y = ", "9", ["10", "2", "9", "9"], [0, 0, 1, 1]),
]
MASKS = [  # ids, EOS ids, mask
    ([5, 6, 7], [2], [1, 1, 1]),  # no EOS
    ([2, 6, 7], [2], [1, 0, 0]),  # the first token
    ([5, 6, 2], [2], [1, 1, 1]),  # the last
    ([5, 2, 2], [2], [1, 1, 0]),  # pad == EOS, or repeated: the first is learnt, the rest is not
    ([5, 2, 6], [2], [1, 1, 0]),  # filler after the end
    ([5, 3, 2], [2, 3], [1, 1, 0]),  # several EOS ids
    ([5, 3, 2], 2, [1, 1, 1]),  # one, as a number
    ([5, 3, 2], [], [1, 1, 1]),  # none
]


@pytest.mark.parametrize("rewards, num_generations, expected", ADVANTAGES)
def test_advantages_of_worked_examples(rewards, num_generations, expected):
    found = group_advantages(torch.tensor(rewards, dtype=torch.float32), num_generations)
    torch.testing.assert_close(found, torch.tensor(expected), atol=5e-5, rtol=0)


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1.0, -2.3, 1e-8, 12345.678])
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_equal_rewards_have_exactly_no_advantage(value, scale_rewards):
    rewards = torch.tensor([value] * 8 + [0.0, 1.0] * 4)
    assert group_advantages(rewards, 8, scale_rewards)[:8].tolist() == [0.0] * 8


@pytest.mark.parametrize("new, old, ratio, clipped", RATIOS)
def test_ratio_and_clip_of_worked_examples(new, old, ratio, clipped):
    new, old, mask = torch.tensor([[new]]).log(), torch.tensor([[old]]).log(), torch.ones(1, 1)
    assert importance_ratio(new, old, mask).item() == pytest.approx(ratio, rel=1e-5)
    side = 1.0 if ratio > 1 else -1.0  # the sign of A for which the clipped side is the smaller
    found = [clipped_surrogate(new, old, torch.tensor([A])).item() for A in (side, -side)]
    assert found == pytest.approx([side * clipped, -side * ratio], rel=1e-5)


def test_clip_higher_moves_the_upper_bound_alone():
    new, old = torch.tensor([[0.9, 0.2]]).log(), torch.tensor([[0.5, 0.5]]).log()
    found = clipped_surrogate(new, old, torch.tensor([[1.0, -1.0]]), epsilon=0.2, epsilon_high=0.28)
    torch.testing.assert_close(found, torch.tensor([[1.28, -0.8]]))


def test_k3_of_worked_example():
    policy, reference = torch.tensor(0.7).log(), torch.tensor(0.5).log()
    assert kl_k3(policy, reference).item() == pytest.approx(0.050758, abs=1e-6)
    assert kl_k3(policy, policy).item() == 0


def test_surrogate_of_worked_example():
    logp, old_logp = torch.tensor([[0.7], [0.7]]).log(), torch.tensor([[0.5], [0.5]]).log()
    found = clipped_surrogate(logp, old_logp, torch.tensor([0.9354, -0.9354]))
    torch.testing.assert_close(found, torch.tensor([[1.1225], [-1.3096]]), atol=5e-5, rtol=0)


@pytest.mark.parametrize("question, answer, completions, expected", REWARDS)
def test_accuracy_of_worked_examples(question, answer, completions, expected):
    count = len(completions)
    assert accuracy_reward([question] * count, completions, [answer] * count) == expected


@pytest.mark.parametrize("ids, eos_token_ids, expected", MASKS)
def test_completion_mask_runs_through_the_first_eos(ids, eos_token_ids, expected):
    mask = completion_mask(torch.tensor([ids]), eos_token_ids)
    assert mask.dtype == torch.bool and mask.int().tolist() == [expected]


# -------------------------------------------------------------------------------------- answers

EXTRACTED = [
    (r"so \boxed{42}.", "42"),
    (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\text{a}\{1\}}", r"\text{a}\{1\}"),
    (r"\boxed 7$.", "7"),
    (r"100 \boxed{5} 200", "5"),
    (r"broken off in \boxed{4", None),
    (r"\boxed{}", None),
    ("we get 5\n#### 18", "18"),
    ("#### 3\nand #### 1,234 ", "1,234"),
    ("#### 18 dollars", "18 dollars"),
    ("#### The answer is 18.", "18"),
    ("#### 18\nThat is 2 more than 16.", "18"),
    ("the numbers 3 and then 4.", "4"),
    ("it costs $80,000.00.", "$80,000.00"),
    ("that is −5", "−5"),
    ("5-3=2", "2"),
    ("pages 3-5", "5"),
    ("one half is 1/2", "1/2"),
    (r"it is \frac{3}{4}", r"\frac{3}{4}"),
    ("the answer is 1e5.", "1e5"),
    ("it took 3 1/2 hours", "3 1/2"),
    ("no number at all", None),
    ("", None),
]


@pytest.mark.parametrize("text, expected", EXTRACTED)
def test_extract_answer(text, expected):
    assert extract_answer(text) == expected


SAME = """$80,000|80000; 80,000.00|80000; 80{,}000|80000; 18.|18; \\frac{1}{2}|0.5; 1/2|0.5; \\dfrac12|1/2; .5|1/2
50%|0.5; 50\\%|50; 0.5|50%; 50 percent|50%; -3|−3; - 3|-3; 7.0|7; +7|7; x = 5|5; x=5|5; f(x) = 5|5; 5 cm|5
5\\text{ cm}|5; 5\\,\\text{cm}^2|5; 12 miles per hour|12; 18 dollars|18; \\$18|18; 90^\\circ|90; 90°|90
3 \\times 10^{5}|300000; 3×10^5|300000; 1.5e3|1500; 1\\frac{1}{2}|3/2; 1 1/2|1.5; -\\frac{1}{2}|-0.5; \\frac{-1}{2}|-1/2
$x^2+1$|x^2 + 1; \\left(1, 2\\right)|(1,2); \\text{Yes}|yes; \\text{(A)}|A; (B)|B; 2\\sqrt3|2\\sqrt{3}; \\(7\\)|7
0.1|1/10; 0.3333|0.33330; 1e2|100; 007|7; €5|5; 2/4|1/2; y = 2x + 1|2x+1; 5cm|5; 5 cm|5 cm; 5 km|5km; 60mph|60"""
DIFFERENT = """1|11; 11|1; 5|-5; 80|80000; 1,2|12; 0.5|5; 1/2|2; 1/3|0.333; x|y; 5x|5; 5|5x; 5 pi|5; 5\\pi|5; 3 million|3
50%|0.05; 5%|50%; 1/0|1; 1/0|2/0; (1,2)|(2,1); x=1, y=2|2; 2 dozen|2; 18 or 20|18; 6xy|6; 4ab|4cd; 3 AM|3 PM; 12 and a half|12; 2 no solution|2; 1 2|12; |; 0.5%|0.05; \\text{}|0"""


def _pairs(table):
    return [pair.strip(" ").split("|") for line in table.splitlines() for pair in line.split("; ")]


@pytest.mark.parametrize("answer, gold", _pairs(SAME))
def test_same_answers_match_both_ways(answer, gold):
    assert answers_match(answer, gold) and answers_match(gold, answer)


@pytest.mark.parametrize("answer, gold", _pairs(DIFFERENT))
def test_different_answers_do_not(answer, gold):
    assert not answers_match(answer, gold) and not answers_match(gold, answer)


def test_missing_answers_match_nothing():
    pairs = [(None, "1"), ("1", None), (None, None)]
    assert not any(answers_match(answer, gold) for answer, gold in pairs)


BAD_TEXTS = {
    "brackets": "\\boxed{" * 100_000,
    "closed": "\\boxed" + "{" * 50_000 + "}" * 50_000,
    "digits": "9" * 5_000,
    "boxed digits": "\\boxed{" + "9" * 5_000 + "}",
    "commas": "1" + ",111" * 30_000 + "1",
    "fractions": "\\frac{1" * 30_000,
    "minus": "-" * 100_000 + "1",
    "spaces": "#### " + " " * 100_000 + "1",
    "letters": "\\boxed{5 " + "a" * 100_000 + "!}",
    "exponent": "\\boxed{1e999999999}",
    "power": "\\boxed{10^{10^{10}}}",
    "equals": "#### " + "x=" * 50_000,
    "think": "<think>" * 20_000 + "</think>" * 20_000,
    "texts": "\\boxed{" + "\\text{" * 20_000 + "}" * 20_001,
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_hostile_texts_cost_milliseconds(name):
    start = time.perf_counter()
    assert accuracy_reward([""], [BAD_TEXTS[name]], ["7"]) == [0.0]
    assert format_reward([""], [BAD_TEXTS[name]]) == [0.0]
    answers_match(BAD_TEXTS[name], BAD_TEXTS[name])
    assert time.perf_counter() - start < 0.5  # a quadratic scan would take minutes


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text("0123456789.,-/%$\\{}boxedfrac# =x^e"))
def test_any_text_has_an_answer_or_none_and_never_raises(text):
    answer = extract_answer(text)
    assert answer is None or (isinstance(answer, str) and answer)
    assert answers_match(answer, answer) in ([False] if answer is None else [True, False])
    format_reward([text], [text])


@settings(max_examples=200, deadline=None)
@given(st.fractions(max_denominator=1000), st.integers(1, 9))
def test_equal_fractions_match_and_others_do_not(value, factor):
    latex = rf"\frac{{{value.numerator * factor}}}{{{value.denominator * factor}}}"
    assert answers_match(latex, f"{value.numerator}/{value.denominator}")
    assert not answers_match(latex, str(value + 1))


FORMATS = [
    ("", "<think>a</think>b", 1.0),
    ("", " <think>\na\n</think>\n\nb ", 1.0),
    ("<think>\n", "a</think>b", 1.0),
    ("", "a</think>b", 0.0),
    ("", "<think>a</think>", 0.0),
    ("", "<think>a", 0.0),
    ("", "x<think>a</think>b", 0.0),
    ("", "<think>a</think>b<think>c</think>d", 0.0),
    ("", "</think>b<think>", 0.0),
]


@pytest.mark.parametrize("prompt, completion, expected", FORMATS)
def test_format_reward(prompt, completion, expected):
    assert format_reward([prompt], [completion]) == [expected]


# --------------------------------------------------------------------------------------- the loss


def slow_grpo_loss(
    logp, old_logp, ref_logp, advantages, mask, epsilon, high, beta, loss_type, level, max_length
):
    """The equations as loops over floats (of torch, so that autograd differentiates them)."""
    total, num_tokens = torch.zeros((), dtype=torch.float64), int(mask.sum())
    for i in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        row = torch.zeros((), dtype=torch.float64)
        for t in tokens:
            if level == "token":
                ratio = torch.exp(logp[i, t] - old_logp[i, t])
            else:
                ratio = torch.exp(sum(logp[i, u] - old_logp[i, u] for u in tokens) / len(tokens))
            advantage = advantages[i] if advantages.dim() == 1 else advantages[i, t]
            clipped = min(max(ratio.item(), 1 - epsilon), 1 + high)
            inside = ratio * advantage <= clipped * advantage
            row = row - (ratio * advantage if inside else clipped * advantage)
            if ref_logp is not None:
                delta = ref_logp[i, t] - logp[i, t]
                row = row + beta * (torch.exp(delta) - delta - 1)
        if loss_type == "grpo":
            total = total + row / max(1, len(tokens)) / len(mask)
        elif loss_type == "dapo":
            total = total + row / num_tokens
        else:
            total = total + row / (len(mask) * max_length)
    return total


def random_batch(n=6, c=5, seed=0, per_token=False):
    """Log-probs far enough from each other that some ratios are clipped; one row is all masked."""
    generator = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    logp, noise, ref = (normal(n, c) for _ in range(3))
    mask = torch.arange(c) < torch.randint(1, c + 1, (n, 1), generator=generator)
    mask[n // 2] = False
    advantages = normal((n, c) if per_token else (n,))
    return logp - 2, logp - 2 + 0.3 * noise, logp - 2 + 0.5 * ref, advantages, mask


LOSS_TYPES, LEVELS = ("grpo", "dapo", "dr_grpo"), ("token", "sequence")
VARIANTS = list(itertools.product(LOSS_TYPES, LEVELS))


@pytest.mark.parametrize("loss_type, level", VARIANTS)
@pytest.mark.parametrize("referred, high, per_token", [(1, 0.2, 0), (0, 0.28, 0), (1, 0.28, 1)])
def test_loss_and_gradient_are_those_of_the_loops(loss_type, level, referred, high, per_token):
    logp, old_logp, ref_logp, advantages, mask = random_batch(per_token=per_token)
    batch = logp.requires_grad_(), old_logp, ref_logp if referred else None, advantages, mask
    options = dict(loss_type=loss_type, importance_sampling_level=level, max_completion_length=9)
    loss, metrics = grpo_loss(*batch, epsilon=0.2, epsilon_high=high, beta=0.1, **options)
    slow = slow_grpo_loss(*batch, 0.2, high, 0.1, loss_type, level, 9)
    torch.testing.assert_close(loss, slow, atol=1e-12, rtol=0)
    gradients = [torch.autograd.grad(x, logp, retain_graph=True)[0] for x in (loss, slow)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)
    assert gradients[0][~mask].abs().max() == 0
    assert not any(value.requires_grad for value in metrics.values())


def test_metrics_are_means_over_unmasked_tokens():
    logp, old_logp, ref_logp, advantages, mask = random_batch()
    _, metrics = grpo_loss(logp, old_logp, ref_logp, advantages, mask, epsilon_high=0.4)
    tokens = [(i, t) for i in range(len(mask)) for t in range(mask.shape[1]) if mask[i, t]]
    ratios = {x: math.exp(logp[x] - old_logp[x]) for x in tokens}
    signed = [(r, advantages[i]) for (i, _), r in ratios.items()]
    clipped = [(r > 1.4 and sign > 0) or (r < 0.8 and sign < 0) for r, sign in signed]
    kl = [math.exp(ref_logp[x] - logp[x]) - (ref_logp[x] - logp[x]) - 1 for x in tokens]
    assert 0 < sum(clipped) < len(tokens)
    assert metrics["clip_fraction"].item() == pytest.approx(sum(clipped) / len(tokens))
    assert metrics["ratio_mean"].item() == pytest.approx(sum(ratios.values()) / len(tokens))
    assert metrics["kl"].item() == pytest.approx(sum(kl).item() / len(tokens))
    entropy = -sum(logp[x] for x in tokens).item() / len(tokens)
    assert metrics["entropy"].item() == pytest.approx(entropy)


@pytest.mark.parametrize("loss_type, level", VARIANTS)
def test_gradcheck_away_from_the_kinks(loss_type, level):
    logp, old_logp, ref_logp, advantages, mask = random_batch()
    ratio = importance_ratio(logp, old_logp, mask, level)
    assert min((ratio[mask] - edge).abs().min() for edge in (0.8, 1.2)) > 1e-4

    def loss(x):
        options = dict(loss_type=loss_type, importance_sampling_level=level)
        return grpo_loss(x, old_logp, ref_logp, advantages, mask, **options)[0]

    assert torch.autograd.gradcheck(loss, logp.requires_grad_(), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss_type, level", VARIANTS)
def test_on_policy_gradient_is_reinforce_with_the_group_as_baseline(loss_type, level):
    logp, _, _, advantages, mask = random_batch()
    options = dict(loss_type=loss_type, importance_sampling_level=level, max_completion_length=9)
    loss, metrics = grpo_loss(logp.requires_grad_(), None, None, advantages, mask, **options)
    (gradient,) = torch.autograd.grad(loss, logp)
    normaliser = dict(grpo=6 * mask.sum(1, keepdim=True).clamp(min=1), dapo=mask.sum(), dr_grpo=54)
    torch.testing.assert_close(gradient, -advantages[:, None] * mask / normaliser[loss_type])
    assert metrics["ratio_mean"] == 1 and metrics["clip_fraction"] == 0 and metrics["kl"] == 0


@pytest.mark.parametrize("loss_type, level", VARIANTS)
@pytest.mark.parametrize("cuts", [1, 2, 4])
def test_losses_of_micro_batches_add_up_to_the_loss_of_the_batch(loss_type, level, cuts):
    batch = random_batch(n=8)
    options = dict(loss_type=loss_type, importance_sampling_level=level, max_completion_length=9)
    whole = grpo_loss(*batch, **options)[0]
    totals = dict(num_sequences=8, num_tokens=batch[-1].sum())
    parts = zip(*(x.chunk(cuts) for x in batch))
    losses = [grpo_loss(*part, **options, **totals)[0] for part in parts]
    torch.testing.assert_close(sum(losses), whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize("loss_type, level", VARIANTS)
@pytest.mark.parametrize("under_the_mask", [0.0, math.inf, -math.inf, math.nan, 1e30])
def test_nothing_under_the_mask_reaches_loss_or_gradient(loss_type, level, under_the_mask):
    *logps, advantages, mask = random_batch()
    results = []
    for fill in (0.0, under_the_mask):
        filled = [x.masked_fill(~mask, fill).requires_grad_() for x in logps]
        options = dict(loss_type=loss_type, importance_sampling_level=level)
        per_token = advantages[:, None].expand(mask.shape).masked_fill(~mask, fill)
        loss, metrics = grpo_loss(*filled, per_token, mask, **options)
        results.append([loss, *torch.autograd.grad(loss, filled[0]), *metrics.values()])
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected)


def test_a_batch_that_is_all_masked_gives_zero():
    logp, old_logp, ref_logp, advantages, mask = random_batch()
    batch = logp, old_logp, ref_logp, advantages, mask & False
    for loss_type in LOSS_TYPES:
        loss, metrics = grpo_loss(*batch, loss_type=loss_type)
        assert loss == 0 and all(value == 0 for value in metrics.values())


def test_half_precision_logps_give_a_float32_loss():
    logp, old_logp, ref_logp, advantages, mask = random_batch()
    half = [x.bfloat16() for x in (logp, old_logp, ref_logp)]
    loss = grpo_loss(*half, advantages.float(), mask)[0]
    expected = grpo_loss(*(x.float() for x in half), advantages.float(), mask)[0]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    far_off = kl_k3(torch.tensor([-30.0]).bfloat16(), torch.tensor([-5.0]).bfloat16())
    assert far_off.item() == pytest.approx(math.exp(25) - 26, rel=1e-6)


def test_k3_is_an_unbiased_estimate_of_the_divergence():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    k3 = kl_k3(policy.log(), reference.log())
    divergence = (policy * (policy / reference).log()).sum().item()
    assert (policy * k3).sum().item() == pytest.approx(divergence, rel=1e-5) and (k3 >= 0).all()
    nearly_equal = kl_k3(torch.tensor(-1.0), torch.tensor(-1.0 - 1e-4))
    assert nearly_equal.item() == pytest.approx(5e-9, rel=1e-2)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages_are_those_of_the_loop(scale_rewards):
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    everything = rewards.tolist()
    expected = []
    for start in range(0, 12, 4):
        group = everything[start : start + 4]
        mean = sum(group) / 4
        of = group if scale_rewards == "group" else everything
        middle = sum(of) / len(of)
        std = math.sqrt(sum((r - middle) ** 2 for r in of) / (len(of) - 1))
        expected += [(r - mean) / (1 if scale_rewards == "none" else std + 1e-8) for r in group]
    expected = torch.tensor(expected, dtype=torch.float64)
    found = group_advantages(rewards, 4, scale_rewards)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_rewards, num_generations", [(4, 1), (4, 0), (5, 2), (4, 8)])
def test_advantages_want_groups_of_two_or_more(num_rewards, num_generations):
    with pytest.raises(ValueError, match="groups"):
        group_advantages(torch.zeros(num_rewards), num_generations)


@pytest.mark.parametrize("option", ["loss_type", "importance_sampling_level"])
def test_unknown_variants_are_errors(option):
    with pytest.raises(ValueError, match=option):
        grpo_loss(*random_batch(), **{option: "x"})


def test_pure_functions_leave_their_inputs_alone():
    logp, old_logp, ref_logp, advantages, mask = batch = random_batch()
    rewards, ids = torch.randn(8), torch.randint(0, 3, (4, 6))
    before = copy.deepcopy([*batch, rewards, ids])
    for loss_type, level in VARIANTS:
        grpo_loss(*batch, loss_type=loss_type, importance_sampling_level=level)
    kl_k3(logp, ref_logp), clipped_surrogate(logp, old_logp, advantages, mask=mask)
    group_advantages(rewards, 4), completion_mask(ids, [2]), sample(logp), sample(logp, 0.5, 0.9, 2)
    assert all(torch.equal(x, y) for x, y in zip(before, [*batch, rewards, ids]))


# --------------------------------------------------------------------------------------- log-probs


def tiny_model(kind, seed=0, **options):
    """A random model of a real architecture, small enough for loops."""
    shape = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    shape |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    shape |= dict(pad_token_id=0, eos_token_id=1, initializer_range=0.3)
    gpt2 = dict(
        vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3
    )
    gemma2 = dict(**shape, head_dim=8, sliding_window=4, query_pre_attn_scalar=8)
    mamba = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4)
    configs = {
        "qwen2": lambda: transformers.Qwen2Config(**shape, tie_word_embeddings=True),
        "untied": lambda: transformers.Qwen2Config(**shape, tie_word_embeddings=False),
        "llama": lambda: transformers.LlamaConfig(**shape),
        "gpt2": lambda: transformers.GPT2Config(**gpt2, eos_token_id=1),
        "mistral": lambda: transformers.MistralConfig(**shape, sliding_window=3),
        "gemma2": lambda: transformers.Gemma2Config(**gemma2),
        "cohere": lambda: transformers.CohereConfig(**shape, logit_scale=0.25),
        "phi": lambda: transformers.PhiConfig(**shape),  # its head has a bias, zero at first
        "mamba": lambda: transformers.MambaConfig(**mamba),
    }
    torch.manual_seed(seed)
    config = configs[kind]()
    for name, value in options.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def ragged_batch(num_generations=3, seed=0):
    """Two left-padded prompts of 5 and 3 tokens, completions of 1 to 6 tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompt_ids = torch.randint(2, 40, (2, 5), generator=generator)
    prompt_mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool()
    completion_ids = torch.randint(2, 40, (2 * num_generations, 6), generator=generator)
    lengths = torch.randint(1, 7, (2 * num_generations, 1), generator=generator)
    lengths[0] = 6
    return prompt_ids, prompt_mask, completion_ids, torch.arange(6) < lengths


def slow_logprobs(model, prompt_ids, prompt_mask, completion_ids, mask, temperature):
    """One unpadded forward for each completion."""
    result = torch.zeros(mask.shape)
    rows = []
    for i in range(len(mask)):
        prompt = i // (len(mask) // len(prompt_ids))
        prompt_tokens = prompt_ids[prompt][prompt_mask[prompt]]
        tokens = completion_ids[i][mask[i]]
        logits = model(torch.cat([prompt_tokens, tokens])[None]).logits[0] / temperature
        predictions = logits[len(prompt_tokens) - 1 : -1].log_softmax(-1)
        row = torch.stack([predictions[t, token] for t, token in enumerate(tokens)])
        rows.append(torch.cat([row, result[i, len(tokens) :]]))
    return torch.stack(rows)


FAST = dict.fromkeys(("qwen2", "untied", "llama", "gpt2", "mistral"), True)
FAST |= dict.fromkeys(("gemma2", "cohere", "phi"), False)


@pytest.mark.parametrize("kind, fast", [*FAST.items(), ("qwen2", False), ("gpt2", False)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_are_those_of_one_unpadded_forward_per_row(kind, temperature, fast):
    model, batch = tiny_model(kind), ragged_batch()
    before = copy.deepcopy(batch)
    weights = torch.randn(batch[-1].shape, generator=torch.Generator().manual_seed(1))
    results, params = [], list(model.parameters())
    slow = slow_logprobs(model, *batch, temperature)
    for logp in (slow, token_logprobs(model, *batch, temperature, fast=fast)):
        assert logp.dtype == torch.float32 and logp[~batch[-1]].abs().max() == 0
        gradients = torch.autograd.grad((logp * weights).sum(), params, allow_unused=True)
        results.append([logp, *(g for g in gradients if g is not None)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    assert all(torch.equal(x, y) for x, y in zip(before, batch))


def test_log_probs_of_a_large_vocabulary_in_chunks(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    hidden, weight, scale = normal(7, 6).requires_grad_(), normal(30, 6).requires_grad_(), normal(7)
    ids = torch.randint(0, 30, (7,), generator=generator)
    plain = (hidden @ weight.t() / 0.7).log_softmax(1)[torch.arange(7), ids]
    expected = [plain, *torch.autograd.grad((plain * scale).sum(), (hidden, weight))]
    for chunk in (1, 40, 64, 10_000):  # from one logit at a time to all at once
        monkeypatch.setattr(grpo.LogProbs, "CHUNK", chunk)
        logp = grpo.LogProbs.apply(hidden, weight, ids, 0.7)
        found = [logp, *torch.autograd.grad((logp * scale).sum(), (hidden, weight))]
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, y, atol=1e-12, rtol=0)


def test_padding_changes_nothing():
    model, (prompt_ids, prompt_mask, completion_ids, mask) = tiny_model("qwen2"), ragged_batch()
    pad = torch.nn.functional.pad
    wide = pad(prompt_ids, (4, 0), value=7), pad(prompt_mask, (4, 0))
    long = pad(completion_ids, (0, 3), value=9), pad(mask, (0, 3))
    batch = prompt_ids, prompt_mask, completion_ids, mask
    found = token_logprobs(model, *wide, *long)[:, :6]
    torch.testing.assert_close(found, token_logprobs(model, *batch), atol=1e-5, rtol=1e-5)
    assert all(torch.equal(x, y) for x, y in zip(grpo.crop(*wide, *long), batch))
    empty = grpo.crop(prompt_ids, prompt_mask, completion_ids, torch.zeros_like(mask))
    assert empty[2].shape == (6, 1) and token_logprobs(model, *empty).abs().max() == 0


@pytest.mark.parametrize("kind, holds", [*FAST.items(), ("mamba", False)])
def test_the_fast_path_is_refused_to_models_that_it_would_get_wrong(kind, holds):
    assert fast_path_holds(tiny_model(kind)) is holds
    assert fast_path_holds(tiny_model(kind, initializer_range=0.01).bfloat16()) is holds


def test_gradient_checkpointing_changes_no_number():
    batch, results = ragged_batch(), []
    for checkpointed in (False, True):
        model = tiny_model("qwen2")
        calls = []
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        if checkpointed:
            grpo.checkpoint_layers(model)
        logp = token_logprobs(model, *batch)
        results.append([logp, *torch.autograd.grad(logp.sum(), list(model.parameters()))])
        # 2 layers, prompts and completions, and again in backward
        assert len(calls) == (8 if checkpointed else 4)
    for x, y in zip(*results):
        torch.testing.assert_close(x, y)


# ---------------------------------------------------------------------------------------- sampling


def test_sample_draws_from_the_softmax():
    """Pearson's chi-square over 300 words, more than two blocks of 128. Were it exact, 1 seed in 10,000 would fail."""
    torch.manual_seed(0)
    logits = 1.5 * torch.randn(300)
    draws = sample(logits.expand(200_000, 300).contiguous(), temperature=1.3)
    expected = 200_000 * (logits / 1.3).softmax(0)
    statistic = ((draws.bincount(minlength=300) - expected) ** 2 / expected).sum().item()
    degrees = 299  # Wilson and Hilferty's approximation of the quantile at 1 - 1e-4
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3


def test_sample_of_truncated_distributions():
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().expand(2000, 4)
    assert set(sample(logits, top_k=2).tolist()) == {0, 1}
    assert set(sample(logits, top_p=0.8).tolist()) == {0, 1, 2}
    assert set(sample(logits).tolist()) == {0, 1, 2, 3}
    assert set(sample(logits, temperature=0).tolist()) == {0}


def test_greedy_generation_is_that_of_transformers():
    model, (prompt_ids, prompt_mask, *_) = tiny_model("qwen2"), ragged_batch()
    ours = generate(model, prompt_ids, prompt_mask, 1, 12, [1], temperature=0)
    kwargs = dict(max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0)
    theirs = model.generate(prompt_ids, attention_mask=prompt_mask.long(), **kwargs)[:, 5:]
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("kind, continuous", [("qwen2", True), ("qwen2", False), ("mamba", False)])
def test_transformers_samplers_sample_the_same_policy(kind, continuous):
    model, (prompt_ids, prompt_mask, *_) = tiny_model(kind), ragged_batch()
    model.generation_config = transformers.GenerationConfig(**HOSTILE)
    theirs = functools.partial(grpo.generate_with_transformers, model, continuous=continuous)
    greedy = theirs(prompt_ids, prompt_mask, 1, 12, [1], temperature=0)
    mask = completion_mask(greedy, [1])
    fast = kind == "qwen2"
    logp = token_logprobs(model, prompt_ids, prompt_mask, greedy, mask, fast=fast)
    for i, prompt in enumerate(p[m] for p, m in zip(prompt_ids, prompt_mask)):
        for t in range(int(mask[i].sum())):  # each token is the most probable one
            logits = model(torch.cat([prompt, greedy[i, :t]])[None]).logits[0, -1]
            assert logits.argmax() == greedy[i, t]
            assert logp[i, t].item() == pytest.approx(logits.log_softmax(0).max().item(), abs=1e-4)
    torch.manual_seed(0)
    ids = theirs(prompt_ids[:1], prompt_mask[:1], 300, 2, [1], 0, 0.5)
    assert (ids[~completion_mask(ids, [1])] == 0).all() and model.generation_config.num_beams == 4
    probs = (model(prompt_ids[:1]).logits[0, -1] / 0.5).softmax(0)
    expected = 300 * probs.detach()
    common = expected > 5  # Pearson's chi-square, rare words together
    found = ids[:, 0].bincount(minlength=len(probs)).float()
    cells = [(found[common], expected[common]), (found[~common].sum(), expected[~common].sum())]
    statistic = sum(((f - e) ** 2 / e).sum() for f, e in cells).item()
    assert statistic < common.sum().item() + 5 * (2 * common.sum().item()) ** 0.5


def test_a_cache_that_cannot_be_repeated_is_left_to_transformers():
    plain = {kind: grpo.has_plain_cache(tiny_model(kind)) for kind in ("qwen2", "mistral", "mamba")}
    assert plain == {"qwen2": True, "mistral": True, "mamba": False}
    hybrid = transformers.FalconH1Config()  # attention and Mamba in one layer
    forward = tiny_model("qwen2").forward
    assert not grpo.has_plain_cache(types.SimpleNamespace(config=hybrid, forward=forward))
    no_cache = transformers.OpenAIGPTConfig(n_layer=2, n_embd=32, n_head=4, vocab_size=40)
    assert not grpo.has_plain_cache(AutoModelForCausalLM.from_config(no_cache))


def test_a_failure_of_continuous_batching_is_an_error(monkeypatch):
    model, (prompt_ids, prompt_mask, *_) = tiny_model("qwen2"), ragged_batch()
    for outputs in ({}, {i: types.SimpleNamespace(error="out of pages") for i in range(2)}):
        model.generate_batch = lambda *args, outputs=outputs, **kwargs: outputs
        with pytest.raises(Error, match="out of pages|missing"):
            inputs = model, prompt_ids, prompt_mask, 1, 4, [1]
            grpo.generate_with_transformers(*inputs, continuous=True)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "mistral", "gemma2"])
def test_samples_come_from_the_policy(kind):
    """The sampler's tokens against the probabilities of one unpadded forward: the first two tokens of
    20,000 completions of each prompt, by chi-square. Were it exact, 1 seed in 10,000 would fail."""
    model, (prompt_ids, prompt_mask, *_) = tiny_model(kind, vocab_size=6), ragged_batch()
    prompt_ids, num_samples = prompt_ids % 6, 20_000
    torch.manual_seed(0)
    ids = generate(model, prompt_ids, prompt_mask, num_samples, 2, [1], temperature=1.2)
    for prompt in range(2):
        tokens = prompt_ids[prompt][prompt_mask[prompt]]
        with torch.no_grad():
            first = (model(tokens[None]).logits[0, -1] / 1.2).softmax(0)
            both = torch.stack([torch.cat([tokens, torch.tensor([i])]) for i in range(6)])
            second = (model(both).logits[:, -1] / 1.2).softmax(1)
        second[1] = torch.tensor([1.0, 0, 0, 0, 0, 0])  # after the EOS: pad
        expected = num_samples * (first[:, None] * second).flatten()
        pairs = ids[prompt * num_samples : (prompt + 1) * num_samples]
        counts = (pairs[:, 0] * 6 + pairs[:, 1]).bincount(minlength=36)
        possible = expected > 0
        assert counts[~possible].sum() == 0
        statistic = ((counts - expected) ** 2 / expected)[possible].sum().item()
        assert statistic < 68  # chi-square's quantile at 1 - 1e-4, 30 degrees of freedom: 67.6


def test_a_finished_row_is_padded_costs_nothing_and_does_not_disturb_the_others():
    model, (prompt_ids, prompt_mask, *_) = tiny_model("qwen2"), ragged_batch()
    sizes, embed = [], model.get_input_embeddings()
    hook = embed.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel()))
    torch.manual_seed(3)
    ids = generate(model, prompt_ids, prompt_mask, 50, 10, [1, 2, 3], pad_token_id=39)
    mask = completion_mask(ids, [1, 2, 3])
    hook.remove()
    lengths = mask.sum(1)
    assert sum(sizes) == prompt_ids.numel() + (lengths - 1).sum()  # each prompt once for its group
    assert len(set(lengths.tolist())) > 4 and lengths.max() == ids.shape[1]
    assert (ids[~mask] == 39).all()
    logp = token_logprobs(model, prompt_ids, prompt_mask, ids, mask)
    expected = slow_logprobs(model, prompt_ids, prompt_mask, ids, mask, 1.0)
    torch.testing.assert_close(logp, expected, atol=1e-4, rtol=1e-3)


def test_generation_stops_when_all_rows_have():
    model = tiny_model("qwen2")
    ids = generate(model, *ragged_batch()[:2], 4, 50, list(range(40)))
    assert ids.shape == (8, 1)


def save_model(path, generation_config=None):
    """A folder with a tiny Qwen2 and a character tokenizer, for everything that takes --model."""
    model, tokenizer = grpo.tiny_model(0, torch.float32)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if generation_config:
        Path(path, "generation_config.json").write_text(json.dumps(generation_config))
    return path


HOSTILE = dict(do_sample=True, temperature=0.01, top_p=0.1, top_k=1, repetition_penalty=50.0)
HOSTILE |= dict(min_new_tokens=5, no_repeat_ngram_size=1, suppress_tokens=[5, 6], max_new_tokens=3)
HOSTILE |= dict(eos_token_id=[0, 7], num_beams=4)


def test_sampling_heeds_nothing_of_a_hostile_generation_config_but_its_eos(tmp_path):
    completions = []
    for name, extra in (("kind", dict(eos_token_id=[0, 7])), ("hostile", HOSTILE)):
        path = save_model(tmp_path / name, extra)
        config = Config(model=str(path), max_completion_length=20, dtype="float32")
        model, tokenizer, eos_token_ids = grpo.load_model(config, torch.device("cpu"))
        assert eos_token_ids == [0, 7]
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(7)
        tokenizer.save_pretrained(path)
        model, tokenizer, eos_token_ids = grpo.load_model(config, torch.device("cpu"))
        assert eos_token_ids == [7, 0]  # the tokenizer's own first: supervised answers end with it
        torch.manual_seed(0)
        prompt_ids, prompt_mask = grpo.pad([tokenizer("1+1=")["input_ids"]], 0, "left", "cpu")
        completions.append(generate(model, prompt_ids, prompt_mask, 200, 20, eos_token_ids))
    assert completions[0].tolist() == completions[1].tolist()
    assert len(set(map(tuple, completions[0].tolist()))) > 150  # nowhere near greedy


# ------------------------------------------------------------------------------------------ update


def test_micro_batches_hold_every_row_once_within_the_budget():
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        num_prompts, size = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
        prompts = torch.randint(1, 30, (num_prompts,), generator=generator)
        completions = torch.randint(1, 30, (num_prompts * size,), generator=generator)
        for budget in (1, 40, 100, 300, 10_000):
            cut = cut_micro_batches(prompts, completions, size, budget)
            everything = torch.cat([rows for _, rows in cut]).tolist()
            assert sorted(everything) == list(range(num_prompts * size))
            for index, rows in cut:
                assert (rows // size == index.repeat_interleave(len(rows) // len(index))).all()
                tokens = len(index) * prompts[index].max() + len(rows) * completions[rows].max()
                assert tokens <= budget or len(rows) == 1
            assert len(cut) == 1 or budget < 10_000


def test_micro_batches_are_sorted_by_length():
    lengths = torch.tensor([9, 1, 8, 1, 1, 9, 1, 8])
    cut = cut_micro_batches(torch.tensor([1, 1, 1, 1]), lengths, 2, 22)
    assert [sorted(lengths[rows].tolist()) for _, rows in cut] == [[1, 9], [1, 9], [1, 8], [1, 8]]
    cut = cut_micro_batches(torch.tensor([1, 1, 1, 1]), lengths, 2, 10)
    assert [lengths[rows].tolist() for _, rows in cut] == [[9], [9], [8], [8], [1, 1, 1, 1]]


def on_policy_batch(model, num_generations=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch = ragged_batch(num_generations, seed)
    return batch, torch.randn(2 * num_generations, generator=generator)


def frozen(model, temperature=1.0, fast=True):
    """The reference that `update` takes."""
    how = dict(temperature=temperature, fast=fast)
    return model and (lambda *batch: grpo.token_logprobs(model, *batch, **how).detach())


def gradient_of_update(config, model, reference, batch, advantages):
    """What `update` hands to the optimizer."""
    optimizer, seen = MasterAdamW(model), []

    def step(*args):
        seen.append([p.grad.clone() for p in optimizer.params])
        return MasterAdamW.step(optimizer, *args)

    optimizer.step = step
    reference = frozen(reference, config.temperature)
    metrics = grpo.update(model, reference, optimizer, config, 1e-3, batch, advantages, True)
    return seen, metrics


@pytest.mark.parametrize("loss_type, level", VARIANTS)
@pytest.mark.parametrize("budget", [24, 60, 10_000])
def test_update_takes_the_gradient_of_the_whole_batch_however_it_is_cut(loss_type, level, budget):
    options = dict(loss_type=loss_type, importance_sampling_level=level, max_completion_length=6)
    config = Config(micro_batch_tokens=budget, beta=0.1, temperature=0.7, **options)
    model, reference = tiny_model("qwen2"), tiny_model("qwen2", seed=1)
    batch, advantages = on_policy_batch(model)
    logp = slow_logprobs(model, *batch, 0.7)
    with torch.no_grad():
        ref_logp = slow_logprobs(reference, *batch, 0.7)
    loss, metrics = grpo_loss(logp, None, ref_logp, advantages, batch[-1], beta=0.1, **options)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    (found,), found_metrics = gradient_of_update(config, model, reference, batch, advantages)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, atol=5e-5, rtol=1e-3)
    assert found_metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert found_metrics["kl"] == pytest.approx(metrics["kl"].item(), rel=1e-4)
    assert found_metrics["ratio_mean"] == 1


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_later_iterations_keep_the_log_probs_of_the_first(level):
    """Three updates of one rollout, with a clip range so narrow that it matters."""
    clip = dict(epsilon=0.01, epsilon_high=0.03, importance_sampling_level=level)
    rest = dict(num_iterations=3, micro_batch_tokens=30, beta=0.1, max_grad_norm=0.5)
    config = Config(**rest, **clip)
    model, reference = tiny_model("qwen2"), tiny_model("qwen2", seed=1)
    batch, advantages = on_policy_batch(model)
    slow = copy.deepcopy(model)
    with torch.no_grad():
        old_logp, ref_logp = (slow_logprobs(m, *batch, 1.0) for m in (slow, reference))
    adamw = torch.optim.AdamW(slow.parameters(), lr=1e-3, weight_decay=0.0)
    rows = []
    for _ in range(3):
        adamw.zero_grad()
        logp = slow_logprobs(slow, *batch, 1.0)
        loss, metrics = grpo_loss(logp, old_logp, ref_logp, advantages, batch[-1], beta=0.1, **clip)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(slow.parameters(), 0.5)
        adamw.step()
        rows.append(metrics)
    optimizer = MasterAdamW(model)
    rest = config, 1e-3, batch, advantages, True
    metrics = grpo.update(model, frozen(reference), optimizer, *rest)
    for x, y, start in zip(model.parameters(), slow.parameters(), tiny_model("qwen2").parameters()):
        assert (x - y).norm() < 0.02 * (y - start).norm()
    for name in ("kl", "clip_fraction", "ratio_mean"):
        mean = sum(row[name].item() for row in rows) / 3
        assert metrics[name] == pytest.approx(mean, rel=1e-3)
    assert metrics["clip_fraction"] > 0.1 and metrics["ratio_mean"] != 1


def test_groups_without_advantage_are_left_out_only_where_that_is_exact(spy):
    model, calls = tiny_model("qwen2"), spy("token_logprobs")
    batch, advantages = on_policy_batch(model)
    advantages[:4] = 0
    for reference in (None, tiny_model("qwen2", seed=1)):
        config = Config(beta=0.1 if reference else 0.0)
        logp = slow_logprobs(model, *batch, 1.0)
        ref_logp = slow_logprobs(reference, *batch, 1.0).detach() if reference else None
        loss = grpo_loss(logp, None, ref_logp, advantages, batch[-1], beta=0.1)[0]
        expected = torch.autograd.grad(loss, list(model.parameters()))
        rest = copy.deepcopy(model), reference, batch, advantages
        (found,), metrics = gradient_of_update(config, *rest)
        assert metrics["ratio_mean"] == pytest.approx(1.0)  # over the tokens that are in
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, y, atol=5e-5, rtol=1e-3)
    sizes = [len(completion_ids) for _, _, _, completion_ids, *_ in calls]
    assert sizes == [4, 8, 8]  # the live group alone; all rows of the reference and of the policy
    (found,), metrics = gradient_of_update(Config(beta=0.0), model, None, batch, 0 * advantages)
    assert all(g.abs().max() == 0 for g in found) and metrics["grad_norm"] == 0


def test_micro_batches_of_the_plain_path_count_a_prompt_for_each_completion(spy):
    model, calls = tiny_model("qwen2"), spy("token_logprobs")
    batch, advantages = on_policy_batch(model)
    rest = Config(micro_batch_tokens=30, beta=0.0), 1e-3, batch, advantages, False
    grpo.update(model, None, MasterAdamW(model), *rest)
    sizes = [(len(ids), prompts.shape[1] + ids.shape[1]) for _, prompts, _, ids, *_ in calls]
    assert sum(rows for rows, _ in sizes) == 8
    assert all(rows * length <= 30 for rows, length in sizes)


def test_the_norm_of_bfloat16_gradients_is_a_float32_number():
    model, generator = tiny_model("qwen2").bfloat16(), torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).bfloat16()
    expected = sum(p.grad.double().pow(2).sum() for p in model.parameters()).sqrt().item()
    assert MasterAdamW(model).step(0.0) == pytest.approx(expected, rel=1e-5)


def test_bfloat16_training_at_a_small_learning_rate_moves_the_masters_as_float32_does():
    """300 steps of 1e-6 with one and the same gradient: bfloat16 weights alone would not move at all."""
    single = tiny_model("qwen2")
    for p in single.parameters():
        p.data = p.data.bfloat16().float()
    half, naive = (copy.deepcopy(single).bfloat16() for _ in range(2))
    start = copy.deepcopy(single)
    optimizers = [MasterAdamW(single), MasterAdamW(half)]
    plain = torch.optim.AdamW(naive.parameters(), lr=1e-6, weight_decay=0)
    for step in range(300):
        generator = torch.Generator().manual_seed(step // 30)
        for params in zip(*(model.parameters() for model in (single, half, naive))):
            gradient = torch.randn(params[0].shape, generator=generator).bfloat16()
            for p in params:
                p.grad = gradient.to(p.dtype)
        [optimizer.step(1e-6) for optimizer in optimizers]
        plain.step()
    rows = zip(half.parameters(), optimizers[1].state)
    masters = [grpo.join_halves(p.data, state[2]) for p, state in rows]
    models = single.parameters(), half.parameters(), start.parameters()
    for master, p, h, s in zip(masters, *models):
        assert master.dtype == torch.float32 and torch.equal(master, p.data)
        assert ((h.data.float() - master).abs() <= (master.bfloat16().float() - master).abs()).all()
        assert (master - s).abs().max() > 1e-5
    pairs = ((m.parameters(), start.parameters()) for m in (naive, half))
    moved = [sum((p.float() != s).sum().item() for p, s in zip(*pair)) for pair in pairs]
    assert moved[0] < 0.2 * moved[1]


@pytest.mark.parametrize("budget, dtype", [(10_000, torch.bfloat16), (24, torch.float32)])
def test_gradients_of_several_micro_batches_are_summed_in_float32(budget, dtype):
    model = tiny_model("qwen2").bfloat16()
    batch, advantages = on_policy_batch(model)
    config = Config(micro_batch_tokens=budget, beta=0.0)
    (gradients,), _ = gradient_of_update(config, model, None, batch, advantages)
    assert {g.dtype for g in gradients} == {dtype}


@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_steps_and_gradient_clipping_are_those_of_torch(scale):
    model, generator = tiny_model("qwen2"), torch.Generator().manual_seed(0)
    other = copy.deepcopy(model)
    ours = MasterAdamW(model, weight_decay=0.1)
    theirs = torch.optim.AdamW(other.parameters(), weight_decay=0.1)
    for step in range(1, 6):
        for p, q in zip(model.parameters(), other.parameters()):
            p.grad = step * scale * torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0).item()
        assert ours.step(1e-2 / step, 1.0) == pytest.approx(norm, rel=1e-5)
        theirs.param_groups[0]["lr"] = 1e-2 / step
        theirs.step()
        for p, q in zip(model.parameters(), other.parameters()):
            torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_stops_and_leaves_the_weights(broken):
    model = tiny_model("qwen2")
    batch, advantages = on_policy_batch(model)
    before, optimizer = copy.deepcopy(model), MasterAdamW(model)
    advantages[0] = broken
    rest = Config(beta=0.0), 1e-3, batch, advantages, True
    with pytest.raises(Error, match="weights are as they were"):
        grpo.update(model, None, optimizer, *rest)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters()))
    assert all(p.grad is None for p in model.parameters())  # the next step does not find it


def test_dropout_is_off(tmp_path):
    model, tokenizer = grpo.tiny_model(0, torch.float32)
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, *_ = grpo.load_model(Config(model=str(tmp_path), dtype="float32"), torch.device("cpu"))
    batch = ragged_batch()
    assert torch.equal(token_logprobs(model, *batch), token_logprobs(model, *batch))


def test_the_dtype_is_the_one_asked_for(tmp_path):
    for stored in (torch.float32, torch.bfloat16):
        model, tokenizer = grpo.tiny_model(0, stored)
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        for asked in ("float32", "bfloat16"):
            config = Config(model=str(tmp_path), dtype=asked)
            model, *_ = grpo.load_model(config, torch.device("cpu"))
            assert model.dtype == getattr(torch, asked)
            halves = {len(state) > 2 for state in MasterAdamW(model).state}
            assert halves == {asked == "bfloat16"}


# --------------------------------------------------------------------------- options, prompts, rewards


def refusal(*words):
    """The message of a command line that must end in one line and an exit code that is not 0."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", ["grpo.py", *words])
        grpo.main()
    assert isinstance(stop.value.code, str)  # which is printed; the exit code is 1
    assert "\n" not in stop.value.code
    return stop.value.code


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_generations", 1), ("prompts_per_step", 0), ("max_prompt_length", 0), ("temperature", 0.0),
        ("temperature", math.nan), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1), ("beta", -0.1),
        ("beta", math.inf), ("epsilon", 1.5), ("epsilon_high", -1.0), ("num_iterations", 0),
        ("learning_rate", math.nan), ("learning_rate", -1.0), ("max_grad_norm", 0.0), ("seed", -1),
        ("micro_batch_tokens", 0), ("loss_type", "ppo"), ("scale_rewards", "row"), ("dtype", "int8"),
        ("importance_sampling_level", "word"), ("prompt_template", "no place for it"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_named(name, value):
    with pytest.raises(Error, match="--" + name.replace("_", "-")):
        Config(**{name: value})


def test_tiny_has_defaults_of_its_own_and_what_the_user_types_wins():
    assert parse_args([]).learning_rate == grpo.TINY["learning_rate"] != Config().learning_rate
    assert parse_args(["--learning-rate", "0.5", "--max-steps", "7"]).learning_rate == 0.5
    assert parse_args(["--model", "x"]) == Config(model="x")
    config = parse_args(["--reward", "accuracy", "format=0.5", "--no-gradient-checkpointing"])
    assert config.reward == ("accuracy", "format=0.5") and not config.gradient_checkpointing


CONTRACT = """model tiny; num_generations 8; prompts_per_step 8; max_prompt_length 512; max_completion_length 512
temperature 1.0; top_p 1.0; top_k 0; beta 0.04; epsilon 0.2; epsilon_high None; loss_type grpo; scale_rewards group
importance_sampling_level token; num_iterations 1; learning_rate 1e-06; warmup_steps 10; max_grad_norm 1.0
weight_decay 0.0; max_steps 200; seed 0; gradient_checkpointing False; lora_rank 0; sft_steps 0; reward ('accuracy',)"""


@pytest.mark.parametrize("option", re.split("; |\n", CONTRACT))
def test_every_option_of_the_contract_exists_with_its_default(option):
    name, default = option.split()
    assert str(getattr(Config(), name)) == default


ROWS = [  # a line of data, its prompt, its gold answer
    ({"question": "1+1?", "answer": "one and one\n#### 1,002"}, "1+1?", "1,002"),
    ({"problem": "1+1?", "solution": r"so \boxed{2}", "level": 5}, "1+1?", "2"),
    ({"prompt": "1+1?", "answer": 2}, "1+1?", "2"),
    ({"prompt": "1+1?", "answer": 0}, "1+1?", "0"),
    ({"prompt": "1+1?", "answer": "", "solution": "2"}, "1+1?", "2"),
    ({"prompt": "1+1\u2028?\x85", "answer": "2"}, "1+1\u2028?\x85", "2"),  # no ends of a JSON line
    ({"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2"}, [{"role": "user", "content": "1+1?"}], "2"),
]  # fmt: skip


@pytest.mark.parametrize("row, prompt, gold", ROWS)
def test_data_in_the_usual_forms(tmp_path, row, prompt, gold):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n\n", encoding="utf-8")
    (found,) = grpo.read_rows(str(path), needs_answer=True)
    assert found["prompt"] == prompt and grpo.gold_answer(found["answer"]) == gold
    assert found.get("level") == row.get("level")


BAD_DATA = {  # what is wrong -> lines of the file, and what the message names
    "empty": (b"", "empty"),
    "blank": (b"\n \n", "empty"),
    "not UTF-8": (b'{"prompt": "\xff"}', "data.jsonl"),
    "malformed": (b'{"prompt": "a", "answer": "1"}\n{"prompt": ', "line 2"),
    "no object": (b"[1]", "line 1"),
    "no question": (b'{"answer": "1"}', "line 1.*question"),
    "a number for a question": (b'{"prompt": 5, "answer": "1"}', "line 1"),
    "messages without content": (b'{"prompt": [{"role": "user"}], "answer": "1"}', "line 1"),
    "no answer": (b'{"prompt": "a", "answer": "1"}\n\n{"prompt": "a"}', "line 3.*answer"),
    "empty answer": (b'{"prompt": "a", "answer": " "}', "line 1.*answer"),
    "unclosed box": (b'{"prompt": "a", "solution": "so \\\\boxed{1"}', "line 1.*answer"),
    "deep": (b'{"prompt": ' + b"[" * 100_000, "line 1"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_wrong_data_is_named_by_file_and_line(tmp_path, name):
    content, message = BAD_DATA[name]
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(Error, match=f"data.jsonl.*{message}|{message}"):
        grpo.read_rows(str(tmp_path / "data.jsonl"), needs_answer=True)
    if "answer" in message:  # which only the accuracy reward wants
        assert grpo.read_rows(str(tmp_path / "data.jsonl"), needs_answer=False)


def test_held_out_prompts_are_never_trained_on():
    train_rows, eval_rows = grpo.load_data(Config(), True)
    assert len(train_rows) == 450 and len(eval_rows) == 50
    assert not {row["prompt"] for row in eval_rows} & {row["prompt"] for row in train_rows}
    assert len(grpo.load_data(Config(model="other"), True)[1]) == 64
    assert grpo.load_data(Config(eval_every=0), True)[1] == []


def test_prompts_come_in_epochs_and_depend_on_the_step_alone():
    rows = list(range(10))
    steps = [grpo.prompt_batch(rows, step, 4, seed=3) for step in range(1, 6)]
    assert sorted(sum(steps, [])) == sorted(2 * rows)
    assert sorted(sum(steps, [])[:10]) == rows and sum(steps, [])[:10] != sum(steps, [])[10:]
    three, four = (grpo.prompt_batch(rows, 4, 4, seed) for seed in (3, 4))
    assert three == steps[3] != four


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def run_of(config, rewards=None, template=None, eos="<eos>"):
    """A Run of the tiny model, its tokenizer with the two tokens of ChatML."""
    model, tokenizer = grpo.tiny_model(0, torch.float32)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    eos_token_ids = [tokenizer.convert_tokens_to_ids(eos)]
    functions = rewards or grpo.load_rewards(config.reward)
    return grpo.Run(config, torch.device("cpu"), functions, model, tokenizer, eos_token_ids)


TEMPLATES = [  # template, EOS, --chat-template, whether it is used
    (None, "<eos>", "auto", False),
    (CHATML, "<eos>", "auto", False),  # Qwen2-Math base: a template that it never saw
    (CHATML, "<|im_end|>", "auto", True),  # an instruct model
    (CHATML, "<|im_end|>", "off", False),
    (CHATML, "<eos>", "on", True),
]


@pytest.mark.parametrize("template, eos, option, chats", TEMPLATES)
def test_a_chat_template_is_used_where_its_end_stops_the_model(template, eos, option, chats):
    run = run_of(Config(chat_template=option, prompt_template="{question}"), None, template, eos)
    (row,) = grpo.encode_prompts([{"prompt": "1+1="}], run)
    chat = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert row["text"] == (chat if chats else "1+1=")
    assert run.tokenizer.decode(row["ids"]) == row["text"]


def test_prompts_are_rendered_with_template_and_system_prompt():
    rows = [{"prompt": "1+1="}, {"prompt": [{"role": "user", "content": "2+2="}]}]
    run = run_of(Config(system_prompt="be brief"))
    texts = [row["text"] for row in grpo.encode_prompts(rows, run)]
    assert texts[0].startswith("be brief\n1+1=\n") and texts[0].endswith("\\boxed{}.\n")
    assert texts[1] == "be brief\n2+2="  # a conversation is left as it is
    config = Config(prompt_template="q: {question} a:", reward=("format",))
    assert grpo.encode_prompts(rows[:1], run_of(config))[0]["text"] == "q: 1+1= a:"
    assert grpo.encode_prompts(rows[:1], run_of(Config(reward=("format",))))[0]["text"] == "1+1="


def test_over_long_prompts_are_left_out_and_counted(capsys):
    run = run_of(Config(max_prompt_length=4, prompt_template="{question}"))
    rows = grpo.encode_prompts([{"prompt": "1+1="}, {"prompt": "10+1="}, {"prompt": ""}], run)
    assert [row["text"] for row in rows] == ["1+1="]
    assert "left out 2 of 3 prompts" in capsys.readouterr().out


REWARD_FILE = """
def length(prompts, completions, **columns):
    return [float(len(c)) for c in completions]

def sees_everything(prompts, completions, completion_ids, answer, level, **kwargs):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer) == len(level)
    return [float(len(ids) + lv) for ids, lv in zip(completion_ids, level)]

def tensor(prompts, completions, **columns):
    import torch
    return torch.ones(len(prompts))

def half_judged(prompts, completions, **columns):
    return [None if i % 2 else 1.0 for i in range(len(prompts))]

def huge(prompts, completions, **columns):
    return [10**400] * len(prompts)

no_function = 5

def hole(prompts, completions, **columns):
    return [[1.0, None]] * len(prompts)

def nan(prompts, completions, **columns):
    return [float("nan")] * len(prompts)

def too_few(prompts, completions, **columns):
    return [1.0]

def words(prompts, completions, **columns):
    return ["good"] * len(prompts)

def number(prompts, completions, **columns):
    return 1.0

def fails(prompts, completions, **columns):
    raise RuntimeError("out of coffee")
"""


@pytest.fixture
def reward_file(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD_FILE)
    return tmp_path / "mine.py"


COLUMNS = dict(prompts=["p", "q"], completions=["a", "bc"], completion_ids=[[1], [2, 3]])
COLUMNS |= dict(answer=["1", "2"], level=[1, 2])


def test_reward_functions_of_a_file_see_what_they_would_see_in_trl(reward_file):
    names = ("length", "sees_everything=0.5", "tensor=-1", "half_judged")
    rewards = grpo.load_rewards([f"{reward_file}:{name}" for name in names])
    assert [weight for _, weight in rewards.values()] == [1.0, 0.5, -1.0, 1.0]
    scores = grpo.score(rewards, **COLUMNS)
    assert scores["length"] == [1.0, 2.0] and scores["sees_everything"] == [2.0, 4.0]
    assert scores["tensor"] == [1.0, 1.0] and scores["half_judged"] == [1.0, None]


def test_every_column_of_the_data_reaches_a_reward_function_whatever_its_name():
    seen = {}

    def look(prompts, **columns):
        seen.update(columns)
        return [0.0] * len(prompts)

    run = run_of(Config(prompt_template="{question}"), {"look": (look, 1.0)})
    data = [{"prompt": "1+1=", "text": "a", "ids": 1, "rewards": 2}, {"prompt": "2+2=", "level": 3}]
    rows = grpo.encode_prompts(data, run)
    ids = torch.tensor([[2, 0], [3, 0]])
    grpo.score_completions(run, rows[1:], ids[1:], ids[1:] > -1)  # a batch where no row has a text
    assert seen["text"] == seen["ids"] == [None] and seen["level"] == [3]
    grpo.score_completions(run, rows, ids, ids > -1)
    assert (seen["text"], seen["ids"], seen["rewards"]) == (["a", None], [1, None], [2, None])
    assert seen["completions"] == ["0", "1"] and seen["completion_ids"] == [[2, 0], [3, 0]]


def test_any_padding_token_will_do(tmp_path):
    """Some tokenizers name a padding token that the model has no embedding for."""
    run = run_of(Config(prompt_template="{question}", max_completion_length=4))
    run.tokenizer.pad_token_id = 10_000
    rows = grpo.encode_prompts([{"prompt": "1+1="}, {"prompt": "1="}], run)
    assert len(grpo.rollout(run, rows, 2, 1.0)[2]) == 4


@pytest.mark.parametrize("name", ["nan", "too_few", "words", "number", "hole", "huge", "fails"])
def test_reward_functions_that_go_wrong_are_named(reward_file, name, capsys):
    with pytest.raises(Error, match=name):
        grpo.score(grpo.load_rewards([f"{reward_file}:{name}"]), **COLUMNS)
    assert name != "fails" or "out of coffee" in capsys.readouterr().err  # with its own traceback


@pytest.mark.parametrize(
    "specs",
    [["acuracy"], ["accuracy=much"], ["accuracy=nan"], ["accuracy", "accuracy"], [""], ["="],
     ["missing.py:f"], ["{file}:missing"], ["{file}"], ["{file}:"], ["{file}:no_function"]],
)  # fmt: skip
def test_reward_specs_that_do_not_parse_are_errors(reward_file, specs):
    with pytest.raises(Error, match="--reward"):
        grpo.load_rewards([spec.replace("{file}", str(reward_file)) for spec in specs])


def test_a_file_of_rewards_that_fails_shows_its_own_traceback(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("import os\nkey = os.environ['NO_SUCH_KEY']")
    with pytest.raises(Error, match="broken.py failed"):
        grpo.load_rewards([f"{tmp_path}/broken.py:f"])
    assert "NO_SUCH_KEY" in capsys.readouterr().err


def test_a_function_of_ones_own_named_accuracy_needs_no_answers(tmp_path):
    (tmp_path / "mine.py").write_text("accuracy = lambda prompts, **columns: [1.0] * len(prompts)")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1="}\n' * 20)
    options = f"--reward {tmp_path}/mine.py:accuracy --data {tmp_path}/data.jsonl --sft-steps 0"
    assert train(tmp_path / "run", QUICK, options)["eval/rewards/accuracy"] == 1.0


def test_rewards_are_the_weighted_sum_and_an_aspect_that_is_not_judged_is_left_out(reward_file):
    rewards = grpo.load_rewards([f"{reward_file}:half_judged=2", "accuracy=0.5"])
    run = run_of(Config(prompt_template="{question}"), rewards)
    rows = grpo.encode_prompts([{"prompt": "1+1=", "answer": "2"}], run)
    ids = torch.tensor([run.tokenizer("2")["input_ids"] + [0, 0], [2, 3, 4]])
    texts, scores, steps = grpo.score_completions(run, rows, ids, completion_mask(ids, [0]))
    assert steps is None and texts == ["2", "012"] and scores["reward"].tolist() == [2.5, 0.0]
    assert scores["rewards/half_judged"][0] == 1 and scores["rewards/half_judged"][1].isnan()
    run.reward_functions.pop("accuracy")  # then nobody judges the second
    reward = grpo.score_completions(run, rows, ids, completion_mask(ids, [0]))[1]["reward"]
    assert reward[0] == 2.0 and reward[1].isnan()


# ----------------------------------------------------------------------------------------- whole runs

QUICK = "--max-steps 3 --sft-steps 2 --prompts-per-step 4 --num-generations 4 --eval-every 3"
VARIED = """
def varied(prompts, completions, **columns):
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
"""


@pytest.fixture
def varied(tmp_path):
    """Words that ask for a reward that a model without any skill gets now and then."""
    (tmp_path / "varied.py").write_text(VARIED)
    return f"--reward {tmp_path}/varied.py:varied accuracy"


def words(*parts):
    """The words of a command line, of texts and paths without blanks in them."""
    return " ".join(map(str, parts)).split()


def train(folder, *parts):
    """A run in this process, in `folder`, with these options."""
    return grpo.train(parse_args([*words(*parts), "--output-dir", str(folder)]))


def resume(folder, *parts):
    return grpo.train(parse_args(["--resume", str(folder), *words(*parts)]))


TIMES = {"rollout_seconds", "update_seconds", "step_seconds", "peak_memory_gb"}


def metrics_of(folder):
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def weights_of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_tiny_learns(tmp_path):
    """The main command, as it is."""
    start = time.perf_counter()
    command = words(sys.executable, grpo.__file__, "--output-dir", tmp_path / "run")
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    rewards = [row["reward"] for row in metrics_of(tmp_path / "run") if "reward" in row]
    assert sum(rewards[:5]) / 5 <= 0.45 and sum(rewards[-5:]) / 5 >= 0.9
    *_, accuracy, curve = result.stdout.splitlines()
    assert "held-out prompts" in accuracy and "█" in curve
    rows = metrics_of(tmp_path / "run")
    evaluations = [row["eval/reward"] for row in rows if "eval/reward" in row]
    assert evaluations[-1] > evaluations[0] + 0.3
    print(f"{time.perf_counter() - start:.0f} s")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_seeded_runs_repeat_bit_for_bit(tmp_path, dtype, varied):
    options = words(QUICK, varied, "--dtype", dtype)
    for name in ("a", "b"):
        train(tmp_path / name, *options)
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")
    a, b = (weights_of(tmp_path / name / "checkpoint-3") for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert a["lm_head.weight"].dtype == getattr(torch, dtype)
    train(tmp_path / "c", *options, "--seed 1")
    assert metrics_of(tmp_path / "c") != metrics_of(tmp_path / "a")


METRICS = """step loss reward reward_std rewards/accuracy kl clip_fraction completion_length truncated_fraction
zero_std_fraction grad_norm learning_rate num_tokens rollout_seconds update_seconds step_seconds peak_memory_gb"""


def test_a_run_leaves_metrics_and_a_checkpoint_and_is_never_written_over(tmp_path):
    options = QUICK + " --warmup-steps 2 --save-every 2"
    train(tmp_path / "run", options)
    rows = grpo.read_log(tmp_path / "run", "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3] and set(METRICS.split()) <= set(steps[0])
    assert [row["step"] for row in rows if "eval/reward" in row] == [0, 3]
    assert [row["learning_rate"] for row in steps] == pytest.approx([5e-4, 1e-3, 1e-3])
    for row in steps:
        assert row["step_seconds"] == pytest.approx(row["rollout_seconds"] + row["update_seconds"])
        assert row["num_tokens"] == pytest.approx(16 * row["completion_length"])
        assert row["reward"] == row["rewards/accuracy"]
        assert row["loss"] == pytest.approx(0.04 * row["kl"], abs=1e-6)
    checkpoint = tmp_path / "run" / "checkpoint-3"
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.decode(tokenizer("12 + 3\n=")["input_ids"]) == "12 + 3\n="
    assert (tmp_path / "run" / "checkpoint-2" / "model.safetensors").exists()
    with pytest.raises(Error, match="holds a run"):
        train(tmp_path / "run", options)
    # A checkpoint is a model like any other.
    again = f"--model {checkpoint} --prompt-template {{question}} --max-completion-length 6"
    train(tmp_path / "again", QUICK, again, "--reward format accuracy")


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_of_a_run_are_scaled_as_asked(tmp_path, varied, scale):
    train(tmp_path / "run", QUICK, varied, "--max-steps 1 --scale-rewards", scale)
    rows = grpo.read_log(tmp_path / "run", "samples.jsonl")
    rewards = torch.tensor([row["reward"] for row in rows])
    expected = group_advantages(rewards, 4, scale)
    assert expected.any() and [row["advantage"] for row in rows] == pytest.approx(expected.tolist())


def test_advantages_of_steps_are_scaled_as_asked(tmp_path, monkeypatch):
    scales, original = [], grpo.process_advantages
    spying = lambda *a, scale_rewards: (scales.append(scale_rewards), original(*a))[1]  # noqa: E731
    monkeypatch.setattr(grpo, "process_advantages", spying)
    train(tmp_path / "run", QUICK, "--reward accuracy step --scale-rewards none --max-steps 1")
    assert scales == ["none"]


def test_no_steps_only_evaluate(tmp_path):
    result = train(tmp_path / "run", QUICK, "--max-steps 0")
    assert 0 <= result["eval/reward"] <= 1
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0]


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "mamba"])
def test_other_architectures_train(tmp_path, kind):
    """GPT-2 on the fast path, a capped model on the plain one, one whose cache cannot be shared."""
    model, tokenizer = tiny_model(kind, vocab_size=60), grpo.tiny_model(0, torch.float32)[1]
    model = AutoModelForCausalLM.from_config(model.config)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = "--prompt-template {question} --max-completion-length 6 --sft-steps 1 --beta 0.1"
    train(tmp_path / "run", QUICK, options, "--temperature 0.7 --model", tmp_path / "model")
    rows = [row for row in metrics_of(tmp_path / "run") if "loss" in row]
    assert all(row["ratio_mean"] == 1 for row in rows)
    assert abs(rows[0]["kl"]) < 1e-7  # the reference is the policy, at the same temperature


def test_supervised_steps_fit_solution_and_eos_and_nothing_else(monkeypatch, spy):
    config = Config(sft_steps=1, prompts_per_step=2, num_generations=2, temperature=0.5)
    run = run_of(dataclasses.replace(config, prompt_template="{question}", loss_type="dr_grpo"))
    rows = [{"prompt": f"{i}+1=", "answer": "0", "solution": "12"} for i in range(4)]
    run.train_rows = grpo.encode_prompts(rows, run)
    seen, gradients, step = spy("token_logprobs"), [], MasterAdamW.step
    record = lambda self, *a: (gradients.extend(p.grad for p in self.params), step(self, *a))[1]  # noqa: E731
    monkeypatch.setattr(MasterAdamW, "step", record)
    before = copy.deepcopy(run.policy)
    grpo.sft(run)
    ((_, prompt_ids, prompt_mask, completion_ids, mask, *_),) = seen
    assert completion_ids.tolist() == [run.tokenizer("12")["input_ids"] + [0]] * 4 and mask.all()
    assert sorted(run.tokenizer.batch_decode(prompt_ids)) == [f"{i}+1=" for i in range(4)]
    logp = [slow_logprobs(m, *seen[0][1:5], 1.0).mean() for m in (before, run.policy)]
    assert logp[1] > logp[0]
    expected = torch.autograd.grad(-logp[0], list(before.parameters()))  # the mean over all tokens
    for x, y in zip(gradients, expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-3)


def test_truncated_completions_can_be_left_out_of_the_loss(tmp_path, spy):
    calls = spy("update")
    options = "--max-completion-length 2 --sft-steps 10 --mask-truncated --prompts-per-step 16"
    train(tmp_path / "run", QUICK, options)
    rows = [row for row in metrics_of(tmp_path / "run") if "loss" in row]
    for call, row in zip(calls[10:], rows, strict=True):  # the first ten were supervised
        _, _, ids, mask = call[5]
        finished = (ids == 0).any(1)
        assert (mask.any(1) == finished).all() and 0 < finished.sum() < len(ids)
        assert row["truncated_fraction"] == pytest.approx(1 - finished.float().mean().item())


@pytest.mark.parametrize(
    "options, message",
    [
        ("--model no/such/folder", "cannot load no/such/folder"),
        ("--model {empty}", "cannot load"),
        ("--data missing.jsonl", "missing.jsonl"),
        ("--reward nonsense", "--reward nonsense"),
        ("--beta nan", "--beta"),
        ("--output-dir {file}", "--output-dir"),
        ("--output-dir /proc/nowhere", "--output-dir"),
        ("--resume {empty}", "config.json"),
        ("--resume {empty} --output-dir {empty}", "leave --output-dir out"),
        ("--eval-data missing.jsonl", "missing.jsonl"),
        ("--data {nothing_to_learn} --reward format", "--sft-steps"),
        ("--chat-template on", "--chat-template"),
        ("--model {refusing} --chat-template on --system-prompt x", "no system message, please"),
        ("--resume {newer}", "unexpected keyword argument 'fancy'"),
        ("--report-to trackio", "pip install trackio"),
        ("--prompts-per-step 5000", "prompts-per-step"),
        ("--max-completion-length 300", "256 positions"),
        ("--max-prompt-length 2", "prompts"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path, options, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    nothing = tmp_path / "nothing.jsonl"
    nothing.write_text('{"prompt": "1+1="}\n' * 100)
    paths = dict(empty=tmp_path / "empty", file=tmp_path / "file", nothing_to_learn=nothing)
    save_model(tmp_path / "refusing")
    refuses = "{{ raise_exception('no system message, please') }}"
    (tmp_path / "refusing" / "chat_template.jinja").write_text(refuses)
    (tmp_path / "config.json").write_text('{"fancy": 1}')
    paths |= dict(refusing=tmp_path / "refusing", newer=tmp_path)
    if "--output-dir" not in options and "--resume" not in options:
        options += f" --output-dir {tmp_path}/run"
    error = refusal(*words(options.format(**paths)))
    assert error.startswith("grpo.py: ") and message in error
    assert (tmp_path / "file").read_text() == "mine"


# ---------------------------------------------------------------------------- process supervision


def slow_process_advantages(step_rewards, step_ends, num_generations, num_tokens):
    result = []
    for i in range(len(step_rewards)):
        start = i - i % num_generations
        group = [r for rewards in step_rewards[start : start + num_generations] for r in rewards]
        mean = sum(group) / max(1, len(group))
        variance = sum((r - mean) ** 2 for r in group) / max(1, len(group) - 1)
        row = []
        for t in range(num_tokens):
            later = [r for r, end in zip(step_rewards[i], step_ends[i]) if end >= t]
            row.append(sum((r - mean) / (math.sqrt(variance) + 1e-8) for r in later))
        result.append(row)
    return torch.tensor(result)


def test_process_advantages_are_those_of_the_loop():
    rewards = [[0.2, 1.0], [0.0], [0.5, 0.25, 1.0], [], [1.0, 0.0], [0.5], [2.0], [0.1, 0.9]]
    ends = [[1, 4], [5], [0, 2, 3], [], [0, 5], [3], [2], [1, 2]]
    found = grpo.process_advantages(rewards, ends, 4, 6)
    expected = slow_process_advantages(rewards, ends, 4, 6)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_process_advantages_of_worked_example():
    """Steps of reward 1, 0 | 0, 1: mean 0.5, std 0.5774. A token sums the steps that end at or after it."""
    found = grpo.process_advantages([[1, 0], [0, 1]], [[0, 2], [1, 2]], 2, 4)
    expected = [[0.0, -0.866, -0.866, 0.0], [0.0, 0.0, 0.866, 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected), atol=5e-5, rtol=0)


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1.0])
def test_equal_step_rewards_have_exactly_no_advantage(value):
    found = grpo.process_advantages([[value] * 3, [value] * 5], [[0, 1, 2], [0, 1, 2, 3, 4]], 2, 5)
    single = grpo.process_advantages([[1.0], []], [[0], []], 2, 3)  # is its own mean
    assert (found == 0).all() and (single == 0).all()
    with pytest.raises(ValueError):  # two rewards, one end
        grpo.process_advantages([[1.0, 2.0], [3.0]], [[0], [1]], 2, 3)


STEPS = [  # completion, index of each step's last token (a token a character, EOS is the last)
    ("1+1\n2+2", [3, 7]),
    ("1+1\n\n2+2\n", [3, 9]),  # a blank line is no step; the last one goes on to the EOS
    ("\n\n1+1", [5]),
    ("1", [1]),
    ("", [0]),
    (" \n ", [3]),
]


@pytest.mark.parametrize("text, expected", STEPS)
def test_steps_end_where_their_lines_do(text, expected):
    _, tokenizer = grpo.tiny_model(0, torch.float32)
    assert grpo.step_ends(tokenizer, tokenizer(text)["input_ids"] + [0]) == expected
    cut_off = tokenizer(text)["input_ids"]
    if cut_off and text.strip():
        assert grpo.step_ends(tokenizer, cut_off) == [min(e, len(cut_off) - 1) for e in expected]


def test_steps_may_end_at_another_separator():
    _, tokenizer = grpo.tiny_model(0, torch.float32)
    assert grpo.step_ends(tokenizer, tokenizer("a b.\nc. d")["input_ids"], ". ") == [7, 8]
    assert grpo.step_ends(tokenizer, tokenizer("a##b#c##d")["input_ids"], "##") == [2, 7, 8]


EQUATIONS = """16 - 3 - 4 = 9|1; 16-3-4=8|0; <<16-3-4=9>>9 eggs|1; 9 * 2 = $<<9*2=18>>18|1; 9 * 2 = $<<9*2=19>>18|0
2 + 2 = 4 and 1 + 1 = 3|0; 1/2 + 1/4 = 3/4|1; 0.1 + 0.2 = 0.3|1; 10 / 3 = 3.33|1; 10/3 = 3.34|0; 10 / 3 = 3|0
20% * 50 = 10|1; 100% - 20% = 80%|1; 20/50*100 = 40%|1; 1,000 + 234 = 1,234|1; $5 + $3 = $8|1; 2 x 3 = 6|1
2 × 3 = 6|1; 6 ÷ 3 = 2|1; 5 − 7 = −2|1; (1 + 2) * 3 = 9|1; 1 + 2 * 3 = 9|0; 2^3 = 8|1; 2^3 + 1 = 9|1; 3 + 4 = 7 = 5 + 2|1
1 + 1 = 2 = 3|0; so x = 5|?; 2x + 1 = 5|?; x - 1 = 5|?; no numbers|?; x = 3 + 4 = 7|1; 3 + 4 = 7 apples|1; 4 = 2 * x|?
7 + 3 = 2y|?; 1/0 = 5|?; 9^99999999 = 1|?; 5|?; = 5|?; |?; 3 + 4 = 7.|1; 007 + 1 = 8|1; Day 1: 3 + 4 = 8|0; a=b|?"""


@pytest.mark.parametrize("line, holds", _pairs(EQUATIONS))
def test_a_step_is_right_if_its_equations_hold(line, holds):
    assert grpo.step_reward([""], [line or "none"]) == [[{"1": 1.0, "0": 0.0, "?": 0.5}[holds]]]


def test_steps_are_scored_line_by_line():
    assert grpo.step_reward(["", ""], ["1+1=2\n\n1+1=3\nok", ""]) == [[1.0, 0.0, 0.5], []]


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text("0123456789+-*/^()=.,%$ x<>\n"))
def test_any_line_has_a_truth_value_and_costs_milliseconds(text):
    start = time.perf_counter()
    assert grpo.equations_hold(text) in (True, False, None)
    assert time.perf_counter() - start < 0.5


BAD_LINES = [
    "so ((((((9^20)^20)^20)^20)^20)^20) = 1",
    "1+" * 50_000 + "1=1",
    "(" * 50_000,
    "9" * 100_000,
    "1=" * 50_000,
    "-" * 99_999 + "1=1",
]


@pytest.mark.parametrize("text", BAD_LINES)
def test_hostile_lines_cost_milliseconds(text):
    start = time.perf_counter()
    grpo.step_reward([""], [text])
    assert time.perf_counter() - start < 0.5


PROCESS_FILE = """
def each_line(prompts, completions, steps, **columns):
    return [[float("1" in step) for step in parts] for parts in steps]

def first_alone(prompts, completions, **columns):
    return [[1.0, 2.0], None]

def too_many(prompts, completions, **columns):
    return [[1.0, 2.0, 3.0]] * len(prompts)
"""


def test_a_reward_that_returns_lists_switches_process_supervision_on(tmp_path):
    (tmp_path / "steps.py").write_text(PROCESS_FILE)
    specs = [f"{tmp_path}/steps.py:each_line=2", "accuracy"]
    run = run_of(Config(prompt_template="{question}"), grpo.load_rewards(specs))
    rows = grpo.encode_prompts([{"prompt": "1+1=", "answer": "2"}], run)
    ids = [run.tokenizer(text)["input_ids"] + [0] for text in ("1\n2", "\n")]
    ids, mask = grpo.pad(ids, 0, "right", "cpu")
    texts, scores, (step_rewards, ends) = grpo.score_completions(run, rows, ids, mask)
    assert step_rewards == [[2.0, 0.0 + 1.0], [0.0]]  # accuracy belongs to the last step
    assert ends == [[1, 3], [1]]
    assert scores["rewards/each_line"].tolist() == [0.5, 0.0]
    assert scores["reward"].tolist() == [2.0, 0.0]
    # A completion that nobody judges has no steps to normalise, so its tokens have no advantage.
    run.reward_functions = grpo.load_rewards([f"{tmp_path}/steps.py:first_alone"])
    _, scores, (step_rewards, ends) = grpo.score_completions(run, rows, ids, mask)
    assert (step_rewards, ends) == ([[1.0, 2.0], []], [[1, 3], []]) and scores["reward"][1].isnan()
    none = grpo.process_advantages(step_rewards, ends, 2, 4, scale_rewards="none")
    assert none.tolist() == [[0.0, 0.0, 0.5, 0.5], [0.0] * 4]
    run.config = Config(prompt_template="{question}", scale_rewards="batch")
    with pytest.raises(Error, match="--scale-rewards batch"):
        grpo.score_completions(run, rows, ids, mask)
    run.reward_functions = grpo.load_rewards([f"{tmp_path}/steps.py:too_many"])
    run.config = Config(prompt_template="{question}")
    with pytest.raises(Error, match="too_many.*3 numbers for 2 steps"):
        grpo.score_completions(run, rows, ids, mask)


# -------------------------------------------------------------------------------------- more rewards


def test_language_reward():
    texts = ["so x = 5", "因此 x", "Привет x", "5 + 5", "Ｘ"]
    assert grpo.language_reward([""] * 5, texts) == [1.0, 1 / 3, 1 / 7, 1.0, 1.0]
    ((cjk, _),) = grpo.load_rewards(["language:cjk"]).values()
    assert cjk(prompts=[""], completions=["因此 x"]) == [2 / 3]


GOOD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
BAD_CODE = {
    "wrong": "def add(a, b):\n    return a - b\n",
    "syntax": "def add(a, b:\n",
    "endless loop": "while True: pass",
    "sleep": "import time; time.sleep(100)",
    "fork bomb": GOOD + "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory hog": GOOD + "x = [b'x' * 10**9 for _ in range(100)]",
    "huge output": GOOD + "import sys\nfor _ in range(10**7): sys.__stdout__.write('x' * 10000)",
    "exit": "import sys; sys.exit(0)",
    "hard exit": "import os; os._exit(0)",
    "prints what a passing run prints": "print('passed'); import os; os.write(1, b'0' * 32); os._exit(0)",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "kills its group": "import os, signal; os.killpg(0, signal.SIGKILL)",
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nos._exit(0)",
}


def fenced(code):
    return f"Here it is:\n```python\n{code}\n```\nDone."


FENCES = [  # a completion, and what the code reward makes of it
    (fenced(GOOD), 1.0),
    (fenced("x = 1") + fenced(GOOD), 1.0),  # the last one counts
    (fenced(GOOD) + fenced("x = 1"), 0.0),
    (f"```bash\nls\n```\nand then\n```python\n{GOOD}```", 1.0),
    (f"```python3\n{GOOD}```\nIt prints\n```\n3\n```", 1.0),
    (f"  ```Python\n{GOOD}\n  ```", 1.0),
    (f"```\n{GOOD}```", 1.0),
    (f"```bash\n{GOOD}```", 0.0),
    (f"```python\n{GOOD}", 0.0),  # cut off
    ("no code", 0.0),
]


def test_code_reward_of_good_code():
    completions, expected = zip(*FENCES)
    count = len(FENCES)
    assert grpo.code_reward([""] * count, completions, [TESTS] * count) == [*expected]
    two = [fenced(GOOD)] * 2
    assert grpo.code_reward([""] * 2, two, [TESTS.splitlines(), None]) == [1.0, None]


def test_code_runs_as_a_plain_process_where_there_are_no_namespaces(monkeypatch, capsys):
    popen = subprocess.Popen

    def without(words, **how):
        return popen(["/no/unshare"] if words[0] == "unshare" else words, **how)

    monkeypatch.setattr(subprocess, "Popen", without)
    words = grpo.namespaces.__wrapped__()
    assert "without namespaces" in capsys.readouterr().out
    assert grpo.run_tests(GOOD, TESTS, words) is True
    for name in ("kills its parent", "hard exit", "wrong"):
        assert grpo.run_tests(BAD_CODE[name], TESTS, words) is False
    nested = "import os\nfor _ in range(2000):\n    os.mkdir('x')\n    os.chdir('x')"
    assert grpo.run_tests(nested, "", words) is True


@pytest.mark.parametrize("name", BAD_CODE)
def test_code_that_does_not_pass_is_stopped_in_time(name):
    start = time.perf_counter()
    assert grpo.run_tests(BAD_CODE[name], TESTS, grpo.namespaces(), seconds=1) is False
    assert time.perf_counter() - start < 5  # 1 second of CPU time, 3 in all


def test_code_runs_side_by_side():
    start = time.perf_counter()
    grpo.code_reward([""] * 4, [fenced("import time; time.sleep(1)\n" + GOOD)] * 4, [TESTS] * 4)
    assert time.perf_counter() - start < 0.9 * 4


def sees(code):
    """Whether code that raises unless it finds what it looks for runs to its end."""
    return grpo.run_tests(code, "", grpo.namespaces(), seconds=4)


NAMESPACES = sees("import os; assert os.getpid() == 1")


def test_code_sees_an_empty_folder_and_a_clean_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    assert sees("import os; assert 'secret-key' not in str(dict(os.environ))")
    assert sees("import os; assert not any(map(os.path.isfile, os.listdir()))")
    if not NAMESPACES:
        pytest.skip("this kernel refuses namespaces")
    (tmp_path / "mine").write_text("mine")
    assert not sees(f"open({str(tmp_path / 'mine')!r}).read()")
    assert not sees(f"open({str(tmp_path / 'theirs')!r}, 'w')")
    assert not (tmp_path / "theirs").exists()
    assert not sees("import sys; open(sys.prefix + '/x', 'w')")
    pids = "[name for name in __import__('os').listdir('/proc') if name.isdigit()]"
    assert sees(f"assert {pids} == ['1']")  # no other process
    assert not sees("import socket; socket.create_connection(('127.0.0.1', 22), 1)")


def test_a_reward_model_scores_in_batches_as_alone(tmp_path):
    torch.manual_seed(0)
    _, tokenizer = grpo.tiny_model(0, torch.float32)
    shape = dict(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    shape |= dict(num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)

    def classifier(num_labels):
        config = transformers.Qwen2Config(**shape, num_labels=num_labels)
        model = transformers.AutoModelForSequenceClassification.from_config(config)
        model.save_pretrained(tmp_path)
        return model

    model = classifier(num_labels=1)
    for template in (None, CHATML):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        ((function, weight),) = grpo.load_rewards([f"reward_model:{tmp_path}=0.5"]).values()
        completions = ["12", "a longer one", "3"] * 7
        prompts, messages = ["1+1="] * 21, [[{"role": "user", "content": "1+1="}]] * 21
        scores = function(prompts=prompts, completions=completions, messages=messages)
        for completion, score in zip(completions[:3], scores):
            text = f"1+1={completion}"
            if template:
                turns = [*messages[0], {"role": "assistant", "content": completion}]
                text = tokenizer.apply_chat_template(turns, tokenize=False)
            alone = model(**tokenizer(text, return_tensors="pt")).logits.item()
            assert score == pytest.approx(alone, abs=1e-5)
    classifier(num_labels=2)
    with pytest.raises(Error, match="2 outputs"):
        grpo.load_rewards([f"reward_model:{tmp_path}"])


@pytest.fixture
def judge_server():
    """A real server of the chat protocol on loopback, whose manners the answer to rate chooses."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = body["messages"][0]["content"]
            answer = re.search(r"Answer to rate:\n(.*?)\n\nReply", content, re.DOTALL)[1]
            seen.append((self.path, body["model"], self.headers.get("Authorization"), content))
            if answer == "slow":
                time.sleep(2)
            if answer == "error" or (answer == "flaky" and sum("flaky" in s[3] for s in seen) < 2):
                return self.send_error(500)
            texts = {
                "rubbish": "I would say 7",
                "eleven": "Score: 11",
                "two lines": "Score: 1\n" * 2,
            }
            text = texts.get(answer, f"Score: {answer}" if answer.isdigit() else "Score: 7")
            reply = json.dumps({"choices": [{"message": {"content": text}}]})
            reply = {"no json": "not json", "empty": '{"choices": []}'}.get(answer, reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", seen
    server.shutdown()
    server.server_close()


def test_the_judge_reads_strictly_and_counts_what_fails(judge_server, monkeypatch, capsys):
    url, seen = judge_server
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    function = grpo.judge_reward(f"some-model@{url}", timeout=1, attempts=2)
    answers = ["0", "7", "10", "{question}", "flaky"]
    answers += ["error", "slow", "rubbish", "eleven", "two lines", "no json", "empty"]
    scores = function(prompts=["1+1?"] * 12, completions=answers, answer=["two"] * 12)
    assert scores == [0.0, 0.7, 1.0, 0.7, 0.7] + [None] * 7
    assert "7 of 12 calls of the judge failed" in capsys.readouterr().out
    path, model, key, content = seen[0]
    assert (path, model, key) == ("/v1/chat/completions", "some-model", "Bearer key")
    assert "1+1?" in content and "two" in content
    function(prompts=["1+1?"], completions=["7"], answer=[None])  # the data has none
    assert "None" not in seen[-1][3]


def test_a_judge_that_is_not_there_is_reported_and_stops_the_run(tmp_path, capsys):
    rewards = {"judge": (grpo.judge_reward("m@http://127.0.0.1:9/v1", timeout=1, attempts=1), 1.0)}
    assert grpo.score(rewards, prompts=["p"], completions=["c"]) == {"judge": [None]}
    assert "1 of 1 calls of the judge failed" in capsys.readouterr().out
    (tmp_path / "nobody.py").write_text("nobody = lambda prompts, **columns: [None] * len(prompts)")
    with pytest.raises(Error, match="no completion was judged by nobody"):
        train(tmp_path / "run", QUICK, f"--reward {tmp_path}/nobody.py:nobody")


BAD_SPECS = [
    "judge:",
    "judge:model",
    "judge:model@ftp://x",
    "judge",
    "language:cjk=x",
    "accuracy:x",
]


@pytest.mark.parametrize("spec", BAD_SPECS)
def test_specs_with_arguments_that_do_not_parse_are_errors(spec):
    with pytest.raises(Error, match="--reward"):
        grpo.load_rewards([spec])


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_a_completion_that_nobody_judged_has_no_advantage_and_counts_nowhere(scale_rewards):
    nan, scale = math.nan, dict(scale_rewards=scale_rewards)
    rewards = torch.tensor(
        [1.0, nan, 0.0, 0.5, nan, nan, nan, nan, 0.1, 0.1, 0.1, nan, 3, nan, nan, nan]
    )
    found, zero = group_advantages(rewards, 4, **scale), [0.0] * 4
    judged = torch.tensor([1.0, 0.0, 0.5])
    if scale_rewards == "batch":
        std = torch.tensor([1.0, 0.0, 0.5, 0.1, 0.1, 0.1, 3]).std()
        expected = (judged - 0.5) / (std + 1e-8)
    else:
        expected = group_advantages(judged, 3, **scale)
    torch.testing.assert_close(found[[0, 2, 3]], expected)
    assert found[1] == 0 and found[4:].tolist() == zero * 3  # also where all equal, or one alone
    assert group_advantages(torch.full((4,), nan), 4, **scale).tolist() == zero


# ------------------------------------------------------------------------------------------------ LoRA


def test_lora_trains_adapters_against_the_policy_without_them(tmp_path, varied):
    pytest.importorskip("peft")
    options = "--lora-rank 2 --learning-rate 0.01 --warmup-steps 0"
    train(tmp_path / "run", QUICK, varied, options)
    start, end = (weights_of(tmp_path / "run" / name) for name in ("reference", "checkpoint-3"))
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved and all("proj" in name for name in moved)  # merged, and the linear layers alone
    for name in moved:
        assert torch.linalg.matrix_rank(end[name] - start[name], rtol=1e-3) <= 2
    rows = [row for row in metrics_of(tmp_path / "run") if "loss" in row]
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-9) and rows[2]["kl"] > 1e-6
    # The adapter on the reference is the merged model.
    import peft

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "reference")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "checkpoint-3" / "adapter")
    for name, tensor in adapted.merge_and_unload().state_dict().items():
        torch.testing.assert_close(tensor, end[name], atol=1e-6, rtol=1e-5)


def test_a_model_that_arrives_with_an_adapter_keeps_it_in_the_reference(tmp_path):
    peft = pytest.importorskip("peft")
    save_model(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora)
    adapted.save_pretrained(tmp_path / "adapted")
    grpo.tiny_model(0, torch.float32)[1].save_pretrained(tmp_path / "adapted")
    batch = ragged_batch()
    with torch.no_grad():
        expected = token_logprobs(adapted.get_base_model(), *batch)
    config = Config(model=str(tmp_path / "adapted"), prompt_template="{question}")
    for rank in (0, 2):
        rest = dict(max_completion_length=8, output_dir=str(tmp_path / f"run{rank}"))
        run = grpo.set_up(dataclasses.replace(config, lora_rank=rank, **rest))
        _, reference, _ = grpo.prepare(run)
        torch.testing.assert_close(reference(*batch), expected, atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            found = token_logprobs(run.policy, *batch)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------ evaluation and resume


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n, right, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if right <= n and k <= n:
            subsets = list(itertools.combinations([i < right for i in range(n)], k))
            share = sum(map(any, subsets)) / len(subsets)
            assert grpo.pass_at_k(n, right, k) == pytest.approx(share)


def test_evaluation_logs_greedy_accuracy_and_pass_at_k_and_changes_nothing(tmp_path):
    runs = []
    for every in ("1", "3"):
        train(tmp_path / every, QUICK, "--sft-steps 30 --eval-every", every)
        runs.append(metrics_of(tmp_path / every))
    evaluations = [row for row in runs[0] if "eval/reward" in row]
    assert [row["step"] for row in evaluations] == [0, 1, 2, 3]
    for row in evaluations:
        assert 0 <= row["eval/pass@1"] <= row["eval/pass@2"] <= row["eval/pass@4"] <= 1
    steps = [[row for row in run if "loss" in row] for run in runs]
    assert steps[0] == steps[1]


def test_evaluation_is_greedy(tmp_path, varied):
    """Another seed samples other completions, but the greedy ones of a model are what they are."""
    model = save_model(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(20)))
    options = f"--model {model} --data {data} --eval-data {data} {varied} --max-steps 0"
    options += " --prompt-template {question} --max-completion-length 6"
    rows = [train(tmp_path / f"run{seed}", options, "--seed", seed) for seed in (0, 1)]
    assert rows[0]["eval/rewards/varied"] == rows[1]["eval/rewards/varied"] > 0


RESUMABLE = QUICK + " --max-steps 6 --save-every 2 --samples-every 2 --seed 5"
VARIATIONS = dict(plain="", bfloat16="--dtype bfloat16", lora="--lora-rank 2")
VARIATIONS |= dict(mu="--num-iterations 2 --beta 0")


@pytest.mark.parametrize("variation", VARIATIONS)
def test_a_resumed_run_ends_as_if_it_had_never_stopped(tmp_path, variation, varied, monkeypatch):
    if variation == "lora":
        pytest.importorskip("peft")
    options = RESUMABLE, VARIATIONS[variation], varied
    train(tmp_path / "whole", *options)

    class Crash(Exception):
        pass

    def crash(run, step, *args, original=grpo.show_samples):
        original(run, step, *args)
        if step == 4:
            raise Crash

    monkeypatch.setattr(grpo, "show_samples", crash)
    with pytest.raises(Crash):
        train(tmp_path / "cut", *options)
    monkeypatch.undo()
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as log:
        log.write('{"step": 5, "rew')  # a crash in the midst of a line
    assert [p.name for p in grpo.checkpoints(tmp_path / "cut")] == ["checkpoint-2"]
    resume(tmp_path / "cut")
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "whole")
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("cut", "whole")]
    assert samples[0] == samples[1]
    whole, cut = (weights_of(tmp_path / name / "checkpoint-6") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    states = [torch.load(tmp_path / n / "checkpoint-6/trainer_state.pt") for n in ("whole", "cut")]
    whole, cut = (sum(state["optimizer"]["tensors"], []) for state in states)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
    row = json.loads(samples[0].splitlines()[0])
    assert {"step", "prompt", "completion", "rewards/accuracy", "reward", "advantage"} <= set(row)


def test_a_run_is_not_resumed_against_another_reference_or_as_another_model(tmp_path):
    pytest.importorskip("peft")
    train(tmp_path / "run", QUICK, "--beta 0")
    for option in ("--beta 0.04", "--lora-rank 2"):
        with pytest.raises(Error, match="reference, the model as GRPO began"):
            resume(tmp_path / "run", option, "--max-steps 4")
    (tmp_path / "run" / "reference").mkdir()
    save_model(tmp_path / "run" / "reference")
    with pytest.raises(Error, match="saved with other options"):
        resume(tmp_path / "run", "--lora-rank 2 --max-steps 4")


def test_a_damaged_checkpoint_is_left_aside_for_the_one_before(tmp_path, capsys):
    out = tmp_path / "run"
    train(out, RESUMABLE)
    assert [path.name for path in grpo.checkpoints(out)] == ["checkpoint-6", "checkpoint-4"]
    expected = weights_of(out / "checkpoint-6")
    with open(out / "checkpoint-6" / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\0")
    (out / ".checkpoint-8").mkdir()  # what a crash while saving leaves
    resume(out)
    assert "checkpoint-6 is damaged" in capsys.readouterr().out
    found = weights_of(out / "checkpoint-6")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert [path.name for path in grpo.checkpoints(out)] == ["checkpoint-6", "checkpoint-4"]
    metrics = (out / "metrics.jsonl").read_text()
    for path in grpo.checkpoints(out):
        (path / "manifest.json").unlink()
    with pytest.raises(Error, match="damaged"):
        resume(out)
    assert (out / "metrics.jsonl").read_text() == metrics


def test_a_disk_that_is_full_is_an_error_that_leaves_earlier_checkpoints(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    saves = itertools.chain([torch.save], itertools.repeat(full))  # the second one fails
    monkeypatch.setattr(torch, "save", lambda *args: next(saves)(*args))
    with pytest.raises(Error, match="cannot save.*checkpoint-4.*No space left.*earlier check"):
        train(tmp_path / "run", RESUMABLE)
    monkeypatch.undo()
    assert grpo.newest_checkpoint(tmp_path / "run").name == "checkpoint-2"
    assert not list((tmp_path / "run").glob(".checkpoint*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(tmp_path, number):
    command = words(
        sys.executable, grpo.__file__, QUICK, "--max-steps 100000 --output-dir", tmp_path
    )
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, **pipes)
    while len(grpo.read_log(tmp_path, "metrics.jsonl")) < 5 and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and "go on with --resume" in error.splitlines()[-1]
    last = max(row["step"] for row in grpo.read_log(tmp_path, "metrics.jsonl"))
    assert grpo.newest_checkpoint(tmp_path).name == f"checkpoint-{last}"


SLOW = """
import time
def slow(prompts, completions, **columns):
    open(__file__ + ".asked", "w").close()
    time.sleep(60)
"""


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    options = QUICK, "--eval-every 0 --reward", f"{tmp_path}/slow.py:slow", "--output-dir", tmp_path
    command = words(sys.executable, grpo.__file__, *options)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "slow.py.asked").exists() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    while "SIGTERM" not in process.stdout.readline():  # it has heard the first
        pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == -signal.SIGTERM


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path, monkeypatch):
    def evaluate(run, step):
        run.log("metrics.jsonl", {"step": step, "eval/reward": 1.0 if step == 2 else 0.5})

    monkeypatch.setattr(grpo, "evaluate", evaluate)
    train(tmp_path / "run", RESUMABLE, "--eval-every 2 --keep-checkpoints 1")
    names = [path.name for path in grpo.checkpoints(tmp_path / "run")]
    assert names == ["checkpoint-6", "checkpoint-2"]
    assert grpo.best_evaluated([{"step": 1}]) is None


def test_metrics_of_a_rollout_are_means_over_all_ranks_and_those_who_judged():
    nan = math.nan
    mine = {"reward": [1.0, 0.0, nan, 1.0], "length": [4, 4, 2, 2], "finished": [1, 1, 1, 0]}
    mine |= {"rewards/a": mine["reward"], "rewards/b": [nan] * 4}
    theirs = {"reward": [3.0, 3.0], "length": [3, 3], "finished": [0, 1]}
    theirs |= {"rewards/a": theirs["reward"], "rewards/b": [nan] * 2}
    mine["rewards/c"], theirs["rewards/c"] = [1.0] * 4, [0.0] * 2
    parts = [{name: torch.tensor(x) for name, x in part.items()} for part in (mine, theirs)]
    columns = grpo.concatenate(parts)
    metrics = grpo.rollout_metrics(columns, group_advantages(columns["reward"], 2), 2)
    assert metrics == pytest.approx({
        "reward": 8 / 5, "rewards/a": 8 / 5, "rewards/b": nan, "rewards/c": 4 / 6,
        "unjudged/a": 1, "unjudged/b": 6, "reward_std": 0.5**0.5 / 2, "zero_std_fraction": 2 / 3, "completion_length": 3.0,
        "num_tokens": 18, "truncated_fraction": 2 / 6,
    }, nan_ok=True)  # fmt: skip


def test_what_is_not_judged_is_null_in_the_logs(tmp_path):
    (tmp_path / "half.py").write_text("half = lambda prompts, **columns: [1.0, None] * 8")
    options = f"--reward {tmp_path}/half.py:half --eval-every 0 --max-steps 1"
    train(tmp_path / "run", QUICK, options)
    logs = [(tmp_path / "run" / name).read_text() for name in ("metrics.jsonl", "samples.jsonl")]
    assert "NaN" not in logs[0] + logs[1]
    samples = [json.loads(line) for line in logs[1].splitlines()]
    assert [(row["reward"], row["advantage"]) for row in samples] == [(1.0, 0.0), (None, 0.0)] * 8
    row = json.loads(logs[0])
    assert (row["reward"], row["unjudged/half"], row["reward_std"]) == (1.0, 8, None)


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(Error, match="pip install no_such_package"):
        grpo.import_optional("no_such_package", "--report-to x")


# ----------------------------------------------------------------------------------- several processes

RANKS = """
import itertools, sys, torch
sys.path[:0] = [{here!r}]
import test_grpo as t, grpo

grpo.join_ranks()
rank, world_size = grpo.ranks()
results = {{}}
for loss_type, level, kind in t.RANKED:
    config = t.Config(num_generations=4, micro_batch_tokens=30, beta=0.1, loss_type=loss_type,
                      importance_sampling_level=level, max_completion_length=6)
    model, reference = (t.tiny_model(kind, seed=seed) for seed in (0, 1))
    batch, advantages = t.four_groups()
    part = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
    rows = slice(part.start * 4, part.stop * 4)
    mine = batch[0][part], batch[1][part], batch[2][rows], batch[3][rows]
    if world_size > 1:
        grpo.shard(model, torch.float32)
    optimizer, step = grpo.MasterAdamW(model), grpo.MasterAdamW.step
    def record(*args):
        gradients = [p.grad for p in optimizer.params if p.grad is not None]
        results[loss_type, level, kind] = [grpo.whole(g).clone() for g in gradients]
        return step(optimizer, *args)
    optimizer.step = record
    rest = config, 1e-3, mine, advantages[rows], kind == "qwen2"
    metrics = grpo.update(model, t.frozen(reference, fast=rest[-1]), optimizer, *rest)
    results[loss_type, level, kind, "metrics"] = metrics
    state = grpo.gather(grpo.optimizer_state(optimizer))[0]  # the first rank's, as a checkpoint has it
    grpo.restore_optimizer(optimizer, state)
    again = grpo.gather(grpo.optimizer_state(optimizer))[0]
    for a, b in zip(again["tensors"], state["tensors"], strict=True):
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(a, b))
if rank == 0:
    torch.save(results, sys.argv[1])
if world_size > 1:
    torch.distributed.barrier()
    sys.stdout.flush()
    __import__("os")._exit(0)
"""


# On the fast path, and on the plain one, each with fewer micro-batches on the second rank.
RANKED = [(*variant, "qwen2") for variant in VARIANTS]
RANKED += [("grpo", "token", kind) for kind in ("gemma2", "phi", "mamba")]


def four_groups():
    """Four prompts; the last two have short completions, so that their rank cuts fewer micro-batches."""
    generator = torch.Generator().manual_seed(0)
    prompt_ids = torch.randint(2, 40, (4, 5), generator=generator)
    prompt_mask = torch.arange(5) >= torch.tensor([[0], [2], [1], [4]])
    completion_ids = torch.randint(2, 40, (16, 6), generator=generator)
    lengths = torch.tensor([6, 5, 6, 3, 6, 6, 2, 4, 1, 2, 1, 1, 2, 1, 1, 2])[:, None]
    advantages = torch.randn(16, generator=generator)
    return (prompt_ids, prompt_mask, completion_ids, torch.arange(6) < lengths), advantages


def torchrun(*words, check=True, signalled=None):
    """Two processes; `signalled`: what to do while they run."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [f"--master-port={port}", *map(str, words)]
    environment, pipe = os.environ | {"OMP_NUM_THREADS": "1"}, subprocess.PIPE
    process = subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe)
    if signalled:
        signalled()
    out, errors = process.communicate(timeout=300)
    assert not check or process.returncode == 0, errors
    return types.SimpleNamespace(returncode=process.returncode, stdout=out, stderr=errors)


def test_two_ranks_take_the_gradient_of_one_process(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(here=str(Path(grpo.__file__).resolve().parent)))
    torchrun(script, tmp_path / "two")
    alone = [sys.executable, str(script), str(tmp_path / "one")]
    subprocess.run(alone, check=True, capture_output=True)
    one, two = (torch.load(tmp_path / name) for name in ("one", "two"))
    for variant in RANKED:
        for x, y in zip(one[variant], two[variant], strict=True):
            torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-4)
        expected = one[*variant, "metrics"]
        for name, value in two[*variant, "metrics"].items():
            assert value == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_two_ranks_train_and_two_or_one_resume(tmp_path, varied):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = "--max-steps 4 --save-every 2 --dtype bfloat16 --output-dir"
    result = torchrun(grpo.__file__, *words(QUICK, varied, options, whole))
    assert result.stdout.count("saved") == 2 and result.stdout.count("held-out") == 1
    rows = [row for row in metrics_of(whole) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["num_tokens"] == 16 * row["completion_length"] for row in rows)
    names = set(weights_of(save_model(tmp_path / "m")))
    assert set(weights_of(whole / "checkpoint-4")) == names
    saved = safetensors.torch.load_file(whole / "checkpoint-4" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}  # as --dtype asks
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoint-4")
    torchrun(grpo.__file__, "--resume", cut)  # as if it had never stopped
    assert metrics_of(cut) == metrics_of(whole)
    again = safetensors.torch.load_file(cut / "checkpoint-4" / "model.safetensors")
    assert all(torch.equal(saved[name], again[name]) for name in saved)
    resume(cut, "--max-steps 5")
    assert grpo.newest_checkpoint(cut).name == "checkpoint-5"


def test_two_ranks_only_evaluate_each_row_once(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')  # fewer than ranks
    (tmp_path / "rank.py").write_text("import os\nrank = lambda **_: [float(os.environ['RANK'])]")
    options = f"--eval-data {tmp_path}/one.jsonl --reward {tmp_path}/rank.py:rank --max-steps 0"
    torchrun(grpo.__file__, *words(QUICK, options, "--output-dir", tmp_path / "run"))
    assert [row["eval/reward"] for row in metrics_of(tmp_path / "run")] == [0.0]


PIDS = """
import os
def pids(prompts, completions, **columns):
    path = f"{__file__}.{os.environ['RANK']}"
    if not os.path.exists(path):
        open(path, "w").write(str(os.getpid()))
    return [1.0] * len(prompts)
"""


def test_a_signal_to_one_rank_stops_them_all(tmp_path):
    (tmp_path / "pids.py").write_text(PIDS)
    out = tmp_path / "run"
    options = f"--eval-every 0 --max-steps 100000 --reward {tmp_path}/pids.py:pids --output-dir"

    def signalled():
        while len(grpo.read_log(out, "metrics.jsonl")) < 3:
            time.sleep(0.05)
        os.kill(int((tmp_path / "pids.py.1").read_text()), signal.SIGTERM)

    result = torchrun(grpo.__file__, *words(QUICK, options, out), check=False, signalled=signalled)
    last = metrics_of(out)[-1]["step"]
    assert f"SIGTERM after step {last}" in result.stderr
    assert grpo.newest_checkpoint(out).name == f"checkpoint-{last}"


FAILS = """
import os
def fails(prompts, completions, **columns):
    if os.environ["RANK"] == "1":
        raise ValueError("rank one is out of coffee")
    return [1.0] * len(prompts)
"""


def test_a_rank_that_fails_ends_the_whole_run_with_its_message(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    start = time.perf_counter()
    options = words(QUICK, f"--eval-every 0 --reward {tmp_path}/fails.py:fails")
    result = torchrun(grpo.__file__, *options, "--output-dir", tmp_path / "run", check=False)
    assert result.returncode != 0 and "rank one is out of coffee" in result.stderr
    assert time.perf_counter() - start < 120


# ------------------------------------------------------------------------------------- when things go wrong


def test_a_run_killed_at_random_moments_ends_as_if_it_had_never_stopped(tmp_path, varied):
    options = RESUMABLE, varied, "--save-every 1 --max-steps 12"
    train(tmp_path / "whole", *options)
    out, moments, kills = tmp_path / "killed", random.Random(time.time_ns()), 0
    while True:
        started = (out / "config.json").exists()
        command = ("--resume", out) if started else (*options, "--output-dir", out)
        command = words(sys.executable, grpo.__file__, *command)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        goal = len(grpo.read_log(out, "metrics.jsonl")) + moments.randint(1, 4)
        while process.poll() is None:
            if kills < 4 and len(grpo.read_log(out, "metrics.jsonl")) >= goal:
                time.sleep(moments.uniform(0, 0.1))  # in a step, or in the midst of saving
                process.kill()
                kills += 1
            time.sleep(0.01)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
    assert metrics_of(out) == metrics_of(tmp_path / "whole")
    whole, killed = (weights_of(folder / "checkpoint-12") for folder in (tmp_path / "whole", out))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


def test_a_file_size_limit_stops_a_save_and_leaves_the_checkpoint_before(tmp_path):
    out = tmp_path / "run"
    train(out, QUICK)
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (10**6, 10**6))
    command = [sys.executable, grpo.__file__, "--resume", str(out), "--max-steps", "4"]
    result = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert result.returncode == 1 and "cannot save" in result.stderr.splitlines()[-1]
    assert [path.name for path in grpo.checkpoints(out)] == ["checkpoint-3"]
    assert grpo.newest_checkpoint(out).name == "checkpoint-3" and not list(out.glob(".check*"))


def test_data_too_small_to_hold_anything_out_trains_without_evaluation(tmp_path):
    (tmp_path / "few.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 5)
    train(tmp_path / "run", QUICK, "--data", tmp_path / "few.jsonl")
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2, 3]


def test_running_out_of_memory_says_which_options_to_lower(monkeypatch):
    def hungry(config):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(grpo, "train", hungry)
    assert "--micro-batch-tokens" in refusal() and "--prompts-per-step" in refusal()


def test_metrics_go_to_the_tracker_that_is_asked_for(tmp_path, monkeypatch):
    seen = []
    module = types.SimpleNamespace(
        init=lambda **k: seen.append(k),
        log=lambda record, step: seen.append(step),
        finish=lambda: seen.append("finish"),
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    train(tmp_path / "run", QUICK, "--report-to wandb")
    assert seen[0]["config"]["seed"] == 0 and seen[1:] == [0, 1, 2, 3, 3, "finish"]


# ------------------------------------------------------------------------------------------ pasting

HELPERS = {  # function -> what its docstring says that it needs
    "completion_mask": [],
    "group_advantages": ["_float"],
    "process_advantages": ["group_advantages", "_float"],
    "kl_k3": ["_float"],
    "clipped_surrogate": ["importance_ratio", "masked_mean", "_float"],
    "grpo_loss": ["clipped_surrogate", "importance_ratio", "kl_k3", "masked_mean", "_float"],
    "token_logprobs": ["PromptCache", "LogProbs", "_float"],
}


@pytest.mark.parametrize("name", HELPERS)
def test_a_function_works_alone_where_it_is_pasted(name):
    docstring = getattr(grpo, name).__doc__
    assert all(f"`{helper}`" in docstring for helper in HELPERS[name])
    scope = {"torch": torch}
    if name == "token_logprobs":  # PromptCache extends transformers' cache
        scope |= dict(DynamicCache=transformers.DynamicCache, copy=copy)
    for source in [*HELPERS[name], name]:
        exec(inspect.getsource(getattr(grpo, source)), scope)
    logp, old_logp, ref_logp, advantages, mask = random_batch()
    calls = {
        "completion_mask": lambda f: f(torch.tensor([[5, 2, 2], [5, 6, 7]]), [2]),
        "group_advantages": lambda f: f(torch.arange(8.0), 4),
        "process_advantages": lambda f: f([[1, 0], [0, 1]], [[0, 2], [1, 2]], 2, 4),
        "kl_k3": lambda f: f(logp, ref_logp),
        "clipped_surrogate": lambda f: f(logp, old_logp, advantages),
        "grpo_loss": lambda f: f(logp, old_logp, ref_logp, advantages, mask)[0],
        "token_logprobs": lambda f: f(tiny_model("qwen2"), *ragged_batch()),
    }
    torch.testing.assert_close(calls[name](scope[name]), calls[name](getattr(grpo, name)))


# ------------------------------------------------------------------------------------ random shapes


@settings(max_examples=60, deadline=None)
@given(*map(st.integers, (1, 2, 1, 0), (4, 5, 7, 2**31)), st.sampled_from(VARIANTS))
def test_tensor_functions_of_any_shape_give_finite_numbers(b, g, c, seed, variant):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 4, (b * g, c), generator=generator)
    mask = completion_mask(ids, [0, 1])
    assert mask.shape == ids.shape and mask[:, 0].all() and (mask[:, 1:] <= mask[:, :-1]).all()
    rewards = torch.randint(0, 3, (b * g,), generator=generator).float()
    advantages = group_advantages(rewards, g)
    assert advantages.shape == rewards.shape and advantages.view(b, g).mean(1).abs().max() < 1e-5
    logp, old_logp, ref_logp = -5 * torch.rand(3, b * g, c, generator=generator)
    level = dict(importance_sampling_level=variant[1])
    options = dict(loss_type=variant[0], **level)
    loss, metrics = grpo_loss(logp, old_logp, ref_logp, advantages, mask, **options)
    assert loss.shape == () and all(x.isfinite() for x in (loss, *metrics.values()))
    surrogate = clipped_surrogate(logp, old_logp, advantages, mask=mask, **level)
    assert surrogate.shape == kl_k3(logp, ref_logp).shape == (b * g, c)
    assert surrogate.isfinite().all()
    steps = [[float(r)] * int(n) for r, n in zip(rewards, mask.sum(1))]
    ends = [list(range(len(step))) for step in steps]
    process = grpo.process_advantages(steps, ends, g, c)
    assert process.shape == (b * g, c) and process.isfinite().all() and (process[~mask] == 0).all()
    prompt_lengths, lengths = torch.randint(1, 9, (b,), generator=generator), mask.sum(1)
    cut = cut_micro_batches(prompt_lengths, lengths, g, 1 + seed % 60)
    assert sorted(torch.cat([rows for _, rows in cut]).tolist()) == list(range(b * g))
