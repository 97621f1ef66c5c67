"""The vLLM plugin: mends that a drafter beside its target needs, each guarded by what the installed version does.

vLLM calls `register` in every one of its processes (entry-point group `vllm.general_plugins`). It does nothing that
the pair at hand doesn't need, and where the internals that a mend leans on have moved, it says so in one line and
leaves them alone.
"""

from __future__ import annotations

import ctypes
import inspect
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

DIE_WITH_PARENT = "DRAFTSMITH_DIE_WITH_PARENT"
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Called by vLLM at the start of every process of an engine. Safe to call twice."""
    # vLLM also calls this in the process that starts an engine: where it is ours, the variable holds its pid, as it
    # may outlive its own parent (a shell that ran it with nohup)
    if os.environ.get(DIE_WITH_PARENT, "") not in ("", str(os.getpid())):
        die_with_parent()
    for mend in (load_quantized_drafter, size_nf4_for_float32, w4a16_on_cpu, expand_sampling_on_cpu):
        try:
            mend()
        except (ImportError, AttributeError) as e:
            _say(f"{mend.__name__} does not fit this vLLM ({e}): left out. {mend.__doc__ or ''}".splitlines()[0])


def _say(line: str) -> None:
    print(f"draftsmith plugin: {line}", file=sys.stderr)


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies, however that happens; kill -9 leaves no engine behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if (
            parent is not None and not parent.is_alive()
        ):  # gone before we asked, as while this process was importing vLLM
            os.kill(os.getpid(), signal.SIGKILL)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replaces `owner.name` by `make(old)`, once."""
    old = getattr(owner, name)
    if not getattr(old, "draftsmith", False):
        new = make(old)
        new.draftsmith = True
        setattr(owner, name, new)


def load_quantized_drafter() -> None:
    """A drafter loads with its own load format, where one of the pair is stored by bitsandbytes and the other isn't.

    vLLM 0.32's DraftModelProposer calls `get_model` without a load config: `draft_load_config` is ignored, and the
    target's loader meets packed weights that it doesn't know (a bare AssertionError), or looks for some where there are
    none. The eagle proposer of the same file family hands it on; so do we. Versions that hand it on themselves are left
    alone.
    """
    from vllm.v1.spec_decode import draft_model as module

    proposer = module.DraftModelProposer
    if "load_config" in inspect.getsource(proposer._get_model):
        return

    def make(_old: Any) -> Any:
        def _get_model(self: Any) -> Any:
            from vllm.compilation.backends import set_model_tag
            from vllm.config.utils import replace

            config = self._create_draft_vllm_config()
            load_config = self.speculative_config.draft_load_config or config.load_config
            by = "bitsandbytes"
            if (config.model_config.quantization == by) != (load_config.load_format == by):
                load_config = replace(load_config, load_format=by if config.model_config.quantization == by else "auto")
            with set_model_tag("draft_model"):
                return module.get_model(vllm_config=config, prefix="draft_model", load_config=load_config)

        return _get_model

    _replace(proposer, "_get_model", make)


def size_nf4_for_float32() -> None:
    """NF4 weights load in a float32 engine: two values a byte, whatever the activations' type.

    vllm-bnb-plugin 0.0.3 divides the activations' width by eight bits, which is right for 16-bit types only.
    """
    try:
        from vllm_bnb_plugin.quantization import fused_moe, linear, utils
    except ImportError:  # no plugin, no bitsandbytes drafter
        return
    import torch

    def make(old: Any) -> Any:
        def calculate_quant_ratio(dtype: Any) -> int:
            return 2 if dtype == torch.float32 else int(old(dtype))

        return calculate_quant_ratio

    for module in (utils, linear, fused_moe):
        _replace(module, "calculate_quant_ratio", make)


def w4a16_on_cpu() -> None:
    """W4A16 weights run in a float32 engine on the CPU back end: inputs are rounded to bfloat16 for the product.

    vLLM 0.32 takes float32 for compressed-tensors, and its CPU kernel, which has no float32, dies at the first step. Scales
    are handed to it in bfloat16, which those that draftsmith writes already fit; results go back to float32. A kernel
    that computes in float32 itself is left alone.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel as Kernel

    def make_process(old: Any) -> Any:
        def process_weights_after_loading(self: Any, layer: Any) -> None:
            if self.config.act_type == torch.float32 and not _multiplies_float32():
                scales = getattr(layer, self.w_s_name)
                scales.data = scales.data.bfloat16()
            # the kernel takes AMX where there is any, which a process must ask for once; it does not ask, and where no other
            # layer of the pair has done so it is an illegal instruction (seen in float32 and in bfloat16)
            torch.cpu._init_amx()
            old(self, layer)

        return process_weights_after_loading

    def make_apply(old: Any) -> Any:
        def apply_weights(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
            if x.dtype != torch.float32 or getattr(layer, self.w_s_name).dtype == torch.float32:
                return old(self, layer, x, bias)
            out = old(self, layer, x.bfloat16(), None).float()
            return out if bias is None else out + bias

        return apply_weights

    _replace(Kernel, "process_weights_after_loading", make_process)
    _replace(Kernel, "apply_weights", make_apply)


def _multiplies_float32() -> bool:
    """Whether the CPU back end's kernel does, on one tile."""
    import torch
    from vllm import _custom_ops as ops

    x, codes, scales = torch.ones(1, 32), torch.zeros(2, 64, dtype=torch.int32), torch.ones(1, 32)
    try:
        ops.cpu_gemm_wna16(x, codes, scales, None, None, 8, "vec")
    except NotImplementedError:
        return False
    return True


def expand_sampling_on_cpu() -> None:
    """At temperature > 0 the CPU back end verifies drafts with the temperatures that were asked for.

    In vLLM 0.32 the CPU stand-in for `expand_kernel` writes into an int64 copy of a float output, so every drafted
    position is verified at an uninitialised temperature and the text is noise (vllm issue 55005). The function that
    calls it is replaced by two lines of torch; versions whose stand-in no longer copies are left alone.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.utils import cpu_triton_utils

    if "_ensure_int64(output)" not in inspect.getsource(cpu_triton_utils._expand_kernel_impl):
        return
    from vllm.v1.sample import rejection_sampler

    def make(_old: Any) -> Any:
        def expand_batch_to_tokens(
            x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: float = 0, replace_to: float = 0
        ) -> Any:
            counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
            return x.where(x != replace_from, replace_to).repeat_interleave(counts.long(), output_size=num_tokens)

        return expand_batch_to_tokens

    _replace(rejection_sampler, "expand_batch_to_tokens", make)
