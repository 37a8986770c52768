# SPDX-License-Identifier: MIT
"""grpo.py by numbers: worked examples, each function against plain loops in float64,
the loss against TRL's, then whole runs. `python -m pytest` runs on a CPU, offline."""

import ast
import copy
import functools
import importlib.util
import inspect
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import tokenizers
import torch
import transformers
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
    """The cells of each row; rows are lines, or parts of a line between ;; signs."""
    return [row.split(" | ") for row in re.split(" ;; |\n", text.strip())]


def values(text):
    return [[eval(cell) for cell in row] for row in table(text)]


def numbers(text):
    return torch.tensor([float(word) for word in text.split()])


def watch(monkeypatch, name):
    """A list of the arguments of each call of a function from now on."""
    calls, function = [], getattr(grpo, name)

    def noting(*args, **options):
        calls.append(args)
        return function(*args, **options)

    monkeypatch.setattr(grpo, name, noting)
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
0.9 0.5 0.9354 1.1225 ;; 0.9 0.5 -0.9354 -1.6837 ;; 0.2 0.5 0.9354 0.3742
0.2 0.5 -0.9354 -0.7483 ;; 0.7 0.5 0.9354 1.1225 ;; 0.7 0.5 -0.9354 -1.3096
"""  # new and old probability, advantage, surrogate


@cases("rewards, num_generations, scale, expected", table(ADVANTAGES))
def test_advantages_of_worked_examples(rewards, num_generations, scale, expected):
    found = grpo.group_advantages(numbers(rewards), int(num_generations), scale)
    assert_close(found, numbers(expected), atol=5e-5, rtol=0)


def test_ratio_and_clip_of_worked_examples():
    new, old, advantages, expected = numbers(RATIOS.replace(";;", "")).view(6, 4).t()
    ratio = grpo.importance_ratio(new.log()[:, None], old.log()[:, None])
    assert_near(ratio[:, 0], numbers("1.8 1.8 0.4 0.4 1.4 1.4"))
    found = grpo.clipped_surrogate(ratio, advantages)[:, 0]
    assert_close(found, expected, atol=5e-5, rtol=0)


def test_k3_of_the_worked_example_and_of_a_small_difference():
    found = grpo.kl_k3(numbers("-0.356675 -1"), numbers("-0.693147 -1.0001"))
    assert found.tolist() == approx([0.050758, 5e-9], rel=1e-2)


# Two tokens whose advantages are 0.9354, with ratios 1.4 (clipped to 1.2) and 0.4, as
# above, and for both the k3 of 0.7 and 0.5, which is 0.050758.
LOSSES = """
0.0 | -(1.1225 + 0.3742) / 2
0.04 | -(1.1225 + 0.3742) / 2 + 0.04 * 0.050758
"""


@cases("beta, expected", values(LOSSES), ids=["minus_surrogate", "plus_beta_kl"])
def test_loss_of_the_worked_example(beta, expected):
    logp = numbers("0.7 0.7").log()[None]
    old_logp = logp - numbers("1.4 0.4").log()
    ref_logp = numbers("0.5 0.5").log()[None]
    arguments = logp, old_logp, ref_logp, numbers("0.9354"), logp < 0
    loss, metrics = grpo.grpo_loss(*arguments, beta=beta)
    assert loss.item() == approx(expected, abs=1e-4)
    assert beta == 0 or metrics["kl"].item() == approx(0.050758, abs=1e-5)


# -------------------------------------------------------------------- completion_mask
MASKS = """
5 6 7 | 2 | 1 1 1 ;; 2 6 7 | 2 | 1 0 0 ;; 5 6 2 | 2 | 1 1 1 ;; 5 2 2 | 2 | 1 1 0
5 2 6 | 2 | 1 1 0 ;; 5 3 2 | 2 3 | 1 1 0
"""


@cases("ids, eos_token_ids, expected", table(MASKS))
def test_completion_mask_runs_through_the_first_eos(ids, eos_token_ids, expected):
    mask = grpo.completion_mask(
        numbers(ids)[None].long(), numbers(eos_token_ids).long().tolist()
    )
    assert mask.dtype == torch.bool
    assert mask[0].tolist() == numbers(expected).tolist()


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
                log_ratio = (logp[i, tokens] - old_logp[i, tokens]).mean()
            ratio = log_ratio.exp()
            surrogate = ratio * advantages[i, t]
            is_clipped = ratio > 1 + high if advantages[i, t] > 0 else ratio < 1 - 0.2
            if is_clipped:
                surrogate = (1 + high if ratio > 1 else 1 - 0.2) * advantages[i, t]
            d = ref_logp[i, t] - logp[i, t]
            kl = d.exp() - d - 1
            row = row - surrogate + 0.1 * kl
            means = dict(kl=kl, entropy=-logp[i, t], ratio_mean=ratio)
            for name, value in dict(means, clip_fraction=is_clipped).items():
                metrics[name] += value.item() / num_tokens
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
    logp, _, _, *others = random_batch()
    fixed = logp.clone()
    logp.requires_grad_()
    results = []
    for old_logp, ref_logp in ((fixed, 2 * fixed), (None, 2 * fixed), (logp, 2 * logp)):
        loss, metrics = grpo.grpo_loss(logp, old_logp, ref_logp, *others, **variant)
        results.append([loss, gradient(loss, logp), metrics])
    for found in results[1:]:
        assert_close(found, results[0])
    assert metrics["ratio_mean"] == 1 and metrics["clip_fraction"] == 0
    assert not any(mean.requires_grad for mean in metrics.values())


@variants
@cases("junk", [math.inf, -math.inf, math.nan, 1e30])
def test_nothing_under_the_mask_reaches_loss_or_gradient(variant, junk):
    *inputs, mask = random_batch()
    for some in (mask, mask & False):  # of the second all, and the loss is 0
        results = []
        for fill in (0.0, junk):
            filled = [x.masked_fill(~some, fill).requires_grad_() for x in inputs]
            loss, metrics = grpo.grpo_loss(*filled, some, **variant)
            results.append([loss, gradient(loss, filled[0]), metrics])
        assert_close(*results)
        assert some.any() == (loss != 0) == any(metrics.values())


# ------------------------------------------------------------------------- TRL's loss
# What `_compute_loss` reads beside the options of the loss. By default TRL multiplies
# the KL by the ratio, also where that is 1.
TRL_DEFAULTS = json.loads("""{
"epsilon_low": 0.2, "max_completion_length": 9,
"current_gradient_accumulation_steps": 1,
"top_entropy_quantile": 1.0, "off_policy_mask_threshold": null, "use_vllm": false,
"aux_loss_enabled": false, "_entropy_bonus_enabled": false}""")
TRL_MASKS = "prompt_ids prompt_mask completion_ids completion_mask"
TRL_ARGS = '{"use_bias_correction_kl": false, "delta": null, "steps_per_generation": 1}'


def trl_loss(logp, inputs, **options):
    """GRPOTrainer's own method, on a stand-in with the attributes that it reads."""
    trainer = SimpleNamespace(
        **TRL_DEFAULTS,
        **options,
        args=SimpleNamespace(**json.loads(TRL_ARGS)),
        accelerator=mock.Mock(num_processes=1, reduce=lambda x, reduction: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, -logp, None),
    )
    trainer.accelerator.gather = lambda x: x
    trainer.model = mock.Mock(training=True)
    trl = pytest.importorskip("trl")
    return trl.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


@variants
@cases("beta", [0.0, 0.04])
@cases("moved", [0.0, 0.3])
@cases("high", [0.2, 0.28])
@cases("seed", range(8))
def test_loss_and_gradient_are_those_of_trl(variant, beta, moved, high, seed):
    torch.manual_seed(seed)
    logp, noise, ref_logp = torch.randn(3, 8, 7) - 3
    logp.requires_grad_()
    mask = torch.arange(7) < torch.randint(1, 8, (8, 1))
    rewards = torch.rand(8).round(decimals=1)
    # TRL adds 1e-4 to the standard deviation, this file 1e-8.
    groups = rewards.view(2, 4)
    deviations = groups - groups.mean(1, keepdim=True)
    inputs = dict(
        {name: mask.long() for name in TRL_MASKS.split()},
        advantages=(deviations / (groups.std(1, keepdim=True) + 1e-4)).flatten(),
        old_per_token_logps=logp.detach() + moved * (noise + 3),
        ref_per_token_logps=ref_logp,
        num_items_in_batch=mask.sum(),
    )
    expected = trl_loss(logp, inputs, **variant, beta=beta, epsilon_high=high)
    advantages = grpo.group_advantages(rewards, 4, eps=1e-4)
    old_logp = inputs["old_per_token_logps"]
    options = dict(variant, beta=beta, epsilon_high=high, max_completion_length=9)
    found, _ = grpo.grpo_loss(logp, old_logp, ref_logp, advantages, mask, **options)
    assert_near(found, expected)
    assert_near(gradient(found, logp), gradient(expected, logp))


# ------------------------------------------------------------------------- advantages
@cases("value", numbers("0.1 0.3 0.7 1 -2.3 1e-8 12345.678"))
def test_equal_rewards_have_exactly_no_advantage(value):
    rewards = torch.cat([value.repeat(8), numbers("0 1 0 1 0 1 0 1")])
    for scale_rewards in ("group", "none"):
        assert not grpo.group_advantages(rewards, 8, scale_rewards)[:8].any()


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
    found = grpo.process_advantages(step_rewards, step_ends, 3, 5, scale)
    assert found.flatten().tolist() == approx(expected, abs=1e-5)


WRONG_CALLS = """
grpo.token_logprobs(tiny_model(), *right_padded()) | ValueError: .* on the left
grpo.shared_logprobs(tiny_model(), *right_padded()) | ValueError: .* on the left
grpo.generate(tiny_model(), *right_padded()[:2], 1, 1, 1) | ValueError: .* on the left
grpo.grpo_loss(*random_batch(), loss_type="x") | ValueError: .* is unknown
grpo.grpo_loss(*random_batch(), importance_sampling_level="x") | ValueError: .* unknown
grpo.group_advantages(torch.zeros(4), 2, "x") | ValueError: .* is unknown
grpo.group_advantages(torch.zeros(4), 1) | ValueError: .* groups of 1
grpo.group_advantages(torch.zeros(5), 2) | ValueError: .* groups of 2
grpo.process_advantages([[1.0, 2.0], [3.0]], [[0], [1, 2]], 2, 3) | ValueError: zip
grpo.shared_logprobs(tiny_model().train(), *ragged_batch()) | ValueError: call model
grpo.choose_logprobs(tiny_model("rwkv")) | ValueError: padding or its cache
grpo.choose_logprobs(tiny_model("recurrent_gemma")) | ValueError:
grpo.choose_logprobs(tiny_model("bert")) | ValueError: padding or its cache
grpo.choose_logprobs(tiny_model("mamba")) | ValueError: padding or its cache
"""


@cases("call, error", table(WRONG_CALLS))
def test_wrong_calls_are_errors(call, error):
    with raises((ValueError, Error)) as stop:
        eval(call)
    assert re.match(error, f"{stop.typename}: {stop.value}")


# -------------------------------------------------------------------------- log-probs
SHAPE = json.loads("""{
"vocab_size": 150, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
"max_position_embeddings": 64, "original_max_position_embeddings": 16,
"initializer_range": 0.3, "eos_token_id": 1, "pad_token_id": 39,
"tie_word_embeddings": true, "attention_hidden_size": 32, "lru_width": 32,
"num_local_experts": 2, "query_pre_attn_scalar": 8, "state_size": 4}""")
OPTIONS = json.loads("""{
"qwen2 untied": {"tie_word_embeddings": false},
"mistral": {"sliding_window": 3},
"gemma2": {"sliding_window": 4},
"cohere": {"logit_scale": 0.25},
"lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
"nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 4,
    "n_groups": 1, "moe_shared_expert_intermediate_size": 48},
"jamba": {"mamba_dt_rank": 4, "attn_layer_offset": 1},
"qwen3_5_text": {"linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4,
    "initializer_range": 0.1}}""")
SHARED = "qwen2|qwen2 untied|llama|gpt2|mistral|lfm2|nemotron_h".split("|")
# Logits that are not head(hidden); recurrent layers that do not continue from a cache
# with several tokens, or change it in place.
PLAIN = ["gemma2", "cohere", "phi", "jamba", "qwen3_5_text"]


def tiny_model(kind="qwen2", seed=0, **options):
    torch.manual_seed(seed)
    options = {**SHAPE, **OPTIONS.get(kind, {}), **options}
    config = AutoConfig.for_model(kind.split()[0], **options)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def ragged_batch(num_generations=3, length=6):
    """Two prompts of 5 and 3 tokens, completions of 0 to 6, all with more padding."""
    generator = torch.Generator().manual_seed(0)
    prompt_ids = torch.randint(2, 40, (2, 7), generator=generator)
    prompt_mask = torch.arange(7) >= torch.tensor([[2], [4]])
    num_rows = 2 * num_generations
    completion_ids = torch.randint(2, 40, (num_rows, 8), generator=generator)
    lengths = (13 - torch.arange(num_rows)[:, None]) % 7
    completions = completion_ids, torch.arange(8) < lengths
    return prompt_ids, prompt_mask, *(x[:, :length] for x in completions)


def right_padded():
    prompt_ids, prompt_mask, *others = ragged_batch()
    return prompt_ids.flip(1), prompt_mask.flip(1), *others


def slow_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, mask, temperature=1.0
):
    logp = torch.zeros(mask.shape)
    for i in range(len(mask)):
        b = i * len(prompt_ids) // len(mask)
        prompt = prompt_ids[b, prompt_mask[b]]
        completion = completion_ids[i, mask[i]]
        ids = torch.cat([prompt, completion])
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].float() / temperature
        tokens = torch.arange(len(completion))
        logp[i, tokens] = logits.log_softmax(1)[tokens, completion]
    return logp


@cases("kind", SHARED + PLAIN)
@cases("temperature, length", [(1.0, 6), (0.7, 6), (0.7, 2), (0.7, 1)])
def test_log_probs_are_those_of_one_pass_a_row(kind, temperature, length, monkeypatch):
    """Also when the output layer is run in parts, here of 64 words."""
    monkeypatch.setattr(grpo.ChunkedLogprobs, "logits_at_once", 1)
    model, batch = tiny_model(kind), ragged_batch(length=length)
    before = copy.deepcopy(batch)
    weights = torch.randn(6, length)
    params = list(model.parameters())
    results = []
    for way in (slow_logprobs, grpo.token_logprobs, grpo.shared_logprobs):
        if kind in PLAIN and way == grpo.shared_logprobs:
            continue
        logp = way(model, *batch, temperature)
        grads = gradient((logp * weights).sum(), params, materialize_grads=True)
        results.append([logp, *grads])
    for found in results[1:]:
        assert_close(found, results[0], atol=5e-4, rtol=1e-3)
        assert found[0].dtype == torch.float32
    assert_close(batch, before)


def test_chunked_log_probs_are_those_of_the_whole_vocabulary(monkeypatch):
    """Logits are rounded to bfloat16 and then divided by the temperature, as in
    sampling. Sums over 200 parts are not rounded."""
    monkeypatch.setattr(grpo.ChunkedLogprobs, "logits_at_once", 1)
    torch.manual_seed(0)
    weight = (1 + 0.1 * torch.randn(12_800, 64)).bfloat16()
    hidden = (0.1 * torch.randn(7, 64)).bfloat16().requires_grad_()
    targets = torch.arange(7)
    found = grpo.ChunkedLogprobs.apply(hidden, weight, targets, 0.7)
    logits = (hidden @ weight.t()).float() / 0.7
    expected = logits.log_softmax(1)[targets, targets]
    assert_close(found, expected, atol=2e-3, rtol=0)
    x, y = (gradient(logp.sum(), hidden)[0] for logp in (found, expected))
    assert (x - y).norm() < 0.04 * y.norm()


def test_a_token_that_is_certain_has_log_prob_0_and_no_gradient():
    """What cancels does so before it is rounded to bfloat16."""
    torch.manual_seed(0)
    weight = torch.randn(64, 32).bfloat16()
    hidden = (3 * weight[:50]).requires_grad_()
    logp = grpo.ChunkedLogprobs.apply(hidden, weight, torch.arange(50), 1.0)
    assert logp.abs().max() < 1e-3
    weight = torch.eye(64).bfloat16()
    hidden = (8.5 * weight[:1]).requires_grad_()  # nearly certain
    logp = grpo.ChunkedLogprobs.apply(hidden, weight, torch.tensor([0]), 1.0)
    grad = gradient(logp.sum(), hidden)[0][0, 0].item()
    assert grad == approx(63 / (63 + math.exp(8.5)), rel=0.01)


class LargestTensor(TorchDispatchMode):
    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            self.size = max(self.size, result.numel())
        return result


def test_the_logits_of_all_tokens_are_never_in_memory(monkeypatch):
    monkeypatch.setattr(grpo.ChunkedLogprobs, "logits_at_once", 1000)
    model, batch = tiny_model(vocab_size=500), ragged_batch(8)
    assert batch[-1].sum() > 32  # more logits than the output layer has weights
    with LargestTensor() as largest:
        grpo.shared_logprobs(model, *batch).sum().backward()
    assert largest.size == 500 * 32


@cases("kind", [*SHARED, *PLAIN])
def test_the_fast_way_is_chosen_where_it_is_right(kind, monkeypatch):
    """By two completions of each of two prompts, so that copies of a cache are used."""
    model = tiny_model(kind)
    if kind == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    calls = watch(monkeypatch, "hidden_states")
    name = "token_logprobs" if kind in PLAIN else "shared_logprobs"
    assert grpo.choose_logprobs(model) == getattr(grpo, name)
    assert calls[0][1].shape == (2, 5)
    if kind in SHARED:
        assert calls[1][1].shape == (4, 7)


@cases("error", [torch.OutOfMemoryError, torch.AcceleratorError])
@cases("function", ["shared_logprobs", "generate"])
def test_an_error_of_the_device_is_raised(error, function, monkeypatch):
    mocked = mock.Mock(side_effect=error("CUDA error"), __name__=function)
    monkeypatch.setattr(grpo, function, mocked)
    with raises(error):
        grpo.choose_logprobs(tiny_model())


# --------------------------------------------------------------------------- sampling
kinds = cases("kind", ["qwen2", "gpt2", "mistral", "gemma2", "lfm2", "jamba"])
HOSTILE = json.loads("""{
"do_sample": true, "temperature": 0.01, "top_p": 0.1, "top_k": 1,
"repetition_penalty": 50.0, "min_new_tokens": 5, "no_repeat_ngram_size": 1,
"suppress_tokens": [2, 3], "max_new_tokens": 1, "num_beams": 4,
"eos_token_id": [0, 7]}""")


def assert_drawn_from(probs, draws):
    """Pearson's chi-square test."""
    counts = draws.bincount(minlength=len(probs))
    expected = len(draws) * probs
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected) ** 2 / expected)[possible].sum()
    degrees = possible.sum() - 1  # the mean of the statistic; twice that its variance
    assert statistic < degrees + 5 * (2 * degrees).sqrt()


def test_sample_draws_from_the_softmax():
    torch.manual_seed(0)
    logits = 1.5 * torch.randn(300)
    logits[::50] = -math.inf
    draws = grpo.sample(logits.expand(200_000, 300), temperature=1.3)
    assert_drawn_from((logits / 1.3).softmax(0), draws)
    assert grpo.sample(logits[None], temperature=0) == logits.argmax()
    assert grpo.sample(torch.full((3, 5), math.nan)).max() < 5  # is a token


def test_sample_knows_each_of_150_000_improbable_words(monkeypatch):
    logits = torch.zeros(1, 150_001)
    logits[0, 0] = 18.8  # leaves them 1 in 1000
    probs = logits.softmax(1).double()
    cdf = probs.cumsum(1) / probs.sum()
    draw = cdf[:, 99_998:100_000].mean(1, keepdim=True)
    monkeypatch.setattr(torch, "rand_like", lambda x: draw.to(x))
    assert grpo.sample(logits) == 99_999


@kinds
def test_samples_come_from_the_policy(kind):
    """The first two tokens, whatever the model's generation config says."""
    model = tiny_model(kind, vocab_size=8, pad_token_id=0)
    model.generation_config = transformers.GenerationConfig(**HOSTILE)
    prompt_ids, prompt_mask, *_ = ragged_batch()
    prompt_ids = prompt_ids % 8
    ids = grpo.generate(
        model, prompt_ids, prompt_mask, 10_000, 2, [1, 5], temperature=1.2
    )
    texts = torch.cartesian_prod(torch.arange(8), torch.arange(8)).repeat(2, 1)
    mask = grpo.completion_mask(texts, [1, 5])
    with torch.no_grad():
        logp = grpo.token_logprobs(model, prompt_ids, prompt_mask, texts, mask, 1.2)
    probs = logp.sum(1).exp() * (mask[:, 1] | (texts[:, 1] == 1))  # EOS after EOS
    draws = ids @ torch.tensor([8, 1])
    for found, expected in zip(draws.view(2, -1), probs.view(2, -1)):
        assert_drawn_from(expected, found)


@kinds
def test_greedy_completions_are_those_of_transformers(kind, monkeypatch):
    model, eos = tiny_model(kind, use_cache=False), list(range(1, 31))
    prompt_ids, prompt_mask, *_ = ragged_batch()
    options = dict(do_sample=False, max_new_tokens=12, pad_token_id=1, eos_token_id=eos)
    expected = torch.ones(2, 12).long()
    for row, prompt, mask in zip(expected, prompt_ids, prompt_mask):
        ids = model.generate(prompt[mask][None], **options)[0, mask.sum() :]
        row[: len(ids)] = ids
    calls = watch(monkeypatch, "forward")
    found = grpo.generate(model, prompt_ids, prompt_mask, 1, 12, eos, temperature=0)
    assert torch.equal(found, expected)
    lengths = grpo.completion_mask(found, eos).sum(1)
    num_tokens = sum(ids.numel() for _, ids, *_ in calls)
    assert num_tokens == prompt_ids.numel() + (lengths - 1).sum()
    assert len(calls) == lengths.max()


def test_a_loaded_model_is_float32_without_dropout_and_knows_all_its_eos(tmp_path):
    model, tokenizer = grpo.tiny_model(0)
    model.config.attention_dropout = 0.5
    model.bfloat16().save_pretrained(tmp_path)
    tokenizer.eos_token = "z"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(HOSTILE))
    model, tokenizer, eos = grpo.load_model(str(tmp_path), 0)
    assert eos == [tokenizer.convert_tokens_to_ids("z"), 0, 7]
    assert model.dtype == torch.float32
    first, second = (grpo.token_logprobs(model, *ragged_batch()) for _ in range(2))
    assert torch.equal(first, second)


# ----------------------------------------------------------------------------- update
# Lengths of the prompts, of the completions (G of each), rows at once; (rows, P, C) of
# the parts.
PARTS = """
1 2 1 3 | 9 9 1 1 9 9 1 1 | 4 | (4, 3, 1) (4, 1, 9)
1 2 1 3 | 9 2 1 1 1 3 1 1 | 2 | (2, 2, 1) (2, 3, 1) (2, 1, 3) (2, 1, 9)
2 1 | 1 9 1 1 1 1 1 1 | 3 | (3, 1, 1) (3, 2, 9) (2, 2, 1) ;; 3 | 2 2 | 16 | (2, 3, 2)
"""


@cases("prompts, completions, size, shapes", table(PARTS))
def test_micro_batches_start_with_short_groups(prompts, completions, size, shapes):
    prompts, completions = numbers(prompts), numbers(completions)
    prompt_lengths = prompts.repeat_interleave(len(completions) // len(prompts))
    prompt_mask = torch.arange(9) >= 9 - prompt_lengths[:, None]
    mask = torch.arange(9) < completions[:, None]
    ids = torch.arange(len(mask))[:, None].expand(mask.shape)
    batch = grpo.Batch(ids, prompt_mask, ids, mask, ids)
    parts = grpo.micro_batches(batch, int(size), len(prompts))
    found = [(*part.prompt_mask.shape, part.mask.shape[1]) for part in parts]
    assert " ".join(map(str, found)) == shapes
    for part in parts:  # all fields are of the same rows
        rows = part.completion_ids[:, 0]
        assert torch.equal(part.mask.sum(1), completions[rows].long())
        assert torch.equal(part.prompt_mask.sum(1), prompt_lengths[rows].long())
        for field in (part.prompt_ids, part.advantages):
            assert torch.equal(field[:, 0], rows)


def test_padding_is_an_ordinary_token():
    ids, _ = grpo.pad([[5, 6], [7]], "left")
    assert ids.tolist() == [[5, 6], [5, 7]]


def test_masters_start_at_random_places_in_their_cells():
    """Uniform over the cell, so that a tenth of it moves a tenth of the weights."""
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(100_000)).bfloat16().float()
    masters = grpo.within_cell(weight)
    steps = 2 ** weight.abs().log2().floor() / 128  # to the next bfloat16 number
    for way in (0.1, -0.1, 0):  # up, down, not at all
        moved = (masters + way * steps).bfloat16().double() - weight
        assert (moved * way).min() == 0 == (moved != 0).all()
        assert (moved.sum() / steps.double().sum()).item() == approx(way, rel=0.05)
    odd = numbers("0 -0 1 -1 0.5 1.1754943508e-38 3e38 -256 1e-40").bfloat16().float()
    masters = grpo.within_cell(odd)
    assert torch.equal(masters.bfloat16().float(), odd) and not masters[:2].any()
    single = torch.randn(1000)  # a float32 checkpoint has lower bits of its own
    assert torch.equal(grpo.within_cell(single), single)


def make_run(model, reference=None, logprobs=grpo.shared_logprobs, **options):
    """A `Run` with these models."""
    defaults = dict(max_completion_length=6, output_dir="nowhere", prompts_per_step=2)
    config = grpo.Config(**dict(defaults, **options))
    models = [(x, None, [1]) for x in (model, reference or copy.deepcopy(model))]
    with mock.patch.multiple(
        grpo,
        choose_logprobs=lambda model: logprobs,
        load_model=mock.Mock(side_effect=models),
    ):
        return grpo.Run(config, "tiny")


@cases("dtype", ["float32", "bfloat16"])
@cases("scale, max_grad_norm", [(1e-3, 1.0), (10.0, 1.0), (10.0, 0.0)])
def test_masters_move_like_float32_weights(dtype, scale, max_grad_norm):
    """At a learning rate of 1e-6, at which bfloat16 weights alone would stand still."""
    model = tiny_model().bfloat16().float()
    before = copy.deepcopy(model)
    run = make_run(model, dtype=dtype, max_grad_norm=max_grad_norm, beta=0.0)
    exact = (run.masters[0] == next(before.parameters())).float().mean()
    assert exact == 1 if dtype == "float32" else exact < 0.5  # within their cells
    assert_close(model.state_dict(), before.to(run.dtype).state_dict(), atol=0, rtol=0)
    single = [master.detach().clone().requires_grad_() for master in run.masters]
    theirs = torch.optim.AdamW(single, lr=1e-6, weight_decay=0)
    params = list(model.parameters())
    for step in range(1, 41):
        for param, twin in zip(params, single):
            twin.grad = step * scale * torch.randn(param.shape)
            param.grad = twin.grad.clone()  # float32, the sum of micro-batches
        norm = clip_grad_norm_(single, max_grad_norm or math.inf).item()
        theirs.step()
        assert grpo.optimizer_step(run, 1e-6) == approx(norm, rel=1e-5)
    for param, master, twin in zip(params, run.masters, single):
        assert_close(master.detach(), twin.detach(), atol=1e-9, rtol=1e-6)
        assert torch.equal(param, master.to(run.dtype)) and param.grad is None


def grouped(batch, num_generations):
    """A batch whose prompts are repeated for each completion."""
    prompts = [x.repeat_interleave(num_generations, dim=0) for x in batch[:2]]
    return [*prompts, *batch[2:]]


def slow_update(model, reference, batch, advantages, config):
    """Without padding and micro-batches -> metrics, AdamW's first moments."""
    logps = [slow_logprobs(x, *batch, 0.7).detach() for x in (model, reference)]
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    options = {name: vars(config)[name] for name in LOSS_OPTIONS.split()}
    metrics = defaultdict(float)
    for _ in range(config.num_iterations):
        adamw.zero_grad()
        logp = slow_logprobs(model, *batch, 0.7)
        loss, means = grpo.grpo_loss(logp, *logps, advantages, batch[-1], **options)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
        adamw.step()
        for name, mean in dict(means, loss=loss).items():
            metrics[name] += mean.item() / config.num_iterations
    return dict(metrics, grad_norm=norm), moments(adamw)


SEVERAL = dict(num_iterations=3, epsilon=0.01, epsilon_high=0.03)
LOSS_OPTIONS = """beta epsilon epsilon_high loss_type importance_sampling_level
max_completion_length"""


def moments(adamw):
    return [adamw.state[param]["exp_avg"] for param in adamw.param_groups[0]["params"]]


UPDATES = values("""
1 | "shared" | slice(8) | dict(beta=0.1)
3 | "shared" | slice(8) | dict(beta=0.1) ;; 8 | "token" | slice(3) | dict(beta=0.1)
16 | "shared" | slice(8) | dict(beta=0.0) ;; 4 | "shared" | slice(3) | dict(beta=0.0)
2 | "token" | slice(0) | dict(beta=0.0)
3 | "shared" | slice(8) | dict(SEVERAL, beta=0.1)
8 | "shared" | slice(3) | dict(SEVERAL, beta=0.0)
""")  # rows at once, way, rows with an advantage, options


@variants
@cases("size, way, alive, options", UPDATES)
def test_updates_are_those_of_the_whole_batch(variant, size, way, alive, options):
    model, reference = tiny_model(), tiny_model(seed=1)
    batch, advantages = ragged_batch(4), torch.zeros(8, 6)
    batch[-1][:, 0] = True  # a completion has one token at least
    advantages[alive] = torch.randn(8, 1)[alive]
    slow = copy.deepcopy(model)
    options = dict(max_grad_norm=0.01, temperature=0.7) | variant | options
    logprobs = getattr(grpo, f"{way}_logprobs")
    run = make_run(model, reference, logprobs, micro_batch_size=size, **options)
    expected, grads = slow_update(slow, reference, batch, advantages, run.config)
    run.logprobs = mock.Mock(side_effect=logprobs)
    metrics = grpo.update(run, grpo.Batch(*grouped(batch, 4), advantages), 1e-3)
    for found, grad in zip(moments(run.optimizer), grads):
        assert (found - grad).norm() <= 0.01 * grad.norm()
    several = "num_iterations" in options
    assert several == (metrics["clip_fraction"] > 0.02)
    for name in expected.keys() - ({"kl"} if not options["beta"] else {}):
        assert metrics[name] == approx(expected[name], rel=1e-3, abs=1e-5)
    num_passes = (3 if several else 1) + (options["beta"] > 0)
    assert run.logprobs.call_count == num_passes * math.ceil(8 / size)


@cases("advantage", [math.inf, math.nan, 1e30])
def test_an_update_whose_gradient_is_not_finite_is_skipped(advantage):
    model, advantages = tiny_model(), torch.ones(6, 6)
    model.unused = torch.nn.Parameter(torch.zeros(3))  # as in an idle vision tower
    advantages[0, 0] = advantage
    run = make_run(model)
    before = copy.deepcopy([run.masters, run.optimizer.state_dict()])
    batch = grpo.Batch(*grouped(ragged_batch(), 3), advantages)
    assert grpo.update(run, batch, 1e-3)["skipped"] == 1
    assert_close([run.masters, run.optimizer.state_dict()], before, atol=0, rtol=0)
    batch.advantages = torch.ones(6, 6)
    assert grpo.update(run, batch, 1e-3)["skipped"] == 0
    assert not torch.equal(model.lm_head.weight, before[0][0])
    assert {len(x) for x in grpo.state_of(run).values()} == {4}  # for resuming


# ---------------------------------------------------------------------------- pasting
PASTED = """
completion_mask | torch | grpo.completion_mask(ids, 2)
group_advantages | torch | grpo.group_advantages(numbers("0 1 2 3"), 2)
process_advantages | torch | grpo.process_advantages([[1], [0]], [[0], [2]], 2, 4)
kl_k3 | torch | grpo.kl_k3(logp, ref_logp)
importance_ratio | torch | grpo.importance_ratio(logp, old_logp, None, "sequence")
clipped_surrogate | torch | grpo.clipped_surrogate(logp.exp(), advantages)
grpo_loss | torch | grpo.grpo_loss(logp, old_logp, ref_logp, advantages, mask)[0]
sample | torch | grpo.sample(logp, 0)
token_logprobs | torch F | grpo.token_logprobs(model, *batch)
shared_logprobs | torch F math DynamicCache ON_GPU | grpo.shared_logprobs(model, *batch)
generate | torch F DynamicCache | grpo.generate(model, *prompts, 2, 5, 1, 0)
accuracy_reward | re Fraction | grpo.accuracy_reward([0], ["so 14"], ["14"])
"""


def paste(name, scope):
    """Take a function, and what it uses of this file, into another one."""
    source = inspect.getsource(getattr(grpo, name))
    for node in ast.walk(ast.parse(source)):
        used = getattr(node, "id", None)
        if inspect.getmodule(vars(grpo).get(used)) is grpo and used not in scope:
            scope[used] = None
            paste(used, scope)
    exec(source, scope)


@cases("name, needs, call", table(PASTED))
def test_a_function_works_alone_when_it_is_pasted(name, needs, call):
    scope = {word: getattr(grpo, word) for word in needs.split()}
    scope["NUMBER"] = grpo.NUMBER
    paste(name, scope)
    inputs = logp, old_logp, ref_logp, advantages, mask = random_batch()
    model, batch = tiny_model(), ragged_batch()
    ids, prompt_mask, *_ = batch
    prompts = ids, prompt_mask.long()  # as of a tokenizer
    values = dict(globals(), **locals())
    pasted = dict(values, grpo=SimpleNamespace(**scope))
    found = eval(call, pasted)
    assert_close(found, eval(call, values))
    assert_close(inputs, random_batch(), atol=0, rtol=0)  # it leaves its inputs alone
    if name.endswith("logprobs"):
        found.sum().backward()


# ----------------------------------------------------------------- answers and rewards
EXTRACTED = r"""
so \boxed{42}. | 42 ;; \boxed{1} then \boxed{\frac{1}{2}} | \frac{1}{2}
\boxed{\text{a}\{1\}} 7 | \text{a}\{1\} ;; #### 5 but \boxed{6} | 6
broken off in 5 \boxed{4 | None ;; #### 3 and then #### 1,234 | 1,234
#### 18 dollars | 18 dollars ;; so 5 #### | 5 ;; it costs $80,000.00. | $80,000.00
that is −5 | -5 ;; so $10{,}080$ | $10,080 ;; 7-5 | 5 ;; 5-3=2 | 2 ;; (pages 3–5). | 5
it is \(-\frac{3}{4}\). | -3/4 ;; it is $.5$. | $.5 ;; <answer>18</answer> | 18
48+24 = <<48+24=72>>72 clips. | 72 ;; a 50% share | 50 ;; - 3 | 3
no number at all | None ;; so 5↵#### 18↵That is 2 more. | 18
"""
SAME = r"""
$80,000|80000; 80,000.00|80000; 80{,}000|80000; (18.),|18; \frac{1}{2}|0.5; 1/2|0.5
\dfrac{1}{2}|1/2; \tfrac{2}{4}|1/2; .5|1/2; 50%|50; 50\%|50; $.5$|0.5; -3|−3; 50\,\%|50
+7|7; 7.0|7; x = 5|5; x=5|5; X = 5|5; \$18|18; $x = 5$|5; -\frac{1}{2}|-0.5; -$5|-5
€5|5; 5 €|5; £1,234.50|2469/2; \frac{-1}{2}|-1/2; 007|7; 2/4|1/2; 0.1|1/10; \(7\)|7
\[7\]|7; \text{Yes}|yes; \text{(A)}|A; (B)|B; b|B; (C).|c; New  York|new york
\text{18}|18; 12,345,678|12345678; 1{,}234{,}567.5|2469135/2; 3/04|0.75; 5 cm|5 CM
\frac{1}{2}\%|0.5; 10,\!080|10080; 80\,000|80000; 7 tenths|7 Tenths; yes.|Yes
x^2|X^2; 1/0|1/0; x = \frac{1}{2}|0.5
"""
DIFFERENT = r"""
1|11; 5|-5; 80|80000; 1,2|12; 1{,}2|12; 0.5|5; 1/2|2; 1/3|0.333; x|y; 5x|5; 5 x|5; -x|x
3 million|3; 5 Million|5; 2 dozen|2; 7 tenths|7; 5\pi|5; 5 cm|5; 5\text{ cm}|5; 5!|5
7, or maybe 8|7; 2024-01-07|7; ±7|7; ±7|-7; 5$3|53; 2*500|2500; 2\frac{1}{2}|21/2; 5)|(
\frac{1}{2}3|1/23; \frac{1}{2}x|1/2; 3 4|3/4; 50%|0.5; 0.5%|0.05; 1%|100; 1/0|1; 1/0|0
x=1, y=2|2; 18 or 20|18; 3 AM|3 PM; 1 2|12; \text{}|0; (1,2)|(2,1); 10:30|10; 1.2.3|1.2
-|0; A|B; yes|no; ()|$; .|,; 2^5|2 5; 3-5|5; --5|5; 1,23|123; 1,2345|12345; 1, 234|1234
"""
HOSTILE_TEXTS = r"""
\boxed{ 20_000; \boxed{\text{ 20_000; \frac{1 30_000
\frac{1}{ 30_000; 9 100_000; 1, 50_000; ,111 30_000; 1/ 50_000; - 100_000
( 100_000; $\ 50_000; x= 50_000; < 100_000; . 100_000
#### 50_000; <think> 20_000; <think></think> 20_000"""
FORMATS = r"""
Q | <think>a</think>b | 1 ;; Q | <think>\na\n</think>\n\nb  | 1
Q<think> | a</think>b | 1 ;; Q | a</think>b | 0 ;; Q | <think>a</think> | 0
Q | <think>a | 0 ;; Q | x<think>a</think>b | 0
Q | <think>a</think>b<think>c</think>d | 0 ;; Q<think> | <think>a</think>b | 0
"""


def pairs(text):
    return [pair.split("|") for pair in re.split("; |\n", text.strip())]


@cases("text, expected", table(EXTRACTED))
def test_extract_answer(text, expected):
    assert str(grpo.extract_answer(text.replace("↵", "\n"))) == expected


VERDICTS = [(*x, text is SAME) for text in (SAME, DIFFERENT) for x in pairs(text)]


@cases("answer, gold, verdict", VERDICTS)
def test_equal_answers_match_and_no_others(answer, gold, verdict):
    assert grpo.answers_match(answer, gold) == verdict
    assert grpo.answers_match(gold, answer) == verdict


SCORES = r"""
["14", "16", "10"] | "14" | None | [1, 0, 0]
["5", "6", "7", "5", "5.0"] | "5" | None | [1, 0, 0, 1, 1]
["10", "2", "9", "9"] | "9" | None | [0, 0, 1, 1]
["", "none", r"5 \boxed{ }", "####", r"5 \boxed{5", "None"] | "none" | None | [0] * 6
["", "none", r"5 \boxed{ }", "####", r"5 \boxed{5", "None"] | "5" | None | [0] * 6
["so 18", r"so \boxed{18} or 1", "#### 18"] | "18" | [False] * 3 | [0, 1, 1]
[r"18 \boxed{18", "so 18"] | "18" | [False, True] | [0, 1]
["1/2", "7", r"\boxed{7} \boxed{.5}"] | "0.5" | None | [1, 0, 1]
"""


def check_scores(reward, row):
    """One row of `SCORES`: of a text that was cut off only a box or a mark counts."""
    texts, gold, finished, expected = row
    size = len(texts)
    columns = dict(finished=finished, level=[1] * size, compare=[0] * size)
    assert reward([""] * size, texts, [gold] * size, **columns) == expected


@cases("row", values(SCORES))
def test_accuracy_reward(row):
    check_scores(grpo.accuracy_reward, row)


@cases("case", re.split("; |\n", HOSTILE_TEXTS.strip()))
def test_hostile_texts_cost_milliseconds(case):
    piece, count = case.split()
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


# ----------------------------------------------------------------------------- options
WRONG_OPTIONS = """num-generations 1; max-prompt-length five; max-completion-length 0
micro-batch-size 0; temperature 0; temperature nan; beta -0.1; epsilon -1; beta nan
num-iterations 0; max-steps -1; prompts-per-step 0; max-grad-norm -1; seed -1; help
loss-type ppo; scale-rewards row; dtype int8; max-step 5; learning-rate inf"""


@cases("option", re.split("; |\n", WRONG_OPTIONS))
def test_wrong_options_are_named(option, capsys):
    with raises((Error, SystemExit)) as stop:
        grpo.parse_args(f"--{option}".split())
    message = f"{stop.value} {capsys.readouterr()}".replace("_", "-")
    assert option.split()[0] in message


def test_what_the_user_types_wins():
    tiny = grpo.parse_args([])
    assert tiny.learning_rate == grpo.TINY["learning_rate"] != grpo.Config.learning_rate
    config = grpo.parse_args(["--learning-rate", "0.5", "--num_generations=4"])
    assert (config.learning_rate, config.num_generations) == (0.5, 4)
    config = grpo.parse_args(["--model", "x", "--output-dir", "y"])
    assert config == grpo.Config(model="x", output_dir="y")
    assert grpo.parse_args([]).output_dir.startswith("runs/")


def test_a_run_is_resumed_with_its_own_options(tmp_path):
    options = dict(model="x", beta=0.5, reward=["format", "accuracy"])
    grpo.claim_folder(grpo.Config(**options, output_dir=f"{tmp_path}/run"))
    moved = str((tmp_path / "run").rename(tmp_path / "moved"))
    config = grpo.parse_args(f"--resume {moved} --max-steps 2 --beta 0".split())
    expected = dict(options, output_dir=moved, resume=moved, max_steps=2, beta=0)
    assert config == grpo.Config(**expected)


# -------------------------------------------------------------------------------- data
MESSAGES = [dict(role="user", content="1+1?")]
ROWS = values(r"""
'{"prompt": "1+1?", "answer": null, "solution": "2"}' | "1+1?" | "2"
r'{"prompt": "1+1?", "answer": "\\[2\\]"}' | "1+1?" | r"\[2\]"
'{"question": "1+1?", "answer": "1 and 1\\n#### 1,002"}' | "1+1?" | "1,002"
r'{"problem": "1+1?", "solution": "so \\boxed{\\frac12}"}' | "1+1?" | r"\frac12"
'{"prompt": "1+1?", "answer": 0}' | "1+1?" | "0"
'{"prompt": "1+1?", "answer": 0.5}' | "1+1?" | "0.5"
'{"prompt": "1\u2028?\x85", "answer": "2"}\n\n' | "1\u2028?\x85" | "2"
json.dumps(dict(prompt=MESSAGES, answer="2")) | MESSAGES | "2"
""")  # line, prompt, answer


@cases("line, prompt, answer", ROWS)
@cases("name", ["data.jsonl", "data"])
def test_data_in_the_usual_forms(tmp_path, name, line, prompt, answer):
    path = tmp_path / name
    path.write_text(line, encoding="utf-8")
    (row,) = grpo.read_rows(str(path), needs_answers=True)
    assert row["prompt"] == prompt
    assert grpo.gold_answer(row["answer"]) == answer


WRONG_LINES = r"""{"prompt": ;; {"prompt": "\ud83d", "answer": "1"}
{"prompt": [{"role": "user", "content": ["a"]}], "answer": "1"}
{"prompt": [{"role": "human", "content": "a"}], "answer": "1"}
{"prompt": [{"role": "system", "content": "a"}], "answer": "1"}
{"prompt": {"role": "user", "content": "a"}, "answer": "1"}
{"prompt": "a", "answer": "LONG"} ;; 5 ;; {"answer": "1"} ;; {"prompt": "a"}
{"prompt": "a", "answer": []} ;; {"prompt": "a", "answer": ["1", null]}
{"prompt": "a", "answer": "####"} ;; {"prompt": "a", "solution": "so \\boxed{1"}
{"prompt": "a", "solution": "so 1 \\boxed 5"} ;; {"prompt": "a", "answer": true}
{"prompt": "a", "answer": NaN} ;; {"prompt": "", "answer": "1"}
{"prompt": [], "answer": "1"}"""


@cases("line", re.split(" ;; |\n", WRONG_LINES))
def test_the_first_wrong_line_is_named_before_any_model_is_loaded(tmp_path, line):
    path = tmp_path / "data.jsonl"
    line = line.replace("LONG", "So it is one. " * 20)
    path.write_text('{"prompt": "a", "answer": "1"}\n \t\n' + line)
    config = grpo.Config(data=str(path), model="no/such/model")
    with raises(Error, match=r"data.jsonl:3: \w+\(") as stop:
        grpo.set_up(config)
    assert len(str(stop.value)) < 400


@cases("size, num_held_out", [(300, 30), (9, 0)])
def test_held_out_rows_are_random_and_never_trained_on(tmp_path, size, num_held_out):
    data = [dict(prompt=str(i), answer=i) for i in range(size)]
    data[7].update(level=5)  # other rows lack it: rewards get None
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, data)))
    options = f"--data {path} --sft-steps 0 --prompts-per-step 1"
    options += f" --output-dir {path}.run"
    _, rows, held_out = grpo.set_up(grpo.parse_args(options.split()))
    answers = [row["answer"] for row in held_out + rows]
    assert sorted(answers) == list(range(size)) and len(held_out) == num_held_out
    assert max(answers[:30]) >= size / 2  # by chance: 1 in 10**9
    assert {row["level"] for row in rows + held_out} == {5, None}


@cases("model", ["tiny", "other"])
def test_built_in_sums_have_right_answers(model):
    for row in grpo.arithmetic(model, seed=0):
        task = row["prompt"].removeprefix("Calculate ").rstrip("=.")
        assert row["answer"] == eval(task)


def test_prompts_come_in_epochs_and_depend_on_the_step_alone():
    steps = [grpo.prompt_batch(range(9), step, 3, seed=5) for step in range(6, 0, -1)]
    second, first = sum(steps[:3], []), sum(steps[3:], [])
    assert sorted(first) == sorted(second) == list(range(9)) and first != second
    assert grpo.prompt_batch(range(9), 1, 3, seed=6) != steps[-1]


# ----------------------------------------------------------------------------- prompts
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"


def encode(prompts, template, eos="<|im_end|>", bos=None, rewards=(), **options):
    tokenizer = grpo.tiny_model(0)[1]
    special = ["<|im_start|>", "<|im_end|>", "<bos>"]
    tokenizer.add_special_tokens(dict(additional_special_tokens=special))
    tokenizer.chat_template = template
    if bos:
        processor = tokenizers.processors.TemplateProcessing
        tokenizer.backend_tokenizer.post_processor = processor(
            single=f"{bos} $A {eos}", special_tokens=[*tokenizer.get_vocab().items()]
        )
    run = SimpleNamespace(
        config=grpo.Config(**options),
        rewards=rewards,
        tokenizer=tokenizer,
        eos_token_ids=[tokenizer.convert_tokens_to_ids(eos)],
    )
    rows = grpo.encode_prompts(run, [dict(prompt=prompt) for prompt in prompts])
    for row in rows:
        row["tokens"] = tokenizer.convert_ids_to_tokens(row["prompt_ids"])
    return rows


SYSTEM = dict(role="system", content="be kind")
USER = dict(role="user", content="1+1=")
REPLY = dict(role="assistant", content="2")
CONVERSATIONS = r"""
"1+1=" | "<|im_end|>" | BRIEF + ASKED
[USER] | "<|im_end|>" | BRIEF + ASKED
[SYSTEM, USER] | "<|im_end|>" | "<|im_start|>system\nbe kind<|im_end|>\n" + ASKED
[USER, REPLY, USER] | "<|im_end|>" | BRIEF + EARLIER + ASKED
[USER] | "<eos>" | "be brief\n1+1="
"""  # a base model has a template that it was not trained on
BRIEF = "<|im_start|>system\nbe brief<|im_end|>\n"
EARLIER = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"


@cases("prompt, eos, expected", values(CONVERSATIONS))
@cases("template", ["{question}", "Add: {question}."])
def test_texts_and_chats_become_prompts_in_one_way(prompt, eos, expected, template):
    """With the chat template if it ends answers with an EOS token of the model."""
    before = copy.deepcopy(prompt)
    options = dict(system_prompt="be brief", prompt_template=template)
    (row,) = encode([prompt], CHATML, eos, **options)
    first, last, rest = expected.rpartition("1+1=")
    assert row["prompts"] == first + template.replace("{question}", last) + rest
    assert prompt == before
    assert encode(["1+1="], None)[0]["prompts"] == "1+1="


def test_a_prompt_has_one_bos_and_keeps_an_eos_only_of_a_template():
    for template in (None, "<bos>" + CHATML):
        (row,) = encode(["1+1="], template, bos="<bos>")
        first, *others, last = row["tokens"]
        assert first == "<bos>" not in others and last != "<|im_end|>"
    (row,) = encode(["1+1="], CHATML + "<|im_end|>")
    assert row["tokens"][-1] == "<|im_end|>"


def test_with_accuracy_the_answer_is_asked_for_in_a_box():
    (row,) = encode(["1+1?"], None, rewards=("format", "accuracy"))
    assert row["prompts"].startswith("1+1?\nReason") and "\\boxed{}" in row["prompts"]
    assert encode(["1+1?"], None, rewards=("format",))[0]["prompts"] == "1+1?"


# ----------------------------------------------------------------------------- rewards
MINE = """
import neighbour

def sees(prompts, completions, completion_ids, answer, level, **columns):
    assert prompts == ["1+1="] * 4 and answer == ["2"] * 4 and level == [5] * 4
    assert columns["finished"] == [True] * 4
    assert completions == ["2", "3", "2", "22"]
    assert completion_ids[3] == [4, 4, 0]
    answer.clear()
    return [neighbour.half * len(text) for text in completions]

judges_some = lambda **columns: [None, 1.0, 0.0, None]
judges_none = lambda **columns: [None] * 4
first = lambda prompts, **columns: [0.1, 0.0, 0.1, 0.0] * (len(prompts) // 4)
second = lambda prompts, **columns: [0.2, 0.0, 0.2, 0.0] * (len(prompts) // 4)
third = lambda prompts, **columns: [0.4, 0.7, 0.4, 0.7] * (len(prompts) // 4)
tenths = lambda prompts, **columns: [0.1, None, 0.1, 0.1] * (len(prompts) // 4)
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "neighbour.py").write_text("half = 0.5")
    return f"{tmp_path}/mine.py"


def load_rewards(*specs):
    """The rewards of a run with these words after --reward."""
    return make_run(tiny_model(), reward=list(specs), beta=0.0).rewards


def score(
    rewards, texts=("2<eos>", "3<eos>", "2<eos>", "22<eos>"), num_rows=1, eos=(0,)
):
    tokenizer = grpo.tiny_model(0)[1]
    ids, mask = grpo.pad([tokenizer.encode(text) for text in texts], "right")
    run = SimpleNamespace(
        tokenizer=tokenizer, rewards=load_rewards(*rewards), eos_token_ids=eos
    )
    rows = [dict(prompts="1+1=", answer="2", level=5, completions="2")] * num_rows
    return grpo.score(run, rows, grpo.Batch(None, None, ids, mask))


def test_a_reward_of_ones_own_sees_copies_of_every_column(mine):
    _, scores = score([f"{mine}:sees=-2", "accuracy"])
    assert scores[f"rewards/{mine}:sees"].tolist() == [0.5, 0.5, 0.5, 1.0]
    assert scores["rewards/accuracy"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert scores["reward"].tolist() == [0.0, -1.0, 0.0, -2.0]


def test_the_end_of_a_text_that_was_cut_off_is_no_answer():
    columns, scores = score(["accuracy"], ["2<eos>", "2", "2 2<eos>", "#### 2"])
    assert columns["finished"] == [True, False, True, False]
    assert scores["reward"].tolist() == [1.0, 0.0, 1.0, 1.0]
    columns, _ = score(["accuracy"], ["2<eos>", "2<unk>", "2"], eos=(7, 0, 1))
    assert columns["finished"] == [True, True, False]  # by any EOS


def test_a_reward_file_is_found_by_its_path_and_run_once(tmp_path):
    source = f"open({str(tmp_path / 'log')!r}, 'a').write('x')\ndef f(): return %d"
    for i, name in enumerate(["a=1/own.py", "b/own.py", "b/math.py"]):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source % i)
        ((function, weight),) = load_rewards(f"{path}:f=0.5").values()
        assert (function(), weight) == (i, 0.5)
        assert list(load_rewards(f"{path}:f")) == [f"{path}:f"]
    assert (tmp_path / "log").read_text() == "xxx" and sys.modules["math"] is math


def test_what_is_not_judged_gets_the_mean_of_its_group_or_of_all(mine):
    _, scores = score([f"{mine}:judges_some"], num_rows=2)
    assert scores["reward"].tolist() == [1.0, 1.0, 0.0, 0.0]
    _, scores = score([f"{mine}:judges_none"])
    assert not scores["reward"].any()
    _, scores = score([f"{mine}:judges_some"], num_rows=4)  # as in an evaluation
    assert scores["reward"].tolist() == [0.5, 1.0, 0.0, 0.5]
    assert scores[f"rewards/{mine}:judges_some"].nanmean() == 0.5


LINES = r"""
"1+1\n2+2<eos>" | [3, 7] ;; "1+1\n\n2+2\n<eos>" | [3, 9] ;; "\n\n1+1<eos>" | [5]
"1+1\n2+2" | [3, 6] ;; " \n <eos>" | [] ;; "9.\n1+1<eos>" | [0, 3]
"""  # a blank line is no step; the last token of the tokenizer has a break within


@cases("text, ends", values(LINES))
def test_steps_end_where_their_lines_do(text, ends):
    tokenizer = grpo.tiny_model(0)[1]
    tokenizer.add_tokens(["9.\n1"])
    texts, found = grpo.split_steps(tokenizer, tokenizer.encode(text))
    assert found == ends and len(texts) == len(ends)


RETURNED = """
np.array([0.1, 1]) | [0.1, 1] ;; [np.float64(0.5), np.float32(1)] | [0.5, 1]
(np.bool_(True), np.int64(3)) | [1, 3]
torch.tensor([0.5, 1], requires_grad=True) | [0.5, 1]
[torch.tensor(0.5), True] | [0.5, 1] ;; [None, 1] | [nan, 1]
np.array([None, True]) | [nan, 1]
"""
NOT_RETURNED = """None; 1.0; np.float64(1); "10"; {}; {"a": 1, "b": 1}; {0, 1}
iter([1, 2])
[1]; [1, 2, 3]; np.ones((1, 2)); ["1", 0]; [b"1", 0]; [np.str_("1"), 0]; [1, {}]
[1, print]; [1, [0]]; [[1, 2], 0]; [1, 1j]; (x for x in [0, 1]); torch.ones(2, 2)
[nan, 1]; [1, np.inf]; [10**400, 1]; [[1], [1]]; np.ones((2, 2))"""
SCOPE = dict(np=np, torch=torch, nan=math.nan)


@cases("returned, expected", table(RETURNED))
def test_a_reward_is_whatever_float_takes(returned, expected):
    found = grpo.to_floats(eval(returned, SCOPE), 2, "mine")
    assert found == approx(eval(expected, SCOPE), nan_ok=True, abs=0)
    assert {type(x) for x in found} == {float}


@cases("returned", re.split("; |\n", NOT_RETURNED))
def test_what_is_no_reward_is_shown_in_one_line(returned):
    with raises(Error, match="^mine returned .*, not 2 finite numbers$") as stop:
        grpo.to_floats(eval(returned, SCOPE), 2, "mine")
    assert len(str(stop.value)) < 300


@cases("names", ["first second third", "tenths"])
def test_equal_sums_of_rewards_have_no_advantage(mine, names, tmp_path, monkeypatch):
    """0.1 + 0.2 + 0.4 and 0.7, which in float32 give advantages of ±0.9; or 0.1 and the
    mean of three, which is a bit more."""
    updates = watch(monkeypatch, "update")
    rewards = ["--reward", *(f"{mine}:{name}" for name in names.split())]
    options = "--max-steps 1 --sft-steps 0 --eval-every 0", *rewards
    (row,) = train(tmp_path / "run", QUICK, *options)
    assert row["zero_std_fraction"] == 1
    assert not updates[0][1].advantages.any()


# -------------------------------------------------------------- rewards of the README
@pytest.fixture
def readme(tmp_path):
    """The module of rewards that the README shows."""
    text = Path(grpo.__file__).with_name("README.md").read_text()
    path = tmp_path / "rewards.py"
    (block,) = re.findall(r"(?ms)^```python\n(.*?)^```$", text)
    path.write_text(block)
    functions = grpo.run_file(str(path))
    return SimpleNamespace(**functions, constants=functions["judge"].__globals__)


MATH_SAME = r"""
\frac{3}{4}|0.75; 2\sqrt{2}|\sqrt{8}; \{1,2\}|\{2,1\}; (1,2)|(1, 2); [1,2)|[1, 2)
50\%|0.5; 90^\circ|90; \text{(A)}|A; \text{yes}|Yes; x^2+1|1+x^2; \frac{\pi}{2}|\pi/2
\begin{pmatrix}1\\2\end{pmatrix}|\begin{pmatrix} 1 \\ 2 \end{pmatrix}; x=5|5; $18|18
\sqrt{8}|\[2\sqrt{2}\]; \[90\]|90; \(\sqrt{8}\)|2\sqrt{2}
10,\!080|10080; \frac12|0.5; 2\frac{1}{2}|2.5; Evelyn|\text{evelyn}; 5 \text{ cm}|5
"""
MATH_DIFFERENT = r"""
\frac{3}{4}|0.74; \{1,2\}|\{1,3\}; (1,2)|(2,1); [1,2)|(1,2); 2\sqrt{2}|\sqrt{2}; A|B
\begin{pmatrix}1\\2\end{pmatrix}|\begin{pmatrix}2\\1\end{pmatrix}; 5, 7|5; ±7|7; 5x|5
7 tenths|7; 7, or maybe 8|7; \foo|\bar; \frac{|\sqrt{; yes|no; 9^{9^{9}}|7
"""
FREE = r"""
["So it is $3\sqrt{7}$.", "So it is 7."] | "7" | None | [0, 1]
["So it is $3\sqrt{7}$.", "$x$, so 2."] | r"\sqrt{63}" | [True, True] | [1, 0]
["So it is $3\sqrt{7}$."] | r"3\sqrt{7}" | [False] | [0]
"""  # without a box or a mark
MATHS = [(SAME, True), (MATH_SAME, True), (MATH_DIFFERENT, False)]


@cases("answer, gold, verdict", [(*x, y) for t, y in MATHS for x in pairs(t)])
def test_math_of_the_readme_compares_latex(readme, answer, gold, verdict):
    pytest.importorskip("math_verify")
    assert readme.math([""], ["#### " + answer], [gold]) == [verdict]


@cases("row", values(SCORES + FREE.lstrip()))
def test_math_of_the_readme_scores_like_accuracy(readme, row):
    pytest.importorskip("math_verify")
    check_scores(readme.math, row)


def test_the_reward_model_of_the_readme(readme):
    def scorer(texts, add_special_tokens):
        return [dict(score=len(text)) for text in texts]

    scorer.tokenizer = mock.Mock()
    scorer.tokenizer.apply_chat_template = lambda chat, tokenize: str(chat)
    readme.constants["load"] = lambda task, name, function_to_apply: scorer
    chats = [[dict(role="user", content="1+1=")]] * 2
    whole = [[*chats[0], dict(role="assistant", content=x)] for x in ("2", "two")]
    expected = [len(str(chat)) for chat in whole]
    assert readme.reward_model(chats, ["2", "two"], messages=chats) == expected


def test_the_judge_of_the_readme(readme):
    """A completion for which the reply has no mark is not judged."""
    chats = [[dict(role="user", content=f"{i}+1=")] for i in range(3)]
    asked = []

    def pipeline(chats, **options):
        asked.extend(chat[0]["content"] for chat in chats)
        return [[dict(generated_text=x)] for x in ("10", "Mark: 7/10", "100 or so")]

    readme.constants["load"] = lambda task, name: pipeline
    assert readme.judge(chats, ["<#>", "2", "3"], messages=chats) == [1.0, 0.7, None]
    assert asked[0].startswith("0+1=") and asked[0].endswith("<#>")


def test_one_language_of_the_readme(readme):
    texts = ["Füge 2 hinzu", "2 + 2", "ab ве"]
    assert readme.one_language(texts, texts) == [1.0, None, 0.5]
    texts = ["你好 ok"]
    assert readme.one_language(texts, texts, script="CJK") == [0.5]


GOOD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
BLOCK = f"Here it is:\n```python\n{GOOD}```\nDone."
COMPLETIONS = r"""
BLOCK | TESTS | 1.0
f"```python\nfrom __future__ import annotations\n{GOOD}```" | TESTS | 1.0
"```python\nx = 1\n```\n" + BLOCK | TESTS | 1.0 ;; BLOCK + "\n```\n3\n```" | TESTS | 1.0
BLOCK + "\n```python\nx = 1\n```" | TESTS | 0.0 ;; f"```python\n{GOOD}" | TESTS | 0.0
BLOCK | "assert add(1, 2) == 4" | 0.0
"""  # the last block counts, but not what the program prints; the last one is cut off
BAD_CODE = r"""
GOOD.replace("+", "-") ;; "def add(a, b:\n" ;; "while True: pass"
"import time; time.sleep(100)" ;; GOOD + "x = bytearray(10**9)"
GOOD + "import sys\nfor _ in range(10**6): sys.stdout.write('x' * 10**4)"
"raise SystemExit(0)" ;; "import os; print('passed', flush=True); os._exit(0)"
"import os\nfor _ in range(7): os.fork()\nos.setsid()\nwhile True: pass"
"import os; assert 'HOME' not in os.environ; os._exit(0)"
"""
BWRAP = subprocess.run("bwrap --unshare-all --ro-bind / / true", shell=True)
needs_bwrap = pytest.mark.skipif(BWRAP.returncode, reason="bubblewrap does not work")


@needs_bwrap
def test_the_code_reward_of_the_readme(readme):
    completions, tests, expected = map(list, zip(*values(COMPLETIONS)))
    columns = dict(prompts=completions, completions=completions, tests=tests)
    assert readme.code(**columns) == expected


@needs_bwrap
@cases("code", [code for (code,) in values(BAD_CODE)])
def test_code_that_does_not_pass_is_stopped(readme, code):
    start = time.perf_counter()
    assert readme.passes(GOOD + TESTS)
    assert not readme.passes(code + "\n" + TESTS, seconds=1)
    assert time.perf_counter() - start < 10  # 1 second of work, 3 in all


ESCAPES = """
assert open({file!r}).read() == 'mine'
open({file!r}, 'a').close()
import os; os.kill({pid}, 0)
import socket; socket.create_connection(('127.0.0.1', {port}), 1)
import os; assert os.environ['HOME']
"""


@needs_bwrap
@cases("escape", ESCAPES.strip().splitlines())
def test_code_sees_nothing_of_the_user(readme, tmp_path, escape):
    (tmp_path / "mine").write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = escape.format(file=f"{tmp_path}/mine", pid=os.getpid(), port=port)
        exec(code)  # it works here
        assert not readme.passes(code)


# -------------------------------------------------------------------------- whole runs
QUICK = "--max-steps 3 --sft-steps 2 --prompts-per-step 4 --num-generations 4 "
QUICK += "--eval-every 3 --warmup-steps 2"
VARIED = """
import os, signal
calls = []

def varied(prompts, completions, **columns):  # a model without skill gets some
    calls.append(prompts)
    if len(calls) == int(os.environ.get("FAIL_AT", 0)):
        raise OSError("out of coffee")
    if len(calls) == int(os.environ.get("STOP_AT", 0)):
        os.kill(os.getpid(), signal.SIGTERM)
    if "SEEN" in os.environ:
        print(completions, file=open(os.environ["SEEN"], "a"))
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
"""


def vary(text):
    return sum(map(ord, text)) % 7 / 7


def write_varied(folder):
    """Options for a reward whose call FAIL_AT fails, or STOP_AT gets a signal."""
    Path(folder, "varied.py").write_text(VARIED)
    return f"--reward {folder}/varied.py:varied accuracy"


@pytest.fixture
def varied(tmp_path_factory):
    return write_varied(tmp_path_factory.mktemp("reward"))


def run(words):
    """Train in this process as a process of its own would, which frees its lock."""
    grpo.run_file.cache_clear()
    with mock.patch.object(grpo.atexit, "register") as register:
        try:
            grpo.train(*grpo.set_up(grpo.parse_args(" ".join(map(str, words)).split())))
        finally:
            for call in register.mock_calls:
                call.args[0]()


def train(folder, *options):
    """A new run -> its training steps."""
    run([*options, "--output-dir", folder])
    return [row for row in metrics_of(folder) if "loss" in row]


def resume(folder, *options):
    run(["--resume", folder, *options])


def saved_steps(folder):
    return [int(x.name[11:]) for x in folder.glob("checkpoint-*[0-9]")]


@pytest.fixture(autouse=True)
def forget_this_test():
    """Reward files, as others have the same names, and the handlers of signals."""
    path = list(sys.path)
    handlers = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)}
    yield
    sys.path[:] = path
    sys.modules.pop("neighbour", None)
    grpo.run_file.cache_clear()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def start(*options):
    words = " ".join(map(str, options)).split()
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, grpo.__file__, *words], **pipes)


def metrics_of(folder, name="metrics.jsonl"):
    log = Path(folder, name)
    return [
        {x: y for x, y in row.items() if not x.endswith(("seconds", "gb"))}
        for row in map(json.loads, log.open() if log.exists() else [])
    ]


def end_of(folder):
    """The training steps in a run's log, of which some may have been written twice, and
    the bytes of its one checkpoint."""
    (checkpoint,) = Path(folder).glob("checkpoint-*")
    rows = {json.dumps(row) for row in metrics_of(folder) if "loss" in row}
    assert (checkpoint / "state" / ".metadata").exists()
    files = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("state/*.distcp")]
    return rows, {x.relative_to(folder): x.read_bytes() for x in files}


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_the_main_command_learns(tmp_path):
    process = start("--output-dir", tmp_path)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    rewards = [row["reward"] for row in metrics_of(tmp_path) if "reward" in row]
    assert sum(rewards[:5]) / 5 <= 0.45
    assert sum(rewards[-5:]) / 5 >= 0.90
    assert re.search(r"450 of 450 prompts fit.*first prompt: '\d+\+\d='", output, re.S)
    assert re.search(r"step 1: reward [01].00 for '\d+\+\d=' -> '", output)
    before, *_, after = re.findall(r"greedy held-out reward (\S+)", output)
    assert float(before) < 0.5 < 0.7 < float(after)


def test_each_step_and_each_seed_draws_other_numbers(tmp_path, varied):
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": 2}')
    options = f"--data {tmp_path}/data.jsonl --prompts-per-step 1 --sft-steps 0"
    options += " --learning-rate 0 --max-steps 2 --eval-every 1 --seed"
    texts = set()
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        train(folder, varied, options, seed)
        rows = metrics_of(folder, "completions.jsonl")
        for i in (0, 8):
            texts.add(str([row["completions"] for row in rows[i : i + 8]]))
    assert len(rows) == 16 and len(texts) == 4


STEPS_REWARD = """
lengths = lambda steps, **_: [[len(step) for step in row] for row in steps]
outcome = lambda completion_ids, **_: [sum(ids) % 7 for ids in completion_ids]
nan = lambda steps, **_: [[float("nan") for step in row] for row in steps]
none = lambda steps, **_: [[None for step in row] for row in steps]
text = lambda steps, **_: [["1" for step in row] for row in steps]
longer = lambda steps, **_: [[1.0 for step in row] + [1.0] for row in steps]
"""


@cases("scale", ["group", "none"])
def test_step_rewards_become_advantages_of_their_own(tmp_path, monkeypatch, scale):
    path = tmp_path / "own.py"
    path.write_text(STEPS_REWARD)
    updates = watch(monkeypatch, "update")
    options = f"--step-reward {path}:lengths --reward {path}:outcome --sft-steps 0"
    options += f" --scale-rewards {scale} --max-steps 1 --num-generations 64"
    (row,) = train(tmp_path / "run", QUICK, options, "--max-completion-length 3")
    ((run, batch, _),) = updates
    rewards, ends = [], []
    for ids, mask in zip(batch.completion_ids, batch.mask):
        texts, found = grpo.split_steps(run.tokenizer, ids[mask].tolist())
        rewards.append([*map(len, texts)])
        ends.append(found)
    expected = grpo.process_advantages(rewards, ends, 64, 3, scale_rewards=scale)
    outcomes = (batch.completion_ids * batch.mask).sum(1) % 7
    advantages = grpo.group_advantages(outcomes.float(), 64, scale)
    assert_near(batch.advantages, expected + advantages[:, None])
    assert max(map(len, ends)) > 1
    flat = sum(rewards, [])
    assert row["step_reward"] == approx(sum(flat) / len(flat))
    assert row["reward"] == approx(outcomes.double().mean().item())


@cases("name", ["nan", "text", "longer", "none"])
def test_wrong_step_rewards_are_shown_in_one_line(tmp_path, name):
    (tmp_path / "own.py").write_text(STEPS_REWARD)
    options = f"--step-reward {tmp_path}/own.py:{name} --sft-steps 0 --eval-every 0"
    expected = "^--step-reward returned (.*, not . finite numbers|None for a step)$"
    with raises(Error, match=expected):
        train(tmp_path / "run", QUICK, options)


def test_a_run_leaves_metrics_and_completions(tmp_path, varied, monkeypatch):
    evaluations = watch(monkeypatch, "evaluate")
    sampled = watch(monkeypatch, "generate")
    options = "--temperature 0.7 --max-completion-length 1 --sft-steps 0"
    rows = train(tmp_path, QUICK, varied, options, "--eval-every 2")
    assert {args[-1] for args in sampled[1:]} == {0, 0.7}
    assert [row["learning_rate"] for row in rows] == approx([5e-4, 1e-3, 1e-3])
    completions = metrics_of(tmp_path, "completions.jsonl")
    name = f"rewards/{varied.split()[1]}"
    names = [name, "rewards/accuracy", "reward"]
    for i, row in enumerate(rows):  # the first, one that is evaluated, the last
        samples = completions[16 * i : 16 * (i + 1)]
        scored = []
        for sample in samples:
            text = sample["completions"]
            parts = [vary(text), float(text == str(sample["answer"]))]
            scored.append([*parts, sum(parts)])
            assert [sample[name] for name in names] == approx(scored[-1])
        columns = torch.tensor(scored)
        assert [row[name] for name in names] == approx(columns.mean(0).tolist())
        spreads = columns[:, 2].view(4, 4).std(1)
        assert row["reward_std"] == approx(spreads.mean().item())
        assert row["zero_std_fraction"] == (spreads == 0).double().mean() < 1
        cut_off = sum(not sample["finished"] for sample in samples)
        assert row["truncated_fraction"] == cut_off / 16
        assert row["num_tokens"] == approx(16 * row["completion_length"])
        assert row["loss"] == approx(0.04 * row["kl"], abs=1e-6)
    assert rows[2]["kl"] > 1e-4
    last, evaluation = open(tmp_path / "metrics.jsonl").read().splitlines()[-2:]
    expected = """loss reward_std clip_fraction grad_norm skipped completion_length
    rollout_seconds update_seconds step_seconds peak_memory_gb"""
    assert set(expected.split()) <= json.loads(last).keys()
    run, held_out, _ = evaluations[-1]  # it is greedy
    batch = grpo.rollout(run, held_out, num_generations=1, temperature=0)
    texts = run.tokenizer.batch_decode(batch.completion_ids, skip_special_tokens=True)
    mean = sum(map(vary, texts)) / len(texts)
    assert json.loads(evaluation)[f"eval/{name}"] == approx(mean)


@cases("dtype", ["bfloat16", "float32"])
def test_a_checkpoint_is_a_model_in_the_dtype_of_the_run(tmp_path, varied, dtype):
    rows = train(tmp_path, QUICK, varied, f"--dtype {dtype}")
    assert rows[0]["kl"] == approx(0, abs=1e-6)
    checkpoint = tmp_path / "checkpoint-3"
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.decode(tokenizer.encode("12 + 3\n=")) == "12 + 3\n="
    model, info = AutoModelForCausalLM.from_pretrained(
        checkpoint, output_loading_info=True
    )
    assert {str(x.dtype) for x in model.parameters()} == {f"torch.{dtype}"}
    assert not any(info.values()) and model.config.architectures


def test_supervised_steps_fit_solution_and_eos(tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    row = '{"prompt": "%d+1=", "answer": "0", "solution": "%d%d"}\n'
    data.write_text("".join(row % (i, i, i) for i in range(40)))
    losses, taught = [], set()

    def update(run, batch, learning_rate, update=grpo.update):
        for prompt_ids, mask, ids, ended in zip(*batch.tokens):
            prompt = run.tokenizer.decode(prompt_ids[mask])
            taught.add(prompt)
            assert run.tokenizer.decode(ids[ended]) == 2 * prompt[:-3] + "<eos>"
        assert (batch.advantages == 1).all()
        logp = slow_logprobs(run.policy, *batch.tokens)
        losses.append(-grpo.masked_mean(logp, batch.mask).item())
        metrics = update(run, batch, learning_rate)
        assert metrics["entropy"] == approx(losses[-1], rel=1e-4)
        return metrics

    monkeypatch.setattr(grpo, "update", update)
    evaluations = watch(monkeypatch, "evaluate")
    options = f"--data {data} --sft-steps 18 --max-steps 0 --temperature 0.7"
    train(tmp_path / "run", QUICK, options)
    assert losses[-1] < losses[0] - 1
    ((_, held_out),) = evaluations
    assert len(taught) == 36 and not taught & {row["prompt"] for row in held_out}
    monkeypatch.undo()
    with raises(Error, match="supervised step 2: the gradient is not finite"):
        train(tmp_path / "bad", QUICK, f"--data {data} --sft-learning-rate 1e30")


@cases("dtype, rate", [("float32", 1e-2), ("bfloat16", 1e-6)])
def test_lora_trains_adapters_alone(tmp_path, varied, monkeypatch, dtype, rate):
    pytest.importorskip("peft")
    saved = watch(monkeypatch, "save")
    options = f"--learning-rate {rate} --dtype {dtype} --lora-rank 2"
    rows = train(tmp_path, QUICK, varied, options)
    base = weights_of(tmp_path / "sft")
    for name, weight in saved[-1][0].policy.named_parameters():
        assert weight.requires_grad == ("lora_" in name)
        if "lora_B" in name:
            assert 0 < weight.abs().median() <= weight.abs().max() < 10 * rate
        elif "lora_" not in name:
            assert torch.equal(weight, base[name.replace(".base_layer", "")])
    assert rows[0]["kl"] == approx(0, abs=1e-6)
    assert (rows[2]["kl"] > 1e-6) == (rate == 1e-2)


# --------------------------------------------------------- resume, and what goes wrong
VARIATIONS = """
5 | --num-generations 8 ;; 6 | --dtype bfloat16 --num-generations 16 --eval-every 1
5 | --lora-rank 2 ;; 4 | --num-iterations 2 --beta 0 --num-generations 16
2 | --eval-every 3
"""  # the call of the reward that fails; options
SIX_STEPS = QUICK + " --max-steps 6 --eval-every 0 --save-every 2"


@cases("fail_at, extra", table(VARIATIONS))
def test_failed_runs_resume_bit_for_bit(tmp_path, varied, fail_at, extra, monkeypatch):
    if "lora" in extra:
        pytest.importorskip("peft")
    options = SIX_STEPS, extra, varied
    train(tmp_path / "whole", *options)
    monkeypatch.setenv("FAIL_AT", fail_at)
    with raises(OSError, match="out of coffee"):
        train(tmp_path / "cut", *options)
    assert bool(saved_steps(tmp_path / "cut")) == (fail_at != "2")
    monkeypatch.delenv("FAIL_AT")
    resume(tmp_path / "cut")
    assert end_of(tmp_path / "cut") == end_of(tmp_path / "whole")


def test_a_run_that_is_stopped_and_killed_ends_as_if_it_had_not_been(tmp_path, varied):
    options = SIX_STEPS, varied, "--eval-every 2 --save-every 1 --max-steps"
    train(tmp_path / "whole", *options, 32)
    killed = tmp_path / "killed"
    words = *options, 30, "--output-dir", killed
    for number, num_steps in ((signal.SIGTERM, 2), (signal.SIGKILL, 5)):
        process = start(*words)
        while len(metrics_of(killed)) < num_steps and process.poll() is None:
            time.sleep(0.01)
        time.sleep(random.SystemRandom().uniform(0, 0.3))
        process.send_signal(number)
        output, _ = process.communicate()
        words = "--resume", killed
        if number == signal.SIGTERM:
            assert f"to go on: python grpo.py --resume {killed}" in output
    (killed / "partial").mkdir(exist_ok=True)
    (killed / "partial" / "stale.safetensors").write_text("")
    for name in ("metrics.jsonl", "completions.jsonl"):
        with open(killed / name, "a") as log:
            log.write('{"cut off')
    resume(killed, "--max-steps 32")
    assert end_of(killed) == end_of(tmp_path / "whole")
    assert not (killed / "partial").exists()


def files_of(folder):
    files = [x for x in sorted(folder.rglob("*")) if x.is_file()]
    return {str(x): x.read_bytes() for x in files}


def test_a_run_takes_only_a_new_or_empty_folder(tmp_path, varied, monkeypatch):
    """It changes no byte of any other; `sft` is somebody's model."""
    for name in ("sft/config.json", "partial/mine", "metrics.jsonl", "options.json"):
        for folder in (tmp_path / "theirs", tmp_path / name.replace("/", "-")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("mine")
    for name, options in dict(rated="--sft-steps 0", taught="").items():
        train(tmp_path / name, QUICK, options, "--max-steps 0")
    before = files_of(tmp_path)
    for folder in [x for x in tmp_path.iterdir() if x.is_dir()]:
        monkeypatch.chdir(folder)
        for options in ("--max-steps 0", varied):
            with raises(
                Error, match="^[^ ]+ is not empty: --resume it or choose anoth"
            ):
                train(folder.name and f"{folder}/.", QUICK, options)
    assert files_of(tmp_path) == before


SLOW = """
def slow(**columns):
    print("asked", flush=True)
    __import__("time").sleep(60)
"""


def start_slow(folder):
    (folder / "slow.py").write_text(SLOW)
    options = f"{QUICK} --eval-every 0 --reward {folder}/slow.py:slow"
    process = start(options, "--output-dir", folder / "run")
    while "asked" not in process.stdout.readline() and process.poll() is None:
        pass
    return process


def test_only_one_process_writes_to_a_folder_until_it_is_ended(tmp_path):
    process = start_slow(tmp_path)
    with raises(Error, match=f"another process is writing to {tmp_path}/run"):
        resume(tmp_path / "run", "--reward accuracy")
    process.send_signal(signal.SIGTERM)
    while "stopping" not in process.stderr.readline() and process.poll() is None:
        pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == -signal.SIGTERM
    resume(tmp_path / "run", "--reward accuracy")
    assert saved_steps(tmp_path / "run") == [3]


STOPS = values("""
"score" | 4 | 0 ;; "score" | 6 | 2 ;; "evaluate" | 2 | 3
""")  # an evaluation at the start; the second step; the last evaluation


@cases("name, call, step", STOPS)
def test_a_signal_ends_the_step(tmp_path, varied, monkeypatch, name, call, step):
    options = QUICK, varied
    train(tmp_path / "whole", *options)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    function, cut = getattr(grpo, name), tmp_path / "cut"
    calls = iter(range(1, 99))

    def stopping(*args, **options):
        if next(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return function(*args, **options)

    monkeypatch.setattr(grpo, name, stopping)
    if step == 3:
        train(cut, *options)
    else:
        with raises(SystemExit if step else KeyboardInterrupt):
            train(cut, *options)
        assert saved_steps(cut) == [step] * (step > 0)
        resume(cut)
    assert end_of(cut) == end_of(tmp_path / "whole")


def test_resuming_says_what_it_does(tmp_path, varied, capsys):
    options = SIX_STEPS, varied, "--sft-steps 0 --max-steps 3"
    train(tmp_path / "run", *options)
    theirs = tmp_path / "run" / "checkpoint-2-keep"
    theirs.mkdir()
    (tmp_path / "run" / "mine.jsonl").write_text("no line break")
    resume(tmp_path / "run")
    assert "all 3 steps are done; --max-steps" in capsys.readouterr().out
    resume(tmp_path / "run", "--max-steps 5")
    output = capsys.readouterr()
    assert f"going on from {tmp_path}/run/checkpoint-3" in output.out
    assert " 60%" in output.err  # the bar
    assert saved_steps(tmp_path / "run") == [5] and theirs.exists()
    assert (tmp_path / "run" / "mine.jsonl").read_text() == "no line break"


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, varied, monkeypatch):
    options = QUICK, varied, "--save-every 1 --max-steps 4 --eval-every 0"
    train(tmp_path, *options)
    with monkeypatch.context() as full:
        full.setattr(grpo.dcp, "save", mock.Mock(side_effect=OSError("no space left")))
        with raises(OSError, match="no space left"):
            resume(tmp_path, "--max-steps 20")
    assert saved_steps(tmp_path) == [4]
    resume(tmp_path, "--max-steps 6")
    assert saved_steps(tmp_path) == [6]


def test_ten_steps_without_an_advantage_are_reported(tmp_path, capsys):
    (tmp_path / "equal.py").write_text("def one(answer, **_): return [1] * len(answer)")
    options = f"--reward {tmp_path}/equal.py:one --sft-steps 0 --eval-every 0"
    for max_steps, reported in ((9, False), (10, True)):
        train(tmp_path / str(max_steps), QUICK, options, "--max-steps", max_steps)
        assert ("10 steps without" in capsys.readouterr().out) == reported


MISTAKES = """--model no/such/folder | no/such/folder
--data missing.jsonl | missing.jsonl ;; --output-dir /proc/nowhere | /proc/nowhere
--data {folder}/empty.jsonl | only 0 ;; --data {folder}/table.parquet | table.parquet:1
--data {folder}/no-answers.jsonl | no-answers.jsonl:1: .*`answer` or `solution` is
--resume {folder}/none | options.json ;; --output-dir {folder} | not empty
--reward accuracy =0.2 | no function '' ;; --reward acuracy | no function 'acuracy'
--reward missing.py:accuracy | missing.py ;; --prompt-template 1+1= | {question}
--reward accuracy=much | no function 'accuracy=much' in accuracy, format
--reward {folder}/own.py:f=nan | no function 'f=nan' in .*own.py
--lora-rank 2 | pip install peft ;; --max-prompt-length 2 | only 0 prompts fit
--prompts-per-step 5000 | --prompts-per-step: only 450 prompts fit
--data {folder}/no-answers.jsonl --reward format --sft-steps 1 | --sft-steps: only 0"""


@cases("options, message", table(MISTAKES))
def test_mistakes_end_in_one_line(tmp_path, options, message, monkeypatch):
    (tmp_path / "options.json").write_text("{}")
    (tmp_path / "own.py").write_text("f = print")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "no-answers.jsonl").write_text('{"prompt": "1+1="}\n' * 100)
    (tmp_path / "table.parquet").write_bytes(b"PAR1\x15\x04\xff" * 1000)
    options = options.format(folder=tmp_path)
    if "--resume" not in options:
        options = f"--sft-steps 0 --output-dir {tmp_path}/run {options}"
    monkeypatch.setattr(sys, "argv", ["grpo.py", *options.split()])
    monkeypatch.setitem(sys.modules, "peft", None)  # is not installed
    with raises(Error) as stop:
        grpo.main()
    assert re.search(message, str(stop.value)) and "\n" not in str(stop.value)
    assert (tmp_path / "options.json").read_text() == "{}"  # as it was
    assert not (tmp_path / "run").exists()


# ----------------------------------------------------------------------- several ranks
GRADIENTS = values("""
grpo.shared_logprobs | dict()
grpo.shared_logprobs | dict(loss_type="dapo") ;; grpo.shared_logprobs | VARIANTS[-1]
grpo.shared_logprobs | dict(beta=0.0) ;; grpo.token_logprobs | dict()
""")
# Of 4 groups; all completions of the second rank have one token.
LENGTHS = json.loads("[[6, 5, 6, 3], [1, 1, 1, 1], [6, 6, 2, 4], [1, 1, 1, 1]]")


def gradients(logprobs, options):
    """Gradients and metrics of an update on 4 prompts, of which this rank has some."""
    models = [grpo.tiny_model(seed)[0].eval() for seed in (0, 1)]
    options = dict(options, micro_batch_size=3, prompts_per_step=4)
    run = make_run(*models, logprobs, **options)
    torch.manual_seed(0)
    ids, advantages = torch.randint(2, 47, (4, 4, 6)), torch.randn(4, 4, 1)
    mask = torch.arange(6) < torch.tensor(LENGTHS)[:, :, None]
    mine = slice(grpo.RANK, 4, grpo.WORLD_SIZE)
    prompt_mask = (torch.arange(6) > torch.arange(4)[:, None])[:, None].expand(4, 4, 6)
    prompt_ids = ids[:, :1].expand(4, 4, 6)
    columns = prompt_ids, prompt_mask, ids, mask, advantages.expand(4, 4, 6)
    batch = grpo.Batch(*[x[mine].flatten(0, 1) for x in columns])
    grads = []

    def noting(run, learning_rate, step=grpo.optimizer_step):
        for weight in run.policy.parameters():
            grads.append(getattr(weight.grad, "full_tensor", weight.grad.clone)())
        return step(run, learning_rate)

    with mock.patch.object(grpo, "optimizer_step", noting):
        metrics = grpo.update(run, batch, 1e-3)
    assert metrics["grad_norm"] == approx(get_total_norm(grads).item(), rel=1e-5)
    ranks = grpo.all_gather(metrics)
    means = {name: sum(x[name] for x in ranks) / len(ranks) for name in metrics}
    return grads, means


def on_each_rank(folder):
    """What torchrun runs twice: gradients, a run, one that a signal to the second rank
    ends, what one rank has begun, and LoRA."""
    grpo.join_ranks()
    grpo.join_ranks = lambda: None
    found = [gradients(*case) for case in GRADIENTS]
    torch.save(found, f"{folder}/gradients{grpo.RANK}.pt")
    model = grpo.tiny_model(0)[0].eval().bfloat16().float()
    masters = make_run(model, dtype="bfloat16").masters
    moved = [(x != x.bfloat16()).full_tensor().flatten() for x in masters]
    assert torch.cat(moved).float().mean() > 0.5  # they start within their cells
    os.environ["SEEN"] = f"{folder}/seen{grpo.RANK}"
    options = SIX_STEPS, RANKS_OPTIONS.format(folder=folder), write_varied(folder)
    train(f"{folder}/whole", *options)
    os.environ.pop("SEEN")
    if grpo.RANK == 1:
        os.environ["STOP_AT"] = "3"
    with raises(SystemExit):
        train(f"{folder}/cut", *options)
    os.environ.pop("STOP_AT", None)
    resume(f"{folder}/cut")
    resume(f"{folder}/one", "--max-steps 4")
    if importlib.util.find_spec("peft"):
        train(f"{folder}/lora", *options, "--lora-rank 2 --max-steps 2")
    if grpo.RANK == 1:
        os.environ["FAIL_AT"] = "1"
    sys.argv = ["grpo.py", "--resume", f"{folder}/whole"]
    grpo.main()


RANKS_OPTIONS = "--dtype bfloat16 --data {folder}/data.jsonl --prompts-per-step 2"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    row = '{"prompt": "1+1=", "answer": 2, "solution": "1234"}\n'
    (folder / "data.jsonl").write_text(9 * row)
    options = SIX_STEPS, RANKS_OPTIONS.format(folder=folder), write_varied(folder)
    train(folder / "one", *options, "--max-steps 2")
    command = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    command = [sys.executable, *command, __file__, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    assert result.stdout.count("stopped; to go on") == 1
    for text in ("cut/checkpoint-3", "one/checkpoint-2", "whole/checkpoint-6"):
        assert f"going on from {folder}/{text}" in result.stdout
    return folder


def test_two_ranks_take_the_gradient_of_one(two_ranks):
    for rank in (0, 1):
        found = torch.load(two_ranks / f"gradients{rank}.pt")
        for case, parts in zip(GRADIENTS, found):
            assert_close(parts, gradients(*case), atol=1e-6, rtol=1e-4)


def test_a_signal_to_one_rank_ends_all_and_resuming_loses_nothing(two_ranks):
    seen = [(two_ranks / f"seen{rank}").read_text().splitlines() for rank in (0, 1)]
    assert seen[0][0] != seen[1][0]  # all rows are the same; samples are not
    assert end_of(two_ranks / "cut") == end_of(two_ranks / "whole")
    folder = two_ranks / "cut" / "checkpoint-6"
    weights = (folder / "model.safetensors").read_bytes()
    assert b"F32" not in weights and b"lm_head" not in weights  # which is tied
    config = AutoConfig.from_pretrained(folder)
    assert config.dtype == torch.bfloat16  # of its weights, not of the shards
    assert config.architectures == ["Qwen2ForCausalLM"]
    rows = metrics_of(two_ranks / "whole")
    assert len(rows) == 6
    assert all(row["num_tokens"] == 8 * row["completion_length"] for row in rows)


def test_a_run_resumes_on_another_number_of_ranks(two_ranks, monkeypatch):
    assert saved_steps(two_ranks / "one") == [4]  # by two ranks
    restored = watch(monkeypatch, "restore")
    resume(two_ranks / "one", "--max-steps 5")
    ((run,),) = restored
    for master in run.masters:
        assert run.optimizer.state[master]["step"] == 5
    found = weights_of(two_ranks / "one" / "checkpoint-5")
    assert_close(found, dict(run.policy.state_dict()), atol=0, rtol=0)


def test_lora_on_two_ranks_leaves_one_adapter(two_ranks):
    peft = pytest.importorskip("peft")
    folder = two_ranks / "lora" / "checkpoint-2"
    assert b"BF16" not in (folder / "adapter_model.safetensors").read_bytes()
    model = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    adapters = {n: x for n, x in model.named_parameters() if "lora_B" in n}
    assert all(x.any() and x.dtype == torch.float32 for x in adapters.values())
    resume(two_ranks / "lora", "--max-steps 3")
    assert saved_steps(two_ranks / "lora") == [3]


def test_ranks_have_equally_many_prompts_and_no_two_the_same(monkeypatch):
    """Or else one rank would evaluate more often than the other and wait for ever."""
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    shares = []
    for rank in (0, 1):
        monkeypatch.setattr(grpo, "RANK", rank)
        rows = encode(map(str, range(8, 19)), None, max_prompt_length=1)  # 8 and 9 fit
        shares.append([row["prompts"] for row in rows])
        shares[-1] += [row["prompts"] for row in encode("123", None)]
    assert shares == [["8", "1"], ["9", "2"]]


if __name__ == "__main__":
    on_each_rank(sys.argv[1])
