"""The tests of a row that the code reward runs. Light: it imports only the standard library.

- `forms`: reads the public formats of test columns.
- `texts`: finds out what a test in Python runs, and refuses one that can't fail.
- `units`: the tests, as the judge runs them.
"""

from rlhfless_functions.data.code_tests.forms import TEST_COLUMNS, read_tests
from rlhfless_functions.data.code_tests.units import CodeTests, TestsError
