"""Forward passes with gradients: samples of any lengths in, log-probabilities out.

`forward` is what stages call. `micro_batches` divides samples into passes, `packing` and `packed_attention` put them in
a row, `varlen_kernels` are the kernels for it, `shared_prompts` computes a prompt once, `output_head` the last layer.
"""
