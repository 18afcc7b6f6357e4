"""Fuzzing: feeds every parser of untrusted input with mutations of good input, and watches how it
behaves.

    python -m benchmarks.fuzz --minutes 10                  # all parsers, equal CPU time for each
    python -m benchmarks.fuzz --inputs 5000000 --seed 2     # until all parsers together have had this many
    python -m benchmarks.fuzz --parser images               # one of them
    python -m benchmarks.fuzz --replay build/fuzz/images/crash-0a1b2c3d

A parser may accept an input, or refuse it with an exception named in its docstring. Everything else
is a finding:

crash   another exception, or the death of the process
memory  more than 4 GiB for one input
hang    more than 5 s of CPU time for one input
act     starting a process, opening a connection, or writing a file outside of its own folder
growth  memory that grows with the number of inputs

The code has four parts: `mutate` makes inputs, `watch` judges one input, `soak` runs parsers in
separate processes for a long time, and the `parsers_of_*` modules define how to call each parser.
tests/benchmarks/test_fuzz.py gives every parser a few hundred inputs, and replays
tests/corpus/fuzz.

Input N of a parser depends only on the seed, the parser's name and N, so findings are reproducible.
"""

from benchmarks import CHECKOUT

CORPUS = CHECKOUT / "tests" / "corpus" / "fuzz"
"""Inputs that were once findings, as PARSER/NAME. Tests replay them, and they are mutated here."""
