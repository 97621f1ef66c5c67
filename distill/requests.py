"""Prompts as the target's token ids, fitted into its context; how they are to be answered, and what comes back."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distill.prompts import Prompt
from pairing.errors import InputError
from pairing.source import load_config, load_tokenizer


@dataclass(frozen=True)
class Sampling:
    max_tokens: int
    temperature: float  # 0 is greedy; no top-p or top-k: the recorded distribution is the one that was drawn from
    top_logprobs: int  # K
    seed: int


@dataclass(frozen=True)
class Request:
    prompt: Prompt
    prompt_ids: list[int]  # of the whole chat up to where the answer begins
    later: tuple[dict[str, str], ...] = ()  # the user's messages still to come, each to be answered too
    turn: int = 0  # which answer of the chat this one is

    @property
    def key(self) -> str:
        """A name of its own for every answer, from which its seed is made."""
        return f"{self.prompt.id} {self.turn}" if self.turn else self.prompt.id


@dataclass(frozen=True)
class Completion:
    """What the target said to a request: `ids` [n] with the ending token where it ended by itself. K ids of the head."""

    request: Request
    ids: list[int]
    finish_reason: str  # "stop" or "length"
    head_ids_NK: NDArray[np.int32]
    head_logprobs_NK: NDArray[np.float32]


@dataclass(frozen=True)
class Failed:
    """A request that no try will answer, where the others may still be. `reason`: one line that names the prompt."""

    request: Request
    reason: str


# Answers the requests that wait, in any order, each as soon as it is finished. Who takes a completion may put more into the
# deque (the chat's next turn) before it asks for the next one.
Answerer = Callable[[deque[Request], Sampling], Iterator[Completion | Failed]]


def tokenize(prompts: Sequence[Prompt], tokenizer: Any, target: str, every_turn: bool = False) -> list[Request]:
    """Each chat through the target's own template, up to where its answer begins; where every turn is to be answered (the
    prompts then hold the user's messages alone), up to where the first one does.

    Raises InputError where the target has no template, or its template refuses a chat.
    """
    require_template(tokenizer, target)
    requests = []
    for one in prompts:
        users = [at for at, message in enumerate(one.messages) if message["role"] == "user"]
        before = users[0] + 1 if every_turn else len(one.messages)
        ids = render(tokenizer, one.messages[:before], one.id)
        requests.append(Request(one, ids, tuple(one.messages[before:])))
    return requests


def require_template(tokenizer: Any, target: str) -> None:
    if not tokenizer.chat_template:
        raise InputError(f"{target}: no chat template, so it cannot answer chats: give an instruction-tuned target")


def render(tokenizer: Any, messages: Sequence[dict[str, str]], id_: str, answer_next: bool = True) -> list[int]:
    """The chat's token ids in the template of `tokenizer`, with the beginning of an answer where one comes next.

    Raises InputError, naming the prompt, where the template refuses the chat.
    """
    try:
        return list(
            tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=answer_next, tokenize=True, return_dict=False
            )
        )
    except Exception as e:  # templates raise what they like
        raise InputError(
            f"prompt {id_}: the target's chat template refuses it ({(str(e) or type(e).__name__).splitlines()[0]})"
        ) from e


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
    return load_config(folder).get_text_config()


def ending_ids(folder: Path) -> list[int]:
    """Every id that ends an answer: eos of generation config (one or a list), of config and of tokenizer."""
    from transformers import GenerationConfig

    found = [text_config(folder).eos_token_id, load_tokenizer(folder).eos_token_id]
    if (folder / "generation_config.json").is_file():
        found.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    return sorted({id_ for ids in found if ids is not None for id_ in (ids if isinstance(ids, list) else [ids])})


def request_seed(seed: int, key: str) -> int:
    """A seed per answer, so that what is drawn does not depend on the batch or on where a run was stopped."""
    return int.from_bytes(hashlib.sha256(f"{seed} {key}".encode()).digest()[:4], "big")


def dtype() -> str:
    """The type in which the target answers. Without native bfloat16, as on most CPUs, float32 is the faster one."""
    return "bfloat16" if torch.cuda.is_available() else "float32"
