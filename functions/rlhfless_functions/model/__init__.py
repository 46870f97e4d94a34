"""Forward passes with gradients: samples of any lengths in, log-probabilities out.

- `forward`: the passes that stages call. `micro_batches`: divide samples into passes.
- `packing` and `packed_attention`: samples in one row without padding. `varlen_kernels`: the kernels for it.
- `attention_masks`: which layers have a sliding window. `trial`: compare passes with a model's own.
- `shared_prompts`: compute a prompt once; `prompt_keys`: its keys before those of its samples.
- `output_head`: from hidden states to log-probabilities; `narrow_head`: the same with bfloat16 products.
  `logit_form`: scale and bound of logits.
"""
