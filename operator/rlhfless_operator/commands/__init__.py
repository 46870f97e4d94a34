"""The commands of `rlhfless`, a file each: their options, and the little that joins them to the packages below.

A command imports what it runs when it runs, so that `rlhfless --help` answers at once. `options` has the options that
several commands share, and `exits` the exit with a message and a status.
"""
