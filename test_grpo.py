# SPDX-License-Identifier: MIT
"""grpo.py by numbers: worked examples, each function against plain loops in
float64, then whole runs. `python -m pytest` runs on a CPU, offline."""

import copy
import dataclasses
import functools
import inspect
import io
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx, raises
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

import grpo

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "2")  # of processes as well
torch.set_num_threads(int(THREADS))

Error = grpo.Error
cases = pytest.mark.parametrize
gradient = torch.autograd.grad
assert_near = functools.partial(assert_close, atol=1e-5, rtol=1e-5)


def table(text):
    """The lines of a text, each a list of what stands between its bars."""
    return [line.split(" | ") for line in text.strip().splitlines()]


def values(text):
    """The same of Python expressions."""
    return [[eval(cell) for cell in row] for row in table(text)]


def numbers(text):
    return torch.tensor([float(word) for word in text.split()])


def watch(owner, name):
    """Note the arguments of each call of a function in the list returned."""
    calls = []
    function = getattr(owner, name)

    def noting(*args, **options):
        calls.append(args)
        return function(*args, **options)

    setattr(owner, name, noting)
    return calls


# -------------------------------------------------------------------- worked examples

ADVANTAGES = """
1 0 0 1 0 0 1 1 | 4 | group | 0.866 -0.866 -0.866 0.866 -0.866 -0.866 0.866 0.866
1 0 0 1 1 0 0 1 | 8 | group | .9354 -0.9354 -0.9354 0.9354 0.9354 -0.9354 -0.9354 0.9354
1 1 1 1 0 0 0 1 | 4 | group | 0 0 0 0 -0.5 -0.5 -0.5 1.5
0.1 0.2 2.2 0.1 5 0.3 | 3 | none | -0.73333 -0.63333 1.36667 -1.7 3.2 -1.5
0.1 0.2 2.2 0.1 5 0.3 | 3 | group | -0.61904 -0.53463 1.15367 -0.61304 1.15395 -0.54092
"""
RATIOS = """
0.9 0.5 0.9354 1.1225
0.9 0.5 -0.9354 -1.6837
0.2 0.5 0.9354 0.3742
0.2 0.5 -0.9354 -0.7483
0.7 0.5 0.9354 1.1225
0.7 0.5 -0.9354 -1.3096
"""  # new and old probability, advantage, surrogate


@cases("rewards, num_generations, scale, expected", table(ADVANTAGES))
def test_advantages_of_worked_examples(rewards, num_generations, scale, expected):
    found = grpo.group_advantages(numbers(rewards), int(num_generations), scale)
    assert_close(found, numbers(expected), atol=5e-5, rtol=0)


def test_ratio_and_clip_of_worked_examples():
    new, old, advantages, expected = numbers(RATIOS).view(6, 4).t()
    logps = new.log()[:, None], old.log()[:, None]
    found = grpo.clipped_surrogate(*logps, advantages)[:, 0]
    assert_close(found, expected, atol=5e-5, rtol=0)


# -------------------------------------------------------------------- completion_mask

MASKS = """
5 6 7 | 2 | 1 1 1
2 6 7 | 2 | 1 0 0
5 6 2 | 2 | 1 1 1
5 2 2 | 2 | 1 1 0
5 2 6 | 2 | 1 1 0
5 3 2 | 2 3 | 1 1 0
"""


@cases("ids, eos_token_ids, expected", table(MASKS))
def test_completion_mask_runs_through_the_first_eos(ids, eos_token_ids, expected):
    mask = grpo.completion_mask(
        numbers(ids)[None].long(), numbers(eos_token_ids).long().tolist()
    )
    assert mask.dtype == torch.bool
    assert mask[0].tolist() == numbers(expected).tolist()


# ----------------------------------------------------------------- answers and rewards

EXTRACTED = r"""
so \boxed{42}. | 42
\boxed{1} then \boxed{\frac{1}{2}} | \frac{1}{2}
\boxed{\text{a}\{1\}} 7 | \text{a}\{1\}
#### 5 but \boxed{6} | 6
broken off in 5 \boxed{4 | None
#### 3 and then #### 1,234 | 1,234
#### 18 dollars | 18 dollars
so 5 #### | 5
the numbers 3 and then 4. | 4
it costs $80,000.00. | $80,000.00
that is −5 | −5
so $10{,}080$ | $10{,}080$
5-3=2 | 2
pages 3-5 | 5
(pages 3–5). | 5
one half is 1/2 | 1/2
it is \frac{3}{4} | \frac{3}{4}
it is $5$ | $5$
it is \(-\frac{3}{4}\). | -\frac{3}{4}
**18** | 18
<answer>18</answer> | 18
48+24 = <<48+24=72>>72 clips. | 72
a 50% share | 50%
no number at all | None
5 on 2024-01-07 | 2024-01-07
5 or ±7 | ±7
5, then 1.2.3 | 1.2.3
5 at 10:30. | 10:30
5 of 3x | 3x
5 + x^2 | x^2
so 5↵#### 18↵That is 2 more. | 18
"""
SAME = r"""
$80,000|80000; 80,000.00|80000; 80{,}000|80000; 18.|18; \frac{1}{2}|0.5; 1/2|0.5
\dfrac{1}{2}|1/2; \tfrac{2}{4}|1/2; .5|1/2; 50%|0.5; 50\%|50; 0.5|50%; 50%|50\%; -3|−3
50 percent|50; - 3|-3; +7|7; 7.0|7; x = 5|5; x=5|5; 5 cm|5; 5\text{ cm}|5; \$18|18
5\,\text{cm}|5; 18 dollars|18; 18 Dollars|18 dollars; -\frac{1}{2}|-0.5; -$5|-5; €5|5
5 €|5; £1,234.50|2469/2; \frac{-1}{2}|-1/2; 007|7; 2/4|1/2; 0.1|1/10; \(7\)|7; $7$|7
\text{Yes}|yes; \text{(A)}|A; (B)|B; b|B; (C).|c; New  York|new york; 5 cm|5 CM
5 months|5; 5 quarts|5; 5 miles|5; 3 million|3 Million; 3/04|0.75; 1/2\%|0.5%
12,345,678|12345678; \frac{3}{4}\text{ cm}|3/4; 1{,}234{,}567.5|2469135/2; ,5|,5
"""
DIFFERENT = r"""
1|11; 5|-5; 80|80000; 1,2|12; 1{,}2|12; 0.5|5; 1/2|2; 1/3|0.333; x|y; 5x|5; 5 x|5
3 million|3; 5 Million|5; 2 dozen|2; 5 dozens|5; 7 tenths|7; 5 squared|5; 5\pi|5
7, or maybe 8|7; 5 hundredths|5; 5 halves|5; 5 THOUSAND|5; 5 thirds|5; 5 sixteenths|5
5 sixtieths|5; 5 pi|5; 5 billionths|5; 2024-01-07|7; ±7|7; ±7|-7; 5$3|53; 2*500|2500
2\frac{1}{2}|21/2; \frac{1}{2}3|1/23; \frac{1}{2}x|1/2; \frac{1}{2}xy|1/2; 3 4|3/4
50%|0.05; 0.5%|0.05; 0.5%|50%; 50|0.5%; 1%|100; 1/0|1; 1/0|2/0; 1/0|0; 5 cm|5 km
x=1, y=2|2; 18 or 20|18; 6xy|6; 3 AM|3 PM; 12 and a half|12; 1 2|12; \text{}|0; 5 cm|5%
(1,2)|(2,1); 5 more than x|5; 10:30|10; 1.2.3|1.2; 5!|5; -|0; A|B; yes|no; 5 20%|5
2^5|2 5; 3-5|5; --5|5; 1,23|123; 1,2345|12345; 5 cm^2|5; 1, 234|1234; 1 234|1234
"""
MATH_SAME = r"""
\frac{3}{4}|0.75; 2\sqrt{2}|\sqrt{8}; \{1,2\}|\{2,1\}; (1,2)|(1, 2); [1,2)|[1, 2)
50\%|0.5; 90^\circ|90; \text{(A)}|A; \text{yes}|Yes; x^2+1|1+x^2; \frac{\pi}{2}|\pi/2
\begin{pmatrix}1\\2\end{pmatrix}|\begin{pmatrix} 1 \\ 2 \end{pmatrix}; x=5|5; $18|18
10,\!080|10080; \frac12|0.5; 2\frac{1}{2}|2.5; Evelyn|\text{evelyn}
"""
MATH_DIFFERENT = r"""
\frac{3}{4}|0.74; \{1,2\}|\{1,3\}; (1,2)|(2,1); [1,2)|(1,2); 2\sqrt{2}|\sqrt{2}; A|B
\begin{pmatrix}1\\2\end{pmatrix}|\begin{pmatrix}2\\1\end{pmatrix}; 5, 7|5; ±7|7; 5x|5
7 tenths|7; 7, or maybe 8|7; \foo|\bar; \frac{|\sqrt{; yes|no; 9^{9^{9}}|7
"""
HOSTILE_TEXTS = r"""
\boxed{ | 20_000
\boxed{\text{ | 20_000
\boxed{^{\circ | 20_000
\frac{1 | 30_000
\frac{1}{ | 30_000
9 | 100_000
1, | 50_000
,111 | 30_000
1/ | 50_000
- | 100_000
( | 100_000
$\ | 50_000
x= | 50_000
3- | 50_000
< | 100_000
. | 100_000
#### | 50_000
####   | 20_000
  | 50_000
<think> | 20_000
<think></think> | 20_000
"""

FORMATS = r"""
Q | <think>a</think>b | 1
Q | <think>\na\n</think>\n\nb  | 1
Q<think> | a</think>b | 1
Q | a</think>b | 0
Q | <think>a</think> | 0
Q | <think>a | 0
Q | x<think>a</think>b | 0
Q | <think>a</think>b<think>c</think>d | 0
Q<think> | <think>a</think>b | 0
"""


def pairs(text):
    return [pair.split("|") for pair in re.split("; |\n", text.strip())]


@cases("text, expected", table(EXTRACTED))
def test_extract_answer(text, expected):
    assert str(grpo.extract_answer(text.replace("↵", "\n"))) == expected


NUMBER_WORDS = """
half third quarter fourth fifth sixth seventh eighth ninth tenth eleventh twelfth
thirteenth thirtieth hundredth thousandth millionth one two three four five six seven
eight nine ten eleven twelve nineteen twenty thirty forty fifty sixty seventy eighty
ninety hundred thousand million billion trillion lakh crore bn mn mil dozen pair
couple score gross squared cubed pi halve
"""


def test_a_number_word_is_no_unit():
    for word in NUMBER_WORDS.split():
        for text in (f"5 {word}", f"5 {word}s", f"5 {word.title()}", f"1/2 {word}"):
            assert not grpo.answers_match(text, text.split()[0])


def math_finds_equal(answer, gold):
    return grpo.math_reward([""], ["#### " + answer], [gold]) == [1.0]


JUDGED = [  # pairs, who judges them, verdict
    (SAME, grpo.answers_match, True),
    (SAME, math_finds_equal, True),
    (DIFFERENT, grpo.answers_match, False),
    (MATH_SAME, math_finds_equal, True),
    (MATH_DIFFERENT, math_finds_equal, False),
]


@cases("answer, gold, equal, verdict", [(*x, *y) for t, *y in JUDGED for x in pairs(t)])
def test_equal_answers_and_no_others_are_the_same(answer, gold, equal, verdict):
    assert equal(answer, gold) == verdict
    if equal is grpo.answers_match:
        assert equal(gold, answer) == verdict


ANSWER_REWARDS = [grpo.accuracy_reward, grpo.math_reward]


SCORES = r"""
["14", "16", "10"] | "14" | None | [1, 0, 0]
["5", "6", "7", "5", "5.0"] | "5" | None | [1, 0, 0, 1, 1]
["10", "2", "9", "9"] | "9" | None | [0, 0, 1, 1]
["", "none", r"5 \boxed{ }", "####", r"5 \boxed{5", "None"] | "none" | None | [0] * 6
["", "none", r"5 \boxed{ }", "####", r"5 \boxed{5", "None"] | "5" | None | [0] * 6
["", "none", r"5 \boxed{ }", "####", r"5 \boxed{5", "None"] | "0" | None | [0] * 6
["so 18", r"so \boxed{18} or 1", "#### 18"] | "18" | [False] * 3 | [0, 1, 1]
[r"18 \boxed{18", "so 18"] | "18" | [False, True] | [0, 1]
["1/2", "7", r"\boxed{7} \boxed{3}"] | ["3", "0.5"] | None | [1, 0, 1]
"""


@cases("reward", ANSWER_REWARDS)
@cases("texts, gold, finished, expected", values(SCORES))
def test_rewards_of_answers(reward, texts, gold, finished, expected):
    """Of an unfinished text only a box or a mark counts; any alternative is right."""
    size = len(texts)
    columns = dict(finished=finished, level=[1] * size)
    assert reward([""] * size, texts, [gold] * size, **columns) == expected


def test_math_works_in_threads():
    columns = [""], [r"\boxed{\sqrt{8}}"], [r"2\sqrt2"]
    with ThreadPoolExecutor() as pool:
        assert pool.submit(grpo.math_reward, *columns).result() == [1.0]


def test_math_names_the_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with raises(ModuleNotFoundError, match="math_verify"):
        grpo.math_reward([""], ["5"], ["5"])


NO_ANSWERS = r'[null, true, NaN, "", " ", [], ["1", null], "\\boxed{1", "####", {}]'


def test_gold_answers_are_marked_or_the_whole_text_or_alternatives():
    assert grpo.gold_answers("2 + 16\n#### 18") == ["18"]
    golds = grpo.gold_answers([r"so \boxed{\frac12}", 0.5, 0, " a\nb"])
    assert golds == [r"\frac12", "0.5", "0", "a\nb"]
    for unusable in json.loads(NO_ANSWERS):
        for check in (
            grpo.gold_answers,
            functools.partial(grpo.check_answer, by_number=True),
        ):
            with raises(ValueError, match="is no answer"):
                check(unusable)


GOLDS = r"18; \$18; 1/2; \frac{1}{2}; 5\text{ cm}; 50\%; \text{(A)}; New York; 1{,}080"
LATEX_GOLDS = (
    r"\foo; 2\sqrt{5}; x^2; a_1; \frac{x}{2}; \frac{\pi}{2}; 90^\circ; \frac12"
)


def test_accuracy_judges_by_numbers_and_words_but_no_other_latex():
    for gold in GOLDS.split("; "):
        grpo.check_answer([gold, 7, rf"so \boxed{{{gold}}}"], by_number=True)
    grpo.check_answer("a \u200bword and 'two' \"quotes\"", by_number=True)
    for gold in LATEX_GOLDS.split("; "):
        with raises(Error, match="--reward math"):
            grpo.check_answer(["7", gold], by_number=True)


@cases("piece, count", table(HOSTILE_TEXTS))
def test_hostile_texts_cost_milliseconds(piece, count):
    text = piece * int(count)
    start = time.process_time()
    for completion in (text, "#### " + text, "\\boxed{" + text + "}" * int(count)):
        assert grpo.accuracy_reward([""], [completion], ["7"]) == [0.0]
        assert grpo.format_reward([""], [completion]) == [0.0]
        grpo.answers_match(completion, completion)
    assert time.process_time() - start < 0.5  # a quadratic search would take minutes


@cases("prompt, completion, expected", table(FORMATS))
def test_format_reward(prompt, completion, expected):
    completion = completion.replace(r"\n", "\n")
    assert grpo.format_reward([prompt], [completion]) == [float(expected)]


# --------------------------------------------------------------------------- the loss

VARIANTS = [
    dict(loss_type=loss_type, importance_sampling_level=level)
    for loss_type in ("grpo", "dapo", "dr_grpo")
    for level in ("token", "sequence")
]
variants = cases("variant", VARIANTS, ids=str)


def random_batch(num_rows=6):
    """Log-probs some of whose ratios are clipped; the last row is all masked."""
    generator = torch.Generator().manual_seed(0)
    shape = 4, num_rows, 5
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    logp = noise[0] - 3
    lengths = torch.arange(num_rows)[:, None] % 5 + 1
    lengths[-1] = 0
    mask = torch.arange(5) < lengths
    return logp, logp + 0.3 * noise[1], logp + 0.5 * noise[2], noise[3], mask


def slow_loss(logp, old_logp, ref_logp, advantages, mask, variant, high):
    """The equations as loops, and the metrics."""
    loss_type, level = variant.values()
    total = 0
    num_tokens = mask.sum().item()
    metrics = defaultdict(float)
    for i in range(len(mask)):
        tokens = mask[i].nonzero()[:, 0].tolist()
        row = 0
        for t in tokens:
            log_ratio = logp[i, t] - old_logp[i, t]
            if level == "sequence":
                log_ratio = sum(logp[i, u] - old_logp[i, u] for u in tokens)
                log_ratio = log_ratio / len(tokens)
            ratio = log_ratio.exp()
            surrogate = ratio * advantages[i, t]
            is_clipped = ratio > 1 + high if advantages[i, t] > 0 else ratio < 1 - 0.2
            if is_clipped:
                bound = 1 + high if ratio > 1 else 1 - 0.2
                surrogate = bound * advantages[i, t]
            d = ref_logp[i, t] - logp[i, t]
            kl = d.exp() - d - 1
            row = row - surrogate + 0.1 * kl
            values = kl.item(), -logp[i, t].item(), ratio.item(), float(is_clipped)
            names = "kl", "entropy", "ratio_mean", "clip_fraction"
            for name, value in zip(names, values):
                metrics[name] += value / num_tokens
        sizes = dict(grpo=max(1, len(tokens)) * len(mask), dapo=num_tokens)
        total += row / sizes.get(loss_type, 9 * len(mask))
    return total, metrics


@variants
@cases("high", [None, 0, 0.4])
def test_loss_gradient_and_metrics_are_those_of_the_loops(variant, high):
    *logps, advantages, mask = random_batch()
    if high is None:  # one advantage for each completion
        advantages = advantages[:, 0]
    logps[0].requires_grad_()
    options = dict(variant, epsilon_high=high, beta=0.1, max_completion_length=9)
    loss, metrics = grpo.grpo_loss(*logps, advantages, mask, **options)
    advantages = advantages.view(6, -1).expand(6, 5)
    slow, slow_metrics = slow_loss(*logps, advantages, mask, variant, high or 0.2)
    assert_close(loss, slow, atol=1e-12, rtol=0)
    grads = [gradient(x, logps[0])[0] for x in (loss, slow)]
    assert_close(*grads, atol=1e-12, rtol=0)
    assert 0 < slow_metrics["clip_fraction"] < 1
    for name, value in slow_metrics.items():
        assert metrics[name].item() == approx(value, rel=1e-6)


@variants
def test_without_old_log_probs_the_policy_is_the_old_one(variant):
    logp, _, *others = random_batch()
    results = []
    for old_logp in (None, logp.clone()):
        loss, metrics = grpo.grpo_loss(
            logp.requires_grad_(), old_logp, *others, **variant
        )
        results.append([loss, gradient(loss, logp), metrics])
    assert_close(*results)
    assert metrics["ratio_mean"] == 1 and metrics["clip_fraction"] == 0


@variants
@cases("junk", [math.inf, -math.inf, math.nan, 1e30])
def test_nothing_under_the_mask_reaches_loss_or_gradient(variant, junk):
    *inputs, mask = random_batch()
    results = []
    for fill in (0.0, junk):
        filled = [x.masked_fill(~mask, fill).requires_grad_() for x in inputs]
        loss, metrics = grpo.grpo_loss(*filled, mask, **variant)
        results.append([loss, gradient(loss, filled[0]), metrics])
    assert_close(*results)


@cases("beta", [0.0, 0.1])
def test_old_and_reference_log_probs_bear_no_gradient(beta):
    logp, _, _, advantages, mask = random_batch()
    logp.requires_grad_()
    grads = []
    for others in ((None, 2 * logp.detach()), (logp, 2 * logp)):
        loss, _ = grpo.grpo_loss(logp, *others, advantages, mask, beta=beta)
        grads.append(gradient(loss, logp)[0])
    assert torch.equal(*grads) and grads[0].any()


@variants
def test_a_batch_that_is_all_masked_gives_zero(variant):
    *inputs, mask = random_batch()
    loss, metrics = grpo.grpo_loss(*inputs, mask & False, **variant)
    assert loss == 0 and not any(metrics.values())


def test_k3_is_an_unbiased_estimate_of_the_divergence():
    policy, reference = numbers("0.5 0.3 0.2"), numbers("0.2 0.3 0.5")
    k3 = grpo.kl_k3(policy.log(), reference.log())
    divergence = (policy * (policy / reference).log()).sum()
    assert_close((policy * k3).sum(), divergence)
    assert grpo.kl_k3(*numbers("0.7 0.5").log()).item() == approx(0.050758, abs=1e-6)
    nearly_equal = grpo.kl_k3(torch.tensor(-1.0), torch.tensor(-1.0001))
    assert nearly_equal.item() == approx(5e-9, rel=1e-2)


# ------------------------------------------------------------------------- advantages


@cases("value", numbers("0.1 0.3 0.7 1 -2.3 1e-8 12345.678"))
def test_equal_rewards_have_exactly_no_advantage(value):
    rewards = torch.cat([value.repeat(8), numbers("0 1 0 1 0 1 0 1")])
    for scale_rewards in ("group", "none"):
        assert not grpo.group_advantages(rewards, 8, scale_rewards)[:8].any()
    step_rewards = [[value] * 3, [value] * 5]
    step_ends = [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert not grpo.process_advantages(step_rewards, step_ends, 2, 5).any()


STEPS = json.loads("""[
[[0.2, 1.0], [1, 4]],       [[], []],     [[0.5, 0.25, 1.0], [0, 2, 3]],
[[1.0, 0.0], [0, 4]],       [[2.0], [2]], [[0.1, 0.9], [1, 2]],
[[3.0], [2]],               [[], []],     [[], []],
[[1.0], [1]],               [[0.0], [2]], [[], []]]""")  # rewards of steps, their ends


@cases("scale", ["group", "none"])
def test_process_advantages_are_those_of_the_loops(scale):
    step_rewards, step_ends = zip(*STEPS)
    expected = []
    for i in range(len(STEPS)):
        start = i - i % 3
        group = torch.tensor(sum(step_rewards[start : start + 3], []))
        first = sum(len(x) for x in step_rewards[start:i])  # step of this row
        advantages = group - group  # of a single step
        if len(group) > 1:
            advantages = grpo.group_advantages(group, len(group), scale)
        for t in range(5):
            after = [x for x, end in zip(advantages[first:], step_ends[i]) if end >= t]
            expected.append(float(sum(after)))
    found = grpo.process_advantages(step_rewards, step_ends, 3, 5, scale_rewards=scale)
    assert found.flatten().tolist() == approx(expected, abs=1e-5)


WRONG_CALLS = """
grpo.grpo_loss(*random_batch(), loss_type="x") | ValueError: .* is unknown
grpo.grpo_loss(*random_batch(), importance_sampling_level="x") | ValueError: .* unknown
grpo.group_advantages(torch.zeros(4), 2, "x") | ValueError: .* is unknown
grpo.group_advantages(torch.zeros(4), 1) | ValueError: .* groups of 1
grpo.group_advantages(torch.zeros(4), 0) | ValueError: .* groups of 0
grpo.group_advantages(torch.zeros(5), 2) | ValueError: .* groups of 2
grpo.group_advantages(torch.zeros(4), 8) | ValueError: .* groups of 8
grpo.process_advantages([[1.0, 2.0], [3.0]], [[0], [1]], 2, 3) | ValueError: zip
grpo.process_advantages([[1.0, 2.0], [3.0]], [[0], [1, 2]], 2, 3) | ValueError: zip
encode(["1+1="], RAISING, chat_template="on") | Error: no system.*--chat-template
encode(["1+1="], RAISING) | Error: no system message.*--chat-template
encode(["1"], None, max_completion_length=1000) | Error: .*-length leaves no positions
grpo.choose_paths(tiny_model("rwkv")) | Error: .*padding or later tokens
grpo.choose_paths(tiny_model("recurrent_gemma")) | Error: .*padding or later tokens
grpo.choose_paths(tiny_model("bert")) | Error: .*padding or later tokens
"""


@cases("call, error", table(WRONG_CALLS))
def test_wrong_calls_are_errors(call, error):
    with raises((ValueError, Error)) as stop:
        eval(call)
    assert re.match(error, f"{stop.typename}: {stop.value}")


# -------------------------------------------------------------------------- log-probs

SHAPE = json.loads("""{
"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
"max_position_embeddings": 64, "original_max_position_embeddings": 16,
"initializer_range": 0.3, "eos_token_id": 1, "pad_token_id": 39,
"tie_word_embeddings": true, "attention_hidden_size": 32, "lru_width": 32,
"num_local_experts": 2, "query_pre_attn_scalar": 8, "state_size": 4}""")
OPTIONS = json.loads("""{
"qwen2 untied": {"tie_word_embeddings": false},
"mistral": {"sliding_window": 3},
"gemma2": {"sliding_window": 4},
"phi3": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4,
    "short_factor": [1, 1, 1, 1], "long_factor": [4, 4, 4, 4],
    "original_max_position_embeddings": 16}},
"cohere": {"logit_scale": 0.25},
"lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
"jamba": {"mamba_dt_rank": 4, "use_mamba_kernels": false, "attn_layer_offset": 1},
"mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
"qwen3_5_text": {"linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4,
    "initializer_range": 0.1},
"llama4_text": {"floor_scale": 12, "attn_temperature_tuning": true}}""")
SHARED = ["qwen2", "qwen2 untied", "llama", "gpt2", "mistral", "lfm2", "mamba2"]
SHARED += ["qwen3_5_text"]
OWN_LOGITS = ["gemma2", "cohere", "phi"]  # which are not head(hidden)
PLAIN = ["jamba"]  # whose layers do not go on from a cache with more than one token
own_logits = functools.partial(grpo.token_logprobs, own_logits=True)


def tiny_model(kind="qwen2", seed=0, **options):
    """A random model of a real architecture."""
    torch.manual_seed(seed)
    options = {**SHAPE, **OPTIONS.get(kind, {}), **options}
    config = AutoConfig.for_model(kind.split()[0], **options)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def ragged_batch(num_generations=3, length=6):
    """Two left-padded prompts of 5 and 3 tokens, completions of 1 to 6 tokens."""
    generator = torch.Generator().manual_seed(0)
    prompt_ids = torch.randint(2, 40, (2, 5), generator=generator)
    prompt_mask = torch.arange(5) >= torch.tensor([[0], [2]])
    shape = 2 * num_generations, 6
    completion_ids = torch.randint(2, 40, shape, generator=generator)
    lengths = 6 - torch.arange(2 * num_generations)[:, None] % 6
    completions = completion_ids, torch.arange(6) < lengths
    return prompt_ids, prompt_mask, *(x[:, :length] for x in completions)


def slow_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, mask, temperature=1.0
):
    """One forward without padding for each completion."""
    logp = torch.zeros(mask.shape)
    for i in range(len(mask)):
        b = i * len(prompt_ids) // len(mask)
        prompt = prompt_ids[b, prompt_mask[b]]
        completion = completion_ids[i, mask[i]]
        ids = torch.cat([prompt, completion])
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
        tokens = torch.arange(len(completion))
        logp[i, tokens] = logits.log_softmax(1)[tokens, completion]
    return logp


@cases("kind", SHARED + OWN_LOGITS + PLAIN)
@cases("temperature, length", [(1.0, 6), (0.7, 6), (0.7, 1)])
def test_token_logprobs_are_those_of_one_forward_per_row(kind, temperature, length):
    model, batch = tiny_model(kind), ragged_batch(length=length)
    before = copy.deepcopy(batch)
    weights = torch.randn(6, length)
    params = list(model.parameters())
    functions = [slow_logprobs, grpo.plain_logprobs]
    if kind not in PLAIN:
        functions.append(own_logits)
    if kind in SHARED:
        functions.append(grpo.token_logprobs)
    results = []
    for function in functions:
        logp = function(model, *batch, temperature)
        loss = (logp * weights).sum()
        grads = gradient(loss, params, materialize_grads=True)
        results.append([logp, *grads])
    for found in results[1:]:
        assert_close(found, results[0], atol=5e-4, rtol=1e-3)
        assert found[0].dtype == torch.float32
    assert_close(batch, before)


@cases("logprobs", [grpo.plain_logprobs, own_logits])
def test_logits_in_bfloat16_give_log_probs_in_float32(logprobs):
    model, batch = tiny_model().bfloat16(), ragged_batch()
    *_, ids, mask = batch
    shape = *ids.shape, 40
    logits = torch.randn(shape).bfloat16()
    scaled = logits.float() / 0.7
    expected = scaled.log_softmax(2).gather(2, ids[:, :, None])[:, :, 0]
    found = grpo.logprobs_of_logits(logits, ids, mask, 0.7)
    assert_close(found, expected * mask)
    assert logprobs(model, *batch).dtype == torch.float32
    weight = torch.randn(40, 8).bfloat16()
    hidden = 4 * weight[ids]  # of which the logits are rounded, as in sampling
    found = grpo.logprobs_of_hidden(hidden, weight, ids, mask, 1.0)
    expected = grpo.logprobs_of_logits(hidden @ weight.t(), ids, mask, 1.0)
    assert_close(found, expected, atol=1e-3, rtol=0)


@cases("frozen", [False, True])
@cases("dtype, tolerance", [(torch.float64, 1e-5), (torch.bfloat16, 0.02)])
def test_the_normaliser_goes_through_the_vocabulary_in_parts(
    frozen, dtype, tolerance, monkeypatch
):
    torch.manual_seed(0)
    weight = (1 + 0.1 * torch.randn(12_800, 6)).to(dtype).requires_grad_(not frozen)
    hidden = (0.1 * torch.randn(7, 6)).to(dtype).requires_grad_()
    inputs = [x for x in (hidden, weight) if x.requires_grad]
    scale = torch.randn(7)
    log_z = (hidden.double() @ weight.double().t()).logsumexp(1)
    expected = log_z, *gradient((log_z * scale).sum(), inputs)
    for size in (1, 1000, 10**6):  # 200 parts, 100, one
        monkeypatch.setattr(grpo, "LOGITS_AT_ONCE", size)
        log_z = grpo.LogNormaliser.apply(hidden, weight)
        found = log_z, *gradient((log_z * scale).sum(), inputs)
        for x, y in zip(found, expected):
            assert (x - y).norm() < tolerance * y.norm()


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of any result."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            self.size = max(self.size, result.numel())
        return result


def test_the_logits_of_all_tokens_are_never_in_memory(monkeypatch):
    monkeypatch.setattr(grpo, "LOGITS_AT_ONCE", 1000)
    model, batch = tiny_model(vocab_size=500), ragged_batch(8)
    assert batch[-1].sum() > 32  # more logits than the output layer has weights
    with LargestTensor() as largest:
        grpo.token_logprobs(model, *batch).sum().backward()
    assert largest.size == 500 * 32


def test_padding_changes_nothing():
    model = tiny_model()
    prompt_ids, prompt_mask, completion_ids, mask = ragged_batch()
    pad = torch.nn.functional.pad
    wide = pad(prompt_ids, (4, 0), value=7), pad(prompt_mask, (4, 0))
    long = pad(completion_ids, (0, 3), value=9), pad(mask, (0, 3))
    for logprobs in (grpo.plain_logprobs, grpo.token_logprobs, own_logits):
        found = logprobs(model, *wide, *long)
        expected = pad(slow_logprobs(model, *ragged_batch()), (0, 3))
        assert_near(found, expected)
    nothing = torch.zeros_like(mask)
    found = grpo.token_logprobs(model, prompt_ids, prompt_mask, completion_ids, nothing)
    assert not found.any()


@cases("kind", [*SHARED, "phi3", *OWN_LOGITS, *PLAIN, "mamba"])
def test_models_share_prompts_as_far_as_they_bear_it(kind, capsys):
    model = tiny_model(kind)
    if kind == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    logprobs, share_prompts, use_cache = grpo.choose_paths(model)
    assert share_prompts == (kind not in [*PLAIN, "mamba"])
    assert (logprobs is grpo.token_logprobs) == (kind in [*SHARED, "phi3"])
    assert (logprobs is grpo.plain_logprobs) == (not share_prompts)
    assert use_cache == (kind != "mamba")
    assert capsys.readouterr().out.count("note: ") == (not share_prompts) + (
        not use_cache
    )


def test_a_cap_that_small_weights_hide_is_seen():
    model = tiny_model("gemma2", initializer_range=0.02)
    assert grpo.choose_paths(model)[0] is not grpo.token_logprobs


class Detached(transformers.DynamicCache):
    """A cache through which no gradient flows."""

    def reorder_cache(self, rows):
        super().reorder_cache(rows)
        for layer in self.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()


def test_values_that_agree_are_not_enough(monkeypatch):
    monkeypatch.setattr(grpo, "DynamicCache", Detached)
    _, share_prompts, use_cache = grpo.choose_paths(tiny_model())
    assert use_cache and not share_prompts


def test_lengths_at_which_log_probs_change_are_the_limit():
    for kind, limit in dict(qwen2=64, phi3=16, llama4_text=12).items():
        assert grpo.max_positions(tiny_model(kind).config) == limit


@cases("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_fault_of_the_device_is_no_property_of_the_model(error, monkeypatch):
    def fail(*args):
        raise error("CUDA error")

    monkeypatch.setattr(grpo, "token_logprobs", fail)
    with raises(error):
        grpo.choose_paths(tiny_model())


# --------------------------------------------------------------------------- sampling

without_cache = functools.partial(grpo.generate, use_cache=False)
SAMPLERS = values("""
"qwen2" | grpo.generate
"gpt2" | grpo.generate
"mistral" | grpo.generate
"gemma2" | grpo.generate
"lfm2" | grpo.generate
"jamba" | grpo.generate
"qwen2" | without_cache
"mamba" | without_cache
"minimax" | without_cache
""")
HOSTILE = json.loads("""{
"do_sample": true, "temperature": 0.01, "top_p": 0.1, "top_k": 1,
"repetition_penalty": 50.0, "min_new_tokens": 5, "no_repeat_ngram_size": 1,
"suppress_tokens": [2, 3], "max_new_tokens": 1, "num_beams": 4,
"eos_token_id": [0, 7]}""")


def assert_drawn_from(probs, draws):
    """Pearson's chi-square test; of right samplers one seed in 10,000 fails it."""
    counts = draws.bincount(minlength=len(probs))
    expected = len(draws) * probs
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected) ** 2 / expected)[possible].sum()
    degrees = possible.sum() - 1
    spread = 2 / (9 * degrees)  # Wilson and Hilferty's approximation of the quantile
    assert statistic < degrees * (1 - spread + 3.719 * spread.sqrt()) ** 3


def test_sample_draws_from_the_softmax():
    torch.manual_seed(0)
    logits = 1.5 * torch.randn(300)
    logits[::50] = -math.inf
    draws = grpo.sample(logits.expand(200_000, 300), temperature=1.3)
    assert_drawn_from((logits / 1.3).softmax(0), draws)
    assert grpo.sample(logits[None], temperature=0) == logits.argmax()


def test_sample_knows_each_of_150_000_improbable_words(monkeypatch):
    logits = torch.zeros(1, 150_001)
    logits[0, 0] = 18.8  # leaves them 1 in 1000
    probs = logits.softmax(1).double()
    cdf = probs.cumsum(1) / probs.sum()
    for word in range(1, 150_000, 9_999):
        draw = cdf[:, word - 1 : word + 1].mean(1, keepdim=True)
        monkeypatch.setattr(torch, "rand_like", lambda x, draw=draw: draw.to(x))
        assert grpo.sample(logits) == word


def test_sample_of_nan_is_a_token():
    assert grpo.sample(torch.full((3, 5), math.nan)).max() < 5


@cases("kind, sampler", SAMPLERS)
def test_samples_come_from_the_policy(kind, sampler):
    """The first two tokens against forwards without padding, whatever the model's
    generation config says."""
    model = tiny_model(kind, vocab_size=8, pad_token_id=0)
    hostile = transformers.GenerationConfig(**HOSTILE)
    model.generation_config = hostile
    prompt_ids, prompt_mask, *_ = ragged_batch()
    prompt_ids = prompt_ids % 8
    ids = sampler(model, prompt_ids, prompt_mask, 10_000, 2, [1, 5], temperature=1.2)
    assert model.generation_config is hostile
    for b in range(2):
        prompt = prompt_ids[b, prompt_mask[b]]
        longer = torch.cat([prompt.expand(8, -1), torch.arange(8)[:, None]], 1)
        with torch.no_grad():
            first = (model(prompt[None]).logits[0, -1] / 1.2).softmax(0)
            second = (model(longer).logits[:, -1] / 1.2).softmax(1)
        second[[1, 5]] = numbers("0 1 0 0 0 0 0 0")  # EOS after EOS
        draws = ids[b * 10_000 : (b + 1) * 10_000]
        assert_drawn_from(
            (first[:, None] * second).flatten(), draws @ torch.tensor([8, 1])
        )


@cases("kind, sampler", SAMPLERS)
def test_the_whole_vocabulary_is_sampled_from(kind, sampler):
    """Not transformers' 50 most probable words; a right sampler never fails this."""
    model = tiny_model(kind, vocab_size=100, initializer_range=0.01)
    prompt_ids, prompt_mask, *_ = ragged_batch()
    ids = sampler(model, prompt_ids, prompt_mask, 2000, 1, [1])
    assert len(ids.unique()) > 90


@cases("look_every", [1, 16])
@cases("kind, sampler", SAMPLERS)
def test_greedy_completions_are_those_of_transformers_without_padding(
    kind, sampler, look_every, monkeypatch
):
    monkeypatch.setattr(grpo, "LOOK_EVERY", look_every)  # rows may finish in between
    model, eos = tiny_model(kind), list(range(1, 9))
    prompt_ids, prompt_mask, *_ = ragged_batch()
    found = sampler(model, prompt_ids, prompt_mask, 1, 12, eos, temperature=0)
    options = dict(do_sample=False, max_new_tokens=12, pad_token_id=1, eos_token_id=eos)
    for b in range(2):
        prompt = prompt_ids[b, prompt_mask[b]]
        expected = model.generate(prompt[None], **options)[0, len(prompt) :].tolist()
        assert found[b].tolist() == expected + [1] * (12 - len(expected))


def test_finished_rows_leave_the_batch():
    model = tiny_model(use_cache=False)
    prompt_ids, prompt_mask, *_ = ragged_batch()
    torch.manual_seed(0)
    calls = watch(model.get_input_embeddings(), "forward")
    eos = list(range(1, 9))
    ids = grpo.generate(model, prompt_ids, prompt_mask, 50, 60, eos)
    lengths = grpo.completion_mask(ids, eos).sum(1)
    num_tokens = sum(x.numel() for (x,) in calls)
    assert num_tokens == prompt_ids.numel() + (lengths - 1).sum()
    assert len(calls) == lengths.max() < 60  # it stops when all have finished


def test_a_loaded_model_is_float32_without_dropout_and_knows_all_its_eos(tmp_path):
    model, tokenizer = grpo.tiny_model(0)
    model.config.attention_dropout = 0.5
    model.bfloat16().save_pretrained(tmp_path)
    tokenizer.eos_token = "z"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(HOSTILE))
    model, tokenizer, eos = grpo.load_model(str(tmp_path), torch.device("cpu"), 0)
    assert eos == [tokenizer.convert_tokens_to_ids("z"), 0, 7]
    assert model.dtype == torch.float32
    first, second = (grpo.token_logprobs(model, *ragged_batch()) for _ in range(2))
    assert torch.equal(first, second)


# ----------------------------------------------------------------------------- update


def numbered_rows(lengths):
    """Ids, each of which is the number of its row, and their mask."""
    mask = torch.arange(30) < lengths[:, None]
    return torch.arange(len(lengths))[:, None].expand(mask.shape), mask


def cut(prompts, completions, budget):
    run = SimpleNamespace(
        reference=None, device="cpu", share_prompts=True, micro_batch_tokens=budget
    )
    batch = grpo.Batch(*prompts, *completions)
    return grpo.prepare_parts(run, batch, batch.completion_ids + 1)


@cases("budget", [1, 40, 100, 300, 10_000])
def test_micro_batches_hold_every_row_once_within_the_budget(budget):
    for seed in range(50):
        torch.manual_seed(seed)
        num_prompts, size = torch.randint(1, 9, (2,)).tolist()
        prompts = numbered_rows(torch.randint(1, 30, (num_prompts,)))
        completions = numbered_rows(torch.randint(1, 30, (num_prompts * size,)))
        parts = cut(prompts, completions, budget)
        everything = torch.cat([part.batch.completion_ids[:, 0] for part in parts])
        assert sorted(everything.tolist()) == list(range(num_prompts * size))
        assert len(parts) == 1 or budget < 10_000
        for part in parts:
            prompt_ids, _, ids, mask = part.batch
            assert torch.equal(part.advantages, ids + 1)
            groups = ids[:, 0].view(len(prompt_ids), -1) // size
            assert (groups == prompt_ids[:, :1]).all()
            assert prompt_ids.numel() + mask.numel() <= budget or len(mask) == 1


def test_micro_batches_are_of_similar_lengths():
    completions = numbered_rows(numbers("9 9 1 1 9 9 1 1"))
    parts = cut(numbered_rows(torch.ones(4)), completions, 40)
    assert [part.batch.mask.shape for part in parts] == [(4, 9), (4, 1)]


def test_rows_are_taken_without_columns_of_padding():
    model, batch = tiny_model(), ragged_batch(4)
    ids, _ = grpo.pad([[5, 6], [7]], "left", "cpu")  # with a token of the prompt
    assert ids.tolist() == [[5, 6], [5, 7]]
    part = grpo.take_part(grpo.Batch(*batch), batch[-1], torch.tensor([[5, 7]]))
    assert [x.shape for x in part.batch] == [(1, 3), (1, 3), (2, 5), (2, 5)]
    expected = slow_logprobs(model, *batch)[[5, 7], :5]
    found = grpo.token_logprobs(model, *part.batch)
    assert_near(found, expected)


@cases("scale", [1e-3, 10.0])
@cases("max_grad_norm", [1.0, 0.0])
def test_steps_and_clipping_are_those_of_torch(scale, max_grad_norm):
    model = tiny_model()
    other = copy.deepcopy(model)
    ours = grpo.MasterAdamW(model, torch.float32)
    theirs = torch.optim.AdamW(other.parameters(), weight_decay=0)
    for step in range(1, 6):
        for param, twin in zip(model.parameters(), other.parameters()):
            param.grad = step * scale * torch.randn(param.shape)
            twin.grad = param.grad.clone()
        norm = clip_grad_norm_(other.parameters(), max_grad_norm or math.inf).item()
        theirs.param_groups[0]["lr"] = 1e-2 / step
        theirs.step()
        found = ours.step(1e-2 / step, max_grad_norm)
        assert found == approx(norm, rel=1e-5)
        assert_close(model.state_dict(), other.state_dict(), atol=1e-6, rtol=1e-4)


def test_a_step_that_is_cut_off_counts_as_one():
    optimizer = grpo.MasterAdamW(tiny_model(), torch.float32)
    optimizer.adamw.step = mock.Mock(side_effect=OSError)
    with raises(OSError):
        optimizer.step(1e-3, 1.0)
    assert optimizer.moved  # so that `save` does not take it


def bfloat16_copy(model):
    """What is left of a float32 model that was published in bfloat16."""
    return copy.deepcopy(model).bfloat16().float()


def test_masters_begin_at_random_places_in_their_cells():
    """Uniform over the cell, so that a tenth of it moves a tenth of the weights."""
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(100_000)).bfloat16().float()
    weight[:9] = numbers("0 -0 1 -1 0.5 1.1754943508e-38 3e38 -256 1e-40")
    weight[:9] = weight[:9].bfloat16()
    masters = grpo.within_cell(weight)
    assert torch.equal(masters.bfloat16().float(), weight)
    assert torch.equal(masters[:2], weight[:2]) and masters.isfinite().all()
    assert not torch.equal(grpo.within_cell(weight), masters)
    steps = 2 ** weight[9:].abs().log2().floor() / 128  # to the next bfloat16 number
    moved = (masters[9:] + 0.1 * steps).bfloat16().float() - weight[9:]
    assert moved.min() == 0
    assert (moved > 0)[weight[9:] > 0].float().mean().item() == approx(0.1, abs=0.005)
    visible, hidden = moved.double().sum(), 0.1 * steps.double().sum()
    assert visible.item() == approx(hidden.item(), rel=0.05)
    single = torch.randn(1000)  # a float32 checkpoint has lower bits of its own
    assert torch.equal(grpo.within_cell(single), single)


def test_masters_of_bfloat16_weights_move_as_float32_ones_do():
    """At a learning rate of 1e-6; bfloat16 weights alone would stand still."""
    half = bfloat16_copy(tiny_model())
    start = copy.deepcopy(half)
    ours = grpo.MasterAdamW(half, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    for param, first in zip(half.parameters(), start.parameters()):
        assert torch.equal(param.float(), first)
        assert param.grad_dtype == torch.float32  # in which micro-batches are summed
    single = [master.clone().requires_grad_() for master in ours.masters]
    theirs = torch.optim.AdamW(single, lr=1e-6, weight_decay=0)
    for _ in range(40):
        torch.manual_seed(0)
        for param, twin in zip(half.parameters(), single):
            param.grad = torch.randn(param.shape)
            twin.grad = param.grad.clone()
        clip_grad_norm_(single, 1.0)
        theirs.step()
        ours.step(1e-6, 1.0)
    for param, master, twin in zip(half.parameters(), ours.masters, single):
        assert_close(master, twin.detach(), atol=1e-9, rtol=1e-7)
        assert torch.equal(param, master.bfloat16())


def make_run(model, reference=None, share_prompts=True, **options):
    """A run with this policy; `calls` are those of its log-probs."""
    calls, config = [], grpo.Config(max_completion_length=6, **options)
    logprobs = grpo.token_logprobs if share_prompts else grpo.plain_logprobs

    def noting(module, *batch_and_temperature):
        if module is model:
            calls.append(batch_and_temperature[:4])
        return logprobs(module, *batch_and_temperature)

    models = [(x, None, [1]) for x in (model, reference or copy.deepcopy(model))]
    with mock.patch.multiple(
        grpo,
        choose_paths=lambda model: (noting, share_prompts, True),
        load_model=mock.Mock(side_effect=models),
    ):
        run = grpo.load(config, "tiny", grpo.join_ranks(), Path("nowhere"), rewards={})
    run.calls = calls
    return run


def slow_grads(model, reference, batch, advantages, **options):
    """Loss, metrics and gradients, without padding and micro-batches."""
    logp, ref_logp = slow_logprobs(model, *batch, 0.7), None
    if reference:
        ref_logp = slow_logprobs(reference, *batch, 0.7).detach()
    loss, metrics = grpo.grpo_loss(
        logp, None, ref_logp, advantages, batch[-1], max_completion_length=6, **options
    )
    grads = list(gradient(loss, list(model.parameters())))
    return dict(metrics, loss=loss, grad_norm=get_total_norm(grads)), grads


def first_grads(run):
    """The gradients of the first step: a tenth of them is Adam's first moment."""
    state = run.optimizer.adamw.state
    return [10 * state[master]["exp_avg"] for master in run.optimizer.masters]


@variants
@cases("budget, share_prompts", [(24, True), (30, False), (10_000, True)])
def test_update_takes_the_gradient_of_the_whole_batch_however_it_is_cut(
    variant, budget, share_prompts
):
    model, reference = tiny_model(), tiny_model(seed=1)
    batch, advantages = ragged_batch(4), torch.randn(8, 1).expand(8, 6)
    options = dict(variant, beta=0.1)
    expected, grads = slow_grads(model, reference, batch, advantages, **options)
    run = make_run(
        model,
        reference,
        share_prompts,
        micro_batch_tokens=budget,
        temperature=0.7,
        max_grad_norm=1e9,
        **options,
    )
    metrics = grpo.update(run, grpo.Batch(*batch), advantages, 0.0)
    assert_close(first_grads(run), grads, atol=5e-5, rtol=1e-3)
    for name, value in expected.items():
        assert metrics[name] == approx(value.item(), rel=1e-4, abs=1e-6)
    for prompt_ids, _, completion_ids, _ in run.calls:
        num_prompts = len(prompt_ids if share_prompts else completion_ids)
        num_tokens = num_prompts * prompt_ids.shape[1] + completion_ids.numel()
        assert num_tokens <= budget


@cases("level", ["token", "sequence"])
def test_later_iterations_keep_the_log_probs_of_the_first(level):
    """Three updates of one rollout, with a clip range so narrow that it matters."""
    model, reference = tiny_model(), tiny_model(seed=1)
    batch, advantages = ragged_batch(4), torch.randn(8, 1).expand(8, 6)
    slow, start = copy.deepcopy(model), copy.deepcopy(model)
    others = [slow_logprobs(x, *batch).detach() for x in (slow, reference)]
    options = dict(beta=0.1, epsilon=0.01, epsilon_high=0.03)
    options["importance_sampling_level"] = level
    adamw = torch.optim.AdamW(slow.parameters(), lr=1e-3, weight_decay=0)
    expected = defaultdict(float)
    for _ in range(3):
        adamw.zero_grad()
        logp = slow_logprobs(slow, *batch)
        loss, means = grpo.grpo_loss(logp, *others, advantages, batch[-1], **options)
        loss.backward()
        clip_grad_norm_(slow.parameters(), 0.5)
        adamw.step()
        for name, mean in dict(means, loss=loss).items():
            expected[name] += mean.item() / 3
    options.update(num_iterations=3, micro_batch_tokens=30, max_grad_norm=0.5)
    run = make_run(model, reference, **options)
    metrics = grpo.update(run, grpo.Batch(*batch), advantages, 1e-3)
    for param, end, first in zip(*(x.parameters() for x in (model, slow, start))):
        assert (param - end).norm() < 0.02 * (end - first).norm()
    assert expected["clip_fraction"] > 0.1
    for name, mean in expected.items():
        assert metrics[name] == approx(mean, rel=1e-3)


@cases("loss_type", ["grpo", "dapo", "dr_grpo"])
@cases("beta, num_rows", [(0.0, 4), (0.1, 8)])
def test_groups_without_advantage_are_left_out_where_that_is_exact(
    beta, num_rows, loss_type
):
    model, batch = tiny_model(), ragged_batch(4)
    advantages = torch.randn(8, 1).expand(8, 6).clone()
    advantages[:5] = 0  # one group and one completion of the other
    reference = tiny_model(seed=1) if beta else None
    options = dict(beta=beta, loss_type=loss_type)
    _, grads = slow_grads(model, reference, batch, advantages, **options)
    options.update(temperature=0.7, max_grad_norm=0.0)
    run = make_run(model, reference, **options)
    metrics = grpo.update(run, grpo.Batch(*batch), advantages, 0.0)
    assert_close(first_grads(run), grads, atol=5e-5, rtol=1e-3)
    assert metrics["ratio_mean"] == approx(1)
    assert sum(len(x[2]) for x in run.calls) == num_rows


def test_a_batch_without_any_advantage_moves_nothing():
    run = make_run(tiny_model(), beta=0.0)
    batch = grpo.Batch(*ragged_batch())
    assert grpo.update(run, batch, torch.zeros(6, 6), 1e-3)["grad_norm"] == 0


def test_parts_without_tokens_that_wait_for_other_ranks_add_nothing(monkeypatch):
    runs = [make_run(tiny_model(), tiny_model(seed=1)) for _ in range(2)]
    results = []

    def second_rank(x):  # which has the same sums, and in the second run two more parts
        return [x, x + 2 * len(results) if type(x) is int else x]

    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    monkeypatch.setattr(grpo, "all_gather", second_rank)
    for run in runs:
        batch = grpo.Batch(*ragged_batch())
        metrics = grpo.update(run, batch, torch.ones(6, 6), 1e-3)
        assert len(run.calls) == 1 + 2 * len(results)
        results.append([*run.policy.parameters(), torch.tensor([*metrics.values()])])
    assert_close(*results)


@cases("advantage", [math.inf, math.nan])
def test_an_update_whose_gradient_is_not_finite_is_skipped(advantage):
    model, advantages = tiny_model(), torch.ones(6, 6)
    advantages[0, 0] = advantage
    run = make_run(model)
    before = copy.deepcopy(run.optimizer.state())
    batch = grpo.Batch(*ragged_batch())
    metrics = grpo.update(run, batch, advantages, 1e-3)
    assert metrics["skipped"] == 1 and not math.isfinite(metrics["grad_norm"])
    assert_close(run.optimizer.state(), before, atol=0, rtol=0)
    assert run.optimizer.masters[0].grad is None
    weight = model.lm_head.weight
    weight.data = weight.data.clone()  # as LoRA's trip to the CPU does when it is saved
    assert grpo.update(run, batch, torch.ones(6, 6), 1e-3)["skipped"] == 0
    assert not torch.equal(weight, before["masters"][0])


# ---------------------------------------------------------------------------- pasting

PASTED = """
completion_mask | grpo.completion_mask(ids, [2])
group_advantages | grpo.group_advantages(numbers("0 1 2 3"), 2)
process_advantages | grpo.process_advantages([[1], [0]], [[0], [2]], 2, 4)
kl_k3 | grpo.kl_k3(logp, ref_logp)
importance_ratio | grpo.importance_ratio(logp, old_logp, mask, "sequence")
mean_log_ratio | grpo.mean_log_ratio(logp, mask)
clipped_surrogate | grpo.clipped_surrogate(logp, old_logp, advantages)
grpo_loss | grpo.grpo_loss(logp, old_logp, ref_logp, advantages, mask)[0]
sample | grpo.sample(logp, 0)
token_logprobs | grpo.token_logprobs(tiny_model(), *ragged_batch())
plain_logprobs | grpo.plain_logprobs(tiny_model(), *ragged_batch())
generate | grpo.generate(tiny_model(), *ragged_batch()[:2], 2, 5, [1], 0)
MasterAdamW | grpo.MasterAdamW(tiny_model(), torch.bfloat16).step(1, 1) or 0
accuracy_reward | grpo.accuracy_reward([0], ["so 14"], ["14"])
code_reward | grpo.code_reward([0], ["```\\nx = 1\\n```"], ["assert x"], True)
"""


@cases("name, call", table(PASTED))
def test_a_function_works_alone_with_what_its_docstring_names(name, call):
    """Constants and what comes from elsewhere are given as they are."""
    needs = inspect.getdoc(getattr(grpo, name)).partition("Needs ")[2]
    scope = dict(torch=torch)
    for needed in [*re.findall(r"`(\w+)`", needs), name]:
        scope[needed] = getattr(grpo, needed)
        if getattr(scope[needed], "__module__", "") == "grpo":
            exec(inspect.getsource(scope[needed]), scope)
    batch = logp, old_logp, ref_logp, advantages, mask = random_batch()
    values = dict(globals(), **locals(), ids=torch.tensor([[5, 2, 2]]))
    pasted = dict(values, grpo=SimpleNamespace(**scope))
    assert_close(eval(call, pasted), eval(call, values))
    assert_close(batch, random_batch(), atol=0, rtol=0)  # it leaves its inputs alone


# ---------------------------------------------------------------------- random shapes


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(VARIANTS))
def test_functions_of_any_shape_give_finite_numbers(rng, variant):
    num_prompts, num_generations = rng.randint(1, 4), rng.randint(2, 5)
    torch.manual_seed(rng.randrange(2**31))
    shape = num_prompts * num_generations, rng.randint(1, 7)
    mask = grpo.completion_mask(torch.randint(0, 4, shape), [0, 1])
    rewards = torch.randint(0, 3, shape[:1]).float()
    outcome = grpo.group_advantages(rewards, num_generations)
    ends = [range(n) for n in mask.sum(1)]
    steps = [torch.rand(len(x)).tolist() for x in ends]
    process = grpo.process_advantages(steps, ends, num_generations, shape[1])
    assert not process[~mask].any()
    logps, advantages = -5 * torch.rand(3, *shape), outcome[:, None] + process
    loss, metrics = grpo.grpo_loss(*logps, advantages, mask, **variant)
    assert all(x.isfinite() and x.shape == () for x in (loss, *metrics.values()))


# ----------------------------------------------------------------------------- options

WRONG_OPTIONS = """num-generations 1
max-prompt-length five
max-completion-length 0
temperature 0
temperature nan
beta -0.1
epsilon -1
num-iterations 0
prompts-per-step 0
learning-rate nan
max-grad-norm -1
max-steps -1
seed -1
loss-type ppo
scale-rewards row
dtype int8
chat-template maybe
max-step 5
maximum 5"""


@cases("option", WRONG_OPTIONS.splitlines())
def test_wrong_options_are_named(option, capsys):
    with raises((Error, SystemExit)) as stop:
        grpo.parse_args(f"--{option}".split())
    assert option.split()[0] in f"{stop.value} {capsys.readouterr().err}"


def test_what_the_user_types_wins():
    tiny = grpo.parse_args([])
    assert tiny.learning_rate == grpo.TINY["learning_rate"] != grpo.Config.learning_rate
    assert grpo.parse_args(["--learning-rate", "0.5"]).learning_rate == 0.5
    assert grpo.parse_args(["--model", "x"]) == grpo.Config(model="x")


def test_help_tells_every_option_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with raises(SystemExit):
        grpo.parse_args(["--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(grpo.Config):
        name = field.name.replace("_", "-")
        assert re.search(rf"--{name}( [A-Z].*| {{.*}})?\s+\w", text), name
    assert max(map(len, text.splitlines())) <= 80
    assert ", ".join(grpo.REWARDS) in " ".join(text.split())


@cases("name", ["", "/", "/checkpoint-2", "/checkpoint-2/"])
def test_a_run_is_resumed_with_its_own_options(tmp_path, name):
    (tmp_path / "options.json").write_text('{"model": "x", "beta": 0.5}')
    resume = ["--resume", f"{tmp_path}{name}"]
    config = grpo.parse_args([*resume, "--max-steps", "2"])
    assert Path(config.output_dir) == tmp_path
    assert (config.model, config.beta, config.max_steps) == ("x", 0.5, 2)
    for word in "--seed --data --eval-data --sft-steps --lora-rank --model".split():
        with raises(Error, match=f"its own {word};.* max_steps"):
            grpo.parse_args([*resume, word, "1"])
    others = "--learning-rate 1 --eval-every 1 --save-every 1 --micro-batch-tokens 1"
    others += " --unsafe-code --report-to trackio"
    assert grpo.parse_args([*resume, *others.split()]).report_to == "trackio"
    newer = tmp_path / "checkpoint-10"  # with what was given anew
    newer.mkdir()
    (newer / "options.json").write_text('{"model": "x", "beta": 0.25}')
    assert grpo.parse_args(resume).beta == 0.25


# -------------------------------------------------------------------------------- data

MESSAGES = [dict(role="user", content="1+1?")]
ROWS = values(r"""
'{"question": "1+1?", "answer": "1 and 1\\n#### 1,002"}' | "1+1?" | ["1,002"]
r'{"problem": "1+1?", "solution": "so \\boxed{2}"}' | "1+1?" | ["2"]
'{"prompt": "1+1?", "answer": 0}' | "1+1?" | ["0"]
'{"prompt": "1+1?", "answer": ["2", "two"]}' | "1+1?" | ["2", "two"]
'{"prompt": "1\u2028?\x85", "answer": "2"}\n\n' | "1\u2028?\x85" | ["2"]
'\ufeff{"prompt": "1+1?", "answer": "2"}' | "1+1?" | ["2"]
json.dumps(dict(prompt=MESSAGES, answer="2")) | MESSAGES | ["2"]
'{"prompt": "1+1?", "answer": null, "solution": "2"}' | "1+1?" | ["2"]
' \n{"prompt": "1+1?", "answer": "2"}\n\t\n' | "1+1?" | ["2"]
""")  # line, prompt, answers


@cases("line, prompt, answers", ROWS)
@cases("name", ["data.jsonl", "data"])
def test_data_in_the_usual_forms(tmp_path, name, line, prompt, answers):
    path = tmp_path / name
    path.write_text(line, encoding="utf-8")
    (row,) = grpo.read_rows(str(path), {"accuracy"})
    assert row["prompt"] == prompt
    assert grpo.gold_answers(row["answer"]) == answers


WRONG_LINES = r"""{"prompt":
[1]
5
{"answer": "1"}
{"prompt": 5, "answer": "1"}
{"prompt": [{"role": "user"}], "answer": "1"}
{"prompt": "a"}
{"prompt": "a", "answer": {"value": 1}}
{"prompt": "a", "answer": []}
{"prompt": "a", "answer": " "}
{"prompt": "a", "answer": ["1", ""]}
{"prompt": "a", "solution": "so \\boxed{1"}
{"prompt": "a", "answer": true}
{"prompt": "a", "answer": NaN}
{"prompt": "", "answer": "1"}
{"prompt": [], "answer": "1"}
{"prompt": "\ud800", "answer": "1"}"""


@cases("line", WRONG_LINES.splitlines())
@cases("reward", ["accuracy", "math"])
def test_wrong_lines_are_left_out_and_named(tmp_path, line, reward, capsys):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n\n' + line)
    assert len(grpo.read_rows(str(path), {reward})) == 1
    output = capsys.readouterr().out
    assert "1 lines are left out: " in output and "data.jsonl:3: " in output
    path.write_text(line)
    with raises(Error, match="data.jsonl:1: "):
        grpo.read_rows(str(path), {reward})


def test_rewards_want_answers_that_they_can_judge(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "2\\\\sqrt{2}"}')
    assert grpo.read_rows(str(path), {"math"})
    with raises(Error, match="--reward math"):
        grpo.read_rows(str(path), {"accuracy"})
    path.write_text('{"prompt": "a"}')
    assert grpo.read_rows(str(path), {"format"})


@cases("size, num_held_out", [(300, 30), (9, 0)])
def test_held_out_rows_are_any_and_never_trained_on(
    tmp_path, capsys, size, num_held_out
):
    data = [dict(prompt=str(i), answer=i) for i in range(size)]
    data[7]["level"] = 5  # other rows lack this column: rewards get None
    config = grpo.Config(data=f"{tmp_path}/data.jsonl")
    Path(config.data).write_text("\n".join(map(json.dumps, data)))
    _, rows, held_out = grpo.set_up(config, torch.device("cpu"), tmp_path)
    answers = [row["answer"] for row in held_out + rows]
    assert sorted(answers) == list(range(size)) and len(held_out) == num_held_out
    assert max(answers[:30]) >= size / 2  # by chance: 1 in 10**9
    assert {row.get("level", 0) for row in rows} <= {5, None}
    assert ("nothing is evaluated" in capsys.readouterr().out) == (not held_out)


@cases("model", ["tiny", "other"])
def test_built_in_sums_have_right_answers(model):
    for row in grpo.arithmetic(model, seed=0):
        task = row["prompt"].removeprefix("Calculate ").rstrip("=.")
        equation = re.fullmatch(r"Solve for x: (.*) \* x \+ (.*) = (.*)", task)
        if equation:
            a, b, c = map(int, equation.groups())
            assert a * row["answer"] + b == c
        else:
            assert row["answer"] == eval(task)


def test_prompts_come_in_epochs_and_depend_on_the_step_alone():
    rows = range(9)
    steps = [grpo.prompt_batch(rows, step, 3, seed=5) for step in (6, 5, 4, 3, 2, 1)]
    second, first = sum(steps[:3], []), sum(steps[3:], [])
    assert sorted(first) == sorted(second) == list(rows) and first != second
    assert grpo.prompt_batch(rows, 1, 3, seed=6) != steps[-1]


# ----------------------------------------------------------------------------- prompts

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
RAISING = "{{ raise_exception('no system message, please') }}"
TEMPLATES = """
None | "<eos>" | "auto" | "1+1="
CHATML | "<eos>" | "auto" | "1+1="
CHATML | "<|im_end|>" | "auto" | ASKED
CHATML | "<|im_end|>" | "off" | "1+1="
CHATML | "<eos>" | "on" | ASKED
"""  # a base model has a template that it never saw


def encode(prompts, template, eos="<|im_end|>", bos=None, **options):
    """What `encode_prompts` makes of prompts for the tiny model."""
    tokenizer = grpo.tiny_model(0)[1]
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<bos>"]}
    )
    tokenizer.chat_template = template
    if bos:
        tokenizer.backend_tokenizer.post_processor = (
            tokenizers.processors.TemplateProcessing(
                single=f"{bos} $A {eos}",
                special_tokens=list(tokenizer.get_vocab().items()),
            )
        )
    run = SimpleNamespace(
        config=grpo.Config(**{"reward": ("format",), **options}),
        tokenizer=tokenizer,
        eos_token_ids=[tokenizer.convert_tokens_to_ids(eos)],
        policy=mock.Mock(config=transformers.Qwen2Config(max_position_embeddings=1000)),
    )
    rows = grpo.encode_prompts([dict(prompt=prompt) for prompt in prompts], run)
    for row in rows:
        row["tokens"] = tokenizer.convert_ids_to_tokens(row["prompt_ids"])
    return rows


@cases("template, eos, option, prompt", values(TEMPLATES))
def test_a_chat_template_is_used_where_its_end_stops_the_model(
    template, eos, option, prompt
):
    (row,) = encode(["1+1="], template, eos, chat_template=option)
    assert row["prompts"] == prompt


SYSTEM = dict(role="system", content="be kind")
USER = dict(role="user", content="1+1=")
CONVERSATIONS = r"""
"1+1=" | "<|im_start|>system\nbe brief<|im_end|>\n" + ASKED
[USER] | "<|im_start|>system\nbe brief<|im_end|>\n" + ASKED
[SYSTEM, USER] | "<|im_start|>system\nbe kind<|im_end|>\n" + ASKED
"""


@cases("prompt, expected", values(CONVERSATIONS))
def test_conversations_keep_their_system_turn(prompt, expected):
    (row,) = encode([prompt], CHATML, system_prompt="be brief")
    assert row["prompts"] == expected


def test_a_prompt_has_one_bos_and_does_not_end_in_eos():
    for template in (None, "<bos>" + CHATML):
        (row,) = encode(["1+1="], template, bos="<bos>")
        first, *others, last = row["tokens"]
        assert first == "<bos>" not in others and last != "<|im_end|>"


def test_over_long_and_empty_prompts_are_left_out(capsys):
    options = dict(max_prompt_length=6, prompt_template="q:{question}")
    rows = encode(["1+1=", "10+1="], None, **options)
    assert [row["prompts"] for row in rows] == ["q:1+1="]
    assert "1 of 2 prompts" in capsys.readouterr().out
    assert encode([""], None) == []
    # With 512 more tokens 1000 positions are full.
    assert len(encode(["1" * 488, "1" * 489], None)) == 1


@cases("reward", ["accuracy=2", "math"])
def test_answers_are_asked_for_in_a_box(reward):
    (row,) = encode(["1+1?"], None, reward=("format", reward))
    assert row["prompts"].startswith("1+1?\nReason") and "\\boxed{}" in row["prompts"]
    (row,) = encode(["1+1?"], None, reward=(reward,), prompt_template="q {question}")
    assert row["prompts"] == "q 1+1?"


# ----------------------------------------------------------------------------- rewards

MINE = """
import neighbour

def sees(prompts, completions, completion_ids, answer, level, **columns):
    assert prompts == ["1+1="] * 4 and answer == ["2"] * 4 and level == [5] * 4
    assert completions == ["2", "3", "2", "22"]
    assert completion_ids[3] == [4, 4, 0]
    answer.clear()
    return [neighbour.half * len(text) for text in completions]

def judges_some(prompts, **columns):
    return [None, 1.0, 0.0, None]

def a_tensor(prompts, finished, **columns):
    assert finished == [True] * 4
    import torch
    return torch.tensor([0.0, 1.0, 0.5, 0.0])

def judges_none(prompts, **columns):
    return [None] * 4

def each_line(prompts, steps, **columns):
    return [[float("1" in step) for step in row] for row in steps]

def too_few(prompts, **columns):
    return [1.0]

def a_number(prompts, **columns):
    return 1.0

def a_dict(prompts, **columns):
    return dict.fromkeys(range(4), 1.0)

def a_set(prompts, **columns):
    return {1.0, 2.0, 3.0, 4.0}

def a_text(prompts, **columns):
    return "1111"

def numbers_and_lists(prompts, steps, **columns):
    return [1.0, *[[1.0] * len(row) for row in steps[1:]]]

def not_a_number(prompts, **columns):
    return [float("nan")] * 4

def huge(prompts, **columns):
    return [10**400] * 4

def words(prompts, **columns):
    return ["good"] * 4

def raises(prompts, **columns):
    raise RuntimeError("out of\\ncoffee")

def exits(prompts, **columns):
    raise SystemExit(0)

def too_many_steps(prompts, **columns):
    return [[1.0, 2.0, 3.0]] * 4

def a_hole(prompts, **columns):
    return [[None]] * 4
"""
WRONG_REWARDS = re.findall(r"def (\w+)", MINE)[5:]


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "neighbour.py").write_text("half = 0.5")
    return f"{tmp_path}/mine.py"


def score(rewards, texts=("2<eos>", "3<eos>", "2<eos>", "22<eos>"), num_rows=1):
    """`score_completions` of these completions of 1+1=."""
    tokenizer = grpo.tiny_model(0)[1]
    ids, mask = grpo.pad([tokenizer.encode(text) for text in texts], "right", "cpu")
    run = SimpleNamespace(
        tokenizer=tokenizer, rewards=grpo.load_rewards(rewards), eos_token_ids=[0]
    )
    rows = [dict(prompts="1+1=", answer="2", level=5, completions="2")] * num_rows
    return grpo.score_completions(run, rows, grpo.Batch(ids, mask, ids, mask))


def test_a_reward_of_ones_own_sees_copies_of_every_column(mine):
    scores = score([f"{mine}:sees=-2", "accuracy"])
    assert scores.columns["rewards/sees"].tolist() == [0.5, 0.5, 0.5, 1.0]
    assert scores.columns["reward"].tolist() == [0.0, -1.0, 0.0, -2.0]
    assert scores.outcome.tolist() == [0.0, -1.0, 0.0, -2.0]  # the weighted sum
    assert not any(scores.step_rewards) and all(scores.finished)
    assert score([f"{mine}:a_tensor"]).outcome.tolist() == [0.0, 1.0, 0.5, 0.0]


def test_the_end_of_a_text_that_was_cut_off_is_no_answer():
    scores = score(["accuracy"], ["2<eos>", "2", "2 2<eos>", "#### 2"])
    assert scores.finished == [True, False, True, False]
    assert scores.outcome.tolist() == [1.0, 0.0, 1.0, 1.0]


def test_a_file_of_rewards_is_imported_once(tmp_path):
    import pickle

    path = tmp_path / "loads.py"
    path.write_text(f"open({str(tmp_path / 'log')!r}, 'a').write('x')\n" + MINE[19:])
    rewards = grpo.load_rewards([f"{path}:sees", f"{path}:a_number"])
    assert (tmp_path / "log").read_text() == "x"
    for function, _ in rewards.values():
        assert pickle.loads(pickle.dumps(function)) is function


def test_what_is_not_judged_gets_the_mean_of_its_group(mine):
    rewards = score([f"{mine}:judges_some"]).outcome
    assert rewards.tolist() == [0.5, 1.0, 0.0, 0.5]
    rewards = score([f"{mine}:judges_some"], num_rows=2).outcome
    assert rewards.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert not score([f"{mine}:judges_none"]).outcome.any()


LINES = r"""
"1+1\n2+2<eos>" | [3, 7]
"1+1\n\n2+2\n<eos>" | [3, 9]
"\n\n1+1<eos>" | [5]
"1+1\n2+2" | [3, 6]
" \n <eos>" | []
"9.\n1+1<eos>" | [0, 3]
"""  # a blank line is no step; the last token of the tokenizer has a break within


@cases("text, ends", values(LINES))
def test_steps_end_where_their_lines_do(text, ends):
    tokenizer = grpo.tiny_model(0)[1]
    tokenizer.add_tokens(["9.\n1"])
    steps = grpo.split_steps(tokenizer, tokenizer.encode(text))
    assert [end for _, end in steps] == ends


WEIGHTS = """
2 | [[2.0, 0.0], [0.0]] | [[1, 3], [1]]
0 | [[], []] | [[], []]
"""  # at 0 a reward is only logged


@cases("weight, step_rewards, step_ends", values(WEIGHTS))
def test_lists_are_rewards_of_steps_beside_those_of_outcomes(
    mine, weight, step_rewards, step_ends
):
    rewards = [f"{mine}:each_line={weight}", "accuracy", "format=0"]
    scores = score(rewards, ["1\n2<eos>", "3<eos>"])
    assert scores.columns["rewards/each_line"].tolist() == [0.5, 0.0]
    assert scores.columns["reward"].tolist() == [1 + weight / 2, 0.0]
    assert scores.outcome.tolist() == [1.0, 0.0]
    assert (scores.step_rewards, scores.step_ends) == (step_rewards, step_ends)


@cases("name", WRONG_REWARDS)
def test_a_reward_that_goes_wrong_is_named(mine, name):
    with raises(Error, match=f"reward {name} failed: .+") as stop:
        score([f"{mine}:{name}"])
    assert "\n" not in str(stop.value)


WRONG_NAMES = "acuracy accuracy=much {mine}:missing {mine}: missing.py:f ="


@cases("spec", WRONG_NAMES.split())
def test_a_reward_that_is_not_there_is_named(mine, spec):
    spec = spec.format(mine=mine)
    with raises(Error, match=f"--reward {spec}: .*accuracy, math, format"):
        grpo.load_rewards([spec])


# -------------------------------------------------------------- rewards of the README

README_SCORES = """
"named" | "The Rhine." | dict(word="Rhine") | 1.0
"short_and_right" | "so 42" | dict(answer="42", completion_ids=[1, 2]) | 0.998
"short_and_right" | "so 41" | dict(answer="42", completion_ids=[1, 2]) | 0.0
"language" | "so x = 因此 5" | dict() | 0.6
"language" | "42" | dict() | None
"step" | "" | dict(steps=["3+4=7", "7 * 5 = 36", "2+3+4=9"]) | [1.0, 0.0, 0.5]
"""
REPLIES = """
Score: 7 | 0.7
**Score:** 7.5/10 | 0.75
<think>Score: 1</think>Score: 7 | 0.7
Score: 12 | 1.0
Score: -3 | 0.0
seven | None
"""
NO_REPLIES = r"""<html>busy</html>
{"error": "overloaded"}
{"choices": []}
{"choices": [{"message": {"content": null}}]}
{"choices": [{"message": {"content": ["Score: 7"]}}]}
7"""


@pytest.fixture
def readme(tmp_path):
    """The module of rewards that the README shows."""
    text = Path(grpo.__file__).with_name("README.md").read_text()
    path = tmp_path / "rewards.py"
    path.write_text("".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)))
    return grpo.import_file(path)


@cases("name, completion, columns, expected", values(README_SCORES))
def test_rewards_of_the_readme(readme, name, completion, columns, expected):
    columns = {column: [value] for column, value in columns.items()}
    common = dict(prompts=[""], completions=[completion], finished=[True])
    (score,) = getattr(readme, name)(**common, **columns)
    assert score == approx(expected, abs=1e-5)


def reply_of(content):
    choice = dict(message=dict(content=content))
    return io.BytesIO(json.dumps(dict(choices=[choice])).encode())


def test_the_judge_of_the_readme(readme, monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    for content, score in table(REPLIES):
        urlopen = mock.Mock(side_effect=[OSError("busy"), reply_of(content)])
        monkeypatch.setattr("urllib.request.urlopen", urlopen)
        assert readme.judge(prompts=["q"], completions=["a"]) == [eval(score)]
    for line in NO_REPLIES.splitlines():
        pauses.clear()
        urlopen = mock.Mock(side_effect=[io.BytesIO(line.encode()) for _ in range(9)])
        monkeypatch.setattr("urllib.request.urlopen", urlopen)
        assert readme.judge(prompts=["q"], completions=["a"]) == [None]
        assert pauses == [1, 4, 15, 60, 0]


def test_the_judge_is_asked_in_parallel(readme, monkeypatch):
    together = threading.Barrier(32, timeout=10)  # breaks if they come one by one

    def urlopen(request, timeout):
        together.wait()
        question = json.loads(request.data)["messages"][0]["content"]
        return reply_of(f"Score: {int(question.split()[0]) % 10}")

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    scores = readme.judge(prompts=list(map(str, range(32))), completions=["a"] * 32)
    assert scores == [i % 10 / 10 for i in range(32)]  # in the order of the questions


@cases("template", [None, "{{ messages[-1].content }}<eos>"])
def test_the_reward_model_of_the_readme(readme, tmp_path, template):
    _, tokenizer = grpo.tiny_model(0)
    tokenizer.bos_token, tokenizer.pad_token = "#", None
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    options = SMALL | HEADS | dict(intermediate_size=48, initializer_range=0.5)
    config = transformers.Qwen2Config(vocab_size=47, num_labels=1, **options)
    model = transformers.Qwen2ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    readme.REWARD_MODEL = str(tmp_path)
    texts = ["so " * (7 * i % 10) + str(i) for i in range(20)]  # two batches
    expected = []
    for text in texts:  # the last token's score, without padding
        ids = tokenizer(text + "<eos>" * bool(template), return_tensors="pt").input_ids
        hidden = model.model(ids).last_hidden_state
        expected.append(model.score(hidden[:, -1]).item())
    for _ in range(2):
        scores = readme.reward_model([""] * 20, texts, messages=[[]] * 20)
        assert scores == approx(expected, abs=1e-4)
    assert readme.load_reward_model.cache_info().misses == 1


# ------------------------------------------------------------------------- code reward

GOOD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
BLOCK = f"Here it is:\n```python\n{GOOD}```\nDone."
COMPLETIONS = r"""
BLOCK | TESTS | 1.0
BLOCK | TESTS.splitlines() | 1.0
BLOCK | ["x = 0", "assert x"] | 0.0
BLOCK | None | None
BLOCK | [] | None
f"```python\nfrom __future__ import annotations\n{GOOD}```" | TESTS | 1.0
"```python\nx = 1\n```\n" + BLOCK | TESTS | 1.0
BLOCK + "\n```\n3\n```" | TESTS | 1.0
BLOCK + "\n```python\nx = 1\n```" | TESTS | 0.0
f"```\n{GOOD}```" | TESTS | 1.0
f"  ```Python3\n{GOOD}\n  ```" | TESTS | 1.0
f"```python\n{GOOD}" | TESTS | 0.0
"""  # the last block counts, but not what the program prints; the last one is cut off


def test_code_reward_runs_the_last_block_of_python():
    completions, tests, expected = map(list, zip(*values(COMPLETIONS)))
    ((reward, _),) = grpo.load_rewards(["code"], unsafe_code=True).values()
    found = reward(prompts=completions, completions=completions, tests=tests)
    assert found == expected


BAD_CODE = r"""
GOOD.replace("+", "-")
"def add(a, b:\n"
"while True: pass"
"import time; time.sleep(100)"
GOOD + "x = bytearray(10**9)"
GOOD + "import sys\nfor _ in range(10**6): sys.stdout.write('x' * 10**4)"
"raise SystemExit(0)"
"import os; print('passed', flush=True); os._exit(0)"
"import os\nfor _ in range(7): os.fork()\nos.setsid()\nwhile True: pass"
"""
BWRAP = subprocess.run("bwrap --unshare-all --ro-bind / / true", shell=True)
needs_bwrap = pytest.mark.skipif(BWRAP.returncode, reason="bubblewrap does not work")


@needs_bwrap
@cases("code", [code for (code,) in values(BAD_CODE)])
def test_code_that_does_not_pass_is_stopped(code):
    start = time.perf_counter()
    assert grpo.run_tests(GOOD, TESTS)
    assert not grpo.run_tests(code, TESTS, seconds=1)
    assert time.perf_counter() - start < 10  # 1 second of work, 3 in all


ESCAPES = {
    "file": "assert open({file!r}).read() == 'mine'",
    "write": "open({file!r}, 'a').close()",
    "process": "import os; os.kill({pid}, 0)",
    "network": "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
}


@needs_bwrap
@cases("name", ESCAPES)
def test_code_sees_nothing_of_the_user(tmp_path, name):
    file = tmp_path / "mine"
    file.write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = ESCAPES[name].format(file=str(file), pid=os.getpid(), port=port)
        assert grpo.run_tests(code, "", unsafe_code=True)  # it would work
        assert not grpo.run_tests(code, "")


@needs_bwrap
def test_the_data_cannot_open_the_sandbox(tmp_path):
    (tmp_path / "mine").write_text("mine")
    ((reward, _),) = grpo.load_rewards(["code"]).values()
    block = f"```python\nopen({str(tmp_path / 'mine')!r})\n```"
    columns = dict(prompts=[""], completions=[block], tests=["pass"])
    assert reward(**columns, unsafe_code=[True]) == [0.0]


def test_code_sees_no_environment(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    code = "import os; assert 'API_KEY' not in os.environ"
    assert grpo.run_tests(code, "", unsafe_code=True)


def test_without_bubblewrap_the_code_reward_is_refused(monkeypatch):
    for command, words in (("no-such-command", "not found"), ("ls --no-such", "ls: ")):
        monkeypatch.setattr(grpo, "SANDBOX", command)  # it is not there, or not allowed
        with raises(Error, match=f"{words}.*bubblewrap.*--unsafe-code"):
            grpo.load_rewards(["code"])


# -------------------------------------------------------------------------- whole runs

QUICK = "--max-steps 3 --sft-steps 2 --prompts-per-step 4 --num-generations 4 "
QUICK += "--eval-every 3 --warmup-steps 2"
VARIED = """
import gc
import os
import torch
calls = []

def varied(prompts, completions, **columns):  # a model without skill gets some
    calls.append(prompts)
    if len(calls) == int(os.environ.get("FAIL_AT", 0)):
        alone = "RANK" not in os.environ
        for x in gc.get_objects() if alone else []:  # as an update that fails leaves it
            if type(x) is torch.nn.Parameter and x.requires_grad:
                x.grad = torch.full_like(x, torch.nan, dtype=x.grad_dtype)
        raise ValueError("out of coffee")
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
"""
SOME = """
def some(completions, **columns):  # the mean of three 0.1 is a bit more
    return [0.1, None, 0.1, 0.1] * (len(completions) // 4) or [0.1] * len(completions)
"""
METRICS = """step loss reward reward_std rewards/accuracy kl clip_fraction grad_norm
skipped completion_length truncated_fraction zero_std_fraction learning_rate num_tokens
rollout_seconds update_seconds step_seconds peak_memory_gb"""


NUMBERS = "reward rewards/varied rewards/accuracy advantage finished"


def write_varied(folder):
    """Options for a reward that fails in its call FAIL_AT, if that is set."""
    Path(folder, "varied.py").write_text(VARIED)
    return f"--reward {folder}/varied.py:varied --reward accuracy"


@pytest.fixture
def varied(tmp_path):
    return write_varied(tmp_path)


def train(folder, *options):
    """A run in this process -> its training steps."""
    words = " ".join(map(str, options)).split()
    grpo.import_file.cache_clear()  # as in a process of its own
    grpo.train(grpo.parse_args([*words, "--output-dir", str(folder)]))
    return [row for row in metrics_of(folder) if "loss" in row]


def resume(folder, *options):
    """Go on with a run in this process."""
    words = " ".join(map(str, ["--resume", folder, *options])).split()
    grpo.train(grpo.parse_args(words))


def saved_steps(folder):
    return [int(x.name[11:]) for x in grpo.checkpoints(folder)]


@pytest.fixture(autouse=True)
def forget_modules():
    """Files of rewards: other tests have others of the same name."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("neighbour", None)
    grpo.import_file.cache_clear()


def start(*options, **how):
    """A run in a process of its own."""
    words = " ".join(map(str, options)).split()
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, grpo.__file__, *words],
        stdout=pipe,
        stderr=pipe,
        text=True,
        **how,
    )


def metrics_of(folder, name="metrics.jsonl"):
    """Rows of a log without times."""
    log = Path(folder, name)
    return [
        {x: y for x, y in row.items() if not x.endswith(("seconds", "gb"))}
        for row in map(json.loads, log.open() if log.exists() else [])
    ]


def end_of(folder):
    """The logs of a run, and the bytes of its one checkpoint's weights and moments."""
    (checkpoint,) = folder.glob("checkpoint-*")
    files = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.pt")]
    assert len(files) > 1
    rows = set(map(str, metrics_of(folder)))  # as evaluations may be repeated
    logs = rows, metrics_of(folder, "completions.jsonl")
    return logs, {x.relative_to(folder): x.read_bytes() for x in files}


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_the_main_command_learns(tmp_path):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}  # which lacks its bars
    process = start("--output-dir", tmp_path, env=environment)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    rewards = [row["reward"] for row in metrics_of(tmp_path) if "reward" in row]
    assert sum(rewards[:5]) / 5 <= 0.45
    assert sum(rewards[-5:]) / 5 >= 0.90
    evaluation, training = output.splitlines()[-2:]
    assert evaluation.startswith("greedy held-out reward: 0.")
    assert training.startswith("reward by step: 0.")


def test_seeded_runs_repeat_bit_for_bit(tmp_path, varied):
    for name, seed in dict(a=1, b=1, c=2).items():
        train(tmp_path / name, QUICK, varied, "--seed", seed)
    assert end_of(tmp_path / "a") == end_of(tmp_path / "b")
    assert metrics_of(tmp_path / "a") != metrics_of(tmp_path / "c")


def test_a_step_draws_other_numbers_than_the_last(tmp_path, varied):
    """The same prompt twice, by a model that stands still."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": 2}')
    options = f"--data {tmp_path}/data.jsonl --prompts-per-step 1 --sft-steps 0"
    options += " --learning-rate 0 --max-steps 2 --eval-every 1"
    train(tmp_path / "run", varied, options)
    rows = metrics_of(tmp_path / "run", "completions.jsonl")
    texts = [row["completion"] for row in rows]
    assert len(texts) == 16 and texts[:8] != texts[8:]


LISTS = """
def lists(steps, **columns):
    return [[float(len(step)) for step in row] for row in steps]

def outcome(completion_ids, **columns):
    return [sum(ids) % 7 for ids in completion_ids]

def even(steps, **columns):
    return [[1, -1] if len(row) == 2 else [0] * len(row) for row in steps]
"""


@cases("scale", ["group", "none"])
def test_rewards_of_steps_and_outcomes_become_advantages_of_their_tokens(
    tmp_path, monkeypatch, scale
):
    (tmp_path / "lists.py").write_text(LISTS)
    monkeypatch.setattr(grpo, "update", grpo.update)
    updates = watch(grpo, "update")
    options = "--reward {0}/lists.py:lists=2 {0}/lists.py:outcome --scale-rewards {1}"
    options += " --sft-steps 0 --max-steps 1 --num-generations 64"
    options += " --max-completion-length 3"
    (row,) = train(tmp_path / "run", QUICK, options.format(tmp_path, scale))
    ((run, batch, found, _),) = updates
    rewards, ends = [], []
    for ids, mask in zip(batch.completion_ids, batch.mask):
        steps = grpo.split_steps(run.tokenizer, ids[mask].tolist())
        rewards.append([2.0 * len(text) for text, _ in steps])
        ends.append([end for _, end in steps])
    expected = grpo.process_advantages(rewards, ends, 64, 3, scale_rewards=scale)
    outcomes = (batch.completion_ids * batch.mask).sum(1) % 7
    outcome = grpo.group_advantages(outcomes.float(), 64, scale)
    assert_near(found, expected + outcome[:, None])
    assert max(map(len, ends)) > 1
    cut_off = batch.completion_ids.all(1)  # EOS is 0, in the last place as well
    assert not batch.mask.all(1).equal(cut_off)
    assert row["truncated_fraction"] == approx(cut_off.double().mean().item())
    even = options.replace("lists=2 {0}/lists.py:outcome", "even")
    (row,) = train(tmp_path / "even", QUICK, even.format(tmp_path, scale))
    assert not row["reward_std"] and row["zero_std_fraction"] < 1  # its steps differ


def test_what_is_not_judged_makes_no_difference_between_equal_rewards(tmp_path, capsys):
    (tmp_path / "some.py").write_text(SOME)
    options = f"--reward {tmp_path}/some.py:some --beta 0 --max-steps 10"
    train(tmp_path / "run", QUICK, options, "--eval-every 10")
    assert grpo.NOTHING_TO_LEARN in capsys.readouterr().out
    for row in metrics_of(tmp_path / "run")[1:-1]:
        assert (row["zero_std_fraction"], row["reward_std"], row["loss"]) == (1, 0, 0)
    assert metrics_of(tmp_path / "run")[-1]["eval/reward"] == approx(0.1)


def test_a_run_leaves_metrics_and_is_never_written_over(tmp_path, varied):
    handlers = [*map(signal.getsignal, signal.Signals)]
    options = "--temperature 0.7 --max-completion-length 1 --sft-steps 0"
    rows = train(tmp_path, QUICK, varied, options)
    assert handlers == [*map(signal.getsignal, signal.Signals)]
    steps = [row["step"] for row in metrics_of(tmp_path)]
    assert steps == [0, 1, 2, 3, 3]  # evaluated twice
    assert [row["learning_rate"] for row in rows] == approx([5e-4, 1e-3, 1e-3])
    completions = metrics_of(tmp_path, "completions.jsonl")
    for row, mine in ((rows[0], completions[:16]), (rows[2], completions[16:])):
        column = {x: torch.tensor([y[x] for y in mine]) for x in NUMBERS.split()}
        texts = [x["completion"] for x in mine]
        varied = torch.tensor([sum(map(ord, text)) % 7 / 7 for text in texts])
        exact = torch.tensor([float(x["completion"] == str(x["answer"])) for x in mine])
        total = varied + exact
        names = "rewards/varied", "rewards/accuracy", "reward"
        assert_close([column[name] for name in names], [varied, exact, total])
        expected = grpo.group_advantages(total, 4)
        assert_close(column["advantage"], expected, atol=1e-5, rtol=0)
        assert varied.std() > 0.1
        for name in names:
            assert row[name] == approx(column[name].mean().item())
        assert row["reward_std"] == approx(total.view(4, 4).std(1).mean().item())
        assert row["truncated_fraction"] == approx(1 - sum(column["finished"]) / 16)
    for row in rows:
        assert row["num_tokens"] == approx(16 * row["completion_length"])
        assert row["loss"] == approx(0.04 * row["kl"], abs=1e-6)
    assert rows[2]["kl"] > 1e-4 and rows[0]["skipped"] == 0
    last = grpo.read_log(tmp_path / "metrics.jsonl")[-2]
    assert set(METRICS.split()) <= last.keys()
    with raises(Error, match="has a run"):
        train(tmp_path, QUICK)


def save_model(folder, kind, **options):
    """A tiny model of another architecture with the tiny tokenizer."""
    _, tokenizer = grpo.tiny_model(0)
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=0, **options
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


SMALL = dict(hidden_size=32, num_hidden_layers=2)
HEADS = json.loads(
    '{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}'
)
ARCHITECTURES = values("""
"gpt2" | dict(n_embd=32, n_layer=2, n_head=2)
"gemma2" | dict(SMALL, **HEADS)
"mamba" | dict(SMALL, state_size=4)
""")


def test_a_model_that_fails_before_its_first_step_blocks_no_other(tmp_path, varied):
    """Rotary angles that depend on the length, once it is reached."""
    rope = OPTIONS["phi3"]["rope_parameters"] | dict(
        short_factor=[1.0] * 8, long_factor=[4.0] * 8
    )
    options = dict(rope_parameters=rope, original_max_position_embeddings=16)
    save_model(tmp_path / "phi3", "phi3", **SMALL, **HEADS, **options)
    options = f"--model {tmp_path}/phi3 --prompt-template {{question}} {varied}"
    options += " --max-steps 0 --data"
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": 2}\n' * 99)
    options += f" {tmp_path}/data.jsonl --max-completion-length"
    with raises(Error, match="leaves no positions"):
        train(tmp_path / "run", options, 16)
    train(tmp_path / "run", options, 12)


@cases("kind, options", ARCHITECTURES)
def test_other_architectures_train(tmp_path, varied, kind, options):
    save_model(tmp_path / "model", kind, **options)
    options = "--prompt-template {question} --max-completion-length 6 --temperature 0.7"
    options += f" --learning-rate 0.01 --model {tmp_path}/model"
    rows = train(tmp_path / "run", QUICK, varied, options)
    assert [row["ratio_mean"] for row in rows] == [1, 1, 1]
    assert rows[0]["kl"] == approx(0, abs=1e-6)  # the reference is the policy
    assert rows[2]["kl"] > 1e-5


def test_a_checkpoint_is_a_model_in_the_dtype_that_was_asked_for(tmp_path, varied):
    model = "tiny"
    for dtype in ("bfloat16", "float32"):
        options = f"--prompt-template {{question}} --dtype {dtype} --model {model}"
        train(tmp_path / dtype, QUICK, varied, "--max-completion-length 8", options)
        model = tmp_path / dtype / "checkpoint-3"
        assert {str(x.dtype) for x in weights_of(model).values()} == {f"torch.{dtype}"}
        assert metrics_of(tmp_path / dtype)[1]["kl"] == approx(0, abs=1e-6)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    assert tokenizer.decode(tokenizer.encode("12 + 3\n=")) == "12 + 3\n="


def test_supervised_steps_fit_solution_and_eos(tmp_path, monkeypatch, capsys):
    data = tmp_path / "data.jsonl"
    row = '{"prompt": "%d+1=", "answer": "0", "solution": "%d%d"}\n'
    data.write_text("".join(row % (i, i, i) for i in range(40)))
    losses, taught = [], set()

    def update(run, batch, advantages, learning_rate, update=grpo.update):
        for prompt_ids, mask, ids, ended in zip(batch[0], batch[1], batch[2], batch[3]):
            i = run.tokenizer.decode(prompt_ids[mask]).removesuffix("+1=")
            taught.add(i + "+1=")
            assert run.tokenizer.decode(ids[ended]) == f"{i}{i}<eos>"
        assert (advantages == 1).all() and run.config.loss_type == "dapo"
        logp = slow_logprobs(run.policy, *batch)
        metrics = update(run, batch, advantages, learning_rate)
        mean = grpo.masked_mean(logp, batch[3]).item()
        assert metrics["entropy"] == approx(-mean, rel=1e-4)
        losses.append(metrics["entropy"])
        return metrics

    monkeypatch.setattr(grpo, "update", update)
    monkeypatch.setattr(grpo, "evaluate", grpo.evaluate)
    evaluations = watch(grpo, "evaluate")
    options = f"--data {data} --sft-steps 18 --max-steps 0 --temperature 0.7"
    train(tmp_path / "run", QUICK, options)
    assert losses[-1] < losses[0] - 1
    ((_, held_out, _),) = evaluations
    assert len(taught) == 36 and not taught & {row["prompt"] for row in held_out}
    assert re.search(r"held-out reward: 0\.\d\d\n", capsys.readouterr().out)  # one


@cases("start", ["--sft-steps 2", "--sft-steps 0 --model {model}"])
def test_lora_trains_adapters_alone(tmp_path, varied, start):
    peft = pytest.importorskip("peft")
    train(tmp_path / "first", QUICK, "--dtype float32")
    base = tmp_path / "first" / "checkpoint-3"
    start = start.format(model=base)
    options = (
        f"--prompt-template {{question}} --learning-rate 0.01 --dtype float32 {start}"
    )
    options += " --max-completion-length 8"
    train(tmp_path / "run", QUICK, varied, options, "--lora-rank 2")
    if "model" not in start:
        base = tmp_path / "run" / "sft"
    checkpoint = tmp_path / "run" / "checkpoint-3"
    before, after = weights_of(base), weights_of(checkpoint)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved and all("proj" in name for name in moved)
    for name in moved:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) <= 2
    rows = [row for row in metrics_of(tmp_path / "run") if "loss" in row]
    assert rows[0]["kl"] == approx(0, abs=1e-6) != rows[2]["kl"]
    adapter = checkpoint / "adapter"
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(adapter)
    assert_close(adapted.merge_and_unload().state_dict(), after)
    # A model that comes with an adapter is its own reference.
    rows = train(
        tmp_path / "again", QUICK, varied, options, "--sft-steps 0 --model", adapter
    )
    assert rows[0]["kl"] == approx(0, abs=1e-6) != rows[2]["kl"]


def test_lora_leaves_out_the_layer_that_peft_refuses():
    pytest.importorskip("peft")
    adapters = grpo.add_adapters(tiny_model("mamba2"), 2)
    assert adapters.peft_config["default"].lora_alpha == 4


def test_bfloat16_does_not_round_an_adapter_away(tmp_path, varied):
    pytest.importorskip("peft")
    options = "--lora-rank 2 --dtype bfloat16 --learning-rate 1e-6 --sft-steps 0"
    train(tmp_path / "run", QUICK, varied, options)
    before, after = grpo.tiny_model(0)[0], weights_of(tmp_path / "run" / "checkpoint-3")
    for name, weight in before.bfloat16().float().named_parameters():
        if "proj.weight" in name:
            moved = (after[name] - weight).abs()
            assert moved.median() > 0 and moved.max() < 1e-5


# --------------------------------------------------------- resume, and what goes wrong

VARIATIONS = """
4 | --unsafe-code
4 | --dtype bfloat16 --num-generations 16 --eval-every 1
4 | --lora-rank 2 --save-every 2
4 | --num-iterations 2 --beta 0 --num-generations 16 --eval-every 2
2 | --eval-every 3
"""  # the call of the reward that fails, once in an evaluation; options
SIX_STEPS = QUICK + " --max-steps 6 --eval-every 0"


@cases("fail_at, variation", table(VARIATIONS))
def test_a_run_that_failed_and_is_resumed_ends_as_if_it_had_not(
    tmp_path, varied, fail_at, variation, monkeypatch
):
    if "lora" in variation:
        pytest.importorskip("peft")
    options = SIX_STEPS, variation, varied
    train(tmp_path / "whole", *options)
    monkeypatch.setenv("FAIL_AT", fail_at)
    with raises(Error, match="reward varied failed: .*out of coffee"):
        train(tmp_path / "cut", *options)
    assert bool(saved_steps(tmp_path / "cut")) == (fail_at == "4")
    monkeypatch.delenv("FAIL_AT")
    if fail_at == "4":
        resume(tmp_path / "cut")
    else:  # no step was finished
        train(tmp_path / "cut", *options)
    assert end_of(tmp_path / "cut") == end_of(tmp_path / "whole")


def test_a_run_that_is_killed_ends_as_if_it_had_not(tmp_path, varied):
    """In a step, or in the midst of saving; the second time it may be over."""
    options = SIX_STEPS, varied, "--eval-every 2 --save-every 1 --max-steps"
    train(tmp_path / "whole", *options, 32)
    killed = tmp_path / "killed"
    words = *options, 30, "--output-dir", killed
    for num_steps in (2, 5):
        process = start(*words)
        while len(metrics_of(killed)) < num_steps and process.poll() is None:
            time.sleep(0.01)
        time.sleep(random.SystemRandom().uniform(0, 0.3))
        process.kill()
        process.wait()
        words = "--resume", killed
    (killed / "partial-checkpoint-0").mkdir()
    (killed / "completions.jsonl").write_text("cut off")
    resume(killed, "--max-steps 32")
    assert end_of(killed) == end_of(tmp_path / "whole")
    assert not list(killed.glob("partial-*"))


@cases("num_updates, saved", [(2, [1]), (3, [])])
def test_weights_between_two_updates_of_a_rollout_are_not_saved(
    tmp_path, varied, monkeypatch, num_updates, saved
):
    errors = [*[1.0] * num_updates, OSError("out of tea"), 1.0, 1.0]
    norm = mock.Mock(side_effect=errors, return_value=0.0)
    monkeypatch.setattr(grpo.MasterAdamW, "gradient_norm", norm)
    with raises(OSError, match="out of tea"):
        train(tmp_path, SIX_STEPS, varied, "--sft-steps 0 --num-iterations 2")
    assert len(metrics_of(tmp_path)) == 1 and saved_steps(tmp_path) == saved


@cases("error", [OSError, RuntimeError])
def test_a_full_disk_is_one_line_and_the_checkpoint_before_stays(
    tmp_path, varied, monkeypatch, error
):
    options = SIX_STEPS, varied, "--sft-steps 0 --save-every 1 --max-steps"
    train(tmp_path, *options, 1)
    monkeypatch.setattr(torch, "save", mock.Mock(side_effect=error("no\nspace left")))
    with raises(Error, match=f"{tmp_path}/.*checkpoint-2.*: no space left"):
        resume(tmp_path, "--max-steps 2")
    assert saved_steps(tmp_path) == [1]


def test_a_folder_in_which_another_process_works_is_refused(tmp_path):
    config = grpo.Config(output_dir=str(tmp_path))
    for _ in range(2):  # it is free again
        with grpo.open_output_dir(config):
            with raises(Error, match=f"another process.*{tmp_path}"):
                grpo.open_output_dir(config).__enter__()


def test_a_tracker_gets_options_and_metrics(tmp_path, varied, monkeypatch):
    tracker = mock.Mock()
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    monkeypatch.setenv("WANDB_RUN_ID", "")
    options = SIX_STEPS, varied, "--sft-steps 0 --report-to trackio --max-steps 1"
    train(tmp_path / "run", *options)
    resume(tmp_path / "run", "--max-steps 2")
    expected = []
    for start, how in zip(tracker.init.call_args_list, ("never", "allow")):
        config = start.kwargs["config"]
        assert config["report_to"] == "trackio"
        start = dict(project="grpo", name="run", config=config, resume=how)
        expected += [mock.call.init(**start), mock.ANY, mock.call.finish()]
    rows = grpo.read_log(tmp_path / "run" / "metrics.jsonl")
    for i, metrics in enumerate(rows):
        expected[3 * i + 1] = mock.call.log(metrics, step=metrics.pop("step"))
    assert tracker.mock_calls == expected


def test_a_signal_finishes_the_step_and_saves(tmp_path):
    process = start(QUICK, "--max-steps 100000 --output-dir", tmp_path)
    while len(metrics_of(tmp_path)) < 5 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    last = metrics_of(tmp_path)[-1]["step"]
    assert (tmp_path / f"checkpoint-{last}").exists()
    error = process.stderr.read().splitlines()[-1]
    assert f"SIGTERM after step {last}: --resume {tmp_path}" in error


SLOW = "import time\ndef slow(**columns):\n    print('asked', flush=True)\n"


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW + "    time.sleep(60)")
    options = f"{QUICK} --eval-every 0 --reward {tmp_path}/slow.py:slow"
    process = start(options, "--output-dir", tmp_path)
    for pipe, word in ((process.stdout, "asked"), (process.stderr, "SIGTERM")):
        while word not in pipe.readline() and process.poll() is None:
            pass
        process.send_signal(signal.SIGTERM)
    assert process.wait(20) == -signal.SIGTERM


def test_a_run_that_diverges_ends_and_keeps_its_last_good_checkpoint(
    tmp_path, varied, capsys
):
    train(tmp_path, QUICK, varied, "--save-every 1 --max-steps 4 --eval-every 0")
    with raises(Error, match="step 5 .* not saved.* of step 4$"):
        resume(tmp_path, "--max-steps 20 --learning-rate 1e30")
    assert saved_steps(tmp_path) == [4]
    resume(tmp_path, "--max-steps 20 --learning-rate 1e-3")
    assert saved_steps(tmp_path) == [20]
    assert grpo.NOTHING_TO_LEARN not in capsys.readouterr().out


def test_five_skipped_updates_in_a_row_end_the_run(tmp_path, varied, monkeypatch):
    norms = numbers("1 nan 1 nan inf nan nan nan 1 1").tolist()  # the last: saving
    norm = grpo.MasterAdamW.gradient_norm
    monkeypatch.setattr(
        grpo.MasterAdamW, "gradient_norm", lambda self: norms.pop(0) * norm(self)
    )
    with raises(Error, match="five steps in a row"):
        options = "--max-steps 20 --sft-steps 0 --eval-every 0"
        train(tmp_path, QUICK, varied, options)
    rows = metrics_of(tmp_path)
    assert [row["skipped"] for row in rows] == [0, 1, 0, 1, 1, 1, 1, 1]
    assert rows[1]["grad_norm"] is None  # which JSON has, unlike NaN
    assert saved_steps(tmp_path) == [8]


MISTAKES = """--model no/such/folder | no/such/folder
--data missing.jsonl | missing.jsonl
--data {folder}/latin-1.jsonl | 0xe9
--eval-data missing.jsonl | missing.jsonl
--reward nonsense | --reward nonsense
--beta nan | --beta
--output-dir /proc/nowhere | /proc/nowhere
--data {folder}/array.json | one object a line
--data {folder}/empty.jsonl | empty.jsonl: no rows
--data {folder}/latin-1.jsonl | latin-1.jsonl
--resume {folder}/none | options.json
--resume {folder} --model no/such/folder | its own --model
--learning-rate inf | --learning-rate
--reward accuracy =0.2 | --reward =0.2
--prompt-template 1+1= | {{question}}
--chat-template on | --chat-template
--prompts-per-step 5000 | prompts-per-step
--max-prompt-length 2 | only 0 rows
--max-completion-length 40000 | positions
--data {folder}/no-answers.jsonl --reward format --sft-steps 1 | only 0 rows"""


@cases("mistake", MISTAKES.splitlines())
def test_mistakes_end_in_one_line(tmp_path, mistake, monkeypatch):
    (tmp_path / "options.json").write_text("{}")
    (tmp_path / "array.json").write_text('[\n{"prompt": "1+1=", "answer": 2}\n]')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "no-answers.jsonl").write_text('{"prompt": "1+1="}\n' * 100)
    (tmp_path / "latin-1.jsonl").write_bytes(b"\xe9")
    options, message = mistake.format(folder=tmp_path).split(" | ")
    if "--resume" not in options:
        options = f"--sft-steps 0 --output-dir {tmp_path}/run {options}"
    words = ["grpo.py", *options.split()]
    monkeypatch.setattr(sys, "argv", words)
    with raises(SystemExit) as stop:
        grpo.main()
    error = stop.value.code
    assert re.fullmatch(f"grpo.py: .*{re.escape(message)}.*", error)  # one line
    assert (tmp_path / "options.json").read_text() == "{}"  # as it was


def test_the_header_names_the_packages_of_requirements_txt():
    source = Path(grpo.__file__).read_text()
    (block,) = re.findall(r"# /// script\n(.*?)# ///", source, re.DOTALL)
    metadata = tomllib.loads(block.replace("# ", ""))
    requirements = Path(grpo.__file__).with_name("requirements.txt").read_text()
    assert metadata["dependencies"] == requirements.split()


# ------------------------------------------------------------------- several processes

GRADIENTS = values("""
True | dict()
True | dict(loss_type="dapo")
True | VARIANTS[-1]
True | dict(beta=0.0)
False | dict()
""")  # whether prompts are shared, options
# Of 4 groups; the second rank has completions of one token, and fewer micro-batches.
LENGTHS = json.loads("[[6, 5, 6, 3], [1, 1, 1, 1], [6, 6, 2, 4], [1, 1, 1, 1]]")


def gradients(share_prompts, options):
    """The entropy and those of an update on 4 prompts, of which this has its part."""
    device = grpo.join_ranks()
    models = [grpo.tiny_model(seed)[0].to(device) for seed in (0, 1)]
    run = make_run(*models, share_prompts, micro_batch_tokens=20, **options)
    prompts, completions, advantages = [], [], []
    for i in range(grpo.RANK, 4, grpo.WORLD_SIZE):
        rng = random.Random(i)
        prompts.append(rng.choices(range(2, 47), k=i + 1))
        for length in LENGTHS[i]:
            completions.append(rng.choices(range(2, 47), k=length))
            advantages.append(rng.gauss())
    prompts = grpo.pad(prompts, "left", run.device)
    completions = grpo.pad(completions, "right", run.device)
    batch = grpo.Batch(*prompts, *completions)
    advantages = torch.tensor(advantages)[:, None].expand(batch.mask.shape)
    norm = run.optimizer.gradient_norm
    grads = []

    def noting():
        for param in run.optimizer.params:
            grads.append(getattr(param.grad, "full_tensor", param.grad.clone)())
        return norm()

    run.optimizer.gradient_norm = noting
    metrics = grpo.update(run, batch, advantages, 1e-3)
    assert metrics["grad_norm"] == approx(get_total_norm(grads).item(), rel=1e-5)
    means = grpo.average(dict(entropy=metrics["entropy"], kl=metrics["kl"]))
    return [torch.tensor([*means.values()]), *grads]


def on_each_rank(folder):
    """What torchrun runs twice: gradients, a run, one that fails and is resumed."""
    found = [gradients(*case) for case in GRADIENTS]
    torch.save(found, f"{folder}/gradients{grpo.RANK}.pt")
    options = SIX_STEPS, write_varied(folder), "--dtype bfloat16"
    train(f"{folder}/whole", *options)
    if grpo.RANK == 1:
        os.environ["FAIL_AT"] = "4"
    try:
        train(f"{folder}/cut", *options)
    except Error as error:
        Path(folder, f"error{grpo.RANK}").write_text(str(error))
    os.environ.pop("FAIL_AT", None)
    sys.argv = ["grpo.py", "--resume", f"{folder}/cut"]
    grpo.main()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    command = [sys.executable, *command, __file__, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert f"going on from {folder}/cut/checkpoint-3" in result.stdout
    return folder


def test_two_ranks_take_the_gradient_of_one_process(two_ranks):
    for rank in (0, 1):
        found = torch.load(two_ranks / f"gradients{rank}.pt")
        for case, parts in zip(GRADIENTS, found):
            expected = gradients(*case)
            assert_close(parts, expected, atol=1e-6, rtol=1e-4)


def test_a_reward_that_fails_on_one_rank_ends_all_and_resuming_loses_nothing(two_ranks):
    for rank in (0, 1):
        assert "out of coffee" in (two_ranks / f"error{rank}").read_text()
    assert end_of(two_ranks / "cut") == end_of(two_ranks / "whole")
    folder = two_ranks / "cut" / "checkpoint-6"
    assert b"F32" not in (folder / "model.safetensors").read_bytes()
    config = AutoConfig.from_pretrained(folder)
    assert config.dtype == torch.bfloat16  # as its weights, not as the shards
    assert config.architectures == ["Qwen2ForCausalLM"]
    rows = metrics_of(two_ranks / "whole")
    assert len(rows) == 6
    assert all(row["num_tokens"] == 16 * row["completion_length"] for row in rows)


def test_another_number_of_processes_cannot_resume(two_ranks):
    with raises(Error, match="number of processes"):
        resume(two_ranks / "whole")
    assert metrics_of(two_ranks / "whole")


if __name__ == "__main__":
    on_each_rank(sys.argv[1])
