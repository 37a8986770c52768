# SPDX-License-Identifier: MIT
r"""GRPO, Group Relative Policy Optimization, in one readable file: torch, transformers, tqdm.

    python grpo.py                                    # built-in tiny model learns sums, no download
    python grpo.py --model Qwen/Qwen2-Math-1.5B --data train.jsonl --micro-batch-tokens 8192
    python grpo.py --help                             # every option

One training step (DeepSeekMath, arXiv:2402.03300, algorithm 1) is the loop at the end of `train`:
  1. take B prompts                                                      `prompt_batch`
  2. sample G completions of each from the current policy                `generate`
  3. score every completion                                              `score`, `accuracy_reward`
  4. normalise the scores within each group into advantages              `group_advantages`
  5. ascend the clipped surrogate, held to a frozen reference by the     `token_logprobs`, `grpo_loss`
     k3 estimate of the KL divergence, with AdamW                        `update`
  6. log, look at samples, evaluate, save                                `evaluate`, `save_checkpoint`

Shapes, in every docstring and comment: B prompts, G samples of each, N = B*G completions (rows
b*G … b*G+G-1 belong to prompt b), P prompt length (left-padded), C completion length (right-padded),
V vocabulary, H hidden size.

Where this file departs from the papers and from common tutorials (each has a test):
  - A group of equal rewards has advantage exactly 0. The formula as printed gives up to ±0.8,
    because the float32 mean can be one bit off and the standard deviation is then that bit.
  - The standard deviation is the unbiased one (n - 1); eps = 1e-8.
  - A completion's mask runs through its first EOS, found by position. `ids == pad` would never
    teach the model to stop where pad and EOS are one token (Qwen2).
  - With one update per rollout the old log-probs are the new ones, detached: the ratio is exactly 1.
  - Every normaliser counts the whole optimizer batch, so micro-batches do not change the gradient.
  - The weights that AdamW moves are float32: at a learning rate of 1e-6 bfloat16 weights stand still.
  - The shared prompt of a group runs through the model once, in sampling, scoring and training.
"""

import argparse
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
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_layers import GradientCheckpointingLayer


class Error(Exception):
    """A mistake that the user can mend: `main` prints it in one line, without a traceback."""


# ------------------------------------------------------------------------------------------- config


def option(default, help, low=-math.inf, high=math.inf):
    """A field of `Config`: its default, its help text, the values that it allows."""
    return dataclasses.field(default=default, metadata=dict(help=help, low=low, high=high))


@dataclass(frozen=True)
class Config:
    """Every option of a run, from which the command line is made. Raises `Error` if out of range."""

    # model and data
    model: str = option("tiny", "Hub name or folder of a causal language model; tiny is built in")
    data: str | None = option(
        None, "JSONL file or Hub data set NAME[:CONFIG[:SPLIT]] (default: sums)"
    )
    eval_data: str | None = option(
        None, "held-out prompts (default: the last tenth of --data, at most 64)"
    )
    reward: tuple[str, ...] = option(
        ("accuracy",), "accuracy, format, FILE.py:FUNCTION; each [=WEIGHT]"
    )
    chat_template: Literal["auto", "on", "off"] = option(
        "auto", "auto: if the model was trained on it"
    )
    prompt_template: str | None = option(
        None, "text around {question} (default: asks for \\boxed{})"
    )
    system_prompt: str | None = option(None, "system message of every prompt")
    dtype: Literal["auto", "bfloat16", "float32"] = option(
        "auto", "of computation; weights stay float32"
    )
    # sampling
    num_generations: int = option(8, "G, completions sampled for each prompt", low=2)
    prompts_per_step: int = option(8, "B, prompts of each step", low=1)
    max_prompt_length: int = option(512, "in tokens; longer prompts are left out", low=1)
    max_completion_length: int = option(512, "in tokens; longer completions are cut off", low=1)
    temperature: float = option(1.0, "of sampling and of every log-prob", low=0.01)
    top_p: float = option(1.0, "below 1, samples are no longer the policy's: leave it", 0.01, 1)
    top_k: int = option(0, "above 0, samples are no longer the policy's: leave it", low=0)
    # loss
    beta: float = option(0.04, "weight of the KL term; 0 needs no reference", low=0)
    epsilon: float = option(0.2, "clip range of the ratio", 0, 1)
    epsilon_high: float | None = option(None, "clip range above 1, if another (DAPO: 0.28)", low=0)
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = option("grpo", "how token losses are averaged")
    scale_rewards: Literal["group", "batch", "none"] = option(
        "group", "whose std divides advantages"
    )
    importance_sampling_level: Literal["token", "sequence"] = option("token", "sequence: GSPO")
    num_iterations: int = option(1, "mu, updates per rollout", low=1)
    # optimisation
    learning_rate: float = option(1e-6, "of AdamW, constant after the warm-up", low=0)
    warmup_steps: int = option(10, "steps of linear warm-up", low=0)
    max_grad_norm: float = option(1.0, "a longer gradient is scaled to this norm", low=1e-12)
    weight_decay: float = option(0.0, "of AdamW", low=0)
    max_steps: int = option(200, "training steps; 0 only evaluates", low=0)
    micro_batch_tokens: int = option(2048, "padded tokens in one forward and backward pass", low=1)
    gradient_checkpointing: bool = option(False, "less memory for activations, a slower update")
    sft_steps: int = option(0, "supervised steps on the data's solutions before GRPO", low=0)
    sft_learning_rate: float = option(1e-5, "of the supervised steps", low=0)
    seed: int = option(0, "of everything random", 0, 2**31)
    # output
    output_dir: str | None = option(None, "folder of the run (default: runs/MODEL-TIME)")
    eval_every: int = option(
        50, "steps between evaluations; 0: none, not even at start and end", low=0
    )
    samples_every: int = option(50, "steps between looks at sampled completions; 0: none", low=0)

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
    parser = argparse.ArgumentParser(
        usage="python grpo.py [--option value ...]",
        description="Train a language model with GRPO, Group Relative Policy Optimization.",
        formatter_class=lambda prog: argparse.ArgumentDefaultsHelpFormatter(
            prog, max_help_position=34, width=110
        ),
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
            with open(source, encoding="utf-8") as lines:
                rows = [
                    (f"{source}, line {i}", line) for i, line in enumerate(lines, 1) if line.strip()
                ]
        except (OSError, UnicodeDecodeError) as error:
            raise Error(f"cannot read {source}: {error}") from None
    else:
        name, config, split = (source.split(":") + [None, None])[:3]
        data = optional("datasets", source).load_dataset(name, config, split=split or "train")
        rows = [(f"{source}, row {i}", row) for i, row in enumerate(data)]
    if not rows:
        raise Error(f"{source} is empty")
    return [check_row(row, where, needs_answer) for where, row in rows]


def check_row(row, where, needs_answer):
    """A line of JSON or a dict -> the dict with "prompt" and "answer"; raises `Error`."""
    try:
        row = json.loads(row) if isinstance(row, str) else row
        prompt = next((row[key] for key in ("prompt", "question", "problem") if row.get(key)), None)
        answer = next(
            (row[key] for key in ("answer", "solution") if row.get(key) is not None), None
        )
        messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
        readable = messages and all(isinstance(message["content"], str) for message in messages)
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise Error(f"{where}: not a JSON object with a question ({error})") from None
    if not readable:
        raise Error(f"{where}: no `prompt`, `question` or `problem` (text, or chat messages)")
    if needs_answer and not gold_answer(answer):
        raise Error(f"{where}: no answer in `answer` or `solution` for the accuracy reward")
    return {**row, "prompt": prompt, "answer": answer}


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
    return tokenizer(ending, add_special_tokens=False)["input_ids"][:1] in [
        [i] for i in eos_token_ids
    ]


def encode_prompts(rows, run):
    """The rows with "text" and "ids" as the model will see them, without the over-long ones."""
    config, tokenizer = run.config, run.tokenizer
    chat = config.chat_template == "on"
    if config.chat_template == "auto":
        chat = chat_template_fits(tokenizer, run.eos_token_ids)
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
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(text, add_special_tokens=not chat)[
            "input_ids"
        ]  # a template writes its own BOS
        if 0 < len(ids) <= config.max_prompt_length:
            kept.append({**row, "text": text, "ids": ids})
    if len(kept) < len(rows):
        dropped = f"{len(rows) - len(kept)} of {len(rows)} prompts"
        print(f"left out {dropped}: empty, or over {config.max_prompt_length} tokens")
    return kept


def prompt_batch(rows, step, size, seed):
    """The `size` rows of step 1, 2, …: epochs of shuffled rows, a function of the step alone, so that
    a resumed run finds its place."""
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
    mask = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
    pad_sequence = functools.partial(
        torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side
    )
    return pad_sequence(ids, padding_value=pad_token_id).to(device), pad_sequence(mask).to(device)


# -------------------------------------------------------------------------------------------- model


def load_model(config, device):
    """(model, tokenizer, EOS ids) of any causal language model of transformers, or the tiny one.

    transformers loads in the checkpoint's dtype unless told another, and picks its fastest attention.
    """
    auto = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, auto if config.dtype == "auto" else config.dtype)
    if config.model == "tiny":
        model, tokenizer = tiny_model(config.seed, dtype)
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(config.model, trust_remote_code=False)
            load = functools.partial(AutoModelForCausalLM.from_pretrained, trust_remote_code=False)
            model = load(config.model, dtype=dtype)
        except (OSError, ValueError, KeyError) as error:
            raise Error(
                f"cannot load {config.model}: {str(error).strip().splitlines()[0]}"
            ) from None
    model.to(device).eval()  # no dropout, ever: sampling, old, new and reference log-probs agree
    for (
        param
    ) in model.parameters():  # out of the mapped file, whose unaligned tensors slow a CPU down
        param.data = param.data.clone()
    ids = [c.eos_token_id for c in (model.generation_config, model.config, tokenizer)]
    eos = next((i for i in ids if i is not None), None)
    if eos is None:
        raise Error(f"{config.model} names no EOS token: it would never stop")
    eos_token_ids = [eos] if isinstance(eos, int) else list(eos)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = eos_token_ids[0]
    return model, tokenizer, eos_token_ids


def checkpoint_layers(model):
    """Recompute the activations of each layer in backward. transformers' own switch drops the cache."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


# ------------------------------------------------------------------------------------------ rollout


def sample(logits, temperature=1.0, top_p=1.0, top_k=0):
    """One token of each row from softmax(logits / temperature): (N, V) -> (N,). Temperature 0: the best.

    First a block of 128 tokens is drawn, then a token of it, which is the same distribution:
    `torch.multinomial` draws a random number for each weight that it is given, and for a vocabulary
    of 151,936 that took a third of a decoding step on a CPU.
    """
    if temperature == 0:
        return logits.argmax(-1)
    if temperature != 1:
        logits = _float(logits) / temperature
    if top_k:
        logits = TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1:
        logits = TopPLogitsWarper(top_p)(None, logits)
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

    prompt_ids, prompt_mask: (B, P), left-padded. C is at most `max_completion_length`; after a row's
    EOS stands `pad_token_id`. Nothing is read from the model's generation config. Needs `sample`.
    """
    mask, positions = prompt_mask.long(), (prompt_mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    forward = functools.partial(model, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits = forward(prompt_ids, attention_mask=mask, position_ids=positions).logits[
        :, -1
    ]  # (B, V)

    # Each prompt ran once; from here on each of its G completions is a row.
    cache.batch_repeat_interleave(num_generations)
    logits, mask, positions = (
        x.repeat_interleave(num_generations, 0) for x in (logits, mask, positions[:, -1:])
    )
    completion_ids = prompt_ids.new_full(
        (len(logits), max_completion_length), pad_token_id
    )  # (N, C)
    rows = torch.arange(len(logits), device=logits.device)  # those still being sampled
    eos = torch.tensor(eos_token_ids, device=logits.device)
    for length in range(1, max_completion_length + 1):
        next_ids = sample(logits, temperature, top_p, top_k)
        completion_ids[rows, length - 1] = next_ids
        unfinished = ~torch.isin(next_ids, eos)
        if length == max_completion_length or not unfinished.any():
            break
        if not unfinished.all():  # a finished row costs nothing from here on
            cache.batch_select_indices(unfinished)
            rows, next_ids, mask, positions = (
                x[unfinished] for x in (rows, next_ids, mask, positions)
            )
        mask, positions = F.pad(mask, (0, 1), value=1), positions + 1
        logits = forward(next_ids[:, None], attention_mask=mask, position_ids=positions).logits[
            :, -1
        ]
    return completion_ids[:, :length]


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
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>\d+)\s+)?(?P<top>{_DECIMAL})(?:\s*/\s*(?P<bottom>{_DECIMAL}))?"
    r"(?:\s*\*\s*10\^{?(?P<power>[-+]?\d{1,3})}?|[eE](?P<e_power>[-+]?\d{1,3}))?"
    r"\s*(?P<percent>%)?\s*(?P<unit>[A-Za-z]{2,}(?:[\s./-]+[A-Za-z]+)*\.?(?:\^{?[23]}?)?)?"
)
_NOT_UNITS = {"pi", "dozen", "hundred", "thousand", "million", "billion", "trillion"}
_SPELLINGS = {
    "-": "− –", "*": "× · \\times \\cdot", "/": "÷", "%": "\\%", ",": "{,}", "\\frac": "\\dfrac \\tfrac",
    "": "\\left \\right \\! \\, \\; \\: ^\\circ ^{\\circ} ° \\$ $ € £ \\( \\)",
}  # fmt: skip


def extract_answer(text):
    r"""The one answer of a text: the last \boxed{…}, else what follows the last ####, else the last
    number. None if there is none, or if the last box is not closed.

    >>> extract_answer(r"First \boxed{3}, so \boxed{\frac{1}{2}}."), extract_answer("so 7\n#### 1,234")
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
    return re.sub(r"^[A-Za-z]\w{0,9}(?:\([A-Za-z]\))?\s*=([^=]*)$", r"\1", text).strip()  # "x = 5"


def _number(text):
    """(exact value, whether a percent sign follows) if the text is one number, perhaps with a unit."""
    if len(text) > 400:  # no answer is that long, and thousands of digits cost time
        return None
    text = re.sub(r"\\frac{(-?[\d.,]+)}{([\d.,]+)}", r" \1/\2", _clean(text)).strip()
    match = _NUMBER.fullmatch(re.sub(r"^-\s+", "-", text))
    unit = re.findall("[a-z]+", (match["unit"] or "").lower()) if match else []
    if not match or (match["whole"] and not match["bottom"]) or _NOT_UNITS & {*unit}:
        return None
    top, bottom = (
        Fraction(digits.replace(",", "")) for digits in (match["top"], match["bottom"] or "1")
    )
    if bottom == 0:
        return None
    value = (int(match["whole"] or 0) + top / bottom) * (-1 if match["sign"] == "-" else 1)
    value *= Fraction(10) ** int(match["power"] or match["e_power"] or 0)
    return value, bool(match["percent"]) or unit == ["percent"]


def answers_match(answer, gold):
    r"""Whether two answers are the same: as exact rationals if both are numbers, else as LaTeX in one
    spelling. A percent sign that only one of them has may mean the number or a hundredth of it.

    >>> answers_match("$80,000.00", "80000"), answers_match(r"\frac{1}{2}", "0.5"), answers_match("1", "11")
    (True, True, False)
    """
    if not answer or not gold:
        return False
    if (a := _number(answer)) and (g := _number(gold)):
        (value, percent), (gold_value, gold_percent) = a, g
        scale = {(True, False): 100, (False, True): Fraction(1, 100)}.get(
            (percent, gold_percent), 1
        )
        return value in (gold_value, gold_value * scale)
    texts = [re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", _clean(text)) for text in (answer, gold)]
    texts = [re.sub(r"^\((\w)\)$", r"\1", text) for text in texts]
    a, g = (text.casefold() if text.isalpha() else text for text in texts)
    return a == g != ""


def gold_answer(answer):
    """The answer that the data gives: in a box, after ####, else the whole text. None if it is empty."""
    text = "" if answer is None else str(answer).strip()
    return extract_answer(text) if "\\boxed" in text or "####" in text else text or None


def accuracy_reward(prompts, completions, answer, **columns):
    """1.0 where the completion's one extracted answer is the data's `answer`, else 0.0.

    >>> accuracy_reward([""] * 3, ["2 + 12 = 14", "so 16", "10"], ["#### 14"] * 3)
    [1.0, 0.0, 0.0]
    """
    return [
        float(answers_match(extract_answer(c), gold_answer(a))) for c, a in zip(completions, answer)
    ]


def format_reward(prompts, completions, **columns):
    """1.0 for one `<think>…</think>` and then an answer, else 0.0 (DeepSeek-R1, arXiv:2501.12948,
    2.2.2). A prompt that ends in `<think>` has opened the block already.

    >>> format_reward(["", ""], ["<think>2 + 2</think>4", "4"])
    [1.0, 0.0]
    """
    scores = []
    for prompt, completion in zip(prompts, completions):
        text = "<think>" * prompt.rstrip().endswith("<think>") + completion.strip()
        once = text.startswith("<think>") and text.count("<think>") == text.count("</think>") == 1
        scores.append(float(once and text.partition("</think>")[2].strip() != ""))
    return scores


REWARDS = {"accuracy": accuracy_reward, "format": format_reward}


def load_rewards(specs):
    """{name: (function, weight)} of `NAME[=WEIGHT]` and `FILE.py:FUNCTION[=WEIGHT]`."""
    rewards = {}
    for spec in specs:
        target, weight = re.fullmatch(r"(.+?)(?:=([^=]*))?", spec, re.DOTALL).groups()
        path, _, name = target.rpartition(":")
        try:
            function = getattr(run_file(path), name) if path.endswith(".py") else REWARDS[name]
            rewards[name] = (function, 1.0 if weight is None else float(weight))
        except (KeyError, ValueError, AttributeError, OSError) as error:
            known = f"{', '.join(REWARDS)} or FILE.py:FUNCTION, with =WEIGHT if not 1"
            raise Error(f"--reward {spec}: {error}; it takes {known}") from None
    if len(rewards) < len(specs) or not all(
        math.isfinite(weight) for _, weight in rewards.values()
    ):
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
        raise Error(f"{path} failed: {error}") from None
    return module


def score(rewards, **columns):
    """Ask every reward function -> {name: (N,) float32}, NaN where it returned None: not its to judge.

    columns: `prompts`, `completions`, `completion_ids` and the data's other columns, each a list of N,
    which a function gets by name as it would from TRL. Raises `Error` for anything but N numbers.
    """
    scores = {}
    for name, (function, _) in rewards.items():
        try:
            values = list(function(**columns))
        except Exception as error:
            traceback.print_exc()
            raise Error(f"the reward {name} failed: {error!r}") from None
        judged = [value for value in values if value is not None]
        numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in judged)
        if len(values) != len(columns["completions"]) or not numbers:
            expected = f"{len(columns['completions'])} finite numbers (None: not judged)"
            raise Error(f"the reward {name} returned {str(values)[:200]}, not {expected}")
        scores[name] = torch.tensor([math.nan if value is None else value for value in values])
    if torch.stack([*scores.values()]).isnan().all(0).any():
        raise Error(f"a completion was judged by none of {', '.join(scores)}: all returned None")
    return scores


# --------------------------------------------------------------------------------------- advantages


def group_advantages(rewards, num_generations, scale_rewards="group", eps=1e-8):
    """(r - mean of its group) / (std + eps): rewards (N,) -> (N,). DeepSeekMath 4.1.2, outcome supervision.

    std is the unbiased one, of the "group", of the whole "batch", or "none" at all (Dr. GRPO,
    arXiv:2503.20783). Equal rewards give exactly 0. Raises ValueError unless G >= 2 divides N.

    >>> group_advantages(torch.tensor([1.0, 0, 0, 1, 0.1, 0.1, 0.1, 0.1]), 4)
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660,  0.0000,  0.0000,  0.0000,  0.0000])
    """
    if num_generations < 2 or len(rewards) % num_generations:
        raise ValueError(
            f"{len(rewards)} rewards do not make groups of {num_generations} (at least 2)"
        )
    groups = _float(rewards).view(-1, num_generations)  # (B, G)
    equal = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    # The float32 mean of equal numbers can be a bit off, and that bit over a std of 0 is not small.
    centred = (groups - groups.mean(1, keepdim=True)).masked_fill(equal, 0)
    scales = {"group": groups.std(1, keepdim=True) + eps, "batch": groups.std() + eps, "none": 1}
    return (centred / scales[scale_rewards]).view(-1)


# ---------------------------------------------------------------------------------------- log-probs


def _float(x: torch.Tensor) -> torch.Tensor:
    """At least float32: exponentials and long sums lose too much in half precision."""
    return x if x.dtype == torch.float64 else x.float()


def token_logprobs(
    model, prompt_ids, prompt_mask, completion_ids, completion_mask, temperature=1.0, fast=True
):
    """log-prob of each completion token given all before it -> (N, C) float32, 0 where masked.

    prompt_ids, prompt_mask: (B, P), left-padded; completion_ids, completion_mask: (N, C), rows
    b*G … b*G+G-1 continue prompt b. Logits are divided by `temperature`, as in sampling. `fast` runs
    each prompt once and its completions on G copies of its key-value cache, through which gradients
    flow, and never holds the (N, C, V) logits; else this is the model's plain forward
    (`fast_path_holds` tells). Needs `PromptCache`, `LogProbs` and `_float` where it is pasted.
    """
    num_generations, length = len(completion_ids) // len(prompt_ids), completion_ids.shape[1]
    rows = torch.arange(len(prompt_ids), device=prompt_ids.device).repeat_interleave(
        num_generations
    )
    mask = F.pad(prompt_mask.long()[rows], (0, length), value=1)  # (N, P + C)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # (N, P + C)
    ids = completion_ids[completion_mask]  # (M,): padding costs nothing in the output layer

    if not fast:
        inputs = dict(attention_mask=mask, position_ids=positions, use_cache=False)
        logits = model(torch.cat([prompt_ids[rows], completion_ids], 1), **inputs).logits
        logits = logits[:, -length - 1 : -1][
            completion_mask
        ]  # each token is predicted by the one before
        logp = (_float(logits) / temperature).log_softmax(1).gather(1, ids[:, None])[:, 0]
    else:
        cache = PromptCache(config=model.config)
        inputs = dict(
            attention_mask=prompt_mask.long(), position_ids=(prompt_mask.cumsum(1) - 1).clamp(min=0)
        )
        hidden = model.base_model(prompt_ids, past_key_values=cache, use_cache=True, **inputs)[0]
        hidden = hidden[
            rows, -1:
        ]  # (N, 1, H): the last prompt token predicts the first of each completion
        if length > 1:
            cache = cache.repeat(num_generations)
            inputs = dict(attention_mask=mask[:, :-1], position_ids=positions[:, -length:-1])
            rest = model.base_model(
                completion_ids[:, :-1], past_key_values=cache, use_cache=True, **inputs
            )[0]
            hidden = torch.cat([hidden, rest], 1)  # (N, C, H)
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

    Goes through the vocabulary a chunk at a time, so that the (M, V) logits never stand in memory and
    each weight's gradient is one sum over all tokens. Backward computes the logits again, with
    d logp / d logits = (onehot(id) - softmax(logits / temperature)) / temperature.
    """

    CHUNK = 2**22  # logits at once: 16 MiB in float32

    @staticmethod
    def chunks(hidden, weight, ids, temperature):
        """(columns, logits (M, columns), rows whose id is among them, its column) of each chunk."""
        size = max(1, LogProbs.CHUNK // len(ids))
        for start in range(0, len(weight), size):
            w = weight[start : start + size]
            logits = _float(hidden @ w.t()).div_(temperature)
            here = ((ids >= start) & (ids < start + size)).nonzero()[:, 0]
            yield slice(start, start + size), logits, here, ids[here] - start

    @staticmethod
    def forward(ctx, hidden, weight, ids, temperature):
        log_z, chosen = 2 * [torch.full((len(ids),), -math.inf, device=ids.device)]
        for _, logits, here, column in LogProbs.chunks(hidden, weight, ids, temperature):
            log_z = torch.logaddexp(log_z, logits.logsumexp(1))
            chosen = chosen.to(logits.dtype).index_put((here,), logits[here, column])
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

    Wrong log-probs are never an option, so every model is asked, on a few tokens: not all logits are
    head(hidden) (Gemma 2 caps them, Cohere scales them), not every layer bears a shared cache.
    """
    vocabulary = min(1000, model.config.get_text_config().vocab_size)
    ids = torch.randint(vocabulary, (6, 5), generator=torch.Generator().manual_seed(0)).to(
        model.device
    )
    prompt_mask = torch.ones_like(ids[:2], dtype=torch.bool)
    prompt_mask[0, :2] = False
    head, results, products = model.get_output_embeddings(), [], []
    try:
        for fast in (False, True):
            logp = token_logprobs(
                model, ids[:2], prompt_mask, ids[2:], torch.ones_like(ids[2:]) > 0, fast=fast
            )
            results.append(
                (logp, *torch.autograd.grad(logp.sum(), model.get_input_embeddings().weight))
            )
        # On inputs so large that a cap shows even in a model whose logits are small.
        hooks = [head.register_forward_pre_hook(lambda module, inputs: (1000 * inputs[0],))]
        hooks += [
            head.register_forward_hook(lambda module, inputs, output: products.append(output))
        ]
        with torch.no_grad():
            logits = model(ids).logits
        [hook.remove() for hook in hooks]
    except Exception:  # whatever a model raises that has no such cache or no such head
        return False
    tolerance = 0.05 if model.dtype in (torch.bfloat16, torch.float16) else 1e-4
    same = [(f - p).norm() <= tolerance * p.norm() for p, f in zip(*results)]
    return (
        all(same)
        and getattr(head, "bias", 0) is None
        and torch.equal(logits.float(), products[0].float())
    )


# --------------------------------------------------------------------------------------------- loss


def masked_mean(x, mask, dim=None):
    """Mean of x where mask is true, over all of it or along `dim`, which is kept; 0 where none is."""
    dims = {} if dim is None else dict(dim=dim, keepdim=True)
    return (x * mask).sum(**dims) / mask.sum(**dims).clamp(min=1)


def kl_k3(logp, ref_logp):
    """exp(d) - d - 1 with d = ref_logp - logp, never negative, unbiased for KL(policy || reference).

    (N, C) -> (N, C) in nats: DeepSeekMath eq. 4, Schulman's k3 (joschu.net/blog/kl-approx.html).

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
        raise ValueError(
            f"importance_sampling_level is token or sequence, not {importance_sampling_level}"
        )
    return log_ratio.exp()


def clipped_surrogate(
    logp, old_logp, advantages, epsilon=0.2, epsilon_high=None, mask=None, importance_sampling_level="token"
):  # fmt: skip
    """min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A), (N, C): what is to be maximised.

    logp, old_logp: (N, C); advantages: (N,) or (N, C); `mask` matters to the "sequence" ratio alone.
    PPO (arXiv:1707.06347) eq. 7 as in DeepSeekMath eq. 3; `epsilon_high` is DAPO's clip-higher
    (arXiv:2503.14476). Needs `importance_ratio`, `masked_mean` and `_float` where it is pasted.

    >>> logp, old_logp = torch.tensor([[0.7], [0.7]]).log(), torch.tensor([[0.5], [0.5]]).log()
    >>> clipped_surrogate(logp, old_logp, torch.tensor([0.9354, -0.9354])).flatten()
    tensor([ 1.1225, -1.3096])
    """
    mask = torch.ones_like(logp) if mask is None else mask
    ratio = importance_ratio(logp, old_logp, mask, importance_sampling_level)
    advantages = advantages.view(len(logp), -1)  # (N, 1) or (N, C)
    clipped = ratio.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    return torch.minimum(ratio * advantages, clipped * advantages)


def grpo_loss(
    logp, old_logp, ref_logp, advantages, mask, *, epsilon=0.2, epsilon_high=None, beta=0.04,
    loss_type="grpo", importance_sampling_level="token", max_completion_length=None,
    num_sequences=None, num_tokens=None,
):  # fmt: skip
    """(scalar to minimise, metrics): DeepSeekMath eq. 3. Metrics are detached means over tokens.

    logp, old_logp, ref_logp: (N, C) in nats, mask: (N, C) bool, advantages: (N,) or (N, C). `old_logp`
    None: the policy has not moved, the ratio is 1. `ref_logp` None: no KL term. What stands under the
    mask reaches neither loss nor gradient. -surrogate + beta k3 of each token is averaged by `loss_type`:
        grpo     mean over sequences of the mean over their tokens
        dapo     sum over tokens / num_tokens
        dr_grpo  sum over tokens / (num_sequences * max_completion_length, if None: C)
    `num_sequences` and `num_tokens` are totals of the optimizer batch (None: this call is all of it), so
    that the losses of its micro-batches add up to its loss. Raises ValueError for an unknown type.
    Needs `clipped_surrogate`, `importance_ratio`, `kl_k3`, `masked_mean`, `_float` where it is pasted.
    """
    mask = mask.bool()
    logp, old_logp, ref_logp = (
        x if x is None else x.masked_fill(~mask, 0) for x in (logp, old_logp, ref_logp)
    )
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
        raise ValueError(f"loss_type is grpo, dapo or dr_grpo, not {loss_type}")

    with torch.no_grad():
        ratio, advantages = (
            importance_ratio(logp, old_logp, mask, level),
            advantages.view(len(logp), -1),
        )
        clipped = (ratio > 1 + high) & (advantages > 0) | (ratio < 1 - epsilon) & (advantages < 0)
        metrics = dict(kl=kl.detach(), ratio_mean=ratio, clip_fraction=clipped.float())
        return loss, {name: masked_mean(value, mask) for name, value in metrics.items()}


# ------------------------------------------------------------------------------------------- update


class MasterAdamW:
    """AdamW on float32 master weights, whatever dtype the model computes in.

    bfloat16 keeps 8 bits of a weight, so that it does not notice a change of less than 1/512: at a
    learning rate of 1e-6 nearly all updates would vanish. A float32 weight is its own master.
    """

    SLICE = 2**22  # weights updated at once: no float32 copy of the whole gradient is ever made

    def __init__(self, model, weight_decay=0.0):
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.masters = [param.detach().float() for param in self.params]
        self.moments = [(torch.zeros_like(m), torch.zeros_like(m)) for m in self.masters]
        self.num_steps = 0
        self.options = dict(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=weight_decay)
        self.options |= dict(amsgrad=False, maximize=False, fused=True)

    def step(self, learning_rate, max_grad_norm=math.inf):
        """Clip the gradient to `max_grad_norm`, update, drop the gradient -> its norm before.

        If the norm is not finite, raises `Error` and leaves all weights as they were.
        """
        gradients = [param.grad for param in self.params if param.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).item()
        if not math.isfinite(norm):
            raise Error(
                f"the gradient's norm is {norm}; the weights are as they were before this step"
            )
        scale = min(1.0, max_grad_norm / (norm + 1e-6))
        for param, master, moments in zip(self.params, self.masters, self.moments):
            if param.grad is None:
                continue
            tensors = [
                x.view(-1).split(self.SLICE) for x in (param.data, param.grad, master, *moments)
            ]
            for weights, gradient, masters, first, second in zip(*tensors):
                count = torch.tensor(float(self.num_steps), device=master.device)
                state = [masters], [gradient.float().mul_(scale)], [first], [second], [], [count]
                adamw(*state, lr=learning_rate, **self.options)
                weights.copy_(masters)
            param.grad = None
        self.num_steps += 1
        return norm


def cut_micro_batches(prompt_lengths, completion_lengths, num_generations, max_tokens):
    """Cut B groups into micro-batches of at most `max_tokens` padded tokens -> [(prompts, rows), …].

    prompt_lengths: (B,), completion_lengths: (N,). Each prompt of a micro-batch stands before equally
    many rows: its whole group or, where that would be too long, an equal part of it. Sorted by length,
    so that little is padding. One completion alone may exceed the budget.
    """
    worst = int(prompt_lengths.max()), int(completion_lengths.max())
    sizes = [size for size in range(1, num_generations + 1) if num_generations % size == 0]
    size = max([size for size in sizes if worst[0] + size * worst[1] <= max_tokens], default=1)
    order = completion_lengths.view(-1, num_generations).argsort(
        dim=1, descending=True, stable=True
    )
    rows = order + torch.arange(0, len(completion_lengths), num_generations)[:, None]  # (B, G)
    parts = rows.view(-1, size)
    parts = parts[completion_lengths[parts[:, 0]].argsort(descending=True, stable=True)].tolist()
    prompt_lengths, completion_lengths = prompt_lengths.tolist(), completion_lengths.tolist()

    micro_batches = [[]]
    for part in parts:
        grown = micro_batches[-1] + [part]
        prompt_length = max(prompt_lengths[row[0] // num_generations] for row in grown)
        if len(grown) * (prompt_length + size * completion_lengths[grown[0][0]]) <= max_tokens:
            micro_batches[-1] = grown
        else:
            micro_batches.append([part])
    return [
        (
            torch.tensor([part[0] for part in parts]) // num_generations,
            torch.tensor(parts).flatten(),
        )
        for parts in micro_batches
        if parts
    ]


def crop(prompt_ids, prompt_mask, completion_ids, mask):
    """The same four without the columns that are padding in every row."""
    left, right = prompt_mask.any(0), mask.any(0)
    return prompt_ids[:, left], prompt_mask[:, left], completion_ids[:, right], mask[:, right]


def update(policy, reference, optimizer, config, learning_rate, batch, advantages, fast):
    """num_iterations (mu) AdamW steps on one rollout -> metrics, means over its tokens and the steps.

    batch: prompt_ids and prompt_mask (B, P), completion_ids and mask (N, C); advantages: (N,) or (N, C).
    The old log-probs of all later steps are those of the first, before any weight moved; with one step
    they are the new ones themselves. `reference` None: no KL term.
    """
    prompt_ids, prompt_mask, completion_ids, mask = batch
    size = config.num_generations
    live = torch.arange(len(prompt_ids))
    if reference is None:  # then a group without advantages has no gradient at all
        some = advantages.view(len(prompt_ids), -1).any(1).cpu()
        live = live[some] if some.any() else live[:1]
    lengths = mask.sum(1).cpu().view(-1, size)[live].flatten()
    micro_batches = cut_micro_batches(
        prompt_mask.sum(1).cpu()[live], lengths, size, config.micro_batch_tokens
    )
    for (
        param
    ) in optimizer.params:  # a sum of bfloat16 gradients in bfloat16 would lose the small ones
        param.grad_dtype = torch.float32 if len(micro_batches) > 1 else param.dtype

    logprobs = functools.partial(token_logprobs, temperature=config.temperature, fast=fast)
    old_logps, ref_logps, totals, num_tokens = {}, {}, {}, 0
    for iteration in range(config.num_iterations):
        for i, (prompts, rows) in enumerate(micro_batches):
            prompts, rows = live[prompts], live[rows // size] * size + rows % size
            inputs = crop(
                prompt_ids[prompts], prompt_mask[prompts], completion_ids[rows], mask[rows]
            )
            if iteration == 0 and reference is not None:
                with torch.no_grad():
                    ref_logps[i] = logprobs(reference, *inputs)
            logp = logprobs(policy, *inputs)
            if iteration == 0 and config.num_iterations > 1:
                old_logps[i] = logp.detach()
            row_advantages = (
                advantages[rows] if advantages.dim() == 1 else advantages[rows, : logp.shape[1]]
            )
            loss, metrics = grpo_loss(
                logp, old_logps.get(i), ref_logps.get(i), row_advantages, inputs[-1],
                epsilon=config.epsilon, epsilon_high=config.epsilon_high, beta=config.beta,
                loss_type=config.loss_type, importance_sampling_level=config.importance_sampling_level,
                max_completion_length=config.max_completion_length,
                num_sequences=len(mask), num_tokens=mask.sum(),
            )  # fmt: skip
            loss.backward()
            row_tokens = inputs[-1].sum()
            num_tokens += row_tokens
            totals["loss"] = totals.get("loss", 0) + loss.detach()
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0) + value * row_tokens
        grad_norm = optimizer.step(learning_rate, config.max_grad_norm)
    loss = totals.pop("loss").item() / config.num_iterations
    metrics = {name: (total / num_tokens).item() for name, total in totals.items()}
    return dict(loss=loss, **metrics, grad_norm=grad_norm)


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
    reference: torch.nn.Module | None = None
    train_rows: list[dict] = dataclasses.field(default_factory=list)
    eval_rows: list[dict] = dataclasses.field(default_factory=list)
    output_dir: Path | None = None

    def log(self, name, record):
        """Append a record to a JSONL file of the run's folder."""
        with open(self.output_dir / name, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")


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
        raise Error(
            f"{len(run.train_rows)} prompts, fewer than --prompts-per-step {config.prompts_per_step}"
        )
    longest = max(len(row["ids"]) for row in run.train_rows + run.eval_rows)
    positions = (
        getattr(policy.config.get_text_config(), "max_position_embeddings", None) or math.inf
    )
    if longest + config.max_completion_length > positions:
        need = (
            f"a prompt of {longest} tokens + --max-completion-length {config.max_completion_length}"
        )
        raise Error(f"{need} exceed the {positions} positions of {config.model}")
    if config.gradient_checkpointing:
        checkpoint_layers(policy)
    name = f"{Path(config.model).name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run.output_dir = Path(config.output_dir or Path("runs") / name)
    try:
        run.output_dir.mkdir(parents=True, exist_ok=True)
        if (run.output_dir / "config.json").exists():
            raise Error(f"--output-dir {run.output_dir} holds a run; name another folder")
        (run.output_dir / "config.json").write_text(
            json.dumps(dataclasses.asdict(config), indent=2)
        )
    except OSError as error:
        raise Error(f"cannot write to --output-dir: {error}") from None
    return run


def rollout(run, rows, num_generations, temperature):
    """Completions of rows -> (prompt_ids, prompt_mask (B, P), completion_ids, mask (N, C)), their texts."""
    config, pad_token_id = run.config, run.tokenizer.pad_token_id
    prompt_ids, prompt_mask = pad([row["ids"] for row in rows], pad_token_id, "left", run.device)
    completion_ids = generate(
        run.policy, prompt_ids, prompt_mask, num_generations, config.max_completion_length,
        run.eos_token_ids, pad_token_id, temperature, config.top_p, config.top_k,
    )  # fmt: skip
    mask = completion_mask(completion_ids, run.eos_token_ids)
    return prompt_ids, prompt_mask, completion_ids, mask


def judge(run, rows, completion_ids, mask):
    """Texts (N,) of the completions of rows (B,), {reward: (N,) scores}, and their weighted sum (N,)."""
    rows = [row for row in rows for _ in range(len(mask) // len(rows))]
    ids = [
        row_ids[row_mask].tolist() for row_ids, row_mask in zip(completion_ids.cpu(), mask.cpu())
    ]
    spoken = [row_ids[: -1 if row_ids[-1] in run.eos_token_ids else None] for row_ids in ids]
    texts = run.tokenizer.batch_decode(spoken, skip_special_tokens=True)
    columns = {
        name: [row.get(name) for row in rows] for name in {name: 0 for row in rows for name in row}
    }
    columns |= dict(prompts=columns.pop("text"), completions=texts, completion_ids=ids)
    columns = {name: values for name, values in columns.items() if name not in ("prompt", "ids")}
    scores = score(run.rewards, **columns)
    return (
        texts,
        scores,
        sum(scores[name].nan_to_num() * weight for name, (_, weight) in run.rewards.items()),
    )


def evaluate(run, step):
    """Mean reward, and mean of each score, of greedy completions of the held-out prompts; logged."""
    size, parts = run.config.prompts_per_step * run.config.num_generations, []
    for start in tqdm(range(0, len(run.eval_rows), size), "evaluating", leave=False):
        rows = run.eval_rows[start : start + size]
        *_, completion_ids, mask = rollout(run, rows, 1, temperature=0)
        _, scores, rewards = judge(run, rows, completion_ids, mask)
        parts.append(dict(reward=rewards, **scores))
    means = {
        f"eval/{name}": torch.cat([part[name] for part in parts]).nanmean().item()
        for name in parts[0]
    }
    run.log("metrics.jsonl", dict(step=step, **means))
    return means


def sft(run):
    """Supervised steps on the rows' solutions, before GRPO: the loss is on the solution and its EOS."""
    config, optimizer = run.config, MasterAdamW(run.policy)
    bar = tqdm(range(1, config.sft_steps + 1), "supervised")
    for step in bar:
        size = config.prompts_per_step * config.num_generations
        rows = prompt_batch(run.train_rows, step, size, config.seed)
        solutions = [str(row.get("solution") or row["answer"]) for row in rows]
        ids = run.tokenizer(solutions, add_special_tokens=False)["input_ids"]
        prompt_ids, prompt_mask = pad([row["ids"] for row in rows], 0, "left", run.device)
        completion_ids, mask = pad([i + run.eos_token_ids[:1] for i in ids], 0, "right", run.device)
        lengths = prompt_mask.sum(1).cpu(), mask.sum(1).cpu()
        total = 0.0
        for i, _ in cut_micro_batches(*lengths, 1, config.micro_batch_tokens):
            inputs = crop(prompt_ids[i], prompt_mask[i], completion_ids[i], mask[i])
            loss = -token_logprobs(run.policy, *inputs, fast=run.fast).sum() / mask.sum()
            loss.backward()
            total += loss.item()
        optimizer.step(config.sft_learning_rate, config.max_grad_norm)
        bar.set_postfix(loss=f"{total:.3f}")


def train(config):
    """GRPO from the first prompt to the last checkpoint."""
    run = set_up(config)
    shape = f"{sum(p.numel() for p in run.policy.parameters()):,} parameters, {run.policy.dtype}"
    print(
        f"{config.model} ({shape}) on {run.device}, {len(run.train_rows)} prompts, {len(run.eval_rows)} held out"
    )
    print(f"the first prompt, as the model sees it: {run.train_rows[0]['text']!r}")
    if config.sft_steps:
        sft(run)
    optimizer = MasterAdamW(run.policy, config.weight_decay)
    run.reference = copy.deepcopy(run.policy).requires_grad_(False) if config.beta else None
    group, history = config.num_generations, []
    evaluations = [evaluate(run, 0)] if config.eval_every else []
    bar = tqdm(range(1, config.max_steps + 1), "training")
    for step in bar:
        start = time.perf_counter()
        # 1. take B prompts
        rows = prompt_batch(run.train_rows, step, config.prompts_per_step, config.seed)
        # 2. sample G completions of each from the current policy
        batch = rollout(run, rows, group, config.temperature)
        # 3. score them
        texts, scores, rewards = judge(run, rows, *batch[2:])
        # 4. normalise the scores within each group
        advantages = group_advantages(rewards, group, config.scale_rewards).to(run.device)
        middle = time.perf_counter()
        # 5. ascend the clipped surrogate, held to the reference
        learning_rate = config.learning_rate * min(1.0, step / max(1, config.warmup_steps))
        metrics = update(
            run.policy, run.reference, optimizer, config, learning_rate, batch, advantages, run.fast
        )
        end = time.perf_counter()
        # 6. log, look, evaluate
        mask, groups = batch[3], rewards.view(-1, group)
        lengths, finished = (
            mask.sum(1).float(),
            torch.isin(batch[2], torch.tensor(run.eos_token_ids).to(batch[2])).any(1),
        )
        record = dict(
            step=step, reward=rewards.mean().item(), reward_std=groups.std(1).mean().item(),
            **{f"rewards/{name}": values.nanmean().item() for name, values in scores.items()},
            **metrics, completion_length=lengths.mean().item(),
            truncated_fraction=1 - finished.float().mean().item(),
            zero_std_fraction=(groups.amax(1) == groups.amin(1)).float().mean().item(),
            learning_rate=learning_rate, num_tokens=int(mask.sum()), rollout_seconds=middle - start,
            update_seconds=end - middle, step_seconds=end - start, peak_memory_gb=peak_memory_gb(),
        )  # fmt: skip
        run.log("metrics.jsonl", record)
        history.append(record["reward"])
        bar.set_postfix(
            reward=f"{record['reward']:.3f}",
            kl=f"{metrics['kl']:.4f}",
            length=f"{record['completion_length']:.0f}",
        )
        if config.samples_every and (step % config.samples_every == 0 or step == 1):
            show_samples(run, step, rows, texts, rewards)
        if config.eval_every and (step % config.eval_every == 0 or step == config.max_steps):
            evaluations.append(evaluate(run, step))
    save_checkpoint(run, config.max_steps)
    conclude(run, evaluations, history)
    return evaluations[-1] if evaluations else {}


def peak_memory_gb():
    """The most memory in use so far, in GiB: of the GPU's allocator, else resident on the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**30 if sys.platform == "darwin" else 2**20
    )


def show_samples(run, step, rows, texts, rewards, count=3):
    """Print the first completions of as many prompts, with their rewards."""
    group = run.config.num_generations
    for i, row in enumerate(rows[:count]):
        text = f"step {step}  reward {rewards[i * group]:g}  {row['text'][-80:]!r} -> {texts[i * group][:300]!r}"
        tqdm.write(text)


def save_checkpoint(run, step):
    """OUTPUT_DIR/checkpoint-<step>, a folder that `from_pretrained` loads."""
    path = run.output_dir / f"checkpoint-{step}"
    run.policy.save_pretrained(path)
    run.tokenizer.save_pretrained(path)
    print(f"saved {path}")


def conclude(run, evaluations, history):
    """What happened, in two lines."""
    if evaluations:
        before, after = (
            f"{100 * e['eval/reward']:.0f} %" for e in (evaluations[0], evaluations[-1])
        )
        print(
            f"greedy reward on {len(run.eval_rows)} held-out prompts: {before} before, {after} after training"
        )
    if history:
        width = max(1, math.ceil(len(history) / 60))
        means = [
            sum(part) / len(part)
            for part in (history[i : i + width] for i in range(0, len(history), width))
        ]
        low, high = min(means), max(means)
        bars = "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / (high - low or 1))] for mean in means)
        print(f"mean sampled reward, step by step: {means[0]:.2f} {bars} {means[-1]:.2f}")


# --------------------------------------------------------------------------- built-in task and model


def arithmetic(config):
    """Rows of built-in arithmetic. For the tiny model: a number below 100 plus a digit, with solutions
    of which most are wrong, so that the supervised steps leave it something to learn."""
    rng = random.Random(config.seed)
    if config.model == "tiny":
        rows = []
        for a, b in rng.sample([(a, b) for a in range(100) for b in range(10)], 1000):
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

    return [
        dict(prompt=question, answer=str(answer))
        for question, answer in (problem() for _ in range(5000))
    ]


def tiny_model(seed, dtype):
    """A 2-layer Qwen2 with 134,000 random weights, and a tokenizer with a token for each character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<eos>", "<unk>", *"0123456789+-*/=()<>#.,: \nabcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, "<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Split("", "isolated"),
        decoders.Fuse(),
    )
    special = dict(eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    shape = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(num_key_value_heads=4, tie_word_embeddings=True, initializer_range=0.06)
    shape |= dict(
        vocab_size=len(tokens), max_position_embeddings=256, eos_token_id=0, pad_token_id=0
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(
        transformers.Qwen2Config(**shape), dtype=dtype
    ), tokenizer


def optional(package, purpose):
    """An optional package, or an `Error` that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise Error(f"{purpose} needs the package {package}: pip install {package}") from None


def main():
    """The command line."""
    try:
        train(parse_args())
    except Error as error:
        sys.exit(f"grpo.py: {error}")


if __name__ == "__main__":
    main()
