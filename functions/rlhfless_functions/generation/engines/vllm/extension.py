"""The module that each worker process of vLLM imports (`worker_extension_cls`) before it makes or compiles anything."""

from rlhfless_functions.generation.engines.vllm.compiled_code import leave_folder_out
from rlhfless_functions.generation.engines.vllm.sleep import sleep_beside_others
from rlhfless_functions.generation.engines.vllm.worker import WorkerExtension as WorkerExtension
from rlhfless_functions.generation.engines.vllm.worker import replace_draw

leave_folder_out()
replace_draw()
sleep_beside_others()
