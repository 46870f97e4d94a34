"""The code reward: runs the code of a response in processes of its own, and tests it.

In the reward's worker:

- `extraction`: the block of a response that is judged.
- `scoring`: the share of its tests that a response passes.
- `running`: the processes for one response, their limits and their results.
- `confinement`: what the code may do on this machine. `folders`: its folder.
- `time_limit`: the time of one test.
- `printed`: compares what a program prints with what it should.

Alone in isolated interpreters, which import nothing of this package but each other:

- `runner`: runs a response's code. `keeper`: bounds and ends its processes.
- `judge`: runs the tests of functions, and asks the runner. `unit_kinds`: the kinds of these tests.
- `values`: the messages between the two.
"""
