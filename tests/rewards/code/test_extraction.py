# ruff: noqa: E501 - tables are easier to read with one entry a line
"""The block of a response that is judged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.rewards.code.extraction import judged_block

RIGHT = "def double(n):\n    return 2 * n\n"
BLOCK = f"```python\n{RIGHT}```"


@pytest.mark.parametrize(
    "response",
    [
        BLOCK,
        f"First:\n```bash\npip install nothing\n```\nThen:\n{BLOCK}\nDone.",
        f"```cpp\nint main() {{ }}\n```\nand in Python\n{BLOCK}",
        f"{BLOCK}\nIt prints\n```\n6\n```",
        f"{BLOCK}\nIt prints\n```text\n6\n```",
        f"{BLOCK}\nIt prints\n```output\n6\n```\nor\n```json\n[6]\n```",
        *(BLOCK.replace("python", name) for name in ("python3", "Python", "PYTHON", "py", "Py3", "{.python}", "{python}")),
        BLOCK.replace("python", 'python title="a.py" linenums=1'),
        BLOCK.replace("python", "python:solution.py"),
        BLOCK.replace("python", "python {1,3-4}"),
        BLOCK.replace("python", " python "),
        BLOCK.replace("```", "~~~"),
        BLOCK.replace("```", "````"),
        BLOCK.replace("\n", "\r\n"),
        BLOCK + "   \r\n",
        BLOCK.replace("python", ""),
        f"{BLOCK.replace('python', '')}\nFor the input 3 it prints\n```\n6\n```\n",
        f"{BLOCK.replace('python', '')}\nOutput:\n```\nYes, it works!\n```\n",
        f"{BLOCK.replace('python', '')}\n```\n[1, 2]\n'a'\n```\n",
        f"{BLOCK.replace('python', '')}\nUse it:\n```\n>>> double(3)\n6\n```\n",
        f"{BLOCK}\nUse it:\n```python\n>>> double(3)\n6\n```\n",
        f"Draft:\n```python\ndef double(n):\n    return n\n```\nBetter:\n{BLOCK}",
        f"<think>\n```python\ndef double(n):\n    retu</think>\n{BLOCK}",
        f"<think>Try\n```python\nx = 1\n```\nor</think>\n{BLOCK}",
        f"I begin\n```python\ndef double(n):\nNo, better:\n{BLOCK}",
        f"I begin\n```\ndraft\nNo, better:\n{BLOCK}",
        f"{BLOCK}\nAnd the tests:\n```python\nassert double(",
        f"Here it is: ```python\n{RIGHT}```",
        f"**Code:**```python\n{RIGHT}```\n",
        "1. Write\n    ```python\n    def double(n):\n        return 2 * n\n    ```\n2. Done",
        f"Use `double` and ``x``; then\n{BLOCK}",
        f"<answer>\n{BLOCK}\n</answer>",
        f"```python\n{RIGHT.rstrip()}```",
    ],
)  # fmt: skip
def test_the_python_block_after_the_thoughts_is_judged(response: str) -> None:
    assert judged_block(response) == RIGHT


@pytest.mark.parametrize(
    "response",
    [
        "",
        "a = 1",
        "```python\nnever closed",
        "```cpp\nint main() {}\n```",
        "```javascript\nlet a = 1\n```\n```text\n6\n```",
        f"<think>{BLOCK}</think>\nThe code is above.",
        f"<think>perhaps\n{BLOCK}\nbut no",
        "```python\n>>> double(3)\n6\n```",
    ],
)
def test_a_response_without_a_block_of_its_answer_has_none(response: str) -> None:
    assert judged_block(response) is None


def test_fences_in_a_docstring_belong_to_the_code() -> None:
    code = 'def f():\n    """Use it:\n\n    ```python\n    f()\n    ```\n    """\n    return 1\n'
    assert judged_block(f"```python\n{code}```") == code
    assert judged_block(f'```python\ns = "```"\n{code}```') == f's = "```"\n{code}'


def test_only_sample_output_is_judged_where_there_is_nothing_else() -> None:
    assert judged_block("```\n6\n```") == "6\n"


@given(st.lists(st.sampled_from(["```python", "```", "~~~", "a = 1", "<think>", "</think>", "    ```", "```cpp", ""])))
def test_any_response_has_a_verdict(lines: list[str]) -> None:
    block = judged_block("\n".join(lines))
    assert block is None or block == "" or block.endswith("\n")


@given(st.text())
def test_a_block_at_the_end_is_found_behind_any_prose_without_fences(prose: str) -> None:
    prose = prose.replace("`", "").replace("~", "").replace("<", "")
    assert judged_block(f"{prose}\n{BLOCK}") == RIGHT
