"""vLLM's own choice of a CUDA graph for a pass, without a GPU: its dispatcher, with the sizes that it captures."""

from types import SimpleNamespace
from typing import Any

from rlhfless_functions.generation.engines.vllm.drafting import LONGEST_DRAFT


def runner_on_a_gpu(sequences: int = 1024, tokens: int = 16_384, draft: int = LONGEST_DRAFT) -> Any:
    """Return the part of vLLM's model runner that captures and chooses graphs, as on a GPU where every kind can be had.

    Args:
        sequences: most requests of a batch.
        tokens: most tokens of a pass.
        draft: longest draft; 0 without drafting.
    """
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    class Runner:
        _is_uniform_decode = staticmethod(GPUModelRunner._is_uniform_decode)
        _determine_batch_execution_and_padding = GPUModelRunner._determine_batch_execution_and_padding
        _warmup_and_capture = GPUModelRunner._warmup_and_capture

    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, cudagraph_num_of_warmups=0
    )
    compilation.set_splitting_ops_for_v1(all2all_backend="naive")
    configuration = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False, is_encoder_decoder=False),
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_seqs=sequences, max_num_batched_tokens=tokens),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        observability_config=SimpleNamespace(cudagraph_metrics=False),
        speculative_config=None,
        lora_config=None,
        performance_mode="balanced",
        num_speculative_tokens=draft,
        uniform_decode_query_len=1 + draft,
    )
    VllmConfig._set_cudagraph_sizes(configuration)
    runner: Any = Runner()
    runner.vllm_config, runner.model_config = configuration, configuration.model_config
    runner.compilation_config = compilation
    runner.uniform_decode_query_len = 1 + draft
    runner.input_batch = SimpleNamespace(lora_id_to_lora_request={})
    runner.cudagraph_dispatcher = CudagraphDispatcher(configuration)
    runner.support = AttentionCGSupport.ALWAYS
    return runner


def learn_graphs(runner: Any) -> None:
    """Fix the sizes of the graphs, as vLLM does when it knows its kernels."""
    query = runner.uniform_decode_query_len
    mode = runner.compilation_config.resolve_cudagraph_mode_and_sizes(runner.support, "a backend", query)
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(mode, query)


def graph_of(runner: Any, rows: list[int]) -> tuple[str, Any]:
    """Return the kind of graph that a pass takes, and vLLM's description of it.

    Args:
        runner: of `runner_on_a_gpu`, after `learn_graphs`.
        rows: rows of each request in the pass.
    """
    import numpy as np

    kind, graph, *_ = runner._determine_batch_execution_and_padding(
        num_tokens=sum(rows),
        num_reqs=len(rows),
        num_scheduled_tokens_np=np.array(rows),
        max_num_scheduled_tokens=max(rows),
    )
    return kind.name, graph
