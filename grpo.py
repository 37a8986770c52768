# SPDX-License-Identifier: MIT
r"""GRPO, Group Relative Policy Optimization, in one readable file: torch, transformers, tqdm.

    python grpo.py                                  # a tiny built-in model learns sums
    python grpo.py --model Qwen/Qwen2-Math-1.5B --data train.jsonl
    python grpo.py --help                           # every option

One training step (DeepSeekMath, arXiv:2402.03300, algorithm 1) is the loop in `train`:
  1. take B prompts                                                     `prompt_batch`
  2. sample G completions of each from the current policy               `rollout`, `generate`
  3. score every completion                                             `judge`, `accuracy_reward`
  4. normalise the scores within each group into advantages             `group_advantages`
  5. ascend the clipped surrogate, held to a frozen reference by the    `token_logprobs`, `update`,
     k3 estimate of the KL divergence, with AdamW                       `grpo_loss`, `MasterAdamW`
  6. log, look at samples, evaluate, save                               `evaluate`, …

Shapes, in every docstring and comment: B prompts, G samples of each, N = B*G completions (rows
b*G … b*G+G-1 belong to prompt b), P prompt length (left-padded), C completion length
(right-padded), M unmasked completion tokens, V vocabulary, H hidden size.

Where this file departs from the papers and from common tutorials (each has a test):
  - A group of equal rewards has advantage exactly 0. The formula as printed gives up to ±0.8,
    because the float32 mean can be one bit off and the standard deviation is then that bit.
  - The standard deviation is the unbiased one (n - 1); eps = 1e-8.
  - A completion's mask runs through its first EOS, found by position. `ids == pad` would never
    teach the model to stop where pad and EOS are one token (Qwen2).
  - With one update per rollout the old log-probs are the new ones, detached: the ratio is 1.
  - Every normaliser counts the whole optimizer batch: micro-batches do not change the gradient.
  - The weights that AdamW moves are float32: at a learning rate of 1e-6 bfloat16 ones stand still.
  - A group's shared prompt runs through the model once, in sampling, scoring and training.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.util
import json
import math
import random
import re
import sys
import time
import traceback
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, get_args, get_origin

import torch
import torch.nn.functional as F
import transformers
from torch.optim.adamw import adamw
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer


class Error(Exception):
    """A mistake that the user can mend: `main` prints it in one line, without a traceback."""


# ------------------------------------------------------------------------------------------- config


def option(default, help, low=-math.inf, high=math.inf):
    """A field of `Config`: its default, its help text, the values that it allows."""
    return dataclasses.field(default=default, metadata=dict(help=help, low=low, high=high))


@dataclass(frozen=True)
class Config:
    """Every option of a run; the command line is made from it. Raises `Error` if out of range."""

    # model and data
    model: str = option("tiny", "Hub name or folder of a causal language model; tiny is built in")
    data: str | None = option(None, "JSONL file, or Hub data set NAME[:CONFIG[:SPLIT]]")
    eval_data: str | None = option(None, "held-out prompts (else the first tenth, at most 64)")
    reward: tuple[str, ...] = option(("accuracy",), "NAME or FILE.py:FUNCTION, each [=WEIGHT]")
    chat_template: Literal["auto", "on", "off"] = option("auto", "auto: if the model knows it")
    prompt_template: str | None = option(None, "text around {question} (else asks for \\boxed{})")
    system_prompt: str | None = option(None, "system message of every prompt")
    dtype: Literal["auto", "bfloat16", "float32"] = option("auto", "auto: bfloat16 on a GPU")
    # sampling
    num_generations: int = option(8, "G, completions sampled for each prompt", low=2)
    prompts_per_step: int = option(8, "B, prompts of each step", low=1)
    max_prompt_length: int = option(512, "in tokens; longer prompts are left out", low=1)
    max_completion_length: int = option(512, "in tokens; longer completions are cut off", low=1)
    temperature: float = option(1.0, "of sampling and of every log-prob", low=0.01)
    top_p: float = option(1.0, "below 1 samples are no longer the policy's: leave it", 0.01, 1)
    top_k: int = option(0, "above 0 samples are no longer the policy's: leave it", low=0)
    # loss
    beta: float = option(0.04, "weight of the KL term; 0 needs no reference", low=0)
    epsilon: float = option(0.2, "clip range of the ratio", 0, 1)
    epsilon_high: float | None = option(None, "clip range above 1, if another (DAPO: 0.28)", low=0)
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = option("grpo", "how token losses are averaged")
    scale_rewards: Literal["group", "batch", "none"] = option("group", "the std's scope")
    importance_sampling_level: Literal["token", "sequence"] = option("token", "sequence: GSPO")
    num_iterations: int = option(1, "mu, updates per rollout", low=1)
    mask_truncated: bool = option(False, "no loss on completions without EOS (DAPO)")
    # optimisation
    learning_rate: float = option(1e-6, "of AdamW, constant after the warm-up", low=0)
    warmup_steps: int = option(10, "steps of linear warm-up", low=0)
    max_grad_norm: float = option(1.0, "a longer gradient is scaled to this norm", low=1e-12)
    weight_decay: float = option(0.0, "of AdamW", low=0)
    max_steps: int = option(200, "training steps; 0 only evaluates", low=0)
    micro_batch_tokens: int = option(2048, "padded tokens in one forward and backward", low=1)
    gradient_checkpointing: bool = option(False, "less memory for activations, a slower update")
    sft_steps: int = option(0, "supervised steps on the data's solutions before GRPO", low=0)
    sft_learning_rate: float = option(1e-5, "of the supervised steps", low=0)
    seed: int = option(0, "of everything random", 0, 2**31)
    # output
    output_dir: str | None = option(None, "folder of the run (else runs/MODEL-TIME)")
    eval_every: int = option(50, "steps between evaluations; 0: none, not even the first", low=0)
    samples_every: int = option(50, "steps between looks at sampled completions; 0: none", low=0)
    save_every: int = option(0, "steps between checkpoints; 0: only the last", low=0)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name, value = "--" + field.name.replace("_", "-"), getattr(self, field.name)
            low, high = field.metadata["low"], field.metadata["high"]
            if get_origin(field.type) is Literal and value not in get_args(field.type):
                raise Error(f"{name} must be one of {', '.join(get_args(field.type))}, not {value}")
            if type(value) in (int, float) and not (low <= value <= high and abs(value) < math.inf):
                raise Error(f"{name} must be a number from {low} to {high}, not {value}")
        if "{question}" not in (self.prompt_template or "{question}"):
            raise Error("--prompt-template must contain {question}")


# What `--model tiny` changes; whatever the user types wins.
TINY = dict(prompt_template="{question}", prompts_per_step=64, max_completion_length=8)
TINY |= dict(micro_batch_tokens=16384, learning_rate=1e-3, max_steps=240, sft_steps=70)
TINY |= dict(sft_learning_rate=3e-3, eval_every=120, samples_every=120)


def parse_args(argv=None) -> Config:
    """`Config` from a list of command-line words (default: the process's)."""
    width = functools.partial(argparse.ArgumentDefaultsHelpFormatter, max_help_position=34)
    parser = argparse.ArgumentParser(
        usage="python grpo.py [--option value ...]",
        description="Train a language model with GRPO, Group Relative Policy Optimization.",
        formatter_class=functools.partial(width, width=110),
        allow_abbrev=False,
    )
    for field in dataclasses.fields(Config):
        kind = (get_args(field.type) or (field.type,))[0]  # `float | None` -> float
        # SUPPRESS keeps a default of None out of the help, where words say what happens instead.
        default = argparse.SUPPRESS if field.default is None else field.default
        kwargs = dict(help=field.metadata["help"], default=default)
        if kind is bool:
            kwargs |= dict(action=argparse.BooleanOptionalAction)
        elif get_origin(field.type) is Literal:
            kwargs |= dict(choices=get_args(field.type))
        else:
            kwargs |= dict(type=kind, metavar=kind.__name__.upper())
        if get_origin(field.type) is tuple:
            kwargs |= dict(nargs="+")
        parser.add_argument("--" + field.name.replace("_", "-"), **kwargs)
    if parser.parse_args(argv).model == "tiny":
        parser.set_defaults(**TINY)
    args = vars(parser.parse_args(argv))
    return Config(**args | dict(reward=tuple(args["reward"])))


# ------------------------------------------------------------------------------------------ prompts


def read_rows(source, needs_answer):
    """Rows (dicts) of a JSONL file, or of the Hub data set NAME[:CONFIG[:SPLIT]].

    The question, under `prompt`, `question` or `problem`, is text or a list of chat messages and
    becomes "prompt"; the answer, under `answer` or `solution`, becomes "answer"; other columns stay
    for the reward functions. Raises `Error` with the file and line of whatever is wrong.
    """
    if Path(source).suffix in (".jsonl", ".json") or Path(source).exists():
        try:
            lines = Path(source).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise Error(f"cannot read {source}: {error}") from None
        rows = [(f"{source}, line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]
    else:
        name, config, split = (source.split(":") + [None, None])[:3]
        datasets = optional("datasets", f"{source} is no file; as a Hub data set it")
        try:
            data = datasets.load_dataset(name, config, split=split or "train")
        except Exception as error:
            raise Error(f"cannot load {source}: {first_line(error)}") from None
        rows = [(f"{source}, row {i}", row) for i, row in enumerate(data)]
    if not rows:
        raise Error(f"{source} is empty")
    return [check_row(row, where, needs_answer) for where, row in rows]


def check_row(row, where, needs_answer):
    """A line of JSON or a dict -> the dict with "prompt" and "answer"; raises `Error`."""
    try:
        row = json.loads(row) if isinstance(row, str) else row
        prompt = next((row[key] for key in ("prompt", "question", "problem") if row.get(key)), None)
        given = [row[key] for key in ("answer", "solution") if row.get(key) is not None]
        messages = [{"role": "", "content": prompt}] if isinstance(prompt, str) else prompt
        readable = messages and all(isinstance(m["role"] + m["content"], str) for m in messages)
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise Error(f"{where}: not a JSON object with a question ({error!r:.200})") from None
    if not readable:
        raise Error(f"{where}: no `prompt`, `question` or `problem` (text, or chat messages)")
    if needs_answer and not any(map(gold_answer, given[:1])):
        raise Error(f"{where}: no answer in `answer` or `solution` for the accuracy reward")
    return {**row, "prompt": prompt, "answer": given[0] if given else None}


def load_data(config, needs_answer):
    """(rows to train on, rows held out)."""
    rows = read_rows(config.data, needs_answer) if config.data else arithmetic(config)
    if config.eval_data:
        return rows, read_rows(config.eval_data, needs_answer)
    held_out = min(64, len(rows) // 10) if config.eval_every else 0
    return rows[held_out:], rows[:held_out]


def chat_template_fits(tokenizer, eos_token_ids):
    """Whether the model was trained on its tokenizer's chat template: does the token that ends an
    assistant's turn stop the model? Base models carry templates that they never saw."""
    if not tokenizer.chat_template:
        return False
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    ending = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("answer")[2].strip()
    first = tokenizer(ending, add_special_tokens=False)["input_ids"][:1]
    return first in [[i] for i in eos_token_ids]


def encode_prompts(rows, run):
    """The rows with "text" and "ids" as the model will see them, without the over-long ones."""
    config, tokenizer = run.config, run.tokenizer
    chat = config.chat_template == "on"
    if config.chat_template == "auto":
        chat = chat_template_fits(tokenizer, run.eos_token_ids)
    if chat and not tokenizer.chat_template:
        raise Error(f"--chat-template on: the tokenizer of {config.model} has none")
    boxed = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}.\n"
    template = config.prompt_template or (boxed if "accuracy" in run.rewards else "{question}")
    kept = []
    for row in rows:
        messages = row["prompt"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": template.replace("{question}", messages)}]
        if config.system_prompt:
            messages = [{"role": "system", "content": config.system_prompt}, *messages]
        text = "\n".join(message["content"] for message in messages)
        if chat:
            render = functools.partial(tokenizer.apply_chat_template, add_generation_prompt=True)
            text = render(messages, tokenize=False)
        # A chat template writes its own BOS.
        ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        if 0 < len(ids) <= config.max_prompt_length:
            kept.append({**row, "messages": messages, "text": text, "ids": ids})
    if len(kept) < len(rows):
        dropped = f"{len(rows) - len(kept)} of {len(rows)} prompts"
        print(f"left out {dropped}: empty, or over {config.max_prompt_length} tokens")
    return kept


def prompt_batch(rows, step, size, seed):
    """The `size` rows of step 1, 2, …: epochs of shuffled rows, a function of the step alone, so
    that a resumed run finds its place."""
    epochs, batch = {}, []
    for i in range((step - 1) * size, step * size):
        epoch, position = divmod(i, len(rows))
        if epoch not in epochs:
            generator = torch.Generator().manual_seed(seed + epoch)
            epochs[epoch] = torch.randperm(len(rows), generator=generator).tolist()
        batch.append(rows[epochs[epoch][position]])
    return batch


def pad(sequences, pad_token_id, side, device):
    """Lists of token ids -> ids and mask, both (len(sequences), longest), int64 and bool.

    >>> pad([[5], [6, 7]], 0, "left", "cpu")[0].tolist()
    [[0, 5], [6, 7]]
    """
    ids = [torch.tensor(sequence) for sequence in sequences]
    stack = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
    mask = stack([torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences])
    return stack(ids, padding_value=pad_token_id).to(device), mask.to(device)


# -------------------------------------------------------------------------------------------- model


def load_model(config, device):
    """(model, tokenizer, EOS ids) of any causal language model of transformers, or the tiny one.

    transformers loads in the checkpoint's dtype unless told another, and picks the fastest
    attention that it knows to work (`sdpa` where the model has it).
    """
    auto = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, auto if config.dtype == "auto" else config.dtype)
    if config.model == "tiny":
        model, tokenizer = tiny_model(config.seed, dtype)
    else:
        safe = dict(trust_remote_code=False)
        try:
            tokenizer = AutoTokenizer.from_pretrained(config.model, **safe)
            load = functools.partial(AutoModelForCausalLM.from_pretrained, use_safetensors=True)
            model = load(config.model, dtype=dtype, **safe)
        except Exception as error:
            raise Error(f"cannot load {config.model}: {first_line(error)}") from None
    model.to(device).eval()  # no dropout, ever: sampling, old, new and reference log-probs agree
    for param in model.parameters():
        param.data = param.data.clone()  # the mapped file's unaligned tensors slow a CPU down
    ids = [c.eos_token_id for c in (model.generation_config, model.config, tokenizer)]
    eos = next((i for i in ids if i is not None), None)
    if eos is None:
        raise Error(f"{config.model} names no EOS token: it would never stop")
    eos_token_ids = [eos] if isinstance(eos, int) else list(eos)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = eos_token_ids[0]
    return model, tokenizer, eos_token_ids


def checkpoint_layers(model):
    """Recompute each layer's activations in backward. transformers' own switch drops the cache."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


# ------------------------------------------------------------------------------------------ rollout


def sample(logits, temperature=1.0, top_p=1.0, top_k=0):
    """One token of each row from softmax(logits / temperature): (N, V) -> (N,). 0: the best one.

    First a block of 128 tokens is drawn, then a token of it, which is the same distribution:
    `torch.multinomial` draws a random number for each weight that it is given, and for a vocabulary
    of 151,936 that took a third of a decoding step on a CPU.
    """
    if temperature == 0:
        return logits.argmax(-1)
    if temperature != 1:
        logits = _float(logits) / temperature
    if top_k:
        logits = transformers.TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1:
        logits = transformers.TopPLogitsWarper(top_p)(None, logits)
    probs = logits.softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))
    if probs.shape[1] % 128:
        probs = F.pad(probs, (0, -probs.shape[1] % 128))
    blocks = probs.unflatten(1, (-1, 128))  # (N, ceil(V / 128), 128)
    block = torch.multinomial(blocks.sum(-1), 1)  # (N, 1)
    within = torch.multinomial(blocks[torch.arange(len(block)), block[:, 0]], 1)  # (N, 1)
    return (block * 128 + within)[:, 0]


@torch.no_grad()
def generate(
    model, prompt_ids, prompt_mask, num_generations, max_completion_length, eos_token_ids,
    pad_token_id=0, temperature=1.0, top_p=1.0, top_k=0,
):  # fmt: skip
    """G completions of each prompt, sampled from exactly the policy -> ids (N, C).

    prompt_ids, prompt_mask: (B, P), left-padded. C is at most `max_completion_length`; after a
    row's EOS stands `pad_token_id`. Heeds nothing of the model's generation config. Each prompt
    runs once and a finished row is dropped, unless the model's cache can be neither repeated nor
    cut (linear attention, Mamba). Needs `sample` and `completion_mask`.
    """
    cache = DynamicCache(config=model.config)
    shared = all(hasattr(layer, "batch_select_indices") for layer in cache.layers)
    mask, positions = prompt_mask.long(), (prompt_mask.cumsum(1) - 1).clamp(min=0)
    if not shared:
        repeated = (x.repeat_interleave(num_generations, 0) for x in (prompt_ids, mask, positions))
        prompt_ids, mask, positions = repeated

    def forward(ids):
        inputs = dict(attention_mask=mask, position_ids=positions, past_key_values=cache)
        return model(ids, **inputs, use_cache=True, logits_to_keep=1).logits[:, -1]

    logits, positions = forward(prompt_ids), positions[:, -1:]  # (B, V), (B, 1)
    if shared:  # from here on each of a prompt's G completions is a row
        cache.batch_repeat_interleave(num_generations)
        repeated = (x.repeat_interleave(num_generations, 0) for x in (logits, mask, positions))
        logits, mask, positions = repeated
    completion_ids = prompt_ids.new_zeros(len(logits), max_completion_length)  # (N, C)
    rows = torch.arange(len(logits), device=logits.device)  # those that the cache holds
    eos = torch.tensor(eos_token_ids, device=logits.device)
    unfinished = torch.ones_like(rows, dtype=torch.bool)
    for length in range(1, max_completion_length + 1):
        next_ids = sample(logits, temperature, top_p, top_k)
        completion_ids[rows, length - 1] = next_ids
        unfinished = unfinished & ~torch.isin(next_ids, eos)
        if length == max_completion_length or not unfinished.any():
            break
        if shared and not unfinished.all():
            cache.batch_select_indices(unfinished)
            kept = (x[unfinished] for x in (rows, next_ids, mask, positions, unfinished))
            rows, next_ids, mask, positions, unfinished = kept
        mask, positions = F.pad(mask, (0, 1), value=1), positions + 1
        logits = forward(next_ids[:, None])
    completion_ids = completion_ids[:, :length]
    return completion_ids.where(completion_mask(completion_ids, eos_token_ids), pad_token_id)


def completion_mask(completion_ids, eos_token_ids):
    """True through the first EOS of each row, it included: ids (N, C) -> bool (N, C).

    The position decides, never `ids == pad`, so a model whose pad is its EOS still learns to stop.

    >>> completion_mask(torch.tensor([[5, 2, 2], [5, 6, 7]]), [2]).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    eos = torch.as_tensor(eos_token_ids, dtype=completion_ids.dtype, device=completion_ids.device)
    is_eos = torch.isin(completion_ids, eos).long()
    return is_eos.cumsum(1) - is_eos == 0  # no EOS before this position


# ------------------------------------------------------------------------------------------ rewards

_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_NUMBER_IN_TEXT = re.compile(
    rf"(?:(?<![\w)\]}}.%])[-−–])?\\?[$€£]?"
    rf"(?:\\[dt]?frac{{-?{_DECIMAL}}}{{{_DECIMAL}}}|{_DECIMAL}(?:/{_DECIMAL})?)(?: ?\\?%)?"
)
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>\d+)\s+)?(?P<top>{_DECIMAL})"
    rf"(?:\s*/\s*(?P<bottom>{_DECIMAL}))?"
    r"(?:\s*\*\s*10\^{?(?P<power>[-+]?\d{1,3})}?|[eE](?P<e_power>[-+]?\d{1,3}))?"
    r"\s*(?P<percent>%)?\s*(?P<unit>[A-Za-z]{2,}(?:[\s./-]+[A-Za-z]+)*\.?(?:\^{?[23]}?)?)?"
)
_NOT_UNITS = {"pi", "dozen", "hundred", "thousand", "million", "billion", "trillion"}
_SPELLINGS = {
    "-": "− –", "*": "× · \\times \\cdot", "/": "÷", "%": "\\%", ",": "{,}",
    "\\frac": "\\dfrac \\tfrac",
    "": "\\left \\right \\! \\, \\; \\: ^\\circ ^{\\circ} ° \\$ $ € £ \\( \\)",
}  # fmt: skip


def extract_answer(text):
    r"""The one answer of a text: the last \boxed{…}, else what follows the last ####, else the last
    number. None if there is none, or if the last box is not closed.

    >>> extract_answer(r"First \boxed{3}, so \boxed{\frac{1}{2}}."), extract_answer("#### 1,234")
    ('\\frac{1}{2}', '1,234')
    """
    before, box, after = text.rpartition("\\boxed")
    if box:
        after = after.lstrip()
        if not after.startswith("{"):
            return after.split()[0].rstrip("$.,") if after else None
        depth = 0
        for match in re.finditer(r"(?<!\\)[{}]", after):
            depth += 1 if match[0] == "{" else -1
            if depth == 0:
                return after[1 : match.start()].strip() or None
        return None
    before, mark, after = text.rpartition("####")
    line = after.strip().partition("\n")[0].strip() if mark else ""
    if line and (_number(line) or not re.search(r"[A-Za-z]{2,} ", line)):
        return line  # what follows #### is the answer, unless it is prose
    numbers = _NUMBER_IN_TEXT.findall(line if mark else text)
    return numbers[-1] if numbers else None


def _clean(text):
    """LaTeX in one of its many spellings."""
    for spelling, others in _SPELLINGS.items():
        for other in others.split():
            text = text.replace(other, spelling)
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\s*{([^{}]*)}", r" \1", text.replace("\\ ", " "))
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text).strip().rstrip(".,;: ")
    return re.sub(r"^[A-Za-z]\w{0,9}(?:\([A-Za-z]\))?\s*=([^=]*)$", r"\1", text).strip()  # x = 5


def _number(text):
    """(exact value, whether in percent) of a text that is one number, perhaps with a unit."""
    if len(text) > 400:  # no answer is that long, and thousands of digits cost time
        return None
    text = re.sub(r"\\frac{(-?[\d.,]+)}{([\d.,]+)}", r" \1/\2", _clean(text)).strip()
    match = _NUMBER.fullmatch(re.sub(r"^-\s+", "-", text))
    unit = re.findall("[a-z]+", (match["unit"] or "").lower()) if match else []
    if not match or (match["whole"] and not match["bottom"]) or _NOT_UNITS & {*unit}:
        return None
    parts = (match["top"], match["bottom"] or "1")
    top, bottom = (Fraction(digits.replace(",", "")) for digits in parts)
    if bottom == 0:
        return None
    value = (int(match["whole"] or 0) + top / bottom) * (-1 if match["sign"] == "-" else 1)
    value *= Fraction(10) ** int(match["power"] or match["e_power"] or 0)
    return value, bool(match["percent"]) or unit == ["percent"]


def answers_match(answer, gold):
    r"""Whether two answers are the same: as exact rationals if both are numbers, else as LaTeX in
    one spelling. A percent sign that only one has may mean the number or a hundredth of it.

    >>> answers_match("$80,000.00", "80000"), answers_match(r"\frac{1}{2}", "0.5")
    (True, True)
    """
    if not answer or not gold:
        return False
    if (a := _number(answer)) and (g := _number(gold)):
        (value, percent), (gold_value, gold_percent) = a, g
        scale = Fraction(100) ** (int(percent) - int(gold_percent))
        return value in (gold_value, gold_value * scale)
    texts = [re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", _clean(text)) for text in (answer, gold)]
    texts = [re.sub(r"^\((\w)\)$", r"\1", text) for text in texts]
    a, g = (text.casefold() if text.isalpha() else text for text in texts)
    return a == g != ""


def gold_answer(answer):
    """The data's answer: in a box, after ####, else the whole text. None if it is empty."""
    text = "" if answer is None else str(answer).strip()
    return extract_answer(text) if "\\boxed" in text or "####" in text else text or None


def accuracy_reward(prompts, completions, answer, **columns):
    """1.0 where the completion's one extracted answer is the data's `answer`, else 0.0.

    >>> accuracy_reward([""] * 3, ["2 + 12 = 14", "so 16", "10"], ["#### 14"] * 3)
    [1.0, 0.0, 0.0]
    """
    pairs = zip(completions, answer, strict=True)
    return [float(answers_match(extract_answer(text), gold_answer(gold))) for text, gold in pairs]


def format_reward(prompts, completions, **columns):
    """1.0 for one `<think>…</think>` and then an answer, else 0.0 (DeepSeek-R1, arXiv:2501.12948,
    2.2.2). A prompt that ends in `<think>` has opened the block already.

    >>> format_reward(["", ""], ["<think>2 + 2</think>4", "4"])
    [1.0, 0.0]
    """
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        text = "<think>" * prompt.rstrip().endswith("<think>") + completion.strip()
        once = text.startswith("<think>") and text.count("<think>") == text.count("</think>") == 1
        scores.append(float(once and text.partition("</think>")[2].strip() != ""))
    return scores


REWARDS = {"accuracy": accuracy_reward, "format": format_reward}


def load_rewards(specs):
    """{name: (function, weight)} of `NAME[=WEIGHT]` and `FILE.py:FUNCTION[=WEIGHT]`."""
    rewards = {}
    for spec in specs:
        target, weight = re.fullmatch(r"(.*?)(?:=([^=]*))?", spec, re.DOTALL).groups()
        path, _, name = target.rpartition(":")
        try:
            function = getattr(run_file(path), name) if path.endswith(".py") else REWARDS[target]
            rewards[name] = (function, 1.0 if weight is None else float(weight))
        except (KeyError, ValueError, AttributeError, OSError) as error:
            known = f"{', '.join(REWARDS)} or FILE.py:FUNCTION, with =WEIGHT if not 1"
            raise Error(f"--reward {spec}: {error}; it takes {known}") from None
    if len(rewards) < len(specs) or not all(math.isfinite(w) for _, w in rewards.values()):
        raise Error(f"--reward {' '.join(specs)}: a name twice, or a weight that is not finite")
    return rewards


def run_file(path):
    """The module that a Python file defines."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except OSError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise Error(f"{path} failed: {error!r}") from None
    return module


def score(rewards, **columns):
    """Ask every reward function -> {name: N values}: a number, a list of numbers (one for each step
    of the completion), or None (not its to judge).

    columns: `prompts`, `completions`, `completion_ids` and the data's other columns, each a list of
    N, which a function gets by name as it would from TRL. Raises `Error` for anything else.
    """
    scores, size = {}, len(columns["completions"])
    for name, (function, _) in rewards.items():
        try:
            values = list(function(**columns))
        except Exception as error:
            traceback.print_exc()
            raise Error(f"the reward {name} failed: {error!r}") from None
        values = [value.tolist() if hasattr(value, "tolist") else value for value in values]
        numbers = [v for value in values for v in (value if isinstance(value, list) else [value])]
        good = all(n is None or isinstance(n, (int, float)) and math.isfinite(n) for n in numbers)
        if len(values) != size or not good:
            kinds = f"{size} finite numbers (or lists of numbers, one a step; or None: not judged)"
            raise Error(f"the reward {name} returned {str(values)[:200]}, not {kinds}")
        scores[name] = values
    if all(value is None for values in scores.values() for value in values):
        raise Error(f"no completion was judged by {', '.join(scores)}: all returned None")
    return scores


# --------------------------------------------------------------------------------------- advantages


def group_advantages(rewards, num_generations, scale_rewards="group", eps=1e-8):
    """(r - mean of its group) / (std + eps): rewards (N,) -> (N,). DeepSeekMath 4.1.2.

    std is the unbiased one, of the "group", of the whole "batch", or "none" at all (Dr. GRPO,
    arXiv:2503.20783). Equal rewards give exactly 0. Raises ValueError unless G >= 2 divides N.
    Needs `_float` where it is pasted.

    >>> group_advantages(torch.tensor([1.0, 0, 0, 1, 0.1, 0.1, 0.1, 0.1]), 4)
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660,  0.0000,  0.0000,  0.0000,  0.0000])
    """
    if num_generations < 2 or len(rewards) % num_generations:
        raise ValueError(f"{len(rewards)} rewards make no groups of {num_generations} (at least 2)")
    groups = _float(rewards).view(-1, num_generations)  # (B, G)
    equal = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    # The float32 mean of equal numbers can be a bit off, and that bit over a std of 0 is not small.
    centred = (groups - groups.mean(1, keepdim=True)).masked_fill(equal, 0)
    scales = {"group": groups.std(1, keepdim=True) + eps, "batch": groups.std() + eps, "none": 1}
    return (centred / scales[scale_rewards]).view(-1)


def process_advantages(step_rewards, step_ends, num_generations, num_tokens, eps=1e-8):
    """Process supervision (DeepSeekMath 4.1.3): the advantage of each token -> (N, num_tokens).

    step_rewards, step_ends: N lists, a number for each step of a completion and the index of its
    last token. The step rewards of a group are normalised together; a token's advantage is the sum
    of those of the steps that end at or after it. Needs `group_advantages` and `_float`.

    >>> process_advantages([[1, 0], [0, 1]], [[0, 2], [1, 2]], 2, 4)
    tensor([[ 0.0000, -0.8660, -0.8660,  0.0000],
            [ 0.0000,  0.0000,  0.8660,  0.0000]])
    """
    advantages = torch.zeros(len(step_rewards), num_tokens)
    for start in range(0, len(step_rewards), num_generations):
        group = range(start, start + num_generations)
        rewards = torch.tensor([float(reward) for i in group for reward in step_rewards[i]])
        if len(rewards) > 1:  # a single step is its own mean
            normalised = iter(group_advantages(rewards, len(rewards), eps=eps))
            for i in group:
                for end in step_ends[i]:
                    advantages[i, : end + 1] += next(normalised)
    return advantages


# ---------------------------------------------------------------------------------------- log-probs


def _float(x: torch.Tensor) -> torch.Tensor:
    """At least float32: exponentials and long sums lose too much in half precision."""
    return x if x.dtype == torch.float64 else x.float()


def token_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, completion_mask, temperature=1.0, fast=True
):
    """log-prob of each completion token given all before it -> (N, C) float32, 0 where masked.

    prompt_ids, prompt_mask: (B, P), left-padded; completion_ids, completion_mask: (N, C), rows
    b*G … b*G+G-1 continue prompt b. Logits are divided by `temperature`, as in sampling. `fast`
    runs each prompt once and its completions on G copies of its key-value cache, through which
    gradients flow, and never holds the (N, C, V) logits; else this is the model's plain forward.
    `fast_path_holds` tells which. Needs `PromptCache`, `LogProbs` and `_float` where it is pasted.
    """
    num_generations, length = len(completion_ids) // len(prompt_ids), completion_ids.shape[1]
    rows = torch.arange(len(completion_ids), device=prompt_ids.device) // num_generations
    mask = torch.cat([prompt_mask[rows], torch.ones_like(completion_mask)], 1).long()  # (N, P + C)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # (N, P + C)
    ids = completion_ids[completion_mask]  # (M,): padding costs nothing in the output layer

    if not fast:
        inputs = dict(attention_mask=mask, position_ids=positions, use_cache=False)
        logits = model(torch.cat([prompt_ids[rows], completion_ids], 1), **inputs).logits
        logits = logits[:, -length - 1 : -1][completion_mask]  # each predicts the next token
        logp = (_float(logits) / temperature).log_softmax(1).gather(1, ids[:, None])[:, 0]
    else:
        cache, run = PromptCache(config=model.config), model.base_model
        inputs = dict(attention_mask=prompt_mask.long(), past_key_values=cache, use_cache=True)
        inputs["position_ids"] = (prompt_mask.cumsum(1) - 1).clamp(min=0)
        # A prompt's last hidden state predicts the first token of each of its completions.
        hidden = run(prompt_ids, **inputs)[0][rows, -1:]  # (N, 1, H)
        if length > 1:
            inputs = dict(attention_mask=mask[:, :-1], position_ids=positions[:, -length:-1])
            inputs |= dict(past_key_values=cache.repeat(num_generations), use_cache=True)
            hidden = torch.cat([hidden, run(completion_ids[:, :-1], **inputs)[0]], 1)  # (N, C, H)
        weight = model.get_output_embeddings().weight
        logp = LogProbs.apply(hidden[completion_mask], weight, ids, temperature)
    return logp.new_zeros(completion_mask.shape).masked_scatter(completion_mask, logp)


class PromptCache(DynamicCache):
    """A key-value cache that a forward pass reads but never changes: what it adds goes to `after`.

    So a layer that gradient checkpointing runs a second time sees what it saw the first time.
    """

    def update(self, keys, values, layer_idx, *args, **kwargs):
        layer = copy.copy(self.layers[layer_idx])
        self.after = {**getattr(self, "after", {}), layer_idx: layer}
        return layer.update(keys, values, *args, **kwargs)

    def repeat(self, num_generations):
        """The cache after the pass, `num_generations` times for each prompt."""
        repeated = PromptCache()
        repeated.layers = [self.after[i] for i in range(len(self.layers))]
        repeated.batch_repeat_interleave(num_generations)
        return repeated


class LogProbs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature) at `ids`: (M, H), (V, H), (M,) -> (M,).

    Goes through the vocabulary a chunk at a time, so that the (M, V) logits never stand in memory
    and each weight's gradient is one sum over all tokens. Backward computes the logits again, with
    d logp / d logits = (onehot(id) - softmax(logits / temperature)) / temperature.
    """

    CHUNK = 2**22  # logits at once: 16 MiB in float32

    @staticmethod
    def chunks(hidden, weight, ids, temperature):
        """(columns, logits (M, columns), rows whose id is among them, its column) of each chunk."""
        size = max(1, LogProbs.CHUNK // max(1, len(ids)))
        for start in range(0, len(weight), size):
            logits = _float(hidden @ weight[start : start + size].t()).div_(temperature)
            here = ((ids >= start) & (ids < start + size)).nonzero()[:, 0]
            yield slice(start, start + size), logits, here, ids[here] - start

    @staticmethod
    def forward(ctx, hidden, weight, ids, temperature):
        log_z, chosen = 2 * [_float(hidden.new_full((len(ids),), -math.inf))]
        for _, logits, here, column in LogProbs.chunks(hidden, weight, ids, temperature):
            log_z = torch.logaddexp(log_z, logits.logsumexp(1))
            chosen = chosen.index_put((here,), logits[here, column])
        ctx.save_for_backward(hidden, weight, ids, log_z)
        ctx.temperature = temperature
        return chosen - log_z

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, ids, log_z = ctx.saved_tensors
        grad = grad / ctx.temperature
        grad_hidden = torch.zeros_like(hidden, dtype=grad.dtype)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for columns, logits, here, column in LogProbs.chunks(hidden, weight, ids, ctx.temperature):
            grad_logits = logits.sub_(log_z[:, None]).exp_().mul_(-grad[:, None])
            grad_logits[here, column] += grad[here]
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden += grad_logits @ weight[columns]
            if grad_weight is not None:
                grad_weight[columns] = grad_logits.t() @ hidden
        return grad_hidden.to(hidden.dtype), grad_weight, None, None


def fast_path_holds(model):
    """Whether `token_logprobs` gives with `fast` what it gives without, in values and gradients.

    Wrong log-probs are never an option, so every model is asked, on a few tokens: not all logits
    are head(hidden) (Gemma 2 caps them, Cohere scales them), not every layer bears a shared cache.
    """
    vocabulary = min(1000, model.config.get_text_config().vocab_size)
    ids = torch.randint(vocabulary, (6, 5), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    batch = [ids[:2], torch.ones_like(ids[:2]).bool(), ids[2:], torch.ones_like(ids[2:]).bool()]
    batch[1][0, :2] = False
    head, results, products = model.get_output_embeddings(), [], []
    try:
        for fast in (False, True):
            logp = token_logprobs(model, *batch, fast=fast)
            gradient = torch.autograd.grad(logp.sum(), model.get_input_embeddings().weight)
            results.append((logp, *gradient))
        # On inputs so large that a cap shows even in a model whose logits are small.
        hooks = [head.register_forward_pre_hook(lambda module, inputs: (1000 * inputs[0],))]
        hooks += [head.register_forward_hook(lambda module, inputs, out: products.append(out))]
        with torch.no_grad():
            logits = model(ids).logits
        [hook.remove() for hook in hooks]
    except Exception:  # whatever a model raises that has no such cache or no such head
        return False
    tolerance = 0.05 if model.dtype in (torch.bfloat16, torch.float16) else 1e-4
    same = [(f - p).norm() <= tolerance * p.norm() for p, f in zip(*results, strict=True)]
    capped = not torch.equal(logits.float(), products[0].float())
    return all(same) and not capped and getattr(head, "bias", 0) is None


# --------------------------------------------------------------------------------------------- loss


def masked_mean(x, mask, dim=None):
    """Mean of x where mask is true, over all of it or along `dim`, which is kept; 0 where none."""
    dims = {} if dim is None else dict(dim=dim, keepdim=True)
    return (x * mask).sum(**dims) / mask.sum(**dims).clamp(min=1)


def kl_k3(logp, ref_logp):
    """exp(d) - d - 1 with d = ref_logp - logp, never negative, unbiased for KL(policy, reference).

    (N, C) -> (N, C) in nats: DeepSeekMath eq. 4, Schulman's k3 (joschu.net/blog/kl-approx.html).
    Needs `_float` where it is pasted.

    >>> kl_k3(torch.tensor([0.7]).log(), torch.tensor([0.5]).log())
    tensor([0.0508])
    """
    d = _float(ref_logp) - _float(logp)
    return torch.expm1(d) - d


def importance_ratio(logp, old_logp, mask, importance_sampling_level="token"):
    """New over old probability of each token, (N, C). `old_logp` None: the policy has not moved.

    "sequence" gives all tokens of a completion one ratio, exp of the mean of logp - old_logp over
    its tokens (GSPO, arXiv:2507.18071, eq. 7).
    """
    log_ratio = _float(logp) - _float(logp.detach() if old_logp is None else old_logp)
    if importance_sampling_level == "sequence":
        log_ratio = masked_mean(log_ratio, mask, dim=1).expand_as(logp)
    elif importance_sampling_level != "token":
        raise ValueError(f"importance_sampling_level {importance_sampling_level!r} is unknown")
    return log_ratio.exp()


def clipped_surrogate(
    logp, old_logp, advantages, epsilon=0.2, epsilon_high=None, mask=None,
    importance_sampling_level="token",
):  # fmt: skip
    """min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A), (N, C): what is to be maximised.

    logp, old_logp: (N, C); advantages: (N,) or (N, C); `mask` matters to the "sequence" ratio
    alone. PPO (arXiv:1707.06347) eq. 7 as in DeepSeekMath eq. 3; `epsilon_high` is DAPO's
    clip-higher (arXiv:2503.14476). Needs `importance_ratio`, `masked_mean` and `_float`.

    >>> logp, old_logp = torch.tensor([[0.7], [0.7]]).log(), torch.tensor([[0.5], [0.5]]).log()
    >>> clipped_surrogate(logp, old_logp, torch.tensor([0.9354, -0.9354])).flatten()
    tensor([ 1.1225, -1.3096])
    """
    mask = torch.ones_like(logp) if mask is None else mask
    ratio = importance_ratio(logp, old_logp, mask, importance_sampling_level)
    advantages = advantages.reshape(len(logp), -1)  # (N, 1) or (N, C)
    clipped = ratio.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    return torch.minimum(ratio * advantages, clipped * advantages)


def grpo_loss(
    logp, old_logp, ref_logp, advantages, mask, *, epsilon=0.2, epsilon_high=None, beta=0.04,
    loss_type="grpo", importance_sampling_level="token", max_completion_length=None,
    num_sequences=None, num_tokens=None,
):  # fmt: skip
    """(scalar to minimise, metrics): DeepSeekMath eq. 3. Metrics are detached means over tokens.

    logp, old_logp, ref_logp: (N, C) in nats, mask: (N, C) bool, advantages: (N,) or (N, C).
    `old_logp` None: the policy has not moved, the ratio is 1. `ref_logp` None: no KL term. What
    stands under the mask reaches neither loss nor gradient. -surrogate + beta k3 of each token is
    averaged by `loss_type`:
        grpo     mean over sequences of the mean over their tokens
        dapo     sum over tokens / num_tokens
        dr_grpo  sum over tokens / (num_sequences * max_completion_length, if None: C)
    `num_sequences` and `num_tokens` are totals of the optimizer batch (None: this call is all of
    it), so that the losses of its micro-batches add up to its loss. Raises ValueError for an
    unknown type. Needs `clipped_surrogate`, `importance_ratio`, `kl_k3`, `masked_mean`, `_float`.
    """
    mask = mask.bool()
    logps = (x if x is None else x.masked_fill(~mask, 0) for x in (logp, old_logp, ref_logp))
    logp, old_logp, ref_logp = logps
    high, level = epsilon if epsilon_high is None else epsilon_high, importance_sampling_level
    surrogate = clipped_surrogate(logp, old_logp, advantages, epsilon, high, mask, level)
    kl = torch.zeros_like(surrogate) if ref_logp is None else kl_k3(logp, ref_logp)
    token_loss = (beta * kl - surrogate).masked_fill(~mask, 0)  # (N, C)

    num_sequences = len(mask) if num_sequences is None else num_sequences
    num_tokens = mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    if loss_type == "grpo":
        loss = masked_mean(token_loss, mask, dim=1).sum() / num_sequences
    elif loss_type == "dapo":
        loss = token_loss.sum() / num_tokens
    elif loss_type == "dr_grpo":
        loss = token_loss.sum() / (num_sequences * (max_completion_length or mask.shape[1]))
    else:
        raise ValueError(f"loss_type {loss_type!r} is unknown")

    with torch.no_grad():
        ratio = importance_ratio(logp, old_logp, mask, level)
        up, down = (sign * advantages.reshape(len(logp), -1) > 0 for sign in (1, -1))
        clipped = (ratio > 1 + high) & up | (ratio < 1 - epsilon) & down
        metrics = dict(kl=kl.detach(), ratio_mean=ratio, clip_fraction=clipped.float())
        return loss, {name: masked_mean(value, mask) for name, value in metrics.items()}


# ------------------------------------------------------------------------------------------- update


class MasterAdamW:
    """AdamW on float32 master weights, whatever dtype the model computes in.

    bfloat16 keeps 8 bits of a weight, so that it does not notice a change of less than 1/512: at a
    learning rate of 1e-6 nearly all updates would vanish. A float32 weight is its own master; a
    bfloat16 one is the upper half of its master, rounded, and the lower 16 bits stand in
    `remainders`. A parameter thus costs 2 + 2 bytes, its moments 8 and its gradient 2 or 4.
    """

    SLICE = 2**22  # weights updated at once: no float32 copy of a whole tensor is ever made

    def __init__(self, model, weight_decay=0.0):
        self.params = [param for param in model.parameters() if param.requires_grad]
        halves = [param.dtype == torch.bfloat16 for param in self.params]
        zeros = functools.partial(torch.zeros_like, memory_format=torch.contiguous_format)
        pairs = list(zip(self.params, halves, strict=True))
        self.remainders = [zeros(p.data, dtype=torch.int16) if half else None for p, half in pairs]
        self.moments = [[zeros(p.data, dtype=torch.float32) for _ in "12"] for p in self.params]
        self.num_steps, self.sums = 0, {}
        self.options = dict(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=weight_decay)
        self.options |= dict(amsgrad=False, maximize=False, fused=True)

    def masters(self):
        """The float32 weights."""
        pairs = zip(self.params, self.remainders, strict=True)
        return [p.data if rest is None else join_halves(p.data, rest) for p, rest in pairs]

    @contextlib.contextmanager
    def float32_sums(self):
        """Backward passes in here add up in float32: bfloat16 would lose the small gradients."""

        def add(param):
            total = self.sums.get(param)
            self.sums[param] = param.grad.float() if total is None else total.add_(param.grad)
            param.grad = None

        halves = [param for param in self.params if param.dtype == torch.bfloat16]
        hooks = [param.register_post_accumulate_grad_hook(add) for param in halves]
        yield
        [hook.remove() for hook in hooks]

    def step(self, learning_rate, max_grad_norm=math.inf):
        """Clip the gradient to `max_grad_norm`, update, drop the gradient -> its norm before.

        If the norm is not finite, raises `Error` and leaves all weights as they were.
        """
        gradients = [self.sums.pop(param, param.grad) for param in self.params]
        norm = torch.nn.utils.get_total_norm([g for g in gradients if g is not None]).item()
        if not math.isfinite(norm):
            raise Error(f"the gradient's norm is {norm}; the weights are as they were before")
        scale = min(1.0, max_grad_norm / (norm + 1e-6))
        for i, (param, gradient) in enumerate(zip(self.params, gradients, strict=True)):
            if gradient is not None:
                rest = [] if self.remainders[i] is None else [self.remainders[i]]
                tensors = (param.data, gradient, *self.moments[i], *rest)
                for parts in zip(*(x.view(-1).split(self.SLICE) for x in tensors), strict=True):
                    self.step_slice(learning_rate, scale, *parts)
            gradients[i] = param.grad = None
        self.num_steps += 1
        return norm

    def step_slice(self, learning_rate, scale, weights, gradient, first, second, remainder=None):
        master = weights if remainder is None else join_halves(weights, remainder)
        count = torch.tensor(float(self.num_steps), device=master.device)
        state = [master], [gradient.float().mul_(scale)], [first], [second], [], [count]
        adamw(*state, lr=learning_rate, **self.options)
        if remainder is not None:
            split_halves(master, weights, remainder)


def join_halves(weights, remainder):
    """The float32 numbers of which bfloat16 `weights` are the upper and int16 `remainder` the lower
    16 bits."""
    return ((weights.view(torch.int16).int() << 16) + remainder).view(torch.float32)


def split_halves(master, weights, remainder):
    """Write float32 `master` into its halves: `weights`, the nearest bfloat16, and what is left."""
    bits = master.view(torch.int32)
    remainder.copy_(bits.to(torch.int16))  # the lower 16 bits, as a number with a sign
    weights.view(torch.int16).copy_((bits - remainder) >> 16)


def cut_micro_batches(prompt_lengths, completion_lengths, num_generations, max_tokens):
    """Cut B groups into micro-batches of at most `max_tokens` padded tokens.

    prompt_lengths: (B,), completion_lengths: (N,) -> [(prompts, rows), …]. Each prompt of
    a micro-batch stands before equally many rows: its whole group or, where that would be too long,
    an equal part of it. Sorted by length, so that little is padding. One completion alone may
    exceed the budget.
    """
    worst = int(prompt_lengths.max()), int(completion_lengths.max())
    sizes = [size for size in range(1, num_generations + 1) if num_generations % size == 0]
    size = max([s for s in sizes if worst[0] + s * worst[1] <= max_tokens], default=1)
    groups = completion_lengths.view(-1, num_generations)
    order = groups.argsort(dim=1, descending=True, stable=True)
    rows = order + torch.arange(0, len(completion_lengths), num_generations)[:, None]  # (B, G)
    parts = rows.view(-1, size)
    parts = parts[completion_lengths[parts[:, 0]].argsort(descending=True, stable=True)]

    micro_batches, prompts = [], parts[:, 0] // num_generations
    start = 0
    for end in range(1, len(parts) + 1):
        longest = prompt_lengths[prompts[start:end]].max(), completion_lengths[parts[start, 0]]
        if end - start > 1 and (end - start) * (longest[0] + size * longest[1]) > max_tokens:
            micro_batches.append((prompts[start : end - 1], parts[start : end - 1].flatten()))
            start = end - 1
    return micro_batches + [(prompts[start:], parts[start:].flatten())]


def crop(prompt_ids, prompt_mask, completion_ids, mask):
    """The same four without the columns that are padding in every row."""
    left, right = prompt_mask.any(0), mask.any(0)
    right[0] = True
    return prompt_ids[:, left], prompt_mask[:, left], completion_ids[:, right], mask[:, right]


def update(policy, reference, optimizer, config, learning_rate, batch, advantages, fast):
    """num_iterations (mu) AdamW steps on one rollout -> metrics, means over its tokens and steps.

    batch: prompt_ids and prompt_mask (B, P), completion_ids and mask (N, C); advantages: (N,) or
    (N, C). reference: a function of such a batch that gives its log-probs (N, C); None: no KL term.
    The old log-probs of all later steps are those of the first, before any weight moved; with one
    step they are the new ones themselves.
    """
    prompt_ids, prompt_mask, completion_ids, mask = batch
    size, num_tokens = config.num_generations, mask.sum()
    advantages = advantages.reshape(len(mask), -1).expand(mask.shape)  # (N, C)
    live = torch.arange(len(prompt_ids))
    if reference is None:  # then a group without advantages has no gradient at all
        some = advantages.reshape(len(prompt_ids), -1).any(1).cpu()
        live = live[some] if some.any() else live[:1]
    lengths = prompt_mask.sum(1).cpu()[live], mask.sum(1).cpu().view(-1, size)[live].flatten()
    micro_batches = [
        (live[prompts], live[rows // size] * size + rows % size)
        for prompts, rows in cut_micro_batches(*lengths, size, config.micro_batch_tokens)
    ]
    options = dict(epsilon=config.epsilon, epsilon_high=config.epsilon_high, beta=config.beta)
    options |= dict(loss_type=config.loss_type, num_sequences=len(mask), num_tokens=num_tokens)
    options |= dict(importance_sampling_level=config.importance_sampling_level)
    options |= dict(max_completion_length=config.max_completion_length)

    old_logps, ref_logps, totals = {}, {}, dict(loss=0.0)
    for iteration in range(config.num_iterations):
        several = len(micro_batches) > 1
        with optimizer.float32_sums() if several else contextlib.nullcontext():
            for i, (prompts, rows) in enumerate(micro_batches):
                inputs = prompt_ids[prompts], prompt_mask[prompts], completion_ids[rows], mask[rows]
                inputs = crop(*inputs)
                if iteration == 0 and reference is not None:
                    ref_logps[i] = reference(*inputs)
                logp = token_logprobs(policy, *inputs, config.temperature, fast)
                if iteration == 0 and config.num_iterations > 1:
                    old_logps[i] = logp.detach()
                terms = logp, old_logps.get(i), ref_logps.get(i), advantages[rows, : logp.shape[1]]
                loss, metrics = grpo_loss(*terms, inputs[-1], **options)
                loss.backward()
                weight = inputs[-1].sum() / (num_tokens.clamp(min=1) * config.num_iterations)
                totals["loss"] += loss.detach() / config.num_iterations
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0) + value * weight
        if not torch.isfinite(totals["loss"]):
            raise Error("the loss is not finite; the weights are as they were before this update")
        totals["grad_norm"] = optimizer.step(learning_rate, config.max_grad_norm)
    return {name: float(value) for name, value in totals.items()}


# ----------------------------------------------------------------------------------------- training


@dataclass
class Run:
    """What a run is made of."""

    config: Config
    device: torch.device
    rewards: dict
    policy: torch.nn.Module
    tokenizer: transformers.PreTrainedTokenizerBase
    eos_token_ids: list[int]
    fast: bool
    train_rows: list[dict] = dataclasses.field(default_factory=list)
    eval_rows: list[dict] = dataclasses.field(default_factory=list)
    output_dir: Path | None = None

    def log(self, name, *records):
        """Append records to a JSONL file of the run's folder."""
        with open(self.output_dir / name, "a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def set_up(config):
    """The `Run` that a config asks for. Raises `Error` for whatever the config gets wrong."""
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rewards = load_rewards(config.reward)
    train_rows, eval_rows = load_data(config, needs_answer="accuracy" in rewards)
    policy, tokenizer, eos_token_ids = load_model(config, device)
    run = Run(config, device, rewards, policy, tokenizer, eos_token_ids, fast_path_holds(policy))
    if not run.fast:
        print(f"note: {type(policy).__name__} needs the plain path, slower and with more memory")
    run.train_rows, run.eval_rows = encode_prompts(train_rows, run), encode_prompts(eval_rows, run)
    if len(run.train_rows) < config.prompts_per_step:
        few = f"{len(run.train_rows)} prompts are fewer than --prompts-per-step"
        raise Error(f"{few} {config.prompts_per_step}")
    longest = max(len(row["ids"]) for row in run.train_rows + run.eval_rows)
    positions = getattr(policy.config.get_text_config(), "max_position_embeddings", None)
    if longest + config.max_completion_length > (positions or math.inf):
        need = f"a prompt of {longest} and --max-completion-length {config.max_completion_length}"
        raise Error(f"{need} exceed the {positions} positions of {config.model}")
    if config.gradient_checkpointing:
        checkpoint_layers(policy)
    name = f"{Path(config.model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run.output_dir = Path(config.output_dir or Path("runs") / name)
    try:
        run.output_dir.mkdir(parents=True, exist_ok=True)
        if (run.output_dir / "config.json").exists():
            raise Error(f"--output-dir {run.output_dir} holds a run; name another folder")
        text = json.dumps(dataclasses.asdict(config), indent=2)
        (run.output_dir / "config.json").write_text(text)
    except OSError as error:
        raise Error(f"cannot write to --output-dir {run.output_dir}: {error}") from None
    return run


def rollout(run, rows, num_generations, temperature):
    """Completions of B rows -> prompt_ids, prompt_mask (B, P), completion_ids, mask (N, C)."""
    config, pad_token_id = run.config, run.tokenizer.pad_token_id
    prompt_ids, prompt_mask = pad([row["ids"] for row in rows], pad_token_id, "left", run.device)
    completion_ids = generate(
        run.policy, prompt_ids, prompt_mask, num_generations, config.max_completion_length,
        run.eos_token_ids, pad_token_id, temperature, config.top_p, config.top_k,
    )  # fmt: skip
    mask = completion_mask(completion_ids, run.eos_token_ids)
    return prompt_ids, prompt_mask, completion_ids, mask


def judge(run, rows, completion_ids, mask):
    """Texts (N,) of the completions of rows (B,), {reward: (N,) scores}, their sum (N,)."""
    rows = [row for row in rows for _ in range(len(mask) // len(rows))]
    pairs = zip(completion_ids.cpu(), mask.cpu(), strict=True)
    ids = [row_ids[row_mask].tolist() for row_ids, row_mask in pairs]
    spoken = [row_ids[: -1 if row_ids[-1] in run.eos_token_ids else None] for row_ids in ids]
    texts = run.tokenizer.batch_decode(spoken, skip_special_tokens=True)
    names = dict.fromkeys(name for row in rows for name in row if name not in ("prompt", "ids"))
    columns = {name: [row.get(name) for row in rows] for name in names}
    columns["prompts"] = columns.pop("text")
    scores = score(run.rewards, **columns, completions=texts, completion_ids=ids)
    scores = {
        name: torch.tensor([math.nan if value is None else value for value in values])
        for name, values in scores.items()
    }
    rewards = sum(weight * scores[name].nan_to_num() for name, (_, weight) in run.rewards.items())
    return texts, scores, rewards


def evaluate(run, step):
    """Mean reward, and mean of each score, of greedy completions of the held-out rows; logged."""
    size, parts = run.config.prompts_per_step * run.config.num_generations, []
    for start in tqdm(range(0, len(run.eval_rows), size), "evaluating", leave=False):
        rows = run.eval_rows[start : start + size]
        _, scores, rewards = judge(run, rows, *rollout(run, rows, 1, temperature=0)[2:])
        named = {f"rewards/{name}": values for name, values in scores.items()}
        parts.append(dict(reward=rewards, **named))
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    means = {f"eval/{name}": values.nanmean().item() for name, values in columns.items()}
    run.log("metrics.jsonl", dict(step=step, **means))
    return means


def sft(run):
    """Supervised steps on the rows' solutions, before GRPO: the loss is on solution and EOS."""
    config, optimizer = run.config, MasterAdamW(run.policy)
    bar = tqdm(range(1, config.sft_steps + 1), "supervised")
    for step in bar:
        size = config.prompts_per_step * config.num_generations
        rows = prompt_batch(run.train_rows, step, size, config.seed)
        solutions = [str(row.get("solution") or row["answer"]) for row in rows]
        ids = run.tokenizer(solutions, add_special_tokens=False)["input_ids"]
        prompt_ids, prompt_mask = pad([row["ids"] for row in rows], 0, "left", run.device)
        completion_ids, mask = pad([i + run.eos_token_ids[:1] for i in ids], 0, "right", run.device)
        lengths, total = (prompt_mask.sum(1).cpu(), mask.sum(1).cpu()), 0.0
        with optimizer.float32_sums():
            for i, _ in cut_micro_batches(*lengths, 1, config.micro_batch_tokens):
                inputs = crop(prompt_ids[i], prompt_mask[i], completion_ids[i], mask[i])
                loss = -token_logprobs(run.policy, *inputs, fast=run.fast).sum() / mask.sum()
                loss.backward()
                total += loss.item()
        optimizer.step(config.sft_learning_rate, config.max_grad_norm)
        bar.set_postfix(loss=f"{total:.3f}")


def freeze_reference(run):
    """The policy as it stands, as a function: a batch -> its log-probs (N, C)."""
    model = copy.deepcopy(run.policy).requires_grad_(False)
    logprobs = functools.partial(token_logprobs, model, fast=run.fast)
    return torch.no_grad()(functools.partial(logprobs, temperature=run.config.temperature))


def train(config):
    """GRPO from the first prompt to the last checkpoint."""
    run = set_up(config)
    size = f"{sum(p.numel() for p in run.policy.parameters()):,} parameters, {run.policy.dtype}"
    print(f"{config.model} ({size}) on {run.device}, {len(run.train_rows)} prompts")
    print(f"the first prompt, as the model sees it: {run.train_rows[0]['text']!r}")
    if config.sft_steps:
        sft(run)
    optimizer = MasterAdamW(run.policy, config.weight_decay)
    reference = freeze_reference(run) if config.beta else None
    group, history = config.num_generations, []
    evaluations = [evaluate(run, 0)] if config.eval_every else []
    bar = tqdm(range(1, config.max_steps + 1), "training")
    for step in bar:
        start = time.perf_counter()
        # 1. take B prompts
        rows = prompt_batch(run.train_rows, step, config.prompts_per_step, config.seed)
        # 2. sample G completions of each from the current policy
        *prompts, completion_ids, mask = rollout(run, rows, group, config.temperature)
        # 3. score them
        texts, scores, rewards = judge(run, rows, completion_ids, mask)
        # 4. normalise the scores within each group
        advantages = group_advantages(rewards, group, config.scale_rewards).to(run.device)
        # 5. ascend the clipped surrogate, held to the reference
        middle = time.perf_counter()
        finished = torch.isin(completion_ids, torch.tensor(run.eos_token_ids, device=run.device))
        finished = (finished & mask).any(1, keepdim=True)  # (N, 1)
        batch = *prompts, completion_ids, mask & finished if config.mask_truncated else mask
        rate = config.learning_rate * min(1.0, step / max(1, config.warmup_steps))
        common = run.policy, reference, optimizer, config
        metrics = update(*common, rate, batch, advantages, run.fast)
        end = time.perf_counter()
        # 6. log, look, evaluate, save
        lengths, groups = mask.sum(1).float(), rewards.view(-1, group)
        record = dict(
            step=step, reward=rewards.mean().item(), reward_std=groups.std(1).mean().item(),
            **{f"rewards/{name}": values.nanmean().item() for name, values in scores.items()},
            **metrics, completion_length=lengths.mean().item(),
            truncated_fraction=1 - finished.float().mean().item(),
            zero_std_fraction=(groups.amax(1) == groups.amin(1)).float().mean().item(),
            learning_rate=rate, num_tokens=int(mask.sum()), rollout_seconds=middle - start,
            update_seconds=end - middle, step_seconds=end - start, peak_memory_gb=peak_memory_gb(),
        )  # fmt: skip
        run.log("metrics.jsonl", record)
        history.append(record["reward"])
        shown = dict(reward="reward", kl="kl", length="completion_length")
        bar.set_postfix({short: f"{record[name]:.3g}" for short, name in shown.items()})
        if config.samples_every and (step % config.samples_every == 0 or step == 1):
            show_samples(run, step, rows, texts, rewards)
        if config.eval_every and (step % config.eval_every == 0 or step == config.max_steps):
            evaluations.append(evaluate(run, step))
        if config.save_every and step % config.save_every == 0 and step < config.max_steps:
            save_checkpoint(run, step)
    save_checkpoint(run, config.max_steps)
    conclude(run, evaluations, history)
    return evaluations[-1] if evaluations else {}


def peak_memory_gb():
    """The most memory in use so far, in GiB: of the GPU's allocator, else resident on the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource  # not on Windows

    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def show_samples(run, step, rows, texts, rewards, count=3):
    """Print the first completions of as many prompts, with their rewards."""
    for row, i in zip(rows[:count], range(0, len(texts), run.config.num_generations), strict=False):
        prompt, completion = row["text"][-80:], texts[i][:300]
        tqdm.write(f"step {step}  reward {rewards[i]:g}  {prompt!r} -> {completion!r}")


def save_checkpoint(run, step):
    """OUTPUT_DIR/checkpoint-<step>, a folder that `from_pretrained` loads."""
    path = run.output_dir / f"checkpoint-{step}"
    run.policy.save_pretrained(path)
    run.tokenizer.save_pretrained(path)
    print(f"saved {path}")


def conclude(run, evaluations, history):
    """What happened, in two lines."""
    if evaluations:
        ends = (evaluations[0], evaluations[-1])
        before, after = (f"{100 * means['eval/reward']:.0f} %" for means in ends)
        held_out = f"{len(run.eval_rows)} held-out prompts"
        print(f"greedy reward on {held_out}: {before} before, {after} after training")
    if history:
        width = max(1, math.ceil(len(history) / 60))
        parts = [history[i : i + width] for i in range(0, len(history), width)]
        means = [sum(part) / len(part) for part in parts]
        low, high = min(means), max(means)
        bars = "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / (high - low or 1))] for mean in means)
        print(f"mean sampled reward, step by step: {means[0]:.2f} {bars} {means[-1]:.2f}")


# -------------------------------------------------------------------------- built-in task and model


def arithmetic(config):
    """Rows of built-in arithmetic. For the tiny model: a number below 50 plus a digit, with
    solutions of which most are wrong, so that the supervised steps leave it something to learn."""
    rng = random.Random(config.seed)
    if config.model == "tiny":
        rows = []
        for a, b in rng.sample([(a, b) for a in range(50) for b in range(10)], 500):
            wrong = max(0, a + b + rng.choice([-10, -2, -1, 1, 2, 10]))
            solution = a + b if rng.random() < 0.4 else wrong
            rows.append(dict(prompt=f"{a}+{b}=", answer=str(a + b), solution=str(solution)))
        return rows

    def problem():
        a, b, c, d = (rng.choice([1, 1, -1]) * rng.randint(2, 99) for _ in range(4))
        return rng.choice([
            (f"Calculate {a} + {b} * ({c} - {d}).", a + b * (c - d)),
            (f"Calculate ({a} - {b}) * ({c} + {d}).", (a - b) * (c + d)),
            (f"Calculate {a * 37} - {b * 11} + {c} * {d}.", a * 37 - b * 11 + c * d),
            (f"Solve for x: {a} * x + {b} = {a * c + b}.", c),
        ])  # fmt: skip

    return [dict(zip(("prompt", "answer"), map(str, problem()), strict=True)) for _ in range(5000)]


def tiny_model(seed, dtype):
    """A 2-layer Qwen2 with 135,168 random weights, and a tokenizer with a token a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<eos>", "<unk>", *"0123456789+-*/=()<>#.,: \nabcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = dict(eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    shape = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(num_key_value_heads=4, tie_word_embeddings=True, initializer_range=0.06)
    shape |= dict(vocab_size=len(tokens), max_position_embeddings=256)
    shape |= dict(eos_token_id=0, pad_token_id=0)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(transformers.Qwen2Config(**shape), dtype=dtype)
    return model, tokenizer


# --------------------------------------------------------------------------------------------- main


def optional(package, purpose):
    """An optional package, or an `Error` that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise Error(f"{purpose} needs the package {package}: pip install {package}") from None


def first_line(error):
    """An exception in one line."""
    return next(iter(str(error).strip().splitlines()), repr(error))


def main():
    """The command line."""
    try:
        train(parse_args())
    except Error as error:
        sys.exit(f"grpo.py: {error}")


if __name__ == "__main__":
    main()
