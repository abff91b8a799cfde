"""The speech LM of SparkTTS as a plain transformers loop: what every engine is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM


@dataclass(frozen=True, slots=True)
class Trace:
    """One sequence: ids with the end token when it came, and the states (behind the final norm) that made
    each of them."""

    ids: list[int]
    #: float32 [steps, hidden].
    hidden: Tensor
    #: float32 [steps, vocabulary].
    logits: Tensor


class OracleLm:
    """Greedy decoding, one sequence at a time, with a KV cache and nothing else."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = Qwen2ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.eos = int(self.model.config.eos_token_id)  # pyright: ignore[reportArgumentType]

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_tokens: int) -> Trace:
        ids, hidden, logits = [], [], []
        step, cache = torch.tensor([list(prompt)]), None
        while len(ids) < max_tokens:
            out = self.model.model(input_ids=step, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            hidden.append(out.last_hidden_state[0, -1])
            logits.append(self.model.lm_head(hidden[-1]))
            ids.append(int(logits[-1].argmax()))
            if ids[-1] == self.eos:
                break
            step = torch.tensor([[ids[-1]]])
        return Trace(ids, torch.stack(hidden), torch.stack(logits).float())

    @torch.inference_mode()
    def penalized(
        self, prompt: Sequence[int], max_tokens: int, penalty: float, ends: Sequence[int]
    ) -> list[int]:
        """The likeliest ids with a repetition penalty, which counts those of the prompt, up to an end."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            repetition_penalty=penalty,
            max_new_tokens=max_tokens,
            eos_token_id=list(ends),
            pad_token_id=self.eos,
        )
        made = out[0, len(prompt) :].tolist()
        return made[:-1] if made[-1] in ends else made

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        sample: bool = True,
        ignore_end: bool = False,
    ) -> list[list[int]]:
        """`generate` over a left-padded batch, as the published code would batch: the ids of each row up
        to its end."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[self.eos] * (longest - len(row)) + list(row) for row in prompts])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
        device = self.model.device
        settings = (
            {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}
            if sample
            else {"do_sample": False}
        )
        out = self.model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens if ignore_end else None,
            pad_token_id=self.eos,
            **settings,
        )
        rows = out[:, longest:].tolist()
        return [row[: row.index(self.eos)] if self.eos in row else row for row in rows]
