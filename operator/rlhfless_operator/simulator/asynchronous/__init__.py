"""Asynchronous systems in discrete events.

`job` is ours, with `rollouts` and `live_plans`; `streaming` is how others stream groups; `systems` names them all.
`compare` tunes and compares them, `bound` has the least that any system needs, and `long_run` the steady pace of ours.
`work` is what is generated and learnt from.
"""
