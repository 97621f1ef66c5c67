"""One update on any number of processes: replicated weights, FSDP2 shards, or DeepSpeed ZeRO, with the same result (D11).

What is the same in all three: the gradient is the *sum* over ranks of losses that the caller has divided by the
window's supervised tokens, and what is gathered for a checkpoint is whole plain tensors under the model's own names.
A mean over ranks (what DistributedDataParallel, FSDP and DeepSpeed do unasked) would weigh a rank with few tokens too much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from distill.batches import Ints, micro_batches
from pairing.errors import InputError

Named = Sequence[tuple[str, torch.nn.Parameter]]
Kind = Literal["replicated", "fsdp2", "deepspeed"]
STATE = ("exp_avg", "exp_avg_sq")  # AdamW's, beside its step count


class Root(torch.nn.Module):
    """`function(model, …)` as a module's forward.

    FSDP and DeepSpeed gather weights around a module's forward. Our loss multiplies hidden states by the head's matrix
    outside the model's own forward, where no hook would gather it; inside this forward everything is whole. Under ZeRO-3
    only as long as it is in use, so `function` must look the head's weight up after it has the hidden states.
    """

    def __init__(self, model: torch.nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *args: Any) -> Any:
        """What `function` returns; a loss that is to be differentiated must be a tensor in it, or in a tuple of it."""
        return self.function(self.model, *args)


@dataclass(frozen=True)
class Prepared:
    """What a step needs. `root(…)` computes; `params` are what learns, under the model's names, sharded or not."""

    kind: Kind
    root: Any
    params: Named
    optimizer: Any


def kind_of(accelerator: Any) -> Kind:
    """How the weights lie, as accelerate was launched. Raises InputError for what our loop does not do."""
    kinds: dict[str, Kind] = {
        "NO": "replicated", "MULTI_CPU": "replicated", "MULTI_GPU": "replicated", "FSDP": "fsdp2", "DEEPSPEED": "deepspeed",
    }  # fmt: skip
    name = accelerator.distributed_type.value
    version = getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", 2) if name == "FSDP" else 2
    if name not in kinds or version != 2:
        raise InputError(
            f"accelerate is set to {name}{'' if version == 2 else f' version {version}'}: distill runs on one process, several "
            "CPU processes, several GPUs, FSDP version 2 or DeepSpeed; see recipes/configs/accelerate/"
        )
    return kinds[name]


def prepare(
    kind: Kind,
    model: torch.nn.Module,
    function: Callable[..., Any],
    optimizer_of: Callable[[Named], torch.optim.Optimizer],
    config: Mapping[str, Any] | None = None,
) -> Prepared:
    """Readies `model`, whose requires_grad flags say what learns, for `root(…) = function(model, …)`.

    fsdp2: the root is one unit. Weights that learn, their gradients and moments lie in shards between steps; while a step
    runs its weights are whole. Not a unit per layer: the shared prefix sends gradients through a cache into a layer
    whose output nothing used, so its weights would be gone (measured: docs/scale.md). What is frozen stays whole, since
    it has no gradients and no moments to spare, and would be gathered for nothing.
    deepspeed: `config` is a DeepSpeed configuration; the caller switches the shared prefix off (see `equal_graphs`).
    """
    learns = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    root: Any = Root(model, function)
    if kind == "fsdp2":
        frozen = {p for p in model.parameters() if not p.requires_grad}
        fully_shard(root, ignored_params=frozen, reshard_after_forward=False)
        root.set_gradient_divide_factor(1.0)  # a sum, not a mean
        root.set_force_sum_reduction_for_comms(True)  # gloo has no scaled reduction
        learns = [(name, p) for name, p in model.named_parameters() if p.requires_grad]  # other objects now
    optimizer: Any = optimizer_of(learns)
    if kind == "deepspeed":
        import deepspeed  # type: ignore[import-not-found]

        root, optimizer, _, _ = deepspeed.initialize(
            model=root, optimizer=optimizer, config=dict(config or {}), dist_init_required=False
        )
    return Prepared(kind, root, learns, optimizer)


def deepspeed_config(stage: Literal[2, 3], batch_size: int, clip: float) -> dict[str, Any]:
    """What DeepSpeed must be told for our loop: it clips inside its own step, and never divides by accumulation steps."""
    return {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": 1,  # ours are marked by hand, see `backward`; this one is a divisor
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }


def equal_graphs(kind: Kind) -> bool:
    """Whether every rank's graph must have the same shape, so that a batch must not share its prefix.

    DeepSpeed reduces gradients in the order in which they appear. Where one rank runs a prefix pass and another, with a
    batch of one row, does not, the orders differ: ZeRO-2 was seen to add up gradients of different weights without a
    word, and ZeRO-3 to hang.
    """
    return kind == "deepspeed"


def passes(kind: Kind, window: Ints, batch_size: int, rank: int, ranks: int) -> list[tuple[Ints, float]]:
    """This rank's (rows, weight of their loss) of a window. Sharded ranks all make the same number of passes, since a pass
    talks to the others; one that has no rows left computes on the window's first with weight 0.
    """
    mine = [(rows, 1.0) for rows in micro_batches(window, batch_size, rank, ranks)]
    if kind != "replicated":
        most = len(micro_batches(window, batch_size, 0, ranks))  # rank 0 never has fewer
        mine += [(window[:1], 0.0)] * (most - len(mine))
    return mine


def backward(prepared: Prepared, loss: torch.Tensor, last: bool, ranks: int) -> None:
    """Adds the gradient of `loss`; `last` marks the window's last pass on this rank."""
    if prepared.kind == "deepspeed":
        prepared.root.set_gradient_accumulation_boundary(last)
        prepared.root.backward(loss * ranks)  # it takes the mean over ranks
    else:
        loss.backward()


def sum_gradients(prepared: Prepared, accelerator: Any) -> None:
    """Replicated weights get the sum of all ranks' gradients; the others have summed already.

    Ours rather than DistributedDataParallel: that one averages, talks in every backward pass, and asks every rank for the
    same number of passes; one sum per window is less traffic and works for a short last window as it is.
    """
    if prepared.kind != "replicated" or accelerator.num_processes == 1:
        return
    params = prepared.params
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for _, p in params])
    flat = accelerator.reduce(flat, "sum")
    for (_, p), g in zip(params, flat.split([p.numel() for _, p in params]), strict=True):
        p.grad = g.view_as(p)


def update(prepared: Prepared, lr: float, clip: float, check: Callable[[float], None]) -> float:
    """Clips the gradient to the norm `clip`, steps, clears, and returns the norm before clipping.

    `check` is called with the norm and raises where it is not finite: before any weight changes, but for DeepSpeed,
    which knows the norm only after its step (and clips to its own configuration's norm).
    """
    for group in prepared.optimizer.param_groups:
        group["lr"] = lr
    if prepared.kind == "deepspeed":
        prepared.root.step()
        norm = float(prepared.root.get_global_grad_norm())
        check(norm)
        return norm
    norm_tensor = torch.nn.utils.clip_grad_norm_([p for _, p in prepared.params], clip)
    norm = float(norm_tensor.full_tensor() if isinstance(norm_tensor, DTensor) else norm_tensor)
    check(norm)
    prepared.optimizer.step()
    prepared.optimizer.zero_grad(set_to_none=True)
    return norm


@contextmanager
def whole(prepared: Prepared) -> Iterator[None]:
    """Inside, the model's weights are whole on every rank, so evaluation may call any part of it. All ranks enter it."""
    if prepared.kind == "fsdp2":
        prepared.root.unshard()
        try:
            yield
        finally:
            prepared.root.reshard()
    elif prepared.kind == "deepspeed":
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(prepared.root.parameters())):
            yield
    else:
        yield


def gather_full(params: Named, optimizer: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights by name, and moments by "kind name": whole plain tensors, whatever the parallelism. All ranks call it."""
    if _is_deepspeed(optimizer):
        from deepspeed.utils import (  # type: ignore[import-not-found]
            safe_get_full_fp32_param,
            safe_get_full_optimizer_state,
        )

        weights = {name: safe_get_full_fp32_param(p) for name, p in params}
        moments = {f"{key} {name}": safe_get_full_optimizer_state(p, key) for name, p in params for key in STATE}
        inner = next(iter(optimizer.optimizer.state.values()))["step"]
        steps = torch.as_tensor(inner, dtype=torch.float32).reshape(())
        moments |= {f"step {name}": steps.clone() for name, _ in params}
        return weights, {key: t for key, t in moments.items() if t is not None}
    weights = {name: _full(p) for name, p in params}
    return weights, {f"{key} {name}": _full(t) for name, p in params for key, t in optimizer.state.get(p, {}).items()}


def scatter_full(
    weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor], params: Named, optimizer: Any
) -> None:
    """The way back: every rank has the whole tensors and takes its part. `optimizer` None: the weights alone."""
    if _is_deepspeed(optimizer):
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        with deepspeed.zero.GatheredParameters([p for _, p in params], modifier_rank=0), torch.no_grad():
            for name, p in params:  # what the next forward sees; below, the optimizer's own copy of it
                p.copy_(weights[name])
        _make_states(optimizer)
        for name, p in params:
            safe_set_full_fp32_param(p, weights[name])
            for key in STATE:
                safe_set_full_optimizer_state(p, moments[f"{key} {name}"], key)
        for state in optimizer.optimizer.state.values():
            state["step"] = moments[f"step {params[0][0]}"].clone()
        return
    with torch.no_grad():
        for name, p in params:
            p.copy_(_like(weights[name], p))
    if optimizer is None:
        return
    by_name = dict(params)
    for key, tensor in moments.items():
        kind, name = key.split(" ", 1)
        p = by_name[name]
        # AdamW keeps its step counts in float32 on the parameter's device when fused, on the CPU otherwise
        alone = not tensor.ndim and not optimizer.defaults.get("fused")
        optimizer.state[p][kind] = tensor if alone else _like(tensor, p) if tensor.ndim else tensor.to(p.device)


def whole_shape(p: torch.Tensor) -> torch.Size:
    """p's shape as the model means it; ZeRO-3 leaves an empty tensor in its place and keeps the shape beside it."""
    return torch.Size(getattr(p, "ds_shape", p.shape))


def _make_states(optimizer: Any) -> None:
    """AdamW's state in DeepSpeed's flat partitions, which it makes at the first step only: a restore comes before that."""
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_partitioned_groups_flat
    for flat in flats:
        if not optimizer.optimizer.state.get(flat):
            zeros = {key: torch.zeros_like(flat.data) for key in STATE}
            optimizer.optimizer.state[flat] = {"step": torch.zeros(()), **zeros}
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # stage 2 looks its parts up in a table
        optimizer._lazy_init_hp_params_optimizer_state()


def _is_deepspeed(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("deepspeed")


def _full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()


def _like(tensor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """`tensor` on p's device, and in p's shards where it is sharded; nobody is asked, since every rank has it all."""
    tensor = tensor.to(p.device)
    if not isinstance(p, DTensor):
        return tensor
    return distribute_tensor(tensor, p.device_mesh, p.placements, src_data_rank=None)
