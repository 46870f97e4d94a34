"""Mathematical equality, with the parser and the comparison of https://github.com/huggingface/Math-Verify.

The library finds mathematics in prose, so of a text that it can't read it takes a part, such as the last number. Here a
text is read whole or not at all.

- `scorer`: the reward.
- `answers`: the answer in a response. `truths`: the ground truth.
- `reading`: a text as numbers, expressions, intervals, lists or words. `shapes`: the forms that these have.
- `plain`: plain text as LaTeX, which the parser reads. `units`: units, money and percent at a text's ends.
- `equality`: equality of two readings.
"""
