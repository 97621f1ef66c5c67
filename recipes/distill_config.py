"""What `draftsmith distill` can be asked for: its keys, their defaults, and which of them go together."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from distill.fake_quantize import Format
from distill.objective import Weight
from distill.student import Trainable
from recipes.config import Strict

Points = float | list[tuple[float, float]]


class LossWeights(Strict):
    """A weight, or points [progress, weight]: [[0, 1], [0.3, 1], [0.4, 0]] falls from 1 to 0 in the second third."""

    forward_kl: Points | None = None
    """KL from the target's distribution to the drafter's"""
    reverse_kl: Points | None = None
    """KL from the drafter's to the target's; signal=online"""
    jsd: Points | None = None
    """the generalised Jensen-Shannon divergence at jsd_beta; signal=online"""
    total_variation: Points | None = None
    """1 − Σ min(p, q): the rejection probability itself"""
    tvd_plus_plus: Points | None = None
    """total variation with a normalised reward (Goel et al. 2024)"""
    lk_hybrid: Points | None = None
    """KL that turns into total variation as acceptance grows (LK losses, 2026)"""
    neg_log_alpha: Points | None = None
    """−log Σ min(p, q) (LK losses, 2026)"""
    cross_entropy: Points | None = None
    """−log q of the answer's tokens"""
    top1_ce: Points | None = None
    """−log q of the target's most likely token"""

    def given(self) -> dict[str, Weight]:
        return {name: weight for name, weight in self if weight is not None}


class LoraConfig(Strict):
    rank: int = Field(default=16, ge=1)
    """of the two factors whose product is added to a weight"""
    alpha: float = Field(default=32.0, gt=0)
    """the product is scaled by alpha / rank"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """of a layer's inputs on their way through the factors"""
    vocabulary: bool = False
    """adapts the embedding and the head too"""


class MaskConfig(Strict):
    keep: float = Field(default=0.5, gt=0, le=1)
    """the mask at offset i of a round is trained with chance max(keep^i, least), so that a step stays cheap (PARD)"""
    least: float = Field(default=0.1, gt=0, le=1)
    """see keep"""
    token: int | str | None = None
    """the mask token or its id; null: the draft config's own, else a spare special token"""


class DistillConfig(Strict):
    model_config = ConfigDict(allow_inf_nan=False)  # with what Strict says

    draft: Path
    """the drafter's folder, from `draftsmith init`; it is not changed"""
    data: Path
    """the target's answers to train on, from `draftsmith generate`"""
    out: Path = Path("runs/distill")
    """the run's folder; the same config goes on in it, another one is refused"""
    heldout: dict[str, Path] = Field(default_factory=dict)
    """answers to evaluate on, by a name of your choice: heldout.orders=runs/held"""
    target: str | None = None
    """the target; checks that the answers were written by it, and with signal=online gives its whole distribution"""
    signal: Literal["cached", "online"] = "cached"
    """cached: what `generate` recorded; online: the target runs beside the drafter"""
    top_logprobs: int | None = Field(default=None, ge=1)
    """with signal=cached: how many of the recorded ids are used; null: all"""
    target_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """with signal=online: the target's type; null: as its weights are stored, float32 on a CPU"""
    target_device: str | None = None
    """with signal=online: where the target runs, such as cuda:1; null: beside the drafter"""
    epochs: float | None = Field(default=None, gt=0)
    """passes over the data; of epochs, max_steps and minutes the first that is reached ends the run; 3 where none is given"""
    max_steps: int | None = Field(default=None, gt=0)
    """optimizer steps"""
    minutes: float | None = Field(default=None, gt=0)
    """minutes of training, evaluation while training included; the rate decays to reach 0 then"""
    seed: int = Field(default=0, ge=0, lt=1 << 31)
    batch_size: int = Field(default=8, gt=0)
    """prompts per process and accumulation step"""
    accumulation: int = Field(default=1, gt=0)
    """batches per optimizer step"""
    lr: float = Field(default=1e-3, ge=0)
    """peak learning rate of AdamW"""
    warmup: float = Field(default=0.04, ge=0, lt=1)
    """part of the run in which the rate rises"""
    weight_decay: float = Field(default=0.0, ge=0)
    beta2: float = Field(default=0.98, gt=0, lt=1)
    """AdamW's memory of squared gradients; short runs want it short"""
    clip: float = Field(default=1.0, gt=0)
    """largest norm of the gradient"""
    trainable: Trainable = "layers"
    """layers: the embedding and the head stay the target's own; all: they learn too; lora: adapters on the layers; qlora:
    the same on a 4-bit copy (bitsandbytes); adapters are merged into the draft's own weights at the end"""
    lora: LoraConfig = LoraConfig()
    objective: Literal["auto", "losses"] | None = None
    """auto chooses the losses from how the pair is served, and says why; null: losses where any is given, else auto"""
    losses: LossWeights = LossWeights()
    jsd_beta: float = Field(default=0.5, ge=0, le=1)
    """losses.jsd: 0 is forward KL, 1 is reverse KL"""
    serve_temperature: float | None = Field(default=None, ge=0)
    """the temperature that the pair is served at; null: the one at which the answers were drawn"""
    temperature: float = Field(default=1.0, gt=0)
    """with signal=online: at which target and drafter are compared. 1 gave more acceptance than the serving temperature
    itself, also at that one (docs/notebook.md); stored answers hold 1 alone"""
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    """how the served drafter proposes, as in vLLM: for objective=auto, and whose τ evaluations and take=best go by"""
    num_speculative_tokens: int = Field(default=4, ge=1)
    """tokens drafted a round, as served: for survival and for the best checkpoint"""
    survival: bool | None = None
    """weights positions by their chance to be reached in a round; null: with parallel_drafting (docs/parallel.md)"""
    parallel_drafting: int | None = Field(default=None, ge=2, le=64)
    """also trains mask tokens, so that up to so many drafts come from one pass (vLLM's parallel_drafting); docs/parallel.md"""
    masks: MaskConfig = MaskConfig()
    """with parallel_drafting"""
    reference: Path | None = None
    """a drafter that was distilled before: with keep_share, the positions where it is ahead are learnt"""
    keep_share: float = Field(default=1.0, gt=0, le=1)
    """the share of an answer's positions that is learnt (AdaSPEC; 0.4 there)"""
    selection: Literal["gap", "random"] = "gap"
    """random: keep_share's control, the same work on positions drawn at random"""
    on_policy: float = Field(default=0.0, ge=0, le=1)
    """share of steps whose answers the drafter writes; signal=online"""
    on_policy_temperature: float = Field(default=1.0, ge=0)
    """at which it writes them"""
    chunk: int | None = Field(default=None, gt=0)
    """positions whose logits exist at one time; null: 24 MiB of logits on a CPU, 256 MiB on a GPU"""
    block: int = Field(default=1 << 19, gt=0)
    """vocabulary rows whose logits exist at one time; fewer save memory and cost time"""
    gradient_checkpointing: bool = False
    """layers keep their input alone and run again in the backward pass: less memory, more time (docs/scale.md)"""
    compile: bool = False
    """torch.compile of each layer; for GPUs"""
    eval_every: int = Field(default=50, gt=0)
    """steps between evaluations"""
    eval_prompts: int = Field(default=64, gt=0)
    """prompts of each held-out set used while training; the last evaluation uses all"""
    checkpoint_every: int = Field(default=50, gt=0)
    """steps between checkpoints"""
    keep: int = Field(default=2, gt=0)
    """newest checkpoints kept; the best by τ on the held-out sets is kept besides"""
    take: Literal["last", "best"] = "last"
    """whose weights the drafter gets: the last step's, or those of the best checkpoint"""
    tracker: Literal["none", "wandb"] = "none"
    """where metrics go beside metrics.jsonl"""
    quantizer: Format | None = None
    """the format that the drafter will be served in, where that is 4 bits: rounding to it is in the forward pass of the
    run's last part, and in all evaluations. The drafter is written in its own type still; `draftsmith quantize` makes the copy"""
    quantizer_from: float = Field(default=0.9, ge=0, lt=1)
    """the part of the run after which it is; 0 is for a short run on a trained drafter"""
    quantizer_group_size: Literal[32, 64, 128] = 64
    """with quantizer=w4a16: weights that share a scale"""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads per process; null shares out the cores (launchers like to set 1)"""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """what the inputs of float32 matrix products may be rounded to, as in torch.set_float32_matmul_precision: high is TF32 on
    a GPU, medium bfloat16 where the CPU multiplies it; sums and all else stay float32. medium is also the way to oneDNN's
    products, which on AMD CPUs are twice as fast as the usual ones and round nothing (docs/scale.md)"""

    @model_validator(mode="after")
    def _is_possible(self) -> DistillConfig:
        if self.survival is None:
            self.survival = self.parallel_drafting is not None
        if self.epochs is None and self.max_steps is None and self.minutes is None:
            self.epochs = 3.0
        given = self.losses.given()
        if self.objective == "auto" and given:
            raise ValueError(f"objective=auto chooses the losses: leave out losses.{next(iter(given))}, or objective")
        if self.objective == "losses" and not given:
            raise ValueError("objective=losses needs at least one: losses.forward_kl=1")
        if self.signal == "online" and self.target is None:
            raise ValueError("signal=online needs the target: target=…")
        if self.take == "best" and not self.heldout:
            raise ValueError("take=best is told by the held-out sets: give heldout.NAME=…, or take=last")
        if self.quantizer is not None and self.trainable in ("lora", "qlora"):
            raise ValueError(
                "quantizer rounds the weights, which adapters are merged into at the end only: train them without it, then "
                "run a short part on the result with trainable=layers quantizer_from=0"
            )
        self._require_used(given)
        if self.keep_share < 1 and self.parallel_drafting is not None:
            raise ValueError(
                "keep_share compares with a reference that knows no masks: leave it or parallel_drafting out"
            )
        if self.keep_share < 1 and self.reference is None:
            raise ValueError("keep_share compares with a drafter that was distilled before: give reference=…")
        if self.reference is not None and self.keep_share == 1:
            raise ValueError("reference is for keep_share: give keep_share=0.4, or leave reference out")
        return self

    def _require_used(self, given: dict[str, Weight]) -> None:
        """Raises ValueError for a key that nothing would look at beside the others."""
        online, adapters = self.signal == "online", self.trainable in ("lora", "qlora")
        used = {
            "temperature": (online, "signal=online (stored answers hold temperature 1 alone)"),
            "target_dtype": (online, "signal=online"),
            "target_device": (online, "signal=online"),
            "lora": (adapters, "trainable=lora or qlora"),
            "masks": (self.parallel_drafting is not None, "parallel_drafting"),
            "jsd_beta": ("jsd" in given, "losses.jsd"),
            "quantizer_from": (self.quantizer is not None, "quantizer=nf4 or w4a16"),
            "quantizer_group_size": (self.quantizer == "w4a16", "quantizer=w4a16"),
            "selection": (self.keep_share < 1, "keep_share below 1"),
            "on_policy_temperature": (self.on_policy > 0, "on_policy above 0"),
            "serve_temperature": (not given, "objective=auto"),
            "draft_sample_method": (
                not given or self.survival or bool(self.heldout),
                "objective=auto, survival=true or heldout.NAME",
            ),
        }
        for key, (looked_at, needs) in used.items():
            if not looked_at and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for {needs}: nothing would look at it here; leave it out")
