"""Prompts as the target's token ids, fitted into its context; and how they are to be answered."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distill.answers import Answer
from distill.prompts import Prompt
from pairing.errors import InputError


@dataclass(frozen=True)
class Sampling:
    max_tokens: int
    temperature: float  # 0 is greedy; no top-p or top-k: the recorded distribution is the one that was drawn from
    top_logprobs: int  # K
    seed: int


@dataclass(frozen=True)
class Request:
    prompt: Prompt
    prompt_ids: list[int]


# Answers requests in any order, each as soon as it is finished.
Answerer = Callable[[Sequence[Request], Sampling], Iterator[Answer]]


def one_answer(
    request: Request,
    ids: list[int],
    finish_reason: str,
    head_ids_NK: NDArray[np.int32],
    head_logprobs_NK: NDArray[np.float32],
) -> Answer:
    """The row of a request and the `ids` that answer it."""
    start = len(request.prompt_ids)
    spans = [(start, start + len(ids))]
    return Answer(request.prompt, request.prompt_ids + ids, spans, finish_reason, head_ids_NK, head_logprobs_NK)


def tokenize(prompts: Sequence[Prompt], tokenizer: Any, target: str) -> list[Request]:
    """Each chat through the target's own template, up to where its answer begins.

    Raises InputError where the target has no template, or its template refuses a chat.
    """
    if not tokenizer.chat_template:
        raise InputError(f"{target}: no chat template, so it cannot answer chats: give an instruction-tuned target")
    requests = []
    for one in prompts:
        try:
            ids = tokenizer.apply_chat_template(
                one.messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as e:  # templates raise what they like
            raise InputError(f"prompt {one.id}: {target}'s chat template refuses it ({str(e).splitlines()[0]})") from e
        requests.append(Request(one, list(ids)))
    return requests


def require_fit(requests: Sequence[Request], max_tokens: int, context: int | None, name: str) -> None:
    """Raises InputError where a prompt and its longest answer do not fit into the context."""
    long = [r for r in requests if context is not None and len(r.prompt_ids) + max_tokens > context]
    if long:
        raise InputError(
            f"{name}: {len(long)} of {len(requests)} prompts are longer than the context of {context} tokens: "
            f"the first is {long[0].prompt.id} with {len(long[0].prompt_ids)} tokens and max_tokens={max_tokens}: "
            "shorten these or leave them out, or lower max_tokens"
        )


def text_config(folder: Path) -> Any:
    """The language model's config: `vocab_size` rows, `max_position_embeddings`, layer and head counts."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()


def ending_ids(folder: Path) -> list[int]:
    """Every id that ends an answer: eos of generation config (one or a list), of config and of tokenizer."""
    from transformers import AutoTokenizer, GenerationConfig

    found = [
        text_config(folder).eos_token_id,
        AutoTokenizer.from_pretrained(folder, local_files_only=True).eos_token_id,
    ]
    if (folder / "generation_config.json").is_file():
        found.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    return sorted({id_ for ids in found if ids is not None for id_ in (ids if isinstance(ids, list) else [ids])})


def request_seed(seed: int, prompt_id: str) -> int:
    """A seed per request, so that what is drawn does not depend on the batch or on where a run was stopped."""
    return int.from_bytes(hashlib.sha256(f"{seed} {prompt_id}".encode()).digest()[:4], "big")


def dtype() -> str:
    """The type in which the target answers. Without native bfloat16, as on most CPUs, float32 is the faster one."""
    return "bfloat16" if torch.cuda.is_available() else "float32"
