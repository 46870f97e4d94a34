"""Drafts from earlier responses.

`drafter` proposes them from an `index` of the responses in `history`; `pass_rows` places them in a pass; `acceptance`,
`costs` and `switch` learn whether they save time.
"""
