"""The module that each worker process of vLLM imports (`worker_extension_cls`) before it compiles anything."""

from rlhfless_functions.generation.engines.vllm.compiled_code import leave_folder_out
from rlhfless_functions.generation.engines.vllm.worker import WorkerExtension as WorkerExtension

leave_folder_out()
